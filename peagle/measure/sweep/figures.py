"""Compute the figures of a run from its raw lines: a VariantRow for every workload and variant.

Intervals are by bootstrap over conversations: the turns of one and all their repeats stay together. A request loops if
the loop share of the variant's output is above 0.3 in any repeat.

Many requests at once share the time. So the repeat takes the place of the request in figures of time, and is what
intervals resample. tok_per_s is then over the seconds in which at least one request was between its first and last
token, and ttft_s includes the wait for a slot. They share steps as well, so there are no figures of a step, of a
category or of a single request.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from peagle.answers.result import LOOPING_ABOVE, Counters
from peagle.measure.estimates import (
    Estimate,
    Statistic,
    estimate,
    estimate_median,
    ratio,
    ratio_of_ratios,
)
from peagle.measure.metrics import busy_s, total
from peagle.measure.sweep.plan import PLAIN, K, Plan, Variant, Workload
from peagle.measure.sweep.store import ITL_QUANTILES, Folder, Sample, Share, SweepRequest

BOUNDS = ("one_hot", "sampled", "best")  # fields of peagle.measure.bound.Bound
SLOWER = 0.97  # a request is slower with speculation if the interval of its speed-up lies below
FEWEST_REPEATS = 3  # that the interval of a request's speed-up needs
# columns of times: of the variant, then of plain decoding
TOKENS, SECONDS, PASSES, PLAIN_TOKENS, PLAIN_SECONDS, PLAIN_PASSES = range(6)
RATES = (TOKENS, SECONDS, PLAIN_TOKENS, PLAIN_SECONDS)  # columns of both tok_per_s


@dataclasses.dataclass(frozen=True)
class BoundFigures:
    """The acceptance length that a bound allows, and the acceptance rate of the first draft."""

    length: Estimate | None
    first: Estimate | None


@dataclasses.dataclass(frozen=True)
class WithoutLoops:
    """Figures without the requests that loop. Many at once have no such speed-up, because they share the time."""

    num_requests: int
    acceptance_length: Estimate | None
    speedup: Estimate | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantFigures:
    """The figures of some requests."""

    num_requests: int
    prompt_tokens: float  # of a prompt, median
    output_tokens: int
    finished_frac: float  # ended by a stop token
    looping_frac: float
    equal_to_plain_frac: float
    num_spec_steps: int
    num_plain_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_truncated_tokens: int  # that steps decided after the end of their output
    histogram: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    acceptance_length: Estimate | None  # sum emitted / sum steps, both of steps that verified drafts
    acceptance_length_mean: Estimate | None  # mean over requests of emitted / steps
    rate_per_position: tuple[Estimate | None, ...]  # [i]: steps that accepted draft i / steps that verified drafts
    tok_per_s: Estimate | None  # sum (tokens - 1) / sum decode_s
    speedup: Estimate | None  # tok_per_s / plain decoding's of the same requests and repeats
    ttft_s: Estimate | None  # median over requests of the median over repeats
    itl_s: tuple[Estimate | None, ...]  # likewise, at ITL_QUANTILES
    tokens_per_step: Estimate | None  # sum (tokens - 1) / sum passes of the target, plain passes of `auto` included
    step_s: Estimate | None  # sum decode_s / sum passes of the target
    cycle_cost: Estimate | None  # c(K) = step_s / plain decoding's; speedup = tokens_per_step / c(K)
    draft_s: Estimate | None  # step_s times the share of drafting under the profiler
    verify_s: Estimate | None
    host_s: Estimate | None  # the rest: accepting, committing, the runtime between operations, the host
    bounds: Mapping[str, BoundFigures] | None  # by BOUNDS; None for greedy requests
    without_loops: WithoutLoops


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartFigures(VariantFigures):
    """The figures of a category, or of a bucket of prompt lengths."""

    part: str  # its name


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantRow(VariantFigures):
    """The figures of one variant in one workload."""

    workload: Workload
    variant: Variant
    label: str  # of the variant, without its number of slots
    num_repeats: int
    num_slower: int  # requests
    num_compared: int  # requests with enough repeats for an interval
    tok_per_s_repeats: tuple[float, ...]
    speedup_repeats: tuple[float, ...]
    by_category: tuple[PartFigures, ...]
    by_bucket: tuple[PartFigures, ...]

    @property
    def k(self) -> K:
        return self.variant.k

    @property
    def concurrency(self) -> int | None:
        return self.variant.concurrency

    @property
    def num_differing(self) -> int:
        """Outputs that differ from plain decoding's."""
        return round((1 - self.equal_to_plain_frac) * self.num_outputs)

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
    share: Share | None = None  # the profile of the variant's steps

    @property
    def loops(self) -> bool:
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


class Units(NamedTuple):
    """The timed units: requests over all repeats or, of many at once, repeats over all requests."""

    groups: np.ndarray  # by unit: the conversation, or the repeat, that is resampled
    samples: Sequence[Sequence[Sample]]
    times: np.ndarray  # [units, 6], with the columns of `Pairing.times`


def _by_request(pairings: Sequence[Pairing]) -> Units:
    times = [pairing.times.sum(axis=0) for pairing in pairings]
    groups = np.array([pairing.request.row for pairing in pairings], np.int64)
    return Units(groups, [pairing.fast for pairing in pairings], np.array(times).reshape(-1, 6))


def _by_repeat(pairings: Sequence[Pairing]) -> Units:
    """Make units of repeats. Passes are 0, because requests share them."""
    fast = list(zip(*(pairing.fast for pairing in pairings), strict=True))
    plain = zip(*(pairing.plain for pairing in pairings), strict=True)
    times = [[*_busy(side), 0.0, *_busy(other), 0.0] for side, other in zip(fast, plain, strict=True)]
    return Units(np.array([samples[0].repeat for samples in fast]), fast, np.array(times))


def _busy(samples: Iterable[Sample]) -> tuple[float, float]:
    """Return (tokens after the first, seconds in which at least one request was decoding).

    All requests were added at the time from which ttft counts.
    """
    timed = [(s.output_tokens - 1, s.ttft_s, s.decode_s) for s in samples if s.ttft_s is not None and s.decode_s]
    return float(sum(tokens for tokens, *_ in timed)), busy_s((ttft, ttft + decode) for _, ttft, decode in timed)


def length_by_rates(sums: np.ndarray) -> np.ndarray:
    """Compute the acceptance length of sums [R, 2K]: how often draft i was tried, and the sum of its probabilities.

    It is 1 + v_1 + v_1 v_2 + ..., v_i the mean probability of accepting draft i after all before it.
    """
    tried, probs = np.split(sums, 2, axis=1)
    means = np.divide(probs, tried, out=np.zeros_like(probs), where=tried > 0)
    length: np.ndarray = 1 + np.cumprod(means, axis=1).sum(axis=1)
    return length


def pairings(folder: Folder) -> dict[tuple[Workload, Variant], list[Pairing]]:
    """Pair the samples of each workload and variant with plain decoding's.

    Leaves out a request that lacks a repeat; of many at once, a repeat that lacks a request.
    """
    plan = folder.plan
    samples = {sample.key: sample for sample in folder.samples()}
    shares = {share.key: share for share in folder.shares}
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
                    share=shares.get((workload, variant, request.request)),
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


def alone(rows: Iterable[VariantRow]) -> list[VariantRow]:
    """Select the rows of one request at a time."""
    return [row for row in rows if row.concurrency is None]


def concurrent(rows: Iterable[VariantRow]) -> list[VariantRow]:
    """Select the rows of many requests at once."""
    return [row for row in rows if row.concurrency is not None]


def of_workload(rows: Iterable[VariantRow], workload: Workload) -> list[VariantRow]:
    """Select a workload's rows."""
    return [row for row in rows if row.workload == workload]


def _row(plan: Plan, workload: Workload, variant: Variant, pairings: Sequence[Pairing]) -> VariantRow:
    singly = pairings if variant.concurrency is None else []  # figures of single requests are of these
    units = _by_request(pairings) if singly else _by_repeat(pairings)
    repeats = np.sum([pairing.times for pairing in pairings], axis=0) if singly else units.times
    rates = repeats[(repeats[:, RATES] > 0).all(axis=1)][:, RATES]
    slower = [_is_slower(pairing.times) for pairing in singly if pairing.times.any(axis=1).sum() >= FEWEST_REPEATS]
    return VariantRow(
        workload=workload,
        variant=variant,
        label=plan.label(variant.at(None)),
        num_repeats=len(repeats),
        num_slower=sum(slower),
        num_compared=len(slower),
        tok_per_s_repeats=tuple(ratio(rates).tolist()),
        speedup_repeats=tuple(ratio_of_ratios(rates).tolist()),
        by_category=_parts(singly, lambda pairing: pairing.request.category or ""),
        by_bucket=_parts(singly, lambda pairing: plan.bucket(len(pairing.request.prompt_ids))),
        **_figures(pairings, units),
    )


def _parts(pairings: Sequence[Pairing], part_of: Callable[[Pairing], str]) -> tuple[PartFigures, ...]:
    """Compute the figures of each part of the requests; none if there is only one part."""
    parts: dict[str, list[Pairing]] = {}
    for pairing in pairings:
        parts.setdefault(part_of(pairing), []).append(pairing)
    if len(parts) < 2:
        return ()

    def order(name: str) -> tuple[int, str]:
        head = name.partition(".")[0]  # buckets begin with a number
        return (int(head), name) if head.isdecimal() else (-1, name)

    return tuple(
        PartFigures(part=name, **_figures(parts[name], _by_request(parts[name]))) for name in sorted(parts, key=order)
    )


def _figures(pairings: Sequence[Pairing], units: Units) -> dict[str, Any]:
    """Compute the fields of Figures."""
    counters = total([pairing.counters for pairing in pairings])
    equal = [
        fast.output_sha256 == plain.output_sha256
        for pairing in pairings
        for fast, plain in zip(pairing.fast, pairing.plain, strict=True)
    ]
    not_looping = [pairing for pairing in pairings if not pairing.loops]
    share_time = pairings[0].fast[0].variant.concurrency is not None
    shares = [pairing.share for pairing in pairings if pairing.share is not None]

    def accepted(position: int) -> Estimate | None:
        return _of_counters(pairings, lambda counters: (counters.accepted_per_position[position], counters.num_steps))

    def median(value: Callable[[Sample], float | None]) -> Estimate | None:
        table = [[number for sample in unit if (number := value(sample)) is not None] for unit in units.samples]
        known = [(float(np.median(row)), group) for row, group in zip(table, units.groups, strict=True) if row]
        return estimate_median([number for number, _ in known], [int(group) for _, group in known])

    def wait(quantile: int) -> Callable[[Sample], float | None]:
        return lambda sample: None if sample.itl_s is None else sample.itl_s[quantile]

    step = _of_times(units, (SECONDS, PASSES), ratio)
    draft, verify, host = _split(step, shares)
    return {
        "num_requests": len(pairings),
        "prompt_tokens": float(np.median([len(pairing.request.prompt_ids) for pairing in pairings])),
        "output_tokens": sum(sample.output_tokens for pairing in pairings for sample in pairing.fast),
        "finished_frac": sum(pairing.fast[0].finish_reason == "stop" for pairing in pairings) / len(pairings),
        "looping_frac": (len(pairings) - len(not_looping)) / len(pairings),
        "equal_to_plain_frac": sum(equal) / len(equal),
        "num_spec_steps": counters.num_steps,
        "num_plain_steps": counters.num_plain_steps,
        "num_draft_tokens": counters.num_drafted,
        "num_accepted_draft_tokens": counters.num_accepted,
        "num_truncated_tokens": counters.num_truncated,
        "histogram": counters.histogram,
        "accepted_per_position": counters.accepted_per_position,
        "acceptance_length": _acceptance_length(pairings),
        "acceptance_length_mean": _of_counters(pairings, lambda counters: (counters.acceptance_length or 0.0, 1)),
        "rate_per_position": tuple(map(accepted, range(len(counters.tried) if counters.num_steps else 0))),
        "tok_per_s": _of_times(units, (TOKENS, SECONDS), ratio),
        "speedup": _of_times(units, RATES, ratio_of_ratios),
        "ttft_s": median(lambda sample: sample.ttft_s),
        "itl_s": tuple(median(wait(quantile)) for quantile in range(len(ITL_QUANTILES))),
        "tokens_per_step": _of_times(units, (TOKENS, PASSES), ratio),
        "step_s": step,
        "cycle_cost": _of_times(units, (SECONDS, PASSES, PLAIN_SECONDS, PLAIN_PASSES), ratio_of_ratios),
        "draft_s": draft,
        "verify_s": verify,
        "host_s": host,
        "bounds": _bounds(pairings),
        "without_loops": WithoutLoops(
            len(not_looping),
            _acceptance_length(not_looping),
            None if share_time else _of_times(_by_request(not_looping), RATES, ratio_of_ratios),
        ),
    }


def _of_counters(pairings: Sequence[Pairing], row: Callable[[Counters], tuple[float, float]]) -> Estimate | None:
    """Estimate a ratio over the requests that verified drafts. row: its two sums by a request's counters."""
    drafted = [pairing for pairing in pairings if pairing.counters.num_steps]
    table = np.array([row(pairing.counters) for pairing in drafted], np.float64)
    return estimate(table, ratio, [pairing.request.row for pairing in drafted])


def _acceptance_length(pairings: Sequence[Pairing]) -> Estimate | None:
    return _of_counters(pairings, lambda counters: (counters.num_emitted, counters.num_steps))


def _of_times(units: Units, columns: Sequence[int], statistic: Statistic) -> Estimate | None:
    """Estimate a statistic of these columns, over the units that have a speed."""
    timed = (units.times[:, RATES] > 0).all(axis=1)
    return estimate(units.times[timed][:, columns], statistic, units.groups[timed].tolist())


def _split(step: Estimate | None, shares: Sequence[Share]) -> tuple[Estimate | None, Estimate | None, Estimate | None]:
    """Split a step's time into (drafting, verifying, the rest) as in the profiled steps; without intervals."""
    parts = np.array([(share.draft_ms, share.verify_ms, share.other_ms) for share in shares]).reshape(-1, 3)
    sums = np.array([share.num_steps for share in shares]) @ parts
    if step is None or not sums.sum() > 0:
        return None, None, None
    draft, verify, rest = (Estimate(step.value * float(part)) for part in sums / sums.sum())
    return draft, verify, rest


def _bounds(pairings: Sequence[Pairing]) -> dict[str, BoundFigures] | None:
    """Compute the figures of the bounds; None for greedy requests."""
    bounded = [(pairing.fast[0].bound, pairing.request.row) for pairing in pairings if pairing.fast[0].bound]
    if not bounded:
        return None
    groups = [group for _, group in bounded]

    def of(name: str) -> BoundFigures:
        sums = [getattr(bound, name) for bound, _ in bounded]
        if None in sums:
            return BoundFigures(None, None)
        table = np.array([[*bound.tried, *own] for (bound, _), own in zip(bounded, sums, strict=True)], np.float64)
        k = table.shape[1] // 2
        return BoundFigures(estimate(table, length_by_rates, groups), estimate(table[:, [k, 0]], ratio, groups))

    return {name: of(name) for name in BOUNDS}


def _is_slower(times: np.ndarray) -> bool:
    """Test whether a request is surely slower, by the 95 % t-interval of the repeats' mean log speed-up."""
    logs = np.log(ratio_of_ratios(times[times.any(axis=1)][:, RATES]))
    return bool(logs.mean() + stdtrit(len(logs) - 1, 0.975) * logs.std(ddof=1) / np.sqrt(len(logs)) < np.log(SLOWER))


def best(rows: Iterable[VariantRow]) -> VariantRow | None:
    """Choose a workload's row with the highest speed-up.

    Leaves out rows that lack requests, and an `auto` that never drafted, which is plain decoding.
    """
    rows = [row for row in rows if row.speedup is not None]
    most = max((row.num_requests for row in rows), default=0)
    complete = [row for row in rows if row.num_requests == most and (row.k == 0 or row.num_spec_steps)]
    return max(complete, key=lambda row: row.speedup.value if row.speedup else 0.0, default=None)
