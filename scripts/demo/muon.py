"""The demo target's optimiser: Muon on blocks of the matrices, Adam on everything else.

Muon wants the matrices that act on their own: one attention head, one expert. The parameters hold them side by side
in a few wide matrices; `split` cuts those into stacks [blocks, inputs, outputs], `join` is its inverse.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from target.config import TargetConfig
from target.params import TargetParams

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MOMENTUM = 0.95


def split(config: TargetConfig, params: TargetParams) -> dict[str, list[jax.Array]]:
    """Cut the matrices into stacks of blocks, a list over the layers each: per head, per expert's gate, up and down."""
    layers, c = params.layers, config
    heads = c.num_heads + 2 * c.num_kv_heads
    return {
        "qkv": [_columns(layer.attention.qkv, heads) for layer in layers],
        "out": [layer.attention.out.reshape(c.num_heads, c.head_dim, c.hidden_size) for layer in layers],
        "gate_up": [_columns(layer.moe.experts.gate_up, 2 * c.num_experts) for layer in layers],
        "down": [layer.moe.experts.down.reshape(c.num_experts, c.expert_width, c.hidden_size) for layer in layers],
    }


def join(params: TargetParams, blocks: dict[str, list[jax.Array]]) -> TargetParams:
    """Put the matrices that `split` cut out back into `params`."""
    layers = []
    for i, layer in enumerate(params.layers):
        attention = layer.attention.replace(qkv=_side_by_side(blocks["qkv"][i]), out=_stacked(blocks["out"][i]))
        experts = layer.moe.experts.replace(
            gate_up=_side_by_side(blocks["gate_up"][i]), down=_stacked(blocks["down"][i])
        )
        layers.append(layer.replace(attention=attention, moe=layer.moe.replace(experts=experts)))
    return params.replace(layers=tuple(layers))


def without_matrices(params: TargetParams) -> TargetParams:
    """Replace the matrices that `split` cuts out by None; Adam trains the rest."""
    layers = []
    for layer in params.layers:
        experts = layer.moe.experts.replace(gate_up=None, down=None)
        attention = layer.attention.replace(qkv=None, out=None)
        layers.append(layer.replace(attention=attention, moe=layer.moe.replace(experts=experts)))
    return params.replace(layers=tuple(layers))


def _columns(matrix: jax.Array, count: int) -> jax.Array:
    """Turn [inputs, count * outputs] into [count, inputs, outputs]."""
    return matrix.reshape(matrix.shape[0], count, -1).swapaxes(0, 1)


def _side_by_side(stack: jax.Array) -> jax.Array:
    """Invert `_columns`."""
    return stack.swapaxes(0, 1).reshape(stack.shape[1], -1)


def _stacked(stack: jax.Array) -> jax.Array:
    """Turn [count, inputs, outputs] into [count * inputs, outputs]."""
    return stack.reshape(-1, stack.shape[2])


def orthogonalise(stack: jax.Array) -> jax.Array:
    """Bring all singular values of each matrix of a stack [n, inputs, outputs] near 1 (Newton-Schulz)."""
    a, b, c = NEWTON_SCHULZ
    tall = stack.shape[1] > stack.shape[2]
    start = stack.swapaxes(1, 2) if tall else stack

    def one(x: jax.Array) -> jax.Array:
        x = x / (jnp.sqrt(jnp.sum(x * x)) + 1e-8)
        for _ in range(NEWTON_SCHULZ_STEPS):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x

    done = jax.lax.map(one, start)
    return done.swapaxes(1, 2) if tall else done


def muon_directions(gradients: Any, momentum: Any) -> tuple[Any, Any]:
    """Compute (steps of root mean square about 0.2, as Adam's; new momentum) for trees of stacks."""
    momentum = jax.tree.map(lambda m, g: MOMENTUM * m + (1 - MOMENTUM) * g, momentum, gradients)
    ahead = jax.tree.map(lambda m, g: MOMENTUM * m + (1 - MOMENTUM) * g, momentum, gradients)
    directions = jax.tree.map(lambda x: orthogonalise(x) * (0.2 * max(x.shape[1:]) ** 0.5), ahead)
    return directions, momentum


def adam() -> optax.GradientTransformation:
    """Make Adam's direction, without a learning rate."""
    return optax.scale_by_adam(b1=0.9, b2=0.98)
