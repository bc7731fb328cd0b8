"""Compile grammars for a pair: for its vocabulary, within the channels of its chat template."""

import dataclasses
import threading
from collections.abc import Mapping, Sequence

from peagle.base.errors import InputError
from peagle.engine.grammar import CompiledGrammar, Grammar, GrammarError, Vocabulary, inlined
from peagle.text.channels import answer_begun, answer_rules, has_channels
from peagle.text.tokenizer import Tokenizer


class Grammars:
    """Compile grammars over the tokens of a target. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer. Raises InputError if it has none."""
        if self._tokenizer is None:
            raise InputError(
                "a grammar is about text, but the target's directory has no tokenizer.json; leave it out, or add the "
                "file"
            )
        return self._tokenizer

    def read(self) -> Vocabulary:
        """Return the target's tokens. The first call reads them, which takes a while.

        Raises InputError without a tokenizer.
        """
        tokenizer = self.tokenizer
        with self._lock:
            if self._vocabulary is None:
                tokens = [tokenizer.token_bytes(token) for token in range(self._vocab_size)]
                control = [token for token in tokenizer.special_tokens if token < len(tokens)]
                self._vocabulary = Vocabulary(tokens, control)
            return self._vocabulary

    def compile(
        self,
        grammar: Grammar | None,
        *,
        channels: bool,
        calls: Mapping[str, Grammar | None] | None = None,
        must_call: bool = False,
    ) -> CompiledGrammar:
        """Compile a grammar; equal grammars are compiled once.

        grammar None: any text, with preambles. channels: in a vocabulary with channels (peagle.text.channels) the
        grammar is of the final message. calls: functions that the answer may call instead, by name, with the JSON
        schemas of their arguments (None: any text). must_call: it must call one. Raises GrammarError for calls in a
        vocabulary without channels.
        """
        tokenizer, vocabulary, schemas = self.tokenizer, self.read(), calls or {}
        final = Grammar.any_text() if grammar is None else grammar
        if not channels or not has_channels(tokenizer):
            if any(schemas.values()):
                raise GrammarError("the model's vocabulary has no channels, so no call can be told from an answer")
            return vocabulary.compile(final)
        written = {name: None if schema is None else inlined(schema) for name, schema in schemas.items()}
        rules = answer_rules(tokenizer, written, final=not must_call, preambles=grammar is None)
        compiled = vocabulary.compile(final, rules)
        left_out = [keyword for schema in schemas.values() if schema is not None for keyword in schema.left_out]
        return dataclasses.replace(compiled, left_out=tuple(dict.fromkeys((*compiled.left_out, *left_out))))

    def begin(self, compiled: CompiledGrammar, prompt_ids: Sequence[int]) -> CompiledGrammar:
        """Start a grammar that was compiled with channels at the end of a prompt.

        After a prompt without messages an answer has no channels: the grammar is of the whole answer.
        """
        if not compiled.around:
            return compiled
        begun = answer_begun(self.tokenizer, prompt_ids)
        return compiled.after(begun) if begun else self.read().compile(compiled.grammar)
