"""Call the CUDA kernels through XLA's FFI, if they run here.

    common.cuh, linear.cu, experts.cu, attention.cu   the kernels; experts_hopper.cu: those for Hopper GPUs only
    nvrtc.py     compiles them for this machine's GPU
    launch.cc    XLA's entry: checks shapes and launches; compiled with the CPU kernels (peagle.ops.native.build)
    calls.py     JAX's entry
    check.py     compares them with a reference before their first use
    graphs.py    lets XLA take a program's loops and branches into its CUDA graph

If any of this fails, XLA's own code runs instead, and `status` gives the reason. PEAGLE_KERNELS=xla disables the
kernels.
"""

import ctypes
import functools
from pathlib import Path

import jax

from peagle.base.errors import InputError
from peagle.ops import native
from peagle.ops.cuda.nvrtc import HOPPER, CudaError, compile_kernels
from peagle.ops.cuda.self_test import check
from peagle.ops.native.build import LAUNCHER

HANDLERS = ("linear", "experts", "expert_block", "paged_attention")
DRIVER = "libcuda.so.1"
_MAJOR = 8  # least compute capability, for bfloat16 tensor cores


@functools.cache
def status() -> tuple[bool, str]:
    """Open and check the kernels once; return (whether they run here, a line with their name or the reason)."""
    if native.wants_xla():
        return False, f"XLA ({native.VARIABLE}={native.XLA})"
    try:
        if jax.default_backend() != "gpu":
            raise CudaError(f"the GPU kernels are for NVIDIA GPUs, this is {jax.default_backend()}")
        capability = _capability()
        architecture = HOPPER if on_hopper(capability) else "sm_" + capability.replace(".", "")
        open_kernels(LAUNCHER, DRIVER, compile_kernels(architecture), "CUDA", tiles=architecture == HOPPER)
        # run on the GPUs now, even if the first call comes while a program is traced
        for device in jax.local_devices():
            with jax.default_device(device), jax.ensure_compile_time_eval():
                check(tiles=architecture == HOPPER)
    except Exception as error:  # an unexpected driver, compiler or library
        return False, f"XLA: {' '.join(str(error).split())[:200]}"
    return True, f"CUDA, compute capability {capability}"


def available() -> bool:
    return status()[0]


def has_tiles() -> bool:
    """Whether the kernels for Hopper GPUs run here."""
    return available() and on_hopper(_capability())


def on_hopper(capability: str) -> bool:
    """Whether a GPU of this compute capability is a Hopper GPU, for the kernels of experts_hopper.cu."""
    return capability == "9.0"


def unsupported(limits: str) -> InputError:
    """Make the error of an op whose CUDA kernels were chosen by name but cannot run. limits: of the operands."""
    runs, line = status()
    why = f"take these operands; expected {limits}" if runs else f"run here ({line.removeprefix('XLA: ')})"
    return InputError(f"the CUDA kernels do not {why}; leave the implementation out, or take 'xla'")


def open_kernels(launcher: Path, driver: str, cubin: bytes, platform: str, *, tiles: bool) -> None:
    """Open the kernels and register them for a platform. tiles: include those for Hopper GPUs. Raises CudaError."""
    if not launcher.exists():
        raise CudaError("the GPU kernels' launcher was not compiled; python -m peagle.ops.native compiles it")
    opened = ctypes.CDLL(str(launcher))
    opened.peagle_cuda_open.restype = ctypes.c_char_p
    if error := opened.peagle_cuda_open(driver.encode(), cubin, ctypes.c_int64(len(cubin)), ctypes.c_int(tiles)):
        raise CudaError(error.decode())
    register_kernels(opened, platform)


def register_kernels(launcher: ctypes.CDLL, platform: str) -> None:
    """Register the launcher's handlers with XLA for a platform."""
    for name in HANDLERS:
        handler = jax.ffi.pycapsule(getattr(launcher, f"peagle_cuda_{name}"))
        jax.ffi.register_ffi_target(f"peagle_cuda_{name}", handler, platform=platform)


def _capability() -> str:
    """Return the first GPU's compute capability, as "9.0". Raises CudaError if it is too old."""
    capability = str(getattr(jax.local_devices()[0], "compute_capability", "unknown"))
    major = capability.split(".")[0]
    if not major.isdecimal() or int(major) < _MAJOR:
        raise CudaError(f"the GPU kernels need compute capability {_MAJOR}.0 or more, this GPU's is {capability}")
    return capability
