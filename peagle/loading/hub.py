"""Find checkpoints of the Hugging Face Hub in the local cache, and download them by `peagle download`.

Only `remaining` and `fetch` use the network. They download safetensors weights, configurations and tokenizer files from
a repository's top level: no code, no pickle.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.base import interrupt
from peagle.base.errors import InputError
from peagle.base.files import expect_room

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # OWNER/NAME
ADDRESS = re.compile(
    r"(?:(?:https?:/)?/?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)(?!datasets/|spaces/)([^/]+/[^/?#@]+)|\w+://"
)
WEIGHTS = ".safetensors"
CONFIG = "config.json"
OF_DRAFTERS = ("speculation.json", "peagle_config.json")
OF_TARGETS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
FILES = (CONFIG, *OF_DRAFTERS, *OF_TARGETS, "model.safetensors.index.json", f"*{WEIGHTS}")
SUBFOLDERS = "*/*"  # they hold other formats of the same weights
OFFLINE = "HF_HUB_OFFLINE"
OURS = "ON"  # the value that `stay_offline` sets; other values are the user's, and are obeyed
BANS = (OFFLINE, "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True)
class Remaining:
    """The files of a repository that `fetch` would download, because the local cache lacks them."""

    name: str
    num_files: int
    num_bytes: int


def is_name(name: str | Path) -> bool:
    """Check whether a name is OWNER/NAME and not an existing path. Raises InputError for an address of the web."""
    if (address := ADDRESS.match(str(name))) is not None and not Path(name).exists():
        raise InputError(
            f"{name} is an address; expected a directory, or OWNER/NAME: {address[1] or 'openai/gpt-oss-20b'}"
        )
    return NAME.fullmatch(str(name)) is not None and not Path(name).exists()


def stay_offline() -> None:
    """Forbid Hugging Face's libraries the network in this process and its children, except in `fetch`.

    Call it before any of them is imported.
    """
    os.environ.setdefault(OFFLINE, OURS)


def cached(name: str, needed: Callable[[Path], Iterable[str]]) -> Path:
    """Return the snapshot of a repository in the local cache.

    needed: lists the files of a snapshot with a config.json that are used, if the repository has them. Raises
    InputError if there is no snapshot, or one of these files is missing; others may be.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot = Path(_snapshot(name, [CONFIG], local_files_only=True))
        return Path(_snapshot(name, [CONFIG, *needed(snapshot)], local_files_only=True))
    except LocalEntryNotFoundError:
        raise InputError(
            f"{name} is no directory, and the local Hugging Face cache has no complete copy; expected a checkpoint: "
            f"peagle download {name} fetches it"
        ) from None


def remaining(name: str) -> Remaining:
    """Look up on the Hub which files the local cache lacks.

    Raises InputError if the Hub cannot be reached or refuses, or if the repository has no safetensors weights.
    """
    with _online(name), interrupt.waiting():
        files = _snapshot(name, dry_run=True, tqdm_class=_reporting(lambda _: None))
    if not any(file.filename.endswith(WEIGHTS) for file in files):
        raise InputError(
            f"{name} on the Hub has no weights in safetensors at its top level, and nothing else is fetched; expected "
            "another repository, or a directory"
        )
    missing = [file for file in files if file.will_download]
    return Remaining(name, len(missing), sum(file.file_size or 0 for file in missing))


def fetch(what: Remaining, progress: Callable[[int, int], None]) -> None:
    """Download the missing files one by one, so that an interruption costs one file at most.

    Calls progress(bytes so far, all bytes) from another thread. Raises InputError as `remaining` does, and before the
    first file if there is no room for all, and KeyboardInterrupt after Ctrl-C; complete files stay.
    """
    expect_room(cache(), what.num_bytes, what.name)
    with _online(what.name):
        _snapshot(what.name, max_workers=1, tqdm_class=_reporting(lambda done: progress(done, what.num_bytes)))


def cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _snapshot(name: str, files: Iterable[str] = FILES, **options: Any) -> Any:
    from huggingface_hub import snapshot_download

    return snapshot_download(name, allow_patterns=[*files], ignore_patterns=SUBFOLDERS, **options)


def _reporting(report: Callable[[int], None]) -> type:
    """Make a progress bar for the Hub's client that shows nothing and reports bytes."""
    from huggingface_hub.utils import tqdm

    class Reporting(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._counts = options.get("unit") == "B"
            self._so_far = 0
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: int | float | None = 1) -> None:
            interrupt.check()
            if self._counts:  # two bars count bytes, received and written: each reports its own sum, nearly equal
                self._so_far += int(n or 0)
                report(self._so_far)

    return Reporting


@contextmanager
def _online(name: str) -> Iterator[None]:
    """Let the Hub's client use the network; raise its errors as InputErrors of one line.

    Raises InputError if the environment forbids the network.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    for variable in BANS:
        value = os.environ.get(variable, "")
        if value.upper() in ("1", "ON", "YES", "TRUE") and (variable, value) != (OFFLINE, OURS):
            raise InputError(f"{variable}={value} in the environment forbids to fetch {name}; unset it")
    failures: Any = (OSError, ValueError, *HfHubHTTPError.__bases__)  # the bases are the HTTP client's errors
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, False
    try:
        yield
    except failures as error:
        raise _refusal(name, error, constants.ENDPOINT) from None
    finally:
        constants.HF_HUB_OFFLINE = before


def _refusal(name: str, error: Exception, hub: str) -> InputError:
    """Describe why a repository cannot be downloaded, and the remedy."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    cause = error
    while not hasattr(cause, "response") and isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if isinstance(cause, GatedRepoError) or status == 403:
        return InputError(
            f"{hub} gives {name} only to accounts that accepted its terms (status {status}); accept them at "
            f"{hub}/{name}, then log in with hf auth login, or set HF_TOKEN"
        )
    if isinstance(cause, RepositoryNotFoundError) or status == 401:
        return InputError(
            f"{hub} has no {name}, or shows it to some accounts only (status {status}); check the name, or log in with "
            "hf auth login"
        )
    why = " ".join(f"{type(cause).__name__}: {cause}".split())
    return InputError(
        f"{name} cannot be fetched from {hub}: {why}; check the network and repeat the command, or give a directory"
    )
