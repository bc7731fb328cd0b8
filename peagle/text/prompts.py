"""Prompts as conversations. peagle.text.prompt_files reads files of them.

A conversation is a list of turns. The prompt of a turn holds the answers to earlier turns, so it can be rendered only
after them (`Conversation.encode`).
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from peagle.base.errors import InputError
from peagle.base.flag import PROMPT, Flag
from peagle.base.settings import brief
from peagle.text.channels import final_message, is_plain
from peagle.text.channels import reasoning as reasoning_of
from peagle.text.tokenizer import DEFAULT_DATE, Message, Tokenizer, parse_date, texts_in

USER, ASSISTANT, TOOL, SYSTEM = "user", "assistant", "tool", "system"
ROLES = {
    USER: ("user", "human"),
    ASSISTANT: ("assistant", "gpt", "chatgpt", "bing", "bard", "model"),  # ShareGPT's "from", too
    TOOL: ("tool", "function"),
    SYSTEM: ("system", "developer"),
}
TEXT_PARTS = ("text", "input_text", "output_text")  # types of content parts in chat completions and responses
MESSAGE_TEXTS = ("name", "thinking", "tool_call_id")  # further texts of a message that templates use
REASONING = ("reasoning", "reasoning_content")  # what servers call an answer's reasoning; templates: "thinking"
MESSAGE_KEYS = {"role", "from", "content", "value", "tool_calls", "function_call", *MESSAGE_TEXTS, *REASONING}
OPTIONS = {  # fields of Rendering, and their flags
    "system": "--system",
    "reasoning_effort": "--reasoning-effort",
    "date": "--date",
}


@dataclasses.dataclass(frozen=True)
class Rendering:
    """How text becomes a prompt. Text that spells a special token stays text, except with special_tokens."""

    raw: Annotated[bool, Flag(PROMPT, names=("--raw-prompt",))] = False
    """Prompt without the chat template: acceptance is lower."""
    system: Annotated[str | None, Flag(PROMPT, "TEXT")] = None
    """System message."""
    reasoning_effort: Annotated[Literal["low", "medium", "high"] | None, Flag(PROMPT, "LEVEL")] = None
    """low, medium or high. Default: the chat template's."""
    date: Annotated[str, Flag(PROMPT, "YYYY-MM-DD")] = DEFAULT_DATE
    """Date that the chat template shows."""
    special_tokens: bool = False  # of raw text: <|end|> in it is the special token

    def __post_init__(self) -> None:
        parse_date(self.date)
        if self.special_tokens and not self.raw:
            raise InputError(
                "special tokens can be spelled only in raw text; leave out special_tokens, or render without the "
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
        """The flags of the fields in OPTIONS that differ from their defaults."""
        return [flag for name, flag in OPTIONS.items() if getattr(self, name) != getattr(Rendering, name)]

    def without_effect(self, tokenizer: Tokenizer) -> list[str]:
        """Return the flags without effect: a prompt is the same with their defaults."""
        probe, unused = from_text("Hi"), []
        for name, flag in OPTIONS.items():
            if flag in self.options:
                other = dataclasses.replace(self, **{name: getattr(Rendering, name)})
                if probe.encode((), tokenizer, self) == probe.encode((), tokenizer, other):
                    unused.append(flag)
        return unused


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A chat with its answers, as a file holds it: messages, or token ids with a mask (true: of an answer).

    unfit: why some messages cannot be trained, by their place.
    """

    messages: tuple[Message, ...] = ()
    token_ids: tuple[int, ...] = ()
    mask: tuple[bool, ...] = ()
    unfit: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def answers(self) -> list[slice]:
        """Where the answers are. Messages of an assistant in a row are one; the row that follows nothing is none."""
        written = [message["role"] == "assistant" for message in self.messages]
        first = written.index(False) if False in written else len(written)  # that is no answer
        marks = (False, *(self.mask or [at > first and own for at, own in enumerate(written)]), False)
        edges = [at for at, (before, after) in enumerate(itertools.pairwise(marks)) if before != after]
        return [slice(*edge) for edge in zip(edges[::2], edges[1::2], strict=True)]


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Turns of text after a history of messages, or the token ids of one prompt.

    Every turn is a request. Without turns, the conversation is one request that continues the history. name: for error
    messages. numbered: reports number the turns. system: replaces the rendering's. tools: functions, in the form that
    chat templates take. recorded: the whole chat, with the answers that the turns leave out. group: what rows of one
    conversation share. Raises InputError for text that cannot be encoded, and for system text or tools with token ids.
    """

    name: str
    turns: tuple[str, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    numbered: bool = False
    history: tuple[Message, ...] = ()
    system: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    category: str | None = None
    recorded: Recorded | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        chat = () if self.recorded is None else self.recorded.messages
        for text in texts_in([self.turns, self.history, self.system, self.tools, self.category, chat]):
            check_encodable(text, self.name)
        if self.prompt_ids is not None and (self.system is not None or self.tools):
            part = "tools" if self.system is None else "a system text"
            raise InputError(f"{self.name} has {part} with token ids, which are taken as they are; leave out one")

    @property
    def num_requests(self) -> int:
        return len(self.turns) or 1

    @property
    def num_left_out(self) -> int:
        """The number of recorded answers that the turns leave out; those in the history are part of the prompt."""
        if self.recorded is None:
            return 0
        return len(self.recorded.answers) - len(Recorded(self.history).answers)

    @property
    def first_prompt(self) -> bytes:
        """What is asked first. It begins that of a row that is a later turn of the same conversation."""
        if self.prompt_ids is not None:
            return "".join(f"{token_id}," for token_id in self.prompt_ids).encode()
        messages = [*self.history, *({"role": "user", "content": turn} for turn in self.turns[:1])]
        return "".join(map(repr, (self.system, self.tools, *messages))).encode()

    def encode(self, answers: Sequence[str], tokenizer: Tokenizer | None, rendering: Rendering) -> tuple[int, ...]:
        """Encode the prompt of the turn that follows these answers.

        Raises InputError for text without a tokenizer or chat template, for a chat that is rendered raw or that the
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
            prompt_ids = tokenizer.encode(self.turns[0], special_tokens=rendering.special_tokens)
        else:
            system = rendering.system if self.system is None else self.system
            messages = chat_messages(self.turns[: len(answers) + 1], answers, system, self.history)
            try:
                prompt_ids = tokenizer.encode_chat(
                    messages, reasoning_effort=rendering.reasoning_effort, date=rendering.date, tools=self.tools
                )
            except InputError as error:
                raise InputError(f"{self.name}: {error}") from None
        if not prompt_ids:
            raise InputError(f"{self.name} is empty; expected at least one token")
        return prompt_ids


def num_repeated(conversations: Iterable[Conversation]) -> int:
    """Count the conversations that ask the same as one before them."""
    counts = collections.Counter(
        repr((one.turns, one.prompt_ids, one.history, one.system, one.tools)) for one in conversations
    )
    return counts.total() - len(counts)


def chat_messages(
    turns: Sequence[str], answers: Sequence[str], system: str | None, history: Sequence[Message] = ()
) -> list[Message]:
    """Make the messages of a chat from turns and one answer fewer. history: messages before the first turn."""
    messages = [*([] if system is None else [{"role": "system", "content": system}]), *history]
    for turn, answer in zip(turns[:-1], answers, strict=True):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": final_message(answer)}]
    return [*messages, *({"role": "user", "content": turn} for turn in turns[-1:])]


def read_messages(value: Any, name: str) -> tuple[str | None, Recorded]:
    """Read a list of messages; return (the texts of the system, the chat)."""
    if not isinstance(value, list):
        raise InputError(f"{name} is {brief(value)}; expected a list of messages")
    systems, messages, unfit = [], list[Message](), dict[int, str]()
    for number, item in enumerate(value):
        message = _message(item, f"{name}: message {number}")
        if message["role"] != SYSTEM:
            if message["role"] == ASSISTANT and (why := _unfit(message, _content(item, name))):
                unfit[len(messages)] = why
            messages.append(message)
        elif message["content"].strip():
            systems.append(message["content"])
    return "\n\n".join(systems) or None, Recorded(tuple(messages), unfit=unfit)


def _unfit(message: Message, text: str) -> str | None:
    """Say why an answer cannot be trained as the model wrote it, if so. text: its content as the file spells it."""
    num_calls = len(message.get("tool_calls", ()))
    if not is_plain(text):
        return "spells other channels than one of analysis and a final one; expected these, or tool_calls"
    if num_calls > 1:
        return f"has {num_calls} tool calls, of which a chat template shows the first; expected one"
    if not num_calls and not message["content"].strip():
        return "has neither content nor a tool call; expected one of them"
    return None


def _message(fields: Any, name: str) -> Message:
    spelled = fields.get("role", fields.get("from")) if isinstance(fields, dict) else None
    if not isinstance(spelled, str):
        raise InputError(f"{name} is {brief(fields)}; expected an object with role and content, or from and value")
    role = next((role for role, names in ROLES.items() if spelled.strip().lower() in names), None)
    if role is None:
        expected = ", ".join(spelling for names in ROLES.values() for spelling in names)
        raise InputError(f"{name} has the role {brief(spelled)}; expected one of {expected}")
    text = _content(fields, name)
    message: dict[str, Any] = {"role": role, "content": final_message(text) if role == ASSISTANT else text}
    message |= {key: fields[key] for key in MESSAGE_TEXTS if isinstance(fields.get(key), str)}
    reasoning = next((fields[key] for key in REASONING if isinstance(fields.get(key), str)), "")
    reasoning = reasoning or (reasoning_of(text) if role == ASSISTANT else "")
    calls = fields.get("tool_calls")
    if not calls and fields.get("function_call"):  # OpenAI's old spelling of one call
        calls = [{"type": "function", "function": fields["function_call"]}]
    if calls and role != ASSISTANT:
        raise InputError(f"{name} of the role {role} has tool_calls; expected them in an assistant's message")
    if calls:
        message["tool_calls"] = _calls(calls, f"{name}: tool_calls")
        if reasoning:  # templates render one text before a call
            message |= {"thinking": "\n\n".join(filter(None, (reasoning, message["content"]))), "content": ""}
    elif reasoning and role == ASSISTANT:
        message["thinking"] = reasoning
    return message


def _content(fields: Any, name: str) -> str:
    return read_text(fields.get("content", fields.get("value")), f"{name}: its content")


def _calls(value: Any, name: str) -> list[Message]:
    """Read tool calls. Arguments as JSON text become objects, as templates need them."""
    calls: list[Message] = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError(f"{name} holds {brief(call)}; expected a function with a name and arguments")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # a model may write invalid JSON
                arguments = json.loads(arguments)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


def read_text(value: Any, name: str) -> str:
    """Read a text, or join a list of parts of text; null is empty."""
    texts = []
    for part in value if isinstance(value, list) else [value]:
        is_text = isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS
        text = part.get("text") if is_text else part
        if text is not None and not isinstance(text, str):
            raise InputError(f"{name} is {brief(value)}; expected a text")
        texts.append(text or "")
    return "".join(texts)


def read_tools(value: Any, name: str) -> tuple[Mapping[str, Any], ...]:
    """Read tools, a list or its JSON text, into the form that templates take."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    tools = []
    for tool in value if isinstance(value, list) else [value]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError(f"{name} holds {brief(tool)}; expected functions, each with a name and parameters")
        tools.append({"type": "function", "function": {"description": "", **function}})
    return tuple(tools)


def from_text(text: str, name: str = "the prompt") -> Conversation:
    """Make a conversation of one turn. Raises InputError for an empty text."""
    return Conversation(name, turns=(check_text(text, name),))


def from_ids(ids: Iterable[Any], name: str = "the prompt") -> Conversation:
    """Make a conversation of token ids. Raises InputError if there are none, or one is not an integer."""
    prompt_ids = tuple(ids)
    if bad := [i for i in prompt_ids if isinstance(i, bool) or not isinstance(i, int)]:
        raise InputError(f"{name} holds {brief(bad[0])} among its token ids; expected integers")
    if not prompt_ids:
        raise InputError(f"{name} is empty; expected at least one token id")
    return Conversation(name, prompt_ids=prompt_ids)


def parse_ids(text: str) -> Conversation:
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if bad := [part for part in parts if not re.fullmatch("-?[0-9]{1,18}", part)]:
        raise InputError(f"--prompt-ids holds {brief(bad[0])}; expected token ids separated by commas, such as 1,2,3")
    return from_ids((int(part) for part in parts), "--prompt-ids")


def check_text(text: str, name: str) -> str:
    """Return the text. Raises InputError if it is blank, and like `check_encodable`."""
    if not text.strip():
        raise InputError(f"{name} is empty; expected some text")
    check_encodable(text, name)
    return text


def check_encodable(text: str, name: str) -> None:
    """Raise InputError for a lone surrogate: half of a character, or a byte of an argument that is not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = text[error.start].encode("unicode_escape").decode()
        raise InputError(
            f"{name} is not valid Unicode text: it holds the lone surrogate {surrogate}; expected UTF-8"
        ) from None
