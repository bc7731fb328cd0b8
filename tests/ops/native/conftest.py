"""Every test with the fixture `kernels` runs once per instruction set of this machine."""

import ctypes
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from peagle.ops import native
from peagle.ops.errors import InputError
from peagle.ops.native.build import instruction_sets

CANNOT = ("this CPU runs", "kernels are for CPUs")  # only these skip a test; a set that was not compiled fails it
SIMPLER = {"avx512": "avx512vnni"}  # a set, and the one that differs by products of bytes alone

IN_TURN = "in_turn"  # in the place of an instruction set in the names of XLA's calls
HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)  # XLA_FFI_Error* (XLA_FFI_CallFrame*)
selected: dict[str, Any] = {}
forwarders: dict[str, Any] = {}


def select(isa: str) -> None:
    """Let XLA's calls of the names IN_TURN run a set's kernels, which share every compiled program so."""
    library = native._open(isa)
    for name in native.HANDLERS:
        handler = getattr(library, f"peagle_{name}")
        handler.restype, handler.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
        selected[name] = handler
        if name not in forwarders:
            forwarders[name] = HANDLER(lambda frame, name=name: selected[name](frame))
            jax.ffi.register_ffi_target(f"peagle_{name}_{IN_TURN}", jax.ffi.pycapsule(forwarders[name]), platform="cpu")


@pytest.fixture(params=list(instruction_sets()))
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Select an instruction set.

    A module of operations without matrices sets NO_MATRICES: the two sets of SIMPLER share their code, which runs once.
    """
    monkeypatch.delenv(native.VARIABLE, raising=False)
    native.status.cache_clear()
    if getattr(request.module, "NO_MATRICES", False) and SIMPLER.get(request.param) == native.status()[0]:
        pytest.skip(f"{native.status()[0]}, which this CPU runs, is the same here")
    monkeypatch.setenv(native.VARIABLE, request.param)
    native.status.cache_clear()
    try:
        isa, line = native.status()
    except InputError as error:
        if any(words in str(error) for words in CANNOT):
            pytest.skip(f"{request.param}: {error}")
        raise
    assert isa == request.param
    select(isa)
    with monkeypatch.context() as patch:
        patch.setattr(native, "status", lambda: (IN_TURN, line))
        yield isa
    native.status.cache_clear()
