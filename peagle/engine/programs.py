"""Make the programs of an executor: functions of models, state and plans that are compiled once for each shape."""

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from peagle.engine.adjust import adjust
from peagle.engine.plans import cut_tables, read_step_plan
from peagle.engine.prefill import ChunkRows, Prefilled, prefill
from peagle.engine.propose import absorb, propose
from peagle.engine.sampling import LogProbs, choose, draw_keys, log_probs
from peagle.engine.state import DecodeState, SlotParams, admit, init_state, put, take
from peagle.engine.step import accept_and_commit, steps, verify
from peagle.engine.step_kinds import Proposed, StepKind
from peagle.engine.widths import Counts
from peagle.ops import native
from peagle.ops.attention import PagedCache, Pages
from peagle.ops.messages import VerifyOutput
from peagle.ops.row_blocks import RowBlocks
from peagle.protocols import DrafterWithoutCaches

NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1 << 30}  # CUDA graphs only of this many operations: never
Make = TypeVar("Make", bound=Callable[..., Any])
_traces: collections.Counter[str] = collections.Counter()


def trace_counts() -> dict[str, int]:
    """Count the programs traced so far in this process, by name."""
    return dict(_traces)


@dataclass(frozen=True)
class Shape:
    """What an executor's programs depend on, besides its models.

    num_drafts   most drafts of a step
    most_steps   most steps of a dispatch
    num_pages    of each cache group, the target's first, then the drafter's
    widths       of their tables
    blocks       compute a prompt at once, in these blocks of rows
    adaptive     some steps are (StepKind)
    counts       the acceptance that adaptive steps start from (peagle.engine.widths.Learned)
    """

    slots: int
    capacity: int
    num_drafts: int
    most_steps: int
    num_pages: tuple[int, ...]
    widths: tuple[int, ...]
    blocks: RowBlocks | None = None
    adaptive: bool = False
    counts: Counts | None = None


def _once(make: Make) -> Make:
    """Cache what `make` returns, as functools.cache does, but call it once even if threads need it at once."""
    kept, lock = functools.cache(make), threading.Lock()

    @functools.wraps(make)
    def cached(*arguments: Any) -> Any:
        with lock:
            return kept(*arguments)

    return cast(Make, cached)


@_once
def init_program(models: Any, shape: Shape) -> Any:
    def _make(model_leaves: list[jax.Array]) -> DecodeState:
        target, drafter = jax.tree.unflatten(models, model_leaves)
        split = len(target.cache_groups)
        pages = shape.num_pages[:split], shape.num_pages[split:]
        sizes = shape.slots, shape.capacity, shape.num_drafts
        return init_state(target, drafter, *sizes, *pages, adaptive=shape.adaptive, counts=shape.counts)

    return jax.jit(_make)


@_once
def prefill_program(models: Any, num_target: int, widths: tuple[int, ...], blocks: RowBlocks | None) -> Any:
    def _chunk(
        model_leaves: list[jax.Array], pages: tuple[tuple[Pages, ...], tuple[Pages, ...]], plan: jax.Array
    ) -> tuple[tuple[tuple[Pages, ...], tuple[Pages, ...]], Prefilled]:
        _traces["chunk"] += 1
        target, drafter = jax.tree.unflatten(models, model_leaves)
        length = plan.shape[1] - sum(widths) - 3
        tables = cut_tables(plan[:, 3 + length :], widths)
        chunk = ChunkRows(plan[:, 3 : 3 + length], plan[:, 0], plan[:, 1], plan[:, 2])
        drafter_cache = None if drafter is None else PagedCache(pages[1], tables[num_target:])
        target_cache, drafter_cache, prefilled = prefill(
            target, drafter, PagedCache(pages[0], tables[:num_target]), drafter_cache, chunk, blocks
        )
        left = target_cache.pages, () if drafter_cache is None else drafter_cache.pages
        return left, Prefilled(_counted_as_long(prefilled.logits, chunk.num_rows[0]), prefilled.aux_hidden)

    return jax.jit(_chunk, donate_argnums=1)


def _choose_first(logits: jax.Array, length: jax.Array, params: SlotParams) -> tuple[jax.Array, jax.Array]:
    """Choose the token after a prompt; return (token [1, 1], its log-probabilities, packed [1, 1, W])."""
    keys = draw_keys(params.sampling, length[:, None])
    logits, no_drafts = logits[:, None], jnp.zeros((1, 0), jnp.int32)

    def plainly() -> tuple[jax.Array, jax.Array]:
        width = LogProbs.packed_width(logits.shape[-1])
        return choose(logits, params.sampling, keys), jnp.zeros((1, 1, width), jnp.int32)

    def fully() -> tuple[jax.Array, jax.Array]:
        stops, masks = jnp.asarray(params.stop_token_ids), jnp.asarray(params.masks)
        token = choose(adjust(logits, no_drafts, params.adjustments, stops, masks), params.sampling, keys)
        return token, log_probs(logits, token).pack()

    chosen: tuple[jax.Array, jax.Array] = jax.lax.cond(params.full[0], fully, plainly)
    return chosen


@_once
def first_token_program() -> Any:
    def _choose(logits: jax.Array, length: jax.Array, known: jax.Array, params: SlotParams) -> jax.Array:
        _traces["first token"] += 1
        token, packed = _choose_first(logits, length, params)
        token = jnp.where(known >= 0, known, token[:, 0])
        return _counted_as_long(jnp.concatenate([token[:, None], packed[:, 0]], axis=1), length[0])

    return jax.jit(_choose)


@_once
def admit_program() -> Any:
    def _let_in(
        state: DecodeState,
        aux_hidden: jax.Array,
        rows: jax.Array,
        slots: jax.Array,
        length: jax.Array,
        first: jax.Array,
        params: SlotParams,
    ) -> DecodeState:
        _traces["admit"] += 1
        after = admit(state, slots, length, first[:, 0], aux_hidden[rows], params)
        return dataclasses.replace(after, length=_counted_as_long(after.length, slots[0]))

    return jax.jit(_let_in, donate_argnums=0)


@_once
def learn_program(model: Any) -> Any:
    def _read_tokens(
        model_leaves: list[jax.Array], state: Any, token_ids: jax.Array, count: jax.Array, slot: jax.Array
    ) -> Any:
        _traces["learn"] += 1
        drafter = jax.tree.unflatten(model, model_leaves)
        assert isinstance(drafter, DrafterWithoutCaches)

        def row(leaf: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(leaf, slot, 1, axis=0)

        place = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
        positions = jnp.where(place < count, place, 0) - 1  # the row at position p holds token p + 1
        no_aux = jnp.zeros((*token_ids.shape, 0), jnp.float32)
        after = drafter.absorb(drafter.restart(jax.tree.map(row, state)), token_ids, no_aux, positions)

        def put_row(into: jax.Array, leaf: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(into, leaf, slot, axis=0)

        return jax.tree.map(put_row, state, after)

    return jax.jit(_read_tokens, donate_argnums=1)


@_once
def steps_program(models: Any, kind: StepKind, shape: Shape, num_target: int, launches_alone: bool) -> Any:
    def _run(
        model_leaves: list[jax.Array], state: DecodeState, plan: jax.Array, costs: jax.Array, limit: jax.Array
    ) -> tuple[DecodeState, jax.Array]:
        _traces["steps"] += 1
        target, drafter = jax.tree.unflatten(models, model_leaves)
        batch, widths = read_step_plan(plan, shape.widths, num_target)
        rows = take(state, batch, kind.input_rows, kind.full)
        after, outputs = steps(
            target, drafter, rows, widths, kind.costs(costs, plan.shape[0]), limit, kind, shape.most_steps
        )
        return put(state, batch, after), _counted_as_long(outputs, outputs[0, 0, 0])

    # the name that peagle.measure.profile looks for
    _run.__name__ = f"_steps_{kind.num_drafts}" + ("_full" if kind.full else "_sampled" if kind.sampled else "")
    return jax.jit(_run, donate_argnums=1, compiler_options=NO_GRAPHS if launches_alone else None)


@_once
def propose_program(model: Any, kind: StepKind, shape: Shape, num_target: int) -> Any:
    def _propose_drafts(
        model_leaves: list[jax.Array],
        drafter_states: tuple[Any, Any],
        small: DecodeState,
        plan: jax.Array,
        costs: jax.Array,
    ) -> tuple[tuple[Any, Any], Proposed]:
        _traces["propose"] += 1
        state = dataclasses.replace(small, drafter_state=drafter_states[0], second_state=drafter_states[1])
        batch, widths = read_step_plan(plan, shape.widths, num_target)
        rows = take(state, batch, kind.input_rows, adjusts=False)
        drafter = jax.tree.unflatten(model, model_leaves)
        after, proposed = propose(drafter, rows, widths, kind.costs(costs, plan.shape[0]), kind, may_skip=False)
        left = put(state, batch, dataclasses.replace(after, drafter_input=None))
        proposed = dataclasses.replace(proposed, widths=_counted_as_long(proposed.widths, plan[0, 0]))
        return (left.drafter_state, left.second_state), proposed

    return jax.jit(_propose_drafts, donate_argnums=1)


@_once
def verify_program(model: Any, shape: Shape, num_target: int) -> Any:
    def _verify_drafts(
        model_leaves: list[jax.Array], pages: tuple[Pages, ...], small: DecodeState, plan: jax.Array, proposed: Proposed
    ) -> tuple[tuple[Pages, ...], VerifyOutput]:
        _traces["verify"] += 1
        batch, _ = read_step_plan(plan, shape.widths, num_target)
        rows = take(dataclasses.replace(small, target_cache=PagedCache(pages, ())), batch, 0, adjusts=False)
        after, verified = verify(jax.tree.unflatten(model, model_leaves), rows, proposed)
        aux_hidden = _counted_as_long(verified.aux_hidden, plan[0, 0])
        return after.target_cache.pages, dataclasses.replace(verified, aux_hidden=aux_hidden)

    return jax.jit(_verify_drafts, donate_argnums=1)


@_once
def accept_and_commit_program(kind: StepKind, shape: Shape, num_target: int) -> Any:
    def _accept_drafts(
        small: DecodeState,
        plan: jax.Array,
        proposed: Proposed,
        verified: VerifyOutput,
        costs: jax.Array,
        masks: jax.Array,
        counts: jax.Array,
    ) -> tuple[DecodeState, jax.Array]:
        _traces["accept"] += 1
        batch, _ = read_step_plan(plan, shape.widths, num_target)
        rows = take(small, batch, kind.input_rows, adjusts=True)
        proposed = dataclasses.replace(proposed, widths=jnp.minimum(proposed.widths, counts))
        after, output = accept_and_commit(rows, proposed, verified, kind.costs(costs, plan.shape[0]), kind, masks)
        return put(small, batch, after), _counted_as_long(output.pack()[None], plan[0, 0])

    return jax.jit(_accept_drafts, donate_argnums=0)


@_once
def absorb_program(model: Any, shape: Shape, num_target: int) -> Any:
    def _catch_up(model_leaves: list[jax.Array], state: DecodeState, plan: jax.Array) -> DecodeState:
        _traces["absorb"] += 1
        batch, _ = read_step_plan(plan, shape.widths, num_target)
        after = absorb(jax.tree.unflatten(model, model_leaves), take(state, batch, None, adjusts=False))
        left = put(state, batch, after)
        return dataclasses.replace(left, length=_counted_as_long(left.length, plan[0, 0]))

    return jax.jit(_catch_up, donate_argnums=1)


@jax.jit
def take_row(logits: jax.Array, row: jax.Array) -> jax.Array:
    return _counted_as_long(jax.lax.dynamic_slice_in_dim(logits, row, 1), row)


@jax.jit
def join_rows(rows: list[jax.Array], zero: jax.Array) -> jax.Array:
    return _counted_as_long(jnp.concatenate(rows), zero)


gather_pages: Callable[[jax.Array, np.ndarray], jax.Array] = jax.jit(lambda pages, numbers: pages[numbers])


@functools.partial(jax.jit, donate_argnums=0)
def write_pages(pages: Pages, numbers: jax.Array, keys: jax.Array, values: jax.Array) -> Pages:
    return Pages(pages.key.at[numbers].set(keys), pages.value.at[numbers].set(values))


def _counted_as_long(result: jax.Array, count: jax.Array) -> jax.Array:
    """Return `result`, and make XLA on CPU dispatch the program asynchronously.

    XLA on CPU runs a program inside the dispatching call if it counts fewer than 1000 operations (cheap_computation_ in
    its PjRt CPU client), and it counts none in compiled kernels. So this adds some, in a branch that is never taken,
    because `count` is not negative.
    """
    if not native.available():
        return result

    def never(result: jax.Array) -> jax.Array:
        return result + jnp.sum(jnp.arange(4000, dtype=jnp.int32) * count).astype(result.dtype)

    return jax.lax.cond(count < 0, never, lambda result: result, result)
