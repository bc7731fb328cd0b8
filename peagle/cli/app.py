"""Parse a command line into a command, a frozen dataclass, and run it. A user error is one line and exit code 2."""

import errno
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cyclopts import App, Group, Parameter
from cyclopts.exceptions import CycloptsError

from peagle.base.errors import InputError, InputWarning, cannot_start, is_of_backend, refuse_shadowed
from peagle.base.files import reason_of
from peagle.base.jax_workaround import MiscompilingJaxError
from peagle.cli.command import (
    ARGUMENTS,
    OPTIONS,
    Command,
    build_command,
    normalize,
    options_of,
    register,
    usage_error,
    with_flag,
)
from peagle.cli.output import say
from peagle.loading.hub import stay_offline

OK, BAD_INPUT, BROKEN_PIPE = 0, 2, 141

MAIN_HELP = """
Lossless speculative decoding for GPT-OSS with P-EAGLE drafters, in JAX.

Start with [cyan]peagle speculate[/cyan]. [cyan]peagle COMMAND --help[/cyan] has options and examples.
For completion in your shell: [cyan]source <(peagle --completion bash)[/cyan], or zsh.
"""
FIRST, MORE = Group("Start here", sort_key=0), Group("More", sort_key=1)
HELP_FLAGS = ("--help", "-h")
DEFAULTS = Parameter(negative=(), show_env_var=False, show_choices=False)


@dataclass(frozen=True)
class Entry:
    """A command in the help of all commands.

    group: its panel there. where: module:class within peagle.cli, imported when the command is used.
    """

    group: Group
    summary: str
    where: str

    def load(self) -> type[Command]:
        module, _, name = self.where.partition(":")
        kind: type[Command] = getattr(importlib.import_module(f"peagle.cli.{module}"), name)
        return kind


COMMANDS = {
    "speculate": Entry(FIRST, "Generate with speculative decoding and report the speed-up.", "speculate:Speculate"),
    "chat": Entry(FIRST, "Chat in the terminal with speculative decoding.", "chat:Chat"),
    "serve": Entry(FIRST, "Serve an OpenAI-compatible HTTP API.", "serve:Serve"),
    "train": Entry(FIRST, "Train a P-EAGLE, EAGLE-3 or DFlash drafter.", "train:Train"),
    "sweep": Entry(FIRST, "Measure acceptance length and speed over K.", "sweep:Sweep"),
    "info": Entry(FIRST, "Inspect checkpoints: geometry, memory, whether they fit.", "info:Info"),
    "download": Entry(MORE, "Download checkpoints from the Hugging Face Hub.", "download:Download"),
    "batch": Entry(MORE, "Run a file of OpenAI Batch API requests, without a server.", "batch:BatchCommand"),
    "cluster": Entry(MORE, "Serve from several replicas, on Ray Serve.", "cluster:Cluster"),
    "data": Entry(MORE, "Generate training data: a target's answers to prompts.", "data:Data"),
    "export": Entry(MORE, "Convert a drafter for vLLM or speculators.", "export:Export"),
    "report": Entry(MORE, "Render the report of a sweep or a training, or compare sweeps.", "report:Report"),
    "evaluate": Entry(MORE, "Check the accuracy on GSM8K, with drafts and plainly.", "evaluate:Evaluate"),
    "parity": Entry(MORE, "Check a pair against references; explain low acceptance.", "parity:Parity"),
    "bench": Entry(MORE, "Time a target's prefill, decoding and verify passes.", "bench:BenchCommand"),
    "check": Entry(MORE, "Test this machine's kernels and lossless decoding.", "check:Check"),
    "random": Entry(MORE, "Write a GPT-OSS checkpoint with random weights.", "random_checkpoint:RandomCheckpoint"),
}


@functools.cache
def application(*loaded: str) -> App:
    """Make the parser. loaded: commands with their options; the others only have a line in the help of all commands."""
    app = App(
        name="peagle",
        help=MAIN_HELP.strip(),
        help_format="rich",
        usage="Usage: peagle COMMAND [OPTIONS] [ARGS]",
        help_flags=HELP_FLAGS,
        version=_version,
        default_parameter=DEFAULTS,
        group_arguments=ARGUMENTS,
        group_parameters=OPTIONS,
    )
    app["--help"].show = app["--version"].show = False
    for index, (name, entry) in enumerate(COMMANDS.items()):
        if name in loaded:
            register(app, entry.load(), name)
        else:
            app.command(App(name=name, help=entry.summary, sort_key=index, group=entry.group, help_flags=()))
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: success. 2: bad input or usage, reported in one line on standard error. 141: the reader of the output has gone.
    Others are a command's own. Raises KeyboardInterrupt after Ctrl-C.
    """
    typed = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    stay_offline()  # only `peagle download` may use the network
    for stream in (sys.stdout, sys.stderr):  # a file name may hold bytes that the encoding lacks
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        refuse_shadowed()
        return _run(typed)
    except (InputError, MiscompilingJaxError) as error:
        return _complain(str(error))
    except OSError as error:
        return _report_os_error(error)
    except Exception as error:
        if is_of_backend(error):
            return _complain(cannot_start(error))
        if _out_of_memory(error):
            return _complain(
                f"out of memory: {str(error).splitlines()[0] if str(error) else 'no reason given'}; lower --context or "
                "--slots, or load smaller weights with --dtype bfloat16"
            )
        raise


def _run(typed: list[str]) -> int:
    name, *rest = typed
    if name.partition("=")[0] == "--completion":
        return _show_completion(typed)
    words = [name] if name in COMMANDS else []
    app, options = application(*words), list(options_of(COMMANDS[name].load()) if words else ())
    try:
        parsed = app(
            [name, *normalize(rest, options)], result_action="return_value", print_error=False, exit_on_error=False
        )
    except CycloptsError as error:
        return _complain(usage_error(error, words, options))
    return OK if parsed is None else _run_command(*parsed)  # None: the help, or the version, is printed


def _run_command(kind: type[Command], values: dict[str, Any]) -> int:
    from peagle.cli.compilation_cache import keep_compiled

    keep_compiled()
    if os.environ.pop("JAX_DISABLE_JIT", "0").lower() not in ("0", "false", ""):
        say("warning", "JAX_DISABLE_JIT is ignored: decoding runs compiled programs only")
    with _warnings_in_one_line():
        try:
            return build_command(kind, values).run()
        except InputError as error:
            raise InputError(with_flag(error, kind)) from error


def _show_completion(typed: Sequence[str]) -> int:
    """Print a shell's completion script for commands and options. Raises InputError for another shell."""
    shell, *others = [*typed[0].split("=", 1), *typed[1:]][1:] or [""]
    if shell not in ("bash", "zsh") or others:
        raise InputError(f"--completion is {' '.join([shell, *others])!r}; expected bash or zsh, and nothing else")
    app = application(*COMMANDS)
    print(app.generate_completion(shell="bash" if shell == "bash" else "zsh"))
    return OK


def _version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("peagle")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _report_os_error(error: OSError) -> int:
    """Report a failed read or write in one line, and return the exit code."""
    if error.filename is None and error.errno in (errno.EPIPE, errno.ENOSPC):
        # standard output cannot be written any more: Python must not flush it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    name = "" if error.filename is None else f"{error.filename}: "
    return _complain(f"{name}{reason_of(error)}; expected a place that can be read and written")


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

        def show(message: Warning | str, category: type[Warning], *origin: Any, **options: Any) -> None:
            if not issubclass(category, InputWarning):
                show_others(message, category, *origin, **options)
            elif str(message) not in printed:
                printed.add(str(message))
                say("warning", str(message))

        warnings.showwarning = show
        yield


def _complain(message: str) -> int:
    say("error", message)
    return BAD_INPUT
