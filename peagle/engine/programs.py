"""Compile and dispatch the engine's programs: prefill chunk, insertion, steps, `absorb`.

Every program takes lists of leaves: given the trees themselves, JAX would flatten them in Python at every dispatch,
which takes as long as a step of a small model. The state's and the lane's leaves are donated. No program depends on a
request's parameters, except that steps have greedy, sampled and full variants.
"""

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from peagle.engine import prefill
from peagle.engine.adjust import adjust
from peagle.engine.prefix_cache import BLOCK
from peagle.engine.sampling import TARGET, LogProbs, choose, log_probs, uniforms
from peagle.engine.state import DecodeState, Prefix, SlotParams, extract, init_state, insert
from peagle.engine.step import Proposed, StepKind, absorb, accept_and_commit, propose, steps, verify
from peagle.ops import native
from peagle.ops.kv_cache import KVCache
from peagle.ops.messages import VerifyOutput
from peagle.ops.row_blocks import RowBlocks
from peagle.protocols import Drafter, Explains, OverDevices, Target

NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1 << 30}  # CUDA graphs of so many operations
Make = TypeVar("Make", bound=Callable[..., Any])
_traces: collections.Counter[str] = collections.Counter()


def trace_counts() -> dict[str, int]:
    """Count the programs traced so far in this process, by name."""
    return dict(_traces)


class Programs:
    """The programs of one target, drafter and shape.

    Engines of equal models and shapes share compiled programs.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        slots: int,
        capacity: int,
        num_drafts: int,
        chunk: int,
        most: int,
        blocks: RowBlocks | None = None,
    ) -> None:
        """num_drafts: most drafts of a step. chunk: its tokens. most: most steps of a dispatch.

        blocks: a chunk is a whole prompt, in these blocks of rows.
        """
        self._target, self._drafter = target, drafter
        self._slots, self._capacity, self._num_drafts = slots, capacity, num_drafts
        self.chunk_length, self.most_steps, self._blocks = chunk, most, blocks
        self._models, self._tree = jax.tree.flatten((target, drafter))
        self._plain_models, self._plain_tree = jax.tree.flatten((target, None))
        self.launches_alone = False  # the operations of steps: `Engine.launching_alone`
        self._target_alone, self._drafter_alone = jax.tree.flatten(target), jax.tree.flatten(drafter)

    def shapes(self) -> tuple[DecodeState, Prefix]:
        """Return the shapes of the state and the lane."""
        found: tuple[DecodeState, Prefix] = jax.eval_shape(self._init, self._models)
        return found

    def init(self) -> tuple[DecodeState, Prefix]:
        """Make an empty state and an empty lane."""
        made: tuple[DecodeState, Prefix] = self._init(self._models)
        return made

    def init_lane(self) -> Prefix:
        """Make an empty lane alone."""
        made: Prefix = self._init_lane(self._models)
        return made

    @property
    def _init(self) -> Any:
        return _init(self._tree, self._slots, self._capacity, self._num_drafts, self._widest_write)

    @property
    def _init_lane(self) -> Any:
        return _init_lane(self._tree, self._capacity, self._widest_write)

    @property
    def _widest_write(self) -> int:
        """The most rows that are written to the lane before they attend."""
        return self.chunk_length if self._blocks is None else self._blocks.query_rows

    @property
    def kv_copies(self) -> int:
        """How often the target's caches hold each kv head (peagle.protocols.OverDevices)."""
        return self._target.kv_copies if isinstance(self._target, OverDevices) else 1

    @functools.cached_property
    def lane_shapes(self) -> Prefix:
        """The shapes of the lane."""
        found: Prefix = jax.eval_shape(self._init_lane, self._models)
        return found

    @functools.cached_property
    def kept_shapes(self) -> list[Any]:
        """The shapes of what a snapshot keeps, but for aux_hidden."""
        cut = functools.partial(prefill.cut_snapshot, chunk=self._widest_write)
        return list(jax.eval_shape(cut, self.lane_shapes)[0])

    def extend(
        self, lane: Prefix, begin: int, token_ids: Sequence[int], lean: bool = False, num_absorbed: int = 0
    ) -> tuple[Prefix, jax.Array]:
        """Prefill a chunk at positions begin..; return (the lane, the logits that follow).

        lean: without the drafter. num_absorbed: peagle.engine.prefill.extend.
        """
        padded = self._padded(token_ids)
        lane = dataclasses.replace(lane, length=np.asarray([begin], np.int32))  # type: ignore[arg-type]  # NumPy's, too
        models, model_tree, drafter_state = self._models, self._tree, lane.drafter_state
        if lean:
            models, model_tree = self._plain_models, self._plain_tree
            lane = dataclasses.replace(lane, drafter_state=None)
        leaves, tree = jax.tree.flatten(lane)
        program = _extend(model_tree, tree, self._blocks)
        counts = np.asarray([len(token_ids), num_absorbed], np.int32)
        after, logits = program(models, leaves, padded, counts)
        left: Prefix = jax.tree.unflatten(tree, after)
        return (dataclasses.replace(left, drafter_state=drafter_state) if lean else left), logits

    def _padded(self, token_ids: Sequence[int]) -> np.ndarray:
        padded = np.zeros((1, self.chunk_length), np.int32)
        padded[0, : len(token_ids)] = token_ids
        return padded

    def admit(
        self, state: DecodeState, lane: Prefix, logits: jax.Array, slot: int, params: SlotParams
    ) -> tuple[DecodeState, jax.Array]:
        """Insert the lane's prompt into a slot; return (the state, the first token).

        The token is packed with its log-probabilities, and its copy to the host is started. What chooses it depends on
        no shape of the engine: engines of one vocabulary share that program, which is the larger one.
        """
        first = self.first_token(lane, logits, params)
        return self._inserted(state, lane, first, slot, params)[0], first

    def first_token(self, lane: Prefix, logits: jax.Array, params: SlotParams) -> jax.Array:
        """Choose the token that follows the lane's prompt; return it as `admit` does."""
        param_leaves, params_tree = jax.tree.flatten(params)
        token: jax.Array = _first_token(params_tree)(logits, lane.length, param_leaves)
        token.copy_to_host_async()
        return token

    def resume(
        self, state: DecodeState, lane: Prefix, pending_token: int, slot: int, params: SlotParams
    ) -> tuple[DecodeState, jax.Array]:
        """Insert the lane's sequence into a slot, with the token that was emitted last; return (the state, that)."""
        return self._inserted(state, lane, np.asarray([pending_token], np.int32), slot, params)

    def _inserted(
        self, state: DecodeState, lane: Prefix, first: jax.Array | np.ndarray, slot: int, params: SlotParams
    ) -> tuple[DecodeState, jax.Array]:
        """Insert the lane's sequence and the token after it into a slot; return (the state, `first`).

        first: the token, and what is packed with it.
        """
        leaves, tree = jax.tree.flatten(state)
        lane_leaves, lane_tree = jax.tree.flatten(lane)
        param_leaves, params_tree = jax.tree.flatten(params)
        program = _insert(tree, lane_tree, params_tree)
        after, token = program(leaves, lane_leaves, first, np.int32(slot), param_leaves)
        return jax.tree.unflatten(tree, after), token

    def steps(
        self, state: DecodeState, widths: np.ndarray, cost: float, count: int, kind: StepKind
    ) -> tuple[DecodeState, jax.Array]:
        """Dispatch `count` steps; return (the state, their packed outputs).

        Starts the copy of the outputs to the host and waits for nothing.
        """
        program, operands, tree = self.prepared_steps(state, widths, cost, count, kind)
        after, outputs = program(*operands)
        outputs.copy_to_host_async()
        left = jax.tree.unflatten(tree, after)
        if kind.num_drafts == 0:
            left = dataclasses.replace(left, drafter_state=state.drafter_state)
        if kind.lean:
            left = dataclasses.replace(left, drafter_input=state.drafter_input)
        return left, outputs

    def prepared_steps(
        self, state: DecodeState, widths: np.ndarray, cost: float, count: int, kind: StepKind
    ) -> tuple[Any, list[Any], Any]:
        """Return (the program of a dispatch of steps, its operands, the tree of its state).

        Plain steps take no leaves of the drafter, since every leaf costs the host time.
        """
        models, model_tree = self._models, self._tree
        if kind.num_drafts == 0:
            models, model_tree = self._plain_models, self._plain_tree
            state = dataclasses.replace(state, drafter_state=None)
        if kind.lean:
            state = dataclasses.replace(state, drafter_input=None)
        leaves, tree = jax.tree.flatten(state)
        operands = [models, leaves, widths, np.float32(cost), np.int32(count)]
        return _steps(model_tree, tree, kind, self.most_steps, self.launches_alone), operands, tree

    def propose(self, state: DecodeState, widths: np.ndarray, kind: StepKind) -> tuple[DecodeState, Proposed]:
        """Dispatch the first part of a step that is cut; start the copy of the drafts to the host."""
        drafter, tree = jax.tree.flatten(state.drafter_state)
        others = dataclasses.replace(state, target_cache=None, drafter_state=None)
        leaves, others_tree = jax.tree.flatten(others)
        models, model_tree = self._drafter_alone
        after, proposed = _propose(model_tree, tree, others_tree, kind)(models, drafter, leaves, widths)
        proposed.draft_token_ids.copy_to_host_async()
        return dataclasses.replace(state, drafter_state=jax.tree.unflatten(tree, after)), proposed

    def verify(self, state: DecodeState, proposed: Proposed) -> tuple[DecodeState, VerifyOutput]:
        """Dispatch the second part."""
        cache, tree = jax.tree.flatten(state.target_cache)
        others = dataclasses.replace(state, target_cache=None, drafter_state=None, drafter_input=None)
        leaves, others_tree = jax.tree.flatten(others)
        models, model_tree = self._target_alone
        after, verified = _verify(model_tree, tree, others_tree)(models, cache, leaves, proposed)
        return dataclasses.replace(state, target_cache=jax.tree.unflatten(tree, after)), verified

    def accept_and_commit(
        self,
        state: DecodeState,
        proposed: Proposed,
        verified: VerifyOutput,
        cost: float,
        masks: np.ndarray,
        counts: np.ndarray,
        kind: StepKind,
    ) -> tuple[DecodeState, jax.Array]:
        """Dispatch the last part; return (the state, its packed output [1, B, W]).

        masks: uint32 [B, K+1, W] (peagle.engine.adjust). counts: int32 [B], how many drafts of a slot may count.
        """
        leaves, tree = jax.tree.flatten(dataclasses.replace(state, target_cache=None, drafter_state=None))
        program = _accept_and_commit(tree, kind)
        after, outputs = program(leaves, proposed, verified, np.float32(cost), masks, counts)
        outputs.copy_to_host_async()
        left: DecodeState = jax.tree.unflatten(tree, after)
        caches = {"target_cache": state.target_cache, "drafter_state": state.drafter_state}
        return dataclasses.replace(left, **caches), outputs

    def cut_block(self, lane: Prefix, start: int) -> list[KVCache]:
        """Copy a block of the lane (peagle.engine.prefill)."""
        leaves, tree = jax.tree.flatten(lane)
        block: list[KVCache] = _cut_block(tree)(leaves, np.int32(start))
        return block

    def cut_snapshot(self, lane: Prefix, length: int) -> prefill.Snapshot:
        """Copy the rest of what is valid at this length."""
        lane = dataclasses.replace(lane, length=np.asarray([length], np.int32))  # type: ignore[arg-type]
        leaves, tree = jax.tree.flatten(lane)
        snapshot: prefill.Snapshot = _cut_snapshot(tree, self._widest_write)(leaves)
        return snapshot

    def put_blocks(self, lane: Prefix, blocks: Iterable[list[KVCache]]) -> Prefix:
        """Load the lane with the blocks of its first positions."""
        leaves, tree = jax.tree.flatten(lane)
        for index, block in enumerate(blocks):
            leaves = _put_block(tree)(leaves, block, np.int32(index * BLOCK))
        after: Prefix = jax.tree.unflatten(tree, leaves)
        return after

    def put_snapshot(self, lane: Prefix, snapshot: prefill.Snapshot, length: int) -> Prefix:
        """Complete a lane whose blocks have been put by what else was cut at this length."""
        leaves, tree = jax.tree.flatten(lane)
        after: Prefix = jax.tree.unflatten(tree, _put_snapshot(tree)(leaves, snapshot, np.int32(length)))
        return after

    def relearn(self, lane: Prefix, token_ids: Sequence[int]) -> Prefix:
        """Let a drafter that reads no aux_hidden absorb the first tokens of a sequence."""
        leaves, tree = jax.tree.flatten(lane)
        for begin in range(0, len(token_ids), self.chunk_length):
            part = self._padded(token_ids[begin : begin + self.chunk_length])
            place = np.arange(begin, begin + self.chunk_length, dtype=np.int32)[None]
            positions = np.where(place < len(token_ids), place, -1)
            leaves = _relearn(self._tree, tree)(self._models, leaves, part, positions)
        after: Prefix = jax.tree.unflatten(tree, leaves)
        return after

    def extract(self, state: DecodeState, lane: Prefix, slot: int) -> Prefix:
        """Load the lane with the Prefix of a slot."""
        leaves, tree = jax.tree.flatten(state)
        lane_leaves, lane_tree = jax.tree.flatten(lane)
        after: Prefix = jax.tree.unflatten(lane_tree, _extract(tree, lane_tree)(leaves, lane_leaves, np.int32(slot)))
        return after

    def part_bytes(self) -> tuple[int, int | None]:
        """(bytes of a block, of a snapshot); None: no snapshots are needed."""
        _, lane = self.shapes()
        start = jax.ShapeDtypeStruct((), jnp.int32)
        parts = (
            jax.eval_shape(functools.partial(prefill.cut_block, size=BLOCK), lane, start),
            jax.eval_shape(functools.partial(prefill.cut_snapshot, chunk=self._widest_write), lane),
        )
        block, snapshot = (sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part)) for part in parts)
        return block, snapshot if prefill.needs_snapshots(lane) else None

    def first_not_finite(self, part: Literal["target", "drafter"], token_ids: Sequence[int]) -> str | None:
        """Name the first output of a model that is not finite (peagle.protocols.Explains)."""
        model = self._target if part == "target" else self._drafter
        assert isinstance(model, Explains)
        return model.first_not_finite(token_ids)

    def absorb(self, state: DecodeState) -> DecodeState:
        """Let the drafter absorb all of its input but the last row of each slot."""
        leaves, tree = jax.tree.flatten(state)
        after: DecodeState = jax.tree.unflatten(tree, _absorb(self._tree, tree)(self._models, leaves))
        return after

    def evict(self, state: DecodeState, slots: np.ndarray) -> DecodeState:
        """Freeze slots. slots: bool [B]."""
        return dataclasses.replace(state, done=_evict(state.done, slots))


def _once(make: Make) -> Make:
    """Keep what `make` returns, as functools.cache does, but make it once if threads need it at once."""
    kept, lock = functools.cache(make), threading.Lock()

    @functools.wraps(make)
    def made(*arguments: Any) -> Any:
        with lock:
            return kept(*arguments)

    return cast(Make, made)


@_once
def _init(models: Any, slots: int, capacity: int, num_drafts: int, widest_write: int) -> Any:
    def _make(model_leaves: list[jax.Array]) -> tuple[DecodeState, Prefix]:
        target, drafter = jax.tree.unflatten(models, model_leaves)
        state = init_state(target, drafter, slots, capacity, num_drafts)
        return state, prefill.empty_prefix(target, drafter, capacity, widest_write)

    return jax.jit(_make)


@_once
def _init_lane(models: Any, capacity: int, widest_write: int) -> Any:
    def _make_lane(model_leaves: list[jax.Array]) -> Prefix:
        target, drafter = jax.tree.unflatten(models, model_leaves)
        return prefill.empty_prefix(target, drafter, capacity, widest_write)

    return jax.jit(_make_lane)


@_once
def _extend(models: Any, lane: Any, blocks: RowBlocks | None) -> Any:
    def _chunk(
        model_leaves: list[jax.Array], lane_leaves: list[jax.Array], token_ids: jax.Array, counts: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        _traces["chunk"] += 1
        target, drafter = jax.tree.unflatten(models, model_leaves)
        operands = (drafter, jax.tree.unflatten(lane, lane_leaves), token_ids, counts[0])
        if blocks is None:
            after, logits = prefill.extend(target, *operands, counts[1])
        else:
            after, logits = prefill.extend_at_once(target, *operands, blocks)
        return jax.tree.leaves(after), _counted_as_long(logits, after.length[0])

    return jax.jit(_chunk, donate_argnums=1)


def _choose_first(logits: jax.Array, length: jax.Array, params: SlotParams) -> tuple[jax.Array, jax.Array]:
    """Choose the token that follows a prompt; return (it [1, 1], its log-probabilities, packed [1, 1, W])."""
    random = uniforms(params.sampling, length[:, None])[..., TARGET]
    no_drafts = jnp.zeros((1, 0), jnp.int32)

    def plainly() -> tuple[jax.Array, jax.Array]:
        width = LogProbs.packed_width(logits.shape[-1])
        return choose(logits, params.sampling, random), jnp.zeros((1, 1, width), jnp.int32)

    def fully() -> tuple[jax.Array, jax.Array]:
        stops, masks = jnp.asarray(params.stop_token_ids), jnp.asarray(params.masks)
        token = choose(adjust(logits, no_drafts, params.adjustments, stops, masks), params.sampling, random)
        return token, log_probs(logits, token).pack()

    found: tuple[jax.Array, jax.Array] = jax.lax.cond(params.full[0], fully, plainly)
    return found


@_once
def _first_token(params_tree: Any) -> Any:
    def _choose(logits: jax.Array, length: jax.Array, param_leaves: list[jax.Array]) -> jax.Array:
        _traces["first token"] += 1
        token, packed = _choose_first(logits, length, jax.tree.unflatten(params_tree, param_leaves))
        return _counted_as_long(jnp.concatenate([token[0], packed[0, 0]]), length[0])

    return jax.jit(_choose)


@_once
def _insert(state: Any, lane: Any, params_tree: Any) -> Any:
    def _insert_sequence(
        leaves: list[jax.Array],
        lane_leaves: list[jax.Array],
        first: jax.Array,
        slot: jax.Array,
        param_leaves: list[jax.Array],
    ) -> tuple[list[jax.Array], jax.Array]:
        _traces["insert"] += 1
        prefix, params = jax.tree.unflatten(lane, lane_leaves), jax.tree.unflatten(params_tree, param_leaves)
        after = insert(jax.tree.unflatten(state, leaves), prefix, first[:1], slot, params)
        return jax.tree.leaves(after), _counted_as_long(first, slot)  # the token may be negative: NO_TOKEN

    return jax.jit(_insert_sequence, donate_argnums=0)


@_once
def _steps(models: Any, state: Any, kind: StepKind, most: int, launches_alone: bool) -> Any:
    def _run(
        model_leaves: list[jax.Array],
        leaves: list[jax.Array],
        widths: jax.Array,
        cost: jax.Array,
        limit: jax.Array,
    ) -> tuple[list[jax.Array], jax.Array]:
        _traces["steps"] += 1
        target, drafter = jax.tree.unflatten(models, model_leaves)
        before = jax.tree.unflatten(state, leaves)
        after, outputs = steps(target, drafter, before, widths, cost, limit, kind, most)
        return jax.tree.leaves(after), _counted_as_long(outputs, outputs[0, 0, 0])

    # the profiler's name of it (peagle.measure.profile)
    _run.__name__ = f"_steps_{kind.num_drafts}" + ("_full" if kind.full else "_sampled" if kind.sampled else "")
    return jax.jit(_run, donate_argnums=1, compiler_options=NO_GRAPHS if launches_alone else None)


@_once
def _propose(model: Any, drafter_state: Any, others: Any, kind: StepKind) -> Any:
    def _propose_drafts(
        model_leaves: list[jax.Array], drafter: list[jax.Array], leaves: list[jax.Array], widths: jax.Array
    ) -> tuple[list[jax.Array], Proposed]:
        _traces["propose"] += 1
        state = dataclasses.replace(
            jax.tree.unflatten(others, leaves), drafter_state=jax.tree.unflatten(drafter_state, drafter)
        )
        after, proposed = propose(jax.tree.unflatten(model, model_leaves), state, widths, kind)
        widths = _counted_as_long(proposed.widths, state.length[0])
        return jax.tree.leaves(after.drafter_state), dataclasses.replace(proposed, widths=widths)

    return jax.jit(_propose_drafts, donate_argnums=1)


@_once
def _verify(model: Any, target_cache: Any, others: Any) -> Any:
    def _verify_drafts(
        model_leaves: list[jax.Array], cache: list[jax.Array], leaves: list[jax.Array], proposed: Proposed
    ) -> tuple[list[jax.Array], VerifyOutput]:
        _traces["verify"] += 1
        state = dataclasses.replace(
            jax.tree.unflatten(others, leaves), target_cache=jax.tree.unflatten(target_cache, cache)
        )
        after, verified = verify(jax.tree.unflatten(model, model_leaves), state, proposed)
        aux_hidden = _counted_as_long(verified.aux_hidden, state.length[0])
        return jax.tree.leaves(after.target_cache), dataclasses.replace(verified, aux_hidden=aux_hidden)

    return jax.jit(_verify_drafts, donate_argnums=1)


@_once
def _accept_and_commit(state: Any, kind: StepKind) -> Any:
    def _accept_drafts(
        leaves: list[jax.Array],
        proposed: Proposed,
        verified: VerifyOutput,
        cost: jax.Array,
        masks: jax.Array,
        counts: jax.Array,
    ) -> tuple[list[jax.Array], jax.Array]:
        _traces["accept and commit"] += 1
        before = jax.tree.unflatten(state, leaves)
        proposed = dataclasses.replace(proposed, widths=jnp.minimum(proposed.widths, counts))
        after, output = accept_and_commit(before, proposed, verified, cost, kind, masks)
        return jax.tree.leaves(after), _counted_as_long(output.pack()[None], before.length[0])

    return jax.jit(_accept_drafts, donate_argnums=0)


@_once
def _cut_block(lane: Any) -> Any:
    def _cut(leaves: list[jax.Array], start: jax.Array) -> list[KVCache]:
        _traces["cut block"] += 1
        block = prefill.cut_block(jax.tree.unflatten(lane, leaves), start, BLOCK)
        first = [dataclasses.replace(each, key=_counted_as_long(each.key, start)) for each in block[:1]]
        return [*first, *block[1:]]

    return jax.jit(_cut)


@_once
def _cut_snapshot(lane: Any, chunk: int) -> Any:
    def _cut_rest(leaves: list[jax.Array]) -> prefill.Snapshot:
        _traces["cut snapshot"] += 1
        prefix: Prefix = jax.tree.unflatten(lane, leaves)
        kept, aux_hidden = prefill.cut_snapshot(prefix, chunk)
        return kept, _counted_as_long(aux_hidden, prefix.length[0])

    return jax.jit(_cut_rest)


@_once
def _put_block(lane: Any) -> Any:
    def _put(leaves: list[jax.Array], block: list[KVCache], start: jax.Array) -> list[jax.Array]:
        _traces["put block"] += 1
        first, *others = jax.tree.leaves(prefill.put_block(jax.tree.unflatten(lane, leaves), block, start))
        return [_counted_as_long(first, start), *others]

    return jax.jit(_put, donate_argnums=0)


@_once
def _relearn(models: Any, lane: Any) -> Any:
    def _absorb_tokens(
        model_leaves: list[jax.Array], leaves: list[jax.Array], token_ids: jax.Array, positions: jax.Array
    ) -> list[jax.Array]:
        _traces["relearn"] += 1
        _, drafter = jax.tree.unflatten(models, model_leaves)
        after = prefill.relearn(drafter, jax.tree.unflatten(lane, leaves), token_ids, positions)
        return list(jax.tree.leaves(after))

    return jax.jit(_absorb_tokens, donate_argnums=1)


@_once
def _put_snapshot(lane: Any) -> Any:
    def _put_rest(leaves: list[jax.Array], snapshot: prefill.Snapshot, length: jax.Array) -> list[jax.Array]:
        _traces["put snapshot"] += 1
        after = prefill.put_snapshot(jax.tree.unflatten(lane, leaves), snapshot, length)
        first, *others = jax.tree.leaves(after)
        return [_counted_as_long(first, length), *others]

    return jax.jit(_put_rest, donate_argnums=0)


@_once
def _extract(state: Any, lane: Any) -> Any:
    def _take(leaves: list[jax.Array], lane_leaves: list[jax.Array], slot: jax.Array) -> list[jax.Array]:
        _traces["extract"] += 1
        after = extract(jax.tree.unflatten(state, leaves), jax.tree.unflatten(lane, lane_leaves), slot)
        first, *others = jax.tree.leaves(after)
        return [_counted_as_long(first, slot), *others]

    return jax.jit(_take, donate_argnums=1)


@_once
def _absorb(models: Any, state: Any) -> Any:
    def _catch_up(model_leaves: list[jax.Array], leaves: list[jax.Array]) -> list[jax.Array]:
        _traces["absorb"] += 1
        _, drafter = jax.tree.unflatten(models, model_leaves)
        after = absorb(drafter, jax.tree.unflatten(state, leaves))
        length, *others = jax.tree.leaves(after)
        return [_counted_as_long(length, length[0]), *others]

    return jax.jit(_catch_up, donate_argnums=1)


_evict: Callable[[jax.Array, np.ndarray], jax.Array] = jax.jit(jnp.logical_or)


def _counted_as_long(result: jax.Array, count: jax.Array) -> jax.Array:
    """Return `result`, and make XLA on CPU dispatch the program asynchronously.

    `count` must not be negative.

    XLA on CPU runs a program inside the dispatching call if it counts fewer than 1000 operations (cheap_computation_ in
    its PjRt CPU client), and it counts none in compiled kernels. So this adds some, in a branch that is never taken.
    """
    if not native.available():
        return result

    def never(result: jax.Array) -> jax.Array:
        return result + jnp.sum(jnp.arange(4000, dtype=jnp.int32) * count).astype(result.dtype)

    return jax.lax.cond(count < 0, never, lambda result: result, result)
