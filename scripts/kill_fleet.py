"""Kill the processes of a fleet on Ray Serve while it answers, and check every answer. Needs `peagle[cluster]`.

    python -m scripts.kill_fleet --out RUN [--requests 200]

Greedy requests are sent at random times. A prefill replica, a decode replica, and the process of the HTTP application
are killed (SIGKILL) in turns. Each request must be answered, or get an error object, within its deadline; if the HTTP
application is killed meanwhile, Ray's proxy may break the connection instead, for which no object of ours can be sent.
Each token must be the one that an engine alone gives; afterwards the fleet answers, and its engines are idle. Exit code
1: not so.
"""

import argparse
import asyncio
import collections
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from peagle.cli.clustering import keep_to_itself
from peagle.cluster.config import FleetConfig
from peagle.config import EngineConfig, LoadConfig
from peagle.engine.request import Request
from peagle.loading import load
from peagle.measure.pages import Block, Table, heading
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from peagle.pair import Pair
from peagle.text.tokenizer import detokenize
from scripts.peers.bystanders import cpu_s
from scripts.runs import (
    Json,
    Progress,
    RawLines,
    add_drafter_option,
    add_run_options,
    in_one_line,
    new_parser,
    origin,
    where,
    write_run,
)
from scripts.serving.servers import free_port

APPLICATION = "Application"
KILLED = ("Prefill", "Decode", APPLICATION)
APP = "peagle"


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("--target", default="demo")
    add_drafter_option(parser)
    add_run_options(parser)
    parser.add_argument("-k", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200, help="default %(default)s")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second (default %(default)s)")
    parser.add_argument("--every", type=float, default=12.0, help="seconds between kills (default %(default)s)")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds of a request (default %(default)s)")
    parser.add_argument("--decode", type=int, default=2, help="decode replicas (default %(default)s)")
    given = sys.argv[1:] if arguments is None else arguments
    return in_one_line("kill_fleet", lambda: run(parser.parse_args(given), given))


def run(asked: argparse.Namespace, given: list[str]) -> int:
    """Start a fleet, play and kill, check, and write the page."""
    expect_new(asked.out)
    if min(asked.requests, asked.decode) < 1 or min(asked.rate, asked.every, asked.deadline) <= 0:
        raise InputError("--requests and --decode must be 1 or more, --rate, --every and --deadline above 0")
    keep_to_itself()
    raw, progress = RawLines(asked.out), Progress()
    pair = load(asked.target, asked.drafter)
    requests = prompts_of(pair, asked.requests)
    progress("what an engine alone answers")
    expected = alone(pair, requests, asked.k)
    progress("starting the fleet")
    with Running(asked) as url:
        progress("answering")
        answers, kills = asyncio.run(play(asked, url, requests))
        progress("what is left")
        left = asyncio.run(settled(url, asked.deadline, requests[0], expected[0]))
    progress.end()
    for number, answer in enumerate(answers):
        lost = any(
            kill["what"] == APPLICATION and answer["begun"] <= kill["second"] <= answer["begun"] + answer["seconds"]
            for kill in kills
        )
        raw.add({"request": number, **judged(answer, expected[number], asked.deadline, lost)})
    counted = collections.Counter(line["outcome"] for line in raw.lines)
    late = max(line["seconds"] for line in raw.lines)
    figures = {"outcomes": dict(counted), "slowest_s": late, "kills": kills, "left": left}
    config = {name: getattr(asked, name) for name in ("k", "requests", "rate", "every", "deadline", "decode")}
    record = {"schema": 1, "provenance": origin("scripts.kill_fleet", given), "config": config, "figures": figures}
    write_run(asked.out, record, page(record))
    bad = sum(count for outcome, count in counted.items() if outcome not in FINE)
    return 1 if bad or left["open"] or not left["answers"] else 0


FINE = ("answered", "error object", "connection broken")


def prompts_of(pair: Pair, count: int) -> list[Request]:
    """Make prompts of random tokens, and answers of 20 to 400."""
    rng = np.random.default_rng(0)
    return [
        Request(tuple(rng.integers(0, pair.target.vocab_size, int(length)).tolist()), int(budget), stop_token_ids=())
        for length, budget in zip(rng.integers(8, 300, count), rng.integers(20, 400, count), strict=True)
    ]


def alone(pair: Pair, requests: Sequence[Request], k: int) -> list[str]:
    """Answer all requests in one engine, as texts."""
    engine = pair.engine(pair.engine_config(k, context=CONTEXT, slots=4))
    tokens: list[list[int]] = [[] for _ in requests]
    for place, chunk in engine.generate(requests):
        tokens[place] += chunk.token_ids
    assert pair.tokenizer is not None
    return [detokenize(pair.tokenizer, each) for each in tokens]


CONTEXT = 1024


class Running:
    """A fleet on this machine, from `with` on."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked

    def __enter__(self) -> str:
        import ray
        from ray import serve
        from ray.serve.config import HTTPOptions

        from peagle.cluster.deployments import build

        asked = self._asked
        port = free_port()
        config = FleetConfig(
            load=LoadConfig(target=asked.target, drafter=asked.drafter),
            engine=EngineConfig(asked.k, slots=4, context=CONTEXT, prefix_cache="on"),
            served_model_name=APP, prefill=1, decode=asked.decode, max_queue=asked.requests,
            patience_s=asked.deadline * 0.75,
        )  # fmt: skip
        ray.init(num_cpus=asked.decode + 3, include_dashboard=False, log_to_driver=False)
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        serve.run(build(config), name=APP)
        return f"http://127.0.0.1:{port}"

    def __exit__(self, *_: object) -> None:
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()


def processes(deployment: str) -> list[int]:
    """List the process ids of a deployment's replicas on this machine."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes().split(b"\0")[0].decode()
            except OSError:
                continue
            if command.startswith(f"ray::ServeReplica:{APP}:{deployment}"):
                found.append(int(folder.name))
    return sorted(found)


async def play(asked: argparse.Namespace, url: str, requests: Sequence[Request]) -> tuple[list[Json], list[Json]]:
    """Send all requests, every second one streamed, and kill meanwhile."""
    rng, kills = np.random.default_rng(1), list[Json]()
    due = np.cumsum(rng.exponential(1 / asked.rate, len(requests))).tolist()
    started = time.perf_counter()

    async def kill() -> None:
        for number in range(10_000):
            await asyncio.sleep(asked.every)
            deployment = KILLED[number % len(KILLED)]
            alive = processes(deployment)
            if alive:
                os.kill(alive[number % len(alive)], signal.SIGKILL)
            kills.append({"second": round(time.perf_counter() - started, 1), "what": deployment, "of": len(alive)})

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=asked.deadline) as client:
        killing = asyncio.create_task(kill())

        async def one(place: int, request: Request) -> Json:
            await asyncio.sleep(due[place])
            found = await answer(client, request, stream=place % 2 == 1, deadline_s=asked.deadline)
            return found | {"begun": due[place]}

        answers = await asyncio.gather(*(one(*each) for each in enumerate(requests)))
        killing.cancel()
    return list(answers), kills


async def answer(client: httpx.AsyncClient, request: Request, stream: bool, deadline_s: float) -> Json:
    """Send one request; return its text, its error, how it ended, and the seconds it took."""
    body = {"prompt": request.prompt_ids, "max_tokens": request.max_new_tokens, "temperature": 0, "ignore_eos": True}
    found: Json = {"stream": stream, "text": "", "error": None, "ended": None}
    started = time.perf_counter()
    try:
        async with asyncio.timeout(deadline_s):
            if stream:
                await streamed(client, body, found)
            else:
                reply = await client.post("/v1/completions", json=body)
                found["ended"] = f"status {reply.status_code}"
                read(found, reply.text)
    except (httpx.HTTPError, TimeoutError, ValueError) as error:
        found["ended"] = f"{type(error).__name__}: {error}"[:200]
    return found | {"seconds": time.perf_counter() - started}


async def streamed(client: httpx.AsyncClient, body: Json, found: Json) -> None:
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        found["ended"] = f"status {reply.status_code}, cut"
        if reply.status_code != 200:
            read(found, (await reply.aread()).decode())
            return
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                found["ended"] = "done"
            elif line.startswith("data: "):
                read(found, line.removeprefix("data: "))
            elif line:
                found["odd"] = line[:200]


def read(found: Json, text: str) -> None:
    """Add a reply's text, or its error object."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        found["odd"] = text[:200]
        return
    if "error" in value:
        found["error"] = value["error"]
    else:
        found["text"] += "".join(choice["text"] for choice in value["choices"])
        if value["choices"] and (reason := value["choices"][0].get("finish_reason")):
            found["finished"] = reason


BROKEN = ("RemoteProtocolError", "status 500")  # how Ray's proxy ends connections of a killed HTTP application


def judged(found: Json, expected: str, deadline_s: float, may_break: bool = False) -> Json:
    """Name the outcome of a request. may_break: the HTTP application was killed meanwhile."""
    error, text = found["error"], found["text"]
    if not expected.startswith(text.rstrip("\ufffd")):
        outcome = "wrong tokens"
    elif found["seconds"] > deadline_s + 1 or "Timeout" in str(found["ended"]):
        outcome = "late"
    elif error is not None:
        whole = isinstance(error, dict) and {"message", "type"} <= error.keys()
        outcome = "error object" if whole else "error of another form"
    elif found.get("finished") == "length" and text == expected:
        outcome = "answered"
    elif may_break and str(found["ended"]).startswith(BROKEN):
        outcome = "connection broken"
    else:
        outcome = "cut without an error"
    kept = {name: found.get(name) for name in ("stream", "ended", "error", "seconds", "odd")}
    return {"outcome": outcome, **kept}


async def settled(url: str, deadline_s: float, request: Request, expected: str) -> Json:
    """Wait until the fleet answers rightly and has no open request; count what it has after the deadline."""
    end, answers, unused = time.monotonic() + deadline_s, False, 0.0
    async with httpx.AsyncClient(base_url=url, timeout=deadline_s) as client:
        while time.monotonic() < end and not answers:
            found = await answer(client, request, stream=False, deadline_s=deadline_s)
            answers = found["text"] == expected
            await asyncio.sleep(0.5)
        idle = {process: cpu_s(process) or 0.0 for name in KILLED[:2] for process in processes(name)}
        await asyncio.sleep(3)
        unused = max(((cpu_s(process) or 0.0) - before for process, before in idle.items()), default=0.0)
        health = (await client.get("/health")).json()
    return {"answers": answers, "open": health["requests_running"], "busiest_idle_replica_s_of_3": round(unused, 2)}


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    config, found, source = record["config"], record["figures"], record["provenance"]
    kills = collections.Counter(each["what"] for each in found["kills"] if each["of"])
    rows = [(outcome, str(count)) for outcome, count in sorted(found["outcomes"].items())]
    left = found["left"]
    return [
        heading("A fleet whose processes are killed", 1),
        f"{config['requests']} greedy requests at {config['rate']:g} a second, half of them streamed, to a fleet of "
        f"one prefill and {config['decode']} decode replicas on Ray Serve; every {config['every']:g} s one is killed "
        f"(SIGKILL): {', '.join(f'{count} of {name}' for name, count in kills.items())}. A deadline is "
        f"{config['deadline']:g} s; the slowest took {found['slowest_s']:.1f} s.",
        Table(("outcome", "requests"), rows),
        f"Afterwards: {left['open']} requests open, the next answer is {'right' if left['answers'] else 'WRONG'}, and "
        f"the busiest replica used {left['busiest_idle_replica_s_of_3']} s of 3 s.",
        f"`{source['command']}`; {where(source)}.",
    ]


if __name__ == "__main__":
    sys.exit(main())
