"""The compiled CPU kernels, called through XLA's FFI: which there are, which this machine runs, and the call.

Sources: kernels.h (what they compute), linear.cc, experts.cc, attention.cc, rope.cc and likeliest.cc (how), with
panels.h (products with weights in panels) and vectors.h under them; ffi.cc and crew.h (checked and threaded, as XLA
calls them); build.py.
Whoever calls an op of peagle.ops never comes here: the ops do, for weights in panels (peagle.ops.linear).

    PEAGLE_KERNELS          an instruction set, whose kernels then run or it is an error; or xla, for XLA's own code
    PEAGLE_KERNELS_DIR      where the compiled libraries are, if not beside this file: another build of them
"""

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from peagle.ops.errors import InputError
from peagle.ops.native.build import HERE, instruction_sets, library

HANDLERS = ("linear", "experts", "decode_attention", "rope_tables", "likeliest")
VARIABLE = "PEAGLE_KERNELS"
DIRECTORY = "PEAGLE_KERNELS_DIR"
XLA = "xla"


@functools.cache
def status() -> tuple[str | None, str]:
    """(the instruction set of the kernels that run here, or None for XLA's own code; one line that says so, and why).

    Raises InputError where PEAGLE_KERNELS names what does not exist here.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", XLA, *instruction_sets()):
        raise InputError(f"{VARIABLE} is {wanted!r}; expected {', '.join([*instruction_sets(), XLA])}, or nothing")
    if wants_xla():
        return None, f"XLA ({VARIABLE}={XLA})"
    isa, said = _choose(wanted)
    if isa is None and wanted:
        raise InputError(f"{VARIABLE} is {wanted!r}, but {said}")
    return (isa, f"native, {isa}{said}") if isa else (None, f"XLA: {said}")


def wants_xla() -> bool:
    """Whether PEAGLE_KERNELS asks for XLA's own code, on whatever device."""
    return os.environ.get(VARIABLE, "") == XLA


def available() -> bool:
    """Whether the native kernels run here: the backend is a CPU, they were compiled, and nobody asked for XLA."""
    return status()[0] is not None


def call(name: str, result: Any, *operands: Any, in_place: dict[int, int] | None = None, **attributes: Any) -> Any:
    """The kernel's result or results, of the shapes in `result`; in_place: operand -> the result that takes its memory.
    Raises InputError where `available` is False."""
    isa, line = status()
    if isa is None:
        why = line.removeprefix("XLA: ")
        raise InputError(f"the native kernels do not run here ({why}); load the weights with kernels='xla'")
    kernel = jax.ffi.ffi_call(f"peagle_{name}_{isa}", result, input_output_aliases=in_place)
    return kernel(*operands, **attributes)


def optional(values: jax.Array | None, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """What a kernel takes for a vector that may be absent: its values in `dtype`, or nothing."""
    return jnp.zeros((0,), dtype) if values is None else values.astype(dtype).reshape(-1)


def _choose(wanted: str) -> tuple[str | None, str]:
    """(the instruction set or None; why there is none, or what is to be said of the one there is)."""
    if jax.default_backend() != "cpu":
        return None, f"the native kernels are for CPUs, this is {jax.default_backend()}"
    built = [isa for isa in instruction_sets() if _library(isa).exists()]
    # -P: in a checkout of the project the package that is installed, not the one of the folder
    again = f"{sys.executable} -P -m peagle.ops.native compiles them where a C++ compiler is"
    if "portable" not in built or (wanted and wanted not in built):
        return None, f"the native kernels were not compiled; {again}"
    order = list(instruction_sets())
    try:
        machine = _open("portable").peagle_machine
        machine.restype = ctypes.c_char_p
        best = machine().decode()
        runs = [isa for isa in order[order.index(best) :] if isa in built]
        if wanted and wanted not in runs:
            return None, f"this CPU runs {', '.join(runs)} only"
        isa = wanted or runs[0]
        _register(isa)
    except Exception as error:  # a library for another system, or for another version of XLA's FFI
        return None, f"the native kernels do not load ({' '.join(str(error).split())[:200]}); {again}"
    return isa, "" if wanted or isa == best else f" (those for {best} were not compiled; {again})"


def _library(isa: str) -> Path:
    return library(isa, Path(os.environ.get(DIRECTORY) or HERE))


def _open(isa: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(_library(isa)))


def _register(isa: str) -> None:
    opened = _open(isa)
    for name in HANDLERS:
        handler = jax.ffi.pycapsule(getattr(opened, f"peagle_{name}"))
        jax.ffi.register_ffi_target(f"peagle_{name}_{isa}", handler, platform="cpu")
