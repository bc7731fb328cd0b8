"""The commands: parse arguments into one frozen Settings, and run it. A user's error is one line and exit code 2."""

import errno
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TextIO

import typer

from peagle.cli.options import Settings, command_of, expect_alone, needing, refusal
from peagle.cli.output import say
from peagle.cli.settings.batch import BatchSettings
from peagle.cli.settings.bench import BenchSettings
from peagle.cli.settings.chat import ChatSettings
from peagle.cli.settings.cluster import ClusterUpSettings
from peagle.cli.settings.data import DataSettings
from peagle.cli.settings.decode import GenerateSettings, SpeculateSettings
from peagle.cli.settings.export import ExportSettings
from peagle.cli.settings.frequent_tokens import FrequentTokensSettings
from peagle.cli.settings.info import InfoSettings
from peagle.cli.settings.parity import ParitySettings
from peagle.cli.settings.random_checkpoint import RandomSettings
from peagle.cli.settings.report import ReportSettings
from peagle.cli.settings.serve import ServedOptions, ServeSettings
from peagle.cli.settings.shared import ProcessOptions
from peagle.cli.settings.sweep import SweepSettings
from peagle.cli.settings.train import TrainSettings
from peagle.hub import stay_offline
from peagle.ops import interrupt
from peagle.ops.errors import InputError, InputWarning, cannot_start, is_of_backend
from peagle.ops.files import reason_of
from peagle.ops.jax_cure import MiscompilingJaxError

OK, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 0, 2, interrupt.EXIT_CODE, 141

MAIN_HELP = """
Lossless speculative decoding for GPT-OSS with P-EAGLE drafters, in JAX.

Start with [cyan]peagle speculate[/cyan]. [cyan]peagle COMMAND --help[/cyan] has options and examples.
"""
GENERATE, TRAIN, MEASURE = "Generate and serve", "Train drafters", "Measure and inspect"

CHECK_HELP = """Test this machine's kernels and lossless decoding.

Compares the kernels with references, and speculative decoding with plain
decoding. Exit code 1 if anything differs.

[bold]Examples[/bold]

  this machine    [cyan]peagle check[/cyan]
"""

# allowed with --resume: they do not change what is measured
FREE = ("out", "resume", "dry_run", "continue_on_error", "write_widths", "quiet")


class Commands(typer.core.TyperGroup):
    """The commands of `peagle`. Its help fits one screen, so it leaves out the option --help."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.hidden = True
        return option


app = typer.Typer(
    name="peagle",
    cls=Commands,
    help=MAIN_HELP,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def peagle(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, hidden=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if version:
        import importlib.metadata

        try:
            print(importlib.metadata.version("peagle"))
        except importlib.metadata.PackageNotFoundError:
            print("not installed")
        raise typer.Exit


def command(
    group: str | None, of: typer.Typer = app
) -> Callable[[Callable[[Settings], int]], Callable[[Settings], int]]:
    """Register a command of the function's name, with the options and the help of its settings.

    group: of the commands in the help of `of`; None: its only one.
    """
    return lambda function: command_of(of, fetching(function), lambda run: guarded(run), group)


def fetching(function: Callable[[Settings], int]) -> Callable[[Settings], int]:
    """Download the checkpoints that a command's settings name, if --download is given, before it runs."""

    @functools.wraps(function)
    def run(settings: Settings) -> int:
        from peagle.cli.download import download, wants_download

        if wants_download(settings):
            download(settings)
        return function(settings)

    return run


def _with_others(
    settings: Settings,
    options: SpeculateSettings | GenerateSettings | ChatSettings | ServedOptions,
    run: Callable[[Settings], int],
) -> int:
    """Run a command, in several processes if --coordinator is given."""
    if options.processes == ProcessOptions():
        return run(settings)
    from peagle.cli.processes import run_together

    return run_together(settings, options.processes, options.devices, run)


@command(GENERATE)
def speculate(settings: SpeculateSettings) -> int:
    from peagle.cli.speculate import decode_command

    return _with_others(settings, settings, decode_command)


@command(GENERATE)
def generate(settings: GenerateSettings) -> int:
    from peagle.cli.speculate import decode_command

    return _with_others(settings, settings, decode_command)


@command(GENERATE)
def chat(settings: ChatSettings) -> int:
    from peagle.cli.chat import chat_command

    return _with_others(settings, settings, chat_command)


@command(GENERATE)
def serve(settings: ServeSettings) -> int:
    with needing("serving needs", "serve"):
        from peagle.cli.serve import serve_command
    return _with_others(settings, settings.served, serve_command)


@command(GENERATE)
def batch(settings: BatchSettings) -> int:
    with needing("batches need", "serve"):
        from peagle.cli.batch import batch_command
    return _with_others(settings, settings.served, batch_command)


cluster = typer.Typer(no_args_is_help=True, help="Serve from several replicas on Ray Serve.")
app.add_typer(cluster, name="cluster", rich_help_panel=GENERATE)


def up(settings: ClusterUpSettings) -> int:
    with needing("a cluster needs", "cluster"):
        from peagle.cli.cluster import up_command

    return up_command(settings)


command(None, of=cluster)(up)


@command(TRAIN)
def data(settings: DataSettings) -> int:
    from peagle.cli.data import data_command

    return data_command(settings)


@command(TRAIN)
def train(settings: TrainSettings) -> int:
    with needing("training needs", "train"):
        from peagle.cli.train import RESUMABLE, train_command
    if settings.resume:
        expect_alone(settings, "--resume", ("out", "resume", *RESUMABLE), f"the recipe in {settings.out}")
    return train_command(settings)


@command(TRAIN)
def export(settings: ExportSettings) -> int:
    from peagle.cli.export import export_command

    return export_command(settings)


@command(TRAIN)
def frequent_tokens(settings: FrequentTokensSettings) -> int:
    from peagle.cli.frequent_tokens import frequent_tokens_command

    return frequent_tokens_command(settings.files, settings.out)


@command(MEASURE)
def sweep(settings: SweepSettings) -> int:
    from peagle.cli.sweep import sweep_command

    if settings.resume:
        expect_alone(settings, "--resume", FREE, f"the plan in {settings.out}")
    return sweep_command(settings)


@command(MEASURE)
def report(settings: ReportSettings) -> int:
    from peagle.cli.report import report_command

    return report_command(settings)


@command(MEASURE)
def parity(settings: ParitySettings) -> int:
    from peagle.cli.parity import parity_command

    return parity_command(settings)


@command(MEASURE)
def bench(settings: BenchSettings) -> int:
    from peagle.cli.bench import bench_command

    return bench_command(settings)


@command(MEASURE)
def info(settings: InfoSettings) -> int:
    from peagle.cli.info import info_command

    return info_command(settings)


@app.command(help=CHECK_HELP, rich_help_panel=MEASURE)
def check() -> int:
    def run() -> int:
        from peagle.cli.check import check_command

        return check_command()

    return guarded(run)


@command(MEASURE)
def random(settings: RandomSettings) -> int:
    from peagle.cli.random_checkpoint import random_command

    return random_command(settings.size, settings.directory, not settings.unquantized, settings.seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0; 2 after one line on standard error about bad input or usage; 130 after Ctrl-C; 141 if the reader of the output
    has closed it; or a command's own.
    """
    typed = list(sys.argv[1:] if arguments is None else arguments)
    stay_offline()  # no library may use the network unless asked
    for stream in (sys.stdout, sys.stderr):  # print any file name, whatever its bytes
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    command = typer.main.get_command(app)
    try:
        code = command.main(args=typed or ["--help"], prog_name="peagle", standalone_mode=False)
    except KeyboardInterrupt:
        return INTERRUPTED
    except InputError as error:
        return _complain(str(error))
    except OSError as error:
        return _input_or_output(error)
    except Exception as error:
        if type(error).__name__ == "Abort":
            return INTERRUPTED
        if type(error).__name__ == "NoArgsIsHelpError":  # the help is printed
            return OK
        if not hasattr(error, "format_message"):  # not the parser's error: a bug, so show its traceback
            raise
        return _complain(refusal(error, command, typed))
    return code if isinstance(code, int) else OK


def guarded(run: Callable[[], int]) -> int:
    """Run a command; report user errors in one line and return the exit code."""
    from peagle.cli.compilation_cache import keep_compiled

    keep_compiled()
    if os.environ.pop("JAX_DISABLE_JIT", "0").lower() not in ("0", "false", ""):
        say("warning", "JAX_DISABLE_JIT is ignored: decoding runs compiled programs only")
    try:
        with _warnings_in_one_line():
            return run()
    except (InputError, MiscompilingJaxError) as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        return _input_or_output(error)
    except Exception as error:
        if is_of_backend(error):
            return _complain(cannot_start(error))
        if _out_of_memory(error):
            return _complain(
                f"out of memory: {str(error).splitlines()[0] if str(error) else 'no reason given'}; lower --context or "
                "--slots, or load smaller weights with --experts packed or --dtype bfloat16"
            )
        raise


def _input_or_output(error: OSError) -> int:
    """Report a failed read or write in one line, and return the exit code."""
    if error.filename is None and error.errno in (errno.EPIPE, errno.ENOSPC):
        # whoever read the output has gone, or its place is full: nothing is to be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    where = "" if error.filename is None else f"{error.filename}: "
    return _complain(f"{where}{reason_of(error)}; expected a place that can be read and written")


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or (
        type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and "RESOURCE_EXHAUSTED" in str(error)
    )


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print each InputWarning as one line, once; leave all other warnings to Python."""
    printed: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", InputWarning)
        show_others = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if not issubclass(category, InputWarning):
                show_others(message, category, filename, lineno, file, line)
            elif str(message) not in printed:
                printed.add(str(message))
                say("warning", str(message))

        warnings.showwarning = show
        yield


def _complain(message: str) -> int:
    say("error", message)
    return BAD_INPUT
