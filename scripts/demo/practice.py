"""Make what the target practises on after training: its own answers, to give the good ones and to avoid loops.

A small model that decodes greedily falls into loops. Its answers that end by themselves and do not loop are learnt as
they are (rejection sampling); of those that were cut off in a loop, every token that repeats is learnt as unwanted
(sequence-level unlikelihood, Welleck et al., arXiv 1908.04319). A small stand-in for the real models' later
training.

The folder holds what scripts.demo.train_target reads: chat_train.npz of those answers and as many of the corpus' chat,
the other files as in the dataset, and manifest.json with how many answers were of which kind.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np

from drafter.train.shards import Document, read_shards
from peagle.ops.strict_json import dumps
from peagle.result import LOOP_GRAM, LOOPING_ABOVE, loop_grams
from scripts.demo import dataset
from scripts.demo.dataset import LOOP, PADDING, PROMPT, TEXT, pack, shuffled
from scripts.demo.long_rows import LONG
from scripts.demo.tokenizer import RETURN, SPECIAL_TOKENS

KEPT_AS_IT_IS = ("raw_train.npz", "raw_heldout.npz", "chat_heldout.npz")
FEWEST_OF_CORPUS = 512
FEWEST_ROWS = 64  # of the corpus, long ones
GOOD, LOOPING, OTHER = "good", "looping", "other"


def kind_of(answer: list[int]) -> str:
    """Judge an answer: GOOD ends by itself and does not loop; LOOPING does neither; OTHER is not learnt from."""
    distinct, total = loop_grams(answer)
    loops = distinct < (1 - LOOPING_ABOVE) * total
    ended = bool(answer) and answer[-1] == SPECIAL_TOKENS.index(RETURN)
    return OTHER if loops == ended else LOOPING if loops else GOOD


def repeats(answer: list[int]) -> np.ndarray:
    """Mark the tokens [n] that end a run of LOOP_GRAM tokens which was there before."""
    grams: set[tuple[int, ...]] = set()
    repeated = np.zeros(len(answer), bool)
    for end in range(LOOP_GRAM, len(answer) + 1):
        gram = tuple(answer[end - LOOP_GRAM : end])
        repeated[end - 1] = gram in grams
        grams.add(gram)
    return repeated


def with_roles(document: Document, of_answer: np.ndarray | int = TEXT) -> dataset.Document:
    """Give the answer's tokens these roles, or this one."""
    roles = np.full(len(document.token_ids), PROMPT)
    roles[document.trained] = of_answer
    return document.token_ids.tolist(), roles.tolist()


def lesson(document: Document) -> tuple[str, dataset.Document]:
    """Make (the answer's kind, the document with the roles of its tokens)."""
    answer = document.token_ids[document.trained].tolist()
    kind = kind_of(answer)
    if kind == LOOPING:
        return kind, with_roles(document, np.where(repeats(answer), LOOP, PADDING))
    return kind, with_roles(document)


def make_long_practice(written: Path, rows: Path, out: Path) -> None:
    """Write rows to practise on, from answers behind long texts (`peagle data`) and scripts.demo.long_rows' folder.

    Lessons go to the kinds chat_2048 and chat_4096, with as many of the corpus' rows there; other kinds stay.
    """
    out.mkdir(parents=True, exist_ok=True)
    lessons = [lesson(document) for document in read_shards(written)]
    kept = [document for kind, document in lessons if kind != OTHER]
    for path in rows.glob("*.npz"):
        shutil.copy(path, out / path.name)
    narrow = 0
    for width in LONG:
        own = pack([document for document in shuffled(kept) if narrow < len(document[0]) <= width], width)
        of_corpus = load_rows(rows / f"chat_{width}.npz")
        most = max(len(own["roles"]), FEWEST_ROWS)
        joined = {name: np.concatenate([own[name], of_corpus[name][:most]]) for name in own}
        np.savez_compressed(out / f"chat_{width}.npz", **joined)
        narrow = width
    manifest = {"answers": dict(Counter(kind for kind, _ in lessons))}
    (out / "manifest.json").write_text(dumps(manifest, indent=1) + "\n", encoding="utf-8")


def load_rows(path: Path) -> dict[str, np.ndarray]:
    """Read a file of rows."""
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def make_practice(written: Path, data: Path, out: Path) -> None:
    """Write a practice dataset into a folder, from answers (`peagle data`) and the corpus' own dataset."""
    out.mkdir(parents=True, exist_ok=True)
    lessons = [lesson(document) for document in read_shards(written)]
    documents = [document for kind, document in lessons if kind != OTHER]
    corpus = read_shards(data / "shards" / "chat")[: max(len(documents), FEWEST_OF_CORPUS)]
    documents += [with_roles(document) for document in corpus]
    np.savez_compressed(out / "chat_train.npz", **pack(shuffled(documents)))
    for name in KEPT_AS_IT_IS:
        shutil.copy(data / name, out / name)
    manifest = {"answers": dict(Counter(kind for kind, _ in lessons)), "corpus": len(corpus)}
    (out / "manifest.json").write_text(dumps(manifest, indent=1) + "\n", encoding="utf-8")
