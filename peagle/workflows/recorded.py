"""Take the answers that a file holds as training data: nothing is generated."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from drafter.train.shards import Document
from peagle.base import interrupt
from peagle.base.errors import InputError
from peagle.text.prompts import Conversation, Rendering
from peagle.text.tokenizer import Message, Tokenizer
from peagle.workflows.answers import Skip

ANY_QUESTION: Message = {"role": "user", "content": "?"}


@dataclasses.dataclass(frozen=True)
class Reader:
    """How recorded answers become documents. tokenizer None: only token ids can be read.

    context: the most tokens of a document; the rest is cut off. stop_token_ids: one of them ends an answer.
    """

    directory: Path  # of the target, for messages
    tokenizer: Tokenizer | None
    rendering: Rendering
    stop_token_ids: Sequence[int]
    vocab_size: int
    context: int

    def documents(
        self,
        conversations: Sequence[Conversation],
        first_index: int,
        skipped: Skip,
        done: Callable[[], None],
        kept: Sequence[Document] = (),
    ) -> Iterator[Document]:
        """Yield a document per answer, or per row of token ids, after those kept of an earlier run.

        Calls `skipped` for an answer without room, of other tokens, that the chat template refuses, or that is not fit
        to be trained (`Recorded.unfit`), and `done` after each conversation.
        """
        return itertools.islice(self._all(conversations, first_index, skipped, done), len(kept), None)

    def _all(
        self, conversations: Sequence[Conversation], first_index: int, skipped: Skip, done: Callable[[], None]
    ) -> Iterator[Document]:
        for index, conversation in enumerate(conversations, first_index):
            interrupt.check()
            recorded = conversation.recorded
            assert recorded is not None
            for place in recorded.answers if recorded.messages else [slice(0)]:
                try:
                    ids, mask = self._messages(conversation, place) if recorded.messages else self._ids(conversation)
                    yield self._document(ids, mask, index, conversation.name)
                except InputError as error:
                    skipped(str(error), 1)
            done()

    def _messages(self, conversation: Conversation, place: slice) -> tuple[Sequence[int], Sequence[bool]]:
        """Encode the prompt as the target gets it, and the answer as it writes it; return (ids, mask)."""
        recorded = conversation.recorded
        assert recorded is not None
        if why := next((recorded.unfit[at] for at in range(place.start, place.stop) if at in recorded.unfit), None):
            raise InputError(f"{conversation.name}: a recorded answer {why}")
        messages = recorded.messages
        before = dataclasses.replace(conversation, turns=(), history=messages[: place.start])
        prompt_ids = before.encode((), self.tokenizer, self.rendering)
        answer_ids = self._answer(messages[place], conversation.name)
        return (*prompt_ids, *answer_ids), [False] * len(prompt_ids) + [True] * len(answer_ids)

    def _answer(self, answer: Sequence[Message], name: str) -> tuple[int, ...]:
        """Encode an answer up to its stop token.

        It is encoded after another question, because templates shorten the reasoning before an answer.
        """
        assert self.tokenizer is not None
        encode = functools.partial(
            self.tokenizer.encode_chat, reasoning_effort=self.rendering.reasoning_effort, date=self.rendering.date
        )
        question, ids = encode([ANY_QUESTION]), encode([ANY_QUESTION, *answer], answered=True)
        stops = [at for at in range(len(question), len(ids)) if ids[at] in self.stop_token_ids]
        if ids[: len(question)] != question or not stops:
            raise InputError(
                f"{name}: the chat template in {self.directory} does not render an answer as the target writes it, "
                "after the prompt and up to a stop token; give input_ids with a loss_mask instead"
            )
        return ids[len(question) : stops[-1] + 1]

    def _ids(self, conversation: Conversation) -> tuple[Sequence[int], Sequence[bool]]:
        """Return the (ids, mask) of a row. Raises InputError for ids outside the vocabulary."""
        assert conversation.recorded is not None
        ids = conversation.recorded.token_ids
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise InputError(
                f"{conversation.name} has token ids {min(ids)}..{max(ids)}; expected those of the "
                f"target, 0..{self.vocab_size - 1}"
            )
        return ids, conversation.recorded.mask

    def _document(self, ids: Sequence[int], mask: Sequence[bool], index: int, name: str) -> Document:
        """Make a document, cut to the context. Raises InputError if nothing of an answer is left."""
        if (size := mask.index(True)) >= self.context:
            raise InputError(
                f"{name} has {size} tokens before an answer, but --context is {self.context}; expected at most "
                f"{self.context - 1}: raise it"
            )
        return Document(
            np.array(ids[: self.context], np.int32), np.array(mask[: self.context], bool), conversation=index
        )
