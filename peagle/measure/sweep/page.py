"""Lay out the pages of sweeps as blocks of peagle.measure.pages: the answer, then tables, then how it was measured."""

import re
import shlex
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from peagle.measure.metrics import figure_text
from peagle.measure.pages import Block, Commands, Picture, Table, heading, plain
from peagle.measure.sweep import charts, headline
from peagle.measure.sweep.compare import Difference
from peagle.measure.sweep.figures import FEWEST, SLOWER, best, sure
from peagle.measure.sweep.folder import Folder
from peagle.measure.sweep.headline import of_workload, variant_text
from peagle.measure.sweep.headline import place_text as place_text
from peagle.measure.sweep.plan import AUTO, PROFILED, Plan, Setting, short_names
from peagle.result import LOOPING_ABOVE

Row = Mapping[str, Any]
FIGURES = (
    "K",
    "speed-up",
    "acceptance length",
    "without loops",
    "tok/s",
    "slower requests",
    "outputs equal to plain",
    "median of requests",
    "mean of requests",
    "requests",
    "tokens a pass",
    "c(K)",
)
FIRST = FIGURES[:-2]
SHORT = (  # of FIGURES
    "K",
    "speed-up",
    "acceptance length",
    "without loops",
    "c(K)",
    "tok/s",
    "slower requests",
    "outputs equal to plain",
)
SHORTEST = ("K", "acceptance length", "speed-up", "c(K)", "tok/s", "outputs equal to plain")  # of FIGURES
HASH = 12  # digits of a checksum that a page shows

TERMS = (
    ("K", "tokens drafted per step. 0 is plain decoding. `auto` reads K from the drafter's table"),
    ("speed-up", "tok/s over plain decoding's, for the same requests in the same repeats, all added up"),
    ("median of requests", "the median of each request's speed-up, so that each request counts the same"),
    ("acceptance length", "tokens per step that verified drafts, with the target's own token: 1 + accepted / steps"),
    ("mean of requests", "the mean of each request's acceptance length, so that each request counts the same"),
    ("without loops", "without the requests whose output loops"),
    ("loop", f"an output loops if it repeats more than {headline.percent(LOOPING_ABOVE)} of its 4-grams"),
    ("tok/s", "(tokens - 1) / (time of the last token - time of the first token)"),
    ("slower requests", f"requests whose 95 % interval over the repeats lies wholly below {SLOWER:g}x"),
    ("tokens a pass", "tokens after the first / passes of the target"),
    ("c(K)", "the time of a pass, in passes of plain decoding. Speed-up = tokens a pass / c(K)"),
    (
        "draft, verify, rest",
        f"their shares of a pass in up to {PROFILED} conversations under the profiler. Rest: accepting, the runtime, "
        "the host",
    ),
    ("v(T)", "the time of a target's pass over T = K + 1 rows, in passes over one row"),
    ("per position", "steps that accepted the first, second, ... draft / all steps"),
    ("given those before", "steps that accepted this draft / steps that accepted all drafts before it"),
    ("ttft, tpot", "time to the first token; time per token after it"),
    ("itl", "time between arrivals, at which several tokens may come together; quantiles of a request"),
    (
        "brackets",
        "95 % intervals, by bootstrap over conversations; fewer than "
        f"{FEWEST} conversations have none. Counts are over all repeats",
    ),
)
BOUNDS = (
    ("p, q", "the target's and the drafter's distribution at a place whose earlier drafts were all accepted"),
    ("best token", "the mean of p(the drafter's most likely token): how often that token is accepted"),
    ("sampled drafts", "the mean of sum min(p, q): the most that any rule accepts of drafts drawn from q"),
    (
        "best guess",
        "the mean of max p: the most that any single guess is accepted. Training can gain only what lies between the "
        "best token and this",
    ),
    ("their lengths", "1 + v1 + v1 v2 + ..., with v the mean of each draft. First draft: v1"),
)
LOADS = (
    (
        "at once",
        "slots. All requests of a repeat are added together and wait for a slot; one that ends is replaced at the next "
        "dispatch, so at the end fewer are decoded than there are slots",
    ),
    ("total tok/s", "tokens after each request's first / the time in which at least one request was decoding"),
    ("over plain decoding", "of as many requests at once, in the same repeats, in which the variants take turns"),
    ("repeats", "the slowest and the fastest repeat, over plain decoding"),
    ("ttft at once", "counts from when the requests were added, so it includes the wait for a slot"),
    (
        "brackets of times",
        f"by bootstrap over repeats, because requests share the time; fewer than {FEWEST} repeats have none",
    ),
)


def run_blocks(folder: Folder, rows: Sequence[Row], loads: Sequence[Row] = ()) -> list[Block]:
    """Lay out the page of one run. `loads`: the figures of many requests at once."""
    plan = folder.plan
    return [
        *_front(folder, rows, loads),
        *_overview(plan, rows),
        *(block for workload in plan.settings for block in _workload(plan, workload, rows, loads)),
        *_terms(rows, loads),
        heading("How it was measured"),
        *_origin(folder),
    ]


def short_blocks(folder: Folder, rows: Sequence[Row], loads: Sequence[Row] = ()) -> list[Block]:
    """Lay out the summary of one run: a table for every workload, and two pictures of the first."""
    plan = folder.plan
    blocks = _front(folder, rows, loads)
    for workload in plan.settings:
        if own := of_workload(rows, workload):
            blocks += [*_about(workload, own), _short_table(own)]
            if workload == plan.settings[0] and not loads:
                blocks += _cycle(own, _slug(workload.label))
        pictured = workload == plan.settings[0]
        tables = _loads(workload, of_workload(loads, workload))
        blocks += [block for block in tables if pictured or not isinstance(block, Picture)]
    return [*blocks, *_terms(rows, loads), heading("How it was measured"), *_origin(folder)]


def arms_blocks(folder: Folder, rows: Sequence[Row]) -> Iterator[tuple[str, Table]]:
    """Yield for each workload its label and the short figures of all variants, for a terminal; then what to use."""
    for workload in folder.plan.settings:
        if own := of_workload(rows, workload):
            yield workload.label, _table(own, SHORTEST)
    yield from (("the K to use", table) for table in _summary(folder.plan, rows))


def comparison_blocks(runs: Mapping[Folder, Sequence[Row]], compared: Sequence[Sequence[Difference]]) -> list[Block]:
    """Lay out the page of several runs: all of them over K, and each against the first (`compared`)."""
    folders = list(runs)
    names = dict(zip(folders, short_names([folder.path.resolve() for folder in folders]), strict=True))
    first, others = names[folders[0]], folders[1:]
    pairs = list(zip(others, compared, strict=True))
    blocks: list[Block] = [
        heading(
            f"{headline.listed([names[folder] for folder in others])} against {first}: {_compared_title(folders)}", 1
        ),
        *_sentences(
            [
                sentence
                for folder, differences in pairs
                for sentence in headline.compared(differences, first, names[folder])
            ]
        ),
        "Speeds are compared as speed-ups over plain decoding of the same run, request by request.",
        *_notes((f"{name} in {names[folder]}", text) for folder in folders for name, text in headline.notes(folder)),
    ]
    by_context: list[Block] = []
    for workload in folders[0].plan.settings:
        if series := _series_of_runs(runs, names, workload):
            slug = _slug(workload.label)
            blocks += [heading(f"Workload {workload.label}")] if len(folders[0].plan.settings) > 1 else []
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
    blocks += _terms([row for rows in runs.values() for row in rows], ())
    for folder in folders:
        blocks += [heading(f"How {names[folder]} was measured"), *_origin(folder)]
    return blocks


def difference_tables(
    folders: Sequence[Folder], compared: Sequence[Sequence[Difference]]
) -> Iterator[tuple[str, Table]]:
    """Yield for each run after the first its title, and the table of its differences from the first (`compared`)."""
    first, *others = short_names([folder.path.resolve() for folder in folders])
    for name, differences in zip(others, compared, strict=True):
        yield f"{name} against {first}", _differences(differences, first, name)


def _compared_title(folders: Sequence[Folder]) -> str:
    """Name what the runs measured, and when."""
    subjects = dict.fromkeys(headline.subject(folder.plan) for folder in folders)
    dates = sorted({headline.date(folder) for folder in folders})
    subject = next(iter(subjects)) if len(subjects) == 1 else "speculative decoding"
    return f"{subject[:1].lower()}{subject[1:]}, {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}"


def _series_of_runs(
    runs: Mapping[Folder, Sequence[Row]], names: Mapping[Folder, str], workload: Setting
) -> dict[str, Sequence[Row]]:
    """Name the lines of all runs in one workload: by the run, and by what else tells them apart."""
    unlike = len({folder.plan.drafters for folder in runs}) > 1
    series: dict[str, Sequence[Row]] = {}
    for folder, rows in runs.items():
        for name, line in _series(folder.plan, of_workload(rows, workload)).items():
            drafter = name or (short_names(folder.plan.drafters)[0] if unlike else "")
            series[f"{names[folder]}{drafter and f', {drafter}'}"] = line
    return series


def _differences(differences: Sequence[Difference], first: str, second: str) -> Table:
    def verdict(difference: Difference) -> str:
        return "yes" if difference.real else "equal" if difference.equal else "undecided"

    return Table(
        ("workload", "K", "figure", first, second, "difference (95 %)", "requests", "real?"),
        tuple(
            (
                difference.setting.label,
                difference.label,
                difference.figure,
                f"{difference.first:.2f}",
                f"{difference.second:.2f}",
                _signed(difference),
                str(difference.num_requests),
                verdict(difference),
            )
            for difference in differences
        ),
    )


def _signed(difference: Difference) -> str:
    low, high = difference.difference.low, difference.difference.high
    interval = " (too few)" if low is None or high is None else f" ({low:+.2f}..{high:+.2f})"
    return f"{difference.difference.value:+.2f}{interval}"


def _front(folder: Folder, rows: Sequence[Row], loads: Sequence[Row]) -> list[Block]:
    """Begin a page: its title, the headlines, the speed-up over K, and what to do."""
    plan = folder.plan
    return [
        heading(headline.title(folder), 1),
        *_sentences(headline.headlines(folder, rows)),
        _circumstances(folder, rows),
        *_notes(headline.notes(folder)),
        *_speedups(_all_series(plan, rows), "all" if len(plan.settings) > 1 else _slug(plan.settings[0].label)),
        *_advice(folder, rows, loads),
    ]


def _sentences(sentences: Sequence[str]) -> Iterator[Block]:
    """Show the sentences that a reader came for."""
    if len(sentences) == 1:
        yield f"**{plain(sentences[0])}.**"
    elif sentences:
        yield "\n".join(f"- **{plain(sentence)}.**" for sentence in sentences)


def _circumstances(folder: Folder, rows: Sequence[Row]) -> str:
    """Say in two lines what was decoded, where, and how fast."""
    plan = folder.plan
    where = ", ".join(dict.fromkeys(headline.machine_text(sitting) for sitting in folder.record["sittings"]))
    how = f"decoded one at a time, {_counted(plan.repeats, 'repeat')}, on {where}."
    if len(plan.settings) > 1 or not rows:
        return plain(f"{_counted(len(plan.settings), 'workload')}, {how}")
    text = f"{_counted(rows[0]['num_requests'], 'request')} ({plan.settings[0].label}), {how}"
    (verdict,) = headline.verdicts(folder, rows)
    if (row := verdict.fastest) is not None:
        speeds = [f"{figure['value']:,.0f} tok/s" for figure in (row["tok_per_s"], rows[0]["tok_per_s"]) if figure]
        text += f" {variant_text(row['label'])}: {', plain decoding '.join(speeds)}; "
        text += f"acceptance length {acceptance_text(row)}."
    return plain(text)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _notes(notes: Iterable[tuple[str, str]]) -> Iterator[Block]:
    for name, text in notes:
        yield f"**{plain(name)}:** {plain(text)}."


def _items(items: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- **{plain(name)}:** {plain(text)}." for name, text in items)


def _advice(folder: Folder, rows: Sequence[Row], loads: Sequence[Row]) -> Iterator[Block]:
    """Name the K to use, with commands, and what limits it; nothing if no speed-up is known."""
    plan = folder.plan
    known = [verdict for verdict in headline.verdicts(folder, rows) if verdict.fastest is not None]
    if not known:
        return
    alone = len(plan.settings) == 1
    by_commands: dict[tuple[str, ...], list[headline.Verdict]] = {}
    for verdict in known:
        by_commands.setdefault(tuple(headline.commands(plan, verdict, alone)), []).append(verdict)
    yield heading("What to do")
    for commands, judged in by_commands.items():
        where = "" if alone else f" for {'; '.join(verdict.workload.label for verdict in judged)}"
        yield plain(_recommended(judged, where))
        yield Commands(commands)
    yield from _by_load(plan, loads)
    if limits := headline.caveats(folder, rows, loads):
        yield "Before you rely on it:"
        yield _items(limits)


def _recommended(judged: Sequence[headline.Verdict], where: str) -> str:
    row = judged[0].fastest
    assert row is not None
    if not judged[0].gains:
        return f"Use plain decoding{where}: no drafts pay here."
    unsure = [verdict for verdict in judged if not verdict.sure]
    if not unsure:
        return f"Use {variant_text(row['label'])}{where}."
    return (
        f"Try {variant_text(row['label'])}{where}: it was the fastest, but not surely faster than plain decoding. "
        "More prompts or repeats (--num-prompts, --repeats) would tell."
    )


def _by_load(plan: Plan, loads: Sequence[Row]) -> Iterator[Block]:
    """Name the best K for each number of requests at once."""
    lines = []
    for workload in plan.settings:
        own = of_workload(loads, workload)
        for slots in dict.fromkeys(row["concurrency"] for row in own):
            timed = [row for row in own if row["concurrency"] == slots and row["speedup"] is not None]
            if row := max(timed, key=lambda row: row["speedup"]["value"], default=None):
                figures = (_rounded_with_interval(row["tok_per_s"]), _over_plain(row))
                lines.append((workload.label, str(slots), variant_text(row["label"]), *figures))
    if not lines:
        return
    header = ("workload", "requests at once", "fastest", "total tok/s", "over plain decoding")
    several = len(plan.settings) > 1
    ways = (plan.drafters, plan.draft_vocabs, plan.drafter_windows)
    writable = 1 in plan.concurrencies and all(len(way) == 1 for way in ways)
    yield "By the number of requests at once" + " (`--write-widths` writes it for `-k auto`)" * writable + ":"
    yield Table(header if several else header[1:], tuple(line if several else line[1:] for line in lines))


def _over_plain(row: Row) -> str:
    """Format a speed-up with its interval, or with its least and greatest repeat if there is none."""
    text = estimate_text(row["speedup"])
    if row["k"] == 0 or row["speedup"]["low"] is not None:
        return text
    return f"{text} (repeats: {_span(row['speedup_repeats'])})"


def _terms(rows: Sequence[Row], loads: Sequence[Row]) -> Iterator[Block]:
    """Define the words of the tables."""
    yield heading("Terms")
    terms = list(TERMS)
    if any(row["bounds"] is not None for row in rows):
        terms += BOUNDS
    if loads:
        terms += LOADS
    yield "\n".join(f"- **{name}:** {meaning}." for name, meaning in terms)


def _origin(folder: Folder) -> Iterator[Block]:
    """Show how a run was made: its command, machine, files and checksums."""
    plan, sittings = folder.plan, folder.record["sittings"]
    yield Commands([shlex.join(sittings[0]["command"])])
    lines = [
        ("began", sittings[0]["time"]),
        *(("machine", place) for place in dict.fromkeys(place_text(sitting) for sitting in sittings)),
        *([("processes", f"{len(sittings)}, each after --resume")] if len(sittings) > 1 else []),
        (
            "decoding",
            f"one request at a time; variants take turns after {_counted(plan.in_a_row, 'request')}; "
            f"{_counted(plan.repeats, 'repeat')}; at most {plan.max_new_tokens} new tokens; seed {plan.seed}",
        ),
        ("options", f"dtype {plan.dtype or 'auto'}, experts {plan.experts}, kernels {plan.kernels}"),
        *_prompts(folder),
        *((f"{_with_path(plan, name)}", f"sha256 {digest[:HASH]}") for name, digest in plan.fingerprints.items()),
        ("chat template, tokenizer", f"sha256 {plan.template[:HASH]}" if plan.template else "none"),
    ]
    yield Table(("what", "value"), lines)


def _with_path(plan: Plan, name: str) -> str:
    """Name the files of a fingerprint: the target's by its path, too, as the drafters' are."""
    return f"target {plan.target}" if name == "target" else name


def _prompts(folder: Folder) -> Iterator[tuple[str, str]]:
    prompts = folder.asked()
    left_out = [] if prompts is None else prompts[1]
    for source in folder.plan.sources:
        rows = [left for left in left_out if left.prompts == source.name and left.row is None]
        conversations = [left for left in left_out if left.prompts == source.name and left.row is not None]
        yield (
            f"prompts {source.name}",
            f"layout {source.layout}, {source.num_used} of {source.num_rows} rows"
            + ("" if source.max_turns is None else f"; turns of each: at most {source.max_turns}")
            + (f"; rows without a usable prompt: {source.num_skipped}" if source.num_skipped else "")
            + (f", the first: {rows[0].why}" if rows else "")
            + f"; sha256 {source.sha256[:HASH]}"
            + (
                f". Conversations left out: {len(conversations)}, the first: {conversations[0].why}"
                if conversations
                else ""
            ),
        )


def _summary(plan: Plan, rows: Sequence[Row]) -> Iterator[Table]:
    """Name the K to use of each workload, if one is surely faster than plain decoding, or none is faster."""
    lines = []
    for workload in plan.settings:
        chosen = best(of_workload(rows, workload))
        if chosen is None:
            continue
        if chosen["k"] == 0:
            verdict = "0, plain decoding"
        elif sure(chosen):
            verdict = chosen["label"]
        else:
            verdict = "undecided"  # its interval reaches below 1
        without_loops = chosen["without_loops"]["acceptance_length"]
        figures = map(estimate_text, (chosen["speedup"], chosen["acceptance_length"], without_loops))
        lines.append((workload.label, verdict, chosen["label"], *figures))
    if lines:
        header = ("workload", "K to use", "fastest measured", "its speed-up", "its acceptance length", "without loops")
        yield Table(header, tuple(lines))


def _overview(plan: Plan, rows: Sequence[Row]) -> Iterator[Block]:
    """Show all workloads together, if there are several."""
    fastest = {workload: best(_drafting(of_workload(rows, workload))) for workload in plan.settings}
    lines = [
        (
            workload.label,
            row["label"],
            *map(estimate_text, (row["speedup"], row["acceptance_length"], row["without_loops"]["acceptance_length"])),
        )
        for workload, row in fastest.items()
        if row is not None
    ]
    if len(plan.settings) > 1 and lines:
        yield heading("All workloads")
        yield Table(("workload", "fastest K", "speed-up", "acceptance length", "without loops"), lines)
        yield from _acceptances(_all_series(plan, rows), "all")


def _drafting(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["k"] != 0]


def _all_series(plan: Plan, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group the rows of all workloads as `_series` does, by workload, too, if there are several."""
    return {
        ", ".join(filter(None, (workload.label * (len(plan.settings) > 1), name))): line
        for workload in plan.settings
        for name, line in _series(plan, of_workload(rows, workload)).items()
    }


def _workload(plan: Plan, workload: Setting, rows: Sequence[Row], loads: Sequence[Row]) -> Iterator[Block]:
    """Lay out the tables of one workload, each with its pictures."""
    slug, rows = _slug(workload.label), of_workload(rows, workload)
    if rows:
        drafting = _drafting(rows)
        series = _series(plan, rows)
        yield from _about(workload, rows)
        yield _table(rows, FIRST)
        if len(plan.settings) > 1:  # else it is the page's first picture
            yield from _speedups(series, slug)
        yield from _acceptances(series, slug)
        yield from _requests(drafting, slug)
        yield from _drafts(drafting, series, slug)
        yield from _times(rows, slug)
        yield from _bounds(drafting)
        yield from _parts(drafting)
        yield from _by_context(series, slug)
    yield from _loads(workload, of_workload(loads, workload))


def _requests(drafting: Sequence[Row], slug: str) -> Iterator[Block]:
    if (fastest := best(drafting)) is not None:
        caption = f"Each request's speed-up by {variant_text(fastest['label'])}"
        caption += ", with its 95 % interval over the repeats" * (fastest["num_compared"] > 0)
        yield from _picture(f"{slug}_requests", charts.requests(fastest, LOOPING_ABOVE), f"{caption}.")


def _drafts(drafting: Sequence[Row], series: Mapping[str, Sequence[Row]], slug: str) -> Iterator[Block]:
    """Show which drafts were accepted."""
    drafted = [row for row in drafting if row["num_spec_steps"]]
    if not drafted:
        return
    yield heading("Drafts", 3)
    yield Table(
        ("K", "per position", "given those before", "steps that accepted 0, 1, ...", "plain steps"),
        tuple(
            (
                row["label"],
                _rates(_of_tried(row)),
                _rates(row["conditional_rate"]),
                ", ".join(map(str, row["histogram"])),
                str(row["num_plain_steps"]),
            )
            for row in drafted
        ),
    )
    svg = charts.positions({name or "all": _widest(line) for name, line in series.items() if line})
    yield from _picture(f"{slug}_positions", svg, "Acceptance by draft, at the largest K.")


def _times(rows: Sequence[Row], slug: str) -> Iterator[Block]:
    """Show what a pass costs, and its parts."""
    yield heading("Time of a pass", 3)
    if all(row["draft_s"] is None for row in rows):
        yield "No steps were profiled, so the times of drafting and verifying are missing."
    yield Table(
        ("K", "tokens a pass", "c(K)", "ms a pass", "draft ms", "verify ms", "rest ms", "v(T)"),
        tuple(
            (
                row["label"],
                *map(estimate_text, (row["tokens_per_step"], row["cycle_cost"])),
                *(_ms(row[name]) for name in ("step_s", "draft_s", "verify_s", "host_s")),
                estimate_text(row["verify_cost"]),
            )
            for row in rows
        ),
    )
    yield from _cycle(rows, slug)
    yield heading("Latency", 3)
    yield Table(
        ("K", "ttft ms", "tpot ms", "itl ms: .5", ".9", ".99"),
        tuple((row["label"], *map(_ms, (row["ttft_s"], row["tpot_s"], *row["itl_s"]))) for row in rows),
    )


def _cycle(rows: Sequence[Row], slug: str) -> Iterator[Block]:
    svg = charts.cycle(_drafting(rows))
    yield from _picture(f"{slug}_cycle", svg, "The time of a pass by parts. Speculation pays if its tokens lie above.")


def _bounds(rows: Sequence[Row]) -> Iterator[Block]:
    """Show beside each acceptance what the law allows at a temperature."""
    bounded = [row for row in rows if row["bounds"] is not None]
    if not bounded:
        return
    yield heading("What the temperature allows", 3)
    yield (
        "However good a drafter is, its guess survives only as often as the target itself says that token. So the best "
        "acceptance that any drafter can reach is below K + 1."
    )
    header = ("K", "acceptance length", "best token", "sampled drafts", "best guess", "share of the best guess")
    first = ("first draft: best token", "sampled", "best guess")

    def text(row: Row, key: str) -> list[str]:
        return [estimate_text(row["bounds"][name][key]) for name in ("one_hot", "sampled", "best")]

    def share(row: Row) -> str:
        length, most = row["acceptance_length"], row["bounds"]["best"]["length"]
        return f"{length['value'] / most['value']:.2f}" if length and most else "-"

    yield Table(
        (*header, *first),
        tuple(
            (row["label"], acceptance_text(row), *text(row, "length"), share(row), *text(row, "first"))
            for row in bounded
        ),
    )


def _parts(rows: Sequence[Row]) -> Iterator[Block]:
    """Make the tables by category and by prompt length."""
    for key, title in (("by_category", "category"), ("by_bucket", "prompt length")):
        names = list(dict.fromkeys(part["part"] for row in rows for part in row[key]))
        parts = [(row, part) for name in names for row in rows for part in row[key] if part["part"] == name]
        if parts:
            yield heading(f"By {title}", 3)
            header = (title, "K", "requests", "loop", "acceptance length", "speed-up", "tokens a pass", "c(K)", "v(T)")
            yield Table(
                (*header, "tok/s", "ttft ms", "tpot ms", "without loops: acceptance", "speed-up"),
                tuple(
                    (
                        part["part"] or "(none)",
                        row["label"],
                        str(part["num_requests"]),
                        f"{part['looping_frac']:.0%}",
                        acceptance_text(part),
                        *map(estimate_text, (part["speedup"], part["tokens_per_step"], part["cycle_cost"])),
                        estimate_text(part["verify_cost"]),
                        _rounded(part["tok_per_s"]),
                        _ms(part["ttft_s"]),
                        _ms(part["tpot_s"]),
                        *(estimate_text(part["without_loops"][key]) for key in ("acceptance_length", "speedup")),
                    )
                    for row, part in parts
                ),
            )


def _loads(workload: Setting, loads: Sequence[Row]) -> Iterator[Block]:
    """Show the figures of many requests at once in one workload."""
    if not loads:
        return
    yield heading(f"Workload {workload.label}: many requests at once")
    by_label: dict[str, list[Row]] = {}
    for row in loads:
        by_label.setdefault(variant_text(row["label"]), []).append(row)
    header = ("at once", "K", "total tok/s", "over plain decoding", "repeats", "acceptance length")
    yield Table(
        (*header, "ttft ms", "itl ms: .5", ".99", "outputs equal to plain"),
        tuple(
            (
                str(row["concurrency"]),
                row["label"],
                _rounded_with_interval(row["tok_per_s"]),
                estimate_text(row["speedup"]),
                _span(row["speedup_repeats"]),
                acceptance_text(row),
                *map(_ms, (row["ttft_s"], row["itl_s"][0], row["itl_s"][-1])),
                f"{row['equal_to_plain_frac']:.1%}",
            )
            for row in loads
        ),
    )
    caption = "Total tokens a second over the number of requests at once."
    yield from _picture(f"{_slug(workload.label)}_concurrency", charts.concurrency(by_label), caption)


def _about(workload: Setting, rows: Sequence[Row]) -> Iterator[Block]:
    """Begin a workload's section with the outputs of plain decoding, its first row."""
    plainly = rows[0]
    yield heading(f"Workload {workload.label}")
    finished, looping = (headline.percent(plainly[name]) for name in ("finished_frac", "looping_frac"))
    yield (
        f"{_counted(plainly['num_requests'], 'request')}. Of plain decoding's outputs {finished} end with a stop "
        f"token, {looping} loop."
    )


def _table(rows: Sequence[Row], names: Sequence[str]) -> Table:
    """Make the table of these FIGURES."""
    lines = (dict(zip(FIGURES, _line(row), strict=True)) for row in rows)
    return Table(names, tuple(tuple(cells[name] for name in names) for cells in lines))


def _short_table(rows: Sequence[Row]) -> Table:
    """Make the table of the SHORT figures and of the rates by position."""
    table = _table(rows, SHORT)
    lines = tuple((*cells, _rates(_of_tried(row)) or "-") for cells, row in zip(table.rows, rows, strict=True))
    return Table((*SHORT, "per position"), lines)


def _speedups(series: Mapping[str, Sequence[Row]], slug: str) -> Iterator[Block]:
    if series:
        yield from _picture(f"{slug}_speedup", charts.speedup(series), "Speed-up over K.")


def _acceptances(series: Mapping[str, Sequence[Row]], slug: str) -> Iterator[Block]:
    if series:
        looping = any(row["looping_frac"] for line in series.values() for row in line)
        caption = "Acceptance length over K" + "; hollow markers: without the outputs that loop" * looping
        yield from _picture(f"{slug}_acceptance", charts.acceptance_length(series), f"{caption}.")


def _by_context(series: Mapping[str, Sequence[Row]], slug: str) -> Iterator[Block]:
    """Draw acceptance, c(K) and speed-up over the length of the prompt, of each series' largest K and its `auto`."""
    shown: dict[str, Sequence[Row]] = {}
    for title, rows in series.items():
        chosen = [_widest(rows), *(row for row in rows if row["k"] == AUTO)] if rows else []
        shown |= {f"{title and f'{title}, '}K = {row['k']}": row["by_bucket"] for row in chosen}
    for key, name, level, caption in (
        ("acceptance_length", "acceptance length", None, "Acceptance length"),
        ("cycle_cost", "c(K)", 1.0, "c(K), the time of a pass in passes of plain decoding,"),
        ("speedup", "speed-up over plain decoding", 1.0, "Speed-up"),
    ):
        svg = charts.over_context(shown, key, name, level)
        yield from _picture(f"{slug}_{key}_by_context", svg, f"{caption} over the length of the prompt.")


def _picture(name: str, svg: str | None, caption: str) -> Iterator[Picture]:
    """Yield the picture, if there is one."""
    if svg is not None:
        yield Picture(name, svg, caption)


def _series(plan: Plan, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group speculative rows by their label without K; "" if it is empty."""
    series: dict[str, list[Row]] = {}
    for row in rows:
        if row["k"] != 0:
            series.setdefault(row["label"].removeprefix(str(row["k"])).removeprefix(", "), []).append(row)
    named = plan.draft_vocabs != (None,) or plan.drafter_windows != (None,)
    return {title if len(series) > 1 or named else "": line for title, line in series.items()}


def _widest(rows: Sequence[Row]) -> Row:
    """Choose the row of the largest fixed K, or of `auto` if there is no other."""
    fixed = [row for row in rows if row["k"] != AUTO]
    return max(fixed or rows, key=lambda row: len(row["rate_per_position"]))


def _line(row: Row) -> tuple[str, ...]:
    """Format a row's FIGURES."""
    return (
        row["label"],
        estimate_text(row["speedup"]),
        acceptance_text(row),
        estimate_text(row["without_loops"]["acceptance_length"]),
        _rounded(row["tok_per_s"]),
        f"{row['num_slower']} of {row['num_compared']}" if row["num_compared"] else "-",
        f"{row['equal_to_plain_frac']:.1%}",
        estimate_text(row["speedup_median"]),
        estimate_text(row["acceptance_length_mean"]),
        str(row["num_requests"]),
        estimate_text(row["tokens_per_step"]),
        estimate_text(row["cycle_cost"]),
    )


def acceptance_text(row: Row) -> str:
    """Format a variant's acceptance length; of `auto`, with the share of passes that drafted."""
    text = estimate_text(row["acceptance_length"])
    if row["num_plain_steps"] and row["num_spec_steps"]:
        text += f" in {row['num_spec_steps'] / (row['num_spec_steps'] + row['num_plain_steps']):.1%} of the passes"
    return text


def _rounded(figure: Mapping[str, float] | None) -> str:
    return "-" if figure is None else f"{figure['value']:.0f}"


def _rounded_with_interval(figure: Mapping[str, float] | None) -> str:
    interval = "" if figure is None or figure["low"] is None else f" ({figure['low']:.0f}..{figure['high']:.0f})"
    return _rounded(figure) + interval


def _span(values: Sequence[float]) -> str:
    """Format the least and the greatest value."""
    return f"{min(values):.2f}..{max(values):.2f}" if values else "-"


def _ms(figure: Mapping[str, float] | None) -> str:
    if figure is None:
        return "-"
    if figure["low"] is None:
        return f"{1e3 * figure['value']:.3f}"
    return f"{1e3 * figure['value']:.3f} ({1e3 * figure['low']:.3f}..{1e3 * figure['high']:.3f})"


def estimate_text(figure: Mapping[str, float | None] | None, digits: int = 2) -> str:
    """Format a figure with its interval."""
    if figure is None:
        return "-"
    value, low, high = (figure_text(figure[name], f".{digits}f") for name in ("value", "low", "high"))
    return value if figure["low"] is None else f"{value} ({low}..{high})"


def _rates(rates: Sequence[Mapping[str, float] | None]) -> str:
    return " ".join("-" if rate is None else f"{rate['value']:.2f}".removeprefix("0") for rate in rates)


def _of_tried(row: Row) -> list[Mapping[str, float] | None]:
    """Return rates per position; None if no step verified the draft after accepting all before it."""
    pairs = zip(row["rate_per_position"], row["conditional_rate"], strict=True)
    return [rate if conditional is not None else None for rate, conditional in pairs]


def _slug(label: str) -> str:
    """Make a file name from a label, with a checksum if the label is not plain lower-case ASCII."""
    plain = re.sub(r"[^a-z0-9]+", "_", label.lower()).strip("_")
    return plain if label.isascii() and label == label.lower() else f"{plain}_{zlib.crc32(label.encode()):08x}"
