"""Choose how many drafts each slot verifies, from the drafter's confidence. Pure functions of counts and times.

Counts, kept while decoding, give each draft's chance to be accepted after the drafts before it: by source (drafter or
lookup drafter), greedy or sampled, position, and bin of the draft's probability. Draft i survives if drafts 0..i are
accepted: its survival is the product of their chances. Texts differ, so each slot compares how often the first drafts
of a source were right with the counts' prediction, and scales their survival by that ratio. A pass verifies drafts in
falling order of survival, over all slots, while the expected gain of each exceeds its cost:

    expected tokens     one per active slot, and the sum of the survivals
    time                of a pass by its number of rows, in units of a plain step (StepCosts, measured)
    rate                tokens per unit of time that the engine emits now; never below plain decoding's

A draft is counted if the token at its position becomes known, whether the draft was verified or not: a step that
accepts n drafts counts drafts 0..n of each source.

Before the drafter runs, its confidence is unknown. So each slot remembers how often its recent drafts were accepted, by
position. If the expected gain of all slots exceeds the cost of the drafter's pass, the drafter runs. In a slot without
drafts, gains drift back to the average of all slots, so that drafting is tried again. Lookups take no pass.

To look up and to choose take time, too. So each slot remembers the profit of its recent steps that tried to draft: the
tokens beyond those that plain steps emit in the same time. If it is negative, drafting is paused: so many plain steps
follow that tries lose a small share of the time. A request begins with the profit and the gains of the engine's
requests of its kind, greedy or sampled.

These choices change time alone, never a token (peagle.engine.step.accept).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98)  # between bins of confidence
NUM_BINS = len(EDGES) + 1
MIDDLES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))
PRIOR_TRIES = 4.0  # tries with which a bin starts, accepted as often as its middle says
MOST_STARTING = 64.0  # most tries per bin that recorded counts add to these
HORIZON = 512.0  # tries per bin after which older ones are forgotten
CALIBRATION_STEPS = 12.0  # steps over which a slot's calibration is averaged
CALIBRATION_PRIOR = 1.5  # right drafts with which it starts
MOST_CALIBRATION = 1.25

RATE_STEPS = 32.0  # plain steps over which the engine's rate is averaged
FIRST_GAIN = 0.7  # gain of a first draft if nothing is known; FIRST_GAIN**2 of a second, and so on
FIRST_PROFIT = 0.2  # of the engine's first request
PROFIT_TRIES, ALL_PROFIT_TRIES = 12.0, 24.0  # tries over which the profit is averaged: of a slot, of all of a kind
LOSS_FRAC = 0.02  # share of the time that tries may lose
GAIN_STEPS, ALL_GAINS_STEPS = 3.0, 32.0  # passes over which gains are averaged: of a slot, of all
DRIFT_STEPS = 64.0  # steps without the drafter over which a slot's gains drift back to the average of all
ALL_DRIFT_STEPS = 2048.0  # and the average of all to FIRST_GAIN's
MOST_CATCH_UP_FRAC = 0.05  # largest share of the time for a drafter that only reads tokens
GOOD_CHANCE = 0.85  # the best chance to expect of a draft: if drafting would gain nothing even then, steps are plain
MOST_PAUSE = 32  # most plain steps of a pause; the drafter's input has room for three

# [greedy, sampled][position][bin]: (tried, accepted)
Counts: TypeAlias = tuple[tuple[tuple[tuple[float, float], ...], ...], ...]


@flax.struct.dataclass
class Learned:
    """What an engine's steps have learned, for all slots. Methods return a changed copy."""

    tried: jax.Array  # [source, sampled, position, bin] float32
    accepted: jax.Array  # likewise
    rate: jax.Array  # float32: tokens of a slot in the time of a plain step
    gain: jax.Array  # [sampled, K] float32: average gain of the drafter's drafts (`gains_of`)
    profit: jax.Array  # [sampled] float32: average profit of tries

    @classmethod
    def start(cls, num_sources: int, num_drafts: int, counts: Counts | None = None) -> "Learned":
        """Make the counts of an engine that has decoded nothing. counts: recorded ones of the drafter."""
        tried = np.full((num_sources, 2, num_drafts, NUM_BINS), PRIOR_TRIES, np.float32)
        accepted = tried * np.asarray(MIDDLES, np.float32)
        if counts is not None:
            recorded = np.asarray(counts, np.float32)[:, :num_drafts]
            scale = np.minimum(1.0, MOST_STARTING / np.maximum(recorded[..., 0], 1.0))
            tried[0, :, : recorded.shape[1]] += scale * recorded[..., 0]
            accepted[0, :, : recorded.shape[1]] += scale * recorded[..., 1]
        chances = np.full((2, num_drafts), FIRST_GAIN, np.float32)
        if counts is not None:
            known = recorded.sum(axis=2)
            place = known[..., 0] > 0
            chances[:, : place.shape[1]][place] = known[place, 1] / known[place, 0]
        gain = jnp.asarray(np.cumprod(chances, axis=1))
        profit = jnp.full((2,), FIRST_PROFIT, jnp.float32)
        return cls(jnp.asarray(tried), jnp.asarray(accepted), jnp.ones((), jnp.float32), gain, profit)

    def survival(self, source: int, sampled: Bool[Array, " B"], confidence: Float[Array, "B K"]) -> Float[Array, "B K"]:
        """Compute each draft's chance of being accepted with all drafts before it."""
        chances = (self.accepted / self.tried)[source]  # [sampled, K, bin]
        by_row = jnp.where(sampled[:, None, None], chances[1][None], chances[0][None])
        return jnp.cumprod(jnp.sum(jnp.where(_in_bin(confidence), by_row, 0.0), axis=-1), axis=-1)

    def count_drafts(
        self,
        sampled: Bool[Array, " B"],
        confidence: Float[Array, "B source K"],
        tried: Bool[Array, "B source K"],
        accepted: Bool[Array, "B source K"],
    ) -> "Learned":
        """Count drafts of all sources. tried: the token at their position is known."""
        which = jnp.stack([~sampled, sampled], axis=1)[:, None, :, None, None]  # [B, 1, 2, 1, 1]
        cells = which & (_in_bin(confidence) & tried[..., None])[:, :, None]  # [B, source, 2, K, bin]
        total_tried = self.tried + jnp.sum(cells, axis=0, dtype=jnp.float32)
        right = cells & accepted[:, :, None, :, None]
        total_accepted = self.accepted + jnp.sum(right, axis=0, dtype=jnp.float32)
        kept = jnp.minimum(1.0, HORIZON / total_tried)
        return dataclasses.replace(self, tried=kept * total_tried, accepted=kept * total_accepted)

    def update_rate(self, tokens: Float[Array, ""], time: Float[Array, ""]) -> "Learned":
        """Average the rate. tokens: of a slot, in a step that took the time of `time` plain ones; 0: unknown."""
        share = jnp.minimum(time / RATE_STEPS, 1.0)
        return dataclasses.replace(self, rate=self.rate + share * (tokens / jnp.maximum(time, 1e-6) - self.rate))

    def update_gain(
        self,
        sampled: Bool[Array, " B"],
        gains: Float[Array, "B K"],
        drafted: Bool[Array, "B K"],
        num_steps: jax.Array | int = 1,
    ) -> "Learned":
        """Average the gains over the slots of a kind that drafted; without any, drift for num_steps steps."""
        of_kind = jnp.stack([drafted & ~sampled[:, None], drafted & sampled[:, None]])  # [2, B, K]
        count = jnp.sum(of_kind, axis=1, dtype=jnp.int32)
        mean = jnp.sum(jnp.where(of_kind, gains, 0.0), axis=1) / jnp.maximum(count, 1).astype(jnp.float32)
        first = FIRST_GAIN ** np.arange(1, gains.shape[1] + 1, dtype=np.float32)
        drift = num_steps * (jnp.asarray(first)[None] - self.gain) / ALL_DRIFT_STEPS
        towards = jnp.where(count > 0, (mean - self.gain) / ALL_GAINS_STEPS, drift)
        return dataclasses.replace(self, gain=self.gain + towards)

    def gain_of(self, sampled: Bool[Array, " B"]) -> Float[Array, "B K"]:
        """Return the average gains of requests of each slot's kind."""
        return jnp.where(sampled[:, None], self.gain[1][None], self.gain[0][None])

    def update_profit(
        self, sampled: Bool[Array, " B"], tried: Bool[Array, " B"], profit: Float[Array, ""]
    ) -> "Learned":
        """Average the profit of a step over the kinds of requests that tried to draft in it."""
        kinds = jnp.stack([jnp.any(tried & ~sampled), jnp.any(tried & sampled)])
        towards = jnp.where(kinds, (profit - self.profit) / ALL_PROFIT_TRIES, 0.0)
        return dataclasses.replace(self, profit=self.profit + towards)


def _in_bin(confidence: Float[Array, "*rows K"]) -> Bool[Array, "*rows K bin"]:
    low, high = np.asarray((-1.0, *EDGES), np.float32), np.asarray((*EDGES, 2.0), np.float32)
    shape = (1,) * confidence.ndim
    return (confidence[..., None] >= low.reshape(*shape, -1)) & (confidence[..., None] < high.reshape(*shape, -1))


@flax.struct.dataclass
class StepCosts:
    """Times of parts of a step at one number of active slots, in units of a plain step there; all 0: not measured."""

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
        return jnp.asarray(self.draft)[count]

    def of_pass(self, count: jax.Array) -> jax.Array:
        """Return the time of the drafter's pass alone."""
        return self.of_drafts(count) - jnp.asarray(self.draft)[0]

    def of_rows(self, rows: jax.Array) -> jax.Array:
        return jnp.asarray(self.verify)[jnp.minimum(rows, self.verify.shape[0] - 1)]

    def of_one_row(self, num_active: jax.Array) -> jax.Array:
        """Average the time of one more row."""
        most = self.verify.shape[0] - 1
        return (self.of_rows(jnp.asarray(most)) - self.of_rows(num_active)) / jnp.maximum(most - num_active, 1).astype(
            jnp.float32
        )


def choose_widths(
    survival: Float[Array, "B K"],
    limits: Int[Array, " B"],
    num_active: Int[Array, ""],
    costs: StepCosts,
    rate: Float[Array, ""],
) -> Int[Array, " B"]:
    """Choose how many drafts of each slot to verify, limits[b] at most.

    rate: tokens of a slot in the time of a plain step, 1 or more. Times need not rise with the number of rows.
    """
    batch, num_drafts = survival.shape
    valid = jnp.arange(num_drafts, dtype=jnp.int32)[None, :] < limits[:, None]
    values = jnp.where(valid, survival, -1.0).reshape(-1)
    # equal values in the order of positions, so that a slot's drafts are taken from the first on
    order = jnp.arange(values.size, dtype=jnp.int32) if batch == 1 else jnp.argsort(-values, stable=True)
    falling = values[order]
    taken = jnp.arange(values.size + 1, dtype=jnp.int32)
    tokens = jnp.pad(jnp.cumsum(jnp.maximum(falling, 0.0)), (1, 0))
    gain = tokens - rate * num_active.astype(jnp.float32) * costs.of_rows(num_active + taken)
    gain = jnp.where(jnp.pad(falling, (1, 0)) < 0, -jnp.inf, gain)
    best = jnp.argmax(gain)  # the first of equal ones
    if batch == 1:
        return jnp.minimum(best, limits).astype(jnp.int32)
    rank = jnp.zeros_like(order).at[order].set(taken[:-1])
    return jnp.sum((rank < best).reshape(batch, num_drafts) & valid, axis=1, dtype=jnp.int32)


def gains_of(
    survival: Float[Array, "B K"], limits: Int[Array, " B"], costs: StepCosts, num_active: jax.Array, rate: jax.Array
) -> Float[Array, "B K"]:
    """Estimate the tokens that drafts gain beyond what the time of their rows would emit otherwise."""
    valid = jnp.arange(survival.shape[1], dtype=jnp.int32)[None, :] < limits[:, None]
    price = rate * num_active.astype(jnp.float32) * costs.of_one_row(num_active)
    return jnp.where(valid, jnp.maximum(survival - price, 0.0), 0.0)


def choose_drafts(
    gains: Float[Array, "B K"], limits: Int[Array, " B"], num_active: jax.Array, costs: StepCosts, rate: jax.Array
) -> Int[Array, " B"]:
    """Choose how many drafts the drafter makes for each slot, as if all slots were alike; limits[b] at most."""
    count = jnp.arange(gains.shape[1] + 1, dtype=jnp.int32)
    times = costs.of_drafts(jnp.minimum(num_active * count, costs.draft.shape[0] - 1))
    gain = jnp.pad(jnp.cumsum(gains, axis=1), ((0, 0), (1, 0))) - rate * times[None, :]
    gain = jnp.where(count[None, :] <= limits[:, None], gain, -jnp.inf)
    return jnp.argmax(gain, axis=1).astype(jnp.int32)


@flax.struct.dataclass
class Pace:
    """How the slots draft; the slot is the leading axis. Methods return a changed copy."""

    pauses: jax.Array  # [B] int32: plain steps before drafting is tried again
    profit: jax.Array  # [B] float32: average profit of tries
    gain: jax.Array  # [B, K] float32: average gain of the drafter's drafts (`gains_of`); inf: not known yet
    expected: jax.Array  # [B, source] float32: how many recent first drafts were expected to be right
    right: jax.Array  # [B, source] float32: how many were

    @classmethod
    def start(cls, profit: Float[Array, " B"], num_drafts: int, num_sources: int) -> "Pace":
        """Make the pace of slots that have decoded nothing. profit: that of the engine's requests of their kind."""
        hits = jnp.zeros((*profit.shape, num_sources), jnp.float32)
        unknown = jnp.full((*profit.shape, num_drafts), jnp.inf, jnp.float32)
        return cls(_pause_after(profit), profit, unknown, hits, hits)

    def pause(self, active: Bool[Array, " B"]) -> Int[Array, ""]:
        """Return for how many steps all active slots pause drafting."""
        return jnp.min(jnp.where(active, self.pauses, MOST_PAUSE))

    @property
    def calibration(self) -> Float[Array, "B source"]:
        """How often recent first drafts were right, over the counts' prediction."""
        return jnp.minimum((self.right + CALIBRATION_PRIOR) / (self.expected + CALIBRATION_PRIOR), MOST_CALIBRATION)

    def record_try(self, tried: Bool[Array, " B"], profit: Float[Array, ""]) -> "Pace":
        """Record the profit of a step in which these slots tried to draft; choose for how long they pause."""
        average = self.profit + jnp.where(tried, (profit - self.profit) / PROFIT_TRIES, 0.0)
        return dataclasses.replace(self, profit=average, pauses=jnp.where(tried, _pause_after(average), self.pauses))

    def gain_or(self, gain: Float[Array, "B K"]) -> Float[Array, "B K"]:
        """Return each slot's gains, or the average `gain` if its own are not known yet."""
        return jnp.where(jnp.isinf(self.gain), gain, self.gain)

    def record_first_drafts(
        self,
        expected: Float[Array, "B source"],
        right: Bool[Array, "B source"],
        proposed: Bool[Array, "B source"],
    ) -> "Pace":
        """Record the first drafts of all sources. expected: their chances by the counts. proposed: there was one."""
        kept = 1.0 - 1.0 / CALIBRATION_STEPS
        return dataclasses.replace(
            self,
            expected=jnp.where(proposed, kept * self.expected + expected, self.expected),
            right=jnp.where(proposed, kept * self.right + right.astype(jnp.float32), self.right),
        )

    def record_steps(
        self,
        active: Bool[Array, " B"],
        gains: Float[Array, "B K"],
        drafted: Bool[Array, "B K"],
        gain_of_all: Float[Array, "B K"],
        num_steps: jax.Array | int = 1,
    ) -> "Pace":
        """Record the gains of a step's drafts, or num_steps steps without drafts."""
        known = self.gain_or(gain_of_all)
        drift = num_steps * (gain_of_all - known) / DRIFT_STEPS
        towards = jnp.where(drafted, (gains - known) / GAIN_STEPS, drift)
        pauses = jnp.maximum(self.pauses - jnp.asarray(num_steps).astype(jnp.int32), 0)
        return dataclasses.replace(
            self,
            pauses=jnp.where(active, pauses, self.pauses),
            gain=jnp.where(active[:, None], known + towards, self.gain),
        )


def _pause_after(profit: Float[Array, " B"]) -> Int[Array, " B"]:
    """Choose so many plain steps that another try of this profit loses LOSS_FRAC of the time."""
    return jnp.clip(-profit / LOSS_FRAC, 0, MOST_PAUSE).astype(jnp.int32)


@dataclass(frozen=True)
class CostTable:
    """Times of parts of steps by number of active slots, in units of a plain step there.

    verify: (rows, time) of passes, from one row per slot on. draft: (drafts, time) of choosing and of the
    drafter's pass; with 0 drafts there is no pass.
    Other times are interpolated.
    """

    verify: Mapping[int, tuple[tuple[int, float], ...]]
    draft: Mapping[int, tuple[tuple[int, float], ...]]
    _kept: dict[tuple[str, int, int, int], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def packed(self, num_active: int, size: int, num_drafts: int) -> np.ndarray:
        """Return the packed costs of `at`; cached, because every dispatch needs them."""
        key = "packed", num_active, size, num_drafts
        if key not in self._kept:
            self._kept[key] = self.at(num_active, size, num_drafts).pack()
        packed: np.ndarray = self._kept[key]
        return packed

    def at(self, num_active: int, size: int, num_drafts: int) -> StepCosts:
        """Make the costs of a batch of `size` entries with this many active slots."""
        entry = max((number for number in self.verify if number <= num_active), default=min(self.verify))
        scale = max(num_active, 1) / entry  # as many rows and drafts per slot take as long
        rows, row_times = np.asarray(self.verify[entry], np.float64).T
        drafts, draft_times = np.asarray(self.draft[entry], np.float64).T
        verify = np.interp(np.arange(size * (num_drafts + 1) + 1), scale * rows, row_times)
        draft = np.interp(np.arange(size * num_drafts + 1), scale * drafts, draft_times)
        return StepCosts(verify.astype(np.float32), draft.astype(np.float32))

    def can_gain(self, num_active: int, num_drafts: int) -> bool:
        """Whether drafting can gain at this many active slots: an upper bound.

        It takes the drafter as free, and each draft as right with GOOD_CHANCE. False means: do not try.
        """
        key = "can_gain", num_active, num_active, num_drafts
        if key not in self._kept:
            more = np.arange(1, num_drafts + 1)
            times = np.asarray(self.at(num_active, num_active, num_drafts).verify)[num_active * (1 + more)]
            self._kept[key] = bool(np.any(1 + np.cumsum(GOOD_CHANCE**more) > times))
        can_gain: bool = self._kept[key]
        return can_gain

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
