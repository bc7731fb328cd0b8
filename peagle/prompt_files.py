"""Files of prompts, in the layouts people have on disk.

    prompts     JSON lines: {"prompt": TEXT}, {"turns": [TEXT, ...]} (MT-Bench, Spec-Bench) or {"prompt_ids": [ID, ...]}
    humaneval   JSON lines: {"task_id": ..., "prompt": CODE, "entry_point": ..., ...}; the code is asked as it is
    gsm8k       JSON lines: {"question": TEXT, "answer": TEXT}
    sharegpt    JSON: {"conversations": [{"from": "human", "value": TEXT}, {"from": "gpt", ...}, ...]}
    messages    JSON: {"messages": [{"role": "user", "content": TEXT}, ...]} (OpenAI), or it under "body" (batches)
    text        a .txt file: each line a prompt

A JSON layout may be lines, or one list. A file has one layout; keys beside those that it needs are left alone. Of
ShareGPT the answers are left out: the model gives its own. Of messages they are the history, but for one at the end,
which is what is asked for.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from peagle.ops.errors import InputError
from peagle.prompts import Conversation, brief, check_text, from_ids, from_text

Row = Mapping[str, Any]
OWN = ("prompt", "turns", "prompt_ids")
TEXT = "text"
SYSTEM_ROLES, USER, ASSISTANT = ("system", "developer"), "user", "assistant"
HUMANS, MODELS = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard", "model")  # ShareGPT's "from"


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """A file of prompts. `skipped` has a line for each row that holds nothing to ask."""

    name: str
    layout: str
    sha256: str
    num_rows: int
    conversations: tuple[Conversation, ...]
    skipped: tuple[str, ...] = ()


class _NothingToAsk(Exception):
    """A row that is as it should be, but holds no prompt."""


def read_prompt_file(path: Path) -> PromptSet:
    """All conversations of a file, in its order.

    Raises InputError with the number of the row that does not work, for a file of several layouts, and for one without
    any prompt.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; expected a file of prompts") from None
    conversations, skipped, num_rows, layout = [], [], 0, None
    for name, row in _rows(path, data.removeprefix(b"\xef\xbb\xbf")):
        num_rows += 1
        found = TEXT if isinstance(row, str) else _layout(row, name)
        if layout not in (None, found):
            raise InputError(f"{name} has the layout {found}, the rows before it {layout}; expected one in a file")
        layout = found
        try:
            conversations.append(from_text(row, name) if isinstance(row, str) else LAYOUTS[found](row, name))
        except _NothingToAsk as nothing:
            skipped.append(f"{name} {nothing}")
    if not conversations:
        why = f": {skipped[0]}" if skipped else ""
        raise InputError(f'{path} holds no prompts{why}; expected JSON lines such as {{"prompt": "..."}}')
    return PromptSet(
        path.stem, layout or TEXT, hashlib.sha256(data).hexdigest(), num_rows, tuple(conversations), tuple(skipped)
    )


def _rows(path: Path, data: bytes) -> Iterator[tuple[str, Row | str]]:
    """Every row that is not blank, with its name."""
    if path.suffix != ".txt" and data.lstrip()[:1] == b"[":
        listed = _parse(data, str(path), "a list of objects, or one object a line")
        if isinstance(listed, list) and (not listed or isinstance(listed[0], dict)):
            yield from (
                (f"{path} row {number}", _object(row, f"{path} row {number}")) for number, row in enumerate(listed, 1)
            )
            return
    for number, line in enumerate(data.split(b"\n"), 1):
        name = f"{path} line {number}"
        if not line.strip():
            continue
        if path.suffix == ".txt":
            yield name, _decode(line, name, "text").removesuffix("\r")
        else:
            yield name, _object(_parse(line, name, "one object a line"), name)


def _parse(data: bytes, name: str, expected: str) -> Any:
    try:
        return json.loads(_decode(data, name, "JSON"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not valid JSON ({error}); expected {expected}") from None


def _decode(data: bytes, name: str, expected: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{name} is not UTF-8; expected {expected} in UTF-8") from None


def _object(row: Any, name: str) -> Row:
    if not isinstance(row, dict):
        raise InputError(f"{name} holds {brief(row)}; expected a JSON object with one of {', '.join(OWN)}")
    return row


def _layout(row: Row, name: str) -> str:
    """That of a row. Raises InputError for one that has none."""
    if "messages" in row or (isinstance(row.get("body"), dict) and "messages" in row["body"]):
        return "messages"
    if "conversations" in row:
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
    value, category = row[kind], row.get("category")
    if kind == "prompt_ids":
        if not isinstance(value, list):
            raise InputError(f"{name}: prompt_ids is {brief(value)}; expected a list of integers")
        return dataclasses.replace(from_ids(value, name), category=_category(category))
    turns = value if kind == "turns" else [value]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        expected = "a list of texts" if kind == "turns" else "a text"
        raise InputError(f"{name}: {kind} is {brief(value)}; expected {expected}")
    return Conversation(
        name,
        turns=tuple(check_text(turn, name) for turn in turns),
        numbered=kind == "turns",
        category=_category(category),
    )


def _category(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _single(key: str) -> Callable[[Row, str], Conversation]:
    return lambda row, name: from_text(_text(row[key], f"{name}: {key}"), name)


def _sharegpt(row: Row, name: str) -> Conversation:
    turns, system = [], None
    for number, message in enumerate(_messages(row["conversations"], f"{name}: conversations", "from", "value")):
        role, text = message
        if role == "system" and number == 0:
            system = text
        elif role in HUMANS:
            turns.append(text)
        elif role not in MODELS:
            raise InputError(
                f"{name}: message {number} is from {brief(role)}; expected one of {', '.join((*HUMANS, *MODELS))}"
            )
    if not any(turn.strip() for turn in turns):
        raise _NothingToAsk("holds no message of a person")
    asked = tuple(check_text(turn, name) for turn in turns if turn.strip())
    return Conversation(name, turns=asked, numbered=True, system=system)


def _openai(row: Row, name: str) -> Conversation:
    listed = row["messages"] if "messages" in row else row["body"]["messages"]
    messages = _messages(listed, f"{name}: messages", "role", "content")
    systems = [text for role, text in messages if role in SYSTEM_ROLES]
    spoken = [(role, text) for role, text in messages if role not in SYSTEM_ROLES]
    if spoken and spoken[-1][0] == ASSISTANT:
        spoken = spoken[:-1]
    if not spoken:
        raise _NothingToAsk("holds no message of a user")
    expected = (USER, ASSISTANT)
    for number, (role, _) in enumerate(spoken):
        if role != expected[number % 2]:
            raise InputError(
                f"{name}: message {number}, system texts aside, is of the {brief(role)}; expected user and assistant "
                "in turns, the user first"
            )
    turns = tuple(check_text(text, name) for role, text in spoken if role == USER)
    given = tuple(text for role, text in spoken if role == ASSISTANT)
    return Conversation(name, turns=turns, given=given, system="\n\n".join(systems) or None)


def _messages(listed: Any, what: str, role: str, text: str) -> list[tuple[str, str]]:
    if not isinstance(listed, list):
        raise InputError(f"{what} is {brief(listed)}; expected a list of messages")
    found = []
    for number, message in enumerate(listed):
        if not isinstance(message, dict) or not isinstance(message.get(role), str):
            raise InputError(f"{what}: message {number} is {brief(message)}; expected an object with {role} and {text}")
        found.append((message[role], _text(message.get(text), f"{what}: {text} of message {number}")))
    return found


def _text(value: Any, name: str) -> str:
    """A text, or OpenAI's list of parts of text."""
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        value = "".join(str(part.get("text", "")) for part in value)
    if not isinstance(value, str):
        raise InputError(f"{name} is {brief(value)}; expected a text")
    return value


LAYOUTS: Mapping[str, Callable[[Row, str], Conversation]] = {
    "prompts": _own,
    "humaneval": _single("prompt"),
    "gsm8k": _single("question"),
    "sharegpt": _sharegpt,
    "messages": _openai,
}
