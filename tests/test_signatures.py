"""Signatures are checked at each call here (tests/conftest.py): with shapes and without, and those of dataclasses."""

from collections.abc import Callable
from pathlib import Path

import beartype
import beartype.roar
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from peagle.engine.request import Request
from peagle.measure.bench import WeightBytes
from peagle.ops.files import trim_folder
from peagle.ops.mask import causal_mask
from peagle.pair import Pair

BROKEN = (beartype.roar.BeartypeException, jaxtyping.TypeCheckError)


@pytest.mark.parametrize(
    "call",
    [
        lambda: trim_folder("a text", 1),
        lambda: trim_folder(Path("absent"), "many"),
        lambda: causal_mask(jnp.zeros((1, 2), jnp.int32), jnp.zeros((3, 4), jnp.int32), None),  # batches of 1 and 3
        lambda: causal_mask(jnp.zeros((1, 2), jnp.int32), jnp.zeros((4,), jnp.int32), None),
        lambda: Request("a text", 1),
        lambda: WeightBytes(1, 2, 3, "four"),
        lambda: WeightBytes(1, 2, 3, 4).read("many"),
        lambda: Pair(None, None, None, None, (1, "two")),
    ],
)
def test_what_does_not_fit_is_an_error(call: Callable[[], object]) -> None:
    with pytest.raises(BROKEN):
        call()


def test_what_fits_is_none() -> None:
    trim_folder(Path(__file__).parent, 1 << 60)
    causal_mask(jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 4), jnp.int32), None)
    Request((1, 2), 1)
    WeightBytes(1, 2, 3, 4).read(5)


def test_closures_of_one_function_share_a_check_and_not_what_they_see() -> None:
    """Whichever is called first, and after arguments that did not fit."""

    def adding(number: int) -> Callable[..., object]:
        def add(to: int, factor: int = 1) -> int:
            return number * factor + to

        def shape_of(x: jaxtyping.Float[np.ndarray, "B D"]) -> jaxtyping.Float[np.ndarray, " D"]:
            return x[number] if number < 9 else x  # type: ignore[no-any-return]

        return jaxtyping.jaxtyped(typechecker=beartype.beartype)(shape_of if number % 2 else add)

    first, second = adding(2), adding(4)
    assert (first(1), second(1), first(1, factor=3)) == (3, 5, 7)
    for _ in range(2):
        with pytest.raises(BROKEN):
            second("a text")
        assert (second(1), first(1)) == (5, 3)
    rows, other, wrong = adding(1), adding(3), adding(9)
    x = np.arange(12.0).reshape(4, 3)
    assert rows(x).tolist() == [3, 4, 5]
    assert other(x).tolist() == [9, 10, 11]
    with pytest.raises(BROKEN):
        wrong(x)
    with pytest.raises(BROKEN):
        rows(x[0])
    assert rows(x).tolist() == [3, 4, 5]
