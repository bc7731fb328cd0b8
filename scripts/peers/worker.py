"""The child's side of a comparison: one engine, called by JSON lines.

    python -m scripts.peers.worker KIND '{"directory": ...}'

A line of standard input is {"do": METHOD, ...arguments}; its answer is a line {"answer": {...}} or {"error": one line}.
The first answer is that of `describe`, after the engine has loaded. Output of libraries goes to standard error.

This file needs only numpy, so that it runs under another environment's Python.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TextIO

KINDS = {
    "peagle": "scripts.peers.ours",
    "transformers": "scripts.peers.torch_engine",
    "vllm": "scripts.peers.vllm_engine",
}


class Engine(Protocol):
    """The calls of an engine; roster.Entry says which it has. Token ids are lists of integers; times are seconds."""

    def describe(self) -> dict[str, Any]:
        """Name the software for the page: {"version": ..., "computes": ...}."""
        ...

    def prepare(self, prompt_ids: list[int], widths: list[int]) -> dict[str, Any]:
        """Choose implementations and compile, for passes of these widths after such a prompt."""
        ...

    def decode(self, prompt_ids: list[int], num_tokens: int) -> dict[str, Any]:
        """Decode plainly: {"prefill_s": until the first token, "decode_s": after it, "token_ids"}."""
        ...

    def verify(self, prompt_ids: list[int], passes: list[list[int]]) -> dict[str, Any]:
        """Time verify passes: {"pass_s": mean time of a pass of T rows after the prompt}.

        A pass ends when the greedy tokens of all rows are known; then its rows are rolled back.
        """
        ...

    def logits(self, prompt_ids: list[int], passes: list[list[int]], path: str) -> dict[str, Any]:
        """Write float32 logits [tokens, vocabulary] of the passes, which follow the prompt."""
        ...


class BatchingEngine(Engine, Protocol):
    """An engine that decodes several requests together."""

    def decode_many(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """Decode the prompts together, plainly and greedily.

        {"decode_s": for num_tokens - 1 steps of all requests, after the last prefill; "token_ids": a list per request,
        as far as they were read by then}.
        """
        ...


class RoutingEngine(Engine, Protocol):
    """An engine that says which experts its rows use."""

    def experts(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Return the experts of each prompt's last token, by layer: {"chosen": [prompt][layer][k]}."""
        ...


class SpeculativeEngine(Engine, Protocol):
    """An engine with a drafter."""

    def speculate(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """Decode the prompts together with K drafts in every step: {"decode_s": as above, "steps": of a request}."""
        ...


def main() -> int:
    """Serve the engine that the command line names."""
    return serve(lambda: importlib.import_module(KINDS[sys.argv[1]]).load(**json.loads(sys.argv[2])))


def serve(load: Callable[[], Any]) -> int:
    """Answer the calls of standard input. load: makes the served object, with `describe`."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        engine = load()
        _say(answers, {"answer": engine.describe()})
    except Exception as error:
        _say_error(answers, error)
        return 1
    for line in sys.stdin:
        request = json.loads(line)
        try:
            _say(answers, {"answer": getattr(engine, request.pop("do"))(**request)})
        except Exception as error:
            _say_error(answers, error)
    return 0


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _say_error(answers: TextIO, error: Exception) -> None:
    traceback.print_exc()
    _say(answers, {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"})


if __name__ == "__main__":
    sys.exit(main())
