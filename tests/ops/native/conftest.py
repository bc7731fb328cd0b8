"""Every test with the fixture `kernels` runs once per instruction set of this machine."""

from collections.abc import Iterator

import pytest

from peagle.ops import native
from peagle.ops.errors import InputError
from peagle.ops.native.build import instruction_sets

CANNOT = ("this CPU runs", "kernels are for CPUs")  # only these skip a test; a set that was not compiled fails it
SIMPLER = {"avx512": "avx512vnni"}  # a set, and the one that differs by products of bytes alone


@pytest.fixture(params=list(instruction_sets()))
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Select an instruction set. Kernels' names contain it, so JAX caches no operation for another set.

    A module of operations without matrices sets NO_MATRICES: the two sets of SIMPLER share their code, which runs once.
    """
    monkeypatch.delenv(native.VARIABLE, raising=False)
    native.status.cache_clear()
    if getattr(request.module, "NO_MATRICES", False) and SIMPLER.get(request.param) == native.status()[0]:
        pytest.skip(f"{native.status()[0]}, which this CPU runs, is the same here")
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
