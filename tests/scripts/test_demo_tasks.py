"""The demo's tasks: every answer follows from its prompt, and Python agrees that it is right."""

import textwrap
from collections import Counter
from collections.abc import Callable

import pytest

from scripts.demo import tasks
from scripts.demo.tasks import CHANGE, DESCRIBE, WRITE, Whole, task_of

STUB = '''def grow(self, first, /, second=None, *rest, key, scale=2.5, **others):
    """Add to what is there."""'''
BODY = """total = first + self.size(second)
if key not in others:
    raise KeyError(key)
for each in rest:
    total += float(each) * scale
return total"""


def whole(stub: str = STUB, body: str = BODY) -> Whole:
    text = f"{stub}\n{textwrap.indent(body, '    ')}"
    node = tasks.only_function(text)
    assert node is not None
    return Whole(text, node, 0)


def test_a_description_names_parameters_calls_errors_and_results_in_their_order() -> None:
    assert tasks.describe(whole()) == "\n".join([
        "`grow` takes 7 parameters:",
        "- `self`: required",
        "- `first`: required",
        "- `second`: default `None`",
        "- `*rest`: any number",
        "- `key`: by name, required",
        "- `scale`: by name, default `2.5`",
        "- `**others`: any by name",
        "It calls `self.size`, `KeyError` and `float`.",
        "It raises `KeyError`.",
        "It returns `total`.",
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("change", "stub", "body", "wish", "changed"),
    [
        (
            tasks.with_parameter_renamed,
            'def f(size, key):\n    """Of a size."""',
            'x.size = size  # size\nreturn g(size=size, é=[size, "size"])',
            "Rename the parameter `size` to `item`.",
            'def f(item, key):\n    """Of a size."""\n    x.size = item  # size\n'
            '    return g(size=item, é=[item, "size"])',
        ),
        (
            tasks.with_function_renamed,
            "def f(n):",
            "return n and f(n - run)",
            "Rename the function to `compute`.",
            "def compute(n):\n    return n and compute(n - run)",
        ),
        (
            tasks.without_docstring,
            'def f(n):\n    """Do."""',
            "return n",
            "Remove the docstring.",
            "def f(n):\n    return n",
        ),
        (
            tasks.in_a_class,
            "def f(n):",
            "return n",
            "Put it into a class `Helper`.",
            "class Helper:\n    def f(n):\n        return n",
        ),
    ],
    ids=["parameter", "function", "docstring", "class"],
)
def test_a_function_is_changed_and_nothing_else(
    change: Callable[[Whole], tuple[str, str] | None], stub: str, body: str, wish: str, changed: str
) -> None:
    """A name is renamed wherever it is that name, and to one that the function does not hold."""
    assert change(whole(stub, body)) == (wish, changed)


@pytest.mark.parametrize("body", ["return lambda: a", "def g(a):\n    return a\nreturn g(a)", "global a\na = 1"])
def test_a_parameter_that_something_inside_may_mean_is_not_renamed(body: str) -> None:
    assert tasks.with_parameter_renamed(whole("def f(a):", body)) is None
    assert tasks.without_docstring(whole("def f(a):", body)) is None


def test_every_function_gets_one_task_and_the_three_are_equally_likely() -> None:
    examples = [task_of(f"def f{number}(x):", BODY) for number in range(300)]
    assert all(70 <= count <= 130 for count in Counter(task.category for task in examples).values())
    for number, task in enumerate(examples):
        text = whole(f"def f{number}(x):").text
        if task.category == WRITE:
            assert (task.prompt, task.reference) == (f"def f{number}(x):", text)
        else:
            assert task.prompt.endswith(f"\n\n{text}")
            assert task.reference != text
            assert task.category in (CHANGE, DESCRIBE)


@pytest.mark.parametrize("body", ["return '" + "x" * tasks.MAX_FUNCTION_CHARS + "'", "'''", "return 1\n):"])
def test_a_long_body_or_no_python_is_only_written(body: str) -> None:
    assert {task_of(f"def f{number}(x):", body).category for number in range(20)} == {WRITE}
