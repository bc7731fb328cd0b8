"""Make a virtual environment for a peer whose packages do not go with this project's own."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from peagle.ops.errors import InputError


def python_of(folder: Path, module: str, requirement: str, unwanted: Sequence[str] = ()) -> str:
    """Find the Python of the environment in a folder, which has the module; make it if there is no such folder.

    pip fills a new one with the requirement, and then removes the unwanted packages that came along. One that exists
    is left as it is. Raises InputError if a folder exists and has no such module, and if the environment cannot be
    made; nothing is left of it then.
    """
    python = folder / "bin" / "python"
    if folder.exists():
        if not _has(python, module):
            raise InputError(
                f"{folder} is no environment that has {module}; expected one, or a folder that does not exist yet: "
                "name another, or remove it"
            )
        return str(python)
    print(f"making an environment with {requirement} in {folder}: minutes, and gigabytes", file=sys.stderr)
    try:
        _run(f"no environment can be made in {folder}", [sys.executable, "-m", "venv", str(folder)])
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        _run(f"pip cannot install {requirement}", [*pip, "install", requirement])
        if unwanted:
            _run(f"pip cannot remove {', '.join(unwanted)}", [*pip, "uninstall", "--yes", *unwanted])
        if not _has(python, module):
            raise InputError(f"{requirement} came without {module}; expected a package that has it")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return str(python)


def _has(python: Path, module: str) -> bool:
    asked = [str(python), "-c", f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"]
    return python.exists() and subprocess.run(asked, capture_output=True, check=False).returncode == 0


def _run(trouble: str, command: Sequence[str]) -> None:
    """Run the command. Raises InputError, with the last error line that it printed, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(("ERROR", "Error"))]
        raise InputError(f"{trouble}: {(errors or lines or ['it printed nothing'])[-1]}")
