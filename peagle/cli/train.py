"""`peagle train`: check everything, write the recipe, train the drafter, export it."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drafter.config import DrafterConfig
from drafter.load import Dialect, sort_aux_layers
from drafter.params import DrafterParams
from drafter.train.batches import Batches
from drafter.train.cod import Cod
from drafter.train.folder import COMMAND, LOG, read_log, steps_done
from drafter.train.recipe import Recipe
from drafter.train.shards import Document
from drafter.train.step import devices_for
from drafter.train.trainer import Trainer, TrainingStopped
from drafter.vocabulary import DraftVocab
from peagle.cli.curve import draw
from peagle.cli.display import Display, duration
from peagle.cli.options import given, rebuilt
from peagle.cli.output import say
from peagle.cli.settings.shared import parse_layers
from peagle.cli.settings.train import ShapeOptions, TrainSettings
from peagle.engine.request import check_num_drafts
from peagle.loading import AUTO, DEMO, default_dtype, load, or_demo, resolve
from peagle.measure.metrics import figure_text
from peagle.ops import interrupt
from peagle.ops.checkpoint import fingerprint
from peagle.ops.errors import InputError
from peagle.ops.files import alone
from peagle.parallel import parse_data_mesh
from peagle.text.prompt_files import PromptSet, left_out_line, read_prompts
from peagle.text.prompts import Rendering
from peagle.workflows.export import with_positions, write_with_card
from peagle.workflows.training import (
    MEASURED_STEPS,
    Acceptance,
    Deadline,
    DrafterShape,
    anchors,
    begun_in,
    check_parts,
    check_teachers,
    check_tokens,
    check_window,
    drafter_config,
    even_parts,
    initial_params,
    parse_mix,
    planned_steps,
    record_recipe,
    seconds_per_step,
    self_contained,
    shares,
    sources,
)
from target.config import TargetConfig
from target.load import inspect_target, load_target
from target.teacher import Teacher


@dataclass(frozen=True)
class Checked:
    """A training that may begin: all that can be found out before weights are loaded."""

    name: str  # of the target, as given
    directory: Path
    target: TargetConfig
    out: Path
    documents: Sequence[Document]
    shape: DrafterShape
    config: DrafterConfig
    vocab: DraftVocab | None
    weights: str  # fingerprint of the target's
    recipe: Recipe  # steps: 1 if they follow from --minutes
    batches: Batches
    begun: dict[str, Any] | None  # the record of the training that goes on
    devices: int | None  # that share the rows of a step


# what may be given beside --resume, as it does not change what is learnt, or only for how long
RESUMABLE = (
    "steps",
    "minutes",
    "mesh",
    "save_every",
    "evaluate",
    "evaluate_every",
    "evaluate_prompts",
    "strict",
    "quiet",
)
FIRST_STEPS = 10  # each with a line of its own if there is no terminal
WEAK_ACCEPTANCE = 1.1


def train_command(settings: TrainSettings) -> int:
    """Check everything, write the recipe, train, and export the drafter. Return the exit code.

    The folder --out then holds the recipe, the log, checkpoints, a curve, and in drafter/ the trained drafter. Raises
    InputError before anything is written for whatever can be known then, and for a training that cannot go on;
    KeyboardInterrupt after Ctrl-C, when the newest checkpoint holds the last step.
    """
    with alone(Path(settings.out)):
        return _train(settings)


def _train(settings: TrainSettings) -> int:
    settings = _resumed(settings) if settings.resume else settings
    checked = _checked(settings)
    display = Display(text=False, quiet=settings.quiet, total=1, streaming=False)
    held_out = _held_out(settings, checked.directory, display)
    if layers := checked.config.aux_layer_ids:
        chosen = settings.shape.init or settings.shape.taps or settings.shape.aux_layer_ids
        why = "as given" if chosen else "early, in the middle and late, as EAGLE-3 takes them; --taps names others"
        display.note(f"reads the outputs of the target's layers {', '.join(map(str, layers))}: {why}")
    trainer, initial = _trainer(checked, settings, held_out, display)
    begun, out = checked.begun, checked.out
    record_recipe(
        out,
        begun,
        trainer.recipe,
        checked.config,
        settings.data,
        settings.rows,
        checked.documents,
        checked.weights,
        dataclasses.asdict(settings),
    )

    started = time.monotonic()
    _say_where_it_begins(display, out, trainer.recipe.steps, None if begun is None else begun["recipe"]["steps"])
    params = _trained(trainer, initial, settings.minutes, display)
    _write_drafter(checked, params, settings.dialect)
    log = list(read_log(out / LOG))
    lines = [f"drafter      {out / 'drafter'} | {steps_done(out)} steps | {time.monotonic() - started:.0f} s now"]
    lines.append(f"curve        {draw(log, out)}")
    if held_out is not None and held_out.left_out:
        lines.append(f"left out     of --evaluate {left_out_line(held_out.left_out)}")
    if weak := _weak(log):
        say("warning", weak)
    display.summary(lines)
    return 0


def _resumed(settings: TrainSettings) -> TrainSettings:
    """Return the settings that the folder was begun with, and of the given ones those that may change.

    Raises InputError for a folder without a training, and for one whose record does not hold them.
    """
    out = Path(settings.out)
    begun = begun_in(out)
    if begun is None:
        raise InputError(f"--resume: {out} holds no training; expected the folder of one, or leave out --resume")
    if COMMAND not in begun:
        raise InputError(f"--resume: {out} was begun by an older version; repeat its command without --resume instead")
    changed = {name: getattr(settings, name) for name in RESUMABLE if name in given(settings)}
    before: TrainSettings = rebuilt(TrainSettings, begun[COMMAND])
    return dataclasses.replace(
        before, **{"out": settings.out, "resume": True, "steps": None, "minutes": None, **changed}
    )


def _weak(log: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what to do about a drafter whose drafts are hardly ever right; None for another."""
    evaluated = [line["evaluation"]["acceptance_length"] for line in log if "evaluation" in line]
    hits = [line["hits_by_depth"][0] for line in log if "loss" in line]
    if evaluated and evaluated[-1] is not None and evaluated[-1] < WEAK_ACCEPTANCE:
        found = f"the acceptance length is {evaluated[-1]:.2f}"
    elif not evaluated and hits and hits[-1] < WEAK_ACCEPTANCE - 1:
        found = f"the first draft is right in {hits[-1]:.0%} of the places"
    else:
        return None
    return (
        f"{found}, so drafting does not pay yet; train longer (--resume --steps N), begin with a trained drafter "
        "(--init), or, for a short training, take the rates of the demo's: --optimizer muon --learning-rate 0.008 "
        "--other-rate 0.003 --warmup 0.02 --decay 0.6"
    )


def _checked(settings: TrainSettings) -> Checked:
    """Read all but weights. Raises InputError for whatever cannot be trained."""
    check_num_drafts(settings.num_speculative_tokens, plain=False)
    if settings.minutes is not None and not 0 < settings.minutes < math.inf:
        raise InputError(f"--minutes is {settings.minutes:g}; expected a number above 0")
    name, out = or_demo(settings.target), Path(settings.out)
    devices = None if settings.mesh is None else parse_data_mesh(settings.mesh)
    directory = resolve(name, "target")
    files = inspect_target(directory)
    parts = shares(settings.data)
    mix = () if settings.mix is None else parse_mix(settings.mix)
    rows, documents = sources(parts, settings.rows, settings.width, mix)
    shape = _shape(settings.shape)
    config, vocab = drafter_config(shape, files.config, files.stop_token_ids, directory, documents)
    check_tokens(documents, config)
    weights = fingerprint(directory)
    check_teachers([folder for folder, _ in parts], config, weights, settings.depth)
    check_window(config, files.config, settings.depth, given=shape.drafter_window != AUTO)
    parts_of_row = even_parts(config, settings.width) if settings.parts is None else settings.parts
    recipe = _recipe(settings, steps=settings.steps or 1, parts=parts_of_row)
    check_parts(config, recipe)
    if not 1 <= shape.mask_hiddens <= max(1, settings.depth - 1):
        raise InputError(f"--mask-hiddens is {shape.mask_hiddens}; expected 1..{max(1, settings.depth - 1)}")
    counts = recipe.segments.counts(recipe.cod, *anchors(rows, recipe.segments))
    batches = Batches(rows, recipe.width, recipe.cod, recipe.segments, counts, recipe.seed)
    begun = begun_in(out)
    if settings.steps is None and begun is not None:
        recipe = dataclasses.replace(recipe, steps=begun["recipe"]["steps"])
    elif settings.steps is None and settings.minutes is None:
        raise InputError("a new training needs --steps or --minutes")
    devices_for(settings.rows, devices)  # check them
    models = (documents, shape, config, vocab, weights)
    return Checked(name, directory, files.config, out, *models, recipe, batches, begun, devices)


def _trainer(
    checked: Checked, settings: TrainSettings, held_out: PromptSet | None, display: Display
) -> tuple[Trainer, DrafterParams]:
    """Load the target, and return the trainer with what it begins from; its steps are measured if none are given."""
    name, config = checked.name, checked.config
    with display.stage(f"loading {'the demo target' if name == DEMO else name}") as progress:
        loaded = load_target(checked.directory, dtype=jnp.dtype(default_dtype()), progress=progress)
    initial = initial_params(checked.shape.init, settings.seed, config, loaded, checked.vocab)
    ids = None if initial.draft_to_target is None else np.asarray(initial.draft_to_target)
    contained = self_contained(checked.documents)
    teacher = None if contained else Teacher(loaded.params, loaded.config, config.aux_layer_ids or ())
    deadline, evaluate = Deadline(settings.minutes), None
    if held_out is not None:
        plain, k = load(name, None), settings.num_speculative_tokens
        acceptance = Acceptance(plain, config, held_out, settings.evaluate_prompts, k)

        def evaluate(params: DrafterParams) -> Mapping[str, Any]:
            return acceptance.of(params)

    trainer = Trainer(
        checked.out,
        config,
        checked.recipe,
        checked.batches,
        teacher,
        ids,
        evaluate=evaluate,
        evaluate_every=settings.evaluate_every,
        save_every=settings.save_every,
        should_stop=lambda: interrupt.asked() or deadline.over(),
        devices=checked.devices,
    )
    done = steps_done(checked.out)
    complete = checked.begun is None or (settings.resume and done == trainer.recipe.steps)
    if settings.minutes is not None and settings.steps is None and complete:
        steps = done + _planned(settings.minutes, trainer, initial, display)
        trainer = dataclasses.replace(trainer, recipe=dataclasses.replace(checked.recipe, steps=steps))
    return trainer, initial


def _trained(trainer: Trainer, initial: DrafterParams, minutes: float | None, display: Display) -> DrafterParams:
    """Train, with progress. Raises InputError if the training cannot go on, KeyboardInterrupt after Ctrl-C."""
    steps, out = trainer.recipe.steps, trainer.out

    def kept() -> str:
        return f"{steps_done(out)} of {steps} steps are kept in {out}; the same command goes on after them"

    done = steps_done(out)
    with display.keeping(kept), display.stage("training", animated=False) as advance:

        def progress(step: int, left_s: float | None) -> None:
            advance(step, steps, left_s)
            if step - done <= FIRST_STEPS and not display.live:
                display.note(f"step {step} of {steps}{'' if left_s is None else f', {duration(left_s)} left'}")

        def watch(line: Mapping[str, Any]) -> None:
            display.note(_shown(line))

        try:
            params = dataclasses.replace(trainer, watch=watch, progress=progress).run(initial)
        except TrainingStopped as error:
            raise InputError(str(error)) from None
        interrupt.check()
    if steps_done(out) < steps:
        display.note(f"--minutes {minutes:g} are over: {kept()}")
    return params


def _write_drafter(checked: Checked, params: DrafterParams, dialect: Dialect) -> None:
    """Write the trained drafter in bfloat16, with its card, into the folder's drafter/."""
    trained = dataclasses.replace(params, draft_to_target=None)
    shipped = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), trained)
    shipped = dataclasses.replace(shipped, draft_to_target=params.draft_to_target)
    shipped, config = sort_aux_layers(shipped, with_positions(checked.config, checked.target, checked.out))
    write_with_card(checked.out / "drafter", shipped, config, dialect, checked.name, checked.target, checked.out)


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


def _recipe(settings: TrainSettings, steps: int, parts: int) -> Recipe:
    return Recipe(
        steps=steps,
        width=settings.width,
        cod=Cod(settings.depth, settings.ratio, settings.min_ratio),
        parts=parts,
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


def _planned(minutes: float, trainer: Trainer, initial: DrafterParams, display: Display) -> int:
    """Plan as many steps as fit into most of --minutes, by measured ones. Raises InputError if not one does."""
    display.note(f"compiling, and measuring {MEASURED_STEPS} steps: how many fit into {minutes:g} minutes")
    with display.stage("measuring a step", animated=False) as progress:
        step_s = seconds_per_step(trainer, initial, lambda done, total: progress(done, total, None))
    evaluation_s = 0.0
    if trainer.evaluate is not None:
        with display.stage("measuring an evaluation", animated=False):
            began = time.monotonic()
            trainer.evaluate(initial)
            evaluation_s = time.monotonic() - began
    steps = planned_steps(minutes, step_s, evaluation_s, trainer.evaluate_every)
    takes = f"a step takes {step_s:.2g} s" + (f", an evaluation {evaluation_s:.2g} s" if evaluation_s else "")
    if not steps:
        raise InputError(f"--minutes is {minutes:g}, and {takes}; expected time for a step, or --steps")
    display.note(f"{takes}: {steps} steps are planned")
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
    speed = "" if line["tok_per_s"] is None else f", {line['tok_per_s']:,} tok/s, {duration(line['left_s'])} left"
    return (
        f"step {line['step']} of {line['steps']}: loss {line['loss']:.3f}, right by depth "
        f"{' '.join(format(x, '.2f').lstrip('0') for x in line['hits_by_depth'])}{speed}"
    )
