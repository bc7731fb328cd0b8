"""Commands whose options are the fields of dataclasses."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from peagle.cli import main
from peagle.cli.app import app
from peagle.cli.options import by_flag, command_of, given
from peagle.cli.settings.shared import PrefillOptions, parse_kept_prefixes, parse_kv_memory, parse_prefix_cache
from peagle.ops.errors import InputError
from peagle.ops.row_blocks import BlockedPrefill


@dataclass(frozen=True, kw_only=True)
class Colour:
    red: Annotated[int, typer.Option("--red")] = 1
    names: Annotated[tuple[str, ...], typer.Option("--name")] = ()


@dataclass(frozen=True, kw_only=True)
class Paint:
    """Paint a place."""

    where: Annotated[str, typer.Argument()]
    colour: Colour = Colour()
    thick: Annotated[bool, typer.Option("--thick")] = False


@pytest.fixture
def painted() -> tuple[typer.Typer, list[Paint]]:
    app, seen = typer.Typer(), []

    @app.callback()
    def main() -> None: ...

    def paint(settings: Paint) -> int:
        seen.append(settings)
        return 7

    assert command_of(app, paint, lambda run: run()) is paint
    return app, seen


def commands(of: Any = None, path: str = "") -> Iterator[tuple[str, str | None]]:
    """Yield the words of each command and its help."""
    group = typer.main.get_command(app) if of is None else of
    yield path, group.help
    for name, each in getattr(group, "commands", {}).items():
        yield from commands(each, f"{path} {name}".strip())


def run(app: typer.Typer, *arguments: str) -> int:
    return typer.main.get_command(app).main(args=list(arguments), standalone_mode=False)


def test_fields_are_options_and_nested_dataclasses_are_groups_of_them(painted) -> None:
    app, seen = painted
    assert run(app, "paint", "door", "--red", "3", "--name", "a", "--name", "b") == 7
    assert run(app, "paint", "wall", "--thick") == 7
    assert seen == [Paint(where="door", colour=Colour(red=3, names=("a", "b"))), Paint(where="wall", thick=True)]


def test_a_field_without_a_default_is_required(painted) -> None:
    with pytest.raises(Exception, match=r"(?i)missing"):
        run(painted[0], "paint")


def test_the_docstring_is_the_help(painted, capsys) -> None:
    run(painted[0], "paint", "--help")
    assert "Paint a place." in capsys.readouterr().out


def test_what_differs_from_its_default_was_given() -> None:
    assert given(Paint(where="door", colour=Colour(red=1, names=("a",)))) == ["where", "names"]


def test_blocks_are_those_of_blocked_prefill() -> None:
    assert PrefillOptions(prefill="blocked", ffn_blocks=2).blocked() == BlockedPrefill(None, 2)
    assert PrefillOptions().blocked() is None
    with pytest.raises(InputError, match=r"--query-blocks is given, .* give --prefill blocked"):
        PrefillOptions(query_blocks=2).blocked()


def test_memory_is_a_size_or_one_of_a_few_words() -> None:
    assert [parse_kv_memory(typed) for typed in ("auto", "512MB", "1.5GiB")] == [None, 512_000_000, 3 << 29]
    typed = ("auto", "on", "off", "0", "2GB")
    assert [parse_prefix_cache(each) for each in typed] == [None, "on", "off", 0, 2_000_000_000]
    assert [parse_kept_prefixes(each) for each in typed] == ["on", "on", "off", 0, 2_000_000_000]
    for parse, wrong in ((parse_kv_memory, "0"), (parse_kv_memory, "off"), (parse_prefix_cache, "-1")):
        with pytest.raises(InputError, match=f"--[a-z-]* is '?{wrong}'?; expected "):
            parse(wrong)


def test_a_message_about_a_value_names_its_flag_as_typed() -> None:
    flags = {"top_k": "--top-k", "slots": "--slots", "num_speculative_tokens": "-k", "prompt_lengths": "-p"}
    for message, named in (
        ("top-k is -1; expected 0 or more", "--top-k is -1; expected 0 or more"),
        ("number of slots is 0", "--slots is 0"),
        ("slots are 0", "--slots is 0"),
        ("K is 0 in adaptive drafting", "-k is 0 in adaptive drafting"),
        ("prompt length is 0", "-p is 0"),
        ("the prompt is empty", "the prompt is empty"),
        ("--top-k is -1", "--top-k is -1"),
        ("a file is too long", "a file is too long"),
    ):
        assert by_flag(message, flags) == named


COMMANDS = dict(commands())
PROMPT_FILES = ("speculate", "generate", "data", "sweep", "parity")


def parameters(words: str) -> Iterator[Any]:
    """Yield the options and arguments of a command that its help shows."""
    command = typer.main.get_command(app)
    for word in words.split():
        command = command.commands[word]
    yield from (parameter for parameter in command.params if not getattr(parameter, "hidden", False))


def shown(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of a command's help at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*words.split(), "--help"]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_stands_whole_at_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line.strip() for line in shown(name, monkeypatch, capsys)]
    assert not [line for line in lines if "…" in line]
    for line in inspect.cleandoc(COMMANDS[name] or "").splitlines():
        assert re.sub(r"\[/?(cyan|bold)\]", "", line).strip() in lines


def test_the_help_of_all_commands_fits_one_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown("", monkeypatch, capsys)
    assert len(lines) <= 32
    for name, text in COMMANDS.items():
        if name and " " not in name:
            first = (text or "").splitlines()[0]
            assert any(re.fullmatch(rf"│ {name} +{re.escape(first)} +│", line) for line in lines), first


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help(name: str) -> None:
    for parameter in parameters(name):
        assert (parameter.help or "").endswith("."), parameter.opts


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("", "cluster")])
def test_every_command_has_examples(name: str) -> None:
    assert f"peagle {name}" in (COMMANDS[name] or "").partition("[bold]Examples[/bold]")[2]


@pytest.mark.parametrize("flag", ["--prompt-file", "--prompts"])
@pytest.mark.parametrize("name", PROMPT_FILES)
def test_files_of_prompts_have_two_names_in_every_command(
    name: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent, out = str(tmp_path / "absent.jsonl"), ["--out", str(tmp_path / "out")]
    assert main([name, flag, absent, *(out if name in ("data", "sweep") else [])]) == 2
    assert f"{absent} cannot be read" in capsys.readouterr().err


def test_all_commands_that_read_files_of_prompts_are_known() -> None:
    reads = {name for name in COMMANDS for parameter in parameters(name) if "--prompt-file" in parameter.opts}
    assert reads == set(PROMPT_FILES)
