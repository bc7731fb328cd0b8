"""The public entries: the layout of the weights decides the implementation."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from peagle.ops import native
from peagle.ops.collectives import Ranks, Reduce
from peagle.ops.kernels import Implementation
from peagle.ops.linear import cuda
from peagle.ops.linear.packed import PackedMatrix
from peagle.ops.linear.split import SplitMatrix
from peagle.ops.norm import Norm, rms_norm
from peagle.ops.tpu import ROWS, as_stored, pad_rows

FEW = 8  # tokens that `embed` slices one by one; most steps embed no more


def linear(
    x: Float[Array, "... inputs"],
    weight: jax.Array | PackedMatrix | SplitMatrix,
    bias: Float[Array, " outputs"] | None = None,
    *,
    norm: Norm | None = None,
    residual: Float[Array, "... outputs"] | None = None,
    positions: Int[Array, "..."] | None = None,
    reduce: Reduce | None = None,
    dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "... outputs"]:
    """Multiply x, after the norm if there is one, by the weight; add the bias and the residual.

    Returns `dtype`, by default x's.

    weight: an array [inputs, outputs]; a PackedMatrix, which runs in the native kernels; or a SplitMatrix, whose
    outputs are on several devices (then without reduce, residual and bias). dtype goes with neither reduce nor
    residual. Rows of negative position are inactive:
    ignore their output, which is finite. The native kernels skip them, and the bits of another row depend only on that
    row and the weights. On a GPU a CUDA kernel multiplies up to 16 rows of bfloat16, unless the implementation is
    "xla". "tpu" multiplies whole tiles of rows.

    reduce: sums the ranks' products, in float32, before the residual is added; the weight holds this rank's inputs.
    """
    if isinstance(weight, SplitMatrix):
        assert (bias, residual, reduce) == (None, None, None)
        return _over_devices(x, weight, norm, positions, dtype or x.dtype, implementation)
    if reduce is not None:
        total = reduce(_product(x, weight, bias, norm, None, positions, jnp.float32, implementation))
        return (total if residual is None else residual.astype(jnp.float32) + total).astype(x.dtype)
    return _product(x, weight, bias, norm, residual, positions, dtype or x.dtype, implementation)


def logits_dtype(implementation: Implementation | None) -> DTypeLike | None:
    """Return the dtype for `linear` of logits: float32 in the native kernels, whose sums are that; else None, x's."""
    return jnp.float32 if implementation == "native" else None


def _product(
    x: jax.Array,
    weight: jax.Array | PackedMatrix,
    bias: jax.Array | None,
    norm: Norm | None,
    residual: jax.Array | None,
    positions: jax.Array | None,
    dtype: DTypeLike,
    implementation: Implementation | None,
) -> jax.Array:
    """See `linear`; the result is in `dtype`."""
    if not isinstance(weight, PackedMatrix):
        if implementation == "tpu" and math.prod(x.shape[:-1]) % ROWS:
            return _of_whole_tiles(x, weight, bias, norm, residual, dtype)
        if implementation == "tpu":
            weight = as_stored(weight)
        normalised = x if norm is None else rms_norm(x, norm.weight, norm.epsilon)
        by_xla = implementation in ("xla", "tpu") or dtype != x.dtype
        if not by_xla and cuda.supports(normalised, weight, bias, residual):
            return _of_few_rows(normalised, weight, bias, residual)
        return _on_xla(normalised, weight, bias, residual, dtype=dtype)
    rows = x.reshape(-1, x.shape[-1])
    out = native.call(
        "linear",
        jax.ShapeDtypeStruct((rows.shape[0], weight.outputs), dtype),
        rows,
        native.optional(None if norm is None else norm.weight),
        weight.data,
        native.optional(weight.scales, jnp.uint8),
        native.optional(bias),
        jnp.zeros((0,), x.dtype) if residual is None else residual.reshape(-1, weight.outputs),
        native.optional(positions, jnp.int32),
        epsilon=np.float32(0.0 if norm is None else norm.epsilon),
    )
    shaped: jax.Array = out.reshape(*x.shape[:-1], weight.outputs)
    return shaped


def _of_whole_tiles(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    norm: Norm | None,
    residual: jax.Array | None,
    dtype: DTypeLike,
) -> jax.Array:
    """See `_product`; norm and product are of whole tiles of rows."""
    rows, added = x.reshape(-1, x.shape[-1]), None
    if residual is not None:
        added = pad_rows(residual.reshape(-1, weight.shape[1]))
    out = _product(pad_rows(rows), weight, bias, norm, added, None, dtype, "tpu")
    return out[: len(rows)].reshape(*x.shape[:-1], weight.shape[1])


@jax.custom_jvp
def _of_few_rows(x: jax.Array, weight: jax.Array, bias: jax.Array | None, residual: jax.Array | None) -> jax.Array:
    """Multiply in the CUDA kernel on a GPU, in XLA elsewhere. Gradients are XLA's."""
    on_xla = functools.partial(_on_xla, dtype=x.dtype)
    out: jax.Array = jax.lax.platform_dependent(x, weight, bias, residual, cuda=cuda.product, default=on_xla)
    return out


@_of_few_rows.defjvp
def _of_few_rows_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    out, tangent = jax.jvp(functools.partial(_on_xla, dtype=primals[0].dtype), primals, tangents)
    return out, tangent


def _on_xla(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, residual: jax.Array | None, *, dtype: DTypeLike
) -> jax.Array:
    out = jnp.matmul(x, weight, preferred_element_type=dtype)
    out = out if bias is None else out + jnp.expand_dims(bias.astype(dtype), tuple(range(x.ndim - 1)))
    return out if residual is None else residual + out


def _over_devices(
    x: jax.Array,
    weight: SplitMatrix,
    norm: Norm | None,
    positions: jax.Array | None,
    dtype: DTypeLike,
    implementation: Implementation | None,
) -> jax.Array:
    """Multiply by each device's part, then gather the products."""

    def of_rank(
        parts: jax.Array | PackedMatrix, x: jax.Array, scale: jax.Array | None, positions: jax.Array | None
    ) -> jax.Array:
        part = jax.tree.map(lambda leaf: leaf[0], parts)
        scaled = None if norm is None or scale is None else norm._replace(weight=scale)
        product = _product(x, part, None, scaled, None, positions, dtype, implementation)
        return Ranks(weight.axis, weight.mesh.size).gather(product, weight.outputs)

    same = PartitionSpec()
    specs = (PartitionSpec(weight.axis), same, same, same)
    # check_vma off: it does not see into native kernels
    run = jax.shard_map(of_rank, mesh=weight.mesh, in_specs=specs, out_specs=same, check_vma=False)
    output: jax.Array = run(weight.parts, x, None if norm is None else norm.weight, positions)
    return output


def embed(table: jax.Array, token_ids: Int[Array, "..."], dtype: DTypeLike, width: int) -> Float[Array, "... width"]:
    """Look up the tokens' rows in the table, in `dtype`. width: without padding (`arrange_embedding`).

    A table of uint16 holds the bits of bfloat16, because XLA on CPU would convert a whole bfloat16 table to gather from
    it. Few tokens are sliced one by one: XLA estimates a gather by the size of the table, and splits it over threads.
    """
    if table.dtype == jnp.uint16 and token_ids.size <= FEW:
        flat = token_ids.reshape(-1)
        few = [jax.lax.dynamic_slice_in_dim(table, flat[i], 1) for i in range(flat.size)]
        rows = jnp.concatenate(few).reshape(*token_ids.shape, -1)
    else:
        rows = table[token_ids]
    if rows.dtype == jnp.uint16:
        rows = jax.lax.bitcast_convert_type(rows, jnp.bfloat16)
    return rows[..., :width].astype(dtype)
