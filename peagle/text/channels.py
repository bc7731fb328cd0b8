"""Parse an answer into reasoning, content and tool calls, by the channels of GPT-OSS's harmony format.

An answer is a list of messages <|start|>ROLE<|channel|>CHANNEL<|message|>TEXT<|end|>; the prompt holds the first
<|start|>ROLE. `ChannelParser` takes an answer's tokens, any number at a time, and returns `Delta`s:

| header | kind |
|---|---|
| channel final, commentary, an unknown one, or none | content |
| channel analysis | reasoning |
| recipient functions.NAME on any channel, or any tool on commentary | tool_call NAME; the text is its arguments |

Role, channel, recipient and content type may stand in any order that models write:
"assistant to=functions.f<|channel|>commentary", "assistantcommentary to=functions.f<|channel|>commentary", ...

Only token ids are control tokens; text that spells one stays text. If the vocabulary lacks them, or the prompt holds no
<|start|> (raw text), the whole answer is content.

Malformed answers raise nothing:
- A header with an unknown word, or longer than MAX_HEADER, becomes text with its control tokens spelled out. The text
  belongs to the message that the header interrupts, or to a new content message.
- <|start|> or <|channel|> inside a message begins the next one, as if <|end|> were missing.
- <|message|> and <|constrain|> outside a header are spelled out.
- <|end|>, <|return|>, <|call|> and <|endoftext|> end any message. Text after them is content.
- A header without a message, because the answer or the message ended there, is dropped.
- A message of another role (a made-up user, the result of a call) is dropped, with its header.

A stop string counts only within one content message: not in headers, reasoning or calls, nor across messages.
"""

import dataclasses
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from peagle.text.offsets import AnswerText, TokenOffset
from peagle.text.stop_strings import StopStrings
from peagle.text.tokenizer import Tokenizer

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
CALL = "<|call|>"
ENDS = ("<|end|>", "<|return|>", CALL, "<|endoftext|>")
CONTROL = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
REQUIRED = (START, CHANNEL, MESSAGE, "<|end|>")  # a vocabulary without these has no channels
ROLE, ANALYSIS, COMMENTARY = "assistant", "analysis", "commentary"
OTHER_ROLES = ("user", "system", "developer", "tool")  # and functions, the authors of their results
CHANNELS = (ANALYSIS, COMMENTARY, "final")
CONTENT_TYPES = ("json", "code")  # that models write without <|constrain|> before them
RECIPIENT, FUNCTIONS = "to=", "functions."
MAX_HEADER = 256  # characters

# in the text of an answer, with control tokens spelled out
_HEADER = re.compile(r"(?:<\|start\|>assistant)? *(?:analysis|commentary|final)? *(?:to=\S+?)? *<\|channel\|>")
_BETWEEN_MESSAGES = re.compile(r"<\|(?:end|return|call)\|>(?=<\|start\|>|\Z)")
_IN_HEADER = re.compile(r"(<\|(?:start|channel|constrain)\|>)")
_NAME = re.compile(r"[A-Za-z][\w.-]*")  # of a channel or a role
_TEXT = r"(?:(?!<\|(?:start|channel|constrain|message|end|return|call)\|>).)*"
# at most a message of analysis, and a final one or a text without channels
_PLAIN = re.compile(
    rf"(?:(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>{_TEXT}<\|end\|>(?=<\|start\|>))?"
    rf"(?:(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>)?{_TEXT}(?:<\|(?:end|return)\|>)?",
    re.DOTALL,
)
_STOP = re.compile(r"<\|(?:end|return|call|endoftext)\|>\Z")

Kind = Literal["reasoning", "content", "tool_call"]
Take = Callable[[int, int], tuple[TokenOffset, ...]]  # `AnswerText.take`


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a function. index: of the answer's calls, from 0. id: unique among all answers."""

    index: int
    id: str
    name: str


class Delta(NamedTuple):
    """Text of one message of an answer.

    message: of the answer's messages, from 0. call: set in every delta of a tool_call, whose first delta has no text.
    start: offset of the text in the answer's text with control tokens spelled out. tokens: those of the text.
    """

    kind: Kind
    text: str
    message: int
    call: ToolCall | None = None
    start: int = 0
    tokens: tuple[TokenOffset, ...] = ()


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ChannelParser:
    """Turn the tokens of one answer into the text of its messages, which ends before the first stop string.

    The joined deltas of a message do not depend on how many tokens a call adds. No delta ends inside a UTF-8 character:
    its bytes are held back until the rest arrives, or become U+FFFD if the message ends. Text that may begin a stop
    string is held back until that is decided or the message ends.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        new_id: Callable[[], str] = _new_id,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        offsets: bool = True,
    ) -> None:
        """prompt_ids: () for an answer that is a single message of content. new_id: makes the ids of tool calls.

        stop: the answer ends before the first of these in a content message. min_tokens: tokens of the answer in which
        no stop string may end. offsets=False: deltas without channels have no tokens.
        """
        begun = answer_begun(tokenizer, prompt_ids) if prompt_ids else ()
        self._control = {token_id: name for name, token_id in control_ids(tokenizer).items()} if begun else {}
        self._single, self._offsets, self._min_tokens = not prompt_ids, offsets, min_tokens
        self._by_token = bool(self._control or stop or offsets)
        self.num_tokens = 0  # read, up to the one that completes a stop string
        self.num_reasoning_tokens = 0  # without headers; exact if no text is held back
        self._text = AnswerText(tokenizer)
        self._messages = _Messages(new_id)
        for token_id in begun:
            self._read(token_id)
        self._text = AnswerText(tokenizer)
        self._messages.begin_answer(stop, self._text.take if offsets else None)

    @property
    def complete(self) -> bool:
        """Whether a stop string has ended the answer. Later tokens are dropped."""
        return self._messages.complete

    def add(self, token_ids: Sequence[int], last: bool = False) -> list[Delta]:
        """Return the deltas that these tokens complete. last: they are the answer's last ones; nothing is held back."""
        messages = self._messages
        if self._by_token:
            for token_id in token_ids:
                if messages.complete:
                    break
                messages.search = self.num_tokens >= self._min_tokens
                self.num_tokens += 1
                reasoned = messages.reasons
                self._read(token_id)
                self.num_reasoning_tokens += reasoned and messages.reasons
        else:
            self.num_tokens += len(token_ids)
            messages.text(self._text.add(token_ids))
        if last:
            searched, messages.search = messages.search, False  # an incomplete character completes no stop string
            messages.text(self._text.flush())
            messages.search = searched
            messages.finish()
        deltas = messages.take()
        if last and self._single and not messages.complete and (rest := self._text.take(0)):  # without text
            end = deltas.pop() if deltas else Delta("content", "", 0)
            deltas.append(end._replace(tokens=(*end.tokens, *rest)))
        return deltas

    def finish(self) -> list[Delta]:
        """Return the deltas held back, after the answer's last token."""
        return self.add((), last=True)

    def _read(self, token_id: int) -> None:
        text = self._text.read(token_id) if self._offsets else self._text.add((token_id,))
        name = self._control.get(token_id)
        if name is None:
            self._messages.text(text)
        else:
            self._messages.text(text.removesuffix(name))
            self._messages.control(name)


class _Messages:
    """The state of the parser: in a header, in a message, or between messages."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._stop: Sequence[str] = ()  # they end the answer in a content message
        self._stop_strings: StopStrings | None = None  # of the open message, if it is content
        self.search = True  # whether a stop string may end in the next text
        self.complete = False
        self._deltas: list[Delta] = []
        self._new: list[str] = []  # text of the open message that is in no delta yet
        self._take: Take | None = None
        self._num_messages = self._num_calls = 0
        self._open: Delta | None = None  # the message to which text is added, or that a header interrupts
        self._foreign = False  # whether text belongs to a message of another role
        self._header: list[tuple[str, str]] = []  # (control token, text after it); empty: not in a header
        self._spelled = ""  # the header as text, without the prompt's part of it
        self._prompted = False  # whether all control tokens of the header are the prompt's
        self._read_length = 0  # characters of the answer's text that were read
        self._next = 0  # offset of the open message's next character

    def begin_answer(self, stop: Sequence[str] = (), take: Take | None = None) -> None:
        """Drop the prompt's text. A message that the prompt began belongs to the answer; a call keeps its name.

        From here on, the first of the stop strings in a content message ends the answer, and deltas take their tokens.
        """
        self._stop, self._take = stop, take
        self._spelled, self._prompted, self._foreign = "", True, False
        self._read_length = self._next = 0
        self._new, self._deltas = [], []
        if self._open is not None:
            self._stop_strings = self._new_stop_strings(self._open.kind)
            self._deltas = [self._open] if self._open.call is not None else []

    @property
    def reasons(self) -> bool:
        """Whether the open message is reasoning, and no header interrupts it."""
        return self._open is not None and self._open.kind == "reasoning" and not self._header

    def text(self, text: str) -> None:
        self._read_length += len(text)
        if self.complete or not text:
            return
        if not self._header:
            self._write(text)
            return
        name, before = self._header[-1]
        self._header[-1] = name, before + text
        self._spelled += text
        self._check_header()

    def control(self, name: str) -> None:
        if self.complete:
            return
        if name in ENDS or name == START:
            self._drop_header()
        if name in ENDS:
            self._close()
        self._read_length += len(name)
        if name in ENDS:
            return
        if name == START or (name == CHANNEL and not self._header):
            self._header, self._spelled, self._prompted = [(name, "")], name, False
        elif not self._header:
            self._write(name)
        elif name != MESSAGE:
            self._header.append((name, ""))
            self._spelled, self._prompted = self._spelled + name, False
            self._check_header()
        elif (header := _read_header(self._header, complete=True, prompted=self._prompted)) is not None:
            self._header, self._spelled = [], ""
            self._begin(header)
        else:
            self._spelled += name
            self._write_header()

    def finish(self) -> None:
        self._drop_header()
        self._close()

    def take(self) -> list[Delta]:
        self._end_delta()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _check_header(self) -> None:
        if _read_header(self._header, complete=False, prompted=self._prompted) is None:
            self._write_header()

    def _drop_header(self) -> None:
        """Drop a header without a message, and end the message that it interrupts. A prompt's header becomes text."""
        if self._prompted:
            self._write_header()
        elif self._header:
            self._close()
        self._header, self._spelled = [], ""

    def _write_header(self) -> None:
        """Add a malformed header, spelled out, to the text of the open message."""
        spelled, self._header, self._spelled, self._prompted = self._spelled, [], "", False
        if spelled:
            self._write(spelled)

    def _close(self) -> None:
        """End the open message, if any; text that only began a stop string belongs to it."""
        if self._open is not None and self._stop_strings is not None:
            self._new.append(self._stop_strings.flush())
        self._end_delta()
        self._open, self._foreign = None, False

    def _new_stop_strings(self, kind: Kind) -> StopStrings | None:
        return StopStrings(self._stop) if self._stop and kind == "content" else None

    def _begin(self, header: "_Header") -> None:
        self._close()
        self._foreign, self._next = header.foreign, self._read_length
        if header.foreign:
            return
        call = None
        if header.tool is not None:
            call = ToolCall(self._num_calls, self._new_id(), header.tool)
            self._num_calls += 1
        kind: Kind = "tool_call" if call else "reasoning" if header.channel == ANALYSIS else "content"
        self._open, self._stop_strings = Delta(kind, "", self._num_messages, call), self._new_stop_strings(kind)
        self._num_messages += 1
        if call is not None:
            self._deltas.append(self._open._replace(start=self._next))

    def _write(self, text: str) -> None:
        """Add the text that was just read to the open message, or to a new one."""
        if self._foreign:
            return
        if self._open is None:
            self._begin(_Header())
            self._next = self._read_length - len(text)
        if self._stop_strings is not None:
            text = self._stop_strings.add(text, self.search)
            self.complete = self._stop_strings.complete
        self._new.append(text)

    def _end_delta(self) -> None:
        """Make a delta of the open message's new text."""
        text = "".join(self._new)
        self._new.clear()
        if text:
            assert self._open is not None
            kind, _, message, call, *_ = self._open
            start, self._next = self._next, self._next + len(text)
            tokens = () if self._take is None else self._take(start, self._next)
            self._deltas.append(Delta(kind, text, message, call, start, tokens))


@dataclasses.dataclass(frozen=True)
class _Header:
    """A parsed header. foreign: of another role than the assistant."""

    channel: str | None = None
    recipient: str | None = None
    foreign: bool = False

    @property
    def tool(self) -> str | None:
        """The name of the called function, if any. Built-in tools (python, browser) on analysis are reasoning."""
        if self.recipient is None or self.recipient in (ROLE, "user", "all"):
            return None
        if self.recipient.startswith(FUNCTIONS) or self.channel in (COMMENTARY, None):
            return self.recipient.removeprefix(FUNCTIONS)
        return None


def _read_header(parts: Sequence[tuple[str, str]], *, complete: bool, prompted: bool) -> _Header | None:
    """Read a header of (control token, text after it); None if it is malformed.

    complete: the header has ended; otherwise its last word may be partial. No beginning of a well-formed header is
    malformed, so it does not matter how many tokens arrive at once. prompted: the header's control tokens are the
    prompt's, so its role is the assistant.
    """
    channel, recipient, foreign = None, None, False
    for number, (name, text) in enumerate(parts):
        words = text.split()
        is_open = bool(words) and not complete and number + 1 == len(parts) and not text[-1].isspace()
        if name == START and words:
            role, rest = words[0], words[0].removeprefix(ROLE)
            if role.startswith(ROLE):
                words[:1] = [rest] if rest else []
            elif not prompted and (role in OTHER_ROLES or role.startswith(FUNCTIONS)):
                return _Header(foreign=True)
            elif is_open and len(words) == 1 and ROLE.startswith(role):
                return _Header()
            elif not prompted and _NAME.fullmatch(role) and not _fits(role, (*CHANNELS, *CONTENT_TYPES), partial=True):
                foreign = True
                words.pop(0)
        words = [part for word in words for part in _split(word)]
        part_channel = content_type = None
        for index, word in enumerate(words):
            partial = is_open and index + 1 == len(words)
            prefixes = (RECIPIENT, FUNCTIONS)
            if partial and (word.startswith(prefixes) or _fits(word, prefixes, partial)):
                continue
            to = word.removeprefix(RECIPIENT)  # to=NAME or, as some models write it, functions.NAME alone
            if to.removeprefix(FUNCTIONS) and (to != word or to.startswith(FUNCTIONS)):
                recipient = to
            elif name != CONSTRAIN and part_channel is None and _fits(word, CHANNELS, partial):
                channel = part_channel = word
            elif content_type is None and (name == CONSTRAIN or _fits(word, CONTENT_TYPES, partial)):
                content_type = word
            elif name == CHANNEL and index == 0 and _NAME.fullmatch(word):
                channel = part_channel = word
            else:
                return None
    return None if sum(len(text) for _, text in parts) > MAX_HEADER else _Header(channel, recipient, foreign)


def _fits(word: str, options: Sequence[str], partial: bool) -> bool:
    """Return whether a word is one of the options, or may become one if it is partial."""
    return word in options or (partial and any(option.startswith(word) for option in options))


def _split(word: str) -> Sequence[str]:
    """Split a channel from a recipient that follows without a space: commentaryto=functions.f."""
    for channel in CHANNELS:
        rest = word.removeprefix(channel)
        if rest and rest != word and (rest.startswith(RECIPIENT) or RECIPIENT.startswith(rest)):
            return channel, rest
    return (word,)


def has_channels(tokenizer: Tokenizer) -> bool:
    return control_ids(tokenizer).keys() >= {*REQUIRED}


def answer_begun(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the prompt's tokens from its last <|start|> on, with which the answer begins (`answer_rules`).

    Empty for a vocabulary without channels, and for a prompt without <|start|>.
    """
    names = control_ids(tokenizer)
    if not has_channels(tokenizer) or names[START] not in prompt_ids:
        return ()
    last = len(prompt_ids) - 1 - [*reversed(prompt_ids)].index(names[START])
    return tuple(prompt_ids[last:])


def answer_rules(
    tokenizer: Tokenizer, calls: Mapping[str, str | None] | None = None, *, final: bool = True, preambles: bool = False
) -> str:
    """Write the grammar of an answer whose final message is @answer, in Lark's notation (peagle.engine.grammar).

    The answer begins with the prompt's <|start|>. Analysis is free text. calls: functions that may end the answer
    instead, with the right side of the rule for their arguments (None: free text). final: allow a final message;
    otherwise a call must end the answer. preambles: allow free commentary before the end.
    """
    ids = {name: f"<[{token_id}]>" for name, token_id in control_ids(tokenizer).items()}
    constrained = f'" "? {ids[CONSTRAIN]} /[a-zA-Z]+/' if CONSTRAIN in ids else ""
    kind = f"({constrained})?" if constrained else ""
    before = f'("{ANALYSIS}" | "{COMMENTARY}")' if preambles else f'"{ANALYSIS}"'
    ends = [*(["final"] if final else []), *(f"call{index}" for index, _ in enumerate(calls or ()))]
    rules = [
        f"start: begin ({ids[CHANNEL]} {before} {ids[MESSAGE]} TEXT {ids['<|end|>']} begin)* ({' | '.join(ends)})",
        f'begin: {ids[START]} "{ROLE}"',
        "TEXT: /(.|\\n)*/",
    ]
    if final:
        rules.append(f'final: {ids[CHANNEL]} "final" {kind} {ids[MESSAGE]} @answer')
    channel = f'{ids[CHANNEL]} "{COMMENTARY}"'
    json_kind = " | ".join(['" json"', constrained][: 1 + bool(constrained)])  # templates leave <|constrain|> out
    for index, (name, arguments) in enumerate((calls or {}).items()):
        to = f'" {RECIPIENT}{FUNCTIONS}{name}"'
        rules += [
            f"call{index}: ({to} {channel} | {channel} {to}) ({json_kind})? {ids[MESSAGE]} arguments{index}",
            f"arguments{index}: {arguments or 'TEXT'}",
        ]
    return "\n".join(rules)


def control_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Map the spellings of a vocabulary's control tokens (CONTROL) to their ids."""
    return {name: token_id for token_id, name in tokenizer.special_tokens.items() if name in CONTROL}


def final_message(answer: str) -> str:
    """Extract the last content message from an answer's text with control tokens spelled out; empty if there is none.

    An answer without a channel header only loses a stop token at its end.
    Example: "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>42" -> "42".
    """
    if not _HEADER.match(answer):
        return _STOP.sub("", answer)
    contents = [(delta.message, delta.text) for delta in _parse_text(answer) if delta.kind == "content"]
    return "".join(text for message, text in contents if message == contents[-1][0])


def reasoning(answer: str) -> str:
    """Extract the reasoning from an answer's text with control tokens spelled out; empty if there is none."""
    if not _HEADER.match(answer):
        return ""
    return "".join(delta.text for delta in _parse_text(answer) if delta.kind == "reasoning")


def is_plain(answer: str) -> bool:
    """Test whether an answer's text, with control tokens spelled out, is `reasoning` and `final_message` alone."""
    return _PLAIN.fullmatch(answer) is not None


def _parse_text(answer: str) -> list[Delta]:
    """Parse the text of an answer that continues <|start|>assistant."""
    messages = _Messages(_new_id)
    messages.control(START)
    messages.text(ROLE)
    messages.begin_answer()
    for number, piece in enumerate(_BETWEEN_MESSAGES.split(answer)):
        if number:
            messages.finish()
        header, message, text = piece.partition(MESSAGE)
        for index, part in enumerate(_IN_HEADER.split(header)):  # the pattern captures control tokens
            (messages.control if index % 2 else messages.text)(part)
        if message:
            messages.control(message)
        messages.text(text)
    messages.finish()
    return messages.take()
