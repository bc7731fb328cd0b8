"""`peagle train`: check everything, write the recipe, train the drafter, export it."""

import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drafter.load import sort_aux_layers
from drafter.params import DrafterParams
from drafter.train.batches import Batches
from drafter.train.cod import Cod
from drafter.train.folder import LOG, read_log, steps_done
from drafter.train.trainer import Recipe, Trainer, TrainingStopped
from peagle.cli.curve import draw
from peagle.cli.display import Display
from peagle.cli.settings.shared import parse_layers
from peagle.cli.settings.train import ShapeOptions, TrainSettings
from peagle.loading import DEMO, default_dtype, load, resolve
from peagle.measure.metrics import figure_text
from peagle.ops import interrupt
from peagle.ops.checkpoint import fingerprint
from peagle.ops.errors import InputError
from peagle.text.prompt_files import PromptSet, left_out_line, read_prompts
from peagle.text.prompts import Rendering
from peagle.workflows.export import with_positions, write_with_card
from peagle.workflows.training import (
    MEASURED_STEPS,
    PLANNED_FRAC,
    Acceptance,
    Deadline,
    DrafterShape,
    anchors,
    begun_in,
    check_teachers,
    check_tokens,
    drafter_config,
    initial_params,
    record_recipe,
    seconds_per_step,
    self_contained,
    shares,
    sources,
)
from target.load import inspect_target, load_target
from target.teacher import Teacher


def train_command(settings: TrainSettings) -> int:
    """Check everything, write the recipe, train, and export the drafter. Return the exit code.

    The folder --out then holds the recipe, the log, checkpoints, a curve, and in drafter/ the trained drafter. Raises
    InputError before anything is written for whatever can be known then, and for a training that cannot go on;
    KeyboardInterrupt after Ctrl-C, when the newest checkpoint holds the last step.
    """
    if settings.minutes is not None and not 0 < settings.minutes < math.inf:
        raise InputError(f"--minutes is {settings.minutes:g}; expected a number above 0")
    name = settings.target or DEMO
    directory = resolve(name, "target")
    files = inspect_target(directory)
    out = Path(settings.out)
    parts = shares(settings.data)
    rows, documents = sources(parts, settings.rows, settings.width)
    shape = _shape(settings.shape)
    config, vocab = drafter_config(shape, files.config, files.stop_token_ids, directory, documents)
    check_tokens(documents, config)
    weights = fingerprint(directory)
    check_teachers([folder for folder, _ in parts], config, weights)
    recipe = _recipe(settings, steps=settings.steps or 1)
    if not 1 <= shape.mask_hiddens <= max(1, settings.depth - 1):
        raise InputError(f"--mask-hiddens is {shape.mask_hiddens}; expected 1..{max(1, settings.depth - 1)}")
    counts = recipe.segments.counts(recipe.cod, anchors(rows, recipe.width))
    batches = Batches(rows, recipe.width, recipe.cod, recipe.segments, counts, recipe.seed)
    begun = begun_in(out)
    if begun is None and settings.steps is None and settings.minutes is None:
        raise InputError("a new training needs --steps or --minutes")
    display = Display(text=False, quiet=settings.quiet, total=1, streaming=False)

    held_out = _held_out(settings, directory, display)
    with display.stage(f"loading {'the demo target' if name == DEMO else name}") as progress:
        loaded = load_target(directory, dtype=jnp.dtype(default_dtype()), progress=progress)
    initial = initial_params(shape.init, settings.seed, config, loaded, vocab)
    ids = None if initial.draft_to_target is None else np.asarray(initial.draft_to_target)
    teacher = None if self_contained(documents) else Teacher(loaded.params, loaded.config, config.aux_layer_ids or ())
    deadline = Deadline(settings.minutes)
    evaluate = None
    if held_out is not None:
        plain, k = load(name, None), settings.num_speculative_tokens
        acceptance = Acceptance(plain, config, held_out, settings.evaluate_prompts, k)

        def evaluate(params: DrafterParams) -> Mapping[str, Any]:
            with deadline.moved():
                return acceptance.of(params)

    trainer = Trainer(out, config, recipe, batches, teacher, ids)
    steps = begun["recipe"]["steps"] if begun is not None and settings.steps is None else settings.steps
    if steps is None:
        steps = _planned(settings.minutes, trainer, initial, display)
    recipe = dataclasses.replace(recipe, steps=steps)
    record_recipe(out, begun, recipe, config, settings.data, settings.rows, documents, weights)

    started = time.monotonic()
    _say_where_it_begins(display, out, steps, None if begun is None else begun["recipe"]["steps"])

    def kept() -> str:
        return f"{steps_done(out)} of {steps} steps are kept in {out}; the same command goes on after them"

    with display.keeping(kept), display.stage("training", animated=False) as progress:

        def watch(line: Mapping[str, Any]) -> None:
            progress(line["step"], recipe.steps)
            display.note(_shown(line))

        trainer = dataclasses.replace(
            trainer,
            recipe=recipe,
            evaluate=evaluate,
            evaluate_every=settings.evaluate_every,
            save_every=settings.save_every,
            watch=watch,
            should_stop=lambda: interrupt.asked() or deadline.over(),
        )
        try:
            params = trainer.run(initial)
        except TrainingStopped as error:
            raise InputError(str(error)) from None
        interrupt.check()
    if steps_done(out) < steps:
        display.note(f"--minutes {settings.minutes:g} are over: {kept()}")
    trained = dataclasses.replace(params, draft_to_target=None)
    shipped = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), trained)
    shipped = dataclasses.replace(shipped, draft_to_target=params.draft_to_target)
    shipped, config = sort_aux_layers(shipped, with_positions(config, files.config, out))
    write_with_card(out / "drafter", shipped, config, settings.dialect, name, files.config, out)
    lines = [f"drafter      {out / 'drafter'} | {steps_done(out)} steps | {time.monotonic() - started:.0f} s now"]
    lines.append(f"curve        {draw(list(read_log(out / LOG)), out)}")
    if held_out is not None and held_out.left_out:
        lines.append(f"left out     of --evaluate {left_out_line(held_out.left_out)}")
    display.summary(lines)
    return 0


def _shape(options: ShapeOptions) -> DrafterShape:
    layers = {"taps": parse_layers(options.taps, "--taps"), "aux_layer_ids": parse_layers(options.aux_layer_ids)}
    return DrafterShape(**{**vars(options), **layers})


def _held_out(settings: TrainSettings, directory: Path, display: Display) -> PromptSet | None:
    if settings.evaluate is None:
        return None
    held_out = read_prompts(Path(settings.evaluate), directory, Rendering(), strict=settings.strict)
    if held_out.left_out:
        display.note(f"left out: {left_out_line(held_out.left_out)}")
    return held_out


def _say_where_it_begins(display: Display, out: Path, steps: int, steps_before: int | None) -> None:
    """steps_before: of the training that goes on; None for a new one."""
    done = steps_done(out)
    if steps_before not in (None, steps):
        display.note(
            f"goes on from step {done} with {steps} steps instead of {steps_before}: the learning rate is from here on "
            f"that of a training of {steps} steps"
        )
    if done < steps:
        display.note(f"training steps {done + 1} to {steps}; the first one compiles")
    else:
        display.note(f"{out} has all of its steps, {steps}; a larger --steps goes on with more")


def _recipe(settings: TrainSettings, steps: int) -> Recipe:
    return Recipe(
        steps=steps,
        width=settings.width,
        cod=Cod(settings.depth, settings.ratio, settings.min_ratio),
        parts=settings.parts,
        loss=settings.loss,
        optimizer=settings.optimizer,
        learning_rate=settings.learning_rate,
        other_rate=settings.learning_rate if settings.other_rate is None else settings.other_rate,
        weight_decay=settings.weight_decay,
        warmup_frac=settings.warmup,
        decay_frac=settings.decay,
        clip_norm=settings.clip,
        train_embedding=not settings.freeze_embedding,
        compute_dtype=settings.dtype,
        seed=settings.seed,
    )


def _planned(minutes: float | None, trainer: Trainer, initial: DrafterParams, display: Display) -> int:
    """Plan as many steps as fit into most of --minutes, by a measured one. Raises InputError where not one does."""
    assert minutes is not None
    display.note(f"compiling, and measuring {MEASURED_STEPS} steps: how many fit into {minutes:g} minutes")
    with display.stage("measuring a step", animated=False):
        step_s = seconds_per_step(trainer, initial)
    steps = int(PLANNED_FRAC * 60 * minutes / step_s)
    if not steps:
        raise InputError(
            f"--minutes is {minutes:g}, and a step takes {step_s:.2g} s; expected time for a step, or --steps"
        )
    display.note(f"a step takes {step_s:.2g} s: {steps} steps are planned")
    return steps


def _shown(line: Mapping[str, Any]) -> str:
    """A line of the log, for a person."""
    if "evaluation" in line:
        found = line["evaluation"]
        lengths = [figure_text(found[f"acceptance_length{of}"], ".2f") for of in ("", "_without_loops")]
        return (
            f"step {line['step']}: acceptance length {lengths[0]}, without loops {lengths[1]}, of "
            f"{found['num_outputs']} held-out prompts"
        )
    minutes = line["left_s"] / 60
    return (
        f"step {line['step']} of {line['steps']}: loss {line['loss']:.3f}, right by depth "
        f"{' '.join(format(x, '.2f').lstrip('0') for x in line['hits_by_depth'])}, {minutes:.0f} min left"
    )
