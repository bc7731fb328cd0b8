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
    "vllm": "scripts.peers.vllm_engine",
}


class Engine(Protocol):
    """The calls of an engine. Token ids are lists of integers; times are seconds."""

    def describe(self) -> dict[str, Any]:
        """Name the software for the page: {"version": ..., "computes": ...}."""
        ...

    def decode(self, prompts: list[list[int]], num_tokens: int, stop_token_ids: list[int]) -> dict[str, Any]:
        """Decode the prompts together, greedily: {"prefill_s", "decode_s", "steps": of a request, "token_ids"}.

        An answer ends with a stop token. decode_s: of all tokens of all requests, less prefill_s: of one token each,
        which the prompts take.
        """
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
