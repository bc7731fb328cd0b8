"""Trainings of a tiny drafter whose target is a rule, in one program."""

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafter.config import DrafterConfig
from drafter.params import DrafterParams, init_params
from drafter.train import step
from drafter.train.cod import Partition
from drafter.train.folder import LOG, read_log
from drafter.train.recipe import Recipe
from drafter.train.row_batches import DocumentSource, RowBatches, pack
from drafter.train.shards import Document
from drafter.train.trainer import Trainer
from peagle.ops.rope import RopeConfig

VOCAB = 23
CONFIG = DrafterConfig(
    hidden_size=12,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_width=14,
    target_hidden_size=10,
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    mask_token_id=VOCAB - 1,
    rope=RopeConfig(8, 10000.0),
    num_aux_layers=2,
    aux_layer_ids=(0, 1),
)
STEPS = 12
RECIPE = Recipe(rows=2, width=24, depth=3, optimizer="adamw", learning_rate=0.02, other_rate=0.02)


def keep_programs(patch: pytest.MonkeyPatch) -> None:
    """Keep every step that is compiled: a process that trains keeps one, these tests train by turns."""
    for name in ("step_program", "sums_program"):
        patch.setattr(f"drafter.train.trainer.{name}", functools.cache(getattr(step, name).__wrapped__))


@flax.struct.dataclass
class Counting:
    """A target whose next token depends on the last one: the next but one in the vocabulary. Its aux_hidden is that
    token's row of a table."""

    table: jax.Array

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del positions, segment_ids
        following = (token_ids + 2) % (VOCAB - 1)
        return 20 * jax.nn.one_hot(following, VOCAB), self.table[token_ids]


def document(start: int, size: int) -> Document:
    return Document((start + 2 * np.arange(size)).astype(np.int32) % (VOCAB - 1), np.arange(size) >= 2)


def with_room(recipe: Recipe) -> Recipe:
    """Give a recipe room for the chains of every position."""
    return dataclasses.replace(recipe, room=Partition.of(recipe).counts(recipe, recipe.width))


def trainer(out: Path, recipe: Recipe = RECIPE, starts: Iterable[int] = range(30), **options: Any) -> Trainer:
    """Make a training of the documents that begin with these tokens."""
    source = DocumentSource(pack([document(start, 7 + start % 5) for start in starts], recipe.width), recipe.rows)
    table = jax.random.normal(jax.random.key(3), (VOCAB, CONFIG.aux_width), jnp.float32)
    out.mkdir(exist_ok=True)
    fixed, batches = step.Fixed(teacher=Counting(table)), RowBatches((source,), with_room(recipe))
    return Trainer(out, CONFIG, batches, fixed, **{"steps": STEPS, "save_every": 4, "log_every": 2, **options})


def initial() -> DrafterParams:
    return jax.jit(init_params, static_argnums=0)(CONFIG, jax.random.key(0))


def same(one: DrafterParams, other: DrafterParams) -> bool:
    return all(bool(np.array_equal(a, b)) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def curve(out: Path) -> list[tuple[int, float]]:
    """Read (step, loss) of the log."""
    return [(line["step"], line["loss"]) for line in read_log(out / LOG) if "loss" in line]
