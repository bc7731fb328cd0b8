"""Report a benchmark of `peagle bench`: as JSON, and as a table with its heading and legend."""

import dataclasses
from typing import Any

from peagle.base.memory import tree_bytes
from peagle.base.sizes import format_size
from peagle.loading.load import local_model
from peagle.measure import reports
from peagle.measure.bench import Bench, BenchOptions, Case, Measurement, WeightBytes
from peagle.measure.metrics import figure_text
from peagle.pair import Pair
from peagle.workflows.run_report import LOADED, SCHEMA

LEGEND = (
    "Medians (min..max). tg and verify: after @ tokens of context. v(T): time of a pass over T rows divided by that "
    "over one row; floor: v(T) if reading weights were the only cost and routing were even. GB/s: weights read while "
    "decoding."
)
LEGEND_OVER_ONE_SLOT = (
    " tok/s: total over all slots, while all are active; over 1 slot: divided by that of one slot. 1 of N slots: one "
    "request in an engine of N slots, whose idle slots should cost nothing."
)
LEGEND_COST = (
    " K: each slot drafts K tokens and verifies K + 1 rows; all drafts are rejected, so that positions are those of "
    "plain steps. c(K): time of such a step divided by that of a plain one, at the same number of slots."
)


def weight_bytes(pair: Pair) -> WeightBytes:
    target = local_model(pair.plain_target)
    params, config = target.params, target.config
    experts = tree_bytes([layer.moe.experts for layer in params.layers])
    return WeightBytes(
        dense=tree_bytes(params) - tree_bytes(params.embedding) - experts,
        experts=experts,
        num_experts=config.num_experts,
        experts_per_token=config.num_experts if pair.loaded.experts == "fused" else config.top_k,
    )


def bench_report(
    measured: Bench,
    pair: Pair,
    weights: WeightBytes,
    names: tuple[str, str | None],
    provenance: dict[str, Any],
    peak: int | None,
) -> dict[str, Any]:
    """Make the object of --json; an absent value is null. names: target and drafter."""
    return {
        "schema": SCHEMA,
        "provenance": provenance,
        "config": {
            "command": "bench",
            "target": names[0],
            "drafter": names[1],
            **dataclasses.asdict(measured.options),
            **{name: getattr(pair.loaded, name) for name in LOADED},
            "steps_per_dispatch": pair.steps_per_dispatch,
            "interrupted": measured.interrupted,
        },
        "weight_bytes": dataclasses.asdict(weights),
        "tests": [_test_block(measurement, measured, weights) for measurement in measured.measurements],
        "peak_memory_bytes": peak,
    }


def legend(options: BenchOptions) -> str:
    """Explain the columns of the table."""
    return LEGEND + LEGEND_OVER_ONE_SLOT * _compares_slots(options) + LEGEND_COST * bool(options.drafts)


def _test_block(measurement: Measurement, measured: Bench, weights: WeightBytes) -> dict[str, Any]:
    case, verify = measurement.case, measurement.case.kind == "verify"
    counts_tokens = not verify and not case.num_drafts  # a real drafted step emits more tokens than this one
    reads_weights = case.kind == "tg" and not case.num_drafts
    weight_rate = weights.read(case.active) / measurement.ms_per_pass.median / 1e6 if reads_weights else None
    return {
        "kind": case.kind,
        "size": case.size,
        "context": 0 if case.kind == "pp" else measured.options.context,
        "slots": case.slots,
        "active": case.active,
        "num_speculative_tokens": case.num_drafts,
        "num_passes": measurement.passes,
        "num_tokens": measurement.num_tokens,
        "seconds": list(measurement.seconds),
        "tok_per_s": dataclasses.asdict(measurement.tok_per_s) if counts_tokens else None,
        "ms_per_pass": dataclasses.asdict(measurement.ms_per_pass),
        "v": measured.v(measurement),
        "v_floor": weights.floor(case.size, case.slots) if verify else None,
        "weight_gb_per_s": weight_rate,
        "over_one_slot": measured.over_one_slot(measurement),
        "cost": measured.cost(measurement),
    }


def _compares_slots(options: BenchOptions) -> bool:
    return len(set(options.slots)) > 1


def _test_name(case: Case, options: BenchOptions) -> str:
    name = f"{case.kind} {case.size}" + ("" if case.kind == "pp" else f" @ {options.context}")
    if case.kind == "tg" and _compares_slots(options):
        name += f", 1 of {case.slots} slots" if case.idle else f", {case.slots} slot{'s' * (case.slots > 1)}"
    return name + (f", K = {case.num_drafts}" if case.num_drafts else "")


def table(measured: Bench, weights: WeightBytes) -> reports.Table:
    options, rows = measured.options, []
    figures = {"v(T)": "v", "floor": "v_floor", "GB/s": "weight_gb_per_s"}  # caption: key of the JSON
    figures |= {"over 1 slot": "over_one_slot"} if _compares_slots(options) else {}
    figures |= {"c(K)": "cost"} if options.drafts else {}
    for measurement in measured.measurements:
        block = _test_block(measurement, measured, weights)
        rows.append(
            (
                _test_name(measurement.case, options),
                "-" if block["tok_per_s"] is None else measurement.tok_per_s.text(_number),
                measurement.ms_per_pass.text(_number),
                *(_number(block[key]) for key in figures.values()),
            )
        )
    return reports.Table(("test", "tok/s", "ms/pass", *figures), rows)


def heading(measured: Bench, weights: WeightBytes, report: dict[str, Any]) -> list[str]:
    config, origin, options = report["config"], report["provenance"], measured.options
    packages = ", ".join(f"{name} {origin['packages'][name]}" for name in ("peagle", "jax"))
    device = origin["device"]
    where = origin["cpu"] or "CPU" if device["platform"] == "cpu" else device["kind"]
    drafter = "" if config["drafter"] is None else f" with the drafter {config['drafter']}"
    repeats = f"{options.repeats} repeats" + (", interrupted" if measured.interrupted else "")
    return [
        f"{config['target']}{drafter}: {config['dtype']} arithmetic, {config['experts']} experts, kernels "
        f"{config['kernels']}; "
        f"{format_size(weights.dense + weights.experts)} of weights without the embedding, "
        f"{format_size(round(weights.read(1)))} read per token",
        f"{where}, {origin['num_threads']} threads; {packages}; slots {', '.join(map(str, options.slots))}, {repeats}",
    ]


def _number(value: float | None) -> str:
    """Format three significant digits or more, without an exponent."""
    return figure_text(value, ",.0f" if value and value >= 1000 else ".1f" if value and value >= 100 else ".3g")
