"""Attend within packed training rows, block by block.

Equals the attention of `target.model.forward`, and is several times faster on a CPU: scores stay in the cache, and
fully masked blocks are skipped.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle.ops.attention import MASKED, AttendHeads
from target.config import TargetConfig
from target.params import TargetParams

BLOCK = 128


def attend_packed(params: TargetParams, config: TargetConfig, segment_ids: Int[Array, "B T"]) -> AttendHeads:
    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        sinks = params.layers[layer].attention.sinks
        return packed_attention(query, key, value, segment_ids, sinks, config.window(layer))

    return attend


def packed_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T G H"],
    value: Float[Array, "B T G H"],
    segment_ids: Int[Array, "B T"],
    sinks: Float[Array, " N"],
    window: int | None,
) -> Float[Array, "B T N H"]:
    """Attend causally by index within each segment, over the last `window` keys if there is one, with sinks."""
    _, width, heads, head_dim = query.shape
    groups = key.shape[2]
    repeat = heads // groups

    def one_row(row: tuple[jax.Array, ...]) -> jax.Array:
        q, k, v, segments = row
        q = q.reshape(width, groups, repeat, head_dim) * head_dim**-0.5
        columns = []
        for group in range(groups):
            own_sinks = sinks[group * repeat : (group + 1) * repeat]
            columns.append(_one_group(q[:, group], k[:, group], v[:, group], segments, own_sinks, window))
        return jnp.concatenate(columns, axis=1)

    return jax.lax.map(one_row, (query, key, value, segment_ids))


def _one_group(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, sinks: jax.Array, window: int | None
) -> jax.Array:
    """Attend by the query heads of one kv head: q [T, R, H], already scaled, k and v [T, H]."""
    width, repeat, head_dim = q.shape
    index = jnp.arange(width, dtype=jnp.int32)
    blocks = []
    for start in range(0, width, BLOCK):
        end = min(start + BLOCK, width)
        first = 0 if window is None else max(0, (start - window + 1) // BLOCK * BLOCK)
        rows = q[start:end].reshape(-1, head_dim)
        scores = (rows @ k[first:end].T).reshape(end - start, repeat, end - first)
        query_index, key_index = index[start:end, None], index[None, first:end]
        visible = (key_index <= query_index) & (segments[start:end, None] == segments[None, first:end])
        if window is not None:
            visible = visible & (key_index > query_index - window)
        scores = jnp.where(visible[:, None, :], scores, MASKED)
        peak = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1), sinks[None, :]))
        weights = jnp.exp(scores - peak[:, :, None])
        total = jnp.sum(weights, axis=-1) + jnp.exp(sinks[None, :] - peak)
        out = (weights.reshape(-1, end - first) @ v[first:end]).reshape(end - start, repeat, head_dim)
        blocks.append(out / total[:, :, None])
    return jnp.concatenate(blocks, axis=0)
