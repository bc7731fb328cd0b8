"""Structured output: grammars, their compilation, and the state of a request's grammar. Host only, without NumPy.

A Grammar describes an answer's text. A Vocabulary, the bytes of a target's tokens, compiles it by llguidance. Each
request has a Matcher, which reads the emitted tokens and gives the masks of a step (peagle.engine.step.masks).
"""

import collections
import functools
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from peagle.base.strict_json import dumps
from peagle.engine.json_schema import (
    ANSWER,
    GrammarError,
    Tokens,
    check_size,
    enforceable,
    has_dead_ends,
    load_library,
    one_line,
    plain_reason,
    prepare,
)

LONGEST_GRAMMAR = 100_000  # characters
MOST_CHOICES_OF_TEXT = 1024
MOST_SCHEMAS = 8  # %json schemas in one grammar
MOST_KEPT = 32  # compiled grammars
LONGEST_RENEWAL_S = 0.5  # per matcher; all other requests wait meanwhile
# options that count tokens or take back emitted ones: masks must depend on the emitted tokens alone
UNSUPPORTED_IN_LARK = ("stop", "max_tokens", "temperature")
_RULE_OPTIONS = re.compile(r"^[ \t]*[?!]?[\w.-]+[ \t]*\[([^\]]*)\]", re.MULTILINE)

UNSATISFIABLE = "no text satisfies it"

GrammarKind = Literal["json_schema", "regex", "choice", "lark"]
EXPECTED: Mapping[GrammarKind, str] = {
    "json_schema": "a valid JSON Schema",
    "regex": "one of Rust's regex crate, which looks neither ahead nor back",
    "choice": "texts",
    "lark": "Lark's notation, as of llguidance, or GBNF",
}


@dataclass(frozen=True)
class Grammar:
    """The whole text of an answer, by a JSON schema, regular expression, choice of texts, or Lark or GBNF grammar.

    Make it with one of the class methods. Lark's notation is llguidance's. Regular expressions are those of Rust's
    regex crate: they match in linear time, and look neither ahead nor back. left_out: keywords of a JSON schema that
    llguidance refuses, with reasons.
    """

    kind: GrammarKind
    text: str
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.text) > LONGEST_GRAMMAR:
            raise GrammarError(f"the {self.name} has {len(self.text)} characters; expected at most {LONGEST_GRAMMAR}")
        try:
            self.text.encode("utf-8")
        except UnicodeEncodeError:
            raise GrammarError(f"the {self.name} is not valid Unicode text; expected UTF-8") from None
        if "\0" in self.text:
            raise GrammarError(f"the {self.name} holds a null character; leave it out")

    @property
    def name(self) -> str:
        """Its kind in messages."""
        names = {"json_schema": "JSON schema", "regex": "regular expression", "choice": "list of choices"}
        return names.get(self.kind, "grammar")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, strict: bool = True) -> "Grammar":
        """Describe a JSON text by a JSON schema, or by a schema's JSON text.

        strict: refuse a keyword that llguidance refuses, instead of leaving it out. Raises GrammarError for a schema
        that is too large, too deep, or cannot be used, with the place of its fault; InputError without llguidance.
        """
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the JSON schema is not valid JSON: {error}; expected an object") from None
        if not isinstance(parsed, Mapping | bool):
            raise GrammarError(f"the JSON schema is {type(parsed).__name__}; expected an object")
        check_size(parsed)
        try:
            text = dumps(parsed)
        except (TypeError, ValueError) as error:
            raise GrammarError(f"the JSON schema cannot be written as JSON: {error}") from None
        grammar = cls("json_schema", text)
        text, left_out = _enforceable(text, strict)
        return replace(grammar, text=text, left_out=left_out)

    @classmethod
    def any_text(cls) -> "Grammar":
        return cls("lark", "start: /(.|\\n)*/")

    @classmethod
    def json_object(cls) -> "Grammar":
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Describe a text that matches a pattern as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Grammar":
        """Describe a text that is one of these."""
        if not 1 <= len(texts) <= MOST_CHOICES_OF_TEXT:
            raise GrammarError(f"{len(texts)} choices are given; expected 1..{MOST_CHOICES_OF_TEXT}")
        if not all(texts):
            raise GrammarError("a choice is empty; expected a character or more")
        return cls("choice", dumps(list(texts), ensure_ascii=False))

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        """Describe a text by a grammar in Lark's notation, or in GBNF."""
        return cls("lark", text)


def inlined(schema: Grammar) -> str:
    """Write a JSON schema as the right side of a rule in Lark's notation, for rules around it."""
    assert schema.kind == "json_schema"
    return f"%json {dumps(prepare(json.loads(schema.text), lenient=bool(schema.left_out)))}"


@functools.lru_cache(128)  # of all tools of a chat
def _enforceable(text: str, strict: bool) -> tuple[str, tuple[str, ...]]:
    schema, left_out = enforceable(json.loads(text), strict)
    return dumps(schema), tuple(left_out)


@dataclass(frozen=True)
class PortableGrammar:
    """The parts of a compiled grammar from which another process of the same target makes it: `Vocabulary.restore`."""

    grammar: Grammar
    around: str
    begun_by: tuple[int, ...]


class Vocabulary:
    """The bytes of a target's tokens, for which grammars are compiled. Slow to make: keep one per target."""

    def __init__(self, token_bytes: Sequence[bytes], control_ids: Sequence[int] = ()) -> None:
        """token_bytes: of each token, empty for none. control_ids: tokens that are not text.

        Raises InputError if llguidance is not installed.
        """
        self._library = llguidance = load_library()
        self.size = len(token_bytes)
        # an end token of our own follows the vocabulary: its bit in a mask says whether the text may end there
        tokens = Tokens([*token_bytes, b"end"], [*control_ids, self.size])
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(tokens))
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[tuple[Grammar, str], CompiledGrammar] = collections.OrderedDict()

    def compile(self, grammar: Grammar, around: str = "") -> "CompiledGrammar":
        """Compile a grammar; any thread may. around: rules in Lark's notation, from `start`, which name it @answer.

        Raises GrammarError for a grammar that is not valid, not supported, or too large.
        """
        key = (grammar, around)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        rules = around or f"start: @{ANSWER}"
        # without forcing, masks allow any tokens that spell the text, not one tokenizer's alone
        top = {"name": "top", "lark_grammar": f'%llguidance {{"no_forcing": true}}\n{rules}'}
        text = dumps({"grammars": [top, {"name": ANSWER, **self._translated(grammar)}]})
        began = time.monotonic()
        matcher = self.matcher(text)
        if not matcher.is_error():
            matcher.compute_bitmask()
        seconds = time.monotonic() - began
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            reason = _reason(matcher)
            expected = "one that some text satisfies" if reason == UNSATISFIABLE else EXPECTED[grammar.kind]
            raise GrammarError(f"the {grammar.name} cannot be used: {reason}; expected {expected}")
        compiled = CompiledGrammar(grammar, around, self, matcher, text, seconds, left_out=grammar.left_out)
        with self._lock:
            self._kept[key] = compiled
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return compiled

    def restore(self, portable: PortableGrammar) -> "CompiledGrammar":
        """Compile a grammar that another process has compiled. Raises as `compile` does."""
        compiled = self.compile(portable.grammar, portable.around)
        return compiled.after(portable.begun_by) if portable.begun_by else compiled

    def forget(self, compiled: "CompiledGrammar") -> None:
        """Compile this grammar anew at its next request, because its automaton is full."""
        with self._lock:
            kept = self._kept.get((compiled.grammar, compiled.around))
            if kept is not None and kept.source is compiled.source:
                del self._kept[compiled.grammar, compiled.around]

    def matcher(self, source: str) -> Any:
        """Make llguidance's matcher of a grammar in llguidance's notation."""
        return self._library.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)

    def _translated(self, grammar: Grammar) -> dict[str, Any]:
        text, library = grammar.text, self._library
        if grammar.kind == "json_schema":
            return {"json_schema": prepare(json.loads(text), lenient=bool(grammar.left_out))}
        if grammar.kind == "choice":
            return {"lark_grammar": "start: " + " | ".join(map(dumps, json.loads(text)))}
        if grammar.kind == "regex":
            (compiled,) = json.loads(library.LLMatcher.grammar_from_regex(text))["grammars"]
            return {"lark_grammar": compiled["lark_grammar"]}
        lark = _from_gbnf(text) if "::=" in text else text
        _check_lark(lark)
        return {"lark_grammar": lark}


def _check_lark(lark: str) -> None:
    """Raise GrammarError for unsupported options of rules, and for %json schemas as for others."""
    for options in _RULE_OPTIONS.findall(lark):
        for name in UNSUPPORTED_IN_LARK:
            if re.search(rf"\b{name}\s*=", options):
                raise GrammarError(f"the grammar sets {name} of a rule, which is not supported here; leave it out")
    schemas = []
    for match in re.finditer(r"%json\s*", lark):
        try:
            schema, _ = json.JSONDecoder().raw_decode(lark, match.end())
        except (ValueError, RecursionError):
            raise GrammarError("%json in the grammar is not followed by valid JSON; expected a schema") from None
        schemas.append(schema)
    if len(schemas) > MOST_SCHEMAS:
        raise GrammarError(f"the grammar holds {len(schemas)} schemas by %json; expected at most {MOST_SCHEMAS}")
    check_size(*schemas)
    if any(map(has_dead_ends, schemas)):
        raise GrammarError(
            "patternProperties of a schema by %json in the grammar match only names of its properties; leave them out"
        )


def _from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark: str = any_to_lark(text)
    except Exception as error:  # the converter does not document its errors
        raise GrammarError(f"the grammar cannot be read as GBNF: {one_line(str(error))}") from None
    return lark


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar for a vocabulary, ready to match; equal if its grammar, rules and beginning are equal.

    All its matchers share one automaton, which grows by every state that any of them reaches, drafts included
    (llguidance's `deep_copy` copies the parser, not the lexer). If the automaton reaches its limits, a matcher makes
    its own (`Matcher.renew`). source: in llguidance's notation. compile_s: seconds of compilation.
    left_out: keywords of its JSON schemas that are not enforced, with reasons.
    """

    grammar: Grammar
    around: str
    vocabulary: Vocabulary = field(repr=False)
    _matcher: Any = field(repr=False, compare=False)
    source: str = field(repr=False, compare=False)
    compile_s: float = field(repr=False, compare=False)
    begun_by: tuple[int, ...] = ()
    left_out: tuple[str, ...] = field(default=(), compare=False)

    def after(self, token_ids: Sequence[int]) -> "CompiledGrammar":
        """Begin after these last tokens of the prompt. Raises GrammarError if the rules do not allow them."""
        matcher = self._matcher.deep_copy()
        if not matcher.consume_tokens(list(token_ids)):
            raise GrammarError(
                f"a {self.grammar.name} cannot follow the end of this prompt; expected one that ends where the answer "
                "or its final message begins"
            )
        return replace(self, _matcher=matcher, begun_by=tuple(token_ids))

    @property
    def portable(self) -> PortableGrammar:
        return PortableGrammar(self.grammar, self.around, self.begun_by)

    def begin(self, stop_token_ids: Sequence[int]) -> "Matcher":
        """Make the matcher of a request that ends with one of these tokens."""
        return Matcher(self, self._matcher.deep_copy(), tuple(stop_token_ids))


class Matcher:
    """The state of one request's grammar: the tokens read, and those that may follow."""

    def __init__(self, compiled: CompiledGrammar, matcher: Any, stop_token_ids: tuple[int, ...]) -> None:
        self.compiled, self.stop_token_ids = compiled, stop_token_ids
        self.state = matcher  # llguidance's
        self._shares = True  # the compiled grammar's automaton

    def read(self, token_ids: Sequence[int]) -> None:
        self.state.consume_tokens(list(token_ids))

    @property
    def may_end(self) -> bool:
        return not self.state.is_error() and bool(self.state.is_accepting())

    @property
    def limited(self) -> bool:
        """Whether the shared automaton has reached its limits."""
        return self._shares and self.state.is_error() and not self._at_dead_end

    def renew(self, token_ids: Sequence[int]) -> None:
        """Read the emitted tokens again with an automaton of its own. Give up after LONGEST_RENEWAL_S."""
        compiled, end = self.compiled, time.monotonic() + LONGEST_RENEWAL_S
        compiled.vocabulary.forget(compiled)
        self._shares = False
        if compiled.compile_s > LONGEST_RENEWAL_S:
            return
        state = compiled.vocabulary.matcher(compiled.source)
        state.consume_tokens([*compiled.begun_by])
        for token_id in token_ids:
            state.compute_bitmask()
            if state.is_error() or time.monotonic() > end:
                return
            state.consume_token(token_id)
        self.state = state

    @property
    def _at_dead_end(self) -> bool:
        matcher = self.state
        stopped = not matcher.is_error() and matcher.is_stopped() and not matcher.is_accepting()
        return stopped or matcher.get_error().startswith("NoExtension")

    @property
    def failure(self) -> str | None:
        """Say why the grammar cannot be followed any further; None if it can."""
        name, matcher = self.compiled.grammar.name, self.state
        if self._at_dead_end:
            return f"no token of the target's vocabulary continues a text of the {name}"
        return f"the {name} cannot be followed any further: {_reason(matcher)}" if matcher.is_error() else None


def _reason(matcher: Any) -> str:
    message = matcher.get_error()
    if not message or message.startswith("NoExtension"):
        return UNSATISFIABLE
    return plain_reason(message)
