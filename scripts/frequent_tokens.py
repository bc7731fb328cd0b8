"""Count the tokens a target writes, for a smaller draft vocabulary (`--draft-vocab`).

    peagle generate --prompt-file PROMPTS.jsonl --slots 16 --quiet --json run.json
    python -m scripts.frequent_tokens run.json --out DRAFTER/frequent_tokens.json

Takes runs that `peagle generate --json` or `speculate --json` wrote, and shards of `peagle data`: the target's answers
are counted. Afterwards `--out` lists every token that
came, the most frequent first. In a drafter's directory under the name frequent_tokens.json, `--draft-vocab N` takes
the first N of it; anywhere else, `--draft-vocab FILE` takes all of it.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from drafter.train.shards import read_shard
from drafter.vocabulary import write_frequent_tokens
from peagle.ops.errors import InputError


def count(path: Path) -> np.ndarray:
    """How often each token id came in the file's answers."""
    try:
        if path.suffix == ".safetensors":
            return np.bincount(np.concatenate([each.token_ids[each.trained] for each in read_shard(path)]))
        answers = [request["output_ids"] for request in json.loads(path.read_text(encoding="utf-8"))["requests"]]
        return np.bincount(np.array([token for answer in answers for token in answer], np.int64))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: {' '.join(str(error).split())}; expected a run written with --json, or a shard"
        ) from None


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="runs (.json) or shards (.safetensors)")
    parser.add_argument("--out", type=Path, required=True, help="the list to write")
    options = parser.parse_args(arguments)
    try:
        counts = [count(path) for path in options.files]
        total = np.sum([np.pad(each, (0, max(map(len, counts)) - len(each))) for each in counts], axis=0)
        if not total.any():
            raise InputError("not one token in these files; expected answers to count")
        listed = write_frequent_tokens(options.out, total)
    except (InputError, OSError) as error:
        print(f"frequent_tokens: error: {error}", file=sys.stderr)
        return 2
    shares = np.cumsum(np.sort(total)[::-1]) / total.sum()
    marks = ", ".join(f"the first {size} are {shares[size - 1]:.1%}" for size in _marks(listed))
    print(f"{options.out}: {listed} tokens, of {total.sum()} counted {marks}")
    return 0


def _marks(listed: int) -> list[int]:
    return [size for size in (listed >> shift for shift in (4, 3, 2, 1)) if size]


if __name__ == "__main__":
    sys.exit(main())
