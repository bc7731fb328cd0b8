"""Models whose outputs are not finite: noticed at the first token that would follow from them, and said in a line."""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.base.errors import InputError
from peagle.config import SamplingParams
from peagle.engine.host.engine import Engine
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig
from peagle.ops.messages import Choose, DrafterInput, DraftOutput, likeliest_of
from peagle.protocols import Drafter
from tests.support.toys import FixedLogits, MarkovTarget, Scripted, decode

VOCAB_SIZE, BAD, BUDGET = 12, 7, 10
GREEDY, SAMPLED = SamplingParams(), SamplingParams(0.7, top_p=0.9)


@flax.struct.dataclass
class Explained(MarkovTarget):
    """A target that knows why: it says what it is asked."""

    def first_not_finite(self, token_ids: Sequence[int]) -> str:
        return f"what follows {list(token_ids)}"


def counting(bad: Sequence[float] = (np.nan,) * VOCAB_SIZE) -> MarkovTarget:
    """A target that goes on with the next number, and behind BAD with these logits."""
    table = 60 * np.roll(np.eye(VOCAB_SIZE, dtype=np.float32), 1, axis=1)
    table[BAD] = bad
    return Explained(jnp.asarray(table))


def scripted() -> Scripted:
    """Drafts that are right at all places but every fourth."""
    index = np.arange(64, dtype=np.int32)
    return Scripted(jnp.asarray(np.where(index % 4 == 3, 0, index % VOCAB_SIZE)[None]))


def engine(target: MarkovTarget, drafter: Drafter | None, k: int, **options: Any) -> Engine:
    return Engine(target, drafter, ResolvedConfig(k, context=64, prefill_chunk=8, steps_per_dispatch=3, **options))


def request(*prompt_ids: int, budget: int = BUDGET, sampling: SamplingParams = GREEDY, index: int = 0) -> Request:
    return Request(prompt_ids, budget, sampling, index=index, name=f"prompt {index}")


def until_refused(engine: Engine, request: Request) -> tuple[list[int], str]:
    """Return (the tokens that came before, the error)."""
    tokens: list[int] = []
    with pytest.raises(InputError) as refused:
        tokens.extend(token for _, chunk in engine.generate([request]) for token in chunk.token_ids)
    return tokens, str(refused.value)


@pytest.mark.parametrize(
    ("drafter", "k", "sampling", "options"),
    [
        (None, 0, GREEDY, {}),
        (None, 0, SAMPLED, {}),
        (scripted(), 3, GREEDY, {}),
        (FixedLogits(jnp.zeros((3, VOCAB_SIZE))), 3, SAMPLED, {}),
        (Scripted(jnp.arange(64, dtype=jnp.int32)[None] + 2), 3, GREEDY, {"synthetic_acceptance": (1.0, 1.0, 1.0)}),
    ],
    ids=["plain", "sampled", "greedy", "sampled drafts", "synthetic"],
)
def test_it_is_noticed_where_it_begins(
    drafter: Drafter | None, k: int, sampling: SamplingParams, options: dict[str, Any]
) -> None:
    tokens, error = until_refused(engine(counting(), drafter, k, **options), request(2, 3, sampling=sampling))
    known = list(range(4, BAD + 1))
    assert tokens == known[: len(tokens)]
    assert len(tokens) >= len(known) - k
    assert error.startswith(f"the target's logits for token {len(known)} of the answer to prompt 0 are not finite")
    assert f"that of what follows {[2, 3, *known]};" in error


def test_minus_infinity_is_a_logit() -> None:
    bad = [-np.inf] * VOCAB_SIZE
    bad[3] = -1e30
    for sampling in (GREEDY, SAMPLED):
        assert decode(engine(counting(bad), None, 0), [request(6, budget=4, sampling=sampling)])[0] == [[7, 3, 4, 5]]


def test_unread_values_may_be_anything() -> None:
    """Rows that are done, whose last token is the bad one, slots without a request, and the token that warming up is
    done with."""
    table = np.asarray(counting().table).copy()
    table[0] = np.nan
    for sampling in (GREEDY, SAMPLED):
        two = engine(MarkovTarget(jnp.asarray(table)), scripted(), 3, slots=3)
        two.warm_up(sampled=not sampling.greedy)
        requests = [request(5, budget=2, sampling=sampling), request(8, budget=3, sampling=sampling, index=1)]
        assert decode(two, requests)[0] == [[6, 7], [9, 10, 11]]


@pytest.mark.parametrize("ending", ["stop", "length"])
def test_values_past_an_end_inside_the_run_may_be_anything(ending: str) -> None:
    """Plain decoding ends there and never sees it; so does a step whose drafts are right up to it."""
    rights = Scripted(jnp.arange(64, dtype=jnp.int32)[None] + 4)  # the prompt's token stands at 0
    ended = Request((4,), BUDGET, stop_token_ids=(BAD,)) if ending == "stop" else Request((4,), 3)
    for drafter, k in ((None, 0), (rights, 3)):
        chunks = [chunk for _, chunk in engine(counting(), drafter, k).generate([ended])]
        assert [token for chunk in chunks for token in chunk.token_ids] == [5, 6, BAD]
        assert chunks[-1].finish_reason == ending
    assert chunks[-1].steps[0].num_accepted == 2


@flax.struct.dataclass
class Broken(FixedLogits):
    """A drafter that takes the likeliest token as a drafter with weights does."""

    def propose(
        self, state: None, fresh: DrafterInput, widths: jax.Array, num_drafts: int, choose: Choose = likeliest_of
    ) -> tuple[DraftOutput, None]:
        draft, state = super().propose(state, fresh, widths, num_drafts)
        assert draft.logits is not None
        token_ids, confidence = choose(jax.lax.optimization_barrier(draft.logits), None, 0)
        return DraftOutput(token_ids, draft.logits, confidence), state


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_drafters_outputs_are_looked_at_as_well(sampling: SamplingParams) -> None:
    """It would cost no token, but all the speed, without a word."""
    logits = np.zeros((3, VOCAB_SIZE), np.float32)
    logits[1, 4] = np.nan
    speculation = engine(counting(), Broken(jnp.asarray(logits)), 3)
    tokens, error = until_refused(speculation, request(2, sampling=sampling))
    assert tokens == [3]
    assert error.startswith("the drafter's logits for token 1 of the answer to prompt 0 are not finite; expected")
