"""The parameters of a GPT-OSS model as a pytree, and their random initialisation.

Matrices are arrays with the input dimension first (`x @ w`); for the native kernels all are packed (peagle.ops.linear).
D hidden size, N query heads, G kv heads, H head_dim, E experts, V vocabulary.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from peagle.ops.expert_matmul import Experts, FusedExperts
from peagle.ops.kernels import Implementation
from peagle.ops.linear import PackedMatrix
from target.config import TargetConfig


@flax.struct.dataclass
class AttentionParams:
    norm: jax.Array  # [D]
    qkv: jax.Array | PackedMatrix  # [D, (N + 2G) H]: queries, keys, values side by side
    qkv_bias: jax.Array  # [(N + 2G) H]
    out: jax.Array | PackedMatrix  # [N H, D]
    out_bias: jax.Array  # [D]
    sinks: jax.Array  # [N]


@flax.struct.dataclass
class MoeParams:
    norm: jax.Array  # [D]
    router: jax.Array | PackedMatrix  # [D, E]
    router_bias: jax.Array  # [E]
    experts: Experts


@flax.struct.dataclass
class LayerParams:
    attention: AttentionParams
    moe: MoeParams


@flax.struct.dataclass
class TargetParams:
    embedding: jax.Array  # [V, D]; uint16 holds the bits of bfloat16
    layers: tuple[LayerParams, ...]
    norm: jax.Array  # [D]
    lm_head: jax.Array | PackedMatrix  # [D, V]
    implementation: Implementation | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations and caches."""
        return self.norm.dtype


def init_params(config: TargetConfig, key: jax.Array, dtype: DTypeLike = jnp.float32) -> TargetParams:
    """Make random parameters to train from, with experts in the fused layout.

    Matrices are normal with variance 1/input, divided by 2 * layers for outputs into the residual stream; norms are
    one, biases and sinks zero.
    """
    c = config
    residual_scale = (2 * c.num_layers) ** -0.5

    def matrix(key: jax.Array, shape: tuple[int, int], inputs: int, scale: float = 1.0) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.float32) * (scale * inputs**-0.5)).astype(dtype)

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros(shape, dtype)

    def layer(key: jax.Array) -> LayerParams:
        keys = jax.random.split(key, 5)
        heads_width, qkv_width = c.num_heads * c.head_dim, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        all_width = c.num_experts * c.expert_width
        return LayerParams(
            attention=AttentionParams(
                norm=jnp.ones((c.hidden_size,), dtype),
                qkv=matrix(keys[0], (c.hidden_size, qkv_width), c.hidden_size),
                qkv_bias=zeros(qkv_width),
                out=matrix(keys[1], (heads_width, c.hidden_size), heads_width, residual_scale),
                out_bias=zeros(c.hidden_size),
                sinks=zeros(c.num_heads),
            ),
            moe=MoeParams(
                norm=jnp.ones((c.hidden_size,), dtype),
                router=matrix(keys[2], (c.hidden_size, c.num_experts), c.hidden_size),
                router_bias=zeros(c.num_experts),
                experts=FusedExperts(
                    gate_up=matrix(keys[3], (c.hidden_size, 2 * all_width), c.hidden_size),
                    gate_up_bias=zeros(2 * all_width),
                    down=matrix(keys[4], (all_width, c.hidden_size), c.expert_width, residual_scale),
                    down_bias=zeros(c.num_experts, c.hidden_size),
                ),
            ),
        )

    embed_key, head_key, *layer_keys = jax.random.split(key, c.num_layers + 2)
    return TargetParams(
        embedding=matrix(embed_key, (c.vocab_size, c.hidden_size), 1, 0.02),
        layers=tuple(layer(key) for key in layer_keys),
        norm=jnp.ones((c.hidden_size,), dtype),
        lm_head=matrix(head_key, (c.hidden_size, c.vocab_size), c.hidden_size),
    )
