"""Commands whose options are the fields of dataclasses."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer

from peagle.cli import main
from peagle.cli.app import app
from peagle.cli.options import by_flag, command_of, given
from peagle.cli.settings.shared import PrefillOptions
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


@pytest.mark.parametrize("name", [name for name, _ in commands()])
def test_examples_of_the_help_stand_whole_at_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = dict(commands())[name] or ""
    assert main([*name.split(), "--help"]) == 0
    shown = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for line in inspect.cleandoc(text).partition("[/bold]")[2].partition("\n")[2].splitlines():
        assert re.sub(r"\[/?(cyan|bold)\]", "", line).strip() in shown


def test_the_main_help_fits_one_screen_and_each_command_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 36
    names = [path for path, _ in commands() if path and " " not in path]
    table = lines[next(i for i, line in enumerate(lines) if "Commands" in line) + 1 : -2]
    assert [line.split()[1] for line in table if line.strip("│ ")] == names


@pytest.mark.parametrize("name", ["speculate", "generate", "data", "sweep", "parity"])
def test_prompt_files_have_two_names_in_every_command(name: str) -> None:
    options = typer.main.get_command(app).commands[name].params  # type: ignore[attr-defined]
    assert any({"--prompts", "--prompt-file"} <= set(option.opts) for option in options)


def test_every_option_says_what_it_is() -> None:
    group = typer.main.get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        for option in command.params:
            if option.name != "help" and not getattr(option, "hidden", False):
                assert getattr(option, "help", None), f"{name} {option.name}"
