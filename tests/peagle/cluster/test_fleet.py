"""A fleet answers as one server does; what is lost ends with an error object. Without Ray: replicas are loops here."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from peagle.base.errors import InputError
from peagle.cluster.affinity import Affinity
from peagle.cluster.fleet import LOADING, LOST, LOST_PROMPT, Fleet, ReplicaLost
from peagle.engine.host.handoff import parse
from peagle.engine.request import Request, StepRecord, TokenChunk
from peagle.ops.attention import PAGE_SIZE
from peagle.pair import Pair
from peagle.serve.engine_loop import EngineLoop, Loop
from peagle.serve.errors import ApiError
from peagle.serve.request_builder import RequestBuilder
from peagle.serve.shared_state import SharedState
from peagle.text.tokenizer import Tokenizer
from tests.support.pairs import toy_pair
from tests.support.running import Gate
from tests.support.servers import COMPLETIONS, CONTEXT, DATE, MODEL, SLOTS, K, client_of, error_of, service_of, values

BODY = {"model": MODEL, "prompt": [5, 9, 2, 11], "max_tokens": 24, "temperature": 0, "logprobs": 2}


class Loops:
    """Replicas in this process; `loses` names calls that are lost. loading: they do not answer yet."""

    def __init__(self, make: Callable[[], Pair], disaggregated: bool, decoders: int = 1) -> None:
        self.disaggregated, self._make = disaggregated, make
        self.loses: list[str] = []
        self.loading = False
        self.decoders = [self.new_loop() for _ in range(decoders)]
        self.prefills = self.new_loop(prefill_only=True) if disaggregated else self.decodes
        self._affinity = Affinity[EngineLoop]()

    def new_loop(self, **options: bool) -> EngineLoop:
        pair = self._make()
        config = pair.engine_config(K, context=CONTEXT, slots=SLOTS, prefix_cache=1_000_000, **options)
        return EngineLoop(pair.engine(config), 64)

    @property
    def decodes(self) -> EngineLoop:
        return self.decoders[0]

    def _preferred(self, prompt_ids: Sequence[int]) -> EngineLoop | None:
        return self._affinity.prefer(prompt_ids, {loop: loop.num_open for loop in self.decoders})

    def knows(self, prompt_ids: Sequence[int]) -> bool:
        return self._preferred(prompt_ids) is not None

    def note_answer(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        self._affinity.note_answer(prompt_ids, answer_ids)

    def _lose(self, call: str) -> None:
        if call in self.loses:
            self.loses.remove(call)
            raise ReplicaLost(call)

    async def ping(self) -> None:
        self._lose("ping")
        while self.loading:
            await asyncio.sleep(0.01)

    async def prefill(self, request: Request) -> tuple[TokenChunk, np.ndarray | None]:
        self._lose("prefill")
        call = self.prefills.submit([request])
        (chunk,) = [chunk async for _, chunk in call.chunks()]
        handle = call.jobs[0].handle
        assert handle is not None
        return chunk, None if handle.hand_off is None else handle.hand_off.data

    async def decode(self, request: Request, hand_off: np.ndarray | None) -> AsyncGenerator[TokenChunk, None]:
        self._lose("decode")
        decodes = self._preferred(request.prompt_ids)
        if decodes is None:
            self.decoders.append(decodes := self.decoders.pop(0))  # in turn
        self._affinity.note(request.prompt_ids, decodes)
        call = decodes.submit([request], [None if hand_off is None else parse(hand_off)])
        del hand_off
        try:
            async for _, chunk in call.chunks():
                yield chunk
                self._lose("decode in its midst")
        finally:
            call.close()

    def close(self) -> None:
        for loop in {*self.decoders, self.prefills}:
            loop.close()


@pytest.fixture
def client(tokenizer: Tokenizer) -> Iterator[TestClient]:
    """One server, to compare with."""
    service = service_of(toy_pair(tokenizer))
    yield client_of(service)
    service.loop.close()


Make = Callable[..., tuple[Loops, SharedState]]


@pytest.fixture
def make(tokenizer: Tokenizer) -> Iterator[Make]:
    fleets: list[Loops] = []

    def making(
        disaggregated: bool = True, most_open: int = 64, patience_s: float = 60.0, decoders: int = 1
    ) -> tuple[Loops, SharedState]:
        pair = toy_pair(tokenizer)
        loops = Loops(lambda: toy_pair(tokenizer), disaggregated, decoders)
        fleets.append(loops)
        config = pair.engine_config(K, context=CONTEXT, slots=SLOTS)
        fleet = Fleet(loops, pair, config, most_open, patience_s)
        asyncio.run(fleet.probe())
        return loops, SharedState(fleet, RequestBuilder(pair, CONTEXT, DATE, K), MODEL)

    yield making
    for loops in fleets:
        loops.close()


def answer(client: TestClient, **changes: object) -> httpx.Response:
    return client.post(COMPLETIONS, json={**BODY, **changes})


@pytest.mark.parametrize("disaggregated", [True, False])
def test_a_fleet_answers_as_one_server_does(make: Make, client: TestClient, disaggregated: bool) -> None:
    """Text, also by a grammar, log-probabilities, figures of acceptance; streamed or not; one token; n; metrics."""
    _, service = make(disaggregated)
    fleet = client_of(service)
    sampled, guided = {"n": 3, "temperature": 0.8, "seed": 4}, {"guided_regex": "[a-c]{30}", "logprobs": None}
    for changes in ({}, sampled, {"max_tokens": 1}, {"stop": ["#$%"]}, guided):
        ours, theirs = answer(fleet, **changes).json(), answer(client, **changes).json()
        for name in ("choices", "metrics"):
            assert ours.get(name) == theirs.get(name), (changes, name)
    in_fleet, alone = values(fleet), values(client)
    counters = {key for key in in_fleet if key[0].startswith("vllm:") and key[0].endswith(("_total", "_count"))}
    counters -= {("vllm:prefix_cache_hits_total",), ("vllm:inter_token_latency_seconds_count",)}
    assert {key: in_fleet[key] for key in counters} == {key: alone[key] for key in counters}
    length, stop = (in_fleet["vllm:request_success_total", reason] for reason in ("length", "stop"))
    assert in_fleet["vllm:request_queue_time_seconds_count",] == length + stop > stop == 1
    assert 0 < in_fleet["vllm:request_queue_time_seconds_sum",] < in_fleet["vllm:time_to_first_token_seconds_sum",]
    streamed = answer(fleet, stream=True).text
    assert streamed.count("data: ") > 2
    assert streamed.endswith("data: [DONE]\n\n")
    assert service.loop.num_running == 0


def test_while_its_replicas_load_a_fleet_says_so_everywhere_and_answers_afterwards(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health, metrics and requests agree; a request waits a moment, not for minutes.

    Another model is refused at once.
    """
    loops, service = make()
    fleet, client = service.loop, client_of(service)
    assert isinstance(fleet, Fleet)
    monkeypatch.setattr("peagle.cluster.fleet.LOADING_PATIENCE_S", 0.1)

    def probe() -> None:
        asyncio.run(fleet.probe(within_s=0.1))

    for lost in ([], ["ping"]):  # the first replica loads; a replica is lost, and another one loads
        loops.loading, loops.loses = True, list(lost)
        probe()
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert int(health.headers["retry-after"]) >= 1
        for stream in (False, True):
            reply = answer(client, stream=stream, logprobs=None)
            assert (reply.status_code, reply.json()["error"]["message"]) == (503, LOADING)
            assert int(reply.headers["retry-after"]) >= 1
        assert answer(client, model="another").status_code == 404
        assert client.post("/tokenize", json={"prompt": "ab"}).status_code == 200
        assert "\npeagle:ready 0.0\n" in client.get("/metrics").text
        loops.loading = False
        probe()
        assert (client.get("/health").status_code, answer(client).status_code) == (200, 200)
        assert "\npeagle:ready 1.0\n" in client.get("/metrics").text


def test_a_fleet_finds_its_replicas_as_they_come_and_go(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that came before the first replica is answered by it. One lost replica of several changes nothing."""
    loops, service = make()
    fleet = service.loop
    assert isinstance(fleet, Fleet)
    for name in ("PROBE_S", "RETRY_S"):
        monkeypatch.setattr(f"peagle.cluster.fleet.{name}", 0.01)

    async def come_and_go() -> None:
        loops.loading = True
        await fleet.probe(within_s=0.05)
        watching, waiting = (asyncio.create_task(task) for task in (fleet.watch(), fleet.expect_ready()))
        await asyncio.sleep(0.05)
        assert (fleet.status, waiting.done()) == ("loading", False)
        loops.loading = False
        await waiting
        assert fleet.status == "ok"
        loops.loses.append("ping")
        while loops.loses:
            assert fleet.status == "ok"
            await asyncio.sleep(0.002)
        watching.cancel()

    asyncio.run(asyncio.wait_for(come_and_go(), 60))


def test_a_lost_prefill_is_repeated(make: Make, client: TestClient) -> None:
    loops, service = make()
    loops.loses += ["prefill"] * 2
    assert answer(client_of(service)).json()["choices"] == answer(client).json()["choices"]
    loops.loses += ["prefill"] * 3
    assert error_of(answer(client_of(service)), 503)["message"] == LOST_PROMPT


async def ask(loop: Loop, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], list[StepRecord], int]:
    """Return (tokens, steps, cached tokens of the prompt)."""
    call = loop.submit([Request(prompt, PAGE_SIZE, stop_token_ids=())])
    chunks = [chunk async for _, chunk in call.chunks()]
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    return tokens, [step for chunk in chunks for step in chunk.steps], chunks[0].num_cached_tokens


@pytest.mark.parametrize("decoders", [1, 2])
def test_a_next_turn_goes_where_the_answer_is(make: Make, tokenizer: Tokenizer, decoders: int) -> None:
    """It finds as many cached tokens as on one server, also after long answers. A lost replica costs only these."""
    alone, (loops, service) = service_of(toy_pair(tokenizer)), make(decoders=decoders)

    async def turns(first: int, lost_before: int | None) -> list[int]:
        prompt, missing = (first, *range(40, 60)), []
        for turn in range(3):
            if turn == lost_before:
                for loop in loops.decoders:
                    loop.close()
                loops.decoders = [loops.new_loop() for _ in range(decoders)]
            *expected, known_alone = await ask(alone.loop, prompt)
            *answer, known = await ask(service.loop, prompt)
            assert answer == expected
            missing.append(known_alone - known)
            prompt += (*answer[0], 5, 6)
        return missing

    async def conversations() -> None:
        for first in (7, 8):
            assert await turns(first, None) == [0, 0, 0]
        assert await turns(9, 2) == [0, 0, 2 * PAGE_SIZE]
        loops.loses.append("decode")  # of a turn that is known: it is computed elsewhere
        assert await turns(9, None) == [0, 0, 0]

    asyncio.run(asyncio.wait_for(conversations(), 60))
    alone.loop.close()


@pytest.mark.parametrize("where", ["decode", "decode in its midst"])
def test_a_lost_decode_ends_its_answer_with_an_error_and_no_other(make: Make, where: str) -> None:
    loops, service = make()
    fleet = client_of(service)
    loops.loses.append(where)
    assert error_of(answer(fleet), 503)["message"] == LOST
    loops.loses.append(where)
    streamed = answer(fleet, stream=True).text
    assert LOST in streamed
    assert answer(fleet).status_code == 200
    assert service.loop.num_running == 0


def test_too_many_requests_and_what_no_fleet_computes_are_refused(make: Make) -> None:
    _, service = make(most_open=2)
    fleet = client_of(service)
    assert "at most 2" in error_of(answer(fleet, n=3, temperature=1))["message"]

    async def while_one_is_open() -> None:
        request = Request((5, 9), 200, stop_token_ids=())
        call = service.loop.submit([request])
        with pytest.raises(ApiError) as full:
            service.loop.submit([request, request])
        assert full.value.status == 429
        call.close()

    asyncio.run(while_one_is_open())
    assert "by a fleet" in error_of(answer(fleet, echo=True))["message"]
    assert error_of(answer(fleet, max_tokens=10_000))["param"] == "max_tokens"


def test_an_aborted_call_ends_in_its_engine(make: Make) -> None:
    """Without a step: the engine that decodes is held until the call has ended."""
    loops, service = make()
    gate = Gate(SharedState(loops.decodes, service.builder, MODEL))
    gate.close()

    async def leave() -> None:
        call = service.loop.submit([Request((5, 9), 200, stop_token_ids=())])
        async with contextlib.aclosing(call.chunks()) as chunks:
            await anext(chunks)
            while not loops.decodes.num_open:
                await asyncio.sleep(0.002)
        call.close()
        while service.loop.num_running:
            await asyncio.sleep(0.002)
        gate.open()
        while loops.decodes.num_open:
            await asyncio.sleep(0.002)

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert gate.dispatched == []


def test_errors_cross_processes() -> None:
    """As Ray's own serialisation takes them."""
    error = ApiError(429, "full", "n", "many", 3)
    kind, arguments = error.__reduce__()
    again = kind(*arguments)
    assert (again.body(), again.status, again.retry_after_s) == (error.body(), 429, 3)


def test_a_request_that_fails_in_its_engine_ends_with_the_engines_error(make: Make) -> None:
    loops, service = make()

    async def refused(request: Request) -> tuple[TokenChunk, np.ndarray | None]:
        raise InputError(f"{request.name} is refused")

    loops.prefill = refused  # type: ignore[method-assign]
    assert error_of(answer(client_of(service)))["message"] == "the prompt is refused"
    assert service.loop.num_running == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_stops_without_an_end_is_an_error_and_no_hang(make: Make, stream: bool) -> None:
    """A process that was told to stop ends its streams, or cancels them; nobody waits for what never comes."""
    loops, service = make()

    async def ends(request: Request, _: np.ndarray | None) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk(request, (8,), 0.0)

    async def cancelled(request: Request, _: np.ndarray | None) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk(request, (8,), 0.0)
        raise asyncio.CancelledError

    for decode in (ends, cancelled):
        loops.decode = decode  # type: ignore[method-assign]
        reply = answer(client_of(service), stream=stream, logprobs=None)
        assert LOST in reply.text
        assert reply.status_code == (200 if stream else 503)
    assert service.loop.num_running == 0


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_if_no_replica_answers_an_error_comes_in_time(make: Make, where: str) -> None:
    loops, service = make(patience_s=0.2)

    async def never(*_: object) -> Any:
        await asyncio.sleep(3600)

    async def never_decoded(*_: object) -> AsyncGenerator[TokenChunk, None]:
        yield await never()

    setattr(loops, where, {"prefill": never, "decode": never_decoded}[where])
    error = error_of(answer(client_of(service)), 503)
    assert "no process of the fleet has answered for 0.2 seconds" in error["message"]
    assert service.loop.num_running == 0


def test_a_hand_off_is_dropped_once_its_request_decodes(make: Make) -> None:
    """It is as large as the prompt's caches, and its answer may take minutes."""
    loops, service = make()
    messages: list[weakref.ref[np.ndarray]] = []
    prefill = loops.prefill

    async def watched(request: Request) -> tuple[TokenChunk, np.ndarray | None]:
        chunk, message = await prefill(request)
        assert message is not None
        messages.append(weakref.ref(message))
        return chunk, message

    loops.prefill = watched  # type: ignore[method-assign]

    async def begin() -> None:
        call = service.loop.submit([Request((5, 9), 200, stop_token_ids=())])
        async with contextlib.aclosing(call.chunks()) as chunks:
            await anext(chunks)
            await anext(chunks)
            gc.collect()
            assert messages[0]() is None
        call.close()

    asyncio.run(asyncio.wait_for(begin(), 60))
