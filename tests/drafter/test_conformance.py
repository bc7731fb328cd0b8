"""What every kind of drafter keeps: the reference's drafts, rollbacks, independent rows, parameters, widths, bits."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafter import reference
from drafter.propose import AnyDrafter
from peagle.ops import native
from peagle.ops.attention import PagedCache
from peagle.ops.kernels import Implementation
from peagle.ops.messages import DrafterInput
from tests.support.compiling import AS_FOR_USERS
from tests.support.drafters import (
    BIASED,
    EAGLE,
    EAGLE_NORMED,
    EAGLE_WINDOW,
    EVERY,
    FOUR,
    MASKS,
    ONE,
    PLAIN,
    TWO,
    WINDOWS,
    Text,
    absorbed,
    assert_reference,
    drafting,
    loaded,
    logits_of,
    prompt_state,
    propose,
    random_text,
    reference_logits,
    run_steps,
    stack_fresh,
    tensors_of,
)
from tests.support.paging import SMALL, entries, of_sequences, small_pages

pytestmark = pytest.mark.compile

NATIVE = pytest.mark.skipif(not native.available(), reason=native.status()[1])
K = 3
propose_exactly = jax.jit(propose.__wrapped__, static_argnames="num_drafts", compiler_options=AS_FOR_USERS)


def texts_of(drafter: AnyDrafter, number: int, first: int = 1) -> list[Text]:
    return [random_text(drafter.config, seed) for seed in range(first, first + number)]


def step(
    drafter: AnyDrafter, state: PagedCache, texts: list[Text], firsts: list[int], nums: list[int]
) -> tuple[np.ndarray, PagedCache]:
    """Propose K drafts; return (their logits, the state)."""
    draft, state = propose(drafter, state, stack_fresh(texts, firsts, nums, K), num_drafts=K)
    return logits_of(draft), state


# The reference


@pytest.mark.parametrize(
    ("name", "num_drafts", "form"),
    [
        (ONE, 1, "xla"),
        (ONE, 8, "xla"),
        (TWO, 5, "xla"),
        (FOUR, 3, "xla"),
        (MASKS, 6, "xla"),
        (EAGLE, 1, "xla"),
        (EAGLE, 4, "xla"),
        (EAGLE_NORMED, 3, "xla"),
        (PLAIN, 1, "xla"),
        (PLAIN, 3, "xla"),
        (BIASED, 7, "xla"),
        pytest.param(PLAIN, 3, "native", marks=NATIVE),
        pytest.param(BIASED, 7, "native", marks=NATIVE),
    ],
)
def test_a_run_of_steps_gives_the_references_drafts(
    tmp_path: Path, name: str, num_drafts: int, form: Implementation
) -> None:
    """Texts of different length; per step none, some and all of the drafts are accepted, and one text pauses."""
    drafter = drafting(name) if form == "xla" else loaded(tmp_path, name, form)
    texts, lengths, some = texts_of(drafter, 3), (5, 9, 7), num_drafts // 2
    first, second = (0, num_drafts, some, 0, num_drafts), (num_drafts, some, 0, some, num_drafts)
    accepted = [*zip(first, second, [None] * 5, strict=True), (0, 0, None)]
    state = prompt_state(drafter, texts, lengths, num_drafts)
    steps, state = run_steps(drafter, state, texts, lengths, accepted, num_drafts)
    assert_reference(name, drafter.config, texts, steps, num_drafts)
    # it wrote in the only step in which it was active
    written = lengths[2] + max(num_drafts, drafter.block_drafts or 0) + 1
    assert not any(part[2].any() for part in entries(drafter, state, written, 80))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        (WINDOWS, "xla"),
        (BIASED, "xla"),
        pytest.param(EAGLE_WINDOW, "native", marks=NATIVE),
        pytest.param(BIASED, "native", marks=NATIVE),
        pytest.param(EAGLE_WINDOW, "xla", marks=pytest.mark.slow),
        pytest.param(WINDOWS, "native", marks=[NATIVE, pytest.mark.slow]),
    ],
)
def test_a_window_gives_the_references_drafts_in_pages_that_repeat(
    tmp_path: Path, name: str, form: Implementation
) -> None:
    """Windows have as few pages as a step allows; accepted are none, some and all of the drafts."""
    num_drafts, lengths, widest = 4, (5, 23), 2 * 4 + 2
    drafter = drafting(name) if form == "xla" else loaded(tmp_path, name, form)
    drafter = drafter.replace(config=drafter.config.with_window(7)) if name == BIASED else drafter
    texts, state = texts_of(drafter, 2), small_pages(drafter, 2, 64, widest)
    kept = state.tables[1].shape[1] * SMALL
    assert kept < 64
    absorb = jax.jit(lambda drafter, state, *rows: drafter.absorb(state, *rows))
    state = absorbed(drafter, state, texts, lengths, 8, absorb)
    accepted = [(0, 4), (4, 2), (4, 0), (1, 4), (0, 0), (4, 1), (4, 0), (3, 4)]
    steps, _ = run_steps(drafter, state, texts, lengths, accepted, num_drafts)
    assert min(steps[-1].known) > kept - num_drafts
    assert_reference(name, drafter.config, texts, steps, num_drafts)
    # the window counts
    for config, counts in ((drafter.config, False), (drafter.config.with_window(None), True)):
        moved = [
            np.abs(
                reference_logits(name, config, texts[0], step.known[0], 1)
                - reference_logits(name, drafter.config, texts[0], step.known[0], 1)
            ).max()
            for step in steps
        ]
        assert (max(moved) > 0.01) == counts


def test_every_input_moves_the_reference() -> None:
    """Each token, each aux_hidden and each mask slot moves its logits; later rows do not."""
    config, tensors, text = EVERY[TWO], tensors_of(TWO), random_text(EVERY[TWO], 3, length=7)
    token_ids, aux = text.token_ids.tolist(), text.aux_hidden[:6]
    base = reference.draft_logits(tensors, config, token_ids, aux, 3)
    for place in range(1, 7):
        other_ids, other_aux = text.token_ids.copy(), aux.copy()
        other_ids[place] = (other_ids[place] + 1) % config.vocab_size
        other_aux[place - 1] += 1
        for told in ((other_ids.tolist(), aux), (token_ids, other_aux)):
            assert np.abs(reference.draft_logits(tensors, config, *told, 3) - base).max() > 1e-3
    np.testing.assert_allclose(reference.draft_logits(tensors, config, token_ids, aux, 2), base[:2], atol=1e-12)
    with pytest.raises(ValueError, match="expected one less"):
        reference.draft_logits(tensors, config, token_ids, text.aux_hidden[:7], 3)


# Rows and caches


@pytest.mark.parametrize("name", [FOUR, PLAIN])
def test_after_a_rollback_all_is_as_if_nothing_had_been_drafted(name: str) -> None:
    """Steps with all, some or none of the drafts accepted leave logits and caches as one prefill of the text does."""
    drafter = drafting(name)
    texts = texts_of(drafter, 1, 6)
    state = prompt_state(drafter, texts, [5], K)
    steps, state = run_steps(drafter, state, texts, [5], [[count] for count in (0, 0, K, 1, 0)], K)
    (first,) = steps[-1].known
    logits, state = step(drafter, state, texts, [first], [1])
    clean = prompt_state(drafter, texts, [first + 1], K)
    clean_logits, clean = step(drafter, clean, texts, [first], [1])
    np.testing.assert_allclose(logits, clean_logits, atol=2e-5)
    for ours, theirs in zip(*(entries(drafter, cache, 0, first + 1) for cache in (state, clean)), strict=True):
        assert np.abs(ours[:, -1]).max() > 1e-3  # the newest row is written
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("name", [ONE, BIASED])
def test_rows_of_a_batch_are_independent_and_inactive_ones_write_nothing(name: str) -> None:
    drafter = drafting(name)
    texts, lengths = texts_of(drafter, 3, 9), [4, 11, 7]
    state = prompt_state(drafter, texts, lengths, K)
    before = entries(drafter, state, 0, 80)
    logits, state = step(drafter, state, texts, [3, -1, 6], [1, 2, 1])
    for row in (0, 2):
        alone = prompt_state(drafter, texts[row : row + 1], lengths[row : row + 1], K)
        expected, _ = step(drafter, alone, texts[row : row + 1], [lengths[row] - 1], [1])
        np.testing.assert_allclose(logits[row : row + 1], expected, atol=1e-5)
    for old, new in zip(before, entries(drafter, state, 0, 80), strict=True):
        np.testing.assert_array_equal(old[1], new[1])
        assert (old[0] != new[0]).any()
        assert (old[2] != new[2]).any()
    # the inactive row continues later as if nothing had happened
    logits, _ = step(drafter, state, texts, [4, 10, 7], [K + 1, 1, 2])
    alone = prompt_state(drafter, texts[1:2], lengths[1:2], K)
    np.testing.assert_allclose(logits[1:2], step(drafter, alone, texts[1:2], [10], [1])[0], atol=1e-5)


@NATIVE
@pytest.mark.parametrize(
    ("name", "most", "dtype"),
    [(ONE, 8, jnp.float32), (TWO, 5, jnp.bfloat16), (BIASED, 4, jnp.float32), (PLAIN, 4, jnp.float32)],
)
def test_a_sequence_alone_has_the_bits_of_the_sequence_in_a_batch(
    tmp_path: Path, name: str, most: int, dtype: type
) -> None:
    """Also in a pass of more drafts than its width."""
    drafter = loaded(tmp_path, name, "native", dtype)
    texts, lengths, nums, widths = texts_of(drafter, 3), (5, 9, 7), [1, most, 3], [most, 2, 2]
    state = prompt_state(drafter, texts, lengths, most)
    fresh = stack_fresh(texts, [length - 1 for length in lengths], nums, most)
    together, after = propose_exactly(drafter, state, fresh, num_drafts=most, widths=jnp.asarray(widths))
    for b, width in enumerate(widths):
        own = slice(b, b + 1)
        own_fresh = jax.tree.map(lambda part, own=own: jnp.asarray(np.asarray(part)[own]), fresh)
        alone, own_after = propose_exactly(drafter, of_sequences(state, own), own_fresh, num_drafts=width)
        bits = [logits_of(draft).view(np.uint32) for draft in (alone, together)]
        np.testing.assert_array_equal(bits[0][0], bits[1][b, :width])
        held = [entries(drafter, cache, 0, lengths[b] + nums[b] - 1) for cache in (own_after, of_sequences(after, own))]
        for one, other in zip(*held, strict=True):
            np.testing.assert_array_equal(one, other)


# Parameters


@pytest.mark.parametrize("name", [TWO, FOUR, BIASED])  # they have every tensor that the others have
def test_every_parameter_counts(name: str) -> None:
    """Moving any one tensor moves the drafts' logits: every one is read."""
    drafter = drafting(name)
    texts = texts_of(drafter, 1, 16)

    def logits(params: object) -> np.ndarray:
        moved = drafter.replace(params=params)
        return step(moved, prompt_state(moved, texts, [6], K), texts, [5], [1])[0]

    base = logits(drafter.params)
    params, ids = drafter.params.replace(draft_to_target=None), drafter.params.draft_to_target
    leaves, tree = jax.tree.flatten_with_path(jax.tree.map(np.asarray, params))
    rng = np.random.default_rng(99)
    for index, (path, leaf) in enumerate(leaves):
        changed = [other for _, other in leaves]
        changed[index] = jnp.asarray(leaf + 0.3 * rng.standard_normal(leaf.shape).astype(np.float32))
        moved = logits(jax.tree.unflatten(tree, changed).replace(draft_to_target=ids))
        assert np.abs(moved - base).max() > 1e-3, jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", [TWO, BIASED])
def test_bfloat16_drafts_nearly_the_same_and_one_trace_serves_every_count(name: str) -> None:
    """Strict promotion holds with bfloat16 parameters and float32 aux_hidden; no retrace for another C or position."""
    drafter = drafting(name)
    half = drafter.replace(
        params=jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf).astype(jnp.bfloat16)), drafter.params)
    )
    texts, accepted, traces = texts_of(drafter, 1, 18), [[0], [K], [1]], []

    @functools.partial(jax.jit, static_argnames="num_drafts")
    def counted(drafter: AnyDrafter, state: PagedCache, fresh: DrafterInput, num_drafts: int) -> object:
        traces.append(1)
        return drafter.propose(state, fresh, jnp.asarray([num_drafts]), num_drafts)

    states = [prompt_state(one, texts, [6], K) for one in (half, drafter)]
    assert states[0].pages[0].key.dtype == jnp.bfloat16
    rounded, _ = run_steps(half, states[0], texts, [6], accepted, K, counted)
    exact, _ = run_steps(drafter, states[1], texts, [6], accepted, K)
    for one, other in zip(rounded, exact, strict=True):
        ours, expected = logits_of(one.draft), logits_of(other.draft)
        assert 0 < np.abs(ours - expected).max() < 0.3 * expected.std()
    assert len(traces) == 1
