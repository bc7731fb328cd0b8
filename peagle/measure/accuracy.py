"""GSM8K: prompts, scores, and the least accuracy that passes.

Prompts and extraction are those of lm-evaluation-harness's task `gsm8k` with a chat template, few-shot examples as
turns and the filter "flexible-extract". The threshold is the one of TensorRT-LLM's accuracy tests, whose references are
90.3 % for gpt-oss-120b and 85.0 % for gpt-oss-20b, with five examples.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from peagle.base.errors import InputError
from peagle.base.files import reason_of
from peagle.base.settings import brief

SIGMA = 50.0  # percent: the most that the standard deviation of right or wrong can be
ALPHA, BETA = 0.05, 0.2  # chances that an equal model fails, and that one worse by `detectable_loss` passes
NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
MARK = "#### "  # before the number of a published answer
DRAFTS, PLAIN = "drafts", "plain"  # ways to answer


@dataclass(frozen=True)
class Question:
    """A row of the published files. answer: the whole solution, which ends with MARK and the number."""

    question: str
    answer: str

    @property
    def prompt(self) -> str:
        return f"Question: {self.question}\nAnswer:"

    @property
    def number(self) -> str:
        return _bare(self.answer.rpartition(MARK)[2].strip())


def read_questions(path: Path) -> list[Question]:
    """Read a file of JSON lines. Raises InputError for an unreadable file and for a row of another layout."""
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {reason_of(error)}; expected JSON lines in UTF-8") from None
    questions = [_read_row(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise InputError(f"{path} is empty; expected a question on each line")
    return questions


def _read_row(line: str, name: str) -> Question:
    try:
        row = json.loads(line)
        texts = row["question"], row["answer"]
    except (ValueError, TypeError, KeyError, RecursionError):
        texts = None, None
    if all(isinstance(text, str) for text in texts) and NUMBER.fullmatch((question := Question(*texts)).number):
        return question
    expected = '{"question": TEXT, "answer": "... #### NUMBER"}'
    raise InputError(f"{name} is {brief(line)}; expected {expected}, as GSM8K is published")


def request_lines(
    questions: Sequence[Question], shots: Sequence[Question], ways: Sequence[str], options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the requests of a batch, one per question and way, greedy. options: further fields of their bodies."""
    turns = [{"role": role, "content": text} for shot in shots for role, text in _turns(shot)]
    for index, question in enumerate(questions):
        messages = [*turns, {"role": "user", "content": question.prompt}]
        for way in ways:
            plainly = {"speculative": {"num_speculative_tokens": 0}} if way == PLAIN else {}
            body = {"messages": messages, "temperature": 0, **options, **plainly}
            yield {"custom_id": _id(index, way), "method": "POST", "url": "/v1/chat/completions", "body": body}


def _turns(shot: Question) -> Iterator[tuple[str, str]]:
    yield "user", shot.prompt
    yield "assistant", shot.answer


def _id(index: int, way: str) -> str:
    return f"{index + 1} {way}"


def extract(text: str) -> str | None:
    """Return the last number of an answer, without separators and currency; None if it has none."""
    numbers = NUMBER.findall(text)
    return _bare(numbers[-1]) if numbers else None


def _bare(number: str) -> str:
    return re.sub(r"\.$", "", re.sub(r"[,$]", "", number))


def threshold(reference: float, num_questions: int) -> float:
    """Return the least accuracy, in percent, that a one-sided test cannot tell from the reference."""
    return reference + NormalDist().inv_cdf(ALPHA) * _scale(num_questions)


def detectable_loss(num_questions: int) -> float:
    """Return the loss of accuracy, in points, that fails with a probability of 1 - BETA."""
    return -(NormalDist().inv_cdf(ALPHA) + NormalDist().inv_cdf(BETA)) * _scale(num_questions)


def _scale(num_questions: int) -> float:
    """Return the standard deviation of the difference of two accuracies."""
    return float((2 * SIGMA**2 / num_questions) ** 0.5)


@dataclass(frozen=True)
class Scores:
    """Accuracies in percent by way, and the numbers (from 1) of questions whose answers differ between ways."""

    num_questions: int
    reference: float
    accuracy: Mapping[str, float]
    differing: Sequence[int]

    @property
    def threshold(self) -> float:
        return threshold(self.reference, self.num_questions)

    @property
    def accurate(self) -> bool:
        return min(self.accuracy.values()) >= self.threshold

    @property
    def passed(self) -> bool:
        return self.accurate and not self.differing


def score(
    questions: Sequence[Question], ways: Sequence[str], replies: Mapping[str, Mapping[str, Any]], reference: float
) -> Scores:
    """Score replies: messages by the custom_id of their requests. A question without a reply is answered wrongly."""
    rows = [[replies.get(_id(index, way), {}) for way in ways] for index in range(len(questions))]

    def accuracy(way: int) -> float:
        right = (
            extract(row[way].get("content") or "") == question.number
            for row, question in zip(rows, questions, strict=True)
        )
        return 100 * sum(right) / len(questions)

    differing = [number for number, row in enumerate(rows, 1) if row[0] != row[-1]]
    return Scores(len(questions), reference, {way: accuracy(index) for index, way in enumerate(ways)}, differing)
