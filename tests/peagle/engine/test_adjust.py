"""Biases, penalties, min_tokens, masks, log-probabilities: equal with and without speculation."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
import torch
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from peagle.config import MOST_LOGPROBS, SamplingParams
from peagle.drafters.ngram import NGram
from peagle.engine.host.engine import Engine
from peagle.engine.host.executor import Executor
from peagle.engine.host.pass_plans import chunk_plan, step_plan
from peagle.engine.request import Request, TokenLogprobs
from peagle.engine.resolved import ResolvedConfig
from peagle.engine.step.adjust import Adjustments, adjust
from peagle.engine.step.masks import MASK_BITS
from peagle.engine.step.state import SlotParams
from peagle.engine.step.step_kinds import StepKind
from peagle.measure.logprobs import output_logprobs
from target.model import GptOss, forward
from tests.support.models import fast_target
from tests.support.toys import CONFIG, check_whole

pytestmark = pytest.mark.compile

V, CONTEXT, NEW, K = CONFIG.vocab_size, 96, 40, 3
run_adjust, emitted_after = jax.jit(adjust), jax.jit(Adjustments.emitted)
run_forward = jax.jit(forward, static_argnames="config")
PROMPTS = [tuple(np.random.default_rng(s).integers(0, V, n).tolist()) for s, n in enumerate((5, 19, 9))]
ADJUSTMENTS: dict[str, Any] = {
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.3,
    "logit_bias": ((3, 2.5), (9, -50.0)),
    "min_tokens": 12,
}
HARD = SamplingParams(**ADJUSTMENTS)
STOPS = (1, 4)
NO_COSTS = np.zeros((0,), np.float32)


@pytest.fixture(scope="module")
def target() -> GptOss:
    return fast_target()


def engine_of(target: GptOss, k: int, slots: int = 1, **options: Any) -> Engine:
    return Engine(target, NGram() if k else None, ResolvedConfig(k, slots, CONTEXT, prefill_chunk=8, **options))


def decode(engine: Engine, *requests: Request) -> tuple[list[list[int]], list[list[TokenLogprobs]]]:
    """Return (tokens, their log-probabilities) of all requests."""
    tokens: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[TokenLogprobs]] = [[] for _ in requests]
    for number, chunk in engine.generate(requests):
        tokens[number] += chunk.token_ids
        logprobs[number] += chunk.logprobs
    check_whole(engine)
    return tokens, logprobs


def by_definition(logits: np.ndarray, prompt: Sequence[int], emitted: Sequence[int]) -> np.ndarray:
    """Adjust the logits [V] of one row as HARD says, by transformers' processors and OpenAI's formula."""
    tokens, row = torch.tensor([[*prompt, *emitted]]), torch.from_numpy(logits.astype(np.float32))[None]
    least = MinNewTokensLengthLogitsProcessor(len(prompt), HARD.min_tokens, list(STOPS), device="cpu")
    row = least(tokens, row).clone()
    for token, bias in HARD.logit_bias:
        row[0, token] += bias
    adjusted = RepetitionPenaltyLogitsProcessor(HARD.repetition_penalty)(tokens, row)[0].numpy().copy()
    for token in set(emitted):
        adjusted[token] -= HARD.frequency_penalty * list(emitted).count(token) + HARD.presence_penalty
    return adjusted


def test_each_row_follows_its_drafts() -> None:
    rng = np.random.default_rng(0)
    prompt, emitted, drafts = (5, 7, 7), [7, 2, 30], [2, 2, 11]
    logits = rng.normal(0, 3, (1, 4, V)).astype(np.float32)
    row = Adjustments.of(Request(prompt, 50, HARD), V)
    row = emitted_after(row, np.asarray([[*emitted, 0]], np.int32), np.asarray([[True] * 3 + [False]]))
    adjusted = run_adjust(logits, np.asarray([drafts], np.int32), row, np.asarray([[*STOPS, -2]], np.int32))
    expected = [by_definition(logits[0, n], prompt, emitted + drafts[:n]) for n in range(4)]
    np.testing.assert_allclose(adjusted[0], expected, rtol=1e-5, atol=1e-5)


def test_a_row_that_asks_for_nothing_keeps_its_bits() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (2, 4, V)).astype(np.float32)
    logits[1, 2, 5], logits[0, 1, 4] = np.nan, -np.inf
    rows = emitted_after(Adjustments.none(2, V), np.asarray([[3, 4], [5, 6]], np.int32), np.ones((2, 2), bool))
    adjusted = run_adjust(logits, np.asarray([[1, 2, 3]] * 2, np.int32), rows, np.asarray([[1], [2]], np.int32))
    np.testing.assert_array_equal(np.asarray(adjusted).view(np.int32), logits.view(np.int32))


def test_masked_tokens_never_come_and_others_keep_their_bits() -> None:
    rng = np.random.default_rng(0)
    logits, may = rng.normal(0, 3, (2, 4, V)).astype(np.float32), rng.random((2, 4, V)) < 0.5
    rows, stops = Adjustments.none(2, V), np.full((2, 1), -2, np.int32)
    adjusted = run_adjust(logits, np.zeros((2, 3), np.int32), rows, stops, packed(may))
    np.testing.assert_array_equal(adjusted, np.where(may, logits, -np.inf))


def packed(may: np.ndarray) -> np.ndarray:
    """Bits, lowest first, of [..., V] booleans."""
    bits = np.packbits(np.pad(may, [*((0, 0),) * (may.ndim - 1), (0, -V % MASK_BITS)]), axis=-1, bitorder="little")
    return bits.view("<u4")


def test_greedy_decoding_is_that_of_the_definition(target: GptOss) -> None:
    prompt = PROMPTS[0]
    ((tokens,), _) = decode(engine_of(target, 0), Request(prompt, NEW, HARD, STOPS))
    whole = np.asarray([[*prompt, *tokens]], np.int32)
    logits = run_forward(target.params, CONFIG, whole, np.arange(whole.shape[1], dtype=np.int32)[None])[0]
    for number, token in enumerate(tokens):
        row = np.asarray(logits[0, len(prompt) - 1 + number])
        expected = by_definition(row, prompt, tokens[:number])
        assert expected[token] == pytest.approx(expected.max(), abs=1e-4)
    assert not set(tokens[: HARD.min_tokens - 1]) & set(STOPS)


@pytest.mark.parametrize("together", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_speculation_and_neighbours_change_nothing(target: GptOss, together: int) -> None:
    hot = dataclasses.replace(HARD, temperature=0.9, top_p=0.9, seed=4)
    requests = [
        Request(PROMPTS[0], NEW, HARD, STOPS, logprobs=2),
        Request(PROMPTS[1], NEW),
        Request(PROMPTS[2], NEW, hot, STOPS, index=2, logprobs=0),
        Request(PROMPTS[1], NEW, SamplingParams(1.0), index=3),
        Request(PROMPTS[2], 7, stop_token_ids=(), logprobs=MOST_LOGPROBS),
    ]
    alone = [decode(engine_of(target, 0), request) for request in requests]
    for k in (0, K):
        answers = decode(engine_of(target, k, 3, steps_per_dispatch=together), *requests)
        for tokens, logprobs, ((expected,), (expected_logprobs,)) in zip(*answers, alone, strict=True):
            assert tokens == expected
            assert_same_logprobs(logprobs, expected_logprobs)
        assert [len(logprobs) for logprobs in answers[1]] == [
            0 if request.logprobs is None else len(tokens) for request, tokens in zip(requests, answers[0], strict=True)
        ]


def assert_same_logprobs(ours: Sequence[TokenLogprobs], theirs: Sequence[TokenLogprobs]) -> None:
    """Assert that tokens and their ranking are the same, and log-probabilities to rounding."""
    for one, other in zip(ours, theirs, strict=True):
        assert [one.token_id, *(token for token, _ in one.best)] == [
            other.token_id,
            *(token for token, _ in other.best),
        ]
        values = [[logprobs.logprob, *(value for _, value in logprobs.best)] for logprobs in (one, other)]
        np.testing.assert_allclose(*values, atol=1e-4)


@pytest.mark.parametrize("k", [0, K])
def test_log_probabilities_are_those_of_the_finished_answer(target: GptOss, k: int) -> None:
    """They are the target's own, by teacher forcing, whatever the request adjusts."""
    sampling = dataclasses.replace(HARD, temperature=1.1, seed=7)
    (tokens,), (logprobs,) = decode(engine_of(target, k), Request(PROMPTS[1], NEW, sampling, logprobs=4))
    assert [one.token_id for one in logprobs] == tokens
    assert_same_logprobs(logprobs, output_logprobs(target, PROMPTS[1], tokens, 4, 128))


def start(target: GptOss, sampling: SamplingParams, widths: list[int]) -> tuple[Executor, np.ndarray]:
    """Let two requests into three slots; return (the executor, the plan of their steps)."""
    engine = Engine(target, NGram(), ResolvedConfig(K, 3, CONTEXT, prefill_chunk=64))
    executor, tables = engine.executor, np.full((3, sum(engine.memory.table_widths)), -1, np.int32)
    engine.start()
    for slot, prompt in enumerate(PROMPTS[:2]):
        table = engine.memory.open((), with_drafter=False)
        assert engine.memory.pool.reserve(table, CONTEXT)
        tables[slot] = engine.memory.row(table)
        executor.prefill(chunk_plan([prompt], [0], 64, tables[slot][None]), with_drafter=False)
        params = SlotParams.of(Request(prompt, NEW, sampling, index=slot), (), V)
        slots, length, unknown = (np.asarray([value], np.int32) for value in (slot, len(prompt), -1))
        executor.admit([0], slots, length, unknown, [params])
        executor.read_tokens(slot, prompt)
    return executor, step_plan((0, 1), widths, tables, 3)


@pytest.mark.parametrize("sampling", [SamplingParams(), HARD, dataclasses.replace(HARD, temperature=0.8)])
def test_a_masked_step_that_allows_all_is_the_step(target: GptOss, sampling: SamplingParams) -> None:
    kind = StepKind(K, sampled=True, full_logits=True)
    all_may = np.full((3, K + 1, -(-V // MASK_BITS)), 0xFFFFFFFF, np.uint32)
    all_count = np.full(all_may.shape[0], kind.num_drafts, np.int32)
    (whole, plan), (masked, _) = (start(target, sampling, [K, 2]) for _ in range(2))
    for _ in range(4):
        expected = whole.steps(plan, NO_COSTS, 1, kind)
        output = masked.masked_step(plan, dataclasses.replace(kind, masked=True), lambda *_: (all_may, all_count))
        np.testing.assert_array_equal(output, expected)
    for mine, theirs in zip(jax.tree.leaves(masked.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(mine, theirs)
