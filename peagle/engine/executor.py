"""Run the engine's verbs on the device: prefill, admit, steps, absorb, and the three parts of a cut step.

The executor is the engine's only door to the device. It holds the state and the pages. Verbs take host values and
return what the host will read, so several processes can run the same verbs (peagle.engine.remote).

One array of integers, the plan, carries the slots and tables of a pass. No program depends on a request: batches and
chunks come in a few sizes, and steps in greedy, sampled and full variants. The state is donated.
"""

import collections
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from peagle.engine.adjust import adjust
from peagle.engine.beside import alone, second_of
from peagle.engine.prefill import ChunkRows, Prefilled, prefill
from peagle.engine.propose import absorb, propose
from peagle.engine.sampling import LogProbs, choose, draw_keys, log_probs
from peagle.engine.state import Batch, DecodeState, SlotParams, admit, init_state, put, take
from peagle.engine.step import accept_and_commit, steps, verify
from peagle.engine.step_kinds import Proposed, StepKind
from peagle.engine.widths import Counts, Learned
from peagle.ops import interrupt, native
from peagle.ops.attention import PagedCache, Pages
from peagle.ops.messages import VerifyOutput
from peagle.ops.row_blocks import RowBlocks
from peagle.protocols import Drafter, Explains, Target

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


class Executor:
    """The programs of one target, drafter and shape, with their state.

    Executors of equal models and shapes share compiled programs.
    """

    def __init__(self, target: Target, drafter: Drafter | None, shape: Shape) -> None:
        self.target, self.drafter, self.shape = target, drafter if shape.adaptive else alone(drafter), shape
        self._models, self._tree = jax.tree.flatten((target, self.drafter))
        self._plain_models, self._plain_tree = jax.tree.flatten((target, None))
        self._target_alone, self._drafter_alone = jax.tree.flatten(target), jax.tree.flatten(self.drafter)
        self.launches_alone = False  # whether steps launch operations one by one: `Engine.launching_alone`
        self._state: DecodeState | None = None
        self._prefilled: Prefilled | None = None
        self._proposed: Proposed | None = None
        self._verified: VerifyOutput | None = None
        self._num_groups = len(target.cache_groups)

    @property
    def state(self) -> DecodeState:
        """The state of all slots; `start` makes it."""
        assert self._state is not None
        return self._state

    @property
    def started(self) -> bool:
        return self._state is not None

    @functools.cached_property
    def shapes(self) -> DecodeState:
        shapes: DecodeState = jax.eval_shape(_init(self._tree, self.shape), self._models)
        return shapes

    def start(self) -> None:
        self._state = _init(self._tree, self.shape)(self._models)

    def prefill(self, plan: np.ndarray, drafts: bool) -> jax.Array:
        """Compute a chunk (`chunk_plan`); return an array to wait for. drafts: with the drafter."""
        state, drafter = self.state, self.drafter
        absorbs = drafts and drafter is not None and bool(drafter.cache_groups)
        models, tree = (self._models, self._tree) if absorbs else (self._plain_models, self._plain_tree)
        pages = state.target_cache.pages, state.drafter_state.pages if absorbs else ()
        program = _prefill(tree, self._num_groups, self.shape.widths, self.shape.blocks)
        (target_pages, drafter_pages), self._prefilled = program(models, pages, plan)
        drafter_state = PagedCache(drafter_pages, ()) if absorbs else state.drafter_state
        target_cache = PagedCache(target_pages, ())
        self._state = dataclasses.replace(state, target_cache=target_cache, drafter_state=drafter_state)
        return self._prefilled.logits

    def admit(
        self,
        rows: Sequence[int],
        slots: np.ndarray,
        length: np.ndarray,
        token_ids: np.ndarray,
        params: Sequence[SlotParams],
    ) -> jax.Array:
        """Admit requests of the last chunk to their slots; return their first tokens, packed [n, W].

        rows: their entries of the chunk, one or more; params: of each. Entries without a slot are dropped. token_ids:
        the next token if it is known; negative: choose it by the request's own parameters. Tokens are packed with their
        log-probabilities; their copy to the host is started.
        """
        assert self._prefilled is not None
        size = len(slots)
        index = np.zeros((size,), np.int32)
        index[: len(rows)] = rows
        # one at a time, so that all passes, and engines of one vocabulary, share the larger program, which chooses
        chosen = [
            _first_token()(_row(self._prefilled.logits, row), length[[place]], token_ids[[place]], params[place])
            for place, row in enumerate(rows)
        ]
        first = chosen[0] if size == 1 else _join_rows([*chosen, *chosen[:1] * (size - len(chosen))], np.int32(0))
        small, kept = _split(self.state)
        stacked = SlotParams.stack(params, size)
        self._state = _join(_admit()(small, self._prefilled.aux_hidden, index, slots, length, first, stacked), kept)
        first.copy_to_host_async()
        return first

    def learn(self, slot: int, token_ids: Sequence[int]) -> None:
        """Let the cacheless drafter read the tokens of a slot's request, the pending one excluded."""
        padded = np.zeros((1, self.shape.capacity), np.int32)
        padded[0, : len(token_ids)] = token_ids
        second, state = second_of(self.drafter), self.state
        models, tree = self._drafter_alone if second is None else jax.tree.flatten(second)
        before = state.drafter_state if second is None else state.second_state
        after = _learn(tree)(models, before, padded, np.int32(len(token_ids)), np.int32(slot))
        changed = {"drafter_state" if second is None else "second_state": after}
        self._state = dataclasses.replace(state, **changed)

    def steps(self, plan: np.ndarray, costs: np.ndarray, count: int, kind: StepKind) -> jax.Array:
        """Dispatch `count` steps of the slots of a plan (`step_plan`); return their packed outputs.

        costs: packed (peagle.engine.widths.StepCosts) for adaptive steps, empty for others. Starts the copy of the
        outputs to the host and waits for nothing.
        """
        program, operands = self.prepared_steps(self.state, plan, costs, count, kind)
        after, outputs = program(*operands)
        outputs.copy_to_host_async()
        self._state = self._merged(after, kind)
        return outputs  # type: ignore[no-any-return]

    def compile_steps(self, passes: Sequence[tuple[np.ndarray, StepKind]]) -> None:
        """Compile the programs of steps, by (plan, kind), in threads, before their first dispatch.

        JAX traces one after the other; XLA, which takes longer, compiles them side by side.
        """

        def one(plan: np.ndarray, kind: StepKind) -> None:
            interrupt.check()
            program, operands = self.prepared_steps(self.state, plan, kind.no_costs(len(plan)), 1, kind)
            program.lower(*operands).compile()

        with ThreadPoolExecutor() as pool:
            list(pool.map(one, *zip(*passes, strict=True)))

    def _merged(self, after: DecodeState, kind: StepKind) -> DecodeState:
        """Put back the leaves that the steps of a kind did not take."""
        state = self.state
        if kind.num_drafts == 0:
            after = dataclasses.replace(
                after, drafter_state=state.drafter_state, second_state=state.second_state, learned=state.learned
            )
        if kind.lean:
            after = dataclasses.replace(after, drafter_input=state.drafter_input)
        return after if kind.full else dataclasses.replace(after, adjustments=state.adjustments)

    def prepared_steps(
        self, state: DecodeState, plan: np.ndarray, costs: np.ndarray, count: int, kind: StepKind
    ) -> tuple[Any, list[Any]]:
        """Return (the program of a dispatch of steps, its operands).

        Steps take only the leaves that they need, because every leaf costs host time.
        """
        models, tree = self._models, self._tree
        if kind.num_drafts == 0:
            models, tree = self._plain_models, self._plain_tree
            state = dataclasses.replace(state, drafter_state=None, second_state=None, learned=None)
        if kind.lean:
            state = dataclasses.replace(state, drafter_input=None)
        if not kind.full:
            state = dataclasses.replace(state, adjustments=None)
        program = _steps(tree, kind, self.shape, self._num_groups, self.launches_alone)
        return program, [models, state, plan, costs, np.int32(count)]

    def absorb(self, plan: np.ndarray) -> None:
        """Let the drafter absorb the input of a plan's slots, except each last row."""
        models, tree = self._drafter_alone
        state = dataclasses.replace(self.state, target_cache=PagedCache((), ()), adjustments=None)
        after = _absorb(tree, self.shape, self._num_groups)(models, state, plan)
        self._state = dataclasses.replace(
            after, target_cache=self.state.target_cache, adjustments=self.state.adjustments
        )

    def propose(self, plan: np.ndarray, costs: np.ndarray, kind: StepKind) -> jax.Array:
        """Dispatch the first part of a cut step; return the drafts, whose copy to the host is started."""
        models, tree = self._drafter_alone
        state = dataclasses.replace(self.state, target_cache=PagedCache((), ()), adjustments=None)
        program = _propose(tree, kind, self.shape, self._num_groups)
        (drafter_state, second_state), self._proposed = program(
            models, (state.drafter_state, state.second_state), _without_drafter(state), plan, costs
        )
        self._state = dataclasses.replace(self.state, drafter_state=drafter_state, second_state=second_state)
        self._proposed.draft_token_ids.copy_to_host_async()
        return self._proposed.draft_token_ids

    def verify(self, plan: np.ndarray) -> jax.Array:
        """Dispatch the second part; return an array to wait for."""
        models, tree = self._target_alone
        small = _without_drafter(dataclasses.replace(self.state, target_cache=PagedCache((), ()), adjustments=None))
        program = _verify(tree, self.shape, self._num_groups)
        pages, self._verified = program(models, self.state.target_cache.pages, small, plan, self._proposed)
        self._state = dataclasses.replace(self.state, target_cache=PagedCache(pages, ()))
        return self._verified.logits

    def accept_and_commit(
        self, plan: np.ndarray, costs: np.ndarray, masks: np.ndarray, counts: np.ndarray, kind: StepKind
    ) -> jax.Array:
        """Dispatch the last part; return its packed output [1, B, W].

        masks: uint32 [B, K+1, W] (peagle.engine.adjust). counts: int32 [B], how many drafts of a slot may count.
        """
        small, kept = _split(self.state)
        program = _accept_and_commit(kind, self.shape, self._num_groups)
        after, outputs = program(small, plan, self._proposed, self._verified, costs, masks, counts)
        outputs.copy_to_host_async()
        self._state = _join(after, kept)
        return outputs  # type: ignore[no-any-return]

    def relearn(self, blank: bool = False) -> None:
        """Forget what steps have learned. blank: also the recorded counts of the shape."""
        counts = None if blank else self.shape.counts
        learned = Learned.start(1 if second_of(self.drafter) is None else 2, self.shape.num_drafts, counts)
        self._state = dataclasses.replace(self.state, learned=learned)

    def counts(self) -> Counts:
        """Read the counts of the first source since `relearn(blank=True)`; waits for all dispatches."""
        assert self.state.learned is not None
        begun = Learned.start(1, self.shape.num_drafts)
        pairs = ((self.state.learned.tried, begun.tried), (self.state.learned.accepted, begun.accepted))
        tried, accepted = (np.maximum(np.asarray(now)[0] - np.asarray(then)[0], 0.0) for now, then in pairs)
        both = np.stack([tried, np.minimum(accepted, tried)], axis=-1).round(2).tolist()
        return tuple(tuple(tuple((t, a) for t, a in bins) for bins in kind) for kind in both)

    def read_pages(self, layer: int, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Copy pages of a layer to the host: (keys, values). Layers: the target's, then the drafter's."""
        pages = self._pools[layer]
        index = np.asarray(numbers, np.int32)
        if _on_host(pages.key):
            return np.asarray(pages.key)[index], np.asarray(pages.value)[index]
        return tuple(np.asarray(_gather(leaf, index)) for leaf in (pages.key, pages.value))  # type: ignore[return-value]

    def write_pages(self, layer: int, numbers: Sequence[int], keys: np.ndarray, values: np.ndarray) -> None:
        pools = list(self._pools)
        pools[layer] = _write(pools[layer], np.asarray(numbers, np.int32), keys, values)
        split = len(self.state.target_cache.pages)
        drafter_state = self.state.drafter_state
        if isinstance(drafter_state, PagedCache):
            drafter_state = PagedCache(tuple(pools[split:]), ())
        self._state = dataclasses.replace(
            self.state, target_cache=PagedCache(tuple(pools[:split]), ()), drafter_state=drafter_state
        )

    @property
    def _pools(self) -> tuple[Pages, ...]:
        drafter_state = self.state.drafter_state
        drafter_pages = drafter_state.pages if isinstance(drafter_state, PagedCache) else ()
        return (*self.state.target_cache.pages, *drafter_pages)

    def first_not_finite(self, part: Literal["target", "drafter"], token_ids: Sequence[int]) -> str | None:
        """Name a model's first output that is not finite (peagle.protocols.Explains)."""
        model = self.target if part == "target" else self.drafter
        assert isinstance(model, Explains)
        return model.first_not_finite(token_ids)

    def settle(self) -> None:
        if self._state is not None:
            jax.block_until_ready((self._state.done, self._state.target_cache))


# --- plans ------------------------------------------------------------------------------------------------------------


def step_plan(slots: Sequence[int], widths: Sequence[int], tables: np.ndarray, absent: int) -> np.ndarray:
    """Write the plan of a pass over slots: rows of (slot, width, tables).

    absent: the slot number of entries after `slots`. tables: [B, M], the tables of all groups side by side.
    """
    plan = np.zeros((len(tables), 2 + tables.shape[1]), np.int32)
    plan[:, 0] = absent
    plan[: len(slots), 0], plan[: len(widths), 1] = slots, widths
    plan[:, 2:] = tables
    return plan


def chunk_plan(
    token_ids: Sequence[Sequence[int]], begin: Sequence[int], known: Sequence[int], length: int, tables: np.ndarray
) -> np.ndarray:
    """Write the plan of a chunk of prompts: rows of (begin, count, known, tokens, tables)."""
    plan = np.zeros((len(tables), 3 + length + tables.shape[1]), np.int32)
    for row, tokens in enumerate(token_ids):
        plan[row, :3] = begin[row], len(tokens), known[row]
        plan[row, 3 : 3 + len(tokens)] = tokens
    plan[:, 3 + length :] = tables
    return plan


def _read_step_plan(plan: jax.Array, widths: tuple[int, ...], num_target: int) -> tuple[Batch, jax.Array]:
    tables = _cut_tables(plan[:, 2:], widths)
    return Batch(plan[:, 0], tables[:num_target], tables[num_target:]), plan[:, 1]


def _cut_tables(columns: jax.Array, widths: tuple[int, ...]) -> tuple[jax.Array, ...]:
    ends = np.cumsum([0, *widths]).tolist()
    return tuple(columns[:, begin:end] for begin, end in itertools.pairwise(ends))


# --- parts of the state -----------------------------------------------------------------------------------------------


def _split(state: DecodeState) -> tuple[DecodeState, tuple[PagedCache, Any, Any]]:
    """Return (the state without pages and drafter states, these pages and states)."""
    small = _without_drafter(dataclasses.replace(state, target_cache=PagedCache((), ())))
    return small, (state.target_cache, state.drafter_state, state.second_state)


def _join(small: DecodeState, kept: tuple[PagedCache, Any, Any]) -> DecodeState:
    return dataclasses.replace(small, target_cache=kept[0], drafter_state=kept[1], second_state=kept[2])


def _without_drafter(state: DecodeState) -> DecodeState:
    return dataclasses.replace(state, drafter_state=None, second_state=None)


def _on_host(leaf: jax.Array) -> bool:
    """Whether NumPy reads an array in place: it is whole and in host memory."""
    devices = leaf.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


# --- programs ---------------------------------------------------------------------------------------------------------


def _once(make: Make) -> Make:
    """Cache what `make` returns, as functools.cache does, but call it once even if threads need it at once."""
    kept, lock = functools.cache(make), threading.Lock()

    @functools.wraps(make)
    def cached(*arguments: Any) -> Any:
        with lock:
            return kept(*arguments)

    return cast(Make, cached)


@_once
def _init(models: Any, shape: Shape) -> Any:
    def _make(model_leaves: list[jax.Array]) -> DecodeState:
        target, drafter = jax.tree.unflatten(models, model_leaves)
        split = len(target.cache_groups)
        pages = shape.num_pages[:split], shape.num_pages[split:]
        sizes = shape.slots, shape.capacity, shape.num_drafts
        return init_state(target, drafter, *sizes, *pages, adaptive=shape.adaptive, counts=shape.counts)

    return jax.jit(_make)


@_once
def _prefill(models: Any, num_target: int, widths: tuple[int, ...], blocks: RowBlocks | None) -> Any:
    def _chunk(
        model_leaves: list[jax.Array], pages: tuple[tuple[Pages, ...], tuple[Pages, ...]], plan: jax.Array
    ) -> tuple[tuple[tuple[Pages, ...], tuple[Pages, ...]], Prefilled]:
        _traces["chunk"] += 1
        target, drafter = jax.tree.unflatten(models, model_leaves)
        length = plan.shape[1] - sum(widths) - 3
        tables = _cut_tables(plan[:, 3 + length :], widths)
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
def _first_token() -> Any:
    def _choose(logits: jax.Array, length: jax.Array, known: jax.Array, params: SlotParams) -> jax.Array:
        _traces["first token"] += 1
        token, packed = _choose_first(logits, length, params)
        token = jnp.where(known >= 0, known, token[:, 0])
        return _counted_as_long(jnp.concatenate([token[:, None], packed[:, 0]], axis=1), length[0])

    return jax.jit(_choose)


@_once
def _admit() -> Any:
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
def _learn(model: Any) -> Any:
    def _read_tokens(
        model_leaves: list[jax.Array], state: Any, token_ids: jax.Array, count: jax.Array, slot: jax.Array
    ) -> Any:
        _traces["learn"] += 1
        drafter = jax.tree.unflatten(model, model_leaves)

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
def _steps(models: Any, kind: StepKind, shape: Shape, num_target: int, launches_alone: bool) -> Any:
    def _run(
        model_leaves: list[jax.Array], state: DecodeState, plan: jax.Array, costs: jax.Array, limit: jax.Array
    ) -> tuple[DecodeState, jax.Array]:
        _traces["steps"] += 1
        target, drafter = jax.tree.unflatten(models, model_leaves)
        batch, widths = _read_step_plan(plan, shape.widths, num_target)
        rows = take(state, batch, kind.input_rows, kind.full)
        after, outputs = steps(
            target, drafter, rows, widths, kind.costs(costs, plan.shape[0]), limit, kind, shape.most_steps
        )
        return put(state, batch, after), _counted_as_long(outputs, outputs[0, 0, 0])

    # the name that peagle.measure.profile looks for
    _run.__name__ = f"_steps_{kind.num_drafts}" + ("_full" if kind.full else "_sampled" if kind.sampled else "")
    return jax.jit(_run, donate_argnums=1, compiler_options=NO_GRAPHS if launches_alone else None)


@_once
def _propose(model: Any, kind: StepKind, shape: Shape, num_target: int) -> Any:
    def _propose_drafts(
        model_leaves: list[jax.Array],
        drafter_states: tuple[Any, Any],
        small: DecodeState,
        plan: jax.Array,
        costs: jax.Array,
    ) -> tuple[tuple[Any, Any], Proposed]:
        _traces["propose"] += 1
        state = dataclasses.replace(small, drafter_state=drafter_states[0], second_state=drafter_states[1])
        batch, widths = _read_step_plan(plan, shape.widths, num_target)
        rows = take(state, batch, kind.input_rows, adjusts=False)
        drafter = jax.tree.unflatten(model, model_leaves)
        after, proposed = propose(drafter, rows, widths, kind.costs(costs, plan.shape[0]), kind, may_skip=False)
        left = put(state, batch, dataclasses.replace(after, drafter_input=None))
        proposed = dataclasses.replace(proposed, widths=_counted_as_long(proposed.widths, plan[0, 0]))
        return (left.drafter_state, left.second_state), proposed

    return jax.jit(_propose_drafts, donate_argnums=1)


@_once
def _verify(model: Any, shape: Shape, num_target: int) -> Any:
    def _verify_drafts(
        model_leaves: list[jax.Array], pages: tuple[Pages, ...], small: DecodeState, plan: jax.Array, proposed: Proposed
    ) -> tuple[tuple[Pages, ...], VerifyOutput]:
        _traces["verify"] += 1
        batch, _ = _read_step_plan(plan, shape.widths, num_target)
        rows = take(dataclasses.replace(small, target_cache=PagedCache(pages, ())), batch, 0, adjusts=False)
        after, verified = verify(jax.tree.unflatten(model, model_leaves), rows, proposed)
        aux_hidden = _counted_as_long(verified.aux_hidden, plan[0, 0])
        return after.target_cache.pages, dataclasses.replace(verified, aux_hidden=aux_hidden)

    return jax.jit(_verify_drafts, donate_argnums=1)


@_once
def _accept_and_commit(kind: StepKind, shape: Shape, num_target: int) -> Any:
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
        batch, _ = _read_step_plan(plan, shape.widths, num_target)
        rows = take(small, batch, kind.input_rows, adjusts=True)
        proposed = dataclasses.replace(proposed, widths=jnp.minimum(proposed.widths, counts))
        after, output = accept_and_commit(rows, proposed, verified, kind.costs(costs, plan.shape[0]), kind, masks)
        return put(small, batch, after), _counted_as_long(output.pack()[None], plan[0, 0])

    return jax.jit(_accept_drafts, donate_argnums=0)


@_once
def _absorb(model: Any, shape: Shape, num_target: int) -> Any:
    def _catch_up(model_leaves: list[jax.Array], state: DecodeState, plan: jax.Array) -> DecodeState:
        _traces["absorb"] += 1
        batch, _ = _read_step_plan(plan, shape.widths, num_target)
        after = absorb(jax.tree.unflatten(model, model_leaves), take(state, batch, None, adjusts=False))
        left = put(state, batch, after)
        return dataclasses.replace(left, length=_counted_as_long(left.length, plan[0, 0]))

    return jax.jit(_catch_up, donate_argnums=1)


def _row(logits: jax.Array, row: int) -> jax.Array:
    """Take a row [1, V]; waits for nothing."""
    return logits if logits.shape[0] == 1 else _take_row(logits, np.int32(row))


@jax.jit
def _take_row(logits: jax.Array, row: jax.Array) -> jax.Array:
    return _counted_as_long(jax.lax.dynamic_slice_in_dim(logits, row, 1), row)


@jax.jit
def _join_rows(rows: list[jax.Array], zero: jax.Array) -> jax.Array:
    return _counted_as_long(jnp.concatenate(rows), zero)


_gather: Callable[[jax.Array, np.ndarray], jax.Array] = jax.jit(lambda pages, numbers: pages[numbers])


@functools.partial(jax.jit, donate_argnums=0)
def _write(pages: Pages, numbers: jax.Array, keys: jax.Array, values: jax.Array) -> Pages:
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
