"""Resolve the names that people type to checkpoint directories and to drafters without weights."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from peagle.base.checkpoint import CONFIG, INDEX, WEIGHTS, fingerprint, read_json, weight_files
from peagle.base.errors import InputError, InputWarning
from peagle.base.settings import naming
from peagle.config import DEFAULT_DRAFTS
from peagle.drafters.ngram import NGram
from peagle.loading.hub import OF_DRAFTERS, OF_TARGETS, cached, is_name
from peagle.loading.speculation import read_auto_drafts
from peagle.protocols import Drafter

DEMO, DEMO_EAGLE3, DEMO_DFLASH, NGRAM = "demo", "demo-eagle3", "demo-dflash", "ngram"
DEMO_DRAFTERS = {DEMO: "drafter", DEMO_EAGLE3: "drafter_eagle3", DEMO_DFLASH: "drafter_dflash"}  # their folders
DEMO_DIRECTORY = Path(__file__).parents[1] / "demo"
HELD_OUT = DEMO_DIRECTORY / "heldout_prompts.jsonl"  # not in the demo pair's training data


WEIGHTLESS: dict[str, Callable[[], Drafter]] = {NGRAM: NGram}  # drafters without weights, by name


def or_demo(name: str | None) -> str:
    """Return the name, or the demo's for None. Raises InputError for an empty name, as from an unset variable."""
    if name == "":
        raise InputError("a target's or a drafter's name is empty; expected a directory or a name, or leave it out")
    return DEMO if name is None else name


def resolve(name: str | Path, part: Literal["target", "drafter"]) -> Path:
    """Return the directory of a name: the demo's, a path, or OWNER/NAME in the local Hugging Face cache.

    The path of a training's folder means its drafter. Downloads nothing. Raises InputError if the package has no demo,
    and for an OWNER/NAME that is neither a path nor in the cache.
    """
    if name in DEMO_DRAFTERS and part == "drafter":
        directory = DEMO_DIRECTORY / DEMO_DRAFTERS[str(name)]
    elif name == DEMO:
        directory = DEMO_DIRECTORY / part
    else:
        directory = cached(str(name), _needed) if is_name(name) else Path(name)
        return drafter_folder(directory) if part == "drafter" else directory
    if not (directory / "config.json").is_file():
        raise InputError(
            f"this installation of peagle comes without the demo {directory.name}; give checkpoint directories with "
            "--target and --drafter, or train the demo with scripts/demo"
        )
    return directory


def _needed(snapshot: Path) -> list[str]:
    """List the files that a target or a drafter of the Hub is read from, beside config.json."""
    from drafter.dialects import is_drafter_config

    of_kind = OF_DRAFTERS if is_drafter_config(read_json(snapshot, CONFIG)) else OF_TARGETS
    weights = weight_files(snapshot)
    return [*of_kind, *(weights if weights == [WEIGHTS] else [INDEX, *(weights or [WEIGHTS])])]


def target_folder(name: str) -> Path | None:
    """Return the directory of a target's name; None if it is not on this machine."""
    try:
        directory = resolve(name, "target")
    except InputError:
        return None
    return directory if directory.is_dir() else None


def from_anywhere(name: str) -> str:
    """Name a checkpoint or a file so that the name holds in any working directory: a path becomes absolute."""
    known = name in (*DEMO_DRAFTERS, *WEIGHTLESS) or is_name(name)
    return name if known else str(Path(name).resolve())


def name_for_others(target: str | None) -> str | None:
    """Name a target for programs with another working directory: an absolute path, or OWNER/NAME.

    None for a path that is no folder of this machine.
    """
    if target is None or is_name(target):
        return target
    directory = target_folder(target)
    return None if directory is None else str(directory.resolve())


def drafter_folder(directory: Path) -> Path:
    """Return the drafter's folder within a training's folder, with a warning; return any other folder unchanged.

    Raises InputError for a training that has not written its drafter yet.
    """
    from drafter.trained import drafter_in

    inner = drafter_in(directory)
    if inner is None:
        return directory
    warnings.warn(f"{directory} is a folder of peagle train: the drafter is {inner}", InputWarning, stacklevel=3)
    return inner


def another_target(drafter_directory: Path, target_directory: Path) -> str | None:
    """Return a warning if the recipe beside a drafter says that it was trained for another target; else None."""
    from drafter.trained import RECIPE, trained_for

    if trained_for(drafter_directory) in (None, fingerprint(target_directory)):
        return None
    return (
        f"{drafter_directory} was trained for another target than {target_directory}, by {RECIPE} beside it, so fewer "
        "drafts may be accepted; expected that target, or --init in a training on data of this one"
    )


def refuse_other_architecture(target_directory: Path) -> None:
    """Raise InputError for a directory that is no checkpoint, or one of another architecture. Reads only config.json.

    Files in the layout of openai's `original/` name no architecture and pass.
    """
    from target.dialects import expect_gpt_oss

    config = read_json(target_directory, CONFIG)
    if "model_type" in config:
        with naming(target_directory / CONFIG):
            expect_gpt_oss(config)


def drafter_path(target: str | Path, drafter: str | Path | None) -> Path | None:
    """Return the drafter's directory; None for a drafter without weights.

    Raises InputError for a demo drafter with another target, also for one that is no GPT-OSS model.
    """
    if drafter is None or drafter in WEIGHTLESS:
        return None
    if drafter in DEMO_DRAFTERS and target != DEMO:
        refuse_other_architecture(resolve(target, "target"))  # its message is the better one
        raise InputError(
            f"the target {target} needs its own drafter (the demo's drafters fit only the demo target); give "
            "--drafter DIR, or --drafter ngram, which needs no weights"
        )
    directory = resolve(drafter, "drafter")
    if not directory.exists():
        raise InputError(
            f"{directory} does not exist; expected a drafter's directory, {', '.join(DEMO_DRAFTERS)}, or {NGRAM}"
        )
    return directory


def auto_drafts(drafter_directory: Path | None) -> int:
    """Return the most drafts of a step with K "auto" (`draft_limits`)."""
    return draft_limits(drafter_directory)[0]


def draft_limits(drafter_directory: Path | None) -> tuple[int, int | None]:
    """Return (most drafts of a step with K "auto", drafts that the drafter was trained for, if a recipe is beside it).

    The first is as the drafter's speculation.json says, else as it was trained, within its block. None: a drafter
    without weights. Reads no weights. Raises InputError for an unreadable file.
    """
    from drafter.dialects import open_drafter, parse_config
    from drafter.trained import trained_depth

    if drafter_directory is None:
        return DEFAULT_DRAFTS, None
    trained, drafts = trained_depth(drafter_directory), read_auto_drafts(drafter_directory)
    if drafts is None:
        drafts = min(DEFAULT_DRAFTS, trained or DEFAULT_DRAFTS)
    most = parse_config(open_drafter(drafter_directory)).block_drafts
    return drafts if most is None else min(drafts, most), trained
