"""With too little memory requests take turns, and each gets what it gets alone."""

import dataclasses

import numpy as np
import pytest

from peagle.base.errors import InputError
from peagle.config import SamplingParams
from peagle.drafters.ngram import NGram
from peagle.engine.host.engine import Engine
from peagle.engine.memory.kv_memory import KVMemory
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig
from tests.support.models import TOKENS, Models, answer_of, ask, engine_of, fast_target, models, needs_native
from tests.support.toys import MarkovTarget, check_whole, decode, follow, tiny_target

pytestmark = pytest.mark.compile

K, CAPACITY = 3, 256
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(0.8, seed=5),
    SamplingParams(0.9, top_k=9, seed=2, repetition_penalty=1.3, frequency_penalty=0.4, min_tokens=40),
]


@pytest.fixture(scope="module")
def pair() -> Models:
    return models()


def memory_of(pair: Models, pages: int) -> int:
    """Bytes of so many pages of every group."""
    return pages * sum(KVMemory(pair.target, pair.drafter, ResolvedConfig(K)).page_bytes)


def requests(number: int, logprobs: int | None = None) -> list[Request]:
    rng = np.random.default_rng(3)
    lengths = rng.integers(2, 150, number).tolist()
    return [
        Request(TOKENS[number : number + length], 90, SAMPLINGS[number % 3], (), index=number, logprobs=logprobs)
        for number, length in enumerate(lengths)
    ]


@needs_native
@pytest.mark.parametrize(
    ("steps", "kept", "drafter"),
    [
        (1, 0, "DFlash"),
        (4, 1, "P-EAGLE"),
        *(pytest.param(*case, "P-EAGLE", marks=pytest.mark.slow) for case in ((1, 0), (1, 1), (4, 0))),
    ],
)
def test_requests_with_memory_for_a_third_get_what_they_get_alone(kept: int, steps: int, drafter: str) -> None:
    """Tokens, steps and log-probabilities; they were interrupted in the midst of prompts and of answers."""
    pair = models("native float32", drafter)
    alone = engine_of(pair)
    some = requests(8, logprobs=2)
    expected = [answer_of(list(follow(alone, alone.add(request)))) for request in some]
    little = engine_of(
        pair,
        slots=5,
        prefill_chunk=32,
        steps_per_dispatch=steps,
        kv_memory=memory_of(pair, 5),
        prefix_cache=kept,
    )
    handles = little.add_all(some)
    answers = {handle: ([], [], []) for handle in handles}
    for handle, chunk in little.run(handles):
        for into, part in zip(answers[handle], (chunk.token_ids, chunk.steps, chunk.logprobs), strict=True):
            into.extend(part)
        if chunk.steps:
            check_whole(little)
    assert [answers[handle] for handle in handles] == expected
    assert little.num_preemptions == sum(handle.num_preempted for handle in handles) > 2
    assert any(handle.num_preempted and handle.output_ids for handle in handles)
    use = little.prefix_cache_use
    assert (use is None) == (not kept)
    if use is not None:  # those that wait for pages, or are computed again, are looked up once
        assert (use.num_requests, use.num_tokens) == (len(some), sum(len(request.prompt_ids) for request in some))
    check_whole(little)


def test_n_grams_go_on_with_all_their_tokens() -> None:
    target = fast_target()
    page = sum(KVMemory(target, NGram(), ResolvedConfig(K)).page_bytes)
    some = [dataclasses.replace(request, sampling=SamplingParams()) for request in requests(5)]
    expected = [decode(Engine(target, NGram(), ResolvedConfig(K, 1, CAPACITY)), [request]) for request in some]
    little = Engine(target, NGram(), ResolvedConfig(K, 4, CAPACITY, prefill_chunk=32, kv_memory=5 * page))
    tokens, steps = decode(little, some)
    assert [([ids], [records]) for ids, records in zip(tokens, steps, strict=True)] == expected
    assert little.num_preemptions > 0


def test_the_latest_request_gives_way(pair: Models) -> None:
    little = engine_of(pair, slots=3, kv_memory=memory_of(pair, 5))
    handles = little.add_all([Request(TOKENS[:60], 120, stop_token_ids=()) for _ in range(3)])
    ended = [handle for handle, chunk in little.run(handles) if chunk.finish_reason]
    assert ended == handles
    assert handles[0].num_preempted == 0


def test_memory_that_holds_no_request_is_refused_with_the_numbers(pair: Models) -> None:
    least = memory_of(pair, 5)
    for memory, context in ((memory_of(pair, 1), CAPACITY), (least, 10 * CAPACITY)):
        with pytest.raises(InputError, match=rf"which hold one request of {context} positions: raise"):
            engine_of(pair, context=context, kv_memory=memory)
    with pytest.raises(InputError, match="kv_memory is 0 bytes; expected more than 0"):
        ResolvedConfig(kv_memory=0)
    engine = engine_of(pair, kv_memory=least)
    with pytest.raises(InputError, match="expected a sum of at most 256, the context"):
        engine.add(Request(TOKENS[:250], 7))
    assert len(ask(engine, TOKENS[:250], 6)[0][0]) <= 6


def test_memory_is_used_for_whole_contexts_by_default_and_a_model_without_layers_takes_none() -> None:
    memory = KVMemory(tiny_target(), None, ResolvedConfig(slots=3, context=128))
    assert memory.num_pages[0] == 3 * 3  # a step's rows may lie behind the context
    huge = KVMemory(tiny_target(), None, ResolvedConfig(slots=4, context=32768))
    assert huge.num_pages[0] * 64 < 1.3 * 32768, "slots share what lies behind 8,192 positions each"
    assert KVMemory(MarkovTarget(np.zeros((5, 5))), None, ResolvedConfig(prefix_cache=1 << 40)).num_bytes == (
        0,
        0,
    )


def test_an_aborted_request_leaves_its_pages_to_those_that_wait(pair: Models) -> None:
    little = engine_of(pair, slots=2, kv_memory=memory_of(pair, 5))
    first, second = little.add_all([Request(TOKENS[:200], 40, stop_token_ids=()), Request(TOKENS[:190], 5)])
    while not first.output_ids:
        little.step()
    assert second.table is None
    little.abort(first)
    tokens = [token for chunk in follow(little, second) for token in chunk.token_ids]
    assert tokens == ask(engine_of(pair), TOKENS[:190], 5)[0][0]
    check_whole(little)
