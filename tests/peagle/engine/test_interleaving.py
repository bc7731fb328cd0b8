"""Any interleaving of add, abort and step gives each request the tokens it gets alone."""

import collections
import dataclasses
from collections.abc import Sequence
from random import Random
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from peagle.config import SamplingParams
from peagle.drafters.ngram import NGram
from peagle.engine.devices.replicas import Replicas
from peagle.engine.grammar import Grammar, Vocabulary
from peagle.engine.host.engine import Engine
from peagle.engine.host.handle import Handle
from peagle.engine.host.in_flight import InFlight, LoopClock
from peagle.engine.host.scheduler import DispatchTimes
from peagle.engine.memory.kv_memory import KVMemory
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig
from peagle.protocols import Drafter, Target
from tests.support.models import FAST, models
from tests.support.toys import CONFIG, check_whole, decode, drafting_at, stepped, taken

pytestmark = pytest.mark.compile

CAPACITY, LONGEST = 192, 60
TEXT = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 130).tolist()
# the longer ones begin alike: with one page of known tokens, and with two
PROMPTS = [(5,), tuple(TEXT[7:57]), tuple(TEXT[:70]), (*TEXT[:64], 3, 4, 5), tuple(TEXT[:128]), tuple(TEXT)]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(1.0, seed=3),
    SamplingParams(0.7, top_k=9, top_p=0.9, min_p=0.01, frequency_penalty=0.5, repetition_penalty=1.2),
]
# a vocabulary whose last token ends answers of a grammar
STOP = CONFIG.vocab_size - 1
LETTERS = [*(chr(ord("a") + token).encode() for token in range(26)), *(b"ab", b"cd", b"xyz"), *[b""] * (STOP - 29)]
COMPILED = Vocabulary([*LETTERS, b"<stop>"], [STOP]).compile(Grammar.regex("([a-m]{1,3}x|yz){2,14}"))
CONSTRAINED = (SamplingParams(0.9, seed=5, logit_bias=((STOP, -1.0),), presence_penalty=0.3), COMPILED)


def request_of(prompt: int, sampling: int, budget: int, stops: tuple[int, ...] = ()) -> Request:
    """Make a request; the last sampling is that with a grammar."""
    if sampling == len(SAMPLINGS):
        params, grammar = CONSTRAINED
        return Request(PROMPTS[prompt], budget, params, (STOP,), index=prompt, grammar=grammar)
    return Request(PROMPTS[prompt], budget, SAMPLINGS[sampling], stops, index=prompt)


PAGES = 4  # of each group, where three requests may need twelve
Alone: TypeAlias = dict[tuple[int, int], list[int]]  # (prompt, sampling) -> tokens


def decoded_alone(target: Target) -> Alone:
    """Decode each prompt alone and plainly, in each sampling."""
    requests = {
        (prompt, sampling): request_of(prompt, sampling, LONGEST)
        for prompt in range(len(PROMPTS))
        for sampling in range(len(SAMPLINGS) + 1)
    }
    engine = Engine(target, None, ResolvedConfig(0, 1, CAPACITY, prefill_chunk=8))
    return dict(zip(requests, decode(engine, list(requests.values()))[0], strict=True))


# some interleavings must have exercised each of these
EXERCISED = (
    "overlapped", "slot reused", "aborted in flight", "aborted waiting", "resumed", "stopped", "sampled",
    "beside a grammar", "ended by a grammar", "cannot draft", "preempted", "known", "evicted", "page reused",
)  # fmt: skip


class EvenClock(LoopClock):
    """A clock by which dispatches always take the same times."""

    def read(self, sent: InFlight, now: float) -> None:
        super().read(sent, now)
        self.latest = DispatchTimes(chunk_s=1e-3, step_s=1e-4, masked_s=3e-4)


class EvenlyPaced(Engine):
    """An engine whose next action depends on its requests alone: not on how fast it is, nor on what is ready."""

    ready = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._clock = EvenClock()


@pytest.mark.parametrize(
    ("together", "count", "drafter", "kind"),
    [
        pytest.param(1, 1, "ngram", "float32", marks=pytest.mark.slow),
        (5, 1, "P-EAGLE", FAST),
        pytest.param(5, 1, "DFlash", FAST, marks=pytest.mark.slow),
        pytest.param(5, 1, "P-EAGLE", "float32", marks=pytest.mark.slow),
        pytest.param(1, 2, "ngram", "float32", marks=pytest.mark.slow),
    ],
)
def test_any_interleaving_gives_each_request_what_it_gets_alone(
    together: int, count: int, drafter: str, kind: str
) -> None:
    """In one engine, and in two behind one queue, with memory for less than what all slots may hold."""
    pair = models(kind, "DFlash" if drafter == "DFlash" else "P-EAGLE")
    proposer = NGram() if drafter == "ngram" else pair.drafter
    alone, happened = decoded_alone(pair.target), collections.Counter[str]()
    examples, exercised = (14, EXERCISED) if count == 1 else (6, EXERCISED[:-5])
    for number in range(4):  # Hypothesis draws constants of the modules that are loaded, too
        happened += interleave([pair.target] * count, alone, examples, together, proposer, number)
        if all(happened[name] for name in exercised):
            return
    assert not [name for name in exercised if not happened[name]], happened


def happened_in(engine: Engine, happened: collections.Counter[str]) -> None:
    """Count what an engine's pages go through."""
    pool, pages = engine.memory.pool, set[int]()
    reserve = pool.reserve

    def counting(table: Any, num_tokens: int) -> bool:
        before = len(table.pages[0])
        done = reserve(table, num_tokens)
        new = table.pages[0][before:]
        happened["page reused"] += sum(page in pages for page in new)
        pages.update(new)
        happened["evicted"] = max(happened["evicted"], pool.counts.num_evicted)
        return done

    pool.reserve = counting  # type: ignore[method-assign]


def little(target: Target, proposer: Drafter, together: int) -> ResolvedConfig:
    """Make the config of an engine with memory for less than what all slots may hold."""
    page_bytes = KVMemory(target, proposer, ResolvedConfig(3)).page_bytes
    return ResolvedConfig(
        3,
        3,
        CAPACITY,
        prefill_chunk=8,
        steps_per_dispatch=together,
        adaptive=True,
        kv_memory=PAGES * sum(page_bytes),
        prefix_cache=1,  # no memory of its own: known tokens stay where they are until others need it
    )


def test_the_loop_that_overlaps_emits_what_the_plain_one_does() -> None:
    """Greedy and sampled requests, some with a grammar, drafted or not, and preempted."""
    pair, tokens = models(FAST), []
    assert pair.drafter is not None
    requests = [request_of(prompt, sampling, 40) for prompt in range(6) for sampling in range(len(SAMPLINGS) + 1)]
    for step, overlaps in ((Engine.step, True), (Engine.step_in_turn, False)):
        engine = Engine(pair.target, pair.drafter, little(pair.target, pair.drafter, together=5))
        drafting_at(engine, {1: True})
        got: dict[Handle, list[int]] = {handle: [] for handle in engine.add_all(requests)}
        drafted, in_flight = collections.Counter[bool](), 0
        while engine.busy:
            step(engine)
            in_flight += len(engine._in_flight)
            for handle, chunk in taken(got):
                got[handle] += chunk.token_ids
                drafted.update(bool(record.draft_token_ids) for record in chunk.steps)
        assert (in_flight > 0) == overlaps
        assert min(drafted.values()) > 0
        assert len(drafted) == 2
        assert engine.num_preemptions > 0
        tokens.append(list(got.values()))
    assert tokens[0] == tokens[1]


def interleave(
    targets: Sequence[Target], alone: Alone, examples: int, together: int, proposer: Drafter, number: int
) -> collections.Counter[str]:
    """Try interleavings in an engine, or engines behind one queue, of equal targets; count what happened.

    number: other interleavings.
    """
    count, happened = len(targets), collections.Counter[str]()
    config = little(targets[0], proposer, together)
    engines = [drafting_at(EvenlyPaced(target, proposer, config), {1: True}) for target in targets]
    engine = engines[0] if count == 1 else Replicas(engines, dataclasses.replace(config, slots=count * config.slots))

    for one in engines:
        happened_in(one, happened)

    def held_now() -> list[Handle | None]:
        return [dict(one.decoding).get(slot) for one in engines for slot in range(config.slots)]

    class Interleaving(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            for one in engines:
                one.memory.pool.free_cached()  # a case repeated must go the same way
            self.expected: dict[Handle, list[int]] = {}  # the expected tokens
            self.got: dict[Handle, list[int]] = {}
            self.drafted: dict[Handle, list[int]] = {}
            self.last: dict[int, Handle] = {}  # the last request of each slot

        @rule(
            prompt=st.integers(0, len(PROMPTS) - 1),
            sampling=st.integers(0, len(SAMPLINGS)),
            budget=st.integers(1, LONGEST),
            stop=st.none() | st.integers(0, LONGEST - 1),
        )
        def add(self, prompt: int, sampling: int, budget: int, stop: int | None) -> None:
            tokens = alone[prompt, sampling]
            stops = () if stop is None else (tokens[min(stop, len(tokens) - 1)],)
            stops = (STOP,) if sampling == len(SAMPLINGS) else stops
            ends = [number for number, token in enumerate(tokens) if token in stops]
            whole = tokens[: min([budget, *(number + 1 for number in ends[:1])])]
            handle = engine.add(request_of(prompt, sampling, budget, stops))
            self.expected[handle], self.got[handle], self.drafted[handle] = whole, [], []
            happened["sampled"] += sampling > 0

        @rule(most=st.integers(1, 3))
        def draft_at(self, most: int) -> None:
            """Let drafting gain with at most so many slots active, from now on."""
            for one in engines:
                drafting_at(one, {1: True, most + 1: False})

        @precondition(lambda self: any(handle.finished is None for handle in self.expected))
        @rule(random=st.randoms(use_true_random=False))
        def abort(self, random: Random) -> None:
            if random.random() < 0.6:  # else nearly all would be
                return
            alive = [handle for handle in self.expected if handle.finished is None]
            in_flight = [handle for handle in alive if handle.table is not None]
            handle = random.choice(in_flight if in_flight and random.random() < 0.5 else alive)
            happened["aborted in flight" if handle.table is not None else "aborted waiting"] += 1
            engine.abort(handle)
            engine.abort(handle)

        @rule(times=st.integers(1, 12))
        def step(self, times: int) -> None:
            for _ in range(times):
                for handle, chunk in stepped(engine, self.got):
                    self.got[handle] += chunk.token_ids
                    self.drafted[handle] += [len(record.draft_token_ids) for record in chunk.steps]
                held = held_now()
                happened["overlapped"] += sum(handle is not None for handle in held) > 1
                bound = [handle.matcher is not None for handle in held if handle is not None]
                happened["beside a grammar"] += any(bound) and not all(bound)
                for slot, handle in enumerate(held):
                    if handle is not None:
                        happened["slot reused"] += self.last.get(slot, handle) is not handle
                        self.last[slot] = handle

        @invariant()
        def the_state_is_whole(self) -> None:
            for one in engines:
                if one.executor.started:
                    check_whole(one)

        def teardown(self) -> None:
            while engine.busy:
                self.step(1)
            for handle, whole in self.expected.items():
                if handle.finished == "aborted":
                    assert self.got[handle] == whole[: len(self.got[handle])]
                    continue
                assert self.got[handle] == whole
                stopped = whole[-1] in (handle.request.stop_token_ids or ())
                assert handle.finished == ("stop" if stopped else "length")
                happened["stopped"] += handle.finished == "stop"
                happened["ended by a grammar"] += whole[-1] == STOP and handle.matcher is not None
                happened["cannot draft"] += not handle.drafting
                happened["preempted"] += handle.num_preempted > 0
                happened["known"] += handle.num_cached_tokens > 0
                widths = self.drafted[handle]
                rested = [step for step, width in enumerate(widths) if width == 0]
                happened["resumed"] += bool(rested) and any(widths[rested[0] :])

    run_state_machine_as_test(
        seed(number)(Interleaving),
        settings=settings(max_examples=examples, stateful_step_count=30, deadline=None, database=None),
    )
    return happened
