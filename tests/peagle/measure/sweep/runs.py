"""Sweeps of the toy pair: through the command, in no time."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest

import peagle.cli.sweeping
from peagle.cli import main
from peagle.measure.sweep.figures import Row, WithoutLoops
from peagle.measure.sweep.plan import PLAIN, Workload
from peagle.measure.sweep.store import Folder, open_run
from peagle.pair import Pair
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


def sweep(monkeypatch: pytest.MonkeyPatch, *arguments: object, pair: Pair | None = None) -> int:
    """`peagle sweep` on the toy pair, which stands in for whatever would be loaded."""
    loaded = shared_pair() if pair is None else pair
    monkeypatch.setattr(peagle.cli.sweeping, "load", lambda *_, **__: loaded)
    monkeypatch.setattr(peagle.cli.sweeping, "with_drafter", lambda *_, **__: loaded)
    return main(["sweep", *map(str, arguments)])


def swept(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: object) -> Folder:
    """Make a finished run of eight prompts, K = 1 and 3, two repeats."""
    prompts = prompt_file(out.parent)
    options = ("-k", "3,1", "--prompts", prompts, "--num-prompts", 8, "--repeats", 2, "-n", 24, "--render", "raw")
    assert sweep(monkeypatch, "--out", out, *options, *arguments) == 0
    return open_run(out)


def example_row(**known: Any) -> Row:
    """Make a row of which only the figures named are known; nothing loops and nothing differs."""
    values: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Row))
    values |= dict.fromkeys(("num_draft_tokens", "num_accepted_draft_tokens", "num_plain_steps", "num_slower"), 0)
    values |= dict.fromkeys(("histogram", "accepted_per_position", "tok_per_s_repeats", "speedup_repeats"), ())
    values |= dict.fromkeys(("by_category", "by_bucket", "rate_per_position"), ())
    values |= {"workload": Workload("prompts", True, 0.0), "variant": PLAIN, "itl_s": (None, None, None)}
    values |= {"without_loops": WithoutLoops(8, None, None), "prompt_tokens": 9.0, "output_tokens": 99}
    values |= {"looping_frac": 0.0, "finished_frac": 1.0, "equal_to_plain_frac": 1.0}
    values |= {"num_requests": 8, "num_repeats": 2, "num_compared": 8, "num_spec_steps": 9}
    return Row(**values | {"label": str(known.get("variant", PLAIN).k)} | known)
