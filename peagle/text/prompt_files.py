"""Read files of prompts, in the common layouts.

    prompts     JSON lines: {"prompt": TEXT}, {"turns": [TEXT, ...]} (MT-Bench, Spec-Bench, SPEED-Bench), the same list
                as "prompt" (MT-Bench on the Hub) or {"prompt_ids": [ID, ...]}
    humaneval   JSON lines: {"task_id": ..., "prompt": CODE, "entry_point": ..., ...}; the prompt is the code
    gsm8k       JSON lines: {"question": TEXT, "answer": TEXT}
    math        JSON lines: {"problem": TEXT, "solution": ..., "answer": ...} (MATH-500)
    mbpp        JSON lines: {"text": TEXT, "code": ..., "test_list": ...}
    alpaca      JSON lines: {"instruction": TEXT, "input": TEXT, ...}
    sharegpt    JSON: {"conversations": [{"from": "human", "value": TEXT}, {"from": "gpt", ...}, ...]}, or with "role"
                and "content" (SpecForge)
    messages    JSON: {"messages": [{"role": "user", "content": TEXT}, ...]} (OpenAI), or these under "body" (batches)
                or as "prompt", or only the list
    speculators JSON lines: {"input_ids": [ID, ...], "loss_mask": [0, ..., 1, ...]}, a prompt and its answer (1)
    text        a .txt file, one prompt per line

JSON may be lines or one list, and any file may be gzipped. A file has one layout. ShareGPT's answers are left out,
because the model generates its own. Answers in messages, and in ShareGPT with tools, are the history; a last answer is
generated anew. So is a text under ANSWER_KEYS. Reasoning in the history is left out, as chat templates do, unless calls
follow it. The whole chat, with answers and reasoning, is `Conversation.recorded`.

A row of any layout may have a system text (SYSTEM_KEYS), `tools` and a `category`. `PromptSet.warnings` counts other
keys, except BOOKKEEPING. A row without a readable prompt is skipped; with `strict` it is an error.
"""

import dataclasses
import functools
import gzip
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peagle.base.errors import InputError
from peagle.base.files import printable, reason_of
from peagle.base.settings import brief
from peagle.text.prompts import (
    ASSISTANT,
    MESSAGE_KEYS,
    TOOL,
    USER,
    Conversation,
    Recorded,
    Rendering,
    check_encodable,
    check_text,
    from_ids,
    from_text,
    read_messages,
    read_text,
    read_tools,
)
from peagle.text.tokenizer import Message, load_tokenizer, texts_in

Row = Mapping[str, Any]
OWN_KEYS = ("prompt", "turns", "prompt_ids")  # of this project's layout; a row has one of them
TEXT = "text"
SYSTEM_KEYS = ("system", "system_prompt", "system_message")  # of a row
ANSWER_KEYS = ("response", "completion", "output")  # of a row with a single prompt: what a model answered
# keys that are not for the model: kind and source of a row, and reference answers
BOOKKEEPING = {
    "id", "idx", "index", "key", "uid", "uuid", "hash", "name", "question_id", "prompt_id", "task_id", "unique_id",
    "conversation_id", "custom_id", "src_id", "primary_id", "debug",
    "category", "sub_category", "subcategory", "subject", "topic", "level", "difficulty", "type", "tags", "language",
    "lang", "multiturn", "source", "source_file", "dataset", "split", "module", "license", "meta", "metadata",
    "timestamp", "created", "url", "method", "model", "model_name", "weight",
    "reference", "references", "reference_answer", "answer", "answers", "solution", "response", "completion", "output",
    "label", "chosen", "rejected", "score", "scores", "rating", "entry_point", "canonical_solution", "test", "code",
    "test_list", "test_setup_code", "test_imports", "challenge_test_list",
}  # fmt: skip
MOST_KEYS = 10  # named in a warning
# SPEED-Bench stores this instead of texts that its own script fetches from other data sets
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"

_CSV = """python -c 'import csv, json; rows = csv.DictReader(open("FILE"), dialect="{}"); \
open("NEW.jsonl", "w").writelines(json.dumps(row) + "\\n" for row in rows)'"""
_HEADER = re.compile(rb'"?\w[\w ]*"?([,;\t]"?\w[\w ]*"?)+\r?\n')  # a line of column names
CONVERT = {
    "CSV": _CSV.format("excel"),
    "TSV": _CSV.format("excel-tab"),
    "parquet": """python -c 'import pandas; pandas.read_parquet("FILE").to_json("NEW.jsonl", orient="records", \
lines=True)'""",
    "UTF-16": "iconv -f UTF-16 -t UTF-8 FILE > NEW",
}


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A row without a usable prompt. line: of the file, or the row of its list, from 1. reason: names the row."""

    line: int
    reason: str


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """A file of prompts. unused: keys without effect, with the number of conversations that have them."""

    name: str
    layout: str
    sha256: str
    conversations: tuple[Conversation, ...]
    skipped: tuple[Skipped, ...] = ()
    unused: Mapping[str, int] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()  # about options without effect on some conversations

    @property
    def num_rows(self) -> int:
        return len(self.conversations) + len(self.skipped)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines about skipped rows, unused keys, and options without effect."""
        lines = [f"left out of {self.name}: {skipped_line(self.skipped)}"] if self.skipped else []
        if self.unused:
            keys = [f"{key} ({_rows_text(count)})" for key, count in self.unused.items()]
            more = [f"and {len(keys) - MOST_KEYS} more"] if len(keys) > MOST_KEYS else []
            lines.append(f"{self.name} has keys that have no effect: {', '.join(keys[:MOST_KEYS] + more)}")
        return (*lines, *(f"{self.name}: {note}" for note in self.notes))


def read_prompt_file(
    path: Path, *, strict: bool = False, check: Callable[[Conversation], None] | None = None
) -> PromptSet:
    """Read all conversations of a file, in order. check: raises InputError for a conversation to skip.

    Raises InputError for a file without prompts, and for one that is neither JSON nor .txt. strict: also for a row that
    would be skipped.
    """
    try:
        stored = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {reason_of(error)}; expected a file of prompts") from None
    data = _unpacked(path, stored)
    conversations: list[Conversation] = []
    skipped: list[Skipped] = []
    unused: Counter[str] = Counter()
    layout: str | None = None
    for number, name, value in _rows(path, data):
        try:
            row = _read(value, name, text=_is_text(path))
            if layout not in (None, row.layout):
                raise InputError(
                    f"{name} has the layout {row.layout}, the rows before it {layout}; expected one in a file"
                )
            if check is not None:
                check(row.conversation)
        except InputError as error:
            if strict:
                raise
            skipped.append(Skipped(number, str(error)))
        else:
            layout = row.layout
            conversations.append(row.conversation)
            unused.update(row.unused)
    if not conversations:
        if skipped and not _is_text(path) and _HEADER.match(data):
            raise _not_read(path, "CSV")
        expected = "one prompt per line" if _is_text(path) else 'JSON lines such as {"prompt": "..."}'
        why = f": {skipped[0].reason}" if skipped else f"; expected {expected}"
        raise InputError(f"{path} holds no prompts{why}")
    return PromptSet(
        printable(without_suffix(path).name),
        layout or TEXT,
        hashlib.sha256(stored).hexdigest(),
        tuple(conversations),
        tuple(skipped),
        unused,
    )


def read_prompts(
    path: Path, target: Path, rendering: Rendering, *, strict: bool = False, answered: bool = False
) -> PromptSet:
    """Read a file, and skip histories and tools that the target's chat template refuses or does not show.

    Some templates take no messages of tools, or no two messages of a user in a row. answered: skip rows without a
    recorded answer, too. Raises InputError like `read_prompt_file`.
    """
    tokenizer = functools.cache(lambda: load_tokenizer(target))

    def check(conversation: Conversation) -> None:
        if answered and (conversation.recorded is None or not conversation.recorded.answers):
            raise InputError(
                f"{conversation.name} has no recorded answer; expected a message of an assistant after another one, or "
                "input_ids with a loss_mask that is not all 0"
            )
        if rendering.raw or not (conversation.history or conversation.tools):
            return
        prompt_ids = conversation.encode((), tokenizer(), rendering)
        without = dataclasses.replace(conversation, tools=())
        if conversation.tools and prompt_ids == without.encode((), tokenizer(), rendering):
            raise InputError(
                f"{conversation.name} has tools, which the chat template in {target} does not show; leave them out"
            )

    prompts = read_prompt_file(path, strict=strict, check=check)
    return dataclasses.replace(prompts, notes=tuple(_notes(prompts.conversations, rendering)))


def _notes(conversations: Sequence[Conversation], rendering: Rendering) -> Iterator[str]:
    """Name rendering options without effect on some conversations."""
    with_ids = sum(conversation.prompt_ids is not None for conversation in conversations)
    if with_ids and (options := rendering.options):
        yield f"{_rows_text(with_ids)} of token ids, which are taken as they are, without {' and '.join(options)}"
    with_system = sum(conversation.system is not None for conversation in conversations)
    if with_system and rendering.system is not None:
        yield f"{_rows_text(with_system)} with a system text of their own, which --system does not replace"


def without_suffix(path: Path) -> Path:
    """Remove the suffixes of a path: a/b.jsonl.gz -> a/b."""
    return _without_gz(path).with_suffix("")


def skipped_line(skipped: Sequence[Skipped]) -> str:
    """Describe skipped rows: their number, and the reason of the first."""
    return f"{_rows_text(len(skipped))} without a usable prompt, the first: {skipped[0].reason}"


def _rows_text(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _without_gz(path: Path) -> Path:
    return path.with_suffix("") if path.suffix == ".gz" else path


def _is_text(path: Path) -> bool:
    return _without_gz(path).suffix == ".txt"


def _unpacked(path: Path, data: bytes) -> bytes:
    """Unpack gzip and remove a byte order mark. Raises InputError for anything but text in UTF-8."""
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path} cannot be unpacked ({error}); expected a whole gzip file") from None
    if data.startswith(b"PAR1"):
        raise _not_read(path, "parquet")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _not_read(path, "UTF-16")
    if b"\0" in data[:1024]:
        raise InputError(f"{path} is no text; expected JSON lines, or a .txt file, in UTF-8")
    if (kind := _without_gz(path).suffix[1:].upper()) in ("CSV", "TSV"):
        raise _not_read(path, kind)
    return data.removeprefix(b"\xef\xbb\xbf")


def _not_read(path: Path, kind: str) -> InputError:
    return InputError(f"{path} is {kind}; expected JSON lines, or .txt, in UTF-8; to convert it: {CONVERT[kind]}")


def _rows(path: Path, data: bytes) -> Iterator[tuple[int, str, Any]]:
    """Yield (number from 1, name, value) of the rows: bytes of the lines that are not blank, or items of a list."""
    numbered = enumerate(data.split(b"\n"), 1)
    lines = [(number, f"{path} line {number}", line) for number, line in numbered if line.strip()]
    is_list = bool(lines) and not _is_text(path) and lines[0][2].lstrip().startswith(b"[")
    if is_list and (len(lines) == 1 or not _is_json(lines[0][2])):  # otherwise every line is a list
        value = _parse(data, str(path))
        rows = [value] if _is_chat(value) else value
        yield from ((number, f"{path} row {number}", row) for number, row in enumerate(rows, 1))
    else:
        yield from lines


def _is_chat(value: Any) -> bool:
    messages = value if isinstance(value, list) else []
    return bool(messages) and all(isinstance(message, dict) and "role" in message for message in messages)


def _is_json(line: bytes) -> bool:
    try:
        _parse(line, "")
    except InputError:
        return False
    return True


def _parse(data: bytes, name: str) -> Any:
    text = _decode(data, name)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not valid JSON ({error}); expected one object per line, or one list") from None


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{name} is not UTF-8; expected text in UTF-8") from None


class _Row(NamedTuple):
    layout: str
    conversation: Conversation
    unused: Sequence[str] = ()  # keys without effect


def _read(value: Any, name: str, *, text: bool) -> _Row:
    if text:
        return _Row(TEXT, from_text(_decode(value, name).removesuffix("\r"), name))
    try:
        return _read_row(_parse(value, name) if isinstance(value, bytes) else value, name)
    except RecursionError:
        raise InputError(f"{name} is nested too deeply; expected a prompt") from None


def _read_row(row: Any, name: str) -> _Row:
    if _is_chat(row):
        row = {"messages": row}
    if not isinstance(row, dict):
        raise InputError(f"{name} holds {brief(row)}; expected a JSON object with one of {', '.join(OWN_KEYS)}")
    if isinstance(row.get("body"), dict) and "messages" in row["body"]:
        row = {**row, **row["body"], "body": None}
    elif _is_chat(row.get("prompt")):  # TRL's, with the answer as "completion"
        answer = row["completion"] if _is_chat(row.get("completion")) else []
        row = {**row, "messages": [*row["prompt"], *answer], "prompt": None}
    layout = _layout(row, name)
    conversation = _with_answer(_with_system(LAYOUTS[layout].read(row, name), row, name), row)
    if tools := _filled(row.get("tools")):
        conversation = dataclasses.replace(conversation, tools=read_tools(tools, f"{name}: tools"))
    category = row.get("category")
    if isinstance(category, str) and category.strip():
        check_encodable(category, f"{name}: category")
        conversation = dataclasses.replace(conversation, category=printable(category))
    if any(text.startswith(PLACEHOLDER) for text in texts_in([conversation.turns, conversation.history])):
        raise InputError(
            f"{name} holds SPEED-Bench's placeholder instead of a prompt; fetch the texts with the prepare.py of that "
            "data set"
        )
    return _Row(layout, conversation, tuple(_unused(row, layout)))


def _unused(row: Row, layout: str) -> Iterator[str]:
    """Name the keys without effect, of the row and of its messages."""
    used = {*LAYOUTS[layout].required, *LAYOUTS[layout].optional, *SYSTEM_KEYS, "tools"}
    yield from (key for key, value in row.items() if _filled(value) is not None and key not in used | BOOKKEEPING)
    for key in used & {"messages", "conversations"}:
        items = (item for message in row[key] for item in message.items())
        names = dict.fromkeys(name for name, value in items if _filled(value) is not None)
        yield from (f"{key}[].{name}" for name in names if name not in MESSAGE_KEYS | BOOKKEEPING)


def _filled(value: Any) -> Any:
    """Return the value; None for an empty one."""
    return None if value in (None, "", [], {}) else value


def _layout(row: Row, name: str) -> str:
    own = [key for key in OWN_KEYS if row.get(key) is not None]
    for layout, kind in LAYOUTS.items():
        if layout == OWN_LAYOUT:
            if len(own) == 1:
                return layout
            if own:
                break
        elif all(row.get(key) is not None for key in kind.required):
            return layout
    keys = " and ".join(own or map(brief, row)) or "nothing"
    raise InputError(
        f"{name} has {keys}; expected exactly one of {', '.join(OWN_KEYS)}, or a row of HumanEval (task_id, prompt, "
        "entry_point), GSM8K (question), MATH (problem), MBPP (text, code), Alpaca (instruction), ShareGPT "
        "(conversations), OpenAI (messages) or speculators (input_ids, loss_mask)"
    )


def _with_system(conversation: Conversation, row: Row, name: str) -> Conversation:
    """Add the system text of the row before those of its messages."""
    texts = [read_text(row[key], f"{name}: {key}") for key in SYSTEM_KEYS if row.get(key) is not None]
    texts = [text for text in (*texts, conversation.system or "") if text.strip()]
    system = "\n\n".join(dict.fromkeys(texts)) or None
    return conversation if system == conversation.system else dataclasses.replace(conversation, system=system)


def _with_answer(conversation: Conversation, row: Row) -> Conversation:
    """Add the recorded answer of a row that has it with a single prompt."""
    answer = next((row[key] for key in ANSWER_KEYS if isinstance(row.get(key), str) and row[key]), None)
    if answer is None or conversation.recorded is not None or len(conversation.turns) != 1:
        return conversation
    chat = {"role": USER, "content": conversation.turns[0]}, {"role": ASSISTANT, "content": answer}
    return dataclasses.replace(conversation, recorded=read_messages([*chat], conversation.name)[1])


def _own(row: Row, name: str) -> Conversation:
    key = next(key for key in OWN_KEYS if row.get(key) is not None)
    value = row[key]
    if key == "prompt_ids":
        if not isinstance(value, list):
            raise InputError(f"{name}: prompt_ids is {brief(value)}; expected a list of integers")
        return from_ids(value, name)
    numbered = key == "turns" or isinstance(value, list)
    turns = value if numbered else [value]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        expected = "a list of texts" if key == "turns" else "a text, a list of texts or one of messages"
        raise InputError(f"{name}: {key} is {brief(value)}; expected {expected}")
    return Conversation(name, turns=tuple(check_text(turn, name) for turn in turns), numbered=numbered)


def _single(*keys: str) -> Callable[[Row, str], Conversation]:
    """Make the reader of a prompt that joins the texts of these keys."""

    def read(row: Row, name: str) -> Conversation:
        texts = [read_text(row.get(key), f"{name}: {key}") for key in keys]
        return from_text("\n\n".join(text for text in texts if text), name)

    return read


def _speculators(row: Row, name: str) -> Conversation:
    ids, mask = row["input_ids"], row["loss_mask"]
    whole = isinstance(ids, list) and isinstance(mask, list) and len(ids) == len(mask)
    if not whole or any(value not in (0, 1) for value in mask):
        raise InputError(
            f"{name} has input_ids {brief(ids)} and loss_mask {brief(mask)}; expected two lists of one length, the "
            "second of 0 and 1"
        )
    from_ids(ids, name)  # raises InputError for other than integers
    if mask[:1] == [1]:
        raise InputError(f"{name} has a loss_mask that begins with 1; expected a prompt before the answer, with 0")
    recorded = Recorded(token_ids=tuple(ids), mask=tuple(map(bool, mask)))
    group, size = row.get("primary_id"), mask.index(1) if 1 in mask else len(mask)
    conversation = from_ids(ids[:size], name)
    return dataclasses.replace(conversation, recorded=recorded, group=None if group is None else str(group))


def _sharegpt(row: Row, name: str) -> Conversation:
    system, recorded = read_messages(row["conversations"], f"{name}: conversations")
    messages = recorded.messages
    if any(message["role"] == TOOL for message in messages):  # later turns depend on the recorded answers
        return _continuation(name, system, recorded)
    turns = tuple(message["content"] for message in messages if message["role"] == USER and message["content"].strip())
    if not turns:
        raise InputError(f"{name} holds no message of a user")
    return Conversation(name, turns=turns, numbered=True, system=system, recorded=recorded)


def _openai(row: Row, name: str) -> Conversation:
    return _continuation(name, *read_messages(row["messages"], f"{name}: messages"))


def _continuation(name: str, system: str | None, recorded: Recorded) -> Conversation:
    """Make a conversation that continues a chat; answers at its end are dropped and generated anew."""
    history = [*map(_without_reasoning, recorded.messages)]
    while history and history[-1]["role"] == ASSISTANT:
        history.pop()
    if not history:
        raise InputError(f"{name} holds no message of a user")
    if history[-1]["role"] == TOOL:
        return Conversation(name, history=tuple(history), system=system, recorded=recorded)
    last = check_text(history.pop()["content"], f"{name}: the last message of the user")
    return Conversation(name, turns=(last,), history=tuple(history), system=system, recorded=recorded)


def _without_reasoning(message: Message) -> Message:
    if "tool_calls" in message:
        return message
    return {key: value for key, value in message.items() if key != "thinking"}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout of rows. required: keys that all its rows have. optional: further keys that `read` uses."""

    required: tuple[str, ...]
    read: Callable[[Row, str], Conversation]
    optional: tuple[str, ...] = ()


OWN_LAYOUT = "prompts"  # exactly one of OWN_KEYS
LAYOUTS: Mapping[str, Layout] = {  # the first one that fits a row is its layout
    "speculators": Layout(("input_ids", "loss_mask"), _speculators),
    "messages": Layout(("messages",), _openai),
    "sharegpt": Layout(("conversations",), _sharegpt),
    "humaneval": Layout(("task_id", "prompt", "entry_point"), _single("prompt")),
    OWN_LAYOUT: Layout((), _own, OWN_KEYS),
    "gsm8k": Layout(("question",), _single("question")),
    "math": Layout(("problem",), _single("problem")),
    "alpaca": Layout(("instruction",), _single("instruction", "input"), ("input",)),
    "mbpp": Layout(("text", "code"), _single("text")),
}
