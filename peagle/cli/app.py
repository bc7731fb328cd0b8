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
    read_config_file,
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

    group: its panel there; None for a subcommand. where: module:class within peagle.cli, imported when the command is
    used; empty for a group of subcommands.
    """

    group: Group | None
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
    "batch": Entry(MORE, "Run a file of OpenAI Batch API requests, without a server.", "batch:BatchCommand"),
    "cluster": Entry(MORE, "Serve from several replicas on Ray Serve.", ""),
    "cluster up": Entry(None, "Serve the API of `peagle serve` from several replicas, on Ray Serve.", "cluster:Up"),
    "data": Entry(MORE, "Generate training data: a target's answers to prompts.", "data:Data"),
    "export": Entry(MORE, "Convert a drafter for vLLM or speculators.", "export:Export"),
    "report": Entry(MORE, "Render the report of a sweep or a training, or compare sweeps.", "report:Report"),
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
        version_flags=[],
        default_parameter=DEFAULTS,
        group_arguments=ARGUMENTS,
        group_parameters=OPTIONS,
    )
    app["--help"].show = False
    for index, (words, entry) in enumerate(COMMANDS.items()):
        parent_name, _, name = words.rpartition(" ")
        parent = app[parent_name] if parent_name else app
        if words in loaded:
            register(parent, entry.load(), name, entry.group)
        else:
            flags = () if entry.where else HELP_FLAGS
            panel: dict[str, Any] = {} if entry.group is None else {"group": entry.group}
            stub = App(name=name, help=entry.summary, sort_key=index, help_flags=flags, version_flags=[], **panel)
            parent.command(stub)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: success. 2: bad input or usage, reported in one line on standard error. 141: the reader of the output has gone.
    Others are a command's own. Raises KeyboardInterrupt after Ctrl-C.
    """
    typed = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    stay_offline()  # only --download may use the network
    for stream in (sys.stdout, sys.stderr):  # a file name may hold bytes that the encoding lacks
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        refuse_shadowed()
        _refuse_undecodable(typed)
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
                "--slots, or load smaller weights with --experts packed or --dtype bfloat16"
            )
        raise


def _refuse_undecodable(typed: Sequence[str]) -> None:
    """Raise InputError if this Python does not read names as UTF-8, and an argument or the folder is not ASCII.

    Such names are no text, which libraries refuse with errors of their own.
    """
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8" and not "".join([*typed, os.getcwd()]).isascii():
        raise InputError(
            f"this Python reads arguments and names of files as {encoding}, and one of them is not ASCII; expected "
            "UTF-8: set PYTHONUTF8=1"
        )


def _run(typed: list[str]) -> int:
    if typed[0] == "--version":
        return _show_version(typed[1:])
    if typed[0].partition("=")[0] == "--completion":
        return _show_completion(typed)
    words, typed = _command_words(typed)
    name = " ".join(words)
    loaded = [name] if words and COMMANDS[name].where else []
    app, options = application(*loaded), list(options_of(COMMANDS[name].load()) if loaded else ())
    line = [*words, *normalize(typed, options)]
    try:
        parsed = app(line, result_action="return_value", print_error=False, exit_on_error=False)
    except CycloptsError as error:
        return _complain(usage_error(error, words, options, line))
    return OK if parsed is None else _run_command(app, words, *parsed)  # None: the help is printed


def _run_command(app: App, words: Sequence[str], kind: type[Command], values: dict[str, Any]) -> int:
    """Run a command. A --config file supplies the values that were not typed."""
    from peagle.cli.compilation_cache import keep_compiled

    keep_compiled()
    if os.environ.pop("JAX_DISABLE_JIT", "0").lower() not in ("0", "false", ""):
        say("warning", "JAX_DISABLE_JIT is ignored: decoding runs compiled programs only")
    with _warnings_in_one_line():
        try:
            if "config" in values:
                values = {**read_config_file(app, words, kind, values["config"]), **values}
            command = build_command(kind, values)
            if any(option.name == "download" and option.of(command) for option in options_of(kind)):
                from peagle.cli.models import download  # imports JAX

                download(command)
            return command.run()
        except InputError as error:
            raise InputError(with_flag(error, kind)) from error


def _command_words(typed: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into (the words of its command, the rest). A -- before a word is dropped."""
    words: list[str] = []
    while typed:
        rest = typed[1:] if typed[0] == "--" else typed
        if not rest or " ".join([*words, rest[0]]) not in COMMANDS:
            break
        words.append(rest[0])
        typed = rest[1:]
    return words, list(typed)


def _show_completion(typed: Sequence[str]) -> int:
    """Print a shell's completion script for commands and options. Raises InputError for another shell."""
    shell, *others = [*typed[0].split("=", 1), *typed[1:]][1:] or [""]
    if shell not in ("bash", "zsh") or others:
        raise InputError(f"--completion is {' '.join([shell, *others])!r}; expected bash or zsh, and nothing else")
    app = application(*(name for name, entry in COMMANDS.items() if entry.where))
    print(app.generate_completion(shell="bash" if shell == "bash" else "zsh"))
    return OK


def _show_version(others: Sequence[str]) -> int:
    import importlib.metadata

    if others:
        raise InputError(f"--version is followed by {' '.join(others)}; leave that out")
    try:
        print(importlib.metadata.version("peagle"))
    except importlib.metadata.PackageNotFoundError:
        print("not installed")
    return OK


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
