"""Requests that begin with tokens computed before get what they get cold: tokens, drafts, acceptance, bit for bit."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from peagle.drafters.ngram import NGram
from peagle.engine.engine import Engine, EngineConfig
from peagle.engine.prefix_cache import BLOCK
from peagle.engine.request import Request, SamplingParams, StepRecord, TokenLogprobs
from peagle.engine.widths import WidthTable
from peagle.ops import native
from peagle.ops.errors import InputError
from tests.peagle.engine.test_state import DRAFTER, TARGET, Models, models
from tests.peagle.toys import decode, tiny_target

CAPACITY, K, NEW = 3 * BLOCK + 40, 3, 24
HUGE = 1 << 30
TOKENS = tuple(np.random.default_rng(8).integers(0, TARGET.vocab_size, CAPACITY).tolist())
Answer = tuple[list[int], list[StepRecord], list[TokenLogprobs]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return models("native float32", tmp_path_factory.getbasetemp())


def engine(pair: Models, size: int, **options: object) -> Engine:
    shape = {"slots": 2, "capacity": CAPACITY, "chunk": BLOCK // 2, "prefix_cache_bytes": size}
    return Engine(pair.target, pair.drafter, EngineConfig(**{"num_speculative_tokens": K, **shape, **options}))


def ask(engine: Engine, prompt: tuple[int, ...], **options: object) -> tuple[Answer, int]:
    """Return ((tokens, steps, log-probabilities), tokens of the prompt that were not computed)."""
    (chunks,) = [list(engine.follow(engine.add(Request(prompt, NEW, **options))))]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    steps = [step for chunk in chunks for step in chunk.steps]
    logprobs = [each for chunk in chunks for each in chunk.logprobs]
    return (tokens, steps, logprobs), chunks[0].num_cached_tokens


def changed(prompt: tuple[int, ...], place: int) -> tuple[int, ...]:
    return (*prompt[:place], (prompt[place] + 1) % TARGET.vocab_size, *prompt[place + 1 :])


# lengths around blocks and chunks; the same again; one that differs in the last token; one that differs early
PROMPTS = [
    *(TOKENS[:length] for length in (2 * BLOCK + 5, 2 * BLOCK + 5, 2 * BLOCK, BLOCK, BLOCK - 1, 40, 1, 2 * BLOCK + 30)),
    *(changed(TOKENS[:length], length - 1) for length in (2 * BLOCK + 5, 2 * BLOCK, BLOCK + 1)),
    changed(TOKENS[: 2 * BLOCK + 9], BLOCK - 1),
    changed(TOKENS[: 2 * BLOCK + 9], 2),
    TOKENS[: 3 * BLOCK],
]


@pytest.mark.skipif(not native.available(), reason=native.status()[1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("entries", [2, 100])
def test_a_hit_gives_what_a_cold_start_gives(
    dtype: str, entries: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever was evicted; drafting rows, whose counters tell a drafter's row that is missing, and sampled ones."""
    given = models(f"native {dtype}", tmp_path_factory.getbasetemp())
    cold = engine(given, 0)
    block, snapshot = cold._programs.part_bytes()
    warm, cached = engine(given, entries * (2 * block + snapshot)), []
    for index, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(temperature=0.9, seed=index) if index % 3 == 2 else SamplingParams()
        expected, _ = ask(cold, prompt, sampling=sampling)
        answer, found = ask(warm, prompt, sampling=sampling)
        assert answer == expected, prompt
        cached.append(found)
    assert warm._prefix_cache is not None
    warm._prefix_cache.check_integrity()
    assert sum(found > 0 for found in cached) >= (2 if entries == 2 else 8), cached
    if entries == 100:
        assert cached[:3] == [0, 2 * BLOCK, BLOCK], cached
        assert cached[8] == 2 * BLOCK, "one that differs in the last token"


@pytest.mark.skipif(not native.available(), reason=native.status()[1])
@pytest.mark.parametrize("k", [0, K])
def test_a_next_turn_begins_after_the_answer(pair: Models, k: int) -> None:
    """But for the tokens of the last step; twice, with another turn's request between."""
    cold, warm = (engine(pair, size, num_speculative_tokens=k, slots=1) for size in (0, HUGE))
    prompt, other = TOKENS[:70], changed(TOKENS[:70], 0)
    for turn in range(3):
        expected, _ = ask(cold, prompt)
        answer, found = ask(warm, prompt)
        assert answer == expected
        assert (found > 0) == (turn > 0)
        if turn:
            assert found >= len(prompt) - 5 - (K + 1), "the answer before, and no more is missing than a step"
        prompt = (*prompt, *answer[0], *TOKENS[200 + 5 * turn : 205 + 5 * turn])
        ask(warm, other)


def test_requests_at_once_reuse_each_others_prompts(pair: Models) -> None:
    """On the kernels or on XLA, where rounding may turn a near tie: then tokens are compared up to a hundredth."""
    cold, warm = engine(pair, 0), engine(pair, HUGE)
    asked = [Request(prompt, NEW) for prompt in PROMPTS]
    expected, answers = decode(cold, asked), decode(warm, asked)
    assert warm.prefix_cache_use is not None
    assert warm.prefix_cache_use.num_hits > 5
    if native.available():
        assert answers == expected
    else:
        same = [a == b for a, b in zip(answers[0], expected[0], strict=True)]
        assert sum(same) >= len(same) - 1


@pytest.mark.parametrize("retain_full_kv", [False, True])
def test_n_grams_and_rows_that_draft_no_more_reuse_prompts_too(retain_full_kv: bool) -> None:
    target = dataclasses.replace(tiny_target(), retain_full_kv=retain_full_kv)
    shape = EngineConfig(K, 2, CAPACITY, chunk=BLOCK, widths=WidthTable({1: K, 2: 0}, sampled=False))
    cold = Engine(target, NGram(), shape)
    warm = Engine(target, NGram(), dataclasses.replace(shape, prefix_cache_bytes=HUGE))
    for prompt in (TOKENS[: BLOCK + 9], TOKENS[: BLOCK + 20], TOKENS[: BLOCK + 20]):
        for sampling in (SamplingParams(), SamplingParams(temperature=0.7, seed=1)):
            expected, _ = ask(cold, prompt, sampling=sampling)
            assert ask(warm, prompt, sampling=sampling)[0] == expected
    assert warm.prefix_cache_use is not None
    assert warm.prefix_cache_use.num_hit_tokens >= 4 * BLOCK


@pytest.mark.parametrize("known", [2, 5, 6, 9, 11])
def test_n_grams_look_back_over_every_token_of_a_reused_prompt(known: int) -> None:
    """The prompt's last three tokens occur once before, across the cut, and the last one later with others before it.

    So a token that was left out changes the drafts.
    """
    shape = EngineConfig(K, 1, CAPACITY, chunk=BLOCK)
    target = dataclasses.replace(tiny_target(), retain_full_kv=True)
    cold = Engine(target, NGram(), shape)
    warm = Engine(target, NGram(), dataclasses.replace(shape, prefix_cache_bytes=HUGE))
    once, again = range(9, 22), range(7 + known, 10 + known)
    prompt = (*once, 25, again[-1], 26, *again)
    ask(warm, (*prompt[:known], 30, 31))
    ask(warm, (33,) * 20)  # it leaves its own tokens in the lane
    answer, cached = ask(warm, prompt)
    assert cached == known - 1
    assert answer == ask(cold, prompt)[0]


@pytest.mark.skipif(not native.available(), reason=native.status()[1])
@pytest.mark.parametrize("entries", [3, 100])
@pytest.mark.parametrize("k", [0, K])
def test_without_rings_a_request_begins_anywhere(pair: Models, k: int, entries: int) -> None:
    """With all that it shares with any entry but a token: tokens, drafts, acceptance and log-probabilities are cold.

    After whatever was evicted; cuts within blocks, at their ends, and by one token only.
    """
    retained = Models(*(dataclasses.replace(each, retain_full_kv=True) for each in (pair.target, pair.drafter)))
    shape = {"num_speculative_tokens": k, "slots": 1}
    block, snapshot = engine(retained, HUGE, **shape)._programs.part_bytes()
    assert snapshot is None
    cold, warm = engine(pair, 0, **shape), engine(retained, entries * 2 * block, **shape)
    longest, seen, found = TOKENS[: 2 * BLOCK + 30], set(), []
    cuts = (BLOCK, 1, 2, 77, BLOCK - 1, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 7)
    for index, prompt in enumerate([longest, *(changed(longest, cut) for cut in cuts), longest, TOKENS[:100]]):
        sampling = SamplingParams(temperature=0.9, seed=index) if index % 3 == 2 else SamplingParams()
        expected, _ = ask(cold, prompt, sampling=sampling, logprobs=3)
        answer, cached = ask(warm, prompt, sampling=sampling, logprobs=3)
        assert answer == expected, index
        shared = max((int(np.argmin([*np.equal(prompt, other[: len(prompt)]), False])) for other in seen), default=0)
        found.append((cached, max(0, shared - 1)))
        seen.add(prompt if len(prompt) == len(longest) else longest)
    assert warm._prefix_cache is not None
    warm._prefix_cache.check_integrity()
    if entries == 100:
        assert [cached for cached, _ in found] == [shared for _, shared in found]
    assert sum(cached > 0 for cached, _ in found) >= 5


def test_an_entry_takes_the_bytes_of_its_positions(pair: Models) -> None:
    """Of full layers the rows of its blocks, of rings the window's; and it is counted so."""
    warm = engine(pair, HUGE)
    ask(warm, TOKENS[: 2 * BLOCK])
    use = warm.prefix_cache_use
    assert use is not None
    block, snapshot = warm._programs.part_bytes()
    windows = [TARGET.window(layer) for layer in range(TARGET.num_layers)]
    of_row = 2 * 4 * TARGET.num_kv_heads * TARGET.head_dim  # keys and values, float32
    of_drafter = 2 * 4 * DRAFTER.num_kv_heads * DRAFTER.head_dim
    own = [DRAFTER.window(layer) for layer in range(DRAFTER.num_layers)]
    assert block == BLOCK * (windows.count(None) * of_row + own.count(None) * of_drafter)
    aux = 4 * 2 * TARGET.hidden_size
    rings = sum(each * of_row for each in windows if each) + sum(each * of_drafter for each in own if each)
    assert snapshot == rings + aux
    assert use.num_bytes == 2 * block + use.num_entries * snapshot or use.num_entries > 2


def test_the_end_of_a_turn_has_its_length_after_others_caught_up(pair: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = EngineConfig(
        3,
        2,
        256,
        64,
        widths=WidthTable({1: 1, 2: 3}),
        programs_by_width=True,
        prefix_cache_bytes=HUGE,
        synthetic_acceptance=(1.0, 1.0, 1.0),
    )
    engine = Engine(pair.target, pair.drafter, shape)
    lengths, remember = [], engine._remember

    def seen(token_ids: tuple[int, ...], whole: int) -> None:
        lengths.append((int(engine._lane.length[0]), len(token_ids)))
        remember(token_ids, whole)

    monkeypatch.setattr(engine, "_remember", seen)
    for _ in engine.generate([Request(TOKENS[:20], 18), Request(TOKENS[50:70], 13)]):
        pass
    assert lengths
    assert all(lane == key for lane, key in lengths), lengths


def test_a_chunk_that_is_no_multiple_of_a_block_keeps_blocks_all_the_same(pair: Models) -> None:
    warm = engine(pair, HUGE, chunk=100)
    expected, _ = ask(engine(pair, 0, chunk=100), TOKENS[: 2 * BLOCK + 9])
    ask(warm, (*TOKENS[: 2 * BLOCK + 3], 1))
    assert ask(warm, TOKENS[: 2 * BLOCK + 9]) == (expected, 2 * BLOCK)


def test_a_warm_up_is_no_request(pair: Models) -> None:
    warm = engine(pair, HUGE)
    warm.warm_up()
    use = warm.prefix_cache_use
    assert use is not None
    assert (use.num_requests, use.num_entries) == (0, 0)


@pytest.mark.parametrize("kind", ["native float32", "float32"])
@pytest.mark.parametrize("size", [0, 1 << 30])
def test_a_request_that_is_not_finite_disturbs_no_later_one(kind: str, size: int, tmp_path: Path) -> None:
    """On XLA 0 times NaN is NaN: dead rows of its lane and slot must not be read."""
    if kind.startswith("native") and not native.available():
        pytest.skip(native.status()[1])
    pair = models(kind, tmp_path)
    params = pair.target.params
    (name,) = (f.name for f in dataclasses.fields(params) if "embed" in f.name)
    broken = dataclasses.replace(params, **{name: getattr(params, name).at[5].set(jnp.nan)})
    target = dataclasses.replace(pair.target, params=broken)

    def ask(engine: Engine, prompt: tuple[int, ...]) -> list[int]:
        return [token for chunk in engine.follow(engine.add(Request(prompt, 1))) for token in chunk.token_ids]

    shape = EngineConfig(3, 1, 256, 64, prefix_cache_bytes=size)
    good = tuple(np.random.default_rng(3).integers(6, TARGET.vocab_size, 10).tolist())
    expected = ask(Engine(target, pair.drafter, shape), good)
    engine = Engine(target, pair.drafter, shape)
    with pytest.raises(InputError):
        ask(engine, (*good, *[6] * 40, 5, 6, 7))
    assert ask(engine, good) == expected
