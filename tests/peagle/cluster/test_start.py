"""What a fleet is told, and what it leaves behind; with Ray's modules, and no cluster. Needs `peagle[cluster]`."""

import threading
from collections.abc import Callable

import pytest

from peagle.ops.errors import InputError

pytest.importorskip("ray", reason="ray is not installed: pip install 'peagle[cluster]'")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"keys": "secret"}, "keys are no list"),
        ({"keys": ["a", ""]}, "keys are no list"),
        ({"decode": 0}, "decode is 0"),
        ({"prefill": -1}, "prefill is -1"),
        ({"slots": 0}, "slots is 0"),
        ({"speed": 1}, "are not understood"),
    ],
)
def test_a_config_that_cannot_be_is_refused_and_shows_no_key(fields: dict, match: str) -> None:
    from peagle.cluster.deployments import FleetConfig, build

    with pytest.raises(InputError, match=match) as raised:
        build({"target": "demo", "drafter": None, **fields})
    assert "secret" not in str(raised.value)
    assert "secret" not in repr(FleetConfig("demo", None, keys=("secret",)))


@pytest.mark.parametrize("address", [None, "auto"])
def test_a_cluster_that_was_running_keeps_what_others_serve_there(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    from peagle.cluster import start

    done: list[str] = []

    def noting(name: str) -> Callable[..., None]:
        return lambda *arguments, **_: done.append(" ".join([name, *map(str, arguments)]))

    for module, names in ((start.ray, ("init", "shutdown")), (start.serve, ("start", "run", "delete", "shutdown"))):
        for name in names:
            monkeypatch.setattr(module, name, noting(f"{module.__name__}.{name}"))
    stopped = threading.Event()
    stopped.set()
    start.run({"target": "demo", "drafter": None}, address, "127.0.0.1", 8000, lambda: None, stopped)
    assert ("ray.serve.delete peagle" in done, "ray.serve.shutdown" in done) == (address is not None, address is None)
    assert done[-1] == "ray.shutdown"


def test_an_address_without_a_cluster_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from peagle.cluster import start

    def refused(**_: object) -> None:
        raise ConnectionError("could not find any\nrunning cluster")

    monkeypatch.setattr(start.ray, "init", refused)
    arguments = {"target": "demo", "drafter": None}
    with pytest.raises(InputError, match="--address auto: could not find any running cluster; expected a Ray cluster"):
        start.run(arguments, "auto", "127.0.0.1", 8000, lambda: None, threading.Event())
