"""What the engine, a target and a drafter hand to each other. They live in the leaf so that both sides can name
them."""

import flax.struct
import jax


@flax.struct.dataclass
class TargetOutput:
    """What a target computes beside its caches."""

    logits: jax.Array  # [B, L, V]: of the rows that were asked for
    aux_hidden: jax.Array  # [B, T, A]: the taps side by side; A is 0 without taps


@flax.struct.dataclass
class Fresh:
    """The tokens committed since the drafter proposed last and the hiddens they follow from: row i pairs token[p+1]
    with aux_hidden[p] at p = first_position + i, for i < num. Rows from num on are leftovers.

    One step commits up to K+1 rows. first_position is the one behind what the drafter took in last: no row is left out.
    """

    token_ids: jax.Array  # [B, F] int32, F >= K+1
    aux_hidden: jax.Array  # [B, F, A]
    num: jax.Array  # [B] int32, 1..F, or 0 in an inactive row
    first_position: jax.Array  # [B] int32; negative: the row is inactive


@flax.struct.dataclass
class Draft:
    """K proposed tokens: the drafter's most likely ones, and the logits they come from where it has any.

    logits is over the target's vocabulary; tokens the drafter cannot propose are at -inf or a very large negative."""

    token_ids: jax.Array  # [B, K] int32
    logits: jax.Array | None = None  # [B, K, V]
