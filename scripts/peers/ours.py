"""This project's engine in a comparison."""

import math
import time
import warnings
from typing import Any, Literal

import peagle
from peagle.base.errors import InputWarning
from peagle.engine.request import Request
from peagle.measure.provenance import version_of
from peagle.pair import Pair


def load(
    directory: str,
    context: int,
    kernels: Literal["auto", "native", "xla"],
    dtype: Literal["float32", "bfloat16"] | None = None,
    drafter: str | None = None,
) -> "Ours":
    """Load a checkpoint, with a drafter or without. Raises InputError if these kernels do not run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InputWarning)  # of a random target's missing tokenizer
        return Ours(peagle.load(directory, drafter, kernels=kernels, dtype=dtype), context)


class Ours:
    """See worker.Engine."""

    def __init__(self, pair: Pair, context: int) -> None:
        self._pair, self._context = pair, context

    def describe(self) -> dict[str, Any]:
        loaded = self._pair.loaded
        return {
            "version": f"peagle {version_of('peagle') or 'not installed'}",
            "computes": f"{loaded.kernels}; {loaded.dtype} activations; experts {loaded.experts}",
        }

    def decode(
        self, prompts: list[list[int]], num_tokens: int, stop_token_ids: list[int], num_drafts: int | str = 0
    ) -> dict[str, Any]:
        """See worker.Engine. The engine has a slot for each request."""
        engine = self._pair.engine(
            self._pair.engine_config(num_drafts, slots=len(prompts), context=self._context)  # type: ignore[arg-type]
        )
        engine.warm_up()

        def timed(budget: int) -> tuple[float, float, int, list[list[int]]]:
            """Return (seconds, those to the first token, steps of all requests, their tokens)."""
            tokens: list[list[int]] = [[] for _ in prompts]
            requests = [Request(tuple(ids), budget, stop_token_ids=tuple(stop_token_ids)) for ids in prompts]
            started, first_s, steps = time.perf_counter(), math.inf, 0
            for index, chunk in engine.generate(requests):
                first_s = min(first_s, chunk.time_s - started)
                tokens[index] += chunk.token_ids
                steps += len(chunk.steps)
            return time.perf_counter() - started, first_s, steps, tokens

        if len(prompts) > 1:
            timed(1)  # the pages' first use takes longer
        whole_s, first_s, steps, tokens = timed(num_tokens)
        prefill_s = first_s if len(prompts) == 1 else timed(1)[0]
        return {
            "prefill_s": prefill_s,
            "decode_s": whole_s - prefill_s,
            "steps": steps / len(prompts),
            "token_ids": tokens,
        }
