"""Measure speculation beside llama.cpp's plain decoding of the same target, on the answers to prompts.

    python -m scripts.bench answers --out RUN --llama-python LLAMA/bin/python -k 3,auto

Every prompt is decoded greedily by every engine in turn, repeatedly: this project's plain decoding, its speculation for
each K of `-k`, and llama.cpp (the scenario `peers` says how to install it). All write as many tokens as this project's
own answer has, so that no engine is fast by stopping early.

Afterwards `--out` (which must not exist yet) holds run.json (provenance, configuration, a row per engine), raw.jsonl (a
line per prompt, repeat and engine) and README.md (the table).
"""

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import peagle
from peagle.checkpoints import drafter_path, resolve
from peagle.measure.metrics import first_difference
from peagle.measure.pages import Block, Table, heading
from peagle.measure.provenance import num_threads
from peagle.measure.sweep.figures import estimate, ratio
from peagle.measure.sweep.plan import K, parse_ks
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from peagle.result import decode
from scripts.peers.gguf_file import write_gguf
from scripts.peers.measure import rotated
from scripts.peers.remote import Remote
from scripts.peers.roster import LLAMA, OURS, Entry, Site, entry, unavailable
from scripts.runs import (
    Json,
    Progress,
    RawLines,
    add_drafter_option,
    add_prompt_options,
    add_run_options,
    figure_text,
    new_parser,
    new_record,
    prompt_config,
    prompted,
    run_scenario,
    where,
    write_run,
)
from target.load import inspect_target


@dataclass(frozen=True)
class Answer:
    """A prompt, and this project's plain answer."""

    prompt_ids: list[int]
    token_ids: list[int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    add_run_options(parser)
    parser.add_argument("--llama-python", required=True, metavar="PATH", help="a Python that has llama-cpp-python")
    parser.add_argument("-k", default="3,auto", help="drafts a step, as 1-3,5,auto (default %(default)s)")
    add_prompt_options(parser)
    add_drafter_option(parser)
    parser.add_argument("--repeats", type=int, default=5, help="after one that warms up (default %(default)s)")
    return run_scenario("answers", parser, bench, arguments)


def bench(arguments: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check everything before anything runs, then measure."""
    drafts = parse_ks(arguments.k)
    if arguments.repeats < 1 or arguments.num_prompts < 1:
        raise InputError("--repeats and --num-prompts must be 1 or more")
    if why := unavailable(LLAMA, arguments.llama_python):
        raise InputError(f"llama.cpp cannot run here: {why}")
    expect_new(arguments.out)
    checkpoint = resolve(arguments.target, "target")
    answers = own_answers(arguments)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        gguf = Path(scratch) / "model.gguf"
        write_gguf(checkpoint, gguf)
        context = max(len(answer.prompt_ids) + len(answer.token_ids) for answer in answers)
        site = Site(
            checkpoint, inspect_target(checkpoint).mxfp4, gguf, context, num_threads() or 1, arguments.llama_python
        )
        engines = {
            engine.name: running.enter_context(Remote(engine))
            for engine in entries(site, drafter_path(arguments.target, arguments.drafter) or arguments.drafter, drafts)
        }
        raw = RawLines(arguments.out)
        raw.extend(decoded(engines, answers, arguments.repeats))
        described = {name: remote.described for name, remote in engines.items()}
    config = prompt_config(arguments, len(answers))
    config |= {"drafter": Path(arguments.drafter).name, "repeats": arguments.repeats}
    rows = [{"engine": name, **described[name], **figures(raw.lines, name)} for name in engines]
    record = new_record(typed, config, rows=rows)
    write_run(arguments.out, record, page(record))
    return 0


def own_answers(arguments: argparse.Namespace) -> list[Answer]:
    """Decode every prompt plainly; answers of one token, which take no decoding, are left out."""
    pair = peagle.load(arguments.target, None)
    requests = prompted(arguments, pair)
    engine = pair.engine(pair.engine_config(0, context=pair.capacity(requests)))
    results = [result for result in decode(engine, requests, None) if len(result.output_ids) > 1]
    if not results:
        raise InputError(
            "no answer has a second token, and decoding is what is timed; give other prompts or a larger -n"
        )
    return [Answer(list(result.request.prompt_ids), list(result.output_ids)) for result in results]


def entries(site: Site, drafter: str | Path, drafts: Sequence[K]) -> Iterator[Entry]:
    """List this project's plain decoding, its speculation with each K, and llama.cpp."""
    plain = entry(OURS, site)
    yield plain
    for k in drafts:
        options = {**plain.options, "drafter": str(drafter), "num_drafts": k}
        yield dataclasses.replace(plain, name=f"{OURS}, K = {k}", options=options)
    yield entry(LLAMA, site)


def decoded(engines: Mapping[str, Remote], answers: Sequence[Answer], repeats: int) -> Iterator[Json]:
    """Yield a line per prompt, repeat and engine. Repeat 0 warms up and is left out."""
    say = Progress(total=(repeats + 1) * len(answers))
    for repeat in range(repeats + 1):
        for index, answer in enumerate(answers):
            say.part("prompts")
            for name in rotated(list(engines), repeat + index):
                reply = engines[name].call("decode", prompt_ids=answer.prompt_ids, num_tokens=len(answer.token_ids))
                line = {"engine": name, "prompt": index, "repeat": repeat, "tokens": len(answer.token_ids)}
                times = {key: reply[key] for key in ("prefill_s", "decode_s")}
                if repeat:
                    yield {**line, **times, "same": first_difference(reply["token_ids"], answer.token_ids) is None}
    say.end()


def figures(lines: Sequence[Json], engine: str) -> Json:
    """Sum up one engine.

    Its tokens a second after each first token; how many times faster it is than this project's plain decoding and than
    llama.cpp's (pooled, with 95 % intervals by bootstrap over prompts); and the share of prompts to which it always
    gives this project's plain answer.
    """
    own = [line for line in lines if line["engine"] == engine]
    seconds = by_prompt(lines, engine)

    def faster_than(other: str) -> Json:
        theirs = by_prompt(lines, other)
        factor = estimate(np.array([[theirs[prompt], seconds[prompt]] for prompt in seconds]), ratio)
        assert factor is not None
        return dataclasses.asdict(factor)

    differing = {line["prompt"] for line in own if not line["same"]}
    return {
        "tok_per_s": sum(line["tokens"] - 1 for line in own) / sum(line["decode_s"] for line in own),
        "over_llama": faster_than(LLAMA),
        "over_plain": faster_than(OURS),
        "same_answers": 1 - len(differing) / len(seconds),
    }


def by_prompt(lines: Sequence[Json], engine: str) -> dict[int, float]:
    """Add up the seconds of decoding a prompt's answer, over all repeats; by prompt."""
    seconds: dict[int, float] = {}
    for line in lines:
        if line["engine"] == engine:
            seconds[line["prompt"]] = seconds.get(line["prompt"], 0.0) + line["decode_s"]
    return seconds


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    config, source = record["config"], record["provenance"]
    versions = "; ".join(dict.fromkeys(row["version"] for row in record["rows"]))
    lines = [
        [
            row["engine"],
            f"{row['tok_per_s']:.0f}",
            "" if row["engine"] == LLAMA else figure_text(row["over_llama"]),
            "" if row["engine"] == OURS else figure_text(row["over_plain"]),
            f"{100 * row['same_answers']:.0f} %",
            row["computes"],
        ]
        for row in record["rows"]
    ]
    return [
        heading("Speculation beside llama.cpp", 1),
        f"`{source['command']}`",
        f"Target {config['target']}, drafter {config['drafter']}; {config['num_prompts']} prompts of "
        f"{config['prompts']}, in the chat template, greedy, batch 1; every engine writes as many tokens as this "
        f"project's own answer has, {config['max_new_tokens']} at most; {config['repeats']} repeats after one that "
        "warms up, at each prompt every engine in turn, one at work at a time. Tokens after the first over the time "
        f"they took, all prompts and repeats together; intervals: 95 %, bootstrap over prompts. {versions}; "
        f"{where(source)}.",
        Table(
            ("engine", "tok/s", "over llama.cpp", "over plain decoding", "prompts answered the same", "computes"), lines
        ),
        "Answered the same: token for token as this project's plain decoding. llama.cpp rounds activations to eight "
        "bits and YaRN's bounds to whole dimensions, so that near-ties fall otherwise and a text goes another way.",
    ]
