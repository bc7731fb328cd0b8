"""Let a target answer many conversations, by continuous batching: training data for drafters."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from peagle.config import SamplingParams
from peagle.engine.request import Request
from peagle.ops.errors import InputError
from peagle.pair import Pair
from peagle.result import Result, follow, submit
from peagle.text.prompts import Conversation, Rendering


@dataclasses.dataclass(frozen=True)
class Answer:
    """One turn: the whole prompt, and the target's output with its stop token."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Asking:
    """How to answer conversations. `context`: the most positions of prompt and answer together."""

    rendering: Rendering
    sampling: SamplingParams
    max_new_tokens: int
    context: int
    slots: int


def answer(
    pair: Pair,
    conversations: Sequence[Conversation],
    asking: Asking,
    first_index: int,
    skipped: Callable[[str], None],
    done: Callable[[int], None],
) -> Iterator[Answer]:
    """Yield the answer to every turn of every conversation, decoded plainly.

    The prompt of a later turn holds the answers to the turns before. Random numbers depend on the seed and on
    first_index + the index of the conversation, so a part of a list gets the answers it gets within the whole.

    Calls skipped(line) for a turn that cannot be run (no room for an answer, no tokenizer); that turn and later ones
    are left out. Calls done(number of conversations that have just finished).
    """
    answers: dict[int, list[str]] = {number: [] for number in range(len(conversations))}  # of unfinished ones
    turn = 0
    while answers:
        requests = []
        for number in list(answers):
            try:
                requests.append(_request(pair, conversations[number], answers[number], asking, first_index, number))
            except InputError as error:
                skipped(str(error))
                del answers[number]
                done(1)

        def ended(request: Request, last_turn: int = turn) -> None:
            if conversations[request.index - first_index].num_requests == last_turn + 1:
                done(1)

        results = _decode(pair, requests, asking, ended)
        turn += 1
        for request in requests:
            number = request.index - first_index
            result = results[request.index]
            yield Answer(request.prompt_ids, result.output_ids)
            if turn < conversations[number].num_requests:
                answers[number].append(result.text or "")
            else:
                del answers[number]


def _request(
    pair: Pair, conversation: Conversation, answers: Sequence[str], asking: Asking, first_index: int, number: int
) -> Request:
    return pair.request(
        conversation,
        answers,
        asking.rendering,
        max_new_tokens=asking.max_new_tokens,
        sampling=asking.sampling,
        index=first_index + number,
        context=asking.context,
    )


def _decode(
    pair: Pair, requests: Sequence[Request], asking: Asking, ended: Callable[[Request], None]
) -> dict[int, Result]:
    """Decode the requests plainly; return results by request index. Calls `ended` at ends."""
    engine = pair.engine(pair.engine_config(0, slots=asking.slots, context=pair.capacity(requests)))
    assemblers = submit(engine, requests, pair.tokenizer)
    try:
        with contextlib.closing(follow(engine, assemblers)) as pieces:
            for assembler, _ in pieces:
                if assembler.finish_reason is not None:
                    ended(assembler.request)
    finally:
        engine.settle()
    return {assembler.request.index: assembler.result() for assembler in assemblers.values()}
