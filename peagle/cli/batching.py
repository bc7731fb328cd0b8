"""Load a pair, answer a file of requests, and report progress."""

import asyncio
import time

from peagle.cli.batch import BatchCommand
from peagle.cli.display import Display
from peagle.cli.output import say
from peagle.cli.serving import FAILED, check_models, load_engine
from peagle.ops import interrupt
from peagle.serve.batch import BatchFile, Counts, check_files
from peagle.serve.loop import EngineLoop
from peagle.serve.service import Service

UNLIMITED = 1 << 30  # queued requests: a line may ask for many responses, and no client waits
ALL_REFUSED = 3  # the exit code
AT_ONCE = 2  # lines in flight per slot, so that no slot is empty


def answer_file(settings: BatchCommand) -> int:
    """Answer the file and return the exit code (see the command's help).

    Raises InputError, before anything slow, for bad options and files; KeyboardInterrupt after Ctrl-C.
    """
    models = check_models(settings)
    check_files(settings.requests, settings.answers)
    display = Display(quiet=settings.quiet)
    engine, builder, name = load_engine(settings, models, display, "answering as")
    loop = EngineLoop(engine, UNLIMITED)
    batch = BatchFile(
        Service(loop, builder, name), settings.requests, settings.answers, AT_ONCE * settings.engine.slots
    )
    started = time.perf_counter()
    try:
        with display.keeping(lambda: _progress(batch.counts)), display.stage("answering") as advance:
            asyncio.run(batch.run(interrupt.pressed, lambda counts: advance(counts.done, counts.total)))
            interrupt.check()
    finally:
        loop.close()
    if loop.failure is not None:
        say("error", f"{loop.failure}; {_progress(batch.counts)}")
        return FAILED
    summary = _summary(batch.counts, time.perf_counter() - started)
    display.note(summary)
    if settings.quiet and (batch.counts.refused or batch.counts.failed):
        display.warn([summary])
    return FAILED if batch.counts.failed else ALL_REFUSED if batch.counts.all_refused else 0


def _progress(counts: Counts) -> str:
    return f"{counts.done} of {counts.total} lines are done; the same command resumes"


def _summary(counts: Counts, seconds: float) -> str:
    known = f", {counts.known} answered before" if counts.known else ""
    speed = f"; {counts.tokens} tokens in {seconds:.1f} s, {counts.tokens / seconds:.0f} tok/s"
    failed = f", {counts.failed} failed: run the same command again" if counts.failed else ""
    why = "; the output has the reason of each refusal" if counts.refused else ""
    done = f"{counts.answered} line{'s' * (counts.answered != 1)} answered, {counts.refused} refused{failed}{known}"
    return f"{done}{speed if counts.tokens else ''}{why}"
