"""What adaptive steps remember: for all slots of an engine, and for each slot."""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from peagle.engine.auto.costs import StepCosts

EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98)  # between bins of confidence
NUM_BINS = len(EDGES) + 1
MIDDLES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))
PRIOR_TRIES = 4.0  # tries with which a bin starts, accepted as often as its middle says
MOST_STARTING = 64.0  # most tries per bin that recorded counts add to these
CALIBRATION_PRIOR = 1.5  # right drafts with which a slot's calibration starts
MOST_CALIBRATION = 1.25
FIRST_GAIN = 0.7  # gain of a first draft if nothing is known; FIRST_GAIN**2 of a second, and so on
FIRST_PROFIT = 0.2  # of the engine's first request
LOSS_FRAC = 0.02  # share of the time that tries may lose
MOST_PAUSE = 32  # most plain steps of a pause; the drafter's input has room for three
OF_SLOTS = ("pauses", "profit", "gains", "expected", "right")  # leaves of AutoState that are led by the slot

# [greedy, sampled][position][bin]: (tried, accepted)
Counts: TypeAlias = tuple[tuple[tuple[tuple[float, float], ...], ...], ...]


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
class AutoState:
    """What adaptive steps remember. 2: of greedy and of sampled requests."""

    # all slots share these
    tried: jax.Array  # [source, 2, K, bin] float32: drafts whose tokens became known
    accepted: jax.Array  # likewise: the right ones
    rate: jax.Array  # float32: tokens of a slot in the time of a plain step
    kind_gains: jax.Array  # [2, K] float32: average gains of the drafter's drafts (`gains_of`)
    kind_profit: jax.Array  # [2] float32: average profit of tries
    # each slot has its own (OF_SLOTS)
    pauses: jax.Array  # [B] int32: plain steps before drafting is tried again
    profit: jax.Array  # [B] float32: average profit of tries
    gains: jax.Array  # [B, K] float32: average gains of the drafter's drafts; inf: not known yet
    expected: jax.Array  # [B, source] float32: how many recent first drafts were expected to be right
    right: jax.Array  # [B, source] float32: how many were

    @classmethod
    def start(cls, slots: int, num_drafts: int, num_sources: int, counts: Counts | None = None) -> "AutoState":
        """Make the state of an engine that has decoded nothing. counts: recorded ones of the drafter."""
        tried = np.full((num_sources, 2, num_drafts, NUM_BINS), PRIOR_TRIES, np.float32)
        accepted = tried * np.asarray(MIDDLES, np.float32)
        chances = np.full((2, num_drafts), FIRST_GAIN, np.float32)
        if counts is not None:
            recorded = np.asarray(counts, np.float32)[:, :num_drafts]
            most = recorded.shape[1]
            scaled = recorded * np.minimum(1.0, MOST_STARTING / np.maximum(recorded[..., :1], 1.0))
            tried[0, :, :most] += scaled[..., 0]
            accepted[0, :, :most] += scaled[..., 1]
            tries, right = np.moveaxis(recorded.sum(axis=2), -1, 0)
            np.divide(right, tries, out=chances[:, :most], where=tries > 0)
        gains, profit = np.cumprod(chances, axis=1), np.full((2,), FIRST_PROFIT, np.float32)
        shared = map(jnp.asarray, (tried, accepted, np.float32(1), gains, profit))
        return cls(*shared, *[jnp.zeros(())] * 5).entered(jnp.zeros((slots,), bool))

    def entered(self, sampled: Bool[Array, " B"]) -> "AutoState":
        """Make the state of slots that requests enter."""
        num_sources, _, num_drafts, _ = self.tried.shape
        profit, shape = by_kind(self.kind_profit, sampled), (*sampled.shape, num_sources)
        return dataclasses.replace(
            self,
            pauses=pause_after(profit),
            profit=profit,
            gains=jnp.full((*sampled.shape, num_drafts), jnp.inf, jnp.float32),
            expected=jnp.zeros(shape, jnp.float32),
            right=jnp.zeros(shape, jnp.float32),
        )

    def map_slots(self, function: Callable[..., jax.Array], *others: "AutoState") -> "AutoState":
        """Apply a function to the leaves that are led by the slot."""
        leaves = {name: [getattr(state, name) for state in (self, *others)] for name in OF_SLOTS}
        return dataclasses.replace(self, **{name: function(*of) for name, of in leaves.items()})

    def counts(self) -> Counts:
        """Read the drafter's counts since a start without recorded ones."""
        begun = AutoState.start(1, self.tried.shape[2], 1)
        pairs = ((self.tried, begun.tried), (self.accepted, begun.accepted))
        tried, accepted = (np.maximum(np.asarray(now)[0] - np.asarray(then)[0], 0.0) for now, then in pairs)
        both = np.stack([tried, np.minimum(accepted, tried)], axis=-1).round(2).tolist()
        return tuple(tuple(tuple((t, a) for t, a in bins) for bins in kind) for kind in both)

    def pause(self, active: Bool[Array, " B"]) -> Int[Array, ""]:
        """Return for how many steps all active slots pause drafting."""
        return jnp.min(jnp.where(active, self.pauses, MOST_PAUSE))

    @property
    def calibration(self) -> Float[Array, "B source"]:
        """How often recent first drafts were right, over the counts' prediction."""
        return jnp.minimum((self.right + CALIBRATION_PRIOR) / (self.expected + CALIBRATION_PRIOR), MOST_CALIBRATION)

    def known_gains(self, sampled: Bool[Array, " B"]) -> Float[Array, "B K"]:
        """Return each slot's gains; where they are not known yet, those of requests of its kind."""
        return jnp.where(jnp.isinf(self.gains), by_kind(self.kind_gains, sampled), self.gains)


def by_kind(values: jax.Array, sampled: Bool[Array, " B"]) -> jax.Array:
    """Return the values [B, ...] of each slot's kind, greedy or sampled, from those of both [2, ...]."""
    return jnp.where(sampled.reshape(-1, *(1 for _ in values.shape[1:])), values[1][None], values[0][None])


def in_bin(confidence: Float[Array, "*rows K"]) -> Bool[Array, "*rows K bin"]:
    low, high = np.asarray((-1.0, *EDGES), np.float32), np.asarray((*EDGES, 2.0), np.float32)
    shape = (1,) * confidence.ndim
    return (confidence[..., None] >= low.reshape(*shape, -1)) & (confidence[..., None] < high.reshape(*shape, -1))


def pause_after(profit: Float[Array, " B"]) -> Int[Array, " B"]:
    """Choose so many plain steps that another try of this profit loses LOSS_FRAC of the time."""
    return jnp.clip(-profit / LOSS_FRAC, 0, MOST_PAUSE).astype(jnp.int32)
