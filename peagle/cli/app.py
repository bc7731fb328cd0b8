"""The commands: arguments in, one frozen Settings, one call. What can be mended becomes one line and exit code 2."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, TextIO

import typer

from peagle.cli.options import Settings, command_of, given
from peagle.cli.output import say
from peagle.cli.settings import (
    BenchSettings,
    ChatSettings,
    DataSettings,
    ExportSettings,
    FrequentTokensSettings,
    GenerateSettings,
    InfoSettings,
    ParitySettings,
    RandomSettings,
    ReportSettings,
    ServeSettings,
    SpeculateSettings,
    SweepSettings,
    TrainSettings,
)
from peagle.ops import interrupt
from peagle.ops.errors import InputError, InputWarning
from peagle.ops.jax_cure import MiscompilingJaxError

OK, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 0, 2, interrupt.EXIT_CODE, 141

MAIN_HELP = """
Lossless speculative decoding of GPT-OSS models with a P-EAGLE drafter, in JAX.

A small drafter proposes K tokens at once, the target checks them in one pass:
what comes out is, token for token, what the target alone would have said.

[bold]Start here[/bold]  (the demo pair comes with the package)

  a built-in example        [cyan]peagle speculate[/cyan]
  your own prompt           [cyan]peagle speculate 'def mean(values):'[/cyan]
  your own checkpoints      [cyan]peagle speculate --target DIR --drafter DIR 'Why?'[/cyan]
  several turns             [cyan]peagle chat --target DIR --drafter DIR[/cyan]
  many people at once       [cyan]peagle serve --target DIR --drafter DIR[/cyan]
  what a checkpoint is      [cyan]peagle info DIR[/cyan]
"""
SPECULATE_HELP = """
Stream an answer with speculative decoding, then measure plain decoding beside it.

[bold]Examples[/bold]

  K = 5, 128 tokens   [cyan]peagle speculate 'def mean(values):' -k 5 -n 128[/cyan]
  no drafter needed   [cyan]peagle speculate --target DIR --drafter ngram 'Why?'[/cyan]
  many prompts        [cyan]peagle speculate --prompt-file IN.jsonl --json OUT[/cyan]
  standard input      [cyan]cat text | peagle speculate - --temperature 0.8[/cyan]
"""
GENERATE_HELP = """
Stream an answer with plain decoding, one token a step: what speculation is measured against.

[bold]Examples[/bold]

  as it is           [cyan]peagle generate 'def mean(values):'[/cyan]
  with the 5 best    [cyan]peagle generate 'def mean(values):' --logprobs 5 --json -[/cyan]
"""
CHAT_HELP = """
Chat: answer one line after another, each with what was said before; streaming, with speculative decoding.

/reset forgets the conversation, /exit or the end of input ends it. Ctrl-C stops an answer, at the prompt the chat.

[bold]Examples[/bold]

  your own checkpoints   [cyan]peagle chat --target DIR --drafter DIR[/cyan]
  from a pipe            [cyan]printf 'Hi\\nAnd you?\\n' | peagle chat --target DIR --drafter ngram[/cyan]
"""
SERVE_HELP = """
Serve a pair over HTTP, as OpenAI does: chat completions and completions, for many people at once.

Ctrl-C or SIGTERM: answers that are under way end first. GET /health, GET /metrics for those who run it.

[bold]Examples[/bold]

  the demo pair          [cyan]peagle serve[/cyan]
  your own checkpoints   [cyan]peagle serve --target DIR --drafter DIR --slots 8 --context 8192[/cyan]
  with a key             [cyan]peagle serve --api-key-file KEYS --host 0.0.0.0[/cyan]
  and call it            [cyan]curl localhost:8000/v1/completions --json '{"prompt": "def mean("}'[/cyan]
"""
INFO_HELP = """
Say what a checkpoint is: geometry, bytes, memory it will need, taps; with two, whether target and drafter fit.

Reads config.json and the headers of the weights only, so it is quick for any size. Without DIR: the demo pair.

[bold]Examples[/bold]

  a target or a drafter        [cyan]peagle info DIR[/cyan]
  both, and whether they fit   [cyan]peagle info TARGET DRAFTER[/cyan]
"""
BENCH_HELP = """
Measure a target by itself: prefill (pp), decoding (tg), and verify passes of several widths.

v(T) is what a pass over T rows costs, in passes over one: with K = T - 1 drafts,
speculation pays where a step gives more tokens than that. Without TARGET: the demo's.

[bold]Examples[/bold]

  a checkpoint          [cyan]peagle bench DIR[/cyan]
  decoding alone        [cyan]peagle bench DIR -p 0 -t 1 -n 64,256 --context 1024[/cyan]
  many requests         [cyan]peagle bench DIR -p 0 -t 1 --slots 1,2,4,8,16,32[/cyan]
  what drafting costs   [cyan]peagle bench DIR --drafter DIR -p 0 -t 1 --slots 1,4,16 -k 1,3[/cyan]
  for a report          [cyan]peagle bench DIR --markdown - --json OUT[/cyan]
"""
SWEEP_HELP = """
Measure acceptance and speed over K: every prompt decoded in every way, in turns, plain decoding among them.

The folder holds the plan, every decoded request, and at the end figures with intervals, a page and pictures.

[bold]Examples[/bold]

  the demo pair           [cyan]peagle sweep --out RUN[/cyan]
  your own                [cyan]peagle sweep --out RUN --target DIR --drafter DIR --prompts mt.jsonl[/cyan]
  two drafters            [cyan]peagle sweep --out RUN -k 1-7,auto --drafter DIR,ngram --repeats 5[/cyan]
  many at once            [cyan]peagle sweep --out RUN --concurrency 1,2,4,8,16[/cyan]
  and its table for auto  [cyan]peagle sweep --out RUN --resume --write-widths DRAFTER[/cyan]
  cut off? go on          [cyan]peagle sweep --out RUN --resume[/cyan]
  only say what it does   [cyan]peagle sweep --out RUN -k 0-8 --render both --temperature 0,1 --dry-run[/cyan]
"""
REPORT_HELP = """
Render runs of peagle sweep: one HTML file that needs no network, and Markdown with pictures.

Of several runs each is compared with the first, request by request: is the difference real?

[bold]Examples[/bold]

  a run once more      [cyan]peagle report RUN[/cyan]
  before and after     [cyan]peagle report BEFORE AFTER --out DIR[/cyan]
"""
PARITY_HELP = """
Say whether a pair does what it should, and why its acceptance is what it is.

The target is compared layer by layer with transformers (where torch is installed), the drafter with a reference in
float64, the engine with both. Then the checkpoint is read in other ways (taps one layer off, another mask token,
norm, vocabulary map, the target's embedding, raw prompts): one that is accepted more often is the likely cause, and
what to change is said as the file names it. Exit code 1 where anything is.

[bold]Examples[/bold]

  the demo pair             [cyan]peagle parity[/cyan]
  "my acceptance is 1.4"    [cyan]peagle parity --target DIR --drafter DIR --prompts FILE[/cyan]
"""
DATA_HELP = """
Have a target answer prompts, and keep what it said as training data for its drafter.

The folder is made of shards, each whole or absent: the same command goes on where it was cut off.

[bold]Examples[/bold]

  greedy answers         [cyan]peagle data --prompt-file IN.jsonl --out DIR[/cyan]
  of your own target     [cyan]peagle data --target DIR --prompt-file IN.jsonl --out DIR -n 512[/cyan]
  with what it thought   [cyan]peagle data --prompt-file IN.jsonl --out DIR --hidden --top 32[/cyan]
"""
TRAIN_HELP = """
Train a drafter for a target on data it wrote: P-EAGLE, or EAGLE-3.

The folder holds recipe, log, checkpoints and the curve, and at the end the drafter;
the same command goes on where it was cut off.

[bold]Examples[/bold]

  an hour             [cyan]peagle train --data DIR --out RUN --minutes 60[/cyan]
  and 2000 more       [cyan]peagle train --data DIR --out RUN --steps 5000[/cyan]
  your own target     [cyan]peagle train --target DIR --data DIR --out RUN --steps 5000 --layers 4[/cyan]
  watch acceptance    [cyan]peagle train --data DIR --out RUN --steps 900 --evaluate IN.jsonl[/cyan]
  the baseline        [cyan]peagle train --data DIR --out RUN --minutes 60 --autoregressive[/cyan]
"""
EXPORT_HELP = """
Write a drafter in the layout of vLLM or of the speculators package, with a model card.

[bold]Examples[/bold]

  for speculators   [cyan]peagle export RUN/drafter --out DIR --dialect speculators --verifier openai/gpt-oss-20b[/cyan]
  for vLLM          [cyan]peagle export DIR --out OTHER --verifier openai/gpt-oss-20b[/cyan]
"""

CHECK_HELP = "Check this machine: its kernels against references, and speculation against plain decoding."
RANDOM_HELP = "Write a GPT-OSS checkpoint of random weights: for speed, memory and format, not for sense."
FREQUENT_HELP = "List the tokens that a target writes, the most frequent first: for --draft-vocab."

# may be given beside --resume, as they do not change what is measured
FREE = ("out", "resume", "dry_run", "continue_on_error", "write_widths", "quiet")

app = typer.Typer(
    name="peagle",
    help=MAIN_HELP,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def peagle(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    if version:
        import importlib.metadata

        try:
            print(importlib.metadata.version("peagle"))
        except importlib.metadata.PackageNotFoundError:
            print("not installed")
        raise typer.Exit


def command(help_text: str) -> Callable[[Callable[[Settings], int]], Callable[[Settings], int]]:
    """Register a command of the function's name, with the options of its settings."""
    return command_of(app, help_text, lambda run: guarded(run))


@command(SPECULATE_HELP)
def speculate(settings: SpeculateSettings) -> int:
    from peagle.cli.speculate import decode_command

    return decode_command(settings)


@command(GENERATE_HELP)
def generate(settings: GenerateSettings) -> int:
    from peagle.cli.speculate import decode_command

    return decode_command(settings)


@command(CHAT_HELP)
def chat(settings: ChatSettings) -> int:
    from peagle.cli.chat import chat_command

    return chat_command(settings)


@command(SERVE_HELP)
def serve(settings: ServeSettings) -> int:
    try:
        from peagle.cli.serve import serve_command
    except ModuleNotFoundError as error:
        raise InputError(f"serving needs {error.name}, which is not installed; pip install 'peagle[serve]'") from None
    return serve_command(settings)


@command(INFO_HELP)
def info(settings: InfoSettings) -> int:
    from peagle.cli.info import info_command

    return info_command(settings)


@command(BENCH_HELP)
def bench(settings: BenchSettings) -> int:
    from peagle.cli.bench import bench_command

    return bench_command(settings)


@command(DATA_HELP)
def data(settings: DataSettings) -> int:
    from peagle.cli.data import data_command

    return data_command(settings)


@command(TRAIN_HELP)
def train(settings: TrainSettings) -> int:
    try:
        from peagle.cli.train import train_command
    except ModuleNotFoundError as error:
        raise InputError(f"training needs {error.name}, which is not installed; pip install 'peagle[train]'") from None
    return train_command(settings)


@command(EXPORT_HELP)
def export(settings: ExportSettings) -> int:
    from peagle.cli.export import export_command

    return export_command(settings)


@command(SWEEP_HELP)
def sweep(settings: SweepSettings) -> int:
    from peagle.cli.sweep import sweep_command

    if settings.resume and (others := [name for name in given(settings) if name not in FREE]):
        raise InputError(
            f"--resume goes on by the plan in {settings.out}, and {others[0].replace('_', ' ')} is given, too; leave "
            "it out, or begin another run with another --out"
        )
    return sweep_command(settings)


@command(REPORT_HELP)
def report(settings: ReportSettings) -> int:
    from peagle.cli.report import report_command

    return report_command(settings)


@command(PARITY_HELP)
def parity(settings: ParitySettings) -> int:
    from peagle.cli.parity import parity_command

    return parity_command(settings)


@app.command(help=CHECK_HELP)
def check() -> int:
    def run() -> int:
        from peagle.cli.check import check_command

        return check_command()

    return guarded(run)


@command(RANDOM_HELP)
def random(settings: RandomSettings) -> int:
    from peagle.cli.random_checkpoint import random_command

    return random_command(settings.size, settings.directory, not settings.unquantized, settings.seed)


@command(FREQUENT_HELP)
def frequent_tokens(settings: FrequentTokensSettings) -> int:
    from peagle.cli.frequent_tokens import frequent_tokens_command

    return frequent_tokens_command(settings.files, settings.out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0; 2 after one line on stderr about bad input or usage; 130
    after Ctrl-C; 141 where nobody reads the output any more."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    # nothing is ever fetched: a library that would ask the network may not
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for stream in (sys.stdout, sys.stderr):  # a name, say of a file, can be shown whatever it holds
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    command = typer.main.get_command(app)
    try:
        code = command.main(args=typed or ["--help"], prog_name="peagle", standalone_mode=False)
    except KeyboardInterrupt:
        return INTERRUPTED
    except InputError as error:
        return _complain(str(error))
    except Exception as error:
        if type(error).__name__ == "Abort":
            return INTERRUPTED
        if not hasattr(error, "format_message"):  # not the parser's: a bug of ours, whose traceback is wanted
            raise
        return _complain(f"{error.format_message()} (peagle --help shows the usage)")
    return code if isinstance(code, int) else OK


def guarded(run: Callable[[], int]) -> int:
    """The exit code of a run, which is one that may compile, with what a person can mend told in one line."""
    from peagle.cli.compilation_cache import keep_compiled

    keep_compiled()
    try:
        with _warnings_in_one_line():
            return run()
    except (InputError, MiscompilingJaxError) as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # whoever read the output has gone; nothing is left to say, and nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        return _complain(f"{where}{error.strerror or error}; expected a place that can be read and written")
    except Exception as error:
        if _out_of_memory(error):
            return _complain(
                f"out of memory: {str(error).splitlines()[0] if str(error) else 'no more is free'}; lower --context or "
                "--slots, or keep the experts small with --experts packed or --dtype bfloat16"
            )
        raise


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or (
        type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and "RESOURCE_EXHAUSTED" in str(error)
    )


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print what checkpoints may be meant otherwise as one line each, once; all other warnings as ever."""
    told: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", InputWarning)
        as_ever = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if not issubclass(category, InputWarning):
                as_ever(message, category, filename, lineno, file, line)
            elif str(message) not in told:
                told.add(str(message))
                say("warning", str(message))

        warnings.showwarning = show
        yield


def _complain(message: str) -> int:
    say("error", message)
    return BAD_INPUT
