"""A DFlash drafter in the engine: plain decoding's tokens for any K up to its block, greedy, drawn, beside others."""

import pytest

from peagle.config import SamplingParams
from peagle.engine.host.engine import Engine
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig
from tests.support.models import FAST, TOKENS, Models, models, needs_native
from tests.support.toys import check_whole, decode, drafting_at

pytestmark = pytest.mark.compile

CAPACITY, NEW = 192, 40
PROMPTS = [TOKENS[:5], TOKENS[20:90], TOKENS[100:119], TOKENS[7:8]]
GREEDY, DRAWN = SamplingParams(), SamplingParams(0.9, seed=4)


@pytest.fixture(scope="module")
def pair() -> Models:
    return models(FAST, "DFlash")


@pytest.fixture(scope="module")
def plain(pair: Models) -> list[list[int]]:
    return decode(Engine(pair.target, None, ResolvedConfig(0, context=CAPACITY)), requests_of())[0]


def requests_of(sampling: SamplingParams = GREEDY) -> list[Request]:
    return [Request(tuple(prompt), NEW, sampling, (), index=number) for number, prompt in enumerate(PROMPTS)]


def engine_of(pair: Models, k: int, slots: int = 1, **options: object) -> Engine:
    return Engine(pair.target, pair.drafter, ResolvedConfig(k, slots, CAPACITY, prefill_chunk=32, **options))


@pytest.mark.parametrize(("k", "slots", "together"), [(3, 3, 1), (7, 1, 4)])
def test_greedy_speculation_equals_plain_decoding(
    pair: Models, plain: list[list[int]], k: int, slots: int, together: int
) -> None:
    """K = 7 takes the whole block. Some drafts are accepted, and some are not."""
    engine = engine_of(pair, k, slots, steps_per_dispatch=together)
    tokens, records = decode(engine, requests_of())
    assert tokens == plain
    check_whole(engine)
    accepted = [record.num_accepted for steps in records for record in steps]
    assert min(accepted) == 0 < max(accepted)


@needs_native
def test_drawn_drafts_are_those_of_a_request_alone(pair: Models) -> None:
    """Tokens, drafts and acceptance; also beside one that asks for fewer drafts, in the same pass."""
    k = 7
    alone = engine_of(pair, k, k_per_request=True)
    requests = requests_of(DRAWN)
    fewer = Request(requests[1].prompt_ids, NEW, DRAWN, (), index=1, num_speculative_tokens=k - 1)
    requests[1] = fewer
    expected = [[part[0] for part in decode(alone, [request])] for request in requests]
    tokens, records = decode(engine_of(pair, k, 4, k_per_request=True), requests)
    assert [list(part) for part in zip(tokens, records, strict=True)] == expected
    assert any(record.num_accepted for steps in records for record in steps)
    assert {len(record.draft_token_ids) for record in records[1]} == {k - 1}


def test_adaptive_steps_change_no_token(pair: Models, plain: list[list[int]]) -> None:
    """Blocks of other sizes, plain steps between them, and rows that catch up."""
    engine = drafting_at(engine_of(pair, 5, 4, adaptive=True, steps_per_dispatch=2), {1: True, 3: False})
    tokens, records = decode(engine, requests_of(), joining=True)
    assert tokens == plain
    assert len({len(record.draft_token_ids) for steps in records for record in steps}) > 1
    check_whole(engine)
