"""What is asked: prompts from the command line, standard input or a JSON lines file, as conversations.

A conversation is a list of turns. Turn k's prompt holds the answers to the turns before it, so it is rendered when
those are known (`Conversation.encode`); conversations do not depend on one another.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from peagle.ops.errors import InputError
from peagle.text import DEFAULT_DATE, Tokenizer, parse_date

KINDS = ("prompt", "turns", "prompt_ids")


@dataclasses.dataclass(frozen=True)
class Rendering:
    """How text becomes a prompt. `raw`: as it is, without the chat template."""

    raw: bool = False
    system: str | None = None
    reasoning_effort: str | None = None
    date: str = DEFAULT_DATE

    def __post_init__(self) -> None:
        parse_date(self.date)
        if self.system is not None:
            check_text(self.system, "the system text")
        if self.raw and (self.system is not None or self.reasoning_effort is not None):
            raise InputError(
                "a system text or a reasoning effort needs the chat template, which --raw-prompt turns off; leave out "
                "the one or the other"
            )


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Either turns of text, one request each, or the ids of a single prompt. `name` says where it comes from;
    `numbered` that its requests are told apart by a turn number."""

    name: str
    turns: tuple[str, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    numbered: bool = False

    @property
    def num_requests(self) -> int:
        return 1 if self.prompt_ids is not None else len(self.turns)

    def encode(self, answers: Sequence[str], tokenizer: Tokenizer | None, rendering: Rendering) -> tuple[int, ...]:
        """The prompt of the turn that follows these answers.

        Raises InputError for text without a tokenizer or template, for turns without the template, and for a prompt
        that comes out empty.
        """
        if self.prompt_ids is not None:
            return self.prompt_ids
        if tokenizer is None:
            raise InputError(
                f"{self.name} is text, but the target's directory has no tokenizer.json; give token ids (--prompt-ids, "
                'or "prompt_ids" in a file)'
            )
        turns = self.turns[: len(answers) + 1]
        if rendering.raw:
            if len(self.turns) > 1:
                raise InputError(
                    f"{self.name} has {len(self.turns)} turns, which only a chat template can put together; leave out "
                    "--raw-prompt"
                )
            ids = tokenizer.encode(turns[0])
        else:
            ids = tokenizer.encode_chat(
                turns,
                answers,
                system=rendering.system,
                reasoning_effort=rendering.reasoning_effort,
                date=rendering.date,
            )
        if not ids:
            raise InputError(f"{self.name} is empty; expected at least one token")
        return ids


def from_text(text: str, name: str = "the prompt") -> Conversation:
    """One turn. Raises InputError for an empty text."""
    return Conversation(name, turns=(check_text(text, name),))


def from_ids(ids: Iterable[Any], name: str = "the prompt") -> Conversation:
    """Token ids as they are. Raises InputError for none, or for what is no id; whether they lie in the vocabulary is
    checked where that is known."""
    listed = list(ids)
    if bad := [i for i in listed if isinstance(i, bool) or not isinstance(i, int)]:
        raise InputError(f"{name} holds {_brief(bad[0])} among its token ids; expected integers")
    if not listed:
        raise InputError(f"{name} is empty; expected at least one token id")
    return Conversation(name, prompt_ids=tuple(listed))


def parse_ids(text: str) -> Conversation:
    """Ids as they are typed: 1,2,3."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if bad := [part for part in parts if not re.fullmatch("-?[0-9]{1,18}", part)]:
        raise InputError(f"--prompt-ids holds {_brief(bad[0])}; expected token ids with commas between, such as 1,2,3")
    return from_ids((int(part) for part in parts), "--prompt-ids")


def read_prompt_file(path: Path) -> list[Conversation]:
    """One conversation per line that is not blank; keys beside `prompt`, `turns` and `prompt_ids` are left alone.

    Raises InputError with the number of the line that does not work.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; expected a file of JSON lines") from None
    lines = enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1)
    conversations = [_parse_line(line, f"{path} line {number}") for number, line in lines if line.strip()]
    if not conversations:
        raise InputError(f'{path} holds no prompts; expected JSON lines such as {{"prompt": "..."}}')
    return conversations


def check_text(text: str, name: str) -> str:
    """The text. Raises InputError where it is blank, or not encodable (a lone surrogate: bytes that are not UTF-8)."""
    if not text.strip():
        raise InputError(f"{name} is empty; expected some text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{name} is not valid Unicode text; expected UTF-8") from None
    return text


def _parse_line(line: bytes, name: str) -> Conversation:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise InputError(f"{name} is not UTF-8; expected a JSON object in UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not valid JSON ({error}); expected one object a line") from None
    if not isinstance(record, dict):
        raise InputError(f"{name} holds {_brief(record)}; expected a JSON object with one of {', '.join(KINDS)}")
    given = [kind for kind in KINDS if record.get(kind) is not None]
    if len(given) != 1:
        seen = " and ".join(given) if given else f"none of them (but {', '.join(map(_brief, record)) or 'nothing'})"
        raise InputError(f"{name} has {seen}; expected exactly one of {', '.join(KINDS)}")
    value = record[given[0]]
    if given[0] == "prompt_ids":
        if not isinstance(value, list):
            raise InputError(f"{name}: prompt_ids is {_brief(value)}; expected a list of integers")
        return from_ids(value, name)
    turns = value if given[0] == "turns" else [value]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        expected = "a list of texts" if given[0] == "turns" else "a text"
        raise InputError(f"{name}: {given[0]} is {_brief(value)}; expected {expected}")
    return Conversation(name, turns=tuple(check_text(turn, name) for turn in turns), numbered=given[0] == "turns")


def _brief(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
