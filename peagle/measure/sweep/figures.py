"""Compute the figures of a run from its raw lines: a VariantRow for every workload and variant.

Intervals of acceptance are by bootstrap over conversations: the turns of one and all their repeats stay together. Those
of times also hold the interval over the rounds: a round is a repeat, in which all variants take turns.

Many requests at once share the time: tok_per_s is then over the seconds in which at least one request was between its
first and last token, and intervals are over rounds alone. They share steps as well, so there is no cost of a step.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from peagle.answers.result import LOOPING_ABOVE, Counters
from peagle.measure.estimates import (
    FEWEST,
    Estimate,
    Statistic,
    estimate,
    over_rounds,
    ratio,
    ratio_of_ratios,
    widened,
)
from peagle.measure.metrics import busy_s, total
from peagle.measure.sweep.plan import PLAIN, K, Plan, Variant, Workload
from peagle.measure.sweep.store import Folder, Sample, SweepRequest

# columns of times: of the variant, then of plain decoding
TOKENS, SECONDS, PASSES, PLAIN_TOKENS, PLAIN_SECONDS, PLAIN_PASSES = range(6)
RATES = [TOKENS, SECONDS, PLAIN_TOKENS, PLAIN_SECONDS]  # columns of both tok_per_s
COSTS = [SECONDS, PASSES, PLAIN_SECONDS, PLAIN_PASSES]  # columns of both seconds per pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantRow:
    """The figures of one variant in one workload."""

    workload: Workload
    variant: Variant
    label: str  # of the variant, without its number of slots
    num_requests: int
    num_repeats: int
    num_differing: int  # outputs of all repeats that differ from plain decoding's
    looping_frac: float  # of the requests
    counters: Counters
    acceptance_length: Estimate | None  # sum emitted / sum steps, both of steps that verified drafts
    mean_length: Estimate | None  # mean over conversations of each one's acceptance length
    length_without_loops: Estimate | None
    rate_per_position: tuple[Estimate | None, ...]  # [i]: steps that accepted draft i / steps that verified drafts
    tok_per_s: Estimate | None  # sum (tokens - 1) / sum decode_s; its interval is over rounds
    speedup: Estimate | None  # tok_per_s / plain decoding's of the same requests and repeats
    speedup_repeats: tuple[float, ...]
    cycle_cost: Estimate | None  # c(K): seconds per pass of the target / plain decoding's

    @property
    def k(self) -> K:
        return self.variant.k

    @property
    def concurrency(self) -> int | None:
        return self.variant.concurrency

    @property
    def num_outputs(self) -> int:
        return self.num_requests * self.num_repeats

    def to_json(self) -> dict[str, Any]:
        """Make the entry of run.json, which has the fields of workload and variant in place of these."""
        entry = dataclasses.asdict(self)
        return entry.pop("workload") | entry.pop("variant") | entry


@dataclasses.dataclass(frozen=True)
class Pairing:
    """A request's samples by a variant and by plain decoding, one per repeat."""

    request: SweepRequest
    fast: tuple[Sample, ...]  # by the variant, which may be plain decoding
    plain: tuple[Sample, ...]

    @property
    def loops(self) -> bool:
        """Whether the variant's output loops in any repeat."""
        return any((sample.loop_share or 0.0) > LOOPING_ABOVE for sample in self.fast)

    @functools.cached_property
    def counters(self) -> Counters:
        return total([sample.counters for sample in self.fast])

    @functools.cached_property
    def times(self) -> np.ndarray:
        """Return [repeats, 6]: tokens after the first, seconds and passes of the variant, then of plain decoding.

        The row is 0 if either decoded fewer than two tokens, which have no speed.
        """
        rows = [
            [(sample.output_tokens - 1, sample.decode_s or 0.0, sample.num_passes) for sample in pair]
            for pair in zip(self.fast, self.plain, strict=True)
        ]
        times: np.ndarray = np.array(rows, np.float64).reshape(-1, 6)
        return np.where((times[:, RATES] > 0).all(axis=1, keepdims=True), times, 0.0)


def pairings(folder: Folder) -> dict[tuple[Workload, Variant], list[Pairing]]:
    """Pair the samples of each workload and variant with plain decoding's.

    Leaves out a request that lacks a repeat; of many at once, a repeat that lacks a request.
    """
    plan = folder.plan
    samples = {sample.key: sample for sample in folder.samples()}
    by_variant = {}
    for workload in plan.workloads:
        requests = folder.requests(workload)
        for variant in (*plan.variants, *plan.concurrent):
            plain = PLAIN.at(variant.concurrency)
            complete = {
                (request.request, repeat)
                for request, repeat in itertools.product(requests, range(plan.repeats))
                if all((workload, by, repeat, request.request) in samples for by in (variant, plain))
            }
            repeats = list(range(plan.repeats))
            if variant.concurrency is not None:
                repeats = [n for n in repeats if all((request.request, n) in complete for request in requests)]
            by_variant[workload, variant] = [
                Pairing(
                    request=request,
                    fast=tuple(samples[workload, variant, repeat, request.request] for repeat in repeats),
                    plain=tuple(samples[workload, plain, repeat, request.request] for repeat in repeats),
                )
                for request in requests
                if repeats and all((request.request, repeat) in complete for repeat in repeats)
            ]
    return by_variant


def rows(folder: Folder) -> list[VariantRow]:
    """Compute the figures of each workload and variant with complete requests, in the plan's order."""
    return [
        _row(folder.plan, workload, variant, requests)
        for (workload, variant), requests in pairings(folder).items()
        if requests
    ]


def rows_by_prompt(folder: Folder, workload: Workload) -> dict[int, list[VariantRow]]:
    """Compute the figures of each variant, one request at a time, for each conversation by its row, from 0."""
    by_prompt: dict[int, list[VariantRow]] = {}
    for (at, variant), requests in pairings(folder).items():
        if at == workload and variant.concurrency is None:
            for row, own in _by_conversation(requests).items():
                by_prompt.setdefault(row, []).append(_row(folder.plan, workload, variant, own))
    return by_prompt


def alone(rows: Iterable[VariantRow]) -> list[VariantRow]:
    """Select the rows of one request at a time."""
    return [row for row in rows if row.concurrency is None]


def concurrent(rows: Iterable[VariantRow]) -> list[VariantRow]:
    """Select the rows of many requests at once."""
    return [row for row in rows if row.concurrency is not None]


def of_workload(rows: Iterable[VariantRow], workload: Workload) -> list[VariantRow]:
    """Select a workload's rows."""
    return [row for row in rows if row.workload == workload]


def best(rows: Iterable[VariantRow]) -> VariantRow | None:
    """Choose a workload's row with the highest speed-up.

    Leaves out rows that lack requests, and those without a draft: plain decoding, and an `auto` that never drafted.
    """
    rows = [row for row in rows if row.speedup is not None]
    most = max((row.num_requests for row in rows), default=0)
    complete = [row for row in rows if row.num_requests == most and row.counters.num_steps]
    return max(complete, key=lambda row: row.speedup.value if row.speedup else 0.0, default=None)


def rounds_of(pairings: Sequence[Pairing]) -> np.ndarray:
    """Sum up the times of requests by round, as `Pairing.times` [repeats, 6]; rounds without a speed are left out.

    Passes of many requests at once are 0, because requests share them.
    """
    if pairings[0].fast[0].variant.concurrency is None:
        times: np.ndarray = np.sum([pairing.times for pairing in pairings], axis=0)
    else:
        sides = [zip(*(getattr(p, side) for p in pairings), strict=True) for side in ("fast", "plain")]
        times = np.array([[*_busy(fast), *_busy(plain)] for fast, plain in zip(*sides, strict=True)])
    return times[(times[:, RATES] > 0).all(axis=1)]


def _busy(samples: Iterable[Sample]) -> tuple[float, float, float]:
    """Return (tokens after the first, seconds in which at least one request was decoding, 0).

    All requests were added at the time from which ttft counts.
    """
    timed = [(s.output_tokens - 1, s.ttft_s, s.decode_s) for s in samples if s.ttft_s is not None and s.decode_s]
    return float(sum(tokens for tokens, *_ in timed)), busy_s((ttft, ttft + decode) for _, ttft, decode in timed), 0.0


def _row(plan: Plan, workload: Workload, variant: Variant, pairings: Sequence[Pairing]) -> VariantRow:
    counters, rounds = total([pairing.counters for pairing in pairings]), rounds_of(pairings)
    loops = [pairing.loops for pairing in pairings]
    samples = [pair for pairing in pairings for pair in zip(pairing.fast, pairing.plain, strict=True)]

    def accepted(position: int) -> Estimate | None:
        return _of_counters(pairings, lambda counters: (counters.accepted_per_position[position], counters.num_steps))

    return VariantRow(
        workload=workload,
        variant=variant,
        label=plan.label(variant.at(None)),
        num_requests=len(pairings),
        num_repeats=len(pairings[0].fast),
        num_differing=sum(fast.output_sha256 != plain.output_sha256 for fast, plain in samples),
        looping_frac=sum(loops) / len(pairings),
        counters=counters,
        acceptance_length=_length(pairings),
        mean_length=_mean_length(pairings),
        length_without_loops=_length([pairing for pairing in pairings if not pairing.loops]),
        rate_per_position=tuple(map(accepted, range(len(counters.tried) if counters.num_steps else 0))),
        tok_per_s=_of_rounds(pairings, rounds[:, [TOKENS, SECONDS]], ratio),
        speedup=_of_times(pairings, rounds, RATES),
        speedup_repeats=tuple(ratio_of_ratios(rounds[:, RATES]).tolist()),
        cycle_cost=_of_times(pairings, rounds, COSTS) if variant.concurrency is None else None,
    )


def _length(pairings: Sequence[Pairing]) -> Estimate | None:
    return _of_counters(pairings, lambda counters: (counters.num_emitted, counters.num_steps))


def _mean_length(pairings: Sequence[Pairing]) -> Estimate | None:
    lengths = [length.value for own in _by_conversation(pairings).values() if (length := _length(own))]
    return estimate(np.array([(length, 1.0) for length in lengths]), ratio)


def _by_conversation(pairings: Iterable[Pairing]) -> dict[int, list[Pairing]]:
    """Group requests by their conversation's row in the file, from 0."""
    by_row: dict[int, list[Pairing]] = {}
    for pairing in pairings:
        by_row.setdefault(pairing.request.row, []).append(pairing)
    return by_row


def _of_counters(pairings: Sequence[Pairing], row: Callable[[Counters], tuple[float, float]]) -> Estimate | None:
    """Estimate a ratio over the requests that verified drafts. row: its two sums by a request's counters."""
    drafted = [pairing for pairing in pairings if pairing.counters.num_steps]
    table = np.array([row(pairing.counters) for pairing in drafted], np.float64)
    return estimate(table, ratio, [pairing.request.row for pairing in drafted])


def _of_rounds(pairings: Sequence[Pairing], rounds: np.ndarray, statistic: Statistic) -> Estimate | None:
    """Compute a statistic of times [rounds, c], with its interval over rounds if there are FEWEST conversations."""
    if not len(rounds):
        return None
    value, few = float(statistic(rounds.sum(axis=0)[None])[0]), len({p.request.row for p in pairings}) < FEWEST
    return Estimate(value) if few else Estimate(value, *(over_rounds(statistic(rounds).tolist()) or ()))


def _of_times(pairings: Sequence[Pairing], rounds: np.ndarray, columns: list[int]) -> Estimate | None:
    """Estimate the ratio of a variant's times to plain decoding's."""
    if pairings[0].fast[0].variant.concurrency is not None:
        return _of_rounds(pairings, rounds[:, columns], ratio_of_ratios)
    timed = [pairing for pairing in pairings if pairing.times.any()]
    table = np.array([pairing.times.sum(axis=0)[columns] for pairing in timed])
    figure = estimate(table, ratio_of_ratios, [pairing.request.row for pairing in timed])
    return figure and widened(figure, over_rounds(ratio_of_ratios(rounds[:, columns]).tolist()))
