"""Prompts as conversations; peagle.text.prompt_files reads files of them.

A conversation is a list of turns. The prompt of a turn holds the answers to earlier turns, so it is rendered after
them (`Conversation.encode`). Conversations do not depend on one another.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from peagle.ops.errors import InputError
from peagle.ops.flag import PROMPT, Flag
from peagle.ops.settings import brief
from peagle.text.channels import chat_messages
from peagle.text.tokenizer import DEFAULT_DATE, Message, Tokenizer, parse_date, texts_in


@dataclasses.dataclass(frozen=True)
class Rendering:
    """How text becomes a prompt. In a chat, and without special_tokens, spelled special tokens stay characters."""

    raw: Annotated[bool, Flag(PROMPT, names=("--raw-prompt",))] = False
    """Continue the prompt as plain text, without the chat template: acceptance is lower."""
    system: Annotated[str | None, Flag(PROMPT, "TEXT")] = None
    """System message."""
    reasoning_effort: Annotated[Literal["low", "medium", "high"] | None, Flag(PROMPT, "LEVEL")] = None
    """low, medium or high, if the chat template has it. Default: the template's."""
    date: Annotated[str, Flag(PROMPT, "YYYY-MM-DD")] = DEFAULT_DATE
    """Current date for chat templates that show it; fixed, so that results are reproducible."""
    special_tokens: Annotated[bool, Flag(PROMPT)] = False
    """In a raw prompt, encode the spelling of a special token as that token."""

    def __post_init__(self) -> None:
        parse_date(self.date)
        if self.special_tokens and not self.raw:
            raise InputError(
                "special tokens can be spelled only in raw text; leave out --special-tokens, or render without the "
                "chat template"
            )
        if self.system is not None:
            check_text(self.system, "the system text")
        if self.raw and (self.system is not None or self.reasoning_effort is not None):
            raise InputError(
                "a system text or a reasoning effort needs the chat template, which --raw-prompt turns off; leave out "
                "one of them"
            )

    @property
    def options(self) -> list[str]:
        """The flags of the options that differ from their defaults."""
        return [option for name, option in OPTIONS.items() if getattr(self, name) != getattr(Rendering, name)]

    def without_effect(self, tokenizer: Tokenizer) -> list[str]:
        """Name the flags without effect, since the chat template or raw text does not show their values."""
        probe, options = from_text("Hi"), []
        for name, option in OPTIONS.items():
            default = getattr(Rendering, name)
            if option in self.options and name != "special_tokens":
                other = dataclasses.replace(self, **{name: default})
                if probe.encode((), tokenizer, self) == probe.encode((), tokenizer, other):
                    options.append(option)
        return options


OPTIONS = {
    "system": "--system",
    "reasoning_effort": "--reasoning-effort",
    "date": "--date",
    "special_tokens": "--special-tokens",
}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Turns of text, each a request, after a history of messages; or the ids of a single prompt.

    Without turns it is one request, which continues the history. name: its origin, for messages. numbered: reports
    number its turns. system: replaces a rendering's. tools: functions, as chat templates take them. Raises InputError
    for text that cannot be encoded, and for a system text or tools beside ids.
    """

    name: str
    turns: tuple[str, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    numbered: bool = False
    history: tuple[Message, ...] = ()
    system: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    category: str | None = None

    def __post_init__(self) -> None:
        for text in texts_in([self.turns, self.history, self.system, self.tools, self.category]):
            check_encodable(text, self.name)
        if self.prompt_ids is not None and (self.system is not None or self.tools):
            part = "tools" if self.system is None else "a system text"
            raise InputError(f"{self.name} has {part} beside token ids, which are taken as they are; leave out one")

    @property
    def num_requests(self) -> int:
        return len(self.turns) or 1

    def encode(self, answers: Sequence[str], tokenizer: Tokenizer | None, rendering: Rendering) -> tuple[int, ...]:
        """Encode the prompt of the turn after these answers.

        Raises InputError for text without a tokenizer or template, for a chat in a raw rendering or one that the
        template refuses, and for an empty prompt.
        """
        if self.prompt_ids is not None:
            return self.prompt_ids
        if tokenizer is None:
            raise InputError(
                f"{self.name} is text, but the target's directory has no tokenizer.json; give token ids (--prompt-ids, "
                'or "prompt_ids" in a file)'
            )
        if rendering.raw:
            parts = {
                f"{len(self.turns)} turns": len(self.turns) > 1,
                "a system text": self.system is not None,
                "a history": bool(self.history),
                "tools": bool(self.tools),
            }
            if chat := [part for part, present in parts.items() if present]:
                raise InputError(f"{self.name} has {chat[0]}, which needs the chat template; leave out --raw-prompt")
            ids = tokenizer.encode(self.turns[0], special_tokens=rendering.special_tokens)
        else:
            system = rendering.system if self.system is None else self.system
            messages = chat_messages(self.turns[: len(answers) + 1], answers, system, self.history)
            try:
                ids = tokenizer.encode_chat(
                    messages, reasoning_effort=rendering.reasoning_effort, date=rendering.date, tools=self.tools
                )
            except InputError as error:
                raise InputError(f"{self.name}: {error}") from None
        if not ids:
            raise InputError(f"{self.name} is empty; expected at least one token")
        return ids


def from_text(text: str, name: str = "the prompt") -> Conversation:
    """Make a conversation of one turn. Raises InputError for an empty text."""
    return Conversation(name, turns=(check_text(text, name),))


def from_ids(ids: Iterable[Any], name: str = "the prompt") -> Conversation:
    """Make a conversation of token ids. Raises InputError if there are none, or one is no integer."""
    listed = list(ids)
    if bad := [i for i in listed if isinstance(i, bool) or not isinstance(i, int)]:
        raise InputError(f"{name} holds {brief(bad[0])} among its token ids; expected integers")
    if not listed:
        raise InputError(f"{name} is empty; expected at least one token id")
    return Conversation(name, prompt_ids=tuple(listed))


def parse_ids(text: str) -> Conversation:
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if bad := [part for part in parts if not re.fullmatch("-?[0-9]{1,18}", part)]:
        raise InputError(f"--prompt-ids holds {brief(bad[0])}; expected token ids separated by commas, such as 1,2,3")
    return from_ids((int(part) for part in parts), "--prompt-ids")


def check_text(text: str, name: str) -> str:
    """Return the text. Raises InputError if it is blank or not encodable."""
    if not text.strip():
        raise InputError(f"{name} is empty; expected some text")
    check_encodable(text, name)
    return text


def check_encodable(text: str, name: str) -> None:
    """Raise InputError for a lone surrogate: half of a character, or a typed byte that is not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = text[error.start].encode("unicode_escape").decode()
        raise InputError(
            f"{name} is not valid Unicode text: it holds the lone surrogate {surrogate}; expected UTF-8"
        ) from None
