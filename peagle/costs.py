"""What drafting and verifying cost on this machine with this pair: measured with the very program that will run, kept
in a file beside the user's other caches, and measured again wherever anything they depend on is another.

A machine that is busy for a moment gives costs that are wrong for a long time, so the first runs measure each once
more, and what counts is the median of what they found.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle import policy
from peagle.config import Ladder, SpeculationConfig
from peagle.ops import native
from peagle.policy import Costs
from peagle.provenance import cpu_model, device, num_threads
from peagle.state import FRESH_ROOM, DecodeState, StepOutput

SCHEMA = 3
ENOUGH_S = 2.5  # rounds go on until they took this long together
FEWEST_ROUNDS, MOST_ROUNDS = 5, 25  # the first does not count
MEASUREMENTS = 5  # of as many runs
TOGETHER = 2  # dispatches that are timed as one, so that the next is on its way while one runs, as in the loop

Start = Callable[[], DecodeState]
Dispatch = Callable[[DecodeState], tuple[DecodeState, jax.Array]]


def measure(ladder: Ladder, start: Start, dispatch: Dispatch, steps_per_dispatch: int) -> Costs:
    """The costs of each rung, medians over rounds in which the rungs take turns. `start` gives a state whose rows go on
    for many dispatches; `dispatch` is the loop's own.

    Drafting on rung r costs (draft r, verify none) - plain; verifying on it, (draft r, verify r) less that. Resuming
    costs what steps that verify one rung, each after a rest, take more than that many such steps and plain ones.
    """
    rungs = range(len(ladder))
    rested = (1, 1, FRESH_ROOM)
    choices: list[tuple[int, ...]] = [
        (0, 0), *((rung, 0) for rung in rungs[1:]), *((rung, rung) for rung in rungs[1:]), rested
    ]  # fmt: skip
    times: dict[tuple[int, ...], list[float]] = {choice: [] for choice in choices}
    shares: list[float] = []  # of the steps after a rest among those timed

    def time_one(state: DecodeState, together: int) -> tuple[DecodeState, float, int, int]:
        """(the state some dispatches on, the ms they took, how many steps they ran: 0 where all rows are done, how many
        of those verified a draft)."""
        jax.block_until_ready(state)
        outputs = []
        before = time.perf_counter()
        for _ in range(together):
            state, output = dispatch(state)
            outputs.append(output)
        jax.block_until_ready((state, outputs))
        taken_ms = (time.perf_counter() - before) * 1e3
        found = StepOutput.unpack(np.concatenate(outputs), ladder[-1])
        ran = np.any(found.num_accepted >= 0, axis=1)
        return state, taken_ms, int(np.sum(ran)), int(np.sum(ran & np.any(found.num_verified > 0, axis=1)))

    began = time.perf_counter()
    for done in range(MOST_ROUNDS):
        for choice in choices:
            for settled in (True, False):
                state = start()
                assert state.outlook is not None
                state = dataclasses.replace(state, outlook=policy.hold(state.outlook, *choice))
                if settled:  # the drafter has caught up before anything is timed, if that leaves tokens to emit
                    state, *_ = time_one(state, 1)
                together = TOGETHER if choice != rested else max(TOGETHER, -(-rested[-1] // steps_per_dispatch) + 1)
                _, taken_ms, num_steps, num_verifying = time_one(state, together)
                if num_steps:
                    times[choice].append(taken_ms / num_steps)
                    if choice == rested:
                        shares.append(num_verifying / num_steps)
                    break
        if done + 1 >= FEWEST_ROUNDS and time.perf_counter() - began > ENOUGH_S:
            break
    median = {choice: statistics.median(taken[1:]) for choice, taken in times.items()}
    # more never costs less: what says so is noise
    draft = np.maximum.accumulate([0.0, *(median[rung, 0] - median[0, 0] for rung in rungs[1:])])
    verify = np.maximum.accumulate([median[0, 0], *(median[rung, rung] - draft[rung] for rung in rungs[1:])])
    share = statistics.median(shares)
    unrested = share * median[1, 1] + (1 - share) * median[0, 0]
    resume = max(median[rested] - unrested, 0.0) / share if share else 0.0
    return Costs(*(jnp.asarray(part, jnp.float32) for part in (draft, verify, resume)))


def identity(target: Any, drafter: Any, config: SpeculationConfig, steps_per_dispatch: int) -> dict[str, Any]:
    """All that the costs depend on, as JSON: the shapes of both models and of the run, the machine, the versions."""
    leaves, tree = jax.tree.flatten((target, drafter))
    geometry = f"{tree} {[(leaf.shape, str(leaf.dtype)) for leaf in leaves]}"
    return {
        "schema": SCHEMA,
        "models": hashlib.sha256(geometry.encode()).hexdigest(),
        "ladder": list(config.ladder),
        "batch_size": config.batch_size,
        "capacity": 1 << (config.capacity - 1).bit_length(),  # about
        "sampling": "greedy" if config.sampling.greedy else "drafts" if config.sampling.draft_sampling else "target",
        **({} if config.sampling.synthetic_acceptance is None else {"synthetic": True}),
        "steps_per_dispatch": steps_per_dispatch,
        "kernels": native.status()[1],
        "device": device(),
        "cpu": cpu_model(),
        "num_threads": num_threads(),
        "versions": {name: importlib.metadata.version(name) for name in ("peagle", "jaxlib")},
    }


def directory() -> Path:
    """Where costs are kept: peagle/costs in the user's cache directory (XDG_CACHE_HOME)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peagle" / "costs"


def typical(measured: Sequence[Costs]) -> Costs:
    """The median of each cost."""
    return jax.tree.map(lambda *each: jnp.median(jnp.stack(each), axis=0), *measured)


def load(known: dict[str, Any]) -> list[Costs]:
    """The costs that earlier runs measured for exactly this, MEASUREMENTS at most; none where there are none, or a file
    that is not as it should be."""
    shape = {"draft_ms": (len(known["ladder"]),), "verify_ms": (len(known["ladder"]),), "resume_ms": ()}
    try:
        kept = json.loads(_path(known).read_text(encoding="utf-8"))
        found = [{name: np.asarray(each[name], np.float32) for name in shape} for each in kept["measured"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    whole = all(
        each[name].shape == shape[name] and np.isfinite(each[name]).all() and each[name].min() >= 0
        for each in found
        for name in shape
    )
    if not whole or kept.get("identity") != known or any(each["verify_ms"].min() <= 0 for each in found):
        return []
    return [Costs(**jax.tree.map(jnp.asarray, each)) for each in found[:MEASUREMENTS]]


def save(known: dict[str, Any], measured: Sequence[Costs]) -> bool:
    """Whether the costs could be kept for the next run."""
    kept = {
        "identity": known,
        "measured": [
            {name: np.round(np.asarray(ms, np.float64), 6).tolist() for name, ms in vars(each).items()}
            for each in measured
        ],
    }
    path = _path(known)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        return False
    return True


def _path(known: dict[str, Any]) -> Path:
    return directory() / f"{hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:24]}.json"
