"""Training DFlash: it computes what drafting does; blocks begin at random trained tokens; the target's ends stay."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafter import reference
from drafter.load import to_tensors
from drafter.model import head
from drafter.params import DrafterParams
from drafter.train.cod import sample
from drafter.train.forward import forward_blocks
from drafter.train.loss import Sums, chain_loss, labels_of_logits
from drafter.train.optimizer import optimizer
from drafter.train.recipe import Recipe
from drafter.train.row_batches import RowBatch
from drafter.train.step import Fixed, State, next_state
from tests.drafter.train.rows import training_rows
from tests.support.drafters import BIASED, CONFIGS, DFLASH_CONFIGS, ONE, PLAIN, random_params

pytestmark = pytest.mark.compile

T, DEPTH, BLOCKS = 24, 4, 7
CONFIG = DFLASH_CONFIGS[PLAIN]
ONE_LAYER = dataclasses.replace(CONFIG, num_layers=1)  # for programs whose layers do not matter
RECIPE = Recipe(width=T, depth=DEPTH, draft_decay=4.0, learning_rate=1e-2, other_rate=1e-4)
losses = jax.jit(chain_loss, static_argnames=("config", "loss", "counts", "part", "draft_decay"))


def row(seed: int) -> dict[str, np.ndarray]:
    """Make a row of two documents and padding."""
    rng = np.random.default_rng(seed)
    segment_ids = np.array([[1] * 12 + [2] * 9 + [0] * 3], np.int32)
    return {
        "token_ids": rng.integers(0, 40, (1, T)).astype(np.int32),
        "aux_hidden": rng.normal(0, 1, (1, T, CONFIG.aux_width)).astype(np.float32),
        "segment_ids": segment_ids,
        "positions": np.array([[*range(12), *range(9), *range(3)]], np.int32),
        "trained": ((rng.random((1, T)) < 0.8) & (segment_ids > 0)).astype(np.float32),
    }


def of_blocks(blocks: int) -> Recipe:
    return dataclasses.replace(RECIPE, blocks=blocks, room=((blocks,) * (DEPTH - 1),))


def sampled(data: dict[str, np.ndarray], blocks: int, seed: int = 4) -> tuple[np.ndarray, np.ndarray]:
    own = data["trained"][0] > 0, data["segment_ids"][0]
    ((anchors, last_depth),) = sample(of_blocks(blocks), *own, np.random.default_rng(seed))
    return anchors[None], last_depth[None]


@pytest.mark.parametrize(("name", "window"), [(PLAIN, None), (BIASED, 6)])
def test_training_computes_the_references_drafts(name: str, window: int | None) -> None:
    """At anchors of both documents: the logits of every draft are those of drafting after the anchor."""
    config, params = DFLASH_CONFIGS[name].with_window(window), random_params(DFLASH_CONFIGS[name])
    assert config.block_drafts is not None
    depth = config.block_drafts  # a drafter's blocks are whole, in training and in the reference
    rng, anchors = np.random.default_rng(1), np.array([[3, 14, 0, 9]], np.int32)
    data = row(2)
    aux = rng.normal(0, 1, (1, T, config.aux_width)).astype(np.float32)
    shifted = np.roll(data["token_ids"], -1, axis=1)
    run = jax.jit(forward_blocks, static_argnames=("config", "depth"))
    x = run(params, config, shifted, aux, data["segment_ids"], data["positions"], anchors, depth)
    logits = np.asarray(jax.jit(head, static_argnums=1)(params, config, x))[0]
    ends = {"embed_tokens.weight": np.asarray(params.embedding), "lm_head.weight": np.asarray(params.lm_head).T}
    tensors = {**to_tensors(params, config.with_window(None)), **ends}
    for number, anchor in enumerate(anchors[0].tolist()):
        begin = 0 if anchor < 12 else 12
        known = data["token_ids"][0, begin : anchor + 2].tolist(), aux[0, begin : anchor + 1]
        expected = reference.draft_logits(tensors, config, *known, depth)
        np.testing.assert_allclose(logits[number :: anchors.shape[1]], expected, atol=1e-4)


def test_blocks_begin_at_trained_tokens_and_do_not_repeat() -> None:
    data = row(3)
    anchors, last_depth = sampled(data, BLOCKS)
    real = anchors[last_depth >= 0]
    assert len(set(real.tolist())) == len(real) == BLOCKS
    assert set(last_depth[last_depth >= 0].tolist()) == {DEPTH - 1}
    first = real + 2
    assert (data["trained"][0, first] > 0).all()
    assert (data["segment_ids"][0, first] == data["segment_ids"][0, real]).all()
    assert set(sampled(data, BLOCKS, seed=5)[0][0].tolist()) != set(real.tolist())
    anchors, last_depth = sampled(data, T)
    assert (last_depth == -1).any()  # more room than anchors
    expected = [
        a
        for a in range(T - 2)
        if data["trained"][0, a + 2] and data["segment_ids"][0, a] == data["segment_ids"][0, a + 2]
    ]
    assert sorted(anchors[last_depth >= 0].tolist()) == [a for a in expected if data["segment_ids"][0, a]]


def sums_of(params: DrafterParams, data: dict[str, np.ndarray], chains: Any, counts: Any, **options: Any) -> Sums:
    logits = np.random.default_rng(7).normal(0, 2, (1, T, CONFIG.vocab_size)).astype(np.float32)
    labels = labels_of_logits(jnp.asarray(logits), None)
    return losses(params, ONE_LAYER, "half", training_rows(data), labels, *chains, counts, **options)


def test_rows_without_a_trained_token_and_padding_do_not_count() -> None:
    """Counted by hand, with every anchor; a block reaches into neither the next document nor the prompt."""
    data = row(5)
    anchors, last_depth = sampled(data, T)
    sums = sums_of(random_params(ONE_LAYER), data, (anchors, last_depth), of_blocks(T).room[0])
    segment, trained = data["segment_ids"][0], data["trained"][0]
    expected = [
        sum(
            trained[a + depth + 2] > 0 and segment[a + depth + 2] == segment[a]
            for a, r in zip(anchors[0], last_depth[0], strict=True)
            if r >= 0 and a + depth + 2 < T
        )
        for depth in range(DEPTH)
    ]
    assert np.asarray(sums.rows).tolist() == expected
    assert expected[0] > expected[-1] > 0


def test_later_drafts_count_less_by_the_decay() -> None:
    data, params = row(6), random_params(ONE_LAYER)
    anchors, last_depth = sampled(data, BLOCKS)

    def loss_of(draft: int, decay: float | None) -> float:
        """The loss with the tokens of one draft alone trained, for one block."""
        anchor = int(anchors[0, 0])
        only = np.zeros_like(data["trained"])
        only[0, anchor + 2 + draft] = 1.0
        same = np.array(data["segment_ids"])
        same[0, : anchor + 3 + draft] = same[0, anchor]
        chains = anchors[:, :1], last_depth[:, :1]
        few = (1,) * (DEPTH - 1)
        changed = {**data, "trained": only, "segment_ids": same}
        return float(sums_of(params, changed, chains, few, draft_decay=decay).loss)

    for draft in range(DEPTH):
        assert loss_of(draft, 4.0) == pytest.approx(loss_of(draft, None) * np.exp(-draft / 4.0), rel=1e-5)


def batch_of(data: dict[str, np.ndarray], chains: list[tuple[np.ndarray, np.ndarray]]) -> RowBatch:
    rng = np.random.default_rng(8)
    teacher = {
        "aux_hidden": data["aux_hidden"],
        "top_ids": rng.integers(0, CONFIG.vocab_size, (1, T, 2)).astype(np.int32),
        "top_logits": rng.normal(0, 1, (1, T, 2)).astype(np.float32),
        "log_total": np.full((1, T), 2.0, np.float32),
    }
    names = ("token_ids", "positions", "segment_ids", "trained")
    anchors, last_depth = zip(*chains, strict=True)
    return jax.tree.map(jnp.asarray, RowBatch(*(data[name] for name in names), anchors, last_depth, teacher))


@pytest.mark.parametrize("rule", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_step_trains_all_but_the_targets_embedding_and_head(rule: Any) -> None:
    data = row(10)
    recipe = dataclasses.replace(of_blocks(BLOCKS), optimizer=rule, weight_decay=0.1)
    batch = batch_of(data, [sampled(data, BLOCKS)])
    whole = random_params(ONE_LAYER)
    fixed = Fixed.of(whole, ONE_LAYER, None)
    params = dataclasses.replace(whole, embedding=None, lm_head=None)
    mesh, everywhere = jax.make_mesh((1,), ("rows",)), jax.sharding.PartitionSpec()

    def step(state: State) -> State:
        return next_state(ONE_LAYER, recipe, state, jnp.float32(10), fixed, batch)[0]

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False))
    state = State(params, optimizer(recipe, jnp.float32(10)).init(params))
    stepped = run(run(state)).params  # the rate is 0 in the first step
    for path, before in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        after = dict(jax.tree.leaves_with_path(stepped))[path]
        assert not np.array_equal(before, after), name
    assert stepped.embedding is None
    assert Fixed.of(random_params(CONFIGS[ONE]), CONFIGS[ONE], None).frozen is None
