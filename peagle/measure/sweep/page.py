"""The pages of sweeps: the result in a sentence, a table per workload, pictures; the same tables are for terminals."""

import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from peagle.base.files import printable
from peagle.measure import charts
from peagle.measure.estimates import FEWEST, FEWEST_ROUNDS, Estimate, estimate_text
from peagle.measure.provenance import origin_text
from peagle.measure.reports import Block, Picture, Table, command, heading, plain
from peagle.measure.sweep.compare import LENGTH, SPEEDUP, Change, Difference
from peagle.measure.sweep.figures import VariantRow, alone, best, concurrent, of_workload, rows_by_prompt
from peagle.measure.sweep.plan import Plan, Workload, k_order, short_names
from peagle.measure.sweep.store import Folder

MOST_PROMPTS = 20  # of a set whose page has a line for each
HASH = 12  # digits of a checksum that a page shows
PLAINLY = "plain decoding"
MOST_HEIGHT = 2.0  # of a picture, over its highest point: the intervals of few rounds may be far wider
INTERVALS = (
    "(a..b): 95 % interval over prompts; of times it also covers the spread between rounds (--repeats). It needs "
    f"{FEWEST} prompts and {FEWEST_ROUNDS} rounds"
)


@dataclass(frozen=True)
class Column:
    """A column of a table with a line per VariantRow; left out if all its cells are "-"."""

    name: str
    text: Callable[[VariantRow], str]
    meaning: str


def _length_without_loops(row: VariantRow) -> str:
    return estimate_text(row.length_without_loops) if row.looping_frac else "-"


def _positions(row: VariantRow) -> str:
    rates = [f"{rate.value:.2f}".removeprefix("0") for rate in row.rate_per_position if rate and rate.value]
    return " ".join(rates) or "-"


def _tok_per_s(row: VariantRow) -> str:
    return "-" if row.tok_per_s is None else f"{row.tok_per_s.value:.0f}"


def _differing(row: VariantRow) -> str:
    return f"{row.num_differing} of {row.num_outputs}" if row.num_differing else "-"


AT_ONCE = Column("at once", lambda row: str(row.concurrency or "-"), "slots that all requests of a round share")
COLUMNS = (
    Column("K", lambda row: row.label, "tokens drafted per step; 0: plain decoding"),
    Column("speed-up", lambda row: estimate_text(row.speedup), "tok/s over plain decoding's for the same requests"),
    Column(
        "acceptance length",
        lambda row: estimate_text(row.acceptance_length),
        "tokens of the outputs per step that verified drafts; what a step decides after an output's end does not count",
    ),
    Column(
        "mean of prompts",
        lambda row: estimate_text(row.mean_length),
        "mean of the prompts' own acceptance lengths: a long answer counts as much as a short one",
    ),
    Column(
        "without loops", _length_without_loops, "acceptance length without outputs that repeat 30 % of their 4-grams"
    ),
    Column("c(K)", lambda row: estimate_text(row.cycle_cost), "time of a pass over that of a plain one"),
    Column("tok/s", _tok_per_s, "tokens after the first over their time; of many requests at once, of all"),
    Column("outputs that differ", _differing, "from plain decoding's"),
    Column("accepted", _positions, "share of steps with drafts that accepted the first, the second and so on"),
)


# --- sentences -------------------------------------------------------------------------------------------------------


def headlines(folder: Folder, rows: Sequence[VariantRow]) -> list[str]:
    """State the fastest variant of each workload, then that of each number of requests at once."""
    several = len(folder.plan.workloads) > 1
    lines = []
    for workload in folder.plan.workloads:
        own = of_workload(rows, workload)
        name = f"{workload.label}: " if several else ""
        lines.append(name + _headline(folder, workload, alone(own)))
        for slots in sorted(folder.plan.concurrencies):
            if fastest := best(row for row in own if row.concurrency == slots):
                lines.append(f"{name}{slots} at once: {_sentence(fastest)}")
    return lines


def _headline(folder: Folder, workload: Workload, rows: Sequence[VariantRow]) -> str:
    drafting = [row for row in rows if row.k != 0]
    if fastest := best(drafting):
        return _sentence(fastest)
    if not drafting:
        failed = [why for (at, _), why in folder.errors().items() if at == workload]
        none = f"no request has all its repeats with {PLAINLY} and with a K"
        return "no speed-up is known: " + (failed[0] if failed else none)
    if not any(row.counters.num_steps for row in drafting):
        return f"nothing was drafted, so every step was one of {PLAINLY}"
    return "no speed was measured, because no output has two tokens"


def _sentence(row: VariantRow) -> str:
    """State a speed-up with its interval, and whether outputs equal plain decoding's."""
    speedup, name = row.speedup or Estimate(1.0), variant_text(row.label)
    if speedup.value <= 1:
        return f"no K beats {PLAINLY} here: the best, {name}, gives {speedup.value:.2f}x ({_interval(speedup)})"
    outputs = f"{row.num_differing} of {row.num_outputs} outputs differ" if row.num_differing else "identical output"
    unsure = "; not surely faster" if speedup.low is not None and not speedup.is_not_1 else ""
    return f"{name}: {speedup.value:.2f}x {PLAINLY} ({_interval(speedup)}), {outputs}{unsure}"


def _interval(figure: Estimate) -> str:
    if figure.low is None or figure.high is None:
        return "too few prompts or repeats for an interval"
    return f"95 %: {figure.low:.2f} to {figure.high:.2f}"


def variant_text(label: str) -> str:
    """Turn a variant's label into words. Example: K = 3 with DRAFTER, 1024 tokens."""
    k, _, rest = label.partition(", ")
    return PLAINLY if k == "0" else f"K = {k}" + (rest and f" with {rest}")


def notes(folder: Folder, rows: Sequence[VariantRow]) -> Iterator[str]:
    """Yield the limits of a run's figures."""
    if not folder.finished:
        resume = shlex.join(["peagle", "sweep", "--out", printable(str(folder.path)), "--resume"])
        yield f"Not finished: figures are of the requests that have all their repeats; {resume} continues"
    for (workload, variant), why in folder.errors().items():
        yield f"Failed: {workload.label}, K = {folder.plan.label(variant)}: {why}"
    for row in rows:
        if not isinstance(row.k, int) and not row.counters.num_steps:
            at_once = "" if row.concurrency is None else f", {row.concurrency} at once"
            yield (
                f"{row.workload.label}{at_once}: K = {row.label} verified no draft, since by measured times none was "
                "likely enough to save time; its speed-up compares plain decoding with itself"
            )
    if len(set(map(origin_text, folder.origins))) > 1:
        yield "Parts of the run were timed on different machines or versions (see the end)"


# --- a run -----------------------------------------------------------------------------------------------------------


def tables(folder: Folder, rows: Sequence[VariantRow]) -> Iterator[tuple[str, Table]]:
    """Yield (title, table of variants) for each workload, and for its many requests at once."""
    return ((title, table) for title, table, _ in _sections(folder, rows))


def _sections(folder: Folder, rows: Sequence[VariantRow]) -> Iterator[tuple[str, Table, Iterator[Picture]]]:
    """Yield (title, table, pictures) as `tables` does; a picture is drawn when it is taken."""
    if len(folder.plan.sources) > 1:
        sets = {workload.label: alone(of_workload(rows, workload)) for workload in folder.plan.workloads}
        yield "Acceptance length and speed-up by prompt set", _by_variant("prompts", sets), iter(())
    for workload in folder.plan.workloads:
        own, label = of_workload(rows, workload), workload.label
        singly, together = alone(own), concurrent(own)
        for title, part, columns, pictures in (
            (label, singly, COLUMNS, _pictures(folder.plan, label, singly)),
            (f"{label}: many requests at once", together, (AT_ONCE, *COLUMNS), _pictures_of_loads(label, together)),
        ):
            used = [column for column in columns if any(column.text(row) != "-" for row in part)]
            if used:
                cells = [[column.text(row) for column in used] for row in part]
                yield title, Table([column.name for column in used], cells, num_names=1 + (AT_ONCE in used)), pictures
        if singly and 1 < singly[0].num_requests <= MOST_PROMPTS:
            prompts = {str(row + 1): own for row, own in sorted(rows_by_prompt(folder, workload).items())}
            yield f"{label}: acceptance length and speed-up by prompt", _by_variant("row", prompts), iter(())


def _by_variant(name: str, lines: Mapping[str, Sequence[VariantRow]]) -> Table:
    """Make a table with a line per prompt, or set of prompts, and a column per variant."""
    labels = list(dict.fromkeys(row.label for rows in lines.values() for row in rows))
    cells = {line: {row.label: _in_short(row) for row in rows} for line, rows in lines.items()}
    header = [name, *(f"K = {label}" if label != "0" else "plain tok/s" for label in labels)]
    return Table(header, [[line, *(own.get(label, "-") for label in labels)] for line, own in cells.items()])


def _in_short(row: VariantRow) -> str:
    """Write an acceptance length and a speed-up; of plain decoding tok/s."""
    if row.k == 0:
        return _tok_per_s(row)
    length = "-" if row.acceptance_length is None else f"{row.acceptance_length.value:.2f}"
    return length if row.speedup is None else f"{length}, {row.speedup.value:.2f}x"


def run_blocks(folder: Folder, rows: Sequence[VariantRow]) -> list[Block]:
    """Lay out the page of one run."""
    plan = folder.plan
    (target,), drafters = short_names([plan.target]), ", ".join(short_names(plan.drafters))
    blocks: list[Block] = [
        heading(f"Speculative decoding of {target} with {drafters}, {str(folder.origins[0]['time'])[:10]}", 1),
        *_listed(f"**{plain(line)}.**" for line in headlines(folder, rows)),
        *_listed(f"{plain(line)}." for line in notes(folder, rows)),
    ]
    used: set[str] = set()
    for title, table, pictures in _sections(folder, rows):
        blocks += [heading(title), table, *pictures]
        used.update(table.header)
    legend = [f"- **{c.name}:** {plain(c.meaning)}." for c in (AT_ONCE, *COLUMNS) if c.name in used]
    return [*blocks, "\n".join([*legend, f"- {plain(INTERVALS)}."]), heading("How it was measured"), *_origin(folder)]


def _listed(items: Iterable[str]) -> Iterator[str]:
    """Show items as a list, or a single one as a paragraph."""
    lines = list(items)
    if lines:
        yield lines[0] if len(lines) == 1 else "\n".join(f"- {line}" for line in lines)


def _pictures(plan: Plan, label: str, rows: Sequence[VariantRow]) -> Iterator[Picture]:
    """Draw one request at a time. label: the workload's."""
    series = _series(plan, rows)
    if svg := _draw_speedup(series):
        yield Picture(f"{_slug(label)}_speedup", svg, "Speed-up over K.")
    widest = {name: [(n, rate) for n, rate in enumerate(_widest(line), 1)] for name, line in series.items()}
    if svg := _draw_positions(widest):
        yield Picture(f"{_slug(label)}_positions", svg, "Share of steps that accepted a draft, at the largest K.")


def _pictures_of_loads(label: str, rows: Sequence[VariantRow]) -> Iterator[Picture]:
    """Draw many requests at once. label: the workload's."""
    series: dict[str, list[charts.Point]] = {}
    for row in rows:
        series.setdefault(variant_text(row.label), []).append((row.concurrency or 1, row.tok_per_s))
    if svg := _draw_concurrency(series):
        yield Picture(f"{_slug(label)}_concurrency", svg, "Total tokens a second over the requests at once.")


def _series(plan: Plan, rows: Sequence[VariantRow]) -> dict[str, list[VariantRow]]:
    """Group rows that speculate into lines of a picture, named by their label without K."""
    series: dict[str, list[VariantRow]] = {}
    for row in rows:
        if row.variant.speculates:
            name = row.label.removeprefix(str(row.k)).removeprefix(", ")
            series.setdefault(name or short_names(plan.drafters)[0], []).append(row)
    return series


def _widest(rows: Sequence[VariantRow]) -> tuple[Estimate | None, ...]:
    """Return the acceptance rates of the largest fixed K, else of `auto`."""
    fixed = [row for row in rows if isinstance(row.k, int)]
    return max((row.rate_per_position for row in fixed or rows), key=len)


def _draw_speedup(series: Mapping[str, Sequence[VariantRow]]) -> str | None:
    """Draw speed-up over K, a line per series. `auto` is on the right, without a line to it."""
    ks = sorted(dict.fromkeys(row.k for rows in series.values() for row in rows), key=k_order)
    num_fixed = sum(isinstance(k, int) for k in ks)
    highest = max((row.speedup.value for rows in series.values() for row in rows if row.speedup), default=1.0)
    shifts = np.linspace(-0.08, 0.08, len(series)) if len(series) > 1 else [0.0]

    def finish(axis: Any) -> None:
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(xlabel="K", ylabel="speed-up over plain decoding", xlim=(-0.5, len(ks) - 0.5))
        axis.set_ylim(0, min(axis.get_ylim()[1], MOST_HEIGHT * highest))
        axis.set_xticks(range(len(ks)), list(map(str, ks)))

    points = {
        name: [(ks.index(row.k) + float(shift), row.speedup) for row in rows]
        for shift, (name, rows) in zip(shifts, series.items(), strict=False)
    }
    return charts.lines(points, finish, joined_until=num_fixed - 0.5)


def _draw_positions(series: Mapping[str, Sequence[charts.Point]]) -> str | None:
    """Draw the acceptance rate by position of the draft, a line per series. None if nothing was drafted."""

    def finish(axis: Any) -> None:
        axis.set(xlabel="draft", ylabel="accepted / steps", ylim=(0, 1.05))
        axis.xaxis.get_major_locator().set_params(integer=True)

    return charts.lines(series, finish)


def _draw_concurrency(series: Mapping[str, Sequence[charts.Point]]) -> str | None:
    """Draw total tok/s over the number of requests at once, a line per variant."""
    loads = sorted({load for points in series.values() for load, _ in points})

    def finish(axis: Any) -> None:
        axis.set_xscale("log", base=2)
        axis.set_xticks(loads, list(map(str, loads)))
        axis.minorticks_off()
        axis.set(xlabel="requests at once", ylabel="total tokens a second")
        axis.set_ylim(0, axis.get_ylim()[1])

    return charts.lines(series, finish)


def _origin(folder: Folder) -> Iterator[Block]:
    """Show a run's command, machines, files and checksums."""
    plan, origins = folder.plan, folder.origins
    yield command(shlex.join(origins[0]["command"]))
    lines = [
        ("began", origins[0]["time"]),
        *(("machine", text) for text in dict.fromkeys(map(origin_text, origins))),
        *([("processes", f"{len(origins)}, each after --resume")] if len(origins) > 1 else []),
        (
            "decoding",
            f"variants take turns after each request; {plan.repeats} repeats; at most {plan.max_new_tokens} new "
            f"tokens; seed {plan.seed}",
        ),
        *_prompts(folder),
        *((name, f"sha256 {digest[:HASH]}") for name, digest in plan.fingerprints.items()),
    ]
    yield Table(("part", "value"), lines)


def _prompts(folder: Folder) -> Iterator[tuple[str, str]]:
    reasons = folder.left_out()
    for source in folder.plan.sources:
        left_out = reasons[source.name]
        parts = [
            f"layout {source.layout}, {source.num_used} of {source.num_rows} rows, sha256 {source.sha256[:HASH]}",
            "" if source.max_turns is None else f"turns of each: at most {source.max_turns}",
            f"rows without a usable prompt: {source.num_skipped}" if source.num_skipped else "",
            f"left out or cut: {len(left_out)}, the first: {left_out[0]}" if left_out else "",
        ]
        yield f"prompts {source.name}", "; ".join(filter(None, parts))


# --- several runs ----------------------------------------------------------------------------------------------------


def difference_tables(
    folders: Sequence[Folder], compared: Sequence[Sequence[Difference]]
) -> Iterator[tuple[str, Table]]:
    """Yield (title, table) for each run that is compared with the first. compared: their differences from the first."""
    first, *others = _names(folders)
    for name, differences in zip(others, compared, strict=True):
        header = ("figure", "K", "requests", first, name, f"{name} / {first}", "real?")
        for workload in dict.fromkeys(difference.workload for difference in differences):
            lines = [
                (figure, difference.label, str(difference.num_requests), *_change_cells(change))
                for figure in (SPEEDUP, LENGTH)
                for difference in differences
                if difference.workload == workload and (change := difference.changes.get(figure))
            ]
            yield f"{name} against {first}: {workload.label}", Table(header, lines, num_names=2)


def real_text(folders: Sequence[Folder]) -> str:
    """Say when a difference is called real."""
    first, *others = _names(folders)
    other = others[0] if len(others) == 1 else "the other"
    return (
        f"real: the 95 % interval of {other} / {first}, over the same prompts, excludes 1; that of a speed-up also "
        f"covers the spread between rounds (--repeats). It needs {FEWEST} prompts and {FEWEST_ROUNDS} rounds"
    )


def comparison_blocks(
    runs: Mapping[Folder, Sequence[VariantRow]], compared: Sequence[Sequence[Difference]]
) -> list[Block]:
    """Lay out the page of several runs. compared: by run after the first, the differences from the first."""
    folders = list(runs)
    names = dict(zip(folders, _names(folders), strict=True))
    first, *others = names.values()
    blocks: list[Block] = [
        heading(f"{', '.join(others)} against {first}", 1),
        *_listed(
            f"{plain(f'{names[folder]}: {line}')}."
            for folder, rows in runs.items()
            for line in (*headlines(folder, rows), *notes(folder, rows))
        ),
    ]
    for title, table in difference_tables(folders, compared):
        blocks += [heading(title), table]
    blocks.append(f"{plain(real_text(folders))}.")
    for workload in folders[0].plan.workloads:
        series = {
            f"{names[folder]}, {name}": line
            for folder, rows in runs.items()
            for name, line in _series(folder.plan, of_workload(alone(rows), workload)).items()
        }
        if svg := _draw_speedup(series):
            blocks.append(Picture(f"{_slug(workload.label)}_speedup", svg, f"{workload.label}: speed-up over K."))
    for folder in folders:
        blocks += [heading(f"How {names[folder]} was measured"), *_origin(folder)]
    return blocks


def _names(folders: Sequence[Folder]) -> list[str]:
    return short_names([folder.path.resolve() for folder in folders])


def _change_cells(change: Change) -> tuple[str, ...]:
    return f"{change.first:.2f}", f"{change.second:.2f}", estimate_text(change.ratio), change.verdict


def _slug(label: str) -> str:
    """Make a file name of a label, with a checksum if the label has more than lower-case ASCII."""
    words = re.sub(r"[^a-z0-9]+", "_", label.lower()).strip("_")
    return words if label.isascii() and label == label.lower() else f"{words}_{zlib.crc32(label.encode()):08x}"
