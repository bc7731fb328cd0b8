"""The comparison with peers: all get the same tokens, ratios follow from lines, a peer that fails is one line."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peagle.loading.checkpoints import DEMO, DEMO_EAGLE3, resolve
from scripts.peers import ours
from scripts.scenarios import peers
from scripts.scenarios.peers import (
    OURS,
    PLAIN,
    VLLM,
    Site,
    entry,
    random_prompts,
)

pytestmark = pytest.mark.compile

OPTIONS = argparse.Namespace(prompt_tokens=16, new_tokens=11, rounds=3, requests=[1, 3])
DRIFT = {1: 1.0, 2: 3.0, 3: 1.5}  # of the machine, by round: ratios within a round do not see it
PROMPTS = random_prompts(89, OPTIONS)
DRAFTERS = {"p-eagle": "/drafter", "eagle3": "/drafter", "ngram": "ngram"}
SITE = Site(Path("small"), Path("scratch"), PROMPTS, 64, drafters=DRAFTERS, vllm_python="python")


def test_prompts_are_the_same_for_every_engine_and_differ() -> None:
    assert random_prompts(89, OPTIONS) == PROMPTS
    assert random_prompts(89, argparse.Namespace(**{**vars(OPTIONS), "requests": [1]})) == PROMPTS[:1]
    assert len({tuple(prompt) for prompt in PROMPTS}) == 3


def fake_lines() -> Iterator[dict[str, Any]]:
    factors = {(OURS, PLAIN): 1.0, (VLLM, PLAIN): 4.0, (OURS, "p-eagle, K = 5"): 2.0, (VLLM, "p-eagle, K = 5"): 3.0}
    for number, drift in DRIFT.items():
        for (engine, drafts), factor in factors.items():
            rate = 600 / factor / drift
            line = {"model": "M", "engine": engine, "drafts": drafts, "round": number, "requests": 4}
            line |= {"tok_per_s": rate, "prefill_tok_per_s": 2 * rate, "equal_frac": 1 / number}
            yield line | {"step_ms": factor * drift, "tokens_a_step": 1.0}


def test_ratios_are_taken_within_a_round() -> None:
    entries = [entry(name, SITE) for name in (OURS, VLLM)]
    entries += [entry(name, SITE, "p-eagle", 5) for name in (OURS, VLLM)]
    own, vllm, own_drafted, drafted = peers.rows_of(list(fake_lines()), entries)
    assert own["tok_per_s"] == {"median": 400, "lowest": 200, "highest": 600}
    assert "ours_over_peer" not in own
    assert vllm["ours_over_peer"] == vllm["ours_over_peer_prefill"] == {"median": 4, "lowest": 4, "highest": 4}
    assert (drafted["ours_over_peer"]["median"], drafted["over_plain"]["median"]) == pytest.approx((1.5, 4 / 3))
    assert (own_drafted["over_plain"]["median"], own_drafted["equal_frac"]) == (0.5, pytest.approx(1 / 3))


def test_requests_get_the_same_tokens_together_alone_and_with_drafts() -> None:
    engine = ours.load(str(resolve(DEMO, "target")), 128, "auto", drafter=str(resolve(DEMO_EAGLE3, "drafter")))
    together = engine.decode(PROMPTS, 20, [])
    assert together["decode_s"] > 0
    assert together["steps"] == 19
    assert together["token_ids"] == [engine.decode([prompt], 20, [])["token_ids"][0] for prompt in PROMPTS]
    drafted = engine.decode(PROMPTS, 20, [], num_drafts=3)
    assert drafted["token_ids"] == together["token_ids"]
    assert drafted["steps"] < 19
    stop = together["token_ids"][0][5]
    (stopped,) = engine.decode(PROMPTS[:1], 20, [stop])["token_ids"]
    assert stopped[-1] == stop
    assert stopped == together["token_ids"][0][: len(stopped)]
