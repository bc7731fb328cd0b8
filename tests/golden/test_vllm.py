"""The demo pair against what vLLM gave on it (python -m scripts.golden.vllm): tokens and drafts."""

import functools

import pytest

from peagle.loading.checkpoints import DEMO
from peagle.loading.load import load, with_drafter
from peagle.pair import Pair
from scripts.golden.vllm import GOLDEN, Drafting, ours, recorded

pytestmark = pytest.mark.compile

ABOUT, KEPT = recorded()


@functools.cache
def pair(drafter: str) -> Pair:
    target = load(DEMO, None, dtype="float32") if drafter == DEMO else pair(DEMO)
    return with_drafter(target, DEMO, drafter)


@pytest.mark.parametrize("drafting", list(dict.fromkeys(drafting for drafting, _, _ in KEPT)), ids=str)
def test_tokens_and_counters_are_vllms(drafting: Drafting) -> None:
    requests, answers = zip(*(kept[1:] for kept in KEPT if kept[0] == drafting), strict=True)
    assert ours(pair(drafting.drafter), drafting.k, requests) == list(answers)


def test_the_record_says_what_made_it_and_covers_what_it_should() -> None:
    """Both ways to draft, both K, answers that a stop token ended and such that the budget cut; small."""
    assert ABOUT["recorded"]["vllm"].startswith("vLLM 0.")
    assert {str(drafting) for drafting, _, _ in KEPT} == {
        f"{drafter}, K = {k}" for drafter in ("demo", "demo-eagle3") for k in (3, 7)
    }
    cut = {len(answer.token_ids) == ABOUT["max_new_tokens"] for _, _, answer in KEPT}
    assert cut == {True, False}
    assert GOLDEN.stat().st_size < 20_000
