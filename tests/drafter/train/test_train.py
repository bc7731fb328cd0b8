"""Training and inference compute the same thing; COD keeps whole chains only; parts add up to the whole."""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafter import model
from drafter.config import DrafterConfig
from drafter.params import init_params
from drafter.propose import Eagle3, PEagle
from drafter.train import forward, loss
from drafter.train.batches import Batch
from drafter.train.cod import Segments, sample_chains
from drafter.train.config import LOSSES, Cod
from drafter.train.forward import forward_chains, rows_of
from drafter.train.loss import Labels, labels_of_best, labels_of_logits
from drafter.train.recipe import Recipe
from drafter.train.step import gradients_of
from peagle.ops.attention import PagedCache
from peagle.ops.errors import InputError
from peagle.ops.messages import DrafterInput
from peagle.ops.rope import RopeConfig
from tests.support.paging import small_pages

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
# for gradients, which compile many times
SMALL = dataclasses.replace(CONFIG, num_heads=2, num_kv_heads=1, mlp_width=12)
T = 24
loss_of_chains = jax.jit(loss.chain_loss, static_argnames=("config", "loss", "counts", "part"))
run_chains = jax.jit(forward_chains, static_argnames=("config", "counts"))
head = jax.jit(model.head, static_argnums=1)
QUICKLY: Any = {"xla_backend_optimization_level": 0}  # for programs that run once


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
    leaves, tree = jax.tree.flatten(jax.jit(init_params, static_argnums=0)(CONFIG, jax.random.key(0)))
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [leaf + jnp.asarray(rng.normal(0, 0.1, leaf.shape), leaf.dtype) for leaf in leaves])


@pytest.fixture(scope="module")
def small():
    return jax.jit(init_params, static_argnums=0)(SMALL, jax.random.key(2))


def on_device(data: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value) for name, value in data.items()}


def chains(data: dict[str, np.ndarray], cod: Cod, counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    return chains_of_parts(data, cod, Segments(T), (counts,))[0]


def chains_of_parts(
    data: dict[str, np.ndarray], cod: Cod, segments: Segments, counts: tuple[tuple[int, ...], ...]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draw (anchors, reach) of both rows, per part."""
    rng = np.random.default_rng(4)
    sampled = [
        sample_chains(cod, data["trained"][row] > 0, data["segment_ids"][row], segments, counts, rng)
        for row in range(2)
    ]
    return [
        (np.stack([row[s][0] for row in sampled]), np.stack([row[s][1] for row in sampled])) for s in range(len(counts))
    ]


def sums(
    params: Any,
    data: dict[str, np.ndarray],
    name: str,
    labels: Labels | None = None,
    config: DrafterConfig = CONFIG,
    **given: Any,
) -> loss.Sums:
    """Compute chain_loss with labels from the data's logits."""
    device = on_device(data)
    logits = device.pop("target_logits")
    return loss_of_chains(
        params, config, name, labels=labels_of_logits(logits, None) if labels is None else labels, **device, **given
    )


@pytest.mark.parametrize(
    "windows",
    [
        pytest.param(None, marks=pytest.mark.slow),
        pytest.param((5, None), marks=pytest.mark.slow),
        (2, 3),  # a chain may be longer than a window
    ],
)
def test_the_chains_pass_equals_the_uncached_pass_under_the_group_causal_mask(
    params, windows: tuple[int | None, ...] | None
) -> None:
    config = dataclasses.replace(CONFIG, windows=windows)
    data, cod = sequence(1), Cod(depth=4)
    counts = cod.counts(T)
    anchors, _ = chains(data, cod, counts)
    device = on_device(data)
    context = [device[name] for name in ("token_ids", "aux_hidden", "segment_ids", "positions")]
    x = run_chains(params, config, *context, jnp.asarray(anchors), counts)
    anchor, depth = map(np.asarray, rows_of(jnp.asarray(anchors), counts, T))
    take = lambda values: np.take_along_axis(values, anchor, axis=1)  # noqa: E731
    starts = take(np.arange(T, dtype=np.int32)[None] - data["positions"])
    expected = jax.jit(model.forward, static_argnames="config")(
        params,
        config,
        take(data["token_ids"]),
        np.take_along_axis(data["aux_hidden"], anchor[:, :, None], axis=1),
        anchor - starts,
        depth,
        segment_ids=take(data["segment_ids"]),
    )
    real = take(data["segment_ids"]) > 0
    difference = np.where(real[:, :, None], np.abs(np.asarray(head(params, config, x)) - np.asarray(expected)), 0.0)
    assert difference.max() < 2e-5


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
    ((_, reach),) = sample_chains(cod, *everywhere, Segments(40), (cod.counts(40),), np.random.default_rng(0))
    expected = cod.counts(38)  # of 40 anchors the last two have no label
    assert tuple(int((reach >= d).sum()) for d in (1, 2, 3)) == expected


def test_the_loss_counts_each_kept_row_once_and_reads_the_targets_row_before_its_token(params) -> None:
    data, cod = sequence(3), Cod(depth=3)
    counts = cod.counts(T)
    anchors, reach = chains(data, cod, counts)
    device, on_anchors = on_device(data), jnp.asarray(anchors)
    run = jax.jit(lambda: sums(params, data, "half", anchors=on_anchors, reach=jnp.asarray(reach), counts=counts))
    found = run()
    # brute force, row by row, through the uncached pass
    shifted = np.pad(data["token_ids"][:, 1:], ((0, 0), (0, 1)))
    others = (device[name] for name in ("aux_hidden", "segment_ids", "positions"))
    x = run_chains(params, CONFIG, shifted, *others, on_anchors, counts)
    log_probs = np.asarray(jax.jit(jax.nn.log_softmax)(head(params, CONFIG, x)))
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
    np.testing.assert_allclose(found.rows, count)
    np.testing.assert_allclose(float(found.loss), total, rtol=1e-5)
    assert (np.asarray(found.hits) <= count).all()


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
    groups, empty = model.cache_groups(config), small_pages(PEagle(small, config), 1, 40, T)
    cache = run_absorb(small, config, shifted, aux, rows_before(anchor), empty, groups)
    fresh = drafter_input(shifted, aux, anchor)
    drafted, _ = jax.jit(model.propose, static_argnames=("config", "groups", "num_drafts"))(
        small, config, fresh, np.full((1,), depth, np.int32), cache, groups, depth
    )
    np.testing.assert_allclose(trained, drafted[0], atol=2e-5)


run_absorb = jax.jit(model.absorb, static_argnames=("config", "groups"))


def rows_before(anchor: int) -> np.ndarray:
    """Return the positions of T rows; rows from the anchor on are inactive."""
    places = np.arange(T, dtype=np.int32)[None, :]
    return np.where(places < anchor, places, np.int32(-1))


def drafter_input(shifted: np.ndarray, aux: np.ndarray, anchor: int) -> DrafterInput:
    """Make the input of a step at the anchor."""
    at = slice(anchor, anchor + 1)
    given = (shifted[:, at], aux[:, at], np.ones((1,), np.int32), np.full((1,), anchor, np.int32))
    return DrafterInput(*map(jnp.asarray, given))


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    found: np.ndarray = weights / weights.sum(axis=-1, keepdims=True)
    return found


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
    groups, empty = model.cache_groups(config), small_pages(Eagle3(params, config), 1, 40, T)
    cache = run_absorb(params, config, shifted, aux, rows_before(anchor), empty, groups)
    fresh = drafter_input(shifted, aux, anchor)
    given, logits_of = jnp.full((1,), depth, jnp.int32), model.head

    @jax.jit
    def draft(cache: PagedCache) -> tuple[jax.Array, jax.Array]:
        """Propose; return (drafts, the logits of each)."""
        seen: list[jax.Array] = []

        def recorded(*operands: Any) -> jax.Array:
            seen.append(logits_of(*operands))
            return seen[-1]

        with monkeypatch.context() as patch:
            patch.setattr(model, "head", recorded)
            (drafts, _), _ = model.propose_in_turn(params, config, fresh, given, cache, groups, depth)
        return drafts, jnp.concatenate(seen, axis=1)

    drafts, logits = map(np.asarray, draft(cache))
    said = shifted.copy()
    said[:, anchor + 1 : anchor + depth] = drafts[:, :-1]
    rest = (data["segment_ids"][1:], data["positions"][1:])
    x = run_chains(params, config, said, aux, *rest, np.full((1, 1), anchor, np.int32), (1,) * (depth - 1))
    trained = softmax(np.asarray(head(params, config, x))[0, [anchor, *range(T, T + depth - 1)]])
    assert np.argmax(trained, axis=-1).tolist() == drafts[0].tolist()
    np.testing.assert_allclose(trained, softmax(logits[0]), atol=2e-6)


@pytest.mark.parametrize(
    "starts",
    [(0, 9), pytest.param((0, 5, 17), marks=pytest.mark.slow), pytest.param((0, 1, 23), marks=pytest.mark.slow)],
)
def test_gradients_of_parts_add_up_to_those_of_the_whole(
    small, starts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Algorithm 1: every kept row counts in one part, with all of its context. The whole runs the code for short
    sequences, the parts the code for long ones, with blocks of rows and of logits."""
    data, cod = sequence(6), Cod(depth=3)
    whole = (T - 1,) * 2
    segments = Segments(T, starts)
    # room for all anchors, so that no chain is cut
    rooms = tuple((T,) * 2 for _ in starts)
    of_parts = chains_of_parts(data, cod, segments, rooms)
    ((anchors, reach),) = chains_of_parts(data, cod, Segments(T), (whole,))

    def loss_of(trained: Any, part: int | None) -> jax.Array:
        if part is None:
            return sums(
                trained,
                data,
                "half",
                config=SMALL,
                anchors=jnp.asarray(anchors),
                reach=jnp.asarray(reach),
                counts=whole,
            ).loss
        own = dict(zip(("anchors", "reach"), map(jnp.asarray, of_parts[part]), strict=True))
        span = (segments.starts[part], segments.ends[part])
        return sums(trained, data, "half", config=SMALL, **own, counts=rooms[part], part=span).loss

    gradient = jax.jit(jax.value_and_grad(loss_of), static_argnums=1, compiler_options=QUICKLY)
    expected = gradient(small, None)
    for module, name, value in ((forward, "LONG", 1), (forward, "LONG_BLOCK", 7), (loss, "CHUNK_BYTES", 4 * 31 * 10)):
        monkeypatch.setattr(module, name, value)
    found = [gradient(small, part) for part in range(len(starts))]
    total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), jax.tree.map(np.asarray, found))
    kept = [
        {(a, d) for a, r in zip(*row, strict=True) for d in range(1, r + 1)} for row in zip(anchors, reach, strict=True)
    ]
    cut = [
        {(a, d) for part in of_parts for a, r in zip(part[0][row], part[1][row], strict=True) for d in range(1, r + 1)}
        for row in range(2)
    ]
    assert kept == cut
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(total), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5 * float(np.abs(one).max()) + 1e-7)


@flax.struct.dataclass
class Known:
    """A target whose results are given."""

    logits: jax.Array
    aux_hidden: jax.Array

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del token_ids, positions, segment_ids
        return self.logits, self.aux_hidden


@pytest.mark.parametrize("parallel", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_with_windows_gradients_of_stretches_add_up_to_those_of_whole_rows(small, parallel: bool) -> None:
    """A part reads its rows and what their windows reach, and is skipped if it trains nothing."""
    config = dataclasses.replace(SMALL, windows=(4, 3), mask_token_id=SMALL.mask_token_id if parallel else None)
    assert config.context_reach == 5
    small = small if parallel else dataclasses.replace(small, mask_hidden=None)
    data, recipe = sequence(6), Recipe(steps=1, width=T, cod=Cod(depth=3), parts=4)
    data["trained"][:, :8] = 0.0  # the first part
    device = on_device(data)
    target = Known(device.pop("target_logits"), device.pop("aux_hidden"))

    def found(parts: int) -> tuple[loss.Sums, Any]:
        one = dataclasses.replace(recipe, parts=parts)
        counts = ((T,) * 2,) * parts
        chains = chains_of_parts(data, one.cod, one.segments, counts)
        anchors, reach = (tuple(jnp.asarray(part[i]) for part in chains) for i in (0, 1))
        batch = Batch(**device, anchors=anchors, reach=reach, teacher={})
        run = jax.jit(gradients_of, static_argnums=(1, 2, 3), compiler_options=QUICKLY)
        return run(small, config, one, counts, None, target, batch)

    (whole, expected), (of_parts, total) = found(1), found(4)
    np.testing.assert_array_equal(of_parts.rows, whole.rows)
    np.testing.assert_allclose(of_parts.loss, whole.loss, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(total), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5 * float(np.abs(one).max()) + 1e-7)


def test_a_part_has_room_for_its_share_and_cuts_the_deepest_excess() -> None:
    cod, segments = Cod(depth=4, ratio=0.9), Segments.even(40, 4)
    everywhere = np.ones((40,), bool), np.ones((40,), np.int32)
    counts = segments.counts(cod, 40)
    assert len(counts) == 4
    assert all(10 >= room[0] >= room[1] >= room[2] >= 40 * 0.9**3 / 4 for room in counts)
    for (anchors, reach), room, start, end in zip(
        sample_chains(cod, *everywhere, segments, counts, np.random.default_rng(0)),
        counts, segments.starts, segments.ends, strict=True,
    ):  # fmt: skip
        assert all((reach >= d).sum() <= room[d - 1] for d in (1, 2, 3))
        grown = anchors[reach > 0]
        assert ((start <= grown + 1) & (grown + 1 < end)).all()
        assert (anchors < end).all(), "padding stays where there is context"


@pytest.mark.parametrize(("starts", "says"), [((1, 3), "expected 0 first"), ((0, 9, 9), "ascending")])
def test_parts_that_make_no_sense_are_one_line(starts: tuple[int, ...], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Segments(12, starts)


def test_memory_grows_with_the_rows_and_not_with_their_square() -> None:
    """A gradient over L tokens at depth 4 has some 3 L rows: a dense mask alone would take 9 L^2 bytes, and scores of
    six heads 216 L^2."""
    config = dataclasses.replace(CONFIG, num_layers=1)
    params = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))

    def temporary_bytes(length: int) -> int:
        counts = Cod(depth=4).counts(length)
        shapes = {
            "token_ids": jax.ShapeDtypeStruct((1, length), jnp.int32),
            "aux_hidden": jax.ShapeDtypeStruct((1, length, CONFIG.aux_width), jnp.float32),
            "segment_ids": jax.ShapeDtypeStruct((1, length), jnp.int32),
            "positions": jax.ShapeDtypeStruct((1, length), jnp.int32),
            "anchors": jax.ShapeDtypeStruct((1, counts[0]), jnp.int32),
        }

        def loss_of(trained: Any, given: dict[str, jax.Array]) -> jax.Array:
            return jnp.sum(forward_chains(trained, config, **given, counts=counts))

        return jax.jit(jax.grad(loss_of)).lower(params, shapes).compile().memory_analysis().temp_size_in_bytes

    small, large = temporary_bytes(2048), temporary_bytes(8192)
    assert large < 4.5 * small
    assert large < 9 * 8192**2


def test_with_windows_memory_is_that_of_a_part_whatever_the_row() -> None:
    """A gradient over a row of thousands of tokens takes what a part and its reach take: here 134 tokens at depth 2,
    of which a value of every kind and all scores are small beside a single value of all rows."""
    config = dataclasses.replace(SMALL, num_layers=1, windows=(4,))
    params = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    width, parts = 1 << 13, 1 << 6
    recipe = Recipe(steps=1, width=width, cod=Cod(depth=2), parts=parts)
    counts = recipe.segments.counts(recipe.cod, 8, 8)
    ids, real = (jax.ShapeDtypeStruct((1, width), dtype) for dtype in (jnp.int32, jnp.float32))
    chains = (jax.ShapeDtypeStruct((1, counts[0][0]), jnp.int32),) * parts
    kinds = {"top_ids": ((2,), jnp.int32), "top_logits": ((2,), jnp.float32), "log_total": ((), jnp.float32)}
    kinds["aux_hidden"] = ((SMALL.aux_width,), jnp.float32)
    stored = {name: jax.ShapeDtypeStruct((1, width, *shape), dtype) for name, (shape, dtype) in kinds.items()}
    run = jax.jit(gradients_of, static_argnums=(1, 2, 3), compiler_options=QUICKLY)
    batch = Batch(ids, ids, ids, real, chains, chains, stored)
    compiled = run.lower(params, config, recipe, counts, None, None, batch).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * width * SMALL.hidden_size


def test_the_losses(small) -> None:
    """kl is never below 0, and all losses in nats agree if the label has probability 1."""
    data, cod = sequence(8), Cod(depth=3)
    counts = cod.counts(T)
    anchors, reach = map(jnp.asarray, chains(data, cod, counts))

    @jax.jit
    def losses(logits: jax.Array) -> list[jax.Array]:
        given = {"anchors": anchors, "reach": reach, "counts": counts, "config": SMALL}
        return [sums(small, {**data, "target_logits": logits}, name, **given).loss for name in LOSSES]

    found = dict(zip(LOSSES, map(float, losses(jnp.asarray(data["target_logits"]))), strict=True))
    assert 0 < found["kl"] < found["soft_cross_entropy"]
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

    def found(logits: jax.Array) -> jax.Array:
        rows = (jnp.asarray(probs, jnp.float32), jnp.asarray(ids) if listed else None, jnp.zeros((4,), jnp.int32))
        return loss._losses("total_variation", jax.nn.log_softmax(logits), rows[2], *rows)[0]

    given = jnp.asarray(logits, jnp.float32)
    np.testing.assert_allclose(found(given), refused(logits), rtol=1e-5)
    gradient = jax.grad(lambda each: jnp.sum(found(each)))(given)
    step = 1e-6 * np.eye(24).reshape(24, 4, 6)
    slopes = [(refused(logits + each).sum() - refused(logits - each).sum()) / 2e-6 for each in step]
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
    data, cod = sequence(9), Cod(depth=2)
    counts = cod.counts(T)
    anchors, reach = map(jnp.asarray, chains(data, cod, counts))
    kept = jnp.asarray([t for t in range(31) if t % 3], jnp.int32)
    narrow = dataclasses.replace(small, lm_head=small.lm_head[:, kept], draft_to_target=kept)
    config = dataclasses.replace(SMALL, draft_vocab_size=len(kept))
    device = on_device(data)
    logits = device.pop("target_logits")
    found = loss_of_chains(
        narrow, config, "cross_entropy", labels=labels_of_logits(logits, kept), **device,
        anchors=anchors, reach=reach, counts=counts,
    )  # fmt: skip
    full = sums(small, data, "cross_entropy", config=SMALL, anchors=anchors, reach=reach, counts=counts)
    assert 0.4 < float(found.rows.sum() / full.rows.sum()) < 0.9
    assert np.isfinite(float(found.loss))
