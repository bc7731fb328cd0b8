"""A drafter whose layers see the last positions alone: in few pages that repeat, and in training."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from drafter import reference
from drafter.config import DrafterConfig
from drafter.load import load_drafter, save_drafter, to_tensors
from drafter.propose import Eagle3, PEagle, drafter_of
from peagle.ops import native
from peagle.ops.attention import PagedCache
from peagle.ops.errors import InputError
from peagle.ops.messages import DraftOutput
from tests.support.compiling import AS_FOR_USERS
from tests.support.drafters import (
    CONFIGS,
    EAGLE_WINDOW,
    WINDOWS,
    Text,
    forward,
    propose,
    random_params,
    random_text,
    stack_fresh,
)
from tests.support.paging import SMALL, small_pages

K, WINDOW, CAPACITY = 4, 9, 64
KEPT = 3 * SMALL  # what a window's pages hold
LENGTHS = (5, 23)
ACCEPTED = [(0, K), (K, 2), (K, 0), (1, K), (0, 0), (K, 1), (K, 0), (3, K)]
NATIVE = pytest.mark.skipif(not native.available(), reason=native.status()[1])
propose_exactly = jax.jit(propose.__wrapped__, static_argnames="num_drafts", compiler_options=AS_FOR_USERS)


def _absorb(drafter: PEagle | Eagle3, state: PagedCache, ids: Any, aux: Any, positions: Any) -> PagedCache:
    return drafter.absorb(state, ids, aux, positions)


absorb, absorb_exactly = jax.jit(_absorb), jax.jit(_absorb, compiler_options=AS_FOR_USERS)


def load(directory: Path, name: str, kernels: Any) -> PEagle | Eagle3:
    save_drafter(directory / "drafter", random_params(CONFIGS[name]), CONFIGS[name])
    drafter = drafter_of(*load_drafter(directory / "drafter", implementation=kernels))
    return drafter.replace(with_logits=True) if isinstance(drafter, PEagle) else drafter


def texts_of(config: DrafterConfig) -> list[Text]:
    return [random_text(config, seed) for seed in (1, 2)]


def prompted(drafter: PEagle | Eagle3, state: PagedCache, chunk: int, exactly: bool) -> PagedCache:
    """The state after all that is known of both prompts, chunk by chunk; padding stands behind the rows."""
    texts = texts_of(drafter.config)
    for begin in range(0, max(LENGTHS) - 1, chunk):
        place = np.arange(begin, begin + chunk)
        positions = np.stack([np.where(place < length - 1, place, -1) for length in LENGTHS]).astype(np.int32)
        ids = np.stack([text.token_ids[place + 1] for text in texts])
        aux = np.stack([text.aux_hidden[place] for text in texts])
        state = (absorb_exactly if exactly else absorb)(drafter, state, ids, aux, positions)
    return state


def steps(drafter: PEagle | Eagle3, state: PagedCache, exactly: bool) -> list[tuple[list[int], DraftOutput]]:
    """(rows with a true hidden of each text, drafts) of every step."""
    firsts, nums, found = [n - 1 for n in LENGTHS], [1, 1], []
    for accepted in ACCEPTED:
        fresh = stack_fresh(texts_of(drafter.config), firsts, nums, K)
        draft, state = (propose_exactly if exactly else propose)(drafter, state, fresh, num_drafts=K)
        firsts = [first + num for first, num in zip(firsts, nums, strict=True)]
        found.append((firsts, draft))
        nums = [count + 1 for count in accepted]
    assert min(firsts) > KEPT  # every sequence repeats its pages
    return found


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        (WINDOWS, "xla"),
        pytest.param(WINDOWS, "native", marks=[NATIVE, pytest.mark.slow]),
        pytest.param(EAGLE_WINDOW, "xla", marks=pytest.mark.slow),
        pytest.param(EAGLE_WINDOW, "native", marks=NATIVE),
    ],
)
def test_a_drafter_with_a_window_gives_the_references_drafts(tmp_path: Path, name: str, kernels: str) -> None:
    """Windows have as few pages as a step allows; accepted are none, some and all of the drafts."""
    drafter = load(tmp_path, name, kernels)
    config, tensors = drafter.config, to_tensors(random_params(CONFIGS[name]), CONFIGS[name])
    state = small_pages(drafter, 2, CAPACITY, 2 * K)
    assert state.tables[1].shape[1] * SMALL == KEPT
    moved = 0.0
    for known, draft in steps(drafter, prompted(drafter, state, 2 * K, False), False):
        for row, text in enumerate(texts_of(config)):
            told = (text.token_ids[: known[row] + 1].tolist(), text.aux_hidden[: known[row]])
            expected = reference.draft_logits(tensors, config, *told, K)
            everything = reference.draft_logits(tensors, config.with_window(None), *told, K)
            moved = max(moved, float(np.abs(expected[:1] - everything[:1]).max()))
            assert draft.token_ids[row].tolist() == reference.draft_ids(tensors, config, *told, K).tolist()
            if draft.logits is not None:
                np.testing.assert_allclose(draft.logits[row], expected, atol=1e-4)
    assert moved > 0.1  # the window counts


@dataclasses.dataclass(frozen=True)
class Way:
    """How the same drafter is run."""

    chunk: int
    widest: int
    retained: bool  # all pages, or those that the window reaches


@pytest.mark.skipif(not native.available(), reason=native.status()[1])
@pytest.mark.parametrize("name", [WINDOWS, pytest.param(EAGLE_WINDOW, marks=pytest.mark.slow)])
def test_few_pages_and_chunks_of_any_size_give_the_bits_of_all_pages(tmp_path: Path, name: str) -> None:
    drafter = load(tmp_path, name, "native")
    kept = None
    few = (Way(chunk, widest, False) for chunk, widest in ((32, 32), (2 * K, 2 * K), (1, 2 * K), (3, 11)))
    for way in (Way(32, 32, True), *few):
        drafter = drafter.replace(retain_full_kv=way.retained)
        state = small_pages(drafter, 2, CAPACITY, way.widest)
        assert len(state.tables) == 1 if way.retained else state.tables[1].shape[1] < state.tables[0].shape[1]
        found = [
            np.asarray(part)
            for _, draft in steps(drafter, prompted(drafter, state, way.chunk, True), True)
            for part in values(draft)
        ]
        kept = found if kept is None else kept
        for one, other in zip(found, kept, strict=True):
            np.testing.assert_array_equal(one, other, str(way))


def values(draft: DraftOutput) -> list[jax.Array]:
    return [draft.token_ids] if draft.logits is None else [draft.token_ids, draft.logits]


def test_a_window_no_smaller_than_the_text_is_none() -> None:
    config = CONFIGS[WINDOWS]
    text, anchor = random_text(config, 3), np.arange(12, dtype=np.int32)[None]
    rows = (text.token_ids[None, 1:13], text.aux_hidden[None, :12], anchor, np.zeros_like(anchor))
    params = random_params(config)
    everything, wide_enough, narrow = (
        np.asarray(forward(params, config.with_window(window), *rows)) for window in (None, 12, 11)
    )
    np.testing.assert_array_equal(everything, wide_enough)
    changed = np.abs(narrow - everything).max(axis=-1)[0] > 1e-4
    assert changed.tolist() == [False] * 11 + [True]


@pytest.mark.parametrize(
    ("windows", "says"),
    [((9, 9), "2 windows for 3 layers"), ((9, 0, 9), "window is 0; expected 1 position or more")],
)
def test_windows_that_cannot_be_are_refused(windows: tuple[int, ...], says: str) -> None:
    with pytest.raises(InputError, match=says):
        dataclasses.replace(CONFIGS[WINDOWS], windows=windows)


def test_two_windows_have_no_place_in_a_config(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIGS[WINDOWS], windows=(9, None, 8))
    with pytest.raises(InputError, match=r"windows of \[8, 9\] positions; expected one, since config.json holds one"):
        save_drafter(tmp_path / "drafter", random_params(CONFIGS[WINDOWS]), config)
