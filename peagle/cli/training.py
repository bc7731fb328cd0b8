"""The work of `peagle train`: check everything, write the recipe, train the drafter, export it."""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from drafter.config import DrafterConfig
from drafter.dialects import Dialect
from drafter.load import sort_aux_layers
from drafter.params import DrafterParams
from drafter.train.checkpoints import TrainingStopped
from drafter.train.fill import fill
from drafter.train.folder import COMMAND, EVALUATION, HELD_OUT, LOG, MOVABLE, best_held_out, read_log, steps_done
from drafter.train.held_out import DEFAULT_FRAC, HeldOut
from drafter.train.recipe import Recipe
from drafter.train.row_batches import RowBatches
from drafter.train.shards import WEIGHTS
from drafter.train.step import Fixed
from drafter.train.trainer import Trainer
from drafter.trained import DRAFTER, RECIPE
from drafter.vocabulary import FREQUENT_TOKENS, DraftVocab, by_frequency
from peagle.base import interrupt
from peagle.base.checkpoint import fingerprint
from peagle.base.errors import InputError
from peagle.base.files import encoded, write_bytes_whole
from peagle.base.settings import brief
from peagle.base.strict_json import dumps
from peagle.cli.command import changed_options, read_record, record
from peagle.cli.display import Display, duration
from peagle.cli.output import say
from peagle.config import AUTO
from peagle.loading.checkpoints import DEMO, from_anywhere, name_for_others, or_demo, resolve
from peagle.loading.defaults import default_dtype
from peagle.loading.load import load
from peagle.loading.speculation import SPECULATION_FILE, WINDOW_KEY
from peagle.measure.metrics import figure_text
from peagle.text.prompt_files import PromptSet, read_prompts, skipped_line
from peagle.text.prompts import Rendering
from peagle.workflows.evaluation import (
    EVALUATED_PROMPTS,
    acceptance_on,
    known_prompts,
)
from peagle.workflows.export import card_files, with_positions, write_with_card
from peagle.workflows.new_drafter import check_window, drafter_config, initial_params
from peagle.workflows.training import (
    MEASURED_FRAC,
    PLANNED_FRAC,
    begun_in,
    evaluate_every,
    held_out_every,
    planned_steps,
    seconds_of_held_out,
    seconds_per_step,
    training_record,
    write_recipe,
)
from peagle.workflows.training_advice import (
    coverage_in_words,
    epochs_in_words,
    memorised_data,
    no_gain,
    recipe_in_words,
    share,
    weak_drafter,
)
from peagle.workflows.training_curve import draw
from peagle.workflows.training_data import (
    TrainingData,
    answer_tokens,
    check_teachers,
    check_tokens,
    data_coverage,
    self_contained,
    shares,
    training_data,
)
from target.config import TargetConfig
from target.load import inspect_target, load_target
from target.teacher import Teacher

if TYPE_CHECKING:  # it imports this module
    from peagle.cli.train import Train

EVALUATED_DRAFTS = 7  # at most; K of evaluations
DIALECT: Dialect = "vllm"  # the layout of a trained drafter; peagle export writes others


@dataclass(frozen=True)
class CheckedTraining:
    """Checked options: everything that is known before weights are loaded."""

    name: str  # of the target, as typed
    directory: Path  # of the target
    target: TargetConfig
    out: Path
    parts: list[tuple[Path, int]]  # folders of the data, and their shares of a step's rows
    data: TrainingData
    config: DrafterConfig
    vocab: DraftVocab | None
    digests: dict[str, dict[str, str]]  # digests of the files that may change between two resumes, for the record
    begun: dict[str, Any] | None  # the record of the training to resume
    steps: int | None  # None: --minutes decides
    typed: Recipe

    def recipe(self, steps: int) -> Recipe:
        """Return the recipe of a training of so many steps; of one that continues, the recorded one."""
        if self.begun is not None:
            return self.typed.over(self.begun["recipe"])
        return fill(self.typed, self.config, self.data.sources, steps, from_trained=self.from_trained)

    @property
    def from_trained(self) -> bool:
        return bool(self.digests["init"])

    @property
    def evaluated_drafts(self) -> int:
        """K of evaluations."""
        return min(EVALUATED_DRAFTS, self.typed.depth)


def train(settings: "Train") -> int:
    """Check everything, write the recipe, train, and export the drafter. Return the exit code.

    --out then holds the recipe, the log, checkpoints, a curve, and the drafter in drafter/. Raises InputError for bad
    options, data and models before it writes, and later for a training that cannot go on; KeyboardInterrupt after
    Ctrl-C, when a checkpoint holds the last step and drafter/ the best one.
    """
    settings = _resumed(settings) if settings.resume else settings
    display = Display(quiet=settings.quiet)
    with display.stage("reading the data"):
        checked = _check(settings)
    prompts = None
    if settings.evaluate is not None:
        prompts = read_prompts(Path(settings.evaluate), checked.directory, Rendering())
        display.warn(prompts.warnings)
    if layers := checked.config.aux_layer_ids:
        chosen = settings.shape.init or settings.shape.aux_layer_ids
        why = "as given" if chosen else "the default, as EAGLE-3's; choose with --aux-layer-ids"
        display.note(f"reads the outputs of the target's layers {', '.join(map(str, layers))}: {why}")
    trainer, initial = _trainer(checked, settings, prompts, display)
    out, documents, ids = checked.out, checked.data.documents, initial.draft_to_target
    covered = None
    if ids is not None:
        covered = data_coverage(documents, np.asarray(ids), checked.evaluated_drafts)
        display.note(f"proposes {coverage_in_words(documents, np.asarray(ids), covered)}")
    record = training_record(
        trainer.recipe, trainer.steps, checked.config, checked.data, checked.parts, checked.digests
    )
    write_recipe(out, checked.begun, record, _recorded(settings), covered)

    started = time.monotonic()
    _note_start(display, checked, settings.minutes, trainer)
    params = _run(trainer, initial, display)
    written = _write_drafter(checked, params)
    log = list(read_log(out / LOG))
    curve = draw(log, out)  # after the drafter, which is worth more
    _write_card(checked, written)
    if interrupt.pressed():
        _note_interruption(display, checked, trainer.steps)
        raise KeyboardInterrupt
    display.warn(filter(None, (no_gain(log, settings.shape.init), weak_drafter(log, out, init=trainer.measure_start))))
    lines = [
        f"drafter      {out / DRAFTER} | {_kept_step(log, trainer)} | {time.monotonic() - started:.0f} s in this run",
        f"curve        {curve}",
    ]
    if covered is not None:
        lines.append(f"proposes     {covered.describe()}")
    if prompts is not None and prompts.skipped:
        lines.append(f"left out     of --evaluate {skipped_line(prompts.skipped)}")
    display.summary(lines)
    return 0


def _kept_step(log: Sequence[Mapping[str, Any]], trainer: Trainer) -> str:
    """Say which step the drafter is."""
    done = steps_done(trainer.out)
    best = best_held_out(log) if trainer.held_out is not None else None
    return f"step {done}" if best is None else f"step {best['step']} of {done}, the best on held-out documents"


def _resumed(settings: "Train") -> "Train":
    """Return the recorded settings of the training to resume, with the typed ones that may change."""
    out = Path(settings.out)
    begun = begun_in(out)
    if begun is None:
        raise InputError(f"--resume: {out} holds no training; expected the folder of one, or leave out --resume")
    if settings.minutes == 0 and not steps_done(out):
        raise InputError(f"--minutes is 0, and {out} has no checkpoint yet to write a drafter from; expected more")
    changed = (option for option in changed_options(settings) if option.name in settings.resumable)
    typed = {option.name: option.of(settings) for option in changed}
    now = {"steps": None, "minutes": None, **typed, "out": settings.out, "resume": True}
    try:
        if not isinstance(command := begun.get(COMMAND), Mapping):
            raise InputError(f"{COMMAND} is {brief(command)}; expected an object")
        resumed = read_record(type(settings), {**command, **now})
    except InputError as error:
        raise InputError(
            f"--resume: the options in {out / RECIPE} cannot be read: {error}; expected what this version of peagle "
            "train writes: repeat the command without --resume instead"
        ) from None
    for flag, name in _inputs(resumed):
        if Path(name).is_absolute() and not Path(name).exists():
            raise InputError(f"--resume: {name} is not there any more; expected {flag} with its place now")
    return resumed


def _inputs(settings: "Train") -> Iterator[tuple[str, str]]:
    """Yield (flag, name) of the files, folders and checkpoints that a training reads."""
    yield from (("--data", str(folder)) for folder, _ in shares(settings.data))
    shape = settings.shape
    named = (settings.load.target, shape.init, shape.draft_vocab, settings.evaluate)
    for flag, name in zip(("--target", "--init", "--draft-vocab", "--evaluate"), named, strict=True):
        if name is not None:
            yield flag, name


def _recorded(settings: "Train") -> dict[str, Any]:
    """Return the options for the record, with names that --resume understands in any working directory."""
    options = record(settings)
    options["data"] = [f"{folder.absolute()}:{share}" for folder, share in shares(settings.data)]
    for name in set(MOVABLE) - {"data"}:
        count = name == "draft_vocab" and str(options[name]).isdecimal()  # of tokens
        if options[name] is not None and not count:
            options[name] = from_anywhere(options[name])
    return options


def _check(settings: "Train") -> CheckedTraining:
    """Read and check everything except weights. Raises InputError for options, data and models that do not fit."""
    name, out = or_demo(settings.load.target), Path(settings.out)
    directory = resolve(name, "target")
    files, parts, begun = inspect_target(directory), shares(settings.data), begun_in(out)
    shape, recipe = settings.shape, settings.recipe
    data = training_data(parts, recipe, _held_out_frac(settings, begun))
    documents, depth = data.documents, recipe.depth
    config, vocab = drafter_config(shape, files.config, files.stop_token_ids, directory, documents, depth)
    check_tokens(documents, config, shape.init)
    check_window(config, files.config, depth, by_option=shape.drafter_window != AUTO)
    digests = {"target": {WEIGHTS: fingerprint(directory)}, "init": {}, "draft_vocab": {}}
    if shape.init is not None:
        digests["init"] = {WEIGHTS: fingerprint(resolve(shape.init, "drafter"))}
    if vocab is not None:
        digests["draft_vocab"] = {"sha256": hashlib.sha256(dumps(vocab.token_ids).encode()).hexdigest()}
    check_teachers([folder for folder, _ in parts], config, digests["target"][WEIGHTS], depth)
    steps = begun.get("steps") if settings.steps is None and begun is not None else settings.steps
    if steps is None and settings.minutes is None:
        raise InputError("a new training needs --steps or --minutes")
    checked = CheckedTraining(
        name=name, directory=directory, target=files.config, out=out, parts=parts, data=data, config=config,
        vocab=vocab, digests=digests, begun=begun, steps=steps, typed=recipe,
    )  # fmt: skip
    checked.recipe(steps or 1)  # raises InputError for options that do not fit the drafter
    if vocab is not None:  # raises InputError if no answer of the data has a token of the vocabulary
        data_coverage(documents, np.array(vocab.token_ids), checked.evaluated_drafts)
    return checked


def _held_out_frac(settings: "Train", begun: Mapping[str, Any] | None) -> float:
    """Return the fraction of documents to hold out: typed, recorded, or the default."""
    if settings.held_out is not None:
        return settings.held_out
    if begun is not None:
        frac: float = begun["data"]["held_out"]
        return frac
    return DEFAULT_FRAC


def _trainer(
    checked: CheckedTraining, settings: "Train", prompts: PromptSet | None, display: Display
) -> tuple[Trainer, DrafterParams]:
    """Load the target; return (trainer, initial parameters). Without --steps, measure how many fit into --minutes."""
    config, documents, init = checked.config, checked.data.documents, settings.shape.init
    with display.stage(f"loading {'the demo target' if checked.name == DEMO else checked.name}") as progress:
        dtype = jnp.dtype(default_dtype(checked.directory, "xla"))
        loaded = load_target(checked.directory, dtype=dtype, progress=progress)
    initial = initial_params(init, settings.recipe.seed, config, loaded, checked.vocab)
    teacher = Teacher(loaded.params, loaded.config, config.aux_layer_ids or ())
    held_out, evaluate = checked.data.held_out, None
    if prompts is not None:
        evaluate = _evaluation(checked, prompts, display)

    def trainer_of(steps: int) -> Trainer:
        batches = RowBatches(checked.data.sources, checked.recipe(steps))
        return Trainer(
            checked.out,
            config,
            batches,
            Fixed.of(initial, config, None if self_contained(documents) else teacher),
            steps,
            settings.minutes,
            HeldOut.of(held_out, batches) if held_out else None,
            held_out_every(steps),
            measure_start=init is not None,
            evaluate=evaluate,
            evaluate_every=evaluate_every(steps),
            save_every=settings.save_every,
            should_stop=interrupt.pressed,
        )

    trainer, done = trainer_of(checked.steps or 1), steps_done(checked.out)
    complete = checked.begun is None or (settings.resume and done == trainer.steps)
    if settings.minutes and settings.steps is None and complete:
        trainer = trainer_of(done + _plan_steps(settings.minutes, trainer, initial, display))
    return trainer, initial


def _evaluation(
    checked: CheckedTraining, prompts: PromptSet, display: Display
) -> Callable[[DrafterParams], Mapping[str, Any]]:
    """Load the target to evaluate; return what measures a drafter on prompts."""
    with display.stage("loading the target to evaluate"):
        pair = load(checked.name, None)
    prompts = dataclasses.replace(prompts, conversations=prompts.conversations[:EVALUATED_PROMPTS])
    progress = functools.partial(display.begin_run, "measuring the acceptance length", unit="output")
    if warning := known_prompts(pair, prompts, checked.data.documents):
        say("warning", warning)
    return acceptance_on(pair, checked.config, prompts, checked.evaluated_drafts, progress)


def _run(trainer: Trainer, initial: DrafterParams, display: Display) -> DrafterParams:
    """Train, with progress. Raises InputError if the training cannot go on, and KeyboardInterrupt after Ctrl-C."""
    steps, out, minutes = trainer.steps, trainer.out, trainer.minutes
    with display.stage("training", animated=False, unit="steps"):

        def progress(step: int, left_s: float | None) -> None:
            display.begin_run("training", step, steps, left_s, unit="steps")

        warned = False

        def watch(line: Mapping[str, Any]) -> None:
            nonlocal warned
            display.note(describe_log_line(line))
            if HELD_OUT in line and not warned and (warning := memorised_data(list(read_log(out / LOG)))):
                warned = True
                say("warning", warning)

        try:
            params = dataclasses.replace(trainer, watch=watch, progress=progress).run(initial)
            if not steps_done(out):
                interrupt.check()  # there is nothing to write a drafter from
        except KeyboardInterrupt:
            none = "interrupted before the first step was kept; the same command begins again"
            display.note(f"interrupted: {kept_steps(out, steps)}" if steps_done(out) else none)
            raise
        except TrainingStopped as error:
            remedy = f"; peagle train --out {out} --resume --minutes 0 writes the drafter so far"
            raise InputError(f"{error}{remedy if steps_done(out) else ''}") from None
    if steps_done(out) < steps and minutes and not interrupt.pressed():
        display.note(f"--minutes {minutes:g} are over: {kept_steps(out, steps)}")
    return params


def kept_steps(out: Path, steps: int) -> str:
    return f"{steps_done(out)} of {steps} steps are kept in {out}; the same command goes on after them"


def _note_interruption(display: Display, checked: CheckedTraining, steps: int) -> None:
    """Say what is kept of an interrupted training, and how to try it."""
    target = "" if checked.name == DEMO else f" --target {checked.name}"
    display.note(
        f"interrupted: {kept_steps(checked.out, steps)}; to try what they learned: peagle speculate{target} --drafter "
        f"{checked.out / DRAFTER}"
    )


def _write_drafter(checked: CheckedTraining, params: DrafterParams) -> DrafterConfig:
    """Write the trained drafter in bfloat16, with its model card, into drafter/ of the training's folder.

    Return its config as written.
    """
    weights = dataclasses.replace(params, draft_to_target=None)
    written = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
    written = dataclasses.replace(written, draft_to_target=params.draft_to_target)
    written, config = sort_aux_layers(written, with_positions(checked.config, checked.target, checked.out))
    target, files = name_for_others(checked.name), dict[str, bytes]()
    if config.kind == "DFlash" and config.narrowest_window is not None:  # its config.json has no place for a window
        files[SPECULATION_FILE] = encoded(dumps({WINDOW_KEY: config.narrowest_window}) + "\n")
        config = config.with_window(None)
    if params.draft_to_target is None:  # for --draft-vocab N when it is loaded
        counts = np.bincount(np.concatenate(list(answer_tokens(checked.data.documents))))
        files[FREQUENT_TOKENS] = encoded(dumps(by_frequency(counts)) + "\n")
    write_with_card(checked.out / DRAFTER, written, config, DIALECT, target, checked.out, files)
    return config


def _write_card(checked: CheckedTraining, written: DrafterConfig) -> None:
    """Write the drafter's model card again, with the curve of this run. written: the drafter's config."""
    files = card_files(written, DIALECT, name_for_others(checked.name), checked.out)
    for name, content in files.items():
        write_bytes_whole(checked.out / DRAFTER / name, content)


def _note_start(display: Display, checked: CheckedTraining, minutes: float | None, trainer: Trainer) -> None:
    """Note the held-out documents, the recipe of a new training, and the first and last step."""
    done, steps, begun = steps_done(trainer.out), trainer.steps, checked.begun
    if trainer.held_out is not None:
        num_held_out, num_documents = len(checked.data.held_out), len(checked.data.documents)
        which = f"{num_held_out} of the {num_documents:,} documents"
        if repeated := checked.data.num_repeated:
            which += f", of which {repeated:,} repeat a prompt (all answers to a prompt are held out, or none)"
        display.note(f"held out: {which}; the step that is best on them is kept (--held-out 0: the last one)")
    if begun is None:
        words = recipe_in_words(trainer.recipe, checked.typed, steps, init=checked.from_trained)
        display.note(f"recipe: {words}")
    elif begun["steps"] != steps:
        display.note(
            f"resumes at step {done} with {steps} steps instead of {begun['steps']}: the learning rate now follows a "
            f"training of {steps} steps"
        )
    if minutes == 0:
        display.note(f"no step is trained with --minutes 0; {trainer.out} has {done} of {steps}")
    elif done < steps:
        epochs = epochs_in_words([source.epochs(steps) for source in trainer.batches.sources])
        display.note(f"training steps {done + 1} to {steps}, {epochs} in all")
    else:
        display.note(f"{trainer.out} is complete ({steps} steps); give a larger --steps to continue")


def _plan_steps(minutes: float, trainer: Trainer, initial: DrafterParams, display: Display) -> int:
    """Measure a step, and return how many fit into most of --minutes. Raises InputError if none does."""
    display.note(f"compiling, and measuring a step: how many fit into {minutes:g} minutes")
    with display.stage("measuring a step", animated=False):
        step_s = seconds_per_step(trainer, initial, MEASURED_FRAC * 60 * minutes)
        held_out_s = seconds_of_held_out(trainer, initial)
    steps = planned_steps(minutes, step_s, held_out_s)
    if not steps:
        raise InputError(
            f"--minutes is {minutes:g}, and a step takes {step_s:.2g} s; expected time for a step, or --steps"
        )
    display.note(f"a step takes {step_s:.2g} s: {steps} steps are planned for {PLANNED_FRAC:.0%} of the time")
    return steps


def describe_log_line(line: Mapping[str, Any]) -> str:
    """Describe a line of the log in a sentence."""
    if EVALUATION in line:
        figures = line[EVALUATION]
        kinds = ("", "_without_loops", "_at_temperature_1")
        greedy, without_loops, sampled = (figure_text(figures[f"acceptance_length{kind}"], ".2f") for kind in kinds)
        return (
            f"step {figures['step']}: acceptance length {greedy} greedily, {without_loops} without loops, {sampled} at "
            f"temperature 1, of {figures['num_outputs']} held-out prompts"
        )
    if HELD_OUT in line:
        return f"step {line['step']}: held out: {_figures(line[HELD_OUT])}"
    speed = "" if line["tok_per_s"] is None else f", {line['tok_per_s']:,} tok/s, {duration(line['left_s'])} left"
    epochs = f", {epochs_in_words(line['epochs'])}"
    return f"step {line['step']} of {line['steps']}{epochs}: {_figures(line)}{speed}"


def _figures(line: Mapping[str, Any]) -> str:
    """Describe loss and hits, as in: loss 3.214, right by depth .31 .12."""
    return f"loss {line['loss']:.3f}, right by depth {' '.join(share(hits) for hits in line['hits_by_depth'])}"
