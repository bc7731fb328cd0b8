"""Draw the pictures of a report as SVG texts; None without matplotlib (the extra `plots`)."""

import importlib.util
import io
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from peagle.measure.sweep.plan import AUTO

Row = Mapping[str, Any]
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

Series = TypeVar("Series")


def can_draw() -> bool:
    """Test whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def speedup(series: Mapping[str, Sequence[Row]]) -> str | None:
    """Draw pooled speed-up over K, one line per series."""
    return _over_k(series, "speedup", "speed-up over plain decoding", level=1.0)


def acceptance_length(series: Mapping[str, Sequence[Row]]) -> str | None:
    """Draw acceptance length over K; hollow markers: without the outputs that loop, if some do."""

    def without_loops(row: Row) -> Any:
        return row["without_loops"]["acceptance_length"] if row["looping_frac"] else None

    return _over_k(series, "acceptance_length", "acceptance length", also=without_loops)


def cycle(rows: Sequence[Row]) -> str | None:
    """Draw the time of a step over K: bars of drafting, verifying and the rest, in plain steps.

    Dots are the tokens a pass, which must lie above the bar. None if no step was profiled.
    """
    profiled = [row for row in rows if row["draft_s"] is not None]
    if not profiled:
        return None

    def draw(axis: Any) -> None:
        places, plain = range(len(profiled)), profiled[0]["plain_step_s"]["value"]
        bottom = np.zeros(len(profiled))
        for key, name, color in (
            ("verify_s", "verify", COLORS[0]),
            ("draft_s", "draft", COLORS[1]),
            ("host_s", "rest", "#bbbbbb"),
        ):
            heights = np.array([row[key]["value"] for row in profiled]) / plain
            axis.bar(places, heights, 0.6, bottom=bottom, label=name, color=color)
            bottom += heights
        lengths = [row["tokens_per_step"] for row in profiled]
        shown = [(place, each) for place, each in zip(places, lengths, strict=True) if each is not None]
        _bars(axis, [place for place, _ in shown], [each for _, each in shown], label="tokens a pass", color=INK)
        axis.set(xlabel="K", ylabel="passes of plain decoding")
        _from_zero(axis)
        axis.set_xticks(places, shortened([row["label"] for row in profiled], LONG_TICK))
        if tilt := _tilt(profiled):
            axis.tick_params(axis="x", rotation=tilt)
            for label in axis.get_xticklabels():
                label.set(ha="right", rotation_mode="anchor")
        _legend_above(axis)

    return svg(draw)


def positions(series: Mapping[str, Row]) -> str | None:
    """Draw the acceptance rate of each draft, one line per series. None if nothing was drafted."""
    drafted = _named({name: row for name, row in series.items() if any(row["rate_per_position"])})
    if not drafted:
        return None

    def draw(axis: Any) -> None:
        for (name, row), (color, marker) in zip(drafted.items(), _looks(), strict=False):
            rates = [each for each in row["rate_per_position"] if each is not None]
            _bars(axis, range(1, len(rates) + 1), rates, label=name, color=color, fmt=f"{marker}-")
        axis.set(xlabel="draft", ylabel="accepted / steps", ylim=(0, 1.05))
        axis.xaxis.get_major_locator().set_params(integer=True)
        _legend(axis, drafted)

    return svg(draw, drafted)


def requests(row: Row, looping_above: float) -> str | None:
    """Draw the speed-up of each request, slowest first. None if no request has one."""
    found = sorted((each for each in row["per_request"] if each["speedup"]), key=lambda each: each["speedup"]["value"])
    if not found:
        return None

    def draw(axis: Any) -> None:
        for looping, color, name in ((False, COLORS[0], "other outputs"), (True, COLORS[1], "looping outputs")):
            some = [
                (place, each["speedup"])
                for place, each in enumerate(found, 1)
                if ((each["loop_share"] or 0) > looping_above) == looping
            ]
            if some:
                _bars(axis, [p for p, _ in some], [e for _, e in some], label=name, color=color, fmt=".", capsize=0)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set(xlabel="requests, slowest first", ylabel="speed-up over plain decoding")
        axis.xaxis.get_major_locator().set_params(integer=True)
        _log_ratios(axis)  # intervals of few repeats reach far, as far up as down by this scale
        if len(axis.get_legend_handles_labels()[1]) > 1:
            _legend_above(axis)

    return svg(draw)


def _log_ratios(axis: Any) -> None:
    """Make the vertical axis logarithmic, with ticks at plain numbers."""
    from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(MaxNLocator(6) if high < 4 * low else LogLocator(2, (1.0, 1.5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.minorticks_off()


def concurrency(series: Mapping[str, Sequence[Row]]) -> str | None:
    """Draw total tokens a second over the number of requests at once, one line per variant.

    None without any.
    """
    timed = {name: [row for row in rows if row["tok_per_s"] is not None] for name, rows in series.items()}
    timed = _named({name: rows for name, rows in timed.items() if rows})
    if not timed:
        return None
    numbers = sorted({row["concurrency"] for rows in timed.values() for row in rows})

    def draw(axis: Any) -> None:
        for (name, rows), (color, marker) in zip(timed.items(), _looks(), strict=False):
            places, rates = [row["concurrency"] for row in rows], [row["tok_per_s"] for row in rows]
            _bars(axis, places, rates, label=name, color=color, fmt=f"{marker}-")
        axis.set_xscale("log", base=2)
        axis.set_xticks(numbers, list(map(str, numbers)))
        axis.minorticks_off()
        highest = max(row["tok_per_s"]["high"] or row["tok_per_s"]["value"] for some in timed.values() for row in some)
        axis.set(xlabel="requests at once", ylabel="total tokens a second", ylim=(0, HEADROOM * highest))
        _legend(axis, timed)

    return svg(draw, timed)


def over_context(series: Mapping[str, Sequence[Row]], key: str, name: str, level: float | None = None) -> str | None:
    """Draw a figure over the length of prompts, one line per series: of buckets, each at its median.

    None if no series has two buckets with that figure.
    """
    found = {title: [part for part in parts if part[key] is not None] for title, parts in series.items()}
    found = _named({title: parts for title, parts in found.items() if len(parts) > 1})
    if not found:
        return None

    def draw(axis: Any) -> None:
        for (title, parts), (color, marker) in zip(found.items(), _looks(), strict=False):
            places = [part["prompt_tokens"] for part in parts]
            _bars(axis, places, [part[key] for part in parts], label=title, color=color, fmt=f"{marker}-")
        if level is not None:
            axis.axhline(level, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        places = sorted({part["prompt_tokens"] for parts in found.values() for part in parts})
        axis.set_xticks(places, [f"{place:,.0f}" for place in places])
        axis.minorticks_off()
        axis.set(xlabel="tokens of the prompt", ylabel=name)
        _from_zero(axis)
        _legend(axis, found)

    return svg(draw, found)


def _over_k(
    series: Mapping[str, Sequence[Row]],
    key: str,
    name: str,
    level: float | None = None,
    also: Callable[[Row], Any] | None = None,
) -> str | None:
    series = _named(series)
    labels = list(dict.fromkeys(str(row["k"]) for rows in series.values() for row in rows))
    labels.sort(key=lambda label: int(label) if label.isdecimal() else 1 << 30)

    def draw(axis: Any) -> None:
        spread = np.linspace(-0.08, 0.08, len(series)) if len(series) > 1 else [0.0]
        for (title, rows), shift, (color, marker) in zip(series.items(), spread, _looks(), strict=False):
            for value, hollow in ((lambda row: row[key], False), (also, True)):
                present = [row for row in rows if value is not None and value(row) is not None]
                fixed, chosen = ([row for row in present if (row["k"] == AUTO) == auto] for auto in (False, True))
                for some, line in ((fixed, ":" if hollow else "-"), (chosen, "")):  # no line to `auto`
                    if value is not None and some:
                        _bars(
                            axis,
                            [labels.index(str(row["k"])) + shift for row in some],
                            [value(row) for row in some],
                            label=None if hollow or (some is chosen and fixed) else title,
                            color=color,
                            fmt=f"{marker}{line}",
                            markerfacecolor=PAGE if hollow else color,
                        )
        if level is not None:
            axis.axhline(level, color="grey", linewidth=0.8)
        axis.set(xlabel="K", ylabel=name, xlim=(-0.5, len(labels) - 0.5))
        _from_zero(axis)
        axis.set_xticks(range(len(labels)), labels)
        _legend(axis, series)

    return svg(draw, series)


def _bars(axis: Any, places: Sequence[int | float], values: Sequence[Mapping[str, float]], **style: Any) -> None:
    """Draw points with their intervals, in the legend, too, if they have any."""
    middle = np.array([each["value"] for each in values])
    style = {"fmt": "o", "markersize": 5, "linewidth": 1.2} | style
    if all(each["low"] is None for each in values):
        axis.plot(list(places), middle, style.pop("fmt"), **{key: style[key] for key in style if key != "capsize"})
        return
    ends = [[each[end] if each[end] is not None else each["value"] for end in ("low", "high")] for each in values]
    span = np.abs(np.array(ends) - middle[:, None]).T
    axis.errorbar(list(places), middle, span, **({"capsize": 3, "elinewidth": 1} | style))


def _from_zero(axis: Any) -> None:
    """Begin the vertical axis at zero, with room above the highest point."""
    axis.set_ylim(0, HEADROOM * axis.get_ylim()[1] / 1.05)  # matplotlib's own margin is .05


def _looks() -> Iterator[tuple[str, str]]:
    """Yield a colour and a marker for each series; a pair repeats only after all pairs."""
    for shift in itertools.count():
        for place, color in enumerate(COLORS):
            yield color, MARKERS[(place + shift) % len(MARKERS)]


def _named(series: Mapping[str, Series]) -> dict[str, Series]:
    """Shorten the names of series to what a legend holds."""
    return dict(zip(shortened(list(series), LONG_NAME), series.values(), strict=True))


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
    return 25 if any(len(row["label"]) > 4 for row in rows) else 0


def svg(
    draw: Callable[[Any], None],
    names: Collection[str] = (),
    panels: int = 1,
    size: tuple[float, float] = (WIDE, HIGH),
    on_dark: Mapping[str, str] = ON_DARK,
) -> str | None:
    """Draw as SVG text that follows the reader's colour scheme; None without matplotlib.

    `draw` gets the axes: of several panels an array, one below the other, with one horizontal axis. names: of its
    `_legend`. on_dark: the colour of a dark page for each colour of a light one.
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
    """Let a drawing follow the reader's colour scheme, alone and in a page: its colours are in style attributes."""
    rules = (
        f'[style*="{property}: {light}"] {{ {property}: {dark} !important }}'
        for light, dark in on_dark.items()
        for property in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>"
    head, end, body = drawing.partition("<defs>")
    return f"{head}{style}\n {end}{body}"
