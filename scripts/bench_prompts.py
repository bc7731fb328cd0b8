"""Measure what long prompts take: prefill by length in both ways, beside llama.cpp; memory; a turn after a long one.

    peagle random M /tmp/M
    python -m scripts.bench_prompts --out RUN --llama-python LLAMA/bin/python /tmp/M

Each engine prefills the same random tokens and gives the first token after them; they take turns round by round, one
at work at a time. Ours prefills in chunks and at once (--prefill blocked). Its memory is the most that the process
takes while it does, beyond what it took before, caches included. A second turn, which repeats a first one of --history
tokens, is timed to its first token with the prefix cache holding the first one and without.

Afterwards `--out` (which must not exist yet) holds run.json, raw.jsonl and README.md.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from peagle.measure.pages import Block, Table, heading
from peagle.measure.provenance import num_threads
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from scripts.measure_memory import Peak, anonymous_bytes
from scripts.peers.gguf_file import write_gguf
from scripts.peers.measure import rotated
from scripts.peers.remote import Remote
from scripts.peers.roster import LLAMA, OURS, Entry, Site, entry, unavailable
from scripts.runs import (
    Json,
    Progress,
    RawLines,
    add_run_options,
    in_one_line,
    new_parser,
    numbers,
    origin,
    where,
    write_run,
)
from target.load import inspect_target

BLOCKED = f"{OURS}, blocked"
MORE = 32  # tokens of the second turn's question
TOKENS = 2  # decoded after a prompt


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="directories, one or several")
    add_run_options(parser, 3, "after one that warms up")
    parser.add_argument("--llama-python", metavar="PATH", help="a Python that has llama-cpp-python")
    parser.add_argument("--lengths", default="128,512,2048,8192", help="of the prompts (default %(default)s)")
    parser.add_argument("--history", type=int, default=2048, help="of the second turn (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all tokens (default %(default)s)")
    given = sys.argv[1:] if arguments is None else arguments
    return in_one_line("bench_prompts", lambda: bench(parser.parse_intermixed_args(given), given))


def bench(asked: argparse.Namespace, given: list[str]) -> int:
    """Check everything before anything runs, then measure."""
    expect_new(asked.out)
    lengths = numbers("--lengths", asked.lengths)
    if min(asked.rounds, asked.history) < 1:
        raise InputError("--rounds and --history must be 1 or more")
    for checkpoint in asked.checkpoints:
        inspect_target(checkpoint)
    absent = unavailable(LLAMA, asked.llama_python)
    raw, say = RawLines(asked.out), Progress()
    described: Json = {}
    for checkpoint in asked.checkpoints:
        raw.extend(measure(checkpoint, lengths, asked, None if absent else asked.llama_python, described, say))
    say.end()
    config = {"lengths": lengths, "history": asked.history, "rounds": asked.rounds, "engines": described}
    config |= {"left_out": {LLAMA: absent} if absent else {}}
    record = {"schema": 1, "provenance": origin("scripts.bench_prompts", given), "config": config}
    record |= {"figures": figures(raw.lines)}
    write_run(asked.out, record, page(record))
    return 0


def measure(
    checkpoint: Path,
    lengths: Sequence[int],
    asked: argparse.Namespace,
    llama_python: str | None,
    described: Json,
    say: Progress,
) -> Iterator[Json]:
    """Yield a line per measurement of one checkpoint. Round 0 warms up and is left out, but for its memory."""
    files, name = inspect_target(checkpoint), checkpoint.name
    rng = np.random.default_rng(asked.seed)

    def draw(count: int) -> list[int]:
        ids: list[int] = rng.integers(0, files.config.vocab_size, count).tolist()
        return ids

    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        context = max(lengths) + TOKENS
        gguf = Path(scratch) / "model.gguf"
        site = Site(checkpoint, files.mxfp4, gguf, context, num_threads() or 1, llama_python or "")
        if llama_python:
            write_gguf(checkpoint, gguf)
        remotes: dict[str, Remote] = {}
        for made in entries(site, llama_python is not None):
            say(f"{name}: {made.name} loads")
            remotes[made.name] = running.enter_context(Remote(made))
            described[made.name] = remotes[made.name].described
        say.begin((asked.rounds + 1) * len(lengths) * len(remotes))
        for number in range(asked.rounds + 1):
            for length in lengths:
                prompt = draw(length)
                for engine in rotated(list(remotes), number):
                    say.part(f"{name}, {length} tokens, {engine}")
                    before = anonymous_bytes(remotes[engine].pid)
                    with Peak(remotes[engine].pid) as peak:
                        found = remotes[engine].call("decode", prompt_ids=prompt, num_tokens=TOKENS)
                    line = {"model": name, "engine": engine, "length": length, "round": number}
                    yield line | {"prefill_s": found["prefill_s"], "bytes": peak.bytes - before}
            turns = [draw(count) for count in (asked.history, asked.history, MORE)]
            found = remotes[OURS].call(
                "reuse", **dict(zip(("prompt_ids", "others_ids", "more_ids"), turns, strict=True))
            )
            yield {"model": name, "engine": OURS, "turn": 2, "round": number, **found}


def entries(site: Site, with_llama: bool) -> Iterator[Entry]:
    """Make the engines: ours in both ways, and llama.cpp."""
    ours = entry(OURS, site)
    yield ours
    yield replace(ours, name=BLOCKED, options={**ours.options, "blocked": True})
    if with_llama:
        yield entry(LLAMA, site)


def figures(lines: Sequence[Json]) -> Json:
    """Take medians over rounds: tokens a second, ratios within a round, and the first round's memory."""
    found: Json = {}
    for model in dict.fromkeys(line["model"] for line in lines):
        mine = [line for line in lines if line["model"] == model]
        timed = [line for line in mine if line["round"]]
        prompts: Json = {}
        for length, engine in dict.fromkeys((line["length"], line["engine"]) for line in mine if "length" in line):
            ours, its = seconds(timed, length, OURS), seconds(timed, length, engine)
            taken = [line["bytes"] for line in mine if (line.get("length"), line["engine"]) == (length, engine)]
            prompts.setdefault(str(length), {})[engine] = {
                "tokens_per_s": length / statistics.median(its.values()),
                "ours_over": statistics.median(its[number] / ours[number] for number in its),
                "bytes": max(taken),
            }
        turns = [line for line in timed if "turn" in line]
        found[model] = {
            "prompts": prompts,
            "hit_s": statistics.median(line["hit_s"] for line in turns),
            "miss_s": statistics.median(line["miss_s"] for line in turns),
            "hit_over_miss": statistics.median(line["hit_s"] / line["miss_s"] for line in turns),
        }
    return found


def seconds(lines: Sequence[Json], length: int, engine: str) -> dict[int, float]:
    """Find the times of an engine's prefill by round."""
    own = [line for line in lines if (line.get("length"), line["engine"]) == (length, engine)]
    return {line["round"]: line["prefill_s"] for line in own}


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    config, source = record["config"], record["provenance"]
    blocks: list[Block] = [
        heading("Long prompts", 1),
        f"`{source['command']}`; {where(source)}.",
        f"Prompts of random tokens, timed to the first token after them; medians over {config['rounds']} rounds, in "
        "each of which the engines take turns; ratios are taken within a round. Ours prefills in chunks, or the whole "
        "prompt at once. Memory is the most that the process took beyond what it had before the prompt, its caches "
        "and what was compiled included.",
    ]
    blocks += [f"Left out: {engine}, since {why}." for engine, why in config["left_out"].items()]
    for model, found in record["figures"].items():
        rows = [
            (
                length,
                engine,
                f"{of['tokens_per_s']:.0f}",
                "" if engine == OURS else f"{of['ours_over']:.2f}",
                f"{of['bytes'] / 1e6:.0f} MB",
            )
            for length, engines in found["prompts"].items()
            for engine, of in engines.items()
        ]
        blocks += [
            heading(model, 2),
            Table(("tokens", "engine", "tokens a second", "chunked is faster by", "memory"), rows),
            f"A second turn after one of {config['history']} tokens, to its first token: {found['hit_s'] * 1e3:.1f} ms "
            f"with the first turn in the prefix cache, {found['miss_s'] * 1e3:.1f} ms without: "
            f"{found['hit_over_miss']:.3f}.",
        ]
    return blocks


if __name__ == "__main__":
    sys.exit(main())
