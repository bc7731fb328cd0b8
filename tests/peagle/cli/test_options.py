"""Commands whose options are the fields of dataclasses."""

import dataclasses
import inspect
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from cyclopts import App

from peagle.base.errors import InputError
from peagle.base.flag import Flag
from peagle.cli import main
from peagle.cli.app import COMMANDS, DEFAULTS
from peagle.cli.app import application as commands
from peagle.cli.batch import BatchCommand
from peagle.cli.command import (
    ARGUMENTS,
    OPTIONS,
    Takes,
    build_command,
    normalize,
    options_of,
    register,
    with_flag,
)
from peagle.cli.info import Info
from peagle.cli.report import Report
from peagle.cli.speculate import Speculate
from peagle.config import AnswerConfig, SamplingParams, read_kv_memory, read_prefix_cache
from peagle.text.prompts import Rendering
from tests.support.commands import run


@dataclass(frozen=True, kw_only=True)
class Colour:
    red: Annotated[int, Flag("Colour", "N")] = 1
    """How red."""
    names: Annotated[tuple[str, ...], Flag("Colour", "NAME", ("--name",))] = ()
    """What it is called; repeatable."""
    mixed: int = 0
    dark: Annotated[bool, Flag("Colour")] = False
    """No command takes it."""


@dataclass(frozen=True, kw_only=True)
class Paint:
    """Paint a place."""

    where: Annotated[str, Flag(names=("WHERE",))]
    """The place."""
    colour: Annotated[Colour, Takes("red", "names")] = Colour(red=2)  # frozen
    thick: Annotated[bool, Flag()] = False
    """Use much paint."""
    dry: Annotated[bool, Flag(help="Let it dry.")] = False

    def run(self) -> int:
        return 0


def application() -> App:
    app = App(name="x", default_parameter=DEFAULTS, group_arguments=ARGUMENTS, group_parameters=OPTIONS)
    register(app, Paint, "paint")
    return app


def painted(*typed: str) -> Paint:
    """Read a command line of `paint`."""
    kind, values = application()(
        ["paint", *typed], result_action="return_value", print_error=False, exit_on_error=False
    )
    return build_command(kind, values)


def read(line: str, *more: str) -> Any:
    """Read a command line of ours."""
    typed = [*line.split(), *more]
    kind, values = commands(typed[0])(typed, result_action="return_value")
    return build_command(kind, values)


def test_fields_are_options_and_nested_dataclasses_are_groups_of_them() -> None:
    several = painted("door", "--red", "3", "--name", "a", "--name", "b")
    assert several == Paint(where="door", colour=Colour(red=3, names=("a", "b")))
    assert painted("wall", "--thick") == Paint(where="wall", colour=Colour(red=2), thick=True)


def test_options_may_stand_between_the_files_of_an_argument_that_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    runs = Path("ONE"), Path("TWO"), Path("THREE")
    assert read("report ONE --out DIR TWO --quiet THREE") == Report(runs=runs, out=Path("DIR"), quiet=True)
    assert read("info --slots 2") == Info(slots=2)
    commands("report")(["report", "--help"], result_action="return_value")
    assert capsys.readouterr().out.splitlines()[0] == "Usage: peagle report [OPTIONS] RUN..."


TWO_SLOTS = dataclasses.replace(BatchCommand.engine, slots=2)
THREE = AnswerConfig(max_new_tokens=3)
STOPPED = AnswerConfig(stop=("--help",))
PENALTY = SamplingParams(presence_penalty=-1.0)


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        ("speculate - -n 3", Speculate(prompt="-", answer=THREE)),
        ("speculate -n 3 -q -", Speculate(prompt="-", answer=THREE, quiet=True)),
        ("speculate --json - --stop -", Speculate(json="-", answer=AnswerConfig(stop=("-",)))),
        ("speculate --json - -", Speculate(json="-", prompt="-")),
        ("speculate -q -- -q", Speculate(prompt="-q", quiet=True)),
        ("speculate --stop -- -n 2", Speculate(answer=AnswerConfig(stop=("--",), max_new_tokens=2))),
        ("speculate --stop --help --system -h", Speculate(answer=STOPPED, rendering=Rendering(system="-h"))),
        ("speculate --presence-penalty -1 -- --", Speculate(prompt="--", sampling=PENALTY)),
        ("batch - OUT.jsonl --slots 2", BatchCommand(requests=Path("-"), answers=Path("OUT.jsonl"), engine=TWO_SLOTS)),
        ("batch IN.jsonl --slots 2 -", BatchCommand(requests=Path("IN.jsonl"), answers=Path("-"), engine=TWO_SLOTS)),
        ("report - --quiet x", Report(runs=(Path("-"), Path("x")), quiet=True)),
        ("info - x", Info(directories=("-", "x"))),
    ],
)
def test_a_dash_is_an_argument_in_its_place_or_the_value_of_an_option(typed: str, command: Any) -> None:
    name, *rest = typed.split()
    assert read(name, *normalize(rest, list(options_of(type(command))))) == command


# what is typed, the line, and the command whose help it names
REFUSED: list[tuple[str, str, str | None]] = [
    ("--help=foo", "no such command: --help=foo; did you mean --help?", ""),
    ("--completion", "--completion is ''; expected bash or zsh, and nothing else", None),
    ("--completion=zsh x", "--completion is 'zsh x'; expected bash or zsh, and nothing else", None),
    ("-z", "no such command: -z", ""),
    ("cluster -z", "no such option: -z", "cluster"),
    ("data", "expected --prompt-file FILE", "data"),
    ("report", "expected RUN", "report"),
    ("speculate --regex", "expected --regex REGEX", "speculate"),
    ("speculate --quiet=maybe", "--quiet is 'maybe'; expected true or false", "speculate"),
    ("speculate -qz", "no such option: -z", "speculate"),
    ("speculate --PROMPT x", "no such option: --PROMPT", "speculate"),
    ("speculate --slot 3", "no such option: --slot; did you mean --slots?", "speculate"),
    ("speculate - -", "unexpected argument -; leave it out", "speculate"),
    ("speculate -n - -", "-n is '-'; expected a valid integer", "speculate"),
    ("speculate --top-k 1.5", "--top-k is 1.5; expected a valid integer", "speculate"),
    ("speculate -n 3 Hi --max-new-tokens 4", "-n is given twice; leave one out", "speculate"),
    ("sweep --out x --drafter demo --drafter ngram", "--drafter is given twice; leave one out", "sweep"),
]


@pytest.mark.parametrize(("typed", "line", "command"), REFUSED)
def test_a_line_that_is_not_understood_is_refused_in_one_line(
    typed: str, line: str, command: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = "" if command is None else f" (peagle {command} --help shows the usage)".replace("  ", " ")
    assert run(capsys, *typed.split()) == (2, "", f"peagle: error: {line}{usage}\n")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_their_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in ("speculate", "--allow-origin", "--write-config"))


def test_docstrings_are_the_help_of_the_options_that_a_command_takes(capsys: pytest.CaptureFixture[str]) -> None:
    application()(["paint", "--help"], result_action="return_value")
    text = capsys.readouterr().out
    for part in ("Paint a place.", "Use much paint.", "Let it dry.", "How red.", "[default: 2]"):
        assert part in text
    assert "No command takes it." not in text


def test_memory_is_a_size_or_one_of_a_few_words() -> None:
    assert [read_kv_memory(typed) for typed in ("auto", "512MB", "1.5GiB")] == [None, 512_000_000, 3 << 29]
    assert [read_prefix_cache(text) for text in ("on", "off", "0", "2GB")] == ["on", "off", 0, 2_000_000_000]
    for reading, wrong in ((read_kv_memory, "off"), (read_prefix_cache, "-1")):
        with pytest.raises(InputError, match=f"[a-z_]* is '?{wrong}'?; expected "):
            reading(wrong)


@pytest.mark.parametrize(
    ("message", "field", "named"),
    [
        ("top-k is -1; expected 0 or more", "top_k", "--top-k is -1; expected 0 or more"),
        ("min tokens are -1", "min_tokens", "--min-tokens is -1"),
        ("K is 0 in adaptive drafting", "num_speculative_tokens", "-k is 0 in adaptive drafting"),
        ("the context is 1", "context", "--context is 1"),
        ("the prompt is empty", None, "the prompt is empty"),
        ("a file is too long", "slots", "a file is too long"),
    ],
)
def test_a_message_about_a_field_names_its_flag(message: str, field: str | None, named: str) -> None:
    assert with_flag(InputError(message, field), COMMANDS["speculate"].load()) == named


LOADED: dict[str, Any] = {name: entry.load() for name, entry in COMMANDS.items()}


def shown(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int = 80
) -> list[str]:
    """Return the lines of a command's help."""
    commands.cache_clear()  # a parser keeps the width
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*words.split(), "--help"]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", LOADED)
def test_the_help_of_a_command_stands_whole_at_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins with the command's summary, has examples, and says something of every option."""
    kind = LOADED[name]
    lines = [line.strip() for line in shown(name, monkeypatch, capsys)]
    assert not [line for line in lines if "…" in line or len(line) > 80]
    for line in inspect.cleandoc(kind.__doc__).splitlines():
        assert re.sub(r"\[/?(cyan|bold)\]", "", line).strip() in lines
    assert kind.__doc__.startswith(COMMANDS[name].summary)
    assert f"peagle {name}" in kind.__doc__.partition("[bold]Examples[/bold]")[2]
    assert not [option.names for option in options_of(kind) if not option.help.endswith(".")]


def test_there_are_few_options_and_each_help_fits_two_screens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [option for kind in LOADED.values() for option in options_of(kind) if not option.is_argument]
    assert len(flags) <= 247
    for name in LOADED:
        assert len(shown(name, monkeypatch, capsys, columns=100)) <= 100, name


def test_the_help_of_all_commands_fits_one_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown("", monkeypatch, capsys)
    assert len(lines) <= 32
    for name, entry in COMMANDS.items():
        assert any(re.fullmatch(rf"│ {name} +{re.escape(entry.summary)} +│", line) for line in lines), name


def test_help_and_options_import_nothing_heavy() -> None:
    """The help of every command, and the refusal of what is typed, come at once."""
    code = """
import sys
from peagle.cli import main
from peagle.cli.app import COMMANDS
assert main(["--help"]) == main(["speculate", "--help"]) == 0
for entry in COMMANDS.values():
    entry.load()
heavy = {"jax", "numpy", "transformers", "flax", "safetensors", "tokenizers", "matplotlib", "pydantic", "ray"}
print(sorted(heavy & set(sys.modules)))
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.endswith("\n[]\n")
    assert "--prompt-file" in shown
