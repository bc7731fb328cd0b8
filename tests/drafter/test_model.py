"""Properties of the cached pass: its equivalents, what it attends to, and what must not affect it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafter.propose import PEagle, lay_out_rows
from peagle.ops.attention import MASKED
from tests.support.drafters import (
    EAGLE,
    FOUR,
    ONE,
    TWO,
    Text,
    drafter,
    eagle3,
    logits_of,
    prefill,
    prompt_state,
    propose,
    random_text,
    stack_fresh,
)
from tests.support.paging import entries, small_pages

K = 3
lay_out = jax.jit(lay_out_rows, static_argnums=(3, 4))


def step(peagle: PEagle, state, texts, firsts, nums):
    draft, state = propose(peagle, state, stack_fresh(texts, firsts, nums, K), num_drafts=K)
    return logits_of(draft), state


def test_the_rows_are_those_of_the_golden_vector() -> None:
    """vLLM's test: two requests, rejected [1, 0], next tokens [100, 200], mask id -2, one flat batch there.
    Their padding row 5 has position 0 and no write; ours comes after all rows that count, so it is left out here."""
    fresh = jnp.asarray([[11, 12, 100, 13], [21, 22, 23, 200]])
    rows = lay_out(fresh, jnp.asarray([3, 4]), jnp.asarray([5, 10]), 3, -2)
    real = np.arange(12) != 5
    assert rows.token_ids.reshape(-1)[real].tolist() == [11, 12, 100, -2, -2, 21, 22, 23, 200, -2, -2]
    assert rows.positions.reshape(-1)[real].tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert np.flatnonzero(~rows.committed.reshape(-1) & real).tolist() == [3, 4, 10, 11]
    assert (rows.draft_rows + jnp.asarray([[0], [6]])).reshape(-1).tolist() == [2, 3, 4, 9, 10, 11]


@pytest.mark.parametrize("num_drafts", [1, 2, 8])
def test_the_rows_hold_everything_for_every_count(num_drafts: int) -> None:
    """C committed rows, K-1 slots and padding fill 2K rows for C = 1..K+1; drafts: last committed row and slots."""
    width = 2 * num_drafts
    for num in range(1, num_drafts + 2):
        fresh = jnp.arange(num_drafts + 1, dtype=jnp.int32)[None] + 50
        rows = lay_out(fresh, jnp.asarray([num]), jnp.asarray([4]), num_drafts, 9)
        assert rows.token_ids[0].tolist() == [*range(50, 50 + num), *[9] * (width - num)]
        used = num + num_drafts - 1
        assert rows.positions[0].tolist() == [*range(4, 4 + used), *[-1] * (width - used)]
        assert rows.draft_rows[0].tolist() == list(range(num - 1, num + num_drafts - 1))
    rows = lay_out(fresh, jnp.asarray([1]), jnp.asarray([-1]), num_drafts, 9)
    assert set(rows.positions[0].tolist()) == {-1}


def test_padding_and_dead_entries_reach_no_result() -> None:
    """Input rows beyond num, prompt rows beyond the length and cache entries beyond the committed rows are garbage
    here, once mild and once wild, and so is the index before the first row; the results' bits are the same."""
    peagle = drafter(TWO, with_logits=True)
    text = random_text(peagle.config, 7)

    def run(garbage: float, token: int) -> tuple[np.ndarray, list[np.ndarray]]:
        width, length = 32, 6
        real = np.arange(width) < length
        tokens = jnp.asarray(np.where(real, text.token_ids[:width], token), jnp.int32)[None]
        aux = jnp.asarray(np.where(real[:, None], text.aux_hidden[:width], garbage), jnp.float32)[None]
        state = small_pages(peagle, 1, 80 - 2 * K, 2 * K)
        state = prefill(peagle, state, tokens, jnp.asarray([length]), aux)
        state = jax.tree.map(np.array, state)
        for pool in jax.tree.leaves(state.pages):
            by_index = pool.reshape(-1, *pool.shape[2:])  # one sequence, whose pages are in order
            by_index[0], by_index[length:] = garbage, garbage
        fresh = jax.tree.map(np.array, stack_fresh([text], [5], [2], K))
        fresh.token_ids[:, 2:], fresh.aux_hidden[:, 2:] = token, garbage
        state, fresh = jax.tree.map(jnp.asarray, (state, fresh))
        draft, state = propose(peagle, state, fresh, num_drafts=K)
        return logits_of(draft), entries(peagle, state, 0, 7)

    mild, wild = run(0.5, 1), run(1e4, 17)
    np.testing.assert_array_equal(mild[0], wild[0])
    for one, other in zip(mild[1], wild[1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_state_has_room_for_the_widest_write() -> None:
    """At a full target (length = capacity) a step equals the same step with room to spare."""
    peagle = drafter(ONE, with_logits=True)
    text = random_text(peagle.config, 8)
    capacity = 15
    tight = prompt_state(peagle, [text], [capacity], K, capacity=capacity)
    wide = prompt_state(peagle, [text], [capacity], K, capacity=50)
    for first, num in ((capacity - 1, 1), (capacity, K + 1)):
        expected, wide = step(peagle, wide, [text], [first], [num])
        logits, tight = step(peagle, tight, [text], [first], [num])
        np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_a_prompt_of_one_token_has_no_row_yet() -> None:
    peagle = drafter(ONE, with_logits=True)
    text = random_text(peagle.config, 12)
    state = prompt_state(peagle, [text], [1], K)
    assert not any(pool.any() for pool in jax.tree.leaves(state.pages))
    logits, _ = step(peagle, state, [text], [0], [1])
    other = random_text(peagle.config, 13)
    other = Text(np.concatenate([text.token_ids[:2], other.token_ids[2:]]), text.aux_hidden)
    np.testing.assert_array_equal(logits, step(peagle, state, [other], [0], [1])[0])


def test_without_logits_the_drafts_are_the_same() -> None:
    peagle = drafter(ONE, with_logits=True)
    text = random_text(peagle.config, 17)
    state = prompt_state(peagle, [text], [6], K)
    fresh = stack_fresh([text], [5], [1], K)
    draft, _ = propose(peagle, state, fresh, num_drafts=K)
    full = logits_of(draft)
    assert (full.shape, full.dtype) == ((1, K, peagle.config.vocab_size), np.float32)
    assert np.exp(np.float32(MASKED) - full.max()) == 0
    certain, _ = propose(peagle.replace(with_logits=False), state, fresh, num_drafts=K)
    assert certain.logits is None
    assert certain.token_ids.tolist() == draft.token_ids.tolist()


def test_drafts_are_at_least_one() -> None:
    peagle = drafter(ONE)
    fresh = stack_fresh([random_text(peagle.config, 19)], [5], [1], K)
    with pytest.raises(ValueError, match="0 drafts; expected K >= 1"):
        peagle.propose(peagle.init_state(1, 16, 4), fresh, jnp.asarray([0]), 0)


def test_rows_may_come_late_and_together() -> None:
    """Input rows fed in one pass, wider than a step's, give the drafts of feeding them step by step."""
    peagle = drafter(FOUR, with_logits=True)
    text = random_text(peagle.config, 20)
    state = prompt_state(peagle, [text], [6], K)
    for first, num in ((5, 1), (6, 2), (8, 3), (11, 1)):
        apart, state = propose(peagle, state, stack_fresh([text], [first], [num], K), num_drafts=K)
    together, _ = propose(peagle, prompt_state(peagle, [text], [6], K), stack_fresh([text], [5], [7], 11), num_drafts=K)
    np.testing.assert_allclose(logits_of(together), logits_of(apart), atol=2e-5)


@pytest.mark.parametrize("name", [ONE, pytest.param(TWO, marks=pytest.mark.slow), EAGLE])
def test_a_smaller_width_gives_the_same_first_drafts(name: str) -> None:
    """Widths are data: each row's first drafts are those of the full width, and width 0 only absorbs the input."""
    drafting = eagle3(name) if name == EAGLE else drafter(name)
    texts = [random_text(drafting.config, seed) for seed in (21, 22, 23)]
    state = prompt_state(drafting, texts, [6, 9, 4], K)
    fresh = stack_fresh(texts, [5, 8, 3], [1, 2, 4], K)
    full, after = propose(drafting, state, fresh, num_drafts=K)
    some, after_some = propose(drafting, state, fresh, num_drafts=K, widths=jnp.asarray([2, 0, 1]))
    assert some.token_ids[0, :2].tolist() == full.token_ids[0, :2].tolist()
    assert some.token_ids[2, :1].tolist() == full.token_ids[2, :1].tolist()
    for one, other in zip(*(entries(drafting, cache, 0, 10) for cache in (after, after_some)), strict=True):
        for row, held in enumerate((6, 10, 7)):
            np.testing.assert_allclose(one[row, :held], other[row, :held], atol=2e-5)
