"""The values that pass between the engine, a target and a drafter. In the leaf, so that all three can import them."""

import flax.struct
import jax


@flax.struct.dataclass
class VerifyOutput:
    """A target's results of one pass, beside its caches."""

    logits: jax.Array  # [B, L, V]: of the requested rows
    aux_hidden: jax.Array  # [B, T, A]: the aux layers' hidden states side by side; A is 0 without aux layers


@flax.struct.dataclass
class DrafterInput:
    """The tokens committed since the drafter proposed last, each with the aux_hidden that predicts it.

    Row i pairs token[p+1] with aux_hidden[p] at p = first_position + i, for i < num; later rows are leftovers. One step
    commits up to K+1 rows. first_position follows the last row that the drafter has absorbed: no row is left out.
    """

    token_ids: jax.Array  # [B, F] int32, F >= K+1
    aux_hidden: jax.Array  # [B, F, A]
    num: jax.Array  # [B] int32, 1..F, or 0 in an inactive row
    first_position: jax.Array  # [B] int32; negative: the row is inactive


@flax.struct.dataclass
class DraftOutput:
    """K proposed tokens, the drafter's argmax, with its logits, if it has any.

    logits is over the target's vocabulary; tokens that the drafter cannot propose are at -inf or a very large negative.
    """

    token_ids: jax.Array  # [B, K] int32
    logits: jax.Array | None = None  # [B, K, V]
