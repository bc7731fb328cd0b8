"""Lay out the pages of sweeps as blocks of peagle.measure.pages."""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from peagle.measure.pages import Block, Picture, Table, heading
from peagle.measure.sweep import charts
from peagle.measure.sweep.compare import Difference
from peagle.measure.sweep.figures import FEWEST, SLOWER, best, sure
from peagle.measure.sweep.folder import Folder
from peagle.measure.sweep.plan import AUTO, LOOKED_AT, Plan, Setting, short_names
from peagle.result import LOOPING_ABOVE

Row = Mapping[str, Any]
TITLE = "Acceptance and speed over K"
FIGURES = (
    "K",
    "requests",
    "acceptance length",
    "mean of requests",
    "without loops",
    "speed-up",
    "median of requests",
    "tokens a pass",
    "c(K)",
    "tok/s",
    "slower requests",
    "outputs equal to plain",
)
SHORT = (  # of FIGURES
    "K",
    "acceptance length",
    "without loops",
    "speed-up",
    "c(K)",
    "tok/s",
    "slower requests",
    "outputs equal to plain",
)


FORMULAS = (
    "Acceptance length is 1 + accepted / steps, over all steps that verified drafts; mean: the same of each "
    "request, averaged. Per position: steps that accepted this draft / all steps; given those before: / steps "
    "that verified it and had accepted all before it. tok/s: (tokens - 1) / (last - first token). Speed-up: "
    "over plain decoding of the same requests in the same repeats, pooled; the median is of the requests'. "
    "c(K): a pass's time in passes of plain decoding; tokens a pass: those behind the first / passes; speed- "
    "up = tokens a pass / c(K). Drafting, verifying and the rest (accepting, the runtime, the host) by their "
    f"shares in up to {LOOKED_AT} conversations under the profiler. v(T): a pass of the target over T = K + 1 rows, in "
    "passes over one. ttft: time to the first token; tpot: time per token behind it; itl: time between arrivals, at "
    "which the tokens of several steps may come together, quantiles of a request. A request loops where more than "
    f"{LOOPING_ABOVE:.0%} of its 4-grams are repeated; slower requests: their 95 % interval over the repeats lies "
    f"wholly below {SLOWER}. Counts are of all repeats. In brackets: 95 % intervals, by bootstrap over "
    "conversations; too few have none."
)


LOADS = (
    "Many requests at once: all requests of a repetition are added together and wait for one of so many slots; one "
    "that ends is replaced at the next dispatch, and towards the end fewer are left than slots. tok/s in all: tokens "
    "behind each request's first / the time in which at least one was decoding. Over plain decoding: with as many at "
    "once, in the same repetitions, in which the arms take turns; least..greatest: of single repetitions. ttft counts "
    "from when the requests were added, so it holds the wait for a slot. Requests that are decoded together share the "
    f"time, so intervals of times are by bootstrap over repetitions here, and fewer than {FEWEST} have none; those of "
    "acceptance length are over conversations."
)


def run_blocks(folder: Folder, rows: Sequence[Row], loads: Sequence[Row] = ()) -> list[Block]:
    """The page of one run: figures and pictures of every setting. `loads`: the figures of many requests at once."""
    plan = folder.plan
    return [
        heading(TITLE, 1),
        *_origin(folder),
        *_failures(folder),
        *_summary(plan, rows),
        *_overview(plan, rows),
        *(block for setting in plan.settings for block in _setting(plan, setting, _of(rows, setting))),
        *(block for setting in plan.settings for block in _loads(setting, _of(loads, setting))),
        heading("How to read this"),
        FORMULAS,
        *_about_loads(loads),
    ]


def short_blocks(folder: Folder, rows: Sequence[Row], loads: Sequence[Row] = ()) -> list[Block]:
    """Lay out the page of one run in short: a table for every setting, and two pictures of the first."""
    plan = folder.plan
    shown = ("_speedup", "_concurrency" if loads else "_cycle")
    blocks: list[Block] = [heading(TITLE, 1), *_origin(folder), *_failures(folder), *_summary(plan, rows)]
    for setting in plan.settings:
        if some := _of(rows, setting):
            blocks += [*_about(setting, some), _headline(setting, some)]
            if setting == plan.settings[0]:
                drawn = (block for block in _setting(plan, setting, some) if isinstance(block, Picture))
                blocks += [each for each in drawn if each.name.endswith(shown)]
        for block in _loads(setting, _of(loads, setting)):
            if not isinstance(block, Picture) or setting == plan.settings[0]:
                blocks.append(block)
    return [*blocks, heading("How to read this"), FORMULAS, *_about_loads(loads)]


def comparison_blocks(runs: Mapping[Folder, Sequence[Row]], found: Sequence[Sequence[Difference]]) -> list[Block]:
    """The page of several runs with their figures: all of them over K, and each against the first (`found`)."""
    folders = list(runs)
    names = dict(zip(folders, short_names([folder.path.resolve() for folder in folders]), strict=True))
    first = names[folders[0]]
    blocks: list[Block] = [heading(f"{', '.join(names.values())}: is there a difference?", 1)]
    for folder in folders:
        blocks += [heading(names[folder]), *_origin(folder)]
    unlike = len({folder.plan.drafters for folder in folders}) > 1
    for setting in folders[0].plan.settings:
        series = {}
        for folder, all_rows in runs.items():
            for title, rows in _series(folder.plan, _of(all_rows, setting)).items():
                drafter = title or (short_names(folder.plan.drafters)[0] if unlike else "")
                series[f"{names[folder]}{drafter and f', {drafter}'}"] = rows
        if any(series.values()):
            blocks += [heading(setting.label), *_curves(series, _slug(setting.label))]
    for folder, differences in zip(folders[1:], found, strict=True):
        blocks += [
            heading(f"{names[folder]} against {first}"),
            (
                f"{len(differences)} differences of the same requests, with 95 % bootstrap intervals; real where the "
                "interval leaves out zero, which one in twenty does by chance. Speed-ups are each over plain decoding "
                "of their own run, and real only where, too, each repeat of the one run is beyond all of the other's."
            ),
            Table(
                ("setting", "K", "figure", first, names[folder], "difference (95 %)", "requests", "real?"),
                tuple(
                    (
                        each.setting.label,
                        each.label,
                        each.figure,
                        f"{each.first:.2f}",
                        f"{each.second:.2f}",
                        _signed(each),
                        str(each.num_requests),
                        "yes" if each.real else "equal" if each.equal else "cannot be told",
                    )
                    for each in differences
                ),
            ),
        ]
    return [*blocks, heading("How to read this"), FORMULAS]


def _signed(each: Difference) -> str:
    low, high = each.difference.low, each.difference.high
    interval = " (too few)" if low is None or high is None else f" ({low:+.2f}..{high:+.2f})"
    return f"{each.difference.value:+.2f}{interval}"


def _origin(folder: Folder) -> Iterator[Block]:
    plan = folder.plan
    sittings = folder.record["sittings"]
    yield f"`{' '.join(sittings[0]['command'])}`"
    yield (
        f"Target {plan.target}; drafters: {', '.join(plan.drafters)}; {plan.repeats} repeat(s), an arm "
        f"decodes {plan.in_a_row} request(s) before the next has its turn, batch 1, at most {plan.max_new_tokens} new "
        f"tokens, seed {plan.seed}; asked for: dtype {plan.dtype or 'auto'}, experts {plan.experts}, kernels "
        f"{plan.kernels}; chat template {plan.template[:12] or 'none'}"
        + ("." if folder.finished else "; **not finished: figures are of the requests whose repeats are all there.**")
    )
    places = list(dict.fromkeys(place_text(sitting) for sitting in sittings))
    warning = " **Sittings differ: their times are mixed.**" if len(places) > 1 else ""
    yield f"{len(sittings)} sitting(s), the first {sittings[0]['time']}: {'; '.join(places)}.{warning}"
    known = folder.asked()
    left_out = [] if known is None else known[1]
    for source in plan.sources:
        rows = [each for each in left_out if each.prompts == source.name and each.row is None]
        some = [each for each in left_out if each.prompts == source.name and each.row is not None]
        yield (
            f"Prompts {source.name}: layout {source.layout}, {source.num_used} of {source.num_rows} rows"
            + ("" if source.max_turns is None else f", at most {source.max_turns} turn(s) of each")
            + (f", {source.num_skipped} row(s) that cannot be asked" if source.num_skipped else "")
            + (f", the first: {rows[0].why}" if rows else "")
            + f"; sha256 {source.sha256[:12]}."
            + (f" Left out of {len(some)} conversation(s), the first: {some[0].why}." if some else "")
        )


def place_text(sitting: Mapping[str, Any]) -> str:
    """Machine, library and commit of a sitting."""
    device, git = sitting["device"], sitting["git"] or {}
    where = f"{sitting['cpu']}, {sitting['num_threads']} threads" if device["platform"] == "cpu" else device["kind"]
    commit = f", commit {git['commit'][:10]}{' with changes' if git['dirty'] else ''}" if git else ""
    ran = "".join(f", {name} {value}" for name, value in sitting.get("ran", {}).items())
    return f"{where}{ran}; jaxlib {sitting['packages']['jaxlib']}{commit}"


def _failures(folder: Folder) -> Iterator[Block]:
    for (setting, arm), why in folder.errors().items():
        yield f"**Failed:** {setting.label}, K = {folder.plan.label(arm)}: {why}"


def _summary(plan: Plan, rows: Sequence[Row]) -> Iterator[Block]:
    """Which K to use."""
    lines = []
    for setting in plan.settings:
        chosen = best(_of(rows, setting))
        if chosen is None:
            continue
        verdict = "plain decoding is fastest" if chosen["k"] == 0 else "yes" if sure(chosen) else "cannot be told"
        length, quiet = chosen["acceptance_length"], chosen["without_loops"]["acceptance_length"]
        figures = map(estimate_text, (chosen["speedup"], length, quiet))
        lines.append((setting.label, chosen["label"], *figures, verdict))
    if lines:
        yield heading("The K to use")
        header = ("setting", "K", "speed-up", "acceptance length", "without loops", "ahead of plain decoding?")
        yield Table(header, tuple(lines))


def _overview(plan: Plan, rows: Sequence[Row]) -> Iterator[Block]:
    """All settings in one picture each, where there are several."""
    if len(plan.settings) < 2:
        return
    series = {
        f"{setting.label}{title and f', {title}'}": some
        for setting in plan.settings
        for title, some in _series(plan, _of(rows, setting)).items()
    }
    if any(series.values()):
        yield heading("All settings")
        yield from _curves(series, "all")


def _setting(plan: Plan, setting: Setting, rows: Sequence[Row]) -> Iterator[Block]:
    if not rows:
        return
    slug, fast = _slug(setting.label), rows[1:]
    yield from _about(setting, rows)
    yield Table(
        FIGURES,
        tuple(_line(setting, row) for row in rows),
    )
    if all(row["draft_s"] is None for row in rows):
        yield "No steps were looked at under the profiler: what drafting and verifying take is not known."
    yield Table(
        ("K", "ms a step", "draft ms", "verify ms", "rest ms", "v(T)", "ttft ms", "tpot ms", "itl ms: .5, .9, .99"),
        tuple(_times(row) for row in rows),
    )
    drafted = [row for row in fast if row["num_spec_steps"]]
    if drafted:
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
    yield from _curves(_series(plan, rows), slug)
    pictures = [
        ("cycle", "What a pass costs, by parts; dots: the tokens it gives.", charts.cycle(fast)),
        (
            "positions",
            "Acceptance by draft, at the largest K.",
            charts.positions({title or "all": _widest(some) for title, some in _series(plan, rows).items() if some}),
        ),
    ]
    if fast and (chosen := best(fast)) is not None:
        caption = f"Each request's speed-up, K = {chosen['label']}."
        pictures.append(("requests", caption, charts.requests(chosen, LOOPING_ABOVE)))
    for name, caption, svg in pictures:
        yield from _drawn(f"{slug}_{name}", svg, caption)
    for key, what in (("by_category", "category"), ("by_bucket", "prompt tokens")):
        parts = [(row, part) for row in fast for part in row[key]]
        if parts:
            header = (what, "K", "requests", "loop", "acceptance length", "speed-up", "tokens a pass", "c(K)", "v(T)")
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


def _loads(setting: Setting, loads: Sequence[Row]) -> Iterator[Block]:
    """The figures of many requests at once, in one setting."""
    if not loads:
        return
    yield heading(f"{setting.label[:1].upper()}{setting.label[1:]}: many requests at once")
    by_label: dict[str, list[Row]] = {}
    for row in loads:
        by_label.setdefault("plain decoding" if row["k"] == 0 else f"K = {row['label']}", []).append(row)
    header = ("at once", "K", "tok/s in all", "over plain decoding", "least..greatest", "acceptance length")
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
                f"{row['equal_to_plain_frac']:.1%}" if setting.temperature == 0 else "-",
            )
            for row in loads
        ),
    )
    caption = "Tokens a second in all, over the requests decoded at once."
    yield from _drawn(f"{_slug(setting.label)}_concurrency", charts.concurrency(by_label), caption)


def _about_loads(loads: Sequence[Row]) -> Iterator[Block]:
    if loads:
        yield LOADS


def _about(setting: Setting, rows: Sequence[Row]) -> Iterator[Block]:
    """Head a setting's section, and say what plain decoding, the first row, did there."""
    plain = rows[0]
    yield heading(setting.label[:1].upper() + setting.label[1:])
    yield (
        f"{plain['num_requests']} requests; of plain decoding's outputs {plain['finished_frac']:.0%} end by "
        f"themselves, {plain['looping_frac']:.0%} loop."
    )


def _headline(setting: Setting, rows: Sequence[Row]) -> Table:
    """Make the table of the SHORT figures, and of the rates by position."""
    lines = []
    for row in rows:
        cells = dict(zip(FIGURES, _line(setting, row), strict=True))
        lines.append((*(cells[name] for name in SHORT), _rates(_of_tried(row)) or "-"))
    return Table((*SHORT, "per position"), tuple(lines))


def _curves(series: Mapping[str, Sequence[Row]], slug: str) -> Iterator[Block]:
    series = {title or "all": rows for title, rows in series.items() if rows}
    if series:
        yield from _drawn(f"{slug}_speedup", charts.speedup(series), "Speed-up over K.")
        yield from _drawn(f"{slug}_acceptance", charts.acceptance_length(series), "Acceptance length over K.")


def _drawn(name: str, svg: str | None, caption: str) -> Iterator[Picture]:
    """The picture, if there is one to show."""
    if svg is not None:
        yield Picture(name, svg, caption)


def _series(plan: Plan, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Speculative rows by what tells them apart beside K; "" where nothing does."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["k"] != 0:
            found.setdefault(row["label"].removeprefix(str(row["k"])).removeprefix(", "), []).append(row)
    return {title if len(found) > 1 or plan.draft_vocabs != (None,) else "": some for title, some in found.items()}


def _widest(rows: Sequence[Row]) -> Row:
    """The row of the largest K that every step drafted; of auto where there is no other."""
    fixed = [row for row in rows if row["k"] != AUTO]
    return max(fixed or rows, key=lambda row: len(row["rate_per_position"]))


def _of(rows: Sequence[Row], setting: Setting) -> list[Row]:
    return [row for row in rows if Setting(row["prompts"], row["raw"], row["temperature"]) == setting]


def _line(setting: Setting, row: Row) -> tuple[str, ...]:
    return (
        row["label"],
        str(row["num_requests"]),
        acceptance_text(row),
        estimate_text(row["acceptance_length_mean"]),
        estimate_text(row["without_loops"]["acceptance_length"]),
        estimate_text(row["speedup"]),
        estimate_text(row["speedup_median"]),
        estimate_text(row["tokens_per_step"]),
        estimate_text(row["cycle_cost"]),
        _rounded(row["tok_per_s"]),
        f"{row['num_slower']} of {row['num_compared']}" if row["num_compared"] else "-",
        f"{row['equal_to_plain_frac']:.1%}" if setting.temperature == 0 else "-",
    )


def _times(row: Row) -> tuple[str, ...]:
    waits = [each for each in row["itl_s"] if each is not None]
    return (
        row["label"],
        _ms(row["step_s"]),
        *(_ms(row[name]) for name in ("draft_s", "verify_s", "host_s")),
        estimate_text(row["verify_cost"]),
        _ms(row["ttft_s"]),
        _ms(row["tpot_s"]),
        ", ".join(f"{1e3 * each['value']:.2f}" for each in waits) or "-",
    )


def acceptance_text(row: Row) -> str:
    """An arm's acceptance length; of a run that chose when to draft, in which of its passes that was."""
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
    """The least and the greatest."""
    return f"{min(values):.2f}..{max(values):.2f}" if values else "-"


def _ms(figure: Mapping[str, float] | None) -> str:
    if figure is None:
        return "-"
    if figure["low"] is None:
        return f"{1e3 * figure['value']:.3f}"
    return f"{1e3 * figure['value']:.3f} ({1e3 * figure['low']:.3f}..{1e3 * figure['high']:.3f})"


def estimate_text(figure: Mapping[str, float | None] | None) -> str:
    """A figure with its interval, as every table shows it."""
    if figure is not None and figure["low"] is None:
        return f"{figure['value']:.2f}"
    return "-" if figure is None else f"{figure['value']:.2f} ({figure['low']:.2f}..{figure['high']:.2f})"


def _rates(rates: Sequence[Mapping[str, float] | None]) -> str:
    return " ".join("-" if each is None else f"{each['value']:.2f}".removeprefix("0") for each in rates)


def _of_tried(row: Row) -> list[Mapping[str, float] | None]:
    """Rates per position; none of a position at which no draft was ever checked."""
    pairs = zip(row["rate_per_position"], row["conditional_rate"], strict=True)
    return [rate if given is not None else None for rate, given in pairs]


def _slug(label: str) -> str:
    """A file's name for it: told apart by a few digits where it holds more than plain letters."""
    plain = re.sub(r"[^a-z0-9]+", "_", label.lower()).strip("_")
    return plain if label.isascii() and label == label.lower() else f"{plain}_{zlib.crc32(label.encode()):08x}"
