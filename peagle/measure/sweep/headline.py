"""Write a sweep's results as sentences: the K to use, its speed-up, and caveats.

    for line in headlines(folder, rows):
        print(line)  # K = 3: 1.19x plain decoding (95 %: 1.14 to 1.24), identical output

All texts are plain, without markup, for terminals and pages.
"""

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from peagle.checkpoints import WEIGHTLESS
from peagle.config import MAX_NUM_DRAFTS
from peagle.measure.estimates import FEWEST, Estimate
from peagle.measure.sweep.compare import LENGTH, Difference
from peagle.measure.sweep.figures import SLOWER, Row, alone, best, of_workload, sure
from peagle.measure.sweep.plan import PLAIN, Plan, Workload, short_names
from peagle.measure.sweep.store import Folder
from peagle.ops.files import printable

PLAINLY = "plain decoding"
NAMED = ("peagle", "jax", "jaxlib")  # packages with versions on a page
MANY = 3  # the most drafters in a title


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The fastest variant with a drafter in one workload; if no speed-up is known, `why_none` is the reason."""

    workload: Workload
    fastest: Row | None
    why_none: str = ""

    @property
    def gains(self) -> bool:
        """Test whether it is faster than plain decoding, surely or not."""
        return self.fastest is not None and speedup_of(self.fastest).value > 1

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
    return str(folder.origins[0]["time"])[:10]


def headlines(folder: Folder, rows: Sequence[Row]) -> list[str]:
    """Return a sentence per workload, named if there are several. rows: of figures.rows."""
    judged = verdicts(folder, rows)
    return [f"{verdict.workload.label}: " * (len(judged) > 1) + sentence(verdict) for verdict in judged]


def verdicts(folder: Folder, rows: Sequence[Row]) -> list[Verdict]:
    """Find the fastest variant of each workload, one request at a time, in the plan's order."""
    return [_verdict(folder, workload, of_workload(alone(rows), workload)) for workload in folder.plan.workloads]


def speedup_of(row: Row) -> Estimate:
    """Return the speed-up of a row that `best` chose."""
    assert row.speedup is not None
    return row.speedup


def _verdict(folder: Folder, workload: Workload, rows: Sequence[Row]) -> Verdict:
    drafting = [row for row in rows if row.k != 0]
    fastest = best(drafting)
    return Verdict(workload, fastest, "" if fastest is not None else _why_none(folder, workload, drafting))


def _why_none(folder: Folder, workload: Workload, drafting: Sequence[Row]) -> str:
    """Say why a workload has no speed-up."""
    failed = {variant: why for (where, variant), why in folder.errors().items() if where == workload}
    if PLAIN in failed:
        return f"no speed-up is known, because {PLAINLY} failed: {failed[PLAIN]}"
    if failed and not drafting:
        variant, why = next(iter(failed.items()))
        return f"no K was measured: K = {folder.plan.label(variant)} failed: {why}"
    if folder.prompts() is not None and not folder.requests(workload):
        return "nothing was decoded, because every prompt was left out"
    if not drafting:
        return f"no speed-up is known yet: no request has all its repeats with {PLAINLY} and with a K"
    if not any(row.num_spec_steps for row in drafting):
        return f"nothing was drafted, so every step was one of {PLAINLY}"
    return "no speed was measured, because no output has two tokens"


def sentence(verdict: Verdict) -> str:
    """State a workload's speed-up with its interval, and whether outputs are plain decoding's."""
    row = verdict.fastest
    if row is None:
        return verdict.why_none
    speedup = speedup_of(row)
    if not verdict.gains:
        return f"no K beats {PLAINLY} here: the best, {variant_text(row.label)}, gives {times_text(speedup)}"
    text = f"{variant_text(row.label)}: {times_text(speedup, f' {PLAINLY}')}, {outputs_text(row)}"
    return text if verdict.sure or speedup.low is None else f"{text}; not surely faster"


def variant_text(label: str) -> str:
    """Name a variant of this label in a sentence: K = 3 with DRAFTER, window 128."""
    k, _, rest = label.partition(", ")
    if k == "0":
        return PLAINLY
    return f"K = {k}" + (rest and f" with {rest}")


def times_text(figure: Estimate, of: str = "") -> str:
    """Format a ratio with its interval: 1.19x (95 %: 1.14 to 1.24)."""
    return f"{figure.value:.2f}x{of} ({interval_text(figure)})"


def interval_text(figure: Estimate, form: str = ".2f") -> str:
    """Format a figure's interval."""
    if figure.low is None or figure.high is None:
        return "too few prompts for an interval"
    return f"95 %: {figure.low:{form}} to {figure.high:{form}}"


def outputs_text(row: Row) -> str:
    """Say whether all outputs are plain decoding's, token for token."""
    return f"{row.num_differing} of {row.num_outputs} outputs differ" if row.num_differing else "identical output"


def _differing_text(row: Row) -> str:
    at_once = "" if row.concurrency is None else f" with {row.concurrency} requests at once"
    return f"{variant_text(row.label)}{at_once} in {row.num_differing} of {row.num_outputs}"


def notes(folder: Folder) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of limits on all figures: an unfinished run, failed parts."""
    plan = folder.plan
    if not folder.finished:
        resume = shlex.join(["peagle", "sweep", "--out", printable(str(folder.path)), "--resume"])
        yield (
            "Not finished",
            f"{resume} goes on; until then the figures are of the requests that have all their repeats",
        )
    for (workload, variant), why in folder.errors().items():
        yield "Failed", f"{workload.label}, K = {plan.label(variant)}: {why}"
    if len(dict.fromkeys(map(place_text, folder.origins))) > 1:
        yield "Mixed times", "parts of the run were timed on different machines or versions (see the end)"


def place_text(origin: Mapping[str, Any]) -> str:
    """Describe machine, library and commit of a process of a run."""
    git = origin["git"] or {}
    commit = f", commit {git['commit'][:10]}{' with changes' if git['dirty'] else ''}" if git else ""
    ran = "".join(f", {name} {value}" for name, value in origin.get("ran", {}).items())
    versions = ", ".join(f"{name} {origin['packages'][name]}" for name in NAMED if name in origin["packages"])
    return f"{machine_text(origin)}{ran}; {versions}{commit}"


def machine_text(origin: Mapping[str, Any]) -> str:
    """Name the machine of a process of a run."""
    device = origin["device"]
    return f"{origin['cpu']}, {origin['num_threads']} threads" if device["platform"] == "cpu" else str(device["kind"])


def caveats(folder: Folder, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """List the caveats that hold for this run as (name, text)."""
    plan, judged = folder.plan, verdicts(folder, rows)
    known = [verdict.fastest for verdict in judged if verdict.fastest is not None]
    if not known:
        return []
    gaining = [verdict.fastest for verdict in judged if verdict.fastest is not None and verdict.gains]
    largest_k = max((k for k in plan.ks if isinstance(k, int)), default=None)
    temperatures = sorted({row.workload.temperature for row in known})

    def joined(chosen: Iterable[Row], text: Callable[[Row], str]) -> str:
        texts = [(row.workload, text(row)) for row in chosen]
        return "; ".join(f"{workload.label}: {line}" if len(judged) > 1 else line for workload, line in texts if line)

    differing = joined(
        (row for workload in plan.workloads for row in of_workload(rows, workload) if row.num_differing),
        _differing_text,
    )
    looping = joined((row for row in gaining if row.looping_frac), _without_loops)
    slower = joined(
        (row for row in gaining if row.num_slower), lambda row: f"{row.num_slower} of {row.num_compared} requests"
    )
    few = joined(
        (row for row in known if speedup_of(row).low is None and _num_prompts(folder, row) < FEWEST),
        lambda row: counted(_num_prompts(folder, row), "prompt"),
    )
    largest = joined(
        (row for row in gaining if row.k == largest_k and row.k < MAX_NUM_DRAFTS),
        lambda row: f"{variant_text(row.label)} is the largest K measured",
    )
    drafters = joined(known, lambda row: _drafters(plan, of_workload(alone(rows), row.workload)))
    texts = {
        "Outputs that differ": differing
        and f"these are not {PLAINLY}'s token for token: {differing}. {_why_differing(folder)}",
        "Outputs that loop": looping and f"repeated text is easy to draft, so it flatters a drafter. {looping}",
        "Slower requests": slower
        and f"surely slower than {PLAINLY} (their 95 % interval lies below {SLOWER:g}x): {slower}",
        "Few prompts": few and f"{few}; an interval needs {FEWEST} or more (--num-prompts)",
        "A larger K": largest and f"{largest}, so a larger one (-k) may be faster still",
        "Raw prompts": all(row.workload.raw for row in known)
        and "they were decoded without the chat template; drafters are mostly trained on chats, so measure "
        "--render chat before you judge this one",
        "Sampled": temperatures[0] > 0
        and f"all was sampled at temperature {listed([f'{t:g}' for t in temperatures])}, which accepts fewer drafts "
        "than greedy decoding: measure --temperature 0 for greedy requests",
        "Several drafters": len(plan.drafters) > 1 and drafters,
    }
    return [(name, text) for name, text in texts.items() if text]


def _without_loops(row: Row) -> str:
    """State the share of looping outputs, and the speed-up without them."""
    text = f"{percent(row.looping_frac)} of the outputs loop"
    calm = row.without_loops.speedup
    return text if calm is None else f"{text}, and without them {variant_text(row.label)} gives {times_text(calm)}"


def _why_differing(folder: Folder) -> str:
    kernels = {str(origin.get("ran", {}).get("kernels", "")).partition(",")[0] for origin in folder.origins}
    if kernels == {"native"}:
        return "The native kernels must not do this: please report it"
    return "Without the native kernels a pass over several rows may round a near-tie the other way"


def _num_prompts(folder: Folder, row: Row) -> int:
    """Count the conversations behind a row's figures."""
    conversation_of = {request.request: request.row for request in folder.requests(row.workload)}
    return len({conversation_of[figures.request] for figures in row.per_request})


def _drafters(plan: Plan, rows: Sequence[Row]) -> str:
    """Rank the drafters by their fastest variants, and say whether the first is surely ahead."""
    names = dict(zip(plan.drafters, short_names(plan.drafters), strict=True))
    fastest = {name: best(row for row in rows if row.variant.drafter == drafter) for drafter, name in names.items()}
    speedups = [(speedup_of(row), name, row.k) for name, row in fastest.items() if row is not None]
    if len(speedups) < 2:
        return ""
    speedups.sort(key=lambda entry: -entry[0].value)
    text = listed([f"{name} gives {times_text(speedup)} with K = {k}" for speedup, name, k in speedups])
    first, second = (speedup for speedup, *_ in speedups[:2])
    if first.low is None or second.high is None or first.low <= second.high:
        text += "; the intervals overlap, so neither is surely the better"
    return text


def commands(plan: Plan, verdict: Verdict, alone: bool) -> list[str]:
    """Write the commands for a verdict. alone: with the options of its workload."""
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
    variant = row.variant
    drafter = ["--drafter", str(variant.drafter), "-k", str(variant.k)]
    for option, value in (("--draft-vocab", variant.draft_vocab), ("--drafter-window", variant.drafter_window)):
        drafter += [option, str(value)] * (value is not None)
    if plan.aux_layer_ids is not None and variant.drafter not in WEIGHTLESS:
        drafter += ["--aux-layer-ids", ",".join(map(str, plan.aux_layer_ids))]
    return [
        _command("speculate", *target, *drafter, *prompt, "your prompt"),
        _command("serve", *target, *drafter),
    ]


def _command(*arguments: str) -> str:
    return printable(shlex.join(["peagle", *arguments]))


def compared(differences: Sequence[Difference], first: str, second: str) -> list[str]:
    """Say for every workload of two runs whether the fastest K is faster in the second."""
    by_workload: dict[Workload, list[Difference]] = {}
    for difference in differences:
        by_workload.setdefault(difference.workload, []).append(difference)
    return [
        f"{workload.label}: " * (len(by_workload) > 1) + _compared(own, first, second)
        for workload, own in by_workload.items()
    ]


def _compared(differences: Sequence[Difference], first: str, second: str) -> str:
    speeds = [(difference, difference.factor) for difference in differences if difference.factor is not None]
    if not speeds:
        return "no speed-ups to compare, because no request was timed in both runs"
    fastest, factor = max(speeds, key=lambda pair: max(pair[0].first, pair[0].second))
    name, where = variant_text(fastest.label), f"in {second} than in {first}"
    if not fastest.real:
        text = f"{name} is not surely faster or slower {where}: {times_text(factor)}"
    elif factor.value > 1:
        text = f"{name} is {factor.value:.2f}x faster {where} ({interval_text(factor)})"
    else:
        text = f"{name} is slower {where}: {times_text(factor)}"
    lengths = [length for length in differences if (length.label, length.figure) == (fastest.label, LENGTH)]
    return "; ".join([text, *(_lengths(length, first, second) for length in lengths)])


def _lengths(length: Difference, first: str, second: str) -> str:
    if length.equal:
        return f"acceptance length {length.first:.2f} in both"
    change = length.difference
    return (
        f"acceptance length {length.first:.2f} in {first}, {length.second:.2f} in {second} "
        f"({change.value:+.2f}; {interval_text(change, '+.2f')})"
    )


def percent(share: float) -> str:
    """Format a share for a sentence."""
    return f"{100 * share:.0f} %"


def listed(texts: Sequence[str]) -> str:
    """Join texts in a sentence: a, b and c."""
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def counted(number: int, noun: str) -> str:
    """Write a number with its noun."""
    return f"{number} {noun}{'s' * (number != 1)}"
