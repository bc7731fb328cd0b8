"""The pair that comes with the package: small, whole, and lossless on prompts it was never trained on."""

import dataclasses
import json

import jax
import pytest

import peagle.pair
from peagle.config import SpeculationConfig
from peagle.generate import Request
from peagle.ops import native
from peagle.pair import DEMO_DIRECTORY, Pair
from peagle.prompts import read_prompt_file
from peagle.session import Run, RunConfig, run


@pytest.fixture(scope="module")
def demo() -> Pair:
    return peagle.pair.load()


@pytest.fixture(scope="module")
def answers(demo: Pair) -> Run:
    conversations = read_prompt_file(DEMO_DIRECTORY / "heldout_prompts.jsonl")[:6]
    return run(demo, conversations, RunConfig(num_speculative_tokens=3, max_new_tokens=48))


def test_it_is_small_and_has_a_card() -> None:
    size = sum(path.stat().st_size for path in DEMO_DIRECTORY.rglob("*") if path.is_file())
    assert size < 30e6
    card = (DEMO_DIRECTORY / "README.md").read_text(encoding="utf-8")
    assert all(word in card for word in ("Held out", "Recipe", "Acceptance", "without loops"))


def test_held_out_prompts_are_many_and_of_whole_modules() -> None:
    lines = (DEMO_DIRECTORY / "heldout_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) >= 100
    card = (DEMO_DIRECTORY / "README.md").read_text(encoding="utf-8")
    assert all(record["module"] in card for record in records)


def test_speculation_says_what_plain_decoding_says(answers: Run) -> None:
    for outcome in answers.outcomes:
        # passes of different width may round a tie apart, and nothing more
        assert outcome.first_divergence is None or outcome.first_divergence.margin < 1e-3


@pytest.mark.skipif(not native.available(), reason="no native kernels: " + native.status()[1])
@pytest.mark.parametrize("together", [1, 4])
def test_steps_keep_no_copy_of_weights_or_caches(demo: Pair, together: int) -> None:
    engine = demo.engine(SpeculationConfig(3, capacity=512))
    engine = dataclasses.replace(engine, steps_per_dispatch=together)
    requests = [Request(0, (5, 6, 7), 20)]
    state, _ = engine._start(requests, 32)
    memory = engine.compiled(requests).memory_analysis()
    largest = max(leaf.nbytes for leaf in jax.tree.leaves((engine.target, state.target_cache)))
    assert memory.temp_size_in_bytes < min(largest, state.target_cache[1].key.nbytes)


def test_the_drafter_is_of_use(answers: Run) -> None:
    accepted = sum(outcome.result.counters.num_accepted for outcome in answers.outcomes)
    steps = sum(outcome.result.counters.num_steps for outcome in answers.outcomes)
    assert 1 + accepted / steps > 1.2


def test_answers_are_text_in_python(answers: Run) -> None:
    texts = [outcome.result.text or "" for outcome in answers.outcomes]
    assert all("<|" not in text for text in texts)
    assert any(outcome.result.finish_reason == "stop" for outcome in answers.outcomes)
    assert any("return " in text for text in texts)
