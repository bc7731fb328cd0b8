"""Find out why a drafter's acceptance is low: compare the engine's drafts with others at the same positions.

Two kinds of faults lower acceptance without a message. The engine may run the checkpoint incorrectly: then its drafts
differ from those of the same drafter replayed by itself (`compare`). Or the drafter was trained with other settings, or
with another prompt format, than the checkpoint says: then another reading of the checkpoint is accepted more often
(`causes`).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle.base import interrupt
from peagle.measure.estimates import Estimate, estimate, ratio
from peagle.ops.messages import DrafterInput, DraftOutput
from peagle.protocols import Drafter

LEAST_GAIN, LEAST_FRAC = 0.1, 0.05  # that a cause must gain: tokens a step, and share of the acceptance length
LENGTHS, STEPS = 256, 32  # cache lengths and numbers of steps are multiples of these, so that texts share programs


@dataclasses.dataclass(frozen=True)
class DraftedText:
    """A prompt with its greedy answer, and the engine's drafts in each step that drafted."""

    token_ids: np.ndarray  # [n] int32
    aux_hidden: np.ndarray  # [n, A]
    lengths: tuple[int, ...]  # by step: of the target's cache; token_ids[length] was the pending token
    drafts: tuple[tuple[int, ...], ...]  # by step
    num_accepted: tuple[int, ...]  # by step


def replay(drafter: Drafter, text: DraftedText, num_drafts: int) -> DraftOutput:
    """Run the drafter over a text as the engine does; return its drafts [S, K] in all steps, in NumPy.

    It absorbs the prompt; then each step reads the tokens committed in the one before.
    """
    interrupt.check()
    prompt, widest = text.lengths[0], num_drafts + 1
    capacity = -(-len(text.token_ids) // LENGTHS) * LENGTHS
    state = drafter.init_state(1, capacity, max(capacity, 2 * num_drafts))  # the prompt is written at once
    ids, aux = padded(text.token_ids[1:prompt], capacity), padded(text.aux_hidden[: prompt - 1], capacity)
    row = np.arange(capacity, dtype=np.int32)
    positions = np.where(row < prompt - 1, row, -1)[None]
    state = jax.jit(type(drafter).absorb)(drafter, state, ids, aux, positions)
    before = (prompt - 1, *text.lengths)
    committed = [(max(first, end - widest), end) for first, end in zip(before, text.lengths, strict=False)]
    committed += [committed[-1]] * (-len(committed) % STEPS)
    leaves: dict[str, Any] = {
        "token_ids": np.stack([padded(text.token_ids[first + 1 : end + 1], widest) for first, end in committed]),
        "aux_hidden": np.stack([padded(text.aux_hidden[first:end], widest) for first, end in committed]),
        "num": np.array([[end - first] for first, end in committed], np.int32),
        "first_position": np.array([[first] for first, _ in committed], np.int32),
    }
    drafts = _propose_in_turn(drafter, state, DrafterInput(**leaves), num_drafts)
    in_steps: DraftOutput = jax.tree.map(lambda leaf: np.asarray(leaf)[: len(text.lengths), 0], drafts)
    return in_steps


@functools.partial(jax.jit, static_argnames="num_drafts")
def _propose_in_turn(drafter: Any, state: Any, drafter_inputs: Any, num_drafts: int) -> Any:
    """Propose in all steps, one after the other; [S, 1, ...]."""

    def propose(state: Any, drafter_input: DrafterInput) -> tuple[Any, DraftOutput]:
        widths = jnp.full(1, num_drafts, jnp.int32)
        draft, after = drafter.propose(state, drafter_input, widths, num_drafts=num_drafts)
        return after, draft

    return jax.lax.scan(propose, state, drafter_inputs)[1]


def padded(rows: np.ndarray, width: int) -> Any:
    """Pad rows [n, ...] with zeros to [1, width, ...]; in NumPy, which dispatches no program."""
    return np.pad(rows, [(0, width - len(rows)), *((0, 0),) * (rows.ndim - 1)])[None]


def accepted(drafts: Any, text: DraftedText) -> np.ndarray:
    """Count in each step the leading drafts that equal the text, up to its end; [S]."""
    counts = []
    for length, step in zip(text.lengths, drafts, strict=True):
        following = text.token_ids[length + 1 : length + 1 + len(step)]
        right = step[: len(following)] == following
        counts.append(int(np.cumprod(right).sum()))
    return np.array(counts)


@dataclasses.dataclass(frozen=True)
class DraftDifference:
    """How the engine's drafts differ from the replayed ones: the first difference, and how many there are."""

    text: int
    step: int
    draft: int
    engine: int  # token id
    reference: int  # token id
    frac: float  # steps that differ / all steps


def compare(texts: Sequence[DraftedText], reference: Sequence[Any]) -> DraftDifference | None:
    """Compare the drafts that the engine verified with the tokens of `replay`, by text; None if all are equal."""
    first, differing, total = None, 0, 0
    for number, (text, expected) in enumerate(zip(texts, reference, strict=True)):
        for step, (ours, theirs) in enumerate(zip(text.drafts, expected, strict=True)):
            wrong = np.flatnonzero(np.array(ours) != theirs[: len(ours)])
            total += 1
            differing += len(wrong) > 0
            if len(wrong) and first is None:
                draft = int(wrong[0])
                first = number, step, draft, int(ours[draft]), int(theirs[draft])
    if first is None:
        return None
    return DraftDifference(*first, differing / total)


@dataclasses.dataclass(frozen=True)
class Reading:
    """Another reading of the drafter's checkpoint, and its accepted drafts."""

    name: str
    accepted: np.ndarray  # [S], over the steps of all texts
    cure: str = ""  # the change of files or options that chooses it


@dataclasses.dataclass(frozen=True)
class Cause:
    """A reading that is accepted significantly more often than the checkpoint as it is."""

    name: str
    acceptance_length: float
    gain: Estimate
    cure: str = ""


def causes(as_it_is: np.ndarray, readings: Sequence[Reading]) -> list[Cause]:
    """Select the readings that explain a low acceptance, the greatest gain first.

    The 95 % interval of the gain excludes zero, and the gain exceeds both LEAST_GAIN and LEAST_FRAC.
    """
    likely = []
    for reading in readings:
        more = (reading.accepted - as_it_is).astype(np.float64)
        gain = estimate(np.stack([more, np.ones_like(more)], axis=1), ratio)
        least = max(LEAST_GAIN, LEAST_FRAC * (1 + as_it_is.mean()))
        if gain is not None and (gain.low or 0.0) > 0 and gain.value > least:
            likely.append(Cause(reading.name, 1 + float(reading.accepted.mean()), gain, reading.cure))
    return sorted(likely, key=lambda cause: -cause.gain.value)
