"""Several engines behind one queue."""

import collections
import dataclasses
import os
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.base.errors import InputError
from peagle.config import SamplingParams
from peagle.drafters.ngram import NGram
from peagle.engine.devices.replicas import Replicas
from peagle.engine.host.engine import Engine
from peagle.engine.host.handle import EngineError, Handle
from peagle.engine.host.programs import trace_counts
from peagle.engine.host.warmup import WarmUp
from peagle.engine.request import Request, StepRecord
from peagle.engine.resolved import ResolvedConfig
from tests.support.toys import MarkovTarget, decode, follow, stepped, taken

VOCAB, K = 29, 3
CONFIG = ResolvedConfig(K, slots=4, context=192, prefill_chunk=8, prefix_cache=1)
RNG = np.random.default_rng(0)
TARGET = MarkovTarget(jnp.asarray(RNG.normal(0, 2, (VOCAB, VOCAB)), jnp.float32))
PROMPTS = [tuple(RNG.integers(0, VOCAB, size).tolist()) for size in (5, 70, 9, 3, 12, 8, 21)]
REQUESTS = [
    Request(prompt, 12 + 4 * place, SamplingParams(0.9 * (place % 2), seed=place), index=place)
    for place, prompt in enumerate(PROMPTS)
]

Answers: TypeAlias = tuple[list[list[int]], list[list[StepRecord]]]


def replicas(count: int = 2, config: ResolvedConfig = CONFIG) -> Replicas:
    return Replicas([Engine(TARGET, NGram(), config.share(count)) for _ in range(count)], config)


def shared(config: ResolvedConfig = CONFIG) -> Replicas:
    """Two engines with a slot each."""
    return replicas(config=dataclasses.replace(config, slots=2))


def never_ready(monkeypatch: pytest.MonkeyPatch, slow: Engine) -> None:
    ready = Engine.ready.fget
    monkeypatch.setattr(Engine, "ready", property(lambda engine: engine is not slow and ready(engine)))


@pytest.fixture(scope="module")
def alone() -> Answers:
    """Decode the requests in one engine."""
    return decode(Engine(TARGET, NGram(), CONFIG), REQUESTS)


def entered(engine: Replicas) -> dict[int, list[int]]:
    """Record which requests each engine is given."""
    entered_by: dict[int, list[int]] = collections.defaultdict(list)
    for number, one in enumerate(engine.engines):

        def record(handle: Handle, number: int = number, enter: Callable[[Handle], None] = one.enter) -> None:
            entered_by[number].append(handle.request.index)
            enter(handle)

        one.enter = record  # type: ignore[method-assign]
    return entered_by


def drain(engine: Replicas, got: dict[Handle, list[int]]) -> None:
    while engine.busy:
        try:
            engine.step()
        finally:
            for handle, chunk in taken(got):
                got[handle] += chunk.token_ids


def test_answers_and_acceptance_are_those_of_one_engine(alone: Answers) -> None:
    engine = replicas()
    by_engine = entered(engine)
    assert decode(engine, REQUESTS) == alone
    assert sorted(by_engine[0] + by_engine[1]) == list(range(len(REQUESTS)))
    assert min(map(len, by_engine.values())) > 1
    assert sum(record.num_accepted for records in alone[1] for record in records) > 20


def test_the_first_in_the_queue_is_given_to_the_first_that_has_room() -> None:
    engine = replicas()
    by_engine = entered(engine)
    handles = engine.add_all(REQUESTS)
    engine.step()
    assert by_engine == {0: [0, 2], 1: [1, 3]}
    engine.abort(handles[1])
    engine.step()
    engine.step()
    assert by_engine[1] == [1, 3, 4]
    drain(engine, collections.defaultdict(list))


def test_requests_are_aborted_wherever_they_are(alone: Answers) -> None:
    engine = replicas(config=dataclasses.replace(CONFIG, slots=2))
    handles = engine.add_all(REQUESTS)
    got: dict[Handle, list[int]] = {handle: [] for handle in handles}
    for _ in range(3):
        for handle, chunk in stepped(engine, got):
            got[handle] += chunk.token_ids
    waiting, running = handles[6], handles[0]
    assert waiting in engine._waiting
    assert running in [handle for _, handle in engine.one.decoding]
    for handle in (waiting, running):
        engine.abort(handle)
        engine.abort(handle)
    assert [chunk.finish_reason for chunk in waiting.inbox] == ["aborted"]
    drain(engine, got)
    for place, handle in enumerate(handles):
        left = handle in (waiting, running)
        assert (handle.finished == "aborted") == left
        assert got[handle] == alone[0][place][: len(got[handle])] if left else got[handle] == alone[0][place]


def test_a_slow_engine_holds_no_other_up(alone: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = shared()
    never_ready(monkeypatch, engine.one)
    first, second = engine.add_all([REQUESTS[4], REQUESTS[2]])
    got: dict[Handle, list[int]] = {first: [], second: []}
    while second.finished is None:
        for handle, chunk in stepped(engine, got):
            got[handle] += chunk.token_ids
    assert got == {first: [], second: alone[0][2]}
    monkeypatch.undo()
    drain(engine, got)
    assert got[first] == alone[0][4]


def test_a_prompt_goes_where_most_of_it_is_known() -> None:
    engine = replicas()
    by_engine = entered(engine)
    for place in (0, 1):  # both engines are idle, so it is the first
        decode(engine, [REQUESTS[place]])
    assert by_engine == {0: [0, 1]}
    busy = engine.add(dataclasses.replace(REQUESTS[0], max_new_tokens=50, index=2))
    engine.step()
    known, new = engine.add_all(
        [Request((*PROMPTS[1], 5), 4, index=3), Request((*PROMPTS[1][:9], *PROMPTS[4]), 4, index=4)]
    )
    chunks = {handle: chunk for handle, chunk in engine.run([known, new]) if not chunk.steps}
    assert by_engine == {0: [0, 1, 2, 3], 1: [4]}
    assert (chunks[known].num_cached_tokens, chunks[new].num_cached_tokens) == (64, 0)
    engine.abort(busy)
    use = engine.prefix_cache_use
    assert use is not None
    assert (use.num_requests, use.num_hits) == (5, 1)


def test_a_failure_ends_all() -> None:
    engine = replicas()
    handle = engine.add_all(REQUESTS)[0]

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no device")

    engine.engines[1]._send = fail  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="the engine failed: no device"):
        list(follow(engine, handle))
    with pytest.raises(EngineError, match="the engine has failed: no device"):
        engine.add(REQUESTS[0])


def test_engines_compile_at_once_and_the_first_measures_when_all_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside another's compilation it would measure that. Its costs hold for all; figures are of all."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    together, run_programs = threading.Barrier(2), WarmUp.compile

    def meet(warm_up: WarmUp, *needs: Any) -> bool:
        if not measured and not warm_up._warm:
            together.wait(120)
        return run_programs(warm_up, *needs)

    def measuring(done: int, _: int) -> None:
        measured.append(done)
        assert all(one.compile_s > 0 and not one.busy for one in engine.engines)

    config = dataclasses.replace(CONFIG, adaptive=True)
    engine, measured = replicas(config=config), list[int]()
    monkeypatch.setattr(WarmUp, "compile", meet)
    engine.warm_up(measuring=measuring)
    monkeypatch.undo()
    assert measured
    assert len(measured) == len(set(measured))
    assert engine.costs is not None
    assert {id(one.costs) for one in engine.engines} == {id(engine.costs)}
    assert engine.compile_s == max(one.compile_s for one in engine.engines)
    before = trace_counts()
    decode(engine, [request for request in REQUESTS if request.sampling.greedy])
    assert trace_counts() == before
    assert engine.times.busy_s == sum(one.times.busy_s for one in engine.engines) > 0
    pages, state, logits = engine.one.memory_bytes()
    together = 2 if jax.default_backend() == "cpu" else 1
    assert engine.memory_bytes() == (together * pages, together * state, together * logits)
    handle = engine.add(REQUESTS[0])
    engine.warm_up(sampled=True)  # does nothing now
    assert engine.busy
    engine.abort(handle)


def test_a_warm_up_that_fails_is_raised_after_the_others_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    engine, (begun, failed), ended = replicas(), (threading.Event(), threading.Event()), list[int]()

    def fail(*_: object, **__: object) -> None:
        assert begun.wait(120)
        failed.set()
        raise RuntimeError("no memory")

    def outlast(*_: object, **__: object) -> None:
        begun.set()
        assert failed.wait(120)
        ended.append(1)

    monkeypatch.setattr(engine.engines[0], "prepare", fail)
    monkeypatch.setattr(engine.engines[1], "prepare", outlast)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.warm_up()
    assert ended == [1]


def test_slots_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(InputError, match="slots is 3; expected a multiple of 2, the replicas"):
        replicas(config=dataclasses.replace(CONFIG, slots=3))


def test_an_engine_that_stands_still_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the loop stands still, too, and its watcher finds that out, although others would go on."""
    monkeypatch.setattr("peagle.engine.devices.replicas.STALLED_S", 0.0)
    engine = shared()
    never_ready(monkeypatch, engine.one)
    handles = engine.add_all(REQUESTS[:2])
    drain(engine, collections.defaultdict(list))
    assert {handle.finished for handle in handles} == {"length"}


def test_chunks_that_arrive_beside_a_failure_are_not_lost() -> None:
    engine = shared()
    first, second = engine.add_all(REQUESTS[:2])
    while not (first.length > len(PROMPTS[0]) and second.length > len(PROMPTS[1])):
        engine.step()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no device")

    engine.engines[1]._collect = fail  # type: ignore[method-assign]
    got: dict[Handle, list[int]] = {first: [], second: []}
    with pytest.raises(EngineError, match="no device"):
        drain(engine, got)
    assert got[first] == first.output_ids


def test_a_request_that_waits_hears_of_the_failure_of_an_idle_engine() -> None:
    engine = shared()
    waiting = engine.add(REQUESTS[0])
    engine.engines[1]._failure = RuntimeError("no device")
    with pytest.raises(EngineError, match="no device"):
        list(follow(engine, waiting))


@pytest.mark.parametrize("prefill_only", [False, True])
def test_a_beginning_known_to_one_engine_does_not_leave_the_other_idle(prefill_only: bool) -> None:
    engine = replicas(config=dataclasses.replace(CONFIG, slots=8, prefill_only=prefill_only))
    decode(engine, REQUESTS[1:2])
    by_engine = entered(engine)
    engine.add_all([Request((*PROMPTS[1], 5), 4, index=place) for place in range(6)])
    engine.step()
    assert by_engine == {0: [0, 1, 3, 4], 1: [2, 5]}
    drain(engine, collections.defaultdict(list))
