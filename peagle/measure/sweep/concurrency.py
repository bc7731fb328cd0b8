"""Compute figures of many requests at once, by arm and number of slots.

A load is all requests of a setting, decoded by an arm in that many slots, once per repetition. All requests are added
together and wait for a slot; one that ends is replaced at the next dispatch. An Estimate's interval is by bootstrap:

    tok_per_s           sum (tokens - 1) / seconds in which at least one request was between its first and last token
    speedup             tok_per_s / plain decoding's with the same slots, in the same repetitions
    speedup_median      median of the repetitions' ratios
    ttft_s, itl_s       median over repetitions of the median over requests. ttft counts from the moment the requests
                        were added: it includes the wait for a slot
    acceptance_length   1 + sum accepted / sum steps

Requests of a load share the time, so figures of time resample whole repetitions; fewer than FEWEST have no interval,
only the least and the greatest repetition. Acceptance length depends only on the text, so it resamples conversations.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from peagle.engine.widths import WidthTable
from peagle.measure.metrics import busy_s, total
from peagle.measure.sweep.figures import (
    Estimate,
    estimate,
    estimate_median,
    json_ready,
    one_more_than_ratio,
    ratio,
    ratio_of_ratios,
)
from peagle.measure.sweep.folder import ITL_QUANTILES, Folder, Sample
from peagle.measure.sweep.plan import AUTO, PLAIN, Arm, Plan, Setting

RULE = (
    "at each number of active requests, the K of the highest total tokens a second, by the median over greedy "
    "workloads and repetitions of the ratio to plain decoding of as many requests at once; 0 if that median is not "
    "above 1; requests with a temperature draft if one of them gains by some K in workloads with a temperature"
)

Row = Mapping[str, Any]  # the figures of one arm with one number of slots in one setting, as JSON
Load = Sequence[Sample]  # every request of a setting, in order


def rows(folder: Folder) -> list[dict[str, Any]]:
    """Compute the figures of every setting, number of slots and arm from complete repetitions."""
    plan, prompts = folder.plan, folder.asked()
    if prompts is None or not plan.loads:
        return []
    found: dict[tuple[Setting, Arm, int], dict[int, Sample]] = {}
    for sample in folder.samples():
        found.setdefault((sample.setting, sample.arm, sample.repeat), {})[sample.request] = sample
    made = []
    for setting, arm in itertools.product(plan.settings, plan.loads):
        asked = [each for each in prompts[0] if (each.prompts, each.raw) == (setting.prompts, setting.raw)]
        plain_arm = dataclasses.replace(PLAIN, concurrency=arm.concurrency)
        fast, plain = (
            {
                repeat: [some[each.request] for each in asked]
                for repeat in range(plan.repeats)
                if all(each.request in (some := found.get((setting, of, repeat), {})) for each in asked)
            }
            for of in (arm, plain_arm)
        )
        both = [(fast[repeat], plain[repeat]) for repeat in fast if repeat in plain]
        if asked and both:
            made.append(_row(plan, setting, arm, both, [each.row for each in asked]))
    return made


def ratios(loads: Sequence[Row]) -> dict[int, dict[int, float]]:
    """Compute median ratios to plain decoding over settings and repetitions: {slots: {K: ratio}}.

    Only for fixed K that succeeded in all settings.
    """
    found: dict[int, dict[int, float]] = {}
    for slots in dict.fromkeys(row["concurrency"] for row in loads):
        mine = [row for row in loads if row["concurrency"] == slots and row["speedup_repeats"]]
        num_settings = sum(row["k"] == 0 for row in mine)
        of = {k: [row for row in mine if row["k"] == k] for k in dict.fromkeys(row["k"] for row in mine)}
        found[slots] = {
            k: float(np.median([each for row in some for each in row["speedup_repeats"]]))
            for k, some in of.items()
            if k not in (0, AUTO) and len(some) == num_settings
        }
    return {slots: some for slots, some in found.items() if some}


def best_table(loads: Sequence[Row]) -> WidthTable | None:
    """Choose the drafts to make by RULE. None without figures of one request by some K.

    If all settings have a temperature, the drafts are theirs; if none has, requests with one draft, too.
    """
    greedy, sampled = (ratios([row for row in loads if (row["temperature"] > 0) == hot]) for hot in (False, True))
    found = greedy or sampled
    if 1 not in found:
        return None
    best = {slots: max(some, key=lambda k: some[k]) for slots, some in found.items()}
    drafts = {slots: k if found[slots][k] > 1 else 0 for slots, k in best.items()}
    return WidthTable(drafts, sampled=1 not in sampled or max(sampled[1].values()) > 1)


def _row(
    plan: Plan, setting: Setting, arm: Arm, both: Sequence[tuple[Load, Load]], conversations: Sequence[int]
) -> dict[str, Any]:
    """Compute the figures of one arm.

    `both`: the loads (arm, plain decoding) of each repetition.
    """
    fast = [load for load, _ in both]
    sums = np.array([(*_tokens_and_seconds(load), *_tokens_and_seconds(plain)) for load, plain in both], np.float64)
    timed = sums[(sums > 0).all(axis=1)]
    rates, speedups = ratio(timed).tolist(), ratio_of_ratios(timed).tolist()
    equal = [f.output_sha256 == p.output_sha256 for load, plain in both for f, p in zip(load, plain, strict=True)]
    return json_ready(
        {
            **dataclasses.asdict(setting),
            **dataclasses.asdict(arm),
            "label": plan.label(dataclasses.replace(arm, concurrency=None)),
            "num_requests": len(conversations),
            "num_repeats": len(both),
            "tok_per_s": estimate(timed[:, :2], ratio),
            "tok_per_s_repeats": rates,
            "speedup": estimate(timed, ratio_of_ratios),
            "speedup_median": estimate_median(speedups, range(len(speedups))),
            "speedup_repeats": speedups,
            "ttft_s": _of_loads(fast, lambda sample: sample.ttft_s),
            "itl_s": [_of_loads(fast, _wait(place)) for place in range(len(ITL_QUANTILES))],
            "acceptance_length": _acceptance_length(fast, conversations),
            "num_spec_steps": sum(sample.counters.num_steps for load in fast for sample in load),
            "num_plain_steps": sum(sample.num_plain_steps for load in fast for sample in load),
            "equal_to_plain_frac": sum(equal) / len(equal),
        }
    )


def _tokens_and_seconds(load: Load) -> tuple[float, float]:
    """Return (tokens after each request's first, seconds in which at least one was decoding).

    All requests of a load were added at one time, from which ttft counts.
    """
    timed = [each for each in load if each.ttft_s is not None and each.decode_s is not None]
    spans = [(each.ttft_s or 0.0, (each.ttft_s or 0.0) + (each.decode_s or 0.0)) for each in timed]
    return float(sum(each.output_tokens - 1 for each in timed)), busy_s(spans)


def _of_loads(loads: Sequence[Load], value: Callable[[Sample], float | None]) -> Estimate | None:
    """Estimate the median over repetitions of the median over requests."""
    each = [[found for sample in load if (found := value(sample)) is not None] for load in loads]
    medians = [float(np.median(some)) for some in each if some]
    return estimate_median(medians, range(len(medians)))


def _wait(quantile: int) -> Callable[[Sample], float | None]:
    return lambda sample: None if sample.itl_s is None else sample.itl_s[quantile]


def _acceptance_length(loads: Sequence[Load], conversations: Sequence[int]) -> Estimate | None:
    """Estimate acceptance length over conversations; repetitions and turns of one stay together."""
    pooled = [total([sample.counters for sample in request]) for request in zip(*loads, strict=True)]
    drafted = [(each, row) for each, row in zip(pooled, conversations, strict=True) if each.num_steps]
    table = [(float(each.num_accepted), float(each.num_steps)) for each, _ in drafted]
    return estimate(np.array(table, np.float64), one_more_than_ratio, [row for _, row in drafted])
