"""The demo's tasks: every answer follows from its prompt, and Python agrees that it is right."""

import ast
import textwrap
from collections import Counter

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
    ("body", "lines"),
    [
        ("pass", ["It calls nothing.", "It returns nothing."]),
        ("yield from x\nreturn 1", ["It calls nothing.", "It is a generator."]),
        ("return [\n    x,\n]", ["It calls nothing.", "It returns an expression."]),
        ("if x:\n    return 1\nreturn x[0]", ["It calls nothing.", "It returns `1` or `x[0]`."]),
        ("def inner():\n    return open(x)\nreturn inner", ["It calls nothing.", "It returns `inner`."]),
        ("x.y.z(lambda: x())\nx()()", ["It calls `x.y.z` and `x`.", "It returns nothing."]),
    ],
)
def test_description_of_a_function_body(body: str, lines: list[str]) -> None:
    assert tasks.describe(whole("def f(x):", body)).split("\n")[2:] == lines


def test_a_renamed_parameter_is_renamed_wherever_it_is_the_parameter() -> None:
    changed = tasks.with_parameter_renamed(
        whole('def f(size, key):\n    """Of a size."""', 'x.size = size  # size\nreturn g(size=size, é=[size, "size"])')
    )
    assert changed is not None
    wish, text = changed
    new = tasks.NEW_PARAMETERS[0]
    assert wish == f"Rename the parameter `size` to `{new}`."
    assert text == (
        f'def f({new}, key):\n    """Of a size."""\n    x.size = {new}  # size\n'
        f'    return g(size={new}, é=[{new}, "size"])'
    )


@pytest.mark.parametrize("body", ["return lambda: a", "def g(a):\n    return a\nreturn g(a)", "global a\na = 1"])
def test_a_parameter_that_something_inside_may_mean_is_not_renamed(body: str) -> None:
    assert tasks.with_parameter_renamed(whole("def f(a):", body)) is None


def test_a_new_name_is_new() -> None:
    text = f"return {', '.join(tasks.NEW_PARAMETERS[:-1])}"
    assert whole("def f(a):", text).pick(tasks.NEW_PARAMETERS) == tasks.NEW_PARAMETERS[-1]
    every = f"return {', '.join(tasks.NEW_PARAMETERS)}"
    assert whole("def f(a):", every).pick(tasks.NEW_PARAMETERS) == f"{tasks.NEW_PARAMETERS[0]}2"


def test_a_renamed_function_calls_itself_by_its_new_name() -> None:
    wish, text = tasks.with_function_renamed(whole("def f(n):", "return n and f(n - 1)"))
    new = tasks.NEW_FUNCTIONS[0]
    assert wish == f"Rename the function to `{new}`."
    assert text == f"def {new}(n):\n    return n and {new}(n - 1)"


def test_a_docstring_is_removed_and_nothing_else() -> None:
    assert tasks.without_docstring(whole()) == ("Remove the docstring.", whole(STUB.split("\n")[0]).text)
    assert tasks.without_docstring(whole("def f():")) is None


def test_a_class_holds_the_function() -> None:
    wish, text = tasks.in_a_class(whole())
    (node,) = ast.parse(text).body
    assert isinstance(node, ast.ClassDef)
    assert wish == f"Put it into a class `{node.name}`."
    assert ast.dump(node.body[0]) == ast.dump(whole().node)


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
def test_task_for_a_long_body_or_no_python(body: str) -> None:
    assert {task_of(f"def f{number}(x):", body).category for number in range(20)} == {WRITE}
