"""Compute the figures of a run from its raw lines: a Row for every workload and variant.

Counters and their ratios are in peagle.result. Every figure is an Estimate, with a bootstrap interval over
conversations: the turns of one and their repeats stay together. A request loops if the loop share of any of the
variant's repeats is above 0.3. Only PROFILED conversations run under the profiler: the intervals of their shares are
wider, and missing if few of them are among the requests.

Many requests at once share the time, so a repeat takes the place of a request in every figure of time, and intervals
resample repeats. tok_per_s is then over the seconds in which at least one request was between its first and last token,
and ttft_s counts from the moment the requests were added: it includes the wait for a slot. Steps are shared too, so
they have no time of their own, and there are no figures by part or request.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from scipy.special import stdtrit

from peagle.measure.estimates import (
    Bootstrap,
    Estimate,
    Statistic,
    bootstrap,
    estimate,
    estimate_median,
    one_more_than_ratio,
    ratio,
    ratio_of_ratios,
)
from peagle.measure.metrics import busy_s, total
from peagle.measure.sweep.plan import PLAIN, K, Plan, Variant, Workload
from peagle.measure.sweep.store import ITL_QUANTILES, Folder, Sample, Share, SweepRequest
from peagle.result import LOOPING_ABOVE, Counters

BOUNDS = ("one_hot", "sampled", "best")  # of peagle.measure.bound
SLOWER = 0.97  # a request is slower with speculation if its interval lies wholly below

AnyPairing = TypeVar("AnyPairing", bound="Pairing")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of some requests."""

    num_requests: int
    acceptance_length: Estimate | None  # 1 + sum accepted / sum steps that verified drafts
    acceptance_length_mean: Estimate | None  # mean over requests of 1 + accepted / steps
    rate_per_position: tuple[Estimate | None, ...]  # [i]: steps that accepted draft i / steps
    conditional_rate: tuple[Estimate | None, ...]  # [i]: the same / steps that accepted all before draft i
    tok_per_s: Estimate | None  # sum (tokens - 1) / sum decode_s
    speedup: Estimate | None  # tok_per_s / plain decoding's of the same requests and repeats
    speedup_median: Estimate | None  # median over requests of plain decoding's median seconds a token / the variant's
    ttft_s: Estimate | None  # median over requests of the median over repeats
    tpot_s: Estimate | None  # the same of decode_s / (tokens - 1)
    itl_s: tuple[Estimate | None, ...]  # the same of a request's ITL_QUANTILES
    tokens_per_step: Estimate | None  # sum (tokens - 1) / sum passes of the target, plain passes of `auto` included
    step_s: Estimate | None  # sum decode_s / sum passes of the target
    plain_step_s: Estimate | None
    cycle_cost: Estimate | None  # c(K): step_s / plain_step_s; speedup = tokens_per_step / c(K)
    draft_s: Estimate | None  # step_s times the share of drafting under the profiler (peagle.measure.profile)
    verify_s: Estimate | None
    host_s: Estimate | None  # the rest: accepting, committing, the runtime between operations, the host
    verify_cost: Estimate | None  # v(T): verify_s, a pass over T = K + 1 rows / plain decoding's, a pass over one
    bounds: Mapping[str, "BoundFigures"] | None  # by name of BOUNDS; None for greedy requests


@dataclasses.dataclass(frozen=True)
class BoundFigures:
    """The acceptance length, and the rate of the first draft, that a bound allows (peagle.measure.bound)."""

    length: Estimate | None
    first: Estimate | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountedFigures(Figures):
    """Figures with the counts behind them."""

    prompt_tokens: float  # median
    looping_frac: float
    finished_frac: float  # ended by a stop token
    output_tokens: int
    num_spec_steps: int
    num_plain_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    histogram: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    equal_to_plain_frac: float
    without_loops: Figures


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part(CountedFigures):
    """The figures of a category, or of a bucket of prompt lengths."""

    part: str


@dataclasses.dataclass(frozen=True)
class RequestFigures:
    """The acceptance and speed-up of one request."""

    request: int
    prompt_tokens: int
    output_tokens: int
    loop_share: float | None
    acceptance_length: float | None
    num_spec_steps: int
    speedup: Estimate | None
    slower: bool | None  # None: too few repeats for an interval

    @property
    def loops(self) -> bool:
        return (self.loop_share or 0.0) > LOOPING_ABOVE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(CountedFigures):
    """The figures of one variant in one workload."""

    workload: Workload
    variant: Variant
    label: str  # of the variant, without its number of slots
    num_repeats: int
    num_slower: int
    num_compared: int  # requests with enough repeats for an interval
    tok_per_s_repeats: tuple[float, ...]
    speedup_repeats: tuple[float, ...]
    by_category: tuple[Part, ...]
    by_bucket: tuple[Part, ...]
    per_request: tuple[RequestFigures, ...]

    @property
    def k(self) -> K:
        return self.variant.k

    @property
    def concurrency(self) -> int | None:
        return self.variant.concurrency

    @property
    def num_differing(self) -> int:
        """Outputs that are not plain decoding's."""
        return round((1 - self.equal_to_plain_frac) * self.num_outputs)

    @property
    def num_outputs(self) -> int:
        return self.num_requests * self.num_repeats

    def to_json(self) -> dict[str, Any]:
        """Make the entry of run.json, with the fields of workload and variant in it."""
        entry = dataclasses.asdict(self)
        return entry.pop("workload") | entry.pop("variant") | entry


@dataclasses.dataclass(frozen=True)
class Pairing:
    """Samples of a variant and plain decoding's of the same requests and repeats, pair by pair.

    They are of one request over all repeats or, of many requests at once, of one repeat over all requests.
    """

    group: int  # the conversation, or the repeat: the unit of resampling
    fast: tuple[Sample, ...]
    plain: tuple[Sample, ...]

    @property
    def concurrent(self) -> bool:
        return self.fast[0].variant.concurrency is not None

    @functools.cached_property
    def timed(self) -> tuple[tuple[Sample, Sample], ...]:
        """Pairs in which both have a time of two tokens or more."""
        pairs = zip(self.fast, self.plain, strict=True)
        return tuple(pair for pair in pairs if all(sample.output_tokens > 1 and sample.decode_s for sample in pair))

    @functools.cached_property
    def sums(self) -> tuple[float, float, float, float]:
        """Sum (tokens after the first, seconds) of the variant, then of plain decoding."""
        if self.concurrent:
            return *_together(self.fast), *_together(self.plain)
        fast, plain = (_in_turns([pair[side] for pair in self.timed]) for side in (0, 1))
        return *fast, *plain

    @functools.cached_property
    def passes(self) -> tuple[float, float]:
        """Count passes of the target: (of the variant, of plain decoding)."""
        fast, plain = (float(sum(pair[side].num_passes for pair in self.timed)) for side in (0, 1))
        return fast, plain

    @property
    def speedup(self) -> float:
        """Divide plain decoding's seconds a token by the variant's: medians; sums of many at once."""
        if self.concurrent:
            return float(ratio_of_ratios(np.array([self.sums]))[0])
        return _seconds_per_token(pair[1] for pair in self.timed) / _seconds_per_token(pair[0] for pair in self.timed)

    def median(self, value: Callable[[Sample], float | None]) -> float | None:
        """Take the median of a value of the variant's samples; None if none has it."""
        values = [number for sample in self.fast if (number := value(sample)) is not None]
        return float(np.median(values)) if values else None


@dataclasses.dataclass(frozen=True)
class RequestPairing(Pairing):
    """The samples of one request over all repeats. Shares: profiles of its steps."""

    request: SweepRequest
    share: Share | None = None
    plain_share: Share | None = None

    @property
    def loops(self) -> bool:
        """Whether the variant's output loops, in any repeat."""
        return any((sample.loop_share or 0.0) > LOOPING_ABOVE for sample in self.fast)

    @functools.cached_property
    def counters(self) -> Counters:
        return total([sample.counters for sample in self.fast])


def length_by_rates(sums: np.ndarray) -> np.ndarray:
    """Compute the acceptance length from sums [R, 2K] over positions: drafts, then their rates.

    It is 1 + v_1 + v_1 v_2 + ..., v_i the mean rate of draft i where all before it were accepted.
    """
    tried, rates = np.split(sums, 2, axis=1)
    means = np.divide(rates, tried, out=np.zeros_like(rates), where=tried > 0)
    length: np.ndarray = 1 + np.cumprod(means, axis=1).sum(axis=1)
    return length


def pairings(folder: Folder) -> dict[tuple[Workload, Variant], list[RequestPairing]]:
    """Pair requests with plain decoding by workload and variant, over complete repeats.

    One request at a time is complete with all its repeats; of many at once a repeat with all its requests.
    """
    plan = folder.plan
    samples = {sample.key: sample for sample in folder.samples()}
    shares = {share.key: share for share in folder.shares}
    by_variant = {}
    for workload in plan.workloads:
        requests = folder.requests(workload)
        for variant in (*plan.variants, *plan.concurrent):
            plainly = PLAIN.at(variant.concurrency)
            complete = {
                (request.request, repeat)
                for request, repeat in itertools.product(requests, range(plan.repeats))
                if all((workload, way, repeat, request.request) in samples for way in (variant, plainly))
            }
            repeats = list(range(plan.repeats))
            if variant.concurrency is not None:
                repeats = [n for n in repeats if all((request.request, n) in complete for request in requests)]
            by_variant[workload, variant] = [
                RequestPairing(
                    group=request.row,
                    fast=tuple(samples[workload, variant, repeat, request.request] for repeat in repeats),
                    plain=tuple(samples[workload, plainly, repeat, request.request] for repeat in repeats),
                    request=request,
                    share=shares.get((workload, variant, request.request)),
                    plain_share=shares.get((workload, plainly, request.request)),
                )
                for request in requests
                if repeats and all((request.request, repeat) in complete for repeat in repeats)
            ]
    return by_variant


def by_repeat(requests: Sequence[RequestPairing]) -> list[Pairing]:
    """Turn pairings of requests over repeats into pairings of repeats over requests."""
    sides = ([pairing.fast for pairing in requests], [pairing.plain for pairing in requests])
    repeats = zip(*(zip(*side, strict=True) for side in sides), strict=True)
    return [Pairing(fast[0].repeat, fast, plain) for fast, plain in repeats]


def rows(folder: Folder) -> list[Row]:
    """Compute the figures of all workloads and variants with complete requests, in order."""
    return [
        _row(folder.plan, workload, variant, requests)
        for (workload, variant), requests in pairings(folder).items()
        if requests
    ]


def alone(rows: Iterable[Row]) -> list[Row]:
    """Select the rows of one request at a time."""
    return [row for row in rows if row.concurrency is None]


def concurrent(rows: Iterable[Row]) -> list[Row]:
    """Select the rows of many requests at once."""
    return [row for row in rows if row.concurrency is not None]


def of_workload(rows: Iterable[Row], workload: Workload) -> list[Row]:
    """Select a workload's rows."""
    return [row for row in rows if row.workload == workload]


def _row(plan: Plan, workload: Workload, variant: Variant, requests: Sequence[RequestPairing]) -> Row:
    repeats = by_repeat(requests)
    in_turns = variant.concurrency is None
    timed = np.array([repeat.sums for repeat in repeats if min(repeat.sums) > 0], np.float64).reshape(-1, 4)
    per_request = [_per_request(pairing) for pairing in requests] if in_turns else []
    compared = [figures.slower for figures in per_request if figures.slower is not None]
    parts = requests if in_turns else []
    return Row(
        workload=workload,
        variant=variant,
        label=plan.label(variant.at(None)),
        num_repeats=len(repeats),
        num_slower=sum(compared),
        num_compared=len(compared),
        tok_per_s_repeats=tuple(ratio(timed).tolist()),
        speedup_repeats=tuple(ratio_of_ratios(timed).tolist()),
        by_category=_parts(parts, lambda pairing: pairing.request.category or ""),
        by_bucket=_parts(parts, lambda pairing: plan.bucket(len(pairing.request.prompt_ids))),
        per_request=tuple(per_request),
        **_counted(requests, requests if in_turns else repeats),
    )


def _parts(requests: Sequence[RequestPairing], part: Callable[[RequestPairing], str]) -> tuple[Part, ...]:
    """Compute the figures of every part of the requests; none if there is only one part."""
    parts: dict[str, list[RequestPairing]] = {}
    for pairing in requests:
        parts.setdefault(part(pairing), []).append(pairing)
    if len(parts) < 2:
        return ()
    return tuple(Part(part=name, **_counted(parts[name], parts[name])) for name in sorted(parts, key=_natural))


def _natural(name: str) -> tuple[int, str]:
    head = name.partition(".")[0]
    return (int(head), name) if head.isdecimal() else (-1, name)


def _counted(requests: Sequence[RequestPairing], units: Sequence[Pairing]) -> dict[str, Any]:
    """Compute the fields of CountedFigures. units: what times are of, requests or repeats."""
    counters = total([pairing.counters for pairing in requests])
    outputs = [pairing.fast[0] for pairing in requests]
    equal = [
        fast.output_sha256 == plain.output_sha256
        for pairing in requests
        for fast, plain in zip(pairing.fast, pairing.plain, strict=True)
    ]
    calm = [pairing for pairing in requests if not pairing.loops]
    return {
        "prompt_tokens": float(np.median([len(pairing.request.prompt_ids) for pairing in requests])),
        "looping_frac": (len(requests) - len(calm)) / len(requests),
        "finished_frac": sum(output.finish_reason == "stop" for output in outputs) / len(requests),
        "output_tokens": sum(sample.output_tokens for pairing in requests for sample in pairing.fast),
        "num_spec_steps": counters.num_steps,
        "num_plain_steps": counters.num_plain_steps,
        "num_draft_tokens": counters.num_drafted,
        "num_accepted_draft_tokens": counters.num_accepted,
        "histogram": counters.histogram,
        "accepted_per_position": counters.accepted_per_position,
        "equal_to_plain_frac": sum(equal) / len(equal),
        # the time of many at once cannot be split among them
        "without_loops": Figures(**_figures(calm, calm if units is requests else [])),
        **_figures(requests, units),
    }


def _figures(requests: Sequence[RequestPairing], units: Sequence[Pairing]) -> dict[str, Any]:
    """Compute the fields of Figures. units: what times are of, requests or repeats."""
    drafted = [pairing for pairing in requests if pairing.counters.num_steps]
    timed = [unit for unit in units if min(unit.sums) > 0]
    stepped = [unit for unit in timed if not unit.concurrent]
    positions = range(len(drafted[0].counters.tried) if drafted else 0)

    def of_drafted(row: Callable[[Counters], Sequence[float]], statistic: Statistic) -> Estimate | None:
        return _estimate(_of(drafted, lambda pairing: row(pairing.counters), statistic))

    def median(value: Callable[[Sample], float | None]) -> Estimate | None:
        known = [(number, unit.group) for unit in units if (number := unit.median(value)) is not None]
        return estimate_median([number for number, _ in known], [group for _, group in known])

    step = _of(stepped, lambda unit: (unit.sums[1], unit.passes[0]), ratio)
    cycle = _of(stepped, lambda unit: (unit.sums[1], unit.passes[0], unit.sums[3], unit.passes[1]), ratio_of_ratios)
    return {
        "num_requests": len(requests),
        "acceptance_length": of_drafted(lambda c: (float(c.num_accepted), float(c.num_steps)), one_more_than_ratio),
        "acceptance_length_mean": of_drafted(lambda c: (1 + c.num_accepted / c.num_steps, 1.0), ratio),
        "rate_per_position": tuple(of_drafted(functools.partial(_accepted, i, tried=False), ratio) for i in positions),
        "conditional_rate": tuple(of_drafted(functools.partial(_accepted, i, tried=True), ratio) for i in positions),
        "tok_per_s": _estimate(_of(timed, lambda unit: unit.sums[:2], ratio)),
        "speedup": _estimate(_of(timed, lambda unit: unit.sums, ratio_of_ratios)),
        "speedup_median": estimate_median([unit.speedup for unit in timed], [unit.group for unit in timed]),
        "ttft_s": median(lambda sample: sample.ttft_s),
        "tpot_s": estimate_median(
            [_seconds_per_token(fast for fast, _ in unit.timed) for unit in timed if unit.timed],
            [unit.group for unit in timed if unit.timed],
        ),
        "itl_s": tuple(median(functools.partial(_wait, i)) for i in range(len(ITL_QUANTILES))),
        "tokens_per_step": _estimate(_of(stepped, lambda unit: (unit.sums[0], unit.passes[0]), ratio)),
        "step_s": _estimate(step),
        "plain_step_s": _estimate(_of(stepped, lambda unit: (unit.sums[3], unit.passes[1]), ratio)),
        "cycle_cost": _estimate(cycle),
        **_split(requests, [unit.group for unit in stepped], step, cycle),
        "bounds": _bounds(requests),
    }


def _bounds(requests: Sequence[RequestPairing]) -> dict[str, BoundFigures] | None:
    """Compute the bounds' acceptance length and first rate; None for greedy requests."""
    bounded = [(pairing.fast[0].bound, pairing.group) for pairing in requests if pairing.fast[0].bound is not None]
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


def _split(
    requests: Sequence[RequestPairing], groups: Sequence[int], step: Bootstrap | None, cycle: Bootstrap | None
) -> dict[str, Estimate | None]:
    """Split a step's time into parts, and compute v(T). groups: those of the times."""

    def fraction(
        pairings: Sequence[RequestPairing], row: Callable[[RequestPairing], Sequence[float]], statistic: Statistic
    ) -> Bootstrap | None:
        # for the same conversations use the draws of the times, since a slow conversation is slow in both
        same = [pairing.group for pairing in pairings] == list(groups)
        return _of(pairings, row, statistic, seed=0 if same else 1)

    def of_step(part: str) -> Estimate | None:
        return times(step, fraction(profiled, lambda pairing: _share(part, pairing.share), ratio))

    def times(left: Bootstrap | None, right: Bootstrap | None) -> Estimate | None:
        return None if left is None or right is None else left.times(right).estimate

    profiled = [pairing for pairing in requests if pairing.share is not None]
    # without `auto`, whose passes differ in their number of rows
    both = [pairing for pairing in profiled if pairing.plain_share and isinstance(pairing.fast[0].variant.k, int)]
    verified = fraction(
        both,
        lambda pairing: (*_share("verify_ms", pairing.share), *_share("verify_ms", pairing.plain_share)),
        ratio_of_ratios,
    )
    return {
        "draft_s": of_step("draft_ms"),
        "verify_s": of_step("verify_ms"),
        "host_s": of_step("other_ms"),
        "verify_cost": times(cycle, verified),
    }


def _share(part: str, share: Share | None) -> tuple[float, float]:
    """Return the milliseconds of the profiled steps (in a part, in all)."""
    assert share is not None
    whole = share.draft_ms + share.verify_ms + share.other_ms
    return share.num_steps * float(getattr(share, part)), share.num_steps * whole


def _per_request(pairing: RequestPairing) -> RequestFigures:
    """Compute one request's acceptance and speed-up.

    With three repeats or more, the speed-up has a 95 % t-interval: of the mean logarithm of the ratios of repeats.
    """
    counters, speedup = pairing.counters, None
    if pairing.timed:
        logs = np.log([_seconds_per_token([plain]) / _seconds_per_token([fast]) for fast, plain in pairing.timed])
        low = high = None
        if len(logs) > 2:
            half = stdtrit(len(logs) - 1, 0.975) * logs.std(ddof=1) / np.sqrt(len(logs)) if logs.std() > 0 else 0.0
            low, high = (float(np.exp(logs.mean() + side * half)) for side in (-1, 1))
        speedup = Estimate(pairing.speedup, low, high)
    return RequestFigures(
        request=pairing.request.request,
        prompt_tokens=len(pairing.request.prompt_ids),
        output_tokens=pairing.fast[0].output_tokens,
        loop_share=pairing.fast[0].loop_share,
        acceptance_length=counters.acceptance_length,
        num_spec_steps=counters.num_steps,
        speedup=speedup,
        slower=None if speedup is None or speedup.high is None else speedup.high < SLOWER,
    )


def _of(
    pairings: Sequence[AnyPairing], row: Callable[[AnyPairing], Sequence[float]], statistic: Statistic, seed: int = 0
) -> Bootstrap | None:
    """Bootstrap a statistic of a table with a row per pairing."""
    table = np.array([row(pairing) for pairing in pairings], np.float64)
    return bootstrap(table, statistic, [pairing.group for pairing in pairings], seed)


def _estimate(figure: Bootstrap | None) -> Estimate | None:
    return None if figure is None else figure.estimate


def _accepted(position: int, counters: Counters, *, tried: bool) -> tuple[float, float]:
    """Return (steps that accepted draft `position`, all steps or those that tried it)."""
    below = counters.tried[position] if tried else counters.num_steps
    return float(counters.accepted_per_position[position]), float(below)


def _wait(quantile: int, sample: Sample) -> float | None:
    return None if sample.itl_s is None else sample.itl_s[quantile]


def _seconds_per_token(samples: Iterable[Sample]) -> float:
    """Return the median seconds of a token after the first. Samples have two tokens or more."""
    return float(np.median([(sample.decode_s or 0.0) / (sample.output_tokens - 1) for sample in samples]))


def _in_turns(samples: Sequence[Sample]) -> tuple[float, float]:
    """Sum (tokens after the first, seconds) of requests that were decoded one at a time."""
    return float(sum(sample.output_tokens - 1 for sample in samples)), float(sum(s.decode_s or 0.0 for s in samples))


def _together(samples: Sequence[Sample]) -> tuple[float, float]:
    """Sum tokens after the first, and seconds in which at least one request was decoding.

    The requests were added at one time, from which ttft counts.
    """
    timed = [sample for sample in samples if sample.ttft_s is not None and sample.decode_s is not None]
    spans = [(sample.ttft_s or 0.0, (sample.ttft_s or 0.0) + (sample.decode_s or 0.0)) for sample in timed]
    return float(sum(sample.output_tokens - 1 for sample in timed)), busy_s(spans)


def best(rows: Iterable[Row]) -> Row | None:
    """Choose the row of the highest pooled speed-up in one workload, plain decoding included.

    Only of rows with all requests that plain decoding has; an `auto` that never drafted is plain decoding.
    """
    rows = [row for row in rows if row.speedup is not None]
    most = max((row.num_requests for row in rows), default=0)
    complete = [row for row in rows if row.num_requests == most and (row.k == 0 or row.num_spec_steps)]
    return max(complete, key=lambda row: row.speedup.value if row.speedup else 0.0, default=None)


def sure(row: Row) -> bool:
    """Test whether a row is significantly faster than plain decoding."""
    return row.speedup is not None and (row.speedup.low or 0.0) > 1
