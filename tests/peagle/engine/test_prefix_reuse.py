"""Requests that begin with known tokens get what they get cold: tokens, drafts, acceptance, bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from peagle.base.errors import InputError
from peagle.config import SamplingParams
from peagle.drafters.ngram import NGram
from peagle.engine.host.engine import Engine
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig
from peagle.ops.attention import PAGE_SIZE as PAGE
from tests.support.models import TARGET, TOKENS, Models, ask, engine_of, fast_target, models, needs_native
from tests.support.toys import check_whole, decode

pytestmark = pytest.mark.compile

CAPACITY, K = 3 * PAGE + 40, 3
HUGE = 1 << 22


@pytest.fixture(scope="module")
def pair() -> Models:
    return models()


def engine(pair: Models, size: int = HUGE, **options: object) -> Engine:
    shape = {"slots": 2, "context": CAPACITY, "prefill_chunk": 40, "prefix_cache": size}
    return engine_of(pair, **{"k": K, **shape, **options})  # type: ignore[arg-type]


def changed(prompt: tuple[int, ...], index: int) -> tuple[int, ...]:
    return (*prompt[:index], (prompt[index] + 1) % TARGET.vocab_size, *prompt[index + 1 :])


# lengths around pages and chunks; the same again; one that differs in the last token; one that differs early
PROMPTS = [
    *(TOKENS[:length] for length in (2 * PAGE + 5, 2 * PAGE + 5, 2 * PAGE, PAGE, PAGE - 1, 40, 1, 2 * PAGE + 30)),
    *(changed(TOKENS[:length], length - 1) for length in (2 * PAGE + 5, 2 * PAGE, PAGE + 1)),
    changed(TOKENS[: 2 * PAGE + 9], PAGE - 1),
    changed(TOKENS[: 2 * PAGE + 9], 2),
    TOKENS[: 3 * PAGE],
]


@needs_native
@pytest.mark.parametrize(
    ("size", "dtype", "drafter"),
    [
        (1, "float32", "DFlash"),
        (HUGE, "bfloat16", "P-EAGLE"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, "bfloat16", "P-EAGLE"), (HUGE, "float32", "P-EAGLE"), (HUGE, "bfloat16", "DFlash"))
        ),
    ],
)
def test_a_hit_gives_what_a_cold_start_gives(dtype: str, size: int, drafter: str) -> None:
    """With windows in both models; with little memory, known pages give way meanwhile."""
    pair = models(f"native {dtype}", drafter)
    warm, sampling = engine(pair, size), SamplingParams(0.8, seed=3)
    hits = []
    for number, prompt in enumerate(PROMPTS):
        options = {"sampling": sampling, "logprobs": 2} if number % 2 else {}
        expected, none = ask(engine(pair, 0), prompt, **options)
        got, known = ask(warm, prompt, **options)
        assert (got, none) == (expected, 0), number
        hits.append(known)
        check_whole(warm)
    assert hits[0] == 0
    assert hits[1] == 2 * PAGE
    use = warm.prefix_cache_use
    assert use is not None
    assert use.num_requests == len(PROMPTS)
    assert use.num_hits == sum(map(bool, hits))
    assert use.num_tokens == sum(map(len, PROMPTS))
    assert use.num_hit_tokens == sum(hits)
    if size == HUGE:
        assert hits[2:7] == [2 * PAGE, PAGE, 0, 0, 0], "a prompt of whole pages is known whole"
        assert hits[7:] == [2 * PAGE, 2 * PAGE, PAGE, PAGE, 0, 0, 2 * PAGE]
        assert use.num_bytes > 0
    else:
        assert warm.memory.pool.counts.num_evicted > 0


@needs_native
@pytest.mark.parametrize("k", [0, K])
def test_a_next_turn_begins_after_the_answer(pair: Models, k: int) -> None:
    warm, cold = engine(pair, k=k), engine(pair, 0, k=k)
    prompt = TOKENS[: PAGE + 1]
    (answer, _, _), _ = ask(warm, prompt, new=PAGE)
    turn = (*prompt, *answer, 5, 6, 7)
    got, known = ask(warm, turn)
    assert known == 2 * PAGE
    assert got == ask(cold, turn)[0]


@needs_native
def test_requests_at_once_reuse_each_others_prompts(pair: Models) -> None:
    """Also pages that another request still computes behind."""
    requests = [Request(PROMPTS[number], 20, index=number) for number in (0, 1, 7, 8, 2, 0)]
    expected = decode(engine(pair, 0), requests)
    warm = engine(pair)
    assert decode(warm, requests) == expected
    use = warm.prefix_cache_use
    assert use is not None
    assert use.num_hits >= 3
    check_whole(warm)


@pytest.mark.parametrize("known", [PAGE, PAGE + 1, 2 * PAGE])
def test_n_grams_look_back_over_every_token_of_a_reused_prompt(known: int) -> None:
    """The tokens that repeat stand in the known pages alone."""
    target, prompt = fast_target(), (*TOKENS[:known], *TOKENS[10:14])
    shape = ResolvedConfig(K, 1, CAPACITY, prefill_chunk=40, prefix_cache=HUGE)
    cold = decode(Engine(target, NGram(), ResolvedConfig(K, 1, CAPACITY)), [Request(prompt, 8)])
    warm = Engine(target, NGram(), shape)
    decode(warm, [Request(TOKENS[:known], 1)])
    assert decode(warm, [Request(prompt, 8)]) == cold
    assert warm.prefix_cache_use is not None
    assert warm.prefix_cache_use.num_hits == 1


@needs_native
def test_a_request_that_never_drafts_serves_one_that_does(pair: Models) -> None:
    """The drafter reads its prompt, too, since others may begin with it; its answer lacks the drafter's rows."""
    warm, cold = engine(pair, k_per_request=True), engine(pair, 0, k_per_request=True)
    prompt = TOKENS[: PAGE + 2]
    (answer, _, _), _ = ask(warm, prompt, new=PAGE, num_speculative_tokens=0)
    expected, _ = ask(cold, prompt)
    assert ask(warm, prompt) == (expected, PAGE)
    turn = (*prompt, *answer)
    assert ask(warm, turn, num_speculative_tokens=0)[1] == 2 * PAGE
    assert ask(warm, turn) == (ask(cold, turn)[0], PAGE)


def test_a_warm_up_is_no_request(pair: Models) -> None:
    warm = engine(pair)
    warm.warm_up(sampled=True)
    use = warm.prefix_cache_use
    assert use is not None
    assert (use.num_requests, use.num_entries) == (0, 0)


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        pytest.param(0, "native float32", marks=needs_native),
        pytest.param(0, "float32", marks=pytest.mark.slow),
        pytest.param(HUGE, "native float32", marks=needs_native),
        pytest.param(HUGE, "float32", marks=pytest.mark.slow),
    ],
)
def test_a_request_that_is_not_finite_disturbs_no_later_one(kind: str, size: int) -> None:
    """It leaves NaN in its pages, which the next request gets."""
    pair = models(kind)
    embedding = np.asarray(pair.target.params.embedding).copy()
    embedding[7] = np.nan
    broken = pair.target.replace(params=pair.target.params.replace(embedding=jnp.asarray(embedding)))
    mixed = Engine(broken, pair.drafter, ResolvedConfig(K, 1, CAPACITY, prefill_chunk=40, prefix_cache=size))
    prompts = [tuple(5 if token == 7 else token for token in TOKENS[:length]) for length in (70, 150)]
    clean = Engine(pair.target, pair.drafter, ResolvedConfig(K, 1, CAPACITY, prefill_chunk=40))
    for prompt in prompts:
        with pytest.raises(InputError, match="not finite"):
            ask(mixed, (*prompt[:66], 7, *prompt[67:]))
        new = 6 if kind.startswith("native") else 1  # on XLA a draft without finite keys spoils the rows before it
        tokens, steps, _ = ask(mixed, prompt, new=new)[0]
        expected = ask(clean, prompt, new=new)[0]
        assert (tokens, len(steps)) == (expected[0], len(expected[1]))
