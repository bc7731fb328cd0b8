"""The demo's training: its attention is the model's, a batch depends on its step alone, the update is Muon's."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from scripts.demo import target
from scripts.demo.target import (
    BATCH_ROWS,
    STEP_TOKENS,
    Batches,
    Rows,
    Stage,
    blocks,
    init_state,
    joined,
    optimizer,
    positions_of,
    restored,
    save,
)
from target import model
from target.packed_attention import attend_packed
from target.params import TargetParams
from tests.support.toys import CONFIG, tiny_target

STAGE = Stage(40 * STEP_TOKENS, 1.0, 0.01, 0.6, chat_frac=((0.0, 0.4), (0.5, 0.9)))
LONG = Stage(50 * STEP_TOKENS, 0.3, 0.03, 0.97, shares={"short": 3, "long": 2})


def rows_of(folder: Path, **widths: int) -> Mapping[str, Rows]:
    """Write twelve random rows of each kind, of segments of six tokens."""
    for seed, (kind, width) in enumerate(widths.items()):
        segments = np.tile(np.arange(width) // 6 % 250 + 1, (12, 1)).astype(np.uint8)
        token_ids = np.random.default_rng(seed).integers(1, CONFIG.vocab_size, segments.shape).astype(np.uint16)
        np.savez(folder / f"{kind}.npz", token_ids=token_ids, segment_ids=segments, roles=np.full_like(segments, 2))
    return {kind: Rows(folder / f"{kind}.npz") for kind in widths}


def test_packed_attention_is_the_models_attention() -> None:
    rng = np.random.default_rng(0)
    segment_ids = jnp.asarray(np.sort(rng.integers(0, 4, (2, 150)), axis=1), jnp.int32)
    positions = jnp.asarray(positions_of(np.asarray(segment_ids)))
    token_ids = jnp.asarray(rng.integers(0, CONFIG.vocab_size, (2, 150)), jnp.int32)
    params = tiny_target().params

    @jax.jit
    def both(params: TargetParams) -> tuple[jax.Array, jax.Array]:
        expected, _ = model.forward(params, CONFIG, token_ids, positions, segment_ids=segment_ids)
        attend = attend_packed(params, CONFIG, segment_ids)
        return expected, model.forward(params, CONFIG, token_ids, positions, attend=attend)[0]

    expected, logits = both(params)
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_blocks_join_to_the_parameters_again() -> None:
    params = tiny_target().params
    jax.tree.map(np.testing.assert_array_equal, joined(blocks(CONFIG, params)), params)


def test_each_head_and_expert_is_orthogonalised_alone() -> None:
    """The first update of a block has singular values near 0.2 sqrt(its larger side), whatever the gradient's size."""
    params = blocks(CONFIG, tiny_target().params)
    rng = np.random.default_rng(0)
    gradients = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 3, x.shape), jnp.float32), params)
    rule = optimizer()
    with jax.numpy_dtype_promotion("standard"):  # optax's
        updates, _ = rule.update(gradients, rule.init(params), params)
    decay = target.MUON_RATE * target.WEIGHT_DECAY
    for layer, weights in zip(updates.layers, params.layers, strict=True):
        for stack, weight in (
            (layer.attention.qkv, weights.attention.qkv),
            (layer.attention.out, weights.attention.out),
            (layer.moe.experts.gate_up, weights.moe.experts.gate_up),
            (layer.moe.experts.down, weights.moe.experts.down),
        ):
            step = np.asarray(stack + decay * weight) / target.MUON_RATE
            values = np.linalg.svd(step, compute_uv=False) / (0.2 * max(step.shape[1:]) ** 0.5)
            assert values.min() > 0.4
            assert values.max() < 1.4


def test_a_batch_depends_on_its_step_alone_and_takes_every_row_in_turn(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, raw_512=512, chat_512=512)
    batches = Batches(STAGE, rows)
    assert batches.steps == 40
    first, again = (same.at(9) for same in (batches, Batches(STAGE, rows)))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert first.token_ids.shape == (BATCH_ROWS, 512)
    assert (first.positions.max(axis=1) == 5).all()
    assert (np.asarray(first.weights)[np.asarray(first.positions) == 0] == 0).all()
    assert sorted(rows["raw_512"].numbers(0, 12)) == list(range(12))
    chat = [batches.chat_rows_until(step) for step in range(41)]
    assert chat == sorted(chat)


def test_kinds_of_rows_have_their_shares_of_steps_in_another_order_each_round(tmp_path: Path) -> None:
    """Of a kind each row comes once before any comes again, whatever steps of the other kind lie between."""
    batches = Batches(LONG, rows_of(tmp_path, short=512, long=2048))
    kinds = [batches.kind_at(step) for step in range(batches.steps)]
    rounds = [tuple(kinds[first : first + 5]) for first in range(0, 50, 5)]
    assert all(Counter(order) == LONG.shares for order in rounds)
    assert len(set(rounds)) > 1
    for kind in LONG.shares:
        taken = [batches.at(step) for step in range(50) if kinds[step] == kind]
        assert {batch.token_ids.size for batch in taken} == {STEP_TOKENS}
        count = len(taken[0].token_ids)
        rows = np.concatenate([np.asarray(batch.token_ids) for batch in taken])[: 12 // count * count]
        assert len(np.unique(rows, axis=0)) == len(rows)


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    state = init_state(CONFIG)
    later = jax.tree.map(lambda leaf: leaf + 1, state)
    assert restored(tmp_path, state)[1] == 0
    save(tmp_path, state, 3)
    save(tmp_path, later, 5)
    found, step = restored(tmp_path, state)
    assert step == 5
    jax.tree.map(np.testing.assert_array_equal, found, later)
