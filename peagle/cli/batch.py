"""`peagle batch`: answer a file of requests of OpenAI's API."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from peagle.base import interrupt
from peagle.base.flag import Flag
from peagle.cli.command import Takes, require_extra
from peagle.cli.flags import QUIET
from peagle.cli.output import say
from peagle.cli.serve import FAILED, Served, check_models, load_engine, model_name
from peagle.config import EngineConfig

if TYPE_CHECKING:  # they import JAX
    from peagle.cli.display import Display
    from peagle.serve.batch import BatchFile, Counts, EngineAnswerer

ALL_REFUSED = 3  # exit code
MAX_QUEUE = 1 << 30  # no limit, because a line may ask for many answers, and no client waits
ENGINE = Takes("num_speculative_tokens", "slots", "context", "prefill_chunk", "kv_memory")
LINES_PER_SLOT = 2  # in flight, so that no slot waits for the next line


@dataclass(frozen=True, kw_only=True)
class BatchCommand(Served):
    """Run a file of OpenAI Batch API requests, without a server.

    Each line is {"custom_id": "a", "method": "POST",
    "url": "/v1/chat/completions", "body": {...}}. The same command resumes with
    the lines that have no answer yet. Exit code: 0 if a line was answered, 3 if
    every line was refused, 1 if the engine failed on a line or as a whole; then
    run the command again.

    [bold]Examples[/bold]

      the demo models      [cyan]peagle batch IN.jsonl OUT.jsonl[/cyan]
      your checkpoints
        [cyan]peagle batch IN.jsonl OUT.jsonl --target DIR --drafter DIR --slots 16[/cyan]
    """

    requests: Annotated[Path, Flag(names=("IN.jsonl",))]
    """Requests, one per line."""
    answers: Annotated[Path, Flag(names=("OUT.jsonl",))]
    """Answers, appended in the order they finish."""
    engine: Annotated[EngineConfig, ENGINE] = EngineConfig(slots=8, prefix_cache="on")
    quiet: Annotated[bool, QUIET] = False

    def run(self) -> int:
        from peagle.cli.processes import run_together

        return run_together(self, self.load, answer_file)


def answer_file(settings: BatchCommand) -> int:
    """Answer the file and return the exit code, as the command's help says.

    Raises InputError for bad options and files before loading, and KeyboardInterrupt after Ctrl-C.
    """
    from peagle.cli.display import Display

    with require_extra("batches need", "serve"):
        from peagle.serve.batch import BatchFile, check_files
    from peagle.cli.models import slots_for

    models = check_models(settings)
    before = check_files(settings.requests, settings.answers, model_name(settings, models))
    display = Display(quiet=settings.quiet)
    if before.done == before.total:
        display.note(f"nothing is left: {settings.answers} answers every line of {settings.requests}")
        return ALL_REFUSED if before.all_refused else 0
    slots = slots_for(before.total - before.done, settings.engine.slots, settings.load.mesh)
    with engine_answerer(settings, models, display, slots=slots) as answerer:
        batch = BatchFile(answerer, settings.requests, settings.answers, LINES_PER_SLOT * slots)
        started = time.perf_counter()
        answer_lines(batch, display)
    if answerer.failure is not None:
        say("error", f"{answerer.failure}; {_progress(batch.counts)}")
        return FAILED
    summary = _summary(batch.counts, time.perf_counter() - started)
    display.note(summary)
    if settings.quiet and (batch.counts.refused or batch.counts.failed):
        display.warn([summary])
    return FAILED if batch.counts.failed else ALL_REFUSED if batch.counts.all_refused else 0


@contextlib.contextmanager
def engine_answerer(
    settings: Served, models: tuple[str, str | None], display: "Display", **options: Any
) -> "Iterator[EngineAnswerer]":
    """Load the pair and make the engine that answers lines in the block. options: of `load_engine`."""
    from peagle.serve.batch import EngineAnswerer
    from peagle.serve.engine_loop import EngineLoop
    from peagle.serve.shared_state import SharedState

    name = model_name(settings, models)
    engine, builder = load_engine(settings, models, display, f"answering as {name}", **options)
    loop = EngineLoop(engine, MAX_QUEUE)
    try:
        yield EngineAnswerer(SharedState(loop, builder, name))
    finally:
        loop.close()


def answer_lines(batch: "BatchFile", display: "Display") -> None:
    """Answer the lines that have no answer yet, with progress. Raises KeyboardInterrupt after Ctrl-C."""
    with display.on_interrupt(lambda: _progress(batch.counts)), display.stage("answering") as advance:
        asyncio.run(batch.run(interrupt.pressed, lambda counts: advance(counts.done, counts.total)))
        interrupt.check()


def _progress(counts: "Counts") -> str:
    return f"{counts.done} of {counts.total} lines are done; the same command resumes"


def _summary(counts: "Counts", seconds: float) -> str:
    known = f", {counts.known} answered before" if counts.known else ""
    speed = f"; {counts.tokens} tokens in {seconds:.1f} s, {counts.tokens / seconds:.0f} tok/s"
    failed = f", {counts.failed} failed: run the same command again" if counts.failed else ""
    why = "; the output has the reason of each refusal" if counts.refused else ""
    done = f"{counts.answered} line{'s' * (counts.answered != 1)} answered, {counts.refused} refused{failed}{known}"
    return f"{done}{speed if counts.tokens else ''}{why}"
