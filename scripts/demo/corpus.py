"""Collect the demo pair's training text from the machine's installed Python sources.

Its folder holds, the same for the same versions:

    raw_train.jsonl, raw_heldout.jsonl      {"module", "path", "text"}: one source file a line
    chat_train.jsonl, chat_heldout.jsonl    {"module", "name", "category", "prompt", "reference"}: one function a line,
                                            as one of the tasks of scripts.demo.tasks
    heldout_prompts.jsonl                   the functions of chat_heldout with a docstring, at most a few per module
    manifest.json                           versions, the held-out modules

Held-out modules are whole top-level modules of the standard library. The training files hold none of their functions,
compared without docstring, comments and layout.
"""

import ast
import functools
import importlib.metadata
import importlib.util
import json
import platform
import sysconfig
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peagle.base.strict_json import dumps
from scripts.demo.tasks import FunctionNode, Task, digest, task_of

STDLIB = "stdlib"
# run-time dependencies of this package, direct and indirect, and import names that differ from the distribution's
PACKAGES = (
    *("jax", "flax", "optax", "orbax-checkpoint", "numpy", "rich", "typer", "huggingface_hub", "treescope", "etils"),
    *("absl-py", "Pygments", "markdown-it-py", "fsspec", "tqdm", "packaging", "PyYAML", "humanize"),
)
IMPORTS = {
    "orbax-checkpoint": "orbax",
    "absl-py": "absl",
    "Pygments": "pygments",
    "markdown-it-py": "markdown_it",
    "PyYAML": "yaml",
}
# tests, tables, and what is generated or vendored
SKIPPED_PARTS = frozenset(
    (
        *("test", "tests", "testing", "_testing", "idle_test", "internal_test_util", "export_back_compat_test_data"),
        *("idlelib", "turtledemo", "lib2to3", "encodings", "pydoc_data", "ensurepip", "__phello__", "locale"),
        *("site-packages", "__pycache__", "_vendor", "vendor", "_generated", "lexers", "styles"),
        *("example_libraries", "pallas", "experimental"),
    )
)
SKIPPED_PREFIXES = ("test_", "_sysconfigdata", "_tables", "add_newdocs")
SKIPPED_SUFFIXES = ("_test.py", "_test_util.py", "_pb2.py", "conftest.py")
MAX_FILE_BYTES, MAX_LINE_CHARS, MAX_DIGIT_FRAC = 160_000, 400, 0.12
MIN_BODY_LINES, MAX_BODY_LINES, MAX_BODY_CHARS = 2, 25, 700
MAX_STUB_CHARS, MAX_DOC_CHARS = 600, 320
NUM_HELD_OUT, MIN_HELD_OUT_PROMPTS, MAX_HELD_OUT_BYTES = 26, 4, 150_000
MAX_PROMPTS_PER_MODULE = 12


class SourceFile(NamedTuple):
    """A source file; `origin` is STDLIB or a distribution, `module` a top-level module or that distribution."""

    origin: str
    module: str
    path: str
    text: str


class Function(NamedTuple):
    """A function as a chat example; `body_key` is equal for bodies that differ in comments or layout only."""

    module: str
    name: str
    task: Task
    has_docstring: bool
    body_key: str


# --- source files ---------------------------------------------------------------------------------------------------


def collect_sources() -> list[SourceFile]:
    """Read the standard library and the packages, every text once."""
    sources: dict[str, SourceFile] = {}
    for source in walk_sources(Path(sysconfig.get_paths()["stdlib"]), STDLIB):
        sources.setdefault(digest(source.text), source)
    for name in PACKAGES:
        for source in walk_sources(package_root(name), name):
            sources.setdefault(digest(source.text), source)
    return [*sources.values()]


def package_root(name: str) -> Path:
    """Find the folder of an installed distribution without importing it."""
    spec = importlib.util.find_spec(IMPORTS.get(name, name))
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"corpus: package {name!r} is not installed; expected `pip install '.[test]'`")
    return Path(next(iter(spec.submodule_search_locations)))


def walk_sources(root: Path, origin: str) -> Iterator[SourceFile]:
    """Yield the sources under root, in the order of their paths."""
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if is_source(relative) and (text := read_source(path)) is not None:
            module = relative.parts[0].removesuffix(".py") if origin == STDLIB else origin
            yield SourceFile(origin, module, f"{origin}/{relative.as_posix()}", text)


def is_source(relative: Path) -> bool:
    """Test whether a path is none of those to skip."""
    skipped = relative.name.startswith(SKIPPED_PREFIXES) or relative.name.endswith(SKIPPED_SUFFIXES)
    return not (skipped or SKIPPED_PARTS.intersection(relative.parts))


def read_source(path: Path) -> str | None:
    """Read a file with "\\n" line ends; None if it is not UTF-8, not parseable or a table."""
    try:
        text = strip_licence(path.read_text(encoding="utf-8"))
        parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return None
    return text if is_text(text) else None


def strip_licence(text: str) -> str:
    """Remove a leading licence in comments, which hundreds of files repeat."""
    lines = text.splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    head = "".join(lines[:end]).lower()
    return "".join(lines[end:]) if "licen" in head or "copyright" in head else text


def is_text(text: str) -> bool:
    """Test whether a text is no table: not huge, no very long lines, few digits."""
    if not 200 <= len(text) <= MAX_FILE_BYTES or "\0" in text:
        return False
    long_lines = max(map(len, text.splitlines())) > MAX_LINE_CHARS
    return not long_lines and sum(map(str.isdigit, text)) <= MAX_DIGIT_FRAC * len(text)


def parse(text: str) -> ast.Module:
    """Parse without the warnings about escapes in old sources."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


# --- functions ------------------------------------------------------------------------------------------------------


def functions_of(text: str) -> list[FunctionNode]:
    """List every function and method of a source, nested ones too, in source order."""
    functions = [node for node in ast.walk(parse(text)) if isinstance(node, FunctionNode)]
    return sorted(functions, key=lambda node: node.lineno)


def statements_of(node: FunctionNode) -> list[ast.stmt]:
    """List the function's statements but for its docstring."""
    return node.body[ast.get_docstring(node, clean=False) is not None :]


def normalised_body(node: FunctionNode) -> str:
    """Render the function's statements without docstring, comments and layout."""
    return "\n".join(map(ast.dump, statements_of(node)))


def function_key(node: FunctionNode) -> str:
    """Make a key that is equal for functions with equal name, parameters and statements."""
    return digest(f"{node.name}({ast.dump(node.args)})\n{normalised_body(node)}")


@functools.cache
def chat_functions(source: SourceFile) -> tuple[Function, ...]:
    """List the functions of a file that are short enough for a chat example, and not trivial."""
    lines, kept = source.text.split("\n"), []
    for node in functions_of(source.text):
        if is_trivial(node) or (stub := stub_of(node, lines)) is None or (body := body_of(node, lines)) is None:
            continue
        short = len(stub) <= MAX_STUB_CHARS and len(body) <= MAX_BODY_CHARS
        if short and MIN_BODY_LINES <= body.count("\n") + 1 <= MAX_BODY_LINES:
            has_docstring, key = len(statements_of(node)) < len(node.body), digest(normalised_body(node))
            kept.append(Function(source.module, node.name, task_of(stub, body), has_docstring, key))
    return tuple(kept)


def is_trivial(node: FunctionNode) -> bool:
    """Test whether a body only raises or does nothing."""
    statements = statements_of(node)
    return len(statements) <= 1 and all(isinstance(one, ast.Pass | ast.Raise | ast.Expr) for one in statements)


def stub_of(node: FunctionNode, lines: Sequence[str]) -> str | None:
    """Render signature and the docstring's first paragraph, dedented; None if the body is on the signature's line."""
    first = node.body[0].lineno
    ends = (i for i in range(first - 1, node.lineno - 1, -1) if lines[i - 1].rstrip().endswith(":"))
    if first == node.lineno or (header_end := next(ends, None)) is None:
        return None
    header = textwrap.dedent("\n".join(lines[node.lineno - 1 : header_end]))
    docstring = ast.get_docstring(node, clean=False) or ""
    text = textwrap.dedent(docstring).strip().split("\n\n")[0].strip()
    if len(text) > MAX_DOC_CHARS or '"""' in text or "\\" in text:
        return None
    quoted = '"""' + "\n".join(line.strip() for line in text.splitlines()) + '"""'
    return f"{header}\n{textwrap.indent(quoted, '    ')}" if text else header


def body_of(node: FunctionNode, lines: Sequence[str]) -> str | None:
    """Render the statements after the docstring, dedented; None if they do not parse alone."""
    has_docstring = len(statements_of(node)) < len(node.body)
    start = node.body[0].end_lineno if has_docstring else node.body[0].lineno - 1
    body = textwrap.dedent("\n".join(line.rstrip() for line in lines[start : node.end_lineno])).strip("\n")
    if not body.strip() or body.startswith(" ") or "\t" in body:
        return None
    try:
        return body if parse(body).body else None
    except SyntaxError:
        return None


# --- the split ------------------------------------------------------------------------------------------------------


def choose_held_out(sources: Iterable[SourceFile]) -> list[str]:
    """Choose NUM_HELD_OUT standard modules with enough prompts, by their names' hashes."""
    by_module: dict[str, list[SourceFile]] = defaultdict(list)
    for source in sources:
        if source.origin == STDLIB:
            by_module[source.module].append(source)
    chosen: list[str] = []
    for module in sorted(by_module, key=digest):
        files = by_module[module]
        prompts = sum(function.has_docstring for source in files for function in chat_functions(source))
        if prompts >= MIN_HELD_OUT_PROMPTS and sum(len(source.text) for source in files) <= MAX_HELD_OUT_BYTES:
            chosen.append(module)
        if len(chosen) == NUM_HELD_OUT:
            return sorted(chosen)
    raise SystemExit(
        f"corpus: only {len(chosen)} modules have {MIN_HELD_OUT_PROMPTS} prompts, {NUM_HELD_OUT} are needed"
    )


def without_functions(source: SourceFile, forbidden: set[str]) -> SourceFile:
    """Remove the lines of all functions with a key in `forbidden`."""
    lines = source.text.split("\n")
    for node in functions_of(source.text):
        if function_key(node) in forbidden:
            first = min(part.lineno for part in (node, *node.decorator_list))
            lines[first - 1 : node.end_lineno] = [""] * (node.end_lineno - first + 1)
    return source._replace(text="\n".join(lines))


def chats(sources: Iterable[SourceFile], keys: set[str]) -> list[Function]:
    """List the functions of files whose body is not among `keys`, and add their bodies to it."""
    kept = []
    for function in (function for source in sources for function in chat_functions(source)):
        if function.body_key not in keys:
            keys.add(function.body_key)
            kept.append(function)
    return kept


def select_prompts(functions: Sequence[Function]) -> list[Function]:
    """Choose functions with a docstring, by hash, at most MAX_PROMPTS_PER_MODULE of each module."""
    chosen: list[Function] = []
    for module in sorted({function.module for function in functions}):
        mine = [function for function in functions if function.module == module and function.has_docstring]
        chosen += sorted(mine, key=lambda function: digest(function.task.prompt))[:MAX_PROMPTS_PER_MODULE]
    return chosen


def split(sources: Sequence[SourceFile]) -> tuple[list[str], dict[str, list[SourceFile]], dict[str, list[Function]]]:
    """Return (held-out modules, files of source, files of chat): free of leaks and of repeated bodies."""
    modules, keys = choose_held_out(sources), set[str]()
    held_out, rest = [], []
    for source in sources:
        (held_out if source.origin == STDLIB and source.module in modules else rest).append(source)
    forbidden = {function_key(node) for source in held_out for node in functions_of(source.text)}
    raw = {"raw_train": [without_functions(source, forbidden) for source in rest], "raw_heldout": held_out}
    chat = {"chat_heldout": chats(held_out, keys), "chat_train": chats(rest, keys)}
    return modules, raw, {**chat, "heldout_prompts": select_prompts(chat["chat_heldout"])}


def collect(out: Path) -> None:
    """Write the files that the module's docstring lists, of the installed packages, into a folder."""
    modules, raw, chat = split(collect_sources())
    out.mkdir(parents=True, exist_ok=True)
    for name, sources in raw.items():
        write_lines(out / f"{name}.jsonl", (source._asdict() for source in sources))
    for name, functions in chat.items():
        records = ({"module": one.module, "name": one.name, **one.task._asdict()} for one in functions)
        write_lines(out / f"{name}.jsonl", records)
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}
    manifest = {"versions": versions, "held_out_modules": modules}
    (out / "manifest.json").write_text(dumps(manifest, indent=1) + "\n", encoding="utf-8")


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
