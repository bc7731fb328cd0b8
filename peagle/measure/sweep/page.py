"""Lay out the pages of sweeps as blocks of peagle.measure.pages."""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from peagle.measure.metrics import figure_text
from peagle.measure.pages import Block, Picture, Table, heading
from peagle.measure.sweep import charts
from peagle.measure.sweep.compare import Difference
from peagle.measure.sweep.figures import FEWEST, SLOWER, best, sure
from peagle.measure.sweep.folder import Folder
from peagle.measure.sweep.plan import AUTO, PROFILED, Plan, Setting, short_names
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


ACCEPTANCE = "Acceptance length over K; hollow markers: without looping outputs."
SHORTEST = ("K", "acceptance length", "speed-up", "c(K)", "tok/s", "outputs equal to plain")  # of FIGURES
NAMED = ("peagle", "jax", "jaxlib")  # packages whose versions a page names
FORMULAS = (
    "Acceptance length: 1 + accepted / steps, over all steps that verified drafts; mean of requests: the same for each "
    "request, averaged. Per position: steps that accepted this draft / all steps; given those before: / steps "
    "that verified it and accepted all before it. tok/s: (tokens - 1) / (time of the last - time of the first token). "
    "Speed-up: over plain decoding of the same requests in the same repeats, pooled, and the median of requests. "
    "c(K): the time of a pass in passes of plain decoding; tokens a pass: tokens after the first / passes; speed-up = "
    "tokens a pass / c(K). Drafting, verifying and the rest (accepting, the runtime, the host): by their shares in up "
    f"to {PROFILED} conversations under the profiler. v(T): a pass of the target over T = K + 1 rows, in passes over "
    "one row. ttft: time to the first token; tpot: time per token after it; itl: time between arrivals, at which "
    "several tokens may arrive together, quantiles of a request. A request loops if more than "
    f"{LOOPING_ABOVE:.0%} of its 4-grams are repeated. Slower requests: their 95 % interval over the repeats lies "
    f"wholly below {SLOWER}. Counts are of all repeats. In brackets: 95 % intervals, by bootstrap over "
    f"conversations; fewer than {FEWEST} have none."
)


BOUNDS = (
    "**What the temperature allows.** However good a drafter is, its guess survives only as often as the target itself "
    "says that token. p is the target's distribution at a place, q the drafter's. Best token: the mean of p(the "
    "drafter's most likely token), which is how often that is accepted. Sampled drafts: the mean of sum min(p, q), the "
    "most that any rule allows drafts drawn from q. Best guess: the mean of max p; no drafter's single guess survives "
    "more often, and only what lies between the best token and this can be trained away. Means over the places whose "
    "draft was verified after all before it were accepted; lengths: 1 + v1 + v1 v2 + ..., v the mean of each draft; "
    "first draft: v1."
)


LOADS = (
    "Many requests at once: all requests of a repetition are added together and wait for a slot; one that ends is "
    "replaced at the next dispatch; at the end fewer requests are left than slots. Total tok/s: tokens after each "
    "request's first / the time in which at least one was decoding. Over plain decoding: of as many at once, in the "
    "same repetitions, in which arms run in turns; least..greatest: of single repetitions. ttft counts from the moment "
    "the requests were added, so it includes the wait for a slot. Requests that are decoded together share the time, "
    f"so intervals of times are by bootstrap over repetitions, and fewer than {FEWEST} have none; intervals of "
    "acceptance length are over conversations."
)


def run_blocks(folder: Folder, rows: Sequence[Row], loads: Sequence[Row] = ()) -> list[Block]:
    """Lay out the page of one run. `loads`: the figures of many requests at once."""
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
    """Lay out the summary of one run: a table for every setting, and two pictures of the first."""
    plan = folder.plan
    shown = ("_speedup", "_concurrency" if loads else "_cycle")
    blocks: list[Block] = [heading(TITLE, 1), *_origin(folder), *_failures(folder), *_summary(plan, rows)]
    for setting in plan.settings:
        if some := _of(rows, setting):
            blocks += [*_about(setting, some), _headline(setting, some)]
            if setting == plan.settings[0]:
                figures = (block for block in _setting(plan, setting, some) if isinstance(block, Picture))
                blocks += [each for each in figures if each.name.endswith(shown)]
        for block in _loads(setting, _of(loads, setting)):
            if not isinstance(block, Picture) or setting == plan.settings[0]:
                blocks.append(block)
    return [*blocks, heading("How to read this"), FORMULAS, *_about_loads(loads)]


def arms_blocks(folder: Folder, rows: Sequence[Row]) -> Iterator[tuple[str, Table]]:
    """Yield for each setting its label and the short figures of all arms, for a terminal; then what to use."""
    for setting in folder.plan.settings:
        if some := _of(rows, setting):
            lines = (dict(zip(FIGURES, _line(setting, row), strict=True)) for row in some)
            yield setting.label, Table(SHORTEST, tuple(tuple(cells[name] for name in SHORTEST) for cells in lines))
    for block in _summary(folder.plan, rows):
        if isinstance(block, Table):
            yield "the K to use", block


def comparison_blocks(runs: Mapping[Folder, Sequence[Row]], found: Sequence[Sequence[Difference]]) -> list[Block]:
    """Lay out the page of several runs: all of them over K, and each against the first (`found`)."""
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
            slug = _slug(setting.label)
            blocks += [heading(setting.label), *_curves(series, slug), *_by_context(series, slug)]
    for folder, differences in zip(folders[1:], found, strict=True):
        blocks += [
            heading(f"{names[folder]} against {first}"),
            (
                f"{len(differences)} differences of the same requests, with 95 % bootstrap intervals. A difference is "
                "real if its interval excludes zero, as one in twenty does by chance. Speed-ups are over plain "
                "decoding of the same run; a difference of speed-ups is real only if, besides, all repeats of one run "
                "lie beyond all of the other."
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
                        "yes" if each.real else "equal" if each.equal else "undecided",
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
        f"Target {plan.target}; drafters: {', '.join(plan.drafters)}; repeats: {plan.repeats}; requests that an arm "
        f"decodes before the next arm's turn: {plan.in_a_row}; batch 1, at most {plan.max_new_tokens} new tokens, "
        f"seed {plan.seed}; options: dtype {plan.dtype or 'auto'}, experts {plan.experts}, kernels {plan.kernels}; "
        f"chat template {plan.template[:12] or 'none'}"
        + ("." if folder.finished else "; **not finished: figures are of the requests with all repeats.**")
    )
    places = list(dict.fromkeys(place_text(sitting) for sitting in sittings))
    warning = " **They differ, so times are mixed.**" if len(places) > 1 else ""
    yield f"Processes that ran it: {len(sittings)}, the first {sittings[0]['time']}: {'; '.join(places)}.{warning}"
    prompts = folder.asked()
    left_out = [] if prompts is None else prompts[1]
    for source in plan.sources:
        rows = [each for each in left_out if each.prompts == source.name and each.row is None]
        some = [each for each in left_out if each.prompts == source.name and each.row is not None]
        yield (
            f"Prompts {source.name}: layout {source.layout}, {source.num_used} of {source.num_rows} rows"
            + ("" if source.max_turns is None else f"; turns of each: at most {source.max_turns}")
            + (f"; rows without a usable prompt: {source.num_skipped}" if source.num_skipped else "")
            + (f", the first: {rows[0].why}" if rows else "")
            + f"; sha256 {source.sha256[:12]}."
            + (f" Conversations left out: {len(some)}, the first: {some[0].why}." if some else "")
        )


def place_text(sitting: Mapping[str, Any]) -> str:
    """Describe machine, library and commit of a process of a run (run.json, "sittings")."""
    device, git = sitting["device"], sitting["git"] or {}
    where = f"{sitting['cpu']}, {sitting['num_threads']} threads" if device["platform"] == "cpu" else device["kind"]
    commit = f", commit {git['commit'][:10]}{' with changes' if git['dirty'] else ''}" if git else ""
    ran = "".join(f", {name} {value}" for name, value in sitting.get("ran", {}).items())
    versions = ", ".join(f"{name} {sitting['packages'][name]}" for name in NAMED if name in sitting["packages"])
    return f"{where}{ran}; {versions}{commit}"


def _failures(folder: Folder) -> Iterator[Block]:
    for (setting, arm), why in folder.errors().items():
        yield f"**Failed:** {setting.label}, K = {folder.plan.label(arm)}: {why}"


def _summary(plan: Plan, rows: Sequence[Row]) -> Iterator[Block]:
    """Name the K to use of each setting, if one is surely faster than plain decoding, or none is faster."""
    lines = []
    for setting in plan.settings:
        chosen = best(_of(rows, setting))
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
        lines.append((setting.label, verdict, chosen["label"], *figures))
    if lines:
        yield heading("The K to use")
        yield (
            "K: tokens drafted a step. Speed-up: over plain decoding of the same requests. Acceptance length: tokens a "
            "step, the target's own one among them. In brackets: 95 % intervals. Undecided: not even the fastest is "
            "surely faster than plain decoding."
        )
        header = ("setting", "K to use", "fastest measured", "its speed-up", "its acceptance length", "without loops")
        yield Table(header, tuple(lines))


def _overview(plan: Plan, rows: Sequence[Row]) -> Iterator[Block]:
    """Draw all settings together, if there are several."""
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
    yield (
        "**Acceptance and speed.** Pooled over all requests; the columns of means and medians count each request the "
        "same. c(K): what a pass costs, in passes of plain decoding; tokens a pass / c(K) is the speed-up."
    )
    yield Table(
        FIGURES,
        tuple(_line(setting, row) for row in rows),
    )
    if all(row["draft_s"] is None for row in rows):
        yield "No steps were profiled, so the times of drafting and verifying are missing."
    yield (
        "**Times.** v(T): a pass of the target over T = K + 1 rows, in passes over one row. ttft: time to the first "
        "token; tpot: time per token after it; itl: time between arrivals of tokens, of which several may come at once."
    )
    yield Table(
        ("K", "ms a step", "draft ms", "verify ms", "rest ms", "v(T)", "ttft ms", "tpot ms", "itl ms: .5, .9, .99"),
        tuple(_times(row) for row in rows),
    )
    drafted = [row for row in fast if row["num_spec_steps"]]
    if drafted:
        yield (
            "**Drafts.** Per position: how often the first, second, ... draft is accepted, of all steps; given those "
            "before: of the steps that accepted all drafts before it."
        )
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
    yield from _bounds(drafted)
    yield from _curves(_series(plan, rows), slug)
    pictures = [
        ("cycle", "The time of a pass by parts; dots: its tokens.", charts.cycle(fast)),
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
        yield from _picture(f"{slug}_{name}", svg, caption)
    yield from _parts(fast)
    yield from _by_context(_series(plan, rows), slug)


def _bounds(rows: Sequence[Row]) -> Iterator[Block]:
    """Show beside each acceptance what the law allows at a temperature."""
    bounded = [row for row in rows if row["bounds"] is not None]
    if not bounded:
        return
    yield BOUNDS
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
    for key, name in (("by_category", "category"), ("by_bucket", "prompt tokens")):
        found = [(row, part) for row in rows for part in row[key]]
        names = list(dict.fromkeys(part["part"] for _, part in found))
        parts = sorted(found, key=lambda each: names.index(each[1]["part"]))
        if parts:
            yield f"**By {name}.**"
            header = (name, "K", "requests", "loop", "acceptance length", "speed-up", "tokens a pass", "c(K)", "v(T)")
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
    """Show the figures of many requests at once in one setting."""
    if not loads:
        return
    yield heading(f"{setting.label[:1].upper()}{setting.label[1:]}: many requests at once")
    by_label: dict[str, list[Row]] = {}
    for row in loads:
        by_label.setdefault("plain decoding" if row["k"] == 0 else f"K = {row['label']}", []).append(row)
    header = ("at once", "K", "total tok/s", "over plain decoding", "least..greatest", "acceptance length")
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
    caption = "Total tokens a second over the number of requests at once."
    yield from _picture(f"{_slug(setting.label)}_concurrency", charts.concurrency(by_label), caption)


def _about_loads(loads: Sequence[Row]) -> Iterator[Block]:
    if loads:
        yield LOADS


def _about(setting: Setting, rows: Sequence[Row]) -> Iterator[Block]:
    """Begin a setting's section with the outputs of plain decoding, its first row."""
    plain = rows[0]
    yield heading(setting.label[:1].upper() + setting.label[1:])
    yield (
        f"{plain['num_requests']} requests; of plain decoding's outputs {plain['finished_frac']:.0%} end with a stop "
        f"token, {plain['looping_frac']:.0%} loop."
    )


def _headline(setting: Setting, rows: Sequence[Row]) -> Table:
    """Make the table of the SHORT figures and of the rates by position."""
    lines = []
    for row in rows:
        cells = dict(zip(FIGURES, _line(setting, row), strict=True))
        lines.append((*(cells[name] for name in SHORT), _rates(_of_tried(row)) or "-"))
    return Table((*SHORT, "per position"), tuple(lines))


def _curves(series: Mapping[str, Sequence[Row]], slug: str) -> Iterator[Block]:
    series = {title or "all": rows for title, rows in series.items() if rows}
    if series:
        yield from _picture(f"{slug}_speedup", charts.speedup(series), "Speed-up over K.")
        yield from _picture(f"{slug}_acceptance", charts.acceptance_length(series), ACCEPTANCE)


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
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["k"] != 0:
            found.setdefault(row["label"].removeprefix(str(row["k"])).removeprefix(", "), []).append(row)
    named = plan.draft_vocabs != (None,) or plan.drafter_windows != (None,)
    return {title if len(found) > 1 or named else "": some for title, some in found.items()}


def _widest(rows: Sequence[Row]) -> Row:
    """Choose the row of the largest fixed K, or of `auto` if there is no other."""
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
    """Format an arm's acceptance length; for an adaptive arm, with the share of drafted passes."""
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
    return " ".join("-" if each is None else f"{each['value']:.2f}".removeprefix("0") for each in rates)


def _of_tried(row: Row) -> list[Mapping[str, float] | None]:
    """Return rates per position; None if no step verified the draft after accepting all before it."""
    pairs = zip(row["rate_per_position"], row["conditional_rate"], strict=True)
    return [rate if given is not None else None for rate, given in pairs]


def _slug(label: str) -> str:
    """Make a file name from a label, with a checksum if the label is not plain lower-case ASCII."""
    plain = re.sub(r"[^a-z0-9]+", "_", label.lower()).strip("_")
    return plain if label.isascii() and label == label.lower() else f"{plain}_{zlib.crc32(label.encode()):08x}"
