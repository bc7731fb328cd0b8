"""Prompts of a given length for the demo: documentation of Python before each of its held-out prompts.

    python -m scripts.long_prompts --tokens 2500 --out long.jsonl
    peagle sweep --out RUN --prompts long.jsonl -k 7 --drafter-window 128,256,512,off

The documentation is that of pydoc, whose topics come with Python: another stretch of it before each prompt.
"""

import argparse
import json
from pathlib import Path
from pydoc_data.topics import topics

from peagle.checkpoints import DEMO, HELD_OUT, resolve
from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps
from peagle.text.tokenizer import Tokenizer, load_tokenizer
from scripts.runs import in_one_line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, required=True, help="of each prompt, with its text before")
    parser.add_argument("--num-prompts", type=int, default=12, help="the first held-out ones (default %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines to write; must not exist")
    arguments = parser.parse_args()

    def run() -> int:
        if arguments.out.exists():
            raise InputError(f"{arguments.out} exists; expected a new file")
        if arguments.tokens < 1 or arguments.num_prompts < 1:
            raise InputError("--tokens and --num-prompts must be 1 or more")
        tokenizer = load_tokenizer(resolve(DEMO, "target"))
        assert tokenizer is not None
        lines = HELD_OUT.read_text(encoding="utf-8").splitlines()[: arguments.num_prompts]
        rows = [json.loads(line) for line in lines]
        prompts = long_prompts([row["prompt"] for row in rows], tokenizer, arguments.tokens)
        changed = [row | {"prompt": prompt} for row, prompt in zip(rows, prompts, strict=True)]
        arguments.out.write_text("".join(dumps(row) + "\n" for row in changed), encoding="utf-8")
        return 0

    return in_one_line("long_prompts", run)


def documentation() -> str:
    """Join all topics of pydoc."""
    return "\n\n".join(topics.values())


def long_prompts(prompts: list[str], tokenizer: Tokenizer, num_tokens: int) -> list[str]:
    """Put documentation before each prompt, so that both together take about so many tokens."""
    before = tokenizer.encode(documentation())
    found = []
    for index, prompt in enumerate(prompts):
        first = index * len(before) // len(prompts)
        taken = before[first : first + max(num_tokens - len(tokenizer.encode(prompt)), 0)]
        text = b"".join(tokenizer.token_bytes(token) for token in taken).decode("utf-8", errors="ignore")
        found.append(f"{text}\n\n{prompt}" if text else prompt)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
