"""Sweeps of the toy pair: through the command, in no time."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

import peagle.loading.load
from peagle.answers.result import Result, decode
from peagle.cli import main
from peagle.engine.host.engine import Engine
from peagle.engine.request import Request
from peagle.measure.sweep.store import RAW, RUN, Folder, open_run
from peagle.pair import Pair
from peagle.text.tokenizer import Tokenizer
from tests.support.commands import words
from tests.support.pairs import ByteTokenizer, toy_pair

TEXTS = ("one two one two", "a", "never", "b", "c", "dd", "e", "f", "gg")  # enough for an interval


class Killed(BaseException):
    """An exception that no handler catches, like a killed process."""


class Tokens(ByteTokenizer):
    """Bytes, and a question mark for every id above them."""

    def token_bytes(self, token_id: int) -> bytes:
        return super().token_bytes(token_id) if token_id < 256 else b"?"


def prompt_file(directory: Path, *rows: Any) -> Path:
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows or [{"prompt": text} for text in TEXTS]))
    return path


@functools.cache
def shared_pair() -> Pair:
    """Make the toy pair once: equal engines of all sweeps of a process compile once."""
    return toy_pair(Tokens(), ())


SMALL = "-k 1 --repeats 1 -n 9 --render raw"
SWEPT = "-k 3,1 --num-prompts 8 --repeats 2 -n 24"


def load_in_place(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    """Load this pair in place of whatever is named."""
    for name in ("load", "with_drafter"):
        monkeypatch.setattr(peagle.loading.load, name, lambda *_, **__: pair)


@dataclasses.dataclass(frozen=True)
class Lab:
    """Commands on the toy pair, in a folder of a test's own. Of an option that is typed twice the last one counts."""

    root: Path
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    @property
    def out(self) -> Path:
        """The folder to sweep into, unless another one is named."""
        return self.root / "run"

    @property
    def folder(self) -> Folder:
        return open_run(self.out)

    @property
    def page(self) -> str:
        return (self.out / "README.md").read_text(encoding="utf-8")

    def run(self, code: int, *parts: object) -> str:
        """Run a command that ends with this code; return its standard error, which is one line if the code is 2."""
        assert main(words(*parts)) == code
        errors = self.capsys.readouterr().err
        assert code != 2 or (errors.startswith("peagle: error: ") and errors.count("\n") == 1), errors
        return errors

    def sweep(self, *parts: object, code: int = 0, out: Path | None = None) -> str:
        """Sweep the test's prompts in a small way, unless options say otherwise."""
        prompts = self.root / "prompts.jsonl"
        if not prompts.exists():
            prompt_file(self.root)
        return self.run(code, "sweep", SMALL, "--prompt-file", prompts, "--out", out or self.out, *parts)

    def resume(self, *parts: object, code: int = 0) -> str:
        return self.run(code, "sweep --resume --out", self.out, *parts)

    def before_decoding(self, hook: Callable[[Engine, Sequence[Request]], object]) -> None:
        """Call this before requests are decoded together."""

        def decode_after(engine: Engine, requests: Sequence[Request], tokenizer: Tokenizer | None) -> list[Result]:
            hook(engine, requests)
            return decode(engine, requests, tokenizer)

        self.monkeypatch.setattr("peagle.measure.sweep.runner.decode", decode_after)

    def kill(self, command: Callable[..., str], *parts: object, after: int) -> None:
        """Run a command that is killed after so many decodings."""
        numbers = itertools.count()

        def hook(*_: object) -> None:
            if next(numbers) == after:
                raise Killed

        self.before_decoding(hook)
        with pytest.raises(Killed):
            command(*parts)
        self.before_decoding(lambda *_: None)


def swept(directory: Path, *parts: object) -> Folder:
    """Make a finished run (SWEPT) below a directory that tests share."""
    command = words("sweep", SMALL, SWEPT, "--prompt-file", prompt_file(directory), "--out", directory / "run", *parts)
    with pytest.MonkeyPatch.context() as patch:
        load_in_place(patch, shared_pair())
        assert main(command) == 0
    return open_run(directory / "run")


def lines_of(folder: Folder) -> list[dict[str, Any]]:
    """Read a run's raw lines."""
    return [json.loads(line) for line in (folder.path / RAW).read_text().splitlines()]


def with_lines(folder: Folder, lines: Iterable[dict[str, Any]]) -> Folder:
    """Write other raw lines into a run."""
    (folder.path / RAW).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return open_run(folder.path)


def with_plan(folder: Folder, **plan: object) -> Folder:
    """Write other fields of the plan into a run."""
    record = json.loads((folder.path / RUN).read_text())
    (folder.path / RUN).write_text(json.dumps(record | {"plan": record["plan"] | plan}))
    return open_run(folder.path)
