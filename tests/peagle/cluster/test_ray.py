"""A fleet on Ray Serve, with replicas that are killed. Needs `peagle[cluster]`:

    python -m pytest -m slow -n 1 tests/peagle/cluster/test_ray.py

Last run: 26 November 2026, ray 2.60.0, jax 0.10.2, two cores: 3 passed in 65 s, 34 of them to start.
"""

import os
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

import peagle
from peagle.cli.cluster import LOOPBACK_ALONE
from peagle.engine.request import Request
from peagle.text.tokenizer import detokenize
from scripts.kill_fleet import processes
from scripts.serving.servers import free_port
from tests.peagle.conftest import Directories

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
os.environ.setdefault(LOOPBACK_ALONE, "0")
ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'peagle[cluster]'")

K, CONTEXT, PATIENCE_S = 3, 4096, 120
PROMPT = [5, 9, 2, 11, 30, 4]
BODY = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(directories: Directories) -> Iterator[str]:
    from ray import serve
    from ray.serve.config import HTTPOptions

    from peagle.cluster.deployments import FleetConfig, build

    port = free_port()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        config = FleetConfig(
            str(directories.target), str(directories.drafter), "toy", 1, 2, K, slots=2, context=CONTEXT
        )
        serve.run(build(config), name="peagle")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(url: str, tokens: int) -> dict:
    reply = httpx.post(f"{url}/v1/completions", json={**BODY, "max_tokens": tokens}, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.fixture(scope="module")
def expected(directories: Directories) -> str:
    pair = peagle.load(directories.target, directories.drafter)
    engine = pair.engine(pair.engine_config(K, capacity=CONTEXT))
    chunks = list(engine.follow(engine.add(Request(tuple(PROMPT), 40, stop_token_ids=()))))
    assert pair.tokenizer is not None
    return detokenize(pair.tokenizer, [token for chunk in chunks for token in chunk.token_ids])


def test_it_answers_as_one_engine_does(url: str, expected: str) -> None:
    for _ in range(4):  # by either replica
        reply = ask(url, 40)
        assert reply["choices"][0]["text"] == expected
        assert reply["usage"]["completion_tokens"] == 40


def test_a_killed_decode_replica_ends_its_streams_with_an_error_and_the_rest_go_on(url: str, expected: str) -> None:
    body = {**BODY, "max_tokens": CONTEXT - 100, "stream": True}
    lines: list[str] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as reply:
        for line in reply.iter_lines():
            lines.append(line)
            if len(lines) == 8:  # beyond the first token, which another process computed
                for process in processes("Decode"):
                    os.kill(process, signal.SIGKILL)
    *_, last, done = [line for line in lines if line.startswith("data: ")]
    assert ("the process that decoded this answer was lost" in last, done) == (True, "data: [DONE]")
    # new replicas take its place
    assert ask(url, 40)["choices"][0]["text"] == expected


def test_a_killed_prefill_replica_costs_no_answer(url: str, expected: str) -> None:
    (process,) = processes("Prefill")
    os.kill(process, signal.SIGKILL)
    started = time.monotonic()
    assert ask(url, 40)["choices"][0]["text"] == expected
    assert time.monotonic() - started < PATIENCE_S
