"""Train a drafter: checkpoints, the log, and the loop over steps (drafter/train/step.py).

A step is a function of (recipe, data, step), so a resumed training ends with the same bits as an uninterrupted one.
Over another number of devices it is equal up to rounding, because gradients are then summed in another order.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.checkpoint_managers import preservation_policy

from drafter.config import DrafterConfig
from drafter.params import DrafterParams
from drafter.train.folder import (
    CHECKPOINTS,
    EVALUATION,
    HELD_OUT,
    LOG,
    best_held_out,
    expect_sizes,
    keep_sizes,
    read_log,
)
from drafter.train.held_out import HeldOut, score_of
from drafter.train.loss import Sums
from drafter.train.recipe import Recipe, optimizer
from drafter.train.row_batches import RowBatch, RowBatches
from drafter.train.step import AnyTeacher, Fixed, FrozenWeights, Record, State, devices_for, step_program, sums_program
from peagle.base.errors import InputError
from peagle.base.files import reason_of, write_text_whole
from peagle.base.sizes import format_size
from peagle.base.strict_json import dumps

NEWEST_KEPT = 2  # checkpoints, besides the best one


class StepTimer:
    """Measure a training's speed and remaining time.

    The first step and the first pause of a kind compile, so they say nothing about the next ones.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=50)
        self._pauses: dict[str, float] = {}  # seconds of the next one, by kind
        self._last: float | None = None  # end of the previous step

    @property
    def step_s(self) -> float | None:
        return statistics.median(self._steps) if self._steps else None

    def stepped(self) -> None:
        now = time.monotonic()
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last = now

    def paused(self, kind: str, seconds: float, again_s: float | None = None) -> None:
        """Record seconds between two steps, which do not count as part of the next one.

        again_s: the seconds of the next such pause, if known.
        """
        self._pauses[kind] = (seconds if kind in self._pauses else 0.0) if again_s is None else again_s
        if self._last is not None:
            self._last += seconds

    def left_s(self, steps: int, between: Mapping[str, int]) -> float | None:
        """Estimate the seconds of `steps` steps with so many pauses of each kind; None before the second step."""
        if self.step_s is None:
            return None
        return steps * self.step_s + sum(count * self._pauses.get(kind, 0.0) for kind, count in between.items())


class Deadline:
    """The end of some minutes of training. Neither the first step counts, which compiles, nor do evaluations."""

    def __init__(self, minutes: float | None = None) -> None:
        self._seconds = math.inf if minutes is None else 60 * minutes
        self._end: float | None = None

    def begin(self) -> None:
        """Begin to count, after the first step. Later calls do nothing."""
        if self._end is None:
            self._end = time.monotonic() + self._seconds

    def paused(self, seconds: float) -> None:
        """Leave out seconds that have passed; those before `begin` do not count anyway."""
        if self._end is not None:
            self._end += seconds

    @property
    def left_s(self) -> float:
        """The seconds that are left; all of them before `begin`."""
        return self._seconds if self._end is None else max(0.0, self._end - time.monotonic())


class TrainingStopped(RuntimeError):
    """Training cannot continue: the loss is not finite, or the disk is full. The message names the last good step."""


@dataclasses.dataclass
class Trainer:
    """A training in a folder: recipe.json, log.jsonl, checkpoints/.

    held_out: documents that measure the drafter. The result is the step that is best on them, whose checkpoint is kept;
    without them it is the last step.

    measure_start: also measure the parameters that the training begins with, as step 0, which may be the best one.
    evaluate: measures the drafter (the command line passes in the engine's acceptance); its figures go to the log.
    One of them may be elapsed_s, its seconds without compilation.
    watch: called with every line of the log. progress: called after every step with (steps done, seconds left or None).
    should_stop: called before the first step and after each; True ends the training as its last step would, and so
    does the deadline, or a KeyboardInterrupt of `evaluate` after a step.
    """

    out: Path
    config: DrafterConfig
    recipe: Recipe
    batches: RowBatches
    teacher: AnyTeacher | None
    draft_to_target: np.ndarray | None = None
    frozen: FrozenWeights | None = None  # of a DFlash drafter
    held_out: HeldOut | None = None
    held_out_every: int = 10  # steps; also at the end
    measure_start: bool = False
    evaluate: Callable[[DrafterParams], Mapping[str, Any]] | None = None
    evaluate_every: int = 0  # steps; 0: only at the end
    save_every: int = 100  # steps
    log_every: int = 10
    watch: Callable[[Mapping[str, Any]], None] = lambda _: None
    progress: Callable[[int, float | None], None] = lambda *_: None
    should_stop: Callable[[], bool] = lambda: False
    deadline: Deadline = dataclasses.field(default_factory=Deadline)
    devices: int | None = None  # that share the rows of a step; None: as many as divide them

    def run(self, initial: DrafterParams) -> DrafterParams:
        """Train from `initial`, or continue from the folder's newest checkpoint; return the trained parameters.

        The result includes draft_to_target. Raises TrainingStopped if the loss is not finite or the folder cannot be
        written, InputError for checkpoints that do not fit, and KeyboardInterrupt if `evaluate` does before a step.
        """
        step = self.compiled()
        policy = preservation_policy.AnyPreservationPolicy(
            [preservation_policy.LatestN(NEWEST_KEPT), _Keep(self._best_step)]
        )
        options = ocp.CheckpointManagerOptions(preservation_policy=policy, enable_async_checkpointing=False)
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
        step: Callable[[State, RowBatch], tuple[State, Record]],
        initial: DrafterParams,
    ) -> DrafterParams:
        state, first = self.begin(initial), checkpoints.latest_step() or 0
        if checkpoints.latest_step() is not None:
            state = self._read(checkpoints, first, jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
        started, done, ends, pace = time.monotonic(), first, self._ends(first), StepTimer()
        evaluated = self._keep_log_until(first, continues=not ends)
        self._expect_best(checkpoints)
        if ends:
            state = self._best(checkpoints, done, state, initial)
        elif self.measure_start and not first:
            if self.held_out is not None:
                self._measure(0, state, pace)
            self._evaluate(0, state, True, pace)
        if first and not evaluated:  # the process was killed during the evaluation, or there was none
            self._evaluate(first, state, ends, pace)
        records: list[Record] = []
        while not ends:
            state, record = step(state, self.batches.at(done))
            jax.block_until_ready(records[-1:])  # the previous step, so that at most one is in flight
            records.append(record)
            done += 1
            pace.stepped()
            self.deadline.begin()
            left_s = pace.left_s(self.recipe.steps - done, self._pauses_after(done))
            left_s = None if left_s is None else min(left_s, self.deadline.left_s)
            self.progress(done, left_s)
            ends = self._ends(done)
            if self._logs(done, ends):
                tokens = self.batches.rows_per_step * self.recipe.width
                speed = None if pace.step_s is None else round(tokens / pace.step_s)
                times = {"elapsed_s": round(time.monotonic() - started, 2), "left_s": left_s, "tok_per_s": speed}
                self._log_records(checkpoints, done, records, times)
                records = []
            self._measure_and_save(checkpoints, done, state, ends, pace)
            if ends:
                state = self._best(checkpoints, done, state, initial)
            try:
                self._evaluate(done, state, ends, pace)
            except KeyboardInterrupt:
                if not ends:
                    self._save(checkpoints, done, state)
                    state, ends = self._best(checkpoints, done, state, initial), True
        return self._whole(state.params)

    def _measure_and_save(
        self, checkpoints: ocp.CheckpointManager, done: int, state: State, ends: bool, pace: StepTimer
    ) -> None:
        """Measure and save a step, if it is time for that."""
        if ends and done < self.recipe.steps:  # save first: a process that is told to end may soon be killed
            self._save(checkpoints, done, state)
        saves = self._saves(done, ends)
        if self._measures(done, ends):
            self._measure(done, state, pace)
            saves = saves or self._best_step() == done
        if saves:
            self._save(checkpoints, done, state)

    def _ends(self, done: int) -> bool:
        return done == self.recipe.steps or not self.deadline.left_s or self.should_stop()

    def _evaluates(self, done: int, ends: bool) -> bool:
        due = self.evaluate_every > 0 and done % self.evaluate_every == 0
        return self.evaluate is not None and (due or ends)

    def _logs(self, done: int, ends: bool) -> bool:
        if done % self.log_every == 0 or self._saves(done, ends):
            return True
        return self._measures(done, ends) or self._evaluates(done, ends)

    def _saves(self, done: int, ends: bool) -> bool:
        return ends or done % self.save_every == 0

    def _measures(self, done: int, ends: bool) -> bool:
        return self.held_out is not None and (ends or done % self.held_out_every == 0)

    def _pauses_after(self, done: int) -> dict[str, int]:
        """Count the evaluations and held-out losses still to come."""
        kinds = {EVALUATION: (self.evaluate, self.evaluate_every), HELD_OUT: (self.held_out, self.held_out_every)}
        return {
            kind: -(-self.recipe.steps // every) - done // every if every else 1
            for kind, (what, every) in kinds.items()
            if what is not None
        }

    def _evaluate(self, done: int, state: State, ends: bool, pace: StepTimer) -> None:
        if self.evaluate is not None and self._evaluates(done, ends):
            began = time.monotonic()
            figures = dict(self.evaluate(self._whole(state.params)))
            best = self._best_step() if ends else None  # then it is what the state holds
            self._log({"step": done, EVALUATION: {**figures, "step": done if best is None else best}})
            seconds = time.monotonic() - began
            pace.paused(EVALUATION, seconds, figures.get("elapsed_s"))
            self.deadline.paused(seconds)

    def _measure(self, done: int, state: State, pace: StepTimer) -> None:
        assert self.held_out is not None
        began = time.monotonic()
        figures = self.held_out_figures(state)
        if not math.isfinite(figures["loss"]):
            raise TrainingStopped(
                f"the held-out loss of step {done} is {figures['loss']}; expected a number: lower --learning-rate, or "
                "give --held-out 0 if the drafter can propose no token of the held-out documents"
            )
        line = {"step": done, HELD_OUT: {**figures, "documents": self.held_out.digest}}
        stopped = done < self.recipe.steps and done % self.held_out_every > 0
        self._log({**line, "stopped": True} if stopped else line)
        pace.paused(HELD_OUT, time.monotonic() - began)

    def held_out_figures(self, state: State) -> dict[str, Any]:
        """Compute loss, hits and score on the held-out documents. The loss is nan if no row counts."""
        assert self.held_out is not None
        any_length = dataclasses.replace(self.recipe, steps=1)
        program = sums_program(self.config, any_length, self.batches.counts, self._mesh)
        figures = _figures([program(state.params, self._fixed, batch) for batch in self.held_out])
        return {**figures, "score": score_of(self.recipe.loss, figures["loss"], figures["hits_by_depth"])}

    def _best_step(self) -> int | None:
        if self.held_out is None:
            return None
        lines = (line for line in read_log(self.out / LOG) if HELD_OUT in line)
        best = best_held_out(line for line in lines if line[HELD_OUT]["documents"] == self.held_out.digest)
        return None if best is None else best["step"]

    def _expect_best(self, checkpoints: ocp.CheckpointManager) -> None:
        best = self._best_step()
        if best and best not in checkpoints.all_steps():
            raise InputError(
                f"{self.out}: by {LOG} step {best} is the best on held-out documents, and {self._checkpoint(best)} is "
                "missing; put it back, or take another --out"
            )

    def _best(self, checkpoints: ocp.CheckpointManager, done: int, state: State, initial: DrafterParams) -> State:
        """Return the state of the best step; if it is another than `state`, free `state` and read a checkpoint.

        initial: step 0, which has no checkpoint.
        """
        best = self._best_step()
        if best is None or best == done:
            return state
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        jax.tree.map(lambda leaf: leaf.delete(), state)
        return self._read(checkpoints, best, shapes) if best else self.begin(initial)

    @functools.cached_property
    def _fixed(self) -> Fixed:
        return cast(Fixed, self._replicated(Fixed(self._draft_to_target, self.teacher, self.frozen)))

    @property
    def _draft_to_target(self) -> jax.Array | None:
        return None if self.draft_to_target is None else jnp.asarray(self.draft_to_target, jnp.int32)

    def compiled(self) -> Callable[[State, RowBatch], tuple[State, Record]]:
        """Compile a step over all devices; a call donates the state's memory."""
        any_length = dataclasses.replace(self.recipe, steps=1)
        step = step_program(self.config, any_length, self.batches.counts, self._mesh)
        steps = self._replicated(jnp.float32(self.recipe.steps))
        return lambda state, batch: step(state, steps, self._fixed, batch)

    def begin(self, initial: DrafterParams) -> State:
        without: dict[str, Any] = {} if self.frozen is None else {"embedding": None, "lm_head": None}
        trained = dataclasses.replace(initial, draft_to_target=None, **without)
        params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), trained)
        return cast(
            State, self._replicated(State(params, optimizer(self.recipe, jnp.float32(self.recipe.steps)).init(params)))
        )

    @property
    def _mesh(self) -> Mesh:
        return devices_for(self.batches.rows_per_step, self.devices)

    def _whole(self, params: DrafterParams) -> DrafterParams:
        one = jax.devices()[0]
        params = params if self.frozen is None else self.frozen.within(params)
        on_one = jax.tree.map(lambda leaf: jax.device_put(leaf, one), params)
        return dataclasses.replace(on_one, draft_to_target=self._draft_to_target)

    def _replicated(self, tree: Any) -> Any:
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))

    def _read(self, checkpoints: ocp.CheckpointManager, step: int, shapes: Any) -> State:
        """Read a step's checkpoint. Raises InputError if it does not have these shapes, or is not whole."""
        try:
            # check first: a restore that fails half way leaves reads open that raise when Python collects them
            expect_sizes(self._checkpoint(step))
            _same_shapes(checkpoints.item_metadata(step), shapes)
            return cast(State, checkpoints.restore(step, args=ocp.args.StandardRestore(shapes)))
        except Exception as error:  # orbax raises a bare Exception for a truncated file
            why = str(error).partition("\n")[0]
            raise InputError(
                f"{self.out / CHECKPOINTS}: cannot continue from step {step}: {why}; remove that checkpoint's folder "
                "to continue from the one before, or take another --out"
            ) from None

    def _checkpoint(self, step: int) -> Path:
        return self.out / CHECKPOINTS / str(step)

    def _save(self, checkpoints: ocp.CheckpointManager, step: int, state: State) -> None:
        if checkpoints.latest_step() == step:
            return
        size, free = sum(leaf.nbytes for leaf in jax.tree.leaves(state)), shutil.disk_usage(self.out).free
        if free < size:  # check first: if a disk fills up half way, orbax's threads print long errors
            raise TrainingStopped(
                f"the checkpoint of step {step} takes {format_size(size)}, the disk of {self.out / CHECKPOINTS} has "
                f"{format_size(free)} left: {os.strerror(errno.ENOSPC)}; {self._last_good(checkpoints)}"
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
        loss, norms = (
            np.stack([np.asarray(value) for value in values])
            for values in zip(*((record.sums.loss, record.gradient_norm) for record in records), strict=True)
        )
        if not (np.isfinite(loss).all() and np.isfinite(norms).all()):
            bad = done - len(records) + 1 + int(np.argmin(np.isfinite(loss) & np.isfinite(norms)))
            raise TrainingStopped(
                f"the loss of step {bad} is not finite; {self._last_good(checkpoints)}: lower --learning-rate"
            )
        figures = _figures([record.sums for record in records])
        if not sum(figures["rows_by_depth"]):
            raise TrainingStopped(
                f"the rows of the steps up to {done} hold no trained token; expected some in the data"
            )
        self._log(
            {
                "step": done,
                "steps": self.recipe.steps,
                "epochs": [round(source.epochs(done), 3) for source in self.batches.sources],
                **figures,
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

    def _keep_log_until(self, step: int, continues: bool) -> bool:
        """Cut the log after the step to continue from; return whether the log holds that step's evaluation.

        A training that begins anew, at step 0, measures its start again. One that goes on drops the measurement of its
        stop: an uninterrupted one has none, and if it were the best, the checkpoint of the best before would go.
        """
        path = self.out / LOG
        kept = [line for line in read_log(path) if line["step"] <= step] if step and path.exists() else []
        kept = [line for line in kept if not (continues and line.get("stopped", False))]
        text = "".join(dumps(line) + "\n" for line in kept)
        write_text_whole(path, text)
        return any(line["step"] == step and EVALUATION in line for line in kept)


@dataclasses.dataclass(frozen=True)
class _Keep:
    """Preserve the checkpoint of the best step so far (a preservation policy of orbax)."""

    step: Callable[[], int | None]

    def should_preserve(self, checkpoints: Sequence[Any], **_: Any) -> Sequence[bool]:
        step = self.step()
        return [checkpoint.step == step for checkpoint in checkpoints]


def _figures(sums: Sequence[Sums]) -> dict[str, Any]:
    """Average over rows: the loss, and by depth the hits, with the number of rows. Without a row the loss is nan."""
    loss, rows, hits = (
        np.stack([np.asarray(value) for value in values]).sum(0)
        for values in zip(*((part.loss, part.rows, part.hits) for part in sums), strict=True)
    )
    return {
        "loss": float(loss / rows.sum()) if rows.sum() else math.nan,
        "hits_by_depth": [round(float(share), 4) for share in hits / np.maximum(rows, 1)],
        "rows_by_depth": [int(count) for count in rows],
    }


def _same_shapes(kept: Any, state: Any) -> None:
    """Raise ValueError naming the first array whose name or shape differs between the two trees."""
    before, expected = _shapes_by_name(kept), _shapes_by_name(state)
    for name in sorted(before.keys() | expected.keys()):
        if before.get(name) != expected.get(name):
            raise ValueError(
                f"{name} is {before.get(name, 'not there')} in it and {expected.get(name, 'not there')} in this "
                "training"
            )


def _shapes_by_name(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape) for path, leaf in leaves}
