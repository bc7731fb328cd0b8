"""`peagle bench`: time a target's passes, and print and write the table."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from rich import box
from rich.console import Console
from rich.measure import Measurement as Width
from rich.table import Table

from peagle.base import interrupt
from peagle.base.errors import InputError
from peagle.base.flag import OUTPUT, RUNNING, SPECULATION, Flag
from peagle.cli.command import Takes
from peagle.cli.flags import JSON
from peagle.cli.output import STANDARD_OUTPUT, output_file, wrapped
from peagle.config import EngineConfig, LoadConfig
from peagle.measure import reports

if TYPE_CHECKING:  # it imports JAX
    from peagle.measure.bench import BenchOptions

MAY_BE_NONE = ("prompt_lengths", "new_tokens")

LOADED = Takes("drafter", "query_blocks", "ffn_blocks", "dtype", "experts", "mesh")


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
      for a report          [cyan]peagle bench DIR --markdown - --json OUT.json[/cyan]
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
    markdown: Annotated[str | None, Flag(OUTPUT, "FILE|-")] = None
    """Write the table in Markdown; -: to standard output."""

    def run(self) -> int:
        return time_target(self)


def time_target(settings: BenchCommand) -> int:
    """Run the benchmark, print its table, and return the exit code.

    The table goes to standard error if --json or --markdown goes to standard output.
    """
    from peagle.cli.display import Display
    from peagle.cli.models import load_pair
    from peagle.loading.checkpoints import drafter_path, or_demo, resolve
    from peagle.loading.fit import check_fit
    from peagle.measure.bench import bench
    from peagle.measure.provenance import peak_memory_bytes, provenance
    from peagle.parallel.mesh import refuse_replicas
    from peagle.workflows.bench_report import bench_report, heading, legend, table, weight_bytes
    from peagle.workflows.run_report import dumps
    from target.load import inspect_target

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

    def progress(stage: str, done: int, total: int, left_s: float | None) -> None:
        display.begin_run(stage, done, total, left_s, "test" if stage == "compiling" else "run")

    measured = bench(pair, options, progress)
    display.clear()

    weights = weight_bytes(pair)
    report = bench_report(measured, pair, weights, (name, drafter), provenance(), peak_memory_bytes())
    above, rows, below = heading(measured, weights, report), table(measured, weights), legend(options)
    if json_file is not None:
        json_file.write(dumps(report))
    if markdown_file is not None:
        command = f"`{' '.join(report['provenance']['command'])}`"
        markdown_file.write(reports.markdown([*above, rows, below, command]))
    if settings.markdown != STANDARD_OUTPUT or not sys.stdout.isatty():  # otherwise Markdown is on the screen already
        _show(above, rows, below, to_stderr=STANDARD_OUTPUT in (settings.json, settings.markdown))
    return interrupt.EXIT_CODE if measured.interrupted else 0


def _options(settings: BenchCommand) -> "BenchOptions":
    from peagle.measure.bench import BenchOptions

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
        repeats=settings.repeats,
        prefill_chunk=settings.engine.prefill_chunk,
    )


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
