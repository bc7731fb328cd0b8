"""The guides' commands work: cheap ones here, every page from top to bottom, as a reader types it, with `-m slow`."""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import run
from tests.test_documents import FENCE, GUIDES, ROOT, commands_of, name_of

HELD_OUT = ROOT / "peagle" / "demo" / "heldout_prompts.jsonl"
# what needs another machine, a checkpoint of the reader's, or is this project's own development
ELSEWHERE = re.compile(r"pip install|^bash |pytest|ruff|\bDIR\b|peagle download|openai/|scripts\.gpu_|\[cuda\]")
SERVER = re.compile(r"peagle (serve|cluster)\b")
HEALTH = "http://127.0.0.1:8000/health"
PATIENCE_S = 1200.0  # a server compiles for minutes


def demo_commands() -> list[list[str]]:
    """List the commands of all guides that run on the demo, without `peagle`."""
    commands = [words[1:] for page in GUIDES for words in commands_of(page) if words[0].endswith("peagle")]
    return [words for words in commands if words and "DIR" not in words and words[0] != "download"]


@pytest.mark.parametrize("words", [words for words in demo_commands() if words[0] == "info"], ids=" ".join)
def test_info_is_as_typed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, *words)[0] == 0


@pytest.mark.parametrize("words", [words for words in demo_commands() if "--mesh" in words], ids=" ".join)
def test_a_mesh_fits_the_demo(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "info", "--mesh", words[words.index("--mesh") + 1], "demo")[0] == 0


def lines_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yield (language, text) of the shell lines and the Python blocks of a page, in order."""
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            yield language, block
        elif language == "bash":
            for line in block.replace("\\\n", " ").splitlines():
                if not (line.startswith("#") or ELSEWHERE.search(line)):
                    yield language, line


def healthy() -> bool:
    with contextlib.suppress(OSError):
        return bool(urllib.request.urlopen(HEALTH, timeout=5).status == 200)
    return False


@contextlib.contextmanager
def serving(line: str, folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run a server, or a command that ends like one, until the next one is due. No other may have the guides' port."""
    assert not healthy(), "another server has port 8000"
    process = subprocess.Popen(["bash", "-c", f"exec {line}"], cwd=folder, env=environment, start_new_session=True)
    try:
        end = time.monotonic() + PATIENCE_S
        while process.poll() is None and not healthy():
            assert time.monotonic() < end, f"{line}: it does not answer"
            time.sleep(0.1)
        assert process.poll() in (None, 0), line
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        assert process.wait() in (0, 130), line


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in GUIDES if list(lines_of(page))], ids=name_of)
def test_a_page_works_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    (tmp_path / "PROMPTS.jsonl").write_text("".join(HELD_OUT.read_text().splitlines(keepends=True)[:40]))
    with contextlib.ExitStack() as server:
        for language, text in lines_of(page):
            if language == "python":
                subprocess.run([sys.executable, "-c", text], cwd=tmp_path, env=environment, check=True)
            elif SERVER.search(text):
                server.close()
                if "cluster" not in text or importlib.util.find_spec("ray"):
                    line = re.sub(r"^((?:\w+=\S+ )*)", r"env \1", text.partition(" #")[0])
                    server.enter_context(serving(line, tmp_path, environment))
            else:
                typed = "def mean(values):\n" if "peagle chat" in text else ""
                subprocess.run(["bash", "-ec", text], input=typed, text=True, cwd=tmp_path, env=environment, check=True)
