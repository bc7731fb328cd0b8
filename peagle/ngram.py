"""A drafter without weights (prompt look-up): what followed the last tokens before is proposed again."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle.ops.messages import Draft, Fresh


@flax.struct.dataclass
class History:
    """All tokens known so far, the pending one included: token_ids[:, :num]; what lies behind is -1."""

    token_ids: jax.Array  # [B, S] int32
    num: jax.Array  # [B] int32


@flax.struct.dataclass
class NGram:
    """Finds the latest earlier place whose last `longest` tokens agree with the end of the history in the most tokens
    (at least one), and proposes what followed it; where nothing agrees, or nothing followed, the last token again."""

    longest: int = flax.struct.field(pytree_node=False, default=3)

    def init_state(self, batch: int, capacity: int, num_drafts: int) -> History:
        room = capacity + num_drafts + 2
        return History(jnp.full((batch, room), -1, jnp.int32), jnp.zeros((batch,), jnp.int32))

    def prefill(
        self,
        state: History,
        token_ids: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        aux_hidden: Float[Array, "B T A"],  # noqa: ARG002
    ) -> History:
        index = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
        known = jnp.where(index < lengths[:, None], token_ids, -1)
        return History(state.token_ids.at[:, : token_ids.shape[1]].set(known), lengths)

    def absorb(
        self,
        state: History,
        token_ids: Int[Array, "B T"],
        aux_hidden: Float[Array, "B T A"],  # noqa: ARG002
        positions: Int[Array, "B T"],
    ) -> History:
        """Append tokens: the row at position p brings token p + 1, a row of negative position none. A sequence's first
        token comes in no row, and is then not part of its history."""
        places = jnp.where(positions < 0, state.token_ids.shape[1], positions + 1)
        rows = jnp.arange(places.shape[0], dtype=jnp.int32)[:, None]
        known = state.token_ids.at[rows, places].set(token_ids, mode="drop")
        newest = jnp.max(positions, axis=1)
        return History(known, jnp.where(newest < 0, state.num, newest + 2))

    def propose(
        self,
        state: History,
        fresh: Fresh,
        num_drafts: int,
        widths: Int[Array, " B"] | None = None,  # noqa: ARG002
    ) -> tuple[Draft, History]:
        """Append the fresh tokens and look up the num_drafts that follow."""
        offsets = jnp.arange(fresh.token_ids.shape[1], dtype=jnp.int32)[None, :]
        taken = (offsets < fresh.num[:, None]) & (fresh.first_position[:, None] >= 0)
        positions = jnp.where(taken, fresh.first_position[:, None] + offsets, -1)
        state = self.absorb(state, fresh.token_ids, fresh.aux_hidden, positions)
        token_ids, num = state.token_ids, state.num
        drafts = jax.vmap(self._look_up, (0, 0, None))(token_ids, num, num_drafts)
        return Draft(drafts), History(token_ids, num)

    def _look_up(self, tokens: jax.Array, num: jax.Array, num_drafts: int) -> jax.Array:
        index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        agree = jnp.zeros(tokens.shape, jnp.int32)
        still = index < num - 1  # a candidate ends before the history does
        for back in range(self.longest):
            here = tokens[jnp.maximum(index - back, 0)]
            there = tokens[jnp.maximum(num - 1 - back, 0)]
            still = still & (index - back >= 0) & (num - 1 - back >= 0) & (here == there)
            agree = agree + still.astype(jnp.int32)
        # the most agreeing tokens first, then the latest place
        best = jnp.argmax(agree * tokens.shape[0] + index * (agree > 0).astype(jnp.int32))
        follow = best + 1 + jnp.arange(num_drafts, dtype=jnp.int32)
        found = (agree[best] > 0) & (follow < num)
        last = tokens[jnp.maximum(num - 1, 0)]
        return jnp.where(found, tokens[jnp.minimum(follow, tokens.shape[0] - 1)], last)
