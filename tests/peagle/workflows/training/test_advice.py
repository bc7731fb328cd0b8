"""What a training says about itself: when its time is over, how it goes, and what to try next."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peagle.workflows.training import planned_steps
from peagle.workflows.training_advice import memorised_data, no_gain, weak_drafter


def logged(step: int, right: float, loss: float = 3.0, epochs: float = 1.0) -> dict[str, Any]:
    return {"step": step, "loss": loss, "hits_by_depth": [right, 0.1], "epochs": [epochs]}


def held_out(step: int, right: float, loss: float = 3.0) -> dict[str, Any]:
    figures = {"loss": loss, "hits_by_depth": [right, 0.1], "score": 1 + 1.1 * right, "documents": "a"}
    return {"step": step, "held_out": figures}


def evaluated(step: int, length: float) -> dict[str, Any]:
    return {"step": step, "evaluation": {"acceptance_length": length}}


WEAK = [  # the log, whether it began with a trained drafter, what is said
    ([], False, None),
    ([logged(10, 0.5), evaluated(10, 2.0)], False, None),
    ([logged(10, 0.95)], False, None),  # 1 + .95 + .95 * .1
    ([logged(10, 0.02)], False, "the first draft is right in .02 of the places"),
    ([logged(10, 0.95), held_out(10, 0.3)], False, "the first draft is right in .30 of the places"),
    ([logged(10, 0.95), evaluated(10, 1.25)], False, "the acceptance length is 1.25, and drafting gains little"),
    (
        [logged(10, 0.2), evaluated(10, 1.25)],
        False,
        "next try more minutes (--out RUN --resume --minutes N), more prompts (peagle data), --init with a trained "
        "drafter, peagle parity --drafter RUN/drafter, which looks for other causes",
    ),
    (
        [logged(10, 0.2, epochs=5.0), evaluated(10, 1.25)],
        True,
        "more prompts (peagle data), more minutes (--out RUN --resume --minutes N), peagle parity",
    ),
    (  # the curves part
        [logged(10, 0.6, epochs=8.0), held_out(10, 0.19), evaluated(10, 1.25)],
        True,
        "next try more prompts (peagle data), peagle parity",
    ),
]


@pytest.mark.parametrize(("log", "init", "says"), WEAK)
def test_a_weak_drafter_is_a_warning_with_what_to_try_next(log: Any, init: bool, says: str | None) -> None:
    warning = weak_drafter(log, Path("RUN"), init=init)
    assert warning is None if says is None else says in (warning or "")


def test_a_start_that_no_step_beats_is_a_warning() -> None:
    better = [held_out(0, 0.3), logged(10, 0.6), held_out(10, 0.4)]
    worse = [held_out(0, 0.3), logged(10, 0.6), held_out(10, 0.2)]
    assert no_gain(better, "DRAFTER") is None
    assert no_gain([logged(10, 0.6)], None) is None
    says = "no step is better on held-out documents than the start, --init DRAFTER, so the drafter is that one; next"
    assert says in (no_gain(worse, "DRAFTER") or "")


PARTED = [
    ([logged(10, 0.2)], None),
    ([logged(10, 0.2), held_out(10, 0.2)], None),
    ([logged(10, 0.2), held_out(10, 0.2), logged(20, 0.3, 2.5), held_out(20, 0.25, 2.8)], None),
    (  # right more often in training
        [logged(10, 0.57, epochs=8.0), held_out(10, 0.19)],
        "after 8.0 epochs, the first draft is right in .57 of the places there and in .19 of held-out ones",
    ),
    (  # the held-out loss rises
        [logged(10, 0.2), held_out(10, 0.2), logged(20, 0.3, 2.5), held_out(20, 0.2, 3.2)],
        "at step 20, after 1.0 epochs, the first draft is right in .30 of the places there and in .20 of held-out "
        "ones (best step: 10)",
    ),
    (  # the start, which has no loss in training, was the best
        [held_out(0, 0.3), logged(10, 0.6), held_out(10, 0.2)],
        "and in .20 of held-out ones (best step: 0)",
    ),
    # both losses rise: no training by heart
    ([logged(10, 0.2), held_out(10, 0.2), logged(20, 0.2, 3.4), held_out(20, 0.2, 3.2)], None),
]


@pytest.mark.parametrize(("log", "says"), PARTED)
def test_curves_that_part_are_a_warning(log: Any, says: str | None) -> None:
    warning = memorised_data(log)
    assert warning is None if says is None else says in (warning or "")


def test_a_curve_may_have_one_point(tmp_path: Path, curves: Callable[..., str]) -> None:
    for log in ([logged(1, 0.5)], [logged(1, 0.5), held_out(1, 0.4)]):
        assert curves(log, tmp_path) == str(tmp_path / "curve.svg")


def test_held_out_losses_take_their_part_of_the_minutes() -> None:
    """Nine tenths of ten minutes, in steps of one second."""
    assert planned_steps(10.0, 1.0) == 540
    assert planned_steps(10.0, 1.0, 2.0) == 500  # and twenty losses on held-out documents
    assert planned_steps(1.0, 1.0, 2.0) == 44  # and five, one every ten steps
    assert planned_steps(0.01, 1.0) == 0
