"""Several processes run one target: they agree before they begin, answer as one does, and end together."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peagle.base.errors import InputError
from peagle.cli import main
from peagle.parallel.processes import Rendezvous, decode, encode, parse_rendezvous
from peagle.workflows.random_checkpoint import random_tensors
from scripts.serving.servers import free_port
from target.load import write_target
from tests.target.test_shard import CONFIG

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[3]


def test_a_message_arrives_as_it_was_sent() -> None:
    table = np.arange(6, dtype=np.int32).reshape(2, 3)
    sent = {"a": [1, 2.5, None, True, "é"], "b": {"c": table}, "d": np.float64(0.1)}
    received = decode(encode(sent))
    assert received["a"] == sent["a"]
    np.testing.assert_array_equal(received["b"]["c"], table)
    assert received["b"]["c"].dtype == np.int32
    assert received["d"] == sent["d"]
    assert decode(encode({"e": np.zeros((0, 3), bool), "f": np.float32(np.inf)}))["f"] == np.inf


@pytest.mark.parametrize("data", [b"", b"\x00\x00\x00\x00", b"\x05\x00\x00\x00[1,2]", encode({"a": np.arange(9)})[:-1]])
def test_other_bytes_are_no_message(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  of NumPy, JSON or ours
        decode(data)


def test_a_place_is_read() -> None:
    assert parse_rendezvous(None) is None
    assert parse_rendezvous("1/2@7000") == Rendezvous("127.0.0.1", 7000, 1, 2)
    assert parse_rendezvous("0/4@[::1]:7000").address == "[::1]:7000"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("host:1", "expected I/N@HOST:PORT, as 0/2@127.0.0.1:7000"),
        ("0/2@host", "expected I/N@HOST:PORT"),
        ("-1/2@host:1", "expected I/N@HOST:PORT"),
        ("0/2@host:70000", "expected a port of 1 to 65535"),
        ("0/1@host:1", "expected 2 processes or more"),
        ("2/2@host:1", "expected I from 0 to 1"),
    ],
)
def test_malformed_address_is_refused(typed: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"--process is {typed!r}; {message}")):
        parse_rendezvous(typed)


def test_several_processes_need_a_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speculate", "--process", "0/2@1", "a"]) == 2
    assert "--process is given without --mesh" in capsys.readouterr().err


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("processes") / "target"
    write_target(path, CONFIG, random_tensors(CONFIG, True, 1), mxfp4=True)
    return path


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test starts; those that are left end with it."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(
    started: list[subprocess.Popen[str]], port: int, process: int, *arguments: str, cwd: Path | None = None
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "peagle", *arguments, "--mesh", "tp=2", "--process", f"{process}/2@{port}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    pipe = subprocess.PIPE
    started.append(
        subprocess.Popen(command, env=env, cwd=cwd, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    )
    return started[-1]


def test_two_processes_answer_as_one_does(directory: Path, started: list[subprocess.Popen[str]], capsys: Any) -> None:
    """One of them speaks; with drafts, and plain decoding beside it."""
    command = ["speculate", "--target", str(directory), "--drafter", "ngram", "-k", "2", "--prompt-ids", "5,6,7,5,6,7"]
    command += ["-n", "20", "--json", "-"]
    port = free_port()
    worker, coordinator = (start(started, port, process, *command) for process in (1, 0))
    out, err = coordinator.communicate(timeout=300)
    assert coordinator.returncode == 0, err
    assert worker.communicate(timeout=60) == ("", "")
    assert worker.returncode == 0
    assert main(command) == 0
    alone = json.loads(capsys.readouterr().out)
    together = json.loads(out)
    assert together["config"]["mesh"] == "2 devices, tp=2,ep=1"
    for name in ("output_ids", "speculative_decoding"):
        assert [request[name] for request in together["requests"]] == [request[name] for request in alone["requests"]]


def test_a_process_that_dies_ends_the_other_with_a_line(directory: Path, started: list[subprocess.Popen[str]]) -> None:
    """At work, in a collective that will never end."""
    command = ["speculate", "-k", "0", "--target", str(directory), "--prompt-ids", "5,6,7", "-n", "100000"]
    command += ["--min-tokens", "100000", "--context", "100010"]
    port = free_port()
    worker, coordinator = (start(started, port, process, *command) for process in (1, 0))
    assert coordinator.stdout is not None
    assert coordinator.stdout.read(8)  # token ids: it is at work
    os.kill(worker.pid, signal.SIGKILL)
    killed = time.monotonic()
    _, err = coordinator.communicate(timeout=60)
    assert coordinator.returncode == 1
    assert time.monotonic() - killed < 30
    lines = [line for line in err.splitlines() if line.startswith("peagle: error")]
    assert len(lines) == 1, err
    assert lines[0].startswith("peagle: error: process 1 of 2 has ended")


def test_processes_that_differ_do_not_begin(directory: Path, started: list[subprocess.Popen[str]]) -> None:
    line = "process 1 of 2 differs from process 0: --max-new-tokens 4 (process 0: 5); expected the same version"
    command = ["speculate", "-k", "0", "--target", str(directory), "--prompt-ids", "5,6,7"]
    port = free_port()
    worker, coordinator = start(started, port, 1, *command, "-n", "4"), start(started, port, 0, *command, "-n", "5")
    for process in (coordinator, worker):
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (2, "")
        assert err.splitlines() == [err.strip()]
        assert line in err


def test_a_shard_that_one_process_lacks_ends_all_with_a_line(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Its own machine's files are what a process reads; process 0 says which one lacks what."""
    for place in ("0", "1"):
        tensors = random_tensors(CONFIG, True, 1)
        write_target(tmp_path / place / "t", CONFIG, tensors, mxfp4=True, shard_bytes=100_000)
    missing = max((tmp_path / "1" / "t").glob("*.safetensors"))
    missing.unlink()
    port, command = free_port(), ("speculate", "-k", "0", "--target", "t", "--prompt-ids", "5,6,7", "-n", "4")
    worker, coordinator = (start(started, port, process, *command, cwd=tmp_path / str(process)) for process in (1, 0))
    line = f"t/model.safetensors.index.json names the shard {missing.name!r}, but there is no such file; fetch it again"
    for process, of in ((coordinator, "process 1 of 2: "), (worker, "")):
        out, err = process.communicate(timeout=120)
        # process 0 may warn of its own files before or after it hears of the other
        errors = [told for told in err.splitlines() if told.startswith("peagle: error: ")]
        assert (process.returncode, out, errors) == (2, "", [f"peagle: error: {of}{line}"])
