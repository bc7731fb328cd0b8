"""Every flag of before is a flag now, with its aliases, its default and its place in the help."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peagle.cli.app import COMMANDS
from peagle.cli.command import Option, options_of

RECORDED: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("flags.json").read_text())
READ = [name for name, entry in COMMANDS.items() if entry.where]
NOT_TAKEN = {"--freeze-embedding"}  # its field says the contrary
WITHOUT_SLOTS = {"speculate": 1, "generate": 1, "data": 32, "bench": "1"}  # had no default beside the old name's


def options(name: str) -> dict[str, Option]:
    """Return the options of a command by each of their flags, former ones included."""
    return {
        flag: option
        for option in options_of(COMMANDS[name].load())
        for flag in (*option.names, option.flag.old)
        if flag
    }


@pytest.mark.parametrize("name", READ)
def test_a_flag_is_what_it_was(name: str) -> None:
    by_flag = options(name)
    for before in RECORDED[name]:
        if before["argument"]:
            continue
        here = {by_flag[flag] for flag in before["flags"]}
        assert len(here) == 1, before
        (option,) = here
        assert (option.kind is not bool) == before["value"], before
        assert option.repeats == before["repeats"] or option.flag.read is not None, before
        assert option.required == before["required"], before
        if not before["hidden"]:
            assert option.flag.group == before["group"], before


@pytest.mark.parametrize("name", READ)
def test_no_flag_has_come_unrecorded(name: str) -> None:
    shown = {flag for option in options_of(COMMANDS[name].load()) for flag in option.names}  # not the former ones
    assert shown <= {flag for before in RECORDED[name] for flag in before["flags"]}


@pytest.mark.parametrize("name", READ)
def test_a_default_is_what_it_was(name: str) -> None:
    by_flag = options(name)
    for before in RECORDED[name]:
        option = by_flag[before["flags"][0]]
        if option.required or before["hidden"] or before["flags"][0] in NOT_TAKEN:
            continue
        now = list(option.default) if isinstance(option.default, tuple) else option.default
        now = option.flag.default if now is None else now
        assert now == before["default"] or (before["flags"] == ["--slots"] and now == WITHOUT_SLOTS[name]), before


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
