"""Learn from the outcome of a step how often drafts are right, what drafting gains, and whether trying pays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from peagle.engine.auto.choose import Choice, Drafts
from peagle.engine.auto.state import FIRST_GAIN, AutoState, Slots, by_kind, in_bin, pause_after

HORIZON = 512.0  # tries per bin after which older ones are forgotten
CALIBRATION_STEPS = 12.0  # steps over which a slot's calibration is averaged
RATE_STEPS = 32.0  # plain steps over which the engine's rate is averaged
PROFIT_TRIES, ALL_PROFIT_TRIES = 12.0, 24.0  # tries over which the profit is averaged: of a slot, of all of a kind
GAIN_STEPS, ALL_GAINS_STEPS = 3.0, 32.0  # passes over which gains are averaged: of a slot, of all
DRIFT_STEPS = 64.0  # steps without the drafter over which a slot's gains drift back to the average of all
ALL_DRIFT_STEPS = 2048.0  # and the average of all to FIRST_GAIN's


def learn(
    auto: AutoState,
    slots: Slots,
    choice: Choice,
    widths: Int[Array, " B"],
    num_accepted: Int[Array, " B"],
    token_ids: Int[Array, "B T"],
    right: Bool[Array, "B K"] | None = None,
) -> AutoState:
    """Learn from an adaptive step, which verified widths[b] drafts.

    token_ids: accepted drafts, then the next token. right: says it of synthetic drafts, whose tokens do not.
    """
    active, sources, num_active = slots.active, choice.sources, jnp.maximum(slots.num_active, 1)
    place = jnp.arange(sources.token_ids.shape[2], dtype=jnp.int32)[None, :]
    known = (place[None] < jnp.minimum(num_accepted[:, None] + 1, sources.num)[..., None]) & active[:, None, None]
    padded = jnp.pad(token_ids, ((0, 0), (0, max(place.size - token_ids.shape[1], 0))))[:, : place.size]
    is_right = sources.token_ids == padded[:, None] if right is None else right[:, None] & jnp.ones(known.shape, bool)
    auto = count_drafts(auto, slots.sampled, sources, known, is_right)
    pass_time = slots.costs.of_rows(num_active + jnp.sum(jnp.where(active, widths, 0)))
    measured, time = pass_time > 0, pass_time + choice.time
    num_emitted = jnp.sum(jnp.where(active, num_accepted + 1, 0))
    tokens = num_emitted.astype(jnp.float32) / num_active.astype(jnp.float32)
    drafted = active[:, None] & (place < sources.num[:, :1]) & measured
    auto = update_rate(auto, tokens, jnp.where(measured, time, 0.0))
    auto = update_gains(auto, slots, sources.gains[:, 0], drafted)
    return update_profit(auto, slots.sampled, active & measured, tokens - time)


def learn_from_plain_steps(auto: AutoState, slots: Slots, num_steps: jax.Array) -> AutoState:
    """Learn from the plain steps of a pause."""
    steps, gains = num_steps.astype(jnp.float32), jnp.zeros_like(auto.gains)
    measured = slots.costs.of_rows(slots.num_active) > 0
    auto = update_rate(auto, steps, jnp.where(measured, steps, 0.0))
    return update_gains(auto, slots, gains, jnp.zeros(gains.shape, bool), steps)


def count_drafts(
    auto: AutoState,
    sampled: Bool[Array, " B"],
    drafts: Drafts,
    known: Bool[Array, "B source K"],
    right: Bool[Array, "B source K"],
) -> AutoState:
    """Count drafts of all sources whose tokens are known, after right ones; compare first ones with the prediction."""
    num_wrong = jnp.cumsum(~right, axis=2, dtype=jnp.int32)
    known &= num_wrong - (~right).astype(jnp.int32) == 0
    which = jnp.stack([~sampled, sampled], axis=1)[:, None, :, None, None]  # [B, 1, 2, 1, 1]
    cells = which & (in_bin(drafts.confidence) & known[..., None])[:, :, None]  # [B, source, 2, K, bin]
    tried = auto.tried + jnp.sum(cells, axis=0, dtype=jnp.float32)
    accepted = auto.accepted + jnp.sum(cells & right[:, :, None, :, None], axis=0, dtype=jnp.float32)
    kept, kept_first = jnp.minimum(1.0, HORIZON / tried), 1.0 - 1.0 / CALIBRATION_STEPS
    first = known[..., 0] & (drafts.confidence[..., 0] > 0)
    return dataclasses.replace(
        auto,
        tried=kept * tried,
        accepted=kept * accepted,
        expected=jnp.where(first, kept_first * auto.expected + drafts.expected, auto.expected),
        right=jnp.where(first, kept_first * auto.right + right[..., 0].astype(jnp.float32), auto.right),
    )


def update_rate(auto: AutoState, tokens: Float[Array, ""], time: Float[Array, ""]) -> AutoState:
    """Average the rate. tokens: of a slot, in the time of `time` plain steps; 0: unknown."""
    share = jnp.minimum(time / RATE_STEPS, 1.0)
    return dataclasses.replace(auto, rate=auto.rate + share * (tokens / jnp.maximum(time, 1e-6) - auto.rate))


def update_gains(
    auto: AutoState,
    slots: Slots,
    gains: Float[Array, "B K"],
    drafted: Bool[Array, "B K"],
    num_steps: jax.Array | int = 1,
) -> AutoState:
    """Average the gains of a step's drafts; where nothing was drafted, let them drift for num_steps steps."""
    of_kind = jnp.stack([drafted & ~slots.sampled[:, None], drafted & slots.sampled[:, None]])  # [2, B, K]
    count = jnp.sum(of_kind, axis=1, dtype=jnp.int32)
    mean = jnp.sum(jnp.where(of_kind, gains, 0.0), axis=1) / jnp.maximum(count, 1).astype(jnp.float32)
    first = FIRST_GAIN ** np.arange(1, gains.shape[1] + 1, dtype=np.float32)
    drift = num_steps * (jnp.asarray(first)[None] - auto.kind_gains) / ALL_DRIFT_STEPS
    towards = jnp.where(count > 0, (mean - auto.kind_gains) / ALL_GAINS_STEPS, drift)
    auto = dataclasses.replace(auto, kind_gains=auto.kind_gains + towards)
    known = auto.known_gains(slots.sampled)
    drift = num_steps * (by_kind(auto.kind_gains, slots.sampled) - known) / DRIFT_STEPS
    after = known + jnp.where(drafted, (gains - known) / GAIN_STEPS, drift)
    pauses = jnp.maximum(auto.pauses - jnp.asarray(num_steps).astype(jnp.int32), 0)
    return dataclasses.replace(
        auto,
        pauses=jnp.where(slots.active, pauses, auto.pauses),
        gains=jnp.where(slots.active[:, None], after, auto.gains),
    )


def update_profit(
    auto: AutoState, sampled: Bool[Array, " B"], tried: Bool[Array, " B"], profit: Float[Array, ""]
) -> AutoState:
    """Average the profit of a step in which these slots tried to draft; choose for how long they pause."""
    kinds = jnp.stack([jnp.any(tried & ~sampled), jnp.any(tried & sampled)])
    average = auto.profit + jnp.where(tried, (profit - auto.profit) / PROFIT_TRIES, 0.0)
    return dataclasses.replace(
        auto,
        kind_profit=auto.kind_profit + jnp.where(kinds, (profit - auto.kind_profit) / ALL_PROFIT_TRIES, 0.0),
        profit=average,
        pauses=jnp.where(tried, pause_after(average), auto.pauses),
    )
