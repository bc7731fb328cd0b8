"""JSON that every reader takes."""

import ast
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.base.strict_json import Written, dumps, number

ROOT = Path(__file__).parents[3]
# what passes between two processes of a script, and is no file
PIPES = {"scripts/peers/worker.py", "scripts/peers/remote.py"}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=8,
)


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def expected(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: expected(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [expected(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@settings(deadline=None, max_examples=25)
@given(values)
def test_numbers_that_are_not_finite_become_null_and_all_else_stays(value: object) -> None:
    assert strict(dumps(value)) == expected(value)
    assert dumps(value, indent=1).isascii()


@pytest.mark.parametrize("value", [str, lambda text: {text: [text]}, lambda text: [Written(dumps(text)), text]])
def test_a_value_is_one_line_to_every_reader(value: Callable[[str], Any]) -> None:
    """Some end lines at any of Unicode's ends, as str.splitlines does: those of server-sent events, for one."""
    text = "".join(map(chr, range(0x3000)))
    assert len(text.splitlines()) > 9
    written = dumps(value(text), ensure_ascii=False)
    assert len(written.splitlines()) == 1
    assert strict(written) == expected(value(text) if not isinstance(value(text), list) else [text, text])


def test_keys_that_are_numbers_and_values_that_are_not_json() -> None:
    read = strict(dumps({1: math.nan, 2: {"a": (math.inf, -math.inf, 0.5)}}))
    assert read == {"1": None, "2": {"a": [None, None, 0.5]}}
    with pytest.raises(TypeError):
        dumps({"a": object()})


@settings(deadline=None, max_examples=25)
@given(values, st.lists(values, max_size=3))
def test_written_json_is_embedded_unchanged(value: object, items: list[object]) -> None:
    array = Written.array([dumps(item) for item in items])
    text = dumps({"before": math.nan, "é": [array, {}, (), value]}, ensure_ascii=False)
    assert strict(text) == expected({"before": None, "é": [items, {}, [], value]})
    assert "é" in text


@given(st.floats())
def test_a_number_alone_is_written_as_in_a_value(value: float) -> None:
    assert number(value) == dumps(value)


def test_everything_is_written_by_it() -> None:
    """No other module calls json.dumps or json.dump."""
    others = []
    for package in ("peagle", "target", "drafter", "scripts"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name == "peagle/base/strict_json.py" or name in PIPES:
                continue
            text = path.read_text("utf-8")
            for node in ast.walk(ast.parse(text)) if "dump" in text else ():
                if isinstance(node, ast.Attribute) and node.attr in ("dump", "dumps"):
                    whole = isinstance(node.value, ast.Name) and node.value.id == "json"
                    others += [f"{name}:{node.lineno}"] if whole else []
                if isinstance(node, ast.ImportFrom) and node.module == "json":
                    others += [f"{name}:{node.lineno}" for alias in node.names if alias.name in ("dump", "dumps")]
    assert not others, f"write with peagle.base.strict_json: {others}"
