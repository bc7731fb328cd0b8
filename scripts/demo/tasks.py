"""The demo's three tasks: to write a function, to change one, to describe one.

Writing a body is open-ended: so small a model is unsure of nearly every token. It can learn to change and to describe,
because most of the answer is in the prompt. The held-out prompts have the task as their category.
"""

import ast
import hashlib
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

WRITE, CHANGE, DESCRIBE = "write", "change", "describe"

MAX_FUNCTION_CHARS = 640  # of a function in a prompt: prompt and answer must fit a row of the training
MAX_CALLS, MAX_RESULTS, MAX_EXPRESSION_CHARS = 6, 3, 60
NEW_PARAMETERS = ("item", "value", "data", "source", "other", "entry", "text", "obj")
NEW_FUNCTIONS = ("run", "compute", "process", "helper", "resolve", "build", "apply", "handle")
NEW_CLASSES = ("Helper", "Base", "Reader", "Worker", "Node", "Context", "Table", "Session")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Changed = tuple[str, str]  # (the wish, the changed function)


class Task(NamedTuple):
    """A question and its right answer."""

    category: str
    prompt: str
    reference: str


class Whole(NamedTuple):
    """A function; the number `choice` makes all arbitrary choices."""

    text: str
    node: FunctionNode
    choice: int

    def pick(self, names: tuple[str, ...]) -> str:
        """Pick a name that the function does not contain, else the first one with a digit."""
        free = [name for name in names if not re.search(rf"\b{name}\b", self.text)]
        return free[self.choice % len(free)] if free else f"{names[0]}2"


def digest(text: str) -> str:
    """Hash a text, for an arbitrary but stable order."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def task_of(stub: str, body: str) -> Task:
    """Choose one of three tasks by the text's hash; writing, if the other is not possible."""
    text, number = f"{stub}\n{textwrap.indent(body, '    ')}", int(digest(f"{stub}\n{body}")[:12], 16)
    node = only_function(text)
    if number % 3 == 0 or len(text) > MAX_FUNCTION_CHARS or node is None:
        return Task(WRITE, stub, text)
    whole = Whole(text, node, number // 3)
    if number % 3 == 1:
        return Task(DESCRIBE, f"Describe this function.\n\n{text}", describe(whole))
    changes = (CHANGES[(whole.choice + offset) % len(CHANGES)](whole) for offset in range(len(CHANGES)))
    wish, changed = next(filter(None, changes))
    return Task(CHANGE, f"{wish}\n\n{text}", changed)


def only_function(text: str) -> FunctionNode | None:
    """Parse a text that is one function; None if it is not."""
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError):
        return None
    return statements[0] if len(statements) == 1 and isinstance(statements[0], FunctionNode) else None


# --- describe -------------------------------------------------------------------------------------------------------


def describe(whole: Whole) -> str:
    """Describe what a function takes, calls, raises and returns, in the order of the source."""
    parameters, inner = [*_parameters(whole)], [*_own_nodes(whole.node)]
    count = {0: "no parameters.", 1: "1 parameter:"}.get(len(parameters), f"{len(parameters)} parameters:")
    calls = _distinct(_dotted(part.func) for part in inner if isinstance(part, ast.Call))[:MAX_CALLS]
    raised = [part.exc for part in inner if isinstance(part, ast.Raise) and part.exc]
    errors = _distinct(_dotted(error.func if isinstance(error, ast.Call) else error) for error in raised)
    results = [part.value for part in inner if isinstance(part, ast.Return) and part.value]
    returned = _distinct(_short(whole.text, result) for result in results)[:MAX_RESULTS]
    lines = [f"`{whole.node.name}` takes {count}", *parameters]
    lines.append(f"It calls {_listed(calls, 'and')}." if calls else "It calls nothing.")
    if errors:
        lines.append(f"It raises {_listed(errors, 'or')}.")
    if any(isinstance(part, ast.Yield | ast.YieldFrom) for part in inner):
        lines.append("It is a generator.")
    elif returned:
        lines.append(f"It returns {_listed(returned, 'or')}.")
    else:
        lines.append("It returns an expression." if results else "It returns nothing.")
    return "\n".join(lines)


def _parameters(whole: Whole) -> Iterator[str]:
    """Yield a line for each parameter."""

    def line(name: str, default: ast.expr | None, by_name: str = "") -> str:
        short = default and _short(whole.text, default)
        what = "required" if default is None else f"default `{short}`" if short else "has a default"
        return f"- `{name}`: {by_name}{what}"

    spec = whole.node.args
    positional = [*spec.posonlyargs, *spec.args]
    defaults = [None] * (len(positional) - len(spec.defaults)) + spec.defaults
    yield from (line(parameter.arg, default) for parameter, default in zip(positional, defaults, strict=True))
    if spec.vararg:
        yield f"- `*{spec.vararg.arg}`: any number"
    for parameter, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        yield line(parameter.arg, default, "by name, ")
    if spec.kwarg:
        yield f"- `**{spec.kwarg.arg}`: any by name"


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function's statements, without those of functions inside it."""
    for child in node.body if isinstance(node, FunctionNode) else ast.iter_child_nodes(node):
        if not isinstance(child, FunctionNode | ast.ClassDef | ast.Lambda):
            yield child
            yield from _own_nodes(child)


def _dotted(node: ast.expr) -> str | None:
    """Render an expression such as a.b.c; None for another one."""
    if isinstance(node, ast.Attribute):
        return (front := _dotted(node.value)) and f"{front}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def _short(text: str, node: ast.expr) -> str | None:
    """Take the expression's source, if it is one short line without a backtick."""
    source = ast.get_source_segment(text, node)
    return source if source and len(source) <= MAX_EXPRESSION_CHARS and not set("\n`") & set(source) else None


def _distinct(names: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(name for name in names if name is not None))


def _listed(names: list[str], last: str) -> str:
    """List names as `a`, `b` and `c`."""
    *front, end = [f"`{name}`" for name in names]
    return f"{', '.join(front)} {last} {end}" if front else end


# --- change ---------------------------------------------------------------------------------------------------------


def without_docstring(whole: Whole) -> Changed | None:
    """Remove the docstring; None if there is none."""
    if ast.get_docstring(whole.node) is None:
        return None
    first, kept = whole.node.body[0], whole.text.split("\n")
    del kept[first.lineno - 1 : first.end_lineno]
    return "Remove the docstring.", "\n".join(kept)


def with_parameter_renamed(whole: Whole) -> Changed | None:
    """Rename a parameter; None if a function or declaration inside may use the name."""
    names = [parameter.arg for parameter in (*whole.node.args.args, *whole.node.args.kwonlyargs)]
    names = [name for name in names if name not in ("self", "cls") and not name.startswith("_")]
    closed = FunctionNode | ast.ClassDef | ast.Lambda | ast.Global | ast.Nonlocal
    if not names or any(isinstance(inner, closed) for inner in ast.walk(whole.node) if inner is not whole.node):
        return None
    old, new = names[whole.choice % len(names)], whole.pick(NEW_PARAMETERS)
    return f"Rename the parameter `{old}` to `{new}`.", _renamed(whole.text, whole.node, old, new)


def with_function_renamed(whole: Whole) -> Changed:
    """Rename the function, and its calls of itself."""
    old, new = whole.node.name, whole.pick(NEW_FUNCTIONS)
    text = re.sub(rf"\bdef {old}\b", f"def {new}", whole.text, count=1)
    return f"Rename the function to `{new}`.", _renamed(text, ast.parse(text), old, new)


def in_a_class(whole: Whole) -> Changed:
    """Put the function into a class."""
    name = whole.pick(NEW_CLASSES)
    return f"Put it into a class `{name}`.", f"class {name}:\n{textwrap.indent(whole.text, '    ')}"


def _renamed(text: str, tree: ast.AST, old: str, new: str) -> str:
    """Rename every name and parameter `old` of the text's tree to `new`. Columns of a tree count bytes."""
    lines = [line.encode() for line in text.split("\n")]
    named = (leaf for leaf in ast.walk(tree) if isinstance(leaf, ast.Name | ast.arg))
    places = [(leaf.lineno, leaf.col_offset) for leaf in named if old == getattr(leaf, "id", getattr(leaf, "arg", ""))]
    for row, column in sorted(places, reverse=True):
        line = lines[row - 1]
        lines[row - 1] = line[:column] + new.encode() + line[column + len(old.encode()) :]
    return b"\n".join(lines).decode()


CHANGES = (with_parameter_renamed, without_docstring, in_a_class, with_function_renamed)
