"""A narrowed head: the same drafter over fewer tokens."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from drafter.propose import PEagle
from drafter.trained import COVERAGE, DRAFTER, RECIPE, recorded_coverage
from drafter.vocabulary import (
    FREQUENT_TOKENS,
    Coverage,
    DraftVocab,
    by_frequency,
    choose,
    coverage,
    narrow,
)
from peagle.base.errors import InputError
from peagle.ops.attention import MASKED
from peagle.ops.linear import PackedMatrix
from peagle.ops.linear.packed import pack_floats, packed_matrix, unpack_floats
from tests.support.drafters import (
    CONFIGS,
    ONE,
    TWO,
    drafter,
    logits_of,
    prompt_state,
    propose,
    random_params,
    random_text,
    stack_fresh,
)

K = 3


@pytest.mark.parametrize("name", [ONE, TWO])
def test_kept_tokens_have_the_logits_they_had(name: str) -> None:
    """From a full vocabulary and from a reduced one."""
    full = drafter(name, with_logits=True)
    ids = np.arange(full.config.vocab_size) if full.params.draft_to_target is None else full.params.draft_to_target
    vocab = tuple(int(token) for token in np.random.default_rng(0).permutation(full.config.vocab_size)[:9])
    params, config = narrow(full.params, full.config, DraftVocab(vocab, "a test"))
    kept = sorted(set(vocab) & set(np.asarray(ids).tolist()))
    assert config.draft_vocab_size == len(kept) == params.lm_head.shape[1]
    text = random_text(full.config, 3)
    fresh = stack_fresh([text], [5], [1], K)
    logits = {}
    for which, peagle in (("full", full), ("narrow", PEagle(params, config, with_logits=True))):
        draft, _ = propose(peagle, prompt_state(peagle, [text], [6], K), fresh, num_drafts=K)
        logits[which] = logits_of(draft)[0]
        assert logits[which].shape == (K, full.config.vocab_size)
    np.testing.assert_allclose(logits["narrow"][:, kept], logits["full"][:, kept], atol=1e-5)
    assert (np.delete(logits["narrow"], kept, axis=1) == MASKED).all()


def test_packed_matrices_are_narrowed_like_arrays() -> None:
    config = CONFIGS[TWO]
    params = random_params(config)
    rows = np.ascontiguousarray(np.asarray(params.lm_head).T)
    packed = dataclasses.replace(params, lm_head=packed_matrix(pack_floats(rows), rows.shape[1], rows.shape[0]))
    vocab = DraftVocab((40, 3, 17), "a test")
    narrowed = narrow(packed, config, vocab)[0]
    assert isinstance(narrowed.lm_head, PackedMatrix)
    np.testing.assert_array_equal(unpack_floats(narrowed.lm_head), rows[[3, 17, 40]])
    assert np.asarray(narrowed.draft_to_target).tolist() == [3, 17, 40]


def test_the_most_frequent_are_taken_from_the_list_beside_the_drafter(tmp_path: Path) -> None:
    """Tokens without a count follow those with one; without a list, ids follow the tokens named first."""
    assert choose("4", tmp_path, 8, first=(6,)).token_ids == (6, 0, 1, 2)
    counts = np.array([0, 3, 0, 9, 3, 0])
    assert by_frequency(counts) == [3, 1, 4]
    (tmp_path / FREQUENT_TOKENS).write_text("[3, 1, 4]")
    assert choose("2", tmp_path, 8, first=(6,)) == DraftVocab((3, 1), FREQUENT_TOKENS)
    assert choose("5", tmp_path, 8).token_ids == (3, 1, 4, 0, 2)
    assert choose("8", tmp_path, 8).token_ids == (3, 1, 4, 0, 2, 5, 6, 7)
    (tmp_path / "mine.json").write_text("[7, 2, 7]")
    assert choose(str(tmp_path / "mine.json"), tmp_path, 8).token_ids == (7, 2)


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1, true]", "[1.5]", "[-1]", "[8]", '["a"]', "[1,"])
def test_a_file_that_lists_no_tokens_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "ids.json").write_text(text)
    with pytest.raises(InputError, match=r"expected a JSON list of token ids, each in 0..7"):
        choose(str(tmp_path / "ids.json"), tmp_path, 8)


def test_other_bad_input_is_one_line(tmp_path: Path) -> None:
    for count in ("0", "-3", "9"):
        with pytest.raises(InputError, match=f"draft-vocab is {count}; expected 1 to 8, the tokens") as caught:
            choose(count, tmp_path, 8)
        assert caught.value.field == "draft_vocab"
    with pytest.raises(InputError, match="cannot be read"):
        choose(str(tmp_path / "absent.json"), tmp_path, 8)
    config = CONFIGS[ONE]
    params = random_params(config)
    outside = tuple(set(range(config.vocab_size)) - set(np.asarray(params.draft_to_target).tolist()))
    with pytest.raises(InputError, match="none of the"):
        narrow(params, config, DraftVocab(outside, "a test"))


@pytest.mark.parametrize(
    ("texts", "num_drafts", "frac", "limit"),
    [
        ([[4, 4, 9, 4]], 3, 0.75, 2.0),  # steps: 4 4 9, and 4
        ([[4, 5, 4, 5, 4, 5, 4, 5]], 3, 1.0, 4.0),
        ([[9, 9, 9]], 3, 0.0, 1.0),
        ([[4, 9], [9, 4]], 1, 0.5, 4 / 3),  # 4 9, then 9, and 4: a step ends with its text
        ([[4, 5, 4, 5]], 1, 1.0, 2.0),
    ],
)
def test_coverage_of_a_draft_vocabulary_bounds_the_acceptance(
    texts: list[list[int]], num_drafts: int, frac: float, limit: float
) -> None:
    measured = coverage([np.array(text) for text in texts], (4, 5), num_drafts)
    assert measured == Coverage(frac, limit, num_drafts)
    assert measured.describe() == f"{frac:.1%} of the tokens, so at most {limit:.2f} a step at K = {num_drafts}"


def test_a_recorded_coverage_is_read_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    figures = {"frac": 0.8, "acceptance_limit": 3.4, "num_drafts": 7}
    for stored, expected in (
        (figures, Coverage(0.8, 3.4, 7)),
        ({**figures, "frac": "most"}, None),
        ({"frac": 0.8}, None),
        ([], None),
    ):
        (tmp_path / RECIPE).write_text(json.dumps({"recipe": {}, COVERAGE: stored}))
        assert recorded_coverage(tmp_path / DRAFTER) == expected
