"""A recipe is filled by the drafter, the data and the number of steps; what is typed stays."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from drafter.config import DrafterConfig
from drafter.train.fill import SHORT_STEPS, fill
from drafter.train.recipe import Recipe
from drafter.train.row_batches import DocumentSource, pack
from peagle.base.errors import InputError
from tests.support.trainers import CONFIG, document

WIDE = dataclasses.replace(CONFIG, hidden_size=192, target_hidden_size=192)
BLOCK = dataclasses.replace(WIDE, block_size=8, qk_norm=True)
SOURCE = DocumentSource(pack([document(start, 9) for start in range(7)], 24), 1)
SHORT, PAPER = ("muon", 0.008, 0.003, 0.02, 0.6), ("adamw", 1e-4, None, 0.0025, 1.0)


def filled(steps: int = 10, config: DrafterConfig = WIDE, from_trained: bool = False, **typed: Any) -> Recipe:
    return fill(Recipe(**{"width": 24, "depth": 7, **typed}), config, [SOURCE], steps, from_trained=from_trained)


def rates(recipe: Recipe) -> tuple[Any, ...]:
    return tuple(
        getattr(recipe, name) for name in ("optimizer", "learning_rate", "other_rate", "warmup_frac", "decay_frac")
    )


@pytest.mark.parametrize(
    ("steps", "from_trained", "typed", "expected"),
    [
        (SHORT_STEPS - 1, False, {}, SHORT),
        (SHORT_STEPS, False, {}, PAPER),
        (131, True, {}, PAPER),
        (131, False, {"optimizer": "adamw"}, PAPER),
        (5000, True, {"optimizer": "muon"}, SHORT),
        # a rate alone is one of adamw's, as the rates of muon are two
        (131, False, {"learning_rate": 1e-3}, ("adamw", 1e-3, None, 0.0025, 1.0)),
        (131, False, {"optimizer": "muon", "learning_rate": 0.004}, ("muon", 0.004, 0.0015, 0.02, 0.6)),
    ],
)
def test_the_rates_follow_from_the_steps_and_what_is_typed_stays(
    steps: int, from_trained: bool, typed: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    assert rates(filled(steps, from_trained=from_trained, **typed)) == pytest.approx(expected)


def test_wider_drafters_learn_at_lower_rates() -> None:
    """Muon's by the root of the width, Adam's by the width; narrower ones are not driven faster."""
    wide = filled(config=dataclasses.replace(WIDE, hidden_size=4 * 192))
    assert (wide.learning_rate, wide.other_rate) == pytest.approx((0.008 / 2, 0.003 / 4))
    assert rates(filled(config=CONFIG)) == pytest.approx(SHORT)


def test_blocks_and_parts_follow_from_the_drafter() -> None:
    """A DFlash drafter's blocks are a sixth of the tokens; a drafter with windows is trained in short parts."""
    assert (filled().blocks, filled().draft_decay, filled().parts) == (None, None, 1)
    of_blocks = filled(config=BLOCK)
    assert (of_blocks.blocks, of_blocks.draft_decay, of_blocks.room) == (4, 4.0, ((4,) * 6,))
    assert filled(config=WIDE.with_window(9), width=2048).parts == 4
    assert filled(config=WIDE.with_window(9), width=2048, parts=2).parts == 2
    for more, says in (
        ({"blocks": 4}, "blocks is given, and a P-EAGLE drafter has none"),
        ({"config": BLOCK, "depth": 3}, "depth is 3, and a block of the drafter has 7 drafts"),
        ({"config": WIDE.with_window(9), "parts": 7}, "parts is 7, and does not divide the 24 tokens"),
    ):
        with pytest.raises(InputError, match=says):
            filled(**more)


def test_most_rows_have_room_for_all_of_their_chains() -> None:
    trained = sorted(np.concatenate([text.trained for text in row.documents]).sum() for row in SOURCE.rows)
    assert filled(ratio=1.0).room[0][0] == int(np.quantile(trained, 0.75)) - 1


def test_a_recorded_recipe_is_read_and_what_is_typed_is_seen() -> None:
    recorded = filled(5000, optimizer="muon", learning_rate=0.004, parts=2)
    record = dataclasses.asdict(recorded)
    assert Recipe(width=24, depth=7).over(record) == recorded
    assert Recipe(width=24, depth=7, seed=5).over(record) == dataclasses.replace(recorded, seed=5)
