"""Lay out the pages of sweeps as blocks of peagle.measure.pages: the result, tables, and the origin."""

import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from peagle.measure.estimates import FEWEST, Estimate, estimate_text
from peagle.measure.pages import Block, Commands, Picture, Table, heading, plain
from peagle.measure.sweep import charts, headline
from peagle.measure.sweep.calibration import KINDS, calibrations_of
from peagle.measure.sweep.compare import Difference
from peagle.measure.sweep.figures import BOUNDS, SLOWER, CountedFigures, Row, alone, best, concurrent, of_workload, sure
from peagle.measure.sweep.headline import counted, place_text, speedup_of, variant_text
from peagle.measure.sweep.plan import PROFILED, Plan, Workload, short_names
from peagle.measure.sweep.store import Folder
from peagle.result import LOOPING_ABOVE

HASH = 12  # digits of a checksum that a page shows

TERMS = {
    "K": "tokens drafted per step. 0 is plain decoding. `auto` reads K from the drafter's table",
    "speed-up": "tok/s over plain decoding's, for the same requests in the same repeats, all added up",
    "median of requests": "the median of the requests' speed-ups, so that all requests count the same",
    "acceptance length": "tokens per step that verified drafts, with the target's own token: 1 + accepted / steps",
    "mean of requests": "the mean of the requests' acceptance lengths, so that all requests count the same",
    "without loops": "without the requests whose output loops",
    "loop": f"an output loops if it repeats more than {headline.percent(LOOPING_ABOVE)} of its 4-grams",
    "tok/s": "(tokens - 1) / (time of the last token - time of the first token)",
    "slower requests": f"requests whose 95 % interval over the repeats lies wholly below {SLOWER:g}x",
    "tokens a pass": "tokens after the first / passes of the target",
    "c(K)": "the time of a pass, in passes of plain decoding. Speed-up = tokens a pass / c(K)",
    "draft, verify, rest": f"their shares of a pass in up to {PROFILED} conversations under the profiler. Rest: "
    "accepting, the runtime, the host",
    "v(T)": "the time of a target's pass over T = K + 1 rows, in passes over one row",
    "per position": "steps that accepted the first, second, ... draft / all steps",
    "given those before": "steps that accepted this draft / steps that accepted all drafts before it",
    "ttft, tpot": "time to the first token; time per token after it",
    "itl": "time between arrivals, at which several tokens may come together; quantiles of a request",
    "brackets": "95 % intervals, by bootstrap over conversations; fewer than "
    f"{FEWEST} conversations have none. Counts are over all repeats",
}
BOUND_TERMS = {
    "p, q": "the target's and the drafter's distribution at a position whose earlier drafts were all accepted",
    "best token": "the mean of p(the drafter's most likely token): how often that token is accepted",
    "sampled drafts": "the mean of sum min(p, q): the most that any rule accepts of drafts drawn from q",
    "best guess": "the mean of max p: the most that any single guess is accepted. Training can gain only the "
    "difference between the best token and this",
    "their lengths": "1 + v1 + v1 v2 + ..., with v the mean of each draft. First draft: v1",
}
CONCURRENT_TERMS = {
    "at once": "slots. All requests of a repeat are added together and wait for a slot. Near the end of a repeat some "
    "slots are empty",
    "total tok/s": "tokens after each request's first / the time in which at least one request was decoding",
    "over plain decoding": "of as many requests at once, in the same repeats, in which the variants take turns",
    "repeats": "the slowest and the fastest repeat, over plain decoding",
    "ttft at once": "counts from when the requests were added, so it includes the wait for a slot",
    "brackets of times": f"by bootstrap over repeats, because requests share the time; fewer than {FEWEST} repeats "
    "have none",
}


def acceptance_text(row: CountedFigures) -> str:
    """Format a variant's acceptance length; of `auto`, with the share of passes that drafted."""
    text = estimate_text(row.acceptance_length)
    if row.num_plain_steps and row.num_spec_steps:
        text += f" in {row.num_spec_steps / (row.num_spec_steps + row.num_plain_steps):.1%} of the passes"
    return text


def _ms(figure: Estimate | None) -> str:
    return "-" if figure is None else figure.times(1e3).text(3)


def _rates(rates: Iterable[Estimate | None]) -> str:
    return " ".join("-" if rate is None else f"{rate.value:.2f}".removeprefix("0") for rate in rates)


def _of_tried(row: Row) -> str:
    """Format rates per position, of drafts that some step tried."""
    pairs = zip(row.rate_per_position, row.conditional_rate, strict=True)
    return _rates(rate if conditional is not None else None for rate, conditional in pairs)


def _value(figure: Estimate | None) -> str:
    return "-" if figure is None else f"{figure.value:.0f}"


COUNTED: dict[str, Callable[[CountedFigures], str]] = {  # columns of rows and of their parts
    "requests": lambda part: str(part.num_requests),
    "loop": lambda part: f"{part.looping_frac:.0%}",
    "acceptance length": acceptance_text,
    "speed-up": lambda part: estimate_text(part.speedup),
    "tokens a pass": lambda part: estimate_text(part.tokens_per_step),
    "c(K)": lambda part: estimate_text(part.cycle_cost),
    "v(T)": lambda part: estimate_text(part.verify_cost),
    "tok/s": lambda part: _value(part.tok_per_s),
    "ttft ms": lambda part: _ms(part.ttft_s),
    "tpot ms": lambda part: _ms(part.tpot_s),
    "without loops: acceptance": lambda part: estimate_text(part.without_loops.acceptance_length),
    "without loops: speed-up": lambda part: estimate_text(part.without_loops.speedup),
}
COLUMNS: dict[str, Callable[[Row], str]] = {
    **COUNTED,
    "K": lambda row: row.label,
    "without loops": lambda row: estimate_text(row.without_loops.acceptance_length),
    "slower requests": lambda row: f"{row.num_slower} of {row.num_compared}" if row.num_compared else "-",
    "outputs equal to plain": lambda row: f"{row.equal_to_plain_frac:.1%}",
    "median of requests": lambda row: estimate_text(row.speedup_median),
    "mean of requests": lambda row: estimate_text(row.acceptance_length_mean),
    "ms a pass": lambda row: _ms(row.step_s),
    "draft ms": lambda row: _ms(row.draft_s),
    "verify ms": lambda row: _ms(row.verify_s),
    "rest ms": lambda row: _ms(row.host_s),
    "itl ms: .5": lambda row: _ms(row.itl_s[0]),
    ".9": lambda row: _ms(row.itl_s[1]),
    ".99": lambda row: _ms(row.itl_s[2]),
    "per position": lambda row: _of_tried(row) or "-",
    "given those before": lambda row: _rates(row.conditional_rate),
    "steps that accepted 0, 1, ...": lambda row: ", ".join(map(str, row.histogram)),
    "plain steps": lambda row: str(row.num_plain_steps),
    "at once": lambda row: str(row.concurrency),
    "total tok/s": lambda row: estimate_text(row.tok_per_s, 0),
    "over plain decoding": lambda row: estimate_text(row.speedup),
    "repeats": lambda row: _span(row.speedup_repeats),
}
WHOLE = (
    *("K", "speed-up", "acceptance length", "without loops", "tok/s", "slower requests", "outputs equal to plain"),
    *("median of requests", "mean of requests", "requests"),
)
SHORT = (
    *("K", "speed-up", "acceptance length", "without loops", "c(K)", "tok/s", "slower requests"),
    *("outputs equal to plain", "per position"),
)
TERMINAL = ("K", "acceptance length", "speed-up", "c(K)", "tok/s", "outputs equal to plain")
DRAFTS = ("K", "per position", "given those before", "steps that accepted 0, 1, ...", "plain steps")
PASSES = ("K", "tokens a pass", "c(K)", "ms a pass", "draft ms", "verify ms", "rest ms", "v(T)")
LATENCY = ("K", "ttft ms", "tpot ms", "itl ms: .5", ".9", ".99")
AT_ONCE = (
    *("at once", "K", "total tok/s", "over plain decoding", "repeats", "acceptance length"),
    *("ttft ms", "itl ms: .5", ".99", "outputs equal to plain"),
)


def _table(rows: Iterable[Row], columns: Sequence[str]) -> Table:
    """Make a table of these COLUMNS."""
    return Table(columns, tuple(tuple(COLUMNS[name](row) for name in columns) for row in rows))


def run_blocks(folder: Folder, rows: Sequence[Row]) -> list[Block]:
    """Lay out the page of one run."""
    plan = folder.plan
    return [
        *_front(folder, rows),
        *_overview(plan, alone(rows)),
        *(block for workload in plan.workloads for block in _workload(plan, workload, of_workload(rows, workload))),
        *_calibrations(folder),
        *_terms(rows),
        heading("How it was measured"),
        *_origin(folder),
    ]


def short_blocks(folder: Folder, rows: Sequence[Row]) -> list[Block]:
    """Lay out the summary of one run: a table for every workload, and two pictures of the first."""
    plan = folder.plan
    blocks = _front(folder, rows)
    for workload in plan.workloads:
        first = workload == plan.workloads[0]
        if own := of_workload(alone(rows), workload):
            blocks += [*_about(workload, own), _table(own, SHORT)]
            if first and not concurrent(rows):
                blocks += _cycle(own, _slug(workload.label))
        tables = _concurrent(workload, concurrent(of_workload(rows, workload)))
        blocks += [block for block in tables if first or not isinstance(block, Picture)]
    return [*blocks, *_terms(rows), heading("How it was measured"), *_origin(folder)]


def terminal_tables(folder: Folder, rows: Sequence[Row]) -> Iterator[tuple[str, Table]]:
    """Yield (workload, short figures of all variants) for a terminal; then the K to use."""
    rows = alone(rows)
    for workload in folder.plan.workloads:
        if own := of_workload(rows, workload):
            yield workload.label, _table(own, TERMINAL)
    if (summary := _summary(folder.plan, rows)).rows:
        yield "the K to use", summary


def _summary(plan: Plan, rows: Sequence[Row]) -> Table:
    """Name every workload's K to use, if one is surely faster than plain decoding or none is."""
    header = ("workload", "K to use", "fastest measured", "its speed-up", "its acceptance length", "without loops")
    lines = []
    for workload in plan.workloads:
        if (chosen := best(of_workload(rows, workload))) is not None:
            # undecided: its interval reaches below 1
            verdict = "0, plain decoding" if chosen.k == 0 else chosen.label if sure(chosen) else "undecided"
            figures = (chosen.speedup, chosen.acceptance_length, chosen.without_loops.acceptance_length)
            lines.append((workload.label, verdict, chosen.label, *map(estimate_text, figures)))
    return Table(header, lines)


def comparison_blocks(runs: Mapping[Folder, Sequence[Row]], compared: Sequence[Sequence[Difference]]) -> list[Block]:
    """Lay out the page of several runs: all over K, the others against the first (`compared`)."""
    folders = list(runs)
    names = dict(zip(folders, short_names([folder.path.resolve() for folder in folders]), strict=True))
    first, others = names[folders[0]], folders[1:]
    sentences = [
        sentence
        for folder, differences in zip(others, compared, strict=True)
        for sentence in headline.compared(differences, first, names[folder])
    ]
    blocks: list[Block] = [
        heading(
            f"{headline.listed([names[folder] for folder in others])} against {first}: {_compared_title(folders)}", 1
        ),
        *_sentences(sentences),
        "Speeds are compared as speed-ups over plain decoding of the same run, request by request.",
        *_notes((f"{name} in {names[folder]}", text) for folder in folders for name, text in headline.notes(folder)),
    ]
    by_context: list[Block] = []
    workloads = folders[0].plan.workloads
    for workload in workloads:
        if series := _series_of_runs(runs, names, workload):
            slug = _slug(workload.label)
            blocks += [heading(f"Workload {workload.label}")] if len(workloads) > 1 else []
            blocks += [*_speedups(series, slug), *_acceptances(series, slug)]
            by_context += _by_context(series, slug)
    blocks += [heading("Each run by itself")]
    blocks += [_items((names[folder], "; ".join(headline.headlines(folder, runs[folder]))) for folder in folders)]
    for title, table in difference_tables(folders, compared):
        blocks += [
            heading(title),
            table,
            "A difference is real if its 95 % interval excludes zero, as one in twenty does by chance. A difference of "
            "speed-ups is real only if, besides, every repeat of one run lies beyond every repeat of the other.",
        ]
    blocks += [heading("By prompt length"), *by_context] if by_context else []
    blocks += _terms([row for rows in runs.values() for row in alone(rows)])
    for folder in folders:
        blocks += [heading(f"How {names[folder]} was measured"), *_origin(folder)]
    return blocks


def difference_tables(
    folders: Sequence[Folder], compared: Sequence[Sequence[Difference]]
) -> Iterator[tuple[str, Table]]:
    """Yield (title, table of differences from the first run) of all other runs."""
    first, *others = short_names([folder.path.resolve() for folder in folders])
    for name, differences in zip(others, compared, strict=True):
        header = ("workload", "K", "figure", first, name, "difference (95 %)", "requests", "real?")
        yield f"{name} against {first}", Table(header, tuple(map(_difference_cells, differences)), num_names=3)


def _difference_cells(difference: Difference) -> tuple[str, ...]:
    change = difference.difference
    interval = "too few" if change.low is None else f"{change.low:+.2f}..{change.high:+.2f}"
    return (
        difference.workload.label,
        difference.label,
        difference.figure,
        f"{difference.first:.2f}",
        f"{difference.second:.2f}",
        f"{change.value:+.2f} ({interval})",
        str(difference.num_requests),
        "yes" if difference.real else "equal" if difference.equal else "undecided",
    )


def _compared_title(folders: Sequence[Folder]) -> str:
    """Name the models of the runs, and their dates."""
    subjects = dict.fromkeys(headline.subject(folder.plan) for folder in folders)
    dates = sorted({headline.date(folder) for folder in folders})
    subject = next(iter(subjects)) if len(subjects) == 1 else "speculative decoding"
    return f"{subject[:1].lower()}{subject[1:]}, {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}"


def _series_of_runs(
    runs: Mapping[Folder, Sequence[Row]], names: Mapping[Folder, str], workload: Workload
) -> dict[str, Sequence[Row]]:
    """Name the series of all runs in one workload by the run and the drafter."""
    unlike = len({folder.plan.drafters for folder in runs}) > 1
    series: dict[str, Sequence[Row]] = {}
    for folder, rows in runs.items():
        for name, line in _series(folder.plan, of_workload(alone(rows), workload)).items():
            drafter = name or (short_names(folder.plan.drafters)[0] if unlike else "")
            series[f"{names[folder]}{drafter and f', {drafter}'}"] = line
    return series


def _front(folder: Folder, rows: Sequence[Row]) -> list[Block]:
    """Begin a page: its title, the headlines, the speed-up over K, and the advice."""
    plan = folder.plan
    slug = "all" if len(plan.workloads) > 1 else _slug(plan.workloads[0].label)
    return [
        heading(headline.title(folder), 1),
        *_sentences(headline.headlines(folder, rows)),
        _circumstances(folder, alone(rows)),
        *_notes(headline.notes(folder)),
        *_speedups(_all_series(plan, alone(rows)), slug),
        *_advice(folder, rows),
    ]


def _sentences(sentences: Sequence[str]) -> Iterator[Block]:
    """Show the headlines."""
    if len(sentences) == 1:
        yield f"**{plain(sentences[0])}.**"
    elif sentences:
        yield "\n".join(f"- **{plain(sentence)}.**" for sentence in sentences)


def _circumstances(folder: Folder, rows: Sequence[Row]) -> str:
    """Describe in two lines the requests, the machine, and the speed."""
    plan = folder.plan
    where = ", ".join(dict.fromkeys(map(headline.machine_text, folder.origins)))
    conditions = f"decoded one at a time, {counted(plan.repeats, 'repeat')}, on {where}."
    if len(plan.workloads) > 1 or not rows:
        return plain(f"{counted(len(plan.workloads), 'workload')}, {conditions}")
    text = f"{counted(rows[0].num_requests, 'request')} ({plan.workloads[0].label}), {conditions}"
    (verdict,) = headline.verdicts(folder, rows)
    if (row := verdict.fastest) is not None:
        speeds = [f"{speed.value:,.0f} tok/s" for speed in (row.tok_per_s, rows[0].tok_per_s) if speed]
        text += f" {variant_text(row.label)}: {', plain decoding '.join(speeds)}; "
        text += f"acceptance length {acceptance_text(row)}."
    return plain(text)


def _notes(notes: Iterable[tuple[str, str]]) -> Iterator[Block]:
    for name, text in notes:
        yield f"**{plain(name)}:** {plain(text)}."


def _items(items: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- **{plain(name)}:** {plain(text)}." for name, text in items)


def _advice(folder: Folder, rows: Sequence[Row]) -> Iterator[Block]:
    """Name the K to use, with commands and caveats; nothing if no speed-up is known."""
    plan = folder.plan
    known = [verdict for verdict in headline.verdicts(folder, rows) if verdict.fastest is not None]
    if not known:
        return
    single = len(plan.workloads) == 1
    by_commands: dict[tuple[str, ...], list[headline.Verdict]] = {}
    for verdict in known:
        by_commands.setdefault(tuple(headline.commands(plan, verdict, single)), []).append(verdict)
    yield heading("What to do")
    for commands, judged in by_commands.items():
        where = "" if single else f" for {'; '.join(verdict.workload.label for verdict in judged)}"
        yield plain(_recommended(judged, where))
        yield Commands(commands)
    yield from _by_slots(plan, concurrent(rows))
    if limits := headline.caveats(folder, rows):
        yield "Before you rely on it:"
        yield _items(limits)


def _recommended(judged: Sequence[headline.Verdict], where: str) -> str:
    row = judged[0].fastest
    if row is None or not judged[0].gains:
        return f"Use plain decoding{where}: no drafts pay here."
    if all(verdict.sure for verdict in judged):
        return f"Use {variant_text(row.label)}{where}."
    return (
        f"Try {variant_text(row.label)}{where}: it was the fastest, but not surely faster than plain decoding. "
        "More prompts or repeats (--num-prompts, --repeats) would tell."
    )


def _by_slots(plan: Plan, rows: Sequence[Row]) -> Iterator[Block]:
    """Name the best K for each number of requests at once."""
    lines = []
    for workload in plan.workloads:
        own = of_workload(rows, workload)
        for slots in dict.fromkeys(row.concurrency for row in own):
            if (row := best(row for row in own if row.concurrency == slots)) is not None:
                figures = (estimate_text(row.tok_per_s, 0), _over_plain(row))
                lines.append((workload.label, str(slots), variant_text(row.label), *figures))
    if not lines:
        return
    header = ("workload", "requests at once", "fastest", "total tok/s", "over plain decoding")
    first = 0 if len(plan.workloads) > 1 else 1
    yield "By the number of requests at once:"
    yield Table(header[first:], tuple(line[first:] for line in lines))


def _over_plain(row: Row) -> str:
    """Format a speed-up with its interval, else with its least and greatest repeat."""
    text = estimate_text(row.speedup)
    if row.k == 0 or speedup_of(row).low is not None:
        return text
    return f"{text} (repeats: {_span(row.speedup_repeats)})"


def _span(values: Sequence[float]) -> str:
    """Format the least and the greatest value."""
    return f"{min(values):.2f}..{max(values):.2f}" if values else "-"


def _terms(rows: Sequence[Row]) -> Iterator[Block]:
    """Define the words of the tables."""
    terms = dict(TERMS)
    if any(row.bounds is not None for row in rows):
        terms |= BOUND_TERMS
    items = [*terms.items(), *(CONCURRENT_TERMS.items() if concurrent(rows) else ())]
    yield heading("Terms")
    yield "\n".join(f"- **{name}:** {meaning}." for name, meaning in items)


def _origin(folder: Folder) -> Iterator[Block]:
    """Show the origin of a run: its command, machine, files and checksums."""
    plan, origins = folder.plan, folder.origins
    yield Commands([shlex.join(origins[0]["command"])])
    lines = [
        ("began", origins[0]["time"]),
        *(("machine", place) for place in dict.fromkeys(map(place_text, origins))),
        *([("processes", f"{len(origins)}, each after --resume")] if len(origins) > 1 else []),
        (
            "decoding",
            f"one request at a time; variants take turns after {counted(plan.in_a_row, 'request')}; "
            f"{counted(plan.repeats, 'repeat')}; at most {plan.max_new_tokens} new tokens; seed {plan.seed}",
        ),
        ("options", f"dtype {plan.dtype or 'auto'}, experts {plan.experts}, kernels {plan.kernels}"),
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
        rows, conversations = ([left.why for left in own if (left.row is None) == of_file] for of_file in (True, False))
        parts = [
            f"layout {source.layout}, {source.num_used} of {source.num_rows} rows",
            "" if source.max_turns is None else f"; turns of each: at most {source.max_turns}",
            f"; rows without a usable prompt: {source.num_skipped}" if source.num_skipped else "",
            f", the first: {rows[0]}" if rows else "",
            f"; sha256 {source.sha256[:HASH]}",
            f". Conversations left out: {len(conversations)}, the first: {conversations[0]}" if conversations else "",
        ]
        yield f"prompts {source.name}", "".join(parts)


def _overview(plan: Plan, rows: Sequence[Row]) -> Iterator[Block]:
    """Show all workloads together, if there are several."""
    if len(plan.workloads) > 1 and (summary := _summary(plan, rows)).rows:
        yield heading("All workloads")
        yield summary
        yield from _acceptances(_all_series(plan, rows), "all")


def _drafting(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.k != 0]


def _all_series(plan: Plan, rows: Sequence[Row]) -> dict[str, Sequence[Row]]:
    """Group the rows of all workloads as `_series` does, by workload, too, if there are several."""
    return {
        ", ".join(filter(None, (workload.label * (len(plan.workloads) > 1), name))): line
        for workload in plan.workloads
        for name, line in _series(plan, of_workload(rows, workload)).items()
    }


def _series(plan: Plan, rows: Sequence[Row]) -> dict[str, Sequence[Row]]:
    """Group speculative rows by their label without K; "" if it is empty."""
    series: dict[str, list[Row]] = {}
    for row in _drafting(rows):
        series.setdefault(row.label.removeprefix(str(row.k)).removeprefix(", "), []).append(row)
    named = plan.draft_vocabs != (None,) or plan.drafter_windows != (None,)
    return {title if len(series) > 1 or named else "": line for title, line in series.items()}


def _widest(rows: Sequence[Row]) -> Row:
    """Choose the row of the largest fixed K, or of `auto` if there is no other."""
    fixed = [row for row in rows if isinstance(row.k, int)]
    return max(fixed or rows, key=lambda row: len(row.rate_per_position))


def _workload(plan: Plan, workload: Workload, rows: Sequence[Row]) -> Iterator[Block]:
    """Lay out the tables of one workload, each with its pictures."""
    slug, at_once, rows = _slug(workload.label), concurrent(rows), alone(rows)
    if rows:
        drafting, series = _drafting(rows), _series(plan, rows)
        yield from _about(workload, rows)
        yield _table(rows, WHOLE)
        if len(plan.workloads) > 1:  # else it is the page's first picture
            yield from _speedups(series, slug)
        yield from _acceptances(series, slug)
        yield from _drafts(drafting, series, slug)
        yield from _times(rows, slug)
        yield from _bounds(drafting)
        yield from _parts(drafting)
        yield from _by_context(series, slug)
    yield from _concurrent(workload, at_once)


def _about(workload: Workload, rows: Sequence[Row]) -> Iterator[Block]:
    """Begin a workload's section with the outputs of plain decoding, its first row."""
    yield heading(f"Workload {workload.label}")
    finished, looping = map(headline.percent, (rows[0].finished_frac, rows[0].looping_frac))
    yield (
        f"{counted(rows[0].num_requests, 'request')}. Of plain decoding's outputs {finished} end with a stop "
        f"token, {looping} loop."
    )


def _drafts(drafting: Sequence[Row], series: Mapping[str, Sequence[Row]], slug: str) -> Iterator[Block]:
    """Show the acceptance by position."""
    if drafted := [row for row in drafting if row.num_spec_steps]:
        yield heading("Drafts", 3)
        yield _table(drafted, DRAFTS)
        svg = charts.positions({name or "all": _widest(line) for name, line in series.items()})
        yield from _picture(f"{slug}_positions", svg, "Acceptance by draft, at the largest K.")


def _times(rows: Sequence[Row], slug: str) -> Iterator[Block]:
    """Show the time of a pass, and its parts."""
    yield heading("Time of a pass", 3)
    if all(row.draft_s is None for row in rows):
        yield "No steps were profiled, so the times of drafting and verifying are missing."
    yield _table(rows, PASSES)
    yield from _cycle(rows, slug)
    yield heading("Latency", 3)
    yield _table(rows, LATENCY)


def _calibrations(folder: Folder) -> Iterator[Block]:
    """Show the share of right drafts by the drafter's confidence."""
    for number, calibration in enumerate(calibrations_of(folder)):
        if number == 0:
            yield heading("The drafter's confidence")
        for kind in KINDS:
            if lines := dict(calibration.lines(kind)):
                text = f"{calibration.label}, {kind}: of drafts after right ones, the share that was right."
                slug = f"calibration_{number}_{kind}"
                yield from _picture(slug, charts.calibration(lines), text)


def _cycle(rows: Sequence[Row], slug: str) -> Iterator[Block]:
    svg = charts.cycle(_drafting(rows))
    yield from _picture(f"{slug}_cycle", svg, "The time of a pass by parts. Speculation pays if its tokens lie above.")


def _bounds(rows: Sequence[Row]) -> Iterator[Block]:
    """Show the acceptance that the temperature allows."""
    lines = []
    for row in rows:
        if row.bounds is not None:
            lengths, firsts = zip(*((row.bounds[name].length, row.bounds[name].first) for name in BOUNDS), strict=True)
            length, most = row.acceptance_length, row.bounds["best"].length
            share = f"{length.value / most.value:.2f}" if length and most else "-"
            cells = *map(estimate_text, lengths), share, *map(estimate_text, firsts)
            lines.append((row.label, acceptance_text(row), *cells))
    if not lines:
        return
    yield heading("What the temperature allows", 3)
    yield (
        "Even a perfect drafter's guess is accepted only as often as the target itself draws that token. So the best "
        "acceptance that any drafter can reach is below K + 1."
    )
    lengths = ("K", "acceptance length", "best token", "sampled drafts", "best guess", "share of the best guess")
    yield Table((*lengths, "first draft: best token", "sampled", "best guess"), lines)


def _parts(rows: Sequence[Row]) -> Iterator[Block]:
    """Make the tables by category and by prompt length."""
    for title, parts in (
        ("category", [(part, row.label) for row in rows for part in row.by_category]),
        ("prompt length", [(part, row.label) for row in rows for part in row.by_bucket]),
    ):
        names = list(dict.fromkeys(part.part for part, _ in parts))
        parts.sort(key=lambda pair: names.index(pair[0].part))
        if parts:
            yield heading(f"By {title}", 3)
            lines = [(part.part or "(none)", k, *(text(part) for text in COUNTED.values())) for part, k in parts]
            yield Table((title, "K", *COUNTED), lines)


def _concurrent(workload: Workload, rows: Sequence[Row]) -> Iterator[Block]:
    """Show the figures of many requests at once in one workload."""
    if not rows:
        return
    yield heading(f"Workload {workload.label}: many requests at once")
    yield _table(rows, AT_ONCE)
    by_label: dict[str, list[Row]] = {}
    for row in rows:
        by_label.setdefault(variant_text(row.label), []).append(row)
    caption = "Total tokens a second over the number of requests at once."
    yield from _picture(f"{_slug(workload.label)}_concurrency", charts.concurrency(by_label), caption)


def _speedups(series: Mapping[str, Sequence[Row]], slug: str) -> Iterator[Block]:
    if series:
        yield from _picture(f"{slug}_speedup", charts.speedup(series), "Speed-up over K.")


def _acceptances(series: Mapping[str, Sequence[Row]], slug: str) -> Iterator[Block]:
    if series:
        looping = any(row.looping_frac for line in series.values() for row in line)
        caption = "Acceptance length over K" + "; hollow markers: without the outputs that loop" * looping
        yield from _picture(f"{slug}_acceptance", charts.acceptance_length(series), f"{caption}.")


def _by_context(series: Mapping[str, Sequence[Row]], slug: str) -> Iterator[Block]:
    """Draw figures over the length of the prompt, of every series' largest K and `auto`."""
    buckets = {
        f"{title and f'{title}, '}K = {row.k}": row.by_bucket
        for title, rows in series.items()
        for row in (_widest(rows), *(row for row in rows if not isinstance(row.k, int)))
    }
    for figure, axis, level, caption in (
        ("acceptance_length", "acceptance length", None, "Acceptance length"),
        ("cycle_cost", "c(K)", 1.0, "c(K), the time of a pass in passes of plain decoding,"),
        ("speedup", "speed-up over plain decoding", 1.0, "Speed-up"),
    ):
        lines = {
            title: [(part.prompt_tokens, getattr(part, figure)) for part in parts] for title, parts in buckets.items()
        }
        svg = charts.over_context(lines, axis, level)
        yield from _picture(f"{slug}_{figure}_by_context", svg, f"{caption} over the length of the prompt.")


def _picture(name: str, svg: str | None, caption: str) -> Iterator[Picture]:
    """Yield the picture, if there is one."""
    if svg is not None:
        yield Picture(name, svg, caption)


def _slug(label: str) -> str:
    """Make a file name of a label, with a checksum unless the label is plain lower-case ASCII."""
    words = re.sub(r"[^a-z0-9]+", "_", label.lower()).strip("_")
    return words if label.isascii() and label == label.lower() else f"{words}_{zlib.crc32(label.encode()):08x}"
