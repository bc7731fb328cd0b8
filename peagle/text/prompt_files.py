"""Read files of prompts, in the common layouts.

    prompts     JSON lines: {"prompt": TEXT}, {"turns": [TEXT, ...]} (MT-Bench, Spec-Bench) or {"prompt_ids": [ID, ...]}
    humaneval   JSON lines: {"task_id": ..., "prompt": CODE, "entry_point": ..., ...}; the prompt is the code
    gsm8k       JSON lines: {"question": TEXT, "answer": TEXT}
    sharegpt    JSON: {"conversations": [{"from": "human", "value": TEXT}, {"from": "gpt", ...}, ...]}, or with "role"
                and "content" (SpecForge)
    messages    JSON: {"messages": [{"role": "user", "content": TEXT}, ...]} (OpenAI), or these under "body" (batches)
                or as "prompt", or only the list
    text        a .txt file: each line a prompt

A JSON layout may be lines, or one list; any file may be gzipped. A file has one layout; further keys are ignored. The
answers in ShareGPT are left out: the model gives its own. Those in messages, and in ShareGPT with tools, are the
history, except one at the end, which the model answers anew.

A row that cannot be read, or holds no prompt, is left out and counted; with `strict` it is an error.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.ops.errors import InputError
from peagle.ops.files import printable, reason_of
from peagle.text.channels import final_message
from peagle.text.prompts import Conversation, Rendering, brief, check_encodable, check_text, from_ids, from_text
from peagle.text.tokenizer import Message, load_tokenizer

Row = Mapping[str, Any]
OWN = ("prompt", "turns", "prompt_ids")
TEXT = "text"
USER, ASSISTANT, TOOL, SYSTEM = "user", "assistant", "tool", "system"
ROLES = {
    USER: ("user", "human"),
    ASSISTANT: ("assistant", "gpt", "chatgpt", "bing", "bard", "model"),  # ShareGPT's "from", too
    TOOL: ("tool", "function"),
    SYSTEM: ("system", "developer"),
}
TEXT_PARTS = ("text", "input_text", "output_text")  # types of parts in a list of content: chat completions, responses
BESIDE = ("name", "thinking", "tool_call_id")  # further texts of a message that templates use

_CSV = """python -c 'import csv, json; rows = csv.DictReader(open("FILE"), dialect="{}"); \
open("NEW.jsonl", "w").writelines(json.dumps(row) + "\\n" for row in rows)'"""
_HEADER = re.compile(rb'"?\w[\w ]*"?([,;\t]"?\w[\w ]*"?)+\r?\n')  # names of columns
CONVERT = {
    "CSV": _CSV.format("excel"),
    "TSV": _CSV.format("excel-tab"),
    "parquet": """python -c 'import pandas; pandas.read_parquet("FILE").to_json("NEW.jsonl", orient="records", \
lines=True)'""",
    "UTF-16": "iconv -f UTF-16 -t UTF-8 FILE > NEW",
}


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """A file of prompts.

    `left_out`: a line for each row left out, with its number and the reason.
    """

    name: str
    layout: str
    sha256: str
    num_rows: int
    conversations: tuple[Conversation, ...]
    left_out: tuple[str, ...] = ()


def read_prompt_file(path: Path, *, strict: bool = False) -> PromptSet:
    """Read all conversations of a file, in order.

    Raises InputError for a file without prompts, or neither JSON nor .txt; if `strict`, also for the first row that
    would be left out.
    """
    path = Path(path)
    try:
        stored = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {reason_of(error)}; expected a file of prompts") from None
    data = _unpacked(path, stored)
    conversations, left_out, num_rows, layout = [], [], 0, None
    for name, given in _rows(path, data):
        num_rows += 1
        try:
            found, conversation = _read(given, name, text=_is_text(path))
            if layout not in (None, found):
                raise InputError(f"{name} has the layout {found}, the rows before it {layout}; expected one in a file")
        except InputError as error:
            if strict:
                raise
            left_out.append(str(error))
        else:
            layout = found
            conversations.append(conversation)
    if not conversations:
        if left_out and not _is_text(path) and _HEADER.match(data):
            raise _not_read(path, "CSV")
        why = f": {left_out[0]}" if left_out else ""
        expected = "a prompt a line" if _is_text(path) else 'JSON lines such as {"prompt": "..."}'
        raise InputError(f"{path} holds no prompts{why}; expected {expected}")
    return PromptSet(
        printable(without_suffix(path).name),
        layout or TEXT,
        hashlib.sha256(stored).hexdigest(),
        num_rows,
        tuple(conversations),
        tuple(left_out),
    )


def read_prompts(path: Path, target: Path, rendering: Rendering, *, strict: bool) -> PromptSet:
    """Read a file, and leave out conversations with a history that the chat template refuses.

    Some templates take no messages of tools, or no two of a user in a row. `target` is a directory. Raises InputError
    as `read_prompt_file` does, and if the template refuses all conversations.
    """
    found = read_prompt_file(path, strict=strict)
    if rendering.raw or not any(each.history for each in found.conversations):
        return found
    tokenizer = load_tokenizer(target)
    taken, refused = [], []
    for each in found.conversations:
        try:
            if each.history:
                each.encode((), tokenizer, rendering)
        except InputError as error:
            if strict:
                raise
            refused.append(str(error))
        else:
            taken.append(each)
    if not taken:
        raise InputError(refused[0])
    return dataclasses.replace(found, conversations=tuple(taken), left_out=(*found.left_out, *refused))


def without_suffix(path: Path) -> Path:
    """Remove the endings of a path: a/b.jsonl.gz is a/b."""
    return _plain(path).with_suffix("")


def left_out_line(left_out: Sequence[str]) -> str:
    """Write a line on the rows left out: their number, and the first with its reason."""
    count = "1 row" if len(left_out) == 1 else f"{len(left_out)} rows"
    return f"{count} without a usable prompt, the first: {left_out[0]}"


def _plain(path: Path) -> Path:
    return path.with_suffix("") if path.suffix == ".gz" else path


def _is_text(path: Path) -> bool:
    return _plain(path).suffix == ".txt"


def _unpacked(path: Path, data: bytes) -> bytes:
    """Unpack gzip and remove a byte order mark. Raises InputError if it is not text in UTF-8."""
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
    if (kind := _plain(path).suffix[1:].upper()) in ("CSV", "TSV"):
        raise _not_read(path, kind)
    return data.removeprefix(b"\xef\xbb\xbf")


def _not_read(path: Path, kind: str) -> InputError:
    return InputError(f"{path} is {kind}; expected JSON lines, or .txt, in UTF-8; to convert it: {CONVERT[kind]}")


def _rows(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    """Yield rows that are not blank with their names: the bytes of a line, or an item of one list."""
    lines = [(f"{path} line {number}", line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    if lines and not _is_text(path) and lines[0][1].lstrip().startswith(b"["):
        try:
            listed = _parsed(data, str(path))
        except InputError:  # each line is a list, unless it is one malformed list
            if not _parses(lines[0][1]):
                raise
        else:
            rows = [listed] if _is_chat(listed) else listed
            yield from ((f"{path} row {number}", row) for number, row in enumerate(rows, 1))
            return
    yield from lines


def _is_chat(value: Any) -> bool:
    """Test whether the value is a bare list of messages."""
    return isinstance(value, list) and all(isinstance(each, dict) and "role" in each for each in value) and bool(value)


def _parses(line: bytes) -> bool:
    try:
        _parsed(line, "")
    except InputError:
        return False
    return True


def _parsed(data: bytes, name: str) -> Any:
    text = _decoded(data, name)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not valid JSON ({error}); expected an object a line, or a list of them") from None


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{name} is not UTF-8; expected text in UTF-8") from None


def _read(given: Any, name: str, *, text: bool) -> tuple[str, Conversation]:
    """Read a row: (its layout, its conversation)."""
    try:
        return _layout_and_conversation(given, name, text)
    except RecursionError:
        raise InputError(f"{name} is nested too deeply; expected a prompt") from None


def _layout_and_conversation(given: Any, name: str, text: bool) -> tuple[str, Conversation]:
    if text:
        return TEXT, from_text(_decoded(given, name).removesuffix("\r"), name)
    row = _parsed(given, name) if isinstance(given, bytes) else given
    if _is_chat(row):
        row = {"messages": row}
    if not isinstance(row, dict):
        raise InputError(f"{name} holds {brief(row)}; expected a JSON object with one of {', '.join(OWN)}")
    if isinstance(row.get("body"), dict) and "messages" in row["body"]:
        row = {**row, "messages": row["body"]["messages"]}
    elif isinstance(row.get("prompt"), list):
        row = {**row, "messages": row["prompt"]}
    layout = _layout(row, name)
    category = row.get("category")
    conversation = LAYOUTS[layout](row, name)
    if isinstance(category, str) and category.strip():
        check_encodable(category, f"{name}: category")
        conversation = dataclasses.replace(conversation, category=printable(category))
    return layout, conversation


def _layout(row: Row, name: str) -> str:
    """Find the layout of a row. Raises InputError if it has none."""
    if row.get("messages") is not None:
        return "messages"
    if row.get("conversations") is not None:
        return "sharegpt"
    if {"task_id", "prompt", "entry_point"} <= row.keys():
        return "humaneval"
    if {"question", "answer"} <= row.keys() and not any(row.get(kind) is not None for kind in OWN):
        return "gsm8k"
    given = [kind for kind in OWN if row.get(kind) is not None]
    if len(given) != 1:
        seen = " and ".join(given or map(brief, row)) or "nothing"
        raise InputError(
            f"{name} has {seen}; expected exactly one of {', '.join(OWN)}, or a row of HumanEval (task_id, prompt, "
            "entry_point), GSM8K (question, answer), ShareGPT (conversations) or OpenAI (messages)"
        )
    return "prompts"


def _own(row: Row, name: str) -> Conversation:
    kind = next(kind for kind in OWN if row.get(kind) is not None)
    value = row[kind]
    if kind == "prompt_ids":
        if not isinstance(value, list):
            raise InputError(f"{name}: prompt_ids is {brief(value)}; expected a list of integers")
        return from_ids(value, name)
    turns = value if kind == "turns" else [value]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        expected = "a list of texts" if kind == "turns" else "a text"
        raise InputError(f"{name}: {kind} is {brief(value)}; expected {expected}")
    return Conversation(name, turns=tuple(check_text(turn, name) for turn in turns), numbered=kind == "turns")


def _single(key: str) -> Callable[[Row, str], Conversation]:
    return lambda row, name: from_text(_text(row[key], f"{name}: {key}"), name)


def _sharegpt(row: Row, name: str) -> Conversation:
    system, messages = _messages(row["conversations"], f"{name}: conversations")
    if any(message["role"] == TOOL for message in messages):  # later turns depend on the recorded answers
        return _answered(name, system, messages)
    turns = tuple(message["content"] for message in messages if message["role"] == USER and message["content"].strip())
    if not turns:
        raise InputError(f"{name} holds no message of a user")
    return Conversation(name, turns=turns, numbered=True, system=system)


def _openai(row: Row, name: str) -> Conversation:
    return _answered(name, *_messages(row["messages"], f"{name}: messages"))


def _answered(name: str, system: str | None, messages: Sequence[Message]) -> Conversation:
    """Make the conversation that continues a chat, or answers its last message anew."""
    history = [*messages]
    while history and history[-1]["role"] == ASSISTANT:
        history.pop()
    if not history:
        raise InputError(f"{name} holds no message of a user")
    if history[-1]["role"] == TOOL:
        return Conversation(name, history=tuple(history), system=system)
    last = check_text(history.pop()["content"], f"{name}: the last message of the user")
    return Conversation(name, turns=(last,), history=tuple(history), system=system)


def _messages(listed: Any, name: str) -> tuple[str | None, list[Message]]:
    """Read a chat: (its system texts joined, the other messages)."""
    if not isinstance(listed, list):
        raise InputError(f"{name} is {brief(listed)}; expected a list of messages")
    systems, messages = [], []
    for number, given in enumerate(listed):
        message = _message(given, f"{name}: message {number}")
        if message["role"] != SYSTEM:
            messages.append(message)
        elif message["content"].strip():
            systems.append(message["content"])
    return "\n\n".join(systems) or None, messages


def _message(given: Any, name: str) -> Message:
    """Read a message into the form that templates take."""
    spelled = given.get("role", given.get("from")) if isinstance(given, dict) else None
    if not isinstance(spelled, str):
        raise InputError(f"{name} is {brief(given)}; expected an object with role and content, or from and value")
    role = next((role for role, names in ROLES.items() if spelled.strip().lower() in names), None)
    if role is None:
        expected = ", ".join(each for names in ROLES.values() for each in names)
        raise InputError(f"{name} has the role {brief(spelled)}; expected one of {expected}")
    text = _text(given.get("content", given.get("value")), f"{name}: its content")
    message: dict[str, Any] = {"role": role, "content": final_message(text) if role == ASSISTANT else text}
    message |= {key: given[key] for key in BESIDE if isinstance(given.get(key), str)}
    calls = given.get("tool_calls") or [
        {"type": "function", "function": each} for each in [given.get("function_call")] if each
    ]
    if calls and role == ASSISTANT:
        message["tool_calls"] = _calls(calls, f"{name}: tool_calls")
    return message


def _calls(listed: Any, name: str) -> list[Message]:
    """Read calls of tools. Arguments in JSON text, as in APIs, become an object, as in templates."""
    calls: list[Message] = []
    for each in listed if isinstance(listed, list) else [listed]:
        function = each.get("function") if isinstance(each, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError(f"{name} holds {brief(each)}; expected a function with a name and arguments")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # a model may have written invalid JSON
                arguments = json.loads(arguments)
        calls.append({**each, "function": {**function, "arguments": arguments}})
    return calls


def _text(value: Any, name: str) -> str:
    """Read a text, or join a list of parts of text; null is empty."""
    texts = []
    for part in value if isinstance(value, list) else [value]:
        is_text = isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS
        text = part.get("text") if is_text else part
        if text is not None and not isinstance(text, str):
            raise InputError(f"{name} is {brief(value)}; expected a text")
        texts.append(text or "")
    return "".join(texts)


LAYOUTS: Mapping[str, Callable[[Row, str], Conversation]] = {
    "prompts": _own,
    "humaneval": _single("prompt"),
    "gsm8k": _single("question"),
    "sharegpt": _sharegpt,
    "messages": _openai,
}
