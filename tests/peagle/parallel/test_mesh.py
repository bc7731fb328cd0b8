"""Models over many devices: the tests of on_devices.py, in a process with fake devices; and bad meshes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from peagle.base.errors import InputError
from peagle.cli import main
from peagle.parallel.mesh import MeshShape, make_meshes, parse_mesh

pytestmark = pytest.mark.compile

HERE = Path(__file__).parent
PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"  # a busy machine is no failure


def test_models_over_eight_devices() -> None:
    assert run_on_devices("not slow") >= 23


@pytest.mark.slow
def test_interleavings_and_more_meshes_over_devices() -> None:
    assert run_on_devices("slow") >= 7  # one more with native kernels


def run_on_devices(which: str) -> int:
    """Run these tests of on_devices.py; return how many passed."""
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {PATIENT}"}
    options = ["-p", "no:cacheprovider", "-n", "0", "-m", which]
    command = [sys.executable, "-m", "pytest", *options, str(HERE / "on_devices.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    return int(passed[1])


def test_a_mesh_is_read() -> None:
    assert parse_mesh("tp=2") == MeshShape(2)
    assert parse_mesh("ep=4, tp=2") == MeshShape(2, 4)
    assert MeshShape(2, 4).ranks == 8
    assert parse_mesh("dp=3,tp=2") == MeshShape(2, 1, 3)
    assert (MeshShape(2, 1, 3).ranks, MeshShape(2, 1, 3).devices) == (2, 6)


@pytest.mark.parametrize(
    "text", ["", "2", "tp", "tp=0", "tp=x", "tp=2,tp=2", "dp=0", "tp=2,", "tp=-1", "tp=1.5", f"dp={'9' * 5000}"]
)
def test_malformed_mesh_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"the mesh is {text!r}; expected tp=N")):
        parse_mesh(text)


def test_more_devices_than_there_are_are_refused() -> None:
    count = jax.device_count()
    with pytest.raises(InputError, match=rf"needs {count + 1} devices, and there are {count} \(.*JAX_NUM_CPU_DEVICES"):
        make_meshes(MeshShape(count + 1))
    with pytest.raises(InputError, match=rf"the mesh dp={count + 1},tp=1,ep=1 needs {count + 1} devices"):
        make_meshes(MeshShape(dp=count + 1))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("speculate --mesh dp=2 hello", "--slots is 1; expected a multiple of 2, the replicas (dp) that share them"),
        ("serve --mesh dp=3,tp=3 --slots 4", "--slots is 4; expected a multiple of 3"),
        ("info --mesh dp=2,tp=3 --slots 3", "--slots is 3; expected a multiple of 2"),
        ("chat --mesh dp=2", "--mesh is 'dp=2', but peagle chat runs one conversation; leave dp out"),
        ("bench --mesh dp=2", "--mesh is 'dp=2', but peagle bench measures one replica; leave dp out"),
        ("cluster --mesh dp=2", "--mesh is 'dp=2', but the replicas of a cluster are --decode N; leave"),
        (
            "speculate --mesh dp=2 --slots 2 --process 0/2@7000 hello",
            "--mesh is 'dp=2', but several processes run one replica of the target; peagle cluster "
            "--decode N runs several; leave dp out",
        ),
    ],
)
def test_replicas_where_they_have_no_place_are_one_line(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
