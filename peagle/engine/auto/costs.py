"""Times of parts of a step, in units of a plain step of as many active slots."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

GOOD_CHANCE = 0.9  # the best chance to expect of a draft: if drafting would gain nothing even then, steps are plain
MOST_CATCH_UP_FRAC = 0.05  # largest share of the time for a drafter that only reads tokens

_Times: TypeAlias = Mapping[int, tuple[tuple[int, float], ...]]


@flax.struct.dataclass
class StepCosts:
    """The times at one number of active slots; all 0: not measured."""

    verify: jax.Array | np.ndarray  # [B (K + 1) + 1] float32: of a pass by its rows, without drafting
    draft: jax.Array | np.ndarray  # [B K + 1]: of choosing and of the drafter's pass, by its drafts; 0: no pass

    @classmethod
    def unknown(cls, size: int, num_drafts: int) -> "StepCosts":
        """Make the costs of an engine that has not measured them, with which every draft is verified."""
        return cls(np.zeros((size * (num_drafts + 1) + 1,), np.float32), np.zeros((size * num_drafts + 1,), np.float32))

    def pack(self) -> np.ndarray:
        """Join both arrays into one operand."""
        return np.concatenate([np.asarray(self.verify), np.asarray(self.draft)])

    @classmethod
    def unpack(cls, packed: jax.Array, size: int, num_drafts: int) -> "StepCosts":
        split = size * (num_drafts + 1) + 1
        return cls(packed[:split], packed[split:])

    def of_drafts(self, count: jax.Array) -> jax.Array:
        return jnp.asarray(self.draft)[jnp.minimum(count, self.draft.shape[0] - 1)]

    def of_pass(self, count: jax.Array) -> jax.Array:
        """Return the time of the drafter's pass alone, which is measured as a difference."""
        return jnp.maximum(self.of_drafts(count) - jnp.asarray(self.draft)[0], 0.0)

    def of_rows(self, rows: jax.Array) -> jax.Array:
        return jnp.asarray(self.verify)[jnp.minimum(rows, self.verify.shape[0] - 1)]

    def of_one_row(self, num_active: jax.Array) -> jax.Array:
        """Average the time of one more row."""
        most = self.verify.shape[0] - 1
        more = jnp.maximum(most - num_active, 1).astype(jnp.float32)
        return (self.of_rows(jnp.asarray(most)) - self.of_rows(num_active)) / more

    def catching_up_is_dear(self, num_active: jax.Array, num_drafts: int) -> jax.Array:
        """Whether a drafter that only reads tokens, in about one pass per K + 1 of them, takes too long."""
        return self.of_pass(num_active) > MOST_CATCH_UP_FRAC * (num_drafts + 1)


@dataclass(frozen=True)
class CostTable:
    """The times by number of active slots; others are interpolated.

    verify: (rows, time) of passes, from one row per slot on. draft: (drafts, time) of choosing and of the drafter's
    pass; with 0 drafts there is no pass.
    """

    verify: _Times
    draft: _Times
    _kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def packed(self, num_active: int, size: int, num_drafts: int) -> np.ndarray:
        """Return the packed costs of `at`; cached, because every dispatch needs them."""
        key = num_active, size, num_drafts
        packed: np.ndarray = self._cached(key, lambda: self.at(*key).pack())
        return packed

    def at(self, num_active: int, size: int, num_drafts: int) -> StepCosts:
        """Make the costs of a batch of `size` entries with this many active slots."""
        entry = max((number for number in self.verify if number <= num_active), default=min(self.verify))
        scale = max(num_active, 1) / entry  # as many rows and drafts per slot take as long

        def times(part: _Times, most: int) -> np.ndarray:
            counts, seconds = np.asarray(part[entry], np.float64).T
            return np.interp(np.arange(most + 1), scale * counts, seconds).astype(np.float32)

        return StepCosts(times(self.verify, size * (num_drafts + 1)), times(self.draft, size * num_drafts))

    def can_gain(self, num_active: int, num_drafts: int, by_drafter: bool = False) -> bool:
        """Whether drafting can gain at this many active slots: an upper bound.

        It takes each draft as right with GOOD_CHANCE, and as free unless by_drafter. False means: do not try.
        """

        def compute() -> bool:
            more = np.arange(1, num_drafts + 1)
            costs = self.at(num_active, num_active, num_drafts)
            times = np.asarray(costs.verify)[num_active * (1 + more)]
            if by_drafter:
                times = times + np.asarray(costs.draft)[num_active * more]
            return bool(np.any(1 + np.cumsum(GOOD_CHANCE**more) > times))

        can_gain: bool = self._cached((num_active, num_drafts, by_drafter), compute)
        return can_gain

    def _cached(self, key: tuple[int, ...], make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def to_json(self) -> dict[str, Any]:
        parts = {"verify": self.verify, "draft": self.draft}
        return {name: {str(number): times for number, times in part.items()} for name, part in parts.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "CostTable":
        """Undo `to_json`. Raises ValueError, or Python's own errors, for other input."""

        def part(name: str) -> dict[int, tuple[tuple[int, float], ...]]:
            return {
                int(number): tuple((int(count), float(time)) for count, time in times)
                for number, times in value[name].items()
            }

        table = cls(part("verify"), part("draft"))
        if not table.verify or table.verify.keys() != table.draft.keys() or not all(table.verify.values()):
            raise ValueError("no times")
        return table
