"""Time the steps of engines whose drafts are accepted by drawn chances (peagle.engine.accept.draw_synthetic)."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from peagle.config import NumDrafts
from peagle.engine.loop import AnyEngine
from peagle.engine.request import Request
from peagle.pair import Pair
from scripts.runs import Json, rotated
from scripts.steady import Steady, steady

PUBLISHED_RATE = 0.76  # draft i is accepted at .76^i: 3.70 tokens a step at K = 7, as published for the 20b on MT-Bench
PROMPT_TOKENS, NEW_TOKENS = 512, 128


def synthetic_engine(
    pair: Pair, k: NumDrafts, slots: int, rate: float, prompt_tokens: int = PROMPT_TOKENS
) -> AnyEngine:
    """Make an engine in which draft i is accepted at rate^i."""
    rates = (rate,) if k else None
    context = min(prompt_tokens + 512, pair.max_positions)
    # prompts in one chunk: steps between chunks would decode the first request without the others
    options = {"context": context, "slots": slots, "synthetic_acceptance": rates, "prefill_chunk": prompt_tokens}
    return pair.engine(pair.engine_config(k, **options))


def random_request(
    vocab_size: int, number: int, new_tokens: int = NEW_TOKENS, prompt_tokens: int = PROMPT_TOKENS
) -> Request:
    """Make a request of random tokens."""
    ids = np.random.default_rng(2 + number).integers(0, vocab_size, prompt_tokens)
    return Request(tuple(map(int, ids)), new_tokens, stop_token_ids=(), index=number)


def time_steps(engines: Mapping[int | str, AnyEngine], requests: Sequence[Request], repeats: int) -> Iterator[Json]:
    """Time the steps of engines by their K, 0 among them, in turns; yield a row of each."""
    runs: dict[int | str, list[Steady]] = {k: [] for k in engines}
    for repeat in range(repeats):
        for k in rotated(list(engines), repeat):
            runs[k].append(steady(engines[k], requests))
    plain_s = statistics.median(run.step_s for run in runs[0])
    for k, of_k in runs.items():
        step_s = statistics.median(run.step_s for run in of_k)
        tokens = sum(run.tokens for run in of_k)
        num_steps = len(requests) * sum(run.steps for run in of_k)
        num_drafts = sum(len(record.draft_token_ids) for run in of_k for record in run.records)
        ratios = [
            (run.tokens / run.seconds) / (plain.tokens / plain.seconds)
            for run, plain in zip(of_k, runs[0], strict=True)
        ]
        yield {
            "batch": len(requests),
            "k": k,
            "tok_per_s": tokens / sum(run.seconds for run in of_k),
            "speedup": statistics.median(ratios),
            "step_ms": 1e3 * step_s,
            "cycle_cost": step_s / plain_s,
            "tokens_a_step": tokens / num_steps,
            "rows_a_token": (num_steps + num_drafts) / tokens,
        }
