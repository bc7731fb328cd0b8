"""What the demo's target practises on: good answers as they are, and of loops the tokens that repeat."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafter.train.shards import Document
from scripts.demo import rows, train_target
from scripts.demo.rows import GOOD, LOOP, LOOPING, OTHER, PADDING, PROMPT, TEXT
from scripts.demo.tokenizer import RETURN, SPECIAL_TOKENS

END = SPECIAL_TOKENS.index(RETURN)
ROUND = [20, 21, 22, 23, 24]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ([*range(20, 60), END], GOOD),
        ([*range(20, 60)], OTHER),  # cut off, but not in a loop
        ([*ROUND * 8, END], OTHER),  # repeats, but knows an end: so do some functions
        (ROUND * 8, LOOPING),
        ([], OTHER),
    ],
)
def test_an_answer_is_good_looping_or_neither(answer: list[int], kind: str) -> None:
    assert rows.kind_of(answer) == kind


def test_practice_repeats_what_loops() -> None:
    token_ids = np.array([1, 9, 9, 40, 41, *ROUND * 4], np.int32)
    trained = np.arange(len(token_ids)) >= 3
    kind, (ids, roles) = rows.lesson(Document(token_ids, trained))
    assert kind == LOOPING
    assert ids == token_ids.tolist()
    # the first round is new, and the three tokens after it: only the fourth completes a run that was there
    assert roles == [PROMPT] * 3 + [PADDING] * (2 + 5 + 3) + [LOOP] * 12


def test_a_good_answer_is_learnt_whole() -> None:
    token_ids = np.array([1, 9, *range(20, 40), END], np.int32)
    kind, (_, roles) = rows.lesson(Document(token_ids, np.arange(len(token_ids)) >= 2))
    assert kind == GOOD
    assert roles == [PROMPT] * 2 + [TEXT] * 21


def test_unwanted_tokens_become_less_likely_and_wanted_ones_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is -log p where a token is wanted and -log(1 - p) where not; also where p is as good as 1."""
    likely = jnp.log(jnp.asarray([[0.25, 0.5, 1.0]], jnp.float32))
    monkeypatch.setattr(train_target, "log_likelihoods", lambda shift, *_: likely + shift)
    monkeypatch.setattr(jax.lax, "psum", lambda value, _: value)
    weights = jnp.asarray([[0.0, 1.0, -1.0, 0.0]])
    batch = train_target.Batch(jnp.zeros((1, 4), jnp.int32), *[jnp.zeros((1, 4), jnp.int32)] * 2, weights)
    loss, slope = train_target.loss_and_gradients(jnp.zeros((1, 3)), None, batch)
    np.testing.assert_allclose(loss, (-np.log(0.25) - np.log(0.5)) / 2, rtol=1e-6)
    np.testing.assert_allclose(slope, [[-0.5, 0.5, 0.0]], atol=1e-6)
    surest = batch._replace(weights=jnp.asarray([[0.0, 0.0, 0.0, -1.0]]))
    loss, _ = train_target.loss_and_gradients(jnp.zeros((1, 3)), None, surest)
    assert 10 < float(loss) < 20
