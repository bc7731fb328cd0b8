"""Measure a fleet of two processes, each on a core of its own, and compare it with what the simulator says of it.

    python -m scripts.bench_fleet --out RUN [-k 3]

First this machine's costs are measured on one core. Then traces are played to two replicas that do both, and to one
that prefills and one that decodes, in turns, through the fleet's own router (peagle.cluster.fleet) and sockets
(scripts.fleet_processes); and simulated. The first trace is a Poisson process of mixed requests. In the second, long
prompts arrive among short ones. Before them, prompts that nobody else waits for go to a replica that does both, and to
two that share them, in turns: what a hand-off adds. Afterwards `--out` (which must not exist yet) holds run.json,
raw.jsonl and README.md.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from peagle.cluster.fleet import Fleet, Shape
from peagle.engine.request import Request, StepRecord
from peagle.engine.resolved import Role
from peagle.loading import load
from peagle.measure.pages import Block, Table, heading
from peagle.measure.sweep.figures import estimate_median
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from scripts.fleet_processes import SocketReplicas, started
from scripts.fleet_sim.simulation import (
    HOPS,
    Arrangement,
    Arrival,
    Costs,
    Lengths,
    Served,
    poisson,
    read_costs,
    simulate,
)
from scripts.runs import (
    Json,
    Progress,
    RawLines,
    add_drafter_option,
    add_prompt_options,
    add_run_options,
    figure_text,
    in_one_line,
    new_parser,
    origin,
    prompt_config,
    prompted,
    spread,
    spread_text,
    where,
    write_run,
)

BOTH, APART = Arrangement(0, 2), Arrangement(1, 1)
# by the number of replicas that only prefill: each process's role, and its core
ROLES: tuple[tuple[tuple[Role, int], ...], ...] = ((("both", 0), ("both", 1)), (("prefill", 0), ("decode", 1)))
MIXED = Lengths((64, 1024), (32, 160))
SHORT = Lengths((64, 64), (128, 256))  # the answers that run while long prompts arrive
LONG_PROMPT, LONG_OUTPUT = 4096, 2
ALONE, ALONE_OUTPUT = (64, 1024, LONG_PROMPT), 32  # tokens of prompts that nobody else waits for, and of their answers
FIGURES = ("ttft p50", "ttft p90", "itl p50", "itl p90", "itl p99", "itl p99 later")


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    add_prompt_options(parser)
    add_drafter_option(parser)
    add_run_options(parser, 2, "of all, in turns")
    parser.add_argument("--costs", type=Path, help="costs that were measured before, on one core")
    parser.add_argument("-k", type=int, default=3, help="drafts of a step (default %(default)s)")
    parser.add_argument("--slots", type=int, default=8, help="of all replicas that decode (default %(default)s)")
    parser.add_argument("--context", type=int, default=4352, help="positions of a slot (default %(default)s)")
    parser.add_argument("--load", type=float, default=0.3, help="share of the fleet's capacity (default %(default)s)")
    parser.add_argument(
        "--short-load", type=float, default=0.1, help="share that answers beside long prompts are (default %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=150, help="of the mixed trace (default %(default)s)")
    parser.add_argument(
        "--long", type=int, default=6, help="prompts that arrive while answers run (default %(default)s)"
    )
    parser.add_argument("--alone", type=int, default=30, help="prompts of a length, alone (default %(default)s)")
    given = sys.argv[1:] if arguments is None else arguments
    return in_one_line("bench_fleet", lambda: bench(parser.parse_args(given), given))


def bench(asked: argparse.Namespace, given: list[str]) -> int:
    """Measure costs, play the traces, simulate them, and write the page."""
    expect_new(asked.out)
    if (
        min(asked.rounds, asked.requests, asked.long, asked.alone) < 1
        or asked.slots < 2
        or asked.slots % 2
        or min(asked.load, asked.short_load) <= 0
        or asked.context <= LONG_PROMPT
    ):
        raise InputError(
            "--rounds, --requests, --long and --alone must be 1 or more, --slots even, loads above 0, --context above "
            f"{LONG_PROMPT}"
        )
    pair = load(asked.target, asked.drafter)
    texts = [token for request in prompted(asked, pair) for token in request.prompt_ids]
    raw, progress = RawLines(asked.out), Progress()
    path = asked.costs or measured(asked, progress)
    costs = read_costs(path)
    rate = asked.load * capacity_per_s(costs, asked.k, asked.slots, MIXED)
    traces = {"mixed": poisson(rate, asked.requests, MIXED), "long prompts": long_trace(costs, asked)}
    shape = Shape(pair.engine_config(asked.k, slots=asked.slots, context=asked.context), pair.target.vocab_size)
    both, apart = fleets = [
        dataclasses.replace(fleet, slots=asked.slots // fleet.decode, num_speculative_tokens=asked.k)
        for fleet in (BOTH, APART)
    ]
    progress("prompts alone")
    lone = asyncio.run(alone(asked, texts, shape))
    raw.extend({"trace": "alone", **line} for line in lone)
    for number in range(asked.rounds):
        order = (both, apart) if number % 2 == 0 else (apart, both)
        for fleet in order:
            progress(f"round {number + 1}: {fleet}")
            raw.extend(asyncio.run(round_of(asked, fleet, traces, texts, shape, number)))
    progress.end()
    for name, trace in traces.items():
        # how many drafts are kept depends on the text, so it is taken from what was played
        kept = np.mean([line["kept"] for line in raw.lines if line["trace"] == name], axis=0)
        known = dataclasses.replace(costs, acceptance={asked.k: tuple(map(float, kept))} if asked.k else {})
        for fleet in fleets:
            played = figures(simulate(known, trace, fleet), name)
            raw.add({"round": "simulated", "fleet": str(fleet), "trace": name, **played})
    config = prompt_config(asked, len(texts)) | {
        "drafter": Path(asked.drafter).name, "k": asked.k, "slots": asked.slots, "context": asked.context,
        "load": asked.load, "short_load": asked.short_load, "requests": asked.requests, "long": asked.long,
        "rounds": asked.rounds, "alone": asked.alone, "requests_per_s": rate,
    }  # fmt: skip
    record = {
        "schema": 1,
        "provenance": origin("scripts.bench_fleet", given),
        "config": config,
        "costs": costs.to_json(),
        "hand_off": added(lone, costs),
        "figures": summed(raw.lines[len(lone) :]),
    }
    write_run(asked.out, record, page(record))
    return 0


def measured(asked: argparse.Namespace, progress: Progress) -> Path:
    """Measure costs in a process on one core."""
    progress("costs")
    path = asked.out / "costs.json"
    words = ["--measure", path, "--target", asked.target, "--drafter", asked.drafter, "--prompts", asked.prompts]
    words += ["-k", asked.k, "--slots", asked.slots, "--context", asked.context]
    command = ["taskset", "-c", "1", sys.executable, "-m", "scripts.simulate_fleet", *map(str, words)]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise InputError(f"costs could not be measured: {done.stderr.strip().splitlines()[-1]}")
    return path


def capacity_per_s(costs: Costs, k: int, slots: int, lengths: Lengths) -> float:
    """Return the requests a second that two replicas that do both could answer, `slots` in all and full."""
    prompt, output = (sum(each) / 2 for each in (lengths.prompt, lengths.output))
    emitted = 1 + sum(costs.acceptance.get(k, ()))
    rows = slots / 2
    return 2 / (costs.prompt_s.at(prompt) + output / emitted * costs.step_s[k].at(rows) / rows)


def long_trace(costs: Costs, asked: argparse.Namespace) -> list[Arrival]:
    """Let short requests arrive at random, and long prompts among them, one at a time."""
    every = 1.5 * costs.prompt_s.at(LONG_PROMPT)
    rate = asked.short_load * capacity_per_s(costs, asked.k, asked.slots, SHORT)
    shorts = poisson(rate, max(8, round(rate * every * asked.long)), SHORT, seed=1)
    longs = [Arrival(every * (number + 0.1), LONG_PROMPT, LONG_OUTPUT) for number in range(asked.long)]
    return sorted([*shorts, *longs], key=lambda arrival: arrival.time_s)


async def round_of(
    asked: argparse.Namespace, fleet: Arrangement, traces: dict[str, list[Arrival]], texts: Sequence[int], shape: Shape,
    number: int,
) -> list[Json]:  # fmt: skip
    """Start a fleet and play all traces to it."""
    found = []
    async with started(
        ROLES[fleet.prefill], asked.target, asked.drafter, asked.k, fleet.slots, asked.context
    ) as replicas:
        await play([Arrival(0.0, 64, 8), Arrival(0.0, 64, 8)], replicas, texts, shape)
        for name, trace in traces.items():
            played, records = await play(trace, replicas, texts, shape)
            steps = [record.num_accepted for record in records if record.draft_token_ids]
            kept = [float(np.mean(np.asarray(steps) > place)) for place in range(asked.k)]
            line = {"round": number, "fleet": str(fleet), "trace": name, "kept": kept}
            found.append(line | figures(played, name))
    return found


async def alone(asked: argparse.Namespace, texts: Sequence[int], shape: Shape) -> list[Json]:
    """Send prompts one at a time, each to a replica that does both and to two that share it, in turns.

    Returns the ms to the first tokens and to those that come next. The first prompt of a length is not counted.
    """
    made, found = (asked.target, asked.drafter, asked.k, asked.slots, asked.context), []
    async with started(ROLES[0][:1], *made) as both, started(ROLES[1], *made) as apart:
        for number in range(-1, asked.alone):
            moved = np.roll(texts, -97 * number)
            for length in ALONE:
                for replicas in (both, apart) if number % 2 else (apart, both):
                    (served,), _ = await play([Arrival(0.0, length, ALONE_OUTPUT)], replicas, moved, shape)
                    first, then = (1e3 * seconds for seconds, _ in served.times[:2])
                    found.append({
                        "prompt": number, "prompt_tokens": length, "apart": replicas is apart, "first": first,
                        "next": then,
                    })  # fmt: skip
    return [line for line in found if line["prompt"] >= 0]


def added(lines: Sequence[Json], costs: Costs) -> list[Json]:
    """Estimate the ms that a hand-off adds: medians of differences of the same prompt, with 95 % intervals.

    counted: by the costs of its parts: packing, both ways over the network, and loading.
    """
    found = []
    for length in ALONE:
        whole, parted = (
            [line for line in lines if line["prompt_tokens"] == length and line["apart"] is apart]
            for apart in (False, True)
        )
        packed, loaded = costs.pack_s.at(length), costs.load_s.at(length)
        sent = HOPS * (costs.message_bytes.at(length) / costs.network_bytes_per_s + costs.network_s)
        line: Json = {"prompt_tokens": length, "counted": 1e3 * (packed + sent + loaded)}
        for name in ("first", "next"):
            line[name] = statistics.median(each[name] for each in whole)
            more = [after[name] - before[name] for before, after in zip(whole, parted, strict=True)]
            line[f"{name} added"] = dataclasses.asdict(estimate_median(more, range(len(more))))
        found.append(line)
    return found


async def play(
    trace: Sequence[Arrival], replicas: SocketReplicas, texts: Sequence[int], shape: Shape
) -> tuple[list[Served], list[StepRecord]]:
    """Send the requests of a trace when they are due; return them with the times of their tokens, and their steps."""
    router, records = Fleet(replicas, shape, len(trace)), list[StepRecord]()
    started_s = time.perf_counter()

    async def one(place: int, arrival: Arrival) -> Served:
        served = Served(arrival)
        await asyncio.sleep(arrival.time_s - (time.perf_counter() - started_s))
        prompt = np.resize(np.roll(texts, -97 * place), arrival.prompt_tokens).tolist()
        budget = min(arrival.output_tokens, shape.config.context - len(prompt))
        call = router.submit([Request(tuple(prompt), budget, stop_token_ids=())])
        async with contextlib.aclosing(call.chunks()) as chunks:
            async for _, chunk in chunks:
                records.extend(chunk.steps)
                if chunk.token_ids:
                    served.times.append((chunk.time_s - started_s, len(chunk.token_ids)))
        return served

    return list(await asyncio.gather(*(one(place, arrival) for place, arrival in enumerate(trace)))), records


def figures(played: Sequence[Served], trace: str) -> Json:
    """Return quantiles in ms; of the long prompts' trace, ttft of the long ones and itl of the others.

    later: without each answer's first gap, in which it is handed over if a fleet does that.
    """
    long = [served for served in played if served.arrival.prompt_tokens == LONG_PROMPT]
    others = [served for served in played if served.arrival.prompt_tokens != LONG_PROMPT]
    firsts = [served.ttft_s for served in (played if trace == "mixed" else long)]
    gaps = [gap for served in others for gap in served.itl_s]
    found = {f"ttft p{q}": 1e3 * float(np.quantile(firsts, q / 100)) for q in (50, 90)}
    found |= {f"itl p{q}": 1e3 * float(np.quantile(gaps, q / 100)) for q in (50, 90, 99)}
    later = [gap for served in others for gap in served.itl_s[1:]]
    return found | {"itl p99 later": 1e3 * float(np.quantile(later, 0.99))}


def summed(raw: Sequence[Json]) -> list[Json]:
    """Take medians over rounds, beside the simulation."""
    found = []
    for trace in dict.fromkeys(line["trace"] for line in raw):
        for fleet in dict.fromkeys(line["fleet"] for line in raw):
            lines = [line for line in raw if (line["trace"], line["fleet"]) == (trace, fleet)]
            for name in FIGURES:
                real = [line[name] for line in lines if line["round"] != "simulated"]
                (simulated,) = (line[name] for line in lines if line["round"] == "simulated")
                found.append({
                    "trace": trace, "fleet": fleet, "figure": name, "real": spread(real), "simulated": simulated,
                    "ratio": simulated / statistics.median(real),
                })  # fmt: skip
    return found


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    config, found, source = record["config"], record["figures"], record["provenance"]
    rows = [
        (each["trace"], each["fleet"], each["figure"], spread_text(each["real"], ".1f"),
         f"{each['simulated']:.1f}", f"{each['ratio']:.2f}")
        for each in found
    ]  # fmt: skip
    by = {(each["trace"], each["fleet"], each["figure"]): each["real"]["median"] for each in found}
    ratio, later = (
        by["long prompts", str(APART), name] / by["long prompts", str(BOTH), name] for name in ("itl p99", FIGURES[-1])
    )
    lone = [
        (str(each["prompt_tokens"]), f"{each['first']:.1f}", figure_text(each["first added"], 1),
         f"{each['next']:.1f}", figure_text(each["next added"], 1), f"{each['counted']:.1f}")
        for each in record["hand_off"]
    ]  # fmt: skip
    return [
        heading("A fleet of two processes, and the simulator", 1),
        f"Two processes, each on a core of its own; K = {config['k']}, {config['slots']} slots of {config['context']} "
        f"positions in all. Mixed: {config['requests']} requests at random, {config['requests_per_s']:.1f} a second, "
        f"prompts of {MIXED.prompt[0]} to {MIXED.prompt[1]} tokens, answers of {MIXED.output[0]} to {MIXED.output[1]}. "
        f"Long prompts: {config['long']} of {LONG_PROMPT} tokens arrive among short ones; ttft is that of the long "
        "ones, itl that of the others. The simulator takes the share of drafts kept from the fleets. "
        f"Milliseconds; medians of {config['rounds']} rounds (least..most), both fleets in turns.",
        Table(("trace", "fleet", "figure", "real", "simulated", "simulated over real"), rows),
        f"**itl p99 of running answers while long prompts arrive, disaggregated over aggregated: {ratio:.2f}; later "
        f"(without each answer's first gap, in which it is handed over): {later:.2f}.**",
        f"Without other requests, {config['alone']} prompts of each length, each to one replica that does both and to "
        "two that share it, in turns. The first token comes from the replica that prefills, after the hand-off is "
        "packed; the next ones after it is loaded elsewhere. Added: medians of differences of the same prompt, with "
        "95 % intervals. Counted: the costs of its parts (packing, both ways over the network, loading).",
        Table(
            ("prompt's tokens", "first token", "added", "next tokens", "added", "counted"),
            lone,
        ),
        f"`{source['command']}`; {where(source)}.",
    ]


if __name__ == "__main__":
    sys.exit(main())
