"""Compile the CUDA kernels with NVRTC, NVIDIA's run-time compiler.

It needs no GPU, and takes some seconds. So the machine code is cached in the user's cache directory by source,
architecture and compiler version.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peagle.ops.files import cache_directory, keep

NAMES = ("common.cuh", "experts.cu", "attention.cu")
SOURCES = tuple(Path(__file__).parent / name for name in NAMES)
OPTIONS = (b"--std=c++17",)
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


class CudaError(Exception):
    """The GPU kernels do not run here; the message gives the reason."""


def compile_kernels(architecture: str) -> bytes:
    """Compile the kernels for an architecture, as sm_90, or read them from the cache.

    Raises CudaError with the compiler's first error.
    """
    nvrtc, source, options = library(), _together(SOURCES), [*OPTIONS, f"--gpu-architecture={architecture}".encode()]
    version = (ctypes.c_int * 2)()
    nvrtc.nvrtcVersion(ctypes.byref(version, 0), ctypes.byref(version, ctypes.sizeof(ctypes.c_int)))
    key = b"\0".join([bytes(version), *options, source])
    cached = cache_directory("cuda") / f"{hashlib.sha256(key).hexdigest()}.cubin"
    with contextlib.suppress(OSError):
        return cached.read_bytes()
    cubin = _compile(nvrtc, source, options, architecture)
    keep(cached, cubin)  # if this fails, the next run compiles again
    return cubin


def _together(sources: tuple[Path, ...]) -> bytes:
    return "".join(f'#line 1 "{path.name}"\n{path.read_text(encoding="utf-8")}' for path in sources).encode()


def _compile(nvrtc: ctypes.CDLL, source: bytes, options: list[bytes], architecture: str) -> bytes:
    program = ctypes.c_void_p()

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(nvrtc, name)(*arguments):
            said = _text(nvrtc, program, "ProgramLog").decode(errors="replace") if program else ""
            errors = [line for line in said.splitlines() if "error" in line]
            raise CudaError(f"NVRTC for {architecture}: {errors[0] if errors else _meaning(nvrtc, code)}")

    call("nvrtcCreateProgram", ctypes.byref(program), source, b"kernels", 0, None, None)
    try:
        call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
        return _text(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def library() -> ctypes.CDLL:
    """Load NVRTC from NVIDIA's Python packages (JAX's for CUDA bring them), else the system's. Raises CudaError."""
    for name in [*_packaged(), *_NAMES]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CudaError("NVRTC, which compiles the GPU kernels, was not found; pip install nvidia-cuda-nvrtc brings it")


def _packaged() -> Iterator[str]:
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or []) if spec else []:
        yield from map(str, sorted(Path(location).glob("*/lib/libnvrtc.so.*"), reverse=True))


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.raw


def _meaning(nvrtc: ctypes.CDLL, code: int) -> str:
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    return str(nvrtc.nvrtcGetErrorString(code).decode())
