"""Make the rows and prompts of the demo's last stage: the corpus' tasks behind long texts, and files in long rows.

The folder holds, for scripts.demo.train_longer,

    chat_512.npz, raw_512.npz               the dataset's rows
    chat_2048.npz, raw_2048.npz, ... 4096   tasks behind a text, one or more a row; files in pieces of the row's width
    raw_heldout.npz, chat_heldout.npz, raw_heldout_2048.npz, chat_heldout_2048.npz

for `peagle data`, long_prompts.jsonl (other tasks behind texts) and short_prompts.jsonl; and manifest.json. The texts
are stretches of the training sources, code or docstrings.
"""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from peagle.ops.strict_json import dumps
from scripts.demo.corpus import parse, read_lines, write_lines
from scripts.demo.dataset import WIDTH, chat_documents, pack, raw_documents, shuffled
from scripts.demo.tasks import digest

LONG = (2048, 4096)
ROWS = {2048: 3600, 4096: 1200}  # tasks behind texts, by the width of their rows
LONG_PROMPTS, SHORT_PROMPTS = 2800, 6000
LENGTHS = (0.2, 0.85)  # of a row that the text takes; the rest is the task's
CHARS_PER_TOKEN = 2.9
KINDS = ("code", "docstrings")


def texts_of(records: Sequence[dict]) -> dict[str, str]:
    """Join the sources, and apart from them their docstrings, in a shuffled order."""
    code, docs = [], []
    for record in shuffled(list(records)):
        code.append(record["text"].strip())
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = [ast.get_docstring(node) for node in ast.walk(parse(record["text"])) if isinstance(node, nodes)]
        docs += [text for text in docstrings if text and len(text) > 80]
    return {"code": "\n\n\n".join(code), "docstrings": "\n\n".join(docs)}


def behind_texts(records: Sequence[dict], texts: dict[str, str], width: int) -> Iterator[dict]:
    """Put another stretch of text before every record's prompt, of a length that leaves room for the rest of a row.

    Kind, place and length follow from the prompt's hash.
    """
    for record in records:
        rng = np.random.default_rng(int(digest(record["prompt"])[:12], 16))
        text = texts[KINDS[rng.integers(len(KINDS))]]
        size = int(rng.uniform(*LENGTHS) * width * CHARS_PER_TOKEN)
        start = int(rng.integers(max(1, len(text) - size)))
        yield record | {"prompt": f"{text[start : start + size].strip()}\n\n{record['prompt']}"}


def make_long_rows(corpus: Path, data: Path, tokenizer: Path, out: Path) -> None:
    """Write the folder."""
    out.mkdir(parents=True, exist_ok=True)
    encoder = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    sources = {name: read_lines(corpus / f"raw_{name}.jsonl") for name in ("train", "heldout")}
    texts = texts_of(sources["train"])
    tasks = shuffled(read_lines(corpus / "chat_train.jsonl"))
    counts = {}

    def save(name: str, rows: dict[str, np.ndarray]) -> None:
        np.savez_compressed(out / f"{name}.npz", **rows)
        counts[name] = {"rows": len(rows["roles"]), "tokens": int((rows["roles"] > 0).sum())}

    for width in LONG:
        some, tasks = tasks[: ROWS[width]], tasks[ROWS[width] :]
        save(f"chat_{width}", chat_rows(encoder, behind_texts(some, texts, width), width))
        save(f"raw_{width}", pack(shuffled(list(raw_documents(encoder, sources["train"], width))), width))
    held_out = texts_of(sources["heldout"])
    chats = read_lines(corpus / "chat_heldout.jsonl")
    save("chat_heldout_2048", chat_rows(encoder, behind_texts(chats, held_out, 2048), 2048))
    save("raw_heldout_2048", pack(shuffled(list(raw_documents(encoder, sources["heldout"], 2048))), 2048))
    for name in ("raw_heldout", "chat_heldout"):
        shutil.copy(data / f"{name}.npz", out / f"{name}.npz")
    for name in ("chat", "raw"):
        shutil.copy(data / f"{name}_train.npz", out / f"{name}_{WIDTH}.npz")
    behind, short = tasks[:LONG_PROMPTS], tasks[LONG_PROMPTS:][:SHORT_PROMPTS]
    # two thirds of up to 2048 tokens, the others of up to 4096
    half = [*behind_texts(behind[::3], texts, 4096), *behind_texts(behind[1::3] + behind[2::3], texts, 2048)]
    write_lines(out / "long_prompts.jsonl", shuffled(half))
    write_lines(out / "short_prompts.jsonl", short)
    manifest = json.loads((data / "manifest.json").read_text(encoding="utf-8")) | {"long_rows": counts}
    (out / "manifest.json").write_text(dumps(manifest, indent=1) + "\n", encoding="utf-8")


def chat_rows(encoder: PreTrainedTokenizerFast, records: Iterator[dict], width: int) -> dict[str, np.ndarray]:
    """Pack records as chat into rows of so many tokens."""
    return pack(shuffled(list(chat_documents(encoder, list(records), width))), width)
