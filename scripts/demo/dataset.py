"""Turn the corpus into packed token arrays.

Its folder holds raw_train.npz, raw_heldout.npz, chat_train.npz, chat_heldout.npz, each with

    token_ids    uint16 [N, T]   several documents side by side, padding at the end
    segment_ids  uint8  [N, T]   1, 2, ... per document of the row, 0 for padding
    roles        uint8  [N, T]   PADDING, PROMPT (the user's text and the template), TEXT (raw text, the assistant's
                                 answer), LOOP (an answer's unwanted tokens: scripts.demo.practice)

shards/chat and shards/raw with the same training documents for `peagle train`, and manifest.json: the corpus' manifest
with the numbers of tokens. Documents that do not fit a row are cut (raw) or left out (chat). The order of rows and
documents is shuffled, the same in every run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from drafter.train import shards
from drafter.train.batches import fill_rows
from drafter.train.shards import open_folder, write_shard
from peagle.ops.strict_json import dumps
from scripts.demo.corpus import read_lines
from scripts.demo.tasks import digest
from scripts.demo.tokenizer import END_OF_TEXT, RETURN, START_OF_TEXT

PADDING, PROMPT, TEXT, LOOP = 0, 1, 2, 3
WIDTH = 512
MAX_ANSWER_TOKENS = 288
SYSTEM_MESSAGES = ("You are a Python programmer.", "You are a helpful assistant.", "Be brief.")
EFFORTS = ("low", "medium", "high")
SYSTEM_EVERY, EFFORT_EVERY = 12, 16  # one example in so many carries a system message, a reasoning effort

Document = tuple[list[int], list[int]]  # token ids, roles


def chat_prefix(tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """Render a prompt by the chat template; a few, chosen by hash, with a system message or a reasoning effort."""
    choice = int(digest(prompt)[:8], 16)
    messages = [{"role": "user", "content": prompt}]
    if choice % SYSTEM_EVERY == 0:
        messages.insert(
            0, {"role": "system", "content": SYSTEM_MESSAGES[choice // SYSTEM_EVERY % len(SYSTEM_MESSAGES)]}
        )
    options = {"reasoning_effort": EFFORTS[choice // EFFORT_EVERY % 3]} if choice % EFFORT_EVERY == 0 else {}
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


def encode_all(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """Encode each text; special tokens only if the text spells them."""
    return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []


def chat_documents(tokenizer: PreTrainedTokenizerFast, records: list[dict], width: int = WIDTH) -> Iterator[Document]:
    """Yield each function as one turn of chat that ends with the stop token; those longer than a row are left out."""
    prefixes = encode_all(tokenizer, [chat_prefix(tokenizer, record["prompt"]) for record in records])
    answers = encode_all(tokenizer, [record["reference"] + RETURN for record in records])
    for prefix, answer in zip(prefixes, answers, strict=True):
        if len(answer) <= MAX_ANSWER_TOKENS and len(prefix) + len(answer) <= width:
            yield prefix + answer, [PROMPT] * len(prefix) + [TEXT] * len(answer)


def raw_documents(tokenizer: PreTrainedTokenizerFast, records: list[dict], width: int = WIDTH) -> Iterator[Document]:
    """Yield each file between start-of-text and end-of-text, cut into rows."""
    for ids in encode_all(tokenizer, [START_OF_TEXT + record["text"] + END_OF_TEXT for record in records]):
        for start in range(0, len(ids), width):
            piece = ids[start : start + width]
            if len(piece) > 1:
                yield piece, [TEXT] * len(piece)


def pack(documents: list[Document], width: int = WIDTH) -> dict[str, np.ndarray]:
    """Pack all documents into rows of so many tokens."""
    placed = fill_rows([len(ids) for ids, _ in documents], width)
    return as_arrays([[documents[place] for place in row] for row in placed], width)


def as_arrays(rows: list[list[Document]], width: int = WIDTH) -> dict[str, np.ndarray]:
    """Make the arrays that the module's docstring describes."""
    shape = (len(rows), width)
    arrays = {
        "token_ids": np.zeros(shape, np.uint16),
        "segment_ids": np.zeros(shape, np.uint8),
        "roles": np.zeros(shape, np.uint8),
    }
    for i, row in enumerate(rows):
        start = 0
        for segment, (ids, roles) in enumerate(row, 1):
            end = start + len(ids)
            arrays["token_ids"][i, start:end] = ids
            arrays["segment_ids"][i, start:end] = segment
            arrays["roles"][i, start:end] = roles
            start = end
    return arrays


def write_shards(folder: Path, documents: list[Document]) -> None:
    """Write the documents as training data for a drafter, in one shard."""
    open_folder(folder, {"made_by": "scripts.demo.dataset", "width": WIDTH})
    as_data = [shards.Document(np.array(ids, np.int32), np.array(roles) == TEXT) for ids, roles in documents]
    write_shard(folder, 0, as_data)


def shuffled(items: list, seed: int = 0) -> list:
    """Shuffle the items, by their number and the seed alone."""
    return [items[i] for i in np.random.default_rng(seed).permutation(len(items))]


def build_dataset(corpus: Path, tokenizer: PreTrainedTokenizerFast, out: Path) -> dict[str, dict[str, int]]:
    """Write the arrays; return the number of rows and tokens of each."""
    out.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name in ("raw_train", "raw_heldout", "chat_train", "chat_heldout"):
        documents_of = raw_documents if name.startswith("raw") else chat_documents
        documents = shuffled(list(documents_of(tokenizer, read_lines(corpus / f"{name}.jsonl"))))
        if name.endswith("_train"):
            write_shards(out / "shards" / name.removesuffix("_train"), documents)
        arrays = pack(documents)
        np.savez_compressed(out / f"{name}.npz", **arrays)
        roles = arrays["roles"]
        counts[name] = {"rows": len(roles), "tokens": int((roles > 0).sum()), "text_tokens": int((roles == TEXT).sum())}
    return counts


def make_dataset(corpus: Path, tokenizer: Path, out: Path) -> None:
    """Write the dataset of a corpus and a tokenizer into a folder."""
    counts = build_dataset(corpus, AutoTokenizer.from_pretrained(tokenizer, local_files_only=True), out)
    manifest = json.loads((corpus / "manifest.json").read_text(encoding="utf-8")) | {"tokens": counts}
    (out / "manifest.json").write_text(dumps(manifest, indent=1) + "\n", encoding="utf-8")
