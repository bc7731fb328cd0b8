"""Commands in the test's process: on the toy pair, or on the models that they name."""

import functools
from collections.abc import Callable

import pytest

import peagle.cli.processes
from peagle.pair import Pair
from tests.support.commands import Captured, run


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], toy: Pair) -> Callable[..., Captured]:
    """Run a command on the toy pair: (exit code, standard output, standard error)."""

    def on_the_toy(command: str, *arguments: str, pair: Pair = toy) -> Captured:
        monkeypatch.setattr(peagle.cli.processes, "load_models", lambda *_, **__: pair)
        return run(capsys, command, "--target", "toy", *arguments)

    return on_the_toy


@pytest.fixture
def real(capsys: pytest.CaptureFixture[str]) -> Callable[..., Captured]:
    """Run a command on the models that it names."""
    return functools.partial(run, capsys)
