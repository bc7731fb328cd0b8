"""Convert between text and token ids by a checkpoint's tokenizer and chat template, offline.

`load_tokenizer` imports transformers, because that is slow. No code of the directory runs: only `tokenizer.json` is
read, never a pickled or custom tokenizer, and the chat template renders in jinja's sandbox.
"""

import codecs
import datetime
import functools
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.base.errors import InputError
from peagle.base.files import reason_of
from peagle.base.settings import brief

# chat templates get this date instead of today's, because acceptance must not change by the day
DEFAULT_DATE = "2025-08-05"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.json"  # of older releases of transformers: {"chat_template": TEXT}

Message = Mapping[str, Any]  # of a chat, in the form that templates take: role, content, and more by role


class Verbatim(str):
    """JSON that a model wrote; it is rendered without the quotes and escapes of the template."""


class TextTooLong(InputError):
    """A text has too many bytes for the allowed number of tokens."""

    def __init__(self, num_bytes: int, least_tokens: int) -> None:
        super().__init__(f"the text has {num_bytes} bytes, which are {least_tokens} tokens or more; shorten it")
        self.num_bytes, self.least_tokens = num_bytes, least_tokens


class TemplateError(InputError):
    """A chat template refuses a chat, or is none."""

    def __init__(self, directory: Path, template: str, error: Exception) -> None:
        self.reason, line = reason_of(error), getattr(error, "lineno", None)  # a syntax error has a line, but no column
        message = f"the chat template refuses this chat: {self.reason}; leave it out"
        if line is not None:
            text = brief(template.split("\n")[line - 1].strip())
            message = f"line {line} of the chat template, {text}, is no Jinja: {self.reason}; correct it"
        super().__init__(f"{directory}: {message}, or give --raw-prompt")


class Tokenizer:
    """The tokenizer of a checkpoint, a byte-level BPE, with its chat template, if it has one (`load_tokenizer`)."""

    def __init__(self, inner: Any, directory: Path) -> None:
        self._inner = inner
        self._directory = directory
        self._byte_of = byte_alphabet()
        self._bytes: dict[int, bytes] = {}
        self._size = len(inner)
        known = inner.backend_tokenizer.get_added_tokens_decoder()
        # the control tokens: id -> spelling
        self.special_tokens: Mapping[int, str] = {
            token_id: token.content for token_id, token in known.items() if token.special
        }

    @functools.cached_property
    def info(self) -> Mapping[str, Any]:
        """Special tokens by role (bos_token, ...) and the chat_template; None for those it lacks."""
        roles = ("bos_token", "eos_token", "pad_token", "unk_token")
        spellings = {role: getattr(self._inner, role) for role in roles}
        return {**spellings, "chat_template": self._inner.chat_template}

    def encode(self, text: str, *, special_tokens: bool = False, most_tokens: int | None = None) -> tuple[int, ...]:
        """Encode raw text, after the tokens that the tokenizer puts before any text (BOS).

        special_tokens: a special token spelled in the text becomes that token; if it is the one that is put before any
        text, the text gets no second one. Raises TextTooLong, before it encodes, for a text whose bytes cannot fit into
        most_tokens; a text that passes may still have more tokens.
        """
        self._check_size(text, most_tokens)
        options = {"split_special_tokens": not special_tokens}
        ids = tuple(self._inner(text, add_special_tokens=True, **options)["input_ids"])
        if not special_tokens:  # the text begins with none
            return ids
        bare = tuple(self._inner(text, add_special_tokens=False, **options)["input_ids"])
        return bare if bare and bare[0] in self.special_tokens and bare[0] == ids[0] else ids

    @functools.cached_property
    def _longest_token(self) -> int | None:
        """The most bytes of text that a token stands for; None if unknown."""
        inner = self._inner.backend_tokenizer
        added = inner.get_added_tokens_decoder().values()
        if inner.normalizer is not None or any(token.lstrip or token.rstrip for token in added):  # a text may shrink
            return None
        return max(len(self._to_bytes(token)) for token in self._inner.get_vocab())

    def _check_size(self, text: str, most_tokens: int | None) -> None:
        if most_tokens is None or (longest := self._longest_token) is None:
            return
        size = len(text.encode("utf-8", "replace"))
        if size > most_tokens * longest:
            raise TextTooLong(size, -(-size // longest))

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        reasoning_effort: str | None = None,
        date: str = DEFAULT_DATE,
        tools: Sequence[Mapping[str, Any]] = (),
        most_tokens: int | None = None,
        answered: bool = False,
    ) -> tuple[int, ...]:
        """Encode a chat up to the next answer. Text in a message or a tool never becomes a control token.

        answered: the chat ends with an answer; encode it with its end, as the model writes it.
        Raises InputError without a template, TemplateError for a chat that it refuses, and TextTooLong like `encode`.
        """
        options: dict[str, Any] = {} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}
        try:
            template = self._inner.get_chat_template()
        except ValueError:
            raise InputError(
                f"{self._directory} has no chat template; add chat_template.jinja, or give --raw-prompt"
            ) from None
        template, dates = fix_date(template, date)
        # while the template renders, masked texts spell no special token, and one character stands for a Verbatim text
        texts = [*texts_in([messages, tools]), template, *options.values()]
        masks, free = self._masks(texts)
        verbatim = [text for text in texts if isinstance(text, Verbatim)]
        marks = [next(free) for _ in verbatim]
        next_mark = iter(marks)

        def masked(text: str) -> str:
            return next(next_mark) if isinstance(text, Verbatim) else text.translate(masks)

        try:
            text = self._inner.apply_chat_template(
                _with_texts([*messages], masked),
                tools=_with_texts([*tools], masked) or None,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=not answered,
                **_with_texts(options, lambda text: text.translate(masks)),
                **dates,
            )
        except Exception as error:  # templates may raise anything
            raise TemplateError(self._directory, template, error) from None
        json_of = {mark: text.translate(masks) for mark, text in zip(marks, verbatim, strict=True)}
        if marks:
            mark = f"[{''.join(marks)}]"
            text = re.sub(f'"{mark}"|{mark}', lambda match: json_of[match[0].strip('"')], text)
        unmask = {ord(mask): chr(char) for char, mask in masks.items()}
        self._check_size(text.translate(unmask), most_tokens)
        return self._encode_rendered(text, unmask)

    def _masks(self, texts: Sequence[str]) -> tuple[dict[int, str], Iterator[str]]:
        """Map the first and last characters of special tokens to characters that the texts lack.

        Return (the map, further such characters). A text with replaced characters spells no special token, so all
        special tokens in the rendered chat are the template's.
        """
        used = set().union(*texts)
        # private use characters first; the rest in case the texts hold all of those
        codes = itertools.chain(range(0xF0000, 0x10FFFE), range(0x10000, 0xF0000))
        free = (char for code in codes if (char := chr(code)) not in used)
        ends = sorted({spelled[end] for spelled in self.special_tokens.values() for end in (0, -1)})
        return {ord(char): next(free) for char in ends}, free

    def _encode_rendered(self, text: str, unmask: Mapping[int, str]) -> tuple[int, ...]:
        """Encode a rendered chat with masked texts: only the template's special tokens are control tokens."""
        encoded = self._inner(text, add_special_tokens=False, split_special_tokens=False, return_offsets_mapping=True)
        whole = tuple(encoded["input_ids"])
        if text.translate(unmask) == text:
            return whole
        ids: list[int] = []
        start = 0
        # a tokenizer splits at special tokens first, so encoding piece by piece gives the same ids
        for token_id, (begin, end) in zip(whole, encoded["offset_mapping"], strict=True):
            if token_id in self.special_tokens:
                ids += [*self._characters(text[start:begin].translate(unmask)), token_id]
                start = end
        return (*ids, *self._characters(text[start:].translate(unmask)))

    def _characters(self, text: str) -> tuple[int, ...]:
        return tuple(self._inner(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token; b"" for an id that the tokenizer does not have."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self._inner.convert_ids_to_tokens(token_id) if 0 <= token_id < self._size else None
            data = self._bytes[token_id] = self._to_bytes(token or "")
        return data

    def _to_bytes(self, token: str) -> bytes:
        try:
            return bytes(self._byte_of[char] for char in token)
        except KeyError:  # an added token, spelled in plain text
            return token.encode("utf-8", errors="replace")


class Detokenizer:
    """Convert token ids to text incrementally.

    No piece ends inside a character: its bytes are held back until the rest arrives, or until `flush` turns them into
    U+FFFD. The joined pieces are the text of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._held = b""  # of a character

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids complete."""
        return self._decode(b"".join(map(self._token_bytes, token_ids)))

    def flush(self) -> str:
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        data = self._held + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._held = data[used:]
        return text


def detokenize(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Convert ids to text, with special tokens spelled out."""
    return b"".join(map(tokenizer.token_bytes, token_ids)).decode("utf-8", errors="replace")


def encode_characters(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Encode a text without the tokens that the tokenizer puts before any text."""
    return tokenizer.encode(text)[len(tokenizer.encode("")) :]


def template_fingerprint(directory: Path) -> str:
    """Hash the tokenizer of a directory, its settings and its chat template."""
    digest = hashlib.sha256()
    for name in (TOKENIZER_FILE, "tokenizer_config.json", "chat_template.jinja", TEMPLATE_FILE):
        path = directory / name
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def load_tokenizer(directory: Path) -> "Tokenizer | None":
    """Load the tokenizer of a directory; None without a tokenizer.json.

    Raises InputError if that file is corrupt or not byte-level BPE, and for a chat_template.json without a template.
    """
    if not (directory / TOKENIZER_FILE).is_file():
        return None
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "torch was not found": it is not needed
    from transformers import PreTrainedTokenizerFast

    try:
        inner = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # the Rust library raises Exception itself
        raise InputError(
            f"{directory / TOKENIZER_FILE} cannot be read: {reason_of(error)}; fetch the file again"
        ) from None
    inner.model_max_length = sys.maxsize  # no warnings: callers check lengths
    decoder = type(inner.backend_tokenizer.decoder).__name__
    if decoder != "ByteLevel":
        raise InputError(
            f"{directory / TOKENIZER_FILE} decodes by {decoder}; expected a byte-level BPE, as GPT-OSS has"
        )
    if not inner.chat_template and (directory / TEMPLATE_FILE).is_file():
        inner.chat_template = _template_in(directory / TEMPLATE_FILE)
    return Tokenizer(inner, directory)


def _template_in(path: Path) -> str:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        template = fields["chat_template"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        template = None
    if not isinstance(template, str):
        raise InputError(f'{path} holds no template; expected {{"chat_template": TEXT}}: fetch the file again')
    return template


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Change every text in a JSON value, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _with_texts(item, change) for key, item in value.items()}
    return [_with_texts(item, change) for item in value] if isinstance(value, list | tuple) else value


def fix_date(template: str, date: str) -> tuple[str, Mapping[str, Mapping[str, str]]]:
    """Make `strftime_now` of a template return a fixed date, YYYY-MM-DD; return (the template, its variables).

    transformers passes no functions to templates, so a macro looks the format up in a table of all string literals.
    """
    day = parse_date(date)
    if "strftime_now" not in template:
        return template, {}
    literals = [a or b for a, b in re.findall(r"'([^'\n]*)'|\"([^\"\n]*)\"", template)]
    dates = {literal: day.strftime(literal) for literal in literals if "%" in literal}
    return "{% macro strftime_now(format) %}{{ fixed_dates[format] }}{% endmacro +%}" + template, {"fixed_dates": dates}


def parse_date(date: str) -> datetime.datetime:
    try:
        return datetime.datetime.strptime(date, "%Y-%m-%d")
    except ValueError:
        raise InputError(f"date is {date!r}; expected a day as YYYY-MM-DD, such as {DEFAULT_DATE}", "date") from None


def byte_alphabet() -> dict[str, int]:
    """Map the characters of a byte-level vocabulary to bytes (GPT-2's alphabet).

    A printable Latin-1 character stands for its own byte; U+0100, U+0101, ... stand for the other bytes in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
