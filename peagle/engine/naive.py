"""The specification: speculative decoding of one request on the host, one step after the other. Read it first.

    tokens     t0 .. t(length - 1) | t(length)    the target's cache holds `length` tokens; the last token is pending
    propose    d0 .. d(K - 1)                     the drafter reads the tokens committed last and drafts the next ones
    verify     t(length) d0 .. d(K - 1)           one pass of the target; row i decides the token after its own
    accept     the drafts that equal the target's choices, up to the first that differs; then one token of its own
    commit     `length` moves. Rows of rejected drafts lie past it: no row sees them, and the next pass overwrites them

The engine does the same on the device, for many requests at once, with shared pages and steps in flight
(peagle.engine.step). tests/peagle/engine/test_naive.py compares the two.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from peagle.engine.request import Request
from peagle.engine.sampling import choose, draw_keys
from peagle.engine.state import SlotParams
from peagle.ops.attention import PagedCache
from peagle.ops.messages import Chosen, DrafterInput, DraftOutput
from peagle.protocols import Drafter, PyTree, Target

Extended: TypeAlias = tuple[jax.Array, jax.Array, PagedCache]


def speculate(target: Target, drafter: Drafter, request: Request, num_drafts: int) -> tuple[list[int], list[int]]:
    """Decode one request; return (its new tokens, the number of accepted drafts of each step).

    Reads its prompt, its budget, and how it is sampled: temperature, seed, top-k, top-p and min-p. Stop tokens,
    penalties and biases are the engine's. drafter: one with caches. num_drafts: K.
    """
    prompt, capacity = list(request.prompt_ids), len(request.prompt_ids) + request.max_new_tokens
    sampling = jax.tree.map(jnp.asarray, SlotParams.of(request, (), target.vocab_size).sampling)
    zero = jnp.zeros((1,), jnp.float32)
    uncut = dataclasses.replace(sampling, top_k=zero.astype(jnp.int32), top_p=zero + 1, min_p=zero)  # for drafts
    target_cache = target.init_cache(1, capacity, num_drafts + 1)
    drafter_state = drafter.init_state(1, capacity, 2 * num_drafts)
    widths = jnp.asarray([num_drafts], jnp.int32)

    def keys(logits: jax.Array, first: jax.Array | int) -> jax.Array:
        """Make the keys of tokens first, first + 1, ...: of seed, request and index alone, for target and drafter."""
        return draw_keys(sampling, first + _positions(0, logits.shape[1]))

    @jax.jit
    def propose(state: PyTree, drafter_input: DrafterInput, first: jax.Array) -> tuple[DraftOutput, PyTree]:
        def draft(logits: jax.Array, token_ids: jax.Array | None, number: int) -> Chosen:
            return choose(logits, uncut, keys(logits, first + number), token_ids), None

        return drafter.propose(state, drafter_input, widths, num_drafts, draft)

    @jax.jit
    def extend(token_ids: jax.Array, positions: jax.Array, cache: PagedCache) -> Extended:
        """Run the target; return (the token after each row, aux_hidden, the cache)."""
        output, cache = target.extend(token_ids, positions, cache)
        decided = choose(output.logits, sampling, keys(output.logits, positions[0, 0] + 1))
        return decided, output.aux_hidden, cache

    decided, aux_hidden, target_cache = extend(_row(prompt), _positions(0, len(prompt)), target_cache)
    length, tokens = len(prompt), [*prompt, int(decided[0, -1])]
    # the drafter's row p is (token p + 1, aux_hidden of position p)
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
