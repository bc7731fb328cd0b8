"""The --json object: the same keys always, null for what is absent, numbers that are numbers."""

import dataclasses
import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest

from peagle.base import jax_workaround
from peagle.config import EngineConfig
from peagle.measure.provenance import TUNING, provenance, tuning
from peagle.pair import Pair, RequestOptions
from peagle.text.prompts import Conversation, from_ids
from peagle.workflows.run import Run, RunConfig, run
from peagle.workflows.run_report import dumps, report, trace_lines
from scripts import runs
from tests.support.pairs import MAX_POSITIONS

K = 3
RECORDED = json.loads((Path(__file__).parent / "recorded" / "document.json").read_text())
NAMES: dict[str, str | None] = {"command": "speculate", "target": "demo", "drafter": "ngram"}


def document(pair: Pair, config: RunConfig, done: Run) -> dict[str, Any]:
    """The object as a reader gets it: strict JSON there and back."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    text = dumps(report(done, pair, config, NAMES, provenance(["speculate", "-k", "3"]), None))
    return json.loads(text, parse_constant=refuse)


def kinds(value: Any) -> Any:
    """Replace values by their kinds, and lists by their first item's."""
    if isinstance(value, dict):
        return {key: kinds(item) for key, item in value.items()}
    if isinstance(value, list):
        return [kinds(item) for item in value[:1]]
    return "number" if type(value) in (int, float) else type(value).__name__


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return RunConfig(answer=RequestOptions(max_new_tokens=12), engine=EngineConfig(K))


def test_speculation_has_every_key(toy: Pair, config: RunConfig) -> None:
    done = run(toy, [Conversation("chat", turns=("a", "b"), numbered=True), from_ids([50])], config)
    value = document(toy, config, done)
    assert value["provenance"].keys() == {*RECORDED["provenance"]}
    assert value["provenance"]["command"] == [*tuning(), "peagle", "speculate", "-k", "3"]
    assert kinds({**value, "provenance": None}) == RECORDED["speculation"]
    assert [request["turn"] for request in value["requests"]] == [0, 1, None]
    for request in value["requests"]:
        assert kinds({**request, "turn": 0}) == RECORDED["speculation"]["requests"][0]
        assert len(request["speculative_decoding"]["acceptance_histogram"]) == K + 1
        assert request["baseline"]["output_ids"] == request["output_ids"]
    summary = value["summary"]
    assert len(summary["acceptance_rate_per_position"]) == K
    assert summary["speedup"] == pytest.approx(summary["tok_per_s"] / summary["baseline_tok_per_s"])


def test_plain_decoding_has_the_same_keys_with_nulls(toy: Pair, config: RunConfig) -> None:
    config = RunConfig(answer=RequestOptions(max_new_tokens=12, logprobs=2), engine=EngineConfig(0))
    value = document(toy, config, run(toy, [from_ids([50])], config))
    (request,), speculation = value["requests"], RECORDED["speculation"]
    assert value["config"].keys() == speculation["config"].keys()
    assert value["summary"].keys() == speculation["summary"].keys()
    assert request.keys() == speculation["requests"][0].keys()
    assert request["speculative_decoding"] is request["baseline"] is value["summary"]["acceptance_length"] is None
    assert len(request["logprobs"]) == len(request["output_ids"])
    assert kinds(request["logprobs"]) == [{"id": "number", "logprob": "number", "top": [["number"]]}]
    assert all(len(pair) == 2 for token in request["logprobs"] for pair in token["top"])


def test_one_token_has_no_speed_and_no_steps(toy: Pair, config: RunConfig) -> None:
    value = document(toy, config, run(toy, [from_ids([50] * (MAX_POSITIONS - 1))], config))
    (request,) = value["requests"]
    assert len(request["output_ids"]) == 1
    assert request["tok_per_s"] is None
    assert request["speculative_decoding"]["num_spec_steps"] == 0
    assert request["speculative_decoding"]["mean_acceptance_length"] is None
    assert value["summary"]["speedup"] is None


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


def test_a_command_names_what_the_environment_changes_about_it_but_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TUNING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XLA_FLAGS", f"--first=1 --second=2 {jax_workaround.FLAG}")  # the last: every process has it
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    told = ["XLA_FLAGS='--first=1 --second=2'", "OMP_NUM_THREADS=1"]
    assert provenance(["speculate"])["command"] == [*told, "peagle", "speculate"]
    shown = runs.origin("scripts.some", ["two words"])["command"]
    assert shown == f"{' '.join(told)} python -m scripts.some 'two words'"
    text = json.dumps(provenance(["speculate"]))
    assert platform.node() not in text or len(platform.node()) < 4
    assert os.getcwd() not in text
