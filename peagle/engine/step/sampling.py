"""Turn logits into probabilities and tokens, per row; target and drafter draw by the same keys."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from peagle.config import GREEDY_BELOW, MOST_LOGPROBS
from peagle.ops.draw import KEYS, draw
from peagle.ops.likeliest import argmax


@flax.struct.dataclass
class RowSampling:
    """Sampling of each row (peagle.config.SamplingParams); the row is the leading axis."""

    temperature: jax.Array  # [B] float32; below GREEDY_BELOW: greedy
    top_k: jax.Array  # [B] int32; 0: all
    top_p: jax.Array  # [B] float32; 1: all
    min_p: jax.Array  # [B] float32; 0: all
    seed: jax.Array  # [B] int32
    index: jax.Array  # [B] int32: Request.index

    @property
    def greedy(self) -> jax.Array:
        return self.temperature < GREEDY_BELOW


def probabilities(logits: Float[Array, "B T V"], sampling: RowSampling) -> Float[Array, "B T V"]:
    """Compute the float32 distribution from which tokens are drawn.

    A greedy row has a point mass on its argmax. Finite or -inf logits give finite probabilities that sum to 1; if a
    logit is NaN, or the largest is infinite, no token has a probability above 0.
    """
    likeliest = argmax(logits)
    weights = weights_of(logits, likeliest, sampling)
    point = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == likeliest[..., None]
    whole = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.where(sampling.greedy[:, None, None], point.astype(jnp.float32), whole)


def weights_of(
    logits: Float[Array, "B T V"], likeliest: Int[Array, "B T"], sampling: RowSampling
) -> Float[Array, "B T V"]:
    """Compute float32 weights in proportion to which tokens are drawn; the largest is 1. Greedy rows: any.

    likeliest: the argmax of the logits, whose logit is faster to read than to find again as their largest.
    Order: temperature, top-k, top-p, min-p. top-k keeps every logit not below the k-th largest. top-p keeps the fewest
    most likely tokens with mass top_p or more, and those that tie with the last of them. min-p drops tokens less likely
    than min_p times the likeliest. If a logit is NaN, or the largest is infinite, no weight is above 0.
    """

    def of(values: jax.Array) -> jax.Array:
        return values[:, None, None]

    logits = logits.astype(jnp.float32)
    # subtract the largest logit before scaling: afterwards, rounding errors would have grown with 1 / temperature
    peak = jnp.take_along_axis(logits, jnp.maximum(likeliest, 0)[..., None], axis=-1)
    peak = jnp.where(likeliest[..., None] < 0, jnp.nan, peak)
    scaled = (logits - peak) / of(jnp.maximum(sampling.temperature, GREEDY_BELOW))
    vocab_size = logits.shape[-1]
    limited = (sampling.top_k > 0) & (sampling.top_k < vocab_size)
    enough = sampling.top_k.astype(jnp.float32)
    scaled = jax.lax.cond(
        jnp.any(limited & ~sampling.greedy),
        lambda scaled: _cut(scaled, jnp.ones_like(scaled), of(enough), of(limited)),
        lambda scaled: scaled,
        scaled,
    )
    limited = sampling.top_p < 1
    scaled = jax.lax.cond(
        jnp.any(limited & ~sampling.greedy),
        lambda scaled: _cut(scaled, jax.nn.softmax(scaled, axis=-1), of(sampling.top_p), of(limited)),
        lambda scaled: scaled,
        scaled,
    )
    # the largest logit is 0 and always kept; log(0) = -inf drops nothing
    return jnp.exp(jnp.where(scaled < of(jnp.log(sampling.min_p)), -jnp.inf, scaled))


def _cut(
    logits: Float[Array, "B T V"],
    weights: Float[Array, "B T V"],
    enough: Float[Array, "B 1 1"],
    limited: Bool[Array, "B 1 1"],
) -> Float[Array, "B T V"]:
    """Keep the fewest most likely tokens whose weights sum to `enough`, and ties; set the others to -inf.

    Rows that are not limited keep all. The largest logit must be 0; it is always kept. The lowest kept logit is found
    bit by bit, with one sum per bit: to sort 200,000 tokens takes longer than a pass of most targets.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.uint32)  # 0 and -0 are equal
    top = jnp.uint32(1 << 31)
    order = jnp.where(bits >= top, ~bits, bits | top)  # unsigned numbers in the order of the logits

    def find(step: jax.Array, lowest: jax.Array) -> jax.Array:
        higher = lowest | (top >> step.astype(jnp.uint32))
        return jnp.where(
            jnp.sum(jnp.where(order >= higher, weights, 0.0), axis=-1, keepdims=True) >= enough, higher, lowest
        )

    lowest = jax.lax.fori_loop(jnp.int32(0), 32, find, jnp.zeros_like(order[..., :1]))
    kept = order >= jnp.minimum(lowest, top)  # `top` is the order of 0
    return jnp.where(kept | ~limited, logits, -jnp.inf)


def choose(
    logits: Float[Array, "B T V"],
    sampling: RowSampling,
    keys: UInt32[Array, "B T 2"] | None,
    token_ids: Int[Array, " V"] | None = None,
) -> Int[Array, "B T"]:
    """Choose the token that plain decoding emits: the argmax, or a draw by the keys.

    keys None: all rows are greedy. token_ids: of the logits; None: 0, 1, 2, ... Returns an index, or NO_TOKEN if a
    logit is NaN or the largest is not finite.
    """
    likeliest = argmax(logits)
    if keys is None:
        return likeliest
    drawn = draw(weights_of(logits, likeliest, sampling), keys, token_ids)
    return jnp.where(sampling.greedy[:, None], likeliest, drawn)


@flax.struct.dataclass
class LogProbs:
    """Log-probabilities of chosen tokens, and of the N likeliest, best first.

    N = MOST_LOGPROBS, or the vocabulary size if that is smaller.
    """

    chosen: jax.Array  # [B, T] float32
    best: jax.Array  # [B, T, N] float32
    best_ids: jax.Array  # [B, T, N] int32

    def at(self, *index: int) -> "LogProbs":
        return LogProbs(self.chosen[index], self.best[index], self.best_ids[index])

    @staticmethod
    def packed_width(vocab_size: int) -> int:
        """Return the number of integers per packed token: 1 + 2 N."""
        return 1 + 2 * min(MOST_LOGPROBS, vocab_size)

    def pack(self) -> Int[Array, "B T W"]:
        """Pack into one array of integers; floats keep their bits."""
        reals = jnp.concatenate([self.chosen[..., None], self.best], axis=-1)
        return jnp.concatenate([jax.lax.bitcast_convert_type(reals, jnp.int32), self.best_ids], axis=-1)

    @classmethod
    def unpack(cls, packed: np.ndarray) -> "LogProbs":
        num = (packed.shape[-1] - 1) // 2
        reals = np.ascontiguousarray(packed[..., : num + 1]).view(np.float32)
        return cls(reals[..., 0], reals[..., 1:], packed[..., num + 1 :])  # type: ignore[arg-type]  # NumPy's, too


def log_probs(logits: Float[Array, "B T V"], token_ids: Int[Array, "B T"]) -> LogProbs:
    all_of = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(all_of, jnp.maximum(token_ids, 0)[..., None], axis=-1)[..., 0]
    best, best_ids = jax.lax.top_k(all_of, min(MOST_LOGPROBS, logits.shape[-1]))
    return LogProbs(chosen, best, best_ids)


def draw_keys(sampling: RowSampling, index: Int[Array, "B T"]) -> UInt32[Array, "B T 2"]:
    """Make keys of draws from (seed, request index, token index) alone: no slot, K or other request changes a draw."""

    def one(seed: jax.Array, request: jax.Array, token_index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl=KEYS), request), token_index)
        return jax.random.key_data(key)

    return jax.vmap(jax.vmap(one, (None, None, 0)))(sampling.seed, sampling.index, index)
