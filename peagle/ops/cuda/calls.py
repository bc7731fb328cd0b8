"""JAX's entry to the CUDA kernels: shapes of results and scratch buffers (launch.cc checks them)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float, Float32, Int32, UInt8

FEW_ROWS, MAX_ROWS = 16, 4096  # rows of `experts`, in two ways: kFewRows and kMaxRows in launch.cc
TILE_ROWS, TILE_WORDS = 64, 3  # of `experts` of many rows: kTileRows and kTileWords
# of `paged_attention`: kHead, kSlots and kChunkSlots in attention.cu, kStepRows in launch.cc
HEAD_DIM, PAGE, CHUNK, STEP_ROWS = 64, 64, 256, 16
Matrices = tuple[UInt8[Array, "E _ _ 16"], UInt8[Array, "E _ _"], BFloat16[Array, "E _"]]


def experts(
    x: BFloat16[Array, "T D"], ids: Int32[Array, "T k"], gate_up: Matrices, down: Matrices, *, limit: float
) -> Float32[Array, "T k D"]:
    """Compute each row's output of each expert in its `ids`. T is at most MAX_ROWS.

    Each expert is read once for TILE_ROWS rows that selected it. An id of E or more selects nothing, and nothing is
    written to its output. A row's bits depend neither on the other rows nor on T. Matrices are the MXFP4 blocks
    [E, out, in / 32, 16], their scales, and the bias, of all experts.
    """
    (rows, width), top_k, (num_experts, outputs) = x.shape, ids.shape[1], gate_up[2].shape
    pairs = rows * top_k
    sorted_pairs = 0 if rows <= FEW_ROWS else pairs + TILE_WORDS * (pairs // TILE_ROWS + num_experts)
    out, *_ = _call(
        "experts",
        (_floats(rows, top_k, width), _halves(pairs, outputs // 2), jax.ShapeDtypeStruct((sorted_pairs,), jnp.int32)),
        *(x, ids, *gate_up, *down),
        limit=np.float32(limit),
    )
    return out


def paged_attention(
    qkv: BFloat16[Array, "B T all"],
    cos: BFloat16[Array, "B T h"],
    sin: BFloat16[Array, "B T h"],
    key: BFloat16[Array, "P S G H"],
    value: BFloat16[Array, "P S G H"],
    table: Int32[Array, "B M"],
    write: Int32[Array, "B T"],
    first: Int32[Array, "B T"],
    last: Int32[Array, "B T"],
    sinks: Float[Array, " N"] | None,
    *,
    span: int,
) -> tuple[BFloat16[Array, "B T out"], BFloat16[Array, "P S G H"], BFloat16[Array, "P S G H"]]:
    """Write the new keys and values, then attend; return (output, keys, values). S is PAGE, H is HEAD_DIM.

    span: the most indices from the first that a row of a sequence sees to the last; of up to STEP_ROWS rows, further
    ones are not read. Sinks are taken in bfloat16, as checkpoints have them.
    """
    (batch, width, values), (_, _, kv_heads, head_dim) = qkv.shape, key.shape
    heads = values // head_dim - 2 * kv_heads
    # a span that begins within a chunk reaches into one more
    chunks = (min(span, table.shape[1] * PAGE) + CHUNK - 2) // CHUNK + 1 if width <= STEP_ROWS else 0
    parts = (batch, kv_heads, chunks, width * heads // kv_heads)
    out, new_key, new_value, *_ = _call(
        "paged_attention",
        (
            *(_halves(batch, width, heads * head_dim), _halves(*key.shape), _halves(*value.shape)),
            *(_halves(batch, width, heads, head_dim), _floats(*parts, head_dim), _floats(*parts), _floats(*parts)),
        ),
        *(qkv, cos, sin, key, value, table, write, first, last),
        jnp.zeros((0,), jnp.bfloat16) if sinks is None else sinks.astype(jnp.bfloat16),
        in_place={3: 1, 4: 2},
    )
    return out, new_key, new_value


def _halves(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _call(name: str, result: Any, *operands: Any, in_place: dict[int, int] | None = None, **attributes: Any) -> Any:
    """Call a kernel; in_place maps an operand to the result that takes its memory."""
    kernel = jax.ffi.ffi_call(f"peagle_cuda_{name}", result, input_output_aliases=in_place)
    return kernel(*operands, **attributes)
