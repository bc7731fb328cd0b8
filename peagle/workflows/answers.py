"""Let a target answer conversations, by continuous batching: training data for drafters."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from drafter.train.shards import Document
from peagle.config import SamplingParams
from peagle.engine.request import Request
from peagle.ops.errors import InputError
from peagle.pair import Pair
from peagle.result import Result, follow, submit
from peagle.text.prompts import Conversation, Rendering


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """How to answer conversations. context: the most tokens of prompt and answer."""

    rendering: Rendering
    sampling: SamplingParams
    max_new_tokens: int
    context: int
    slots: int


def answer(
    pair: Pair,
    conversations: Sequence[Conversation],
    options: AnswerOptions,
    first_index: int,
    skipped: Callable[[str], None],
    done: Callable[[], None],
) -> Iterator[Document]:
    """Yield a document per turn: its whole prompt, and the target's answer, which is trained.

    The prompt of a later turn holds the answers to the earlier turns. Random numbers depend on the seed and on
    first_index + the index of the conversation, so shards get the answers that the whole list would get.

    Calls skipped(reason) for a turn that cannot be run (no room for an answer, no tokenizer); it and later turns are
    left out. Calls `done` when a conversation has ended.
    """
    answers: dict[int, list[str]] = {number: [] for number in range(len(conversations))}  # by unfinished conversation
    turn = 0
    while answers:
        requests = []
        for number in list(answers):
            try:
                requests.append(
                    pair.request(
                        conversations[number],
                        answers[number],
                        options.rendering,
                        max_new_tokens=options.max_new_tokens,
                        sampling=options.sampling,
                        index=first_index + number,
                        context=options.context,
                    )
                )
            except InputError as error:
                skipped(str(error))
                del answers[number]
                done()

        def ended(request: Request, last_turn: int = turn) -> None:
            if conversations[request.index - first_index].num_requests == last_turn + 1:
                done()

        results = _decode(pair, requests, options.slots, ended)
        turn += 1
        for request in requests:
            number = request.index - first_index
            result = results[request.index]
            ids = np.array([*request.prompt_ids, *result.output_ids], np.int32)
            yield Document(ids, np.arange(len(ids)) >= len(request.prompt_ids))
            if turn < conversations[number].num_requests:
                answers[number].append(result.text or "")
            else:
                del answers[number]


def _decode(pair: Pair, requests: Sequence[Request], slots: int, ended: Callable[[Request], None]) -> dict[int, Result]:
    """Decode the requests plainly; return results by request index. Calls ended(request) when one has ended."""
    engine = pair.engine(pair.engine_config(0, slots=slots, context=pair.capacity(requests)))
    assemblers = submit(engine, requests, pair.tokenizer)
    try:
        with contextlib.closing(follow(engine, assemblers)) as pieces:
            for assembler, _ in pieces:
                if assembler.finish_reason is not None:
                    ended(assembler.request)
    finally:
        engine.settle()
    return {assembler.request.index: assembler.result() for assembler in assemblers.values()}
