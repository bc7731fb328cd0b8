"""Concurrent streams of one pair, from threads and an event loop, and their early ends."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from peagle.base.errors import InputError
from peagle.engine.host.engine import Engine
from peagle.pair import Pair
from peagle.text.tokenizer import Tokenizer
from tests.support.pairs import toy_pair

pytestmark = pytest.mark.compile

SHAPE: dict[str, Any] = {"slots": 2, "context": 256, "ignore_eos": True}
PROMPTS: list[tuple[str, dict[str, Any]]] = [
    ("hello", {"max_new_tokens": 60}),
    ("1 + 2 = ", {"max_new_tokens": 70, "temperature": 0.9, "seed": 5}),
]


def one_engine(pair: Pair) -> Engine:
    (engine,) = (engine for config, engine in pair.engines.items() if config.slots == 2)
    return engine


def most_at_once(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Callable[[], int]:
    """Record the most requests in slots at any dispatch from now on."""
    active, step = [0], engine.step

    def counting() -> Any:
        chunks = step()
        active.append(engine._scheduler.num_active)
        return chunks

    monkeypatch.setattr(engine, "step", counting)
    return lambda: max(active)


@pytest.fixture(params=["toy", pytest.param("pair", marks=pytest.mark.slow)])
def some_pair(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Pair:
    """For the quick toy, and for the real pair with its caches."""
    pair: Pair = toy_pair(tokenizer) if request.param == "toy" else request.getfixturevalue("pair")
    return pair


@pytest.mark.parametrize("k", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_threads_that_stream_at_once_get_what_each_gets_alone(
    some_pair: Pair, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    some_pair.engines.clear()
    options = {**SHAPE, "num_speculative_tokens": k}
    alone = [some_pair.generate(text, **options, **sampling) for text, sampling in PROMPTS]
    most = most_at_once(monkeypatch, one_engine(some_pair))
    streams = [some_pair.stream(text, **options, **sampling) for text, sampling in PROMPTS]
    first = [next(stream) for stream in streams]  # both have a slot before the threads begin
    texts = ["", ""]

    def read(number: int) -> None:
        texts[number] = first[number] + "".join(streams[number])

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [result.text for result in alone]
    assert [stream.result.output_ids for stream in streams] == [result.output_ids for result in alone]
    assert most() == 2


def test_tasks_that_stream_at_once_get_what_each_gets_alone(some_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    some_pair.engines.clear()
    options = {**SHAPE, "num_speculative_tokens": 3}
    alone = [some_pair.generate(text, **options, **sampling) for text, sampling in PROMPTS]
    most = most_at_once(monkeypatch, one_engine(some_pair))

    async def read(number: int, both_began: asyncio.Barrier) -> str:
        text, sampling = PROMPTS[number]
        stream = some_pair.astream(text, **options, **sampling)
        shown = await anext(stream)
        await both_began.wait()
        async for piece in stream:
            shown += piece
        assert stream.result.output_ids == alone[number].output_ids
        assert stream.result.finish_reason == "length"
        return shown

    async def both() -> list[str]:
        barrier = asyncio.Barrier(2)
        return await asyncio.gather(read(0, barrier), read(1, barrier))

    assert asyncio.run(both()) == [result.text for result in alone]
    assert most() == 2


def test_a_sampled_stream_may_begin_while_a_greedy_one_is_decoded(tokenizer: Tokenizer) -> None:
    """Its program is not warm: a warm-up beside the other would cost that one tokens."""
    options = {**SHAPE, "num_speculative_tokens": 3}
    alone = [toy_pair(tokenizer).generate(text, **options, **sampling) for text, sampling in PROMPTS]
    pair = toy_pair(tokenizer)
    streams = [pair.stream(text, **options, **sampling) for text, sampling in PROMPTS]
    next(streams[0])
    next(streams[1])
    for stream, expected in zip(streams, alone, strict=True):
        for _ in stream:
            pass
        assert stream.result.output_ids == expected.output_ids


@pytest.mark.parametrize("how", ["close", "forget", "break", "aclose", "cancel"])
def test_a_stream_that_ends_early_frees_its_slot(tokenizer: Tokenizer, how: str) -> None:
    pair = toy_pair(tokenizer)
    options: dict[str, Any] = {"max_new_tokens": 200, "num_speculative_tokens": 1}
    whole = pair.generate("hello", **options)
    (engine,) = pair.engines.values()

    async def early() -> None:
        stream = pair.astream("hello", **options)
        if how == "cancel":

            async def read() -> None:
                async for _ in stream:
                    pass

            task = asyncio.create_task(read())
            while len(stream.result.output_ids) < 5:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "aclose":
            async with stream:
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        else:
            async for _ in stream:
                break
        assert len(stream.result.output_ids) < 200

    if how in ("close", "forget"):
        stream = pair.stream("hello", **options)
        next(stream)
        assert engine.busy
        if how == "close":
            stream.close()
            assert list(stream) == []
        del stream
    else:
        asyncio.run(early())
    gc.collect()
    while engine.busy:  # the thread that waited for a piece leaves by itself
        time.sleep(0.001)
    assert pair.generate("hello", **options).output_ids == whole.output_ids


def test_a_stream_that_is_closed_before_it_began_asks_nothing(toy: Pair) -> None:
    stream = toy.stream("hello", max_new_tokens=5, num_speculative_tokens=0)
    stream.close()
    assert list(stream) == []
    assert stream.result.output_ids == ()


def test_the_event_loop_goes_on_while_a_stream_waits(toy: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = toy.astream("hello", max_new_tokens=20, num_speculative_tokens=0, slots=2)
    (engine,) = toy.engines.values()
    went_on, step = threading.Event(), engine.step

    def waiting() -> Any:
        assert went_on.wait(600), "the event loop is blocked"
        return step()

    monkeypatch.setattr(engine, "step", waiting)

    async def go_on() -> None:
        went_on.set()

    async def both() -> None:
        task = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await go_on()
        await task

    asyncio.run(both())


def test_text_that_is_held_back_is_shown_at_the_end(toy: Pair) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "num_speculative_tokens": 0}
    whole = toy.generate("hello", **options).text
    assert whole is not None
    stream = toy.stream("hello", stop=whole + "\x00", **options)  # all of it may be its beginning
    assert list(stream) == [whole]
    assert stream.result.finish_reason == "length"


def test_streams_that_name_their_context_share_an_engine(toy: Pair) -> None:
    for text, budget in (("a", 10), ("b" * 150, 60)):
        toy.generate(text, max_new_tokens=budget, num_speculative_tokens=3, context=300, slots=2)
    ((config, _),) = toy.engines.items()
    assert (config.context, config.slots) == (300, 2)
    assert len(toy.generate("a" * 250, max_new_tokens=200, num_speculative_tokens=3, context=300).output_ids) < 50
    with pytest.raises(InputError, match=r"the context holds 20 positions; .* raise --context"):
        toy.stream("a" * 50, context=20)
    with pytest.raises(InputError, match="slots is 0"):
        toy.stream("a", slots=0)
