"""A sequence trained part after part: gradients add up to those of the whole, and a part has the memory of a part."""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafter.config import DrafterConfig
from drafter.params import init_params
from drafter.train import forward, loss
from drafter.train.cod import Partition, sample
from drafter.train.loss import Sums
from drafter.train.recipe import Recipe
from drafter.train.row_batches import RowBatch
from drafter.train.step import Fixed, gradients_of
from peagle.base.errors import InputError
from tests.drafter.train.rows import QUICKLY, SMALL, T, chains_of_parts, on_device, sequence
from tests.support.trainers import with_room

pytestmark = pytest.mark.compile

RECIPE = Recipe(width=T, depth=3)
IN_BLOCKS = dataclasses.replace(
    SMALL, num_layers=1, hidden_size=SMALL.target_hidden_size, num_heads=3, block_size=3, qk_norm=True
)
DRAFTERS = {
    "P-EAGLE": dataclasses.replace(SMALL, num_layers=1),
    "P-EAGLE, windows": dataclasses.replace(SMALL, windows=(4, 3)),
    "EAGLE-3, windows": dataclasses.replace(SMALL, windows=(4, 3), mask_token_id=None),
    "DFlash": IN_BLOCKS,
    "DFlash, a window": IN_BLOCKS.with_window(6),
}
run = jax.jit(gradients_of, static_argnums=(1, 2), compiler_options=QUICKLY)


@flax.struct.dataclass
class Known:
    """A target whose results are known."""

    logits: jax.Array
    aux_hidden: jax.Array

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return self.logits, self.aux_hidden


def gradients(config: DrafterConfig, parts: int) -> tuple[Sums, Any]:
    """Train both sequences in so many parts, with room for all anchors. The first of four parts would train nothing."""
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(2))
    blocks, room = T if config.kind == "DFlash" else None, ((T // parts,) * 2,) * parts
    recipe, data = dataclasses.replace(RECIPE, parts=parts, blocks=blocks, room=room), sequence(6)
    data["trained"][:, :8] = 0.0
    drawn = chains_of_parts(data, recipe)
    anchors, last_depth = (tuple(jnp.asarray(part[i]) for part in drawn) for i in (0, 1))
    device = on_device(data)
    target = Known(device.pop("target_logits"), device.pop("aux_hidden"))
    batch = RowBatch(**device, anchors=anchors, last_depth=last_depth, teacher={})
    sums: Sums
    sums, gradient = run(params, config, recipe, Fixed(teacher=target), batch)
    return sums, gradient


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("DFlash", "EAGLE-3, windows"))) for name in DRAFTERS],
)
def test_gradients_of_parts_add_up_to_those_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Algorithm 1: every kept row counts in one part, with all of its context, or with what its windows reach.

    The whole runs the code for short sequences, the parts the code for long ones, with blocks of rows and of logits."""
    whole, expected = gradients(DRAFTERS[name], 1)
    for module, constant, value in ((forward, "LONG", 1), (forward, "LONG_CHUNK", 7), (loss, "CHUNK_BYTES", 1240)):
        monkeypatch.setattr(module, constant, value)
    # without windows every part is a program of its own
    of_parts, total = gradients(DRAFTERS[name], 2 if DRAFTERS[name].windows is None else 4)
    np.testing.assert_array_equal(of_parts.rows, whole.rows)
    np.testing.assert_allclose(of_parts.loss, whole.loss, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(total), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5 * float(np.abs(one).max()) + 1e-7)


def test_a_part_has_room_for_its_share_and_cuts_the_deepest_excess() -> None:
    recipe = with_room(Recipe(width=40, depth=4, ratio=0.9, parts=4))
    partition, everywhere = Partition.of(recipe), (np.ones((40,), bool), np.ones((40,), np.int32))
    assert len(recipe.room) == 4
    assert all(10 >= room[0] >= room[1] >= room[2] >= 40 * 0.9**3 / 4 for room in recipe.room)
    parts = sample(recipe, *everywhere, np.random.default_rng(0))
    spans = zip(parts, recipe.room, partition.starts, partition.ends, strict=True)
    for (anchors, last_depth), room, start, end in spans:
        assert all((last_depth >= d).sum() <= room[d - 1] for d in (1, 2, 3))
        grown = anchors[last_depth > 0]
        assert ((start <= grown + 1) & (grown + 1 < end)).all()
        assert (anchors < end).all(), "padding stays where there is context"


@pytest.mark.parametrize(("starts", "says"), [((1, 3), "expected 0 first"), ((0, 9, 9), "ascending")])
def test_parts_that_make_no_sense_are_one_line(starts: tuple[int, ...], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Partition(12, starts)


def test_with_windows_memory_is_that_of_a_part_whatever_the_row() -> None:
    """A gradient over a row of thousands of tokens takes what a part and its receptive field take: here 134 tokens at
    depth 2, of which a value of every kind and all scores are small beside a single value of all rows."""
    config = dataclasses.replace(SMALL, num_layers=1, windows=(4,))
    params = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    width, parts = 1 << 13, 1 << 6
    recipe = Recipe(width=width, depth=2, parts=parts)
    recipe = dataclasses.replace(recipe, room=Partition.of(recipe).counts(recipe, 8, 8))
    ids, real = (jax.ShapeDtypeStruct((1, width), dtype) for dtype in (jnp.int32, jnp.float32))
    chains = (jax.ShapeDtypeStruct((1, recipe.room[0][0]), jnp.int32),) * parts
    kinds = {"top_ids": ((2,), jnp.int32), "top_logits": ((2,), jnp.float32), "log_total": ((), jnp.float32)}
    kinds["aux_hidden"] = ((SMALL.aux_width,), jnp.float32)
    stored = {name: jax.ShapeDtypeStruct((1, width, *shape), dtype) for name, (shape, dtype) in kinds.items()}
    batch = RowBatch(ids, ids, ids, real, chains, chains, stored)
    compiled = run.lower(params, config, recipe, Fixed(), batch).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * width * SMALL.hidden_size
