"""Adjust the target's logits before acceptance: masks, min_tokens, biases, penalties.

Row i of a step follows the drafts before it, so its counts include them:

    row          pending   d0          d1
    its counts   counts    counts+d0   counts+d0+d1

The order is that of vLLM's sampler: masks and min_tokens, biases, then the repetition, frequency and presence
penalties. If a mask allows only stop tokens, min_tokens gives way. The repetition penalty counts prompt tokens, too;
the others count only emitted tokens. If a request sets none of these, its logits keep their bits.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from peagle.config import MOST_BIASES
from peagle.engine.request import Request
from peagle.engine.step.masks import MASK_BITS

NO_BIAS = np.iinfo(np.int32).max  # fills unused bias entries: outside every vocabulary


@flax.struct.dataclass
class Adjustments:
    """Adjustments of each row (peagle.config.SamplingParams); the row is the leading axis."""

    presence: jax.Array  # [B] float32; 0: off
    frequency: jax.Array  # [B] float32; 0: off
    repetition: jax.Array  # [B] float32; 1: off
    bias_ids: jax.Array  # [B, MOST_BIASES] int32, NO_BIAS in unused entries
    bias: jax.Array  # [B, MOST_BIASES] float32
    must_emit: jax.Array  # [B] int32: tokens still to be emitted before a stop token is allowed
    counts: jax.Array  # [B, V] int32: how often each token was emitted; kept up only by steps that need full logits
    in_prompt: jax.Array  # [B, V] bool

    @classmethod
    def none(cls, rows: int, vocab_size: int) -> "Adjustments":
        real = jnp.zeros((rows,), jnp.float32)
        return cls(
            presence=real,
            frequency=real,
            repetition=real + 1,
            bias_ids=jnp.full((rows, MOST_BIASES), NO_BIAS, jnp.int32),
            bias=jnp.zeros((rows, MOST_BIASES), jnp.float32),
            must_emit=jnp.zeros((rows,), jnp.int32),
            counts=jnp.zeros((rows, vocab_size), jnp.int32),
            in_prompt=jnp.zeros((rows, vocab_size), bool),
        )

    @classmethod
    def of(cls, request: Request, vocab_size: int) -> "Adjustments":
        """Make the row of a request that has emitted nothing, in NumPy."""
        sampling = request.sampling
        ids, bias = np.full((1, MOST_BIASES), NO_BIAS, np.int32), np.zeros((1, MOST_BIASES), np.float32)
        for place, (token, value) in enumerate(sampling.logit_bias):
            ids[0, place], bias[0, place] = token, value
        in_prompt = np.zeros((1, vocab_size), bool)
        if sampling.repetition_penalty != 1:
            in_prompt[0, list(request.prompt_ids)] = True
        reals = np.asarray(
            [[sampling.presence_penalty], [sampling.frequency_penalty], [sampling.repetition_penalty]], np.float32
        )
        must_emit = np.asarray([sampling.min_tokens], np.int32)
        leaves: list[Any] = [*reals, ids, bias, must_emit, np.zeros((1, vocab_size), np.int32), in_prompt]
        return cls(*leaves)

    def emitted(self, token_ids: Int[Array, "B T"], kept: Bool[Array, "B T"]) -> "Adjustments":
        rows = jnp.arange(token_ids.shape[0])[:, None]
        counts = self.counts.at[rows, token_ids].add(kept.astype(jnp.int32), mode="drop")
        must_emit = self.must_emit - jnp.sum(kept, axis=1, dtype=jnp.int32)
        return dataclasses.replace(self, counts=counts, must_emit=jnp.maximum(must_emit, 0))


def adjust(
    logits: Float[Array, "B T V"],
    draft_token_ids: Int[Array, "B K"],
    adjustments: Adjustments,
    stop_token_ids: Int[Array, "B S"],
    masks: UInt32[Array, "B T W"] | None = None,
) -> Float[Array, "B T V"]:
    """Adjust the logits of the T = K + 1 rows of a step. Negative draft ids count as no token.

    masks: one bit per token, 1 if it is allowed, lowest bit first, in W >= ceil(V / 32) words.
    """
    logits = logits.astype(jnp.float32)
    batch, width, vocab_size = logits.shape

    def of(values: jax.Array) -> jax.Array:
        return values[:, None, None]

    early = jnp.arange(width, dtype=jnp.int32)[None, :] < adjustments.must_emit[:, None]
    token = jnp.arange(vocab_size, dtype=jnp.int32)
    stops = jnp.any(token[None, None, :] == stop_token_ids[:, :, None], axis=1)
    if masks is not None:
        place = jnp.arange(MASK_BITS, dtype=jnp.uint32).reshape(1, 1, 1, MASK_BITS)
        allowed = ((masks[..., None] >> place) & 1).reshape(batch, width, -1)[..., :vocab_size] > 0
        logits = jnp.where(allowed, logits, -jnp.inf)
        early &= jnp.any(allowed & ~stops[:, None, :], axis=-1)
    logits = jnp.where(early[..., None] & stops[:, None, :], -jnp.inf, logits)
    rows = jnp.arange(batch)[:, None]
    bias = jnp.zeros((batch, vocab_size), jnp.float32).at[rows, adjustments.bias_ids].add(adjustments.bias, mode="drop")
    logits = jnp.where(bias[:, None, :] != 0, logits + bias[:, None, :], logits)

    before = jax.nn.one_hot(draft_token_ids, vocab_size, dtype=jnp.int32)
    counts = adjustments.counts[:, None, :] + jnp.pad(jnp.cumsum(before, axis=1), ((0, 0), (1, 0), (0, 0)))
    occurred = (counts > 0) | adjustments.in_prompt[:, None, :]
    penalised = jnp.where(logits > 0, logits / of(adjustments.repetition), logits * of(adjustments.repetition))
    logits = jnp.where(occurred & (of(adjustments.repetition) != 1), penalised, logits)
    loss = of(adjustments.frequency) * counts.astype(jnp.float32)
    loss += of(adjustments.presence) * (counts > 0).astype(jnp.float32)
    return jnp.where(loss != 0, logits - loss, logits)
