"""Write a sweep's results as sentences: the K to use, its speed-up, and caveats.

    K = 3: 1.19x plain decoding (95 %: 1.14 to 1.24), identical output

Texts have no markup: they are for terminals and pages.
"""

import dataclasses
import shlex
from collections.abc import Iterator, Sequence

from peagle.base.files import printable
from peagle.config import MAX_NUM_DRAFTS
from peagle.measure.estimates import FEWEST, Estimate
from peagle.measure.provenance import origin_text
from peagle.measure.sweep.compare import Change, Difference
from peagle.measure.sweep.figures import VariantRow, alone, best, of_workload
from peagle.measure.sweep.plan import PLAIN, Plan, Workload, short_names
from peagle.measure.sweep.store import Folder

PLAINLY = "plain decoding"
MANY = 3  # the most drafters that a title names


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The fastest variant that drafts in a workload."""

    workload: Workload
    fastest: VariantRow | None  # None: no speed-up is known
    why_none: str = ""

    @property
    def gains(self) -> bool:
        """Whether it is faster than plain decoding, surely or not."""
        return self.fastest is not None and speedup_of(self.fastest).value > 1

    @property
    def sure(self) -> bool:
        """Whether it is significantly faster."""
        return self.fastest is not None and (speedup_of(self.fastest).low or 0.0) > 1


def title(folder: Folder) -> str:
    """Name target, drafters and the day on which the run began."""
    (target,), drafters = short_names([folder.plan.target]), short_names(folder.plan.drafters)
    if len(drafters) > MANY:
        named = f"{len(drafters)} drafters"
    else:
        named = f"drafter{'s' * (len(drafters) > 1)} {listed(drafters)}"
    return f"Speculative decoding of {target} with {named}, {str(folder.origins[0]['time'])[:10]}"


def headlines(folder: Folder, rows: Sequence[VariantRow]) -> list[str]:
    """Write a sentence about each workload. They begin with its name if there are several."""
    judged = verdicts(folder, rows)
    return [f"{verdict.workload.label}: " * (len(judged) > 1) + sentence(verdict) for verdict in judged]


def loads(folder: Folder, rows: Sequence[VariantRow]) -> list[tuple[str, str]]:
    """Return (load, a sentence about its fastest variant) for each number of requests at once."""
    return [
        (
            f"{workload.label}, " * (len(folder.plan.workloads) > 1) + f"{slots} at once",
            sentence(Verdict(workload, best(own))),
        )
        for workload in folder.plan.workloads
        for slots in sorted(folder.plan.concurrencies)
        if best(own := [row for row in of_workload(rows, workload) if row.concurrency == slots and row.k != 0])
    ]


def verdicts(folder: Folder, rows: Sequence[VariantRow]) -> list[Verdict]:
    """Find the fastest variant of each workload, of those that decode one request at a time."""
    judged = []
    for workload in folder.plan.workloads:
        drafting = [row for row in of_workload(alone(rows), workload) if row.k != 0]
        fastest = best(drafting)
        judged.append(Verdict(workload, fastest, "" if fastest else _why_none(folder, workload, drafting)))
    return judged


def speedup_of(row: VariantRow) -> Estimate:
    """Return the speed-up of a row that `best` chose."""
    assert row.speedup is not None
    return row.speedup


def _why_none(folder: Folder, workload: Workload, drafting: Sequence[VariantRow]) -> str:
    failed = {variant: why for (at, variant), why in folder.errors().items() if at == workload}
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
    """State the speed-up with its interval, and whether outputs equal plain decoding's."""
    row = verdict.fastest
    if row is None:
        return verdict.why_none
    speedup = speedup_of(row)
    interval = interval_text(speedup, unit="prompts" if row.concurrency is None else "repeats")
    if not verdict.gains:
        return (
            f"no K beats {PLAINLY} here: the best, {variant_text(row.label)}, gives {speedup.value:.2f}x ({interval})"
        )
    text = f"{variant_text(row.label)}: {speedup.value:.2f}x {PLAINLY} ({interval}), "
    text += f"{row.num_differing} of {row.num_outputs} outputs differ" if row.num_differing else "identical output"
    return text if verdict.sure or speedup.low is None else f"{text}; not surely faster"


def variant_text(label: str) -> str:
    """Turn a variant's label into words. Example: K = 3 with DRAFTER, window 128."""
    k, _, rest = label.partition(", ")
    return PLAINLY if k == "0" else f"K = {k}" + (rest and f" with {rest}")


def times_text(figure: Estimate) -> str:
    """Format a ratio with its interval, as 1.19x (95 %: 1.14 to 1.24)."""
    return f"{figure.value:.2f}x ({interval_text(figure)})"


def interval_text(figure: Estimate, form: str = ".2f", unit: str = "prompts") -> str:
    """Format a figure's interval. unit: what was resampled."""
    if figure.low is None or figure.high is None:
        return f"no interval with fewer than {FEWEST} {unit}"
    return f"95 %: {figure.low:{form}} to {figure.high:{form}}"


def notes(folder: Folder) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of limits on all figures: an unfinished run, failed variants, several machines."""
    plan = folder.plan
    if not folder.finished:
        resume = shlex.join(["peagle", "sweep", "--out", printable(str(folder.path)), "--resume"])
        yield (
            "Not finished",
            f"{resume} continues; until then the figures are of the requests that have all their repeats",
        )
    for (workload, variant), why in folder.errors().items():
        yield "Failed", f"{workload.label}, K = {plan.label(variant)}: {why}"
    if len(set(map(origin_text, folder.origins))) > 1:
        yield "Mixed times", "parts of the run were timed on different machines or versions (see the end)"


def caveats(folder: Folder, rows: Sequence[VariantRow]) -> list[tuple[str, str]]:
    """List the caveats of a run as (name, text)."""
    plan, judged = folder.plan, verdicts(folder, rows)
    texts: dict[str, list[str]] = {}
    for verdict in judged:
        for name, text in _caveats(plan, verdict, of_workload(rows, verdict.workload)):
            texts.setdefault(name, []).append(f"{verdict.workload.label}: " * (len(judged) > 1) + text)
    if "Outputs that differ" in texts:
        texts["Outputs that differ"].append(_why_differing(folder))
    if any(verdict.fastest for verdict in judged) and all(plan.raw):
        texts["Raw prompts"] = ["drafters are mostly trained on chats, so measure --render chat before you judge one"]
    return [(name, "; ".join(lines)) for name, lines in texts.items()]


def _caveats(plan: Plan, verdict: Verdict, rows: Sequence[VariantRow]) -> Iterator[tuple[str, str]]:
    for row in rows:
        if row.num_differing:
            load = "" if row.concurrency is None else f" with {row.concurrency} requests at once"
            differing = f"{row.num_differing} of {row.num_outputs}"
            yield "Outputs that differ", f"{variant_text(row.label)}{load} in {differing}"
    fastest = verdict.fastest
    if fastest is None or not verdict.gains:
        return
    name = variant_text(fastest.label)
    if fastest.looping_frac:
        text = f"{percent(fastest.looping_frac)} of the outputs loop, and loops are easy to draft"
        rest = fastest.without_loops.speedup
        yield "Outputs that loop", text if rest is None else f"{text}; without them {name} gives {times_text(rest)}"
    if fastest.k == max((k for k in plan.ks if isinstance(k, int)), default=0) < MAX_NUM_DRAFTS:
        yield "A larger K", f"{name} is the largest K measured, so a larger one (-k) may be faster still"
    other = best(row for row in alone(rows) if row.k != 0 and row.variant.drafter != fastest.variant.drafter)
    if other is not None and not _apart(speedup_of(fastest), speedup_of(other)):
        yield "Another drafter may be as good", f"{variant_text(other.label)} gives {times_text(speedup_of(other))}"


def _apart(higher: Estimate, lower: Estimate) -> bool:
    """Test whether two intervals do not overlap."""
    return higher.low is not None and lower.high is not None and higher.low > lower.high


def _why_differing(folder: Folder) -> str:
    kernels = {str(origin.get("ran", {}).get("kernels", "")).partition(",")[0] for origin in folder.origins}
    if kernels == {"native"}:
        return "The native kernels must not do this: please report it"
    return "Without the native kernels a pass over several rows may round a near-tie the other way"


def recommended(verdict: Verdict, where: str) -> str:
    """Recommend the fastest variant, or plain decoding."""
    row = verdict.fastest
    if row is None or not verdict.gains:
        return f"Use {PLAINLY}{where}: no drafts save time here."
    if verdict.sure:
        return f"Use {variant_text(row.label)}{where}."
    return (
        f"Try {variant_text(row.label)}{where}: it was the fastest, but not surely faster than {PLAINLY}. "
        "More prompts or repeats (--num-prompts, --repeats) would tell."
    )


def commands(plan: Plan, verdict: Verdict, for_workload: bool) -> list[str]:
    """Write the commands that a verdict recommends. for_workload: with the workload's own options."""
    target = ["--target", plan.target]
    for option, value, default in (
        ("--dtype", plan.dtype, None),
        ("--experts", plan.experts, "auto"),
    ):
        target += [option, str(value)] * (value != default)
    prompt = ["--raw-prompt"] * (for_workload and verdict.workload.raw)
    if for_workload and verdict.workload.temperature > 0:
        prompt += ["--temperature", f"{verdict.workload.temperature:g}"]
    row = verdict.fastest
    if row is None or not verdict.gains:
        return [_command("speculate", *target, "-k", "0", *prompt, "your prompt")]
    variant = row.variant
    drafter = ["--drafter", str(variant.drafter), "-k", str(variant.k)]
    for option, value in (("--draft-vocab", variant.draft_vocab), ("--drafter-window", variant.drafter_window)):
        drafter += [option, str(value)] * (value is not None)
    return [
        _command("speculate", *target, *drafter, *prompt, "your prompt"),
        _command("serve", *target, *drafter),
    ]


def _command(*arguments: str) -> str:
    return printable(shlex.join(["peagle", *arguments]))


def compared(differences: Sequence[Difference], first: str, second: str) -> list[str]:
    """Compare the fastest variant of each workload in two runs. first, second: names of the runs."""
    by_workload: dict[Workload, list[Difference]] = {}
    for difference in differences:
        by_workload.setdefault(difference.workload, []).append(difference)
    return [
        f"{workload.label}: " * (len(by_workload) > 1) + _compared(own, first, second)
        for workload, own in by_workload.items()
    ]


def _compared(differences: Sequence[Difference], first: str, second: str) -> str:
    known = [(change, difference) for difference in differences if (change := difference.speedup) is not None]
    if not known:
        return "no speed-ups to compare, because no request was timed in both runs"
    speedup, fastest = max(known, key=lambda pair: max(pair[0].first, pair[0].second))
    text = f"{variant_text(fastest.label)}: speed-up {_change_text(speedup, first, second)}"
    if (length := fastest.acceptance_length) is not None:
        text += f"; acceptance length {_change_text(length, first, second)}"
    return text


def _change_text(change: Change, first: str, second: str) -> str:
    if change.equal:
        return f"{change.first:.2f} in both"
    text = f"{change.first:.2f} in {first}, {change.second:.2f} in {second}"
    text += f" ({change.difference.value:+.2f}; {interval_text(change.difference, '+.2f')})"
    return text if change.real else f"{text}, not surely different"


def percent(share: float) -> str:
    """Format a share for a sentence."""
    return f"{100 * share:.0f} %"


def listed(texts: Sequence[str]) -> str:
    """Join texts in a sentence: a, b and c."""
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def counted(number: int, noun: str) -> str:
    """Write a number and its noun, in the plural unless it is 1."""
    return f"{number} {noun}{'s' * (number != 1)}"
