"""The thread team runs each chunk of each job once, from any caller, and a thread sanitizer finds no race."""

import subprocess
from pathlib import Path

import pytest

from peagle.ops.native import build

pytestmark = pytest.mark.compile

STRESS = Path(__file__).parent / "thread_team"
RACES = "-fsanitize=thread"


def stress(folder: Path, *flags: str) -> Path:
    """Compile the program."""
    try:
        compiler = build.compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    program = folder / "stress"
    source, includes = STRESS / "stress.cc", [f"-I{STRESS}", f"-I{build.HERE}"]
    command = [compiler, "-std=c++20", "-O2", "-Wall", "-Wextra", "-pthread", *flags, *includes, str(source)]
    done = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return program


@pytest.mark.parametrize(
    ("milliseconds", "flags"),
    [pytest.param(200, (), id="as_it_is"), pytest.param(1000, (RACES,), id="races", marks=pytest.mark.slow)],
)
def test_every_chunk_runs_once(tmp_path: Path, milliseconds: int, flags: tuple[str, ...]) -> None:
    program = stress(tmp_path, *flags)
    for callers, threads in ((1, 2), (1, 4), (3, 2), (3, 4)):
        done = subprocess.run(
            [program, str(callers), str(threads), str(milliseconds)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, (callers, threads, (done.stdout + done.stderr)[-2000:])
