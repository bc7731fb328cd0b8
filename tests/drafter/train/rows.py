"""Rows that drafters are trained on: two sequences of T tokens, packed documents and one whole, and their chains."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drafter.config import DrafterConfig
from drafter.train.cod import sample
from drafter.train.loss import TrainingRows
from drafter.train.recipe import Recipe
from peagle.ops.rope import RopeConfig
from tests.support.trainers import with_room

CONFIG = DrafterConfig(
    hidden_size=20,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=8,
    mlp_width=28,
    target_hidden_size=12,
    vocab_size=31,
    draft_vocab_size=31,
    mask_token_id=30,
    rope=RopeConfig(8, 10000.0),
)
SMALL = dataclasses.replace(CONFIG, num_heads=2, num_kv_heads=1, mlp_width=12)  # for gradients, which compile long
T = 24
QUICKLY: Any = {"xla_backend_optimization_level": 0}  # for programs that run once
Data = dict[str, np.ndarray]
Chains = tuple[np.ndarray, np.ndarray]  # (anchors, last_depth) of both sequences


def sequence(seed: int) -> Data:
    rng = np.random.default_rng(seed)
    segment_ids = np.array([[1] * 13 + [2] * 8 + [0] * 3, [1] * T], np.int32)
    trained = rng.random((2, T)) < 0.8
    positions = np.stack([np.concatenate([np.arange(13), np.arange(8), np.arange(3)]), np.arange(T)]).astype(np.int32)
    return {
        "token_ids": rng.integers(0, 30, (2, T)).astype(np.int32),
        "aux_hidden": rng.normal(0, 1, (2, T, CONFIG.aux_width)).astype(np.float32),
        "target_logits": rng.normal(0, 2, (2, T, 31)).astype(np.float32),
        "segment_ids": segment_ids,
        "positions": positions,
        "trained": (trained & (segment_ids > 0)).astype(np.float32),
    }


def on_device(data: Data) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value) for name, value in data.items()}


def training_rows(data: Data) -> TrainingRows:
    inputs = {name: data[name] for name in ("token_ids", "positions", "segment_ids", "trained")}
    return TrainingRows(**on_device(inputs), target={"aux_hidden": jnp.asarray(data["aux_hidden"])})


def recipe(depth: int, **values: Any) -> Recipe:
    """Make a recipe of whole sequences, with room for the chains of every position."""
    return with_room(Recipe(width=T, depth=depth, **values))


def chains(data: Data, recipe: Recipe) -> Chains:
    """Draw the chains of whole sequences."""
    return chains_of_parts(data, recipe)[0]


def chains_of_parts(data: Data, recipe: Recipe) -> list[Chains]:
    """Draw the chains of each part."""
    rng = np.random.default_rng(4)
    sampled = [sample(recipe, data["trained"][row] > 0, data["segment_ids"][row], rng) for row in range(2)]
    return [
        (np.stack([row[s][0] for row in sampled]), np.stack([row[s][1] for row in sampled]))
        for s in range(len(recipe.room))
    ]
