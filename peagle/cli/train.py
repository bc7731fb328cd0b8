"""Options of `peagle train`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from drafter.train.folder import MOVABLE
from drafter.train.recipe import DrafterShape, Recipe
from peagle.base.errors import InputError
from peagle.base.files import locked
from peagle.base.flag import DATA, LEARNING, OUTPUT, RUNNING, Flag, check_least
from peagle.cli.command import Takes, refuse_other_options, require_extra
from peagle.cli.flags import QUIET
from peagle.config import LoadConfig


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a P-EAGLE, EAGLE-3 or DFlash drafter.

    Reads what peagle data wrote. Writes the recipe, the log, checkpoints and a
    plot of the training, and at the end or after Ctrl-C the best drafter so far.
    The same command, or --resume, resumes after the last checkpoint.

    [bold]Examples[/bold]

      one hour          [cyan]peagle train --data DATA --out RUN --minutes 60[/cyan]
      resume, longer    [cyan]peagle train --out RUN --resume --steps 5000[/cyan]
      your target
        [cyan]peagle train --target DIR --data DATA --out RUN --steps 5000[/cyan]
      from a trained drafter
        [cyan]peagle train --data DATA --out RUN --init DRAFTER --minutes 10[/cyan]
      acceptance length on held-out prompts
        [cyan]peagle train --data DATA --out RUN --steps 900 --evaluate IN.jsonl[/cyan]
      long prompts
        [cyan]peagle train --data DATA --out RUN --steps 900 --width 8192 \\
          --drafter-window 2048[/cyan]
      another kind: eagle-3 or dflash
        [cyan]peagle train --data DATA --out RUN --minutes 60 --drafter dflash[/cyan]
    """

    # allowed with --resume, because they change only for how long the training runs, what it shows, and where files are
    resumable: ClassVar[Sequence[str]] = (
        *("steps", "minutes", "save_every", "quiet"),
        *MOVABLE,
    )
    data: Annotated[tuple[str, ...], Flag(DATA, "DIR[:SHARE]")] = ()
    """Directory of peagle data, and its share of the rows; repeatable."""
    out: Annotated[str, Flag(OUTPUT, "DIR")]
    """Output directory; the same command resumes it."""
    resume: Annotated[bool, Flag(RUNNING)] = False
    """Resume the training in --out with its own options; --steps or --minutes extend it, --data, --target and --init
    name what has moved."""
    load: Annotated[LoadConfig, Takes("target")] = LoadConfig()
    steps: Annotated[int | None, Flag(LEARNING, "N")] = None
    """Training steps; more than before extend the training in --out."""
    minutes: Annotated[float | None, Flag(LEARNING, "MINUTES")] = None
    """Minutes of training, without loading, compiling and --evaluate. With --resume, 0 writes the drafter of the last
    checkpoint."""
    shape: DrafterShape = DrafterShape()
    recipe: Recipe = Recipe()
    save_every: Annotated[int, Flag(RUNNING, "STEPS")] = 100
    """Steps between checkpoints, 1 or more."""
    evaluate: Annotated[str | None, Flag(RUNNING, "FILE.jsonl")] = None
    """Held-out prompts: measure the acceptance length on the first 20, greedily and at temperature 1."""
    held_out: Annotated[float | None, Flag(DATA, "P")] = None
    """Fraction of the documents to hold out, 0 to 0.5; the step that is best on them is kept. Default: 0.1."""
    quiet: Annotated[bool, QUIET] = False

    def __post_init__(self) -> None:
        check_least(self, steps=1, save_every=1)
        if self.minutes is not None and not (0 < self.minutes < math.inf or (self.resume and self.minutes == 0)):
            raise InputError(f"minutes is {self.minutes:g}; expected a number above 0", "minutes")
        if self.held_out is not None and not 0 <= self.held_out <= 0.5:
            raise InputError(f"held_out is {self.held_out:g}; expected a fraction from 0 to 0.5", "held_out")

    def run(self) -> int:
        if self.resume:
            refuse_other_options(self, "--resume", ("out", "resume", *self.resumable), f"the recipe in {self.out}")
        with require_extra("training needs", "train"):
            from peagle.cli.training import train
        with locked(Path(self.out)):
            return train(self)
