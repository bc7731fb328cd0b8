"""Time the steps of engines while all requests of a batch decode."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from peagle.base.errors import InputError
from peagle.config import NumDrafts, SamplingParams
from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.request import Request, StepRecord
from peagle.pair import Pair
from scripts.runs import Json, ratios, turns

PUBLISHED_RATE = 0.76  # draft i is accepted at .76^i: 3.70 tokens a step at K = 7, as published for the 20b on MT-Bench
PROMPT_TOKENS, NEW_TOKENS = 512, 128


@dataclass(frozen=True)
class Steady:
    """Counts of whole dispatches between the last request's first token and the first request's end."""

    seconds: float
    tokens: int
    steps: int
    records: tuple[StepRecord, ...]

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def tok_per_s(self) -> float:
        return self.tokens / self.seconds


def steady(engine: AnyEngine, requests: Sequence[Request]) -> Steady:
    """Decode the requests together. Raises InputError if one ends before the last one begins.

    The time counts from the end of the first dispatch with all requests: that dispatch began before the last request.
    If no other dispatch has them all, the time counts from the last request's first token.
    """
    chunks = list(engine.generate(requests))
    begun = max(chunk.time_s for _, chunk in chunks if not chunk.steps)
    ended = min(chunk.time_s for _, chunk in chunks if chunk.finish_reason is not None)
    times = [chunk.time_s for index, chunk in chunks if index == 0 and chunk.steps and begun < chunk.time_s <= ended]
    if not times:
        raise InputError(f"no step has all of {len(requests)} requests; expected longer answers, or fewer slots")
    if len(times) > 1:
        begun = times[0]
    timed = [(index, chunk) for index, chunk in chunks if chunk.steps and begun < chunk.time_s <= times[-1]]
    return Steady(
        seconds=times[-1] - begun,
        tokens=sum(len(chunk.token_ids) for _, chunk in timed),
        steps=sum(len(chunk.steps) for index, chunk in timed if index == 0),
        records=tuple(record for _, chunk in timed for record in chunk.steps),
    )


def synthetic_engine(
    pair: Pair, k: NumDrafts, slots: int, rate: float, prompt_tokens: int = PROMPT_TOKENS
) -> AnyEngine:
    """Make an engine in which draft i is accepted at rate^i (peagle.engine.step.accept.draw_synthetic)."""
    rates = (rate,) if k else None
    context = min(prompt_tokens + 512, pair.max_positions)
    # prompts in one chunk: steps between chunks would decode the first request without the others
    options = {"context": context, "slots": slots, "synthetic_acceptance": rates, "prefill_chunk": prompt_tokens}
    return pair.engine(pair.engine_config(k, **options))


def random_request(
    vocab_size: int,
    number: int,
    new_tokens: int = NEW_TOKENS,
    prompt_tokens: int = PROMPT_TOKENS,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008  # frozen
) -> Request:
    """Make a request of random tokens."""
    ids = np.random.default_rng(2 + number).integers(0, vocab_size, prompt_tokens)
    return Request(tuple(map(int, ids)), new_tokens, sampling, stop_token_ids=(), index=number)


def time_steps(engines: Mapping[int | str, AnyEngine], requests: Sequence[Request], repeats: int) -> Iterator[Json]:
    """Time the steps of engines by their K, 0 among them, in turns; yield a row of each."""
    runs: dict[int | str, list[Steady]] = {k: [] for k in engines}
    for _, k in turns(list(engines), repeats, warm_up=False):
        runs[k].append(steady(engines[k], requests))
    plain_s = statistics.median(run.step_s for run in runs[0])
    for k, own in runs.items():
        step_s = statistics.median(run.step_s for run in own)
        tokens = sum(run.tokens for run in own)
        num_steps = len(requests) * sum(run.steps for run in own)
        num_drafts = sum(len(record.draft_token_ids) for run in own for record in run.records)
        yield {
            "batch": len(requests),
            "k": k,
            "tok_per_s": tokens / sum(run.seconds for run in own),
            "speedup": statistics.median(ratios([run.tok_per_s for run in own], [run.tok_per_s for run in runs[0]])),
            "step_ms": 1e3 * step_s,
            "cycle_cost": step_s / plain_s,
            "tokens_a_step": tokens / num_steps,
            "rows_a_token": (num_steps + num_drafts) / tokens,
        }
