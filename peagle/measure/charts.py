"""Draw pictures as SVG texts. Functions return None without matplotlib (the extra `plots`)."""

import importlib
import importlib.util
import io
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from peagle.base.errors import InputWarning
from peagle.base.files import reason_of
from peagle.measure.estimates import Estimate

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222")  # safe for colour-blind readers
MARKERS = "osD^vP*"
SIZE = (5.4, 3.6)  # inches, so that letters of 10 points are readable in a picture of 500 pixels
LONG_NAME = 70  # characters of a name in a legend
LINE = 0.2  # inches of a legend's line

Point = tuple[int | float, Estimate | None]  # (x, figure)


def can_draw() -> bool:
    """Test whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def lines(
    series: Mapping[str, Sequence[Point]], finish: Callable[[Any], None], joined_until: float = np.inf
) -> str | None:
    """Draw lines with intervals, and a legend if there are several; `finish` sets up the axis. None without a point.

    joined_until: the x from which points are not joined.
    """
    points = {name: [(x, figure) for x, figure in line if figure is not None] for name, line in series.items()}
    points = {name: line for name, line in points.items() if line}
    if not points:
        return None
    below = LINE * len(points) if len(points) > 1 else 0.0

    def draw(axis: Any) -> None:
        for number, (name, line) in enumerate(points.items()):
            marker, label = MARKERS[number % len(MARKERS)], _shortened(name)
            style = {"color": COLORS[number % len(COLORS)], "markersize": 5, "linewidth": 1.2}
            joined = [point for point in line if point[0] < joined_until]
            if joined:
                _points(axis, joined, fmt=f"{marker}-", label=label, **style)
            if single := line[len(joined) :]:
                _points(axis, single, fmt=marker, label="_" if joined else label, **style)
        finish(axis)
        if below:
            axis.figure.legend(loc="outside lower center", fontsize="small")

    return svg(draw, size=(SIZE[0], SIZE[1] + below))


def _points(axis: Any, points: Sequence[tuple[int | float, Estimate]], fmt: str, **style: Any) -> None:
    """Draw points, with their intervals if there are any."""
    xs, values = [x for x, _ in points], np.array([figure.value for _, figure in points])
    axis.plot(xs, values, fmt, clip_on=False, zorder=3, **style)  # a marker at the edge is whole, and above it
    if all(figure.low is None for _, figure in points):
        return
    ends = [[figure.value if end is None else end for end in (figure.low, figure.high)] for _, figure in points]
    lengths = np.abs(np.array(ends) - values[:, None]).T
    axis.errorbar(xs, values, lengths, fmt="none", ecolor=style["color"], capsize=3, elinewidth=1)


def _shortened(name: str) -> str:
    """Cut the middle out of a long name."""
    half = LONG_NAME // 2
    return name if len(name) <= LONG_NAME else f"{name[:half]}…{name[-half:]}"


def svg(draw: Callable[[Any], None], panels: int = 1, size: tuple[float, float] = SIZE) -> str | None:
    """Draw as SVG text; None without matplotlib.

    `draw` gets the axis, or an array of them: panels one below the other that share the horizontal axis. A picture that
    cannot be drawn is an InputWarning and None, because the figures that it shows are worth more.
    """
    if not can_draw():
        return None
    try:
        return _drawn(draw, panels, size)
    except Exception as error:
        why = f"a picture cannot be drawn: {type(error).__name__}: {reason_of(error)}"
        warnings.warn(f"{why}; expected a working matplotlib: pip install matplotlib", InputWarning, stacklevel=2)
        return None


def _drawn(draw: Callable[[Any], None], panels: int, size: tuple[float, float]) -> str:
    """Draw as SVG text, the same whatever the user's environment and matplotlibrc say about style and backend."""
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure  # draws without pyplot, so without a backend that shows windows

    # without a date and random ids, so that the same figures give the same file
    style: Any = {"svg.hashsalt": "peagle", "svg.fonttype": "none", "font.size": 10, "text.parse_math": False}
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # the reader's fonts draw the text
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(style)
        figure = Figure(figsize=size, layout="constrained")
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
