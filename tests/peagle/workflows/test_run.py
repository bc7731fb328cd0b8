"""Whole runs: order, history, slots, baseline, and the outcomes of interrupted runs."""

import dataclasses
import itertools
import signal
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from peagle.answers.result import Result, decode
from peagle.base import interrupt
from peagle.base.errors import InputError
from peagle.config import EngineConfig, SamplingParams
from peagle.engine.auto import measure
from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.grammar import GrammarError
from peagle.engine.host.engine import Engine
from peagle.engine.host.handle import Handle
from peagle.engine.host.programs import trace_counts
from peagle.engine.request import Request
from peagle.measure.logprobs import output_logprobs
from peagle.pair import Pair, RequestOptions
from peagle.text.prompts import Conversation, Rendering, from_ids, from_text
from peagle.text.tokenizer import Tokenizer
from peagle.workflows import run as workflows_run
from peagle.workflows.run import MOST_ROUNDS, Observer, Outcome, Run, RunConfig, run
from tests.support.pairs import MAX_POSITIONS, STOP, VOCAB_SIZE, ToyTarget, toy_pair

pytestmark = pytest.mark.compile

K, NEW = 3, 12
ANSWER = RequestOptions(max_new_tokens=NEW)
CONFIG = RunConfig(answer=ANSWER, engine=EngineConfig(K))
CHAT = Conversation("chat", turns=("one", "two", "three"), numbered=True)
slots_of_both_ways = pytest.mark.parametrize("slots", [1, 3])  # one conversation after the other; side by side


def with_engine(**options: Any) -> RunConfig:
    return dataclasses.replace(CONFIG, engine=dataclasses.replace(CONFIG.engine, **options))


def ids(run: Run) -> list[tuple[int, ...]]:
    return [outcome.result.output_ids for outcome in run.outcomes]


def only(pair: Pair, config: RunConfig = CONFIG, prompt: Sequence[int] = (50,)) -> Outcome:
    """Run one prompt."""
    (outcome,) = run(pair, [from_ids(list(prompt))], config).outcomes
    return outcome


class Watcher:
    """Record the calls of a run, and call back with each piece."""

    def __init__(self, callback: Callable[[Request], None] = lambda _: None) -> None:
        self.order: list[str] = []
        self.text: dict[int, str] = {}
        self.callback = callback
        self.observer = Observer(self.stage, emitted=self.emitted)

    def stage(self, stage: str, *_: int) -> None:
        self.order += {"decoding": ["fast"], "comparing": ["plain"]}.get(stage, [])

    def emitted(self, request: Request, token_ids: Sequence[int], text: str, _: Sequence[tuple[str, int]]) -> None:
        self.text[request.index] = self.text.get(request.index, "") + text
        if token_ids:
            self.callback(request)


# Order, turns and slots


def test_results_come_in_the_order_of_the_input_with_their_turns(toy: Pair) -> None:
    watcher = Watcher()
    done = run(toy, [from_ids([50]), CHAT, from_text("solo")], CONFIG, watcher.observer)
    assert [outcome.result.request.index for outcome in done.outcomes] == [0, 1, 2, 3, 4]
    assert [outcome.turn for outcome in done.outcomes] == [None, 0, 1, 2, None]
    assert watcher.text == {outcome.result.request.index: outcome.result.text for outcome in done.outcomes}
    assert not done.interrupted
    assert all(len(output) == NEW for output in ids(done))


def test_a_turn_has_the_answers_of_this_run_in_its_prompt(toy: Pair) -> None:
    first, second, third = run(toy, [CHAT], CONFIG).outcomes
    answers = [first.result.text or "", second.result.text or ""]
    assert all(answers)
    assert first.result.request.prompt_ids == CHAT.encode([], toy.tokenizer, Rendering())
    assert third.result.request.prompt_ids == CHAT.encode(answers, toy.tokenizer, Rendering())


def test_conversations_go_on_while_others_are_at_their_first_turn(toy: Pair) -> None:
    """Three first turns in two slots: the third keeps no slot empty. The answers are those of one slot."""
    conversations = [CHAT, dataclasses.replace(CHAT, turns=("a", "b", "c")), from_ids([50])]
    together = run(toy, conversations, with_engine(slots=2))
    assert ids(together) == ids(run(toy, conversations, CONFIG))
    assert [outcome.turn for outcome in together.outcomes] == [0, 1, 2, 0, 1, 2, None]
    assert all(outcome.baseline is not None for outcome in together.outcomes)
    assert all(outcome.first_divergence is None for outcome in together.outcomes)
    results = [outcome.result for outcome in together.outcomes]
    assert min(results[1].first_s or 0.0, results[4].first_s or 0.0) < (results[6].last_s or 0.0)


@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_conversation_that_outgrows_the_positions_keeps_what_it_has_and_stops_nobody(toy: Pair, slots: int) -> None:
    """The three prompts fit; with the answers between them, the third does not."""
    long = Conversation("long", turns=("a" * 90, "b" * 90, "c" * 90), numbered=True)
    config = RunConfig(answer=RequestOptions(max_new_tokens=60), engine=EngineConfig(K, slots))
    done = run(toy, [from_ids([50]), long, CHAT], config)
    turns = [(outcome.result.request.index, outcome.turn) for outcome in done.outcomes]
    begun = [turn for index, turn in turns if 1 <= index <= 3]
    assert begun == list(range(len(begun)))
    assert 1 <= len(begun) < 3
    assert [index for index, _ in turns if index > 3 or index == 0] == [0, 4, 5, 6]
    (line,) = done.cut_short
    assert f"turn {len(begun) + 1} of 3 was not run" in line
    assert "long" in line


def test_an_answer_that_the_context_ends_is_told_in_the_words_of_the_engine(toy: Pair) -> None:
    answer = RequestOptions(max_new_tokens=300, ignore_eos=True)
    done = run(toy, [from_ids([50])], RunConfig(answer=answer, engine=EngineConfig(K, context=16), baseline=False))
    (line,) = done.cut_short
    assert "1 tokens and at most 300 new ones; expected a sum of at most 16, the context" in line


@slots_of_both_ways
def test_a_grammar_that_cannot_be_followed_ends_its_own_conversation(
    toy: Pair, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, config = Conversation("bad", turns=("x", "y"), numbered=True), with_engine(slots=slots)
    expected = run(toy, [from_ids([50]), CHAT], CONFIG)
    handles: list[tuple[Engine, Handle]] = []
    add = Engine.add

    def adding(engine: Engine, request: Request) -> Handle:
        handles.append((engine, add(engine, request)))
        return handles[-1][1]

    def fail(request: Request) -> None:
        for engine, handle in handles:
            if handle.request is request and request.name == "bad" and handle.finished is None:
                engine.finish(handle, "error", GrammarError("bad: no text follows"))

    monkeypatch.setattr(Engine, "add", adding)
    done = run(toy, [from_ids([50]), bad, CHAT], config, Watcher(fail).observer)
    assert done.failed == ("bad: no text follows",)
    assert [outcome.result.request.index for outcome in done.outcomes] == [0, 1, 3, 4, 5]
    assert done.outcomes.pop(1).result.error == "bad: no text follows"
    assert ids(done) == ids(expected)


@slots_of_both_ways
def test_turns_begin_with_those_before_them_and_say_the_same(toy: Pair, slots: int) -> None:
    """By default if there are several requests; 0 turns it off, and one request has nothing to begin with."""
    # a first turn fills a page
    conversations = [dataclasses.replace(CHAT, turns=(letter * 60, "two", "three")) for letter in "ab"]
    cold = run(toy, conversations, with_engine(slots=slots, prefix_cache=0))
    warm = run(toy, conversations, with_engine(slots=slots))
    assert ids(warm) == ids(cold)
    assert cold.prefix_cache is None
    assert warm.prefix_cache is not None
    assert warm.prefix_cache.num_hits >= 4
    cached = [outcome.result.num_cached_tokens for outcome in warm.outcomes]
    assert cached[0] == 0
    assert min(*cached[1:3], *cached[4:]) > 0
    assert sum(cached) == warm.prefix_cache.num_hit_tokens
    assert run(toy, [from_text("solo")], CONFIG).prefix_cache is None


def test_a_prompt_that_is_prefilled_whole_begins_after_its_known_tokens(pair: Pair) -> None:
    prompt = [5 + place % 7 for place in range(70)]
    prompts = [from_ids([*prompt, last]) for last in (3, 4)]
    answer = RequestOptions(max_new_tokens=NEW, ignore_eos=True)
    config = RunConfig(answer=answer, engine=EngineConfig(K, prefill_chunk="all"), baseline=False)
    without = dataclasses.replace(config.engine, prefix_cache="off")
    cold = run(pair, prompts, dataclasses.replace(config, engine=without))
    warm = run(pair, prompts, config)
    assert [outcome.result.num_cached_tokens for outcome in warm.outcomes] == [0, 64]
    assert ids(warm) == ids(cold)


# The baseline, and what is measured


def test_plain_decoding_runs_beside_it_first_and_second_in_turn(toy: Pair) -> None:
    watcher = Watcher()
    done = run(toy, [from_ids([i]) for i in (50, 51, 52)], CONFIG, watcher.observer)
    assert watcher.order == ["fast", "plain", "plain", "fast", "fast", "plain"]
    for outcome in done.outcomes:
        assert outcome.baseline is not None
        assert outcome.baseline.output_ids == outcome.result.output_ids
        assert outcome.baseline.num_speculative_tokens == 0
        assert outcome.first_divergence is None
    assert only(toy, dataclasses.replace(CONFIG, baseline=False)).baseline is None


@pytest.mark.parametrize(
    ("tick_s", "compare_s", "first", "count"),
    [
        (0.0, 2.0, True, MOST_ROUNDS),
        (0.0, 0.0, False, 1),  # not asked for
        (1.0, 2.0, False, 1),  # a slow model: one round is all there is time for
    ],
)
def test_a_single_request_is_compared_in_further_rounds_while_they_fit(
    toy: Pair, monkeypatch: pytest.MonkeyPatch, tick_s: float, compare_s: float, first: bool, count: int
) -> None:
    """By a fake clock, which each look moves on. Further rounds replace the first, and each way begins in turn."""
    only(toy)  # compiles
    looks, order = itertools.count(), list[int]()

    def spy(engine: AnyEngine, *others: Any) -> list[Result]:
        order.append(engine.config.num_drafts)
        return decode(engine, *others)

    monkeypatch.setattr("time.perf_counter", lambda: (tick_s + 1e-6) * next(looks))
    monkeypatch.setattr(workflows_run, "decode", spy)
    outcome = only(toy, dataclasses.replace(CONFIG, compare_s=compare_s))
    rounds = outcome.rounds
    assert [one.plain_first for one in rounds] == [(number % 2 == 0) == first for number in range(count)]
    further = [k for one in rounds for k in ((0, K) if one.plain_first else (K, 0))] if count > 1 else []
    assert order == [0, *further]
    for one in rounds:
        assert one.result.output_ids == one.baseline.output_ids == outcome.result.output_ids
        assert (one.result.num_speculative_tokens, one.baseline.num_speculative_tokens) == (K, 0)
    assert outcome.median_round.speedup == sorted(one.speedup or 0 for one in rounds)[(count - 1) // 2]


def test_several_requests_have_one_round_each(toy: Pair) -> None:
    done = run(toy, [from_ids([50]), from_ids([51])], dataclasses.replace(CONFIG, compare_s=60.0))
    assert [[one.plain_first for one in outcome.rounds] for outcome in done.outcomes] == [[False], [True]]


def test_a_divergence_is_reported_with_the_margin_there(toy: Pair) -> None:
    """A plain target that differs in one row: outputs diverge after the token of that row."""
    output_ids = only(toy).result.output_ids
    assert isinstance(toy.target, ToyTarget)
    last = output_ids[3]
    assert last not in output_ids[:3]
    table = np.array(toy.target.table)
    other = int(np.argsort(table[last])[-2])
    table[last, other] = table[last].max() + 0.25
    divergence = only(dataclasses.replace(toy, plain_target=ToyTarget(jnp.asarray(table)))).first_divergence
    assert divergence is not None
    assert divergence.index == 4
    assert divergence.margin == pytest.approx(0.25, abs=1e-4)


def test_compilation_is_told_apart_from_running(toy: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a fake clock: compiling a program takes 1000 s, reading the clock a millisecond."""
    looks, config = itertools.count(), with_engine(context=77)  # a shape that no other test has
    monkeypatch.setattr("time.perf_counter", lambda: 1000.0 * sum(trace_counts().values()) + 1e-3 * next(looks))
    done, again = (run(toy, [from_ids([prompt])], config) for prompt in (50, 51))
    assert done.compile_s >= 1000
    assert again.compile_s == 0.0  # the same shape: nothing was left to do
    ttft_s = done.outcomes[0].result.ttft_s
    assert ttft_s is not None
    assert 0 < ttft_s < 1


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_measuring_what_drafting_costs_compiles_nothing(
    toy: Pair, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    measure_costs, counts = measure.measure_costs, []

    def counting(*operands: Any) -> dict[int, float]:
        counts.append(trace_counts())
        costs = measure_costs(*operands)
        counts.append(trace_counts())
        return costs

    monkeypatch.setattr("peagle.engine.auto.measure.measure_costs", counting)
    context = 78 + round(temperature)  # a shape that no other test has
    config = with_engine(num_speculative_tokens="auto", context=context)
    pair = dataclasses.replace(toy, auto_drafts=2)
    only(pair, dataclasses.replace(config, sampling=SamplingParams(temperature)))
    before, after = counts
    assert before == after


def test_tokens_of_a_dispatch_are_observed_at_once(tokenizer: Tokenizer) -> None:
    """The tokens of a dispatch have one time, and are those of single steps."""
    config = dataclasses.replace(CONFIG, baseline=False)
    single, several = (
        only(dataclasses.replace(toy_pair(tokenizer), steps_per_dispatch=steps), config).result for steps in (1, 4)
    )
    assert (several.output_ids, several.steps) == (single.output_ids, single.steps)
    assert len(single.times_s) == 1 + len(single.steps)
    assert len(several.times_s) == 1 + -(-len(several.steps) // 4)
    assert list(several.times_s) == sorted(set(several.times_s))


# Interrupted runs


@pytest.mark.parametrize("slots", [1, 2])
def test_ctrl_c_is_a_flag_that_the_next_dispatch_finds(toy: Pair, slots: int) -> None:
    """Dispatches in flight are dropped, and the engines stay intact: the same run then finishes."""
    conversations, config = [from_ids([prompt]) for prompt in (50, 51, 52)], with_engine(slots=slots)
    whole = run(toy, conversations, config)

    def press(_: Request) -> None:
        if len(watcher.text) == slots and not interrupt.pressed():
            signal.raise_signal(signal.SIGINT)

    watcher = Watcher(press)
    with interrupt.handled():
        cut = run(toy, conversations, config, watcher.observer)
        assert interrupt.pressed()
    assert cut.interrupted
    assert len(cut.outcomes) == slots  # those that waited for a slot are not there
    assert cut.outcomes[0].result.finish_reason is None
    assert 0 < len(cut.outcomes[0].result.output_ids) < NEW
    for outcome, complete in zip(cut.outcomes, whole.outcomes, strict=False):
        output_ids = outcome.result.output_ids
        assert complete.result.output_ids[: len(output_ids)] == output_ids
        assert watcher.text.get(outcome.result.request.index, "") == outcome.result.text
    again = run(toy, conversations, config)
    assert (again.interrupted, ids(again)) == (False, ids(whole))


# Ends, and what cannot run


def test_a_budget_beyond_the_positions_is_cut(toy: Pair) -> None:
    result = only(toy, prompt=[50] * (MAX_POSITIONS - 5)).result
    assert (len(result.output_ids), result.finish_reason) == (5, "length")
    assert len(only(toy, with_engine(context=10), [50] * 7).result.output_ids) == 3


def test_a_pair_without_a_tokenizer_runs_on_ids_alone() -> None:
    result = only(toy_pair(None)).result
    assert result.text is None
    assert STOP not in result.output_ids
    with pytest.raises(InputError, match="--prompt-ids"):
        run(toy_pair(None), [from_text("Hi")], CONFIG)


# Log-probabilities


def test_scores_are_the_log_softmax_of_the_targets_logits(toy: Pair) -> None:
    assert isinstance(toy.target, ToyTarget)
    table = np.array(toy.target.table, np.float64)
    logprobs = table - np.log(np.exp(table).sum(-1, keepdims=True))
    outputs = [int(i) for i in np.random.default_rng(1).integers(0, VOCAB_SIZE, 70)]  # several chunks
    scores = output_logprobs(toy.target, [3, 50], outputs, 4, MAX_POSITIONS)
    assert [token.token_id for token in scores] == outputs
    for before, token in zip([50, *outputs], scores, strict=False):
        assert token.logprob == pytest.approx(logprobs[before, token.token_id], abs=1e-4)
        assert [i for i, _ in token.best] == np.argsort(-logprobs[before])[:4].tolist()
    assert output_logprobs(toy.target, [3, 50], outputs[:1], 0, MAX_POSITIONS)[0].best == ()


@pytest.mark.parametrize("after", [1, 2, 5])
def test_an_interrupted_run_keeps_what_there_is(toy: Pair, after: int) -> None:
    pieces = itertools.count(1)

    def interrupt_once(_: Request) -> None:
        if next(pieces) == after:
            raise KeyboardInterrupt

    whole, watcher = only(toy).result, Watcher(interrupt_once)
    cut = run(toy, [from_ids([50]), from_ids([51])], CONFIG, watcher.observer)
    assert cut.interrupted
    if after >= 1 + len(whole.steps):
        assert [outcome.result.finish_reason for outcome in cut.outcomes] == ["length", None]
        return
    (outcome,) = cut.outcomes  # the request that was not begun is not there
    assert outcome.result.finish_reason is None
    assert 0 < len(outcome.result.output_ids) < NEW
    assert whole.output_ids[: len(outcome.result.output_ids)] == outcome.result.output_ids
    assert watcher.text[0] == outcome.result.text
