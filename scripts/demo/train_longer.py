"""Train the demo target further, on rows of several lengths.

    python -m scripts.demo.train_longer --begin RUN --data DIR --out DIR --minutes M
        --shares chat_512:4,raw_512:2,chat_2048:6,... [--peak 0.3]

--begin names a run's folder (config.json, params.npz). Each step is of one kind of rows, a file NAME.npz of --data; its
share is of the steps. The folder --out is as that of scripts.demo.train_target, and the same command goes on in it.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections import Counter
from pathlib import Path

from peagle.ops.strict_json import dumps
from scripts.demo.tuned import restart_tuned

if __name__ == "__main__":
    restart_tuned()

import jax
import numpy as np

from scripts.demo.checkpoint import load_target, read_config, save_tree
from scripts.demo.train_target import (
    ADAM_RATE,
    MUON_RATE,
    SEED,
    WEIGHT_DECAY,
    Batch,
    Rows,
    compiled_step,
    init_state,
    make_batch,
    replicated,
    train,
)
from scripts.runs import new_parser
from target.config import TargetConfig
from target.load import load_target as load_checkpoint

STEP_TOKENS = 4096  # of a step's rows, as many as a device each if these take more
WARMUP_FRAC = 0.03
MEASURED = 2  # steps of each kind, after one that compiles


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The steps of a training on kinds of rows: each kind has its share, in an order that depends on the seed."""

    steps: int
    rows: dict[str, Rows]
    shares: dict[str, int]
    peak: float

    def rate_at(self, step: int) -> float:
        """Compute the learning rates' share: it rises, then falls to zero in a line."""
        progress = (step + 0.5) / self.steps
        return self.peak * min(1.0, progress / WARMUP_FRAC, (1.0 - progress) / (1.0 - WARMUP_FRAC))

    def kind_at(self, step: int) -> str:
        """Return the kind of a step; every kind has its share of each round of steps."""
        kinds = [name for name, share in sorted(self.shares.items()) for _ in range(share)]
        number, place = divmod(step, len(kinds))
        return kinds[np.random.default_rng((SEED, number)).permutation(len(kinds))[place]]

    def at(self, step: int) -> Batch:
        """Make the batch of a step, a function of the arguments alone."""
        kind = self.kind_at(step)
        whole = sum(self.shares.values())
        number, place = divmod(step, whole)
        first = number * whole
        before = number * self.shares[kind] + Counter(self.kind_at(first + i) for i in range(place))[kind]
        return self.batch(kind, before)

    def batch(self, kind: str, number: int) -> Batch:
        """Make the batch of this number of a kind."""
        rows = self.rows[kind]
        count = max(len(jax.devices()), STEP_TOKENS // rows.token_ids.shape[1])
        return make_batch([(rows, rows.at(number * count, count))])


def open_shipped(checkpoint: Path, out: Path) -> None:
    """Write a shipped target as the folder of a run to begin from: config.json and params.npz."""
    out.mkdir(parents=True, exist_ok=True)
    save_tree(out / "params.npz", load_checkpoint(checkpoint, experts="expanded").params)
    shutil.copy(checkpoint / "config.json", out / "config.json")


def planned_steps(config: TargetConfig, begin: Path, mixture: Mixture, minutes: float) -> int:
    """Count the steps that fit into so many minutes, by the measured time of a step of each kind."""
    step_of = compiled_step(config)
    state = replicated(init_state(config)._replace(params=load_target(begin)[1]))
    seconds = {}
    for kind in mixture.shares:
        times = []
        for number in range(MEASURED + 1):
            started = time.perf_counter()
            state, loss = step_of(state, mixture.batch(kind, number), np.float32(0.0))
            loss.block_until_ready()
            times.append(time.perf_counter() - started)
        seconds[kind] = min(times[1:])
        print(f"a step of {kind} takes {seconds[kind]:.1f} s, the first {times[0]:.1f} s", flush=True)
    whole = sum(mixture.shares.values())
    mean = sum(share * seconds[kind] for kind, share in mixture.shares.items()) / whole
    return max(1, int(60 * minutes / mean))


def settle(out: Path, config: TargetConfig, begin: Path, mixture: Mixture, minutes: float) -> Mixture:
    """Give the mixture its number of steps: that of out/run.json, or as many as fit, written there."""
    path = out / "run.json"
    if path.exists():
        return dataclasses.replace(mixture, steps=json.loads(path.read_text(encoding="utf-8"))["steps"])
    mixture = dataclasses.replace(mixture, steps=planned_steps(config, begin, mixture, minutes))
    kinds = Counter(mixture.kind_at(step) for step in range(mixture.steps))
    tokens = sum(count * mixture.batch(kind, 0).token_ids.size for kind, count in kinds.items())
    rates = {"muon_rate": MUON_RATE, "adam_rate": ADAM_RATE, "weight_decay": WEIGHT_DECAY, "peak": mixture.peak}
    record = {"steps": mixture.steps, "tokens": tokens, "minutes": minutes, "steps_by_kind": dict(kinds), **rates}
    path.write_text(dumps(record, indent=1) + "\n", encoding="utf-8")
    return mixture


def parse_shares(typed: str) -> dict[str, int]:
    """Read NAME:SHARE,... Exits for anything else."""
    try:
        return {name: int(share) for name, share in (part.split(":") for part in typed.split(","))}
    except ValueError:
        raise SystemExit(f"train_longer: --shares is {typed!r}; expected NAME:SHARE, with commas between") from None


def main() -> None:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("--begin", type=Path, required=True, help="folder of the run to go on from")
    parser.add_argument("--data", type=Path, required=True, help="folder of scripts.demo.long_rows")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; an existing run goes on")
    parser.add_argument("--shares", required=True, help="kinds of rows, each with its share of the steps")
    parser.add_argument("--minutes", type=float, required=True, help="measured once, then fixed as steps")
    parser.add_argument("--peak", type=float, default=0.3, help="of the learning rates (default %(default)s)")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "config.json").exists():
        shutil.copy(arguments.begin / "config.json", out / "config.json")
    config, shares = read_config(out), parse_shares(arguments.shares)
    rows = {name: Rows(arguments.data / f"{name}.npz", SEED) for name in shares}
    held_out = {path.stem: Rows(path, SEED) for path in sorted(arguments.data.glob("*_heldout*.npz"))}
    mixture = settle(out, config, arguments.begin, Mixture(1, rows, shares, arguments.peak), arguments.minutes)
    train(out, config, mixture, held_out, arguments.begin)


if __name__ == "__main__":
    main()
