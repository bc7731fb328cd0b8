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
from cyclopts.exceptions import MissingArgumentError

from peagle.cli import main
from peagle.cli.app import COMMANDS, DEFAULTS
from peagle.cli.app import application as commands
from peagle.cli.batch import BatchCommand
from peagle.cli.command import (
    ARGUMENTS,
    OPTIONS,
    Takes,
    build_command,
    changed_options,
    normalize,
    options_of,
    read_config_file,
    register,
    with_flag,
)
from peagle.cli.info import Info
from peagle.cli.report import Report
from peagle.cli.serve import Serve
from peagle.cli.speculate import Generate
from peagle.config import AnswerConfig, SamplingParams, read_kv_memory, read_prefix_cache
from peagle.ops.errors import InputError
from peagle.ops.flag import Flag
from peagle.text.prompts import Rendering
from tests.support.commands import refused, run


@dataclass(frozen=True, kw_only=True)
class Colour:
    red: Annotated[int, Flag("Colour", "N")] = 1
    """How red."""
    names: Annotated[tuple[str, ...], Flag("Colour", "NAME", ("--name",))] = ()
    """What it is called; repeatable."""
    mixed: int = 0


@dataclass(frozen=True, kw_only=True)
class Paint:
    """Paint a place."""

    where: Annotated[str, Flag(names=("WHERE",))]
    """The place."""
    colour: Annotated[Colour, Takes(helps={"red": "Redness."})] = Colour(red=2)  # frozen
    thick: Annotated[bool, Flag(help="Of several commands.")] = False
    """Use much paint."""
    dry: Annotated[bool, Flag(help="Let it dry.")] = False

    def run(self) -> int:
        return 0


def application() -> App:
    app = App(name="x", default_parameter=DEFAULTS, group_arguments=ARGUMENTS, group_parameters=OPTIONS)
    register(app, Paint, "paint", None)
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


def test_a_field_without_a_default_is_required() -> None:
    with pytest.raises(MissingArgumentError):
        painted()


def test_options_may_stand_between_the_files_of_an_argument_that_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    runs = Path("ONE"), Path("TWO"), Path("THREE")
    assert read("report ONE --out DIR TWO --quiet THREE") == Report(runs=runs, out=Path("DIR"), quiet=True)
    assert read("info --slots 2") == Info(slots=2)
    for command, usage in (("report", "[OPTIONS] RUN..."), ("frequent-tokens", "--out FILE FILE...")):
        commands(command)([command, "--help"], result_action="return_value")
        assert capsys.readouterr().out.splitlines()[0] == f"Usage: peagle {command} {usage}"


TWO_SLOTS = dataclasses.replace(BatchCommand.engine, slots=2)
THREE = AnswerConfig(max_new_tokens=3)
STOPPED = AnswerConfig(stop=("--help",))
PENALTY = SamplingParams(presence_penalty=-1.0)


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        ("generate - -n 3", Generate(prompt="-", answer=THREE)),
        ("generate -n 3 -q -", Generate(prompt="-", answer=THREE, quiet=True)),
        ("generate --json - --stop -", Generate(json="-", answer=AnswerConfig(stop=("-",)))),
        ("generate --json - -", Generate(json="-", prompt="-")),
        ("generate -q -- -q", Generate(prompt="-q", quiet=True)),
        ("generate --stop -- -n 2", Generate(answer=AnswerConfig(stop=("--",), max_new_tokens=2))),
        ("generate --stop --help --system -h", Generate(answer=STOPPED, rendering=Rendering(system="-h"))),
        ("generate -qn 3 -", Generate(prompt="-", answer=THREE, quiet=True)),
        ("generate --presence-penalty -1 -- --", Generate(prompt="--", sampling=PENALTY)),
        ("batch - OUT.jsonl --slots 2", BatchCommand(requests=Path("-"), answers=Path("OUT.jsonl"), engine=TWO_SLOTS)),
        ("batch IN.jsonl --slots 2 -", BatchCommand(requests=Path("IN.jsonl"), answers=Path("-"), engine=TWO_SLOTS)),
        ("report - --quiet x", Report(runs=(Path("-"), Path("x")), quiet=True)),
        ("info - x", Info(directories=("-", "x"))),
    ],
)
def test_a_dash_is_an_argument_in_its_place_or_the_value_of_an_option(typed: str, command: Any) -> None:
    name, *rest = typed.split()
    assert read(name, *normalize(rest, [name], list(options_of(type(command))))) == command


# what is typed, the line, and the command whose help it names
REFUSED: list[tuple[str, str, str | None]] = [
    ("--help=foo", "Option '--help' does not take a value.", ""),
    ("--version foo", "--version is followed by foo; leave that out", None),
    ("--completion", "--completion is ''; expected bash or zsh, and nothing else", None),
    ("--completion=zsh x", "--completion is 'zsh x'; expected bash or zsh, and nothing else", None),
    ("-z", "No such option: -z", ""),
    ("-- nope", "No such command 'nope'.", ""),
    ("cluster -- up -z", "No such option: -z", "cluster up"),
    ("-- info -z", "No such option: -z", "info"),
    ("info --help=foo", "Option '--help' does not take a value.", "info"),
    ("data", "Missing option '--prompt-file' / '--prompts'.", "data"),
    ("speculate --quiet=false", "Option '--quiet' does not take a value.", "speculate"),
    ("speculate -q=1", "Option '-q' does not take a value.", "speculate"),
    ("speculate -qz", "No such option: -z", "speculate"),
    ("speculate --PROMPT x", "No such option: --PROMPT", "speculate"),
    ("speculate --slot", "No such option: --slot. Did you mean '--slots'?", "speculate"),
    ("speculate - -", "Got unexpected extra argument(s) (-)", "speculate"),
    ("speculate -qn - -", "-n is '-'; expected a valid integer", "speculate"),
    ("speculate --top-k 1.5", "--top-k is 1.5; expected a valid integer", "speculate"),
]


@pytest.mark.parametrize(("typed", "line", "command"), REFUSED)
def test_unreadable_config_file_is_refused_in_one_line(
    typed: str, line: str, command: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = "" if command is None else f" (peagle {command} --help shows the usage)".replace("  ", " ")
    assert run(capsys, *typed.split()) == (2, "", f"peagle: error: {line}{usage}\n")


def test_a_whole_number_may_be_typed_as_8_0_and_a_file_may_set_flags(tmp_path: Path) -> None:
    assert read("generate --top-k 1.0").sampling.top_k == 1
    (tmp_path / "serve.toml").write_text("port = 8001.0\nquiet = true\nretain-full-kv = false\n")
    values = read_config_file(commands("serve"), ["serve"], Serve, tmp_path / "serve.toml")
    assert build_command(Serve, values) == Serve(port=8001, quiet=True)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_their_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in ("frequent-tokens", "--synthetic-acceptance", "--write-config"))


def test_docstrings_are_the_help_and_a_command_may_say_more_of_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    application()(["paint", "--help"], result_action="return_value")
    text = capsys.readouterr().out
    for part in ("Paint a place.", "Use much paint.", "Let it dry.", "Redness.", "[default: 2]"):
        assert part in text
    assert "Of several commands." not in text


def test_changed_options_differ_from_their_defaults() -> None:
    changed = changed_options(Paint(where="door", colour=Colour(red=2, names=("a",))))
    assert [option.name for option in changed] == ["where", "names"]


def test_memory_is_a_size_or_one_of_a_few_words() -> None:
    assert [read_kv_memory(typed) for typed in ("auto", "512MB", "1.5GiB")] == [None, 512_000_000, 3 << 29]
    typed = ("auto", "on", "off", "0", "2GB")
    assert [read_prefix_cache(text) for text in typed] == [None, "on", "off", 0, 2_000_000_000]
    for reading, wrong in ((read_kv_memory, "0"), (read_kv_memory, "off"), (read_prefix_cache, "-1")):
        with pytest.raises(InputError, match=f"[a-z_]* is '?{wrong}'?; expected "):
            reading(wrong)


@pytest.mark.parametrize("name", ["chat", "serve", "batch"])
def test_auto_keeps_prefixes_where_many_requests_come(name: str) -> None:
    (option,) = (option for option in options_of(COMMANDS[name].load()) if option.name == "prefix_cache")
    assert [option.value(typed) for typed in ("auto", "on", "off", "1kB")] == ["on", "on", "off", 1000]
    assert option.default == "on"


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


LOADED: dict[str, Any] = {name: entry.load() for name, entry in COMMANDS.items() if entry.where}
PROMPT_FILES = ("speculate", "generate", "data", "sweep", "parity")


def shown(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of a command's help at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
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


def test_the_help_of_all_commands_fits_one_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown("", monkeypatch, capsys)
    assert len(lines) <= 32
    for name, entry in ((name, entry) for name, entry in COMMANDS.items() if " " not in name):
        assert any(re.fullmatch(rf"│ {name} +{re.escape(entry.summary)} +│", line) for line in lines), name


@pytest.mark.parametrize("name", PROMPT_FILES)
def test_files_of_prompts_have_two_names_in_every_command(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent, out = str(tmp_path / "absent.jsonl"), ["--out", str(tmp_path / "out")]
    for flag in ("--prompt-file", "--prompts"):
        result = run(capsys, name, flag, absent, *(out if name in ("data", "sweep") else []))
        refused(result, f"{absent} cannot be read")


def test_all_commands_that_read_files_of_prompts_are_known() -> None:
    reads = {name for name, kind in LOADED.items() for option in options_of(kind) if "--prompt-file" in option.names}
    assert reads == set(PROMPT_FILES)


def test_help_and_options_import_nothing_heavy() -> None:
    """The help of every command, and the refusal of what is typed, come at once."""
    code = """
import sys
from peagle.cli import main
from peagle.cli.app import COMMANDS
assert main(["--help"]) == main(["speculate", "--help"]) == 0
for entry in COMMANDS.values():
    if entry.where:
        entry.load()
heavy = {"jax", "numpy", "transformers", "flax", "safetensors", "tokenizers", "matplotlib", "pydantic", "ray"}
print(sorted(heavy & set(sys.modules)))
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.endswith("\n[]\n")
    assert "--prompt-file" in shown
