"""Figures of several requests: pooled counters and ratios. Those of one request are in peagle.answers.result."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.answers.result import Counters, Result, ratio

# keys of JSON, named as in vLLM's metrics -> attributes of Counters
COUNTS = {
    "num_spec_steps": "num_steps",
    "num_plain_steps": "num_plain_steps",
    "num_proposed_draft_tokens": "num_proposed",
    "num_draft_tokens": "num_drafted",
    "num_accepted_draft_tokens": "num_accepted",
    "num_looked_up_draft_tokens": "num_looked_up",
    "num_truncated_tokens": "num_truncated",
    "acceptance_histogram": "histogram",
}


def pooled_counters(results: Sequence[Result]) -> Counters | None:
    """Add up the counters of the results with K > 0; None if there are none. Raises ValueError for several K."""
    speculative = [result.counters for result in results if result.num_speculative_tokens]
    return total(speculative) if speculative else None


def total(counters: Sequence[Counters]) -> Counters:
    """Add up one or more counters of the same K."""
    return sum(counters[1:], start=counters[0])


def pooled_tok_per_s(results: Sequence[Result]) -> float | None:
    """Divide tokens after the first by the seconds in which at least one request was decoding.

    Time that several requests share counts once.
    """
    tokens = sum(len(result.output_ids) - 1 for result in results if result.output_ids)
    spans = [(r.first_s, r.last_s) for r in results if r.first_s is not None and r.last_s is not None]
    return ratio(tokens, busy_s(spans)) if tokens else None


def busy_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time covered by at least one span (begin, end). Example: (0, 2), (1, 3), (5, 6) cover 4."""
    seconds, covered = 0.0, float("-inf")
    for begin, end in sorted(spans):
        seconds += max(0.0, end - max(begin, covered))
        covered = max(covered, end)
    return seconds


@dataclass(frozen=True)
class Spread:
    """A median with the extremes."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(float(statistics.median(values)), float(min(values)), float(max(values)))

    def text(self, number: Callable[[float], str]) -> str:
        """Format as median (lowest..highest)."""
        return f"{number(self.median)} ({number(self.lowest)}..{number(self.highest)})"


def figure_text(value: float | None, form: str) -> str:
    """Format a figure; "-" if it is undefined."""
    return "-" if value is None else format(value, form)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first index at which two sequences differ, where one may have ended; None if they are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def speculative_decoding_block(counters: Counters) -> dict[str, Any]:
    """Make a request's block of counters. Its length is vLLM's, of all accepted drafts."""
    return {
        "num_spec_tokens": counters.num_speculative_tokens,
        **_attributes(counters, COUNTS),
        "mean_acceptance_length": counters.mean_acceptance_length,
        "draft_acceptance_rate": counters.acceptance_rate,
    }


def _attributes(counters: Counters | None, names: Mapping[str, str]) -> dict[str, Any]:
    """Read attributes of the counters as JSON's values, by key; None without counters."""
    values = {key: None if counters is None else getattr(counters, name) for key, name in names.items()}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def summarize(
    results: Sequence[Result],
    baselines: Sequence[Result | None],
    compile_s: float,
    peak_memory_bytes: int | None,
    host_gap_frac: float | None = None,
) -> dict[str, Any]:
    """Summarise all requests: counters, then figures from them.

    baselines[i]: plain decoding of request i, or None. Speed-ups are over the requests that have one, and None if
    nothing was drafted. host_gap_frac: see peagle.engine.host.in_flight.LoopTimes.
    """
    counters = pooled_counters(results)
    without_loops = pooled_counters([result for result in results if not result.loops])
    both = [(fast, plain) for fast, plain in zip(results, baselines, strict=True) if plain is not None]
    drafted = both if counters is not None and counters.num_steps else []
    baseline_tok_per_s = pooled_tok_per_s([plain for _, plain in both])
    speculated = pooled_tok_per_s([fast for fast, _ in drafted])
    return {
        "num_requests": len(results),
        "num_prompt_tokens": sum(len(result.request.prompt_ids) for result in results),
        "num_output_tokens": sum(len(result.output_ids) for result in results),
        **_attributes(counters, COUNTS),
        "acceptance_length": None if counters is None else counters.acceptance_length,
        "acceptance_length_without_loops": None if without_loops is None else without_loops.acceptance_length,
        "acceptance_rate_per_position": None if counters is None else list(counters.acceptance_rate_per_position),
        "looping_requests_frac": ratio(sum(result.loops for result in results), len(results)),
        "tok_per_s": pooled_tok_per_s(results),
        "baseline_tok_per_s": baseline_tok_per_s,
        "speedup": None if speculated is None else ratio(speculated, baseline_tok_per_s or 0.0),
        "num_diverged_requests": sum(fast.output_ids != plain.output_ids for fast, plain in both) if both else None,
        "ttft_s": statistics.median(times) if (times := [r.ttft_s for r in results if r.ttft_s is not None]) else None,
        "compile_s": compile_s,
        "host_gap_frac": host_gap_frac,
        "peak_memory_bytes": peak_memory_bytes,
    }
