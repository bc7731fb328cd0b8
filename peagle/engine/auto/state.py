"""What adaptive steps remember: running averages of each slot, and of all requests of a kind (greedy or sampled)."""

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from peagle.engine.auto.costs import StepCosts

FIRST_CHANCE = 0.7  # of a draft to be accepted after those before it, if nothing is known
FIRST_PROFIT = 0.2  # of the engine's first request
LOSS_FRAC = 0.02  # share of the time that tries may lose
MOST_PAUSE = 32  # most plain steps of a pause; the drafter's input has room for three


@flax.struct.dataclass
class Slots:
    """The slots of a pass: how they sample, how long their steps take, what time is worth."""

    active: jax.Array  # [B] bool
    sampled: jax.Array  # [B] bool
    costs: StepCosts
    rate: jax.Array | float  # tokens of a slot in the time of a plain step; 1 or more

    @property
    def num_active(self) -> Int[Array, ""]:
        return jnp.sum(self.active, dtype=jnp.int32)

    def tokens_in(self, time: jax.Array) -> jax.Array:
        """Return how many tokens the active slots emit in this time."""
        return self.rate * self.num_active.astype(jnp.float32) * time


@flax.struct.dataclass
class Averages:
    """Running averages, led by the slot or by the kind."""

    right: jax.Array  # [N, source, K]: how often drafts were right, if those before them were
    confidence: jax.Array  # [N, source, K]: the drafter's probability of the same drafts
    gains: jax.Array  # [N, K]: what the drafter's drafts gained (`gains_of`)
    profit: jax.Array  # [N]: what steps that tried to draft gained

    @property
    def calibration(self) -> Float[Array, "N source K"]:
        """How often drafts are right, over the drafter's probability of them."""
        return self.right / jnp.maximum(self.confidence, 0.01)

    def moved(self, values: "Averages", known: "Averages", steps: "Averages") -> "Averages":
        """Average the known values over about so many steps."""

        def move(average: jax.Array, value: jax.Array, known: jax.Array, steps: float) -> jax.Array:
            return average + jnp.where(known, (value - average) / steps, 0.0)

        moved: Averages = jax.tree.map(move, self, values, known, steps)
        return moved

    def drifted(self, idle: jax.Array, share: jax.Array | float) -> "Averages":
        """Let gains go a share of the way back to the first ones, where nothing was drafted."""
        drift = share * (first_gains(*self.gains.shape) - self.gains)
        return dataclasses.replace(self, gains=self.gains + jnp.where(idle, drift, 0.0))


@flax.struct.dataclass
class AutoState:
    """What adaptive steps remember."""

    slots: Averages
    kinds: Averages  # of greedy and of sampled requests, with which new ones begin
    rate: jax.Array  # float32: tokens of a slot in the time of a plain step
    pauses: jax.Array  # [B] int32: plain steps before drafting is tried again

    @classmethod
    def start(cls, slots: int, num_drafts: int, num_sources: int) -> "AutoState":
        """Make the state of an engine that has decoded nothing."""
        chances = jnp.full((2, num_sources, num_drafts), FIRST_CHANCE, jnp.float32)
        profit = jnp.full((2,), FIRST_PROFIT, jnp.float32)
        # every leaf is a buffer of its own, because states are donated
        kinds = Averages(chances, jnp.copy(chances), first_gains(2, num_drafts), profit)
        begun = jnp.zeros((slots,), jnp.int32)
        return cls(kinds, kinds, jnp.ones((), jnp.float32), begun).entered(jnp.zeros((slots,), bool))

    def entered(self, sampled: Bool[Array, " B"]) -> "AutoState":
        """Make the state of slots that requests enter."""
        slots = jax.tree.map(lambda average: by_kind(average, sampled), self.kinds)
        return dataclasses.replace(self, slots=slots, pauses=pause_after(slots.profit))

    def map_slots(self, function: Callable[..., jax.Array], *others: "AutoState") -> "AutoState":
        """Apply a function to the leaves that are led by the slot."""
        slots = jax.tree.map(function, self.slots, *(other.slots for other in others))
        return dataclasses.replace(self, slots=slots, pauses=function(self.pauses, *(o.pauses for o in others)))

    def pause(self, active: Bool[Array, " B"]) -> Int[Array, ""]:
        """Return for how many steps all active slots pause drafting."""
        return jnp.min(jnp.where(active, self.pauses, MOST_PAUSE))


def first_gains(count: int, num_drafts: int) -> jax.Array:
    gains = FIRST_CHANCE ** np.arange(1, num_drafts + 1, dtype=np.float32)
    return jnp.broadcast_to(jnp.asarray(gains), (count, num_drafts))


def by_kind(values: jax.Array, sampled: Bool[Array, " B"]) -> jax.Array:
    """Return the values [B, ...] of each slot's kind, greedy or sampled, from those of both [2, ...]."""
    return jnp.where(sampled.reshape(-1, *(1 for _ in values.shape[1:])), values[1][None], values[0][None])


def pause_after(profit: Float[Array, " B"]) -> Int[Array, " B"]:
    """Choose so many plain steps that another try of this profit loses LOSS_FRAC of the time."""
    return jnp.clip(-profit / LOSS_FRAC, 0, MOST_PAUSE).astype(jnp.int32)
