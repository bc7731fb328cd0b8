"""`--download`: download the checkpoints that a command names, before it runs."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from peagle.cli.display import Display
from peagle.hub import cache, fetch, is_name, remaining
from peagle.ops.memory import format_size

NAMING = ("target", "drafter", "init", "directories")  # fields whose values are checkpoints


def download(settings: Any) -> None:
    """Download the missing files of the settings' Hub checkpoints, and print how many.

    Raises InputError if a checkpoint cannot be fetched, and KeyboardInterrupt after Ctrl-C.
    """
    display = Display(quiet=getattr(settings, "quiet", False))
    for name in dict.fromkeys(checkpoint for checkpoint in _named(settings) if is_name(checkpoint)):
        with display.stage(f"looking up {name}"):
            missing = remaining(name)
        if not missing.num_files:
            display.note(f"{name} is in {cache()} already")
            continue
        files = f"{missing.num_files} file{'s' * (missing.num_files > 1)}"
        display.note(f"downloading {name} into {cache()}: {files}, {format_size(missing.num_bytes)}")
        with display.keeping(_kept), display.stage(f"downloading {name}") as progress:
            fetch(missing, progress)


def _kept() -> str:
    return f"complete files stay in {cache()}; the same command downloads the rest"


def wants_download(settings: Any) -> bool:
    """Return whether the command has --download, and it was typed."""
    own = getattr(settings, "download", False)
    groups = (getattr(settings, field.name) for field in dataclasses.fields(settings))
    return bool(own) or any(wants_download(group) for group in groups if dataclasses.is_dataclass(group))


def _named(settings: Any) -> Iterator[str]:
    """Yield the checkpoints that settings and their groups name."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from _named(value)
        elif field.name in NAMING and value is not None:
            yield from value.split(",") if isinstance(value, str) else value
