"""Train a drafter: one step as one program over all devices, checkpoints, and the loop.

    rows of a step ──► each device computes its share, one row (and part of it) after the other
                       ──► sum gradients over parts, rows and devices ──► one update

The target runs inside the step and computes aux_hidden and labels, or both come from the data. A step is a function of
(recipe, data, step), so a resumed training ends with the same bits as an uninterrupted one; over another number of
devices it goes on to rounding, since gradients are then summed in another order.
"""

import dataclasses
import errno
import functools
import math
import os
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast, get_args, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from drafter.config import DrafterConfig
from drafter.params import DrafterParams
from drafter.train.batches import Batch, Batches
from drafter.train.cod import Cod, Segments
from drafter.train.folder import CHECKPOINTS, LOG, expect_sizes, keep_sizes, read_log
from drafter.train.loss import LOSSES, Labels, LossName, Sums, chain_loss, labels_of_best, labels_of_logits
from peagle.ops.errors import InputError
from peagle.ops.files import reason_of, write_text_whole
from peagle.ops.strict_json import dumps

ROWS = "rows"  # the mesh axis
OptimizerName = Literal["adamw", "muon"]


@runtime_checkable
class Teacher(Protocol):
    """A pytree that computes (logits [B, T, V], aux_hidden [B, T, A]) of packed rows (target/teacher.py)."""

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> tuple[jax.Array, jax.Array]: ...


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The settings of a training. Hashable.

    The learning rate rises from 0 over the first warmup_frac of the steps, stays, and falls to 0 over the last
    decay_frac. learning_rate is for matrices, other_rate for embedding, head, norms and mask_hidden (with adamw,
    learning_rate is for all).

    `steps` is the only field that may change when a training continues. It sets the length, and with it the rate of
    each later step, which is that of a training of the new length. So a training continued from 1000 steps to 2000 ends
    differently from one of 2000 steps: its rate fell to 0 at 1000, and continues at half its peak (with decay_frac 1).
    """

    steps: int
    width: int = 512  # tokens of a row
    cod: Cod = dataclasses.field(default_factory=Cod)
    parts: int = 1  # of a sequence; their gradients are computed one after the other (Algorithm 1)
    loss: LossName = "half"
    optimizer: OptimizerName = "adamw"
    learning_rate: float = 1e-4
    other_rate: float = 1e-4
    weight_decay: float = 0.0
    warmup_frac: float = 0.0025
    decay_frac: float = 1.0
    clip_norm: float | None = None  # longer gradients are scaled down to this length
    train_embedding: bool = True
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # weights, gradients' sums and optimiser stay float32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise InputError(f"loss {self.loss!r}; expected one of {', '.join(LOSSES)}")
        if self.optimizer not in get_args(OptimizerName):
            raise InputError(f"optimizer {self.optimizer!r}; expected one of {', '.join(get_args(OptimizerName))}")
        if self.steps < 1 or self.width < 3:
            raise InputError(f"{self.steps} steps of rows of {self.width} tokens; expected 1 or more, and 3 or more")
        if not (0 <= self.warmup_frac < 1 and 0 < self.decay_frac <= 1):
            raise InputError(
                f"warm-up over {self.warmup_frac} of the steps and decay over {self.decay_frac}; expected parts of 1"
            )
        if not all(0 < rate < math.inf for rate in (self.learning_rate, self.other_rate)):
            raise InputError(f"learning rates {self.learning_rate} and {self.other_rate}; expected numbers above 0")
        if not 0 <= self.weight_decay < math.inf or not (self.clip_norm is None or self.clip_norm > 0):
            raise InputError(
                f"weight decay {self.weight_decay} and gradients clipped at {self.clip_norm}; expected 0 or more, and "
                "more than 0"
            )

    @property
    def segments(self) -> Segments:
        return Segments.even(self.width, self.parts)


@flax.struct.dataclass
class State:
    """Everything that a step changes."""

    params: DrafterParams  # float32, without draft_to_target
    optimizer: Any


@flax.struct.dataclass
class Record:
    """A step's results: sums over its rows, and the length of its gradient."""

    sums: Sums
    gradient_norm: jax.Array


class Pace:
    """How fast a training goes, and how long it will take.

    The first step compiles, so it is left out. Evaluations are counted apart.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=50)
        self._evaluations: list[float] = []
        self._last: float | None = None  # end of the step before

    @property
    def step_s(self) -> float | None:
        """The median of the last steps; None before the second."""
        return statistics.median(self._steps) if self._steps else None

    def stepped(self) -> None:
        """Note the end of a step."""
        now = time.monotonic()
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last = now

    def evaluated(self, seconds: float) -> None:
        """Note an evaluation, which is not part of the next step."""
        self._evaluations.append(seconds)
        if self._last is not None:
            self._last += seconds

    def left_s(self, steps: int, evaluations: int) -> float | None:
        """Return the seconds that so many steps and evaluations take; None before the second step."""
        if self.step_s is None:
            return None
        of_one = statistics.mean(self._evaluations) if self._evaluations else 0.0
        return steps * self.step_s + evaluations * of_one


class TrainingStopped(RuntimeError):
    """Training cannot continue (a loss that is not finite, a full disk). The message names the last good step."""


def rate_schedule(recipe: Recipe, steps: jax.Array, peak: float) -> optax.Schedule:
    """Make the learning rate of a training of so many steps: it rises to `peak`, stays, and falls to 0."""
    warmup = jnp.maximum(1.0, jnp.floor(steps * recipe.warmup_frac))
    decay = jnp.clip(jnp.floor(steps * recipe.decay_frac), 1.0, jnp.maximum(1.0, steps - warmup))
    return lambda step: peak * jnp.clip(jnp.minimum(step / warmup, (steps - step) / decay), 0.0, 1.0)


def optimizer(recipe: Recipe, steps: jax.Array) -> optax.GradientTransformation:
    """Make the recipe's update rule for so many steps, whatever the recipe's own number is.

    Muon: orthogonalised momentum for layer matrices and fc, Adam for the rest.
    """

    def schedule(peak: float) -> optax.Schedule:
        return rate_schedule(recipe, steps, peak)

    if recipe.optimizer == "adamw":
        rule = optax.adamw(schedule(recipe.learning_rate), weight_decay=recipe.weight_decay)
    else:
        rule = optax.contrib.muon(
            schedule(recipe.learning_rate),
            weight_decay=recipe.weight_decay,
            adam_b2=0.98,
            adam_learning_rate=schedule(recipe.other_rate),
            muon_weight_dimension_numbers=_by_muon,
            consistent_rms=0.2,
        )
    return rule if recipe.clip_norm is None else optax.chain(optax.clip_by_global_norm(recipe.clip_norm), rule)


def _by_muon(params: DrafterParams) -> DrafterParams:
    spec = optax.contrib.MuonDimensionNumbers()
    marks = jax.tree.map(lambda leaf: spec if leaf.ndim == 2 else None, params)
    result: DrafterParams = marks.replace(embedding=None, lm_head=None, mask_hidden=None)
    return result


@flax.struct.dataclass
class _Stretch:
    """What whole rows, or a stretch of each, are trained on."""

    token_ids: jax.Array  # [B, T]
    positions: jax.Array  # [B, T]
    segment_ids: jax.Array  # [B, T]
    trained: jax.Array  # [B, T]
    target: dict[str, jax.Array]  # those of TEACHER, or aux_hidden and the logits of all tokens [B, T, ...]


class _Part(NamedTuple):
    """The rows of depth 0 that count in a part, and its room for chains by depth."""

    start: int
    end: int
    counts: tuple[int, ...]


def gradients_of(
    params: DrafterParams,
    config: DrafterConfig,
    recipe: Recipe,
    counts: tuple[tuple[int, ...], ...],
    draft_to_target: jax.Array | None,
    teacher: Teacher | None,
    batch: Batch,
) -> tuple[Sums, DrafterParams]:
    """Compute (sums, gradient of the summed loss) of a batch, part after part.

    teacher None: the data holds aux_hidden and the target's best tokens. If every layer has a window, a part reads only
    the stretch of the rows that its outputs depend on, and a part without a trained token is skipped.
    """
    rows = _taught(teacher, batch)
    segments, dtype = recipe.segments, jnp.dtype(recipe.compute_dtype)

    def loss_of(
        trained: DrafterParams, rows: _Stretch, labels: Labels, anchors: jax.Array, reach: jax.Array, part: _Part
    ) -> tuple[jax.Array, Sums]:
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), trained)
        sums = chain_loss(
            cast.replace(draft_to_target=draft_to_target),
            config,
            recipe.loss,
            rows.token_ids,
            rows.target["aux_hidden"].astype(dtype),
            labels,
            rows.segment_ids,
            rows.positions,
            rows.trained,
            anchors,
            reach,
            part.counts,
            (part.start, part.end),
        )
        return sums.loss, sums

    gradient_of = jax.grad(loss_of, has_aux=True)
    if config.context_reach is not None and recipe.parts > 1:
        return _by_stretches(
            lambda rows, *part: gradient_of(params, rows, _labels(config, draft_to_target, rows.target), *part),
            _nothing(recipe, params),
            config.context_reach + 1,  # a part's first chain grows from the row before it
            recipe,
            counts[0],
            rows,
            (jnp.stack(batch.anchors), jnp.stack(batch.reach)),
        )
    labels = _labels(config, draft_to_target, rows.target)
    parts = [_Part(*each) for each in zip(segments.starts, segments.ends, counts, strict=True)]
    found = [
        gradient_of(params, rows, labels, anchors, reach, part)
        for anchors, reach, part in zip(batch.anchors, batch.reach, parts, strict=True)
    ]
    gradient, sums = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), found)
    return sums, gradient


def _taught(teacher: Teacher | None, batch: Batch) -> _Stretch:
    """Return the whole rows with what the target gives them: stored, or computed now."""
    target = dict(batch.teacher)
    if "aux_hidden" not in target or "top_ids" not in target:
        assert teacher is not None
        logits, aux_hidden = teacher(batch.token_ids, batch.positions, batch.segment_ids)
        target |= {"aux_hidden": aux_hidden} if "top_ids" in target else {"aux_hidden": aux_hidden, "logits": logits}
    return _Stretch(batch.token_ids, batch.positions, batch.segment_ids, batch.trained, target)


def _labels(config: DrafterConfig, draft_to_target: jax.Array | None, target: Mapping[str, jax.Array]) -> Labels:
    if "logits" in target:
        return labels_of_logits(target["logits"], draft_to_target)
    ids, logits, log_total = (target[name] for name in ("top_ids", "top_logits", "log_total"))
    return labels_of_best(ids, logits, log_total, draft_to_target, config.vocab_size)


def _by_stretches(
    gradient_of: Callable[[_Stretch, jax.Array, jax.Array, _Part], tuple[DrafterParams, Sums]],
    none: tuple[DrafterParams, Sums],
    before: int,
    recipe: Recipe,
    counts: tuple[int, ...],
    rows: _Stretch,
    chains: tuple[jax.Array, jax.Array],
) -> tuple[Sums, DrafterParams]:
    """Sum the parts' (gradient, sums) in a loop on the device, so that memory is that of one part.

    A part's stretch holds its rows, `before` rows before them, and after them those that its labels stand in. chains:
    (anchors, reach) of all parts [parts, B, n]. none: what a part without a trained token adds.
    """
    width, span = recipe.width, recipe.width // recipe.parts
    part = _Part(before, before + span, counts)

    def add(total: Any, each: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, None]:
        start, anchors, reach = each
        place = start - before + jnp.arange(before + span + recipe.cod.depth, dtype=jnp.int32)
        inside, taken = (place >= 0) & (place < width), jnp.clip(place, 0, width - 1)
        stretch = jax.tree.map(lambda leaf: jnp.take(leaf, taken, axis=1), rows)
        segment_ids = jnp.where(inside[None], stretch.segment_ids, 0)
        stretch = stretch.replace(segment_ids=segment_ids, trained=jnp.where(inside[None], stretch.trained, 0.0))
        found = jax.lax.cond(
            jnp.any(stretch.trained[:, before + 2 :] > 0),  # the first row of a part predicts the token two further
            lambda: gradient_of(stretch, anchors - start + before, reach, part),
            lambda: none,
        )
        return jax.tree.map(jnp.add, total, found), None

    starts = jnp.arange(recipe.parts, dtype=jnp.int32) * span
    (gradient, sums), _ = jax.lax.scan(add, none, (starts, *chains))
    return sums, gradient


def _nothing(recipe: Recipe, params: DrafterParams) -> tuple[DrafterParams, Sums]:
    """Make the (gradient, sums) that add nothing."""
    depths = jnp.zeros((recipe.cod.depth,))
    return jax.tree.map(jnp.zeros_like, params), Sums(jnp.zeros(()), depths, depths)


def next_state(
    config: DrafterConfig,
    recipe: Recipe,
    counts: tuple[tuple[int, ...], ...],
    state: State,
    steps: jax.Array,
    draft_to_target: jax.Array | None,
    teacher: Teacher | None,
    batch: Batch,
) -> tuple[State, Record]:
    """Compute (the next state, the record). Runs on every device, on its own rows, one row after the other.

    steps: of the whole training, for the learning rate; data, so that the program that measures a step trains, too.
    """

    def add_row(total: Any, row: Batch) -> tuple[Any, None]:
        one = jax.tree.map(lambda leaf: leaf[None], row)
        found = gradients_of(state.params, config, recipe, counts, draft_to_target, teacher, one)
        return jax.tree.map(jnp.add, total, found), None

    gradient, sums = _nothing(recipe, state.params)
    total, _ = jax.lax.scan(add_row, (sums, gradient), batch)
    sums, gradient = jax.lax.psum(total, ROWS)
    num_rows = jnp.maximum(jnp.sum(sums.rows), 1.0)
    gradient = jax.tree.map(lambda leaf: leaf / num_rows, gradient)
    if not recipe.train_embedding:
        gradient = gradient.replace(embedding=jnp.zeros_like(gradient.embedding))
    with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers
        updates, after = optimizer(recipe, steps).update(gradient, state.optimizer, state.params)
    if not recipe.train_embedding:
        updates = updates.replace(embedding=jnp.zeros_like(updates.embedding))
    record = Record(sums, jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(gradient))))
    return State(optax.apply_updates(state.params, updates), after), record


@functools.lru_cache(maxsize=1)
def _program(
    config: DrafterConfig, recipe: Recipe, counts: tuple[tuple[int, ...], ...], mesh: Mesh
) -> Callable[..., tuple[State, Record]]:
    everywhere, by_rows = PartitionSpec(), PartitionSpec(ROWS)
    body = functools.partial(next_state, config, recipe, counts)
    ins = (everywhere, everywhere, everywhere, everywhere, by_rows)
    sharded = jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=everywhere, check_vma=False)
    return cast(Callable[..., tuple[State, Record]], jax.jit(sharded, donate_argnums=0))


def devices_for(rows_per_step: int, wanted: int | None = None) -> Mesh:
    """Make a mesh of `wanted` devices, by default of as many as divide the rows of a step.

    Raises InputError for more than there are, and for a number that does not divide the rows.
    """
    available = jax.devices()
    good = [count for count in range(1, len(available) + 1) if rows_per_step % count == 0]
    if wanted is not None and wanted not in good:
        raise InputError(
            f"the mesh is dp={wanted}, a step has {rows_per_step} rows, and there are {len(available)} devices; "
            f"expected dp of {', '.join(map(str, good))}, or another --rows"
        )
    return Mesh(np.asarray(available[: wanted or good[-1]]), (ROWS,))


@dataclasses.dataclass
class Trainer:
    """A training in a folder: recipe.json, log.jsonl, checkpoints/. It learns from `batches` and `teacher`.

    evaluate measures the drafter at a step (the command line passes in the engine's acceptance); its figures go to the
    log. watch is called with every line of the log, progress after every step with the steps done and the seconds left
    (None before the second). should_stop is called before the first step and after each; True ends the training as its
    last step would.
    """

    out: Path
    config: DrafterConfig
    recipe: Recipe
    batches: Batches
    teacher: Teacher | None
    draft_to_target: np.ndarray | None = None
    evaluate: Callable[[DrafterParams], Mapping[str, Any]] | None = None
    evaluate_every: int = 0  # steps; 0: only at the end
    save_every: int = 100  # steps
    log_every: int = 10
    watch: Callable[[Mapping[str, Any]], None] = lambda _: None
    progress: Callable[[int, float | None], None] = lambda *_: None
    should_stop: Callable[[], bool] = lambda: False
    devices: int | None = None  # that share the rows of a step; None: as many as divide them

    def run(self, initial: DrafterParams) -> DrafterParams:
        """Train from `initial`, or continue from the folder's newest checkpoint; return the trained parameters.

        The result includes draft_to_target. At every end the newest checkpoint holds the last step, even if evaluate
        raises KeyboardInterrupt, which is raised on.

        Raises TrainingStopped if the loss is not finite or nothing can be written, InputError for checkpoints that do
        not fit.
        """
        step = self.compiled()
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        handler = ocp.StandardCheckpointHandler()
        folder = (self.out / CHECKPOINTS).absolute()
        with ocp.CheckpointManager(folder, options=options, item_handlers=handler) as checkpoints:
            try:
                return self._train(checkpoints, step, initial)
            except OSError as error:
                raise TrainingStopped(
                    f"{self.out} cannot be written: {reason_of(error)}; {self._last_good(checkpoints)}"
                ) from None

    def _train(
        self,
        checkpoints: ocp.CheckpointManager,
        step: Callable[[State, Batch], tuple[State, Record]],
        initial: DrafterParams,
    ) -> DrafterParams:
        state, first = self._restored(checkpoints, self.begin(initial))
        evaluated, pace = self._keep_log_until(first), Pace()
        if first and not evaluated:  # a kill interrupted the evaluation, or there was none
            self._evaluate(first, state, first == self.recipe.steps, pace)
        started, done, ends = time.monotonic(), first, self._ends(first)
        records: list[Record] = []
        while not ends:
            state, record = step(state, self.batches.at(done))
            jax.block_until_ready(records[-1:])  # the step before, so that a stop waits for one step, not for many
            records.append(record)
            done += 1
            pace.stepped()
            left_s = pace.left_s(self.recipe.steps - done, self._evaluations_after(done))
            self.progress(done, left_s)
            ends = self._ends(done)
            saves = ends or done % self.save_every == 0
            if saves or done % self.log_every == 0 or self._evaluates(done, ends):
                speed = None if pace.step_s is None else round(self._tokens_per_step / pace.step_s)
                times = {"elapsed_s": round(time.monotonic() - started, 2), "left_s": left_s, "tok_per_s": speed}
                self._log_records(checkpoints, done, records, times)
                records = []
            if saves:
                self._save(checkpoints, done, state)
            try:
                self._evaluate(done, state, ends, pace)
            except KeyboardInterrupt:
                self._save(checkpoints, done, state)
                raise
        return self._whole(state.params)

    def _ends(self, done: int) -> bool:
        return done == self.recipe.steps or self.should_stop()

    def _evaluates(self, done: int, ends: bool) -> bool:
        due = self.evaluate_every > 0 and done % self.evaluate_every == 0
        return self.evaluate is not None and (due or ends)

    def _evaluations_after(self, done: int) -> int:
        if self.evaluate is None:
            return 0
        every, steps = self.evaluate_every, self.recipe.steps
        return 1 if not every else -(-steps // every) - done // every

    def _evaluate(self, done: int, state: State, ends: bool, pace: Pace) -> None:
        """Evaluate this step, if it is due, and log the figures."""
        if self.evaluate is not None and self._evaluates(done, ends):
            began = time.monotonic()
            self._log({"step": done, "evaluation": dict(self.evaluate(self._whole(state.params)))})
            pace.evaluated(time.monotonic() - began)

    @property
    def _tokens_per_step(self) -> int:
        return sum(source.rows_per_step for source in self.batches.sources) * self.recipe.width

    def compiled(self) -> Callable[[State, Batch], tuple[State, Record]]:
        """Compile a step over all devices; a call donates the state's memory."""
        any_length = dataclasses.replace(self.recipe, steps=1)
        step = _program(self.config, any_length, self.batches.counts, self._mesh)
        fixed = self._replicated((jnp.float32(self.recipe.steps), self.draft_to_target, self.teacher))
        return lambda state, batch: step(state, *fixed, batch)

    def begin(self, initial: DrafterParams) -> State:
        """Make the state before the first step."""
        params = jax.tree.map(
            lambda leaf: jnp.array(leaf, jnp.float32), dataclasses.replace(initial, draft_to_target=None)
        )
        return cast(
            State, self._replicated(State(params, optimizer(self.recipe, jnp.float32(self.recipe.steps)).init(params)))
        )

    @property
    def _mesh(self) -> Mesh:
        return devices_for(sum(source.rows_per_step for source in self.batches.sources), self.devices)

    def _whole(self, params: DrafterParams) -> DrafterParams:
        ids = None if self.draft_to_target is None else jnp.asarray(self.draft_to_target, jnp.int32)
        one = jax.devices()[0]
        return dataclasses.replace(jax.tree.map(lambda leaf: jax.device_put(leaf, one), params), draft_to_target=ids)

    def _replicated(self, tree: Any) -> Any:
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))

    def _restored(self, checkpoints: ocp.CheckpointManager, initial: State) -> tuple[State, int]:
        """Return (the newest checkpoint's state, its step), or (the initial state, 0) if there is none."""
        latest = checkpoints.latest_step()
        if latest is None:
            return initial, 0
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, initial)
        try:
            # checked first: a restore that fails half way leaves reads open that raise when they are collected
            expect_sizes(self._checkpoint(latest))
            _same_shapes(checkpoints.item_metadata(latest), shapes)
            return cast(State, checkpoints.restore(latest, args=ocp.args.StandardRestore(shapes))), latest
        except Exception as error:  # orbax raises a bare Exception for a truncated file
            why = str(error).partition("\n")[0]
            raise InputError(
                f"{self.out / CHECKPOINTS}: cannot continue from step {latest}: {why}; remove that checkpoint's folder "
                "to continue from the one before, or take another --out"
            ) from None

    def _checkpoint(self, step: int) -> Path:
        return self.out / CHECKPOINTS / str(step)

    def _save(self, checkpoints: ocp.CheckpointManager, step: int, state: State) -> None:
        """Write the step's checkpoint, if it does not exist."""
        if checkpoints.latest_step() == step:
            return
        size, free = sum(leaf.nbytes for leaf in jax.tree.leaves(state)), shutil.disk_usage(self.out).free
        if free < size:  # checked first: on a disk that fills up half way orbax's threads print long errors
            raise TrainingStopped(
                f"the checkpoint of step {step} takes {size / 1e6:.0f} MB, the disk of {self.out / CHECKPOINTS} has "
                f"{free / 1e6:.0f} MB left: {os.strerror(errno.ENOSPC)}; {self._last_good(checkpoints)}"
            )
        try:
            checkpoints.save(step, args=ocp.args.StandardSave(state))
            keep_sizes(self._checkpoint(step))
        except (OSError, ValueError, RuntimeError) as error:  # orbax raises its storage's errors as they are
            why = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
            raise TrainingStopped(
                f"the checkpoint of step {step} cannot be written to {self.out / CHECKPOINTS}: {why}; "
                f"{self._last_good(checkpoints)}"
            ) from None

    def _log_records(
        self,
        checkpoints: ocp.CheckpointManager,
        done: int,
        records: list[Record],
        times: Mapping[str, float | None],
    ) -> None:
        loss, rows, hits, norms = (
            np.stack([np.asarray(value) for value in values])
            for values in zip(*((r.sums.loss, r.sums.rows, r.sums.hits, r.gradient_norm) for r in records), strict=True)
        )
        if not (np.isfinite(loss).all() and np.isfinite(norms).all()):
            bad = done - len(records) + 1 + int(np.argmin(np.isfinite(loss) & np.isfinite(norms)))
            raise TrainingStopped(
                f"the loss of step {bad} is not finite; {self._last_good(checkpoints)}: lower --learning-rate"
            )
        if not rows.sum():
            raise TrainingStopped(
                f"the rows of the steps up to {done} hold no trained token; expected some in the data"
            )
        self._log(
            {
                "step": done,
                "steps": self.recipe.steps,
                "loss": float(loss.sum() / rows.sum()),
                "hits_by_depth": [round(float(x), 4) for x in hits.sum(0) / np.maximum(rows.sum(0), 1)],
                "rows_by_depth": [int(x) for x in rows.sum(0)],
                "gradient_norm": float(norms.mean()),
                **times,
            }
        )

    def _last_good(self, checkpoints: ocp.CheckpointManager) -> str:
        latest = checkpoints.latest_step()
        if latest is None:
            return "there is no checkpoint yet"
        return f"the last good step is {latest}, in {self.out / CHECKPOINTS}"

    def _log(self, line: Mapping[str, Any]) -> None:
        with (self.out / LOG).open("a", encoding="utf-8") as file:
            file.write(dumps(line) + "\n")
        self.watch(line)

    def _keep_log_until(self, step: int) -> bool:
        """Cut the log after the step that training continues from; return whether it holds that step's evaluation."""
        path = self.out / LOG
        kept = [line for line in read_log(path) if line["step"] <= step] if path.exists() else []
        text = "".join(dumps(line) + "\n" for line in kept)
        write_text_whole(path, text)
        return any(line["step"] == step and "evaluation" in line for line in kept)


def _same_shapes(kept: Any, wanted: Any) -> None:
    """Raises ValueError naming the first array whose name or shape differs between the two trees."""
    found, expected = _shapes_by_name(kept), _shapes_by_name(wanted)
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise ValueError(
                f"{name} is {found.get(name, 'not there')} in it and {expected.get(name, 'not there')} in this training"
            )


def _shapes_by_name(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape) for path, leaf in leaves}
