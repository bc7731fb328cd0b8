"""What a command finds around it: no device, no input, no room. Each ends in one line, without a traceback."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from peagle.cli import main
from tests.support.pairs import toy_pair
from tests.support.terminal import ROOT

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


def test_a_module_of_the_users_in_place_of_ours_is_named(tmp_path: Path) -> None:
    name = "target"
    (tmp_path / f"{name}.py").write_text("")
    says = f"/{name}.py is imported in place of peagle's own package {name}; rename it"
    code, error = run(f"cd {tmp_path}; PYTHON -m peagle speculate -k 0 Hi", PYTHONPATH=str(ROOT))
    assert code == 2
    assert error.count("\n") == 1
    assert says in error
    code, error = run(f"cd {tmp_path}; PYTHON -c 'import peagle; peagle.load()'", PYTHONPATH=str(ROOT))
    assert code == 1
    assert says in error.splitlines()[-1]


def test_draws_do_not_depend_on_jaxs_default_generator() -> None:
    """Which an environment variable sets."""
    answers = []
    for name in ("threefry2x32", "rbg"):
        with jax.default_prng_impl(name):
            answers.append(toy_pair(None).generate([50, 51], max_new_tokens=8, temperature=1.0, seed=3).output_ids)
    assert answers[0] == answers[1]


def test_ctrl_c_while_the_process_ends_shows_no_traceback() -> None:
    """JAX and others clean up at exit: the answer is out already."""
    code = "import atexit, sys, time; atexit.register(lambda: (print('exit', flush=True), time.sleep(600))); "
    code += "from peagle.cli import main; sys.argv[1:] = ['--version']; sys.exit(main())"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.stdout.readline() != "exit\n":
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert (process.returncode, error) == (-signal.SIGINT, "")


def test_jax_disable_jit_is_ignored_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_DISABLE_JIT", "1")
    assert main(["info"]) == 0
    assert "JAX_DISABLE_JIT is ignored" in capsys.readouterr().err
    assert "JAX_DISABLE_JIT" not in os.environ
