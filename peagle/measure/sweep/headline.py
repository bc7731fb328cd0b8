"""Say in sentences what a sweep measured: the K to use, its speed-up, and what to know before relying on it.

    for line in headlines(folder, rows):
        print(line)  # K = 3: 1.19x plain decoding (95 %: 1.14 to 1.24), identical output

All texts are plain, without markup, for a terminal as for a page.
"""

import dataclasses
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from peagle.checkpoints import WEIGHTLESS
from peagle.config import MAX_NUM_DRAFTS
from peagle.measure.sweep.compare import Difference
from peagle.measure.sweep.figures import FEWEST, SLOWER, best, sure
from peagle.measure.sweep.folder import Folder, SweepRequest
from peagle.measure.sweep.plan import AUTO, PLAIN, Plan, Setting, short_names
from peagle.ops.files import printable

Row = Mapping[str, Any]  # the figures of one variant in one workload, as JSON
Figure = Mapping[str, float | None]
PLAINLY = "plain decoding"
NAMED = ("peagle", "jax", "jaxlib")  # packages whose versions a page names
MANY = 3  # drafters that a title still names


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The fastest variant with a drafter in one workload; None if no speed-up is known, and `why_none` says why."""

    workload: Setting
    fastest: Row | None
    why_none: str = ""

    @property
    def gains(self) -> bool:
        """Whether it is faster than plain decoding, surely or not."""
        return self.fastest is not None and self.fastest["speedup"]["value"] > 1

    @property
    def sure(self) -> bool:
        return self.fastest is not None and sure(self.fastest)


def title(folder: Folder) -> str:
    """Name target, drafters and date."""
    return f"{subject(folder.plan)}, {date(folder)}"


def subject(plan: Plan) -> str:
    """Name target and drafters."""
    (target,) = short_names([plan.target])
    drafters = short_names(plan.drafters)
    if len(drafters) > MANY:
        return f"Speculative decoding of {target} with {len(drafters)} drafters"
    return f"Speculative decoding of {target} with drafter{'s' * (len(drafters) > 1)} {listed(drafters)}"


def date(folder: Folder) -> str:
    """Return the day on which the run began."""
    return str(folder.record["sittings"][0]["time"])[:10]


def headlines(folder: Folder, rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each workload, which it names if there are several. `rows`: of figures.rows."""
    judged = verdicts(folder, rows)
    return [f"{verdict.workload.label}: " * (len(judged) > 1) + sentence(folder.plan, verdict) for verdict in judged]


def verdicts(folder: Folder, rows: Sequence[Row]) -> list[Verdict]:
    """Find the fastest variant of each workload, in the plan's order."""
    return [_verdict(folder, workload, of_workload(rows, workload)) for workload in folder.plan.settings]


def of_workload(rows: Sequence[Row], workload: Setting) -> list[Row]:
    """Pick a workload's rows."""
    return [row for row in rows if Setting(row["prompts"], row["raw"], row["temperature"]) == workload]


def _verdict(folder: Folder, workload: Setting, rows: Sequence[Row]) -> Verdict:
    drafting = [row for row in rows if row["k"] != 0]
    fastest = best(drafting)
    return Verdict(workload, fastest, "" if fastest is not None else _why_none(folder, workload, drafting))


def _why_none(folder: Folder, workload: Setting, drafting: Sequence[Row]) -> str:
    """Say why a workload has no speed-up."""
    failed = {variant: why for (where, variant), why in folder.errors().items() if where == workload}
    if PLAIN in failed:
        return f"no speed-up is known, because {PLAINLY} failed: {failed[PLAIN]}"
    if failed and not drafting:
        variant, why = next(iter(failed.items()))
        return f"no K was measured: K = {folder.plan.label(variant)} failed: {why}"
    if folder.asked() is not None and not _requests(folder, workload):
        return "nothing was decoded, because every prompt was left out"
    if not drafting:
        return f"no speed-up is known yet: no request has all its repeats with {PLAINLY} and with a K"
    if not any(row["num_spec_steps"] for row in drafting):
        return f"nothing was drafted, so every step was one of {PLAINLY}"
    return "no speed was measured, because no output has two tokens"


def sentence(plan: Plan, verdict: Verdict) -> str:
    """State a workload's result: its speed-up with the interval, and whether the outputs are plain decoding's."""
    row = verdict.fastest
    if row is None:
        return verdict.why_none
    if not verdict.gains:
        return f"no K beats {PLAINLY} here: the best, {variant_text(row['label'])}, gives {times_text(row['speedup'])}"
    text = f"{variant_text(row['label'])}: {times_text(row['speedup'], f' {PLAINLY}')}, {outputs_text(plan, row)}"
    return text if verdict.sure or row["speedup"]["low"] is None else f"{text}; not surely faster"


def variant_text(label: str) -> str:
    """Name a variant in a sentence by its label: K = 3 with DRAFTER, window 128."""
    k, _, rest = label.partition(", ")
    if k == "0":
        return PLAINLY
    return f"K = {k}" + (rest and f" with {rest}")


def times_text(figure: Figure, of: str = "") -> str:
    """Format a ratio with its interval: 1.19x (95 %: 1.14 to 1.24)."""
    return f"{figure['value']:.2f}x{of} ({interval_text(figure)})"


def interval_text(figure: Figure, form: str = ".2f") -> str:
    """Format a figure's interval."""
    if figure["low"] is None:
        return "too few prompts for an interval"
    return f"95 %: {format(figure['low'], form)} to {format(figure['high'], form)}"


def outputs_text(plan: Plan, row: Row) -> str:
    """Say whether all outputs are plain decoding's, token for token."""
    differing, total = _differing(plan, row)
    return f"{differing} of {total} outputs differ" if differing else "identical output"


def _differing(plan: Plan, row: Row) -> tuple[int, int]:
    """Count a variant's outputs: (those that differ from plain decoding's, all)."""
    total = row["num_requests"] * row.get("num_repeats", plan.repeats)
    return round((1 - row["equal_to_plain_frac"]) * total), total


def _differing_text(plan: Plan, row: Row) -> str:
    at_once = "" if row["concurrency"] is None else f" with {row['concurrency']} requests at once"
    differing, total = _differing(plan, row)
    return f"{variant_text(row['label'])}{at_once} in {differing} of {total}"


def notes(folder: Folder) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of what limits every figure of a run: it is unfinished, or a part of it failed."""
    plan = folder.plan
    if not folder.finished:
        resume = shlex.join(["peagle", "sweep", "--out", printable(str(folder.path)), "--resume"])
        yield (
            "Not finished",
            f"{resume} goes on; until then the figures are of the requests that have all their repeats",
        )
    for (workload, variant), why in folder.errors().items():
        yield "Failed", f"{workload.label}, K = {plan.label(variant)}: {why}"
    if len(dict.fromkeys(map(place_text, folder.record["sittings"]))) > 1:
        yield "Mixed times", "parts of the run were timed on different machines or versions (see the end)"


def place_text(sitting: Mapping[str, Any]) -> str:
    """Describe machine, library and commit of a process of a run (run.json, "sittings")."""
    git = sitting["git"] or {}
    commit = f", commit {git['commit'][:10]}{' with changes' if git['dirty'] else ''}" if git else ""
    ran = "".join(f", {name} {value}" for name, value in sitting.get("ran", {}).items())
    versions = ", ".join(f"{name} {sitting['packages'][name]}" for name in NAMED if name in sitting["packages"])
    return f"{machine_text(sitting)}{ran}; {versions}{commit}"


def machine_text(sitting: Mapping[str, Any]) -> str:
    """Name the machine of a process of a run."""
    device = sitting["device"]
    return f"{sitting['cpu']}, {sitting['num_threads']} threads" if device["platform"] == "cpu" else str(device["kind"])


def caveats(folder: Folder, rows: Sequence[Row], loads: Sequence[Row] = ()) -> list[tuple[str, str]]:
    """List (name, text) of what to know before relying on the headlines; only what holds for this run.

    `loads`: of concurrency.rows.
    """
    plan, judged = folder.plan, verdicts(folder, rows)
    known = [(verdict.workload, verdict.fastest) for verdict in judged if verdict.fastest is not None]
    if not known:
        return []
    several = len(judged) > 1

    def joined(parts: Iterable[tuple[Setting, str]]) -> str:
        return "; ".join(f"{workload.label}: {text}" if several else text for workload, text in parts)

    differing = [
        (workload, _differing_text(plan, row))
        for workload in plan.settings
        for row in of_workload([*rows, *loads], workload)
        if _differing(plan, row)[0]
    ]
    gaining = [
        (verdict.workload, verdict.fastest) for verdict in judged if verdict.fastest is not None and verdict.gains
    ]
    looping = [(workload, _without_loops(row)) for workload, row in gaining if row["looping_frac"]]
    slower = [
        (workload, f"{row['num_slower']} of {row['num_compared']} requests")
        for workload, row in gaining
        if row["num_slower"]
    ]
    few = [
        (workload, f"{prompts} prompt{'s' * (prompts > 1)}")
        for workload, row in known
        if row["speedup"]["low"] is None and (prompts := _num_prompts(folder, workload, row)) < FEWEST
    ]
    largest = [
        (workload, f"{variant_text(row['label'])} is the largest K measured")
        for workload, row in gaining
        if row["k"] == max((k for k in plan.ks if k != AUTO), default=None) and row["k"] < MAX_NUM_DRAFTS
    ]
    drafters = [(verdict.workload, _drafters(plan, of_workload(rows, verdict.workload))) for verdict in judged]
    temperatures = sorted({workload.temperature for workload, _ in known})
    sampled = listed([f"{temperature:g}" for temperature in temperatures])
    texts = {
        "Outputs that differ": differing
        and f"these are not {PLAINLY}'s token for token: {joined(differing)}. {_why_differing(folder)}",
        "Outputs that loop": looping and f"repeated text is easy to draft, so it flatters a drafter. {joined(looping)}",
        "Slower requests": slower
        and f"surely slower than {PLAINLY} (their 95 % interval lies below {SLOWER:g}x): {joined(slower)}",
        "Few prompts": few and f"{joined(few)}; an interval needs {FEWEST} or more (--num-prompts)",
        "A larger K": largest and f"{joined(largest)}, so a larger one (-k) may be faster still",
        "Raw prompts": all(workload.raw for workload, _ in known)
        and "they were decoded without the chat template; drafters are mostly trained on chats, so measure "
        "--render chat before you judge this one",
        "Sampled": temperatures[0] > 0
        and f"all was sampled at temperature {sampled}, which accepts fewer drafts than greedy decoding: measure "
        "--temperature 0 for greedy requests",
        "Several drafters": len(plan.drafters) > 1 and joined((workload, text) for workload, text in drafters if text),
    }
    return [(name, text) for name, text in texts.items() if text]


def _without_loops(row: Row) -> str:
    """Say how many outputs loop, and what is left of the speed-up without them."""
    text = f"{percent(row['looping_frac'])} of the outputs loop"
    calm = row["without_loops"]["speedup"]
    return text if calm is None else f"{text}, and without them {variant_text(row['label'])} gives {times_text(calm)}"


def _why_differing(folder: Folder) -> str:
    kernels = {
        str(sitting.get("ran", {}).get("kernels", "")).partition(",")[0] for sitting in folder.record["sittings"]
    }
    if kernels == {"native"}:
        return "The native kernels must not do this: please report it"
    return "Without the native kernels a pass over several rows may round a near-tie the other way"


def _num_prompts(folder: Folder, workload: Setting, row: Row) -> int:
    """Count the conversations behind a row's figures."""
    row_of = {request.request: request.row for request in _requests(folder, workload)}
    return len({row_of[figures["request"]] for figures in row["per_request"]})


def _requests(folder: Folder, workload: Setting) -> list[SweepRequest]:
    requests, _ = folder.asked() or ([], [])
    return [request for request in requests if (request.prompts, request.raw) == (workload.prompts, workload.raw)]


def _drafters(plan: Plan, rows: Sequence[Row]) -> str:
    """Rank the drafters by their fastest variants, and say if the first is surely ahead."""
    names = dict(zip(plan.drafters, short_names(plan.drafters), strict=True))
    fastest = {name: best([row for row in rows if row["drafter"] == drafter]) for drafter, name in names.items()}
    ranked = sorted(
        ((name, row) for name, row in fastest.items() if row is not None),
        key=lambda pair: pair[1]["speedup"]["value"],
        reverse=True,
    )
    if len(ranked) < 2:
        return ""
    text = listed([f"{name} gives {times_text(row['speedup'])} with K = {row['k']}" for name, row in ranked])
    first, second = (row["speedup"] for _, row in ranked[:2])
    if first["low"] is None or second["high"] is None or first["low"] <= second["high"]:
        text += "; the intervals overlap, so neither is surely the better"
    return text


def commands(plan: Plan, verdict: Verdict, alone: bool) -> list[str]:
    """Write the commands that decode as a verdict recommends. alone: the workload's own options are among them."""
    target = ["--target", plan.target]
    for option, value, default in (
        ("--dtype", plan.dtype, None),
        ("--experts", plan.experts, "auto"),
        ("--kernels", plan.kernels, "auto"),
    ):
        target += [option, str(value)] * (value != default)
    prompt = ["--raw-prompt"] * (alone and verdict.workload.raw)
    if alone and verdict.workload.temperature > 0:
        prompt += ["--temperature", f"{verdict.workload.temperature:g}"]
    row = verdict.fastest
    if row is None or not verdict.gains:
        return [_command("generate", *target, *prompt, "your prompt")]
    drafter = ["--drafter", str(row["drafter"]), "-k", str(row["k"])]
    for option, value in (("--draft-vocab", row["draft_vocab"]), ("--drafter-window", row["drafter_window"])):
        drafter += [option, str(value)] * (value is not None)
    if plan.aux_layer_ids is not None and row["drafter"] not in WEIGHTLESS:
        drafter += ["--aux-layer-ids", ",".join(map(str, plan.aux_layer_ids))]
    return [
        _command("speculate", *target, *drafter, *prompt, "your prompt"),
        _command("serve", *target, *drafter),
    ]


def _command(*arguments: str) -> str:
    return printable(shlex.join(["peagle", *arguments]))


def compared(differences: Sequence[Difference], first: str, second: str) -> list[str]:
    """Return a sentence for each workload of two runs: if the fastest K of both is faster in the second."""
    by_workload: dict[Setting, list[Difference]] = {}
    for difference in differences:
        by_workload.setdefault(difference.setting, []).append(difference)
    return [
        f"{workload.label}: " * (len(by_workload) > 1) + _compared(own, first, second)
        for workload, own in by_workload.items()
    ]


def _compared(differences: Sequence[Difference], first: str, second: str) -> str:
    speeds = [difference for difference in differences if difference.factor is not None]
    if not speeds:
        return "no speed-ups to compare, because no request was timed in both runs"
    fastest = max(speeds, key=lambda difference: max(difference.first, difference.second))
    factor = dataclasses.asdict(fastest.factor)  # type: ignore[arg-type]
    name = variant_text(fastest.label)
    where = f"in {second} than in {first}"
    if not fastest.real:
        text = f"{name} is not surely faster or slower {where}: {times_text(factor)}"
    elif factor["value"] > 1:
        text = f"{name} is {factor['value']:.2f}x faster {where} ({interval_text(factor)})"
    else:
        text = f"{name} is slower {where}: {times_text(factor)}"
    lengths = [length for length in differences if length.label == fastest.label and length.factor is None]
    return "; ".join([text, *(_lengths(length, first, second) for length in lengths)])


def _lengths(length: Difference, first: str, second: str) -> str:
    if length.equal:
        return f"acceptance length {length.first:.2f} in both"
    change = dataclasses.asdict(length.difference)
    return (
        f"acceptance length {length.first:.2f} in {first}, {length.second:.2f} in {second} "
        f"({change['value']:+.2f}; {interval_text(change, '+.2f')})"
    )


def percent(share: float) -> str:
    """Format a share for a sentence."""
    return f"{100 * share:.0f} %"


def listed(texts: Sequence[str]) -> str:
    """Join texts as a sentence does: a, b and c."""
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
