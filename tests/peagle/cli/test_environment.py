"""What a command finds around it: no device, no input, no room. Each ends in one line, without a traceback."""

import os
import re
import subprocess
import sys

import pytest


def run(command: str, **environment: str) -> tuple[int, str]:
    """Run a command of the shell; return (exit code, standard error)."""
    done = subprocess.run(
        ["bash", "-c", command.replace("peagle", f"{sys.executable} -m peagle")],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("command", "environment", "says"),
    [
        ("peagle info", {"JAX_PLATFORMS": "cuda"}, "JAX cannot start: .*check JAX_PLATFORMS"),
        ("peagle speculate - <&-", {}, "standard input is closed"),
        ("peagle chat <&-", {}, "standard input is closed"),
        ("peagle --help > /dev/full", {}, "No space left on device"),
    ],
)
def test_it_is_one_line(command: str, environment: dict[str, str], says: str) -> None:
    code, error = run(command, **environment)
    assert code == 2
    lines = [line for line in error.splitlines() if line.startswith("peagle: error: ")]
    assert len(lines) == 1
    assert "Traceback" not in error
    assert re.search(says, lines[0])


def test_compiled_programs_run_whatever_jax_disable_jit_says() -> None:
    code, error = run("peagle generate -n 2 --prompt-ids 1,2", JAX_DISABLE_JIT="1")
    assert code == 0
    assert "JAX_DISABLE_JIT is ignored" in error
