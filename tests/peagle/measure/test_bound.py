"""What the law of acceptance allows, along an output: against the exact expectation, by all ways a step can go."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafter.propose import PEagle
from peagle.answers.result import Result
from peagle.config import SamplingParams
from peagle.engine.request import Request, StepRecord
from peagle.measure.bound import bound
from peagle.measure.sweep.figures import length_by_rates
from tests.support.drafters import random_params
from tests.support.toys import FixedLogits, MarkovTarget, drafter_config, tiny_target

V, K, FIRST = 4, 2, 3
RNG = np.random.default_rng(2)
TABLE, DRAFTS = RNG.normal(0, 1.5, (V, V)), RNG.normal(0, 1.5, (K, V))
TARGET = MarkovTarget(jnp.asarray(TABLE, jnp.float32))
DRAFTER = FixedLogits(jnp.asarray(DRAFTS, jnp.float32))
TEMPERATURE = 0.8


def softmax(logits: np.ndarray) -> np.ndarray:
    shares: np.ndarray = np.exp(logits / TEMPERATURE)
    return shares / shares.sum(axis=-1, keepdims=True)


P, Q = softmax(TABLE), softmax(DRAFTS)


def stepped(accepted: tuple[int, ...], next_token: int) -> Result:
    """Make the result of a prompt, a first token and one step."""
    request = Request((1, 0), 8, SamplingParams(TEMPERATURE, seed=5))
    step = StepRecord(3 - 1, (*accepted, *[0] * (K - len(accepted))), len(accepted), next_token)
    return Result(request, K, (FIRST, *accepted, next_token), None, "length", 0.0, None, None, (step,))


def pooled(ways: list[tuple[float, tuple[int, ...]]], name: str) -> float:
    """Pool the bound over the ways of a step, by their probabilities; return the length that it allows."""
    sums = np.zeros((1, 2 * K))
    for probability, accepted in ways:
        bounds = bound(TARGET, DRAFTER, stepped(accepted, 1))
        assert bounds is not None
        assert bounds.tried == tuple(int(place <= len(accepted)) for place in range(K))
        sums += probability * np.array([*bounds.tried, *getattr(bounds, name)])
    return float(length_by_rates(sums)[0])


def test_one_hot_drafts_are_accepted_as_often_as_the_target_says_them() -> None:
    first, second = (int(token) for token in DRAFTS.argmax(axis=1))
    one, two = P[FIRST, first], P[first, second]
    ways = [(1 - one, ()), (one * (1 - two), (first,)), (one * two, (first, second))]
    exact = 1 + sum(probability * len(accepted) for probability, accepted in ways)
    assert pooled(ways, "one_hot") == pytest.approx(exact, rel=1e-5)
    assert pooled(ways, "best") >= exact


def test_sampled_drafts_are_accepted_as_often_as_the_rule_of_acceptance_allows() -> None:
    """All drafts, each accepted with probability min(1, p / q)."""
    ways: list[tuple[float, tuple[int, ...]]] = []
    for first, second in itertools.product(range(V), repeat=2):
        drawn = Q[0, first] * Q[1, second]
        one, two = min(1, P[FIRST, first] / Q[0, first]), min(1, P[first, second] / Q[1, second])
        ways += [(drawn * (1 - one), ()), (drawn * one * (1 - two), (first,)), (drawn * one * two, (first, second))]
    assert sum(probability for probability, _ in ways) == pytest.approx(1)
    exact = 1 + sum(probability * len(accepted) for probability, accepted in ways)
    assert pooled(ways, "sampled") == pytest.approx(exact, rel=1e-5)


def test_places_beyond_the_output_and_steps_without_drafts_do_not_count() -> None:
    ended = stepped((2, 1), 1)
    cut = bound(TARGET, DRAFTER, Result(ended.request, K, (FIRST,), None, "stop", 0.0, None, None, ended.steps))
    assert cut is not None
    assert cut.tried == (1, 0)
    plain = StepRecord(2, (), 0, 1)
    assert (
        bound(TARGET, DRAFTER, Result(ended.request, K, (FIRST, 1), None, "length", 0.0, None, None, (plain,))) is None
    )


def test_greedy_rows_allow_what_is_right() -> None:
    """At temperature 0 both are one where the draft is the target's argmax, else none."""
    result = stepped((2, 1), 1)
    greedy = Request(result.request.prompt_ids, 8)
    bounds = bound(TARGET, DRAFTER, Result(greedy, K, result.output_ids, None, "length", 0.0, None, None, result.steps))
    assert bounds is not None
    right = [float(TABLE[token].argmax() == draft.argmax()) for token, draft in zip((FIRST, 2), DRAFTS, strict=True)]
    assert list(bounds.one_hot) == list(bounds.sampled or ()) == right
    assert bounds.best == (1, 1)


def test_texts_of_other_lengths_compile_nothing() -> None:
    """A sweep has hundreds of them; how they are cut into passes and steps differs, too."""
    config = drafter_config()
    target, drafter = tiny_target(aux_layer_ids=config.aux_layer_ids), PEagle(random_params(config), config)

    def measure(prompt: int, accepted: tuple[int, ...]) -> None:
        request = Request(tuple(range(1, prompt + 1)), 40, SamplingParams(TEMPERATURE, seed=5))
        lengths = np.cumsum([prompt, *(count + 1 for count in accepted)])
        steps = [StepRecord(int(at), (5,) * K, count, 1) for at, count in zip(lengths, accepted, strict=False)]
        output = (5,) * int(lengths[-1] - prompt + 1)
        assert bound(target, drafter, Result(request, K, output, None, "length", 0.0, None, None, tuple(steps)))

    measure(70, (0, 2, 1))
    compiled: list[str] = []

    def listen(event: str, _: float, **__: object) -> None:
        compiled.extend([event] if event.endswith("backend_compile_duration") else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        measure(91, (1, 1, 2, 0, 2))
        measure(40, (2,))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled
