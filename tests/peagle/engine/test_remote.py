"""A worker ends with the coordinator's bits, whatever the engine did, and decides nothing itself."""

import dataclasses
from typing import Any
from unittest.mock import create_autospec

import jax
import numpy as np
import pytest

from peagle.base.errors import InputError
from peagle.config import SamplingParams
from peagle.drafters.ngram import NGram
from peagle.engine.devices.remote import VERBS, Coordinator, Worker
from peagle.engine.host import handoff
from peagle.engine.host.engine import Engine
from peagle.engine.host.executor import Executor
from peagle.engine.memory.kv_memory import KVMemory
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig
from peagle.parallel.processes import decode, encode
from tests.peagle.engine.test_interleaving import COMPILED, STOP
from tests.support.models import models
from tests.support.toys import decode as answers
from tests.support.toys import drafting_at, tiny_target

pytestmark = pytest.mark.compile

CONFIG = ResolvedConfig(2, slots=2, context=256, prefill_chunk=64, prefix_cache=1 << 20, steps_per_dispatch=3)


@pytest.mark.parametrize("kind", ["P-EAGLE", pytest.param("ngram", marks=pytest.mark.slow)])
def test_a_worker_ends_with_the_coordinators_bits(kind: str) -> None:
    """Through the wire's own bytes: prompts, steps of every kind, split ones too, known pages, an abort."""
    pair = models()
    target, (drafter, lookup) = pair.target, (pair.drafter, NGram()) if kind == "P-EAGLE" else (NGram(), None)
    config = dataclasses.replace(CONFIG, adaptive=True)
    verbs: list[str] = []
    worker = Worker(lambda drafts: (target, drafter if drafts else None), lookup)

    def send(message: dict[str, Any]) -> None:
        verbs.append(message.get("verb", "executor"))
        worker.run(decode(encode(message)))

    engine = Engine(target, drafter, config, make_executor=Coordinator(send).executor, lookup=lookup)
    engine.warm_up(constrained=True)
    drafting_at(engine, {1: True, 2: False})
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, target.vocab_size, size).tolist()) for size in (5, 140, 9)]
    sampled = SamplingParams(temperature=0.8, seed=3)
    requests = [Request(prompts[number], size) for number, size in ((0, 12), (2, 7), (1, 4))]
    requests.insert(1, Request(prompts[1], 9, sampled))
    requests.append(Request(prompts[0], 12, stop_token_ids=(STOP,), grammar=COMPILED))
    tokens, _ = answers(engine, requests)
    handle = engine.add(Request(prompts[2], 40))
    while not handle.output_ids:
        engine.step()
    engine.abort(handle)
    engine.step()
    alone, _ = answers(drafting_at(Engine(target, drafter, config, lookup=lookup), {1: True, 2: False}), requests)
    assert tokens == alone
    assert engine.prefix_cache_use is not None
    assert engine.prefix_cache_use.num_hits > 0
    assert set(verbs) >= set(VERBS) - {"first_not_finite"}
    (theirs,) = worker.executors.values()
    assert type(theirs) is Executor
    worker.settle()
    for ours, other in zip(jax.tree.leaves(engine.executor.state), jax.tree.leaves(theirs.state), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(other))


def test_an_engine_whose_pages_no_process_holds_whole_takes_no_hand_offs() -> None:
    target, coordinator = tiny_target(), Coordinator(lambda _: None)
    executor = coordinator.executor(target, None, ResolvedConfig(context=64))
    memory, message = (create_autospec(kind, instance=True) for kind in (KVMemory, handoff.HandOff))
    with pytest.raises(InputError, match="takes no hand-offs"):
        handoff.check(executor, memory, 64, handoff.Fingerprints(), message)
