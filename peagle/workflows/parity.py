"""Does a drafter do what it should? What the engine drafted, held against the same drafter followed step by step, and
against the drafter read in other ways.

Two kinds of fault lower acceptance without any message. The engine may not do what the checkpoint says: then its drafts
differ from the reference's, and how they differ tells why (`explain`). Or the checkpoint, or the way it is asked, says
something else than it was trained with: then another reading of it is accepted more often (`causes`).

Everything is looked at where the engine was: at the places of a greedy text where it drafted.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from peagle.measure.sweep.figures import Estimate, estimate, ratio
from peagle.ops import interrupt
from peagle.ops.messages import DrafterInput, DraftOutput
from peagle.protocols import Drafter

FOLLOWS = 0.9  # of the steps: a fault explains drafts that follow it this often
CHANCE = 0.05  # of a pattern that is taken for no accident
LEAST_GAIN = 0.1  # tokens a step: less is no cause
LEAST_FRAC = 0.05  # of what is expected as it is
LENGTHS = 256  # caches are so long, or a multiple


@dataclasses.dataclass(frozen=True)
class Text:
    """A prompt with its greedy answer, and what the engine drafted on the way."""

    token_ids: np.ndarray  # [n] int32
    aux_hidden: np.ndarray  # [n, A] what the drafter reads
    places: tuple[int, ...]  # of each step: tokens whose hiddens were known; token_ids[place] was the last token
    drafts: tuple[tuple[int, ...], ...]  # of each step
    num_accepted: tuple[int, ...]

    def with_aux(self, aux_hidden: np.ndarray) -> "Text":
        return dataclasses.replace(self, aux_hidden=aux_hidden)


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What a drafter gives at the places of a text."""

    token_ids: np.ndarray  # [S, K]
    logits: np.ndarray | None  # [S, K, V], where it has any


def replay(drafter: Drafter, text: Text, num_drafts: int, blind: bool = False) -> Replayed:
    """The drafter led along the text as the engine leads it: its cache filled with the prompt, then at each place given
    the tokens committed since the last. blind: with an empty cache at each place, as if nothing lay before them."""
    prompt, widest = text.places[0], num_drafts + 1
    capacity = -(-len(text.token_ids) // LENGTHS) * LENGTHS  # so that texts share their programs
    empty = drafter.init_state(1, capacity, max(capacity, 2 * num_drafts))  # the prompt is written at once
    ids, aux = _padded(text.token_ids[1:prompt], capacity), _padded(text.aux_hidden[: prompt - 1], capacity)
    row = np.arange(capacity, dtype=np.int32)
    positions = np.where(row < prompt - 1, row, -1)[None]
    state = empty if blind else jax.jit(type(drafter).absorb)(drafter, empty, ids, aux, positions)
    propose = jax.jit(type(drafter).propose, static_argnames="num_drafts")
    found: list[DraftOutput] = []
    held = prompt - 1
    for place in text.places:
        interrupt.check()
        first = max(held, place - widest)
        rows = slice(first, place)
        num = place - first
        fresh = DrafterInput(
            token_ids=_padded(text.token_ids[first + 1 : place + 1], widest),
            aux_hidden=_padded(text.aux_hidden[rows], widest),
            num=np.array([num], np.int32),  # type: ignore[arg-type]  # NumPy's, too
            first_position=np.array([first], np.int32),  # type: ignore[arg-type]
        )
        widths = np.array([num_drafts], np.int32)
        draft, state = propose(drafter, empty if blind else state, fresh, widths, num_drafts=num_drafts)
        found.append(draft)
        held = place
    logits = None if found[0].logits is None else np.concatenate([np.asarray(each.logits) for each in found])
    return Replayed(np.concatenate([np.asarray(each.token_ids) for each in found]), logits)


def _padded(rows: np.ndarray, width: int) -> Any:
    """[1, width, ...], of NumPy: given to a program, it costs no dispatch of its own."""
    missing = [(0, width - len(rows)), *((0, 0),) * (rows.ndim - 1)]
    return np.pad(rows, missing)[None]


def accepted(drafts: np.ndarray, text: Text) -> np.ndarray:
    """[S]: how many drafts of each step the text goes on with, as far as it goes."""
    found = []
    for place, step in zip(text.places, drafts, strict=True):
        following = text.token_ids[place + 1 : place + 1 + len(step)]
        right = step[: len(following)] == following
        found.append(int(np.cumprod(right).sum()))
    return np.array(found)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where the engine's drafts first differ from the reference's."""

    text: int
    step: int
    draft: int
    engine: int
    reference: int
    frac: float  # of all steps that differ anywhere
    explanation: str | None


def compare(texts: Sequence[Text], reference: Sequence[np.ndarray], blind: Sequence[np.ndarray]) -> Difference | None:
    """None where all drafts that the engine verified are the reference's. `blind` are those of a drafter that sees
    nothing before the tokens committed last."""
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
    """The known fault that the engine's drafts follow; None where they follow none."""
    steps = [
        (number, step, ours == tuple(theirs[: len(ours)]), ours == tuple(alone[: len(ours)]))
        for number, (text, expected, unseen) in enumerate(zip(texts, reference, blind, strict=True))
        for step, (ours, theirs, alone) in enumerate(zip(text.drafts, expected, unseen, strict=True))
    ]
    right, alone = (float(np.mean([each[which] for each in steps])) for which in (2, 3))
    if alone >= FOLLOWS and alone > right:
        return (
            "the drafter is blind to its context: its drafts are those of an empty cache; the cache is not filled at "
            "prefill, not carried from step to step, or not read"
        )
    # what leaves rows in the drafter's cache that must go: drafts that were rejected; of a drafter with mask slots, any
    # draft behind the first
    leaves: dict[str, Callable[[int, int], bool]] = {
        "the first rejection": lambda accepted, drafted: accepted < drafted,
        "the first step with several drafts": lambda _, drafted: drafted > 1,
    }
    for where, left in leaves.items():
        until: list[bool] = []
        behind: list[bool] = []
        for number, step, right, _ in steps:
            before = zip(texts[number].num_accepted[:step], texts[number].drafts[:step], strict=True)
            (behind if any(left(a, len(d)) for a, d in before) else until).append(right)
        # were faults as frequent before as behind it, none there would be luck
        if behind and all(until) and np.mean(behind) ** len(until) < CHANCE:
            return (
                f"drafts are right until {where} and wrong behind it: the drafter's cache is not rolled back to what "
                "was accepted (or along another axis than that of its positions)"
            )
    return None


@dataclasses.dataclass(frozen=True)
class Reading:
    """The drafter read in another way, and what of it would be accepted in each step."""

    name: str
    accepted: np.ndarray  # [S], over all texts
    cure: str = ""  # what to change, so that it is read so


@dataclasses.dataclass(frozen=True)
class Cause:
    """A reading that is accepted more often than the one given, and for sure."""

    name: str
    acceptance_length: float
    gain: Estimate
    cure: str = ""


def causes(given: np.ndarray, readings: Sequence[Reading]) -> list[Cause]:
    """Those that explain a low acceptance, the greatest gain first: more accepted at the same places, whose 95 %
    interval leaves out zero, and by more than a tenth of a token and 5 %."""
    found = []
    for reading in readings:
        more = (reading.accepted - given).astype(np.float64)
        gain = estimate(np.stack([more, np.ones_like(more)], axis=1), ratio)
        least = max(LEAST_GAIN, LEAST_FRAC * (1 + given.mean()))
        if gain is not None and (gain.low or 0.0) > 0 and gain.value > least:
            found.append(Cause(reading.name, 1 + float(reading.accepted.mean()), gain, reading.cure))
    return sorted(found, key=lambda cause: -cause.gain.value)
