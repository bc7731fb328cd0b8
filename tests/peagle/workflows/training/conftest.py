"""Data of the tests' target, a training on them, and commands that are run in this process."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import peagle.cli.training
from drafter.train.batches import Batches
from peagle.cli import main
from peagle.ops.errors import InputError
from tests.support.pairs import Directories
from tests.support.trainers import keep_programs

PROMPTS = [[17, 4, 90], [5, 5, 5, 5], [200, 31], [9, 8, 7, 6, 5, 4], [77]]
SMALL = "--steps 4 --taps 0,1,2 --width 32 --depth 3 --rows 2 --layers 1 --heads 4 --mlp-width 16"
Run = Callable[..., str]


def words(*parts: object) -> list[str]:
    """Split options that are written in one text."""
    return [word for part in parts for word in (part.split() if isinstance(part, str) else [str(part)])]


def train(target: Path, data: object, out: Path, *more: object) -> list[str]:
    """Write the command of a small training; what is given twice is what is given last."""
    return words("train --target", target, f"--data {data} --out", out, SMALL, *more)


def write_prompts(path: Path, *prompts: list[int]) -> Path:
    path.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in prompts))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that ends with this code; return its standard error, with one error if the code is 2."""

    def call(code: int, *parts: object) -> str:
        ended = main(words(*parts))
        said = capsys.readouterr().err
        assert (ended, sum("error" in line for line in said.splitlines())) == (code, int(code == 2)), said
        return said

    return call


@pytest.fixture(scope="module", autouse=True)
def _programs_are_kept() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        keep_programs(patch)
        yield


@pytest.fixture(autouse=True)
def curves(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Draw no curves, which takes as long as a training of a few steps; return what draws them."""
    draw = peagle.cli.training.draw
    monkeypatch.setattr("peagle.cli.training.draw", lambda *_: "none")
    return draw


@pytest.fixture
def no_step(monkeypatch: pytest.MonkeyPatch) -> str:
    """End each training with an error of this text where its first step begins, before the step is compiled."""

    says = "the first step begins"

    def refuse(*_: object) -> None:
        raise InputError(says)

    monkeypatch.setattr(Batches, "at", refuse)
    return says


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", *PROMPTS, [])


@pytest.fixture(scope="session")
def data(directories: Directories, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of the tests' target."""
    out = tmp_path_factory.mktemp("data") / "data"
    sizes = "-n 20 --shard-prompts 2 --slots 2 --quiet"
    assert main(words("data --target", directories.target, "--prompt-file", prompts, "--out", out, sizes)) == 0
    return out


@pytest.fixture(scope="session")
def taught(directories: Directories, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers that hold the taps 0, 1, 2 and the target's two best tokens, too."""
    out = tmp_path_factory.mktemp("taught") / "data"
    told = "-n 4 --hidden --top 2 --taps 0,1,2 --quiet"
    assert main(words("data --target", directories.target, "--prompt-file", prompts, "--out", out, told)) == 0
    return out


@pytest.fixture(scope="module")
def trained(directories: Directories, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of four steps."""
    out = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peagle.cli.training.draw", lambda *_: "none")
        assert main(train(directories.target, data, out, "--quiet")) == 0
    return out
