"""Choosing widths: nothing of it changes what is emitted, and it does what it says."""

import dataclasses
import itertools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.config import DrafterConfig
from drafter.propose import PEagle
from peagle import generate, policy
from peagle.autoregressive import NoDrafter
from peagle.config import SamplingConfig, SpeculationConfig
from peagle.generate import Engine, Request, trace_counts
from peagle.ngram import NGram
from peagle.ops.errors import InputError
from peagle.ops.messages import Draft, Fresh
from peagle.ops.rope import RopeConfig
from peagle.policy import Costs, Outlook
from peagle.state import FRESH_ROOM, _behind, overdue, put_first
from tests.drafter.cases import random_params
from tests.peagle.toys import CONFIG, FixedLogits, MarkovTarget, Scripted, decode, tiny_target

CAPACITY, NEW, K = 160, 120, 3
LADDER = (0, 1, 2, 3)
DRAFTER = DrafterConfig(
    hidden_size=20,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_width=28,
    target_hidden_size=CONFIG.hidden_size,
    vocab_size=CONFIG.vocab_size,
    draft_vocab_size=CONFIG.vocab_size,
    mask_token_id=3,
    rope=RopeConfig(6, 10000.0),
    num_taps=2,
)
PROMPTS = [tuple(np.random.default_rng(s).integers(0, CONFIG.vocab_size, n).tolist()) for s, n in ((0, 5), (1, 19))]


LEARN = jax.jit(policy.learn, static_argnames="ladder")
WIDTH = jax.jit(policy.width, static_argnames=("ladder", "drafted"))


def costs(draft: float, verify: float, ladder: Sequence[int] = LADDER, resume: float = 0.0) -> Costs:
    """Of a plain step that costs 1, with what each draft adds."""
    sizes = jnp.asarray(ladder, jnp.float32)
    return Costs(draft * sizes, 1 + verify * sizes, jnp.asarray(resume, jnp.float32))


def shape(k: int = K, batch: int = 1, sampling: SamplingConfig = SamplingConfig()) -> SpeculationConfig:  # noqa: B008
    return SpeculationConfig(k, batch, CAPACITY, sampling, adaptive=k > 0)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [Request(i, prompt, NEW) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def plain(target, requests) -> list[list[int]]:
    return decode(Engine(target, NoDrafter(), shape(0)), requests)[0]


def scripted(plain: list[list[int]], row: int, right: float) -> Scripted:
    """Drafts that are right with this probability."""
    script = np.array([*PROMPTS[row], *plain[row], *[0] * 16])
    wrong = np.random.default_rng(row).random(script.shape) >= right
    return Scripted(jnp.asarray(np.where(wrong, (script + 1) % CONFIG.vocab_size, script)[None], jnp.int32))


@pytest.mark.parametrize("together", [1, 8])
@pytest.mark.parametrize("price", [0.0, 0.1, 0.5])
def test_whatever_is_chosen_the_tokens_are_plain_decodings(target, requests, plain, price, together) -> None:
    engine = Engine(
        target, scripted(plain, 0, 0.6), shape(), steps_per_dispatch=together, costs=costs(price / 2, price)
    )
    (tokens,), (decisions,) = decode(engine, requests[:1])
    assert tokens == plain[0]
    lengths = [decision.length for decision in decisions]
    assert lengths == [
        len(PROMPTS[0]) + sum(d.num_accepted + 1 for d in decisions[:step]) for step in range(len(decisions))
    ]
    widths = {len(decision.draft_token_ids) for decision in decisions}
    assert widths <= set(LADDER)
    assert all(decision.num_accepted <= len(decision.draft_token_ids) for decision in decisions)


def test_rows_of_a_batch_and_early_ends(target, requests, plain) -> None:
    engine = Engine(target, NGram(), shape(2, batch=3), costs=costs(0.02, 0.1, (0, 1, 2)))
    uneven = [requests[0], dataclasses.replace(requests[1], max_new_tokens=31)]
    assert decode(engine, uneven)[0] == [plain[0], plain[1][:31]]
    stop = plain[0][17]
    ended = Engine(target, scripted(plain, 0, 0.7), shape(), (stop,), costs=costs(0.02, 0.1))
    assert decode(ended, requests[:1])[0] == [plain[0][: plain[0].index(stop) + 1]]


def test_one_hot_drafts_under_sampling_emit_plain_samplings_tokens(target) -> None:
    sampling = SamplingConfig(0.8, top_k=9, top_p=0.9)
    requests = [Request(i, prompt, 60, seed=3) for i, prompt in enumerate(PROMPTS)]
    plain, _ = decode(Engine(target, NoDrafter(), shape(0, sampling=sampling)), requests)
    adaptive = Engine(target, NGram(), shape(2, batch=2, sampling=sampling), costs=costs(0.01, 0.2, (0, 1, 2)))
    assert decode(adaptive, requests)[0] == plain


SAMPLED = SpeculationConfig(2, 6, 16, SamplingConfig(1.0, draft_sampling=True), adaptive=True)


@flax.struct.dataclass
class Confident(FixedLogits):
    """Distributions that change with the position, and their confidence."""

    def propose(self, state: None, fresh: Fresh, num_drafts: int) -> tuple[Draft, None]:
        place = (fresh.first_position + fresh.num)[:, None] + jnp.arange(num_drafts, dtype=jnp.int32)[None, :]
        logits = self.logits[place % self.logits.shape[0]]
        confidence = jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1)
        return Draft(jnp.argmax(logits, axis=-1).astype(jnp.int32), logits, confidence), state


@pytest.mark.parametrize(("price", "chosen"), [(0.18, (1, 2)), (0.35, (0, 1))])
def test_sampled_drafts_of_chosen_widths_follow_the_targets_law(price: float, chosen: tuple[int, ...]) -> None:
    """Where confidence, history and costs all move the width, rows still follow the product of p. They run in small
    batches, so that there are many histories; some places have drafts that are sure and mostly wrong."""
    rng = np.random.default_rng(1)
    table = rng.normal(0, 1, (3, 3))
    p = np.exp(table) / np.exp(table).sum(-1, keepdims=True)
    drafts = [[0.2, 0, 0.1], [0, 0.3, 0.1], [0, 0, 5.0], [0.4, 0.3, 0], [4.0, 0, 0]]
    engine = Engine(
        MarkovTarget(jnp.asarray(table, jnp.float32)),
        Confident(jnp.asarray(drafts, jnp.float32)),
        SAMPLED,
        costs=costs(0.05, price, (0, 1, 2)),
    )
    rows = 8000
    outputs, decisions = decode(engine, [Request(i, (0,), 5) for i in range(rows)])
    widths = [len(decision.draft_token_ids) for steps in decisions for decision in steps]
    assert all(widths.count(width) > 500 for width in chosen), [widths.count(width) for width in (0, 1, 2)]
    counts = np.zeros((3, 3, 3))
    np.add.at(counts, tuple(np.array(outputs)[:, 2:].T), 1)
    expected = np.einsum("a,ab,bc,cd,de->cde", p[0], p, p, p, p) * rows
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 60  # 26 degrees of freedom: P < 2e-4


def test_a_width_is_no_function_of_what_was_drawn() -> None:
    """The same state under other random numbers drafts other tokens, and chooses the same widths."""
    rng = np.random.default_rng(3)
    target = MarkovTarget(jnp.asarray(rng.normal(0, 1, (3, 3)), jnp.float32))
    drafter = Confident(jnp.asarray(rng.normal(0, 1.5, (5, 3)), jnp.float32))
    seen = []
    for seed in range(12):
        engine = Engine(target, drafter, SAMPLED, costs=costs(0.01, 0.12, (0, 1, 2)))
        emissions = list(engine.generate([Request(0, (1, 2), 12, seed=seed)]))
        seen.append(emissions[1].decision)
    assert len({len(decision.draft_token_ids) for decision in seen}) == 1
    assert len({decision.draft_token_ids for decision in seen}) > 3


def test_a_drafter_that_never_hits_is_left_alone(target, requests, plain) -> None:
    engine = Engine(target, scripted(plain, 0, 0.0), shape(), costs=costs(0.05, 0.2))
    (tokens,), (decisions,) = decode(engine, requests[:1])
    assert tokens == plain[0]
    tried = [number for number, decision in enumerate(decisions) if decision.draft_token_ids]
    assert tried[0] == 0, "it is tried at once"
    assert len(tried) <= 10
    used_up, *rests = [rest for rest in np.diff(tried) if rest > 1]
    assert used_up > 1 / policy.ALLOWANCE, "the credit is used up, and that takes many plain steps to mend"
    assert rests == sorted(rests), "and then ever more seldom"


@pytest.mark.parametrize("together", [1, generate.STEPS_THAT_SHARE_A_CHOICE])
def test_a_drafter_of_which_nothing_was_seen_is_asked(target, requests, plain, together) -> None:
    """Also where what is thought of an unknown one would not pay: it may be better than that."""
    dear = costs(0.4, 0.5)
    survival = policy.FIRST_SURVIVAL ** np.arange(K + 1)
    rates = np.cumsum(survival) / (dear.draft_ms + dear.verify_ms)
    assert max(rates[1:]) < policy.PROMISE * rates[0]
    engine = Engine(target, scripted(plain, 0, 1.0), shape(), steps_per_dispatch=together, costs=dear)
    (tokens,), (decisions,) = decode(engine, requests[:1])
    assert tokens == plain[0]
    widths = [len(decision.draft_token_ids) for decision in decisions]
    assert widths[0] > 0
    assert np.count_nonzero(widths) > 0.5 * len(widths), "it pays, and goes on"


@pytest.mark.parametrize(("right", "usual"), [(0.0, 0), (1.0, K), (0.6, None)])
def test_steps_of_a_dispatch_share_what_was_chosen_for_them(target, requests, plain, right, usual) -> None:
    together = generate.STEPS_THAT_SHARE_A_CHOICE
    engine = Engine(target, scripted(plain, 0, right), shape(), steps_per_dispatch=together, costs=costs(0.05, 0.2))
    engine.warm_up(requests[:1])
    before = trace_counts()
    assert len(engine.compiled(requests[:1])) == len(LADDER), "each has a program"
    (tokens,), (decisions,) = decode(engine, requests[:1])
    again = decode(engine, requests[:1])
    assert trace_counts() == before
    assert tokens == again[0][0] == plain[0]
    widths = [len(decision.draft_token_ids) for decision in decisions]
    shared, few = [len(list(run)) for _, run in itertools.groupby(widths)], policy.FEW_STEPS
    if right == 1.0:
        assert min(widths[:-1]) > 0, "the first few are waited for, and then it goes on"
    else:
        assert shared[0] == few, "the first drafts are to find out"
        assert all(length % together == 0 or length == few for length in shared[1:-1]), shared
    if usual is not None:
        assert widths.count(usual) > 0.5 * len(widths), widths
        assert len(again[1][0][-1].draft_token_ids) == usual, "and the next request begins with that"


@given(st.integers(0, 10_000))
@settings(max_examples=25)
def test_steps_that_share_a_choice_teach_what_one_step_would(seed: int) -> None:
    """All of them together move the estimates as far, and the credit by all they gained."""
    rng = np.random.default_rng(seed)
    known, rung = outlook(rng), int(rng.integers(1, len(LADDER)))
    accepted = np.sort(rng.integers(0, LADDER[rung] + 1, 1))
    draws, undone = np.repeat(accepted, 5)[:, None], np.full((3, 1), -1)
    of_host = on_host(known)
    together = policy.learn_together(of_host, LADDER, rung, np.concatenate([draws, undone]))
    one = LEARN(known, LADDER, rung, rung, jnp.zeros((1, K)), jnp.asarray(accepted), jnp.ones((1,), bool))
    alone = policy.learn_together(of_host, LADDER, rung, draws[:1])
    assert all(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves((alone, together)))
    for name in ("survival", "credit", "resting", "pause", "choice", "rate"):
        np.testing.assert_allclose(getattr(alone, name), getattr(one, name), rtol=1e-5, atol=1e-5, err_msg=name)
    seen = (np.arange(K) < accepted)[: LADDER[rung]].astype(np.float32)
    weight = policy.LEARN_FROM_PROBE if int(known.pause) > policy.FIRST_PAUSE else policy.LEARN
    moved = seen + (1 - weight) ** 5 * (np.asarray(known.survival)[: LADDER[rung]] - seen)
    np.testing.assert_allclose(together.survival[: LADDER[rung]], moved, atol=1e-5)
    assert policy.learn_together(of_host, LADDER, rung, undone) is of_host


@given(st.integers(0, 10_000))
@settings(max_examples=25)
def test_the_host_begins_requests_as_the_device_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, last = outlook(rng), outlook(rng)
    of_device, of_host = policy.again(LADDER, first, last), policy.again(LADDER, on_host(first), on_host(last))
    for name in ("survival", "credit", "resting", "pause", "choice", "rate"):
        np.testing.assert_allclose(getattr(of_host, name), getattr(of_device, name), rtol=1e-5, err_msg=name)
    jax.tree.map(np.testing.assert_allclose, policy.begin(LADDER, last.costs), policy.begin(LADDER, last.costs, np))


def plans(monkeypatch: pytest.MonkeyPatch, *rest: tuple[int, int, bool]) -> list[Outlook]:
    """Outlooks that say (plain steps first, the rung then, whether that is to find out). The first is a course's; it
    learns the others, whatever it sees."""
    blank = policy.begin(LADDER, costs(0.1, 0.1), np)
    outlooks = [
        dataclasses.replace(
            blank,
            resting=np.asarray(resting),
            choice=np.asarray(rung),
            pause=np.asarray(2 * policy.FIRST_PAUSE if probes else policy.FIRST_PAUSE),
        )
        for resting, rung, probes in rest
    ]
    learned = iter(outlooks[1:])
    monkeypatch.setattr(policy, "learn_together", lambda *_: next(learned))
    return outlooks


def test_a_course_rests_drafts_and_waits_for_what_a_probe_finds(monkeypatch) -> None:
    first, *_ = plans(monkeypatch, (20, 2, False), (9, 3, True), (0, 3, False), (100, 3, True))
    course, seen = policy.Course(LADDER, first), np.zeros((8, 1), int)
    plain, drafts = (0, 8), (3, 8)
    assert [course.choose(8) for _ in range(5)] == [plain] * 3 + [(2, 8)] * 2, "20 plain steps are three dispatches"
    course.learn(2, seen)
    assert [course.choose(8) for _ in range(5)] == [plain, plain, drafts, plain, plain], "it probes once"
    course.learn(3, seen)
    assert [course.choose(8) for _ in range(3)] == [drafts] * 3
    assert course.outlook.resting == 0
    course.learn(3, seen)
    assert course.choose(8) == plain
    assert course.outlook.resting == 92


def test_a_new_drafters_course_is_few_steps_at_a_time_until_it_pays(monkeypatch) -> None:
    few, plain, drafts = (3, policy.FEW_STEPS), (0, 8), (3, 8)
    first, *_ = plans(monkeypatch, (0, 3, False), (9, 3, True), (0, 3, False), (1, 3, True))
    course, seen = policy.Course(LADDER, first, new=True), np.zeros((8, 1), int)
    assert not course.waits
    assert course.choose(8) == few
    assert course.waits, "and nothing is sent off before it has ended"
    course.learn(3, seen)
    assert not course.waits, "it did not pay: it rests"
    assert [course.choose(8) for _ in range(3)] == [plain, plain, few], "and is asked again"
    assert course.waits
    course.learn(3, seen)
    assert [course.choose(8) for _ in range(2)] == [drafts] * 2, "it paid"
    course.learn(3, seen)
    assert [course.choose(8) for _ in range(2)] == [plain, drafts], "and is known from then on"
    assert not course.waits


def test_where_no_draft_can_pay_plain_decodings_own_program_runs(target, requests, plain) -> None:
    dear, fair = costs(1.0, 0.2), costs(0.1, 0.2)
    assert not policy.can_pay(LADDER, dear), "a draft for the time of a token"
    assert policy.can_pay(LADDER, fair)
    beside = Engine(target, NoDrafter(), shape().plain)
    for prices, drafts in ((dear, False), (fair, True)):
        engine = Engine(target, scripted(plain, 0, 1.0), shape(), costs=prices, plain=beside)
        engine.warm_up(requests[:1])
        assert engine.compile_s > 0
        before = trace_counts()
        (tokens,), (decisions,) = decode(engine, requests[:1])
        assert trace_counts() == before
        assert tokens == plain[0]
        assert any(decision.draft_token_ids for decision in decisions) is drafts


@pytest.mark.parametrize("together", [1, 8])
def test_a_request_that_a_rest_outlasts_is_plain_decodings_own(target, requests, plain, together, monkeypatch) -> None:
    beside = Engine(target, NoDrafter(), shape().plain)
    never = scripted(plain, 0, 0.0)
    engine = Engine(target, never, shape(), steps_per_dispatch=together, costs=costs(0.05, 0.5), plain=beside)
    short = dataclasses.replace(requests[0], max_new_tokens=30)
    engine.warm_up([short])
    before, decode_plainly, theirs = trace_counts(), beside._decode, []
    monkeypatch.setattr(beside, "_decode", lambda *given: theirs.append(given) or decode_plainly(*given))
    handed_over = []
    for number in range(24):
        resting = int(engine._outlooks[1].resting) if number else 0
        assert decode(engine, [short])[0] == [plain[0][:30]]
        handed_over.append(len(theirs) > sum(handed_over))
        assert handed_over[-1] is (resting >= 30)
        if handed_over[-1]:
            assert int(engine._outlooks[1].resting) == resting - 30
    assert sum(handed_over) > 5
    assert True in handed_over[handed_over.index(True) + 2 :], "and again, behind another probe"
    assert False in handed_over[handed_over.index(True) :], "it probes again"
    assert trace_counts() == before


@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 0.4), st.floats(0, 0.6), st.floats(0, 5))
@settings(max_examples=25, deadline=None)
def test_by_its_own_costs_little_is_lost_on_any_text(
    seed: int, right: float, draft: float, verify: float, resume: float
) -> None:
    """However often drafts are right, and however sure they look: a text is never slower than plain decoding by more
    than the credit, the allowance and two bad steps."""
    rng, prices = np.random.default_rng(seed), costs(draft, verify, resume=resume)
    known, took, tokens, dearest = policy.begin(LADDER, prices), 0.0, 0, 0.0
    for _ in range(120):
        if (rest := int(known.resting)) > 0:
            known, took, tokens = (
                dataclasses.replace(known, resting=jnp.zeros_like(known.resting)),
                took + rest,
                tokens + rest,
            )
        probes, confidence = bool(policy._probes(known)), jnp.asarray(rng.uniform(0, 1, (1, K)), jnp.float32)
        drafted = known.choice
        verified = WIDTH(known, LADDER, len(LADDER) - 1, confidence, jnp.ones((1,), bool))
        verified = jnp.minimum(verified, drafted)
        hits = rng.random(LADDER[int(verified)]) < right
        accepted = int(np.argmin(np.append(hits, False)))
        step = float(prices.draft_ms[int(drafted)] + prices.verify_ms[int(verified)]) + probes * resume
        known = LEARN(known, LADDER, drafted, verified, confidence, jnp.asarray([accepted]), jnp.ones((1,), bool))
        took, tokens, dearest = took + step, tokens + 1 + accepted, max(dearest, step)
        assert took <= tokens * (1 + policy.ALLOWANCE) + policy.FIRST_CREDIT + 2 * dearest


def test_a_drafter_that_always_hits_drafts_all_it_can(target, requests, plain) -> None:
    engine = Engine(target, scripted(plain, 0, 1.0), shape(), costs=costs(0.02, 0.1))
    (tokens,), (decisions,) = decode(engine, requests[:1])
    assert tokens == plain[0]
    assert all(len(decision.draft_token_ids) == K for decision in decisions[8:])
    assert len(decisions) < NEW / (K + 1) + 5


def test_a_text_that_becomes_easy_is_found_again(target, requests, plain) -> None:
    hard = scripted(plain, 0, 0.0).script
    easy = scripted(plain, 0, 1.0).script
    switch = len(PROMPTS[0]) + 40
    mixed = Scripted(jnp.where(jnp.arange(hard.shape[1])[None, :] < switch, hard, easy))
    engine = Engine(target, mixed, shape(), costs=costs(0.02, 0.1))
    (tokens,), (decisions,) = decode(engine, requests[:1])
    assert tokens == plain[0]
    lately = [decision.num_accepted for decision in decisions[-5:-1]]
    assert min(lately) >= 2, "drafts are taken again"


def test_what_a_request_taught_the_next_one_begins_with(target, requests, plain) -> None:
    engine = Engine(target, scripted(plain, 0, 0.0), shape(), costs=costs(0.05, 0.2))
    counts = [sum(bool(d.draft_token_ids) for d in decode(engine, requests[:1])[1][0]) for _ in range(3)]
    assert counts[2] < counts[0]


def outlook(rng: np.random.Generator) -> Outlook:
    survival = np.cumprod(rng.uniform(0.2, 1.0, K))
    bins = len(policy.BIN_CENTRES)
    trials = rng.uniform(0, 40, bins)
    first = policy.begin(
        LADDER,
        Costs(*(jnp.asarray(np.sort(rng.uniform(0.5, 4, len(LADDER))), jnp.float32) for _ in "dv"), jnp.asarray(0.5)),
    )
    return dataclasses.replace(
        first,
        survival=jnp.asarray(survival, jnp.float32),
        trials=jnp.asarray(trials, jnp.float32),
        hits=jnp.asarray(trials * rng.uniform(0, 1, bins), jnp.float32),
        rate=jnp.asarray(rng.uniform(0.2, 2), jnp.float32),
        pause=jnp.asarray(policy.FIRST_PAUSE << int(rng.integers(2)), jnp.int32),
    )


def on_host(known: Outlook) -> Outlook:
    """The same in NumPy's arrays."""
    copied: Outlook = jax.tree.map(np.asarray, known)
    return copied


@given(st.integers(0, 10_000))
def test_the_width_is_the_best_by_its_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    known, drafted = outlook(rng), int(rng.integers(1, len(LADDER)))
    confidence = rng.uniform(0, 1, (3, K)).astype(np.float32)
    active = np.array([True, *(rng.random(2) < 0.7)])
    centres, edges = np.array(policy.BIN_CENTRES), (-np.inf, *policy.BIN_EDGES, np.inf)
    best, best_value = 0, -np.inf
    for rung in range(int(known.pause) > policy.FIRST_PAUSE, drafted + 1):
        gained = 0.0
        for row in np.flatnonzero(active):
            chance = 1.0
            for place in range(LADDER[rung]):
                own = next(b for b in range(len(centres)) if edges[b] < confidence[row, place] <= edges[b + 1])
                hits, trials = float(known.hits[own]), float(known.trials[own])
                was = (policy.PRIOR_TRIALS * centres[own] + hits) / (policy.PRIOR_TRIALS + trials)
                chance *= float(np.clip(confidence[row, place] + was - centres[own], 0, 1))
                gained += chance / active.sum()
        value = gained - float(known.rate) * float(known.costs.verify_ms[rung])
        if value > best_value + 1e-5:
            best, best_value = rung, value
    found = int(WIDTH(known, LADDER, drafted, jnp.asarray(confidence), jnp.asarray(active)))
    assert found == best


def test_confidences_are_calibrated_by_what_was_seen() -> None:
    """Drafts of confidence .92 that are right half of the time are soon taken for what they are."""
    known = policy.begin(LADDER, costs(0.01, 0.01))
    rng = np.random.default_rng(0)
    confidence = jnp.full((1, K), 0.92)
    assert policy.chances(known, confidence)[0, 0] == pytest.approx(0.92)
    survival = []
    for _ in range(300):
        accepted = int(np.argmin(np.append(rng.random(K) < 0.5, False)))
        rung = jnp.asarray(len(LADDER) - 1)
        known = LEARN(known, LADDER, rung, rung, confidence, jnp.asarray([accepted]), jnp.ones((1,), bool))
        survival.append(np.asarray(known.survival[:3]))
    assert float(policy.chances(known, confidence)[0, 0]) == pytest.approx(0.5, abs=0.12)
    assert np.mean(survival[30:], axis=0) == pytest.approx([0.5, 0.25, 0.125], abs=0.08)


def test_overdue_rows_and_the_last_ones() -> None:
    """The example of overdue's docstring."""
    letters = np.array([ord(letter) for letter in "efcdef??"])
    waiting = Fresh(
        jnp.asarray(letters[None], jnp.int32),
        jnp.asarray(letters[None, :, None], jnp.float32),
        jnp.asarray([6], jnp.int32),
        jnp.asarray([10], jnp.int32),
    )
    for fresh, rows, first in zip(overdue(waiting, 1), ("cde", "f"), (12, 15), strict=True):
        assert "".join(map(chr, fresh.token_ids[0, : len(rows)].tolist())) == rows
        assert fresh.aux_hidden[0, : len(rows), 0].tolist() == [ord(letter) for letter in rows]
        assert (fresh.num.tolist(), fresh.first_position.tolist()) == ([len(rows)], [first])


@pytest.mark.parametrize("batch", [1, 2])
def test_what_a_step_committed_and_plain_steps_behind_it_wait_in_order(batch: int) -> None:
    """Rows of the batch had another number accepted, so they come round at another step; the token at position p is p,
    and its hidden p / 2."""
    room, width, first = 6, 3, np.array([10, 30])[:batch]
    parts, behind = jax.jit(overdue, static_argnums=1), jax.jit(_behind)

    def rows(start: np.ndarray, count: int) -> tuple[jax.Array, jax.Array]:
        tokens = start[:, None] + np.arange(count)
        return jnp.asarray(tokens, jnp.int32), jnp.asarray(tokens[:, :, None] / 2, jnp.float32)

    def fresh(start: np.ndarray, count: int, num: np.ndarray) -> Fresh:
        return Fresh(*rows(start, count), jnp.asarray(num, jnp.int32), jnp.asarray(start, jnp.int32))

    accepted = np.array([3, 1])[:batch]
    waiting = put_first(fresh(first, width, accepted), fresh(first * 0 + 90, 2 * room, accepted))
    for number in range(17):
        num = accepted + number
        lost = np.maximum(num - room, 0)
        older, newer = parts(waiting, width)
        assert newer.token_ids.shape == waiting.token_ids.shape
        before = np.maximum(num - lost - width, 0)
        assert older.num.tolist() == before.tolist()
        assert newer.num.tolist() == (num - lost - before).tolist()
        assert newer.first_position.tolist() == (first + lost + before).tolist()
        assert older.first_position.tolist() == np.where(before > 0, first + lost, -1).tolist()
        for row in range(batch):
            expected = np.arange(first[row] + lost[row], first[row] + num[row])
            split = before[row]
            assert older.token_ids[row, :split].tolist() == expected[:split].tolist()
            assert older.aux_hidden[row, :split, 0].tolist() == (expected[:split] / 2).tolist()
            assert newer.token_ids[row, : len(expected) - split].tolist() == expected[split:].tolist()
            assert newer.aux_hidden[row, : len(expected) - split, 0].tolist() == (expected[split:] / 2).tolist()
        waiting = behind(fresh(first + num, 1, num * 0 + 1), waiting)


def test_a_real_drafter_goes_on_after_rests_of_any_length(requests) -> None:
    """The tokens are plain decoding's, and as long as all that waited had room its confidences are those of a drafter
    that never rested."""
    target = tiny_target(aux_layer_ids=(0, 1))
    drafter = PEagle(random_params(DRAFTER), DRAFTER)
    plain, _ = decode(Engine(target.replace(aux_layer_ids=()), NoDrafter(), shape(0)), requests[:1])
    fixed, always = decode(Engine(target, drafter, SpeculationConfig(1, 1, CAPACITY)), requests[:1])
    resting = Engine(target, drafter, SpeculationConfig(1, 1, CAPACITY, adaptive=True), costs=costs(0.1, 0.01, (0, 1)))
    adaptive, sometimes = decode(resting, requests[:1])
    assert adaptive == fixed == plain
    tried = [decision.length for decision in sometimes[0] if decision.draft_token_ids]
    assert max(np.diff(tried)) > FRESH_ROOM
    assert 1 < sorted(set(np.diff(tried)))[1] < FRESH_ROOM
    known = {decision.length: decision for decision in always[0]}
    lost = next(here for before, here in itertools.pairwise(tried) if here - before > FRESH_ROOM)
    alike = [decision for decision in sometimes[0] if decision.length in tried and decision.length < lost]
    assert any(decision.length - before > 1 for before, decision in zip(tried, alike[1:], strict=False))
    for decision in alike:
        assert decision.draft_token_ids == known[decision.length].draft_token_ids
        assert decision.confidence == pytest.approx(known[decision.length].confidence, rel=1e-4)


@pytest.mark.parametrize(("together", "pause"), [(1, FRESH_ROOM - 5), (4, 1)])
def test_sequences_of_a_batch_catch_up_together_each_with_its_own_rows(requests, monkeypatch, together, pause) -> None:
    """Those of the batch have another number of rows waiting; each drafts as if the drafter had never rested. Of four
    steps that share a choice at least two such dispatches rest."""
    monkeypatch.setattr(generate, "STEPS_THAT_SHARE_A_CHOICE", 4)
    target = tiny_target(aux_layer_ids=(0, 1))
    drafter = PEagle(random_params(DRAFTER), DRAFTER)
    fixed, always = decode(Engine(target, drafter, SpeculationConfig(2, 2, CAPACITY)), requests)
    begin = policy.begin
    monkeypatch.setattr(policy, "begin", lambda *given: policy.hold(begin(*given), 2, 2, pause))
    adaptive = SpeculationConfig(2, 2, CAPACITY, adaptive=True)
    engine = Engine(target, drafter, adaptive, steps_per_dispatch=together, costs=costs(0.1, 0.1, (0, 1, 2)))
    held, sometimes = decode(engine, requests)
    assert held == fixed
    rests = np.diff([number for number, decision in enumerate(sometimes[0]) if decision.draft_token_ids]) - 1
    assert rests.max() >= max(pause, together)
    for row in range(2):
        known = {decision.length: decision for decision in always[row]}
        alike = [one for one in sometimes[row] if one.draft_token_ids and one.length in known]
        assert len(alike) > 2
        for decision in alike:
            assert decision.draft_token_ids == known[decision.length].draft_token_ids
            assert decision.confidence == pytest.approx(known[decision.length].confidence, rel=1e-4)


def test_no_retrace_and_no_hidden_copy(target, requests) -> None:
    config, ladder = dataclasses.replace(shape(1), capacity=4096), (0, 1)
    engine = Engine(target, NGram(), config, costs=costs(0.1, 0.1, ladder))
    engine.warm_up(requests)
    before = trace_counts()
    decode(engine, requests)
    engine.costs = costs(0.3, 0.1, ladder)
    decode(engine, requests)
    assert trace_counts() == before
    state, *_ = engine._start(requests[:1], 32)
    caches = sum(leaf.nbytes for leaf in jax.tree.leaves((state.target_cache, state.drafter_state)))
    memory = engine.compiled(requests[:1])[0].memory_analysis()
    assert memory.alias_size_in_bytes >= caches
    fixed = Engine(target, NGram(), dataclasses.replace(config, adaptive=False))
    one = fixed.compiled(requests[:1])[0].memory_analysis()
    assert memory.temp_size_in_bytes < one.temp_size_in_bytes + caches / 4


def test_a_choice_needs_more_than_zero() -> None:
    with pytest.raises(InputError, match="K = 0 leaves nothing to choose from"):
        SpeculationConfig(0, adaptive=True)
    assert SpeculationConfig(4, adaptive=True).ladder == (0, 1, 2, 3, 4)
    assert SpeculationConfig(4).ladder == (4,)
