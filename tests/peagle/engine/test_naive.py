"""The engine does what the specification does: the same tokens, and the same drafts accepted in every step."""

import numpy as np
import pytest

from peagle.config import SamplingParams
from peagle.engine.naive import speculate
from peagle.engine.request import Request
from peagle.loading.load import load
from peagle.text.prompts import Rendering, from_text
from tests.support.models import TARGET, engine_of, models
from tests.support.toys import decode

pytestmark = pytest.mark.compile

PROMPT = tuple(np.random.default_rng(4).integers(0, TARGET.vocab_size, 37).tolist())
K = 3
SAMPLED = SamplingParams(0.9, top_k=20, top_p=0.8, seed=3)


@pytest.mark.parametrize(
    ("drafter", "length", "sampling"),
    [
        ("P-EAGLE", len(PROMPT), SamplingParams()),
        ("P-EAGLE", 1, SAMPLED),
        ("EAGLE-3", len(PROMPT), SamplingParams()),
        ("DFlash", 1, SAMPLED),
    ],
)
def test_the_engine_is_the_specification(drafter: str, length: int, sampling: SamplingParams) -> None:
    pair, request = models(drafter=drafter), Request(PROMPT[:length], 24, sampling)
    tokens, num_accepted = speculate(pair.target, pair.drafter, request, K)
    (engine_tokens,), (steps,) = decode(engine_of(pair, K, context=80), [request])
    assert tokens == engine_tokens
    assert num_accepted == [step.num_accepted for step in steps]
    assert len(tokens) == 24


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", ["demo", "demo-eagle3", "demo-dflash"])
def test_so_it_is_with_drafters_that_are_often_right(drafter: str, temperature: float) -> None:
    pair = load("demo", drafter)
    assert pair.drafter is not None
    sampling = SamplingParams(temperature, seed=1)
    request = pair.request(
        from_text("def mean(values):"), (), Rendering(), max_new_tokens=60, sampling=sampling, ignore_eos=True
    )
    tokens, num_accepted = speculate(pair.target, pair.drafter, request, K)
    (engine_tokens,), (steps,) = decode(pair.engine(pair.engine_config(K, context=256)), [request])
    assert tokens == engine_tokens
    assert num_accepted == [step.num_accepted for step in steps]
    assert sum(num_accepted) > len(num_accepted) / 2
