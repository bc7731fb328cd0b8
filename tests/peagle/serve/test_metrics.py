"""Prometheus metrics under vLLM's names add up what the replies say."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.peagle.serve.conftest import client_of


def values(client: Any) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    labels = ("finished_reason", "position", "le")
    return {
        (sample.name, *(sample.labels[label] for label in labels if label in sample.labels)): sample.value
        for family in families
        for sample in family.samples
    }


def test_counters_are_the_sums_of_the_replies(make: Any) -> None:
    client = client_of(make())
    prompt = [100 + place % 50 for place in range(140)]
    replies = [
        client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 30, "temperature": 0, **fields}).json()
        for fields in ({}, {"stop": ["a"]}, {"n": 2, "temperature": 1.0, "seed": 1}, {"max_tokens": 9})
    ]
    found = values(client)
    usage = [reply["usage"] for reply in replies]
    figures = [reply["metrics"]["speculative_decoding"] for reply in replies]
    assert found[("vllm:prompt_tokens_total",)] == sum(each["prompt_tokens"] for each in usage) == 560
    assert found[("vllm:generation_tokens_total",)] == sum(each["completion_tokens"] for each in usage)
    assert found[("vllm:prefix_cache_queries_total",)] == 700
    assert found[("vllm:prefix_cache_hits_total",)] > 0
    for name, field in (
        ("num_drafts", "num_spec_steps"),
        ("num_draft_tokens", "num_draft_tokens"),
        ("num_accepted_tokens", "num_accepted_draft_tokens"),
    ):
        assert found[(f"vllm:spec_decode_{name}_total",)] == sum(each[field] for each in figures) > 0
    per_position = [found[("vllm:spec_decode_num_accepted_tokens_per_pos_total", str(place))] for place in range(3)]
    assert sum(per_position) == found[("vllm:spec_decode_num_accepted_tokens_total",)]
    assert per_position == sorted(per_position, reverse=True)
    ended = {key[1]: value for key, value in found.items() if key[0] == "vllm:request_success_total"}
    assert sum(ended.values()) == 5
    assert ended["length"] >= 4
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert found[(f"vllm:{name}_count",)] == 5
    assert found[("vllm:inter_token_latency_seconds_count",)] > 5
    assert found[("vllm:num_requests_running",)] == found[("vllm:num_requests_waiting",)] == 0


@pytest.mark.parametrize("k", [0, 3])
def test_plain_decoding_has_no_figures_of_speculation(make: Any, k: int) -> None:
    client = client_of(make(k=k))
    reply = client.post("/v1/completions", json={"prompt": [40, 41], "max_tokens": 5, "temperature": 0}).json()
    assert ("metrics" in reply) == (k > 0)
    assert (values(client)[("vllm:spec_decode_num_drafts_total",)] > 0) == (k > 0)
