"""Prometheus metrics under vLLM's names, so that its boards and benchmark clients read them."""

from collections.abc import Iterator, Sequence

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
        for name, text, read in (
            ("num_requests_running", "Requests in slots or in prefill.", lambda: loop.num_running),
            ("num_requests_waiting", "Requests that wait for a slot.", lambda: loop.num_waiting),
        ):
            self._gauge(name, text).set_function(read)
        text = "1: the server answers requests; 0: it does not, and /health says why."
        ready = Gauge("peagle:ready", text, registry=self._registry)
        ready.set_function(lambda: loop.status == "ok")
        if isinstance(loop.engine, AnyEngine):  # not of a fleet
            engine = loop.engine
            text = "Share of the pages of keys and values that requests hold; 1: all."
            self._gauge("kv_cache_usage_perc", text).set_function(lambda: engine.page_use.held_frac)
            self._registry.register(_Preemptions(engine, model))
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generation = self._counter("generation_tokens", "Tokens of answers.")
        self._cache_queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._cache_hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._drafts = self._counter("spec_decode_num_drafts", "Steps that drafted.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafted tokens that were verified.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
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
        self.unread = Counter(
            "peagle:unread_connections", "Connections whose clients read nothing.", registry=self._registry
        )
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", SHORT_S)
        self._itl = self._histogram("inter_token_latency_seconds", "Between arrivals of tokens.", SHORT_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", LONG_S)

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

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, ["model_name"], registry=self._registry).labels(self._model)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, ["model_name"], registry=self._registry, buckets=buckets)
        return histogram.labels(self._model)
