"""Compute the figures of many requests from raw lines.

Counters and their ratios are in peagle.result.

Every figure is an Estimate: its value, and a 95 % interval by bootstrap over conversations (the turns of one and their
repeats stay together); fewer than FEWEST conversations have no interval. With n over requests:

    acceptance_length        1 + sum accepted_n / sum steps_n           (pooled; steps that verified drafts)
    acceptance_length_mean   mean of 1 + accepted_n / steps_n           (per request)
    rate_per_position[i]     sum steps accepting draft i / sum steps    (unconditional)
    conditional_rate[i]      the same / steps that verified draft i and accepted all before it
    tok_per_s                sum (tokens_n - 1) / sum decode_s_n
    speedup                  tok_per_s / plain decoding's of the same requests and repeats
    speedup_median           median of each request's (median seconds a token of plain decoding / of the arm)
    ttft_s, tpot_s           median over requests of the median over repeats
    itl_s                    quantiles .5, .9, .99 of a request's waits, the median of each over requests
    step_s                   sum decode_s / sum passes of the target
    tokens_per_step          sum (tokens_n - 1) / sum passes of the target: emitted tokens a pass, plain passes of
                             `auto` included
    cycle_cost, c(K)         step_s / plain decoding's step_s: a step in plain passes; speedup = tokens_per_step / c(K)
    draft_s, verify_s        step_s times the part's share of a step in some requests under the profiler
                             (peagle.measure.profile); host_s is the rest: accepting, committing, the runtime
                             between operations, the host
    verify_cost, v(T)        verify_s, a pass over T = K + 1 rows / plain decoding's, a pass over one
    bounds                   at a temperature: acceptance length and rate of the first draft that the law of acceptance
                             allows this drafter, and any (peagle.measure.bound)

A request loops if the loop share of any of the arm's repeats is above 0.3; `without_loops` has the same figures of the
other requests. `by_category` and `by_bucket` have them of parts of the requests. Only PROFILED conversations run under
the profiler: the intervals of their shares are wider, and missing if few of them are among the requests.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

from peagle.measure.metrics import total
from peagle.measure.sweep.folder import ITL_QUANTILES, Folder, Json, Sample, SweepRequest, arm_of
from peagle.measure.sweep.plan import AUTO, PLAIN, Arm, Plan, Setting
from peagle.result import LOOPING_ABOVE, Counters

RESAMPLES = 2000
FEWEST = 8  # conversations for a bootstrap interval
SHARES = {"draft": "draft_ms", "verify": "verify_ms", "host": "other_ms"}  # part of a step -> key in run.json
BOUNDS = ("one_hot", "sampled", "best")  # of peagle.measure.bound
SLOWER = 0.97  # a request is slower with speculation if its interval lies wholly below

Row = Mapping[str, Any]  # the figures of one arm in one setting, as JSON
Statistic = Callable[[np.ndarray], np.ndarray]  # sums of a table's columns [R, c] -> [R]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval, or none if there are too few conversations."""

    value: float
    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True)
class Bootstrap:
    """A figure, and its values in RESAMPLES draws of conversations; None if there are too few."""

    value: float
    draws: np.ndarray | None

    @property
    def estimate(self) -> Estimate:
        if self.draws is None or np.isinf(self.draws).any():  # infinite if a draw's denominator is zero
            return Estimate(self.value, None, None)
        low, high = np.nanquantile(self.draws, (0.025, 0.975))
        return Estimate(self.value, float(low), float(high))

    def times(self, other: "Bootstrap") -> "Bootstrap":
        if self.draws is None or other.draws is None:
            return Bootstrap(self.value * other.value, None)
        with np.errstate(invalid="ignore"):  # infinity times zero: see `estimate`
            return Bootstrap(self.value * other.value, self.draws * other.draws)


def bootstrap(
    table: np.ndarray, statistic: Statistic, groups: Sequence[int] | None = None, seed: int = 0
) -> Bootstrap | None:
    """Bootstrap a statistic of the sums of a table's [n, c] columns; None if it is not a number.

    The table has a row per request; groups[i] is its conversation (None: one request each). Draws are the same for the
    same seed and number of conversations.
    """
    if not len(table):
        return None
    names, group_of = np.unique(np.arange(len(table)) if groups is None else groups, return_inverse=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(table.sum(axis=0)[None])[0])
        if not np.isfinite(value):
            return None
        if len(names) < FEWEST:
            return Bootstrap(value, None)
        sums = np.zeros((len(names), table.shape[1]))
        np.add.at(sums, group_of, table)
        return Bootstrap(value, statistic(_times_drawn(len(names), seed) @ sums))


def estimate(table: np.ndarray, statistic: Statistic, groups: Sequence[int] | None = None) -> Estimate | None:
    """Return the estimate of `bootstrap`."""
    found = bootstrap(table, statistic, groups)
    return None if found is None else found.estimate


def estimate_median(values: Sequence[float], groups: Sequence[int]) -> Estimate | None:
    """Estimate the median of a value per request; groups[i] is its conversation.

    None without values.
    """
    if not values:
        return None
    names, group_of = np.unique(groups, return_inverse=True)
    if len(names) < FEWEST:
        return Estimate(float(np.median(values)), None, None)
    order = np.argsort(values)
    ordered, weights = np.asarray(values)[order], _times_drawn(len(names), 0)[:, group_of[order]].cumsum(axis=1)
    # a draw's median is the mean of its two middle values: the first with a cumulative weight of at least half, and the
    # first with more than half
    half = weights[:, -1:] / 2
    lower, upper = (weights >= half).argmax(axis=1), (weights > half).argmax(axis=1)
    return Bootstrap(float(np.median(values)), (ordered[lower] + ordered[upper]) / 2).estimate


@functools.lru_cache(maxsize=32)
def _times_drawn(num_groups: int, seed: int) -> np.ndarray:
    """Draw num_groups groups with replacement, and count each; [RESAMPLES, num_groups]."""
    picks = np.random.default_rng(seed).integers(0, num_groups, (RESAMPLES, num_groups))
    found = np.zeros((RESAMPLES, num_groups))
    np.add.at(found, (np.arange(RESAMPLES)[:, None], picks), 1)
    return found


def ratio(sums: np.ndarray) -> np.ndarray:
    """Divide column 0 by column 1."""
    return sums[:, 0] / sums[:, 1]


def one_more_than_ratio(sums: np.ndarray) -> np.ndarray:
    return 1 + ratio(sums)


def ratio_of_ratios(sums: np.ndarray) -> np.ndarray:
    """Compute (column 0 / column 1) / (column 2 / column 3)."""
    return ratio(sums[:, :2]) / ratio(sums[:, 2:])


@dataclasses.dataclass(frozen=True)
class Pairing:
    """All repeats of one request by an arm, and by plain decoding."""

    asked: SweepRequest
    fast: tuple[Sample, ...]
    plain: tuple[Sample, ...]
    share: Json  # the profile of its steps (SHARES); empty if there is none
    plain_share: Json

    @property
    def loops(self) -> bool:
        """Whether the arm's output loops, in any repeat."""
        return any((sample.loop_share or 0.0) > LOOPING_ABOVE for sample in self.fast)

    @functools.cached_property
    def counters(self) -> Counters:
        return total([sample.counters for sample in self.fast])

    @functools.cached_property
    def timed(self) -> tuple[tuple[Sample, Sample], ...]:
        """Repeats in which both have a time of two tokens or more."""
        pairs = zip(self.fast, self.plain, strict=True)
        return tuple((f, p) for f, p in pairs if all(s.output_tokens > 1 and s.decode_s for s in (f, p)))


def pairings(folder: Folder) -> dict[tuple[Setting, Arm], list[Pairing]]:
    """Pair requests with plain decoding by setting and arm, in order; only those with all repeats."""
    plan, prompts = folder.plan, folder.asked()
    if prompts is None:
        return {}
    by_key: dict[tuple[Setting, Arm], dict[int, dict[int, Sample]]] = {}
    for sample in folder.samples():
        by_key.setdefault((sample.setting, sample.arm), {}).setdefault(sample.request, {})[sample.repeat] = sample
    shares = {(*arm_of(share), share["request"]): share for share in folder.record["shares"] if "why_not" not in share}
    found = {}
    for setting, arm in itertools.product(plan.settings, plan.arms):
        fast, plain = by_key.get((setting, arm), {}), by_key.get((setting, PLAIN), {})
        asked = [each for each in prompts[0] if (each.prompts, each.raw) == (setting.prompts, setting.raw)]
        found[setting, arm] = [
            Pairing(
                each,
                fast=tuple(fast[each.request][repeat] for repeat in range(plan.repeats)),
                plain=tuple(plain[each.request][repeat] for repeat in range(plan.repeats)),
                share=shares.get((setting, arm, each.request), {}),
                plain_share=shares.get((setting, PLAIN, each.request), {}),
            )
            for each in asked
            if all(len(of.get(each.request, {})) == plan.repeats for of in (fast, plain))
        ]
    return found


def rows(folder: Folder) -> list[dict[str, Any]]:
    """Compute the figures of every setting and arm that has complete requests."""
    return [_row(folder.plan, setting, arm, some) for (setting, arm), some in pairings(folder).items() if some]


def _row(plan: Plan, setting: Setting, arm: Arm, some: Sequence[Pairing]) -> dict[str, Any]:
    requests = [_per_request(each) for each in some]
    compared = [each["slower"] for each in requests if each["slower"] is not None]
    whole = {
        **dataclasses.asdict(setting),
        **dataclasses.asdict(arm),
        "label": plan.label(arm),
        **_all_figures(some),
        "num_slower": sum(compared),
        "num_compared": len(compared),  # requests with enough repeats for an interval
        "by_category": _parts(some, lambda each: each.asked.category),
        "by_bucket": _parts(some, lambda each: plan.bucket(len(each.asked.prompt_ids))),
        "per_request": requests,
    }
    return json_ready(whole)


def _all_figures(some: Sequence[Pairing]) -> dict[str, Any]:
    without_loops = [each for each in some if not each.loops]
    return {
        **_counts(some),
        **_figures(some),
        "without_loops": {"num_requests": len(without_loops), **_figures(without_loops)},
    }


def _counts(some: Sequence[Pairing]) -> dict[str, Any]:
    counters = total([each.counters for each in some])
    outputs = [each.fast[0] for each in some]
    equal = [f.output_sha256 == p.output_sha256 for each in some for f, p in zip(each.fast, each.plain, strict=True)]
    return {
        "num_requests": len(some),
        "prompt_tokens": float(np.median([len(each.asked.prompt_ids) for each in some])),
        "looping_frac": sum(each.loops for each in some) / len(some),
        "finished_frac": sum(output.finish_reason == "stop" for output in outputs) / len(some),
        "output_tokens": sum(sample.output_tokens for each in some for sample in each.fast),
        "num_spec_steps": counters.num_steps,
        "num_plain_steps": counters.num_plain_steps,
        "num_draft_tokens": counters.num_drafted,
        "num_accepted_draft_tokens": counters.num_accepted,
        "histogram": list(counters.histogram),
        "accepted_per_position": list(counters.accepted_per_position),
        "equal_to_plain_frac": sum(equal) / len(equal),
    }


def _figures(some: Sequence[Pairing]) -> dict[str, Any]:
    drafted = [(each, counters) for each in some if (counters := each.counters).num_steps]
    timed = [each for each in some if each.timed]
    drafted_rows, timed_rows = [each.asked.row for each, _ in drafted], [each.asked.row for each in timed]
    positions = range(len(drafted[0][1].tried) if drafted else 0)

    def of_drafted(row: Callable[[Counters], Sequence[float]], statistic: Statistic) -> Estimate | None:
        return estimate(_table(row(counters) for _, counters in drafted), statistic, drafted_rows)

    def of_timed(row: Callable[[Pairing], Sequence[float]], statistic: Statistic) -> Bootstrap | None:
        return bootstrap(_table(map(row, timed)), statistic, timed_rows)

    def of_all(value: Callable[[Pairing], float | None]) -> Estimate | None:
        known = [(found, each.asked.row) for each in some if (found := value(each)) is not None]
        return estimate_median([found for found, _ in known], [row for _, row in known])

    step = of_timed(lambda each: (timed_sums(each)[1], _passes(each)[0]), ratio)
    cycle_cost = of_timed(
        lambda each: (timed_sums(each)[1], _passes(each)[0], timed_sums(each)[3], _passes(each)[1]), ratio_of_ratios
    )
    pooled = {
        "tokens_per_step": of_timed(lambda each: (timed_sums(each)[0], _passes(each)[0]), ratio),
        "tok_per_s": of_timed(lambda each: timed_sums(each)[:2], ratio),
        "speedup": of_timed(timed_sums, ratio_of_ratios),
        "step_s": step,
        "plain_step_s": of_timed(lambda each: (timed_sums(each)[3], _passes(each)[1]), ratio),
        "cycle_cost": cycle_cost,
        **_split(some, timed_rows, step, cycle_cost),
    }
    return {
        "acceptance_length": of_drafted(lambda c: (float(c.num_accepted), float(c.num_steps)), one_more_than_ratio),
        "acceptance_length_mean": of_drafted(lambda c: (1 + c.num_accepted / c.num_steps, 1.0), ratio),
        "rate_per_position": [of_drafted(functools.partial(_accepted, i, tried=False), ratio) for i in positions],
        "conditional_rate": [of_drafted(functools.partial(_accepted, i, tried=True), ratio) for i in positions],
        **{name: None if found is None else found.estimate for name, found in pooled.items()},
        "speedup_median": estimate_median([_speedup(each) for each in timed], timed_rows),
        "ttft_s": of_all(lambda each: _median(s.ttft_s for s in each.fast)),
        "tpot_s": estimate_median([_seconds_per_token(each.timed)[0] for each in timed], timed_rows),
        "itl_s": [of_all(functools.partial(_wait, i)) for i in range(len(ITL_QUANTILES))],
        "bounds": _bounds(some),
    }


def _bounds(some: Sequence[Pairing]) -> dict[str, dict[str, Estimate | None]] | None:
    """Compute of each bound the acceptance length and the rate of the first draft; None for greedy requests."""
    found = [(each.asked.row, each.fast[0].bound) for each in some if each.fast[0].bound]
    if not found:
        return None
    rows = [row for row, _ in found]

    def of(name: str) -> dict[str, Estimate | None]:
        if any(each[name] is None for _, each in found):
            return {"length": None, "first": None}
        table = _table([*each["tried"], *each[name]] for _, each in found)
        k = table.shape[1] // 2
        return {"length": estimate(table, length_by_rates, rows), "first": estimate(table[:, [k, 0]], ratio, rows)}

    return {name: of(name) for name in BOUNDS}


def length_by_rates(sums: np.ndarray) -> np.ndarray:
    """Compute the acceptance length from sums [R, 2K]: places of each draft, then of its rates there.

    It is 1 + v_1 + v_1 v_2 + ..., v_i the mean rate of draft i where all before it were accepted.
    """
    tried, total = np.split(sums, 2, axis=1)
    rates = np.divide(total, tried, out=np.zeros_like(total), where=tried > 0)
    length: np.ndarray = 1 + np.cumprod(rates, axis=1).sum(axis=1)
    return length


def _accepted(position: int, counters: Counters, *, tried: bool) -> tuple[float, float]:
    """Return (steps that accepted draft `position`; all steps, or those that accepted all before)."""
    below = counters.tried[position] if tried else counters.num_steps
    return float(counters.accepted_per_position[position]), float(below)


def _wait(quantile: int, each: Pairing) -> float | None:
    return _median(sample.itl_s[quantile] if sample.itl_s else None for sample in each.fast)


def _passes(each: Pairing) -> tuple[float, float]:
    """Count passes of the target in the timed repeats: (of the arm, of plain decoding)."""
    fast, plain = (float(sum(pair[side].num_steps for pair in each.timed)) for side in (0, 1))
    return fast, plain


def _speedup(each: Pairing) -> float:
    """Divide plain decoding's seconds a token by the arm's, medians over repeats."""
    fast, plain = _seconds_per_token(each.timed)
    return plain / fast


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _table(rows: Iterable[Sequence[float]]) -> np.ndarray:
    return np.array(list(rows), np.float64)


def timed_sums(each: Pairing) -> tuple[float, float, float, float]:
    """Sum (tokens after the first, seconds) of the arm, then of plain decoding."""
    fast, plain = (_sums([pair[side] for pair in each.timed]) for side in (0, 1))
    return *fast, *plain


def _sums(samples: Sequence[Sample]) -> tuple[float, float]:
    return float(sum(s.output_tokens - 1 for s in samples)), sum((s.decode_s or 0.0 for s in samples), start=0.0)


def _seconds_per_token(timed: Sequence[tuple[Sample, Sample]]) -> list[float]:
    """Return seconds a token of (the arm, plain decoding), medians over repeats."""
    return [float(np.median([s.seconds_per_token for s in samples])) for samples in zip(*timed, strict=True)]


def _per_request(each: Pairing) -> dict[str, Any]:
    """Compute one request's acceptance and speed-up.

    With three repeats or more, the speed-up has a 95 % t-interval: of the mean logarithm of the ratios of repeats.
    """
    counters, speedup = each.counters, None
    if each.timed:
        logs = np.log([plain.seconds_per_token / fast.seconds_per_token for fast, plain in each.timed])
        low = high = None
        if len(logs) > 2:
            half = stdtrit(len(logs) - 1, 0.975) * logs.std(ddof=1) / np.sqrt(len(logs)) if logs.std() > 0 else 0.0
            low, high = (float(np.exp(logs.mean() + side * half)) for side in (-1, 1))
        speedup = Estimate(_speedup(each), low, high)
    return {
        "request": each.asked.request,
        "prompt_tokens": len(each.asked.prompt_ids),
        "output_tokens": each.fast[0].output_tokens,
        "loop_share": each.fast[0].loop_share,
        "acceptance_length": counters.acceptance_length,
        "num_spec_steps": counters.num_steps,
        "speedup": speedup,
        "slower": None if speedup is None or speedup.high is None else speedup.high < SLOWER,
    }


def _parts(some: Sequence[Pairing], part: Callable[[Pairing], str | None]) -> list[dict[str, Any]]:
    """Compute the figures of each part of the requests; [] if there is only one part."""
    inside: dict[str, list[Pairing]] = {}
    for each in some:
        inside.setdefault(part(each) or "", []).append(each)
    if len(inside) < 2:
        return []
    return [{"part": name, **_all_figures(inside[name])} for name in sorted(inside, key=_natural)]


def _natural(name: str) -> tuple[int, str]:
    head = name.partition(".")[0]
    return (int(head), name) if head.isdecimal() else (-1, name)


def _split(
    some: Sequence[Pairing], timed_rows: Sequence[int], step: Bootstrap | None, cycle_cost: Bootstrap | None
) -> dict[str, Bootstrap | None]:
    """Split a step's time into parts, and compute v(T); None without profiles."""

    def fraction(
        of: Sequence[Pairing], row: Callable[[Pairing], Sequence[float]], statistic: Statistic
    ) -> Bootstrap | None:
        rows = [each.asked.row for each in of]
        # for the same conversations use the draws of the times, since a slow conversation is slow in both
        return bootstrap(_table(map(row, of)), statistic, rows, seed=0 if rows == timed_rows else 1)

    def of_step(part: str) -> Bootstrap | None:
        return times(step, fraction(profiled, lambda each: _share(part, each.share), ratio))

    def times(left: Bootstrap | None, right: Bootstrap | None) -> Bootstrap | None:
        return left.times(right) if left is not None and right is not None else None

    profiled = [each for each in some if each.share]
    # without `auto`, whose passes differ in their number of rows
    both = [each for each in profiled if each.plain_share and each.share["k"] != AUTO]
    over_plain = fraction(
        both, lambda each: (*_share("verify", each.share), *_share("verify", each.plain_share)), ratio_of_ratios
    )
    return {**{f"{part}_s": of_step(part) for part in SHARES}, "verify_cost": times(cycle_cost, over_plain)}


def _share(part: str, share: Json) -> tuple[float, float]:
    """Return the milliseconds of the profiled steps (in a part, in all)."""
    steps = share["num_steps"]
    return steps * share[SHARES[part]], steps * sum(share[name] for name in SHARES.values())


def best(rows: Sequence[Row]) -> Row | None:
    """Choose the row of the highest pooled speed-up in one setting, plain decoding included.

    Only of rows with all requests that plain decoding has.
    """
    most = max((row["num_requests"] for row in rows), default=0)
    complete = [
        row
        for row in rows
        if row["speedup"] is not None
        and row["num_requests"] == most
        and (row["k"] == 0 or row["num_spec_steps"])  # an `auto` that never drafted is plain decoding
    ]
    return max(complete, key=lambda row: row["speedup"]["value"], default=None)


def sure(row: Row) -> bool:
    """Test whether a row is significantly faster than plain decoding."""
    return (row["speedup"]["low"] or 0.0) > 1


def json_ready(value: Any) -> Any:
    """Replace estimates by dicts."""
    if isinstance(value, Estimate):
        return dataclasses.asdict(value)
    if isinstance(value, dict):
        return {name: json_ready(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return value
