"""Run `peagle bench`: check, load, measure, print and write the table."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement as Width
from rich.table import Table

from peagle.checkpoints import drafter_path, or_demo, resolve
from peagle.cli.bench import BenchCommand
from peagle.cli.display import Display
from peagle.cli.models import load_pair
from peagle.cli.output import STANDARD_OUTPUT, output_file, wrapped
from peagle.cli.results import LOADED, SCHEMA, dumps
from peagle.fit import check_fit
from peagle.loading import local_model
from peagle.measure import reports
from peagle.measure.bench import Bench, BenchOptions, Case, Measurement, Stage, WeightBytes, bench
from peagle.measure.metrics import figure_text
from peagle.measure.provenance import peak_memory_bytes, provenance
from peagle.ops import interrupt
from peagle.ops.errors import InputError
from peagle.ops.memory import format_size, tree_bytes
from peagle.pair import Pair
from peagle.parallel import refuse_replicas
from target.load import inspect_target

MAY_BE_NONE = ("prompt_lengths", "new_tokens")
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


def time_target(settings: BenchCommand) -> int:
    """Run the benchmark, print its table, and return the exit code.

    The table goes to standard error if --json or --markdown goes to standard output.
    """
    options = _options(settings)
    json_file = output_file(settings.json, "--json")
    markdown_file = output_file(settings.markdown, "--markdown")
    if json_file is not None and markdown_file is not None and json_file.path == markdown_file.path:
        raise InputError(f"--json and --markdown both name {settings.json}; expected two files")
    refuse_replicas(settings.load.mesh, "peagle bench measures one replica")
    name = or_demo(settings.target)
    drafter = None if settings.num_speculative_tokens is None else or_demo(settings.load.drafter)
    if settings.load.drafter is not None and drafter is None:
        raise InputError("--drafter is given without -k, the number of drafts to measure; give both, or neither")
    if (directory := drafter_path(name, drafter)) is not None:
        check_fit(resolve(name, "target"), directory)
    options.check(inspect_target(resolve(name, "target")).config.max_positions)

    display = Display()
    pair = load_pair(name, drafter, settings.load, display)

    def progress(stage: Stage, done: int, total: int, left_s: float | None) -> None:
        display.begin_run(stage, done, total, left_s, "test" if stage == "compiling" else "run")

    measured = bench(pair, options, progress)
    display.clear()

    weights = weight_bytes(pair)
    report = bench_report(measured, pair, weights, (name, drafter), provenance(), peak_memory_bytes())
    heading, table = _heading(measured, weights, report), _table(measured, weights)
    legend = LEGEND + LEGEND_OVER_ONE_SLOT * _compares_slots(options) + LEGEND_COST * bool(options.drafts)
    if json_file is not None:
        json_file.write(dumps(report))
    if markdown_file is not None:
        command = f"`{' '.join(report['provenance']['command'])}`"
        markdown_file.write(reports.markdown([*heading, table, legend, command]))
    if settings.markdown != STANDARD_OUTPUT or not sys.stdout.isatty():  # otherwise Markdown is on the screen already
        _show(heading, table, legend, to_stderr=STANDARD_OUTPUT in (settings.json, settings.markdown))
    return interrupt.EXIT_CODE if measured.interrupted else 0


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


def _options(settings: BenchCommand) -> BenchOptions:
    def numbers(name: str) -> tuple[int, ...]:
        typed = getattr(settings, name)
        if typed is None or (name in MAY_BE_NONE and typed.strip() == "0"):
            return ()
        try:
            return tuple(int(part) for part in typed.split(","))
        except ValueError:
            message = f"{name} is {typed!r}; expected whole numbers with commas between them, as 1,2,4"
            raise InputError(message, name) from None

    return BenchOptions(
        prompt_lengths=numbers("prompt_lengths"),
        new_tokens=numbers("new_tokens"),
        widths=numbers("widths"),
        context=settings.context,
        slots=numbers("slots"),
        drafts=numbers("num_speculative_tokens"),
        kv_memory_bytes=settings.engine.kv_memory,
        repeats=settings.repeats,
        prefill_chunk=settings.engine.prefill_chunk,
    )


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


def _table(measured: Bench, weights: WeightBytes) -> reports.Table:
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


def _heading(measured: Bench, weights: WeightBytes, report: dict[str, Any]) -> list[str]:
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


def _show(heading: Sequence[str], table: reports.Table, legend: str, to_stderr: bool) -> None:
    console = Console(file=sys.stderr if to_stderr else sys.stdout, highlight=False, soft_wrap=True)
    if not table.rows:
        console.print("interrupted before the first measurement")
        return
    for line in heading:
        console.print(wrapped(line, console), markup=False)
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, caption in enumerate(table.header):
        shown.add_column(caption, justify="left" if index == 0 else "right", no_wrap=True)
    for row in table.rows:
        shown.add_row(*row)
    # print the table at its full width, so that no number is cut; a narrow terminal breaks the lines
    width = console.width
    console.width = max(console.width, Width.get(console, console.options.update(max_width=1000), shown).maximum)
    console.print(shown)
    console.width = width
    console.print(wrapped(legend, console), style="dim")


def _number(value: float | None) -> str:
    """Format three significant digits or more, without an exponent."""
    return figure_text(value, ",.0f" if value and value >= 1000 else ".1f" if value and value >= 100 else ".3g")
