"""What a fleet is told, and what it leaves behind; with Ray's modules, and no cluster. Needs the extra `cluster`."""

import dataclasses
import threading
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from peagle.base.errors import InputError
from peagle.cluster.config import FleetConfig
from peagle.config import EngineConfig
from peagle.serve.server import listen
from scripts.serving.servers import free_port

pytest.importorskip("ray", reason="ray is not installed: pip install '.[cluster]'")

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_file_makes_the_application() -> None:
    from peagle.cluster.deployments import build

    elsewhere = {"load": {"target": "a/folder/of/other/machines"}}  # nothing is read where the application is made
    for file in ({"load": {"target": "demo"}, "engine": {"slots": 2}}, elsewhere):
        assert build({**file, "prefill": 1, "max_decode": 3}) is not None


PLAIN = FleetConfig(engine=EngineConfig(0, slots=4, context=4096, prefix_cache="on"))
Done = list[str]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Done:
    """What is called of Ray, which does nothing."""
    from peagle.cluster import start

    calls: Done = []

    def noting(name: str) -> Callable[..., None]:
        return lambda *arguments, **_: calls.append(
            " ".join([name, *(argument for argument in arguments if argument == "peagle")])
        )

    for name in ("init", "shutdown"):
        monkeypatch.setattr(start.ray, name, noting(f"ray.{name}"))
    for name in ("start", "run_many", "delete", "shutdown"):
        monkeypatch.setattr(start.serve, name, noting(f"serve.{name}"))
    return calls


def status_of(monkeypatch: pytest.MonkeyPatch, *states: Any) -> None:
    """Let Serve tell each of these statuses of the fleet in turn, then the last of them."""
    from peagle.cluster import start

    left = list(states)

    def status() -> Any:
        return SimpleNamespace(applications={"peagle": left.pop(0) if len(left) > 1 else left[0]})

    monkeypatch.setattr(start.serve, "status", status)
    monkeypatch.setattr(start, "POLL_S", 0.001)


def of(status: str, message: str = "", **replicas: dict[str, int]) -> Any:
    deployments = {name: SimpleNamespace(replica_states=states) for name, states in replicas.items()}
    return SimpleNamespace(status=status, message=message, deployments=deployments)


@pytest.mark.parametrize("address", [None, "auto"])
def test_a_cluster_that_was_running_keeps_what_others_serve_there(
    monkeypatch: pytest.MonkeyPatch, done: Done, address: str | None
) -> None:
    """Its own application alone is deleted, which waits for answers, before Ray is left or ended."""
    from peagle.cluster import start

    status_of(
        monkeypatch,
        of("DEPLOYING", Both={"STARTING": 2}),
        of("RUNNING", Both={"RUNNING": 2}),
        of("RUNNING", Both={"RUNNING": 1, "STARTING": 1}),
    )
    stopped, notes = threading.Event(), list[str]()

    def note(line: str) -> None:
        notes.append(line)
        if "1 running" in line:
            stopped.set()

    start.run(PLAIN, address, "127.0.0.1", free_port(), note, stopped)
    assert [line.split(":")[0] for line in notes] == ["ready", "replicas", "replicas", "ending"]
    assert notes[1:3] == ["replicas: Both 2 running", "replicas: Both 1 running, 1 starting"]
    assert done == ["ray.init", "serve.start", "serve.run_many", "serve.delete peagle", "ray.shutdown"]


def test_a_fleet_that_cannot_be_started_is_one_line_and_is_ended(monkeypatch: pytest.MonkeyPatch, done: Done) -> None:
    from peagle.cluster import start

    status_of(monkeypatch, of("DEPLOY_FAILED", "Traceback\n  of theirs\nMemoryError: no room"))
    with pytest.raises(InputError, match="the fleet cannot be started: MemoryError: no room"):
        start.run(PLAIN, None, "127.0.0.1", free_port(), lambda _: None, threading.Event())
    assert done[-2:] == ["serve.delete peagle", "ray.shutdown"]


def test_early_stop_starts_nothing_and_a_second_one_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, done: Done
) -> None:
    from peagle.cluster import start

    stopped = threading.Event()
    stopped.set()
    start.run(PLAIN, None, "127.0.0.1", free_port(), lambda _: None, stopped)
    assert done == ["ray.init", "ray.shutdown"]

    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(start.serve, "run_many", lambda *_, **__: stopped.set())
    monkeypatch.setattr(start.serve, "delete", pressed)
    stopped.clear()
    start.run(PLAIN, None, "127.0.0.1", free_port(), lambda _: None, stopped)
    assert done[-2:] == ["serve.start", "ray.shutdown"]


def test_an_address_without_a_cluster_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from peagle.cluster import start

    def refused(**_: object) -> None:
        raise ConnectionError("could not find any\nrunning cluster")

    monkeypatch.setattr(start.ray, "init", refused)
    with pytest.raises(InputError, match="--address auto: could not find any running cluster; expected a Ray cluster"):
        start.run(PLAIN, "auto", "127.0.0.1", 8000, lambda _: None, threading.Event())
    with pytest.raises(InputError, match=r"--address 127.0.0.1:\d+: .*refused; expected a Ray cluster"):
        start.run(PLAIN, f"127.0.0.1:{free_port()}", "127.0.0.1", 8000, lambda _: None, threading.Event())


def test_a_port_that_is_taken_and_gpus_that_are_not_there_are_refused_before_anything_is_served(
    monkeypatch: pytest.MonkeyPatch, done: Done
) -> None:
    from peagle.cluster import start

    with closing(listen("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"--port {port} cannot be listened on: Address already in use"):
            start.run(PLAIN, None, "127.0.0.1", port, lambda _: None, threading.Event())
    assert done == []
    monkeypatch.setattr(start.ray, "cluster_resources", dict)
    many = dataclasses.replace(PLAIN, prefill=1, decode=2, num_gpus=0.5)
    with pytest.raises(InputError, match=r"--num-gpus 0\.5 for 3 replicas needs 1\.5 GPUs, and Ray finds 0"):
        start.run(many, None, "127.0.0.1", free_port(), lambda _: None, threading.Event())
    assert done == ["ray.init", "ray.shutdown"]
