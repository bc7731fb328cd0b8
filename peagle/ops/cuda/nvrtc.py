"""Compile the CUDA kernels with NVRTC, NVIDIA's run-time compiler.

It takes some seconds and needs no GPU. The machine code is cached in the user's cache directory by source,
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

from peagle.base.files import cache_directory, write_cached

HERE = Path(__file__).parent
NAMES = ("common.cuh", "linear.cu", "experts.cu", "attention.cu")
HOPPER, HOPPER_NAMES = "sm_90a", ("experts_hopper.h", "hopper.cuh", "products", "experts_hopper.cu")
WIDTHS = (8, 16, 32, 48, 64, 80, 96, 144)  # N of Product<N>, which experts_hopper.h uses
OPTIONS = (b"--std=c++17",)
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


class CudaError(Exception):
    """The GPU kernels do not run here; the message gives the reason."""


def compile_kernels(architecture: str) -> bytes:
    """Compile the kernels for an architecture such as sm_90, or read them from the cache.

    Raises CudaError with the compiler's first error.
    """
    nvrtc, source, options = library(), sources(architecture), [*OPTIONS, f"--gpu-architecture={architecture}".encode()]
    version = (ctypes.c_int * 2)()
    nvrtc.nvrtcVersion(ctypes.byref(version, 0), ctypes.byref(version, ctypes.sizeof(ctypes.c_int)))
    key = b"\0".join([bytes(version), *options, source])
    cached = cache_directory("cuda") / f"{hashlib.sha256(key).hexdigest()}.cubin"
    with contextlib.suppress(OSError):
        return cached.read_bytes()
    cubin = _compile(nvrtc, source, options, architecture)
    write_cached(cached, cubin)  # if this fails, the next run compiles again
    return cubin


def sources(architecture: str) -> bytes:
    names = NAMES + (HOPPER_NAMES if architecture == HOPPER else ())
    texts = (products() if name == "products" else (HERE / name).read_text(encoding="utf-8") for name in names)
    return "".join(f'#line 1 "{name}"\n{text}' for name, text in zip(names, texts, strict=True)).encode()


def products() -> str:
    """Generate Product<N>: sums [64, N] (+)= weights [64, 16] x rows [16, N], because its instruction names registers.

    Sums and weights are in a warpgroup's registers. `rows` is a matrix descriptor of shared memory; `add` is 0 in the
    first product of a sum.
    """
    return "namespace tiles {\ntemplate <int N>\nstruct Product;\n" + "".join(map(_product, WIDTHS)) + "}\n"


def _product(width: int) -> str:
    count = width // 2
    names, sums = ", ".join(f"%{i}" for i in range(count)), ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    weights = ", ".join(f"%{count + i}" for i in range(4))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16"
    return f"""template <>
struct Product<{width}> {{
  static __device__ __forceinline__ void Add(float (&sums)[{count}], unsigned a, unsigned b, unsigned c, unsigned d,
                                             unsigned long long rows, int add) {{
    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n"
                 "{instruction} {{{names}}}, {{{weights}}}, %{count + 4}, p, 1, 1, 0;\\n}}"
                 : {sums}
                 : "r"(a), "r"(b), "r"(c), "r"(d), "l"(rows), "r"(add));
  }}
}};
"""


def _compile(nvrtc: ctypes.CDLL, source: bytes, options: list[bytes], architecture: str) -> bytes:
    program = ctypes.c_void_p()

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(nvrtc, name)(*arguments):
            said = text_of(nvrtc, program, "ProgramLog").decode(errors="replace") if program else ""
            errors = [line for line in said.splitlines() if "error" in line]
            raise CudaError(f"NVRTC for {architecture}: {errors[0] if errors else _meaning(nvrtc, code)}")

    call("nvrtcCreateProgram", ctypes.byref(program), source, b"kernels", 0, None, None)
    try:
        call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
        return text_of(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def library() -> ctypes.CDLL:
    """Load NVRTC from NVIDIA's Python packages, which JAX for CUDA needs, else from the system. Raises CudaError."""
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


def text_of(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    """Read a program's log (what: "ProgramLog") or machine code ("CUBIN")."""
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.raw


def _meaning(nvrtc: ctypes.CDLL, code: int) -> str:
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    return str(nvrtc.nvrtcGetErrorString(code).decode())
