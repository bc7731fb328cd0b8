"""Signatures are checked at each call (tests/support/strict.py): with shapes and without, and those of dataclasses."""

from collections.abc import Callable
from pathlib import Path

import beartype
import beartype.roar
import jax.numpy as jnp
import jaxtyping
import pytest

from peagle.base.files import trim_folder
from peagle.engine.request import Request
from peagle.measure.bench import Case
from peagle.ops.mask import causal_mask
from peagle.pair import Pair

BROKEN = (beartype.roar.BeartypeException, jaxtyping.TypeCheckError)


@pytest.mark.parametrize(
    "call",
    [
        lambda: trim_folder("a text", 1),
        lambda: causal_mask(jnp.zeros((1, 2), jnp.int32), jnp.zeros((3, 4), jnp.int32), None),  # batches of 1 and 3
        lambda: Request("a text", 1),
        lambda: Case("tg", "many"),
        lambda: Pair(None, None, None, None, (1, "two")),
    ],
)
def test_mismatched_signature_raises(call: Callable[[], object]) -> None:
    with pytest.raises(BROKEN):
        call()


def test_matching_signature_raises_nothing() -> None:
    trim_folder(Path(__file__).parent, 1 << 60)
    causal_mask(jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 4), jnp.int32), None)
    Request((1, 2), 1)
    Case("tg", 5)


def test_functions_within_functions_have_no_check() -> None:
    """They are made at every call, and a check takes as long as thousands of calls."""

    def add(to: int) -> int:
        return 1 + to

    assert jaxtyping.jaxtyped(typechecker=beartype.beartype)(add) is add
