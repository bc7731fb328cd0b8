"""Call the compiled CPU kernels through XLA's FFI, for the instruction set of this machine.

    kernels.h                   their interface: what each computes
    linear.cc experts.cc attention.cc rope.cc likeliest.cc draw.cc   the kernels
    packed.h vectors.h          products with packed matrices; vector registers
    ffi.cc thread_team.h        XLA's entry: checks shapes, shares work among threads
    build.py                    compiles them
    self_test.py                compares those for avx512amx with float64 before their first use

Only the ops of peagle.ops call them, for weights in packed matrices (peagle.ops.linear).

    PEAGLE_KERNELS          an instruction set, whose kernels run or raise an error; or xla, for XLA's own code
    PEAGLE_KERNELS_DIR      the folder of another build of the libraries
"""

import ctypes
import functools
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from peagle.base.errors import InputError, InputWarning
from peagle.ops.native.build import HERE, instruction_sets, library
from peagle.ops.native.self_test import UNTESTED, find_fault

HANDLERS = ("linear", "experts", "paged_attention", "rope_tables", "likeliest", "draw", "put_rows")
VARIABLE = "PEAGLE_KERNELS"
DIRECTORY = "PEAGLE_KERNELS_DIR"
XLA = "xla"


@functools.cache
def status() -> tuple[str | None, str]:
    """Choose the kernels once; return (their instruction set or None for XLA's own code, a line with the reason).

    Raises InputError if PEAGLE_KERNELS names kernels that do not run here.
    """
    choice = os.environ.get(VARIABLE, "")
    if choice not in ("", XLA, *instruction_sets()):
        raise InputError(f"{VARIABLE} is {choice!r}; expected {', '.join([*instruction_sets(), XLA])}, or nothing")
    if wants_xla():
        return None, f"XLA ({VARIABLE}={XLA})"
    isa, said = _choose(choice)
    if isa is None and choice:
        raise InputError(f"{VARIABLE} is {choice!r}, but {said}")
    return (isa, f"native, {isa}{said}") if isa else (None, f"XLA: {said}")


def wants_xla() -> bool:
    return os.environ.get(VARIABLE, "") == XLA


def available() -> bool:
    """Whether the native kernels run here: on a CPU, compiled, and not disabled by PEAGLE_KERNELS."""
    return status()[0] is not None


def call(name: str, result: Any, *operands: Any, in_place: dict[int, int] | None = None, **attributes: Any) -> Any:
    """Call a kernel; return its results, of the shapes in `result`.

    in_place: maps an operand to the result that reuses its memory. Raises InputError if the kernels do not run here.
    """
    isa, line = status()
    if isa is None:
        why = line.removeprefix("XLA: ")
        raise InputError(f"the native kernels do not run here ({why}); load the weights with kernels='xla'")
    kernel = jax.ffi.ffi_call(f"peagle_{name}_{isa}", result, input_output_aliases=in_place)
    return kernel(*operands, **attributes)


def optional(values: jax.Array | None, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Make the operand for an optional vector: its values in `dtype`, or an empty array."""
    return jnp.zeros((0,), dtype) if values is None else values.astype(dtype).reshape(-1)


def compiled() -> bool:
    """Whether kernels were compiled for any CPU, whether or not they load here."""
    return bool(_built())


def _built() -> list[str]:
    return [isa for isa in instruction_sets() if _library(isa).exists()]


def _choose(choice: str) -> tuple[str | None, str]:
    """Return (the instruction set, or None; a note on the set, or the reason for None)."""
    if jax.default_backend() != "cpu":
        return None, f"the native kernels are for CPUs, this is {jax.default_backend()}"
    built = _built()
    # -P: the installed package, even in a checkout of the project
    again = f"{sys.executable} -P -m peagle.ops.native compiles them, given a C++ compiler"
    if "portable" not in built:
        return None, f"the native kernels were not compiled; {again}"
    if choice and choice not in built:
        return None, f"the kernels for {choice} were not compiled; {again.replace('compiles', '--all compiles')}"
    order = list(instruction_sets())
    try:
        machine = open_library("portable").peagle_machine
        machine.restype = ctypes.c_char_p
        best = machine().decode()
        runs = [isa for isa in order[order.index(best) :] if isa in built]
        if choice and choice not in runs:
            return None, f"this CPU runs {', '.join(runs)} only"
        isa = choice or runs[0]
        _register(isa)
        if isa in UNTESTED and (fault := find_fault(isa)):
            failed = f"the kernels for {isa} fail their check ({fault})"
            if choice:
                return None, f"{failed}; leave {VARIABLE} out"
            isa = runs[1]
            _register(isa)
            warnings.warn(f"{failed}; those for {isa} run", InputWarning, stacklevel=2)
            return isa, f" ({failed})"
    except Exception as error:  # a library for another system, or for another version of XLA's FFI
        return None, f"the native kernels do not load ({' '.join(str(error).split())[:200]}); {again}"
    return isa, "" if choice or isa == best else f" (those for {best} were not compiled; {again})"


def _library(isa: str) -> Path:
    return library(isa, Path(os.environ.get(DIRECTORY) or HERE))


def open_library(isa: str) -> ctypes.CDLL:
    """Open the compiled kernels of an instruction set."""
    return ctypes.CDLL(str(_library(isa)))


def _register(isa: str) -> None:
    opened = open_library(isa)
    for name in HANDLERS:
        handler = jax.ffi.pycapsule(getattr(opened, f"peagle_{name}"))
        jax.ffi.register_ffi_target(f"peagle_{name}_{isa}", handler, platform="cpu")
