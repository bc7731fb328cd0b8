"""Train a drafter: the loop over steps (drafter/train/step.py), its log and its best step.

A step is a function of (recipe, data, step), so a resumed training ends with the same bits as an uninterrupted one.
Over another number of devices it is equal up to rounding, because gradients are then summed in another order.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from drafter.config import DrafterConfig
from drafter.params import DrafterParams
from drafter.train.checkpoints import Checkpoints, TrainingStopped
from drafter.train.clock import Clock
from drafter.train.folder import EVALUATION, HELD_OUT, LOG, best_held_out, read_log
from drafter.train.held_out import HeldOut, score_of
from drafter.train.loss import Sums
from drafter.train.optimizer import optimizer
from drafter.train.recipe import Recipe
from drafter.train.row_batches import RowBatch, RowBatches
from drafter.train.step import Fixed, Record, State, devices_for, step_program, sums_program
from peagle.base.files import reason_of, write_text_whole
from peagle.base.strict_json import dumps

LOGGED, SAVED = "logged", "saved"  # what may follow a step, besides HELD_OUT and EVALUATION


@dataclasses.dataclass
class Trainer:
    """A training in a folder: recipe.json, log.jsonl, checkpoints/.

    held_out: documents that measure the drafter. The result is the step that is best on them, whose checkpoint is kept;
    without them it is the last step.

    measure_start: also measure the parameters that the training begins with, as step 0, which may be the best one.
    evaluate: measures the drafter (the command line passes in the engine's acceptance); its figures go to the log.
    One of them may be elapsed_s, its seconds without compilation.
    watch: called with every line of the log. progress: called after every step with (steps done, seconds left or None).
    should_stop: called before the first step and after each; True ends the training as its last step would, and so do
    the end of the minutes, or a KeyboardInterrupt of `evaluate` after a step.
    """

    out: Path
    config: DrafterConfig
    batches: RowBatches
    fixed: Fixed
    steps: int
    minutes: float | None = None
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

    @property
    def recipe(self) -> Recipe:
        return self.batches.recipe

    def run(self, initial: DrafterParams) -> DrafterParams:
        """Train from `initial`, or continue from the folder's newest checkpoint; return the trained parameters.

        The result includes draft_to_target. Raises TrainingStopped if the loss is not finite or the folder cannot be
        written, InputError for checkpoints that do not fit, and KeyboardInterrupt if `evaluate` does before a step.
        """
        step = self.compiled()
        with Checkpoints(self.out, self._best_step) as checkpoints:
            try:
                return self._train(checkpoints, step, initial)
            except OSError as error:
                raise TrainingStopped(
                    f"{self.out} cannot be written: {reason_of(error)}; {checkpoints.last_good}"
                ) from None

    def _train(
        self,
        checkpoints: Checkpoints,
        step: Callable[[State, RowBatch], tuple[State, Record]],
        initial: DrafterParams,
    ) -> DrafterParams:
        done, clock, started = checkpoints.newest or 0, Clock(self.minutes), time.monotonic()
        ends = self._ends(done, clock)
        state = self._start(checkpoints, initial, done, ends, clock)
        records: list[Record] = []
        while not ends:
            state, record = step(state, self.batches.at(done))
            jax.block_until_ready(records[-1:])  # the previous step, so that at most one is in flight
            records.append(record)
            done += 1
            clock.stepped()
            left_s = clock.left_s(self.steps - done, self._pauses_after(done))
            self.progress(done, left_s)
            ends = self._ends(done, clock)
            due = self._due(done, ends)
            if LOGGED in due:
                times = {"elapsed_s": round(time.monotonic() - started, 2), "left_s": left_s}
                self._log_records(checkpoints, done, records, times, clock)
                records = []
            if ends and done < self.steps:  # save first: a process that is told to end may soon be killed
                checkpoints.save(done, state)
            self._keep(checkpoints, done, state, due, clock)
            if ends:
                state = self._best(checkpoints, done, state, initial)
            if EVALUATION in due:
                try:
                    self._evaluate(done, state, ends, clock)
                except KeyboardInterrupt:
                    if not ends:
                        checkpoints.save(done, state)
                        state, ends = self._best(checkpoints, done, state, initial), True
        return self._whole(state.params)

    def _start(self, checkpoints: Checkpoints, initial: DrafterParams, done: int, ends: bool, clock: Clock) -> State:
        """Return the state to go on from, or if no step follows the best one; measure what is not measured yet."""
        state = self.begin(initial)
        if checkpoints.newest is not None:
            state = checkpoints.read(done, jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
        evaluated = self._keep_log_until(done, continues=not ends)
        checkpoints.expect_best()
        if ends:
            state = self._best(checkpoints, done, state, initial)
        elif self.measure_start and not done:
            if self.held_out is not None:
                self._measure(0, state, clock)
            self._evaluate(0, state, True, clock)
        # the process was killed during the evaluation, or there was none
        if done and not evaluated and EVALUATION in self._due(done, ends):
            self._evaluate(done, state, ends, clock)
        return state

    def _keep(self, checkpoints: Checkpoints, done: int, state: State, due: set[str], clock: Clock) -> None:
        """Measure a step, and save it, if that is due; save the best one anyway."""
        if HELD_OUT in due:
            self._measure(done, state, clock)
        if SAVED in due or (HELD_OUT in due and self._best_step() == done):
            checkpoints.save(done, state)

    def _ends(self, done: int, clock: Clock) -> bool:
        return done == self.steps or not clock.budget_s or self.should_stop()

    def _due(self, done: int, ends: bool) -> set[str]:
        """Return what follows a step: it is measured, saved and evaluated every so often and at the end."""
        due = {what for what, steps in self._every.items() if ends or (steps and done % steps == 0)}
        return due | {LOGGED} if due or done % self.log_every == 0 else due

    @property
    def _every(self) -> dict[str, int]:
        """Steps between two saves, held-out losses or evaluations, by kind; 0: only after the last step."""
        every = {SAVED: self.save_every}
        every |= {HELD_OUT: self.held_out_every} if self.held_out is not None else {}
        return every | {EVALUATION: self.evaluate_every} if self.evaluate is not None else every

    def _pauses_after(self, done: int) -> dict[str, int]:
        """Count the saves, held-out losses and evaluations still to come."""
        return {kind: -(-self.steps // every) - done // every if every else 1 for kind, every in self._every.items()}

    def _evaluate(self, done: int, state: State, ends: bool, clock: Clock) -> None:
        if self.evaluate is None:
            return
        began = time.monotonic()
        figures = dict(self.evaluate(self._whole(state.params)))
        best = self._best_step() if ends else None  # then it is what the state holds
        self._log({"step": done, EVALUATION: {**figures, "step": done if best is None else best}})
        clock.paused(EVALUATION, time.monotonic() - began, figures.get("elapsed_s"), free=True)

    def _measure(self, done: int, state: State, clock: Clock) -> None:
        assert self.held_out is not None
        began = time.monotonic()
        figures = self.held_out_figures(state)
        if not math.isfinite(figures["loss"]):
            raise TrainingStopped(
                f"the held-out loss of step {done} is {figures['loss']}; expected a number: lower --learning-rate, or "
                "give --held-out 0 if the drafter can propose no token of the held-out documents"
            )
        line = {"step": done, HELD_OUT: {**figures, "documents": self.held_out.digest}}
        stopped = done < self.steps and done % self.held_out_every > 0
        self._log({**line, "stopped": True} if stopped else line)
        clock.paused(HELD_OUT, time.monotonic() - began)

    def held_out_figures(self, state: State) -> dict[str, Any]:
        """Compute loss, hits and score on the held-out documents. The loss is nan if no row counts."""
        assert self.held_out is not None
        program = sums_program(self.config, self.recipe, self._mesh)
        figures = _figures([program(state.params, self._on_devices, batch) for batch in self.held_out])
        return {**figures, "score": score_of(self.recipe.loss, figures["loss"], figures["hits_by_depth"])}

    def _best_step(self) -> int | None:
        if self.held_out is None:
            return None
        lines = (line for line in read_log(self.out / LOG) if HELD_OUT in line)
        best = best_held_out(line for line in lines if line[HELD_OUT]["documents"] == self.held_out.digest)
        return None if best is None else best["step"]

    def _best(self, checkpoints: Checkpoints, done: int, state: State, initial: DrafterParams) -> State:
        """Return the state of the best step; if it is another than `state`, free `state` and read a checkpoint.

        initial: step 0, which has no checkpoint.
        """
        best = self._best_step()
        if best is None or best == done:
            return state
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        jax.tree.map(lambda leaf: leaf.delete(), state)
        return checkpoints.read(best, shapes) if best else self.begin(initial)

    @functools.cached_property
    def _on_devices(self) -> Fixed:
        return cast(Fixed, self._replicated(self.fixed))

    def compiled(self) -> Callable[[State, RowBatch], tuple[State, Record]]:
        """Compile a step over all devices; a call donates the state's memory."""
        step = step_program(self.config, self.recipe, self._mesh)
        steps = self._replicated(jnp.float32(self.steps))
        return lambda state, batch: step(state, steps, self._on_devices, batch)

    def begin(self, initial: DrafterParams) -> State:
        without: dict[str, Any] = {} if self.fixed.frozen is None else {"embedding": None, "lm_head": None}
        trained = dataclasses.replace(initial, draft_to_target=None, **without)
        params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), trained)
        rule = optimizer(self.recipe, jnp.float32(self.steps))
        return cast(State, self._replicated(State(params, rule.init(params))))

    @property
    def _mesh(self) -> Mesh:
        return devices_for(self.batches.rows_per_step)

    def _whole(self, params: DrafterParams) -> DrafterParams:
        one, fixed = jax.devices()[0], self.fixed
        params = params if fixed.frozen is None else fixed.frozen.within(params)
        on_one = jax.tree.map(lambda leaf: jax.device_put(leaf, one), params)
        return dataclasses.replace(on_one, draft_to_target=fixed.draft_to_target)

    def _replicated(self, tree: Any) -> Any:
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))

    def _log_records(
        self,
        checkpoints: Checkpoints,
        done: int,
        records: list[Record],
        times: Mapping[str, float | None],
        clock: Clock,
    ) -> None:
        loss, norms = (
            np.stack([np.asarray(value) for value in values])
            for values in zip(*((record.sums.loss, record.gradient_norm) for record in records), strict=True)
        )
        if not (np.isfinite(loss).all() and np.isfinite(norms).all()):
            bad = done - len(records) + 1 + int(np.argmin(np.isfinite(loss) & np.isfinite(norms)))
            raise TrainingStopped(
                f"the loss of step {bad} is not finite; {checkpoints.last_good}: lower --learning-rate"
            )
        figures = _figures([record.sums for record in records])
        if not sum(figures["rows_by_depth"]):
            raise TrainingStopped(
                f"the rows of the steps up to {done} hold no trained token; expected some in the data"
            )
        tokens = self.batches.rows_per_step * self.recipe.width
        self._log(
            {
                "step": done,
                "steps": self.steps,
                "epochs": [round(source.epochs(done), 3) for source in self.batches.sources],
                **figures,
                "gradient_norm": float(norms.mean()),
                **times,
                "tok_per_s": None if clock.step_s is None else round(tokens / clock.step_s),
            }
        )

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
