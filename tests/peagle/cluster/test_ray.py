"""A fleet on Ray Serve, with replicas that are scaled away, and killed. Needs the extra `cluster`:

    python -m pytest -m slow -n 1 tests/peagle/cluster/test_ray.py

Last run, 30 November 2026, ray 2.60.0, jax 0.10.2, two cores, busy with other work: all passed in five minutes.
"""

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import peagle
from peagle.cli.cluster import LOOPBACK_ALONE
from peagle.cluster.config import FleetConfig
from peagle.config import EngineConfig, LoadConfig
from peagle.engine.request import Request
from peagle.ops.attention import PAGE_SIZE
from peagle.pair import Pair
from peagle.text.tokenizer import detokenize
from scripts.serving import client
from scripts.serving.servers import free_port
from tests.support.pairs import TARGET, Directories, write_drafter, write_target, write_tokenizer
from tests.support.toys import follow

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
os.environ.setdefault(LOOPBACK_ALONE, "0")
ray = pytest.importorskip("ray", reason="ray is not installed: pip install '.[cluster]'")

K, CONTEXT, PATIENCE_S = 3, 4096, 300.0
LONG, BUSY = CONTEXT - 100, 4
Alone, Answer = Callable[[int], str], Callable[[Sequence[int], int], list[int]]
PROMPT = [5, 9, 2, 11, 30, 4]
BODY = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """Make a pair whose target has as many positions as the fleet's context."""
    root = tmp_path_factory.mktemp("fleet")
    write_target(root / "target", dataclasses.replace(TARGET, max_positions=CONTEXT))
    write_tokenizer(root / "target")
    write_drafter(root / "drafter")
    return Directories(root / "target", root / "drafter", root)


@pytest.fixture(scope="module")
def url(directories: Directories) -> Iterator[str]:
    from ray import serve
    from ray.serve.config import HTTPOptions

    from peagle.cluster.deployments import build

    port = free_port()
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        config = FleetConfig(
            load=LoadConfig(target=str(directories.target), drafter=str(directories.drafter)),
            engine=EngineConfig(K, slots=2, context=CONTEXT, prefix_cache=1 << 24),
            served_model_name="toy", prefill=2, max_decode=2, busy=BUSY, scale_up=0.0, scale_down=0.0, drain=PATIENCE_S,
        )  # fmt: skip
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
def pair(directories: Directories) -> Pair:
    return peagle.load(directories.target, directories.drafter)


@pytest.fixture(scope="module")
def answer(pair: Pair) -> Answer:
    """Return the tokens that an engine alone answers a prompt with, so many."""
    engine = pair.engine(pair.engine_config(K, context=CONTEXT))

    def tokens(prompt: Sequence[int], count: int) -> list[int]:
        handle = engine.add(Request(tuple(prompt), count, stop_token_ids=()))
        return [token for chunk in follow(engine, handle) for token in chunk.token_ids]

    return tokens


@pytest.fixture(scope="module")
def alone(pair: Pair, answer: Answer) -> Alone:
    """Return the text of so many tokens, as an engine alone answers."""
    tokenizer, tokens = pair.tokenizer, answer(PROMPT, LONG)
    assert tokenizer is not None
    return lambda count: detokenize(tokenizer, tokens[:count])


@pytest.fixture(scope="module")
def expected(alone: Alone) -> str:
    return alone(40)


def test_it_answers_as_one_engine_does(url: str, expected: str) -> None:
    for _ in range(4):
        reply = ask(url, 40)
        assert reply["choices"][0]["text"] == expected
        assert reply["usage"]["completion_tokens"] == 40
    # Serve's router takes the two calls of one HTTP request for one, unless it is first in, first out
    body = {**BODY, "prompt": [PROMPT, PROMPT], "max_tokens": 40}
    both = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).json()
    assert [choice["text"] for choice in both["choices"]] == [expected, expected]


def test_a_later_turn_goes_where_its_beginning_went(url: str) -> None:
    """Each conversation has a beginning of its own, which one of two replicas computed."""
    for first in range(6):
        turn = [first, *range(4, 25), *PROMPT] * 12
        for prompt, known in ((turn, 0), (turn + PROMPT, len(turn) // PAGE_SIZE * PAGE_SIZE)):
            body = {**BODY, "prompt": prompt, "max_tokens": 4}
            reply = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).json()
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= known


def test_a_next_turn_begins_after_the_answer(url: str, pair: Pair, answer: Answer) -> None:
    """It goes to the replica that decoded it; those that prefill never saw that answer."""
    prompt, size, tokenizer = [7, *range(40, 60)], 4 * PAGE_SIZE, pair.tokenizer
    assert tokenizer is not None
    for turn in range(3):
        body = {**BODY, "prompt": prompt, "max_tokens": size}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).json()
        tokens = answer(prompt, size)
        assert reply["choices"][0]["text"] == detokenize(tokenizer, tokens)
        known = len(prompt) - len(PROMPT) - 1 if turn else 0  # the last token is in no page yet
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= known // PAGE_SIZE * PAGE_SIZE
        prompt += [*tokens, *PROMPT]


def until(holds: Callable[[], bool]) -> None:
    """Wait for what must come true."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, over all its threads."""
    own = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, own)) / os.sysconf("SC_CLK_TCK")


def processes(deployment: str) -> list[int]:
    """List the process ids of a deployment's replicas on this machine."""
    replicas = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes().split(b"\0")[0].decode()
                if command.startswith(f"ray::ServeReplica:peagle:{deployment}"):
                    replicas.append(int(folder.name))
    return sorted(replicas)


def decoding(state: str) -> int:
    """Count the decode replicas of a state of Serve's."""
    from ray import serve

    return int(serve.status().applications["peagle"].deployments["Decode"].replica_states.get(state, 0))


def test_a_replica_that_is_scaled_away_ends_its_streams_whole(url: str, alone: Alone) -> None:
    """Serve ends the newest first. That is halted amid its streams until Serve has told it to stop."""
    (first,) = processes("Decode")
    scaled = threading.Event()

    def busy() -> set[str]:
        return {client.stream(url, {**BODY, "max_tokens": LONG}).text for _ in iter(scaled.is_set, True)}

    with ThreadPoolExecutor(BUSY + 2) as pool:
        load = [pool.submit(busy) for _ in range(BUSY + 2)]
        try:
            until(lambda: decoding("RUNNING") == 2)
            (newest,) = set(processes("Decode")) - {first}
            idle_s = cpu_s(newest)
            until(lambda: cpu_s(newest) > idle_s + 0.3)  # it decodes
        finally:
            scaled.set()
        os.kill(newest, signal.SIGSTOP)
        try:
            until(lambda: decoding("STOPPING") == 1)
            assert not all(worker.done() for worker in load)
        finally:
            os.kill(newest, signal.SIGCONT)
        assert {text for worker in load for text in worker.result()} == {alone(LONG)}
    until(lambda: processes("Decode") == [first])


def test_a_killed_decode_replica_ends_its_streams_with_an_error_and_the_rest_go_on(url: str, expected: str) -> None:
    body = {**BODY, "max_tokens": LONG, "stream": True}
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


def test_killed_prefill_replicas_cost_no_answer(url: str, expected: str) -> None:
    both = processes("Prefill")
    assert len(both) == 2
    for process in both:
        os.kill(process, signal.SIGKILL)
    started = time.monotonic()
    assert ask(url, 40)["choices"][0]["text"] == expected
    assert time.monotonic() - started < PATIENCE_S
