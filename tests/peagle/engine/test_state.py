"""Prefill and insertion: the Prefix does not depend on chunks; `insert` copies its valid positions into one slot."""

import functools
from collections.abc import Sequence
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafter.load import load_drafter, save_drafter
from drafter.propose import PEagle
from peagle.drafters.ngram import NGram
from peagle.engine.prefill import empty_prefix, extend
from peagle.engine.programs import Programs
from peagle.engine.request import Request, SamplingParams
from peagle.engine.state import NO_STOP, DecodeState, Prefix, SlotParams, check_integrity, extract, init_state, insert
from peagle.engine.step import StepKind, StepOutput
from peagle.ops import native
from peagle.ops.attention import cached
from peagle.ops.kv_cache import KVCache, copy_positions, slot_positions
from peagle.ops.likeliest import NO_TOKEN
from peagle.protocols import Drafter, Target
from target.load import load_target, save_target
from target.model import GptOss
from tests.compiling import AS_FOR_USERS
from tests.drafter.cases import random_params as random_drafter
from tests.peagle.toys import CONFIG as TARGET
from tests.peagle.toys import WINDOW, drafter_config, tiny_target

G, H, ROWS, ROW = 2, 3, 3, 1
held_by = jax.jit(slot_positions)

# copy_positions


def of_positions(positions: np.ndarray) -> np.ndarray:
    """[..., G, H]: distinct values for each position, head and channel."""
    places = np.arange(G * H, dtype=np.float32).reshape(G, H)
    return positions.astype(np.float32)[..., None, None] * 100 + places


def lane(capacity: int, ring: bool, length: int) -> KVCache:
    """Make one sequence's cache of positions 0..length-1, as far as they fit, and NaN elsewhere."""
    held = np.asarray(
        held_by(
            KVCache(*[jnp.asarray(np.zeros((1, capacity, G, H), np.float32))] * 2, ring),
            np.asarray([length - 1], np.int32),
        )
    )
    written = (held >= 0) & (held < length)
    keys = np.where(written[..., None, None], of_positions(held), np.nan).astype(np.float32)
    return KVCache(jnp.asarray(keys), jnp.asarray(-keys), ring)


@functools.cache
def filled(capacity: int, ring: bool) -> KVCache:
    """Make three sequences' caches, full of old values."""
    old = np.random.default_rng(capacity).standard_normal((2, ROWS, capacity, G, H), np.float32)
    return KVCache(jnp.asarray(old[0]), jnp.asarray(old[1]), ring)


copy = jax.jit(copy_positions, static_argnames="block")


def assert_copied(into: KVCache, source: KVCache, after: KVCache, length: int) -> np.ndarray:
    """Check that the row holds both ranges of positions and other rows are unchanged; return the row's changes."""
    held = np.asarray(held_by(after, np.asarray([length - 1], np.int32)))[0]
    reach = min(length, into.capacity, source.capacity)  # the last so many are in both, if one of them is a ring
    wanted = (held >= 0) & (held < length) & (held >= (length - reach if into.ring or source.ring else 0))
    assert wanted.sum() == reach
    for part, sign in (("key", 1), ("value", -1)):
        new, old = np.asarray(getattr(after, part)), np.asarray(getattr(into, part))
        np.testing.assert_array_equal(new[ROW, wanted], sign * of_positions(held[wanted]))
        np.testing.assert_array_equal(np.delete(new, ROW, axis=0), np.delete(old, ROW, axis=0))
    return (np.asarray(after.key)[ROW] != np.asarray(into.key)[ROW]).any(axis=(1, 2))


RING_LENGTHS = (0, 1, 2, 6, 7, 8, 10, 11, 12, 13, 14, 15, 21, 22, 23, 77, 1000, 1001)


@pytest.mark.parametrize(("into", "source"), [(7, 11), (11, 7), (7, 7), (8, 15), (1, 4)])
def test_a_ring_goes_into_a_ring_of_another_capacity(into: int, source: int) -> None:
    """Each position to its own slot, at every place of either's wrap and long after."""
    for length in RING_LENGTHS:
        given, old = lane(source, True, length), filled(into, True)
        assert_copied(old, given, copy(old, given, jnp.int32(ROW), jnp.int32(length)), length)


@pytest.mark.parametrize("into", [1, 7, 16])
def test_a_full_cache_goes_into_a_ring(into: int) -> None:
    for length in (0, 1, into - 1, into, into + 1, 2 * into, 2 * into + 1, 40, 41):
        given, old = lane(41, False, length), filled(into, True)
        assert_copied(old, given, copy(old, given, jnp.int32(ROW), jnp.int32(length)), length)


@pytest.mark.parametrize(("into", "source"), [(41, 41), (41, 50), (50, 41), (4, 4), (3, 3), (41, 3)])
@pytest.mark.parametrize("block", [1, 4, 8, 128])
def test_a_full_cache_goes_into_a_full_one_by_blocks(into: int, source: int, block: int) -> None:
    """Only blocks with valid positions are copied, and the last block ends within both caches."""
    fits = min(into, source)
    width = min(block, fits)
    for length in {n for n in (0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 39, 40, 41, fits - 1, fits) if n <= fits}:
        given, old = lane(source, False, length), filled(into, False)
        after = copy(old, given, jnp.int32(ROW), jnp.int32(length), block=block)
        touched = assert_copied(old, given, after, length)
        assert not touched[-(-length // width) * width :].any()


def test_a_ring_does_not_go_into_a_full_cache() -> None:
    with pytest.raises(ValueError, match="a ring does not hold all positions"):
        copy_positions(filled(8, False), lane(8, True, 3), jnp.int32(0), jnp.int32(3))


def test_the_copy_takes_the_dtype_of_its_place() -> None:
    for ring in (False, True):
        old = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), filled(8, ring))
        after = copy(old, lane(8, ring, 5), jnp.int32(ROW), jnp.int32(5))
        assert after.key.dtype == jnp.bfloat16
        np.testing.assert_array_equal(after.key[ROW, :5], jnp.asarray(of_positions(np.arange(5)), jnp.bfloat16))


# a Prefix, however the prompt is cut

DRAFTER = drafter_config(num_layers=2, windows=(WINDOW, None))  # as the target's layers
PROMPT = tuple(np.random.default_rng(4).integers(0, TARGET.vocab_size, 45).tolist())
CAPACITY = 64
assert len(PROMPT) > 5 * WINDOW  # the rings wrap several times
# tokens of each chunk; the programs' chunk length stands before them, and is filled up with padding
CUTTINGS: list[tuple[int, list[int]]] = [
    (64, [45]),
    (1, [1] * 45),
    (16, [16, 16, 13]),
    (16, [1, 15, 2, 16, 7, 4]),
    (16, [*([3] * 14), 3]),
    (WINDOW, [WINDOW] * 5 + [5]),
    (64, [44, 1]),
]
empty = jax.jit(empty_prefix, static_argnums=(2, 3))
empty_state = jax.jit(init_state, static_argnums=(2, 3, 4))
run_on_xla = jax.jit(extend)
run_native = jax.jit(extend, compiler_options=AS_FOR_USERS)


@flax.struct.dataclass
class Models:
    target: GptOss
    drafter: PEagle


@functools.cache
def models(kind: str, root: Path) -> Models:
    """Load the same weights as XLA's arrays, or in the kernels' layout."""
    directory, dtype = root / kind, jnp.dtype(kind.split()[-1])
    on = kind.startswith("native")
    save_target(directory / "target", tiny_target().params, TARGET, dtype=np.float32, mxfp4=False)
    save_drafter(directory / "drafter", random_drafter(DRAFTER), DRAFTER)
    loaded = load_target(directory / "target", dtype=dtype, implementation="native" if on else None)
    params, config = load_drafter(directory / "drafter", dtype, implementation="native" if on else None)
    return Models(GptOss(loaded.params, loaded.config, (0, 1)), PEagle(params, config))


def prefix_of(models: Models, chunk: int, counts: Sequence[int], native: bool) -> tuple[Prefix, np.ndarray]:
    """Return (the Prefix of the first tokens of PROMPT, the logits after them)."""
    lane, begin = empty(models.target, models.drafter, CAPACITY, chunk), 0
    for count in counts:
        padded = np.full((1, chunk), TARGET.vocab_size - 1, np.int32)
        padded[0, :count] = PROMPT[begin : begin + count]
        run = run_native if native else run_on_xla
        lane, logits = run(models.target, models.drafter, lane, padded, jnp.int32(count))
        begin += count
    return lane, np.asarray(logits)


def valid(caches: Sequence[KVCache], length: int) -> list[np.ndarray]:
    """Keys and values of the positions below length that a later query may see, in order."""
    found = []
    for cache in caches:
        held = np.asarray(held_by(cache, np.asarray([length - 1], np.int32)))[0]
        oldest = max(0, length - WINDOW + 1) if cache.ring else 0
        slots = np.array([np.flatnonzero(held == position)[0] for position in range(oldest, length)], int)
        found += [np.asarray(part)[0, slots] for part in (cache.key, cache.value)]
    return found


def everything(prefix: Prefix, logits: np.ndarray) -> dict[str, np.ndarray]:
    length = int(prefix.length[0])
    target, drafter = valid(prefix.target_cache, length), valid(prefix.drafter_state, length - 1)
    parts = {f"target {i}": part for i, part in enumerate(target)} | {f"drafter {i}": x for i, x in enumerate(drafter)}
    return parts | {"aux_hidden": np.asarray(prefix.aux_hidden), "logits": logits}


@pytest.mark.skipif(not native.available(), reason=native.status()[1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_cutting_of_a_prompt_gives_the_same_bits(dtype: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Caches of target and drafter, aux_hidden and logits, past the window and round the ring; shorter prompts, too."""
    given = models(f"native {dtype}", tmp_path_factory.getbasetemp())
    for length in (45, 1, 2, WINDOW, 17):
        whole = everything(*prefix_of(given, 64, [length], native=True))
        assert all(np.isfinite(part.astype(np.float32)).all() for part in whole.values())
        for chunk, counts in CUTTINGS[1:]:
            cut = shortened(counts, length)
            for name, part in everything(*prefix_of(given, chunk, cut, native=True)).items():
                np.testing.assert_array_equal(part, whole[name], f"{name}: {length} tokens as {cut}")


@pytest.mark.parametrize("most_scores", [None, 90])
def test_any_cutting_of_a_prompt_gives_the_same_to_rounding(
    most_scores: int | None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On XLA, whose attention uses blocks of keys if a chunk is long or begins late."""
    given = models("xla float32", tmp_path_factory.getbasetemp())
    run_on_xla.clear_cache()
    if most_scores is not None:
        monkeypatch.setattr(cached, "MOST_SCORES", most_scores)
    for length in (45, 2):
        whole = everything(*prefix_of(given, 64, [length], native=False))
        for chunk, counts in CUTTINGS[1:]:
            cut = shortened(counts, length)
            for name, part in everything(*prefix_of(given, chunk, cut, native=False)).items():
                scale = 1e-4 * max(float(np.abs(whole[name]).max(initial=0.0)), 1.0)
                np.testing.assert_allclose(part, whole[name], atol=scale, err_msg=f"{name}: {length} as {cut}")
    run_on_xla.clear_cache()


def shortened(counts: Sequence[int], length: int) -> list[int]:
    """For the first tokens only, in the same chunks."""
    ends = [min(end, length) for end in np.cumsum(counts)]
    return [int(n) for n in np.diff([0, *ends]) if n]


# insert

SLOTS, NUM_DRAFTS = 3, 4
ASKED = Request(PROMPT, 9, SamplingParams(0.7, 5, 0.9, 0.1, seed=11), (2, 30), index=6)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return models("xla float32", tmp_path_factory.getbasetemp())


def noisy(state: DecodeState) -> DecodeState:
    """Make a state with old values of other requests in every leaf."""
    rng = np.random.default_rng(8)

    def one(leaf: jax.Array) -> jax.Array:
        if leaf.dtype == jnp.bool_:
            return jnp.zeros_like(leaf)
        return jnp.asarray(rng.integers(1, 9, leaf.shape), leaf.dtype)

    return jax.tree.map(one, state)


run_insert = jax.jit(insert)


def inserted(
    target: Target, drafter: Drafter | None, prefix: Prefix, first: int, slot: int, asked: Request = ASKED
) -> tuple[DecodeState, DecodeState]:
    """(before, after)."""
    before = noisy(empty_state(target, drafter, SLOTS, CAPACITY, NUM_DRAFTS))
    params = SlotParams.of(asked, asked.stop_token_ids or (), target.vocab_size)
    after = run_insert(before, prefix, jnp.asarray([first], jnp.int32), jnp.int32(slot), params)
    return before, after


@pytest.mark.parametrize("slot", range(SLOTS))
@pytest.mark.parametrize("length", [1, 2, WINDOW, 45])
def test_a_prompt_goes_into_its_slot_and_no_other(pair: Models, slot: int, length: int) -> None:
    prefix, _ = prefix_of(pair, 16, shortened(CUTTINGS[2][1], length), native=False)
    before, after = inserted(pair.target, pair.drafter, prefix, 7, slot)
    leaves = jax.tree_util.tree_leaves_with_path(after)
    for (path, leaf), old in zip(leaves, jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(np.delete(leaf, slot, axis=0), np.delete(old, slot, axis=0), str(path))

    def own(caches: Sequence[KVCache]) -> list[KVCache]:
        return [jax.tree.map(lambda leaf: leaf[slot : slot + 1], cache) for cache in caches]

    for mine, theirs, held in (
        (after.target_cache, prefix.target_cache, length),
        (after.drafter_state, prefix.drafter_state, length - 1),
    ):
        for ours, given in zip(valid(own(mine), held), valid(theirs, held), strict=True):
            np.testing.assert_array_equal(ours, given)
    assert int(after.length[slot]) == length
    assert int(after.pending_token[slot]) == 7
    assert not after.done[slot]
    assert int(after.remaining[slot]) == 8
    assert after.stop_token_ids[slot].tolist() == [2, 30, *[NO_STOP] * 14]
    asked = [np.asarray(leaf)[slot].item() for leaf in jax.tree.leaves(after.sampling)]
    np.testing.assert_allclose(asked, [0.7, 5, 0.9, 0.1, 11, 6], rtol=1e-6)
    waiting = after.drafter_input
    assert waiting is not None
    assert (int(waiting.num[slot]), int(waiting.first_position[slot])) == (1, length - 1)
    assert int(waiting.token_ids[slot, 0]) == 7
    np.testing.assert_array_equal(waiting.aux_hidden[slot, 0], prefix.aux_hidden[0])
    others_done = after.replace(done=jnp.arange(SLOTS) != slot)
    check_integrity(others_done, CAPACITY)


@pytest.mark.parametrize(
    ("first", "asked", "done", "pending"),
    [
        (7, ASKED, False, 7),
        (30, ASKED, True, 30),
        (7, Request(PROMPT, 1), True, 7),
        (7, Request(PROMPT, 2), False, 7),
        (NO_TOKEN, ASKED, False, 0),  # for the host to stop
        (0, Request(PROMPT, 9, stop_token_ids=(NO_STOP,)), False, 0),
    ],
    ids=["goes on", "stop token", "budget of one", "budget of two", "no token", "no stop"],
)
def test_a_first_token_that_ends_the_request_leaves_its_slot_frozen(
    pair: Models, first: int, asked: Request, done: bool, pending: int
) -> None:
    prefix, _ = prefix_of(pair, 16, [3], native=False)
    _, after = inserted(pair.target, pair.drafter, prefix, first, 1, asked)
    assert bool(after.done[1]) is done
    assert int(after.pending_token[1]) == pending
    assert int(after.remaining[1]) == asked.max_new_tokens - 1


def test_states_that_are_no_caches_go_whole_and_there_may_be_none() -> None:
    target = tiny_target()
    for drafter in (NGram(), None):
        lane = empty(target, drafter, CAPACITY, 16)
        padded = np.zeros((1, 16), np.int32)
        padded[0, :9] = PROMPT[:9]
        prefix, _ = run_on_xla(target, drafter, lane, padded, jnp.int32(9))
        _, after = inserted(target, drafter, prefix, 7, 2)
        if drafter is None:
            assert after.drafter_input is after.drafter_state is None
        else:
            assert after.drafter_state.token_ids[2, 1:9].tolist() == list(PROMPT[1:9])
            assert int(after.drafter_state.num[2]) == 9


# extract


@pytest.mark.skipif(not native.available(), reason=native.status()[1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prefix_of_a_row_that_paused_is_that_of_its_tokens_and_drafts_on(
    dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bit for bit; in another slot the row drafts, accepts and emits as in its own."""
    given = models(f"native {dtype}", tmp_path_factory.getbasetemp())
    programs = Programs(given.target, given.drafter, SLOTS, CAPACITY, NUM_DRAFTS, 16, 1)
    state, lane = programs.init()
    params = SlotParams.of(Request(PROMPT[:9], 50), (), TARGET.vocab_size)
    lane, logits = programs.extend(lane, 0, PROMPT[:9])
    state, first = programs.admit(state, lane, logits, 2, params)
    tokens = [*PROMPT[:9], int(first[0])]

    def run(state: DecodeState, slot: int, drafts: int) -> tuple[DecodeState, StepOutput]:
        widths = np.where(np.arange(SLOTS) == slot, drafts, 0).astype(np.int32)
        state, packed = programs.steps(state, widths, 0.0, 1, StepKind(drafts))
        output = StepOutput.unpack(np.asarray(packed)[0], drafts)
        return state, jax.tree.map(lambda leaf: leaf[slot], output)

    for drafts in (NUM_DRAFTS, NUM_DRAFTS, *[0] * 7, NUM_DRAFTS, *[0] * 5):
        if drafts and state.drafter_input is not None and int(state.drafter_input.num[2]) > 1:
            state = programs.absorb(state)
        state, output = run(state, 2, drafts)
        tokens += output.token_ids[: int(output.count)].tolist()
    assert len(tokens) > 2 * WINDOW
    state = programs.absorb(state)
    taken = jax.jit(extract)(state, empty(given.target, given.drafter, CAPACITY, 16), jnp.int32(2))
    held = len(tokens) - 1
    assert int(taken.length[0]) == held
    for begin in range(0, held, 16):
        lane, logits = programs.extend(lane, begin, tokens[begin : min(begin + 16, held)])
    whole = everything(lane, np.asarray(logits))
    for name, part in everything(taken, np.asarray(logits)).items():
        np.testing.assert_array_equal(part, whole[name], name)

    moved, _ = programs.init()
    left = SlotParams.of(Request(PROMPT[:9], int(state.remaining[2]) + 1), (), TARGET.vocab_size)
    moved = run_insert(moved, taken, jnp.asarray(tokens[-1:], jnp.int32), jnp.int32(0), left)
    for _ in range(5):
        state, here = run(state, 2, NUM_DRAFTS)
        moved, there = run(moved, 0, NUM_DRAFTS)
        for mine, theirs in zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True):
            np.testing.assert_array_equal(mine, theirs)
