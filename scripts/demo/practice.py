"""Make rows for practice: the target's own answers, the good ones to repeat and the loops to avoid.

A small model that decodes greedily falls into loops. Practice repeats the answers that end by themselves and do not
loop (rejection sampling). Of answers that were cut off in a loop, every token that repeats counts as unwanted
(sequence-level unlikelihood, Welleck et al., arXiv 1908.04319). It is a small stand-in for the real models' later
training.
"""

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

FEWEST_ROWS = 64  # of the corpus
GOOD, LOOPING, OTHER = "good", "looping", "other"


def kind_of(answer: list[int]) -> str:
    """Judge an answer. GOOD ends by itself and does not loop; LOOPING does neither."""
    distinct, total = loop_grams(answer)
    loops = distinct < (1 - LOOPING_ABOVE) * total
    ended = bool(answer) and answer[-1] == SPECIAL_TOKENS.index(RETURN)
    return OTHER if loops == ended else LOOPING if loops else GOOD


def repeats(answer: list[int]) -> np.ndarray:
    """Mark the tokens [n] that end a run of LOOP_GRAM tokens that occurred before."""
    grams: set[tuple[int, ...]] = set()
    repeated = np.zeros(len(answer), bool)
    for end in range(LOOP_GRAM, len(answer) + 1):
        gram = tuple(answer[end - LOOP_GRAM : end])
        repeated[end - 1] = gram in grams
        grams.add(gram)
    return repeated


def lesson(document: Document) -> tuple[str, dataset.Document]:
    """Make (the answer's kind, the document with the roles of its tokens)."""
    answer = document.token_ids[document.trained].tolist()
    kind, roles = kind_of(answer), np.full(len(document.token_ids), PROMPT)
    roles[document.trained] = np.where(repeats(answer), LOOP, PADDING) if kind == LOOPING else TEXT
    return kind, (document.token_ids.tolist(), roles.tolist())


def make_practice(written: Path, rows: Path, widths: tuple[int, ...], out: Path) -> None:
    """Write a dataset: chat rows of these widths are half lessons of answers, half the corpus'.

    rows: a folder of scripts.demo.dataset, whose other rows stay as they are.
    """
    out.mkdir(parents=True, exist_ok=True)
    lessons = [lesson(document) for document in read_shards(written)]
    useful = shuffled([document for kind, document in lessons if kind != OTHER])
    for path in rows.glob("*.npz"):
        shutil.copy(path, out / path.name)
    narrower = 0
    for width in widths:
        own = pack([document for document in useful if narrower < len(document[0]) <= width], width)
        with np.load(rows / f"chat_{width}.npz", allow_pickle=False) as corpus:
            most = max(len(own["roles"]), FEWEST_ROWS)
            joined = {name: np.concatenate([own[name], corpus[name][:most]]) for name in own}
        np.savez_compressed(out / f"chat_{width}.npz", **joined)
        narrower = width
    manifest = {"answers": dict(Counter(kind for kind, _ in lessons))}
    (out / "manifest.json").write_text(dumps(manifest, indent=1) + "\n", encoding="utf-8")
