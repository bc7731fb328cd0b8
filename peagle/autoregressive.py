"""Plain decoding: the same state, step and loop, with a drafter that proposes nothing.

It is the baseline every speed-up is measured against, so it shares all but the drafts.
"""

import flax.struct
import jax
import jax.numpy as jnp

from peagle.ops.messages import Draft, Fresh


@flax.struct.dataclass
class NoDrafter:
    """Proposes no token: verify runs one row, accept takes the target's token."""

    def init_state(self, batch: int, capacity: int, num_drafts: int) -> None:  # noqa: ARG002
        if num_drafts:
            raise ValueError(f"plain decoding drafts 0 tokens a step, not {num_drafts}")

    def prefill(self, state: None, token_ids: jax.Array, lengths: jax.Array, aux_hidden: jax.Array) -> None:
        pass

    def propose(self, state: None, fresh: Fresh, num_drafts: int) -> tuple[Draft, None]:
        return Draft(jnp.zeros((fresh.num.shape[0], num_drafts), jnp.int32)), state
