"""Turn the corpus, and the target's own answers, into packed rows of tokens.

A folder of rows holds, for kinds such as chat_512, raw_512 and chat_2048, NAME.npz with

    token_ids    uint16 [N, T]   several documents side by side, padding at the end
    segment_ids  uint8  [N, T]   1, 2, ... per document of the row, 0 for padding
    roles        uint8  [N, T]   PADDING, PROMPT (the user's text and the template), TEXT (raw text, the assistant's
                                 answer), LOOP (an answer's unwanted tokens)

The short rows' folder also has shards/chat and shards/raw, the same documents for `peagle train`; that of the long
ones, with tasks behind texts, has prompts for `peagle data`. Documents that do not fit a row are cut (raw) or left out
(chat). Rows and documents are shuffled, the same in every run.

A small model that decodes greedily falls into loops. Practice repeats the answers that end by themselves and do not
loop (rejection sampling). Of answers that were cut off in a loop, every token that repeats counts as unwanted
(sequence-level unlikelihood, Welleck et al., arXiv 1908.04319). It is a small stand-in for the real models' later
training.
"""

import ast
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from drafter.train import shards
from drafter.train.row_batches import fill_rows
from peagle.answers.result import LOOP_GRAM, LOOPING_ABOVE, loop_grams
from scripts.demo.corpus import parse, read_lines, write_lines
from scripts.demo.tasks import digest
from scripts.demo.tokenizer import END_OF_TEXT, RETURN, SPECIAL_TOKENS, START_OF_TEXT

PADDING, PROMPT, TEXT, LOOP = 0, 1, 2, 3
ARRAYS = {"token_ids": np.uint16, "segment_ids": np.uint8, "roles": np.uint8}
WIDTH = 512
LONG_WIDTHS = {2048: 3600, 4096: 1200}  # of rows: how many tasks stand behind texts
LONG_PROMPTS, SHORT_PROMPTS = 2800, 6000
TEXT_FRAC = (0.2, 0.85)  # of a row that the text before a task takes
CHARS_PER_TOKEN = 2.9
MIN_DOCSTRING_CHARS = 80
MAX_ANSWER_TOKENS = 288
SYSTEM_MESSAGES = ("You are a Python programmer.", "You are a helpful assistant.", "Be brief.")
EFFORTS = ("low", "medium", "high")
SYSTEM_EVERY, EFFORT_EVERY = 12, 16  # one example in so many carries a system message, a reasoning effort
FEWEST_ROWS = 64  # of the corpus, beside answers
GOOD, LOOPING, OTHER = "good", "looping", "other"

Document = tuple[list[int], list[int]]  # token ids, roles
Record = Mapping[str, Any]


def shuffled(items: list) -> list:
    """Shuffle the items, by their number alone."""
    return [items[i] for i in np.random.default_rng(0).permutation(len(items))]


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


def chat_documents(tokenizer: PreTrainedTokenizerFast, records: Iterable[Record], width: int) -> list[Document]:
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


def raw_documents(tokenizer: PreTrainedTokenizerFast, records: Iterable[Record], width: int) -> list[Document]:
    """Cut all files, with start-of-text and end-of-text, into pieces of a row; shuffled."""
    texts = [START_OF_TEXT + record["text"] + END_OF_TEXT for record in records]
    pieces = [ids[start : start + width] for ids in encode_all(tokenizer, texts) for start in range(0, len(ids), width)]
    return shuffled([(piece, [TEXT] * len(piece)) for piece in pieces if len(piece) > 1])


def pack(documents: Sequence[Document], width: int) -> dict[str, np.ndarray]:
    """Pack all documents into rows of so many tokens: the arrays of the module's docstring."""
    placed = fill_rows([len(ids) for ids, _ in documents], width)
    rows = {name: np.zeros((len(placed), width), dtype) for name, dtype in ARRAYS.items()}
    for number, places in enumerate(placed):
        start = 0
        for segment, (ids, roles) in enumerate((documents[place] for place in places), 1):
            own = slice(start, start := start + len(ids))
            for name, values in zip(ARRAYS, (ids, segment, roles), strict=True):
                rows[name][number, own] = values
    return rows


def make_dataset(corpus: Path, tokenizer: Path, out: Path) -> None:
    """Write the short rows of a corpus into a folder."""
    encoder = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    for kind, documents_of in (("raw", raw_documents), ("chat", chat_documents)):
        documents = documents_of(encoder, read_lines(corpus / f"{kind}_train.jsonl"), WIDTH)
        folder = out / "shards" / kind
        shards.open_folder(folder, {"made_by": "scripts.demo.rows", "width": WIDTH})
        as_data = [shards.Document(np.array(ids, np.int32), np.array(roles) == TEXT) for ids, roles in documents]
        shards.write_shard(folder, 0, as_data)
        np.savez_compressed(out / f"{kind}_{WIDTH}.npz", **pack(documents, WIDTH))


# --- long rows ------------------------------------------------------------------------------------------------------


def texts_of(records: Iterable[Record]) -> list[str]:
    """Join the sources, and apart from them their docstrings, in a shuffled order."""
    code, docs = [], []
    for record in shuffled(list(records)):
        code.append(record["text"].strip())
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = [ast.get_docstring(node) for node in ast.walk(parse(record["text"])) if isinstance(node, nodes)]
        docs += [text for text in docstrings if text and len(text) > MIN_DOCSTRING_CHARS]
    return ["\n\n\n".join(code), "\n\n".join(docs)]


def behind_texts(records: Iterable[Record], texts: Sequence[str], width: int) -> Iterator[dict[str, Any]]:
    """Put a stretch of text before every record's prompt, with room for the rest of a row.

    Kind, place and length follow from the prompt's hash.
    """
    for record in records:
        rng = np.random.default_rng(int(digest(record["prompt"])[:12], 16))
        text = texts[rng.integers(len(texts))]
        size = int(rng.uniform(*TEXT_FRAC) * width * CHARS_PER_TOKEN)
        start = int(rng.integers(max(1, len(text) - size)))
        yield {**record, "prompt": f"{text[start : start + size].strip()}\n\n{record['prompt']}"}


def make_long_dataset(corpus: Path, dataset: Path, tokenizer: Path, out: Path) -> None:
    """Write long rows beside the short ones, long_prompts.jsonl and short_prompts.jsonl."""
    encoder = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    copy_rows(dataset, out)
    sources = read_lines(corpus / "raw_train.jsonl")
    texts, tasks = texts_of(sources), shuffled(read_lines(corpus / "chat_train.jsonl"))
    for width, count in LONG_WIDTHS.items():
        behind, tasks = behind_texts(tasks[:count], texts, width), tasks[count:]
        np.savez_compressed(out / f"chat_{width}.npz", **pack(chat_documents(encoder, behind, width), width))
        np.savez_compressed(out / f"raw_{width}.npz", **pack(raw_documents(encoder, sources, width), width))
    long, longer = LONG_WIDTHS
    behind, short = tasks[:LONG_PROMPTS], tasks[LONG_PROMPTS:][:SHORT_PROMPTS]
    prompts = [*behind_texts(behind[::3], texts, longer), *behind_texts(behind[1::3] + behind[2::3], texts, long)]
    write_lines(out / "long_prompts.jsonl", shuffled(prompts))
    write_lines(out / "short_prompts.jsonl", short)


def copy_rows(folder: Path, out: Path) -> None:
    """Copy the rows of a folder into another."""
    out.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.npz"):
        shutil.copy(path, out / path.name)


# --- rows for practice ----------------------------------------------------------------------------------------------


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


def lesson(document: shards.Document) -> tuple[str, Document]:
    """Make (the answer's kind, the document with the roles of its tokens)."""
    answer = document.token_ids[document.trained].tolist()
    kind, roles = kind_of(answer), np.full(len(document.token_ids), PROMPT)
    roles[document.trained] = np.where(repeats(answer), LOOP, PADDING) if kind == LOOPING else TEXT
    return kind, (document.token_ids.tolist(), roles.tolist())


def make_practice(written: Path, rows: Path, widths: Sequence[int], out: Path) -> None:
    """Write rows: chat rows of these widths are half lessons of answers, half the corpus'; others stay as they are."""
    copy_rows(rows, out)
    lessons = [lesson(document) for document in shards.read_shards(written)]
    useful = shuffled([document for kind, document in lessons if kind != OTHER])
    narrower = 0
    for width in widths:
        own = pack([document for document in useful if narrower < len(document[0]) <= width], width)
        with np.load(rows / f"chat_{width}.npz", allow_pickle=False) as corpus:
            most = max(len(own["roles"]), FEWEST_ROWS)
            joined = {name: np.concatenate([own[name], corpus[name][:most]]) for name in own}
        np.savez_compressed(out / f"chat_{width}.npz", **joined)
        narrower = width
