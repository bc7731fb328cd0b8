"""Prometheus metrics under vLLM's names add up what the replies say."""

import dataclasses
from typing import Any

import pytest

from peagle.engine.kv_memory import KVMemory, Sizing
from peagle.ops.attention import PAGE_SIZE
from peagle.pair import Pair
from tests.support.servers import CONTEXT, K, client_of, service_of, values


def test_counters_are_the_sums_of_the_replies(make: Any) -> None:
    client = client_of(make())
    prompt = [100 + place % 50 for place in range(140)]
    replies = [
        client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 30, "temperature": 0, **fields}).json()
        for fields in ({}, {"stop": ["a"]}, {"n": 2, "temperature": 1.0, "seed": 1}, {"max_tokens": 9})
    ]
    metrics = values(client)
    usage = [reply["usage"] for reply in replies]
    figures = [reply["metrics"]["speculative_decoding"] for reply in replies]
    assert metrics[("vllm:prompt_tokens_total",)] == sum(block["prompt_tokens"] for block in usage) == 560
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
    assert ended["length"] >= 4
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert metrics[(f"vllm:{name}_count",)] == 5
    assert metrics[("vllm:inter_token_latency_seconds_count",)] > 5
    assert metrics[("vllm:num_requests_running",)] == metrics[("vllm:num_requests_waiting",)] == 0


@pytest.mark.parametrize("k", [0, 3])
def test_plain_decoding_has_no_figures_of_speculation(make: Any, k: int) -> None:
    client = client_of(make(k=k))
    reply = client.post("/v1/completions", json={"prompt": [40, 41], "max_tokens": 5, "temperature": 0}).json()
    assert ("metrics" in reply) == (k > 0)
    assert (values(client)[("vllm:spec_decode_num_drafts_total",)] > 0) == (k > 0)


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_pages_that_requests_hold_and_preemptions_are_counted(pair: Pair, replicas: int) -> None:
    pages, slots = 6, 2 * replicas
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
        held.append(values(client)[("vllm:kv_cache_usage_perc",)])
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
