"""The READMEs: links lead somewhere, commands and Python exist, sentences and pages are short."""

import ast
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from peagle.cli.app import COMMANDS
from peagle.cli.command import options_of

ROOT = Path(__file__).parents[1]
FRONT, CONTRIBUTING, RESULTS = ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "results" / "README.md"
FOLDERS = ("peagle", "target", "drafter", "scripts", "tests")
ROOMS = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("README.md"))
GUIDES = [FRONT, CONTRIBUTING, *(path for path in ROOMS if path.parent.name != "demo")]  # the demo's is a model card
PAGES = [*GUIDES, ROOT / "peagle" / "demo" / "README.md", *sorted((ROOT / "results").rglob("README.md"))]
MOST_LINES = {FRONT: 100, CONTRIBUTING: 83, RESULTS: 73}
MOST_WORDS = 25  # of a sentence
COLUMNS = 125
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    """Return the anchors of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{target}: no such heading"


def test_every_run_is_in_the_list_of_results() -> None:
    folders = [path.name for path in RESULTS.parent.iterdir() if path.is_dir()]
    assert folders
    listed = RESULTS.read_text(encoding="utf-8")
    assert not [name for name in folders if f"]({name}/README.md)" not in listed]


def commands_of(page: Path) -> Iterator[list[str]]:
    """Yield the words of every command in a page's shell blocks."""
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language != "bash":
            continue
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;>")
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, ";"]:
                if set(word) <= set("&|;>"):
                    if words:
                        yield words
                    words = []
                elif words or not re.match(r"^[A-Z_]+=", word):
                    words.append(word)


def flags_of(words: list[str]) -> tuple[str, set[str]]:
    """Return (the name, the flags) of the peagle command that the words call; none: the root, or only --help."""
    commands = {name: entry for name, entry in COMMANDS.items() if entry.where}
    name = next((name for name in (" ".join(words[:2]), "".join(words[:1])) if name in commands), "")
    assert name or words[:1] in ([], ["--help"], ["--version"], ["cluster"]), f"peagle has no command {words[0]}"
    return name, {flag for option in options_of(commands[name].load()) for flag in option.names} if name else set()


def unknown_in(words: list[str]) -> list[str]:
    """Return what of a command of ours does not exist: its module, or flags."""
    flags = [word.partition("=")[0] for word in words if re.match(r"^--?[a-z]", word)]
    if words[0].endswith("peagle"):
        known = flags_of(words[1:])[1] | {"--help", "-h"}
    elif words[:2] == ["python", "-m"] and words[2].startswith("scripts."):
        modules = [f"scripts.scenarios.{words[3]}", "scripts.runs"] if words[2] == "scripts.bench" else words[2:3]
        specs = [importlib.util.find_spec(module) for module in modules]
        if missing := [module for module, spec in zip(modules, specs, strict=True) if not (spec and spec.origin)]:
            return missing
        source = "".join(Path(spec.origin).read_text(encoding="utf-8") for spec in specs if spec and spec.origin)
        known = {"--help", *(flag for flag in flags if flag in source)}
    else:
        return []
    return [flag for flag in flags if flag not in known]


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_commands_exist_with_their_options(page: Path) -> None:
    assert not [words for words in commands_of(page) if unknown_in(words)]


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_python_blocks_compile_and_import_what_there_is(page: Path) -> None:
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(block)):
            is_ours = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "peagle"
            if is_ours:
                assert hasattr(importlib.import_module("peagle"), node.attr), node.attr  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", MOST_LINES, ids=name_of)
def test_pages_are_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= MOST_LINES[page]


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_sentences_are_short_and_lines_fit(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    prose = [line for line in text.splitlines() if not line.startswith(("|", "#", "![", "<!--"))]
    assert not [line for line in prose if len(line) > COLUMNS]
    for paragraph in re.split(r"\n\s*\n|\n(?=- )", "\n".join(prose)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
        for sentence in re.split(r"(?<=[.?!])\s", plain):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            assert len(words) <= MOST_WORDS, f"{len(words)} words: {' '.join(words)}"
