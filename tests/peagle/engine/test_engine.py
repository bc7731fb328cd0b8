"""Losslessness of the loop: speculation emits plain decoding's tokens, whatever drafter and neighbours do."""

import threading
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.base.errors import InputError
from peagle.config import SamplingParams
from peagle.drafters.ngram import NGram
from peagle.engine.auto.costs import CostTable
from peagle.engine.auto.learn import PROFIT_STEPS
from peagle.engine.auto.state import FIRST_PROFIT, LOSS_FRAC, AutoState
from peagle.engine.host.engine import Engine
from peagle.engine.host.handle import EngineError
from peagle.engine.host.inspection import step_programs
from peagle.engine.host.programs import trace_counts
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig
from peagle.engine.step.step_kinds import StepKind
from peagle.ops.messages import Choose, DrafterInput, DraftOutput, likeliest_of
from peagle.protocols import Drafter
from tests.support.models import fast_target
from tests.support.toys import (
    CONFIG,
    WINDOW,
    MarkovTarget,
    Scripted,
    WithoutMemory,
    check_whole,
    decode,
    drafting_at,
    follow,
    tiny_target,
)

pytestmark = pytest.mark.compile

CAPACITY, NEW = 96, 60
PROMPTS = [
    tuple(np.random.default_rng(s).integers(0, CONFIG.vocab_size, n).tolist()) for s, n in ((0, 5), (1, 19), (2, 9))
]


def run(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Decode requests; return the tokens of each, in order, and check the engine's state."""
    tokens = decode(engine, requests)[0]
    check_whole(engine)
    return tokens


def config(k: int, slots: int = 1, **options: object) -> ResolvedConfig:
    return ResolvedConfig(
        **{"num_speculative_tokens": k, "slots": slots, "context": CAPACITY, "prefill_chunk": 8, **options}
    )


@pytest.fixture(scope="module")
def target():
    return fast_target()


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [Request(prompt, NEW) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def plain(target, requests) -> list[list[int]]:
    outputs = run(Engine(target, None, config(0)), requests)
    assert all(len(output) == NEW for output in outputs)
    assert NEW > 3 * WINDOW  # the rings wrap several times
    assert len({tuple(output) for output in outputs}) == len(outputs)
    return outputs


def scripts(plain: list[list[int]], kind: str) -> Scripted:
    """Scripts of the full sequences: right everywhere, wrong everywhere, or right now and then."""
    width = max(map(len, PROMPTS)) + NEW + 16
    script = np.zeros((len(PROMPTS), width), np.int32)
    for row, (prompt, output) in enumerate(zip(PROMPTS, plain, strict=True)):
        script[row, : len(prompt) + NEW] = [*prompt, *output]
    rng = np.random.default_rng(3)
    if kind == "adversarial":
        script = (script + 1) % CONFIG.vocab_size
    elif kind == "random":
        script = rng.integers(0, CONFIG.vocab_size, script.shape)
    elif kind == "sometimes":
        script = np.where(rng.random(script.shape) < 0.6, script, (script + 1) % CONFIG.vocab_size)
    return Scripted(jnp.asarray(script, jnp.int32))


def drafter_of(kind: str, plain: list[list[int]], row: int | None = None) -> Drafter:
    if kind == "ngram":
        return NGram()
    scripted = scripts(plain, kind)
    return scripted if row is None else Scripted(scripted.script[row : row + 1])


@pytest.mark.parametrize("kind", ["oracle", "adversarial", "random", "sometimes", "ngram"])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_greedy_speculation_equals_plain_decoding(target, requests, plain, kind: str, k: int) -> None:
    for row, request in enumerate(requests[:2]):
        engine = Engine(target, drafter_of(kind, plain, row), config(k))
        assert run(engine, [request]) == [plain[row]]


def test_on_xla_speculation_of_requests_side_by_side_equals_plain_decoding(requests) -> None:
    """The other tests run on the native kernels, where they are."""
    target = tiny_target()
    alone = run(Engine(target, None, config(0)), requests[:2])
    assert run(Engine(target, NGram(), config(3, slots=2)), requests[:2]) == alone


def test_the_oracle_is_accepted_whole_and_the_adversary_never(target, requests, plain) -> None:
    for kind, expected in (("oracle", 3), ("adversarial", 0)):
        records = decode(Engine(target, drafter_of(kind, plain, 0), config(3)), requests[:1])[1][0]
        assert [record.num_accepted for record in records] == [expected] * len(records)
        length = len(PROMPTS[0])
        for record in records:
            assert record.length == length
            length += record.num_accepted + 1


def test_nothing_that_a_request_asks_for_compiles_anything(target, requests) -> None:
    engine = Engine(target, NGram(longest=2), config(5, slots=2))
    engine.warm_up()
    engine.warm_up(sampled=True)
    engine.warm_up(full_logits=True)
    assert engine.compile_s > 0
    before = trace_counts()
    run(engine, requests)
    adjusted = SamplingParams(2.0, 3, 0.5, 0.1, seed=5, presence_penalty=1.0, logit_bias=((3, 1.0),), min_tokens=2)
    for sampling in (SamplingParams(0.5), SamplingParams(2.0, 3, 0.5, 0.1, seed=5), adjusted):
        run(engine, [Request(PROMPTS[0][::-1], 9, sampling, (3, 4, 5)), Request(PROMPTS[1], 3)])
    assert trace_counts() == before


@pytest.mark.parametrize(("pays", "num_steps"), [(True, 1), (False, 2)])
def test_alone_only_what_the_costs_decide_is_compiled(target, plain, pays: bool, num_steps: int) -> None:
    """Where drafting pays, one program of steps; otherwise plain steps, until the drafter is too far behind and after.

    The request then compiles nothing. A warm-up for others compiles the rest.
    """
    shape = config(3, context=320 + 64 * pays, adaptive=True)  # tables that no other test has
    engine = drafting_at(Engine(target, drafter_of("oracle", plain, 0), shape), {1: pays})

    def compiled_by(act) -> dict[str, int]:
        before = trace_counts()
        act()
        return {name: count - before.get(name, 0) for name, count in trace_counts().items()}

    assert compiled_by(lambda: engine.warm_up(alone=True))["steps"] == num_steps
    request = Request(PROMPTS[0], NEW)
    assert not any(compiled_by(lambda: run(engine, [request])).values())
    assert compiled_by(engine.warm_up)["steps"] == 3 - num_steps


@pytest.mark.parametrize("steps_per_dispatch", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_requests_own_k_bounds_its_drafts_and_changes_no_token(
    target, plain, steps_per_dispatch: int, adaptive: bool
) -> None:
    """Beside others and alone, and nothing compiles for it."""
    options = {"k_per_request": True, "adaptive": adaptive, "steps_per_dispatch": steps_per_dispatch}
    engine = drafting_at(Engine(target, NGram(), config(5, 2, **options)), {1: True})
    engine.warm_up()
    before = trace_counts()
    for limits in ([None, 0, 1, 2, 5, 0], [0], [1], [0, 0]):
        requests = [Request(PROMPTS[i % 3], NEW, num_speculative_tokens=limit) for i, limit in enumerate(limits)]
        tokens, records = decode(engine, requests)
        assert tokens == [plain[i % 3] for i in range(len(requests))]
        for limit, steps in zip(limits, records, strict=True):
            widest = max(len(step.draft_token_ids) for step in steps)
            assert widest <= (5 if limit is None else limit)
            assert (widest > 0) == (limit != 0)
    assert trace_counts() == before


def test_the_step_donates_its_state_and_keeps_no_hidden_copy(target) -> None:
    engine = Engine(target, NGram(), config(3, context=4096, steps_per_dispatch=4))
    engine.warm_up()
    state = engine.executor.state
    donated = sum(leaf.nbytes for leaf in jax.tree.leaves((state.target_cache, state.drafter_state)))
    assert step_programs(engine)[0].memory_analysis().alias_size_in_bytes >= donated
    engine.executor.steps(engine.batches.empty_plan(1), np.zeros((0,), np.float32), 4, StepKind(3))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.target_cache))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (lambda: Request((), 5), "is empty"),
        (lambda: Request((1, 37), 5, name="prompt 3"), "prompt 3 holds token id 37, outside the target's vocabulary"),
        (lambda: Request((1, -1), 5), "token id -1"),
        (lambda: Request((1,) * 90, 7), "90 tokens and at most 7 new ones; expected a sum of at most 96, the context"),
        (lambda: Request((1,), 0), "max_new_tokens is 0"),
        (lambda: Request((1,), 5, stop_token_ids=tuple(range(17))), "17 stop tokens are given; expected at most 16"),
        (lambda: Request((1,), 5, SamplingParams(logit_bias=((37, 1.0),))), "names token id 37, outside the target's"),
        (lambda: Request((1,), 5, logprobs=21), "logprobs is 21; expected 0..20"),
        (lambda: Request((1,), 5, num_speculative_tokens=-1), "K is -1; expected 0"),
        (lambda: Request((1,), 5, num_speculative_tokens=4), "K is 4 for the prompt; expected at most 0"),
        (lambda: Request((1,), 5, num_speculative_tokens=0), "expected an engine with k_per_request"),
    ],
)
def test_requests_that_cannot_run_are_refused_before_any_work(target, request_, message: str) -> None:
    engine = Engine(target, None, config(0))
    with pytest.raises(InputError, match=message):
        next(engine.generate([Request((1, 2), 3), request_()]))
    assert not engine.busy


def test_chunks_tell_what_was_decided_before_the_cut(target, plain) -> None:
    engine = Engine(target, drafter_of("oracle", plain, 0), config(3))
    chunks = [chunk for _, chunk in engine.generate([Request(PROMPTS[0], 3)])]
    assert [chunk.token_ids for chunk in chunks] == [tuple(plain[0][:1]), tuple(plain[0][1:3])]
    (record,) = chunks[1].steps
    assert record.num_accepted == 3
    assert record.next_token == plain[0][4]
    assert record.draft_token_ids == tuple(plain[0][1:4])


@pytest.mark.parametrize("steps_per_dispatch", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_a_slot_whose_drafts_fail_verifies_no_more_and_the_other_goes_on(target, plain, steps_per_dispatch) -> None:
    """Slot 0's drafts are always wrong, slot 1's always right; the tokens are plain decoding's."""
    script = np.asarray(scripts(plain, "oracle").script).copy()
    script[0] = (script[0] + 1) % CONFIG.vocab_size
    shape = config(3, slots=2, adaptive=True, steps_per_dispatch=steps_per_dispatch)
    engine = Engine(target, Scripted(jnp.asarray(script[:2])), shape)
    verify = {1: ((1, 1.0), (4, 1.6)), 2: ((2, 1.0), (8, 2.2))}
    engine.costs = CostTable(verify, {1: ((0, 0.0), (3, 0.1)), 2: ((0, 0.0), (6, 0.1))})
    tokens, records = decode(engine, [Request(PROMPTS[0], 40), Request(PROMPTS[1], 40)])
    assert tokens == [plain[0][:40], plain[1][:40]]
    widths = [[len(record.draft_token_ids) for record in steps] for steps in records]
    assert sum(widths[0][:4]) > 0
    assert sum(widths[0][8:]) < 0.5 * len(widths[0][8:])  # of 3 drafts a step; it is tried again, alone more often
    assert sum(widths[1]) > 16


@pytest.mark.parametrize("logprobs", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_a_drafter_that_never_pays_is_left_out_and_changes_nothing(target, plain, logprobs: int | None) -> None:
    """Within a dispatch: its steps become plain ones, of the same log-probabilities."""
    script = (np.asarray(scripts(plain, "oracle").script)[:1] + 1) % CONFIG.vocab_size
    shape = config(3, adaptive=True, steps_per_dispatch=16)
    adaptive = Engine(target, Scripted(jnp.asarray(script)), shape)
    adaptive.costs = CostTable({1: ((1, 1.0), (4, 1.6))}, {1: ((0, 0.0), (3, 0.5))})
    request = Request(PROMPTS[0], 40, logprobs=logprobs)
    chunks, expected = (
        [chunk for _, chunk in engine.generate([request])] for engine in (adaptive, Engine(target, None, config(0)))
    )
    drafted = [step.num_drafted for chunk in chunks for step in chunk.steps]
    assert sum(drafted[:8]) > 0
    assert 0 in drafted[:10]
    assert sum(number > 0 for number in drafted) < 12
    tokens = [[token for chunk in of for token in chunk.token_ids] for of in (chunks, expected)]
    assert tokens[0] == tokens[1] == plain[0][:40]
    entries, references = ([entry for chunk in of for entry in chunk.logprobs] for of in (chunks, expected))
    assert len(entries) == len(references) == (40 if logprobs else 0)
    for entry, reference in zip(entries, references, strict=True):
        assert entry.token_id == reference.token_id
        np.testing.assert_allclose(entry.logprob, reference.logprob, rtol=1e-4, atol=1e-5)


@flax.struct.dataclass
class Counting(WithoutMemory):
    """A drafter that is never sure of its drafts; its state counts its passes."""

    def init_state(self, batch: int, capacity: int, widest_write: int) -> jax.Array:
        return jnp.zeros((batch,), jnp.int32)

    def propose(
        self, state: jax.Array, fresh: DrafterInput, widths: jax.Array, num_drafts: int, choose: Choose = likeliest_of
    ) -> tuple[DraftOutput, jax.Array]:
        shape = (fresh.num.shape[0], num_drafts)
        return DraftOutput(jnp.zeros(shape, jnp.int32), confidence=jnp.full(shape, 0.01)), state + 1


def test_after_steps_whose_tries_do_not_pay_the_next_are_plain(target, plain) -> None:
    """Looking up takes a fifth of a plain step, and finds nothing. The second request begins with a pause."""
    shape = config(3, adaptive=True, steps_per_dispatch=16)
    engine = Engine(target, scripts(plain, "oracle"), shape, lookup=Counting())
    engine.costs = CostTable({1: ((1, 1.0), (2, 1.5), (4, 1e3))}, {1: ((0, 0.2), (3, 1e3))})
    profit, step, num_tries = FIRST_PROFIT, 0, 0
    while step < 59:
        profit -= (profit + 0.2) / PROFIT_STEPS
        step, num_tries = step + 1 + max(0, int(-profit / LOSS_FRAC)), num_tries + 1
    assert num_tries < 25
    looked_up = [0]
    for _ in range(2):
        tokens, records = decode(engine, [Request(PROMPTS[0], 60)])
        assert tokens == [plain[0]]
        assert len(records[0]) == 59
        looked_up += engine.executor.state.lookup_state.tolist()
    assert looked_up[1] == num_tries
    assert 0 < looked_up[2] - looked_up[1] < 0.7 * num_tries


def test_slots_that_took_plain_steps_draft_again_when_the_load_falls_and_lose_no_row(target, plain) -> None:
    """Nothing is drafted for two active slots; the last one then drafts what it drafts alone."""
    long, short = Request(PROMPTS[0], 60), Request(PROMPTS[1], 30)
    alone = decode(Engine(target, NGram(), config(3)), [long])[1][0]
    engine = drafting_at(Engine(target, NGram(), config(3, slots=2, adaptive=True)), {1: True, 2: False})
    tokens, records = decode(engine, [long, short], joining=True)
    assert tokens == [plain[0], plain[1][:30]]
    assert 0 in {len(record.draft_token_ids) for record in records[0]}
    by_length = {record.length: record for record in alone}
    resumed = [record for record in records[0] if record.draft_token_ids and record.length in by_length]
    assert len(resumed) > 3
    for record in resumed:
        assert record.draft_token_ids == by_length[record.length].draft_token_ids[: len(record.draft_token_ids)]


def test_a_reader_waits_for_the_last_chunk_that_another_thread_hands_out(target, plain) -> None:
    """Another thread has ended the request, but not yet delivered its chunk."""
    engine = Engine(target, None, config(0, slots=2))
    short, long = engine.add_all([Request(PROMPTS[0], 2), Request(PROMPTS[1], 40)])
    chunks = engine.run([short])
    got = list(next(chunks)[1].token_ids)
    ended, looked = threading.Event(), threading.Event()
    step, turn = engine.step, engine._turn

    class Turn:
        release = turn.release

        def acquire(self, timeout: float) -> bool:
            if ended.is_set():
                looked.set()  # the reader waits for its turn, instead of taking the empty inbox for the end
            return turn.acquire(timeout=timeout)

    def slow() -> object:
        output = step()
        if short.finished is not None and not ended.is_set():
            ended.set()
            assert looked.wait(600)
        return output

    engine.step, engine._turn = slow, Turn()
    driver = threading.Thread(target=lambda: list(engine.run([long])))
    driver.start()
    assert ended.wait(600)
    got += [token for _, chunk in chunks for token in chunk.token_ids]
    looked.set()
    driver.join()
    assert got == plain[0][:2]


def test_a_reader_gets_its_chunks_while_another_thread_waits_for_its_own(target, plain) -> None:
    """The other's request has no slot yet, so its thread has the turn for long."""
    engine = Engine(target, None, config(0, slots=1))
    running, queued = engine.add_all([Request(PROMPTS[0], 40), Request(PROMPTS[1], 5)])
    delivered, read = threading.Event(), threading.Event()
    step = engine.step

    def held() -> object:
        if running.inbox:
            delivered.set()
            assert read.wait(60)
        return step()

    engine.step = held
    driver = threading.Thread(target=lambda: list(engine.run([queued])))
    driver.start()
    assert delivered.wait(60)
    chunks = engine.run([running])
    got = list(next(chunks)[1].token_ids)
    assert not read.is_set()
    assert running.finished is None
    read.set()
    got += [token for _, chunk in chunks for token in chunk.token_ids]
    driver.join()
    assert got == plain[0][:40]


def test_an_abort_never_waits_and_takes_effect_before_the_next_step(target, plain) -> None:
    engine = Engine(target, None, config(0))
    handle, other = engine.add_all([Request(PROMPTS[0], 40), Request(PROMPTS[1], 5)])
    chunks = engine.run([handle])
    next(chunks)
    with engine._lock:  # a step is under way
        engine.abort(handle)
        assert handle.finished is None
    tokens = [token for _, chunk in engine.run([other]) for token in chunk.token_ids]
    assert handle.finished == "aborted"
    assert tokens == plain[1][:5]
    assert [chunk.finish_reason for _, chunk in chunks] == ["aborted"]


def test_a_warm_up_leaves_requests_alone(target, plain) -> None:
    engine = Engine(target, drafter_of("oracle", plain, 0), config(3))
    engine.warm_up()
    handle = engine.add(Request(PROMPTS[0], 30))
    chunks = follow(engine, handle)
    got = list(next(chunks).token_ids)
    engine.warm_up(sampled=True)
    assert got + [token for chunk in chunks for token in chunk.token_ids] == plain[0][:30]


def test_an_engine_that_failed_says_so_to_everybody(target) -> None:
    engine = Engine(target, None, config(0, slots=2))
    handles = [engine.add(Request(prompt, 9)) for prompt in PROMPTS]

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    engine.executor.prefill = broken  # type: ignore[method-assign, assignment]
    for handle in handles:
        with pytest.raises(EngineError, match="the device is gone"):
            list(follow(engine, handle))
    with pytest.raises(EngineError, match="has failed: the device is gone"):
        engine.add(Request(PROMPTS[0], 9))


def test_adaptive_steps_verify_the_sure_drafts_of_synthetic_acceptance(target, requests, plain) -> None:
    """Of the drafts that they verify more are accepted than with a fixed K."""
    accepted_frac = {}
    for adaptive in (False, True):
        shape = config(3, adaptive=adaptive, synthetic_acceptance=(0.6, 0.36, 0.22))
        engine = Engine(target, drafter_of("adversarial", plain, row=0), shape)
        if adaptive:
            engine.costs = CostTable({1: ((1, 1.0), (4, 2.2))}, {1: ((0, 0.0), (3, 0.1))})
        records = [record for steps in decode(engine, requests)[1] for record in steps]
        num_verified = sum(len(record.draft_token_ids) for record in records)
        accepted_frac[adaptive] = sum(record.num_accepted for record in records) / num_verified
    assert accepted_frac[True] > accepted_frac[False] + 0.1, accepted_frac


def test_cost_of_drafting_is_measured_once_per_number_of_rows(target, plain) -> None:
    engine = Engine(target, NGram(), config(3, slots=2, adaptive=True))
    assert engine.costs is None
    engine.warm_up()
    costs = engine.costs
    assert costs is not None
    assert set(costs.verify) == set(costs.draft) == {1, 2}
    for number in (1, 2):
        assert [rows for rows, _ in costs.verify[number]] == sorted(
            {number, number + 1, *(number * n for n in (2, 3, 4))}
        )
        assert all(1 <= time < float("inf") for _, time in costs.verify[number])
        assert all(0 <= time < float("inf") for _, time in costs.draft[number])
    jax.tree.map(np.testing.assert_array_equal, engine.executor.state.auto, AutoState.start(2, 3, 1))  # learned nothing
    engine.warm_up()
    assert engine.costs is costs
    requests = [Request(PROMPTS[0], 30), Request(PROMPTS[1], 30)]
    assert run(engine, requests) == [plain[0][:30], plain[1][:30]]


def test_outputs_that_are_not_finite_end_their_request_alone() -> None:
    """Token t is followed by t + 1; after 5 and 0 every logit is NaN."""
    table = np.full((9, 9), -9.0, np.float32)
    table[np.arange(9), (np.arange(9) + 1) % 9] = 9.0
    table[[0, 5]] = np.nan
    engine = Engine(MarkovTarget(jnp.asarray(table)), NGram(), config(2, slots=2, prefill_chunk=4))
    wrong, right = engine.add(Request((2,), 8, name="the first prompt")), engine.add(Request((6,), 3))
    said = "the target's logits for token 3 of the answer to the first prompt are not finite; expected finite ones"
    with pytest.raises(InputError, match=said):
        list(follow(engine, wrong))
    assert wrong.finished == "error"
    assert [token for chunk in follow(engine, right) for token in chunk.token_ids] == [7, 8, 0]
    engine.warm_up()  # after token 0, too, they are said by requests alone
    at_once = engine.add(Request((5,), 8))
    with pytest.raises(InputError, match="for token 0 of the answer to the prompt"):
        list(follow(engine, at_once))
    assert not engine.busy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adaptive": True}, "K is 0 in adaptive drafting"),
        ({"num_speculative_tokens": 129}, "K is 129; expected 0"),
        ({"slots": 0}, "slots is 0; expected 1 or more"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0 tokens; expected 1 or more"),
        ({"context": 1}, "context is 1 positions"),
        ({"num_speculative_tokens": 2, "synthetic_acceptance": (0.5,)}, "has 1 rates for K = 2"),
    ],
)
def test_engines_that_cannot_be_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ResolvedConfig(**options)


def test_a_row_whose_drafter_is_too_far_behind_drafts_no_more(target, plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """At two active rows nothing is drafted; the load falls after more plain steps than the drafter's input holds."""
    monkeypatch.setattr("peagle.engine.step.state.INPUT_ROOM", 8)
    # a capacity of its own, since engines of equal shapes share the program that makes their state
    engine = Engine(target, NGram(), config(3, slots=2, context=CAPACITY + 1, adaptive=True))
    drafting_at(engine, {1: True, 2: False})
    tokens, records = decode(engine, [Request(PROMPTS[0], 60), Request(PROMPTS[1], 30)], joining=True)
    assert tokens == [plain[0], plain[1][:30]]
    beside = records[0][0].length + 1
    assert {len(record.draft_token_ids) for record in records[0] if record.length > beside} == {0}


def test_a_crowd_is_decoded_as_without_a_drafter(target, plain) -> None:
    """What begins while so many run or wait that drafting gains nothing never drafts; what is alone does."""
    engine = drafting_at(Engine(target, NGram(), config(3, slots=2, adaptive=True)), {1: True, 2: False})
    engine.warm_up()
    before, skipped, steps = trace_counts(), [], engine.executor.steps

    def spy(plan, costs, count, kind):
        skipped.append(not kind.keep_drafter_input)
        return steps(plan, costs, count, kind)

    engine.executor.steps = spy
    tokens, records = decode(engine, [Request(PROMPTS[i % 3], 20) for i in range(7)])
    assert tokens == [plain[i % 3][:20] for i in range(7)]
    assert {len(record.draft_token_ids) for some in records for record in some} == {0}
    assert all(skipped)
    skipped.clear()
    tokens, records = decode(engine, [Request(PROMPTS[0], 20)])
    assert tokens == [plain[0][:20]]
    assert any(record.draft_token_ids for record in records[0])
    assert not any(skipped)
    assert trace_counts() == before


def test_a_crowd_for_which_the_drafter_is_too_dear_drafts_by_lookups_alone(target, plain) -> None:
    """The drafter does not read their prompts, either."""
    engine = Engine(target, scripts(plain, "oracle"), config(3, slots=2, adaptive=True), lookup=NGram())
    cheap = {number: ((number, 1.0), (4 * number, 1.1)) for number in (1, 2)}
    engine.costs = CostTable(cheap, {1: ((0, 0.0), (3, 0.1)), 2: ((0, 0.0), (6, 9.0))})
    prefill, by_drafter = engine.executor.prefill, set()
    engine.executor.prefill = lambda plan, with_drafter: by_drafter.add(with_drafter) or prefill(plan, with_drafter)
    tokens, records = decode(engine, [Request(prompt, NEW) for prompt in (PROMPTS[0], *PROMPTS)])
    assert tokens == [plain[0], *plain]
    assert {record.source for steps in records for record in steps if record.draft_token_ids} == {1}
    assert by_drafter == {False}
