"""Let the GPU decide a program's loops and branches, inside one CUDA graph.

XLA records programs into CUDA graphs, but by default not their loops and branches: the host waits for the GPU, reads
the condition, and launches what follows. With OPTIONS these are nodes of the graph (CUDA 12.3 or newer), and the host
can run ahead of the GPU. Before their first use a small program is tried with and without them.
"""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle.ops import cuda
from peagle.ops.cuda import calls
from peagle.ops.cuda.nvrtc import CudaError
from peagle.ops.cuda.pack import pack
from peagle.ops.mxfp4 import BLOCK
from peagle.ops.norm import Norm
from peagle.ops.self_tests import random_halves

COMMANDS = "xla_gpu_enable_command_buffer"
OPTIONS: dict[str, str | int] = {
    # XLA's own default, then the loops and branches
    COMMANDS: "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
    "xla_gpu_graph_min_graph_size": 1,  # a program may be nothing but a branch
    "xla_gpu_command_buffer_scheduling_mode": "LHS",  # the default; attention.cu counts on kernels one after the other
}
ROWS, WIDTH, COUNTS = 2, 2880, (0, 1, 4)  # of the program that is tried; the last are numbers of turns of its loop


def status() -> tuple[bool, str]:
    """Return (whether programs are compiled with the options, why not on this GPU)."""
    if jax.default_backend() != "gpu":
        return False, ""
    return (False, f"XLA_FLAGS has {COMMANDS}") if chosen_by_user() else trial()


@functools.cache
def trial() -> tuple[bool, str]:
    """Try the options once; return (whether they work, why not)."""
    try:
        # run on the GPU now, even if the first call comes while a program is traced
        with jax.default_device(jax.local_devices()[0]), jax.ensure_compile_time_eval():
            check()
    except Exception as error:  # an unexpected driver or compiler
        return False, " ".join(str(error).split())[:200]
    return True, ""


def chosen_by_user() -> bool:
    """Whether XLA_FLAGS say what graphs take."""
    return COMMANDS in os.environ.get("XLA_FLAGS", "")


def options() -> dict[str, str | int] | None:
    """Return the compiler options of programs with loops or branches; None: XLA's own."""
    return OPTIONS if status()[0] else None


def check() -> None:
    """Raise CudaError if a program gives other results with the options than without."""
    operands = _operands()
    as_usual, in_graph = jax.jit(_program), jax.jit(_program, compiler_options=OPTIONS)
    kept = []  # so that every run has arrays of its own, and the graph is changed to their addresses
    for count in COUNTS:
        for seed in (0, 1):
            x = jnp.asarray(random_halves(np.random.default_rng(seed), ROWS, WIDTH))
            expected, result = (run(x, operands, np.int32(count)) for run in (as_usual, in_graph))
            kept += [x, expected, result]
            if not np.array_equal(np.asarray(result), np.asarray(expected)):
                raise CudaError(f"a loop of {count} turns in a CUDA graph gives another result than outside of one")


def _operands() -> dict[str, Any]:
    """Make a square matrix, and a layer's experts if the kernels for Hopper GPUs run here."""
    rng, experts = np.random.default_rng(2), 8
    operands: dict[str, Any] = {"matrix": jnp.asarray(random_halves(rng, WIDTH, WIDTH))}
    if cuda.has_tiles():

        def packed(outputs: int) -> tuple[jax.Array, jax.Array]:
            blocks = rng.integers(0, 256, (experts, outputs, WIDTH // BLOCK, BLOCK // 2), np.uint8)
            codes = jax.jit(pack)(jnp.asarray(blocks), jnp.full(blocks.shape[:-1], 118, jnp.uint8))
            return codes, jnp.zeros((experts, outputs), jnp.bfloat16)

        # operands of the program, since the kernels load them before they wait for the kernel before
        norm, no_bias = jnp.ones((WIDTH,), jnp.bfloat16), jnp.zeros((experts,), jnp.bfloat16)
        routing = norm, jnp.asarray(random_halves(rng, WIDTH, experts)), no_bias
        operands |= {"routing": routing, "experts": (packed(2 * WIDTH), packed(WIDTH))}
    return operands


def _program(x: jax.Array, operands: dict[str, Any], count: jax.Array) -> jax.Array:
    """Run `count` turns of a loop over a branch and another loop, with kernels of this project where they run."""

    def multiplied(x: jax.Array) -> jax.Array:
        return calls.linear(x, operands["matrix"], None, x) if cuda.available() else x @ operands["matrix"]

    def mixed(x: jax.Array) -> jax.Array:
        if "experts" not in operands:
            return -x
        (norm, router, bias), (gate_up, down) = operands["routing"], operands["experts"]
        return calls.expert_block(x, Norm(norm, 1e-5), router, bias, None, gate_up, down, None, limit=7.0)[0]

    def inner(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x = mixed(carry[0])
        return (x / jnp.max(jnp.abs(x))).astype(jnp.bfloat16), carry[1] - 1

    def turn(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, number = carry
        x = jax.lax.cond(number % 2 == 0, multiplied, lambda x: x * 0.5, x)
        x, _ = jax.lax.while_loop(lambda carry: carry[1] > 0, inner, (x, number))
        return x, number + 1

    return jax.lax.while_loop(lambda carry: carry[1] < count, turn, (x, jnp.zeros((), jnp.int32)))[0]
