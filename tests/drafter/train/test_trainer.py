"""A training reaches the same bits however often it is killed, and stops if it cannot continue."""

import contextlib
import dataclasses
import json
import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import drafter.train.trainer
from drafter.params import DrafterParams, init_params
from drafter.train.checkpoints import TrainingStopped
from drafter.train.clock import Clock
from drafter.train.folder import CHECKPOINTS, LOG, best_held_out, read_log, steps_done
from drafter.train.held_out import HeldOut
from drafter.train.optimizer import rate_schedule
from drafter.train.row_batches import DocumentSource, RowBatches, pack
from drafter.train.trainer import Trainer
from peagle.base.errors import InputError
from tests.support.trainers import CONFIG, RECIPE, curve, document, initial, keep_programs, same, trainer

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", autouse=True)
def _programs_are_kept() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        keep_programs(patch)
        yield


def steps_of(out: Path, kind: str) -> list[int]:
    return [line["step"] for line in read_log(out / LOG) if kind in line]


class Straight(NamedTuple):
    """A training without interruptions, evaluated at every eighth step."""

    out: Path
    params: DrafterParams
    curve: list[tuple[int, float]]
    evaluated: list[DrafterParams]
    progress: list[tuple[int, bool]]  # (step, whether the time left was told)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    out = tmp_path_factory.mktemp("straight") / "run"
    evaluated: list[DrafterParams] = []
    progress: list[tuple[int, bool]] = []

    def evaluate(params: DrafterParams) -> dict[str, Any]:
        evaluated.append(jax.tree.map(jnp.copy, params))
        return {"acceptance_length": 1.5}

    training = trainer(
        out,
        evaluate=evaluate,
        evaluate_every=8,
        progress=lambda step, left_s: progress.append((step, left_s is not None)),
    )
    return Straight(out, training.run(initial()), curve(out), evaluated, progress)


def test_it_learns_and_tells_its_progress_after_every_step(straight: Straight) -> None:
    assert [step for step, _ in straight.curve] == [2, 4, 6, 8, 10, 12]
    assert straight.curve[-1][1] < 0.8 * straight.curve[0][1]
    assert straight.progress == [(step, step > 1) for step in range(1, 13)]
    assert steps_of(straight.out, "evaluation") == [8, 12]
    assert same(straight.evaluated[-1], straight.params)


def test_stopped_anywhere_it_saves_the_last_step_and_continues_to_the_same_bits(
    tmp_path: Path, straight: Straight
) -> None:
    """Stopped by should_stop, as by a deadline, and by Ctrl-C in an evaluation; neither at a step of save_every."""
    out, stops = tmp_path / "run", iter([False] * 3 + [True])

    def evaluate(_: DrafterParams) -> dict[str, float]:
        if steps_done(out) == 4:
            raise KeyboardInterrupt
        return {"acceptance_length": 1.0}

    trainer(out, evaluate=evaluate, should_stop=lambda: next(stops)).run(initial())
    assert steps_done(out) == 3
    assert [(line["step"], "evaluation" in line) for line in read_log(out / LOG)] == [(2, False), (3, False), (3, True)]
    stopped = trainer(out, evaluate=evaluate, evaluate_every=5).run(initial())
    assert steps_done(out) == 5
    assert same(stopped, trainer(out, should_stop=lambda: True).run(initial())), "what the checkpoint holds"
    assert same(trainer(out).run(initial()), straight.params)
    assert steps_done(out) == 12
    assert steps_of(out, "loss") == [2, 3, 4, 5, 6, 8, 10, 12]


def test_with_more_steps_it_continues_at_the_rates_of_a_longer_training(tmp_path: Path) -> None:
    """A training with these rates from the start ends differently. The program of the shorter one trains both."""
    out = tmp_path / "run"
    trainer(out, steps=4).run(initial())
    programs = drafter.train.trainer.step_program.cache_info().misses  # type: ignore[attr-defined]
    params = trainer(out, steps=6).run(initial())
    assert (steps_done(out), steps_of(out, "loss")) == (6, [2, 4, 6])
    assert not same(params, trainer(tmp_path / "straight", steps=6).run(initial()))
    assert drafter.train.trainer.step_program.cache_info().misses == programs  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("steps", "warmup", "decay"), [(2, 0.0, 1.0), (7, 0.3, 0.5), (20, 0.1, 0.95), (600, 0.02, 0.6)]
)
def test_the_rate_rises_stays_and_falls(steps: int, warmup: float, decay: float) -> None:
    """Against optax's schedules."""
    recipe = dataclasses.replace(RECIPE, learning_rate=0.5, warmup_frac=warmup, decay_frac=decay)
    rises = max(1, int(steps * warmup))
    falls = min(max(1, int(steps * decay)), max(1, steps - rises))
    expected = optax.join_schedules(
        [optax.linear_schedule(0.0, 0.5, rises), optax.constant_schedule(0.5), optax.linear_schedule(0.5, 0.0, falls)],
        [rises, steps - falls],
    )
    every = jnp.arange(steps + 2)
    with jax.numpy_dtype_promotion("standard"):
        rates = jax.vmap(rate_schedule(recipe, jnp.float32(steps), 0.5))(every)
        np.testing.assert_allclose(rates, jax.vmap(expected)(every), atol=1e-6)


def test_the_time_left_counts_neither_compiling_nor_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("drafter.train.clock.time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = Clock()
    now[0] += 100  # compiling
    clock.stepped()
    assert clock.left_s(10, {}) is None
    for seconds in (2, 2, 50, 2, 2):  # one was disturbed
        now[0] += seconds
        clock.stepped()
    assert clock.left_s(10, {"evaluation": 3}) == 20
    for pause, again_s, expected in ((90.0, None, 0), (30.0, None, 30), (90.0, 25.0, 25)):  # the first one compiles
        now[0] += pause
        clock.paused("evaluation", pause, again_s)
        now[0] += 2
        clock.stepped()
        assert clock.left_s(10, {"evaluation": 3}) == 20 + 3 * expected


def test_minutes_count_neither_the_first_step_nor_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """They also bound the time left."""
    now = [100.0]
    monkeypatch.setattr("drafter.train.clock.time", SimpleNamespace(monotonic=lambda: now[0]))
    clock, budget_s = Clock(1.0), []
    for seconds in (500, 59, 1):  # loading and compiling; two steps
        now[0] += seconds
        clock.stepped()
        budget_s.append(clock.budget_s)
        now[0] += 600
        clock.paused("evaluation", 600.0, free=True)
    assert budget_s == [60.0, 1.0, 0.0]
    assert clock.left_s(1000, {}) == 0.0
    assert Clock(0.0).budget_s == 0
    assert Clock(None).budget_s == math.inf


class Killed(BaseException):
    """Stands in for a kill: nothing catches it."""


@pytest.mark.parametrize("at", [9, 3])
def test_a_killed_training_continues_to_the_same_bits(tmp_path: Path, straight: Straight, at: int) -> None:
    """After a checkpoint, and before any."""

    def watch(line: Mapping[str, Any]) -> None:
        if line["step"] >= at:
            raise Killed

    with pytest.raises(Killed):
        trainer(tmp_path / "run", watch=watch).run(initial())
    assert same(trainer(tmp_path / "run").run(initial()), straight.params)
    assert curve(tmp_path / "run") == straight.curve


# Held-out documents


def watched(out: Path, **options: Any) -> Trainer:
    """Train on even tokens, and measure odd ones after every second step: none is right, and the loss soon rises."""
    recipe = dataclasses.replace(RECIPE, learning_rate=0.005)
    training = trainer(out, recipe, starts=range(0, 30, 2), **options)
    others = HeldOut.of([document(start, 9) for start in (3, 9, 15)], training.batches)
    return dataclasses.replace(training, held_out=others, held_out_every=2)


def held_out_losses(out: Path) -> dict[int, float]:
    return {line["step"]: line["held_out"]["loss"] for line in read_log(out / LOG) if "held_out" in line}


def best_of(losses: Mapping[int, float]) -> int:
    return min(losses, key=lambda step: losses[step])


@pytest.fixture(scope="module")
def watched_straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DrafterParams, dict[int, DrafterParams]]:
    """Train without interruptions: (the folder, the result, the parameters after every second step)."""
    out = tmp_path_factory.mktemp("watched") / "run"
    by_step: dict[int, DrafterParams] = {}

    def evaluate(params: DrafterParams) -> dict[str, Any]:
        by_step[max(held_out_losses(out))] = jax.tree.map(jnp.copy, params)
        return {}

    return out, watched(out, evaluate=evaluate, evaluate_every=2).run(initial()), by_step


def test_the_step_that_is_best_on_held_out_documents_is_kept(
    watched_straight: tuple[Path, DrafterParams, dict[int, DrafterParams]],
) -> None:
    """It is the result, it is what the last evaluation measures, and its checkpoint stays."""
    out, params, by_step = watched_straight
    losses = held_out_losses(out)
    assert list(losses) == [2, 4, 6, 8, 10, 12]
    best = best_of(losses)
    assert best < 12, losses
    assert same(params, by_step[best])
    assert not same(params, by_step[10])
    assert same(params, by_step[12])
    assert {int(path.name) for path in (out / CHECKPOINTS).iterdir()} >= {best, 12}


def test_the_held_out_loss_is_the_loss_of_those_documents(tmp_path: Path) -> None:
    """With what is trained on held out, it is the loss of the step."""
    training = trainer(tmp_path / "run")
    rows = training.batches.sources[0].rows
    held_out = HeldOut.of([document for row in rows[:2] for document in row.documents], training.batches)
    training = dataclasses.replace(training, held_out=held_out)
    figures = training.held_out_figures(training.begin(initial()))
    (batch,) = held_out
    _, record = training.compiled()(training.begin(initial()), batch)
    assert figures["rows_by_depth"] == record.sums.rows.tolist()
    assert figures["loss"] == pytest.approx(float(record.sums.loss / record.sums.rows.sum()), rel=1e-5)


def test_stopped_anywhere_it_keeps_the_step_that_it_would_have_kept(
    tmp_path: Path, watched_straight: tuple[Path, DrafterParams, dict[int, DrafterParams]]
) -> None:
    """A stop between two measurements is measured, too. It is the best here, but only until training continues."""
    straight_out, straight_params, _ = watched_straight
    out = tmp_path / "run"
    for stop in (3, 4, 7):
        stops = iter([False] * (stop - steps_done(out)) + [True])
        stopped = watched(out, should_stop=lambda stops=stops: next(stops)).run(initial())
        assert list(held_out_losses(out))[-1] == stop
        assert same(stopped, straight_params) == (stop > 3)
    assert same(watched(out).run(initial()), straight_params)
    assert held_out_losses(out) == held_out_losses(straight_out)


def test_a_stop_that_was_the_best_does_not_displace_the_best_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints that are no measurements come between: it goes on, and step 3 is the result."""
    out, scores = tmp_path / "run", {3: 2.0, 6: 1.5, 7: 2.5, 9: 1.6, 12: 1.7}
    measure = Trainer._measure

    def measured(self: Trainer, done: int, *rest: Any) -> None:
        figures = {"loss": 1.0, "hits_by_depth": [0.5], "rows_by_depth": [1], "score": scores[done]}
        monkeypatch.setattr(Trainer, "held_out_figures", lambda *_: figures)
        measure(self, done, *rest)

    monkeypatch.setattr(Trainer, "_measure", measured)
    stops = iter([False] * 7 + [True])
    dataclasses.replace(watched(out, should_stop=lambda: next(stops)), held_out_every=3).run(initial())
    dataclasses.replace(watched(out, should_stop=lambda: True), held_out_every=3).run(initial())
    assert best_held_out(read_log(out / LOG))["step"] == 7
    dataclasses.replace(watched(out), held_out_every=3).run(initial())
    assert best_held_out(read_log(out / LOG))["step"] == 3
    assert {int(path.name) for path in (out / CHECKPOINTS).iterdir()} >= {3, 12}


@pytest.mark.parametrize(("trained", "rate", "kept"), [(True, 10.0, True), (False, 0.02, False)])
def test_the_start_is_step_0_and_is_kept_if_no_step_is_better(
    tmp_path: Path, straight: Straight, trained: bool, rate: float, kept: bool
) -> None:
    """Measured once, before the first step and by `evaluate`, too; a training that goes on knows it."""
    out, stops = tmp_path / "run", iter([False] * 5 + [True])
    start = straight.params if trained else initial()
    evaluated: list[DrafterParams] = []

    def evaluate(params: DrafterParams) -> dict[str, Any]:
        evaluated.append(jax.tree.map(jnp.copy, params))
        return {}

    def training(**options: Any) -> Trainer:
        recipe = dataclasses.replace(RECIPE, learning_rate=rate)
        of_documents = trainer(out, recipe, evaluate=evaluate, measure_start=True, held_out_every=4, **options)
        others = HeldOut.of([document(start, 9) for start in range(3)], of_documents.batches)
        return dataclasses.replace(of_documents, held_out=others)

    training(should_stop=lambda: next(stops)).run(start)
    params = training().run(start)
    assert list(held_out_losses(out)) == [0, 4, 8, 12]
    assert steps_of(out, "evaluation") == [0, 5, 12]
    best = best_held_out(read_log(out / LOG))
    measured = [line["evaluation"]["step"] for line in read_log(out / LOG) if "evaluation" in line]
    assert measured[0] == 0
    assert best is not None
    assert measured[-1] == best["step"]
    assert same(evaluated[0], start)
    assert same(evaluated[-1], params)
    assert same(params, start) == kept


def test_a_training_killed_before_its_first_checkpoint_measures_its_start_once_more(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def killed(_: DrafterParams) -> dict[str, Any]:
        raise Killed

    for evaluate in (killed, None):
        training = dataclasses.replace(watched(out, evaluate=evaluate), measure_start=True)
        with contextlib.suppress(Killed):
            training.run(initial())
    assert steps_of(out, "held_out") == [0, 2, 4, 6, 8, 10, 12]


def test_a_training_that_is_told_to_end_is_saved_before_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process manager kills soon after it has asked."""
    out, stops = tmp_path / "run", iter([False] * 3 + [True])

    def killed(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr(Trainer, "held_out_figures", killed)
    training = dataclasses.replace(watched(out, should_stop=lambda: next(stops)), held_out_every=9)
    with pytest.raises(Killed):
        training.run(initial())
    assert steps_done(out) == 3


def test_without_the_checkpoint_of_the_best_step_it_does_not_continue(
    tmp_path: Path, watched_straight: tuple[Path, DrafterParams, dict[int, DrafterParams]]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(watched_straight[0], out)
    best = best_of(held_out_losses(out))
    shutil.rmtree(out / CHECKPOINTS / str(best))
    says = f"by log.jsonl step {best} is the best on held-out documents, and .* is missing"
    with pytest.raises(InputError, match=says):
        watched(out).run(initial())


# Recipes


@pytest.mark.slow
def test_muon_and_bfloat16_train_too(tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, optimizer="muon", compute_dtype="bfloat16")
    trainer(tmp_path / "run", recipe).run(initial())
    losses = curve(tmp_path / "run")
    assert losses[-1][1] < losses[0][1]


def test_data_with_and_without_stored_results_of_the_target_train_together() -> None:
    """Then the target runs for all: a batch uses stored results only if all of its rows have them."""
    stored = {"aux_hidden": np.zeros((7, CONFIG.aux_width), np.float32)}
    with_aux = DocumentSource(pack([dataclasses.replace(document(0, 7), teacher=stored)], RECIPE.width), 1)
    without = DocumentSource(pack([document(1, 7)], RECIPE.width), 1)

    def teacher(*sources: DocumentSource) -> set[str]:
        return set(RowBatches(sources, RECIPE).at(0).teacher)

    assert teacher(with_aux) == {"aux_hidden"}
    assert teacher(with_aux, without) == teacher(without, with_aux) == set()


# What ends it


def test_a_loss_that_is_not_finite_stops_it_with_the_last_good_step(tmp_path: Path) -> None:
    broken = trainer(tmp_path / "run")
    fine = broken.batches

    class Breaking:
        recipe, sources, rows_per_step = fine.recipe, fine.sources, fine.rows_per_step

        def at(self, step: int) -> Any:
            batch = fine.at(step)
            return dataclasses.replace(batch, trained=batch.trained * (np.nan if step == 6 else 1.0))

    broken.batches = Breaking()  # type: ignore[assignment]
    with pytest.raises(TrainingStopped, match="the loss of step 7 is not finite; the last good step is 4, in"):
        broken.run(initial())
    assert sorted(path.name for path in (tmp_path / "run" / CHECKPOINTS).iterdir()) == ["4"]


def cut_largest_file(out: Path) -> Trainer:
    largest = max((out / CHECKPOINTS / "12").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    largest.write_bytes(largest.read_bytes()[:100])
    return trainer(out)


def widen_mlp(out: Path) -> Trainer:
    return dataclasses.replace(trainer(out), config=dataclasses.replace(CONFIG, mlp_width=16))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (cut_largest_file, r"cannot continue from step 12: .* has 100 bytes, \d+ were.* continue from the one before"),
        (widen_mlp, r"cannot continue from step 12: .*down is \(14, 12\) in it and \(16, 12\) in this"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_one_line(
    tmp_path: Path, straight: Straight, spoil: Callable[[Path], Trainer], says: str
) -> None:
    shutil.copytree(straight.out, tmp_path / "run")
    training = spoil(tmp_path / "run")
    with pytest.raises(InputError, match=says) as error:
        training.run(jax.jit(init_params, static_argnums=0)(training.config, jax.random.key(0)))
    assert "\n" not in str(error.value)


# in a process of its own: orbax's threads go on after a write that failed
FULL_DISK = """
import resource, sys
from pathlib import Path
from drafter.train.trainer import TrainingStopped
from tests.support.trainers import initial, trainer

soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
for largest in sys.argv[2:]:
    def fill(line):
        if line["step"] == 6:  # from here on no file can grow beyond this, as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest), hard))

    try:
        trainer(Path(sys.argv[1], largest), watch=fill).run(initial())
    except TrainingStopped as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        print(error)
"""


def test_a_full_disk_stops_it_with_the_last_good_step_and_it_continues_from_there(
    tmp_path: Path, straight: Straight
) -> None:
    """There is room for the log, but not for a checkpoint; and not for the log either."""
    says = {"3000": "the checkpoint of step 8 cannot be written", "600": "cannot be written: File too large"}
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path), *says]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for (largest, why), line in zip(says.items(), done.stdout.splitlines(), strict=True):
        out = tmp_path / largest
        assert why in line
        assert f"the last good step is 4, in {out / CHECKPOINTS}" in line
        assert same(trainer(out).run(initial()), straight.params)
        assert curve(out) == straight.curve


def test_a_checkpoint_without_room_on_the_disk_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(TrainingStopped, match=r"has 1\.0 kB left: No space left on device; there is no checkpoint yet"):
        trainer(out).run(initial())
    assert not list((out / CHECKPOINTS).iterdir())


def test_an_interrupted_evaluation_is_repeated(tmp_path: Path) -> None:
    def killed(_: DrafterParams) -> dict[str, Any]:
        raise Killed

    def evaluate(_: DrafterParams) -> dict[str, Any]:
        return {"acceptance_length": 1.5}

    out = tmp_path / "run"
    for every in (4, 0):  # within the training, and at its end
        with pytest.raises(Killed):
            trainer(out, evaluate=killed, evaluate_every=every).run(initial())
        trainer(out, evaluate=evaluate, evaluate_every=every).run(initial())
        (out / LOG).write_text("".join(f"{json.dumps(line)}\n" for line in read_log(out / LOG) if line["step"] < 12))
    trainer(out, evaluate=evaluate, evaluate_every=4).run(initial())
    assert steps_of(out, "evaluation") == [4, 8, 12]


# stops in its second step, before the step is saved or before the written files are renamed, to be killed there
PROCESS = """
import os, sys
from pathlib import Path
from tests.support.trainers import initial, trainer

out, within_a_write = Path(sys.argv[1]), sys.argv[2] == "True"
rename, lines = os.rename, []

def stop():
    print("here", flush=True)
    sys.stdin.read()

def watch(line):
    lines.append(line)
    if len(lines) == 2 and not within_a_write:
        stop()

def renaming(old, new, *rest, **named):
    if len(lines) == 2 and Path(new).parent.name == "checkpoints":
        stop()
    return rename(old, new, *rest, **named)

os.rename = renaming
trainer(out, watch=watch, save_every=1, log_every=1).run(initial())
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_continues(tmp_path: Path, straight: Straight) -> None:
    """kill -9 between steps, and during the write of a checkpoint."""
    out = tmp_path / "run"
    out.mkdir()
    for within_a_write in (False, True, False, True):
        command = [sys.executable, "-c", PROCESS, str(out), str(within_a_write)]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"here\n"
            process.kill()
            assert process.wait() == -signal.SIGKILL
        assert any("tmp" in path.name for path in (out / CHECKPOINTS).glob("*")) == within_a_write
    assert same(trainer(out, save_every=1, log_every=1).run(initial()), straight.params)
    assert steps_of(out, "loss") == list(range(1, 13))
