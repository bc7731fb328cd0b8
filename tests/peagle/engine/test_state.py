"""The state of slots: a pass takes those it names and puts them back, and a request enters its own slot alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.config import SamplingParams
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
from tests.support.models import TARGET, TOKENS, Models, models
from tests.support.toys import check_state

pytestmark = pytest.mark.compile

SLOTS, NUM_DRAFTS, CAPACITY = 5, 4, 64
run_take, run_put = jax.jit(take, static_argnums=(2, 3)), jax.jit(put)
REQUEST = Request(TOKENS[:45], 9, SamplingParams(0.7, 5, 0.9, 0.1, seed=11), (2, 30), index=6)


@pytest.fixture(scope="module")
def pair() -> Models:
    return models("float32")


@pytest.fixture(scope="module")
def noisy(pair: Models) -> DecodeState:
    """Make a state with old values of other requests in every leaf."""
    state = init_state(pair.target, pair.drafter, None, SLOTS, CAPACITY, NUM_DRAFTS, (2, 2), (2, 2))
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
