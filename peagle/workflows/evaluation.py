"""Evaluate a drafter during training: its acceptance in the engine, on held-out prompts."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from drafter.config import DrafterConfig
from drafter.params import DrafterParams
from drafter.propose import drafter_of
from drafter.train.shards import Document
from peagle.answers.result import Result, decode
from peagle.base import interrupt
from peagle.config import SamplingParams
from peagle.engine.host.engine import Engine
from peagle.measure.metrics import pooled_counters
from peagle.pair import Pair
from peagle.text.prompt_files import PromptSet
from peagle.text.prompts import Rendering
from target.model import GptOss

EVALUATION_TOKENS, EVALUATED_PROMPTS = 256, 20


def acceptance_on(
    pair: Pair,
    config: DrafterConfig,
    prompts: PromptSet,
    num_drafts: int,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Callable[[DrafterParams], dict[str, Any]]:
    """Return a function that decodes held-out prompts with a drafter, greedily and at temperature 1.

    It returns the fields of an evaluation in the log. Calls progress(0, 0) while it compiles, and progress(outputs
    done, total) before each.
    """
    assert isinstance(pair.plain_target, GptOss)
    target = dataclasses.replace(pair.plain_target, aux_layer_ids=config.aux_layer_ids or ())
    conversations = prompts.conversations
    requests = [
        pair.request(conversation, [], Rendering(), max_new_tokens=EVALUATION_TOKENS, sampling=sampling, index=index)
        for sampling in (SamplingParams(), SamplingParams(1.0))
        for index, conversation in enumerate(conversations)
    ]
    engine_config = pair.engine_config(num_drafts, context=pair.capacity(requests))

    def decoded(engine: Engine) -> Iterator[Result]:
        for number, request in enumerate(requests):
            progress(number, len(requests))
            yield from decode(engine, [request], None)

    def measure(params: DrafterParams) -> dict[str, Any]:
        interrupt.check()
        progress(0, 0)
        engine = Engine(target, drafter_of(params, config), engine_config, pair.stop_token_ids)
        for for_sampling in (False, True):
            engine.warm_up(for_sampling)
        began = time.monotonic()
        both = list(decoded(engine))
        results, sampled = both[: len(conversations)], pooled_counters(both[len(conversations) :])
        not_looping = [result for result in results if not result.loops]
        counters, without_loops = pooled_counters(results), pooled_counters(not_looping)
        assert counters is not None
        assert sampled is not None
        return {
            "num_speculative_tokens": engine_config.num_drafts,
            "num_outputs": len(results),
            "num_left_out": len(prompts.skipped),
            "num_outputs_without_loops": len(not_looping),
            "acceptance_length": counters.acceptance_length,
            "acceptance_length_without_loops": None if without_loops is None else without_loops.acceptance_length,
            "acceptance_length_at_temperature_1": sampled.acceptance_length,
            "elapsed_s": round(time.monotonic() - began, 2),
            "acceptance_rate_per_position": list(counters.acceptance_rate_per_position),
        }

    return measure


def known_prompts(pair: Pair, prompts: PromptSet, documents: Sequence[Document]) -> str | None:
    """Return a warning about prompts to evaluate that are in the training data, or None."""
    trained = {document.prompt.tobytes() for document in documents}
    encoded = (conversation.encode((), pair.tokenizer, Rendering()) for conversation in prompts.conversations)
    count = sum(np.array(ids, np.int32).tobytes() in trained for ids in encoded)
    if not count:
        return None
    return (
        f"{count} of the {len(prompts.conversations)} --evaluate prompts are in the data, too, so their figures are "
        "not those of new ones; expected prompts that are not in the data"
    )
