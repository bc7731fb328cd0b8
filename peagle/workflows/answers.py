"""Let a target answer conversations, by continuous batching: training data for drafters."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from drafter.train.shards import Document
from peagle.answers.result import follow, submit
from peagle.base.errors import InputError
from peagle.config import SamplingParams
from peagle.engine.request import Request
from peagle.pair import Pair
from peagle.text.prompts import Conversation, Rendering
from peagle.text.tokenizer import detokenize

Skip = Callable[[str, int], None]  # called with a reason, and how many turns are left out


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """How to answer conversations. context: the most tokens of prompt and answer, which max_new_tokens None leaves."""

    rendering: Rendering
    sampling: SamplingParams
    max_new_tokens: int | None
    context: int
    slots: int


def answer(
    pair: Pair,
    conversations: Sequence[Conversation],
    options: AnswerOptions,
    first_index: int,
    skipped: Skip,
    done: Callable[[], None],
    kept: Sequence[Document] = (),
) -> Iterator[Document]:
    """Yield a document per turn as it ends: its whole prompt, and the target's answer, which is trained.

    The prompt of a later turn holds the answers to the earlier turns. A conversation is numbered by first_index + its
    own index; random numbers depend on the seed and on that, so shards get the answers that the whole list would get.
    kept: documents of an earlier run, which are not yielded.

    Calls `skipped` for a turn that cannot be run (no room for an answer, no tokenizer); it and later turns are left
    out. Calls `done` when a conversation has ended.
    """
    turns: dict[int, list[Document]] = {first_index + number: [] for number in range(len(conversations))}
    for document in kept:
        turns[document.conversation].append(document)
    unfinished = dict(zip(turns, conversations, strict=True))

    def num_left(index: int) -> int:
        return unfinished[index].num_requests - len(turns[index])

    def leave(index: int) -> None:
        del unfinished[index]
        done()

    for index in [index for index in unfinished if not num_left(index)]:
        leave(index)
    while unfinished:
        requests = []
        for index, conversation in list(unfinished.items()):
            try:
                requests.append(_request(pair, conversation, turns[index], options, index))
            except InputError as error:
                skipped(str(error), num_left(index))
                leave(index)
        for document in _decode(pair, requests, options.slots):
            turns[document.conversation].append(document)
            if not num_left(document.conversation):
                leave(document.conversation)
            yield document


def in_order(documents: Sequence[Document]) -> list[Document]:
    """Sort documents by their conversations; the turns of one stay in order."""
    return sorted(documents, key=lambda document: document.conversation)


def is_cut(document: Document, stop_token_ids: Sequence[int]) -> bool:
    """Whether an answer ends at a limit instead of a stop token."""
    return int(document.token_ids[document.trained][-1]) not in stop_token_ids


def _request(
    pair: Pair, conversation: Conversation, turns: Sequence[Document], options: AnswerOptions, index: int
) -> Request:
    """Make the request of the turn after these."""
    answers = []
    for turn in turns:
        ids = turn.token_ids[turn.trained].tolist()
        ids = ids if is_cut(turn, pair.stop_token_ids) else ids[:-1]
        answers.append("" if pair.tokenizer is None else detokenize(pair.tokenizer, ids))
    return pair.request(
        conversation,
        answers,
        options.rendering,
        max_new_tokens=options.context if options.max_new_tokens is None else options.max_new_tokens,
        sampling=options.sampling,
        index=index,
        context=options.context,
    )


def _decode(pair: Pair, requests: Sequence[Request], slots: int) -> Iterator[Document]:
    """Decode the requests plainly; yield a document of each as it ends."""
    engine = pair.engine(pair.engine_config(0, slots=slots, context=pair.capacity(requests)))
    assemblers = submit(engine, requests, pair.tokenizer)
    try:
        with contextlib.closing(follow(engine, assemblers)) as pieces:
            for assembler, _ in pieces:
                if assembler.finish_reason is not None:
                    result = assembler.result()
                    ids = np.array([*result.request.prompt_ids, *result.output_ids], np.int32)
                    trained = np.arange(len(ids)) >= len(result.request.prompt_ids)
                    yield Document(ids, trained, conversation=result.request.index)
    finally:
        engine.settle()
