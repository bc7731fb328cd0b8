"""Turn the corpus into packed rows of tokens: short ones, and long ones with tasks behind texts.

A dataset's folder holds, for kinds such as chat_512, raw_512, chat_2048 and chat_heldout, NAME.npz with

    token_ids    uint16 [N, T]   several documents side by side, padding at the end
    segment_ids  uint8  [N, T]   1, 2, ... per document of the row, 0 for padding
    roles        uint8  [N, T]   PADDING, PROMPT (the user's text and the template), TEXT (raw text, the assistant's
                                 answer), LOOP (an answer's unwanted tokens: scripts.demo.practice)

and manifest.json with the numbers of tokens. The short dataset also has shards/chat and shards/raw, the same training
documents for `peagle train`; the long one has prompts for `peagle data`. Documents that do not fit a row are cut (raw)
or left out (chat). Rows and documents are shuffled, the same in every run.
"""

import ast
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from drafter.train import shards
from drafter.train.row_batches import fill_rows
from drafter.train.shards import open_folder, write_shard
from peagle.ops.strict_json import dumps
from scripts.demo.corpus import parse, read_lines, write_lines
from scripts.demo.tasks import digest
from scripts.demo.tokenizer import END_OF_TEXT, RETURN, START_OF_TEXT

PADDING, PROMPT, TEXT, LOOP = 0, 1, 2, 3
WIDTH = 512
LONG_WIDTHS = {2048: 3600, 4096: 1200}  # of rows: how many tasks stand behind texts
LONG_PROMPTS, SHORT_PROMPTS = 2800, 6000
TEXT_FRAC = (0.2, 0.85)  # of a row that the text before a task takes
CHARS_PER_TOKEN = 2.9
TEXT_KINDS = ("code", "docstrings")
MAX_ANSWER_TOKENS = 288
SYSTEM_MESSAGES = ("You are a Python programmer.", "You are a helpful assistant.", "Be brief.")
EFFORTS = ("low", "medium", "high")
SYSTEM_EVERY, EFFORT_EVERY = 12, 16  # one example in so many carries a system message, a reasoning effort

Document = tuple[list[int], list[int]]  # token ids, roles
Record = Mapping[str, Any]


def chat_prefix(tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """Render a prompt by the chat template; a few have a system message or a reasoning effort."""
    choice = int(digest(prompt)[:8], 16)
    messages = [{"role": "user", "content": prompt}]
    if choice % SYSTEM_EVERY == 0:
        text = SYSTEM_MESSAGES[choice // SYSTEM_EVERY % len(SYSTEM_MESSAGES)]
        messages.insert(0, {"role": "system", "content": text})
    options = {"reasoning_effort": EFFORTS[choice // EFFORT_EVERY % 3]} if choice % EFFORT_EVERY == 0 else {}
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


def encode_all(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Encode texts; special tokens only if a text spells them."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []


def chat_documents(tokenizer: PreTrainedTokenizerFast, records: Iterable[Record], width: int = WIDTH) -> list[Document]:
    """Make one turn of chat of every function, shuffled; those longer than a row are left out."""
    records = list(records)
    prefixes = encode_all(tokenizer, [chat_prefix(tokenizer, record["prompt"]) for record in records])
    answers = encode_all(tokenizer, [record["reference"] + RETURN for record in records])
    return shuffled(
        [
            (prefix + answer, [PROMPT] * len(prefix) + [TEXT] * len(answer))
            for prefix, answer in zip(prefixes, answers, strict=True)
            if len(answer) <= MAX_ANSWER_TOKENS and len(prefix) + len(answer) <= width
        ]
    )


def raw_documents(tokenizer: PreTrainedTokenizerFast, records: Iterable[Record], width: int = WIDTH) -> list[Document]:
    """Cut all files, with start-of-text and end-of-text, into pieces of a row; shuffled."""
    texts = [START_OF_TEXT + record["text"] + END_OF_TEXT for record in records]
    pieces = [ids[start : start + width] for ids in encode_all(tokenizer, texts) for start in range(0, len(ids), width)]
    return shuffled([(piece, [TEXT] * len(piece)) for piece in pieces if len(piece) > 1])


def pack(documents: Sequence[Document], width: int = WIDTH) -> dict[str, np.ndarray]:
    """Pack all documents into rows of so many tokens: the arrays of the module's docstring."""
    placed = fill_rows([len(ids) for ids, _ in documents], width)
    rows = {
        name: np.zeros((len(placed), width), dtype)
        for name, dtype in (("token_ids", np.uint16), ("segment_ids", np.uint8), ("roles", np.uint8))
    }
    for number, places in enumerate(placed):
        start = 0
        for segment, (ids, roles) in enumerate((documents[place] for place in places), 1):
            end = start + len(ids)
            for name, values in (("token_ids", ids), ("segment_ids", segment), ("roles", roles)):
                rows[name][number, start:end] = values
            start = end
    return rows


def shuffled(items: list, seed: int = 0) -> list:
    """Shuffle the items, by their number and the seed alone."""
    return [items[i] for i in np.random.default_rng(seed).permutation(len(items))]


class Rows:
    """Save rows into a dataset's folder, and count them for its manifest."""

    def __init__(self, out: Path) -> None:
        self.counts: dict[str, dict[str, int]] = {}
        self._out = out
        out.mkdir(parents=True, exist_ok=True)

    def save(self, name: str, rows: dict[str, np.ndarray]) -> None:
        """Write NAME.npz."""
        np.savez_compressed(self._out / f"{name}.npz", **rows)
        roles = rows["roles"]
        tokens = {"tokens": int((roles > 0).sum()), "text_tokens": int((roles == TEXT).sum())}
        self.counts[name] = {"rows": len(roles), **tokens}

    def finish(self, before: Path) -> None:
        """Write manifest.json: that of the folder before, and the counts."""
        manifest = json.loads((before / "manifest.json").read_text(encoding="utf-8"))
        manifest["rows"] = manifest.get("rows", {}) | self.counts
        (self._out / "manifest.json").write_text(dumps(manifest, indent=1) + "\n", encoding="utf-8")


def make_dataset(corpus: Path, tokenizer: Path, out: Path) -> None:
    """Write the short rows of a corpus into a folder."""
    encoder, rows = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True), Rows(out)
    for kind, documents_of in (("raw", raw_documents), ("chat", chat_documents)):
        documents = documents_of(encoder, read_lines(corpus / f"{kind}_train.jsonl"))
        folder = out / "shards" / kind
        open_folder(folder, {"made_by": "scripts.demo.dataset", "width": WIDTH})
        as_data = [shards.Document(np.array(ids, np.int32), np.array(roles) == TEXT) for ids, roles in documents]
        write_shard(folder, 0, as_data)
        rows.save(f"{kind}_{WIDTH}", pack(documents))
        rows.save(f"{kind}_heldout", pack(documents_of(encoder, read_lines(corpus / f"{kind}_heldout.jsonl"))))
    rows.finish(corpus)


def texts_of(records: Iterable[Record]) -> dict[str, str]:
    """Join the sources, and apart from them their docstrings, in a shuffled order."""
    code, docs = [], []
    for record in shuffled(list(records)):
        code.append(record["text"].strip())
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = [ast.get_docstring(node) for node in ast.walk(parse(record["text"])) if isinstance(node, nodes)]
        docs += [text for text in docstrings if text and len(text) > 80]
    return {"code": "\n\n\n".join(code), "docstrings": "\n\n".join(docs)}


def behind_texts(records: Iterable[Record], texts: Mapping[str, str], width: int) -> Iterator[dict[str, Any]]:
    """Put a stretch of text before every record's prompt, with room for the rest of a row.

    Kind, place and length follow from the prompt's hash.
    """
    for record in records:
        rng = np.random.default_rng(int(digest(record["prompt"])[:12], 16))
        text = texts[TEXT_KINDS[rng.integers(len(TEXT_KINDS))]]
        size = int(rng.uniform(*TEXT_FRAC) * width * CHARS_PER_TOKEN)
        start = int(rng.integers(max(1, len(text) - size)))
        yield {**record, "prompt": f"{text[start : start + size].strip()}\n\n{record['prompt']}"}


def make_long_dataset(corpus: Path, dataset: Path, tokenizer: Path, out: Path) -> None:
    """Write long rows beside the short ones, long_prompts.jsonl and short_prompts.jsonl."""
    encoder, rows = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True), Rows(out)
    for path in dataset.glob("*.npz"):
        shutil.copy(path, out / path.name)
    sources = {name: read_lines(corpus / f"raw_{name}.jsonl") for name in ("train", "heldout")}
    texts, held_out = texts_of(sources["train"]), texts_of(sources["heldout"])
    tasks = shuffled(read_lines(corpus / "chat_train.jsonl"))
    for width, count in LONG_WIDTHS.items():
        behind, tasks = tasks[:count], tasks[count:]
        rows.save(f"chat_{width}", pack(chat_documents(encoder, behind_texts(behind, texts, width), width), width))
        rows.save(f"raw_{width}", pack(raw_documents(encoder, sources["train"], width), width))
    chats = read_lines(corpus / "chat_heldout.jsonl")
    long, longer = LONG_WIDTHS
    rows.save("chat_heldout_long", pack(chat_documents(encoder, behind_texts(chats, held_out, long), long), long))
    rows.save("raw_heldout_long", pack(raw_documents(encoder, sources["heldout"], long), long))
    behind, short = tasks[:LONG_PROMPTS], tasks[LONG_PROMPTS:][:SHORT_PROMPTS]
    prompts = [*behind_texts(behind[::3], texts, longer), *behind_texts(behind[1::3] + behind[2::3], texts, long)]
    write_lines(out / "long_prompts.jsonl", shuffled(prompts))
    write_lines(out / "short_prompts.jsonl", short)
    rows.finish(dataset)
