"""`peagle bench`: time a target's passes, and print and write the table."""

import dataclasses
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from peagle.base import interrupt
from peagle.base.errors import InputError
from peagle.base.flag import RUNNING, SPECULATION, Flag
from peagle.cli.command import Takes
from peagle.cli.flags import JSON
from peagle.cli.output import STANDARD_OUTPUT, output_file, wrapped
from peagle.cli.report import show_table
from peagle.config import EngineConfig, LoadConfig
from peagle.measure.reports import Table

if TYPE_CHECKING:  # it imports JAX
    from peagle.measure.bench import Bench, BenchOptions, Measurement
    from peagle.pair import Pair

MAY_BE_NONE = ("prompt_lengths", "new_tokens")

LOADED = Takes("drafter", "query_blocks", "ffn_blocks", "dtype", "experts", "mesh")
LEGEND = (
    "Medians (min..max). tg and verify: after @ tokens of context; tok/s: over all slots. v(T): time of a pass over T "
    "rows divided by that over one row. K: each slot drafts K tokens, all are rejected; c(K): time of such a step "
    "divided by that of a plain one."
)


@dataclass(frozen=True, kw_only=True)
class BenchCommand:
    """Time a target's prefill, decoding and verify passes.

    v(T) is the time of a verify pass over T rows divided by that over one row.
    Drafting K = T - 1 tokens saves time only if a step emits more than v(T) tokens.

    [bold]Examples[/bold]

      the demo target       [cyan]peagle bench[/cyan]
      a checkpoint          [cyan]peagle bench DIR[/cyan]
      decoding only         [cyan]peagle bench DIR -p 0 -t 1 -n 64,256 --context 1024[/cyan]
      batch sizes           [cyan]peagle bench DIR -p 0 -t 1 --slots 1,2,4,8,16,32[/cyan]
      cost of drafting
        [cyan]peagle bench DIR --drafter DIR -p 0 -t 1 --slots 1,4,16 -k 1,3[/cyan]
    """

    target: Annotated[str | None, Flag(names=("TARGET",))] = None
    """GPT-OSS checkpoint. Default: the demo target."""
    prompt_lengths: Annotated[str, Flag(RUNNING, "N,N", ("-p", "--prompt-lengths"))] = "128,512"
    """Prompt lengths to prefill (pp); 0: none."""
    new_tokens: Annotated[str, Flag(RUNNING, "N,N", ("-n", "--new-tokens"))] = "64"
    """Tokens to decode (tg); 0: none."""
    widths: Annotated[str, Flag(RUNNING, "T,T", ("-t", "--widths"))] = "1,2,4,8"
    """Rows of the verify passes; 1 is always included."""
    context: Annotated[int, Flag(RUNNING, "N")] = 128
    """Tokens in the KV cache before decoding and verifying."""
    slots: Annotated[str, Flag(RUNNING, "N,N")] = "1"
    """Requests decoded at once. With several numbers, decoding is timed with each and with 1, other passes with 1."""
    engine: Annotated[EngineConfig, Takes("prefill_chunk")] = EngineConfig()
    num_speculative_tokens: Annotated[str | None, Flag(SPECULATION, "K,K", ("-k", "--num-speculative-tokens"))] = None
    """Also time decoding with K drafts per step, all rejected: the cost of a drafted step."""
    load: Annotated[LoadConfig, LOADED] = LoadConfig()
    repeats: Annotated[int, Flag(RUNNING, "R")] = 5
    """Measurements per test."""
    json: Annotated[str | None, JSON] = None

    def run(self) -> int:
        """Run the benchmark, print its table, and return the exit code.

        The table goes to standard error if --json goes to standard output.
        """
        from peagle.cli.display import Display
        from peagle.cli.models import load_pair
        from peagle.loading.checkpoints import drafter_path, or_demo, resolve
        from peagle.loading.fit import check_fit
        from peagle.measure.bench import bench
        from peagle.parallel.mesh import refuse_replicas
        from peagle.workflows.run_report import dumps
        from target.load import inspect_target

        options = self._options()
        json_file = output_file(self.json, "--json")
        refuse_replicas(self.load.mesh, "peagle bench measures one replica")
        name = or_demo(self.target)
        drafter = None if self.num_speculative_tokens is None else or_demo(self.load.drafter)
        if self.load.drafter is not None and drafter is None:
            raise InputError("--drafter is given without -k, the number of drafts to measure; give both, or neither")
        if (directory := drafter_path(name, drafter)) is not None:
            check_fit(resolve(name, "target"), directory)
        options.check(inspect_target(resolve(name, "target")).config.max_positions)

        display = Display()
        pair = load_pair(name, drafter, self.load, display)

        def progress(stage: str, done: int, total: int, left_s: float | None) -> None:
            display.begin_run(stage, done, total, left_s, "test" if stage == "compiling" else "run")

        measured = bench(pair, options, progress)
        display.clear()
        record = bench_record(measured, pair, name, drafter)
        if json_file is not None:
            json_file.write(dumps(record))
        _show(record, sys.stderr if self.json == STANDARD_OUTPUT else sys.stdout)
        return interrupt.EXIT_CODE if measured.interrupted else 0

    def _options(self) -> "BenchOptions":
        from peagle.measure.bench import BenchOptions

        def numbers(name: str) -> tuple[int, ...]:
            typed = getattr(self, name)
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
            context=self.context,
            slots=numbers("slots"),
            drafts=numbers("num_speculative_tokens"),
            repeats=self.repeats,
            prefill_chunk=self.engine.prefill_chunk,
        )


def bench_record(measured: "Bench", pair: "Pair", target: str, drafter: str | None) -> dict[str, Any]:
    """Make the object of --json: provenance, settings, and a line per test; an absent value is null."""
    from peagle.base.memory import tree_bytes
    from peagle.loading.load import local_model
    from peagle.measure.provenance import peak_memory_bytes, provenance
    from peagle.workflows.run_report import LOADED, SCHEMA

    return {
        "schema": SCHEMA,
        "provenance": provenance(),
        "config": {
            "command": "bench",
            "target": target,
            "drafter": drafter,
            **dataclasses.asdict(measured.options),
            **{name: getattr(pair.loaded, name) for name in LOADED},
            "steps_per_dispatch": pair.steps_per_dispatch,
            "interrupted": measured.interrupted,
        },
        "weight_bytes": tree_bytes(local_model(pair.plain_target).params),
        "tests": [_line(measurement, measured) for measurement in measured.measurements],
        "peak_memory_bytes": peak_memory_bytes(),
    }


def _line(measurement: "Measurement", measured: "Bench") -> dict[str, Any]:
    case = measurement.case
    counts_tokens = case.kind != "verify" and not case.num_drafts  # a real drafted step emits more tokens than this one
    return {
        "kind": case.kind,
        "size": case.size,
        "context": 0 if case.kind == "pp" else measured.options.context,
        "slots": case.slots,
        "num_speculative_tokens": case.num_drafts,
        "num_passes": measurement.passes,
        "num_tokens": measurement.num_tokens,
        "seconds": list(measurement.seconds),
        "tok_per_s": dataclasses.asdict(measurement.tok_per_s) if counts_tokens else None,
        "ms_per_pass": dataclasses.asdict(measurement.ms_per_pass),
        "v": measured.v(measurement),
        "cost": measured.cost(measurement),
    }


def _show(record: dict[str, Any], file: Any) -> None:
    from peagle.base.sizes import format_size
    from peagle.measure.metrics import Spread
    from peagle.measure.provenance import origin_text

    console = Console(file=file, highlight=False, soft_wrap=True)
    if not record["tests"]:
        console.print("interrupted before the first measurement")
        return

    def spread(value: dict[str, float] | None) -> str:
        return "-" if value is None else Spread(**value).text(_number)

    config = record["config"]
    several = len({line["slots"] for line in record["tests"] if line["kind"] == "tg"}) > 1
    drafter = f" with the drafter {config['drafter']}" if config["drafter"] else ""
    above = (
        f"{config['target']}{drafter}: {config['dtype']} "
        f"arithmetic, {config['experts']} experts, kernels {config['kernels']}; "
        f"{format_size(record['weight_bytes'])} of weights",
        f"{origin_text(record['provenance'])}; slots {', '.join(map(str, config['slots']))}, {config['repeats']} "
        f"repeats{', interrupted' if config['interrupted'] else ''}",
    )
    header = ("test", "tok/s", "ms/pass", "v(T)", *(["c(K)"] if config["drafts"] else []))
    rows = [
        (
            _name(line, several),
            spread(line["tok_per_s"]),
            spread(line["ms_per_pass"]),
            _number(line["v"]),
            *([_number(line["cost"])] if config["drafts"] else []),
        )
        for line in record["tests"]
    ]
    for text in above:
        console.print(wrapped(text, console), markup=False)
    show_table(Table(header, rows), console)
    console.print(wrapped(LEGEND, console), style="dim")


def _name(line: dict[str, Any], several: bool) -> str:
    """Name a test. several: whether decoding is timed with several numbers of slots."""
    name = f"{line['kind']} {line['size']}" + ("" if line["kind"] == "pp" else f" @ {line['context']}")
    if line["kind"] == "tg" and several:
        name += f", {line['slots']} slot{'s' * (line['slots'] > 1)}"
    return name + (f", K = {line['num_speculative_tokens']}" if line["num_speculative_tokens"] else "")


def _number(value: float | None) -> str:
    """Format three significant digits or more, without an exponent."""
    if value is None:
        return "-"
    return format(value, ",.0f" if value >= 1000 else ".1f" if value >= 100 else ".3g")
