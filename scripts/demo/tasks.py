"""The demo's three tasks: to write a function, to change one, to describe one.

Writing a body is open-ended: so small a model is unsure of nearly every token. It can learn to change and to describe,
because most of the answer is in the prompt. The held-out prompts have the task as their category.
"""

import ast
import hashlib
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

WRITE, CHANGE, DESCRIBE = "write", "change", "describe"

MAX_FUNCTION_CHARS = 640  # of a function in a prompt: prompt and answer must fit a row of the training
MAX_CALLS, MAX_RESULTS, MAX_EXPRESSION_CHARS = 6, 3, 60
NEW_PARAMETERS = ("item", "value", "data", "source", "other", "entry", "text", "obj")
NEW_FUNCTIONS = ("run", "compute", "process", "helper", "resolve", "build", "apply", "handle")
NEW_CLASSES = ("Helper", "Base", "Reader", "Worker", "Node", "Context", "Table", "Session")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Task:
    """A question and its right answer."""

    category: str
    prompt: str
    reference: str


@dataclass(frozen=True)
class Whole:
    """A function. `stub` ends with its docstring; the number `choice` makes all arbitrary choices."""

    stub: str
    body: str
    choice: int

    @property
    def text(self) -> str:
        return f"{self.stub}\n{textwrap.indent(self.body, '    ')}"

    @property
    def node(self) -> FunctionNode:
        (node,) = ast.parse(self.text).body
        assert isinstance(node, FunctionNode)
        return node

    @property
    def has_docstring(self) -> bool:
        return ast.get_docstring(self.node) is not None

    def pick(self, names: tuple[str, ...]) -> str:
        """Pick a name that the function does not contain, else the first one with a digit."""
        free = [name for name in names if not re.search(rf"\b{name}\b", self.text)]
        return free[self.choice % len(free)] if free else f"{names[0]}2"


def digest(text: str) -> str:
    """Hash a text, for an arbitrary but stable order."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def task_of(stub: str, body: str) -> Task:
    """Choose one of three tasks by the text's hash; writing, if the other is not possible."""
    choice = int(digest(f"{stub}\n{body}")[:12], 16)
    whole = Whole(stub, body, choice // 3)
    writing = Task(WRITE, stub, whole.text)
    kind = choice % 3
    if kind == 0 or len(whole.text) > MAX_FUNCTION_CHARS or not _stands_alone(whole):
        return writing
    if kind == 1:
        return Task(DESCRIBE, f"Describe this function.\n\n{whole.text}", describe(whole))
    for offset in range(len(CHANGES)):
        changed = CHANGES[(whole.choice + offset) % len(CHANGES)](whole)
        if changed is not None:
            wish, text = changed
            return Task(CHANGE, f"{wish}\n\n{whole.text}", text)
    return writing


def _stands_alone(whole: Whole) -> bool:
    """Test whether the text parses as one function."""
    try:
        statements = ast.parse(whole.text).body
    except (SyntaxError, ValueError):
        return False
    return len(statements) == 1 and isinstance(statements[0], FunctionNode)


def describe(whole: Whole) -> str:
    """Describe what a function takes, calls, raises and returns, in the order of the source."""
    node = whole.node
    parameters = list(_parameters(node, whole.text))
    count = {0: "no parameters.", 1: "1 parameter:"}.get(len(parameters), f"{len(parameters)} parameters:")
    lines = [f"`{node.name}` takes {count}", *(f"- `{name}`: {what}" for name, what in parameters)]
    inner = list(_own_nodes(node))
    calls = _first(_dotted(part.func) for part in inner if isinstance(part, ast.Call))[:MAX_CALLS]
    raised = _first(_raised(part) for part in inner if isinstance(part, ast.Raise))
    results = [part.value for part in inner if isinstance(part, ast.Return) and part.value is not None]
    returned = _first(_short(whole.text, result) for result in results)[:MAX_RESULTS]
    lines.append(f"It calls {_listed(calls, 'and')}." if calls else "It calls nothing.")
    if raised:
        lines.append(f"It raises {_listed(raised, 'or')}.")
    if any(isinstance(part, ast.Yield | ast.YieldFrom) for part in inner):
        lines.append("It is a generator.")
    elif returned:
        lines.append(f"It returns {_listed(returned, 'or')}.")
    else:
        lines.append("It returns an expression." if results else "It returns nothing.")
    return "\n".join(lines)


def _parameters(node: FunctionNode, text: str) -> Iterator[tuple[str, str]]:
    """Yield (name in the source, description) of the parameters."""

    def what(default: ast.expr | None) -> str:
        if default is None:
            return "required"
        short = _short(text, default)
        return f"default `{short}`" if short else "has a default"

    spec = node.args
    positional = [*spec.posonlyargs, *spec.args]
    defaults = [None] * (len(positional) - len(spec.defaults)) + spec.defaults
    for parameter, default in zip(positional, defaults, strict=True):
        yield parameter.arg, what(default)
    if spec.vararg:
        yield f"*{spec.vararg.arg}", "any number"
    for parameter, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        yield parameter.arg, f"by name, {what(default)}"
    if spec.kwarg:
        yield f"**{spec.kwarg.arg}", "any by name"


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function's statements, without those of functions inside it."""
    for child in node.body if isinstance(node, FunctionNode) else ast.iter_child_nodes(node):
        if not isinstance(child, FunctionNode | ast.ClassDef | ast.Lambda):
            yield child
            yield from _own_nodes(child)


def _dotted(node: ast.expr) -> str | None:
    """Render an expression such as a.b.c; None for another one."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else None


def _raised(node: ast.Raise) -> str | None:
    cause = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return None if cause is None else _dotted(cause)


def _short(text: str, node: ast.expr) -> str | None:
    """Take the expression's source, if it is one short line without a backtick."""
    source = ast.get_source_segment(text, node)
    return source if source and len(source) <= MAX_EXPRESSION_CHARS and not set("\n`") & set(source) else None


def _first(names: Iterator[str | None]) -> list[str]:
    """Drop repeated names."""
    return list(dict.fromkeys(name for name in names if name is not None))


def _listed(names: list[str], last: str) -> str:
    """List names as `a`, `b` and `c`."""
    *front, end = [f"`{name}`" for name in names]
    return f"{', '.join(front)} {last} {end}" if front else end


def without_docstring(whole: Whole) -> tuple[str, str] | None:
    """Make (wish, changed function)."""
    if not whole.has_docstring:
        return None
    first = whole.node.body[0]
    kept = whole.text.split("\n")
    del kept[first.lineno - 1 : first.end_lineno]
    return "Remove the docstring.", "\n".join(kept)


def with_parameter_renamed(whole: Whole) -> tuple[str, str] | None:
    """Make (wish, changed function); None if a function or declaration inside may use the name."""
    node = whole.node
    names = [parameter.arg for parameter in (*node.args.args, *node.args.kwonlyargs)]
    names = [name for name in names if name not in ("self", "cls") and not name.startswith("_")]
    closed = FunctionNode | ast.ClassDef | ast.Lambda | ast.Global | ast.Nonlocal
    if not names or any(isinstance(inner, closed) for inner in ast.walk(node) if inner is not node):
        return None
    old, new = names[whole.choice % len(names)], whole.pick(NEW_PARAMETERS)
    return f"Rename the parameter `{old}` to `{new}`.", _renamed(whole.text, node, old, new)


def with_function_renamed(whole: Whole) -> tuple[str, str]:
    """Make (wish, changed function)."""
    old, new = whole.node.name, whole.pick(NEW_FUNCTIONS)
    text = re.sub(rf"\bdef {old}\b", f"def {new}", whole.text, count=1)
    return f"Rename the function to `{new}`.", _renamed(text, ast.parse(text), old, new)


def in_a_class(whole: Whole) -> tuple[str, str]:
    """Make (wish, changed function)."""
    name = whole.pick(NEW_CLASSES)
    return f"Put it into a class `{name}`.", f"class {name}:\n{textwrap.indent(whole.text, '    ')}"


def _renamed(text: str, tree: ast.AST, old: str, new: str) -> str:
    """Rename every name and parameter `old` of the text's tree to `new`."""
    lines = [line.encode() for line in text.split("\n")]
    places = [
        (leaf.lineno, leaf.col_offset)
        for leaf in ast.walk(tree)
        if (isinstance(leaf, ast.Name) and leaf.id == old) or (isinstance(leaf, ast.arg) and leaf.arg == old)
    ]
    for row, column in sorted(places, reverse=True):
        line = lines[row - 1]
        lines[row - 1] = line[:column] + new.encode() + line[column + len(old.encode()) :]
    return b"\n".join(lines).decode()


CHANGES: tuple[Callable[[Whole], tuple[str, str] | None], ...] = (
    with_parameter_renamed,
    without_docstring,
    in_a_class,
    with_function_renamed,
)
