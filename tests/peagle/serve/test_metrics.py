"""Prometheus metrics under vLLM's names: they count what happens when it happens, and add up what the replies say."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from peagle.config import SamplingParams
from peagle.engine.memory.kv_memory import KVMemory, Sizing
from peagle.engine.request import Request
from peagle.ops.attention import PAGE_SIZE
from peagle.pair import Pair
from peagle.serve.completions import CompletionFormatter
from peagle.serve.errors import ApiError
from peagle.serve.generation import Generation
from peagle.serve.shared_state import SharedState
from tests.support.running import Gate
from tests.support.servers import CONTEXT, MODEL, SLOTS, K, client_of, service_of, values

TIMES = ("queue", "prefill", "decode", "inference")
OF_WHOLE = ("e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens", "request_params_n")
Make = Callable[..., SharedState]


def test_counters_are_the_sums_of_the_replies(make: Any) -> None:
    client = client_of(make())
    prompt = [50 + place % 50 for place in range(140)]
    replies = [
        client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 30, "temperature": 0, **fields}).json()
        for fields in ({}, {"stop": ["zrs"]}, {"n": 2, "temperature": 1.0, "seed": 1}, {"max_tokens": 9})
    ]
    metrics = values(client)
    usage = [reply["usage"] for reply in replies]
    figures = [reply["metrics"]["speculative_decoding"] for reply in replies]
    assert sum(block["prompt_tokens"] for block in usage) == 560
    assert metrics[("vllm:prompt_tokens_total",)] == 700  # by answer, as in vLLM
    assert metrics[("vllm:generation_tokens_total",)] == sum(block["completion_tokens"] for block in usage)
    assert metrics[("vllm:prefix_cache_queries_total",)] == 700
    assert metrics[("vllm:prefix_cache_hits_total",)] > 0
    for name, field in (
        ("num_drafts", "num_spec_steps"),
        ("num_draft_tokens", "num_draft_tokens"),
        ("num_accepted_tokens", "num_accepted_draft_tokens"),
    ):
        assert metrics[(f"vllm:spec_decode_{name}_total",)] == sum(block[field] for block in figures) > 0
    per_position = [metrics[("vllm:spec_decode_num_accepted_tokens_per_pos_total", str(place))] for place in range(3)]
    assert sum(per_position) == metrics[("vllm:spec_decode_num_accepted_tokens_total",)]
    assert per_position == sorted(per_position, reverse=True)
    ended = {key[1]: value for key, value in metrics.items() if key[0] == "vllm:request_success_total"}
    assert sum(ended.values()) == 5
    assert (ended["length"], ended["stop"]) == (4, 1)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_time_per_output_token_seconds"):
        assert metrics[(f"vllm:{name}_count",)] == 5
    assert metrics[("vllm:request_prompt_tokens_sum",)] == 700
    assert metrics[("vllm:request_generation_tokens_sum",)] == metrics[("vllm:generation_tokens_total",)]
    assert metrics[("vllm:request_params_max_tokens_sum",)] == 4 * 30 + 9
    n = [metrics[(f"vllm:request_params_n_{figure}",)] for figure in ("count", "sum")]
    assert n == [4, 1 + 1 + 2 + 1]
    # a dispatch's tokens are all that it emitted, also after a stop string
    step_tokens = metrics[("vllm:iteration_tokens_total_sum",)]
    assert step_tokens >= 700 + metrics[("vllm:generation_tokens_total",)]
    assert 4 < metrics[("vllm:iteration_tokens_total_count",)] < step_tokens
    assert metrics[("vllm:inter_token_latency_seconds_count",)] > 5
    assert metrics[("vllm:num_requests_running",)] == metrics[("vllm:num_requests_waiting",)] == 0


def test_the_times_of_an_answer_add_up(make: Make) -> None:
    client = client_of(make())
    bodies = [{"prompt": [40, 41 + number], "max_tokens": 5, "ignore_eos": True} for number in range(3)]
    assert all(client.post("/v1/completions", json=body).is_success for body in bodies)
    metrics = values(client)
    assert {metrics[(f"vllm:request_{name}_time_seconds_count",)] for name in TIMES} == {3}
    queue, prefill, decode, inference = (metrics[(f"vllm:request_{name}_time_seconds_sum",)] for name in TIMES)
    assert queue > 0
    assert queue + prefill == pytest.approx(metrics[("vllm:time_to_first_token_seconds_sum",)])
    assert prefill + decode == pytest.approx(inference)
    assert queue + inference == pytest.approx(metrics[("vllm:e2e_request_latency_seconds_sum",)])
    assert metrics[("vllm:inter_token_latency_seconds_sum",)] == pytest.approx(decode)
    assert metrics[("vllm:request_time_per_output_token_seconds_sum",)] == pytest.approx(decode / 4)


def outputs_of(service: SharedState, count: int = 1, **fields: Any) -> Generation:
    sampling = SamplingParams(seed=1)
    requests = [Request((40, 41, 42), 30, sampling, (), index=index, **fields) for index in range(count)]
    return Generation(service.loop, requests, CompletionFormatter(MODEL, service.builder.tokenizer), service.metrics)


class Text:
    """The metrics of a service, read without a client, as after every step."""

    def __init__(self, service: SharedState) -> None:
        self.get = lambda _: SimpleNamespace(text=service.metrics.text().decode())


def counted(service: SharedState, *names: str) -> list[float]:
    """Read metrics by their names without vLLM's prefix."""
    metrics = values(Text(service))
    return [metrics[(f"vllm:{name}",)] for name in names]


@pytest.mark.parametrize("stop", [(), ("D<=>?@ABCD<",)])
def test_tokens_waits_and_steps_count_as_they_arrive(make: Make, stop: tuple[str, ...]) -> None:
    """Without them a board shows nothing for minutes, and then a burst."""
    service = make()
    names = ("generation_tokens_total", "time_to_first_token_seconds_count", "inter_token_latency_seconds_count")

    async def read() -> None:
        outputs, arrivals, ended = outputs_of(service, stop=stop), 0, False
        async for chunk in outputs.pieces():
            assert not ended, "a stop string ends the engine's request, too"
            (result,) = outputs.results()
            arrivals += bool(chunk.token_ids)
            assert counted(service, *names) == [len(result.output_ids), 1, arrivals - 1]
            steps, accepted = result.counters.num_steps, result.counters.num_accepted
            spec = counted(service, "spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total")
            assert spec == [steps, accepted]
            assert counted(service, "prompt_tokens_total", "prefix_cache_queries_total") == [3, 3]
            ended = chunk.finish_reason is not None
            assert counted(service, *(f"{name}_count" for name in OF_WHOLE)) == [ended] * 4
        assert arrivals > 2
        assert result.finish_reason == ("stop" if stop else "length")

    asyncio.run(read())


def test_a_request_that_leaves_the_queue_or_its_midst_has_no_figures_of_a_whole_one(make: Make) -> None:
    """What left the queue was not computed: its prompt does not count."""
    service = make()
    gate = Gate(service)

    async def leave(num_chunks: int) -> None:
        outputs = outputs_of(service, SLOTS + 1)
        async with contextlib.aclosing(outputs.pieces()) as chunks:
            for _ in range(num_chunks):
                await anext(chunks)
        outputs.close()

    gate.close()
    asyncio.run(leave(0))
    assert counted(service, "prompt_tokens_total", "prefix_cache_queries_total", "generation_tokens_total") == [0] * 3
    gate.open()
    asyncio.run(leave(2))
    prompts, tokens, first = counted(
        service, "prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count"
    )
    assert prompts == 3 * first > 0
    assert tokens >= 2
    assert counted(service, *(f"{name}_count" for name in OF_WHOLE)) == [0] * 4
    metrics = values(client_of(service))
    ended = {reason: metrics["vllm:request_success_total", reason] for reason in ("stop", "length", "abort", "error")}
    assert ended == {"stop": 0, "length": 0, "abort": 2 * (SLOTS + 1), "error": 0}


def test_a_request_that_fails_counts_as_an_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make()
    monkeypatch.setattr(service.loop.engine, "step", lambda: 1 / 0)

    async def fail() -> None:
        with pytest.raises(ApiError):
            await anext(outputs_of(service).pieces())

    asyncio.run(fail())
    metrics = values(client_of(service))
    assert (metrics["vllm:request_success_total", "error"], metrics["vllm:request_success_total", "abort"]) == (1, 0)


# families that vLLM's boards and gateways read, with vLLM's own bounds of buckets
FAMILIES = {
    "time_to_first_token_seconds": "0.02",
    "inter_token_latency_seconds": "0.025",
    "request_time_per_output_token_seconds": "0.15",
    "e2e_request_latency_seconds": "0.3",
    **{f"request_{name}_time_seconds": "7680.0" for name in TIMES},
    "request_prompt_tokens": "200.0",
    "request_generation_tokens": "1.0",
    "request_params_max_tokens": "200.0",
    "request_params_n": "20.0",
    "iteration_tokens_total": "16384.0",
}


def test_boards_and_gateways_find_their_families(make: Make) -> None:
    """From the start, with vLLM's labels."""
    service = make()
    families = list(text_string_to_metric_families(service.metrics.text().decode()))
    samples = [sample for family in families for sample in family.samples]
    for name, bound in FAMILIES.items():
        buckets = [sample for sample in samples if sample.name == f"vllm:{name}_bucket"]
        assert bound in {sample.labels["le"] for sample in buckets}, name
    assert all(
        (sample.labels["model_name"], sample.labels["engine"]) == (MODEL, "0")
        for sample in samples
        if sample.name.startswith("vllm:")
    )
    (info,) = (sample for sample in samples if sample.name == "vllm:cache_config_info")
    pages = service.loop.engine.page_use.num_pages
    assert (info.value, info.labels["block_size"], info.labels["num_gpu_blocks"]) == (1, str(PAGE_SIZE), str(pages))
    assert info.labels["enable_prefix_caching"] == "True"
    process = {sample.name for sample in samples if sample.name.startswith("process_")}
    assert process >= {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_start_time_seconds"}


@pytest.mark.parametrize("k", [0, 3])
def test_plain_decoding_has_no_figures_of_speculation(make: Any, k: int) -> None:
    client = client_of(make(k=k))
    reply = client.post("/v1/completions", json={"prompt": [40, 41], "max_tokens": 5, "temperature": 0}).json()
    assert ("metrics" in reply) == (k > 0)
    assert (values(client)[("vllm:spec_decode_num_drafts_total",)] > 0) == (k > 0)


def test_pages_that_requests_hold_and_preemptions_are_counted(pair: Pair) -> None:
    """Of both replicas."""
    replicas, pages, slots = 2, 6, 4
    pair = dataclasses.replace(pair)
    memory = KVMemory(pair.target, pair.drafter, pair.engine_config(K, context=CONTEXT, slots=2))
    sizing = Sizing(memory.groups, memory.page_bytes, pair.engine_config(K, context=CONTEXT, slots=2))
    room = {"kv_memory": replicas * sizing.size(pages), "prefix_cache": "off"}
    service = service_of(pair, slots=slots, replicas=replicas, **room)
    client, engine, held = client_of(service), service.loop.engine, []
    health = client.get("/health").json()
    assert (health["kv_cache_tokens"], health["kv_cache_usage"]) == (pages * replicas * PAGE_SIZE, 0)
    step = engine.step

    def watched() -> Any:
        chunks = step()
        held.append(*counted(service, "kv_cache_usage_perc"))
        return chunks

    engine.step = watched
    sampling = {"max_tokens": 190, "temperature": 0, "ignore_eos": True}
    prompts = [[50 + place, 60, 70] for place in range(slots)]
    replies = client.post("/v1/completions", json={**sampling, "prompt": prompts}).json()["choices"]
    engine.step = step
    metrics = values(client)
    # two requests of four pages in six
    assert metrics[("vllm:num_preemptions_total",)] == engine.num_preemptions >= replicas
    assert metrics[("vllm:kv_cache_usage_perc",)] == 0
    assert 4 / pages < max(held) <= 1
    alone = [client.post("/v1/completions", json={**sampling, "prompt": prompt}).json() for prompt in prompts]
    assert [reply["text"] for reply in replies] == [reply["choices"][0]["text"] for reply in alone]
    service.loop.close()
