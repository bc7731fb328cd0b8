"""Commands that typer still reads."""

import functools
from collections.abc import Callable
from typing import Annotated, Any

import typer

from peagle.cli.app import INTERRUPTED, OK, _complain, guarded
from peagle.cli.options import Settings, command_of, refusal
from peagle.cli.settings.export import ExportSettings
from peagle.cli.settings.frequent_tokens import FrequentTokensSettings
from peagle.cli.settings.info import InfoSettings
from peagle.cli.settings.parity import ParitySettings
from peagle.cli.settings.random_checkpoint import RandomSettings
from peagle.cli.settings.report import ReportSettings

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


@command(TRAIN)
def export(settings: ExportSettings) -> int:
    from peagle.cli.export import export_command

    return export_command(settings)


@command(TRAIN)
def frequent_tokens(settings: FrequentTokensSettings) -> int:
    from peagle.cli.frequent_tokens import frequent_tokens_command

    return frequent_tokens_command(settings.files, settings.out)


@command(MEASURE)
def report(settings: ReportSettings) -> int:
    from peagle.cli.report import report_command

    return report_command(settings)


@command(MEASURE)
def parity(settings: ParitySettings) -> int:
    from peagle.cli.parity import parity_command

    return parity_command(settings)


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


def main(typed: list[str]) -> int:
    """Run one of these commands."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=typed, prog_name="peagle", standalone_mode=False)
    except Exception as error:
        if type(error).__name__ == "Abort":
            return INTERRUPTED
        if type(error).__name__ == "NoArgsIsHelpError":  # the help is printed
            return OK
        if not hasattr(error, "format_message"):  # not the parser's error: a bug, so show its traceback
            raise
        return _complain(refusal(error, command, typed))
    return code if isinstance(code, int) else OK
