"""JAX's entry to the CUDA kernels: shapes of results and scratch buffers (launch.cc checks them)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float, Float32, Int32, UInt8, UInt32

from peagle.ops.norm import Norm

LINEAR_ROWS, LINEAR_OUTPUTS = 16, 32  # of `linear`: kLinearRows and kLinearOutputs in launch.cc
FEW_ROWS, MAX_ROWS = 16, 4096  # rows of `experts`, in two ways: kFewRows and kMaxRows in launch.cc
TILE_ROWS, TILE_WORDS = 64, 3  # of `experts` of many rows: kTileRows and kTileWords
TILED_WIDTH, TILED_TOP_K, TILED_EXPERTS, MOST_TILES = 2880, 4, 128, 384  # of `expert_block`: experts_hopper.h
# of `paged_attention`: kHead, kSlots and kChunkSlots in attention.cu, kStepRows in launch.cc
HEAD_DIM, PAGE, CHUNK, STEP_ROWS, MOST_SPLITS = 64, 64, 256, 16, 32
Packed = tuple[UInt32[Array, "here _ chunks units words"], BFloat16[Array, "here _"]]
Matrices = tuple[UInt8[Array, "E _ _ 16"], UInt8[Array, "E _ _"], BFloat16[Array, "E _"]]


def linear(
    x: BFloat16[Array, "T K"],
    weights: BFloat16[Array, "K N"],
    bias: BFloat16[Array, " N"] | None,
    residual: BFloat16[Array, "T N"] | None,
) -> BFloat16[Array, "T N"]:
    """Multiply up to LINEAR_ROWS rows by a matrix, summing in float32; add the bias and the residual.

    K is a multiple of 16, N of LINEAR_OUTPUTS. A row's bits depend neither on the other rows nor on T.
    """
    out: jax.Array = _call(
        "linear", _halves(x.shape[0], weights.shape[1]), x, weights, *map(_optional, (bias, residual))
    )
    return out


def experts(
    x: BFloat16[Array, "T D"], ids: Int32[Array, "T k"], gate_up: Matrices, down: Matrices, *, limit: float
) -> Float32[Array, "T k D"]:
    """Compute each row's output of each expert in its `ids`. T is at most MAX_ROWS.

    An expert is read once for every TILE_ROWS rows that selected it. An id of E or more selects nothing, and its output
    is not written. A row's bits depend neither on the other rows nor on T. gate_up, down: the MXFP4 blocks [E, out, in
    / 32, 16], scales and bias of all experts.
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


def expert_block(
    x: BFloat16[Array, "T D"],
    norm: Norm,
    router: BFloat16[Array, "D E"],
    router_bias: BFloat16[Array, " E"],
    positions: Int32[Array, " T"] | None,
    gate_up: Packed,
    down: Packed,
    next_norm: Norm | None,
    *,
    limit: float,
    first: Int32[Array, ""] | None = None,
) -> tuple[Float[Array, "T D"], BFloat16[Array, "_ D"]]:
    """Compute the second half of a layer on a Hopper GPU: y = x + the experts of norm(x), by the router's weights.

    Returns (y, next_norm(y)); the second is empty without a next norm. Both norms have the same epsilon. T is at most
    MAX_ROWS. D and the experts' width are TILED_WIDTH; E is a multiple of 8, up to TILED_EXPERTS. gate_up, down: packed
    matrices (peagle.ops.cuda.pack) and bias. A row of negative position selects nothing. A row's bits depend neither on
    the other rows nor on T.

    first: the matrices are those of the experts from this one on, a part of the router's E; y is their part of the
    sum, in float32 and without x, and there is no next norm.
    """
    (rows, width), pairs, num_experts = x.shape, x.shape[0] * TILED_TOP_K, router.shape[1]
    tables = 2 * MOST_TILES + 5 * pairs + rows + rows * num_experts + 1
    assert next_norm is None or (first is None and next_norm.epsilon == norm.epsilon)
    out, normalised, *_ = _call(
        "expert_block",
        (
            (_halves if first is None else _floats)(rows, width),
            _halves(0 if next_norm is None else rows, width),
            *(_halves(pairs, width), _halves(pairs, width), _floats(pairs, width)),
            jax.ShapeDtypeStruct((tables,), jnp.int32),
        ),
        *(x, norm.weight, router, router_bias),
        *(jnp.zeros((0,), jnp.int32) if numbers is None else numbers.reshape(-1) for numbers in (positions, first)),
        *(*gate_up, *down),
        _optional(None if next_norm is None else next_norm.weight),
        epsilon=np.float32(norm.epsilon),
        limit=np.float32(limit),
    )
    return out, normalised


def paged_attention(
    qkv: BFloat16[Array, "B T all"],
    cos: BFloat16[Array, "B T h"],
    sin: BFloat16[Array, "B T h"],
    key: BFloat16[Array, "P S GH"],
    value: BFloat16[Array, "P S GH"],
    table: Int32[Array, "B M"],
    write: Int32[Array, "B T"],
    first: Int32[Array, "B T"],
    last: Int32[Array, "B T"],
    sinks: Float[Array, " N"] | None,
    *,
    span: int,
) -> tuple[BFloat16[Array, "B T out"], BFloat16[Array, "P S GH"], BFloat16[Array, "P S GH"]]:
    """Write the new keys and values, then attend; return (output, keys, values). S is PAGE, H is HEAD_DIM.

    span: see PagedRows; with up to STEP_ROWS rows, indices beyond it are not read. Sinks are converted to bfloat16, the
    dtype of checkpoints.
    """
    (batch, width, values), head_dim = qkv.shape, 2 * cos.shape[2]
    kv_heads = key.shape[2] // head_dim
    heads = values // head_dim - 2 * kv_heads
    splits = num_splits(span, width, table.shape[1] * PAGE) if width <= STEP_ROWS else 0
    parts = (batch, kv_heads, splits, width * heads // kv_heads)
    out, new_key, new_value, *_ = _call(
        "paged_attention",
        (
            *(_halves(batch, width, heads * head_dim), _halves(*key.shape), _halves(*value.shape)),
            _halves(batch, 0 if splits else width, heads, head_dim),
            *(_floats(*parts, head_dim), _floats(*parts), _floats(*parts)),
        ),
        *(qkv, cos, sin, key, value, table, write, first, last),
        _optional(None if sinks is None else sinks.astype(jnp.bfloat16)),
        in_place={3: 1, 4: 2},
    )
    return out, new_key, new_value


def num_splits(span: int, width: int, capacity: int) -> int:
    """Return into how many splits the context of up to STEP_ROWS rows is cut: a power of two.

    span: see PagedRows. A window's span grows with the rows; the splits, by which a row's bits are summed, must not.
    """
    most = min(span + STEP_ROWS - width, capacity)
    chunks = (most + CHUNK - 2) // CHUNK + 1  # one more, because a span may begin within a chunk
    return min(MOST_SPLITS, 1 << (chunks - 1).bit_length())


def _optional(values: jax.Array | None) -> jax.Array:
    return jnp.zeros((0,), jnp.bfloat16) if values is None else values


def _halves(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _call(name: str, result: Any, *operands: Any, in_place: dict[int, int] | None = None, **attributes: Any) -> Any:
    """Call a kernel; in_place maps an operand to the result that reuses its memory."""
    kernel = jax.ffi.ffi_call(f"peagle_cuda_{name}", result, input_output_aliases=in_place)
    return kernel(*operands, **attributes)
