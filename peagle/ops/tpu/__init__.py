"""Run the ops on TPUs: Pallas kernels of experts and attention, products of whole tiles of rows.

    ops/expert_matmul/tpu.py   MXFP4 experts, of few rows and of many
    ops/attention/tpu.py       attention over pages
    self_test.py               compares them with XLA's code before their first use

Everything here was compiled for TPUs and interpreted on CPUs; nothing ever ran on a TPU. If the check fails there,
XLA's own code runs instead, and `status` gives the reason. PEAGLE_KERNELS=xla disables the kernels.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu

from peagle.ops import native

ROWS = 8  # of a tile of float32: products have a multiple of so many rows
LANES = 128
VMEM_BYTES = 40 << 20  # that a kernel may take; the smallest chip has 64 MiB
# Pallas's interpret mode: True, or InterpretParams, which simulates copies. Tests set it.
interpreted: Any = False


@functools.cache
def status() -> tuple[bool, str]:
    """Check the kernels once; return (whether they run here, a line with their name or the reason)."""
    from peagle.ops.tpu.self_test import check  # here, because the kernels import this module

    if native.wants_xla():
        return False, f"XLA ({native.VARIABLE}={native.XLA})"
    if (backend := jax.default_backend()) != "tpu":
        return False, f"XLA: the TPU kernels are for TPUs, this is {backend}"
    try:
        check()  # only loading asks for the status, so no program is being traced
    except Exception as error:  # an unexpected compiler, or a wrong result
        return False, f"XLA: {' '.join(str(error).split())[:200]}"
    return True, f"Pallas, {jax.devices()[0].device_kind}: compiled and interpreted before this check, never run"


def available() -> bool:
    return status()[0]


def pad_rows(x: jax.Array) -> jax.Array:
    """Append rows [T, ...] up to a multiple of ROWS.

    XLA multiplies one row on the vector unit and eight on the matrix unit, in another order. So a row alone and in a
    verify pass would have other bits, and one row would take longer than eight.
    """
    return jnp.pad(x, [(0, -x.shape[0] % ROWS), *[(0, 0)] * (x.ndim - 1)])


def multiplies_bfloat16() -> bool:
    """Whether the chip's vector unit has products of bfloat16; v5e's has not."""
    return bool(interpreted) or pltpu.get_tpu_info().generation > 5


def call(
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int | jax.Array, ...],
    prefetched: Sequence[jax.Array],
    operands: Sequence[tuple[jax.Array, pl.BlockSpec]],
    out: tuple[jax.ShapeDtypeStruct, pl.BlockSpec],
    scratch: Sequence[Any],
    cost: pl.CostEstimate,
) -> jax.Array:
    """Call a kernel over a grid, whose steps run in order. prefetched: scalars for the specs' index maps.

    cost: for XLA, which would otherwise estimate none.
    """
    result: jax.Array = pl.pallas_call(
        kernel,
        out_shape=out[0],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=grid,
            in_specs=[spec for _, spec in operands],
            out_specs=out[1],
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=[pltpu.ARBITRARY] * len(grid), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=cost,
        interpret=interpreted,
        name=name,
    )(*prefetched, *(operand for operand, _ in operands))
    return result


def as_stored(weight: jax.Array) -> jax.Array:
    """Keep a matrix in the layout in which a TPU stores it: the one with less padding, and row-major of two.

    Within loops XLA would choose others, and copy such weights in every dispatch.
    """
    if interpreted:
        return weight
    rows, columns = weight.shape
    padded = (rows * (columns + -columns % LANES), columns * (rows + -rows % LANES))
    return with_layout_constraint(weight, Layout((0, 1) if padded[0] <= padded[1] else (1, 0)))


def in_hbm(stored: jax.Array) -> jax.Array:
    """Keep XLA from copying a whole operand to VMEM ahead of a kernel, which reads a part of it."""
    return stored if interpreted else pltpu.with_memory_space_constraint(stored, pltpu.HBM)
