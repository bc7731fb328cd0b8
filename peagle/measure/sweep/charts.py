"""Draw the pictures of a report as SVG texts; None without matplotlib (the extra `plots`)."""

import importlib.util
import io
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from peagle.measure.estimates import Estimate
from peagle.measure.sweep.figures import Row
from peagle.measure.sweep.plan import in_order

PAGE, INK = "#ffffff", "#222222"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)  # safe for colour-blind readers
ON_DARK = {  # what a reader of dark pages sees in place of a colour
    PAGE: "#16181c",
    INK: "#e6e6e6",
    "#0072b2": "#4da3e0",
    "#d55e00": "#f28a3c",
    "#009e73": "#2fc49a",
    "#cc79a7": "#e39bc4",
    "#56b4e9": "#a6dcff",
    "#cccccc": "#3a3f46",  # the frame of a legend
    "#bbbbbb": "#8a929c",
}
MARKERS = "osD^vP*"
WIDE, HIGH = 5.4, 3.6  # inches: letters of 10 points are readable where the picture is 500 pixels wide
HEADROOM = 1.12  # of an axis, over its highest point
FEW_SERIES = 4
SHORT_NAME, LONG_NAME, LONG_TICK = 30, 70, 24  # characters: of a legend inside, below a picture, and of a label
LINE = 0.2  # inches of a legend's line

Point = tuple[int | float, Estimate | None]  # (place on the horizontal axis, figure)


def can_draw() -> bool:
    """Test whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def speedup(series: Mapping[str, Sequence[Row]]) -> str | None:
    """Draw pooled speed-up over K, one line per series."""
    return _over_k(series, lambda row: row.speedup, "speed-up over plain decoding", level=1.0)


def acceptance_length(series: Mapping[str, Sequence[Row]]) -> str | None:
    """Draw acceptance length over K; hollow markers: without the outputs that loop, if some do."""

    def without_loops(row: Row) -> Estimate | None:
        return row.without_loops.acceptance_length if row.looping_frac else None

    return _over_k(series, lambda row: row.acceptance_length, "acceptance length", hollow=without_loops)


def cycle(rows: Sequence[Row]) -> str | None:
    """Draw the time of a step over K: bars of drafting, verifying and the rest, in plain steps.

    Dots are the tokens a pass, which must lie above the bar. None if no step was profiled.
    """
    profiled = [row for row in rows if row.draft_s is not None]
    if not profiled or profiled[0].plain_step_s is None:
        return None
    plain_s = profiled[0].plain_step_s.value
    parts = (
        ("verify", [row.verify_s for row in profiled], COLORS[0]),
        ("draft", [row.draft_s for row in profiled], COLORS[1]),
        ("rest", [row.host_s for row in profiled], "#bbbbbb"),
    )

    def draw(axis: Any) -> None:
        bottom = np.zeros(len(profiled))
        for name, times, color in parts:
            heights = np.array([0.0 if time is None else time.value for time in times]) / plain_s
            axis.bar(range(len(profiled)), heights, 0.6, bottom=bottom, label=name, color=color)
            bottom += heights
        _points(axis, enumerate(row.tokens_per_step for row in profiled), label="tokens a pass", color=INK)
        axis.set(xlabel="K", ylabel="passes of plain decoding")
        _from_zero(axis)
        axis.set_xticks(range(len(profiled)), shortened([row.label for row in profiled], LONG_TICK))
        if tilt := _tilt(profiled):
            axis.tick_params(axis="x", rotation=tilt)
            for label in axis.get_xticklabels():
                label.set(ha="right", rotation_mode="anchor")
        _legend_above(axis)

    return svg(draw)


def positions(series: Mapping[str, Row]) -> str | None:
    """Draw the acceptance rate by draft, a line per series. None if nothing was drafted."""
    lines = {name: list(enumerate(row.rate_per_position, 1)) for name, row in series.items()}

    def finish(axis: Any) -> None:
        axis.set(xlabel="draft", ylabel="accepted / steps", ylim=(0, 1.05))
        axis.xaxis.get_major_locator().set_params(integer=True)

    return _lines(lines, finish)


def concurrency(series: Mapping[str, Sequence[Row]]) -> str | None:
    """Draw total tokens a second over the number of requests at once, a line per variant."""
    lines = {name: [(row.concurrency or 1, row.tok_per_s) for row in rows] for name, rows in series.items()}
    figures = [figure for points in lines.values() for _, figure in points if figure is not None]
    highest = max((figure.high or figure.value for figure in figures), default=0.0)

    def finish(axis: Any) -> None:
        _log_numbers(axis, lines)
        axis.set(xlabel="requests at once", ylabel="total tokens a second", ylim=(0, HEADROOM * highest))

    return _lines(lines, finish)


def over_context(lines: Mapping[str, Sequence[Point]], name: str, level: float | None = None) -> str | None:
    """Draw a figure over the length of prompts; points are (median tokens of a bucket, figure).

    None if no series has two buckets with that figure.
    """
    known = {title: [point for point in points if point[1] is not None] for title, points in lines.items()}
    known = {title: points for title, points in known.items() if len(points) > 1}

    def finish(axis: Any) -> None:
        _level(axis, level)
        _log_numbers(axis, known)
        axis.set(xlabel="tokens of the prompt", ylabel=name)
        _from_zero(axis)

    return _lines(known, finish)


def _lines(lines: Mapping[str, Sequence[Point]], finish: Callable[[Any], None]) -> str | None:
    """Draw lines with intervals and a legend; `finish` sets up the axis. None without a point."""
    drawn = {title: points for title, points in lines.items() if any(figure is not None for _, figure in points)}
    if not drawn:
        return None
    titles = shortened(list(drawn), LONG_NAME)

    def draw(axis: Any) -> None:
        for title, points, (color, marker) in zip(titles, drawn.values(), _looks(), strict=False):
            _points(axis, points, label=title, color=color, fmt=f"{marker}-")
        finish(axis)
        _legend(axis, titles)

    return svg(draw, titles)


def calibration(lines: Mapping[str, Sequence[tuple[float, float]]]) -> str | None:
    """Draw the share of right drafts over the drafter's confidence."""
    titles = shortened(list(lines), LONG_NAME)

    def draw(axis: Any) -> None:
        axis.plot([0, 1], [0, 1], linestyle=":", color=INK, linewidth=1, label="_")
        for title, points, (color, marker) in zip(titles, lines.values(), _looks(), strict=False):
            axis.plot(*zip(*points, strict=True), f"{marker}-", color=color, markersize=5, linewidth=1.2, label=title)
        axis.set(xlabel="the drafter's probability of its draft", ylabel="accepted", xlim=(0, 1), ylim=(0, 1.02))
        _legend(axis, titles)

    return svg(draw, titles) if lines else None


def _over_k(
    series: Mapping[str, Sequence[Row]],
    value: Callable[[Row], Estimate | None],
    name: str,
    level: float | None = None,
    hollow: Callable[[Row], Estimate | None] = lambda _: None,
) -> str | None:
    """Draw a figure over K; `auto` is joined by no line. hollow: the values of hollow markers."""
    titles = shortened(list(series), LONG_NAME)
    ks = list(dict.fromkeys(row.k for rows in series.values() for row in rows))
    ks.sort(key=in_order)

    def draw(axis: Any) -> None:
        spread = np.linspace(-0.08, 0.08, len(series)) if len(series) > 1 else [0.0]
        for title, rows, shift, (color, marker) in zip(titles, series.values(), spread, _looks(), strict=False):
            fixed, auto = ([row for row in rows if (not isinstance(row.k, int)) == chosen] for chosen in (False, True))
            label = title
            for figure, line, fill in ((value, "-", color), (hollow, ":", PAGE)):
                for some, joint in ((fixed, line), (auto, "")):
                    points = [(ks.index(row.k) + shift, figure(row)) for row in some]
                    style = {"label": label, "color": color, "markerfacecolor": fill, "fmt": f"{marker}{joint}"}
                    if _points(axis, points, **style):
                        label = "_"  # so that the legend has a series once
        _level(axis, level)
        axis.set(xlabel="K", ylabel=name, xlim=(-0.5, len(ks) - 0.5))
        _from_zero(axis)
        axis.set_xticks(range(len(ks)), list(map(str, ks)))
        _legend(axis, titles)

    return svg(draw, titles)


def _points(axis: Any, points: Iterable[Point], **style: Any) -> bool:
    """Draw the points that have a figure, with their intervals."""
    known = [(place, figure) for place, figure in points if figure is not None]
    if not known:
        return False
    places, middle = [place for place, _ in known], np.array([figure.value for _, figure in known])
    style = {"fmt": "o", "markersize": 5, "linewidth": 1.2} | style
    if all(figure.low is None for _, figure in known):
        axis.plot(places, middle, style.pop("fmt"), **{key: style[key] for key in style if key != "capsize"})
        return True
    ends = [[figure.value if end is None else end for end in (figure.low, figure.high)] for _, figure in known]
    axis.errorbar(
        places, middle, np.abs(np.array(ends) - middle[:, None]).T, **({"capsize": 3, "elinewidth": 1} | style)
    )
    return True


def _level(axis: Any, level: float | None) -> None:
    if level is not None:
        axis.axhline(level, color="grey", linewidth=0.8)


def _log_numbers(axis: Any, lines: Mapping[str, Sequence[Point]]) -> None:
    """Make the horizontal axis logarithmic, with a tick at every point."""
    places = sorted({place for points in lines.values() for place, figure in points if figure is not None})
    axis.set_xscale("log", base=2)
    axis.set_xticks(places, [f"{place:,.0f}" for place in places])
    axis.minorticks_off()


def _from_zero(axis: Any) -> None:
    """Begin the vertical axis at zero, with room above the highest point."""
    axis.set_ylim(0, HEADROOM * axis.get_ylim()[1] / 1.05)  # matplotlib's own margin is .05


def _looks() -> Iterator[tuple[str, str]]:
    """Yield a colour and a marker for every series; a pair repeats only after all pairs."""
    for shift in itertools.count():
        for place, color in enumerate(COLORS):
            yield color, MARKERS[(place + shift) % len(MARKERS)]


def shortened(names: Sequence[str], most: int) -> list[str]:
    """Cut the middle out of names of more than `most` characters, if all remain different."""
    half = most // 2
    short = [name if len(name) <= most else f"{name[:half]}…{name[-half:]}" for name in names]
    return short if len(set(short)) == len(set(names)) else list(names)


def _columns_below(names: Collection[str]) -> int:
    """Count the columns of a legend below the picture; 0 if it fits inside."""
    longest = max(map(len, names), default=0)
    if len(names) < 2 or (len(names) <= FEW_SERIES and longest <= SHORT_NAME):
        return 0
    return 2 if longest <= SHORT_NAME else 1


def _legend(axis: Any, names: Collection[str]) -> None:
    """Put a legend into the picture, or below it if it would cover much."""
    if columns := _columns_below(names):
        axis.figure.legend(loc="outside lower center", ncols=columns, fontsize="small")
    elif len(names) > 1:
        axis.legend()


def _legend_above(axis: Any) -> None:
    """Put a legend above the picture, where it covers nothing."""
    axis.figure.legend(loc="outside upper center", ncols=4, fontsize="small", frameon=False)


def _tilt(rows: Sequence[Row]) -> int:
    """Choose the angle at which the labels of rows do not meet."""
    if len(rows) > 12:
        return 90
    return 25 if any(len(row.label) > 4 for row in rows) else 0


def svg(
    draw: Callable[[Any], None],
    names: Collection[str] = (),
    panels: int = 1,
    size: tuple[float, float] = (WIDE, HIGH),
    on_dark: Mapping[str, str] = ON_DARK,
) -> str | None:
    """Draw as SVG text that follows the reader's colour scheme; None without matplotlib.

    `draw` gets the axes: of several panels an array, one below the other, with one horizontal axis. names: of its
    `_legend`. on_dark: the colour of a dark page by that of a light one.
    """
    if not can_draw():
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # no date and no random ids, so that the same figures give the same file
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: Any = {"svg.hashsalt": "peagle", "svg.fonttype": "none", "font.size": 10, "text.parse_math": False}
    with matplotlib.rc_context(style | dict.fromkeys(inked, INK)):
        columns, (width, height) = _columns_below(names), size
        below = LINE * -(-len(names) // columns) if columns else 0.0
        figure, axes = plt.subplots(panels, figsize=(width, height + below), layout="constrained", sharex=True)
        draw(axes)
        for axis in figure.axes:
            axis.spines[["top", "right"]].set_visible(False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        plt.close(figure)
    return _for_both_schemes(text.getvalue(), on_dark)


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
