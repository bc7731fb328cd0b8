"""What a command finds around it: no device, no input, no room. Each ends in one line, without a traceback."""

import os
import re
import subprocess
import sys

import pytest

BOTH = "import sys; from peagle.cli import main; sys.exit(main(['speculate', '-']) + main(['chat']))"


def run(command: str, **environment: str) -> tuple[int, str]:
    """Run a command of the shell; return (exit code, standard error)."""
    ended = subprocess.run(
        ["bash", "-c", command.replace("PYTHON", sys.executable)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("command", "environment", "lines"),
    [
        ("PYTHON -m peagle info", {"JAX_PLATFORMS": "cuda"}, ["JAX cannot start: .*check JAX_PLATFORMS"]),
        (f'PYTHON -c "{BOTH}" <&-', {}, ["standard input is closed"] * 2),
        ("PYTHON -m peagle --help > /dev/full", {}, ["No space left on device"]),
    ],
)
def test_it_is_one_line(command: str, environment: dict[str, str], lines: list[str]) -> None:
    code, error = run(command, **environment)
    assert code == 2 * len(lines)
    refusals = [line for line in error.splitlines() if line.startswith("peagle: error: ")]
    assert len(refusals) == len(lines)
    assert all(map(re.search, lines, refusals))
    assert "Traceback" not in error


def test_compiled_programs_run_whatever_jax_disable_jit_says() -> None:
    code, error = run("PYTHON -m peagle generate -n 2 --prompt-ids 1,2", JAX_DISABLE_JIT="1")
    assert code == 0
    assert "JAX_DISABLE_JIT is ignored" in error
