"""Prompt lookup, a drafter without weights: propose the tokens that followed the last n-gram before."""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle.ops.attention import CacheGroup, Pages
from peagle.ops.messages import Choose, DrafterInput, DraftOutput, likeliest_of
from peagle.ops.put_rows import put_rows

# a draft after a match of n tokens is wrong with a chance of MISS**n: of the demo's, after 1, 2 and 3 tokens, .45, .71
# and .84 are right, greedy; .35, .64 and .73 at temperature 1
MISS = 0.55


@flax.struct.dataclass
class History:
    """All tokens so far, the pending one included: token_ids[:, :num]; the rest is -1."""

    token_ids: jax.Array  # [B, S] int32
    num: jax.Array  # [B] int32


@flax.struct.dataclass
class NGram:
    """Propose the tokens that followed the best earlier match of the history's end.

    A match is a position whose last 1..`longest` tokens equal the history's last ones. The longest match counts; of
    equal ones, the latest. Without a match, or beyond the history's end, propose the history's last token again.
    """

    longest: int = flax.struct.field(pytree_node=False, default=3)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return ()

    def init_pages(self, num_pages: Sequence[int]) -> tuple[Pages, ...]:  # noqa: ARG002
        return ()

    def init_state(self, batch: int, capacity: int, widest_write: int) -> History:
        """Make an empty history with room for `capacity` tokens, the pending one and a whole input after these."""
        room = capacity + 2 + widest_write
        return History(jnp.full((batch, room), -1, jnp.int32), jnp.zeros((batch,), jnp.int32))

    def restart(self, state: History) -> History:
        """Forget all tokens."""
        return History(jnp.full_like(state.token_ids, -1), jnp.zeros_like(state.num))

    def absorb(
        self,
        state: History,
        token_ids: Int[Array, "B T"],
        aux_hidden: Float[Array, "B T A"],  # noqa: ARG002
        positions: Int[Array, "B T"],
    ) -> History:
        """Append tokens: the row at position p holds token p + 1. So the first token of a sequence is left out."""
        room = state.token_ids.shape[1]
        places = jnp.where(positions < 0, room, positions + 1)
        rows = jnp.arange(places.shape[0], dtype=jnp.int32)[:, None]
        tokens = state.token_ids.at[rows, places].set(token_ids, mode="drop")
        newest = jnp.max(positions, axis=1)
        return History(tokens, jnp.where(newest < 0, state.num, newest + 2))

    def propose(
        self,
        state: History,
        drafter_input: DrafterInput,
        widths: Int[Array, " B"],  # noqa: ARG002
        num_drafts: int,
        choose: Choose = likeliest_of,  # noqa: ARG002  there is nothing to choose from
    ) -> tuple[DraftOutput, History]:
        """Append the tokens of the input and look up the num_drafts that follow."""
        first_position, num = drafter_input.first_position, drafter_input.num
        begin = jnp.maximum(first_position, 0) + 1
        tokens = put_rows(state.token_ids, drafter_input.token_ids, begin, jnp.where(first_position < 0, 0, num))
        state = History(tokens, jnp.where(first_position < 0, state.num, begin + num))
        drafts, confidence = jax.vmap(self._look_up, (0, 0, None))(state.token_ids, state.num, num_drafts)
        return DraftOutput(drafts, confidence=confidence), state

    def _look_up(self, tokens: jax.Array, num: jax.Array, num_drafts: int) -> tuple[jax.Array, jax.Array]:
        """Return (drafts, confidence). Confidence grows with the length of the match and is 0 without one."""
        index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        length = jnp.zeros(tokens.shape, jnp.int32)  # of the match that ends at each index
        agrees = index < num - 1  # a match ends before the history does
        for back in range(self.longest):
            here = jnp.pad(tokens, (back, 0))[: tokens.shape[0]]
            there = tokens[jnp.maximum(num - 1 - back, 0)]
            agrees = agrees & (index - back >= 0) & (num - 1 - back >= 0) & (here == there)
            length = length + agrees.astype(jnp.int32)
        # the longest match, then the latest; XLA on CPU does not vectorise an argmax
        top = jnp.max(jnp.where(length > 0, length * tokens.shape[0] + index, 0))
        best, longest = top % tokens.shape[0], top // tokens.shape[0]
        follow = best + 1 + jnp.arange(num_drafts, dtype=jnp.int32)
        known = (longest > 0) & (follow < num)
        last = tokens[jnp.maximum(num - 1, 0)]
        # each right draft makes the match longer by one
        match = (longest + jnp.arange(num_drafts, dtype=jnp.int32)).astype(jnp.float32)
        confidence = jnp.where(known, 1.0 - MISS**match, 0.0)
        return jnp.where(known, tokens[jnp.minimum(follow, tokens.shape[0] - 1)], last), confidence
