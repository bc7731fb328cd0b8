"""The parameters of a drafter as a pytree, and their random initialisation.

Matrices are arrays with the input dimension first (`x @ w`); for the native kernels all are packed (peagle.ops.linear).
D hidden size, N query heads, G kv heads, H head_dim, F MLP width, V the target's vocabulary, U the draft vocabulary, A
the width of aux_hidden. Absent biases are None.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from drafter.config import DrafterConfig
from peagle.ops.kernels import Implementation
from peagle.ops.linear import PackedMatrix, SplitMatrix


@flax.struct.dataclass
class DrafterLayerParams:
    """One decoder layer.

    In layer 0 of P-EAGLE and EAGLE-3 `norm` is the embedding's, `hidden_norm` the hidden state's, and qkv reads 2D.
    """

    norm: jax.Array  # [D]
    hidden_norm: jax.Array | None  # [D] in layer 0 of P-EAGLE and EAGLE-3, None elsewhere
    qkv: jax.Array | PackedMatrix  # [2D or D, (N + 2G) H]: queries, keys, values side by side
    qkv_bias: jax.Array | None  # [(N + 2G) H]
    query_norm: jax.Array | None  # [H]: weight of the norm of each head's query; None: no such norm
    key_norm: jax.Array | None  # [H]
    out: jax.Array | PackedMatrix  # [N H, D]
    out_bias: jax.Array | None  # [D]
    mlp_norm: jax.Array  # [D]
    gate_up: jax.Array | PackedMatrix  # [D, 2F]: gate, up side by side
    gate_up_bias: jax.Array | None  # [2F]
    down: jax.Array | PackedMatrix  # [F, D]
    down_bias: jax.Array | None  # [D]


@flax.struct.dataclass
class DrafterParams:
    """All parameters of a drafter. draft_to_target is not trained: only proposing reads it, and trainers remove it."""

    embedding: jax.Array  # [V, D]; uint16 holds the bits of bfloat16
    aux_norm: jax.Array | None  # [A]: weight of the norm before fc, if the config has one
    fc: jax.Array | PackedMatrix  # [A, D]
    mask_hidden: jax.Array | None  # [M, A]: aux_hidden of a P-EAGLE's mask slots, one per depth or one for all
    layers: tuple[DrafterLayerParams, ...]
    norm: jax.Array  # [D]
    lm_head: jax.Array | PackedMatrix | SplitMatrix  # [D, U]
    draft_to_target: jax.Array | None  # [U] int32, absolute ids; None: the draft vocabulary is the target's
    hidden_norm: jax.Array | None = None  # [D]: weight of the norm after a DFlash drafter's fc
    implementation: Implementation | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations and caches."""
        return self.norm.dtype


def init_params(config: DrafterConfig, key: jax.Array, dtype: DTypeLike = jnp.float32) -> DrafterParams:
    """Make random parameters to train from.

    Matrices are normal with variance 1/input, divided by 2 * layers for outputs into the residual stream; mask_hidden
    is standard normal, norms are one, biases zero. A reduced draft vocabulary has the target's lowest ids; the caller
    chooses better ones.
    """
    c = config
    residual_scale = (2 * c.num_layers) ** -0.5
    qkv_width = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim

    def matrix(key: jax.Array, shape: tuple[int, int], scale: float = 1.0) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.float32) * (scale * shape[0] ** -0.5)).astype(dtype)

    def layer(index: int, key: jax.Array) -> DrafterLayerParams:
        keys = jax.random.split(key, 4)
        return DrafterLayerParams(
            norm=jnp.ones((c.hidden_size,), dtype),
            hidden_norm=jnp.ones((c.hidden_size,), dtype) if index == 0 and c.kind != "DFlash" else None,
            qkv=matrix(keys[0], (c.layer_input(index), qkv_width)),
            qkv_bias=jnp.zeros((qkv_width,), dtype) if c.attention_bias else None,
            query_norm=jnp.ones((c.head_dim,), dtype) if c.qk_norm else None,
            key_norm=jnp.ones((c.head_dim,), dtype) if c.qk_norm else None,
            out=matrix(keys[1], (c.num_heads * c.head_dim, c.hidden_size), residual_scale),
            out_bias=jnp.zeros((c.hidden_size,), dtype) if c.attention_bias else None,
            mlp_norm=jnp.ones((c.hidden_size,), dtype),
            gate_up=matrix(keys[2], (c.hidden_size, 2 * c.mlp_width)),
            gate_up_bias=jnp.zeros((2 * c.mlp_width,), dtype) if c.mlp_bias else None,
            down=matrix(keys[3], (c.mlp_width, c.hidden_size), residual_scale),
            down_bias=jnp.zeros((c.hidden_size,), dtype) if c.mlp_bias else None,
        )

    embed_key, fc_key, mask_key, head_key, *layer_keys = jax.random.split(key, c.num_layers + 4)
    reduced, masks = c.draft_vocab_size < c.vocab_size, (c.num_mask_hiddens, c.aux_width)
    return DrafterParams(
        embedding=(jax.random.normal(embed_key, (c.vocab_size, c.hidden_size), jnp.float32) * 0.02).astype(dtype),
        aux_norm=jnp.ones((c.aux_width,), dtype) if c.aux_norm else None,
        fc=matrix(fc_key, (c.aux_width, c.hidden_size)),
        mask_hidden=jax.random.normal(mask_key, masks, jnp.float32).astype(dtype) if c.kind == "P-EAGLE" else None,
        layers=tuple(layer(index, key) for index, key in enumerate(layer_keys)),
        norm=jnp.ones((c.hidden_size,), dtype),
        lm_head=matrix(head_key, (c.hidden_size, c.draft_vocab_size)),
        draft_to_target=jnp.arange(c.draft_vocab_size, dtype=jnp.int32) if reduced else None,
        hidden_norm=jnp.ones((c.hidden_size,), dtype) if c.kind == "DFlash" else None,
    )
