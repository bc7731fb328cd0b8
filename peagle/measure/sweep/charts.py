"""Draw the pictures of a page as SVG texts. Functions return None without matplotlib (the extra `plots`)."""

import importlib.util
import io
import itertools
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from peagle.base.errors import InputWarning
from peagle.base.files import reason_of
from peagle.measure.estimates import Estimate
from peagle.measure.sweep.figures import VariantRow
from peagle.measure.sweep.plan import k_order

PAGE, INK = "#ffffff", "#222222"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)  # safe for colour-blind readers
ON_DARK = {  # the colour on a dark page, by that on a light one
    PAGE: "#16181c",
    INK: "#e6e6e6",
    "#0072b2": "#4da3e0",
    "#d55e00": "#f28a3c",
    "#009e73": "#2fc49a",
    "#cc79a7": "#e39bc4",
    "#56b4e9": "#a6dcff",
    "#cccccc": "#3a3f46",  # the frame of a legend
}
MARKERS = "osD^vP*"
WIDE, HIGH = 5.4, 3.6  # inches, so that letters of 10 points are readable in a picture of 500 pixels
HEADROOM = 1.12  # the end of an axis over its highest point
FEW_SERIES, SHORT_NAME = 4, 30  # the most lines, and characters of a name, for a legend inside the picture
LONG_NAME = 70  # characters of a name in a legend below the picture
LINE = 0.2  # inches per line of that legend

Point = tuple[int | float, Estimate | None]  # (x, figure)


def can_draw() -> bool:
    """Test whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def speedup(series: Mapping[str, Sequence[VariantRow]]) -> str | None:
    """Draw speed-up over K, a line per series. `auto` is on the right, without a line to it."""
    ks = list(dict.fromkeys(row.k for rows in series.values() for row in rows))
    ks.sort(key=k_order)
    first_auto = next((index for index, k in enumerate(ks) if not isinstance(k, int)), len(ks))
    spread = np.linspace(-0.08, 0.08, len(series)) if len(series) != 1 else [0.0]
    lines = {
        title: [(ks.index(row.k) + float(shift), row.speedup) for row in rows]
        for shift, (title, rows) in zip(spread, series.items(), strict=True)
    }

    def finish(axis: Any) -> None:
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(xlabel="K", ylabel="speed-up over plain decoding", xlim=(-0.5, len(ks) - 0.5))
        axis.set_ylim(0, axis.get_ylim()[1])
        axis.set_xticks(range(len(ks)), list(map(str, ks)))

    return _lines(lines, finish, joined_until=first_auto - 0.5)


def positions(series: Mapping[str, VariantRow]) -> str | None:
    """Draw the acceptance rate by position of the draft, a line per series. None if nothing was drafted."""
    lines = {name: list(enumerate(row.rate_per_position, 1)) for name, row in series.items()}

    def finish(axis: Any) -> None:
        axis.set(xlabel="draft", ylabel="accepted / steps", ylim=(0, 1.05))
        axis.xaxis.get_major_locator().set_params(integer=True)

    return _lines(lines, finish)


def concurrency(series: Mapping[str, Sequence[VariantRow]]) -> str | None:
    """Draw total tok/s over the number of requests at once, a line per variant."""
    lines = {name: [(row.concurrency or 1, row.tok_per_s) for row in rows] for name, rows in series.items()}
    points = [point for line in lines.values() for point in line if point[1] is not None]
    loads = sorted({load for load, _ in points})
    highest = max((figure.high or figure.value for _, figure in points if figure is not None), default=0.0)

    def finish(axis: Any) -> None:
        axis.set_xscale("log", base=2)
        axis.set_xticks(loads, list(map(str, loads)))
        axis.minorticks_off()
        axis.set(xlabel="requests at once", ylabel="total tokens a second", ylim=(0, HEADROOM * highest))

    return _lines(lines, finish)


def calibration(lines: Mapping[str, Sequence[tuple[float, float]]]) -> str | None:
    """Draw the share of right drafts over the drafter's probability of them, and the diagonal."""

    def finish(axis: Any) -> None:
        axis.plot([0, 1], [0, 1], linestyle=":", color=INK, linewidth=1, label="_")
        axis.set(xlabel="the drafter's probability of its draft", ylabel="right", xlim=(0, 1), ylim=(0, 1.02))

    return _lines({name: [(prob, Estimate(share)) for prob, share in points] for name, points in lines.items()}, finish)


def _lines(
    lines: Mapping[str, Sequence[Point]], finish: Callable[[Any], None], joined_until: float = np.inf
) -> str | None:
    """Draw lines with intervals and a legend; `finish` sets up the axis. None without a point.

    joined_until: the x from which points are not joined.
    """
    known = {title: [(x, figure) for x, figure in points if figure is not None] for title, points in lines.items()}
    known = {title: points for title, points in known.items() if points}
    if not known:
        return None
    titles = shortened(list(known), LONG_NAME)

    def draw(axis: Any) -> None:
        for title, points, (color, marker) in zip(titles, known.values(), _looks(), strict=False):
            joined = [point for point in points if point[0] < joined_until]
            single = points[len(joined) :]
            style = {"color": color, "markersize": 5, "linewidth": 1.2}
            for part, line, label in ((joined, "-", title), (single, "", "_" if joined else title)):
                if part:
                    _points(axis, part, fmt=f"{marker}{line}", label=label, **style)
        finish(axis)
        _legend(axis, titles)

    return svg(draw, titles)


def _points(axis: Any, points: Sequence[tuple[int | float, Estimate]], fmt: str, **style: Any) -> None:
    """Draw points, with their intervals if there are any."""
    xs, values = [x for x, _ in points], np.array([figure.value for _, figure in points])
    if all(figure.low is None for _, figure in points):
        axis.plot(xs, values, fmt, **style)
        return
    ends = [[figure.value if end is None else end for end in (figure.low, figure.high)] for _, figure in points]
    axis.errorbar(xs, values, np.abs(np.array(ends) - values[:, None]).T, fmt=fmt, capsize=3, elinewidth=1, **style)


def _looks() -> Iterator[tuple[str, str]]:
    """Yield a colour and a marker for each series, without end; all pairs come before one repeats."""
    for shift in itertools.count():
        for index, color in enumerate(COLORS):
            yield color, MARKERS[(index + shift) % len(MARKERS)]


def shortened(names: Sequence[str], most: int) -> list[str]:
    """Cut the middle out of names of more than `most` characters, unless some become equal."""
    half = most // 2
    short = [name if len(name) <= most else f"{name[:half]}…{name[-half:]}" for name in names]
    return short if len(set(short)) == len(set(names)) else list(names)


def _columns_below(names: Collection[str]) -> int:
    """Choose the number of columns of a legend below the picture; 0: it fits inside."""
    longest = max(map(len, names), default=0)
    if len(names) < 2 or (len(names) <= FEW_SERIES and longest <= SHORT_NAME):
        return 0
    return 2 if longest <= SHORT_NAME else 1


def _legend(axis: Any, names: Collection[str]) -> None:
    """Put a legend into the picture, or below it if it would cover too much."""
    if columns := _columns_below(names):
        axis.figure.legend(loc="outside lower center", ncols=columns, fontsize="small")
    elif len(names) > 1:
        axis.legend()


def svg(
    draw: Callable[[Any], None],
    names: Collection[str] = (),
    panels: int = 1,
    size: tuple[float, float] = (WIDE, HIGH),
    on_dark: Mapping[str, str] = ON_DARK,
) -> str | None:
    """Draw as SVG text that follows the reader's colour scheme; None without matplotlib.

    `draw` gets the axis, or an array of them: panels one below the other that share the horizontal axis. names: those
    in the legend. on_dark: as ON_DARK. A picture that cannot be drawn is an InputWarning and None, because the figures
    that it shows are worth more.
    """
    if not can_draw():
        return None
    try:
        return _for_both_schemes(_drawn(draw, names, panels, size), on_dark)
    except Exception as error:
        why = f"a picture cannot be drawn: {type(error).__name__}: {reason_of(error)}"
        warnings.warn(f"{why}; expected a working matplotlib: pip install matplotlib", InputWarning, stacklevel=2)
        return None


def _drawn(draw: Callable[[Any], None], names: Collection[str], panels: int, size: tuple[float, float]) -> str:
    """Draw as SVG text, the same whatever the user's environment and matplotlibrc say about style and backend."""
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure  # draws without pyplot, so without a backend that shows windows

    # without a date and random ids, so that the same figures give the same file
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: Any = {"svg.hashsalt": "peagle", "svg.fonttype": "none", "font.size": 10, "text.parse_math": False}
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # the reader's fonts draw the text
        warnings.filterwarnings("ignore", "Creating legend with loc", UserWarning)  # it took a second
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(style | dict.fromkeys(inked, INK))
        columns, (width, height) = _columns_below(names), size
        below = LINE * -(-len(names) // columns) if columns else 0.0
        figure = Figure(figsize=(width, height + below), layout="constrained")
        draw(figure.subplots(panels, sharex=True))
        for axis in figure.axes:
            axis.spines[["top", "right"]].set_visible(False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _matplotlib() -> Any:
    """Import matplotlib, which fails if MPLBACKEND names a backend that is not installed, such as a notebook's."""
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        return importlib.import_module("matplotlib")
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend


def _for_both_schemes(drawing: str, on_dark: Mapping[str, str]) -> str:
    """Let a drawing follow the reader's colour scheme, by rules on its style attributes."""
    rules = (
        f'[style*="{property}: {light}"] {{ {property}: {dark} !important }}'
        for light, dark in on_dark.items()
        for property in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>"
    head, end, body = drawing.partition("<defs>")
    return f"{head}{style}\n {end}{body}"
