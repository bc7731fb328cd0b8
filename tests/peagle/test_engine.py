"""Losslessness of the loop: speculation emits plain decoding's tokens, whatever the drafter does."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.autoregressive import NoDrafter
from peagle.config import SamplingConfig, SpeculationConfig
from peagle.generate import Emission, Engine, Request, trace_counts
from peagle.ngram import NGram
from peagle.ops.errors import InputError
from peagle.protocols import Drafter
from tests.peagle.toys import CONFIG, WINDOW, FixedLogits, MarkovTarget, Scripted, decode, tiny_target

CAPACITY, NEW = 96, 60
PROMPTS = [
    tuple(np.random.default_rng(s).integers(0, CONFIG.vocab_size, n).tolist()) for s, n in ((0, 5), (1, 19), (2, 9))
]


def run(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """The tokens of each request, by order of the requests."""
    return decode(engine, requests)[0]


def config(k: int, batch: int = 1, sampling: SamplingConfig = SamplingConfig()) -> SpeculationConfig:  # noqa: B008
    return SpeculationConfig(k, batch, CAPACITY, sampling)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [Request(i, prompt, NEW) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def plain(target, requests) -> list[list[int]]:
    outputs = run(Engine(target, NoDrafter(), config(0)), requests)
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


@pytest.mark.parametrize("k", [2, 4, 5, 6, 7])
def test_every_other_k_too(target, requests, plain, k: int) -> None:
    engine = Engine(target, drafter_of("sometimes", plain, 1), config(k))
    assert run(engine, [requests[1]]) == [plain[1]]


def test_the_oracle_is_accepted_whole_and_the_adversary_never(target, requests, plain) -> None:
    for kind, expected in (("oracle", 4), ("adversarial", 0)):
        emissions = list(Engine(target, drafter_of(kind, plain, 0), config(4)).generate(requests[:1]))
        decisions = [emission.decision for emission in emissions[1:]]
        assert [decision.num_accepted for decision in decisions] == [expected] * len(decisions)
        length = len(PROMPTS[0])
        for decision in decisions:
            assert decision.length == length
            length += decision.num_accepted + 1


def test_rows_of_a_batch_equal_rows_alone(target, requests, plain) -> None:
    assert run(Engine(target, NoDrafter(), config(0, batch=3)), requests) == plain
    assert run(Engine(target, drafter_of("sometimes", plain), config(3, batch=3)), requests) == plain
    # a batch with an empty place, and rows that end at different times
    uneven = [Request(0, PROMPTS[0], 7), Request(1, PROMPTS[1], 50)]
    outputs = run(Engine(target, NGram(), config(3, batch=3)), uneven)
    assert outputs == [plain[0][:7], plain[1][:50]]


@pytest.mark.parametrize("kind", ["oracle", "sometimes"])
@pytest.mark.parametrize("budget", [1, 2, 5, 6, 7, 8])
def test_a_budget_inside_the_run_cuts_there(target, plain, kind: str, budget: int) -> None:
    engine = Engine(target, drafter_of(kind, plain, 0), config(4))
    assert run(engine, [Request(0, PROMPTS[0], budget)]) == [plain[0][:budget]]


@pytest.mark.parametrize("kind", ["oracle", "sometimes", "ngram"])
def test_a_stop_token_inside_the_run_ends_it_there(target, plain, kind: str) -> None:
    firsts = [i for i, token in enumerate(plain[0]) if token not in plain[0][:i]]
    for end in (firsts[0], firsts[3], firsts[5]):
        stops = (plain[0][end], CONFIG.vocab_size + 5)
        engine = Engine(target, drafter_of(kind, plain, 0), config(4), stops)
        assert run(engine, [Request(0, PROMPTS[0], NEW)]) == [plain[0][: end + 1]]


@pytest.mark.parametrize("sampling", [SamplingConfig(1.0), SamplingConfig(0.8, top_k=9, top_p=0.9)])
def test_sampling_with_one_hot_drafts_emits_plain_samplings_tokens(target, sampling: SamplingConfig) -> None:
    requests = [Request(i, prompt, 30, seed=7) for i, prompt in enumerate(PROMPTS)]
    plain = run(Engine(target, NoDrafter(), config(0, sampling=sampling)), requests)
    other_seed = run(Engine(target, NoDrafter(), config(0, sampling=sampling)), [Request(0, PROMPTS[0], 30, seed=8)])
    assert plain[0] != other_seed[0]
    assert run(Engine(target, NGram(), config(4, 3, sampling)), requests) == plain
    oracle = Scripted(jnp.asarray([[*PROMPTS[0], *plain[0], *[0] * 40]], jnp.int32))
    emissions = list(Engine(target, oracle, config(4, sampling=sampling)).generate(requests[:1]))
    assert [token for emission in emissions for token in emission.token_ids] == plain[0]
    assert emissions[1].decision.num_accepted == 4


def test_sampled_drafts_give_the_targets_frequencies() -> None:
    """The wiring around the proven law: 30000 rows of one engine, the first three tokens against the product of p."""
    rng = np.random.default_rng(1)
    table = rng.normal(0, 1, (3, 3))
    p = np.exp(table) / np.exp(table).sum(-1, keepdims=True)
    sampling = SamplingConfig(1.0, draft_sampling=True)
    rows = 30000
    engine = Engine(
        MarkovTarget(jnp.asarray(table, jnp.float32)),
        FixedLogits(jnp.asarray(rng.normal(0, 1, (2, 3)), jnp.float32)),
        SpeculationConfig(2, rows, 8, sampling),
    )
    outputs = np.array(run(engine, [Request(i, (0,), 4) for i in range(rows)]))
    counts = np.zeros((3, 3, 3))
    np.add.at(counts, tuple(outputs[:, 1:].T), 1)
    expected = np.einsum("a,ab,bc,cd->bcd", p[0], p, p, p) * rows
    assert np.abs(counts - expected).max() < 4.5 * np.sqrt(expected.max())
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 60  # 26 degrees of freedom: P < 2e-4


def test_no_retrace_after_warm_up(target, requests) -> None:
    engine = Engine(target, NGram(longest=2), config(5, batch=2))
    engine.warm_up(requests)
    assert engine.compile_s > 0
    before = trace_counts()
    run(engine, requests)
    run(engine, requests[::-1])
    assert trace_counts() == before
    # the seed, budgets and stop tokens are data, not programs
    run(engine, [Request(0, PROMPTS[0][::-1], 9, seed=5)])
    assert trace_counts() == before


def test_neighbouring_k_and_all_samplings_share_the_program_of_prefill() -> None:
    target = MarkovTarget(jnp.zeros((3, 3), jnp.float32))

    def prefills(k: int, sampling: SamplingConfig = SamplingConfig()) -> int:  # noqa: B008
        before = trace_counts()["prefill"]
        engine = Engine(target, NGram(longest=1), SpeculationConfig(k, capacity=11, sampling=sampling))
        engine._start([Request(0, (0,), 2)], 8)
        return trace_counts()["prefill"] - before

    assert prefills(1) == 1
    assert [prefills(k) for k in (2, 3, 7)] == [0, 0, 0]
    assert prefills(5, SamplingConfig(temperature=0.5, top_k=2)) == 0
    assert prefills(8) == 1  # its caches are longer


@pytest.mark.parametrize("together", [2, 8])
@pytest.mark.parametrize("drafts", [0, 3])
def test_steps_that_are_dispatched_together_change_nothing(target, requests, drafts, together) -> None:
    drafter = NGram(longest=2) if drafts else NoDrafter()

    def emissions(steps_per_dispatch: int) -> list[tuple]:
        engine = Engine(target, drafter, config(drafts, batch=2), steps_per_dispatch=steps_per_dispatch)
        return [(e.request, e.token_ids, e.decision) for e in engine.generate(requests)]

    assert emissions(together) == emissions(1)


@pytest.mark.parametrize("together", [1, 4])
def test_the_step_donates_its_state_and_keeps_no_hidden_copy(target, requests, together) -> None:
    engine = Engine(target, NGram(), SpeculationConfig(3, capacity=4096), steps_per_dispatch=together)
    state, *_ = engine._start(requests[:1], 32)
    donated = sum(leaf.nbytes for leaf in jax.tree.leaves((state.target_cache, state.drafter_state)))
    assert engine.compiled(requests[:1])[0].memory_analysis().alias_size_in_bytes >= donated
    engine._dispatch(state, None, together)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.target_cache))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(0, (), 5), "is empty"),
        (Request(3, (1, 37), 5), "prompt 3 holds token id 37, outside the vocabulary; expected 0..36"),
        (Request(0, (1, -1), 5), "token id -1"),
        (Request(0, (1,) * 90, 7), "90 tokens and 7 new ones are asked for, but the context holds 96"),
        (Request(0, (1,), 0), "0 new tokens asked for"),
    ],
)
def test_requests_that_cannot_run_are_refused_before_any_work(target, request_: Request, message: str) -> None:
    engine = Engine(target, NoDrafter(), config(0))
    with pytest.raises(InputError, match=message):
        next(engine.generate([Request(1, (1, 2), 3), request_]))


def test_emissions_tell_what_was_decided_before_the_cut(target, plain) -> None:
    engine = Engine(target, drafter_of("oracle", plain, 0), config(4))
    emissions: list[Emission] = list(engine.generate([Request(0, PROMPTS[0], 4)]))
    assert [emission.token_ids for emission in emissions] == [tuple(plain[0][:1]), tuple(plain[0][1:4])]
    assert emissions[1].decision.num_accepted == 4
    assert emissions[1].decision.next_token == plain[0][5]
    assert emissions[1].decision.draft_token_ids == tuple(plain[0][1:5])
