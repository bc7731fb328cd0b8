"""The formulas, against examples worked by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.answers.result import Assembler, Counters, Result, loop_grams
from peagle.engine.request import FinishReason, Request, StepRecord, TokenChunk
from peagle.engine.resolved import ResolvedConfig
from peagle.measure.metrics import (
    first_difference,
    pooled_tok_per_s,
    speculative_decoding_block,
    summarize,
)
from peagle.workflows.run import Outcome, Run
from peagle.workflows.run_report import summary_lines

REQUEST = Request((7, 8), max_new_tokens=100)


def step(num_accepted: int, k: int = 3) -> StepRecord:
    return StepRecord(2, tuple(range(k)), num_accepted, 9, k)


def result(ids: list[int], *, k: int = 0, accepted: tuple[int, ...] = (), start: float = 0.0, first: float = 1.0,
           last: float = 2.0) -> Result:  # fmt: skip
    steps = tuple(step(a, k) for a in accepted)
    return Result(REQUEST, k, tuple(ids), None, "length", start, first if ids else None, last if ids else None, steps)


def test_counters_by_hand() -> None:
    # K = 3, five steps that accepted 0, 3, 1, 3, 2
    counters = Counters.of([step(a) for a in (0, 3, 1, 3, 2)], 3)
    assert counters.histogram == (1, 1, 1, 2)
    assert (counters.num_steps, counters.num_drafted, counters.num_accepted) == (5, 15, 9)
    assert counters.acceptance_length == pytest.approx(1 + 9 / 5)
    assert counters.acceptance_rate == pytest.approx(9 / 15)
    # draft 0 was accepted in 4 steps of 5, draft 1 in 3, draft 2 in 2
    assert counters.acceptance_rate_per_position == pytest.approx((0.8, 0.6, 0.4))
    # of the 4 steps that had draft 0 right, 3 had draft 1 right, too; of those 3, 2 draft 2
    assert counters.tried == (5, 4, 3)


def test_steps_of_chosen_widths_by_hand() -> None:
    # K = 3: two steps that verified 3 drafts, one that verified 1, two plain ones
    steps = [step(3), step(1), step(1, 1), step(0, 0), step(0, 0)]
    counters = Counters.of(steps, 3)
    assert (counters.num_steps, counters.num_plain_steps) == (3, 2)
    assert (counters.num_drafted, counters.num_accepted) == (7, 5)
    assert counters.acceptance_length == pytest.approx(1 + 5 / 3)
    assert counters.acceptance_rate_per_position == pytest.approx((1, 1 / 3, 1 / 3))
    # the step that verified 1 draft and accepted it has not tried draft 1
    assert counters.tried == (3, 2, 1)
    assert counters + counters == Counters.of(steps * 2, 3)
    assert speculative_decoding_block(counters)["num_plain_steps"] == 2


def test_a_position_that_was_never_drafted_has_no_rate() -> None:
    """In a run of at most 3 drafts although K is 5; no draft 2 was right, which is a rate of 0."""
    steps = [step(1, 1), step(2, 3), step(0, 3), step(0, 0)]
    counters = Counters.of(steps, 5)
    assert counters.acceptance_rate_per_position == pytest.approx((2 / 3, 1 / 3, 0, None, None))
    assert Counters.of([step(0, 0)], 2).acceptance_rate_per_position == (None, None)
    engine = ResolvedConfig(5, adaptive=True)
    whole = Result(REQUEST, 5, tuple(range(8)), None, "length", 0.0, 1.0, 2.0, tuple(steps))
    (line,) = [
        text for text in summary_lines(Run([Outcome(whole, None)], 128, engine=engine), None) if "per position" in text
    ]
    rates = "length 2.00 | 3 steps with drafts (K <= 5), 1 without | rate per position 0.67 0.33 0.00 - -"
    assert line.endswith(f"{rates} | drafts: 7 proposed, 7 verified, 3 accepted")


@given(st.lists(st.integers(0, 5), min_size=1))
def test_rates_fall_and_add_up_to_the_acceptance_length(accepted: list[int]) -> None:
    counters = Counters.of([step(a, 5) for a in accepted], 5)
    rates = counters.acceptance_rate_per_position
    assert list(rates) == sorted(rates, reverse=True)
    assert counters.acceptance_length == pytest.approx(1 + sum(rates))


def test_no_steps_give_none_and_never_a_number() -> None:
    counters = Counters.of([], 3)
    assert counters.acceptance_length is None
    assert counters.acceptance_rate is None
    assert counters.acceptance_rate_per_position == (None, None, None)
    assert speculative_decoding_block(counters)["acceptance_histogram"] == [0, 0, 0, 0]


def test_the_acceptance_length_counts_emitted_tokens_and_vllms_all_accepted_ones() -> None:
    """Three tokens of a step that accepted seven drafts: one of prefill, and two more."""
    cut = Result(Request((7, 8), 3), 7, (1, 2, 3), None, "length", 0.0, 1.0, 2.0, (step(7, 7),))
    assert (cut.acceptance_length, cut.counters.mean_acceptance_length) == (2.0, 8.0)
    whole = Result(Request((7, 8), 9), 7, tuple(range(9)), None, "length", 0.0, 1.0, 2.0, (step(7, 7),))
    assert (whole.acceptance_length, whole.counters.mean_acceptance_length) == (8.0, 8.0)
    both = cut.counters + whole.counters
    assert (both.num_emitted, both.acceptance_length, both.mean_acceptance_length) == (10, 5.0, 8.0)
    run = Run([Outcome(cut, None)], 128, engine=ResolvedConfig(7))
    assert any("length 2.00 | 1 steps with drafts (K = 7)" in line for line in summary_lines(run, None))


def test_counters_of_another_k_are_not_pooled() -> None:
    with pytest.raises(ValueError, match="cannot be pooled"):
        Counters.of([], 3) + Counters.of([], 2)


def test_the_block_has_vllms_names() -> None:
    assert speculative_decoding_block(Counters.of([step(1), step(3)], 3, num_truncated=1)) == {
        "num_spec_tokens": 3,
        "num_spec_steps": 2,
        "num_proposed_draft_tokens": 6,
        "num_draft_tokens": 6,
        "num_accepted_draft_tokens": 4,
        "num_looked_up_draft_tokens": 0,
        "num_truncated_tokens": 1,
        "num_plain_steps": 0,
        "acceptance_histogram": [0, 1, 0, 1],
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": pytest.approx(2 / 3),
    }


def chunks(decided: list[tuple[list[int], int]], budget: int, stop: int) -> tuple[list[TokenChunk], Request]:
    """Make the engine's output: each step's run, cut at a stop token and at the budget."""
    request = Request((7, 8), budget)
    out, emitted = [TokenChunk(request, (5,), 10.0)], 1
    for number, (run, accepted) in enumerate(decided):
        kept = run[: accepted + 1]
        kept = kept[: kept.index(stop) + 1] if stop in kept else kept
        kept = kept[: budget - emitted]
        emitted += len(kept)
        reason: FinishReason | None = "stop" if stop in kept else "length" if emitted == budget else None
        out.append(TokenChunk(request, tuple(kept), 10.5 + number, (step(accepted),), reason))
        if reason is not None:
            break
    return out, request


@given(
    st.lists(st.tuples(st.lists(st.integers(2, 4), min_size=4, max_size=4), st.integers(0, 3)), max_size=12),
    st.integers(2, 20),
)
def test_emitted_is_what_was_decided_less_what_was_truncated(decided: list[tuple[list[int], int]], budget: int) -> None:
    out, request = chunks(decided, budget, stop=4)
    assembler = Assembler(request, 3, None, 9.0)
    for chunk in out:
        assembler.add(chunk)
    whole = assembler.result()
    assert len(whole.output_ids) == sum(len(chunk.token_ids) for chunk in out)
    accepted = [record.num_accepted for chunk in out for record in chunk.steps]
    assert len(whole.output_ids) == 1 + sum(a + 1 for a in accepted) - whole.num_truncated
    assert whole.num_truncated >= 0
    assert whole.counters.num_accepted == sum(accepted)  # all of them, cut or not
    assert whole.counters.num_emitted == len(whole.output_ids) - 1
    expected = "stop" if whole.output_ids[-1] == 4 else "length" if len(whole.output_ids) == budget else None
    assert whole.finish_reason == expected


def test_times_by_hand() -> None:
    whole = result([1, 2, 3, 4, 5], start=10.0, first=10.5, last=12.5)
    assert whole.ttft_s == pytest.approx(0.5)
    assert whole.decode_s == pytest.approx(2.0)
    assert whole.tok_per_s == pytest.approx(4 / 2.0)
    assert result([1]).tok_per_s is None
    assert result([1, 2], first=3.0, last=3.0).tok_per_s is None  # no time, no speed
    assert (result([]).ttft_s, result([]).tok_per_s, result([]).loop_share) == (None, None, None)


def test_waits_are_between_arrivals_and_those_of_a_dispatch_are_one() -> None:
    assembler = Assembler(REQUEST, 0, None, started_s=1.0)
    for time_s, ids in ((2.0, (5,)), (2.5, (6, 7, 8)), (3.5, ()), (4.0, (9,))):
        assembler.add(TokenChunk(REQUEST, ids, time_s))
    timed = assembler.result()
    assert timed.times_s == (2.0, 2.5, 4.0)
    assert timed.tpot_s == pytest.approx(2.0 / 4)
    assert result([1]).tpot_s is None


def test_pooled_speed_counts_shared_time_once() -> None:
    one_after_the_other = [result([1] * 11, first=0.0, last=2.0), result([1] * 21, first=5.0, last=8.0)]
    assert pooled_tok_per_s(one_after_the_other) == pytest.approx(30 / 5.0)
    together = [result([1] * 11, first=0.0, last=2.0), result([1] * 21, first=0.0, last=3.0)]
    assert pooled_tok_per_s(together) == pytest.approx(30 / 3.0)
    assert pooled_tok_per_s([]) is None
    assert pooled_tok_per_s([result([1])]) is None


def test_loop_share_by_hand() -> None:
    # 1 2 1 2 1 2 1: four 4-grams, two different ones
    assert loop_grams([1, 2, 1, 2, 1, 2, 1]) == (2, 4)
    looping, fresh = result([1, 2, 1, 2, 1, 2, 1]), result([1, 2, 3, 4, 5])
    assert looping.loop_share == pytest.approx(0.5)
    assert (looping.loops, fresh.loops) == (True, False)
    assert fresh.loop_share == 0.0
    assert result([1, 2, 3]).loop_share is None


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], []) is None


def test_the_summary_by_hand() -> None:
    fast = [
        result([1, 2, 3, 4, 5], k=3, accepted=(3,), first=0.0, last=1.0),
        result([1, 2] * 6, k=3, accepted=(1, 2, 3, 1), first=1.0, last=3.0),
    ]
    plain = [result([1, 2, 3, 4, 5], first=3.0, last=5.0), None]
    summary = summarize(fast, plain, 1.5, 1000)
    assert summary["num_spec_steps"] == 5
    assert summary["acceptance_length"] == pytest.approx(1 + 10 / 5)
    assert summary["acceptance_length_without_loops"] == pytest.approx(4.0)
    assert summary["looping_requests_frac"] == 0.5
    assert summary["tok_per_s"] == pytest.approx(15 / 3.0)
    # the speed-up is over the requests that have both: 4 tokens a second against 2
    assert summary["baseline_tok_per_s"] == pytest.approx(2.0)
    assert summary["speedup"] == pytest.approx(2.0)
    assert summary["num_diverged_requests"] == 0
    assert (summary["compile_s"], summary["peak_memory_bytes"]) == (1.5, 1000)


def test_where_nothing_was_drafted_there_is_no_speed_up() -> None:
    undrafted = Result(REQUEST, 3, (1, 2, 3), None, "length", 0.0, 1.0, 2.0, (step(0, 0), step(0, 0)))
    summary = summarize([undrafted], [result([1, 2, 3], last=3.0)], 0.0, None)
    assert (summary["num_spec_steps"], summary["num_plain_steps"]) == (0, 2)
    assert summary["speedup"] is None
    assert (summary["tok_per_s"], summary["baseline_tok_per_s"]) == (pytest.approx(2.0), pytest.approx(1.0))


def test_a_summary_of_nothing_holds_no_nan() -> None:
    summary = summarize([], [], 0.0, None)
    assert all(value is None or not math.isnan(value) for value in summary.values() if isinstance(value, float))
    assert (summary["acceptance_length"], summary["tok_per_s"], summary["speedup"]) == (None, None, None)
