"""GSM8K: the threshold of TensorRT-LLM's accuracy tests, lm-evaluation-harness's extraction and prompts."""

from pathlib import Path

import pytest

from peagle.base.errors import InputError
from peagle.measure.accuracy import (
    DRAFTS,
    PLAIN,
    Question,
    detectable_loss,
    extract,
    read_questions,
    request_lines,
    score,
    threshold,
)

GOOD = '{"question": "How many?", "answer": "6 * 7 = <<6*7=42>>42\\n#### 42"}'


@pytest.mark.parametrize(("reference", "least"), [(90.3, 87.10), (85.0, 81.80)])  # of the 120b and the 20b
def test_the_threshold_of_all_questions_is_tensorrt_llms(reference: float, least: float) -> None:
    assert round(threshold(reference, 1319), 2) == least
    assert round(detectable_loss(1319), 2) == 4.84


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 6 * 7 = 42", "42"),
        ("#### 1,234", "1234"),
        ("It costs $18.", "18"),
        ("It costs $18.50 in all", "18.50"),
        ("5 less is -3", "-3"),
        ("I do not know", None),
        ("", None),
    ],
)
def test_the_last_number_of_an_answer_counts(text: str, number: str | None) -> None:
    assert extract(text) == number


def test_examples_are_turns_before_each_question_and_both_ways_get_the_same_prompt() -> None:
    shot, question = Question("1 + 1?", "2\n#### 2"), Question("6 * 7?", "42\n#### 42")
    drafts, plain = request_lines([question], [shot], (DRAFTS, PLAIN), {"max_tokens": 9})
    assert drafts["body"] == {
        "messages": [
            {"role": "user", "content": "Question: 1 + 1?\nAnswer:"},
            {"role": "assistant", "content": "2\n#### 2"},
            {"role": "user", "content": "Question: 6 * 7?\nAnswer:"},
        ],
        "temperature": 0,
        "max_tokens": 9,
    }
    assert plain["body"] == {**drafts["body"], "speculative": {"num_speculative_tokens": 0}}


def test_a_lower_accuracy_fails_and_so_do_answers_that_differ_or_lack() -> None:
    questions = [Question("?", f"#### {number}") for number in range(200)]
    replies = {
        f"{number + 1} {way}": {"content": f"it is {number}."} for number in range(200) for way in (DRAFTS, PLAIN)
    }
    passed = score(questions, (DRAFTS, PLAIN), replies, 100.0)
    assert (passed.accuracy, passed.differing, passed.passed) == ({DRAFTS: 100.0, PLAIN: 100.0}, [], True)
    other = score(questions, (DRAFTS, PLAIN), replies | {"8 plain": {"content": "seven: 7"}}, 100.0)
    assert (other.accuracy[PLAIN], other.differing, other.accurate, other.passed) == (100.0, [8], True, False)
    less = {name: message for name, message in replies.items() if not name.startswith("1")}
    worse = score(questions, (DRAFTS,), less, 100.0)
    assert (worse.accuracy, worse.accurate) == ({DRAFTS: 44.5}, False)


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"question": "?"}', '{"question": 1, "answer": "#### 4"}', '{"question": "?", "answer": "#### four"}'],
)
def test_a_row_of_another_layout_is_refused_by_its_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(InputError, match=r"line 3 is .*; expected .* #### NUMBER"):
        read_questions(path)
    path.write_text(f"{GOOD}\n")
    assert [question.number for question in read_questions(path)] == ["42"]
