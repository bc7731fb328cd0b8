"""Answers of a target to many conversations, by continuous batching: what drafters are trained on."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from peagle.api import Pair
from peagle.engine.request import Request, SamplingParams
from peagle.ops.errors import InputError
from peagle.result import Result, decode
from peagle.text.prompts import Conversation, Rendering


@dataclasses.dataclass(frozen=True)
class Answer:
    """One turn: the whole prompt, and what the target said, its stop token among it."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Asking:
    """How conversations are answered. `context`: prompt and answer together, at most."""

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
    """The answer to every turn of every conversation, plainly decoded. Later turns are asked with the answers to those
    before. Random numbers follow from the seed and from first_index + the place of the conversation, so that any part
    of a list is answered as within the whole.

    `skipped` is told, in a line, of a turn that cannot be asked (no room for an answer, no tokenizer); it and those
    behind it are missing. `done` is told how many more conversations are finished.
    """
    said: dict[int, list[str]] = {number: [] for number in range(len(conversations))}
    turn = 0
    while said:
        requests = []
        for number in list(said):
            try:
                requests.append(_request(pair, conversations[number], said[number], asking, first_index, number))
            except InputError as error:
                skipped(str(error))
                del said[number]
                done(1)
        results = _decode(pair, requests, asking)
        turn += 1
        for request in requests:
            number = request.index - first_index
            result = results[request.index]
            yield Answer(request.prompt_ids, result.output_ids)
            if turn < conversations[number].num_requests:
                said[number].append(result.text or "")
            else:
                del said[number]
                done(1)


def _request(
    pair: Pair, conversation: Conversation, said: Sequence[str], asking: Asking, first_index: int, number: int
) -> Request:
    return pair.request(
        conversation,
        said,
        asking.rendering,
        max_new_tokens=asking.max_new_tokens,
        sampling=asking.sampling,
        index=first_index + number,
        context=asking.context,
    )


def _decode(pair: Pair, requests: Sequence[Request], asking: Asking) -> dict[int, Result]:
    """By index."""
    engine = pair.engine(pair.engine_config(0, slots=asking.slots, capacity=pair.capacity(requests)))
    return {result.request.index: result for result in decode(engine, requests, pair.tokenizer)}
