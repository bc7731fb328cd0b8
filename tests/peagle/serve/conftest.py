"""A server over the toy pair, in the test's process."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from peagle.api import Pair
from peagle.serve.app import Service, create_app
from peagle.serve.loop import EngineLoop
from peagle.serve.prompts import Prompter
from peagle.text.tokenizer import ByteLevelTokenizer
from tests.peagle.conftest import toy_pair

CONTEXT, SLOTS, K = 256, 2, 3
MODEL = "toy"
DATE = "2025-08-05"


def service_of(pair: Pair, max_queue: int = 64, k: int = K, **options: Any) -> Service:
    # several tests have engines of one shape, and each engine has one driver
    pair._engines.clear()
    engine = pair.engine(pair.engine_config(k, capacity=CONTEXT, slots=SLOTS, prefix_cache_bytes=1_000_000))
    return Service(EngineLoop(engine, max_queue), Prompter(pair, CONTEXT, DATE), MODEL, **options)


def client_of(service: Service) -> TestClient:
    return TestClient(create_app(service), raise_server_exceptions=False)


@pytest.fixture(scope="session")
def shared(tokenizer: ByteLevelTokenizer) -> Iterator[Service]:
    """One server for all tests that leave it as it was."""
    service = service_of(toy_pair(tokenizer))
    yield service
    service.loop.close()


@pytest.fixture
def client(shared: Service) -> TestClient:
    return client_of(shared)


@pytest.fixture
def make(tokenizer: ByteLevelTokenizer) -> Iterator[Callable[..., Service]]:
    """Make a server of one's own."""
    made: list[Service] = []

    def making(stops: tuple[int, ...] = (1,), **options: Any) -> Service:
        made.append(service_of(toy_pair(tokenizer, stops), **options))
        return made[-1]

    yield making
    for service in made:
        service.loop.close()
