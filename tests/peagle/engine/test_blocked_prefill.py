"""A prompt that is prefilled at once, in blocks of rows, leaves what chunks leave."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from peagle.engine.engine import Engine
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig
from peagle.ops import native
from peagle.ops.errors import InputError
from peagle.ops.expert_matmul import NativeExperts
from peagle.ops.row_blocks import BlockedPrefill, RowBlocks
from tests.support.models import TARGET, Models, models
from tests.support.toys import MarkovTarget, decode

CAPACITY, K = 3 * 128 - 20, 3
TOKENS = tuple(np.random.default_rng(8).integers(0, TARGET.vocab_size, CAPACITY).tolist())


@pytest.fixture(scope="module", params=["native float32", pytest.param("float32", marks=pytest.mark.slow)])
def pair(request: pytest.FixtureRequest) -> Models:
    if request.param.startswith("native") and not native.available():
        pytest.skip(native.status()[1])
    return models(request.param)


def engine(pair: Models, prefill: str, **options: object) -> Engine:
    shape = {"num_speculative_tokens": K, "context": CAPACITY, "prefill": prefill, "prefill_chunk": 32, **options}
    return Engine(pair.target, pair.drafter, ResolvedConfig(**shape))


def test_requests_get_what_they_get_in_chunks(pair: Models) -> None:
    """Tokens, drafts and what was accepted; more requests than slots."""
    requests = [Request(TOKENS[:length], 20) for length in (1, 40, 128, 300, 129)]
    expected = decode(engine(pair, "chunked", slots=2), requests)
    answers = decode(engine(pair, "blocked", slots=2), requests)
    if isinstance(pair.target.params.layers[0].moe.experts, NativeExperts):
        assert answers == expected
    else:  # a near tie may turn
        assert sum(map(list.__eq__, answers[0], expected[0])) >= len(requests) - 1


def test_a_known_beginning_is_not_computed_again(pair: Models) -> None:
    prompts = [Request(TOKENS[:length], 12) for length in (140, 300, 128)]
    expected = [decode(engine(pair, "blocked"), [request]) for request in prompts]
    warm = engine(pair, "blocked", prefix_cache=1 << 20)
    answers = [decode(warm, [request]) for request in prompts]
    assert warm.prefix_cache_use is not None
    assert warm.prefix_cache_use.num_hit_tokens == 2 * 128
    if isinstance(pair.target.params.layers[0].moe.experts, NativeExperts):
        assert answers == expected


def test_blocks_are_of_128_and_of_at_most_2048_rows() -> None:
    for capacity, query, expert in ((100, 128, 128), (2048, 128, 2048), (2049, 128, 1088), (8192, 128, 2048)):
        assert BlockedPrefill().rows(capacity) == RowBlocks(query, expert)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"query_blocks": 5}, "query_blocks is 5; expected a number that divides 384"),
        ({"ffn_blocks": 0}, "ffn_blocks is 0; .*: 1, 2, 3, 4, 6, 8, 12, 16"),
    ],
)
def test_impossible_blocks_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        ResolvedConfig(context=CAPACITY, prefill="blocked", **options)


def test_a_target_without_it_is_refused() -> None:
    with pytest.raises(InputError, match="does not prefill at once"):
        Engine(MarkovTarget(jnp.zeros((5, 5))), None, ResolvedConfig(prefill="blocked"))
