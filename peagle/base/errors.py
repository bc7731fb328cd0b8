"""The error and the warning for bad input."""

import difflib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path


class InputError(ValueError):
    """Bad input: a file, a flag, a prompt, a pair that does not fit.

    The message is one line: what was seen, what was expected, what to do. Commands print it and exit with 2. field: the
    wrong option, or the wrong field of a request in the server's API; None: several or none.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InputWarning(UserWarning):
    """Input that works, but probably not as intended: a checkpoint that can be read in two ways, say.

    The message is one line: what was seen, how it was read, what to do. Commands print it on standard error.
    """


def not_installed(what: str, package: str, extra: str) -> InputError:
    """Make the error of a missing package. what: such as "training needs". extra: the extra of peagle that has it.

    No package index has peagle, so the message tells how to install the extra from a checkout.
    """
    return InputError(f"{what} {package}, which is not installed; in the checkout of peagle: pip install '.[{extra}]'")


def meant(name: str, names: Iterable[str]) -> str | None:
    """Return the name that a misspelt one is likely to mean; None if none is like it."""
    return next(iter(difflib.get_close_matches(name, [*names], 1)), None)


def refuse_shadowed() -> None:
    """Raise InputError if another module is imported in place of this project's packages target and drafter."""
    home = Path(__file__).resolve().parents[2]
    for name in ("target", "drafter"):
        module = sys.modules.get(name)
        spec = importlib.util.find_spec(name) if module is None else None
        origin = getattr(module, "__file__", None) if spec is None else spec.origin
        if origin is not None and Path(origin).resolve().parent != home / name:
            raise InputError(
                f"{origin} is imported in place of peagle's own package {name}; rename it, or start Python in another "
                "folder"
            )


def cannot_start(error: Exception) -> str:
    """Describe in one line that JAX has no device. error: JAX's."""
    platform = os.environ.get("JAX_PLATFORMS")
    why = " ".join(str(error).split()) or f"there is no device of JAX_PLATFORMS={platform}"
    return f"JAX cannot start: {why}; check JAX_PLATFORMS and the installed jax"


def is_of_backend(error: Exception) -> bool:
    """Whether JAX raised the error while it started a backend (an AssertionError if that has no device)."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.endswith("xla_bridge.py")
