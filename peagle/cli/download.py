"""`--download`: download the checkpoints that a command names, before it runs."""

from typing import Any

from peagle.cli.command import options_of
from peagle.cli.display import Display
from peagle.hub import cache, fetch, is_name, remaining
from peagle.ops.memory import size_in_words

CHECKPOINT_FIELDS = ("target", "drafter", "init", "directories")


def download(command: Any) -> None:
    """Download the files that the local cache lacks of the checkpoints that a command names.

    Raises InputError if a checkpoint cannot be fetched, and KeyboardInterrupt after Ctrl-C.
    """
    display = Display(quiet=getattr(command, "quiet", False))
    kept = f"complete files stay in {cache()}; the same command downloads the rest"
    values = [option.of(command) for option in options_of(type(command)) if option.name in CHECKPOINT_FIELDS]
    names = [name for value in values if value for name in (value.split(",") if isinstance(value, str) else value)]
    for name in filter(is_name, dict.fromkeys(names)):
        with display.stage(f"looking up {name}"):
            missing = remaining(name)
        if not missing.num_files:
            display.note(f"{name} is in {cache()} already")
            continue
        files = f"{missing.num_files} file{'s' * (missing.num_files > 1)}"
        display.note(f"downloading {name} into {cache()}: {files}, {size_in_words(missing.num_bytes)}")
        with display.on_interrupt(lambda: kept), display.stage(f"downloading {name}") as progress:
            fetch(missing, progress)
