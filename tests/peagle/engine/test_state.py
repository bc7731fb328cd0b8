"""The state of slots: a pass takes those it names and puts them back, and a request enters its own slot alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.config import SamplingParams
from peagle.drafters.ngram import NGram
from peagle.engine.request import Request
from peagle.engine.step.state import (
    NO_STOP,
    DecodeState,
    SlotBatch,
    SlotParams,
    admit,
    init_state,
    put,
    take,
)
from peagle.ops.likeliest import NO_TOKEN
from tests.support.models import TARGET, TOKENS, Models, models
from tests.support.toys import check_state, tiny_target

SLOTS, NUM_DRAFTS, CAPACITY = 5, 4, 64
run_take, run_put = jax.jit(take, static_argnums=(2, 3)), jax.jit(put)
REQUEST = Request(TOKENS[:45], 9, SamplingParams(0.7, 5, 0.9, 0.1, seed=11), (2, 30), index=6)


@pytest.fixture(scope="module")
def pair() -> Models:
    return models("float32")


@pytest.fixture(scope="module")
def noisy(pair: Models) -> DecodeState:
    """Make a state with old values of other requests in every leaf."""
    state = init_state(pair.target, pair.drafter, SLOTS, CAPACITY, NUM_DRAFTS, (2, 2), (2, 2))
    rng = np.random.default_rng(8)

    def one(leaf: jax.Array) -> jax.Array:
        if leaf.dtype == jnp.bool_:
            return jnp.zeros_like(leaf)
        return jnp.asarray(rng.integers(1, 9, leaf.shape), leaf.dtype)

    return jax.tree.map(one, state)


def batch_of(slots: list[int]) -> SlotBatch:
    table = jnp.zeros((len(slots), 1), jnp.int32)
    return SlotBatch(jnp.asarray(slots, jnp.int32), (table, table), (table, table))


def leaves(state: DecodeState) -> dict[str, np.ndarray]:
    """Copy what is led by the slot."""
    small = state.replace(target_cache=None, drafter_state=None)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(small)}


@pytest.mark.parametrize("slots", [[3], [4, 0], [1, SLOTS, 2, SLOTS], [0, SLOTS, 2, 3, SLOTS]])
@pytest.mark.parametrize(("input_rows", "adjusts"), [(0, False), (NUM_DRAFTS + 1, True), (None, False)])
def test_a_pass_changes_its_own_slots_alone(noisy: DecodeState, slots: list[int], input_rows, adjusts: bool) -> None:
    """Entries without a slot are done; what the pass does not take stays, and so do the tables outside."""
    batch = batch_of(slots)
    rows = run_take(noisy, batch, input_rows, adjusts)
    own = [row for row, slot in enumerate(slots) if slot < SLOTS]
    assert np.flatnonzero(~np.asarray(rows.done)).tolist() == own
    np.testing.assert_array_equal(rows.length[np.asarray(own)], noisy.length[np.asarray(slots)[own]])
    assert len(rows.target_cache.tables) == 2
    after = run_put(
        noisy, batch, jax.tree.map(lambda leaf: leaf if leaf.ndim == 4 else leaf + leaf.dtype.type(1), rows)
    )
    assert after.target_cache.tables == ()
    taken = np.asarray(slots)[own]
    for name, leaf in leaves(after).items():
        old = leaves(noisy)[name]
        whole = len(slots) == SLOTS
        others = np.setdiff1d(np.arange(SLOTS), taken)
        if not whole or name == ".done":
            np.testing.assert_array_equal(leaf[others], old[others], name)
        fixed = ".stop" in name or ".sampling" in name or (".adjust" in name and not adjusts)
        if fixed or (".drafter_input" in name and input_rows == 0):
            np.testing.assert_array_equal(leaf, old, name)
            continue
        mine, before = leaf[taken], old[taken]
        if ".drafter_input" in name and leaf.ndim > 1 and input_rows is not None:
            np.testing.assert_array_equal(mine[:, input_rows:], before[:, input_rows:], name)
            mine, before = mine[:, :input_rows], before[:, :input_rows]
        np.testing.assert_array_equal(mine, before + before.dtype.type(1), name)


def admitted(state: DecodeState, slots: list[int], tokens: list[int], length: int, request: Request) -> DecodeState:
    params = SlotParams.of(request, request.stop_token_ids or (), TARGET.vocab_size)
    count = len(slots)
    aux = jnp.full((count, 2 * TARGET.hidden_size), 0.5, jnp.float32)
    lengths = jnp.full((count,), length, jnp.int32)
    stacked = SlotParams.stack([params], count)
    return jax.jit(admit)(state, jnp.asarray(slots, jnp.int32), lengths, jnp.asarray(tokens, jnp.int32), aux, stacked)


@pytest.mark.parametrize("slot", [0, 2, SLOTS - 1])
@pytest.mark.parametrize("length", [1, 45])
def test_a_request_enters_its_slot_and_no_other(noisy: DecodeState, slot: int, length: int) -> None:
    after = admitted(noisy, [SLOTS, slot], [3, 7], length, REQUEST)
    for name, leaf in leaves(after).items():
        np.testing.assert_array_equal(np.delete(leaf, slot, axis=0), np.delete(leaves(noisy)[name], slot, axis=0), name)
    assert int(after.length[slot]) == length
    assert int(after.pending_token[slot]) == 7
    assert not after.done[slot]
    assert int(after.remaining[slot]) == 8
    assert after.stop_token_ids[slot].tolist() == [2, 30, *[NO_STOP] * 14]
    sampling = [np.asarray(leaf)[slot].item() for leaf in jax.tree.leaves(after.sampling)]
    np.testing.assert_allclose(sampling, [0.7, 5, 0.9, 0.1, 11, 6], rtol=1e-6)
    waiting = after.drafter_input
    assert waiting is not None
    assert (int(waiting.num[slot]), int(waiting.first_position[slot])) == (1, length - 1)
    assert int(waiting.token_ids[slot, 0]) == 7
    np.testing.assert_array_equal(waiting.aux_hidden[slot, 0], 0.5)
    check_state(after, CAPACITY, [slot])


@pytest.mark.parametrize(
    ("first", "request_", "done", "pending"),
    [
        (7, REQUEST, False, 7),
        (30, REQUEST, True, 30),
        (7, Request((1,), 1), True, 7),
        (7, Request((1,), 2), False, 7),
        (NO_TOKEN, REQUEST, False, 0),  # for the host to stop
        (0, Request((1,), 9, stop_token_ids=(NO_STOP,)), False, 0),
    ],
    ids=["goes on", "stop token", "budget of one", "budget of two", "no token", "no stop"],
)
def test_a_first_token_that_ends_the_request_leaves_its_slot_done(
    noisy: DecodeState, first: int, request_: Request, done: bool, pending: int
) -> None:
    after = admitted(noisy, [1], [first], 3, request_)
    assert bool(after.done[1]) is done
    assert int(after.pending_token[1]) == pending
    assert int(after.remaining[1]) == request_.max_new_tokens - 1


def test_a_drafter_may_have_no_caches_and_there_may_be_none() -> None:
    target = tiny_target()
    state = init_state(target, NGram(), SLOTS, CAPACITY, NUM_DRAFTS, (2, 2), ())
    rows = take(state, batch_of([3, 1]), NUM_DRAFTS + 1, adjusts=False)
    assert rows.drafter_state.token_ids.shape[0] == 2
    changed = rows.replace(drafter_state=rows.drafter_state.replace(num=rows.drafter_state.num + 7))
    after = put(state, batch_of([3, 1]), changed)
    assert after.drafter_state.num.tolist() == [0, 7, 0, 7, 0]
    state = init_state(target, None, SLOTS, CAPACITY, 0, (2, 2), ())
    assert state.drafter_input is state.drafter_state is None


def test_a_request_that_goes_on_has_what_it_had() -> None:
    """Counts, the budget and must_emit, after three emitted tokens, of which one is pending."""
    request = Request((1, 2), 9, SamplingParams(frequency_penalty=0.5, min_tokens=4))
    params = SlotParams.of(request, (), TARGET.vocab_size).continued([5, 5, 6])
    assert params.remaining.tolist() == [7]
    assert params.adjustments.must_emit.tolist() == [2]
    counts = np.asarray(params.adjustments.counts)[0]
    assert (counts[5], counts[6], counts.sum()) == (2, 0, 2)  # the pending token is counted when it is admitted
