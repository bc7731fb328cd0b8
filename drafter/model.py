"""The layers of P-EAGLE and EAGLE-3 drafters. propose.py has the cached passes, train/forward.py those of training.

Row p is (embedding of token[p+1], fc(aux_hidden[p])) at RoPE position p, and predicts token[p+2]. A mask slot is
(embedding of mask_token_id, fc(mask_hidden)). The row of a draft is (its embedding, the last layer's output at the row
before). Every pass runs `run_layers` with its own `attend`.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from drafter.config import DrafterConfig
from drafter.params import DrafterLayerParams, DrafterParams
from peagle.ops.attention import Attend
from peagle.ops.kernels import Implementation
from peagle.ops.linear import embed, linear, logits_dtype
from peagle.ops.norm import Norm, rms_norm
from peagle.ops.rope import rope_tables


def next_input(params: DrafterParams, config: DrafterConfig, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Turn the last layer's output into the hidden state that an EAGLE-3 drafter's next pass reads."""
    return rms_norm(x, params.norm, config.rms_norm_eps) if config.norm_output else x


def mask_token_of(config: DrafterConfig) -> int:
    """Return the token of mask slots. Raises ValueError for an EAGLE-3 drafter."""
    if config.mask_token_id is None:
        raise ValueError("an EAGLE-3 drafter has no mask slots; it proposes in turn")
    return config.mask_token_id


def mask_slots(params: DrafterParams, config: DrafterConfig) -> Float[Array, "M D"]:
    assert params.mask_hidden is not None
    return project_aux(params, config, params.mask_hidden[None])[0]


def project_aux(
    params: DrafterParams,
    config: DrafterConfig,
    aux_hidden: Float[Array, "B T A"],
    positions: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """Project aux_hidden (or mask_hidden) by fc, after the config's norm, if any. Ignore rows of negative position."""
    if config.aux_norm is not None and params.aux_norm is not None:
        groups = config.num_aux_layers if config.aux_norm == "per_layer" else 1
        parts, weights = jnp.split(aux_hidden, groups, axis=-1), jnp.split(params.aux_norm, groups)
        normed = [rms_norm(part, weight, config.rms_norm_eps) for part, weight in zip(parts, weights, strict=True)]
        aux_hidden = jnp.concatenate(normed, axis=-1)
    return linear(aux_hidden, params.fc, positions=positions, implementation=params.implementation)


def run_layers(
    params: DrafterParams,
    config: DrafterConfig,
    token_ids: jax.Array,
    hidden: jax.Array,
    positions: jax.Array,
    attend: Attend,
    output_rows: Int[Array, "B K"] | None = None,
) -> jax.Array:
    """Return the residual stream after the last layer [B, T, D], from each row's token and fc output.

    output_rows: return only these rows [B, K, D]; of the others the last layer computes only keys and values. Ignore
    the result of a negative index.
    """
    eps = config.rms_norm_eps
    product = functools.partial(linear, implementation=params.implementation)
    cos, sin = rope_tables(config.rope, positions, hidden.dtype, implementation=params.implementation)
    x = hidden
    for index, p in enumerate(params.layers):
        if p.hidden_norm is None:
            qkv = product(x, p.qkv, p.qkv_bias, norm=Norm(p.norm, eps), positions=positions)
        else:
            normed = rms_norm(x, p.hidden_norm, eps)
            embedded = rms_norm(embed(params.embedding, token_ids, hidden.dtype, config.hidden_size), p.norm, eps)
            qkv = product(jnp.concatenate([embedded, normed], axis=-1), p.qkv, p.qkv_bias, positions=positions)
            x = normed if config.norm_before_residual else x
        out = attend(index, norm_heads(qkv, p, config), cos, sin)
        if output_rows is not None and index == len(params.layers) - 1:
            kept_rows = jnp.maximum(output_rows, 0)
            out, x = (jnp.take_along_axis(rows, kept_rows[:, :, None], axis=1) for rows in (out, x))
            positions = jnp.where(output_rows < 0, -1, jnp.take_along_axis(positions, kept_rows, axis=1))
        x = product(out, p.out, p.out_bias, residual=x, positions=positions)
        x = feed_forward(p, x, eps, positions, params.implementation)
    return x


def feed_forward(
    p: DrafterLayerParams,
    x: Float[Array, "B T D"],
    eps: float,
    positions: Int[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T D"]:
    product = functools.partial(linear, positions=positions, implementation=implementation)
    gate, up = jnp.split(product(x, p.gate_up, p.gate_up_bias, norm=Norm(p.mlp_norm, eps)), 2, axis=-1)
    return product(jax.nn.silu(gate) * up, p.down, p.down_bias, residual=x)


def norm_heads(qkv: jax.Array, p: DrafterLayerParams, config: DrafterConfig) -> jax.Array:
    if p.query_norm is None or p.key_norm is None:
        return qkv
    heads = qkv.reshape(*qkv.shape[:-1], -1, config.head_dim)
    cuts = (config.num_heads, config.num_heads + config.num_kv_heads)
    query, key, value = jnp.split(heads, cuts, axis=-2)
    eps = config.rms_norm_eps
    normed = (rms_norm(query, p.query_norm, eps), rms_norm(key, p.key_norm, eps), value)
    return jnp.concatenate(normed, axis=-2).reshape(qkv.shape)


def head(
    params: DrafterParams,
    config: DrafterConfig,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T U"]:
    """Compute the logits over the draft vocabulary. Ignore rows of negative position."""
    norm = Norm(params.norm, config.rms_norm_eps)
    by = params.implementation
    return linear(x, params.lm_head, norm=norm, positions=positions, dtype=logits_dtype(by), implementation=by)
