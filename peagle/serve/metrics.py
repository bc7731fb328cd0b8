"""Prometheus metrics under vLLM's names, so that its boards, gateways and benchmark clients read them.

Tokens, waits and steps count as they arrive, what is of a whole request at its end. Buckets have vLLM's bounds, and
smaller ones.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.request import StepRecord
from peagle.ops.attention import PAGE_SIZE
from peagle.serve.engine_loop import EngineLoop, Loop

LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM numbers its engines; replicas are one here
FIRST_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    *(480.0, 960.0, 1920.0, 7680.0),
)
REPLY_S = (0.1, 0.5, 1.0)
ANSWERS = (1, 2, 5, 10, 20)
TOKENS_OF_A_STEP = (1, 8, *(2**power for power in range(4, 15)))
COUNTERS = {
    "prompt_tokens": "Tokens of prompts, by answer, from its first token on.",
    "generation_tokens": "Tokens of answers.",
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "spec_decode_num_drafts": "Steps that drafted.",
    "spec_decode_num_draft_tokens": "Drafted tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
}
TIMES = {  # in seconds
    "time_to_first_token_seconds": ("Arrival to first token.", FIRST_S),
    "inter_token_latency_seconds": ("Between arrivals of tokens.", TOKEN_S),
    "request_time_per_output_token_seconds": ("First to last token, over the tokens after the first.", TOKEN_S),
    "e2e_request_latency_seconds": ("Arrival to last token.", REQUEST_S),
    "request_queue_time_seconds": ("Arrival to slot.", REQUEST_S),
    "request_prefill_time_seconds": ("Slot to first token.", REQUEST_S),
    "request_decode_time_seconds": ("First to last token.", REQUEST_S),
    "request_inference_time_seconds": ("Slot to last token.", REQUEST_S),
}
SIZES = {  # in tokens, up to the context
    "request_prompt_tokens": "Tokens of the prompt.",
    "request_generation_tokens": "Tokens of the answer.",
    "request_params_max_tokens": "Most tokens that the answer may have.",
}
WHOLE = ("stop", "length")  # reasons of answers that were not cut short: only these have figures of a whole request
REASONS = (*WHOLE, "abort", "error")


class _Preemptions(Collector):
    """Reads the engine's count of preemptions."""

    def __init__(self, engine: AnyEngine, model: str) -> None:
        self._engine, self._model = engine, model

    def collect(self) -> Iterator[Metric]:
        text = "Requests that lost their pages to an earlier one; they are computed again."
        counter = CounterMetricFamily("vllm:num_preemptions", text, labels=LABELS)
        counter.add_metric([self._model, ENGINE], self._engine.num_preemptions)
        yield counter


class Metrics:
    """Counts since the start of the server. Metrics of vLLM have its labels model_name and engine.

    unsent, cut, unread: updated by the HTTP code.
    """

    def __init__(self, loop: Loop, model: str) -> None:
        self._registry, self._model = CollectorRegistry(), model
        self._add_gauges(loop)
        if isinstance(loop, EngineLoop):  # not a fleet
            self._add_engine(loop)
        self._counters = {name: self._add(Counter, name, text) for name, text in COUNTERS.items()}
        sizes = _bounds(loop.config.context)
        histograms = {**TIMES, **{name: (text, sizes) for name, text in SIZES.items()}}
        histograms["request_params_n"] = ("Answers to the prompt.", ANSWERS)
        self._histograms = {
            name: self._add(Histogram, name, text, buckets=bounds) for name, (text, bounds) in histograms.items()
        }
        text = "Accepted tokens by their position in the draft, from 0."
        places = map(str, range(loop.config.num_speculative_tokens))
        self._per_position = self._family(Counter, "spec_decode_num_accepted_tokens_per_pos", text, "position", places)
        self._ended = self._family(Counter, "request_success", "Ended requests.", "finished_reason", REASONS)
        self._add_replies()
        ProcessCollector(registry=self._registry)

    def _add_gauges(self, loop: Loop) -> None:
        running = self._add(Gauge, "num_requests_running", "Requests in slots or in prefill.")
        running.set_function(lambda: loop.num_running)
        waiting = self._add(Gauge, "num_requests_waiting", "Requests that wait for a slot.")
        waiting.set_function(lambda: loop.num_waiting)
        text = "1: the server answers requests; 0: it does not, and /health says why."
        ready = Gauge("peagle:ready", text, registry=self._registry)
        ready.set_function(lambda: loop.status == "ok")

    def _add_engine(self, loop: EngineLoop) -> None:
        """Add what is only known of an engine in this process."""
        engine = loop.engine
        text = "Share of the pages of keys and values that requests hold; 1: all."
        self._add(Gauge, "kv_cache_usage_perc", text).set_function(lambda: engine.page_use.held_frac)
        self._registry.register(_Preemptions(engine, self._model))
        cache = {
            "block_size": str(PAGE_SIZE),
            "num_gpu_blocks": str(engine.page_use.num_pages),
            "enable_prefix_caching": str(engine.prefix_cache_use is not None),
        }
        text = "1; its labels describe the pages of keys and values, on any device."
        info = Gauge("vllm:cache_config_info", text, [*LABELS, *cache], registry=self._registry)
        info.labels(self._model, ENGINE, *cache.values()).set(1)
        text = "Tokens of a dispatch that returned some: of answers, and of prompts at their first token."
        loop.count_step = self._add(Histogram, "iteration_tokens_total", text, buckets=TOKENS_OF_A_STEP).observe

    def _add_replies(self) -> None:
        labels = ["handler", "method", "status"]
        self._replies = Counter("http_requests", "Replies, as vLLM counts them.", labels, registry=self._registry)
        text = "Time to the end of a reply."
        self._reply_s = Histogram(
            "http_request_duration_seconds", text, labels[:2], registry=self._registry, buckets=REPLY_S
        )
        self.unsent = Gauge("peagle:unsent_bytes", "Bytes of streams that wait to be sent.", registry=self._registry)
        self.cut = Counter("peagle:cut_streams", "Streams whose clients read too slowly.", registry=self._registry)
        text = "Connections whose clients read nothing."
        self.unread = Counter("peagle:unread_connections", text, registry=self._registry)

    def count_reply(self, handler: str, method: str, status: int) -> None:
        """Count a reply that begins, by the hundreds of its status: 2xx, 4xx or 5xx."""
        self._replies.labels(handler, method, f"{status // 100}xx").inc()

    def time_reply(self, handler: str, method: str, seconds: float) -> None:
        """Count a reply that has ended."""
        self._reply_s.labels(handler, method).observe(seconds)

    def count(self, **counts: int) -> None:
        """Add to counters, by their names without vLLM's prefix."""
        for name, count in counts.items():
            if count:
                self._counters[name].inc(count)

    def observe(self, **values: int | float) -> None:
        """Add values to histograms, by their names without vLLM's prefix."""
        for name, value in values.items():
            self._histograms[name].observe(value)

    def count_steps(self, steps: Sequence[StepRecord]) -> None:
        """Count the steps that drafted."""
        drafting = [step for step in steps if step.draft_token_ids]
        self.count(
            spec_decode_num_drafts=len(drafting),
            spec_decode_num_draft_tokens=sum(len(step.draft_token_ids) for step in drafting),
            spec_decode_num_accepted_tokens=sum(step.num_accepted for step in drafting),
        )
        for position in itertools.chain.from_iterable(range(step.num_accepted) for step in drafting):
            self._per_position[str(position)].inc()

    def count_end(self, reason: str) -> None:
        self._ended[reason if reason in REASONS else "abort"].inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _add(self, kind: Any, name: str, text: str, **options: Any) -> Any:
        """Add a metric of this kind with vLLM's name and labels."""
        metric = kind(f"vllm:{name}", text, LABELS, registry=self._registry, **options)
        return metric.labels(self._model, ENGINE)

    def _family(self, kind: Any, name: str, text: str, label: str, values: Iterator[str] | Sequence[str]) -> Any:
        """Add a metric with one label more; return its metrics by that label's values."""
        metric = kind(f"vllm:{name}", text, [*LABELS, label], registry=self._registry)
        return {value: metric.labels(self._model, ENGINE, value) for value in values}


def _bounds(most: int) -> list[int]:
    """Make the bounds 1, 2, 5, 10, 20, 50, ... up to `most`."""
    bounds = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    return list(itertools.takewhile(lambda bound: bound <= most, bounds))
