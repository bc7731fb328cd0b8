"""The update of a training follows from its length, unless a person names another."""

from typing import Any

import pytest

from drafter.train.recipe import PAPER, SHORT_STEPS, Update, chosen_update, short_update

SHORT = short_update(192)


@pytest.mark.parametrize(
    ("steps", "from_trained", "typed", "update"),
    [
        (131, False, {}, SHORT),
        (SHORT_STEPS - 1, False, {}, SHORT),
        (SHORT_STEPS, False, {}, PAPER),
        (131, True, {}, PAPER),
        (131, False, {"optimizer": "adamw"}, PAPER),
        (5000, False, {"optimizer": "muon"}, SHORT),
        (131, True, {"optimizer": "muon"}, SHORT),
        (131, False, {"decay_frac": 1.0}, Update("muon", 0.008, 0.003, 0.02, 1.0)),
        (131, False, {"warmup_frac": 0.1}, Update("muon", 0.008, 0.003, 0.1, 0.6)),
        # a rate alone is one of adamw's, as the rates of muon are two
        (131, False, {"learning_rate": 1e-3}, Update("adamw", 1e-3, 1e-3, 0.0025, 1.0)),
        (5000, False, {"other_rate": 0.001}, Update("muon", 0.008, 0.001, 0.02, 0.6)),
        (131, False, {"learning_rate": 0.02, "other_rate": 0.001}, Update("muon", 0.02, 0.001, 0.02, 0.6)),
        (131, False, {"optimizer": "muon", "learning_rate": 0.02}, Update("muon", 0.02, 0.003, 0.02, 0.6)),
    ],
)
def test_the_update_follows_from_the_steps_and_what_is_typed_wins(
    steps: int, from_trained: bool, typed: dict[str, Any], update: Update
) -> None:
    assert chosen_update(steps, 192, from_trained=from_trained, typed=typed) == update


def test_wider_drafters_learn_at_lower_rates() -> None:
    """Muon's by the root of the width, Adam's by the width; narrower ones are not driven faster."""
    wide = short_update(4 * 192)
    assert (wide.learning_rate, wide.other_rate) == (SHORT.learning_rate / 2, SHORT.other_rate / 4)
    assert short_update(24) == SHORT


def test_an_update_is_said_in_one_line() -> None:
    muon = "muon at rates of 0.008 and 0.003, rising over 2% of the steps and falling over the last 60%"
    assert SHORT.describe() == muon
    assert (
        PAPER.describe() == "adamw at a rate of 0.0001, rising over 0.25% of the steps and falling over the last 100%"
    )
