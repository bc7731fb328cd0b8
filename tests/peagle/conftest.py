"""Fixtures: one tiny random pair in the real file layout, written once and loaded once."""

import copy
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App
from cyclopts.argument import ArgumentCollection

import peagle.loading.load
from peagle.cli import display
from peagle.engine.host.step_batches import StepBatches
from peagle.pair import Pair
from peagle.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.pairs import Directories, toy_pair, write_drafter, write_target, write_tokenizer

display.LINE_SECONDS = threading.TIMEOUT_MAX  # messages must be those of a quick machine

_assemble = App.assemble_argument_collection
_assembled: dict[tuple[int, bool], tuple[App, ArgumentCollection]] = {}


def _assemble_once(app: App, *, parse_docstring: bool = False) -> ArgumentCollection:
    """Build a command's options once for the hundreds of command lines of the tests: it takes longer than the rest."""
    key = id(app), parse_docstring
    if key not in _assembled:
        _assembled[key] = app, _assemble(app, parse_docstring=parse_docstring)
    options = _assembled[key][1]
    fresh = {id(option): copy.copy(option) for option in options}
    for option in fresh.values():
        option.tokens = []
        option.children = ArgumentCollection(fresh[id(child)] for child in option.children)
    return ArgumentCollection(fresh.values())


App.assemble_argument_collection = _assemble_once  # type: ignore[method-assign, assignment]


SIZES_OF_THEIR_OWN = (
    "engine/test_engine.py",
    "engine/test_interleaving.py",
    "engine/test_remote.py",
    "engine/test_step_loop.py",
    "engine/test_warmup.py",
    "measure/test_bench.py",
)


@pytest.fixture(scope="module", autouse=True)
def _batches_have_one_size(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile steps for all slots alone: every size of a batch is a program more, and takes half a second."""
    path = request.path.relative_to(Path(__file__).parent).as_posix()
    with pytest.MonkeyPatch.context() as patch:
        if not path.startswith(SIZES_OF_THEIR_OWN):
            patch.setattr(StepBatches, "sizes", property(lambda batches: (batches.config.slots,)))
        yield


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    root = tmp_path_factory.mktemp("pair")
    write_target(root / "target")
    write_tokenizer(root / "target")
    write_drafter(root / "drafter")
    return Directories(root / "target", root / "drafter", root)


@pytest.fixture
def cached_target(directories: Directories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the target into a local cache, as the Hugging Face hub lays it out, by the name openai/gpt-oss-20b."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository, revision = tmp_path / "hub" / "models--openai--gpt-oss-20b", "0" * 40
    shutil.copytree(directories.target, repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    return repository / "snapshots" / revision


@pytest.fixture(scope="session")
def pair(directories: Directories) -> Pair:
    return peagle.loading.load.load(directories.target, directories.drafter)


@pytest.fixture(scope="session")
def tokenizer(directories: Directories) -> Tokenizer:
    loaded = load_tokenizer(directories.target)
    assert loaded is not None
    return loaded


@pytest.fixture
def toy(tokenizer: Tokenizer) -> Pair:
    return toy_pair(tokenizer)
