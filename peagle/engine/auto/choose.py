"""Choose whether the drafter runs, and how many drafts of which source each slot verifies.

The drafter runs if the expected gain of all slots exceeds the cost of its pass. A pass verifies drafts in falling order
of survival, over all slots, while the expected gain of each exceeds its cost.
"""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from peagle.engine.auto.state import AutoState, Slots
from peagle.ops.messages import DraftOutput

DRAFTER, LOOKUP = 0, 1  # sources


@flax.struct.dataclass
class Drafts:
    """The drafts of a source."""

    token_ids: jax.Array  # [B, K]
    confidence: jax.Array  # [B, K]
    num: jax.Array  # [B]: how many drafts
    survival: jax.Array  # [B, K]: chances that this draft and all before it are accepted
    gains: jax.Array  # [B, K]

    @classmethod
    def of(cls, auto: AutoState, slots: Slots, source: int, draft: DraftOutput, num: Int[Array, " B"]) -> "Drafts":
        assert draft.confidence is not None
        # one that is not finite is none: averages must not learn from it
        confidence = jnp.where(jnp.isfinite(draft.confidence), draft.confidence, 0.0)
        survival = jnp.cumprod(jnp.minimum(confidence * auto.slots.calibration[:, source], 1.0), axis=1)
        return cls(draft.token_ids, confidence, num, survival, gains_of(survival, num, slots))


class Plan(NamedTuple):
    """What is decided before the drafter runs."""

    num: jax.Array  # [B]: drafts that the drafter makes
    runs: jax.Array  # bool: the drafter does
    behind: jax.Array  # bool: it must absorb its input first
    time: jax.Array  # of choosing and of the drafter's passes, in units of a plain step
    looked_up: Drafts | None


@flax.struct.dataclass
class Choice:
    """What an adaptive step chose, and from what."""

    widths: jax.Array  # [B]: drafts to verify
    token_ids: jax.Array  # [B, K]: of the source
    num: jax.Array  # [B]: of the source's drafts
    source: jax.Array  # [B]: DRAFTER or LOOKUP
    sources: Drafts  # of all, on a second axis
    time: jax.Array  # Plan.time


def plan_drafting(
    auto: AutoState,
    slots: Slots,
    limits: Int[Array, " B"],
    num_unread: Int[Array, " B"],
    uses_drafter: Bool[Array, " B"],
    must_run: Bool[Array, ""] | None,
    looked_up: DraftOutput | None,
) -> Plan:
    """Decide whether the drafter runs, and how many drafts it makes for each slot, limits[b] at most.

    num_unread: tokens that it has not read. must_run: it runs even if that gains nothing; None: it makes all drafts.
    """
    drafts = None if looked_up is None else Drafts.of(auto, slots, LOOKUP, looked_up, limits)
    num, runs, num_drafts = jnp.where(uses_drafter, limits, 0), jnp.ones((), bool), auto.slots.gains.shape[1]
    most_unread = jnp.max(jnp.where(uses_drafter, num_unread, 0))
    behind = most_unread > num_drafts + 1
    # to absorb the input takes about one pass per K + 1 rows
    passes = jnp.where(behind, most_unread.astype(jnp.float32) / (num_drafts + 1), 0.0)
    catch_up = passes * slots.costs.of_pass(slots.num_active)
    if must_run is not None:
        gains = auto.slots.gains
        num = choose_drafts(gains, num, slots)
        gain = jnp.sum(jnp.where(jnp.arange(num_drafts)[None, :] < num[:, None], gains, 0.0), axis=1)
        gain = gain if drafts is None else gain - jnp.sum(drafts.gains, axis=1)
        time = slots.costs.of_pass(jnp.sum(num)) + catch_up
        num = jnp.where(jnp.sum(jnp.maximum(gain, 0.0)) >= slots.tokens_in(time), num, 0)
        runs = jnp.any(num > 0) | must_run
    time = slots.costs.of_drafts(jnp.sum(num)) + jnp.where(runs, catch_up, 0.0)
    return Plan(num, runs, behind, time, drafts)


def choose(auto: AutoState, slots: Slots, plan: Plan, draft: DraftOutput) -> Choice:
    """Choose the better source of each slot, and how many of its drafts to verify. draft: the drafter's."""
    drafts = Drafts.of(auto, slots, DRAFTER, draft, plan.num)
    chosen, sources, takes = drafts, [drafts], jnp.zeros(plan.num.shape, bool)
    if (looked_up := plan.looked_up) is not None:
        # without measured times, as in masked steps, take the drafter's own drafts
        takes = jnp.sum(looked_up.gains, axis=1) > jnp.sum(drafts.gains, axis=1)
        takes &= slots.costs.of_rows(slots.num_active) > 0
        sources = [drafts, looked_up]
        chosen = jax.tree.map(
            lambda own, other: jnp.where(takes.reshape(-1, *[1] * (own.ndim - 1)), other, own), *sources
        )
    return Choice(
        widths=choose_widths(chosen.survival, chosen.num, slots),
        token_ids=chosen.token_ids,
        num=chosen.num,
        source=takes.astype(jnp.int32),
        sources=jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *sources),
        time=plan.time,
    )


def gains_of(survival: Float[Array, "B K"], limits: Int[Array, " B"], slots: Slots) -> Float[Array, "B K"]:
    """Estimate the tokens that drafts gain beyond what the time of their rows would emit otherwise."""
    valid = jnp.arange(survival.shape[1], dtype=jnp.int32)[None, :] < limits[:, None]
    cost = slots.tokens_in(slots.costs.of_one_row(slots.num_active))
    return jnp.where(valid, jnp.maximum(survival - cost, 0.0), 0.0)


def choose_drafts(gains: Float[Array, "B K"], limits: Int[Array, " B"], slots: Slots) -> Int[Array, " B"]:
    """Choose how many drafts the drafter makes for each slot, as if all slots were alike; limits[b] at most."""
    count = jnp.arange(gains.shape[1] + 1, dtype=jnp.int32)
    cost = slots.rate * slots.costs.of_drafts(slots.num_active * count)
    gain = jnp.pad(jnp.cumsum(gains, axis=1), ((0, 0), (1, 0))) - cost[None, :]
    gain = jnp.where(count[None, :] <= limits[:, None], gain, -jnp.inf)
    return jnp.argmax(gain, axis=1).astype(jnp.int32)


def choose_widths(survival: Float[Array, "B K"], limits: Int[Array, " B"], slots: Slots) -> Int[Array, " B"]:
    """Choose how many drafts of each slot to verify, limits[b] at most. Times need not rise with the number of rows."""
    batch, num_drafts = survival.shape
    valid = jnp.arange(num_drafts, dtype=jnp.int32)[None, :] < limits[:, None]
    values = jnp.where(valid, survival, -1.0).reshape(-1)
    # equal values in the order of positions, so that a slot's drafts are taken from the first on
    order = jnp.arange(values.size, dtype=jnp.int32) if batch == 1 else jnp.argsort(-values, stable=True)
    falling = values[order]
    taken = jnp.arange(values.size + 1, dtype=jnp.int32)
    tokens = jnp.pad(jnp.cumsum(jnp.maximum(falling, 0.0)), (1, 0))
    gain = tokens - slots.tokens_in(slots.costs.of_rows(slots.num_active + taken))
    gain = jnp.where(jnp.pad(falling, (1, 0)) < 0, -jnp.inf, gain)
    best = jnp.argmax(gain)  # the first of equal ones
    if batch == 1:
        return jnp.minimum(best, limits).astype(jnp.int32)
    rank = jnp.argsort(order)  # the inverse of the order
    return jnp.sum((rank < best).reshape(batch, num_drafts) & valid, axis=1, dtype=jnp.int32)
