"""What is asked, as conversations; files of them are read by peagle.prompt_files.

A conversation is a list of turns. Turn k's prompt holds the answers to the turns before it, so it is rendered when
those are known (`Conversation.encode`); conversations do not depend on one another.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from peagle.ops.errors import InputError
from peagle.text import DEFAULT_DATE, Tokenizer, parse_date


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
    """Either turns of text or the ids of a single prompt. `name` says where it comes from; `numbered` that its requests
    are told apart by a turn number.

    Each turn is a request, but for the first ones whose answers are `given`. `system` goes before a rendering's own.
    """

    name: str
    turns: tuple[str, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    numbered: bool = False
    given: tuple[str, ...] = ()
    system: str | None = None
    category: str | None = None

    @property
    def num_requests(self) -> int:
        return 1 if self.prompt_ids is not None else len(self.turns) - len(self.given)

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
        answers = (*self.given, *answers)
        turns = self.turns[: len(answers) + 1]
        if rendering.raw:
            if len(self.turns) > 1 or self.system is not None:
                what = f"{len(self.turns)} turns" if self.system is None else "a system text"
                raise InputError(
                    f"{self.name} has {what}, which only a chat template can put together; leave out --raw-prompt"
                )
            ids = tokenizer.encode(turns[0])
        else:
            ids = tokenizer.encode_chat(
                turns,
                answers,
                system=rendering.system if self.system is None else self.system,
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
        raise InputError(f"{name} holds {brief(bad[0])} among its token ids; expected integers")
    if not listed:
        raise InputError(f"{name} is empty; expected at least one token id")
    return Conversation(name, prompt_ids=tuple(listed))


def parse_ids(text: str) -> Conversation:
    """Ids as they are typed: 1,2,3."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if bad := [part for part in parts if not re.fullmatch("-?[0-9]{1,18}", part)]:
        raise InputError(f"--prompt-ids holds {brief(bad[0])}; expected token ids with commas between, such as 1,2,3")
    return from_ids((int(part) for part in parts), "--prompt-ids")


def check_text(text: str, name: str) -> str:
    """The text. Raises InputError where it is blank, or not encodable (a lone surrogate: bytes that are not UTF-8)."""
    if not text.strip():
        raise InputError(f"{name} is empty; expected some text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{name} is not valid Unicode text; expected UTF-8") from None
    return text


def brief(value: Any) -> str:
    """A value as a message shows it."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
