"""The variants of a step, and its output for the host."""

import dataclasses
from dataclasses import dataclass

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from peagle.engine.auto.costs import StepCosts
from peagle.engine.step.sampling import LogProbs

DRAFTING_BITS = 2  # of a packed output, above caught_up and source, below num_drafted


@dataclass(frozen=True)
class StepKind:
    """A variant of the step; each compiles its own program.

    num_drafts             0: plain steps
    sampled                some row is not greedy; such rows draw their drafts by the keys of the target's draws
    full_logits            some row has its logits adjusted or returns log-probabilities (Request.full_logits)
    synthetic_acceptance   see `draw_synthetic`
    keep_drafter_input     False if no row drafts again: plain steps then keep nothing for the drafter
    adaptive               the step chooses its widths, and may pause drafting
    masked                 one step in three programs: the host fills in token masks while the target verifies
                           (Executor.masked_step). The drafter always runs, and every draft is verified
    """

    num_drafts: int
    sampled: bool = False
    full_logits: bool = False
    synthetic_acceptance: tuple[float, ...] | None = None
    keep_drafter_input: bool = True
    adaptive: bool = False
    masked: bool = False

    def no_costs(self, size: int) -> np.ndarray:
        """Make the packed costs of a batch of this size that are not measured; empty if steps are not adaptive."""
        return StepCosts.unknown(size, self.num_drafts).pack() if self.adaptive else np.zeros((0,), np.float32)

    def costs(self, packed: jax.Array, size: int) -> StepCosts:
        return StepCosts.unpack(packed, size, self.num_drafts)

    @property
    def input_rows(self) -> int | None:
        """Rows of drafter_input that steps take; None: all, because a step may append rows."""
        return self.num_drafts + 1 if self.num_drafts and not self.adaptive else None

    @property
    def plain(self) -> "StepKind":
        return StepKind(0, self.sampled, self.full_logits)


@flax.struct.dataclass
class StepOutput:
    """The output of a step for the host. A slot that was done before has count 0 and num_accepted -1."""

    count: jax.Array | np.ndarray  # [B]: emitted tokens, 0..K+1, cut after a stop token and at the budget
    num_accepted: jax.Array | np.ndarray  # [B]: before that cut
    num_verified: jax.Array | np.ndarray  # [B]
    num_drafted: jax.Array | np.ndarray  # [B]: of the slot's source; the first num_verified were verified
    source: jax.Array | np.ndarray  # [B]: 0 the drafter, 1 the lookup drafter
    drafting: jax.Array | np.ndarray  # [B]: Drafting; below ALWAYS the drafter's pages have a gap
    caught_up: jax.Array | np.ndarray  # [B]: the drafter has read all rows before this step's
    token_ids: jax.Array | np.ndarray  # [B, K+1]: accepted drafts, then next_token or NO_TOKEN, then leftovers
    draft_token_ids: jax.Array | np.ndarray  # [B, K]; leftovers from num_verified on
    log_probs: LogProbs | None = None  # of token_ids, if the step needs full logits

    def padded(self, num_more: int) -> "StepOutput":
        """Pad the output by `num_more` drafts, so that it packs like a step with that many more."""

        def pad(leaf: jax.Array | np.ndarray) -> jax.Array:
            return jnp.pad(leaf, ((0, 0), (0, num_more), *((0, 0) for _ in leaf.shape[2:])))

        drafts, log_probs = pad(self.draft_token_ids), jax.tree.map(pad, self.log_probs)
        return dataclasses.replace(self, token_ids=pad(self.token_ids), draft_token_ids=drafts, log_probs=log_probs)

    def pack(self) -> Int[Array, "B W"]:
        """Pack into one array, which takes one copy to the host instead of ten."""
        caught_up, source, drafting, num_drafted = (
            jnp.asarray(number).astype(jnp.int32)
            for number in (self.caught_up, self.source, self.drafting, self.num_drafted)
        )
        flags = caught_up | source << 1 | drafting << 2 | num_drafted << (2 + DRAFTING_BITS)
        numbers = (self.count, self.num_accepted, self.num_verified, flags)
        columns = [jnp.asarray(number).astype(jnp.int32)[:, None] for number in numbers]
        columns += [jnp.asarray(self.token_ids), jnp.asarray(self.draft_token_ids)]
        if self.log_probs is not None:
            packed = self.log_probs.pack()
            columns.append(packed.reshape(packed.shape[0], -1))
        return jnp.concatenate(columns, axis=1)

    @staticmethod
    def packed_width(kind: StepKind, vocab_size: int) -> int:
        """Return the number of integers per slot of a packed output."""
        log_probs = LogProbs.packed_width(vocab_size) if kind.full_logits else 0
        return 4 + kind.num_drafts + (kind.num_drafts + 1) * (1 + log_probs)

    @classmethod
    def unpack(cls, packed: np.ndarray, num_drafts: int) -> "StepOutput":
        """Undo `pack`; leading axes stay."""
        parts = np.cumsum([1, 1, 1, 1, num_drafts + 1, num_drafts])
        *numbers, tokens, drafts, rest = np.split(packed, parts, axis=-1)
        count, num_accepted, num_verified, flags = (number[..., 0] for number in numbers)
        log_probs = None
        if rest.shape[-1]:
            log_probs = LogProbs.unpack(rest.reshape(*rest.shape[:-1], num_drafts + 1, -1))
        return cls(
            count=count,
            num_accepted=num_accepted,
            num_verified=num_verified,
            num_drafted=flags >> (2 + DRAFTING_BITS),
            source=flags >> 1 & 1,
            drafting=flags >> 2 & ((1 << DRAFTING_BITS) - 1),
            caught_up=(flags & 1) != 0,
            token_ids=tokens,
            draft_token_ids=drafts,
            log_probs=log_probs,
        )
