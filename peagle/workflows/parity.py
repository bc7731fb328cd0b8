"""Find out why a drafter's acceptance is low: compare the engine's drafts with references.

Two kinds of faults lower acceptance without a message. The engine may run the checkpoint incorrectly: then its drafts
differ from those of the same drafter replayed step by step, and the pattern of differences shows the fault (`explain`).
Or the checkpoint, or the prompt format, is not the one the drafter was trained with: then another reading of the
checkpoint is accepted more often (`causes`).

All comparisons are made at the positions of a greedy text at which the engine drafted.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle.measure.estimates import Estimate, estimate, ratio
from peagle.ops import interrupt
from peagle.ops.messages import DrafterInput, DraftOutput
from peagle.protocols import Drafter

FOLLOWS = 0.9  # share of the steps that must follow a fault's pattern
CHANCE = 0.05  # a pattern must be less likely than this by chance
LEAST_GAIN = 0.1  # of a cause, in tokens a step
LEAST_FRAC = 0.05  # of a cause, over the acceptance length as it is
LENGTHS = 256  # cache lengths are multiples of this, so that texts share programs
PLACES = 32  # likewise the numbers of places


@dataclasses.dataclass(frozen=True)
class Text:
    """A prompt with its greedy answer, and the engine's drafts."""

    token_ids: np.ndarray  # [n] int32
    aux_hidden: np.ndarray  # [n, A]
    places: tuple[int, ...]  # of each step: the length of the target's cache; token_ids[place] was the pending token
    drafts: tuple[tuple[int, ...], ...]  # of each step
    num_accepted: tuple[int, ...]

    def with_aux(self, aux_hidden: np.ndarray) -> "Text":
        return dataclasses.replace(self, aux_hidden=aux_hidden)


@dataclasses.dataclass(frozen=True)
class Replayed:
    """The drafts of a drafter at the places of a text."""

    token_ids: np.ndarray  # [S, K]
    logits: np.ndarray | None  # [S, K, V], if it has any


def replay(drafter: Drafter, text: Text, num_drafts: int, blind: bool = False) -> Replayed:
    """Run the drafter over a text as the engine does, and return its drafts at every place.

    It absorbs the prompt, then reads at every place the tokens committed since the last. blind: with an empty cache at
    every place.
    """
    interrupt.check()
    prompt, widest = text.places[0], num_drafts + 1
    capacity = -(-len(text.token_ids) // LENGTHS) * LENGTHS
    state = drafter.init_state(1, capacity, max(capacity, 2 * num_drafts))  # the prompt is written at once
    if not blind:
        ids, aux = _padded(text.token_ids[1:prompt], capacity), _padded(text.aux_hidden[: prompt - 1], capacity)
        row = np.arange(capacity, dtype=np.int32)
        positions = np.where(row < prompt - 1, row, -1)[None]
        state = jax.jit(type(drafter).absorb)(drafter, state, ids, aux, positions)
    before = (prompt - 1, *text.places)
    runs = [(max(length, place - widest), place) for length, place in zip(before, text.places, strict=False)]
    runs += [runs[-1]] * (-len(runs) % PLACES)  # so that texts share programs
    leaves: dict[str, Any] = {
        "token_ids": np.stack([_padded(text.token_ids[first + 1 : place + 1], widest) for first, place in runs]),
        "aux_hidden": np.stack([_padded(text.aux_hidden[first:place], widest) for first, place in runs]),
        "num": np.array([[place - first] for first, place in runs], np.int32),
        "first_position": np.array([[first] for first, _ in runs], np.int32),
    }
    drafts = _in_turn(drafter, state, DrafterInput(**leaves), num_drafts, blind)
    of_text = jax.tree.map(lambda leaf: np.asarray(leaf)[: len(text.places), 0], drafts)
    return Replayed(of_text.token_ids, of_text.logits)


@functools.partial(jax.jit, static_argnames=("num_drafts", "blind"))
def _in_turn(drafter: Any, state: Any, drafter_inputs: Any, num_drafts: int, blind: bool) -> Any:
    """Propose at all places in turn; [S, 1, ...]. blind: always from the first state."""

    def propose(state: Any, drafter_input: DrafterInput) -> tuple[Any, DraftOutput]:
        widths = jnp.full(1, num_drafts, jnp.int32)
        draft, after = drafter.propose(state, drafter_input, widths, num_drafts=num_drafts)
        return state if blind else after, draft

    return jax.lax.scan(propose, state, drafter_inputs)[1]


def _padded(rows: np.ndarray, width: int) -> Any:
    """Pad to [1, width, ...] in NumPy, which needs no dispatch before a program."""
    missing = [(0, width - len(rows)), *((0, 0),) * (rows.ndim - 1)]
    return np.pad(rows, missing)[None]


def accepted(drafts: Sequence[np.ndarray] | np.ndarray, text: Text) -> np.ndarray:
    """Count every step's leading drafts that equal the text, as far as it reaches; [S]."""
    counts = []
    for place, step in zip(text.places, drafts, strict=True):
        following = text.token_ids[place + 1 : place + 1 + len(step)]
        right = step[: len(following)] == following
        counts.append(int(np.cumprod(right).sum()))
    return np.array(counts)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference of the engine's drafts from the reference's."""

    text: int
    step: int
    draft: int
    engine: int
    reference: int
    frac: float  # steps that differ anywhere, over all steps
    explanation: str | None


def compare(texts: Sequence[Text], reference: Sequence[np.ndarray], blind: Sequence[np.ndarray]) -> Difference | None:
    """Compare the drafts that the engine verified with the reference's; None if all are equal.

    `blind`: the drafts of a drafter with an empty cache (`replay`).
    """
    first, differing, total = None, 0, 0
    for number, (text, expected) in enumerate(zip(texts, reference, strict=True)):
        for step, (ours, theirs) in enumerate(zip(text.drafts, expected, strict=True)):
            wrong = np.flatnonzero(np.array(ours) != theirs[: len(ours)])
            total += 1
            differing += len(wrong) > 0
            if len(wrong) and first is None:
                place = int(wrong[0])
                first = number, step, place, int(ours[place]), int(theirs[place])
    if first is None:
        return None
    return Difference(*first, differing / total, explain(texts, reference, blind))


def explain(texts: Sequence[Text], reference: Sequence[np.ndarray], blind: Sequence[np.ndarray]) -> str | None:
    """Describe the known fault that the engine's drafts follow; None if they follow none."""
    steps = [
        (number, step, ours == tuple(theirs[: len(ours)]), ours == tuple(alone[: len(ours)]))
        for number, (text, expected, unseen) in enumerate(zip(texts, reference, blind, strict=True))
        for step, (ours, theirs, alone) in enumerate(zip(text.drafts, expected, unseen, strict=True))
    ]
    right, alone = (float(np.mean([step[which] for step in steps])) for which in (2, 3))
    if alone >= FOLLOWS and alone > right:
        return (
            "the drafter is blind to its context: its drafts are those of an empty cache; the cache is not filled at "
            "prefill, not carried from step to step, or not read"
        )
    # steps that leave rows in the drafter's cache which must be rolled back: rejected drafts; in a drafter with mask
    # slots, any draft after the first
    leaves: dict[str, Callable[[int, int], bool]] = {
        "the first rejection": lambda accepted, drafted: accepted < drafted,
        "the first step with several drafts": lambda _, drafted: drafted > 1,
    }
    for event, left in leaves.items():
        until: list[bool] = []
        after: list[bool] = []
        for number, step, right, _ in steps:
            before = zip(texts[number].num_accepted[:step], texts[number].drafts[:step], strict=True)
            (after if any(left(a, len(d)) for a, d in before) else until).append(right)
        # the chance of no wrong draft until the event, if wrong drafts were as frequent before it as after it
        if after and all(until) and np.mean(after) ** len(until) < CHANCE:
            return (
                f"drafts are right until {event} and wrong after it: the drafter's cache is not rolled back to the "
                "accepted tokens (or along an axis that is not that of its positions)"
            )
    return None


@dataclasses.dataclass(frozen=True)
class Reading:
    """Another reading of the drafter's checkpoint, and how many of its drafts the text accepts."""

    name: str
    accepted: np.ndarray  # [S], over all texts
    cure: str = ""  # the change that makes it the default reading


@dataclasses.dataclass(frozen=True)
class Cause:
    """A reading that is accepted significantly more often than the given one."""

    name: str
    acceptance_length: float
    gain: Estimate
    cure: str = ""


def causes(as_it_is: np.ndarray, readings: Sequence[Reading]) -> list[Cause]:
    """Select the readings that explain a low acceptance, the greatest gain first.

    At the same places they accept more: the gain's 95 % interval excludes zero, and it exceeds both LEAST_GAIN and
    LEAST_FRAC.
    """
    likely = []
    for reading in readings:
        more = (reading.accepted - as_it_is).astype(np.float64)
        gain = estimate(np.stack([more, np.ones_like(more)], axis=1), ratio)
        least = max(LEAST_GAIN, LEAST_FRAC * (1 + as_it_is.mean()))
        if gain is not None and (gain.low or 0.0) > 0 and gain.value > least:
            likely.append(Cause(reading.name, 1 + float(reading.accepted.mean()), gain, reading.cure))
    return sorted(likely, key=lambda cause: -cause.gain.value)
