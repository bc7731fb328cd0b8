"""What the target practises on when it has learnt: its own answers, to give the good ones, and not to fall into loops.

    python -m scripts.demo.practice --written DIR --dataset DIR --out DIR

A small model that decodes greedily falls into loops. Its answers that end by themselves and do not loop are learnt as
they are (rejection sampling); of those that were cut off in a loop, every token that repeats is learnt as unwanted
(sequence-level unlikelihood, Welleck et al., arXiv 1908.04319). A small stand-in for what the real models' later
training does.

Afterwards `--out` holds what scripts.demo.train_target reads: chat_train.npz of those answers and as many of the
corpus' chat, the other files as in --dataset, and manifest.json with how many answers were of which kind.
"""

from __future__ import annotations

import argparse
import shutil
from collections import Counter
from pathlib import Path

import numpy as np

from drafter.train.shards import Document, read_shards
from peagle.ops.strict_json import dumps
from peagle.result import LOOP_GRAM, LOOPING_ABOVE, loop_grams
from scripts.demo import dataset
from scripts.demo.dataset import LOOP, PADDING, PROMPT, TEXT, pack, shuffled
from scripts.demo.tokenizer import RETURN, SPECIAL_TOKENS

KEPT_AS_IT_IS = ("raw_train.npz", "raw_heldout.npz", "chat_heldout.npz")
FEWEST_OF_CORPUS = 512
GOOD, LOOPING, OTHER = "good", "looping", "other"


def kind_of(answer: list[int]) -> str:
    """GOOD: ends by itself and does not loop; LOOPING: does neither; OTHER: one of the two, and teaches nothing."""
    distinct, total = loop_grams(answer)
    loops = distinct < (1 - LOOPING_ABOVE) * total
    ended = bool(answer) and answer[-1] == SPECIAL_TOKENS.index(RETURN)
    return OTHER if loops == ended else LOOPING if loops else GOOD


def repeats(answer: list[int]) -> np.ndarray:
    """Which tokens end a run of LOOP_GRAM tokens that was there before. [n] bool."""
    seen: set[tuple[int, ...]] = set()
    found = np.zeros(len(answer), bool)
    for end in range(LOOP_GRAM, len(answer) + 1):
        gram = tuple(answer[end - LOOP_GRAM : end])
        found[end - 1] = gram in seen
        seen.add(gram)
    return found


def with_roles(document: Document, of_answer: np.ndarray | int = TEXT) -> dataset.Document:
    """The document with these roles, or this one, of its answer's tokens."""
    roles = np.full(len(document.token_ids), PROMPT)
    roles[document.trained] = of_answer
    return document.token_ids.tolist(), roles.tolist()


def lesson(document: Document) -> tuple[str, dataset.Document]:
    """(the answer's kind, the document with the roles of its tokens)."""
    answer = document.token_ids[document.trained].tolist()
    kind = kind_of(answer)
    if kind == LOOPING:
        return kind, with_roles(document, np.where(repeats(answer), LOOP, PADDING))
    return kind, with_roles(document)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--written", type=Path, required=True, help="the target's answers, as peagle data wrote them")
    parser.add_argument("--dataset", type=Path, required=True, help="what scripts.demo.dataset wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    lessons = [lesson(document) for document in read_shards(arguments.written)]
    documents = [document for kind, document in lessons if kind != OTHER]
    corpus = read_shards(arguments.dataset / "shards" / "chat")[: max(len(documents), FEWEST_OF_CORPUS)]
    documents += [with_roles(each) for each in corpus]
    np.savez_compressed(arguments.out / "chat_train.npz", **pack(shuffled(documents)))
    for name in KEPT_AS_IT_IS:
        shutil.copy(arguments.dataset / name, arguments.out / name)
    manifest = {"answers": dict(Counter(kind for kind, _ in lessons)), "corpus": len(corpus)}
    (arguments.out / "manifest.json").write_text(dumps(manifest, indent=1) + "\n", encoding="utf-8")
    print(dumps(manifest))


if __name__ == "__main__":
    main()
