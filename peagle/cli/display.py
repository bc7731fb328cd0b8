"""The output of a run: generated text on standard output, everything else on standard error."""

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.color import Color, ColorSystem
from rich.console import COLOR_SYSTEMS, Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from peagle.answers.result import Result
from peagle.answers.stream import show_ids
from peagle.base import interrupt
from peagle.cli.output import say, wrapped
from peagle.engine.request import Request
from peagle.text.channels import ChannelParser, Delta
from peagle.text.tokenizer import Tokenizer
from peagle.workflows.run import Observer, RunStage

DIM, NOT_DIM = "\x1b[2m", "\x1b[22m"
LINE_SECONDS: float = 10.0  # between two lines of progress, if standard error is no terminal
REDRAW_SECONDS = 1  # between two updates of progress on a terminal while a measurement runs
LEAST_LEFT = 0.5  # seconds; a shorter time left is not shown
COUNTED = ("tokens", "requests", "steps")  # progress in these units is a count, "2 of 9 tokens"; in others "run 3 of 9"
PART = "part"  # a unit that takes long: a line shows the elapsed time if the time left is unknown or over
SUMMARY_INDENT = 13  # characters before the text of a summary's line
PLAINLY = "comparing with plain decoding (--no-baseline skips it)"

# control characters except tab, line feed and carriage return: a model's output must not drive the terminal
_UNSAFE = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160)], "�")

# of accepted drafts by their position in the step; readable on dark and light backgrounds
DRAFT_COLOURS = ("#2da44e", "#1f9d9d", "#3b82f6", "#8b5cf6", "#d946a0", "#e0572f", "#b7791f")
NO_COLOUR = "\x1b[39m"

Parts = Sequence[tuple[str, int]]  # (text, origin) as in peagle.answers.result.Piece; origin 0: not an accepted draft


class Stage:
    """A stage that takes seconds. Call it with (done, total), and the seconds left if the elapsed time misleads.

    The elapsed time counts from the first call with a total, because what comes before may be compilation, or the work
    of an earlier run that this one resumes.

    unit: what `done` counts; None shows a percentage. Calls `redraw` after a change, at most once in REDRAW_SECONDS.
    """

    def __init__(self, title: str, unit: str | None, redraw: Callable[[], None]) -> None:
        self.title, self.unit = title, unit
        self._redraw = redraw
        self._began = self._reported = time.monotonic()
        self._redrawn: float | None = None
        self._first: tuple[float, int] | None = None  # when a total was reported first, and what was done then
        self._last: tuple[int, int, float | None] = 0, 0, None

    def __call__(self, done: int, total: int, left_s: float | None = None) -> None:
        self._last, self._reported = (done, total, left_s), time.monotonic()
        if total and self._first is None:
            self._first = self._reported, done
        if self._redrawn is None or self._reported - self._redrawn >= REDRAW_SECONDS:
            self._redrawn = self._reported
            self._redraw()

    @property
    def progress(self) -> str:
        """The last reported progress as text: "20%", "run 2 of 5" while the second run lasts, "20 of 128 tokens".

        With the time left, which runs down between reports.
        """
        done, total, left_s = self._last
        if not total or self._first is None:
            return ""
        began, before = self._first
        if left_s is None and done > before:
            left_s = (self._reported - began) * (total - done) / (done - before)
        if left_s is not None:
            left_s -= time.monotonic() - self._reported
        share = f"{done / total:.0%}"
        if self.unit in COUNTED:
            share = f"{done:,} of {total:,} {self.unit}"
        elif self.unit is not None:
            share = f"{self.unit} {min(done + 1, total)} of {total}"
        return share + left_text(left_s)

    def line(self) -> str:
        progress, so_far = self.progress, f"{duration(time.monotonic() - self._began)} so far"
        if progress and (self.unit != PART or progress.endswith("left")):
            return f"{self.title}: {progress}"
        return f"{self.title}: {progress}, {so_far}" if progress else f"{self.title}: {so_far}"


class Ticker:
    """Call `tick` every `seconds` in a thread, until stopped."""

    def __init__(self, seconds: float, tick: Callable[[], None]) -> None:
        self._seconds, self._tick, self._stopped = seconds, tick, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            with contextlib.suppress(OSError):  # the reader of a pipe may be gone
                self._tick()


class Channels:
    """An answer by channel. `add` yields the deltas of the text so far, before a stop string that may come."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._parser, self._waiting, self._length = ChannelParser(tokenizer, prompt_ids), list[Delta](), 0

    def add(self, token_ids: Sequence[int], text: str, last: bool = False) -> Iterator[Delta]:
        """Add tokens, and text of these or of earlier ones. last: the answer has ended."""
        self._waiting += self._parser.add(token_ids, last)
        self._length += len(text)
        deltas, self._waiting = self._waiting, []
        for delta in deltas:
            room = max(0, self._length - delta.start)
            if delta.text[:room] or (not delta.text and delta.start <= self._length):
                yield delta._replace(text=delta.text[:room])
            if delta.text[room:]:
                self._waiting.append(delta._replace(text=delta.text[room:], start=delta.start + room))


class Display:
    """Print texts, progress, notes and the summary of a run.

    text: print texts. streaming: print a text while it is generated; otherwise texts are printed whole, in the order of
    the requests. Progress is redrawn on a terminal, or a line is printed every LINE_SECONDS; it stops when text streams
    to the same place. Text that streams to a terminal is printed by channel, reasoning and tool calls dim; elsewhere,
    and if quiet, control tokens are spelled out. drafts: colour accepted drafts on a terminal with colours, unless
    quiet.
    """

    def __init__(
        self, *, text: bool = False, quiet: bool = False, total: int = 1, streaming: bool = False, drafts: bool = False
    ) -> None:
        self._stderr = Console(stderr=True, highlight=False, soft_wrap=True)
        self._stdout = Console(highlight=False, soft_wrap=True)
        self.quiet = quiet
        self._text, self._total, self._streaming = text, total, streaming
        system = COLOR_SYSTEMS.get(self._stdout.color_system or "")  # None: no terminal, or one without colours
        self.shows_drafts = drafts and text and not quiet and system is not None and not self._stdout.no_color
        self._colours = [] if system is None else [_colour_code(colour, system) for colour in DRAFT_COLOURS]
        self.live = self._stderr.is_terminal and not quiet
        self._shared = self.live and text and sys.stdout.isatty()
        self._by_channel = streaming and text and not quiet and sys.stdout.isatty()
        self._has_tokenizer = True
        self._tokenizer: Tokenizer | None = None
        self._channels: dict[int, Channels] = {}
        self._message: int | None = None  # the message of the last printed delta
        self._pieces: dict[int, list[tuple[str, int]]] = {}  # by the index of the request
        self._ended: dict[int, Parts] = {}  # complete texts that wait for an earlier request
        self._stage: Stage | None = None
        self._progress: Progress | None = None
        self._ticker: Ticker | None = None
        self._done = self._finished = 0  # requests: before this round, in it
        self._num_tokens = 0  # in this round
        self._began: float | None = None
        if text and hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")

    @contextmanager
    def stage(self, title: str, animated: bool = True, unit: str | None = None) -> Iterator[Stage]:
        """Show a stage during the block, with its elapsed time if animated. Raises KeyboardInterrupt after Ctrl-C."""
        interrupt.check()
        try:
            yield self._show(title, animated, unit)
        finally:
            self.clear()

    def begin_run(self, title: str, done: int, total: int, left_s: float | None = None, unit: str = "run") -> None:
        """Show that run `done` + 1 of a measurement begins. A new title starts a new stage."""
        if self._stage is None or self._stage.title != title:
            self._show(title, animated=unit == PART, unit=unit)
        assert self._stage is not None
        self._stage(done, total, left_s)

    @contextmanager
    def on_interrupt(self, describe_kept: Callable[[], str]) -> Iterator[None]:
        """If a signal interrupts the block, note which results are kept."""
        try:
            yield
        except KeyboardInterrupt:
            self.note(f"interrupted: {describe_kept()}")
            raise

    def set_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Set the tokenizer of the texts; without one, token ids are printed."""
        self._has_tokenizer, self._tokenizer = tokenizer is not None, tokenizer

    @property
    def observer(self) -> Observer:
        """The callbacks of a run that it shows."""
        return Observer(self.run_stage, self.compared, self.started, self.emitted, self.finished, self.shows_drafts)

    def run_stage(self, stage: RunStage, done: int, total: int) -> None:
        """Show that a stage of a run begins."""
        if stage == "measuring":
            self.measuring(done, total)
        elif stage not in ("decoding", "comparing"):
            self._show(stage)
        else:
            self._done, self._began = done, self._began or time.perf_counter()
            self._finished = self._num_tokens = 0
            plainly = stage == "comparing"
            by_token = total == 1 or (plainly and not self._streaming)
            self._show(PLAINLY if plainly else stage, animated=False, unit="tokens" if by_token else "requests")
            self._count()

    def measuring(self, done: int, total: int) -> None:
        self.begin_run("measuring the cost of drafting (-k K skips it)", done, total)

    def compared(self, done: int, total: int) -> None:
        if self._stage is not None and self._stage.unit == "tokens":
            self._stage(done, total)

    def started(self, request: Request, turn: int | None) -> None:
        self._pieces[request.index] = []
        if self._by_channel and self._tokenizer is not None:
            self._channels[request.index] = Channels(self._tokenizer, request.prompt_ids)
        if self._streaming:
            self._heading(request.index, turn)

    def emitted(self, request: Request, token_ids: Sequence[int], text: str, parts: Parts = ()) -> None:
        if not parts or not self.shows_drafts:
            parts = [(text if self._has_tokenizer else show_ids(token_ids), 0)]
        self._pieces[request.index] += parts
        if (channels := self._channels.get(request.index)) is not None:
            tokens = [(token,) for token in token_ids] if self.shows_drafts else [tuple(token_ids)]
            for ids, part in itertools.zip_longest(tokens, parts):
                shown, origin = part or ("", 0)
                self._write_deltas(channels.add(ids or (), shown), origin)
        elif self._streaming:
            self._write_parts(parts)
        self._num_tokens += len(token_ids)
        if self._total == 1 and self._stage is not None:
            self._stage(self._num_tokens, request.max_new_tokens)

    def finished(self, result: Result) -> None:
        self.end(result.request.index)
        self._finished += 1
        self._count()

    def end(self, index: int) -> None:
        """Complete a request's text on standard output, with a line break after it."""
        parts = self._pieces.pop(index, None)
        if parts is None:
            return
        line_break = "" if "".join(text for text, _ in parts).endswith("\n") else "\n"
        if (channels := self._channels.pop(index, None)) is not None:
            self._write_deltas(channels.add((), "", last=True))
            self._message = None
        if self._streaming:
            self._write(line_break)
            return
        self._ended[index] = [*parts, (line_break, 0)]
        while self._ended and (first := min(self._ended)) < min(self._pieces, default=self._total):
            self._heading(first, None)
            self._write_parts(self._ended.pop(first))

    def end_all(self) -> None:
        """Complete the texts of interrupted requests; drop requests that have no text yet, unless they stream."""
        self.clear()
        for index in sorted(self._pieces):
            if self._streaming or self._pieces[index]:
                self.end(index)
            else:
                del self._pieces[index]

    def note(self, line: str) -> None:
        """Print a line on standard error, unless quiet."""
        if not self.quiet:
            self._stderr.print(wrapped(line, self._stderr), style="dim", markup=False)

    def warn(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.clear()
            say("warning", line)

    def summary(self, lines: Sequence[str]) -> None:
        if self.quiet or not lines:
            return
        self.clear()
        self._stderr.print()
        for line in lines:
            self._stderr.print(wrapped(line, self._stderr, SUMMARY_INDENT), markup=False)

    def clear(self) -> None:
        self._stage = None
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker = None

    def _heading(self, index: int, turn: int | None) -> None:
        if self._total > 1 and self._text and not self.quiet:
            turns = "" if turn is None else f", turn {turn}"
            self.note(f"--- request {index + 1} of {self._total}{turns}{left_text(self._left_s())}")

    def _count(self) -> None:
        if self._stage is not None and self._stage.unit == "requests":
            self._stage(self._done + self._finished, self._total, self._left_s())

    def _left_s(self) -> float | None:
        done = self._done + self._finished
        if not done or self._began is None:
            return None
        return (time.perf_counter() - self._began) / done * (self._total - done)

    def _write_deltas(self, deltas: Iterable[Delta], origin: int = 0) -> None:
        for delta in deltas:
            dim = delta.kind != "content"
            if delta.message != self._message:
                self._write("" if self._message is None else "\n\n")
                self._write("" if delta.call is None else f"{delta.call.name} ", dim)
            self._message = delta.message
            self._write(delta.text, dim, origin)

    def _write_parts(self, parts: Parts) -> None:
        for text, origin in parts:
            self._write(text, origin=origin)

    def _write(self, text: str, dim: bool = False, origin: int = 0) -> None:
        """Write a text; colour an accepted draft, whose origin is its position in the step."""
        if not self._text or not text:
            return
        self._clear_before_text()
        shown = text.translate(_UNSAFE) if sys.stdout.isatty() else text
        if origin and self.shows_drafts:
            shown = f"{self._colours[min(origin, len(DRAFT_COLOURS)) - 1]}{shown}{NO_COLOUR}"
        sys.stdout.write(f"{DIM}{shown}{NOT_DIM}" if dim and not self._stderr.is_dumb_terminal else shown)
        sys.stdout.flush()

    def _clear_before_text(self) -> None:
        """Stop showing progress if the text goes to the same terminal, or may go to the same file."""
        if self._shared or not self.live:
            self.clear()

    def _show(self, title: str, animated: bool = True, unit: str | None = None) -> Stage:
        """Show a stage and return it. Do not animate a measurement: the redrawing thread would disturb it."""
        self.clear()
        stage = self._stage = Stage(title, unit, self._redraw)
        if self.live:
            columns: list[ProgressColumn] = [
                TextColumn("{task.description}", markup=False),
                TextColumn("{task.fields[stage].progress}", markup=False),
            ]
            if animated:
                columns = [SpinnerColumn("line"), columns[0], TimeElapsedColumn(), columns[1]]
            # by default rich sends standard output to its own console, wherever the output goes
            self._progress = Progress(
                *columns, console=self._stderr, transient=True, auto_refresh=animated, redirect_stdout=False
            )
            self._progress.add_task(title, total=None, stage=stage)
            self._progress.start()
        elif not self.quiet:
            self._ticker = Ticker(LINE_SECONDS, lambda: self.note(stage.line()))
        return stage

    def _redraw(self) -> None:
        if self._progress is not None and not self._progress.live.auto_refresh:
            self._progress.refresh()


def _colour_code(colour: str, system: ColorSystem) -> str:
    """Return the control sequence that sets a colour, or the nearest one of the terminal's system."""
    return f"\x1b[{';'.join(Color.parse(colour).downgrade(system).get_ansi_codes())}m"


def left_text(left_s: float | None) -> str:
    """Return ", about 20 s left"; "" if unknown, or below LEAST_LEFT."""
    return "" if left_s is None or left_s < LEAST_LEFT else f", about {duration(left_s)} left"


def duration(seconds: float) -> str:
    """Return "3 min 20 s", or "20 s"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
