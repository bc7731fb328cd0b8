"""Run `peagle train`: check everything, write the recipe, train the drafter, export it."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drafter.config import DrafterConfig
from drafter.dialects import Dialect
from drafter.load import sort_aux_layers
from drafter.params import DrafterParams
from drafter.train.batches import Batches
from drafter.train.folder import COMMAND, EVALUATION, HELD_OUT, LOG, best_held_out, read_log, steps_done
from drafter.train.held_out import DEFAULT_FRAC, HeldOut
from drafter.train.recipe import Recipe, Update, chosen_update, decided, typed_update
from drafter.train.step import FrozenWeights, devices_for
from drafter.train.trainer import Trainer, TrainingStopped
from drafter.trained import DRAFTER, RECIPE
from drafter.vocabulary import DraftVocab
from peagle.checkpoints import DEMO, name_for_others, or_demo, resolve
from peagle.cli.command import changed_options, read_record, record
from peagle.cli.curve import draw
from peagle.cli.display import Display, duration
from peagle.cli.output import say
from peagle.cli.train import RESUMABLE, Train
from peagle.config import AUTO, check_block
from peagle.engine.speculation import SPECULATION_FILE, WINDOW_KEY
from peagle.loading import default_dtype, load
from peagle.measure.metrics import figure_text
from peagle.ops import interrupt
from peagle.ops.checkpoint import fingerprint
from peagle.ops.errors import InputError
from peagle.ops.files import encoded
from peagle.ops.flag import layers_reader
from peagle.ops.settings import brief, mapping
from peagle.ops.strict_json import dumps
from peagle.parallel import parse_data_mesh
from peagle.text.prompt_files import PromptSet, read_prompts, skipped_line
from peagle.text.prompts import Rendering
from peagle.workflows.evaluation import acceptance_on, answer_held_out, known_prompts, with_same_teacher
from peagle.workflows.export import with_positions, write_with_card
from peagle.workflows.new_drafter import check_window, drafter_config, initial_params, with_blocks
from peagle.workflows.training import (
    MEASURED_FRAC,
    Deadline,
    begun_in,
    check_parts,
    even_parts,
    held_out_every,
    planned_steps,
    record_recipe,
    seconds_of_held_out,
    seconds_per_step,
    with_held_out,
)
from peagle.workflows.training_advice import (
    coverage_in_words,
    epochs_in_words,
    memorised_data,
    recipe_in_words,
    share,
    weak_drafter,
)
from peagle.workflows.training_data import (
    TrainingData,
    anchors,
    check_teachers,
    check_tokens,
    data_coverage,
    kept_of_prompts,
    parse_mix,
    self_contained,
    shares,
    training_data,
)
from target.config import TargetConfig
from target.load import inspect_target, load_target
from target.teacher import Teacher

OLD_NAMES = {"warmup": "warmup_frac", "decay": "decay_frac", "clip": "clip_norm", "dtype": "compute_dtype"}
FIRST_STEPS = 10  # without a terminal, these steps are noted one by one


@dataclass(frozen=True)
class CheckedTraining:
    """Checked options: everything that is known before weights are loaded."""

    name: str  # of the target, as typed
    directory: Path  # of the target
    target: TargetConfig
    out: Path
    data: TrainingData
    held_out_frac: float
    keep_prompt: int | None  # most tokens of a prompt in the data; None: all
    config: DrafterConfig
    vocab: DraftVocab | None
    weights: str  # the target's fingerprint
    recipe: Recipe  # with steps = 1 if --minutes decides them
    batches: Batches
    begun: dict[str, Any] | None  # the record of the training to resume
    devices: int | None  # that share the rows of a step


def train(settings: Train) -> int:
    """Check everything, write the recipe, train, and export the drafter. Return the exit code.

    --out then holds the recipe, the log, checkpoints, a curve, and the drafter in drafter/. Raises InputError for bad
    options, data and models before it writes, and later for a training that cannot go on; KeyboardInterrupt after
    Ctrl-C, when a checkpoint holds the last step.
    """
    settings = _resumed(settings) if settings.resume else settings
    display = Display(quiet=settings.quiet)
    with display.stage("reading the data"):
        checked = _check(settings)
    prompts = None
    if settings.evaluate is not None:
        prompts = read_prompts(Path(settings.evaluate), checked.directory, Rendering(), strict=settings.strict)
        display.warn(prompts.warnings)
    if layers := checked.config.aux_layer_ids:
        chosen = settings.shape.init or settings.shape.taps or settings.shape.aux_layer_ids
        why = "as given" if chosen else "early, in the middle and late, as EAGLE-3 takes them; --taps names others"
        display.note(f"reads the outputs of the target's layers {', '.join(map(str, layers))}: {why}")
    trainer, initial = _trainer(checked, settings, prompts, display)
    begun, out, documents = checked.begun, checked.out, checked.data.documents
    covered = None
    if trainer.draft_to_target is not None:
        covered = data_coverage(documents, trainer.draft_to_target, settings.num_speculative_tokens)
        display.note(f"proposes {coverage_in_words(documents, trainer.draft_to_target, covered)}")
    record_recipe(
        out,
        begun,
        trainer.recipe,
        checked.config,
        settings.data,
        settings.rows,
        documents,
        checked.weights,
        checked.held_out_frac,
        record(settings) | ({} if checked.name == DEMO else {"target": name_for_others(checked.name)}),
        covered,
    )

    started = time.monotonic()
    _note_start(display, checked, settings, trainer)
    params = _run(trainer, initial, settings.minutes, display)
    log = list(read_log(out / LOG))
    best = best_held_out(log) if trainer.held_out is not None else None
    done = steps_done(out)
    kept = f"step {done}" if best is None else f"step {best['step']} of {done}, the best on held-out documents"
    curve = draw(log, out)  # before the model card, which shows it
    _write_drafter(checked, params, settings.dialect)
    lines = [f"drafter      {out / DRAFTER} | {kept} | {time.monotonic() - started:.0f} s now"]
    lines.append(f"curve        {curve}")
    if covered is not None:
        lines.append(f"proposes     {covered.describe()}")
    if prompts is not None and prompts.skipped:
        lines.append(f"left out     of --evaluate {skipped_line(prompts.skipped)}")
    if weak := weak_drafter(log, out, init=settings.shape.init is not None):
        say("warning", weak)
    display.summary(lines)
    return 0


def _resumed(settings: Train) -> Train:
    """Return the recorded settings of the training to resume, with the typed ones that may change."""
    out = Path(settings.out)
    begun = begun_in(out)
    if begun is None:
        raise InputError(f"--resume: {out} holds no training; expected the folder of one, or leave out --resume")
    if COMMAND not in begun:
        raise InputError(f"--resume: {out} was begun by an older version; repeat its command without --resume instead")
    changed = {option.name: option.of(settings) for option in changed_options(settings) if option.name in RESUMABLE}
    try:
        before = read_record(Train, upgrade_record(begun[COMMAND]))
    except InputError as error:
        raise InputError(
            f"--resume: the options in {out / RECIPE} cannot be read: {error}; expected what this version of peagle "
            "train writes: repeat the command without --resume instead"
        ) from None
    return dataclasses.replace(
        before, **{"out": settings.out, "resume": True, "steps": None, "minutes": None, **changed}
    )


def upgrade_record(command: Any) -> dict[str, Any]:
    """Rename the options of a recorded command to today's names. Old records nest some of them in "shape".

    Raises InputError for a record without options, and for an option that is both in "shape" and beside it.
    """
    if not isinstance(command, Mapping):
        raise InputError(f"{COMMAND} is {brief(command)}; expected an object")
    if "shape" not in command:
        return dict(command)
    options: Mapping[str, Any] = command
    flat = {OLD_NAMES.get(name, name): value for name, value in options.items()}
    shape = mapping(flat, "shape")
    del flat["shape"]
    if twice := [name for name in shape if name in flat]:
        raise InputError(f"{twice[0]} is recorded twice, in shape and beside it")
    flat |= shape
    flat["train_embedding"] = not flat.pop("freeze_embedding", False)
    for name in ("taps", "aux_layer_ids"):
        if isinstance(flat.get(name), str):
            flat[name] = layers_reader(name)(flat[name])
    return flat


def _check(settings: Train) -> CheckedTraining:
    """Read and check everything except weights. Raises InputError for options, data and models that do not fit."""
    name, out = or_demo(settings.load.target), Path(settings.out)
    devices = None if settings.mesh is None else parse_data_mesh(settings.mesh)
    directory = resolve(name, "target")
    files = inspect_target(directory)
    folder_shares = shares(settings.data)
    mix = () if settings.mix is None else parse_mix(settings.mix)
    begun = begun_in(out)
    held_out_frac = _held_out_frac(settings, begun)
    shape, learning = settings.shape, settings.learning
    data = training_data(folder_shares, settings.rows, learning.width, mix, held_out_frac, learning.seed)
    depth = learning.cod.depth
    config, vocab = drafter_config(shape, files.config, files.stop_token_ids, directory, data.documents, depth)
    learning = with_blocks(learning, config)
    if config.kind == "DFlash" and settings.dialect != "vllm":
        raise InputError(f"--dialect is {settings.dialect}; expected vllm: a DFlash drafter has a layout of its own")
    if settings.evaluate is not None:
        check_block(settings.num_speculative_tokens, config.most_drafts)
    if vocab is not None:  # raises InputError if no answer of the data has a token of the vocabulary
        data_coverage(data.documents, np.array(vocab.token_ids), settings.num_speculative_tokens)
    check_tokens(data.documents, config, shape)
    weights = fingerprint(directory)
    folders = [folder for folder, _ in folder_shares]
    check_teachers(folders, config, weights, depth, strict=settings.strict)
    check_window(config, files.config, depth, by_option=shape.drafter_window != AUTO)
    parts = even_parts(config, learning.width) if learning.parts is None else learning.parts
    steps = begun["recipe"]["steps"] if settings.steps is None and begun is not None else settings.steps
    if steps is None and settings.minutes is None:
        raise InputError("a new training needs --steps or --minutes")
    recipe = decided(learning, steps or 1, parts, _update(steps or 1, config, settings, begun))
    check_parts(config, recipe)
    if not 1 <= shape.mask_hiddens <= (most := max(1, depth - 1)):
        raise InputError(f"--mask-hiddens is {shape.mask_hiddens}; expected 1..{most}")
    if recipe.blocks is not None:
        counts = recipe.partition.block_counts(recipe.cod.depth, recipe.blocks)
    else:
        counts = recipe.partition.counts(recipe.cod, *anchors(data.sources, recipe.partition))
    batches = Batches(data.sources, recipe, counts)
    devices_for(settings.rows, devices)  # raises InputError if they cannot share the rows
    return CheckedTraining(
        name=name, directory=directory, target=files.config, out=out, data=data, held_out_frac=held_out_frac,
        keep_prompt=kept_of_prompts(folders), config=config, vocab=vocab, weights=weights, recipe=recipe,
        batches=batches, begun=begun, devices=devices,
    )  # fmt: skip


def _held_out_frac(settings: Train, begun: Mapping[str, Any] | None) -> float:
    """Return the fraction of documents to hold out: typed, recorded, or 0 if --evaluate holds prompts out instead."""
    if settings.held_out is not None:
        return settings.held_out
    if begun is not None:
        frac: float = with_held_out(begun)["data"]["held_out"]
        return frac
    return DEFAULT_FRAC if settings.evaluate is None else 0.0


def _trainer(
    checked: CheckedTraining, settings: Train, prompts: PromptSet | None, display: Display
) -> tuple[Trainer, DrafterParams]:
    """Load the target; return (trainer, initial parameters). Without --steps, measure how many fit into --minutes."""
    name, config, documents = checked.name, checked.config, checked.data.documents
    with display.stage(f"loading {'the demo target' if name == DEMO else name}") as progress:
        loaded = load_target(checked.directory, dtype=jnp.dtype(default_dtype()), progress=progress)
    initial = initial_params(settings.shape.init, settings.learning.seed, config, loaded, checked.vocab)
    ids = None if initial.draft_to_target is None else np.asarray(initial.draft_to_target)
    teacher = Teacher(loaded.params, loaded.config, config.aux_layer_ids or ())
    held_out = checked.data.held_out
    deadline = Deadline(settings.minutes)
    evaluate: Callable[[DrafterParams], Mapping[str, Any]] | None = None
    if prompts is not None:
        with display.stage("loading the target to evaluate"):
            plain = load(name, None)
        k = settings.num_speculative_tokens
        evaluate = acceptance_on(plain, config, prompts, settings.evaluate_prompts, k)
        if settings.held_out is None and not checked.held_out_frac:
            with display.stage("answering the held-out prompts"):
                held_out = answer_held_out(plain, prompts, settings.evaluate_prompts, settings.learning.width)
            held_out = with_same_teacher(held_out, documents, teacher, checked.keep_prompt)
            if warning := known_prompts(held_out, documents):
                say("warning", warning)
    trainer = Trainer(
        checked.out,
        config,
        checked.recipe,
        checked.batches,
        None if self_contained(documents) else teacher,
        ids,
        FrozenWeights.of(initial, config),
        held_out=HeldOut.of(held_out, checked.batches) if held_out else None,
        held_out_every=held_out_every(checked.recipe.steps),
        evaluate=evaluate,
        evaluate_every=settings.evaluate_every,
        save_every=settings.save_every,
        should_stop=lambda: interrupt.pressed() or deadline.over(),
        devices=checked.devices,
    )
    done = steps_done(checked.out)
    complete = checked.begun is None or (settings.resume and done == trainer.recipe.steps)
    if settings.minutes is not None and settings.steps is None and complete:
        steps = done + _plan_steps(settings.minutes, trainer, initial, display)
        update = _update(steps, config, settings, checked.begun)
        recipe = dataclasses.replace(checked.recipe, steps=steps, **dataclasses.asdict(update))
        trainer = dataclasses.replace(trainer, recipe=recipe, held_out_every=held_out_every(steps))
    return trainer, initial


def _run(trainer: Trainer, initial: DrafterParams, minutes: float | None, display: Display) -> DrafterParams:
    """Train, with progress. Raises InputError if the training cannot go on, and KeyboardInterrupt after Ctrl-C."""
    steps, out = trainer.recipe.steps, trainer.out

    def kept() -> str:
        return f"{steps_done(out)} of {steps} steps are kept in {out}; the same command goes on after them"

    done = steps_done(out)
    with display.on_interrupt(kept), display.stage("training", animated=False) as advance:

        def progress(step: int, left_s: float | None) -> None:
            advance(step, steps, left_s)
            if step - done <= FIRST_STEPS and not display.live:
                display.note(f"step {step} of {steps}{'' if left_s is None else f', {duration(left_s)} left'}")

        warned = False

        def watch(line: Mapping[str, Any]) -> None:
            nonlocal warned
            display.note(describe_log_line(line))
            if HELD_OUT in line and not warned and (warning := memorised_data(list(read_log(out / LOG)))):
                warned = True
                say("warning", warning)

        try:
            params = dataclasses.replace(trainer, watch=watch, progress=progress).run(initial)
        except TrainingStopped as error:
            raise InputError(str(error)) from None
        interrupt.check()
    if steps_done(out) < steps:
        display.note(f"--minutes {minutes:g} are over: {kept()}")
    return params


def _write_drafter(checked: CheckedTraining, params: DrafterParams, dialect: Dialect) -> None:
    """Write the trained drafter in bfloat16, with its model card, into drafter/ of the training's folder."""
    weights = dataclasses.replace(params, draft_to_target=None)
    written = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
    written = dataclasses.replace(written, draft_to_target=params.draft_to_target)
    written, config = sort_aux_layers(written, with_positions(checked.config, checked.target, checked.out))
    target, files = name_for_others(checked.name), dict[str, bytes]()
    if config.kind == "DFlash" and config.narrowest_window is not None:  # its config.json has no place for a window
        files[SPECULATION_FILE] = encoded(dumps({WINDOW_KEY: config.narrowest_window}) + "\n")
        config = config.with_window(None)
    write_with_card(checked.out / DRAFTER, written, config, dialect, target, checked.target, checked.out, files)


def _note_start(display: Display, checked: CheckedTraining, settings: Train, trainer: Trainer) -> None:
    """Note the held-out documents, the recipe of a new training, and the first and last step."""
    done, steps, begun = steps_done(trainer.out), trainer.recipe.steps, checked.begun
    if trainer.held_out is not None:
        num_held_out, num_documents = len(checked.data.held_out), len(checked.data.documents)
        which = f"{num_held_out} of the {num_documents:,} documents" if num_held_out else "the answers to --evaluate"
        if num_held_out and (repeated := checked.data.num_repeated):
            which += f", of which {repeated:,} repeat a prompt (all answers to a prompt are held out, or none)"
        display.note(f"held out: {which}; the step that is best on them is kept (--held-out 0: the last one)")
    if begun is None:
        typed = typed_update(settings.learning)
        display.note(f"recipe: {recipe_in_words(trainer.recipe, typed, init=settings.shape.init is not None)}")
    elif begun["recipe"]["steps"] != steps:
        display.note(
            f"resumes at step {done} with {steps} steps instead of {begun['recipe']['steps']}: the learning rate now "
            f"follows a training of {steps} steps"
        )
    if done < steps:
        epochs = epochs_in_words([source.epochs(steps) for source in trainer.batches.sources])
        display.note(f"training steps {done + 1} to {steps}, {epochs} in all; the first one compiles")
    else:
        display.note(f"{trainer.out} has all of its steps, {steps}; a larger --steps goes on with more")


def _update(steps: int, config: DrafterConfig, settings: Train, begun: Mapping[str, Any] | None) -> Update:
    """Choose the update of a new training, or return the recorded one; the user's fields replace those of both."""
    typed = typed_update(settings.learning)
    if begun is not None:
        fields = [field.name for field in dataclasses.fields(Update)]
        return dataclasses.replace(Update(**{name: begun["recipe"][name] for name in fields}), **typed)
    return chosen_update(steps, config.hidden_size, from_trained=settings.shape.init is not None, typed=typed)


def _plan_steps(minutes: float, trainer: Trainer, initial: DrafterParams, display: Display) -> int:
    """Measure a step, and return how many fit into most of --minutes. Raises InputError if none does."""
    display.note(f"compiling, and measuring a step: how many fit into {minutes:g} minutes")
    with display.stage("measuring a step", animated=False) as progress:
        at_most_s = MEASURED_FRAC * 60 * minutes
        step_s = seconds_per_step(trainer, initial, at_most_s, progress)
        held_out_s = seconds_of_held_out(trainer, initial)
    evaluation_s = 0.0
    if trainer.evaluate is not None:
        with display.stage("measuring an evaluation", animated=False):
            began = time.monotonic()
            trainer.evaluate(initial)
            evaluation_s = time.monotonic() - began
    steps = planned_steps(minutes, step_s, evaluation_s, trainer.evaluate_every, held_out_s)
    takes = f"a step takes {step_s:.2g} s" + (f", an evaluation {evaluation_s:.2g} s" if evaluation_s else "")
    if not steps:
        raise InputError(f"--minutes is {minutes:g}, and {takes}; expected time for a step, or --steps")
    display.note(f"{takes}: {steps} steps are planned")
    return steps


def describe_log_line(line: Mapping[str, Any]) -> str:
    """Describe a line of the log in a sentence."""
    if EVALUATION in line:
        figures = line[EVALUATION]
        lengths = [figure_text(figures[f"acceptance_length{of}"], ".2f") for of in ("", "_without_loops")]
        return (
            f"step {line['step']}: acceptance length {lengths[0]}, without loops {lengths[1]}, of "
            f"{figures['num_outputs']} held-out prompts"
        )
    if HELD_OUT in line:
        return f"step {line['step']}: held out: {_figures(line[HELD_OUT])}"
    speed = "" if line["tok_per_s"] is None else f", {line['tok_per_s']:,} tok/s, {duration(line['left_s'])} left"
    epochs = f", {epochs_in_words(line['epochs'])}"
    return f"step {line['step']} of {line['steps']}{epochs}: {_figures(line)}{speed}"


def _figures(line: Mapping[str, Any]) -> str:
    """Describe loss and hits, as in: loss 3.214, right by depth .31 .12."""
    return f"loss {line['loss']:.3f}, right by depth {' '.join(share(hits) for hits in line['hits_by_depth'])}"
