"""The openai client, over real connections: what many clients get at once is what each gets alone."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from peagle.pair import Pair
from peagle.text.tokenizer import Tokenizer
from tests.peagle.answers.test_streams import most_at_once
from tests.support.pairs import toy_pair
from tests.support.running import Gate, Running, running
from tests.support.servers import CONTEXT, MODEL, K, service_of


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    service = service_of(toy_pair(tokenizer), keys=("secret",))
    with running(service) as served:
        yield served
    service.loop.close()


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0) as opened:
        yield opened


def test_many_at_once_get_what_each_gets_alone(
    server: Running, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: Pair = toy_pair(tokenizer)
    bodies: list[dict[str, Any]] = [
        {"prompt": [40 + number, 7, 50], "max_tokens": 10 + 9 * number, "temperature": 0.9 * (number % 2), "seed": 7}
        for number in range(8)
    ]
    options: dict[str, Any] = {"num_speculative_tokens": K, "context": CONTEXT, "seed": 7}
    expected = [
        alone.generate(
            body["prompt"], max_new_tokens=body["max_tokens"], temperature=body["temperature"], **options
        ).text
        for body in bodies
    ]
    gate = Gate(server.service)
    most = most_at_once(monkeypatch, server.service.loop.engine)

    async def ask(client: openai.AsyncOpenAI, fields: dict[str, Any], stream: bool) -> str:
        if not stream:
            return (await client.completions.create(model=MODEL, **fields)).choices[0].text
        chunks = await client.completions.create(model=MODEL, stream=True, **fields)
        return "".join([choice.text async for chunk in chunks for choice in chunk.choices])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0) as client:
            gate.close()
            tasks = [
                asyncio.create_task(ask(client, fields, stream=number % 3 == 0)) for number, fields in enumerate(bodies)
            ]
            while server.service.loop.num_open < len(tasks):
                await asyncio.sleep(0.002)
            gate.open()
            return await asyncio.gather(*tasks)

    assert asyncio.run(ask_all()) == expected
    assert most() == 2
    assert server.service.loop.num_open == 0
