"""Hold PROPERTIES.md to the tests that it names."""

import ast
import functools
import re
from pathlib import Path

TESTS = Path(__file__).parent
HELD = re.compile(r"`([\w/.]+\.py)::(\w+)`")


def named() -> list[tuple[Path, str]]:
    """List the tests of the main part: paths are relative to the folder that a section begins with."""
    main = (TESTS / "PROPERTIES.md").read_text().split("\n## Held twice")[0]
    folder, tests = TESTS, []
    for line in main.splitlines():
        if start := re.fullmatch(r"`tests/([\w/]*)`", line):
            folder = TESTS / start[1]
        tests += [(folder / path, name) for path, name in HELD.findall(line)]
    return tests


@functools.cache
def functions_of(path: Path) -> set[str]:
    """List the functions of a file; of one that is not there, none."""
    if not path.is_file():
        return set()
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_exists_and_is_named_once() -> None:
    tests = named()
    assert len(tests) > 50
    assert len(tests) == len(set(tests)), [
        str(path) + "::" + name for path, name in tests if tests.count((path, name)) > 1
    ]
    missing = [f"{path}::{name}" for path, name in tests if name not in functions_of(path)]
    assert not missing
