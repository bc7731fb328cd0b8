"""Training and inference compute the same thing; COD keeps whole chains only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafter import model
from drafter.config import DrafterConfig
from drafter.params import init_params
from drafter.train.cod import Cod, sample_chains
from drafter.train.forward import forward_chains, rows_of
from drafter.train.loss import chain_loss
from peagle.ops.rope import RopeConfig

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
T = 24


def sequence(seed: int) -> dict[str, np.ndarray]:
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


@pytest.fixture(scope="module")
def params():
    leaves, tree = jax.tree.flatten(init_params(CONFIG, jax.random.key(0)))
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [leaf + jnp.asarray(rng.normal(0, 0.1, leaf.shape), leaf.dtype) for leaf in leaves])


def on_device(data: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value) for name, value in data.items()}


def chains(data: dict[str, np.ndarray], cod: Cod, counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    sampled = [sample_chains(cod, data["trained"][row] > 0, data["segment_ids"][row], counts, rng) for row in range(2)]
    return np.stack([anchors for anchors, _ in sampled]), np.stack([reach for _, reach in sampled])


def test_the_chains_pass_equals_the_uncached_pass_under_the_group_causal_mask(params) -> None:
    data, cod = sequence(1), Cod(depth=4)
    counts = cod.counts(T)
    anchors, _ = chains(data, cod, counts)
    device = on_device(data)
    x = forward_chains(
        params,
        CONFIG,
        *(device[name] for name in ("token_ids", "aux_hidden", "segment_ids", "positions")),
        jnp.asarray(anchors),
        counts,
    )
    anchor, depth = rows_of(jnp.asarray(anchors), counts, T)
    take = lambda values: jnp.take_along_axis(jnp.asarray(values), anchor, axis=1)  # noqa: E731
    starts = take(np.arange(T, dtype=np.int32)[None] - data["positions"])
    expected = model.forward(
        params,
        CONFIG,
        take(data["token_ids"]),
        jnp.take_along_axis(jnp.asarray(data["aux_hidden"]), anchor[:, :, None], axis=1),
        anchor - starts,
        depth,
        segment_ids=take(data["segment_ids"]),
    )
    real = take(data["segment_ids"]) > 0
    difference = jnp.where(real[:, :, None], jnp.abs(model._logits(params, CONFIG, x) - expected), 0.0)
    assert float(difference.max()) < 2e-5


def test_cod_keeps_whole_chains_inside_the_trained_region() -> None:
    data, cod = sequence(2), Cod(depth=5, ratio=0.8, min_ratio=0.2)
    counts = cod.counts(T)
    anchors, reach = chains(data, cod, counts)
    for row in range(2):
        assert len(set(anchors[row].tolist())) == len(anchors[row])
        assert (np.diff(reach[row]) <= 0).all()
        assert all((reach[row] >= d).sum() <= counts[d - 1] for d in range(1, cod.depth))
        assert (reach[row] > 0).any()
        for anchor, deepest in zip(anchors[row], reach[row], strict=True):
            for depth in range(deepest + 1) if deepest else ():
                label = anchor + depth + 2
                assert data["trained"][row, label] > 0
                assert data["segment_ids"][row, label] == data["segment_ids"][row, anchor]


def test_cod_counts_are_those_of_the_paper() -> None:
    assert Cod(depth=4, ratio=0.8, min_ratio=0.2).counts(100) == (79, 62, 49)
    assert Cod(depth=3, ratio=0.1, min_ratio=0.2).counts(10) == (1, 1)
    everywhere = np.ones((40,), bool), np.ones((40,), np.int32)
    cod = Cod(depth=4)
    _, reach = sample_chains(cod, *everywhere, cod.counts(40), np.random.default_rng(0))
    expected = cod.counts(38)  # of 40 anchors the last two have no label
    assert tuple(int((reach >= d).sum()) for d in (1, 2, 3)) == expected


def test_the_loss_counts_each_kept_row_once_and_reads_the_targets_row_before_its_token(params) -> None:
    data, cod = sequence(3), Cod(depth=3)
    counts = cod.counts(T)
    anchors, reach = chains(data, cod, counts)
    device, on_anchors = on_device(data), jnp.asarray(anchors)
    loss, (hits, rows) = chain_loss(
        params, CONFIG, **device, anchors=on_anchors, reach=jnp.asarray(reach), counts=counts
    )
    # brute force, row by row, through the uncached pass
    shifted = jnp.pad(device["token_ids"][:, 1:], ((0, 0), (0, 1)))
    others = (device[name] for name in ("aux_hidden", "segment_ids", "positions"))
    x = forward_chains(params, CONFIG, shifted, *others, on_anchors, counts)
    log_probs = np.asarray(jax.nn.log_softmax(model._logits(params, CONFIG, x), axis=-1))
    anchor, depth = map(np.asarray, rows_of(jnp.asarray(anchors), counts, T))
    total, count = 0.0, np.zeros(cod.depth)
    for b in range(2):
        kept = {(a, d) for a, r in zip(anchors[b], reach[b], strict=True) for d in range(1, r + 1)}
        for row, (a, d) in enumerate(zip(anchor[b], depth[b], strict=True)):
            token = a + d + 2
            if (d and (a, d) not in kept) or token >= T or not data["trained"][b, token]:
                continue
            if data["segment_ids"][b, token] != data["segment_ids"][b, a]:
                continue
            logits = data["target_logits"][b, token - 1]
            soft = np.exp(logits - logits.max())
            label = 0.5 * soft / soft.sum()
            label[logits.argmax()] += 0.5
            total -= (label * log_probs[b, row]).sum()
            count[d] += 1
    np.testing.assert_allclose(rows, count)
    np.testing.assert_allclose(float(loss), total, rtol=1e-5)
    assert (np.asarray(hits) <= count).all()
