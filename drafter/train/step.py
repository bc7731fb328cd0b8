"""One training step as one program over all devices, and the losses of the same rows without an update.

    rows of a step ──► each device computes its rows in turn, and each row's parts in turn
                       ──► sum gradients over parts, rows and devices ──► one update

The target runs inside the step and computes aux_hidden and labels, or both come from the data.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from drafter.config import DrafterConfig
from drafter.params import DrafterParams
from drafter.train.cod import Partition
from drafter.train.loss import Labels, Sums, TrainingRows, chain_loss, labels_of_best, labels_of_logits
from drafter.train.optimizer import optimizer
from drafter.train.recipe import Recipe
from drafter.train.row_batches import RowBatch

ROWS = "rows"  # the mesh axis


@runtime_checkable
class AnyTeacher(Protocol):
    """A target as a pytree: computes (logits [B, T, V], aux_hidden [B, T, A]) of packed rows (target/teacher.py)."""

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> tuple[jax.Array, jax.Array]: ...


class FrozenWeights(NamedTuple):
    """A DFlash drafter's embedding and head: the target's, which no step changes."""

    embedding: jax.Array
    lm_head: jax.Array

    def within(self, params: DrafterParams) -> DrafterParams:
        return dataclasses.replace(params, embedding=self.embedding, lm_head=self.lm_head)


@flax.struct.dataclass
class Fixed:
    """What no step changes.

    teacher: None if the data holds what it computes. frozen: of a DFlash drafter.
    """

    draft_to_target: jax.Array | None = None
    teacher: AnyTeacher | None = None
    frozen: FrozenWeights | None = None

    @classmethod
    def of(cls, initial: DrafterParams, config: DrafterConfig, teacher: AnyTeacher | None) -> "Fixed":
        """Take what no step changes from a drafter's first parameters."""
        frozen = None
        if config.kind == "DFlash":
            assert isinstance(initial.lm_head, jax.Array)
            frozen = FrozenWeights(initial.embedding, initial.lm_head)
        return cls(initial.draft_to_target, teacher, frozen)


@flax.struct.dataclass
class State:
    params: DrafterParams  # float32, without draft_to_target and frozen weights
    optimizer: Any


@flax.struct.dataclass
class Record:
    """A step's results: sums over its rows, and the norm of its gradient."""

    sums: Sums
    gradient_norm: jax.Array


class _Part(NamedTuple):
    """A part of a row: its anchors at depth 0, and its room for chains by depth."""

    start: int
    end: int
    counts: tuple[int, ...]


def gradients_of(
    params: DrafterParams,
    config: DrafterConfig,
    recipe: Recipe,
    fixed: Fixed,
    batch: RowBatch,
    with_gradient: bool = True,
) -> tuple[Sums, Any]:
    """Compute (sums, gradient of the summed loss) of a batch, part after part; without a gradient, (sums, ()).

    If every layer has a window, a part reads only the positions that its outputs depend on, and a part without a
    trained token is skipped.
    """
    rows = _taught(fixed.teacher, batch)
    draft_to_target, partition, dtype = fixed.draft_to_target, Partition.of(recipe), jnp.dtype(recipe.compute_dtype)

    def loss_of(
        trained: DrafterParams,
        rows: TrainingRows,
        labels: Labels,
        anchors: jax.Array,
        last_depth: jax.Array,
        part: _Part,
    ) -> tuple[jax.Array, Sums]:
        whole = trained if fixed.frozen is None else fixed.frozen.within(trained)
        drafter = jax.tree.map(lambda leaf: leaf.astype(dtype), whole).replace(draft_to_target=draft_to_target)
        chains, span = (anchors, last_depth, part.counts), (part.start, part.end)
        sums = chain_loss(drafter, config, recipe.loss, rows, labels, *chains, span, recipe.draft_decay)
        return sums.loss, sums

    def only_sums(*arguments: Any) -> tuple[tuple[()], Sums]:
        return (), loss_of(*arguments)[1]

    gradient_of = jax.grad(loss_of, has_aux=True) if with_gradient else only_sums
    if config.receptive_field is not None and len(recipe.room) > 1:
        return _part_by_part(
            lambda rows, *part: gradient_of(params, rows, _labels(config, draft_to_target, rows.target), *part),
            _nothing(recipe, params if with_gradient else ()),
            config.receptive_field + 1,  # a part's first chain begins at the row before it
            recipe,
            rows,
            (jnp.stack(batch.anchors), jnp.stack(batch.last_depth)),
        )
    labels = _labels(config, draft_to_target, rows.target)
    parts = [_Part(*part) for part in zip(partition.starts, partition.ends, recipe.room, strict=True)]
    results = [
        gradient_of(params, rows, labels, anchors, last_depth, part)
        for anchors, last_depth, part in zip(batch.anchors, batch.last_depth, parts, strict=True)
    ]
    gradient, sums = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), results)
    return sums, gradient


def _taught(teacher: AnyTeacher | None, batch: RowBatch) -> TrainingRows:
    """Return the whole rows with the target's outputs, stored or computed now."""
    target = batch.teacher
    if not target:
        assert teacher is not None
        logits, aux_hidden = teacher(batch.token_ids, batch.positions, batch.segment_ids)
        target = {"aux_hidden": aux_hidden, "logits": logits}
    return TrainingRows(batch.token_ids, batch.positions, batch.segment_ids, batch.trained, target)


def _labels(config: DrafterConfig, draft_to_target: jax.Array | None, target: Mapping[str, jax.Array]) -> Labels:
    if "logits" in target:
        return labels_of_logits(target["logits"], draft_to_target)
    ids, logits, log_total = (target[name] for name in ("top_ids", "top_logits", "log_total"))
    return labels_of_best(ids, logits, log_total, draft_to_target, config.vocab_size)


def _part_by_part(
    gradient_of: Callable[[TrainingRows, jax.Array, jax.Array, _Part], tuple[Any, Sums]],
    none: tuple[Any, Sums],
    before: int,
    recipe: Recipe,
    rows: TrainingRows,
    chains: tuple[jax.Array, jax.Array],
) -> tuple[Sums, Any]:
    """Sum the parts' (gradient, sums) in a loop on the device, so that memory is that of one part.

    A part reads its positions, `before` positions before them, and those after them with its labels. chains:
    (anchors, last_depth) of all parts [parts, B, n]. none: the zeros that a part without a trained token adds.
    """
    width, num_parts = recipe.width, len(recipe.room)
    span = width // num_parts
    part = _Part(before, before + span, recipe.room[0])

    def add(total: Any, piece: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, None]:
        start, anchors, last_depth = piece
        positions = start - before + jnp.arange(before + span + recipe.depth, dtype=jnp.int32)
        inside, indices = (positions >= 0) & (positions < width), jnp.clip(positions, 0, width - 1)
        part_rows = jax.tree.map(lambda leaf: jnp.take(leaf, indices, axis=1), rows)
        segment_ids = jnp.where(inside[None], part_rows.segment_ids, 0)
        part_rows = part_rows.replace(segment_ids=segment_ids, trained=jnp.where(inside[None], part_rows.trained, 0.0))
        result = jax.lax.cond(
            jnp.any(part_rows.trained[:, before + 2 :] > 0),  # the row at p predicts the token at p + 2
            lambda: gradient_of(part_rows, anchors - start + before, last_depth, part),
            lambda: none,
        )
        return jax.tree.map(jnp.add, total, result), None

    starts = jnp.arange(num_parts, dtype=jnp.int32) * span
    (gradient, sums), _ = jax.lax.scan(add, none, (starts, *chains))
    return sums, gradient


def _nothing(recipe: Recipe, params: Any) -> tuple[Any, Sums]:
    """Make (gradient, sums) of zeros; params (): without a gradient."""
    depths = jnp.zeros((recipe.depth,))
    return jax.tree.map(jnp.zeros_like, params), Sums(jnp.zeros(()), depths, depths)


def next_state(
    config: DrafterConfig,
    recipe: Recipe,
    state: State,
    steps: jax.Array,
    fixed: Fixed,
    batch: RowBatch,
) -> tuple[State, Record]:
    """Compute (the next state, the record). Runs on every device, on its own rows, one row after the other.

    steps: of the whole training, for the learning rate.
    """
    sums, gradient = _over_rows(config, recipe, state.params, fixed, batch)
    num_rows = jnp.maximum(jnp.sum(sums.rows), 1.0)
    gradient = jax.tree.map(lambda leaf: leaf / num_rows, gradient)
    with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers
        updates, after = optimizer(recipe, steps).update(gradient, state.optimizer, state.params)
    record = Record(sums, jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(gradient))))
    return State(optax.apply_updates(state.params, updates), after), record


def _over_rows(
    config: DrafterConfig,
    recipe: Recipe,
    params: DrafterParams,
    fixed: Fixed,
    batch: RowBatch,
    with_gradient: bool = True,
) -> tuple[Sums, Any]:
    """Sum (sums, gradient) over the rows of this device, one after the other, and over devices."""

    def add_row(total: Any, row: RowBatch) -> tuple[Any, None]:
        one = jax.tree.map(lambda leaf: leaf[None], row)
        result = gradients_of(params, config, recipe, fixed, one, with_gradient)
        return jax.tree.map(jnp.add, total, result), None

    gradient, sums = _nothing(recipe, params if with_gradient else ())
    total, _ = jax.lax.scan(add_row, (sums, gradient), batch)
    summed: tuple[Sums, Any] = jax.lax.psum(total, ROWS)
    return summed


@functools.lru_cache(maxsize=1)
def step_program(config: DrafterConfig, recipe: Recipe, mesh: Mesh) -> Callable[..., tuple[State, Record]]:
    """Compile (state, steps, fixed, batch) -> (state, record): `next_state` over devices."""
    body = functools.partial(next_state, config, recipe)
    program = jax.jit(_by_rows(body, mesh, replicated=3), donate_argnums=0)
    return cast(Callable[..., tuple[State, Record]], program)


@functools.lru_cache(maxsize=1)
def sums_program(config: DrafterConfig, recipe: Recipe, mesh: Mesh) -> Callable[..., Sums]:
    """Compile (params, fixed, batch) -> the batch's sums over all devices; no update."""

    def body(params: DrafterParams, fixed: Fixed, batch: RowBatch) -> Sums:
        return _over_rows(config, recipe, params, fixed, batch, with_gradient=False)[0]

    return cast(Callable[..., Sums], jax.jit(_by_rows(body, mesh, replicated=2)))


def _by_rows(body: Callable[..., Any], mesh: Mesh, replicated: int) -> Callable[..., Any]:
    """Run a function on every device. The first arguments are replicated; the last, a batch, is cut by rows."""
    everywhere = PartitionSpec()
    ins = (*[everywhere] * replicated, PartitionSpec(ROWS))
    return jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=everywhere, check_vma=False)


def devices_for(rows_per_step: int) -> Mesh:
    """Make a mesh of the most devices that divide the rows of a step."""
    available = jax.devices()
    most = max(count for count in range(1, len(available) + 1) if rows_per_step % count == 0)
    return Mesh(np.asarray(available[:most]), (ROWS,))
