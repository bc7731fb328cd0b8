"""Prometheus metrics under vLLM's names, so that its boards and benchmark clients read them."""

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from peagle.engine.loop import AnyEngine
from peagle.result import Result
from peagle.serve.loop import Loop
from peagle.serve.outputs import pooled

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
LONG_S = (0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0)


class _Preemptions(Collector):
    """Reads the engine's count of preemptions."""

    def __init__(self, engine: AnyEngine, model: str) -> None:
        self._engine, self._model = engine, model

    def collect(self) -> Iterator[Metric]:
        text = "Requests that lost their pages to an earlier one; they are computed again."
        counter = CounterMetricFamily("vllm:num_preemptions", text, labels=["model_name"])
        counter.add_metric([self._model], self._engine.num_preemptions)
        yield counter


class Metrics:
    """Counts since the start of the server. Metrics of vLLM have its label model_name.

    replies, unsent, cut, unread: updated by the HTTP code.
    """

    def __init__(self, loop: Loop, model: str) -> None:
        self._registry, self._model = CollectorRegistry(), model
        running = self._add(Gauge, "num_requests_running", "Requests in slots or in prefill.")
        running.set_function(lambda: loop.num_running)
        waiting = self._add(Gauge, "num_requests_waiting", "Requests that wait for a slot.")
        waiting.set_function(lambda: loop.num_waiting)
        text = "1: the server answers requests; 0: it does not, and /health says why."
        ready = Gauge("peagle:ready", text, registry=self._registry)
        ready.set_function(lambda: loop.status == "ok")
        if isinstance(loop.engine, AnyEngine):  # not of a fleet
            engine = loop.engine
            text = "Share of the pages of keys and values that requests hold; 1: all."
            self._add(Gauge, "kv_cache_usage_perc", text).set_function(lambda: engine.page_use.held_frac)
            self._registry.register(_Preemptions(engine, model))
        self._prompt = self._add(Counter, "prompt_tokens", "Tokens of prompts.")
        self._generation = self._add(Counter, "generation_tokens", "Tokens of answers.")
        self._cache_queries = self._add(Counter, "prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._cache_hits = self._add(Counter, "prefix_cache_hits", "Tokens found in the prefix cache.")
        self._drafts = self._add(Counter, "spec_decode_num_drafts", "Steps that drafted.")
        self._draft_tokens = self._add(Counter, "spec_decode_num_draft_tokens", "Drafted tokens that were verified.")
        self._accepted = self._add(Counter, "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self._success = Counter(
            "vllm:request_success", "Ended requests.", ["model_name", "finished_reason"], registry=self._registry
        )
        self._per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their position in the draft, from 0.",
            ["model_name", "position"],
            registry=self._registry,
        )
        labels = ["handler", "method", "status"]
        self.replies = Counter("http_requests", "Replies, as vLLM counts them.", labels, registry=self._registry)
        self.unsent = Gauge("peagle:unsent_bytes", "Bytes of streams that wait to be sent.", registry=self._registry)
        self.cut = Counter("peagle:cut_streams", "Streams whose clients read too slowly.", registry=self._registry)
        text = "Connections whose clients read nothing."
        self.unread = Counter("peagle:unread_connections", text, registry=self._registry)
        self._ttft = self._add(Histogram, "time_to_first_token_seconds", "Arrival to first token.", buckets=SHORT_S)
        self._itl = self._add(Histogram, "inter_token_latency_seconds", "Between arrivals of tokens.", buckets=SHORT_S)
        self._e2e = self._add(Histogram, "e2e_request_latency_seconds", "Arrival to last token.", buckets=LONG_S)

    def observe(self, results: Sequence[Result]) -> None:
        """Count the results of one HTTP request, after its answers have ended or its client has left."""
        for result in results:
            reason = result.finish_reason or "abort"
            self._success.labels(self._model, reason).inc()
            if result.request.index == 0:
                self._prompt.inc(len(result.request.prompt_ids))
            self._cache_queries.inc(len(result.request.prompt_ids))
            self._cache_hits.inc(result.num_cached_tokens)
            self._generation.inc(len(result.output_ids))
            if result.ttft_s is not None and result.last_s is not None:
                self._ttft.observe(result.ttft_s)
                self._e2e.observe(result.last_s - result.started_s)
            for seconds in result.itl_s:
                self._itl.observe(seconds)
        counters = pooled(results)
        self._drafts.inc(counters.num_steps)
        self._draft_tokens.inc(counters.num_drafted)
        self._accepted.inc(counters.num_accepted)
        for position, accepted in enumerate(counters.accepted_per_position):
            self._per_position.labels(self._model, str(position)).inc(accepted)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _add(self, kind: Any, name: str, text: str, **options: Any) -> Any:
        """Add a metric of this kind with vLLM's name and label."""
        return kind(f"vllm:{name}", text, ["model_name"], registry=self._registry, **options).labels(self._model)
