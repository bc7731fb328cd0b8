"""The specification: speculative decoding of one request on the host, one step after the other. Read it first.

    tokens     t0 .. t(length - 1) | t(length)    the target's cache holds `length` tokens. t(length) is pending: it
                                                  is part of the output, but the target has not read it
    propose    d0 .. d(K - 1)                     the drafter reads the last step's tokens, each with the target's
                                                  hidden states before it (aux_hidden), and drafts the next K
    verify     t(length) d0 .. d(K - 1)           one pass of the target; its output at a token chooses the next one
    accept     the drafts that equal the target's choices, up to the first that differs; then one token of its own
    commit     `length` grows by accepted + 1. Cache rows of rejected drafts lie beyond it: nothing reads them, and the
               next pass overwrites them

The engine does the same on the device, for many requests at once, with shared pages and steps in flight
(peagle.engine.step.step). tests/peagle/engine/test_naive.py compares the two. peagle/protocols.py has a worked example.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from peagle.engine.request import Request
from peagle.engine.step.sampling import choose, draw_keys
from peagle.engine.step.state import SlotParams
from peagle.ops.attention import PagedCache
from peagle.ops.messages import Chosen, DrafterInput, DraftOutput
from peagle.protocols import Drafter, PyTree, Target

Extended: TypeAlias = tuple[jax.Array, jax.Array, PagedCache]


def speculate(target: Target, drafter: Drafter, request: Request, num_drafts: int) -> tuple[list[int], list[int]]:
    """Decode one request; return (its new tokens, the number of accepted drafts of each step).

    Of the request it reads the prompt, the budget, temperature, seed, top-k, top-p and min-p. It ignores stop tokens,
    penalties and biases; the engine handles them. drafter: one with caches. num_drafts: K.
    """
    prompt, capacity = list(request.prompt_ids), len(request.prompt_ids) + request.max_new_tokens
    sampling = jax.tree.map(jnp.asarray, SlotParams.of(request, (), target.vocab_size).sampling)
    zero = jnp.zeros((1,), jnp.float32)
    # top-k, top-p and min-p are the target's alone: truncated drafts would not be accepted more often
    untruncated = dataclasses.replace(sampling, top_k=zero.astype(jnp.int32), top_p=zero + 1, min_p=zero)
    target_cache = target.init_cache(1, capacity, num_drafts + 1)
    drafter_state = drafter.init_state(1, capacity, 2 * num_drafts)  # a pass: up to K + 1 new tokens, K - 1 mask slots
    widths = jnp.asarray([num_drafts], jnp.int32)

    def keys(logits: jax.Array, first: jax.Array | int) -> jax.Array:
        """Make a random key for tokens first, first + 1, ...: it depends on seed, request and token index alone."""
        return draw_keys(sampling, first + _positions(0, logits.shape[1]))

    @jax.jit
    def propose(state: PyTree, drafter_input: DrafterInput, first: jax.Array) -> tuple[DraftOutput, PyTree]:
        def draft(logits: jax.Array, token_ids: jax.Array | None, number: int) -> Chosen:
            return choose(logits, untruncated, keys(logits, first + number), token_ids), None

        return drafter.propose(state, drafter_input, widths, num_drafts, draft)

    @jax.jit
    def extend(token_ids: jax.Array, positions: jax.Array, cache: PagedCache) -> Extended:
        """Run the target; return (the token after each row, aux_hidden, the cache)."""
        output, cache = target.extend(token_ids, positions, cache)
        decided = choose(output.logits, sampling, keys(output.logits, positions[0, 0] + 1))
        return decided, output.aux_hidden, cache

    decided, aux_hidden, target_cache = extend(_row(prompt), _positions(0, len(prompt)), target_cache)
    length, tokens = len(prompt), [*prompt, int(decided[0, -1])]
    # row p of the drafter pairs token p + 1 with the target's hidden states at position p
    if length > 1:
        drafter_state = drafter.absorb(drafter_state, _row(prompt[1:]), aux_hidden[:, :-1], _positions(0, length - 1))
    committed, aux_hidden = tokens[length:], aux_hidden[:, -1:]
    num_accepted = []
    while len(tokens) < capacity:
        unread = num_drafts + 1 - len(committed)  # padding: a step commits up to K + 1 tokens
        drafter_input = DrafterInput(
            _row([*committed, *[0] * unread]),
            jnp.pad(aux_hidden, ((0, 0), (0, unread), (0, 0))),
            num=jnp.asarray([len(committed)], jnp.int32),
            first_position=jnp.asarray([length - len(committed)], jnp.int32),
        )
        proposed, drafter_state = propose(drafter_state, drafter_input, jnp.int32(length + 1))
        drafts = proposed.token_ids[0].tolist()

        run = _row([tokens[-1], *drafts])
        decided, aux_hidden, target_cache = extend(run, _positions(length, num_drafts + 1), target_cache)

        own = decided[0].tolist()
        accepted = next((i for i in range(num_drafts) if drafts[i] != own[i]), num_drafts)

        committed, aux_hidden = own[: accepted + 1], aux_hidden[:, : accepted + 1]
        tokens, length = tokens + committed, length + accepted + 1
        num_accepted.append(accepted)
    return tokens[len(prompt) : capacity], num_accepted


def _row(token_ids: Sequence[int]) -> jax.Array:
    return jnp.asarray([token_ids], jnp.int32)


def _positions(first: int, count: int) -> jax.Array:
    return first + jnp.arange(count, dtype=jnp.int32)[None, :]
