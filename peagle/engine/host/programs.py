"""The programs of an executor: functions of models, state and plans that are compiled once for each shape."""

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from peagle.engine.auto.costs import StepCosts
from peagle.engine.host.pass_plans import PlanLayout
from peagle.engine.step.adjust import adjust
from peagle.engine.step.dispatch import steps
from peagle.engine.step.prefill import Prefilled, prefill
from peagle.engine.step.propose import Proposed, propose
from peagle.engine.step.sampling import LogProbs, choose, draw_keys, log_probs
from peagle.engine.step.state import DecodeState, SlotParams, admit, init_state, put, take
from peagle.engine.step.step import accept_and_commit, verify
from peagle.engine.step.step_kinds import StepKind
from peagle.ops import native
from peagle.ops.attention import PagedCache, Pages
from peagle.ops.cuda import graphs
from peagle.ops.messages import VerifyOutput
from peagle.protocols import DrafterWithoutCaches

NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1 << 30}  # CUDA graphs only of this many operations: never
Make = TypeVar("Make", bound=Callable[..., Any])
_traces: collections.Counter[str] = collections.Counter()


def trace_counts() -> dict[str, int]:
    """Count the programs traced so far in this process, by name."""
    return dict(_traces)


def _compiled(function: Callable[..., Any], *donated: int, alone: bool = False) -> Any:
    """Compile a function. Branches are decided on the device. alone: operations are launched one by one."""
    options = NO_GRAPHS if alone else graphs.options()
    return jax.jit(function, donate_argnums=donated, compiler_options=options)


def _once(make: Make) -> Make:
    """Cache results as functools.cache does, but never call `make` twice if threads need one result at once."""
    kept, lock = functools.cache(make), threading.Lock()

    @functools.wraps(make)
    def cached(*arguments: Any) -> Any:
        with lock:
            return kept(*arguments)

    return cast(Make, cached)


@_once
def init_program(models: Any, *sizes: Any) -> Any:
    """Make the program of an empty state. sizes: arguments of `init_state`."""

    def _make(model_leaves: list[jax.Array]) -> DecodeState:
        return init_state(*jax.tree.unflatten(models, model_leaves), *sizes)

    return _compiled(_make)


@_once
def prefill_program(models: Any, layout: PlanLayout) -> Any:
    def _chunk(
        model_leaves: list[jax.Array], pages: tuple[tuple[Pages, ...], tuple[Pages, ...]], plan: jax.Array
    ) -> tuple[tuple[tuple[Pages, ...], tuple[Pages, ...]], Prefilled]:
        _traces["chunk"] += 1
        target, drafter, _ = jax.tree.unflatten(models, model_leaves)
        chunk, tables = layout.read_chunk(plan)
        target_cache = PagedCache(pages[0], tables[0])
        drafter_cache = None if drafter is None else PagedCache(pages[1], tables[1])
        target_cache, drafter_cache, prefilled = prefill(target, drafter, target_cache, drafter_cache, chunk)
        left = target_cache.pages, () if drafter_cache is None else drafter_cache.pages
        return left, Prefilled(_dispatched_async(prefilled.logits, chunk.num_rows[0]), prefilled.aux_hidden)

    return _compiled(_chunk, 1)


@_once
def first_token_program(full_logits: bool) -> Any:
    """Make the program of the token after a prompt. full_logits: of its request (Request.full_logits)."""

    def first_token(logits: jax.Array, length: jax.Array, known: jax.Array, params: SlotParams) -> jax.Array:
        """Return the token, `known` unless negative, packed with its log-probabilities: [1, W]."""
        _traces["first token"] += 1
        keys, rows = draw_keys(params.sampling, length[:, None]), logits[:, None]
        if full_logits:
            no_drafts, stops, masks = jnp.zeros((1, 0), jnp.int32), params.stop_token_ids, params.masks
            rows = adjust(rows, no_drafts, params.adjustments, jnp.asarray(stops), jnp.asarray(masks))
        chosen = choose(rows, params.sampling, keys)
        none = jnp.zeros((1, 1, LogProbs.packed_width(rows.shape[-1])), jnp.int32)
        packed = log_probs(logits[:, None], chosen).pack() if full_logits else none
        token = jnp.where(known >= 0, known, chosen[:, 0])
        return _dispatched_async(jnp.concatenate([token[:, None], packed[:, 0]], axis=1), length[0])

    return _compiled(first_token)


@functools.partial(jax.jit, donate_argnums=0)
def admit_rows(
    state: DecodeState,
    aux_hidden: jax.Array,
    rows: jax.Array,
    slots: jax.Array,
    length: jax.Array,
    first: jax.Array,
    params: SlotParams,
) -> DecodeState:
    """Admit rows of a chunk to slots. first: their first tokens, packed."""
    _traces["admit"] += 1
    after = admit(state, slots, length, first[:, 0], aux_hidden[rows], params)
    return dataclasses.replace(after, length=_dispatched_async(after.length, slots[0]))


@_once
def read_tokens_program(model: Any) -> Any:
    def _read_tokens(
        model_leaves: list[jax.Array], state: Any, token_ids: jax.Array, count: jax.Array, slot: jax.Array
    ) -> Any:
        _traces["read tokens"] += 1
        drafter = jax.tree.unflatten(model, model_leaves)
        assert isinstance(drafter, DrafterWithoutCaches)
        place = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
        positions = jnp.where(place < count, place, 0) - 1  # the row at position p holds token p + 1
        no_aux = jnp.zeros((*token_ids.shape, 0), jnp.float32)
        row = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, slot, 1), state)
        after = drafter.absorb(drafter.restart(row), token_ids, no_aux, positions)
        return jax.tree.map(lambda into, leaf: jax.lax.dynamic_update_slice_in_dim(into, leaf, slot, 0), state, after)

    return _compiled(_read_tokens, 1)


@_once
def steps_program(models: Any, kind: StepKind, layout: PlanLayout, most: int, launches_alone: bool) -> Any:
    """Make the program of up to `most` steps."""

    def _run(
        model_leaves: list[jax.Array], state: DecodeState, plan: jax.Array, costs: jax.Array, limit: jax.Array
    ) -> tuple[DecodeState, jax.Array]:
        _traces["steps"] += 1
        target, drafter, lookup = jax.tree.unflatten(models, model_leaves)
        batch, widths = layout.read_steps(plan)
        rows = take(state, batch, kind.input_rows, kind.full_logits)
        step_costs = kind.costs(costs, plan.shape[0])
        after, outputs = steps(target, drafter, rows, widths, step_costs, limit, kind, most, lookup)
        return put(state, batch, after), _dispatched_async(outputs, outputs[0, 0, 0])

    # the name that scripts/gpu/parts.py looks for
    _run.__name__ = f"_steps_{kind.num_drafts}" + ("_full" if kind.full_logits else "_sampled" if kind.sampled else "")
    return _compiled(_run, 1, alone=launches_alone)


@_once
def propose_program(models: Any, kind: StepKind, layout: PlanLayout) -> Any:
    def _propose_drafts(
        model_leaves: list[jax.Array],
        drafter_states: tuple[Any, Any],
        small: DecodeState,
        plan: jax.Array,
    ) -> tuple[tuple[Any, Any], Proposed]:
        _traces["propose"] += 1
        state = dataclasses.replace(small, drafter_state=drafter_states[0], lookup_state=drafter_states[1])
        batch, widths = layout.read_steps(plan)
        rows = take(state, batch, kind.input_rows, adjusts=False)
        drafter, lookup = jax.tree.unflatten(models, model_leaves)
        after, proposed = propose(drafter, rows, widths, StepCosts.unknown(len(plan), kind.num_drafts), kind, lookup)
        left = put(state, batch, dataclasses.replace(after, drafter_input=None))
        proposed = dataclasses.replace(proposed, widths=_dispatched_async(proposed.widths, plan[0, 0]))
        return (left.drafter_state, left.lookup_state), proposed

    return _compiled(_propose_drafts, 1)


@_once
def verify_program(model: Any, layout: PlanLayout) -> Any:
    def _verify_drafts(
        model_leaves: list[jax.Array], pages: tuple[Pages, ...], small: DecodeState, plan: jax.Array, proposed: Proposed
    ) -> tuple[tuple[Pages, ...], VerifyOutput]:
        _traces["verify"] += 1
        batch, _ = layout.read_steps(plan)
        rows = take(dataclasses.replace(small, target_cache=PagedCache(pages, ())), batch, 0, adjusts=False)
        after, verified = verify(jax.tree.unflatten(model, model_leaves), rows, proposed)
        aux_hidden = _dispatched_async(verified.aux_hidden, plan[0, 0])
        return after.target_cache.pages, dataclasses.replace(verified, aux_hidden=aux_hidden)

    return _compiled(_verify_drafts, 1)


@_once
def accept_and_commit_program(kind: StepKind, layout: PlanLayout) -> Any:
    def _accept_drafts(
        small: DecodeState,
        plan: jax.Array,
        proposed: Proposed,
        verified: VerifyOutput,
        masks: jax.Array,
        counts: jax.Array,
    ) -> tuple[DecodeState, jax.Array]:
        _traces["accept"] += 1
        batch, _ = layout.read_steps(plan)
        rows = take(small, batch, kind.input_rows, adjusts=True)
        proposed = dataclasses.replace(proposed, widths=jnp.minimum(proposed.widths, counts))
        costs = StepCosts.unknown(len(plan), kind.num_drafts)
        after, output = accept_and_commit(rows, proposed, verified, costs, kind, masks)
        return put(small, batch, after), _dispatched_async(output.pack()[None], plan[0, 0])

    return _compiled(_accept_drafts, 0)


@jax.jit
def take_row(logits: jax.Array, row: jax.Array) -> jax.Array:
    return _dispatched_async(jax.lax.dynamic_slice_in_dim(logits, row, 1), row)


@jax.jit
def join_rows(rows: list[jax.Array], zero: jax.Array) -> jax.Array:
    return _dispatched_async(jnp.concatenate(rows), zero)


gather_pages: Callable[[jax.Array, np.ndarray], jax.Array] = jax.jit(lambda pages, numbers: pages[numbers])


@functools.partial(jax.jit, donate_argnums=0)
def write_pages(pages: Pages, numbers: jax.Array, keys: jax.Array, values: jax.Array) -> Pages:
    return Pages(pages.key.at[numbers].set(keys), pages.value.at[numbers].set(values))


def _dispatched_async(result: jax.Array, count: jax.Array) -> jax.Array:
    """Return `result`; make XLA on CPU dispatch the program asynchronously.

    XLA on CPU runs a program inside the dispatching call if it counts fewer than 1000 operations (cheap_computation_ in
    its PjRt CPU client). It counts none in our kernels. So this adds some, in a branch that is never taken, because
    `count` is not negative.
    """
    if not native.available():
        return result

    def never(result: jax.Array) -> jax.Array:
        return result + jnp.sum(jnp.arange(4000, dtype=jnp.int32) * count).astype(result.dtype)

    return jax.lax.cond(count < 0, never, lambda result: result, result)
