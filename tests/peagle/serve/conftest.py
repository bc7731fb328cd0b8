"""A server over the toy pair, in the test's process."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from peagle.serve.service import Service
from peagle.text.tokenizer import ByteLevelTokenizer, load_tokenizer
from tests.support.pairs import toy_pair, write_tokenizer
from tests.support.servers import HARMONY_SPECIALS, HARMONY_TEMPLATE, client_of, service_of


@pytest.fixture(scope="session")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> ByteLevelTokenizer:
    """A tokenizer with the control tokens of calls, and a chat template that writes what a GPT-OSS reads."""
    directory = tmp_path_factory.mktemp("harmony")
    write_tokenizer(directory, HARMONY_SPECIALS, HARMONY_TEMPLATE)
    loaded = load_tokenizer(directory)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def shared(tokenizer: ByteLevelTokenizer) -> Iterator[Service]:
    """One server for all tests that leave it as it was."""
    service = service_of(toy_pair(tokenizer))
    yield service
    service.loop.close()


@pytest.fixture(scope="session")
def client(shared: Service) -> Iterator[TestClient]:
    """Its client, whose event loop serves all requests: else each starts a loop in a thread of its own."""
    with client_of(shared) as client:
        yield client


@pytest.fixture
def make(tokenizer: ByteLevelTokenizer) -> Iterator[Callable[..., Service]]:
    """Make a server of one's own."""
    services: list[Service] = []

    shared_tokenizer = tokenizer

    def making(
        stops: tuple[int, ...] = (1,), tokenizer: ByteLevelTokenizer = shared_tokenizer, **options: Any
    ) -> Service:
        services.append(service_of(toy_pair(tokenizer, stops), **options))
        return services[-1]

    yield making
    for service in services:
        service.loop.close()
