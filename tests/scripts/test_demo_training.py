"""The demo's trainers: their fast attention is the model's, their matrices go apart and together again, a batch is a
function of its step."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.demo import muon
from scripts.demo.checkpoint import load_tree, save_tree
from scripts.demo.train_target import Rows, Schedule, positions_of
from target import model
from target.packed_attention import attend_packed
from target.params import TargetParams
from tests.support.toys import CONFIG, tiny_target


def packed_rows(path: Path, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    segment_ids = np.tile(np.repeat(np.arange(1, 6, dtype=np.uint8), 6), (7, 1))
    token_ids = rng.integers(0, CONFIG.vocab_size, segment_ids.shape).astype(np.uint16)
    np.savez(path, token_ids=token_ids, segment_ids=segment_ids, roles=np.full_like(segment_ids, 2))
    return Rows(path, seed)


def test_packed_attention_is_the_models_attention() -> None:
    rng = np.random.default_rng(0)
    segment_ids = jnp.asarray(np.sort(rng.integers(0, 4, (2, 150)), axis=1), jnp.int32)
    positions = jnp.asarray(positions_of(np.asarray(segment_ids)))
    token_ids = jnp.asarray(rng.integers(0, CONFIG.vocab_size, (2, 150)), jnp.int32)
    params = tiny_target().params

    @jax.jit
    def both(params: TargetParams) -> tuple[jax.Array, jax.Array]:
        expected, _ = model.forward(params, CONFIG, token_ids, positions, segment_ids=segment_ids)
        attend = attend_packed(CONFIG, segment_ids)
        return expected, model.forward(params, CONFIG, token_ids, positions, attend=attend)[0]

    expected, logits = both(params)
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_the_matrices_come_together_as_they_were() -> None:
    params = tiny_target().params
    joined = muon.join(muon.without_matrices(params), muon.split(CONFIG, params))
    jax.tree.map(np.testing.assert_array_equal, joined, params)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    stack = jnp.asarray(np.random.default_rng(0).normal(0, 3, (2, 24, 40)), jnp.float32)
    for shape in (stack, stack.swapaxes(1, 2)):
        values = np.linalg.svd(np.asarray(muon.orthogonalise(shape)), compute_uv=False)
        assert values.min() > 0.5
        assert values.max() < 1.4


def test_a_batch_depends_on_its_step_alone_and_takes_every_row_in_turn(tmp_path: Path) -> None:
    raw, chat = packed_rows(tmp_path / "raw.npz", 0), packed_rows(tmp_path / "chat.npz", 1)
    first, again = (Schedule(40).batch_at(9, raw, chat) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert (first.positions.max(axis=1) == 5).all()
    assert (np.asarray(first.weights)[np.asarray(first.positions) == 0] == 0).all()
    assert sorted(raw.at(0, 7)) == list(range(7))
    steps = [Schedule(40).chat_rows_until(step) for step in range(41)]
    assert steps == sorted(steps)


def test_the_rate_warms_up_and_ends_at_zero() -> None:
    rates = [Schedule(1000).rate_at(step) for step in range(1000)]
    assert max(rates) == 1
    assert rates[0] < 0.1
    assert rates[-1] < 0.001
    assert rates[300] == 1


def test_a_tree_is_stored_whole_and_read_back(tmp_path: Path) -> None:
    tree = {"a": jnp.arange(3), "b": (jnp.ones((2, 2)),)}
    save_tree(tmp_path / "tree.npz", tree)
    jax.tree.map(np.testing.assert_array_equal, load_tree(tmp_path / "tree.npz", tree), tree)
    with pytest.raises(SystemExit, match="expected"):
        load_tree(tmp_path / "tree.npz", {"a": jnp.arange(4), "b": (jnp.ones((2, 2)),)})
