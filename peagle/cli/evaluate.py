"""`peagle evaluate`: compare a model's accuracy on GSM8K with a reference, and drafts with plain decoding."""

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from peagle.base.errors import InputError
from peagle.base.files import encoded, write_bytes_whole, write_text_whole
from peagle.base.flag import PROMPT, RUNNING, SERVER, SPECULATION, Flag
from peagle.base.strict_json import dumps
from peagle.cli.batch import LINES_PER_SLOT, answer_lines, engine_answerer
from peagle.cli.command import Takes, refuse_other_options, require_extra
from peagle.cli.flags import QUIET
from peagle.cli.output import say, show_lines
from peagle.cli.serve import FAILED, Served, check_models
from peagle.config import AnswerConfig, EngineConfig, LoadConfig
from peagle.measure.accuracy import (
    ALPHA,
    BETA,
    DRAFTS,
    PLAIN,
    SIGMA,
    Question,
    Scores,
    detectable_loss,
    read_questions,
    request_lines,
    score,
)
from peagle.text.prompts import Rendering

if TYPE_CHECKING:  # they import JAX
    from peagle.cli.display import Display
    from peagle.serve.batch import Answerer

# fields that --server leaves to this command
BESIDE_SERVER = (
    *("questions", "out", "reference", "shots", "server", "no_baseline", "quiet"),
    *("reasoning_effort", "max_new_tokens", "slots"),
)
REQUESTS, ANSWERS, SCORES = "requests.jsonl", "answers.jsonl", "scores.json"  # in the folder
NAMES = {DRAFTS: "with drafts", PLAIN: "plainly"}
SUMMARY_INDENT = 13  # characters before the text of a summary's line
MOST_SHOWN = 20  # questions whose answers differ


@dataclass(frozen=True, kw_only=True)
class Evaluate(Served):
    """Check the accuracy on GSM8K, with drafts and plainly.

    Asks each question twice, greedily: with drafts and plainly. The answers must
    be the same. The accuracy must reach the threshold, below which a one-sided
    test tells it from --reference. The same command resumes. Exit code: 0 if both
    hold, 1 if not.

    [bold]Examples[/bold]

      a pair
        [cyan]peagle evaluate test.jsonl OUT --reference 85 --target DIR --drafter DIR[/cyan]
      a server
        [cyan]peagle evaluate test.jsonl OUT --reference 85 --server http://HOST:8000[/cyan]
    """

    questions: Annotated[Path, Flag(names=("GSM8K.jsonl",))]
    """Questions, one {"question": TEXT, "answer": "... #### NUMBER"} per line."""
    out: Annotated[Path, Flag(names=("OUT",))]
    """Folder of requests, answers and scores."""
    reference: Annotated[float, Flag(RUNNING, "PERCENT")]
    """Accuracy to hold: 90.3 for gpt-oss-120b and 85.0 for gpt-oss-20b, with 5 examples, in TensorRT-LLM's tests."""
    shots: Annotated[Path | None, Flag(PROMPT, "FILE")] = None
    """Examples before each question, all of the file, as turns of the chat."""
    rendering: Annotated[Rendering, Takes("reasoning_effort")] = Rendering()
    server: Annotated[str | None, Flag(SERVER, "URL")] = None
    """Ask this server instead of a pair, --slots questions at once; OPENAI_API_KEY is sent, if set."""
    load: Annotated[LoadConfig, Takes("target", "drafter")] = LoadConfig()
    engine: Annotated[EngineConfig, Takes("num_speculative_tokens", "slots")] = EngineConfig(slots=8, prefix_cache="on")
    no_baseline: Annotated[bool, Flag(SPECULATION)] = False
    """Skip plain decoding: only the accuracy counts. On a GPU logits that nearly tie may change places."""
    answer: Annotated[AnswerConfig, Takes("max_new_tokens")] = AnswerConfig(max_new_tokens=8192)
    quiet: Annotated[bool, QUIET] = False
    served_model_name: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.reference <= 100:
            raise InputError(f"reference is {self.reference}; expected percent, 0 to 100", "reference")

    @property
    def ways(self) -> tuple[str, ...]:
        if self.engine.num_speculative_tokens == 0:
            return (PLAIN,)
        return (DRAFTS,) if self.no_baseline else (DRAFTS, PLAIN)

    def run(self) -> int:
        return evaluate(self)


def evaluate(settings: Evaluate) -> int:
    """Answer the questions, write the scores, and return the exit code.

    Raises InputError for bad options and files before loading, and KeyboardInterrupt after Ctrl-C.
    """
    from peagle.cli.display import Display

    with require_extra("evaluations need", "serve"):
        from peagle.serve.batch import BatchFile
    if settings.server is not None:
        refuse_other_options(settings, "--server", BESIDE_SERVER, "the running server")
    questions = read_questions(settings.questions)
    display = Display(quiet=settings.quiet)
    answerer = _answerer(settings, display)
    _write_requests(settings, questions)
    answers = settings.out / ANSWERS
    with answerer as answering:
        batch = BatchFile(answering, settings.out / REQUESTS, answers, LINES_PER_SLOT * settings.engine.slots)
        answer_lines(batch, display)
    if answering.failure is not None or batch.counts.failed:
        why = answering.failure or f"{batch.counts.failed} requests failed, {answers} says why"
        say("error", f"{why}; the same command resumes")
        return FAILED
    messages, refusals = _read(answers)
    if refusals:
        display.warn([f"{len(refusals)} refused requests count as wrong answers; the first: {refusals[0]}"])
    scores = score(questions, settings.ways, messages, settings.reference)
    write_text_whole(settings.out / SCORES, dumps(_record(scores, answering.model), indent=2) + "\n")
    if not settings.quiet:
        show_lines(_summary(scores), SUMMARY_INDENT)
    return 0 if scores.passed else FAILED


def _answerer(settings: Evaluate, display: "Display") -> "AbstractContextManager[Answerer]":
    """Return what answers: the server, or the pair, which is loaded when the block begins."""
    from peagle.serve.remote import RemoteServer

    if settings.server is not None:
        return nullcontext(RemoteServer.connect(settings.server))
    return engine_answerer(settings, check_models(settings), display, greedy=True)


def _write_requests(settings: Evaluate, questions: Sequence[Question]) -> None:
    """Write the requests, or find them there. Raises InputError for a folder of another evaluation."""
    shots = [] if settings.shots is None else read_questions(settings.shots)
    options: dict[str, Any] = {"max_tokens": settings.answer.max_new_tokens}
    if settings.rendering.reasoning_effort is not None:
        options["reasoning_effort"] = settings.rendering.reasoning_effort
    lines = request_lines(questions, shots, settings.ways, options)
    content, path = encoded("".join(dumps(line) + "\n" for line in lines)), settings.out / REQUESTS
    settings.out.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_bytes_whole(path, content)
    elif path.read_bytes() != content:
        raise InputError(f"{settings.out} has other questions, or was begun with other options; give another folder")


def _read(answers: Path) -> tuple[dict[str, Any], list[str]]:
    """Return (messages by custom_id, reasons of refusals)."""
    rows = [json.loads(line) for line in answers.read_text("utf-8").splitlines()]
    replies = {row["custom_id"]: row["response"]["body"] for row in rows}
    messages = {name: reply["choices"][0]["message"] for name, reply in replies.items() if "choices" in reply}
    return messages, [reply["error"]["message"] for name, reply in replies.items() if name not in messages]


def _record(scores: Scores, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "num_questions": scores.num_questions,
        "accuracy": dict(scores.accuracy),
        "reference": scores.reference,
        "threshold": scores.threshold,
        "sigma": SIGMA,
        "alpha": ALPHA,
        "differing": list(scores.differing),
        "passed": scores.passed,
    }


def _summary(scores: Scores) -> Iterator[str]:
    n, loss = scores.num_questions, detectable_loss(scores.num_questions)
    accuracy = ", ".join(f"{value:.2f} % {NAMES[way]}" for way, value in scores.accuracy.items())
    yield f"accuracy     {accuracy}, of {n} questions"
    yield (
        f"threshold    {scores.threshold:.2f} %: {'passed' if scores.accurate else 'FAILED'} (reference "
        f"{scores.reference:g} %; a loss of {loss:.1f} points fails in {1 - BETA:.0%} of evaluations)"
    )
    if len(scores.accuracy) > 1 and scores.differing:
        shown = ", ".join(map(str, scores.differing[:MOST_SHOWN])) + ", ..." * (len(scores.differing) > MOST_SHOWN)
        yield f"answers      DIFFER with drafts and plainly for {len(scores.differing)} questions: {shown}"
    elif len(scores.accuracy) > 1:
        yield "answers      with drafts are the plain ones, for all questions"
