"""Between text and token ids: a checkpoint directory's own tokenizer and chat template, offline.

Through transformers, whose import is heavy and therefore inside the functions. Nothing in the directory is run: only
`tokenizer.json` is read (never a pickled or custom tokenizer), and the chat template is rendered in jinja's sandbox.
"""

import codecs
import datetime
import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from peagle.ops.errors import InputError

# What a template that asks for today's date gets: acceptance must not drift by the day.
DEFAULT_DATE = "2025-08-05"
TOKENIZER_FILE = "tokenizer.json"


@runtime_checkable
class Tokenizer(Protocol):
    """What the toolkit needs of a tokenizer; `load_tokenizer` gives a checkpoint's, tests may bring their own."""

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a raw text, with whatever the tokenizer puts in front of one."""
        ...

    def encode_chat(
        self,
        turns: Sequence[str],
        answers: Sequence[str],
        *,
        system: str | None = None,
        reasoning_effort: str | None = None,
        date: str = DEFAULT_DATE,
    ) -> tuple[int, ...]:
        """The ids of a chat that waits for the answer to the last turn; `answers` are those to the turns before it."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes a token stands for; none for an id the tokenizer does not know."""
        ...


class Detokenizer:
    """Token ids to text as they come. No piece ever ends inside a character: its first bytes are held back until the
    rest is here, or until `flush`, where bytes that are no character become U+FFFD. All pieces joined are the text of
    all ids. Each token is looked at once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that is certain with these ids and was not before."""
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, token_ids)))

    def flush(self) -> str:
        """What was held back."""
        return self._decoder.decode(b"", final=True)


def detokenize(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of whole ids, special tokens spelled out."""
    detokenizer = Detokenizer(tokenizer)
    return detokenizer.add(token_ids) + detokenizer.flush()


def template_fingerprint(directory: Path) -> str:
    """A hash of what turns text into ids in a directory: tokenizer, its settings, chat template."""
    found = hashlib.sha256()
    for name in (TOKENIZER_FILE, "tokenizer_config.json", "chat_template.jinja"):
        path = Path(directory) / name
        found.update(path.read_bytes() if path.is_file() else b"")
    return found.hexdigest()


def load_tokenizer(directory: Path) -> "ByteLevelTokenizer | None":
    """The tokenizer in a directory; None where it has no tokenizer.json.

    Raises InputError where that file is corrupt, or not byte-level BPE (which every GPT-OSS tokenizer is).
    """
    directory = Path(directory)
    if not (directory / TOKENIZER_FILE).is_file():
        return None
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "torch was not found": it is not needed
    from transformers import PreTrainedTokenizerFast

    try:
        inner = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # the Rust library raises bare Exception
        raise InputError(
            f"{directory / TOKENIZER_FILE} cannot be read: {_one_line(error)}; fetch the file again"
        ) from None
    inner.model_max_length = sys.maxsize  # who asks checks lengths; it would only warn
    decoder = type(inner.backend_tokenizer.decoder).__name__
    if decoder != "ByteLevel":
        raise InputError(
            f"{directory / TOKENIZER_FILE} decodes by {decoder}; expected a byte-level BPE, as GPT-OSS has"
        )
    return ByteLevelTokenizer(inner, directory)


class ByteLevelTokenizer:
    """A byte-level BPE tokenizer with its chat template, if it has one."""

    def __init__(self, inner: Any, directory: Path) -> None:
        self._inner = inner
        self._directory = directory
        self._byte_of = _byte_alphabet()
        self._bytes: dict[int, bytes] = {}
        self._size = len(inner)

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a raw text, with whatever the tokenizer puts in front of one."""
        return tuple(self._inner(text)["input_ids"])

    def encode_chat(
        self,
        turns: Sequence[str],
        answers: Sequence[str],
        *,
        system: str | None = None,
        reasoning_effort: str | None = None,
        date: str = DEFAULT_DATE,
    ) -> tuple[int, ...]:
        """The ids of a chat that waits for the answer to the last turn. Raises InputError where there is no template,
        or where it refuses the chat."""
        messages = chat_messages(turns, answers, system)
        options: dict[str, Any] = {} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}
        try:
            template = self._inner.get_chat_template()
        except ValueError:
            raise InputError(
                f"{self._directory} has no chat template; add chat_template.jinja, or give --raw-prompt"
            ) from None
        template, dates = fix_date(template, date)
        try:
            text = self._inner.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=True, **options, **dates
            )
        except Exception as error:  # whatever a template raises
            raise InputError(
                f"{self._directory}: the chat template refuses this chat: {_one_line(error)}; give --raw-prompt"
            ) from None
        return tuple(self._inner(text, add_special_tokens=False)["input_ids"])

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes a token stands for; none for an id the tokenizer does not know (a padded vocabulary)."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._inner.convert_ids_to_tokens(token_id) if 0 <= token_id < self._size else None
            known = self._bytes[token_id] = self._to_bytes(token or "")
        return known

    def _to_bytes(self, token: str) -> bytes:
        try:
            return bytes(self._byte_of[char] for char in token)
        except KeyError:  # an added token, spelled as it is
            return token.encode("utf-8", errors="replace")


def chat_messages(turns: Sequence[str], answers: Sequence[str], system: str | None) -> list[dict[str, str]]:
    """The chat in the roles every template knows: one answer fewer than turns."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for turn, answer in zip(turns[:-1], answers, strict=True):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": final_message(answer)}]
    return [*messages, {"role": "user", "content": turns[-1]}]


def final_message(answer: str) -> str:
    """What of an answer goes into the history: its last harmony message; all of it where it has no such marks.

    Example: "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>42" -> "42".
    """
    return re.split(r"<\|(?:end|return|call|start)\|>", answer.rsplit("<|message|>", 1)[-1], maxsplit=1)[0]


def fix_date(template: str, date: str) -> tuple[str, Mapping[str, Mapping[str, str]]]:
    """(the template, variables for it) such that `strftime_now` tells the given date, YYYY-MM-DD, at midnight.

    transformers passes data to templates, never functions, so the function becomes a macro that looks its format up
    among the template's own string literals.
    """
    day = parse_date(date)
    if "strftime_now" not in template:
        return template, {}
    literals = [a or b for a, b in re.findall(r"'([^'\n]*)'|\"([^\"\n]*)\"", template)]
    dates = {literal: day.strftime(literal) for literal in literals if "%" in literal}
    return "{% macro strftime_now(format) %}{{ fixed_dates[format] }}{% endmacro +%}" + template, {"fixed_dates": dates}


def parse_date(date: str) -> datetime.datetime:
    """Raises InputError for what is not YYYY-MM-DD."""
    try:
        return datetime.datetime.strptime(date, "%Y-%m-%d")
    except ValueError:
        raise InputError(f"date is {date!r}; expected a day as YYYY-MM-DD, such as {DEFAULT_DATE}") from None


def _byte_alphabet() -> dict[str, int]:
    """The byte each character of a byte-level vocabulary stands for: printable Latin-1 for itself, the other bytes, in
    order, for the characters from U+0100 on (GPT-2's alphabet)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
