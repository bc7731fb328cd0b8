"""The log in a training's folder, and its newest step. Imports no training library. recipe.json: drafter/trained.py."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

LOG, CHECKPOINTS = "log.jsonl", "checkpoints"
# keys of log lines that are not steps; an evaluation at the end is of the best step, which it names
EVALUATION, HELD_OUT = "evaluation", "held_out"
COMMAND = "command"  # key of recipe.json: the options, with absolute paths
MOVABLE = ("target", "data", "init", "draft_vocab", "evaluate")  # its options that name files, which may move


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the log's lines, except one that was cut off when the process was killed."""
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(text)
        except ValueError:
            continue


def best_held_out(log: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the log line of the step that is best on the held-out documents; None if there is none.

    The best step has the highest score (drafter/train/held_out.py); of equal scores the lowest loss. Lines of other
    documents than the newest line's do not count.
    """
    lines = [line for line in log if HELD_OUT in line]
    if not lines:
        return None
    comparable = [line for line in lines if line[HELD_OUT]["documents"] == lines[-1][HELD_OUT]["documents"]]
    return max(comparable, key=lambda line: (line[HELD_OUT]["score"], -line[HELD_OUT]["loss"]))


def steps_done(out: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    return max((int(path.name) for path in (out / CHECKPOINTS).glob("*") if path.name.isdecimal()), default=0)
