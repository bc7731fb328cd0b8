"""The kernels for NVIDIA GPUs, called through XLA's FFI: whether they run here.

Sources: common.cuh, experts.cu, attention.cu (what runs on the GPU), nvrtc.py (compiles it, for the device at hand),
launch.cc (checked and launched, as XLA calls it; compiled as the CPU kernels are, by peagle.ops.native.build), calls.py
(as JAX calls it), check.py (what they compute before they are used). Where anything fails XLA's own code runs instead,
and `status` says so.

PEAGLE_KERNELS=xla asks for XLA's own code here, too.
"""

import ctypes
import functools
from pathlib import Path

import jax

from peagle.ops import native
from peagle.ops.cuda.check import check
from peagle.ops.cuda.nvrtc import CudaError, compile_kernels
from peagle.ops.native.build import LAUNCHER

HANDLERS = ("experts", "decode_attention")
DRIVER = "libcuda.so.1"
_MAJOR = 8  # compute capability: bfloat16 tensor cores


@functools.cache
def status() -> tuple[bool, str]:
    """(whether the GPU kernels run here, one line that says so, or why they do not)."""
    if native.wants_xla():
        return False, f"XLA ({native.VARIABLE}={native.XLA})"
    try:
        if jax.default_backend() != "gpu":
            raise CudaError(f"the GPU kernels are for NVIDIA GPUs, this is {jax.default_backend()}")
        capability = _capability()
        open_kernels(LAUNCHER, DRIVER, compile_kernels("sm_" + capability.replace(".", "")), "CUDA")
        # whatever is being traced, and for whatever device
        with jax.default_device(jax.local_devices()[0]), jax.ensure_compile_time_eval():
            check()
    except Exception as error:  # a driver, a compiler or a library that is not as expected
        return False, f"XLA: {' '.join(str(error).split())[:200]}"
    return True, f"CUDA, compute capability {capability}"


def available() -> bool:
    """Whether the GPU kernels run here."""
    return status()[0]


def open_kernels(launcher: Path, driver: str, cubin: bytes, platform: str) -> None:
    """`calls` are of these kernels, on that platform, from here on. Raises CudaError."""
    if not launcher.exists():
        raise CudaError("what launches the GPU kernels was not compiled; python -m peagle.ops.native compiles it")
    opened = ctypes.CDLL(str(launcher))
    opened.peagle_cuda_open.restype = ctypes.c_char_p
    if said := opened.peagle_cuda_open(driver.encode(), cubin, ctypes.c_int64(len(cubin))):
        raise CudaError(said.decode())
    for name in HANDLERS:
        handler = jax.ffi.pycapsule(getattr(opened, f"peagle_cuda_{name}"))
        jax.ffi.register_ffi_target(f"peagle_cuda_{name}", handler, platform=platform)


def _capability() -> str:
    """That of the first device, as 9.0."""
    said = str(getattr(jax.local_devices()[0], "compute_capability", "unknown"))
    major = said.split(".")[0]
    if not major.isdecimal() or int(major) < _MAJOR:
        raise CudaError(f"the GPU kernels need compute capability {_MAJOR}.0 or more, this GPU's is {said}")
    return said
