"""A follower ends with the leader's bits, whatever the engine did, and decides nothing itself."""

import dataclasses
import gc
from typing import Any

import jax
import numpy as np
import pytest

from drafter.propose import PEagle
from peagle.drafters.ngram import NGram
from peagle.engine.engine import Engine, EngineConfig
from peagle.engine.lead import CALLS, Follower, Lead
from peagle.engine.programs import Programs
from peagle.engine.request import Request, SamplingParams
from peagle.ops.errors import InputError
from peagle.ops.row_blocks import RowBlocks
from peagle.processes import decode, encode
from tests.drafter.cases import random_params
from tests.peagle.toys import decode as answers
from tests.peagle.toys import drafter_config, tiny_target

CONFIG = EngineConfig(2, slots=2, capacity=256, chunk=64, prefix_cache_bytes=1 << 22, steps_per_dispatch=3)
DRAFTER = drafter_config()


def leaves(*trees: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trees)]


def test_a_follower_ends_with_the_leaders_bits() -> None:
    """Through the wire's own bytes: prefills, steps of every kind, cut ones too, the prefix cache, evictions."""
    target, drafter = tiny_target(aux_layer_ids=(0, 1)), PEagle(random_params(DRAFTER), DRAFTER)
    seen: list[str] = []
    follower = Follower(lambda drafts, _: (target, drafter if drafts else None))

    def send(message: dict[str, Any]) -> None:
        seen.append(message.get("call", "programs"))
        follower.run(decode(encode(message)))

    engine = Engine(target, drafter, CONFIG, lead=Lead(send))
    engine.warm_up(constrained=True)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, target.vocab_size, size).tolist()) for size in (5, 140, 9)]
    sampled = SamplingParams(temperature=0.8, seed=3)
    requests = [Request(prompts[place], size) for place, size in ((0, 12), (2, 7), (1, 4))]
    requests.insert(1, Request(prompts[1], 9, sampled))
    given, _ = answers(engine, requests)
    handle = engine.add(Request(prompts[2], 40))
    while not handle.output_ids:
        engine.step()
    engine.abort(handle)
    engine.step()
    alone, _ = answers(Engine(target, drafter, dataclasses.replace(CONFIG)), requests)
    assert given == alone
    assert set(seen) >= CALLS.keys() - {"absorb", "relearn", "first_not_finite"}
    (programs, _, held) = follower._engines[0]
    assert type(programs) is Programs
    for ours, theirs in zip(leaves(engine._state, engine._lane), leaves(held["state"], held["lane"]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert follower._kept


def test_what_the_prefix_cache_drops_is_dropped_everywhere() -> None:
    """And a drafter that reads tokens alone learns them on both sides."""
    target = tiny_target()
    follower = Follower(lambda drafts, _: (target, NGram() if drafts else None))
    engine = Engine(
        target,
        NGram(),
        dataclasses.replace(CONFIG, slots=1, prefix_cache_bytes=1 << 17, num_speculative_tokens=1),
        lead=Lead(lambda message: follower.run(decode(encode(message)))),
    )
    for start in range(6):
        answers(engine, [Request(tuple((start + i) % 37 for i in range(130)), 2)])
        gc.collect()
    answers(engine, [Request((1, 2, 3), 2)])
    use = engine.prefix_cache_use
    assert use is not None
    assert 0 < len(follower._kept) < follower._num_kept[0] / 2


def test_an_engine_whose_caches_no_process_holds_whole_hands_nothing_over() -> None:
    target = tiny_target()
    lead = Lead(lambda _: None)
    with pytest.raises(InputError, match="neither takes nor hands over"):
        lead.programs(target, None, 1, 64, 0, 8, 1, None).init_lane()
    with pytest.raises(InputError, match="does not prefill at once"):
        lead.programs(target, None, 1, 64, 0, 8, 1, RowBlocks(8, 8))
