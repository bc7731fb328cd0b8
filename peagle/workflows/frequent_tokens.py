"""List a target's most frequent tokens, for a smaller draft vocabulary (drafter.vocabulary)."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from drafter.train.shards import read_shard
from drafter.vocabulary import write_frequent_tokens
from peagle.ops.errors import InputError
from peagle.ops.files import reason_of


@dataclasses.dataclass(frozen=True)
class Counted:
    """A list of frequent tokens, and its coverage of the answers."""

    num_listed: int
    num_counted: int  # tokens of the answers
    shares: dict[int, float]  # by N: share of these that are among the first N listed


def list_frequent_tokens(files: Sequence[Path], out: Path) -> Counted:
    """Write a list of all tokens in the files' answers, the most frequent first.

    files: from `peagle generate --json`, `speculate --json`, and shards of `peagle data`. Raises InputError for other
    files, and if they hold no token.
    """
    counts = [_count(path) for path in files]
    total = np.zeros(max(map(len, counts), default=0), np.int64)
    for count in counts:
        total[: len(count)] += count
    if not total.any():
        raise InputError("these files hold no token of an answer; expected answers to count")
    listed = write_frequent_tokens(out, total)
    shares = np.cumsum(np.sort(total)[::-1]) / total.sum()
    sizes = [size for size in (listed >> shift for shift in (4, 3, 2, 1)) if size]
    return Counted(listed, int(total.sum()), {size: float(shares[size - 1]) for size in sizes})


def _count(path: Path) -> np.ndarray:
    """Count the token ids of a file's answers."""
    try:
        if path.suffix == ".safetensors":
            return np.bincount(np.concatenate([document.token_ids[document.trained] for document in read_shard(path)]))
        answers = [request["output_ids"] for request in json.loads(path.read_text(encoding="utf-8"))["requests"]]
        return np.bincount(np.array([token for answer in answers for token in answer], np.int64))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: {reason_of(error)}; expected a run written with --json, or a shard") from None
