"""What is shown while a run goes on: the text on standard output, everything else on standard error."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from peagle.api import show_ids
from peagle.cli.output import wrapped
from peagle.engine.request import Request
from peagle.ops import interrupt
from peagle.result import Result
from peagle.text.channels import ChannelParser, Delta
from peagle.text.tokenizer import Tokenizer
from peagle.workflows.run import Observer

DIM, NOT_DIM = "\x1b[2m", "\x1b[22m"
LINE_SECONDS = 60  # between two lines about progress, where there is no terminal
REDRAW_SECONDS = 1  # between two changes of progress that is shown while something is measured
LEAST_LEFT = 0.5  # seconds: less is not said
LABEL = 13  # characters before the text of a line of a summary

# control characters but tab, line feed and carriage return: a model's output must not drive the terminal
_UNSAFE = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160)], "�")


PLAINLY = "decoding plainly, to compare (--no-baseline skips it)"
# of accepted drafts by their place in the step; readable on dark and on light
DRAFT_COLOURS = ("#2da44e", "#1f9d9d", "#3b82f6", "#8b5cf6", "#d946a0", "#e0572f", "#b7791f")


def draft_text(text: str, origin: int) -> Text:
    """Colour the text of an accepted draft; that of the target's own tokens, origin 0, stays as it is."""
    return Text(text, style="" if origin == 0 else DRAFT_COLOURS[min(origin, len(DRAFT_COLOURS)) - 1])


@runtime_checkable
class Advance(Protocol):
    """Progress of a stage: done of total, and the seconds left if they are known."""

    def __call__(self, done: int, total: int, left_s: float | None = None) -> None: ...


class Display(Observer):
    """Streams one text at a time; texts of requests that are decoded together come whole, in the order of the requests,
    each when those before it have ended. Progress is shown on terminals only, and never while text runs into the same
    terminal. A text that streams to a terminal is shown by its channels: reasoning and tool calls dim, then the answer;
    elsewhere, and if quiet, it is shown as the tokens spell it."""

    def __init__(self, *, text: bool, quiet: bool, total: int, streaming: bool, colours: bool = False) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._text, self._quiet, self._total, self._streaming = text, quiet, total, streaming
        self._colours = colours and text and sys.stdout.isatty()
        self.live = self.console.is_terminal and not quiet
        self._shared = self.live and text and sys.stdout.isatty()
        self._by_channel = streaming and text and not quiet and not self._colours and sys.stdout.isatty()
        self._has_tokenizer = True
        self._tokenizer: Tokenizer | None = None
        self._parsers: dict[int, ChannelParser] = {}
        self._message: int | None = None  # of the text that streams, shown last
        self._pieces: dict[int, list[str]] = {}
        self._ended: dict[int, tuple[Request, str]] = {}  # those that wait for one before them
        self._progress: Progress | None = None
        self._done = self._finished = 0  # requests: before this round, in it
        self._decoding = ""
        self._began: float | None = None
        self._runs: tuple[str, Advance] | None = None  # what `run_of` shows
        self._compared: tuple[Advance, float] | None = None  # progress of the comparison, and when it was shown last
        self._stdout = Console(highlight=False, soft_wrap=True)
        if text and hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")

    @contextmanager
    def stage(self, what: str, animated: bool = True) -> Iterator["Advance"]:
        """Show what takes seconds now, with the time it took if animated.

        Call the result with (done, all), and the seconds left if they are known better than by the time so far. Without
        a terminal, a line once in a while says the same. Raises KeyboardInterrupt after Ctrl-C, before anything begins.
        """
        interrupt.check()
        self._show(what, animated)
        try:
            yield self._advancing(what)
        finally:
            self.clear()

    def run_of(self, what: str, done: int, total: int, left_s: float | None = None, unit: str = "run") -> None:
        """Show that the run after `done` of `total` begins, of something that is measured or else takes seconds.

        Another `what` begins anew, and what is shown else ends it.
        """
        if self._runs is None or self._runs[0] != what or (self._progress is None and self.live):
            self._show(what, animated=False)
            self._runs = what, self._advancing(what, unit)
        self._runs[1](done, total, left_s)

    def _advancing(self, what: str, unit: str | None = None) -> "Advance":
        """Return what shows the progress of a stage that begins now: a share, or with a unit a number."""
        began = said = time.monotonic()

        def advance(done: int, total: int, left_s: float | None = None) -> None:
            nonlocal said
            now = time.monotonic()
            text = _progress(done, total, now - began, left_s, unit)
            if self._progress is not None:
                task = self._progress.tasks[0]
                self._progress.update(task.id, left=text, refresh=not self._progress.live.auto_refresh)
            if not self.live and now - said >= LINE_SECONDS and total:
                said = now
                self.note(f"{what}: {text}")

        return advance

    @contextmanager
    def keeping(self, kept: Callable[[], str]) -> Iterator[None]:
        """Say what is there by then, should Ctrl-C end what goes on within."""
        try:
            yield
        except KeyboardInterrupt:
            self.note(f"interrupted: {kept()}")
            raise

    def read_by(self, tokenizer: Tokenizer | None) -> None:
        """Take the tokenizer of the texts; without one, ids are shown."""
        self._has_tokenizer, self._tokenizer = tokenizer is not None, tokenizer

    @property
    def talks(self) -> bool:
        """Whether anything but the text is shown."""
        return not self._quiet

    def compiling(self) -> None:
        self._show("compiling")

    def measuring(self, done: int, total: int) -> None:
        self.run_of("measuring what drafting costs here (-k K skips it)", done, total)

    def decoding(self, done: int, total: int, plainly: bool) -> None:
        self._done, self._began = done, self._began or time.perf_counter()
        self._finished, self._decoding = 0, PLAINLY if plainly else "decoding"
        self._show(self._decoding if total == 1 else f"{self._counted()}{self._time_left()}", animated=False)
        self._compared = self._advancing(self._decoding, "tokens"), time.monotonic()

    def compared(self, done: int, total: int) -> None:
        assert self._compared is not None
        advance, shown = self._compared
        if self._total == 1 and time.monotonic() - shown >= REDRAW_SECONDS:  # rarely, as this is measured
            advance(done, total)
            self._compared = advance, time.monotonic()

    def profiling(self) -> None:
        self._show("looking at some steps")

    def started(self, request: Request, turn: int | None) -> None:
        self._pieces[request.index] = []
        if self._by_channel and self._tokenizer is not None:
            self._parsers[request.index] = ChannelParser(self._tokenizer, request.prompt_ids)
        if self._streaming:
            self._heading(request, turn)

    def emitted(
        self, request: Request, token_ids: Sequence[int], text: str, parts: Sequence[tuple[str, int]] = ()
    ) -> None:
        piece = text if self._has_tokenizer else show_ids(token_ids)
        self._pieces[request.index].append(piece)
        if parts and self._colours and self._streaming:
            self._write_coloured(parts)
        elif (parser := self._parsers.get(request.index)) is not None:
            self._write_deltas(parser.add(token_ids, text))
        elif self._streaming:
            self._write(piece)

    def finished(self, result: Result) -> None:
        self.end(result.request)
        self._finished += 1
        if self._progress is not None and not self._streaming:
            self._progress.update(self._progress.tasks[0].id, description=self._counted(), refresh=True)

    def end(self, request: Request) -> None:
        """The request's text is complete on standard output, with a line break behind it."""
        pieces = self._pieces.pop(request.index, None)
        if pieces is None:
            return
        text = "".join(pieces)
        if (parser := self._parsers.pop(request.index, None)) is not None:
            self._write_deltas(parser.finish())
            self._message = None
        if self._streaming:
            self._write("" if text.endswith("\n") else "\n")
            return
        self._ended[request.index] = request, text
        while self._ended and min(self._ended) < min(self._pieces, default=self._total):
            each, whole = self._ended.pop(min(self._ended))
            self._heading(each, None)
            self._write(whole if whole.endswith("\n") else whole + "\n")

    def end_all(self) -> None:
        """The same for whatever was interrupted; of those that waited for a slot there is nothing to show."""
        self.clear()
        for index in sorted(self._pieces):
            if self._streaming or self._pieces[index]:
                self.end(Request((0,), 1, index=index))
            else:
                del self._pieces[index]

    def note(self, line: str) -> None:
        """A line on standard error, if anybody wants to read such."""
        if not self._quiet:
            self.clear()
            self.console.print(wrapped(line, self.console), style="dim", markup=False)

    def summary(self, lines: Sequence[str]) -> None:
        if self._quiet or not lines:
            return
        self.clear()
        self.console.print()
        for line in lines:
            self.console.print(wrapped(line, self.console, LABEL), markup=False)

    def clear(self) -> None:
        """Nothing is shown as going on."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _heading(self, request: Request, turn: int | None) -> None:
        if self._total > 1 and self._text and not self._quiet:
            turns = "" if turn is None else f", turn {turn}"
            self.note(f"--- request {request.index + 1} of {self._total}{turns}{self._time_left()}")

    def _counted(self) -> str:
        return f"{self._decoding}: {self._done + self._finished} of {self._total} requests"

    def _time_left(self) -> str:
        if not self._done or self._began is None:
            return ""
        left = (time.perf_counter() - self._began) / self._done * (self._total - self._done)
        return f", about {duration(left)} left"

    def _write_deltas(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            dim = delta.kind != "content"
            if delta.message != self._message:
                self._write("" if self._message is None else "\n\n")
                self._write("" if delta.call is None else f"{delta.call.name} ", dim)
            self._message = delta.message
            self._write(delta.text, dim)

    def _write(self, text: str, dim: bool = False) -> None:
        if not self._text or not text:
            return
        if self._shared:
            self.clear()
        shown = text.translate(_UNSAFE) if sys.stdout.isatty() else text
        sys.stdout.write(f"{DIM}{shown}{NOT_DIM}" if dim and not self.console.is_dumb_terminal else shown)
        sys.stdout.flush()

    def _write_coloured(self, parts: Sequence[tuple[str, int]]) -> None:
        """Write the parts in the colours of their origins (peagle.result.Piece)."""
        self.clear()
        for text, origin in parts:
            self._stdout.print(draft_text(text.translate(_UNSAFE), origin), end="")
        sys.stdout.flush()

    def _show(self, what: str, animated: bool = True) -> None:
        """Not animated is what is measured: a thread that redraws would be in its way."""
        if not self.live:
            return
        self.clear()
        what_column = TextColumn("{task.description}", markup=False)
        left_column = TextColumn("{task.fields[left]}", markup=False)
        columns: list[ProgressColumn] = [what_column, left_column]
        if animated:
            columns = [SpinnerColumn("line"), what_column, TimeElapsedColumn(), left_column]
        self._progress = Progress(*columns, console=self.console, transient=True, auto_refresh=animated)
        self._progress.add_task(what, total=None, left="")
        self._progress.start()


def _progress(done: int, total: int, elapsed_s: float, left_s: float | None, unit: str | None) -> str:
    """Say how far something is: 20%; run 2 of 5, if its first run is done; 20 of 128 tokens."""
    if not total:
        return ""
    if left_s is None and done:
        left_s = elapsed_s * (total - done) / done
    share = f"{done / total:.0%}"
    if unit is not None:
        share = f"{done} of {total} tokens" if unit == "tokens" else f"{unit} {min(done + 1, total)} of {total}"
    return share + ("" if left_s is None or left_s < LEAST_LEFT else f", about {duration(left_s)} left")


def duration(seconds: float) -> str:
    """Return "3 min 20 s", or "20 s"."""
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s" if seconds >= 60 else f"{seconds:.0f} s"
