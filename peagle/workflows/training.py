"""A training's recipe.json, and the steps that fit into --minutes."""

import bisect
import dataclasses
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from drafter.config import DrafterConfig
from drafter.params import DrafterParams
from drafter.train.folder import COMMAND, MOVABLE, steps_done
from drafter.train.recipe import DECIDED, Recipe, read_recipe
from drafter.train.shards import NAME, read_manifest, total_tokens
from drafter.train.trainer import Trainer
from drafter.trained import COVERAGE, RECIPE, read_record
from drafter.vocabulary import Coverage
from peagle.base import interrupt
from peagle.base.errors import InputError
from peagle.base.files import holds_files, write_text_whole
from peagle.base.flag import check_type
from peagle.base.records import describe_difference, flat
from peagle.base.settings import brief, mapping, whole
from peagle.base.strict_json import dumps
from peagle.measure.provenance import provenance
from peagle.workflows.training_data import TrainingData

MEASURED_STEPS, LEAST_MEASURED = 12, 3  # steps to plan --minutes; the first compiles
MEASURED_FRAC = 0.05  # of --minutes, to measure slow steps
LEAST_BETWEEN, MEASURED_TIMES = 10, 20  # losses on held-out documents: the fewest steps between two, the most of them
LEAST_BETWEEN_EVALUATIONS, EVALUATION_TIMES = 200, 10  # the same of evaluations
PLANNED_FRAC = 0.9  # of --minutes, so that a machine that slows down still ends the schedule
# of recipe.json, besides `coverage`, `provenance` and `continued`
PARTS = ("schema", "steps", "recipe", "drafter", "target", "init", "draft_vocab", "data", COMMAND)
OPTIONS = {  # by value in recipe.json, if the option has another name
    "data.held_out": "--held-out",
    "recipe.compute_dtype": "--dtype",
    "drafter.windows": "--drafter-window",
}
TYPED = {field.name for field in dataclasses.fields(Recipe)} - set(DECIDED)  # values of a recipe that are options


def begun_in(out: Path) -> dict[str, Any] | None:
    """Read a training's record; None for a new folder. Raises InputError for another folder, and a damaged record."""
    if (record := read_record(out)) is not None:
        return _checked(out / RECIPE, record)
    if out.exists() and (not out.is_dir() or holds_files(out)):
        state = f"holds files, but no {RECIPE}" if out.is_dir() else "is a file"
        raise InputError(f"{out} {state}; expected a new folder, or one of a training")
    return None


def _checked(path: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record. Raises InputError if it lacks a part, or if a training cannot continue with a value of it."""
    if missing := [part for part in PARTS if part not in record]:
        raise InputError(f"{path} has no {missing[0]}; expected what peagle train writes: take another --out")
    try:
        steps, data = whole(record, "steps"), mapping(record, "data")
        read_recipe(record["recipe"])
        check_type("data.held_out", data.get("held_out"), float)
        if not 0 <= data["held_out"] <= 0.5:
            raise InputError(f"data.held_out is {data['held_out']}; expected a fraction from 0 to 0.5")
        if not isinstance(continued := record.get("continued", []), list):
            raise InputError(f"continued is {brief(continued)}; expected a list")
    except InputError as error:
        raise InputError(f"{path}: {error}: take another --out") from None
    return {**record, "steps": steps}


def training_record(
    recipe: Recipe,
    steps: int,
    config: DrafterConfig,
    data: TrainingData,
    parts: Sequence[tuple[Path, int]],
    digests: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """Return what a training depends on, as JSON.

    parts: the folders of the data and their shares; their paths are not in it, because files may move. digests: of the
    other files that it reads.
    """
    manifests = [{name: value for name, value in read_manifest(folder).items() if name != NAME} for folder, _ in parts]
    documents, held_out = data.documents, data.held_out_frac
    record = {
        "schema": 1,
        "steps": steps,
        "recipe": dataclasses.asdict(recipe),
        "drafter": dataclasses.asdict(config),
        **digests,
        "data": {"manifests": manifests, "shares": [share for _, share in parts], "held_out": held_out}
        | {"documents": len(documents), "tokens": total_tokens(documents)[0]},
    }
    loaded: dict[str, Any] = json.loads(dumps(record))
    return loaded


def write_recipe(
    out: Path,
    begun: Mapping[str, Any] | None,
    record: Mapping[str, Any],
    command: Mapping[str, Any],
    covered: Coverage | None,
) -> None:
    """Write recipe.json. In a training that continues, check that it is the same, and add more steps to `continued`.

    begun: the recipe.json of that training. command: the options for --resume. covered: the data's coverage by a
    narrowed vocabulary. Raises InputError that names all differences.
    """
    if begun is None:
        out.mkdir(parents=True, exist_ok=True)
        known = {} if covered is None else {COVERAGE: dataclasses.asdict(covered)}
        _write(out, {**record, COMMAND: dict(command), **known, "provenance": provenance()})
        return
    then, now = (flat({part: values[part] for part in record if part != "steps"}) for values in (begun, record))
    if difference := describe_difference(then, now, _option):
        raise InputError(f"{out} was begun with {difference}; expected the same: take another --out")
    steps = begun["steps"]
    if record["steps"] < steps:
        raise InputError(f"{out} was begun with {steps} steps, now it is {record['steps']}; expected as many or more")
    recorded = begun[COMMAND] if isinstance(begun[COMMAND], Mapping) else command
    updated = {**begun, COMMAND: {**recorded, **{name: command[name] for name in MOVABLE}}}
    if record["steps"] > steps:
        continued = [*begun.get("continued", []), {"at": steps_done(out), "steps_before": steps}]
        updated |= {"steps": record["steps"], "continued": continued}
    if updated != begun:
        _write(out, updated)


def _option(key: str) -> str:
    """Name the option that sets a value of the record, or the value."""
    if key in OPTIONS:
        return OPTIONS[key]
    kind, _, name = key.partition(".")
    if kind in MOVABLE:
        return "--" + kind.replace("_", "-")
    if kind == "recipe" and name in TYPED:
        return "--" + name.replace("_", "-")
    return f"the {kind}'s {name.replace('_', ' ')}" if name else f"the {kind}"


def _write(out: Path, record: Mapping[str, Any]) -> None:
    write_text_whole(out / RECIPE, dumps(record, indent=1) + "\n")


def held_out_every(steps: int) -> int:
    """Return the steps between two losses on held-out documents."""
    return max(LEAST_BETWEEN, -(-steps // MEASURED_TIMES))


def evaluate_every(steps: int) -> int:
    """Return the steps between two evaluations of the acceptance length."""
    return max(LEAST_BETWEEN_EVALUATIONS, -(-steps // EVALUATION_TIMES))


def planned_steps(minutes: float, step_s: float, held_out_s: float = 0.0) -> int:
    """Count the steps that fit into the minutes, with held-out losses.

    held_out_s: seconds of a loss; 0 without them.
    """

    def seconds(steps: int) -> float:
        num_losses = min(MEASURED_TIMES, -(-steps // LEAST_BETWEEN))
        return steps * step_s + num_losses * held_out_s

    budget = PLANNED_FRAC * 60 * minutes
    return bisect.bisect_right(range(1, 1 + int(budget / step_s)), budget, key=seconds)


def seconds_per_step(trainer: Trainer, initial: DrafterParams, at_most_s: float) -> float:
    """Return the median time of a step without compilation. Trains a copy of the parameters.

    Measures for about at_most_s if steps are slow.
    """
    step, state = trainer.compiled(), trainer.begin(initial)
    times: list[float] = []
    while len(times) < MEASURED_STEPS and (len(times) < LEAST_MEASURED or sum(times[1:]) < at_most_s):
        interrupt.check()
        started = time.perf_counter()
        state, record = step(state, trainer.batches.at(len(times)))
        jax.block_until_ready(record)
        times.append(time.perf_counter() - started)
    return statistics.median(times[min(2, len(times) - 1) :])


def seconds_of_held_out(trainer: Trainer, initial: DrafterParams) -> float:
    """Return the time of a loss on held-out documents without compilation; 0 without such documents."""
    if trainer.held_out is None:
        return 0.0
    state = trainer.begin(initial)
    trainer.held_out_figures(state)
    interrupt.check()
    started = time.perf_counter()
    trainer.held_out_figures(state)
    return time.perf_counter() - started
