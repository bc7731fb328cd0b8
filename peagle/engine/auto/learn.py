"""Learn from the outcome of a step how often drafts are right, what drafting gains, and whether trying pays."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from peagle.engine.auto.choose import Choice
from peagle.engine.auto.state import AutoState, Averages, Slots, pause_after

RATE_STEPS = 32.0  # plain steps over which the engine's rate is averaged
# steps over which averages are taken: of a slot's drafts and their gains; of its profit; of all requests of a kind
DRAFT_STEPS, PROFIT_STEPS, KIND_STEPS = 4.0, 16.0, 24.0
OF_SLOTS = Averages(DRAFT_STEPS, DRAFT_STEPS, DRAFT_STEPS, PROFIT_STEPS)  # type: ignore[arg-type]
OF_KINDS = Averages(KIND_STEPS, KIND_STEPS, KIND_STEPS, KIND_STEPS)  # type: ignore[arg-type]
DRIFT_STEPS = 256.0  # steps without drafts over which gains return to the first ones, so that drafting is tried again


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

    token_ids: accepted drafts, then the next token. right: says it of synthetic drafts, whose tokens do not. A draft
    counts if the token at its position is known, whether it was verified or not, and all drafts before it were right.
    """
    active, sources, num_active = slots.active, choice.sources, jnp.maximum(slots.num_active, 1)
    place = jnp.arange(sources.token_ids.shape[2], dtype=jnp.int32)[None, :]
    padded = jnp.pad(token_ids, ((0, 0), (0, max(place.size - token_ids.shape[1], 0))))[:, : place.size]
    is_right = padded[:, None] == sources.token_ids
    if right is not None:
        is_right = jnp.broadcast_to(right[:, None], is_right.shape)
    known = (place[None] < jnp.minimum(num_accepted[:, None] + 1, sources.num)[..., None]) & active[:, None, None]
    known &= sources.confidence > 0  # a lookup without a match is no draft
    known &= jnp.cumsum(~is_right, axis=2, dtype=jnp.int32) - (~is_right).astype(jnp.int32) == 0
    pass_time = slots.costs.of_rows(num_active + jnp.sum(jnp.where(active, widths, 0)))
    measured, time = pass_time > 0, pass_time + choice.time
    num_emitted = jnp.sum(jnp.where(active, num_accepted + 1, 0))
    tokens = num_emitted.astype(jnp.float32) / num_active.astype(jnp.float32)
    drafted, tried = active[:, None] & (place < sources.num[:, :1]) & measured, active & measured
    profit = jnp.broadcast_to(tokens - time, active.shape)
    values = Averages(is_right.astype(jnp.float32), sources.confidence, sources.gains[:, 0], profit)
    auto = update(auto, slots, values, Averages(known, known, drafted, tried), 1)
    auto = update_rate(auto, tokens, jnp.where(measured, time, 0.0))
    return dataclasses.replace(auto, pauses=jnp.where(tried, pause_after(auto.slots.profit), auto.pauses))


def learn_from_plain_steps(auto: AutoState, slots: Slots, num_steps: jax.Array) -> AutoState:
    """Learn from the plain steps of a pause."""
    steps = num_steps.astype(jnp.float32)
    none = jax.tree.map(lambda average: jnp.zeros(average.shape, bool), auto.slots)
    auto = update(auto, slots, auto.slots, none, steps)
    pauses = jnp.where(slots.active, jnp.maximum(auto.pauses - num_steps, 0), auto.pauses)
    measured = slots.costs.of_rows(slots.num_active) > 0
    return update_rate(dataclasses.replace(auto, pauses=pauses), steps, jnp.where(measured, steps, 0.0))


def update(auto: AutoState, slots: Slots, values: Averages, known: Averages, num_steps: jax.Array | int) -> AutoState:
    """Average the known values of slots, and of all slots of a kind; let gains drift where nothing was drafted."""
    of_kind = jnp.stack([slots.active & ~slots.sampled, slots.active & slots.sampled])

    def pooled(value: jax.Array, known: jax.Array) -> tuple[jax.Array, jax.Array]:
        which = of_kind.reshape(2, -1, *[1] * (value.ndim - 1)) & known[None]
        count = jnp.sum(which, axis=1, dtype=jnp.float32)
        return jnp.sum(jnp.where(which, value[None], 0.0), axis=1) / jnp.maximum(count, 1.0), count > 0

    pairs = jax.tree.map(pooled, values, known)
    means, some = jax.tree.transpose(jax.tree.structure(values), jax.tree.structure((0, 0)), pairs)
    idle = jax.tree.map(lambda known: ~known & slots.active.reshape(-1, *[1] * (known.ndim - 1)), known)
    own = auto.slots.moved(values, known, OF_SLOTS).drifted(idle.gains, num_steps / DRIFT_STEPS)
    kinds = auto.kinds.moved(means, some, OF_KINDS).drifted(~some.gains, num_steps / DRIFT_STEPS)
    return dataclasses.replace(auto, slots=own, kinds=kinds)


def update_rate(auto: AutoState, tokens: Float[Array, ""], time: Float[Array, ""]) -> AutoState:
    """Average the rate. tokens: of a slot, in the time of `time` plain steps; 0: unknown."""
    share = jnp.minimum(time / RATE_STEPS, 1.0)
    return dataclasses.replace(auto, rate=auto.rate + share * (tokens / jnp.maximum(time, 1e-6) - auto.rate))
