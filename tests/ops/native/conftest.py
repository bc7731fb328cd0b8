"""Every test that asks for `kernels` runs once per instruction set of this machine."""

from collections.abc import Iterator

import pytest

from peagle.ops import native
from peagle.ops.errors import InputError
from peagle.ops.native.build import instruction_sets

CANNOT = ("this CPU runs", "kernels are for CPUs")  # a set that is not compiled is no reason to skip


@pytest.fixture(params=list(instruction_sets()))
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The instruction set in use. Kernels are called by names that contain it, so operations that are not jitted as a
    whole are never those of another set."""
    monkeypatch.setenv(native.VARIABLE, request.param)
    native.status.cache_clear()
    try:
        assert native.status()[0] == request.param
    except InputError as error:
        if any(words in str(error) for words in CANNOT):
            pytest.skip(f"{request.param}: {error}")
        raise
    yield request.param
    native.status.cache_clear()
