"""Compare routing by known prompts with routing by load: turns of conversations, on Ray Serve. Needs `peagle[cluster]`.

    python -m scripts.bench_routing --out RUN

Two fleets of two replicas that do both run on this machine, at work one at a time: one sends a prompt where its
beginning went (peagle.cluster.router), the other to the emptier replica, as Ray Serve does. A round plays the same
conversations to each, all of them at once, each turn as soon as the last is answered and its reader has thought. Of the
turns after the first: the share of their tokens that the replica knew, and the time to the first token. Afterwards
`--out` (which must not exist yet) holds run.json, raw.jsonl and README.md.
"""

import argparse
import contextlib
import http.client
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from peagle.cli.clustering import keep_to_itself
from peagle.cluster.config import FleetConfig
from peagle.config import EngineConfig, LoadConfig
from peagle.measure.metrics import Spread
from peagle.measure.pages import Block, Table, heading
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from peagle.text.prompt_files import read_prompt_file
from scripts.runs import (
    Json,
    Progress,
    RawLines,
    add_drafter_option,
    add_prompt_options,
    add_run_options,
    in_one_line,
    new_parser,
    origin,
    prompt_config,
    spread,
    where,
    write_run,
)
from scripts.serving.client import RefusedError, Reply, stream
from scripts.serving.servers import free_port

REPLICAS, SLOTS, CONTEXT = 2, 4, 4096
CACHE_BYTES = 1 << 28
BEGINNING, QUESTION = 6, 2  # texts of a conversation's first turn, and of each other one
ROUTES = {"prefix": "by known prompts", "load": "by load"}


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    add_prompt_options(parser, max_new_tokens=48)
    add_drafter_option(parser)
    add_run_options(parser, 5, "of both, in turns")
    parser.add_argument("-k", type=int, default=3, help="drafts of a step (default %(default)s)")
    parser.add_argument("--conversations", type=int, default=6, help="at once (default %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="of each, 2 or more (default %(default)s)")
    parser.add_argument("--think", type=float, default=0.5, help="seconds before a turn (default %(default)s)")
    given = sys.argv[1:] if arguments is None else arguments
    return in_one_line("bench_routing", lambda: bench(parser.parse_args(given), given))


def bench(asked: argparse.Namespace, given: list[str]) -> int:
    """Start both fleets, play the rounds, and write the page."""
    expect_new(asked.out)
    if min(asked.rounds, asked.conversations) < 1 or asked.turns < 2 or asked.think < 0:
        raise InputError("--rounds and --conversations must be 1 or more, --turns 2 or more, --think 0 or more")
    conversations = read_prompt_file(asked.prompts, strict=True).conversations[: asked.num_prompts]
    texts = [text for each in conversations for text in each.turns[:1]]
    if not texts:
        raise InputError(
            f"{asked.prompts} holds no texts in its first {asked.num_prompts} prompts; expected one or more"
        )
    raw, progress = RawLines(asked.out), Progress()
    progress("starting four replicas")
    with running(asked) as urls:
        for number in range(-1, asked.rounds):  # the first warms up
            for route in list(urls)[:: 1 if number % 2 else -1]:
                progress(f"round {number + 1} of {asked.rounds}: {ROUTES[route]}")
                found = played(asked, urls[route], texts, number)
                if number >= 0:
                    raw.add({"round": number, "route": route, **found})
    progress.end()
    config = prompt_config(asked, len(texts)) | {
        "replicas": REPLICAS, "slots": SLOTS, "context": CONTEXT, "prefix_cache_bytes": CACHE_BYTES, "k": asked.k,
        "conversations": asked.conversations, "turns": asked.turns, "think": asked.think, "rounds": asked.rounds,
    }  # fmt: skip
    record = {
        "schema": 1,
        "provenance": origin("scripts.bench_routing", given),
        "config": config,
        "figures": summary(raw.lines),
    }
    write_run(asked.out, record, page(record))
    return 0


@contextlib.contextmanager
def running(asked: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Run a fleet for each way of routing; yield their addresses."""
    keep_to_itself()
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    from peagle.cluster.deployments import build

    port = free_port()
    ray.init(num_cpus=len(ROUTES) * REPLICAS + 1, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        for route in ROUTES:
            config = FleetConfig(
                load=LoadConfig(target=asked.target, drafter=asked.drafter),
                engine=EngineConfig(asked.k, slots=SLOTS, context=CONTEXT, prefix_cache=CACHE_BYTES),
                decode=REPLICAS, route_by_prefix=route == "prefix",
            )  # fmt: skip
            serve.run(build(config), name=route, route_prefix=f"/{route}")
        yield {route: f"http://127.0.0.1:{port}/{route}" for route in ROUTES}
    finally:
        serve.shutdown()
        ray.shutdown()


def played(asked: argparse.Namespace, url: str, texts: Sequence[str], number: int) -> Json:
    """Play a round's conversations at once, and sum up their turns after the first.

    Raises InputError if a turn is refused or lost.
    """

    def one(place: int) -> list[Reply]:
        rng, replies = np.random.default_rng([number + 1, place]), list[Reply]()
        left = itertools.cycle(np.roll(texts, -int(rng.integers(len(texts)))).tolist())
        prompt = "\n".join(itertools.islice(left, BEGINNING))
        for _ in range(asked.turns):
            time.sleep(float(rng.exponential(asked.think)))
            body = {"prompt": prompt, "max_tokens": asked.max_new_tokens, "temperature": 0, "ignore_eos": True}
            replies.append(stream(url, body))
            prompt += "\n".join([replies[-1].text, *itertools.islice(left, QUESTION)])
        return replies[1:]

    with ThreadPoolExecutor(asked.conversations) as pool:
        try:
            later = [reply for replies in pool.map(one, range(asked.conversations)) for reply in replies]
        except (RefusedError, OSError, http.client.HTTPException) as error:
            raise InputError(f"{url} does not answer as expected: {error or type(error).__name__}") from None
    firsts = [reply.times_s[0] - reply.started_s for reply in later]
    return {
        "known_frac": sum(reply.num_cached for reply in later) / sum(reply.num_prompt for reply in later),
        "ttft_p50_s": float(np.quantile(firsts, 0.5)),
        "ttft_p90_s": float(np.quantile(firsts, 0.9)),
    }


NAMES = ("known_frac", "ttft_p50_s", "ttft_p90_s")


def summary(raw: Sequence[Json]) -> Json:
    """Take medians over rounds, with the extremes, and of the ratios of one round."""

    def of(route: str, name: str) -> list[float]:
        return [line[name] for line in raw if line["route"] == route]

    found: Json = {route: {name: spread(of(route, name)) for name in NAMES} for route in ROUTES}
    pairs = {name: zip(of("prefix", name), of("load", name), strict=True) for name in NAMES}
    return found | {"ratio": {name: spread([a / b for a, b in pair]) for name, pair in pairs.items()}}


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    config, found, source = record["config"], record["figures"], record["provenance"]

    def cells(row: Json, ratio: bool = False) -> list[str]:
        def written(name: str, times: float, digits: int) -> str:
            return Spread(**row[name]).text(lambda value: f"{value * times:.{digits}f}")

        return [written(name, *((1, 2) if ratio or name == "known_frac" else (1e3, 0))) for name in NAMES]

    rows = [(name, *cells(found[route])) for route, name in ROUTES.items()]
    return [
        heading("Turns of conversations in a fleet: routed by known prompts, and by load", 1),
        f"{config['replicas']} replicas on Ray Serve, each with {config['slots']} slots and "
        f"{config['prefix_cache_bytes'] >> 20} MiB for known prompts, K = {config['k']}. {config['conversations']} "
        f"conversations at once of {config['turns']} turns, whose readers think {config['think']:g} s on average; "
        f"answers of {config['max_new_tokens']} tokens. Turns after the first; medians of {config['rounds']} rounds "
        "(lowest..highest), both ways in turns with the same conversations. The router, the client and all replicas "
        "share the machine.",
        Table(
            ("routing", "share of tokens known", "ttft p50 ms", "ttft p90 ms"),
            [*rows, ("ratio in a round", *cells(found["ratio"], ratio=True))],
        ),
        f"`{source['command']}`; {where(source)}.",
    ]


if __name__ == "__main__":
    sys.exit(main())
