"""The cached drafter against the float64 reference, over runs of steps."""

import numpy as np
import pytest

from drafter import reference
from drafter.load import to_tensors
from peagle.ops.attention import MASKED
from tests.support.drafters import (
    EAGLE,
    EAGLE_NORMED,
    FOUR,
    MASKS,
    ONE,
    TWO,
    drafter,
    eagle3,
    logits_of,
    prompt_state,
    propose,
    random_text,
    stack_fresh,
)
from tests.support.paging import entries


@pytest.mark.parametrize(
    ("name", "num_drafts"),
    [(ONE, 1), (ONE, 3), (ONE, 8), (TWO, 2), (TWO, 5), (FOUR, 3), (FOUR, 7), (MASKS, 3), (MASKS, 6)],
)
def test_a_run_of_steps_gives_the_references_drafts(name: str, num_drafts: int) -> None:
    """Two rows of different length; per step none, some and all of K drafts are accepted."""
    peagle = drafter(name, with_logits=True)
    config, tensors = peagle.config, to_tensors(peagle.params, peagle.config)
    some = num_drafts // 2
    accepted = [(0, num_drafts), (num_drafts, some), (some, 0), (0, some), (num_drafts, num_drafts), (0, 0)]
    lengths = [5, 9]
    texts = [random_text(config, seed) for seed in (1, 2)]
    state = prompt_state(peagle, texts, lengths, num_drafts)

    firsts, nums = [n - 1 for n in lengths], [1, 1]
    for step in accepted:
        draft, state = propose(peagle, state, stack_fresh(texts, firsts, nums, num_drafts), num_drafts=num_drafts)
        for row, text in enumerate(texts):
            known = firsts[row] + nums[row]  # rows with a true aux_hidden; there is one token more
            told = (text.token_ids[: known + 1].tolist(), text.aux_hidden[:known])
            expected = reference.draft_logits(tensors, config, *told, num_drafts)
            ids = reference.draft_ids(tensors, config, *told, num_drafts)
            target_ids = np.arange(config.vocab_size)
            if peagle.params.draft_to_target is not None:
                target_ids = np.asarray(peagle.params.draft_to_target)
            full = logits_of(draft)[row]
            np.testing.assert_allclose(full[:, target_ids], expected, atol=1e-4)
            assert (np.delete(full, target_ids, axis=1) == MASKED).all()
            assert draft.token_ids[row].tolist() == ids.tolist()
        firsts = [first + num for first, num in zip(firsts, nums, strict=True)]
        nums = [count + 1 for count in step]


@pytest.mark.parametrize(
    ("name", "num_drafts"),
    [(EAGLE, 1), (EAGLE, 4), (EAGLE_NORMED, 3), pytest.param(EAGLE_NORMED, 6, marks=pytest.mark.slow)],
)
def test_a_run_of_passes_in_turn_gives_the_references_drafts(name: str, num_drafts: int) -> None:
    """The same for EAGLE-3, whose passes read the draft before; a third row is inactive from the second step on."""
    drafter = eagle3(name)
    config, tensors = drafter.config, to_tensors(drafter.params, drafter.config)
    some = num_drafts // 2
    accepted = [(0, num_drafts, 0), (num_drafts, some, 0), (some, 0, 0), (0, 0, 0)]
    lengths = [5, 9, 7]
    texts = [random_text(config, seed) for seed in (1, 2, 3)]
    state = prompt_state(drafter, texts, lengths, num_drafts)

    firsts, nums = [n - 1 for n in lengths], [1, 1, 1]
    for step in accepted:
        draft, state = propose(drafter, state, stack_fresh(texts, firsts, nums, num_drafts), num_drafts=num_drafts)
        assert draft.logits is None
        for row, text in enumerate(texts):
            if firsts[row] < 0:
                continue
            known = firsts[row] + nums[row]
            told = (text.token_ids[: known + 1].tolist(), text.aux_hidden[:known])
            ids = reference.draft_ids(tensors, config, *told, num_drafts)
            assert draft.token_ids[row].tolist() == ids.tolist()
        firsts = [first + num for first, num in zip(firsts, nums, strict=True)]
        firsts[2] = -1
        nums = [count + 1 for count in step]
    # it wrote in the only step it was active in
    assert not any(part[2].any() for part in entries(drafter, state, lengths[2] + num_drafts, 80))


def test_every_input_moves_the_reference() -> None:
    """Each token, each aux_hidden and each mask slot moves its logits; later rows do not."""
    peagle = drafter(TWO)
    config, tensors = peagle.config, to_tensors(peagle.params, peagle.config)
    text = random_text(config, 3, length=7)
    base = reference.draft_logits(tensors, config, text.token_ids.tolist(), text.aux_hidden[:6], 3)
    for place in range(1, 7):
        tokens = text.token_ids.copy()
        tokens[place] = (tokens[place] + 1) % config.vocab_size
        assert (
            np.abs(reference.draft_logits(tensors, config, tokens.tolist(), text.aux_hidden[:6], 3) - base).max() > 1e-3
        )
        aux = text.aux_hidden[:6].copy()
        aux[place - 1] += 1
        assert np.abs(reference.draft_logits(tensors, config, text.token_ids.tolist(), aux, 3) - base).max() > 1e-3
    fewer = reference.draft_logits(tensors, config, text.token_ids.tolist(), text.aux_hidden[:6], 2)
    np.testing.assert_allclose(fewer, base[:2], atol=1e-12)
    with pytest.raises(ValueError, match="expected one less"):
        reference.draft_logits(tensors, config, text.token_ids.tolist(), text.aux_hidden[:7], 3)
