"""Training and inference compute the same thing; COD keeps whole chains only; every kept row counts once."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafter import model, reference
from drafter.config import DrafterConfig
from drafter.load import to_tensors
from drafter.params import init_params
from drafter.propose import AnyDrafter, Eagle3, PEagle
from drafter.train import loss
from drafter.train.cod import counts as cod_counts
from drafter.train.cod import sample
from drafter.train.forward import forward_chains, rows_of
from drafter.train.loss import Labels, labels_of_best, labels_of_logits, losses_of_rows
from drafter.train.recipe import LOSSES, Recipe
from peagle.ops.attention import PagedCache
from peagle.ops.messages import DrafterInput
from tests.drafter.train.rows import CONFIG, SMALL, T, chains, on_device, recipe, sequence, training_rows
from tests.support.paging import small_pages
from tests.support.trainers import with_room

pytestmark = pytest.mark.compile

loss_of_chains = jax.jit(loss.chain_loss, static_argnames=("config", "loss", "counts", "part"))
run_chains = jax.jit(forward_chains, static_argnames=("config", "counts"))
head = jax.jit(model.head, static_argnums=1)


@pytest.fixture(scope="module")
def params():
    leaves, tree = jax.tree.flatten(jax.jit(init_params, static_argnums=0)(CONFIG, jax.random.key(0)))
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [leaf + jnp.asarray(rng.normal(0, 0.1, leaf.shape), leaf.dtype) for leaf in leaves])


@pytest.fixture(scope="module")
def small():
    return jax.jit(init_params, static_argnums=0)(SMALL, jax.random.key(2))


def sums(
    params: Any,
    data: dict[str, np.ndarray],
    name: str,
    labels: Labels | None = None,
    config: DrafterConfig = CONFIG,
    **options: Any,
) -> loss.Sums:
    """Compute chain_loss with labels from the data's logits."""
    labels = labels or labels_of_logits(jnp.asarray(data["target_logits"]), None)
    return loss_of_chains(params, config, name, training_rows(data), labels, **options)


@pytest.mark.parametrize(
    "windows",
    [
        pytest.param(None, marks=pytest.mark.slow),
        pytest.param((5, None), marks=pytest.mark.slow),
        (2, 3),  # a chain may be longer than a window
    ],
)
def test_chains_give_the_references_logits(params, windows: tuple[int | None, ...] | None) -> None:
    """A row sees the context up to its anchor, and its own chain up to itself, within its document."""
    config = dataclasses.replace(CONFIG, windows=windows)
    data, cod = sequence(1), recipe(depth=4)
    (counts,) = cod.room
    anchors, _ = chains(data, cod)
    device, tensors = on_device(data), to_tensors(params, config)
    context = [device[name] for name in ("token_ids", "aux_hidden", "segment_ids", "positions")]
    logits = np.asarray(head(params, config, run_chains(params, config, *context, jnp.asarray(anchors), counts)))
    anchor, depth = map(np.asarray, rows_of(jnp.asarray(anchors), counts, T))
    mask = reference.projected(tensors, config, tensors["mask_hidden"].reshape(-1))
    for b in range(2):
        segment = data["segment_ids"][b]
        places = [(a, d) for a, d in zip(anchor[b].tolist(), depth[b].tolist(), strict=True) if segment[a] > 0]
        rows = [
            (config.mask_token_id, mask)
            if d
            else (int(data["token_ids"][b, a]), reference.projected(tensors, config, data["aux_hidden"][b, a]))
            for a, d in places
        ]
        visible = [
            [
                key
                for key, (k, e) in enumerate(places)
                if segment[k] == segment[a] and ((e == 0 and k <= a) or (k == a and e <= d))
            ]
            for a, d in places
        ]
        positions = [int(data["positions"][b, a]) + d for a, d in places]
        expected, _ = reference.row_outputs(tensors, config, rows, positions, visible)
        np.testing.assert_allclose(logits[b][segment[anchor[b]] > 0], expected, atol=2e-5)


def test_cod_keeps_whole_chains_inside_the_trained_region() -> None:
    data, cod = sequence(2), recipe(depth=5)
    (counts,) = cod.room
    anchors, last_depth = chains(data, cod)
    for row in range(2):
        assert len(set(anchors[row].tolist())) == len(anchors[row])
        assert (np.diff(last_depth[row]) <= 0).all()
        assert all((last_depth[row] >= d).sum() <= counts[d - 1] for d in range(1, cod.depth))
        assert (last_depth[row] > 0).any()
        for anchor, deepest in zip(anchors[row], last_depth[row], strict=True):
            for depth in range(deepest + 1) if deepest else ():
                label = anchor + depth + 2
                assert data["trained"][row, label] > 0
                assert data["segment_ids"][row, label] == data["segment_ids"][row, anchor]


def test_cod_counts_are_those_of_the_paper() -> None:
    assert cod_counts(Recipe(depth=4, ratio=0.8), 100) == (79, 62, 49)
    assert cod_counts(Recipe(depth=3, ratio=0.1), 10) == (1, 1)
    cod = with_room(Recipe(width=40, depth=4))
    everywhere = np.ones((40,), bool), np.ones((40,), np.int32)
    ((_, last_depth),) = sample(cod, *everywhere, np.random.default_rng(0))
    expected = cod_counts(cod, 38)  # of 40 anchors the last two have no label
    assert tuple(int((last_depth >= d).sum()) for d in (1, 2, 3)) == expected


def test_the_loss_counts_each_kept_row_once_and_reads_the_targets_row_before_its_token(params) -> None:
    data, cod = sequence(3), recipe(depth=3)
    (counts,) = cod.room
    anchors, last_depth = chains(data, cod)
    device, on_anchors, depths = on_device(data), jnp.asarray(anchors), jnp.asarray(last_depth)
    run = jax.jit(lambda: sums(params, data, "half", anchors=on_anchors, last_depth=depths, counts=counts))
    result = run()
    # brute force, row by row, through the uncached pass
    shifted = np.pad(data["token_ids"][:, 1:], ((0, 0), (0, 1)))
    others = (device[name] for name in ("aux_hidden", "segment_ids", "positions"))
    x = run_chains(params, CONFIG, shifted, *others, on_anchors, counts)
    log_probs = np.asarray(jax.jit(jax.nn.log_softmax)(head(params, CONFIG, x)))
    anchor, depth = map(np.asarray, rows_of(jnp.asarray(anchors), counts, T))
    total, count = 0.0, np.zeros(cod.depth)
    for b in range(2):
        kept = {(a, d) for a, r in zip(anchors[b], last_depth[b], strict=True) for d in range(1, r + 1)}
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
    np.testing.assert_allclose(result.rows, count)
    np.testing.assert_allclose(float(result.loss), total, rtol=1e-5)
    assert (np.asarray(result.hits) <= count).all()


@pytest.mark.parametrize(
    ("mask_hiddens", "windows"), [(1, None), (3, (6, 7))]
)  # shared, and one per depth up to the third; all seen, and as few as five drafts allow
def test_drafting_with_caches_and_training_with_chains_give_the_same_logits_at_every_depth(
    mask_hiddens: int, windows: tuple[int, ...] | None
) -> None:
    """Training agrees with inference: a chain grown from an anchor equals the drafter's proposal there."""
    config = dataclasses.replace(SMALL, num_mask_hiddens=mask_hiddens, windows=windows)
    small = jax.jit(init_params, static_argnums=0)(config, jax.random.key(2))
    data, depth = sequence(5), 5
    anchor = 9  # in the second row, which is one document
    tokens, aux = data["token_ids"][1:], data["aux_hidden"][1:]
    shifted = np.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    counts = (1,) * (depth - 1)
    rest = (data["segment_ids"][1:], data["positions"][1:])
    x = run_chains(small, config, shifted, aux, *rest, np.full((1, 1), anchor, np.int32), counts)
    trained = np.asarray(head(small, config, x))[0, [anchor, *range(T, T + depth - 1)]]
    drafter = PEagle(small, config, with_logits=True)
    cache = run_absorb(drafter, small_pages(drafter, 1, 40, T), shifted, aux, rows_before(anchor))
    fresh, widths = drafter_input(shifted, aux, anchor), np.full((1,), depth, np.int32)
    drafted, _ = jax.jit(PEagle.propose, static_argnames="num_drafts")(drafter, cache, fresh, widths, num_drafts=depth)
    assert drafted.logits is not None
    np.testing.assert_allclose(trained, drafted.logits[0], atol=2e-5)


@jax.jit
def run_absorb(drafter: AnyDrafter, cache: PagedCache, *operands: jax.Array) -> PagedCache:
    return drafter.absorb(cache, *operands)


def rows_before(anchor: int) -> np.ndarray:
    """Return the positions of T rows; rows from the anchor on are inactive."""
    positions = np.arange(T, dtype=np.int32)[None, :]
    return np.where(positions < anchor, positions, np.int32(-1))


def drafter_input(shifted: np.ndarray, aux: np.ndarray, anchor: int) -> DrafterInput:
    """Make the input of a step at the anchor."""
    at = slice(anchor, anchor + 1)
    operands = (shifted[:, at], aux[:, at], np.ones((1,), np.int32), np.full((1,), anchor, np.int32))
    return DrafterInput(*map(jnp.asarray, operands))


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probs: np.ndarray = weights / weights.sum(axis=-1, keepdims=True)
    return probs


@pytest.mark.parametrize("norm_output", [pytest.param(False, marks=pytest.mark.slow), True])
def test_drafting_in_turn_and_training_in_turn_agree_on_tokens_and_logits(
    norm_output: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EAGLE-3 reads its own drafts, training reads the text. If the text is those drafts, the two agree."""
    windows = (5,) if norm_output else None
    config = dataclasses.replace(SMALL, num_layers=1, mask_token_id=None, norm_output=norm_output, windows=windows)
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(3))
    data, depth, anchor = sequence(5), 4, 9
    tokens, aux = data["token_ids"][1:], data["aux_hidden"][1:]
    shifted = np.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    drafter = Eagle3(params, config)
    cache = run_absorb(drafter, small_pages(drafter, 1, 40, T), shifted, aux, rows_before(anchor))
    fresh = drafter_input(shifted, aux, anchor)
    widths, logits_of = jnp.full((1,), depth, jnp.int32), model.head

    @jax.jit
    def draft(cache: PagedCache) -> tuple[jax.Array, jax.Array]:
        """Propose; return (drafts, the logits of each)."""
        logits: list[jax.Array] = []

        def recorded(*operands: Any) -> jax.Array:
            logits.append(logits_of(*operands))
            return logits[-1]

        with monkeypatch.context() as patch:
            patch.setattr(model, "head", recorded)
            drafts, _ = drafter.propose(cache, fresh, widths, depth)
        return drafts.token_ids, jnp.concatenate(logits, axis=1)

    drafts, logits = map(np.asarray, draft(cache))
    continued = shifted.copy()
    continued[:, anchor + 1 : anchor + depth] = drafts[:, :-1]
    rest = (data["segment_ids"][1:], data["positions"][1:])
    x = run_chains(params, config, continued, aux, *rest, np.full((1, 1), anchor, np.int32), (1,) * (depth - 1))
    trained = softmax(np.asarray(head(params, config, x))[0, [anchor, *range(T, T + depth - 1)]])
    assert np.argmax(trained, axis=-1).tolist() == drafts[0].tolist()
    np.testing.assert_allclose(trained, softmax(logits[0]), atol=2e-6)


def test_memory_grows_with_the_rows_and_not_with_their_square() -> None:
    """A gradient over L tokens at depth 4 has some 3 L rows: a dense mask alone would take 9 L^2 bytes, and scores of
    two heads 72 L^2."""
    config = dataclasses.replace(SMALL, num_layers=1)
    params = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))

    def temporary_bytes(length: int) -> int:
        counts = cod_counts(Recipe(depth=4), length)
        shapes = {
            "token_ids": jax.ShapeDtypeStruct((1, length), jnp.int32),
            "aux_hidden": jax.ShapeDtypeStruct((1, length, CONFIG.aux_width), jnp.float32),
            "segment_ids": jax.ShapeDtypeStruct((1, length), jnp.int32),
            "positions": jax.ShapeDtypeStruct((1, length), jnp.int32),
            "anchors": jax.ShapeDtypeStruct((1, counts[0]), jnp.int32),
        }

        def loss_of(trained: Any, rows: dict[str, jax.Array]) -> jax.Array:
            return jnp.sum(forward_chains(trained, config, **rows, counts=counts))

        return jax.jit(jax.grad(loss_of)).lower(params, shapes).compile().memory_analysis().temp_size_in_bytes

    small, large = temporary_bytes(2048), temporary_bytes(8192)
    assert large < 4.5 * small
    assert large < 9 * 8192**2


def test_the_losses(small) -> None:
    """kl is never below 0, and all losses in nats agree if the label has probability 1."""
    data, cod = sequence(8), recipe(depth=3)
    (counts,) = cod.room
    anchors, last_depth = map(jnp.asarray, chains(data, cod))

    @jax.jit
    def losses(logits: jax.Array) -> list[jax.Array]:
        rows = {"anchors": anchors, "last_depth": last_depth, "counts": counts, "config": SMALL}
        return [sums(small, {**data, "target_logits": logits}, name, **rows).loss for name in LOSSES]

    by_name = dict(zip(LOSSES, map(float, losses(jnp.asarray(data["target_logits"]))), strict=True))
    assert by_name["kl"] > 0
    # labels that are the data's tokens
    sure = np.full(data["target_logits"].shape, -1e4, np.float32)
    np.put_along_axis(sure, np.roll(data["token_ids"], -1, axis=1)[:, :, None], 1e4, axis=2)
    *values, refused = losses(jnp.asarray(sure))
    np.testing.assert_allclose(values, values[0], rtol=1e-5)
    assert LOSSES[-1] == "total_variation"
    assert 0 < float(refused) < float(values[0])


@pytest.mark.parametrize("listed", [False, True])
def test_total_variation_is_what_is_refused_of_sampled_drafts_and_so_is_its_gradient(listed: bool) -> None:
    """Labels are all tokens in order, or the best ones by their ids, of which one has no probability."""
    rng = np.random.default_rng(3)
    logits, ids = rng.normal(0, 1, (4, 6)), np.array([rng.permutation(6)[:3] for _ in range(4)], np.int32)
    probs = rng.dirichlet(np.ones(3 if listed else 6), 4)
    spread = np.zeros((4, 6))
    np.put_along_axis(spread, ids if listed else np.tile(np.arange(6), (4, 1)), probs, axis=1)

    def refused(logits: np.ndarray) -> np.ndarray:
        drafted = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        return np.abs(spread - drafted).sum(axis=-1) / 2

    def losses(logits: jax.Array) -> jax.Array:
        rows = (jnp.asarray(probs, jnp.float32), jnp.asarray(ids) if listed else None, jnp.zeros((4,), jnp.int32))
        return losses_of_rows("total_variation", jax.nn.log_softmax(logits), rows[2], *rows)[0]

    in_float32 = jnp.asarray(logits, jnp.float32)
    np.testing.assert_allclose(losses(in_float32), refused(logits), rtol=1e-5)
    gradient = jax.grad(lambda logits: jnp.sum(losses(logits)))(in_float32)
    steps = 1e-6 * np.eye(24).reshape(24, 4, 6)
    slopes = [(refused(logits + step).sum() - refused(logits - step).sum()) / 2e-6 for step in steps]
    np.testing.assert_allclose(gradient, np.reshape(slopes, (4, 6)), atol=1e-4)


def test_labels_from_all_tokens_and_from_the_best_agree() -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 2, (1, 3, 9)), jnp.float32)
    best, ids = jax.lax.top_k(logits, 9)
    total = jax.nn.logsumexp(logits, axis=-1)
    for draft_to_target in (None, jnp.asarray([1, 4, 5, 8], jnp.int32)):
        whole = jax.jit(labels_of_logits)(logits, draft_to_target)
        listed = jax.jit(labels_of_best, static_argnums=4)(ids, best, total, draft_to_target, 9)
        assert listed.ids is not None
        spread = np.zeros(whole.probs.shape)
        for row in np.ndindex(spread.shape[:2]):
            np.add.at(spread[row], np.asarray(listed.ids)[row], np.asarray(listed.probs)[row])
        np.testing.assert_allclose(spread, whole.probs, atol=1e-6)
        np.testing.assert_array_equal(listed.best, whole.best)
    assert int(whole.best[0, 0]) in (-1, 0, 1, 2, 3)


def test_a_token_that_cannot_be_proposed_adds_no_loss(small) -> None:
    data, cod = sequence(9), recipe(depth=2)
    (counts,) = cod.room
    anchors, last_depth = map(jnp.asarray, chains(data, cod))
    kept = jnp.asarray([t for t in range(31) if t % 3], jnp.int32)
    narrow = dataclasses.replace(small, lm_head=small.lm_head[:, kept], draft_to_target=kept)
    config = dataclasses.replace(SMALL, draft_vocab_size=len(kept))
    logits = jnp.asarray(data["target_logits"])
    rows = {"anchors": anchors, "last_depth": last_depth, "counts": counts}
    sums_of_narrow = sums(narrow, data, "cross_entropy", labels_of_logits(logits, kept), config, **rows)
    full = sums(small, data, "cross_entropy", config=SMALL, **rows)
    assert 0.4 < float(sums_of_narrow.rows.sum() / full.rows.sum()) < 0.9
    assert np.isfinite(float(sums_of_narrow.loss))
