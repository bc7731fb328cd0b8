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
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from peagle.base.strict_json import dumps
from scripts.demo.tasks import FunctionNode, Task, digest, task_of

# Distribution -> import name: run-time dependencies of this package, direct and indirect.
PACKAGES = {
    "jax": "jax",
    "flax": "flax",
    "optax": "optax",
    "orbax-checkpoint": "orbax",
    "numpy": "numpy",
    "rich": "rich",
    "typer": "typer",
    "huggingface_hub": "huggingface_hub",
    "treescope": "treescope",
    "etils": "etils",
    "absl-py": "absl",
    "Pygments": "pygments",
    "markdown-it-py": "markdown_it",
    "fsspec": "fsspec",
    "tqdm": "tqdm",
    "packaging": "packaging",
    "PyYAML": "yaml",
    "humanize": "humanize",
}
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

MAX_FILE_BYTES = 160_000
MAX_LINE_CHARS = 400
MAX_DIGIT_FRAC = 0.12

MIN_BODY_LINES, MAX_BODY_LINES = 2, 25
MAX_BODY_CHARS = 700
MAX_STUB_CHARS = 600
MAX_DOC_CHARS = 320

NUM_HELD_OUT = 26
MIN_HELD_OUT_PROMPTS, MAX_PROMPTS_PER_MODULE = 4, 12
MAX_HELD_OUT_BYTES = 150_000


@dataclass(frozen=True)
class SourceFile:
    """A source file; `origin` is "stdlib" or a distribution, `module` a top-level module or that distribution."""

    origin: str
    module: str
    path: str
    text: str


@dataclass(frozen=True)
class Function:
    """A function as a chat example; `body_key` is equal for bodies that differ in comments or layout only."""

    module: str
    name: str
    task: Task
    has_docstring: bool
    body_key: str

    def record(self) -> dict[str, str]:
        """Make the function's line on disk."""
        return {"module": self.module, "name": self.name, **asdict(self.task)}


@dataclass(frozen=True)
class Corpus:
    """The collected text; training parts hold no function of `held_out_modules`."""

    raw_train: list[SourceFile]
    raw_heldout: list[SourceFile]
    chat_train: list[Function]
    chat_heldout: list[Function]
    heldout_prompts: list[Function]
    held_out_modules: list[str]


def is_source(relative: Path) -> bool:
    """Test whether a path is no test, no table, and neither generated nor vendored."""
    if SKIPPED_PARTS.intersection(relative.parts):
        return False
    return not (relative.name.startswith(SKIPPED_PREFIXES) or relative.name.endswith(SKIPPED_SUFFIXES))


def is_text(text: str) -> bool:
    """Test whether a text is no table: not huge, no very long lines, few digits."""
    if not 200 <= len(text) <= MAX_FILE_BYTES or "\0" in text:
        return False
    if max(map(len, text.splitlines())) > MAX_LINE_CHARS:
        return False
    return sum(map(str.isdigit, text)) <= MAX_DIGIT_FRAC * len(text)


def strip_licence(text: str) -> str:
    """Remove a leading licence in comments, which hundreds of files repeat."""
    lines = text.splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    head = "".join(lines[:end]).lower()
    return "".join(lines[end:]) if "licen" in head or "copyright" in head else text


def read_source(path: Path) -> str | None:
    """Read a file with "\\n" line ends; None if it is not UTF-8, not parseable or a table."""
    try:
        text = strip_licence(path.read_text(encoding="utf-8"))
        parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return None
    return text if is_text(text) else None


def walk_sources(root: Path, origin: str) -> Iterator[SourceFile]:
    """Yield the sources under root, in the order of their paths."""
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if is_source(relative) and (text := read_source(path)) is not None:
            module = relative.parts[0].removesuffix(".py") if origin == "stdlib" else origin
            yield SourceFile(origin, module, f"{origin}/{relative.as_posix()}", text)


def package_root(import_name: str) -> Path:
    """Find the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(import_name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"corpus: package {import_name!r} is not installed; expected `pip install '.[test]'`")
    return Path(next(iter(spec.submodule_search_locations)))


def collect_sources() -> list[SourceFile]:
    """Read the standard library and the packages, every text once."""
    digests: set[str] = set()
    sources: list[SourceFile] = []
    roots = [("stdlib", Path(sysconfig.get_paths()["stdlib"]))]
    roots += [(distribution, package_root(name)) for distribution, name in PACKAGES.items()]
    for origin, root in roots:
        for source in walk_sources(root, origin):
            key = digest(source.text)
            if key not in digests:
                digests.add(key)
                sources.append(source)
    return sources


def docstring_node(node: FunctionNode) -> ast.Expr | None:
    """Find the statement that is the function's docstring."""
    first = node.body[0]
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return first if is_text else None


def statements_of(node: FunctionNode) -> list[ast.stmt]:
    """List the function's statements but for its docstring."""
    return node.body[1:] if docstring_node(node) else node.body


def normalised_body(node: FunctionNode) -> str:
    """Render the function's statements without docstring, comments and layout."""
    return "\n".join(map(ast.dump, statements_of(node)))


def function_key(node: FunctionNode) -> str:
    """Make a key that is equal for functions with equal name, parameters and statements."""
    return digest(f"{node.name}({ast.dump(node.args)})\n{normalised_body(node)}")


def functions_of(tree: ast.Module) -> list[FunctionNode]:
    """List every function and method, nested ones too, in source order."""
    functions = [node for node in ast.walk(tree) if isinstance(node, FunctionNode)]
    return sorted(functions, key=lambda node: node.lineno)


def parse(text: str) -> ast.Module:
    """Parse without the warnings about escapes in old sources."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def summary(docstring: str) -> str:
    """Take the docstring's first paragraph, on one or a few lines."""
    return textwrap.dedent(docstring).strip().split("\n\n")[0].strip()


def stub_of(node: FunctionNode, lines: list[str]) -> str | None:
    """Render signature and summary, dedented; None if the body is on the signature's line."""
    first = node.body[0]
    if first.lineno == node.lineno:
        return None
    header_end = next(
        (i for i in range(first.lineno - 1, node.lineno - 1, -1) if lines[i - 1].rstrip().endswith(":")), None
    )
    if header_end is None:
        return None
    header = textwrap.dedent("\n".join(lines[node.lineno - 1 : header_end]))
    doc = docstring_node(node)
    text = summary(doc.value.value) if doc else ""  # type: ignore[attr-defined]
    if not text:
        return header
    if len(text) > MAX_DOC_CHARS or '"""' in text or "\\" in text:
        return None
    quoted = textwrap.indent('"""' + "\n".join(line.strip() for line in text.splitlines()) + '"""', "    ")
    return f"{header}\n{quoted}"


def body_of(node: FunctionNode, lines: list[str]) -> str | None:
    """Render the statements after the docstring, dedented; None if they do not parse alone."""
    doc = docstring_node(node)
    start = doc.end_lineno if doc else node.body[0].lineno - 1
    body = textwrap.dedent("\n".join(line.rstrip() for line in lines[start : node.end_lineno])).strip("\n")
    if not body.strip() or body.startswith(" ") or "\t" in body:
        return None
    try:
        return body if parse(body).body else None
    except SyntaxError:
        return None


def is_trivial(node: FunctionNode) -> bool:
    """Test whether a body only raises or does nothing."""
    statements = statements_of(node)
    return len(statements) <= 1 and all(isinstance(one, ast.Pass | ast.Raise | ast.Expr) for one in statements)


@functools.cache
def chat_functions(source: SourceFile) -> tuple[Function, ...]:
    """List the functions of a file that are short enough for a chat example, and not trivial."""
    lines, kept = source.text.split("\n"), []
    for node in functions_of(parse(source.text)):
        if is_trivial(node):
            continue
        stub, body = stub_of(node, lines), body_of(node, lines)
        if stub is None or body is None or len(stub) > MAX_STUB_CHARS or len(body) > MAX_BODY_CHARS:
            continue
        if MIN_BODY_LINES <= body.count("\n") + 1 <= MAX_BODY_LINES:
            has_docstring = docstring_node(node) is not None
            key = digest(normalised_body(node))
            kept.append(Function(source.module, node.name, task_of(stub, body), has_docstring, key))
    return tuple(kept)


def unique_bodies(functions: Iterable[Function], keys: set[str]) -> list[Function]:
    """Keep the functions whose body is not among `keys`, and add their bodies to it."""
    kept = []
    for function in functions:
        if function.body_key not in keys:
            keys.add(function.body_key)
            kept.append(function)
    return kept


def choose_held_out(sources: list[SourceFile]) -> list[str]:
    """Choose NUM_HELD_OUT standard modules with enough prompts, by their names' hashes."""
    by_module: dict[str, list[SourceFile]] = {}
    for source in sources:
        if source.origin == "stdlib":
            by_module.setdefault(source.module, []).append(source)
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
    for node in functions_of(parse(source.text)):
        if function_key(node) in forbidden:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines[first - 1 : node.end_lineno] = [""] * (node.end_lineno - first + 1)  # type: ignore[operator]
    return SourceFile(source.origin, source.module, source.path, "\n".join(lines))


def select_prompts(functions: list[Function]) -> list[Function]:
    """Choose functions with a docstring, by hash, at most MAX_PROMPTS_PER_MODULE of each module."""
    chosen: list[Function] = []
    for module in sorted({function.module for function in functions}):
        mine = [function for function in functions if function.module == module and function.has_docstring]
        chosen += sorted(mine, key=lambda function: digest(function.task.prompt))[:MAX_PROMPTS_PER_MODULE]
    return chosen


def build_corpus(sources: list[SourceFile]) -> Corpus:
    """Split the sources into training and held-out text, free of leaks and of repeated bodies."""
    held_out = choose_held_out(sources)
    raw_heldout = [source for source in sources if source.origin == "stdlib" and source.module in held_out]
    rest = [source for source in sources if not (source.origin == "stdlib" and source.module in held_out)]
    forbidden = {function_key(node) for source in raw_heldout for node in functions_of(parse(source.text))}
    raw_train = [without_functions(source, forbidden) for source in rest]
    keys: set[str] = set()
    chat_heldout = unique_bodies((function for source in raw_heldout for function in chat_functions(source)), keys)
    chat_train = unique_bodies((function for source in rest for function in chat_functions(source)), keys)
    return Corpus(raw_train, raw_heldout, chat_train, chat_heldout, select_prompts(chat_heldout), held_out)


def write_lines(path: Path, records: Iterable[dict]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def read_lines(path: Path) -> list[dict]:
    """Read the objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def collect(out: Path) -> None:
    """Write the files that the module's docstring lists, of the installed packages, into a folder."""
    corpus = build_corpus(collect_sources())
    out.mkdir(parents=True, exist_ok=True)
    for name in ("raw_train", "raw_heldout"):
        write_lines(out / f"{name}.jsonl", map(asdict, getattr(corpus, name)))
    for name in ("chat_train", "chat_heldout", "heldout_prompts"):
        write_lines(out / f"{name}.jsonl", (function.record() for function in getattr(corpus, name)))
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}
    manifest = {"versions": versions, "held_out_modules": corpus.held_out_modules}
    (out / "manifest.json").write_text(dumps(manifest, indent=1) + "\n", encoding="utf-8")
