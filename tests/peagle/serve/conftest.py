"""A server over the toy pair, in the test's process."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from peagle.serve.shared_state import SharedState
from peagle.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.harmony import prompt_of, says
from tests.support.pairs import toy_pair, write_tokenizer
from tests.support.servers import HARMONY_SPECIALS, HARMONY_TEMPLATE, client_of, service_of


@pytest.fixture(scope="session")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with the control tokens of calls, and a chat template that writes what a GPT-OSS reads."""
    directory = tmp_path_factory.mktemp("harmony")
    write_tokenizer(directory, HARMONY_SPECIALS, HARMONY_TEMPLATE)
    loaded = load_tokenizer(directory)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def prompt(harmony: Tokenizer) -> Callable[..., str]:
    """Decode the prompt of a chat or a response with these fields."""
    return functools.partial(prompt_of, harmony)


@pytest.fixture(scope="session")
def agent(harmony: Tokenizer) -> Iterator[TestClient]:
    """A client of one server whose chat template has tools; its answers are empty."""
    service = says(harmony)
    with client_of(service) as client:
        yield client
    service.loop.close()


@pytest.fixture(scope="session")
def shared(tokenizer: Tokenizer) -> Iterator[SharedState]:
    """One server for all tests that leave it as it was."""
    service = service_of(toy_pair(tokenizer))
    yield service
    service.loop.close()


@pytest.fixture(scope="session")
def client(shared: SharedState) -> Iterator[TestClient]:
    """Its client, whose event loop serves all requests: else each starts a loop in a thread of its own."""
    with client_of(shared) as client:
        yield client


@pytest.fixture
def closing() -> Iterator[Callable[[SharedState], SharedState]]:
    """Close the engines of services after the test."""
    services: list[SharedState] = []

    def keep(service: SharedState) -> SharedState:
        services.append(service)
        return service

    yield keep
    for service in services:
        service.loop.close()


@pytest.fixture
def make(tokenizer: Tokenizer, closing: Callable[[SharedState], SharedState]) -> Callable[..., SharedState]:
    """Make a server over the toy pair. options: of service_of."""

    def making(stops: tuple[int, ...] = (1,), **options: Any) -> SharedState:
        return closing(service_of(toy_pair(options.pop("tokenizer", tokenizer), stops), **options))

    return making


@pytest.fixture
def saying(harmony: Tokenizer, closing: Callable[[SharedState], SharedState]) -> Callable[..., SharedState]:
    """Make a server that gives these answers to these bodies (tests.support.harmony.says)."""
    return lambda *turns, **options: closing(says(harmony, *turns, **options))
