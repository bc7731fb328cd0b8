"""The --json object: the same keys always, null for what is absent, numbers that are numbers."""

import dataclasses
import json
from typing import Any

import pytest

from peagle.cli.document import dumps, report, trace_lines
from peagle.config import EngineConfig
from peagle.engine.speculation import Speculation
from peagle.measure.provenance import TUNING, provenance, tuning
from peagle.ops import jax_cure
from peagle.pair import Pair
from peagle.text.prompts import Conversation, from_ids
from peagle.workflows.run import Outcome, Run, RunConfig, run
from scripts import runs
from tests.support.pairs import MAX_POSITIONS

K = 3
TOP = {"schema", "provenance", "config", "skipped", "profile", "requests", "summary"}
PROVENANCE = {"time", "command", "git", "python", "packages", "platform", "cpu", "num_threads", "device"}
CONFIG = {
    "command", "target", "drafter", "num_speculative_tokens", "adaptive", "costs", "max_new_tokens", "temperature",
    "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "min_tokens", "synthetic_acceptance", "prefill_chunk", "prefill", "kv_memory_bytes",
    "prefix_cache_bytes",
    "retain_full_kv", "seed", "slots", "context", "capacity", "dtype", "experts", "kernels", "mesh", "aux_layers",
    "draft_vocab", "drafter_window", "baseline", "ignore_eos", "logprobs", "grammar", "raw_prompt", "special_tokens",
    "system", "reasoning_effort", "date", "stop_token_ids", "interrupted", "cut_short", "failed",
}  # fmt: skip
REQUEST = {
    "request", "turn", "prompt_ids", "output_ids", "text", "stop", "finish_reason", "num_truncated_tokens", "ttft_s",
    "tok_per_s", "tpot_s", "loop_share", "speculative_decoding", "baseline", "logprobs", "num_cached_tokens",
}  # fmt: skip
SPECULATIVE = {
    "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps", "num_plain_steps",
    "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens", "num_proposed_draft_tokens",
    "num_looked_up_draft_tokens",
}  # fmt: skip
BASELINE = {"output_ids", "ttft_s", "tok_per_s", "first_divergence"}
SUMMARY = {
    "num_requests", "num_prompt_tokens", "num_output_tokens", "num_truncated_tokens", "num_spec_steps",
    "num_plain_steps",
    "num_draft_tokens", "num_accepted_draft_tokens", "acceptance_histogram", "acceptance_length",
    "num_proposed_draft_tokens", "num_looked_up_draft_tokens",
    "acceptance_length_without_loops",
    "acceptance_rate_per_position", "conditional_rate_per_position", "loop_share", "looping_requests_frac", "tok_per_s",
    "baseline_tok_per_s", "speedup",
    "speedup_median", "num_diverged_requests", "ttft_s", "compile_s", "host_gap_frac", "peak_memory_bytes",
    "prefix_cache",
}  # fmt: skip
NAMES: dict[str, str | None] = {"command": "speculate", "target": "demo", "drafter": "ngram"}


def document(pair: Pair, config: RunConfig, done: Run) -> dict[str, Any]:
    """The object as a reader gets it: strict JSON there and back."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    text = dumps(report(done, pair, config, NAMES, provenance(["speculate", "-k", "3"]), None))
    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return RunConfig(engine=EngineConfig(K), max_new_tokens=12)


def test_speculation_has_every_key(toy: Pair, config: RunConfig) -> None:
    done = run(toy, [from_ids([50]), Conversation("chat", turns=("a", "b"), numbered=True)], config)
    value = document(toy, config, done)
    assert value["schema"] == 1
    assert set(value) == TOP
    assert set(value["provenance"]) == PROVENANCE
    assert value["provenance"]["command"] == [*tuning(), "peagle", "speculate", "-k", "3"]
    assert set(value["config"]) == CONFIG
    assert set(value["summary"]) == SUMMARY
    assert [request["turn"] for request in value["requests"]] == [None, 0, 1]
    for request in value["requests"]:
        assert set(request) == REQUEST
        assert set(request["speculative_decoding"]) == SPECULATIVE
        assert len(request["speculative_decoding"]["acceptance_histogram"]) == K + 1
        assert set(request["baseline"]) == BASELINE
        assert request["baseline"]["output_ids"] == request["output_ids"]
        assert request["baseline"]["first_divergence"] is None
        assert request["logprobs"] is None
    assert len(value["summary"]["acceptance_rate_per_position"]) == K
    assert value["summary"]["speedup"] == pytest.approx(
        value["summary"]["tok_per_s"] / value["summary"]["baseline_tok_per_s"]
    )


def test_plain_decoding_has_the_same_keys_with_nulls(toy: Pair, config: RunConfig) -> None:
    config = dataclasses.replace(config, engine=EngineConfig(0), logprobs=2)
    value = document(toy, config, run(toy, [from_ids([50])], config))
    (request,) = value["requests"]
    assert (set(value["config"]), set(value["summary"]), set(request)) == (CONFIG, SUMMARY, REQUEST)
    assert request["speculative_decoding"] is None
    assert request["baseline"] is None
    assert value["summary"]["acceptance_length"] is None
    assert len(request["logprobs"]) == len(request["output_ids"])
    assert [set(token) for token in request["logprobs"]] == [{"id", "logprob", "top"}] * len(request["logprobs"])
    assert all(len(pair) == 2 for token in request["logprobs"] for pair in token["top"])


def test_one_token_has_no_speed_and_no_steps(toy: Pair, config: RunConfig) -> None:
    value = document(toy, config, run(toy, [from_ids([50] * (MAX_POSITIONS - 1))], config))
    (request,) = value["requests"]
    assert len(request["output_ids"]) == 1
    assert request["tok_per_s"] is None
    assert request["speculative_decoding"]["num_spec_steps"] == 0
    assert request["speculative_decoding"]["mean_acceptance_length"] is None
    assert value["summary"]["speedup"] is None


def test_a_run_interrupted_before_anything_is_still_an_object(toy: Pair, config: RunConfig) -> None:
    value = document(toy, config, Run([], capacity=128, interrupted=True))
    assert value["requests"] == []
    assert set(value["summary"]) == SUMMARY
    assert value["config"]["interrupted"] is True


def test_a_request_that_was_cut_off_is_called_interrupted(toy: Pair, config: RunConfig) -> None:
    done = run(toy, [from_ids([50])], config)
    cut = dataclasses.replace(done.outcomes[0].result, finish_reason=None)
    value = document(toy, config, dataclasses.replace(done, outcomes=[Outcome(cut, None)], interrupted=True))
    assert [request["finish_reason"] for request in value["requests"]] == ["interrupted"]


def test_an_adaptive_run_tells_what_it_went_by(toy: Pair, config: RunConfig) -> None:
    config = dataclasses.replace(config, engine=EngineConfig("auto"))
    done = run(dataclasses.replace(toy, speculation=Speculation(K)), [from_ids([50])], config)
    assert done.costs is not None
    value = document(toy, config, done)
    assert set(value["config"]) == CONFIG
    assert value["config"]["costs"] == json.loads(json.dumps(done.costs.to_json()))


def test_the_trace_tells_the_output_again(toy: Pair, config: RunConfig) -> None:
    """Replaying the trace of a request gives its output, cut at the budget; lengths are of what is cached."""
    done = run(toy, [from_ids([50, 51]), from_ids([52])], dataclasses.replace(config, engine=EngineConfig(K, slots=2)))
    lines = [json.loads(line) for line in trace_lines(done)]
    assert {tuple(line) for line in lines} == {
        ("request", "step", "length", "draft_token_ids", "num_accepted", "next_token", "num_drafted", "source")
    }
    for outcome in done.outcomes:
        output = outcome.result.output_ids
        own = [line for line in lines if line["request"] == outcome.result.request.index]
        assert [line["step"] for line in own] == list(range(len(own)))
        replayed = [output[0]]
        for line in own:
            assert len(replayed) < len(output)  # no step past the end
            assert line["length"] == len(outcome.result.request.prompt_ids) + len(replayed) - 1
            replayed += [*line["draft_token_ids"][: line["num_accepted"]], line["next_token"]]
        assert tuple(replayed[: len(output)]) == output


def test_a_command_names_what_the_environment_changes_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TUNING:
        monkeypatch.delenv(name, raising=False)
    plain = ["peagle", "speculate"]
    assert provenance(["speculate"])["command"] == plain
    monkeypatch.setenv("XLA_FLAGS", jax_cure.FLAG)
    assert provenance(["speculate"])["command"] == plain, "every process has it"
    monkeypatch.setenv("XLA_FLAGS", f"--first=1 --second=2 {jax_cure.FLAG}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert provenance(["speculate"])["command"] == ["XLA_FLAGS='--first=1 --second=2'", "OMP_NUM_THREADS=1", *plain]
    shown = runs.origin("scripts.some", ["two words"])["command"]
    assert shown == "XLA_FLAGS='--first=1 --second=2' OMP_NUM_THREADS=1 python -m scripts.some 'two words'"


def test_provenance_names_no_place_and_no_host() -> None:
    import os
    import platform

    text = json.dumps(provenance(["speculate"]))
    assert platform.node() not in text or len(platform.node()) < 4
    assert os.getcwd() not in text
