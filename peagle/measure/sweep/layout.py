"""Lay out the pages of sweeps: the result, what to do, a table per workload."""

import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from peagle.answers.result import LOOPING_ABOVE
from peagle.measure.estimates import FEWEST, Estimate, estimate_text
from peagle.measure.provenance import machine_text, origin_text
from peagle.measure.reports import Block, Commands, Picture, Table, heading, plain
from peagle.measure.sweep import charts, headline
from peagle.measure.sweep.calibration import KINDS, calibrations_of
from peagle.measure.sweep.compare import Change, Difference
from peagle.measure.sweep.figures import SLOWER, VariantRow, alone, best, concurrent, of_workload
from peagle.measure.sweep.headline import counted, variant_text
from peagle.measure.sweep.plan import Plan, Workload, short_names
from peagle.measure.sweep.store import Folder

HASH = 12  # digits of a checksum that a page shows
LOOPING = headline.percent(LOOPING_ABOVE)


@dataclass(frozen=True)
class Column:
    """A column of a table with a line per VariantRow; left out if all its cells are "-"."""

    name: str
    text: Callable[[VariantRow], str]
    meaning: str = ""


def _drafted_share(row: VariantRow) -> str:
    passes = row.num_spec_steps + row.num_plain_steps
    return f"{row.num_spec_steps / passes:.0%}" if row.num_spec_steps and row.num_plain_steps else "-"


def _rows_a_token(row: VariantRow) -> str:
    steps = row.num_spec_steps + row.num_plain_steps
    tokens = steps + row.num_accepted_draft_tokens - row.num_truncated_tokens
    return f"{(steps + row.num_draft_tokens) / tokens:.2f}" if row.k else "-"


def _length_without_loops(row: VariantRow) -> str:
    return estimate_text(row.without_loops.acceptance_length) if row.looping_frac else "-"


def _length_at_most(row: VariantRow) -> str:
    return estimate_text(row.bounds["best"].length) if row.bounds else "-"


def _positions(row: VariantRow) -> str:
    rates = [f"{rate.value:.2f}".removeprefix("0") for rate in row.rate_per_position if rate and rate.value]
    return " ".join(rates) or "-"


def _ms(*times: Estimate | None) -> str:
    return " + ".join("-" if time is None else f"{1e3 * time.value:.2f}" for time in times)


def _parts_ms(row: VariantRow) -> str:
    return "-" if row.draft_s is None else _ms(row.draft_s, row.verify_s, row.host_s)


def _tok_per_s(row: VariantRow) -> str:
    return "-" if row.tok_per_s is None else f"{row.tok_per_s.value:.0f}"


def _repeats(row: VariantRow) -> str:
    return f"{min(row.speedup_repeats):.2f}..{max(row.speedup_repeats):.2f}" if row.speedup_repeats else "-"


def _slower(row: VariantRow) -> str:
    return f"{row.num_slower} of {row.num_compared}" if row.num_slower else "-"


def _differing(row: VariantRow) -> str:
    return f"{row.num_differing} of {row.num_outputs}" if row.num_differing else "-"


K_COLUMN = Column("K", lambda row: row.label, "tokens drafted per step; 0: plain decoding")
DIFFERING = Column("outputs that differ", _differing, "from plain decoding's")
ALONE = (
    K_COLUMN,
    Column("speed-up", lambda row: estimate_text(row.speedup), "tok/s over plain decoding's for the same requests"),
    Column("drafted", _drafted_share, "share of the steps of auto that verified drafts"),
    Column(
        "acceptance length",
        lambda row: estimate_text(row.acceptance_length),
        "tokens of the outputs per step that verified drafts; what a step decides after an output's end does not count",
    ),
    Column(
        "mean of requests",
        lambda row: estimate_text(row.acceptance_length_mean),
        "the acceptance length of each request, averaged; the other is over the steps of all",
    ),
    Column(
        "length without loops", _length_without_loops, f"without outputs that repeat over {LOOPING} of their 4-grams"
    ),
    Column(
        "length at most",
        _length_at_most,
        "acceptance length, cut nowhere, if each draft were the target's likeliest token",
    ),
    Column("accepted", _positions, "share of steps with drafts that accepted the first, the second and so on"),
    Column("rows a token", _rows_a_token, "rows of the target per token: one a step, and one for each verified draft"),
    Column("c(K)", lambda row: estimate_text(row.cycle_cost), "time of a pass over that of a plain one"),
    Column("draft + verify + rest, ms", _parts_ms, "time of a pass by parts; some conversations, profiled"),
    Column("tok/s", _tok_per_s, "tokens after the first over their time"),
    Column("slower requests", _slower, f"their 95 % interval over the repeats lies below {SLOWER:g}x"),
    DIFFERING,
)
NOT_IN_TERMINAL = ("drafted", "accepted", "rows a token", "draft + verify + rest, ms")
TERMINAL = [column for column in ALONE if column.name not in NOT_IN_TERMINAL]
AT_ONCE = (
    Column("at once", lambda row: str(row.concurrency), "slots that all requests of a repeat share"),
    K_COLUMN,
    Column("total tok/s", lambda row: estimate_text(row.tok_per_s, 0), "of all requests; intervals are over repeats"),
    Column("over plain decoding", lambda row: estimate_text(row.speedup), "of as many requests at once"),
    Column("repeats", _repeats, "the slowest and the fastest, over plain decoding"),
    Column("ttft, ms", lambda row: _ms(row.ttft_s), "median time to the first token, with the wait for a slot"),
    Column("itl .99, ms", lambda row: _ms(row.itl_s[-1]), "longer than 99 % of a request's waits; median of requests"),
    DIFFERING,
)


def _table(rows: Sequence[VariantRow], columns: Iterable[Column]) -> tuple[Table, list[Column]]:
    """Make a table; return (it, the columns that are not left out)."""
    used = [column for column in columns if any(column.text(row) != "-" for row in rows)]
    return Table([column.name for column in used], [[column.text(row) for column in used] for row in rows]), used


def run_blocks(folder: Folder, rows: Sequence[VariantRow]) -> list[Block]:
    """Lay out the page of one run."""
    plan = folder.plan
    explained: set[str] = set()
    return [
        heading(headline.title(folder), 1),
        *_sentences(headline.headlines(folder, rows)),
        plain(
            f"{counted(len(plan.workloads), 'workload')}, decoded one request at a time, "
            f"{counted(plan.repeats, 'repeat')}, on {', '.join(dict.fromkeys(map(machine_text, folder.origins)))}."
        ),
        *_items(headline.notes(folder)),
        *_advice(folder, rows),
        *(block for workload in plan.workloads for block in _workload(folder, workload, rows, explained)),
        *_calibrations(folder),
        heading("How it was measured"),
        *_origin(folder),
    ]


def terminal_tables(folder: Folder, rows: Sequence[VariantRow]) -> Iterator[tuple[str, Table]]:
    """Yield (workload, table of its variants), one request at a time, for a terminal."""
    for workload in folder.plan.workloads:
        if own := of_workload(alone(rows), workload):
            yield workload.label, _table(own, TERMINAL)[0]


def comparison_blocks(
    runs: Mapping[Folder, Sequence[VariantRow]], compared: Sequence[Sequence[Difference]]
) -> list[Block]:
    """Lay out the page of several runs. compared: by run after the first, the differences from the first."""
    folders = list(runs)
    names = dict(zip(folders, short_names([folder.path.resolve() for folder in folders]), strict=True))
    first, others = names[folders[0]], [names[folder] for folder in folders[1:]]
    blocks: list[Block] = [
        heading(f"{headline.listed(others)} against {first}", 1),
        *_sentences(comparison_sentences(folders, compared)),
        "Speeds are compared as speed-ups over plain decoding of the same run, request by request.",
        *_items((f"{name} in {names[folder]}", text) for folder in folders for name, text in headline.notes(folder)),
        *_items((names[folder], "; ".join(headline.headlines(folder, runs[folder]))) for folder in folders),
    ]
    for title, table in difference_tables(folders, compared):
        blocks += [heading(title), table]
    blocks.append(
        "A difference is real if its 95 % interval excludes zero, as one in twenty does by chance. A difference of "
        "speed-ups is real only if, besides, every repeat of one run lies beyond every repeat of the other."
    )
    for workload in folders[0].plan.workloads:
        series = _series_of_runs(runs, names, workload)
        blocks += _picture(f"{_slug(workload.label)}_speedup", charts.speedup(series), f"{workload.label}: speed-up.")
    for folder in folders:
        blocks += [heading(f"How {names[folder]} was measured"), *_origin(folder)]
    return blocks


def comparison_sentences(folders: Sequence[Folder], compared: Sequence[Sequence[Difference]]) -> list[str]:
    """Say how the fastest variants of each other run differ from the first run's."""
    first, *others = short_names([folder.path.resolve() for folder in folders])
    return [
        sentence
        for name, differences in zip(others, compared, strict=True)
        for sentence in headline.compared(differences, first, name)
    ]


def difference_tables(
    folders: Sequence[Folder], compared: Sequence[Sequence[Difference]]
) -> Iterator[tuple[str, Table]]:
    """Yield (title, table of differences from the first run) for each other run."""
    first, *others = short_names([folder.path.resolve() for folder in folders])
    for name, differences in zip(others, compared, strict=True):
        header = ("workload", "K", "requests", *(f"{figure}: {first}, {name}" for figure in ("speed-up", "length")))
        lines = [
            (
                difference.workload.label,
                difference.label,
                str(difference.num_requests),
                _change_cell(difference.speedup),
                _change_cell(difference.acceptance_length),
            )
            for difference in differences
        ]
        yield f"{name} against {first}", Table(header, lines, num_names=2)


def _change_cell(change: Change | None) -> str:
    if change is None:
        return "-"
    if change.equal:
        return f"{change.first:.2f}, equal"
    low, high = change.difference.low, change.difference.high
    interval = "too few" if low is None else f"{low:+.2f}..{high:+.2f}"
    verdict = "real" if change.real else "undecided"
    return f"{change.first:.2f}, {change.second:.2f}: {change.difference.value:+.2f} ({interval}), {verdict}"


def _series_of_runs(
    runs: Mapping[Folder, Sequence[VariantRow]], names: Mapping[Folder, str], workload: Workload
) -> dict[str, Sequence[VariantRow]]:
    """Group the rows of all runs in a workload into lines of a picture, named by the run and the drafter."""
    drafters_differ = len({folder.plan.drafters for folder in runs}) > 1
    series: dict[str, Sequence[VariantRow]] = {}
    for folder, rows in runs.items():
        for name, line in _series(folder.plan, of_workload(alone(rows), workload)).items():
            drafter = name or (short_names(folder.plan.drafters)[0] if drafters_differ else "")
            series[f"{names[folder]}{drafter and f', {drafter}'}"] = line
    return series


def _series(plan: Plan, rows: Sequence[VariantRow]) -> dict[str, Sequence[VariantRow]]:
    """Group rows that speculate into lines of a picture, named by their label without K."""
    series: dict[str, list[VariantRow]] = {}
    for row in rows:
        if row.variant.speculates:
            series.setdefault(row.label.removeprefix(str(row.k)).removeprefix(", "), []).append(row)
    named = plan.draft_vocabs != (None,) or plan.drafter_windows != (None,)
    return {title if len(series) > 1 or named else "": line for title, line in series.items()}


def _sentences(sentences: Sequence[str]) -> Iterator[Block]:
    if len(sentences) == 1:
        yield f"**{plain(sentences[0])}.**"
    elif sentences:
        yield "\n".join(f"- **{plain(sentence)}.**" for sentence in sentences)


def _items(items: Iterable[tuple[str, str]], title: str = "") -> Iterator[Block]:
    """Show (name, text) as a list below a title; nothing without items."""
    if lines := [f"- **{plain(name)}:** {plain(text)}." for name, text in items]:
        yield from filter(None, (title, "\n".join(lines)))


def _advice(folder: Folder, rows: Sequence[VariantRow]) -> Iterator[Block]:
    """Recommend a K, with commands and caveats; nothing if no speed-up is known."""
    plan = folder.plan
    known = [verdict for verdict in headline.verdicts(folder, rows) if verdict.fastest is not None]
    if not known:
        return
    single = len(plan.workloads) == 1
    alike: dict[tuple[tuple[str, ...], bool], list[headline.Verdict]] = {}
    for verdict in known:
        commands = tuple(headline.commands(plan, verdict, single))
        alike.setdefault((commands, verdict.sure), []).append(verdict)
    yield heading("What to do")
    for (commands, _), judged in alike.items():
        where = "" if single else f" for {'; '.join(verdict.workload.label for verdict in judged)}"
        yield plain(headline.recommended(judged[0], where))
        yield Commands(commands)
    yield from _items(headline.loads(folder, rows), "With many requests at once:")
    yield from _items(headline.caveats(folder, rows), "Before you rely on it:")


def _workload(folder: Folder, workload: Workload, rows: Sequence[VariantRow], explained: set[str]) -> Iterator[Block]:
    """Lay out a workload: tables and pictures. explained: names of columns that the page has explained; adds to it."""
    plan, slug, rows = folder.plan, _slug(workload.label), of_workload(rows, workload)
    at_once, rows = concurrent(rows), alone(rows)
    if rows:
        series = _series(plan, rows)
        yield heading(f"Workload {workload.label}")
        finished, looping = map(headline.percent, (rows[0].finished_frac, rows[0].looping_frac))
        yield (
            f"{counted(rows[0].num_requests, 'request')}. Of plain decoding's outputs {finished} end with a stop "
            f"token, {looping} loop."
        )
        yield from _explained_table(rows, ALONE, explained)
        yield from _picture(f"{slug}_speedup", charts.speedup(series), "Speed-up over K.")
        if not at_once:
            svg = charts.positions({name or "all": _widest(line) for name, line in series.items()})
            yield from _picture(f"{slug}_positions", svg, "Share of steps that accepted a draft, at the largest K.")
        yield from _parts(rows)
    if at_once:
        yield heading(f"Workload {workload.label}: many requests at once")
        yield from _explained_table(at_once, AT_ONCE, explained)
        by_label: dict[str, list[VariantRow]] = {}
        for row in at_once:
            by_label.setdefault(variant_text(row.label), []).append(row)
        caption = "Total tokens a second over the number of requests at once."
        yield from _picture(f"{slug}_concurrency", charts.concurrency(by_label), caption)


def _explained_table(rows: Sequence[VariantRow], columns: Iterable[Column], explained: set[str]) -> Iterator[Block]:
    """Show a table, then the meaning of columns that are new on the page."""
    table, used = _table(rows, columns)
    yield table
    new = [column for column in used if column.name not in explained]
    if not explained:
        new.append(Column("(a..b)", str, f"95 % interval by bootstrap over conversations; needs {FEWEST} of them"))
    yield from _items((column.name, column.meaning) for column in new)
    explained.update(column.name for column in new)


def _widest(rows: Sequence[VariantRow]) -> VariantRow:
    """Choose the row of the largest fixed K, else of `auto`."""
    fixed = [row for row in rows if isinstance(row.k, int)]
    return max(fixed or rows, key=lambda row: len(row.rate_per_position))


def _parts(rows: Sequence[VariantRow]) -> Iterator[Block]:
    """Show the fastest variant by category and by prompt length."""
    row = best(row for row in rows if row.k != 0)
    if row is None or not (parts := [*row.by_category, *row.by_bucket]):
        return
    names = [part.part or "no category" for part in row.by_category]
    names += [f"{part.part} prompt tokens" for part in row.by_bucket]
    lines = [
        (name, str(part.num_requests), estimate_text(part.speedup), estimate_text(part.acceptance_length))
        for name, part in zip(names, parts, strict=True)
    ]
    yield Table((f"of {variant_text(row.label)}", "requests", "speed-up", "acceptance length"), lines)


def _calibrations(folder: Folder) -> Iterator[Block]:
    """Show how often drafts are right over the drafter's probability of them, if the run counted that."""
    calibrations = calibrations_of(folder)
    lines = {
        f"{plain(calibration.label)}, {kind}": calibration.points(kind)
        for calibration in calibrations
        for kind in KINDS
    }
    caption = "Share of drafts that were right, of those after right ones, over the drafter's probability of them."
    yield from _picture("calibration", charts.calibration(lines), caption)


def _origin(folder: Folder) -> Iterator[Block]:
    """Show a run's command, machines, files and checksums."""
    plan, origins = folder.plan, folder.origins
    yield Commands([shlex.join(origins[0]["command"])])
    lines = [
        ("began", origins[0]["time"]),
        *(("machine", text) for text in dict.fromkeys(map(origin_text, origins))),
        *([("processes", f"{len(origins)}, each after --resume")] if len(origins) > 1 else []),
        (
            "decoding",
            f"one request at a time; variants take turns after {counted(plan.in_a_row, 'request')}; "
            f"{counted(plan.repeats, 'repeat')}; at most {plan.max_new_tokens} new tokens; seed {plan.seed}",
        ),
        *_prompts(folder),
        *(
            (f"target {plan.target}" if name == "target" else name, f"sha256 {digest[:HASH]}")
            for name, digest in plan.fingerprints.items()
        ),
        ("chat template, tokenizer", f"sha256 {plan.template[:HASH]}" if plan.template else "none"),
    ]
    yield Table(("part", "value"), lines)


def _prompts(folder: Folder) -> Iterator[tuple[str, str]]:
    _, left_out = folder.prompts() or ([], [])
    for source in folder.plan.sources:
        own = [left for left in left_out if left.prompts == source.name]
        rows = [left.why for left in own if left.row is None]
        conversations = [left.why for left in own if left.row is not None]
        parts = [
            f"layout {source.layout}, {source.num_used} of {source.num_rows} rows",
            "" if source.max_turns is None else f"; turns of each: at most {source.max_turns}",
            f"; rows without a usable prompt: {source.num_skipped}" if source.num_skipped else "",
            f", the first: {rows[0]}" if rows else "",
            f"; sha256 {source.sha256[:HASH]}",
            f". Conversations left out: {len(conversations)}, the first: {conversations[0]}" if conversations else "",
        ]
        yield f"prompts {source.name}", "".join(parts)


def _picture(name: str, svg: str | None, caption: str) -> Iterator[Picture]:
    if svg is not None:
        yield Picture(name, svg, caption)


def _slug(label: str) -> str:
    """Make a file name of a label, with a checksum if the label has more than lower-case ASCII."""
    words = re.sub(r"[^a-z0-9]+", "_", label.lower()).strip("_")
    return words if label.isascii() and label == label.lower() else f"{words}_{zlib.crc32(label.encode()):08x}"
