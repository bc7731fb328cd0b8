"""Data of the tests' target, a training on them, and commands that are run in this process."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import peagle.cli.training
from drafter.train.row_batches import RowBatches
from peagle.base.errors import InputError
from peagle.cli import main
from tests.support.commands import words
from tests.support.pairs import Directories
from tests.support.trainers import keep_programs

PROMPTS = [[17, 4, 90], [5, 5, 5, 5], [200, 31], [9, 8, 7, 6, 5, 4], [77]]
SMALL = "--steps 4 --aux-layer-ids 0,1,2 --width 32 --depth 3 --rows 2 --layers 1 --mlp-width 16"


def train(target: Path, data: object, out: Path, *more: object) -> list[str]:
    """Write the command of a small training. Of an option that is given twice, the last one counts."""
    return words("train --target", target, f"--data {data} --out", out, SMALL, *more)


def write_prompts(path: Path, *prompts: list[int]) -> Path:
    path.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in prompts))
    return path


@dataclasses.dataclass(frozen=True)
class Lab:
    """Commands that run in this process, on the tests' pair, with a folder of the test's own."""

    target: Path
    drafter: Path
    data: Path  # answers of the target
    prompts: Path
    root: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def out(self) -> Path:
        """The folder to train into, unless another one is named."""
        return self.root / "run"

    def run(self, code: int, *parts: object) -> str:
        """Run a command that ends with this code; return its standard error, with one error if the code is 2."""
        ended = main(words(*parts))
        messages = self.capsys.readouterr().err
        errors = sum("error" in line for line in messages.splitlines())
        assert (ended, errors) == (code, int(code == 2)), messages
        return messages

    def output(self, *parts: object) -> str:
        """Run a command; return all that it prints."""
        self.capsys.readouterr()
        assert main(words(*parts)) == 0
        captured = self.capsys.readouterr()
        return captured.out + captured.err

    def train(
        self, *more: object, code: int = 0, out: Path | None = None, data: object = None, target: Path | None = None
    ) -> str:
        """Run a small training."""
        return self.run(code, *train(target or self.target, data or self.data, out or self.out, *more))

    def resume(self, *more: object, code: int = 0, out: Path | None = None) -> str:
        return self.run(code, "train --resume --out", out or self.out, *more)


@pytest.fixture
def lab(directories: Directories, data: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Lab:
    return Lab(directories.target, directories.drafter, data, prompts, tmp_path, capsys)


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

    monkeypatch.setattr(RowBatches, "at", refuse)
    return says


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", *PROMPTS, [])


@pytest.fixture(scope="session")
def data(directories: Directories, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of the tests' target."""
    out = tmp_path_factory.mktemp("data") / "data"
    sizes = "-n 20 --slots 2 --quiet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peagle.workflows.dataset.SHARD_PROMPTS", 2)
        assert main(words("data --target", directories.target, "--prompt-file", prompts, "--out", out, sizes)) == 0
    return out


@pytest.fixture(scope="session")
def taught(directories: Directories, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers that hold the outputs of layers 0, 1, 2 and the target's best tokens, too."""
    out = tmp_path_factory.mktemp("taught") / "data"
    options = "-n 4 --hidden --aux-layer-ids 0,1,2 --quiet"
    assert main(words("data --target", directories.target, "--prompt-file", prompts, "--out", out, options)) == 0
    return out


@pytest.fixture(scope="module")
def trained(directories: Directories, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of four steps."""
    out = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peagle.cli.training.draw", lambda *_: "none")
        assert main(train(directories.target, data, out, "--quiet")) == 0
    return out
