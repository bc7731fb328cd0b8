"""Gradients that are worth their memory."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

Result = TypeVar("Result")


def recomputed(function: Callable[..., Result]) -> Callable[..., Result]:
    """The same function of its arguments (pytrees), of which nothing but those is kept for its gradient."""

    def at_once(*arguments: Any) -> Result:
        # Tied together: else, inside a loop, what does not depend on what is differentiated (masks, labels) would be
        # made for all turns in a loop of its own, and kept.
        return function(*jax.lax.optimization_barrier(arguments))

    result: Callable[..., Result] = jax.checkpoint(at_once)
    return result
