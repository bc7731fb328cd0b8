"""A training reaches the same bits however often it is killed, and stops if it cannot continue."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from drafter.config import DrafterConfig
from drafter.params import DrafterParams, init_params
from drafter.train.batches import Batches, Source, pack
from drafter.train.config import Cod
from drafter.train.folder import CHECKPOINTS, LOG, read_log, steps_done
from drafter.train.held_out import HeldOut
from drafter.train.recipe import Recipe, rate_schedule
from drafter.train.shards import Document
from drafter.train.step import step_program
from drafter.train.trainer import Pace, Trainer, TrainingStopped
from peagle.ops.errors import InputError
from peagle.ops.rope import RopeConfig

VOCAB = 23
CONFIG = DrafterConfig(
    hidden_size=12,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_width=14,
    target_hidden_size=10,
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    mask_token_id=VOCAB - 1,
    rope=RopeConfig(8, 10000.0),
    num_taps=2,
    aux_layer_ids=(0, 1),
)
RECIPE = Recipe(steps=12, width=24, cod=Cod(depth=3), learning_rate=0.02, other_rate=0.02)
ROOT = Path(__file__).parents[3]


@flax.struct.dataclass
class Counting:
    """A target whose next token depends on the last one: the next but one in the vocabulary. Its aux_hidden is that
    token's row of a table."""

    table: jax.Array

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del positions, segment_ids
        following = (token_ids + 2) % (VOCAB - 1)
        return 20 * jax.nn.one_hot(following, VOCAB), self.table[token_ids]


def document(start: int, size: int) -> Document:
    return Document((start + 2 * np.arange(size)).astype(np.int32) % (VOCAB - 1), np.arange(size) >= 2)


def trainer(
    out: Path, recipe: Recipe = RECIPE, rows: int = 2, starts: Iterable[int] = range(30), **options: Any
) -> Trainer:
    source = Source(pack([document(start, 7 + start % 5) for start in starts], recipe.width), rows)
    counts = recipe.segments.counts(recipe.cod, recipe.width)
    batches = Batches((source,), recipe.width, recipe.cod, recipe.segments, counts, recipe.seed)
    table = jax.random.normal(jax.random.key(3), (VOCAB, CONFIG.aux_width), jnp.float32)
    given = {"save_every": 4, "log_every": 2, **options}
    out.mkdir(exist_ok=True)
    return Trainer(out, CONFIG, recipe, batches, Counting(table), **given)


def initial() -> DrafterParams:
    return jax.jit(init_params, static_argnums=0)(CONFIG, jax.random.key(0))


def same(one: DrafterParams, other: DrafterParams) -> bool:
    return all(bool(np.array_equal(a, b)) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def curve(out: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_log(out / LOG) if "loss" in line]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[DrafterParams, list[tuple[int, float]]]:
    """Train without interruptions."""
    out = tmp_path_factory.mktemp("straight") / "run"
    return trainer(out).run(initial()), curve(out)


def test_it_learns(straight: tuple[DrafterParams, list[tuple[int, float]]]) -> None:
    _, losses = straight
    assert [step for step, _ in losses] == [2, 4, 6, 8, 10, 12]
    assert losses[-1][1] < 0.8 * losses[0][1]


def test_stopped_anywhere_it_saves_the_last_step_and_continues_to_the_same_bits(
    tmp_path: Path, straight: tuple[DrafterParams, list[tuple[int, float]]]
) -> None:
    """Stopped by should_stop, as by a deadline, and by Ctrl-C in an evaluation; neither at a step of save_every."""
    out, asked = tmp_path / "run", iter([False] * 3 + [True])

    def evaluate(_: DrafterParams) -> dict[str, float]:
        if steps_done(out) == 4:
            raise KeyboardInterrupt
        return {"acceptance_length": 1.0}

    trainer(out, evaluate=evaluate, should_stop=lambda: next(asked)).run(initial())
    assert steps_done(out) == 3
    assert [(line["step"], "evaluation" in line) for line in read_log(out / LOG)] == [(2, False), (3, False), (3, True)]
    with pytest.raises(KeyboardInterrupt):
        trainer(out, evaluate=evaluate, evaluate_every=5).run(initial())
    assert steps_done(out) == 5
    params = trainer(out).run(initial())
    assert same(params, straight[0])
    assert steps_done(out) == 12
    assert [step for step, _ in curve(out)] == [2, 3, 4, 5, 6, 8, 10, 12]


def test_with_more_steps_it_continues_at_the_rates_of_a_longer_training(tmp_path: Path) -> None:
    """Its first steps are those of the shorter one; a training with these rates from the start ends differently."""
    out = tmp_path / "run"
    trainer(out, dataclasses.replace(RECIPE, steps=4)).run(initial())
    longer = dataclasses.replace(RECIPE, steps=6)
    params = trainer(out, longer).run(initial())
    assert steps_done(out) == 6
    assert [step for step, _ in curve(out)] == [2, 4, 6]
    moved = trainer(tmp_path / "straight", longer).run(initial())
    assert not same(params, moved)


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
    with jax.numpy_dtype_promotion("standard"):
        found = [float(rate_schedule(recipe, jnp.float32(steps), 0.5)(step)) for step in range(steps + 2)]
        np.testing.assert_allclose(found, [float(expected(step)) for step in range(steps + 2)], atol=1e-6)


def test_a_longer_training_compiles_nothing(tmp_path: Path) -> None:
    """Steps are measured before their number is known; the program that was measured trains."""
    trainer(tmp_path / "run", dataclasses.replace(RECIPE, steps=2)).run(initial())
    programs = step_program.cache_info().misses
    trainer(tmp_path / "run", dataclasses.replace(RECIPE, steps=5)).run(initial())
    assert step_program.cache_info().misses == programs


def test_the_time_left_counts_neither_compiling_nor_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("drafter.train.trainer.time", SimpleNamespace(monotonic=lambda: now[0]))
    pace = Pace()
    now[0] += 100  # compiling
    pace.stepped()
    assert pace.left_s(10, {}) is None
    for seconds in (2, 2, 50, 2, 2):  # one was disturbed
        now[0] += seconds
        pace.stepped()
    assert pace.left_s(10, {"evaluation": 3}) == 20
    now[0] += 30
    pace.paused("evaluation", 30.0)
    now[0] += 2
    pace.stepped()
    assert pace.left_s(10, {"evaluation": 3}) == 20 + 3 * 30


def test_progress_is_told_after_every_step(tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []
    trainer(tmp_path / "run", progress=lambda step, left: seen.append((step, left is not None))).run(initial())
    assert seen == [(step, step > 1) for step in range(1, 13)]


class Killed(BaseException):
    """Stands in for a kill: nothing catches it."""


def watched(out: Path, **options: Any) -> Trainer:
    """Train on even tokens, and measure odd ones after every second step: none is right, and the loss soon rises."""
    recipe = dataclasses.replace(RECIPE, learning_rate=0.005)
    training = trainer(out, recipe, starts=range(0, 30, 2), **options)
    others = HeldOut.of([document(start, 9) for start in (3, 9, 15)], training.batches)
    return dataclasses.replace(training, held_out=others, held_out_every=2)


def held_out_losses(out: Path) -> dict[int, float]:
    return {line["step"]: line["held_out"]["loss"] for line in read_log(out / LOG) if "held_out" in line}


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
    best = min(losses, key=lambda step: losses[step])
    assert best < 12, losses
    assert same(params, by_step[best])
    assert not same(params, by_step[10])
    assert same(params, by_step[12])
    assert {int(path.name) for path in (out / CHECKPOINTS).iterdir()} >= {best, 12}


def test_the_held_out_loss_is_the_loss_of_those_documents(tmp_path: Path) -> None:
    """With what is trained on held out, it is the loss of the step."""
    training = trainer(tmp_path / "run")
    rows = training.batches.sources[0].rows
    documents = [document for row in rows[:2] for document in row.documents]
    held_out = HeldOut.of(documents, training.batches)
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
        asked = iter([False] * (stop - steps_done(out)) + [True])
        stopped = watched(out, should_stop=lambda asked=asked: next(asked)).run(initial())
        losses = held_out_losses(out)
        assert min(losses, key=lambda step: losses[step]) == 3
        assert same(stopped, straight_params) == (stop > 3)
    assert same(watched(out).run(initial()), straight_params)
    assert {step: loss for step, loss in held_out_losses(out).items() if step % 2 == 0} == held_out_losses(straight_out)


def test_without_the_checkpoint_of_the_best_step_it_does_not_continue(
    tmp_path: Path, watched_straight: tuple[Path, DrafterParams, dict[int, DrafterParams]]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(watched_straight[0], out)
    losses = held_out_losses(out)
    best = min(losses, key=lambda step: losses[step])
    shutil.rmtree(out / CHECKPOINTS / str(best))
    with pytest.raises(
        InputError, match=f"by log.jsonl step {best} is the best on held-out documents, and .* is missing"
    ):
        watched(out).run(initial())


@pytest.mark.parametrize("at", [9, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_training_continues_to_the_same_bits(
    tmp_path: Path, straight: tuple[DrafterParams, list[tuple[int, float]]], at: int
) -> None:
    def watch(line: Mapping[str, Any]) -> None:
        if line["step"] >= at:
            raise Killed

    with pytest.raises(Killed):
        trainer(tmp_path / "run", watch=watch).run(initial())
    params = trainer(tmp_path / "run").run(initial())
    assert same(params, straight[0])
    assert curve(tmp_path / "run") == straight[1]


@pytest.mark.slow
def test_in_parts_it_learns_the_same(tmp_path: Path) -> None:
    """The sums are added in another order: close, not equal."""
    cut = trainer(tmp_path / "cut", dataclasses.replace(RECIPE, parts=2))
    # the whole's room, so that the same chains are kept
    counts = tuple((RECIPE.width,) * 2 for _ in range(2))
    cut.batches = dataclasses.replace(cut.batches, counts=counts)
    whole = trainer(tmp_path / "whole")
    whole.batches = dataclasses.replace(whole.batches, counts=((RECIPE.width,) * 2,))
    whole.run(initial())
    cut.run(initial())
    np.testing.assert_allclose(
        [loss for _, loss in curve(tmp_path / "cut")], [loss for _, loss in curve(tmp_path / "whole")], rtol=1e-4
    )


def test_a_frozen_embedding_stays(tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, steps=2, train_embedding=False, weight_decay=0.1)
    params = trainer(tmp_path / "run", recipe).run(initial())
    assert np.array_equal(params.embedding, initial().embedding)
    assert not np.array_equal(params.lm_head, initial().lm_head)


@pytest.mark.slow
def test_muon_and_clipping_and_bfloat16_train_too(tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, optimizer="muon", clip_norm=1.0, compute_dtype="bfloat16")
    trainer(tmp_path / "run", recipe).run(initial())
    losses = curve(tmp_path / "run")
    assert losses[-1][1] < losses[0][1]


def test_a_loss_that_is_not_finite_stops_it_with_the_last_good_step(tmp_path: Path) -> None:
    broken = trainer(tmp_path / "run")
    fine = broken.batches

    class Breaking:
        counts, sources, rows_per_step = fine.counts, fine.sources, fine.rows_per_step

        def at(self, step: int) -> Any:
            batch = fine.at(step)
            return dataclasses.replace(batch, trained=batch.trained * (np.nan if step == 6 else 1.0))

    broken.batches = Breaking()  # type: ignore[assignment]
    with pytest.raises(TrainingStopped, match="the loss of step 7 is not finite; the last good step is 4, in"):
        broken.run(initial())
    assert sorted(path.name for path in (tmp_path / "run" / CHECKPOINTS).iterdir()) == ["4"]


def test_a_checkpoint_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    first = trainer(tmp_path / "run", dataclasses.replace(RECIPE, steps=4))
    first.run(initial())
    other = dataclasses.replace(CONFIG, mlp_width=16)
    second = dataclasses.replace(trainer(tmp_path / "run"), config=other)
    why = r"cannot continue from step 4: .*down is \(14, 12\) in it and \(16, 12\) in this"
    with pytest.raises(InputError, match=why):
        second.run(init_params(other, jax.random.key(0)))


FULL_DISK = """
import resource, sys
from pathlib import Path
from drafter.train.trainer import TrainingStopped
from tests.drafter.train.test_trainer import initial, trainer

def fill(line):
    if line["step"] == 6:  # no file can grow beyond this from here on, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))

try:
    trainer(Path(sys.argv[1]), watch=fill).run(initial())
except TrainingStopped as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("room", "said"),
    [
        (3000, "the checkpoint of step 8 cannot be written"),
        pytest.param(600, "cannot be written: File too large", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_stops_it_with_the_last_good_step_and_it_continues_from_there(
    tmp_path: Path, straight: tuple[DrafterParams, list[tuple[int, float]]], room: int, said: str
) -> None:
    out = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(out), str(room)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert f"the last good step is 4, in {out / CHECKPOINTS}" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert same(trainer(out).run(initial()), straight[0])
    assert curve(out) == straight[1]


def test_evaluations_are_logged(tmp_path: Path) -> None:
    seen: list[DrafterParams] = []

    def evaluate(params: DrafterParams) -> dict[str, Any]:
        seen.append(params)
        return {"acceptance_length": 1.5}

    params = trainer(tmp_path / "run", evaluate=evaluate, evaluate_every=5).run(initial())
    evaluated = [line["step"] for line in read_log(tmp_path / "run" / LOG) if "evaluation" in line]
    assert evaluated == [5, 10, 12]
    assert same(seen[-1], params)


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
    assert [line["step"] for line in read_log(out / LOG) if "evaluation" in line] == [4, 8, 12]


def test_a_truncated_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    out = tmp_path / "run"
    trainer(out).run(initial())
    largest = max((out / CHECKPOINTS / "12").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    largest.write_bytes(largest.read_bytes()[:100])
    with pytest.raises(InputError, match=r"cannot continue from step 12: .* has 100 bytes, \d+ were") as error:
        trainer(out).run(initial())
    assert "\n" not in str(error.value)
    assert "continue from the one before" in str(error.value)


def test_a_checkpoint_without_room_on_the_disk_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(TrainingStopped, match="has 0 MB left: No space left on device; there is no checkpoint yet"):
        trainer(out).run(initial())
    assert not list((out / CHECKPOINTS).iterdir())


# stops in its second step, before the step is saved or before the written files are renamed, to be killed there
PROCESS = """
import os, sys
from pathlib import Path
from tests.drafter.train.test_trainer import initial, trainer

out, within_a_write = Path(sys.argv[1]), sys.argv[2] == "True"
rename, seen = os.rename, []

def stop():
    print("here", flush=True)
    sys.stdin.read()

def watch(line):
    seen.append(line)
    if len(seen) == 2 and not within_a_write:
        stop()

def renaming(old, new, *rest, **named):
    if len(seen) == 2 and Path(new).parent.name == "checkpoints":
        stop()
    return rename(old, new, *rest, **named)

os.rename = renaming
trainer(out, watch=watch, save_every=1, log_every=1).run(initial())
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_continues(
    tmp_path: Path, straight: tuple[DrafterParams, list[tuple[int, float]]]
) -> None:
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
    params = trainer(out, save_every=1, log_every=1).run(initial())
    assert same(params, straight[0])
    lines = [json.loads(text) for text in (out / LOG).read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))


def test_data_with_and_without_stored_results_of_the_target_train_together() -> None:
    """Then the target runs for all: a batch uses stored results only if all of its rows have them."""
    said = {"aux_hidden": np.zeros((7, CONFIG.aux_width), np.float32)}
    with_taps = Source(pack([dataclasses.replace(document(0, 7), teacher=said)], RECIPE.width), 1)
    without = Source(pack([document(1, 7)], RECIPE.width), 1)
    counts = RECIPE.segments.counts(RECIPE.cod, RECIPE.width)

    def teacher(*sources: Source) -> set[str]:
        batches = Batches(sources, RECIPE.width, RECIPE.cod, RECIPE.segments, counts, 0)
        return set(batches.at(0).teacher)

    assert teacher(with_taps) == {"aux_hidden"}
    assert teacher(with_taps, without) == teacher(without, with_taps) == set()
