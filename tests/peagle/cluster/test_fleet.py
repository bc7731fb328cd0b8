"""A fleet answers as one server does; what is lost ends with an error object. Without Ray: replicas are loops here."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterator

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from peagle.api import Pair
from peagle.cluster.fleet import LOST, Fleet, ReplicaLost, Shape
from peagle.engine.engine import Role
from peagle.engine.handoff import parse
from peagle.engine.request import Request, TokenChunk
from peagle.ops.errors import InputError
from peagle.serve.app import Service
from peagle.serve.errors import ApiError
from peagle.serve.loop import EngineLoop
from peagle.serve.prompts import Prompter
from peagle.text.tokenizer import ByteLevelTokenizer
from tests.peagle.conftest import toy_pair
from tests.peagle.serve.conftest import CONTEXT, DATE, MODEL, SLOTS, K, client_of, service_of

BODY = {"model": MODEL, "prompt": [5, 9, 2, 11], "max_tokens": 24, "temperature": 0, "logprobs": 2}


class Loops:
    """Replicas in this process; `loses` names calls that are lost."""

    def __init__(self, pair: Pair, disaggregated: bool) -> None:
        self.disaggregated = disaggregated
        self.loses: list[str] = []
        self.decodes = self._loop(pair, "decode" if disaggregated else "both")
        self.prefills = self._loop(pair, "prefill") if disaggregated else self.decodes

    @staticmethod
    def _loop(pair: Pair, role: Role) -> EngineLoop:
        return EngineLoop(pair.engine(pair.engine_config(K, capacity=CONTEXT, slots=SLOTS, role=role)), 64)

    def _lose(self, call: str) -> None:
        if call in self.loses:
            self.loses.remove(call)
            raise ReplicaLost(call)

    async def prefill(self, request: Request) -> tuple[TokenChunk, np.ndarray | None]:
        self._lose("prefill")
        call = self.prefills.submit([request])
        (chunk,) = [chunk async for _, chunk in call.chunks()]
        handle = call.jobs[0].handle
        assert handle is not None
        return chunk, None if handle.hand_off is None else handle.hand_off.data

    async def decode(self, request: Request, hand_off: np.ndarray | None) -> AsyncGenerator[TokenChunk, None]:
        self._lose("decode")
        call = self.decodes.submit([request], [None if hand_off is None else parse(hand_off)])
        try:
            async for _, chunk in call.chunks():
                yield chunk
                self._lose("decode in its midst")
        finally:
            call.close()

    def close(self) -> None:
        self.decodes.close()
        self.prefills.close()


@pytest.fixture
def client(tokenizer: ByteLevelTokenizer) -> Iterator[TestClient]:
    """One server, to compare with."""
    service = service_of(toy_pair(tokenizer))
    yield client_of(service)
    service.loop.close()


Make = Callable[..., tuple[Loops, Service]]


@pytest.fixture
def make(tokenizer: ByteLevelTokenizer) -> Iterator[Make]:
    made: list[Loops] = []

    def making(disaggregated: bool = True, most_open: int = 64) -> tuple[Loops, Service]:
        pair = toy_pair(tokenizer)
        loops = Loops(pair, disaggregated)
        made.append(loops)
        shape = Shape(pair.engine_config(K, capacity=CONTEXT, slots=SLOTS), pair.target.vocab_size)
        return loops, Service(Fleet(loops, shape, most_open), Prompter(pair, CONTEXT, DATE, K), MODEL)

    yield making
    for loops in made:
        loops.close()


def answer(client: TestClient, **changes: object) -> httpx.Response:
    return client.post("/v1/completions", json={**BODY, **changes})


@pytest.mark.parametrize("disaggregated", [True, False])
def test_a_fleet_answers_as_one_server_does(make: Make, client: TestClient, disaggregated: bool) -> None:
    """Text, log-probabilities, usage, figures of acceptance; streamed or not; one token alone; n of them."""
    _, service = make(disaggregated)
    fleet = client_of(service)
    for changes in ({}, {"n": 3, "temperature": 0.8, "seed": 4}, {"max_tokens": 1}, {"stop": ["a"]}):
        ours, theirs = answer(fleet, **changes).json(), answer(client, **changes).json()
        for name in ("choices", "metrics"):
            assert ours.get(name) == theirs.get(name), (changes, name)
    streamed = answer(fleet, stream=True).text
    assert streamed.count("data: ") > 2
    assert streamed.endswith("data: [DONE]\n\n")
    assert service.loop.num_running == 0


def test_a_lost_prefill_is_repeated(make: Make, client: TestClient) -> None:
    loops, service = make()
    loops.loses += ["prefill"] * 2
    assert answer(client_of(service)).json()["choices"] == answer(client).json()["choices"]
    loops.loses += ["prefill"] * 3
    reply = answer(client_of(service))
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, LOST)


@pytest.mark.parametrize("where", ["decode", "decode in its midst"])
def test_a_lost_decode_ends_its_answer_with_an_error_and_no_other(make: Make, where: str) -> None:
    loops, service = make()
    fleet = client_of(service)
    loops.loses.append(where)
    reply = answer(fleet)
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, LOST)
    loops.loses.append(where)
    streamed = answer(fleet, stream=True).text
    assert LOST in streamed
    assert answer(fleet).status_code == 200
    assert service.loop.num_running == 0


def test_too_many_requests_and_what_no_fleet_computes_are_refused(make: Make) -> None:
    _, service = make(most_open=2)
    fleet = client_of(service)
    assert answer(fleet, n=3, temperature=1).status_code == 429
    refused = answer(fleet, echo=True)
    assert (refused.status_code, "by a fleet" in refused.text) == (400, True)
    assert answer(fleet, max_tokens=10_000).status_code == 400


def test_an_aborted_call_ends_in_its_engine(make: Make) -> None:
    loops, service = make()

    async def leave() -> None:
        call = service.loop.submit([Request((5, 9), 200, stop_token_ids=())])
        async with contextlib.aclosing(call.chunks()) as chunks:
            async for _ in chunks:
                break
        call.close()
        while loops.decodes.num_open or service.loop.num_running:
            await asyncio.sleep(0.002)

    asyncio.run(asyncio.wait_for(leave(), 60))


def test_errors_cross_processes() -> None:
    """As Ray's own serialisation takes them."""
    error = ApiError(429, "full", "n", "many", 3)
    made, given = error.__reduce__()
    again = made(*given)
    assert (again.body(), again.status, again.retry_after_s) == (error.body(), 429, 3)


def test_a_request_that_fails_in_its_engine_ends_with_the_engines_error(make: Make) -> None:
    loops, service = make()

    async def refused(request: Request) -> tuple[TokenChunk, np.ndarray | None]:
        raise InputError(f"{request.name} is refused")

    loops.prefill = refused  # type: ignore[method-assign]
    reply = answer(client_of(service))
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "the prompt is refused")
    assert dataclasses.is_dataclass(service)
