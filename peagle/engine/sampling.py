"""Turn logits into probabilities and tokens, per row, for both sides of the acceptance ratio."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from peagle.config import GREEDY_BELOW
from peagle.engine.request import MOST_LOGPROBS
from peagle.ops.likeliest import NO_TOKEN, argmax


@flax.struct.dataclass
class RowSampling:
    """Sampling of each row (peagle.engine.request.SamplingParams); the row is the leading axis."""

    temperature: jax.Array  # [B] float32; below GREEDY_BELOW: greedy
    top_k: jax.Array  # [B] int32; 0: all
    top_p: jax.Array  # [B] float32; 1: all
    min_p: jax.Array  # [B] float32; 0: all
    seed: jax.Array  # [B] int32
    index: jax.Array  # [B] int32: the request's

    @property
    def greedy(self) -> jax.Array:
        return self.temperature < GREEDY_BELOW


def probabilities(logits: Float[Array, "B T V"], sampling: RowSampling) -> Float[Array, "B T V"]:
    """Compute the float32 distribution from which tokens are drawn.

    Temperature, top-k, top-p, min-p, renormalised; a greedy row has a point mass on its argmax. top-k keeps every logit
    not below the k-th largest. top-p keeps the smallest set of most likely tokens with mass top_p or more, and ties
    with its last member. min-p drops tokens less likely than min_p times the likeliest. Logits that are finite or -inf
    give finite probabilities that sum to 1; if a logit is NaN, or the largest is infinite, no token has a probability
    above 0.
    """

    def of(values: jax.Array) -> jax.Array:
        return values[:, None, None]

    logits = logits.astype(jnp.float32)
    # subtract the largest logit before scaling: a difference of scaled logits would hold their rounding errors, which
    # grow with 1 / temperature
    peak = jnp.max(logits, axis=-1, keepdims=True)
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
    # the largest logit is 0 and is always kept; log(0) = -inf drops nothing
    scaled = jnp.where(scaled < of(jnp.log(sampling.min_p)), -jnp.inf, scaled)
    point = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == argmax(logits)[..., None]
    return jnp.where(of(sampling.greedy), point.astype(jnp.float32), jax.nn.softmax(scaled, axis=-1))


def _cut(
    logits: Float[Array, "B T V"],
    weights: Float[Array, "B T V"],
    enough: Float[Array, "B 1 1"],
    limited: Bool[Array, "B 1 1"],
) -> Float[Array, "B T V"]:
    """Keep the fewest most likely tokens whose weights sum to `enough`, and ties.

    Set the others to -inf. Rows that are not limited keep all. The largest logit must be 0; it is kept whatever
    `enough` is. No sorting, which at 200 000 tokens takes longer than a pass of most targets: the lowest kept logit is
    found bit by bit, one sum each.
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


BLOCK = 512  # weights in a block of `draw`


def draw(weights: Float[Array, "... V"], uniform: Float[Array, "..."]) -> Int[Array, "..."]:
    """Draw the token whose interval of the cumulative weights holds uniform * total.

    Weights need not be normalised; uniform lies in [0, 1). A token of zero weight has an empty interval and is never
    drawn. Returns NO_TOKEN if the total is not above 0, or NaN. Finds the block first, then the token in it, since one
    cumulative sum over a large vocabulary is slow.
    """
    *lead, vocab_size = weights.shape
    padded = jnp.pad(weights, [(0, 0)] * len(lead) + [(0, -vocab_size % BLOCK)])
    blocks = padded.reshape(*lead, -1, BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    point = uniform * ends[..., -1]
    block = _hit(sums, ends, point)[..., None]
    inside = jnp.take_along_axis(blocks, block[..., None], axis=-2)[..., 0, :]
    begin = jnp.take_along_axis(ends - sums, block, axis=-1)[..., 0]
    token = block[..., 0] * BLOCK + _hit(inside, jnp.cumsum(inside, axis=-1), point - begin)
    return jnp.where(ends[..., -1] > 0, token, NO_TOKEN)


def _hit(weights: Float[Array, "... N"], ends: Float[Array, "... N"], point: Float[Array, "..."]) -> Int[Array, "..."]:
    """Find the first index with weight above 0 whose end lies above the point.

    If rounding put the point beyond all ends, the last index with weight above 0.
    """
    index = jax.lax.broadcasted_iota(jnp.int32, weights.shape, weights.ndim - 1)
    least = jnp.sum(ends <= point[..., None], axis=-1, keepdims=True, dtype=jnp.int32)
    some = weights > 0
    first = jnp.min(jnp.where(some & (index >= least), index, weights.shape[-1]), axis=-1)
    return jnp.minimum(first, jnp.max(jnp.where(some, index, 0), axis=-1))


def choose(
    logits: Float[Array, "B T V"], sampling: RowSampling, uniform: Float[Array, "B T"] | None
) -> Int[Array, "B T"]:
    """Choose the token plain decoding emits: the argmax, or a draw by the uniform numbers.

    uniform None: all rows are greedy. Returns NO_TOKEN if a logit is NaN, or the largest is not finite.
    """
    if uniform is None:
        return argmax(logits)
    return jnp.where(sampling.greedy[:, None], argmax(logits), draw(probabilities(logits, sampling), uniform))


@flax.struct.dataclass
class LogProbs:
    """Log-probabilities of chosen tokens, and of the N likeliest, best first.

    N = MOST_LOGPROBS, or the vocabulary size if that is smaller.
    """

    chosen: jax.Array  # [B, T] float32
    best: jax.Array  # [B, T, N] float32
    best_ids: jax.Array  # [B, T, N] int32

    def at(self, *index: int) -> "LogProbs":
        """Index the leading axes."""
        return LogProbs(self.chosen[index], self.best[index], self.best_ids[index])

    @staticmethod
    def packed_width(vocab_size: int) -> int:
        """Return the number of integers that `pack` makes of each token: 1 + 2 N."""
        return 1 + 2 * min(MOST_LOGPROBS, vocab_size)

    def pack(self) -> Int[Array, "B T W"]:
        """Pack into one array of integers; floats keep their bits."""
        reals = jnp.concatenate([self.chosen[..., None], self.best], axis=-1)
        return jnp.concatenate([jax.lax.bitcast_convert_type(reals, jnp.int32), self.best_ids], axis=-1)

    @classmethod
    def unpack(cls, packed: np.ndarray) -> "LogProbs":
        """Undo `pack`."""
        num = (packed.shape[-1] - 1) // 2
        reals = np.ascontiguousarray(packed[..., : num + 1]).view(np.float32)
        return cls(reals[..., 0], reals[..., 1:], packed[..., num + 1 :])  # type: ignore[arg-type]  # NumPy's, too


def log_probs(logits: Float[Array, "B T V"], token_ids: Int[Array, "B T"]) -> LogProbs:
    """Compute the log-probabilities of these tokens and of the likeliest."""
    all_of = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(all_of, jnp.maximum(token_ids, 0)[..., None], axis=-1)[..., 0]
    best, best_ids = jax.lax.top_k(all_of, min(MOST_LOGPROBS, logits.shape[-1]))
    return LogProbs(chosen, best, best_ids)


# The uses of a position's random numbers: the last axis of `uniforms`.
TARGET, ACCEPT, DRAFT = 0, 1, 2


def uniforms(sampling: RowSampling, index: Int[Array, "B T"]) -> Float[Array, "B T 3"]:
    """Make uniform numbers in [0, 1) that depend only on (seed, request index, token index).

    So a row's randomness does not depend on other rows, its slot, K, or the length of steps. If a step drafts a token
    index and does not reach it, the next step uses the same numbers again: no emitted token depended on them.
    """

    def one(seed: jax.Array, request: jax.Array, token_index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), request), token_index)
        return jax.random.uniform(key, (3,), jnp.float32)

    return jax.vmap(jax.vmap(one, (None, None, 0)))(sampling.seed, sampling.index, index)
