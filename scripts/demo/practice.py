"""What the target practises on when it has learnt: its own answers, those that end by themselves and do not loop.

    python -m scripts.demo.practice --written DIR --dataset DIR --out DIR

A small model that decodes greedily falls into loops; trained on its own good answers it falls into them less often, and
grows surer of what it says (rejection sampling; a small stand-in for what the real models' later training does).

Afterwards `--out` holds what scripts.demo.train_target reads: chat_train.npz of those answers, the other files as in
--dataset, and manifest.json with how many answers were kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np

from drafter.train.shards import Document, read_shards
from peagle.metrics import LOOPING_ABOVE, loop_grams
from scripts.demo.dataset import PROMPT, TEXT, pack, shuffled
from scripts.demo.tokenizer import RETURN, SPECIAL_TOKENS

KEPT_AS_IT_IS = ("raw_train.npz", "raw_heldout.npz", "chat_heldout.npz")


def is_good(document: Document) -> bool:
    """Whether the answer ends by itself and does not loop."""
    answer = document.token_ids[document.trained].tolist()
    distinct, total = loop_grams(answer)
    ended = bool(answer) and answer[-1] == SPECIAL_TOKENS.index(RETURN)
    return ended and distinct >= (1 - LOOPING_ABOVE) * total


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--written", type=Path, required=True, help="the target's answers, as peagle data wrote them")
    parser.add_argument("--dataset", type=Path, required=True, help="what scripts.demo.dataset wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    written = read_shards(arguments.written)
    good = [document for document in written if is_good(document)]
    documents = [(each.token_ids.tolist(), np.where(each.trained, TEXT, PROMPT).tolist()) for each in shuffled(good)]
    np.savez_compressed(arguments.out / "chat_train.npz", **pack(documents))
    for name in KEPT_AS_IT_IS:
        shutil.copy(arguments.dataset / name, arguments.out / name)
    manifest = {"answers": len(written), "kept": len(good), "tokens": sum(len(ids) for ids, _ in documents)}
    (arguments.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(manifest))


if __name__ == "__main__":
    main()
