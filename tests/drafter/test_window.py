"""A drafter whose layers see the last positions alone: in few pages that repeat, and in training."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from drafter.load import save_drafter
from peagle.base.errors import InputError
from peagle.ops import native
from peagle.ops.messages import DraftOutput
from tests.support.compiling import AS_FOR_USERS
from tests.support.drafters import (
    CONFIGS,
    EAGLE_WINDOW,
    WINDOWS,
    absorbed,
    loaded,
    propose,
    random_params,
    random_text,
    run_steps,
)
from tests.support.paging import SMALL, small_pages

pytestmark = pytest.mark.compile

K, WINDOW, CAPACITY = 4, 9, 64
KEPT = 3 * SMALL  # what a window's pages hold
LENGTHS = (5, 23)
ACCEPTED = [(0, K), (K, 2), (K, 0), (1, K), (0, 0), (K, 1), (K, 0), (3, K)]
propose_exactly = jax.jit(propose.__wrapped__, static_argnames="num_drafts", compiler_options=AS_FOR_USERS)


absorb_exactly = jax.jit(lambda drafter, state, *rows: drafter.absorb(state, *rows), compiler_options=AS_FOR_USERS)


@dataclasses.dataclass(frozen=True)
class Way:
    """How the same drafter is run."""

    chunk: int
    widest: int
    retained: bool  # all pages, or those that the window reaches


@pytest.mark.skipif(not native.available(), reason=native.status()[1])
@pytest.mark.parametrize("name", [WINDOWS, pytest.param(EAGLE_WINDOW, marks=pytest.mark.slow)])
def test_few_pages_and_chunks_of_any_size_give_the_bits_of_all_pages(tmp_path: Path, name: str) -> None:
    drafter, bits = loaded(tmp_path, name, "native"), None
    texts = [random_text(drafter.config, seed) for seed in (1, 2)]
    few = (Way(chunk, widest, False) for chunk, widest in ((32, 32), (2 * K, 2 * K), (1, 2 * K), (3, 11)))
    for way in (Way(32, 32, True), *few):
        drafter = drafter.replace(retain_full_kv=way.retained)
        state = small_pages(drafter, 2, CAPACITY, way.widest)
        assert len(state.tables) == 1 if way.retained else state.tables[1].shape[1] < state.tables[0].shape[1]
        state = absorbed(drafter, state, texts, LENGTHS, way.chunk, absorb_exactly)
        steps, _ = run_steps(drafter, state, texts, LENGTHS, ACCEPTED, K, propose_exactly)
        assert min(steps[-1].known) > KEPT - K  # every sequence repeats its pages
        parts = [np.asarray(part) for step in steps for part in values(step.draft)]
        bits = parts if bits is None else bits
        for one, other in zip(parts, bits, strict=True):
            np.testing.assert_array_equal(one, other, str(way))


def values(draft: DraftOutput) -> list[jax.Array]:
    return [draft.token_ids] if draft.logits is None else [draft.token_ids, draft.logits]


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
