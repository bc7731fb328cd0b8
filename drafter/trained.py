"""Read a folder of `peagle train`: the path of its drafter, the target, the coverage of its draft vocabulary."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from drafter.vocabulary import Coverage
from peagle.base.checkpoint import CONFIG
from peagle.base.errors import InputError

RECIPE = "recipe.json"
DRAFTER = "drafter"  # subfolder
COVERAGE = "coverage"  # key of recipe.json


def read_record(run: Path) -> dict[str, Any] | None:
    """Read a training's recipe.json; None if there is none. Raises InputError for a malformed one."""
    path = run / RECIPE
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {**record, "recipe": dict(record["recipe"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{path} cannot be read; expected what peagle train writes: take another --out") from None


def drafter_in(directory: Path) -> Path | None:
    """Return the drafter's folder in a folder of peagle train; None for any other folder.

    Raises InputError for a training that has not written it yet.
    """
    if (directory / CONFIG).exists() or not _record(directory):
        return None
    if not (directory / DRAFTER / CONFIG).exists():
        raise InputError(
            f"{directory} is a folder of peagle train without a drafter yet; peagle train --out {directory} --resume "
            "goes on, and writes one at its end, or with --minutes 0 that of the last checkpoint"
        )
    return directory / DRAFTER


def trained_for(drafter: Path) -> str | None:
    """Return the fingerprint of the target that a drafter was trained for; None without a recipe beside it."""
    target = _record_beside(drafter).get("target")
    return target.get("weights") if isinstance(target, dict) else None


def trained_depth(drafter: Path) -> int | None:
    """Return how many drafts per position a drafter was trained for; None without a recipe beside it."""
    depth = _record_beside(drafter).get("recipe", {}).get("depth")
    return depth if type(depth) is int else None


def recorded_coverage(drafter: Path) -> Coverage | None:
    """Return how much of its data a narrowed drafter can propose; None if no recipe beside it has it."""
    stored = _record_beside(drafter).get(COVERAGE)
    names = [field.name for field in dataclasses.fields(Coverage)]
    figures = [stored.get(name) for name in names] if isinstance(stored, dict) else [None]
    return Coverage(*figures) if all(isinstance(figure, int | float) for figure in figures) else None


def _record_beside(drafter: Path) -> dict[str, Any]:
    """Read the recipe of the training whose folder holds the drafter; empty if there is none."""
    whole = drafter.resolve()
    return _record(whole.parent) if whole.name == DRAFTER else {}


def _record(run: Path) -> dict[str, Any]:
    """Read a training's recipe; empty if there is none, or the file is another program's."""
    try:
        return read_record(run) or {}
    except InputError:
        return {}
