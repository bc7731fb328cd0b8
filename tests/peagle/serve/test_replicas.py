"""Replicas of a pair behind one server: it answers as it does over one engine."""

from typing import Any

from peagle.engine.devices.replicas import Replicas
from tests.support.servers import SLOTS, client_of, values

ASKED = {"prompt": [100, 110, 120], "max_tokens": 40, "temperature": 0}
BODIES = (
    {"n": 7, "temperature": 1.0, "seed": 3},  # more answers than slots
    {"stop": ["a"]},
    {"structured_outputs": {"json": {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}}},
    {"prompt": [100 + place % 50 for place in range(140)]},
    {"prompt": [100 + place % 50 for place in range(145)], "logprobs": 2},
)


def test_answers_and_counters_are_those_of_one_engine(make: Any) -> None:
    results = []
    for service in (make(slots=2 * SLOTS), make(slots=2 * SLOTS, replicas=2)):
        client = client_of(service)
        replies = [client.post("/v1/completions", json={**ASKED, **body}).json() for body in BODIES]
        parts = [{name: reply[name] for name in ("choices", "usage", "metrics")} for reply in replies]
        # each engine has a prefix cache and dispatches of its own, so these are not compared
        left_out = ("seconds", "prefix_cache_hits", "iteration_tokens", "process", "_created")
        counted = {key: value for key, value in values(client).items() if not any(part in key[0] for part in left_out)}
        results.append((parts, counted))
    engine = service.loop.engine
    assert isinstance(engine, Replicas)
    assert all(replica.prefix_cache_use.num_requests > 1 for replica in engine.engines)
    assert engine.prefix_cache_use.num_hits > 0
    one, both = results
    assert both[0] == one[0]
    assert both[1] == one[1]
