"""Make GPT-OSS models of random weights in the device's memory, to time full geometries without their files.

Experts are MXFP4 as in checkpoints, the rest is in `dtype`. Weights are scaled as at initialisation: activations stay
finite, and rows are routed evenly to the experts.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from peagle.base.memory import tree_bytes
from peagle.ops.expert_matmul import PackedExperts, tiled_experts
from peagle.ops.mxfp4 import BLOCK
from target.config import TargetConfig
from target.params import AttentionParams, LayerParams, MoeParams, TargetParams

CODE_SPREAD = 2.93  # root mean square of uniformly drawn four-bit codes


def random_params(
    config: TargetConfig, seed: int, dtype: DTypeLike = jnp.bfloat16, *, as_stored: bool = False
) -> TargetParams:
    """Draw parameters on JAX's default device, layer by layer: peak memory is theirs plus one layer's.

    as_stored: experts are laid out as in checkpoints; else as by `load_target`.
    """
    # not threefry: drawing 65 GB must take only seconds
    keys = jax.random.split(jax.random.key(seed, impl="unsafe_rbg"), config.num_layers + 2)
    hidden, vocab = config.hidden_size, config.vocab_size
    layer = jax.jit(functools.partial(_layer, config=config, dtype=dtype))
    matrix = jax.jit(_matrix, static_argnums=(1, 2, 3))
    return TargetParams(
        embedding=matrix(keys[0], (vocab, hidden), 1, dtype),
        layers=tuple(layer(key) if as_stored else _arranged(layer(key), config) for key in keys[2:]),
        norm=jnp.ones((hidden,), dtype),
        lm_head=matrix(keys[1], (hidden, vocab), hidden, dtype),
    )


def random_bytes(config: TargetConfig, dtype: DTypeLike = jnp.bfloat16) -> int:
    return tree_bytes(jax.eval_shape(lambda: random_params(config, 0, dtype, as_stored=True)))


def _arranged(layer: LayerParams, config: TargetConfig) -> LayerParams:
    assert isinstance(layer.moe.experts, PackedExperts)
    experts = tiled_experts(layer.moe.experts, config.num_experts, config.top_k)
    return layer.replace(moe=layer.moe.replace(experts=experts))  # type: ignore[attr-defined]


def _layer(key: jax.Array, config: TargetConfig, dtype: DTypeLike) -> LayerParams:
    c = config
    keys = jax.random.split(key, 9)
    heads, qkv = c.num_heads * c.head_dim, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    gate_up_blocks, gate_up_scales = _packed(keys[3], c.num_experts, 2 * c.expert_width, c.hidden_size)
    down_blocks, down_scales = _packed(keys[4], c.num_experts, c.hidden_size, c.expert_width)
    return LayerParams(
        attention=AttentionParams(
            norm=jnp.ones((c.hidden_size,), dtype),
            qkv=_matrix(keys[0], (c.hidden_size, qkv), c.hidden_size, dtype),
            qkv_bias=_small(keys[5], (qkv,), dtype),
            out=_matrix(keys[1], (heads, c.hidden_size), heads, dtype),
            out_bias=_small(keys[6], (c.hidden_size,), dtype),
            sinks=jnp.zeros((c.num_heads,), dtype),
        ),
        moe=MoeParams(
            norm=jnp.ones((c.hidden_size,), dtype),
            router=_matrix(keys[2], (c.hidden_size, c.num_experts), c.hidden_size, dtype),
            router_bias=jnp.zeros((c.num_experts,), dtype),
            experts=PackedExperts(
                gate_up_blocks,
                gate_up_scales,
                _small(keys[7], (c.num_experts, 2 * c.expert_width), dtype),
                down_blocks,
                down_scales,
                _small(keys[8], (c.num_experts, c.hidden_size), dtype),
            ),
        ),
    )


def _packed(key: jax.Array, experts: int, outputs: int, inputs: int) -> tuple[jax.Array, jax.Array]:
    blocks = jax.random.bits(key, (experts, outputs, inputs // BLOCK, BLOCK // 2), jnp.uint8)
    scale = 127 - round(math.log2(CODE_SPREAD * math.sqrt(inputs)))
    return blocks, jnp.full((experts, outputs, inputs // BLOCK), scale, jnp.uint8)


def _matrix(key: jax.Array, shape: tuple[int, int], inputs: int, dtype: DTypeLike) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) * inputs**-0.5).astype(dtype)


def _small(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    return (0.1 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
