"""A prompt that is prefilled at once, in blocks of rows, leaves what the chunked lane leaves."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from peagle.engine.engine import Engine, EngineConfig
from peagle.engine.request import Request
from peagle.ops import native
from peagle.ops.errors import InputError
from peagle.ops.expert_matmul import NativeExperts
from peagle.ops.row_blocks import BlockedPrefill, RowBlocks
from tests.peagle.engine.test_state import TARGET, Models, everything, models
from tests.peagle.toys import MarkovTarget, decode

CAPACITY, K = 3 * 128 - 20, 3
TOKENS = tuple(np.random.default_rng(8).integers(0, TARGET.vocab_size, CAPACITY).tolist())


@pytest.fixture(scope="module", params=["native float32", "float32"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    if request.param.startswith("native") and not native.available():
        pytest.skip(native.status()[1])
    return models(request.param, tmp_path_factory.getbasetemp())


def engine(pair: Models, blocked: BlockedPrefill | None, **options: object) -> Engine:
    shape = {"num_speculative_tokens": K, "capacity": CAPACITY, "chunk": 32, "blocked": blocked, **options}
    return Engine(pair.target, pair.drafter, EngineConfig(**shape))


def left(engine: Engine, prompt: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Prefill; return what is valid in the lane, and the logits."""
    programs = engine._programs
    _, lane = programs.init()
    for start in range(0, len(prompt), programs.chunk_length):
        lane, logits = programs.extend(lane, start, prompt[start : start + programs.chunk_length])
    return everything(lane, np.asarray(logits))


@pytest.mark.parametrize("blocks", [(1, 1), (3, 1), (12, 2)])
def test_the_lane_holds_what_chunks_leave(pair: Models, blocks: tuple[int | None, int | None]) -> None:
    """On native kernels bit for bit; past the window, with last blocks that are full, part full and of one row."""
    chunked, at_once = engine(pair, None), engine(pair, BlockedPrefill(*blocks))
    for length in (1, 23, 128, 129, CAPACITY):
        expected, found = left(chunked, TOKENS[:length]), left(at_once, TOKENS[:length])
        for name, given in expected.items():
            mine = found[name][len(found[name]) - len(given) :]  # one block of queries needs no ring
            if isinstance(pair.target.params.layers[0].moe.experts, NativeExperts):
                np.testing.assert_array_equal(mine, given, name)
            else:
                np.testing.assert_allclose(mine, given, atol=1e-4 * max(1.0, np.abs(given).max(initial=0)))


def test_requests_get_what_they_get_in_chunks(pair: Models) -> None:
    """Tokens, drafts and what was accepted; more requests than slots."""
    asked = [Request(TOKENS[:length], 20) for length in (1, 40, 128, 300, 129)]
    expected = decode(engine(pair, None, slots=2), asked)
    found = decode(engine(pair, BlockedPrefill(), slots=2), asked)
    if isinstance(pair.target.params.layers[0].moe.experts, NativeExperts):
        assert found == expected
    else:  # a near tie may turn
        assert sum(map(list.__eq__, found[0], expected[0])) >= len(asked) - 1


def test_blocks_are_of_128_and_of_at_most_2048_rows() -> None:
    for capacity, query, expert in ((100, 128, 128), (2048, 128, 2048), (2049, 128, 1088), (8192, 128, 2048)):
        assert BlockedPrefill().rows(capacity) == RowBlocks(query, expert)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"blocked": BlockedPrefill(query_blocks=5)}, "--query-blocks is 5; expected a number that divides 384"),
        ({"blocked": BlockedPrefill(ffn_blocks=0)}, "--ffn-blocks is 0; .*: 1, 2, 3, 4, 6, 8, 12, 16"),
        ({"blocked": BlockedPrefill(), "prefix_cache_bytes": 1}, "leave out --prefill blocked or --prefix-cache"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        EngineConfig(capacity=CAPACITY, **options)


def test_a_target_without_it_is_refused() -> None:
    with pytest.raises(InputError, match="does not prefill at once"):
        Engine(MarkovTarget(jnp.zeros((5, 5))), None, EngineConfig(blocked=BlockedPrefill()))
