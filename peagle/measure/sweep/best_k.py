"""Choose the K of `-k auto` by a sweep's figures of many requests at once, and write it beside the drafter."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from peagle.checkpoints import drafter_folder
from peagle.engine.widths import OFF, WINDOW_KEY, WidthTable, widths_file, write_widths
from peagle.measure.sweep.figures import Row, alone, concurrent
from peagle.measure.sweep.headline import place_text
from peagle.measure.sweep.plan import AUTO, Plan
from peagle.measure.sweep.store import Folder
from peagle.ops.errors import InputError

RULE = (
    "at each number of active requests, the K of the highest total tokens a second, by the median over greedy "
    "workloads and repetitions of the ratio to plain decoding of as many requests at once; 0 if that median is not "
    "above 1; requests with a temperature draft if one of them gains by some K in workloads with a temperature"
)


def ratios(rows: Iterable[Row]) -> dict[int, dict[int, float]]:
    """Compute median ratios to plain decoding over workloads and repeats: {slots: {K: ratio}}.

    Only for fixed K that succeeded in all workloads.
    """
    timed = [row for row in concurrent(rows) if row.speedup_repeats]
    medians: dict[int, dict[int, float]] = {}
    for slots in dict.fromkeys(row.concurrency for row in timed):
        own = [row for row in timed if row.concurrency == slots]
        num_workloads = sum(row.k == 0 for row in own)
        for k in dict.fromkeys(row.k for row in own):
            speedups = [row.speedup_repeats for row in own if row.k == k]
            if slots and k and k != AUTO and len(speedups) == num_workloads:
                medians.setdefault(slots, {})[k] = float(np.median(np.concatenate(speedups)))
    return medians


def best_table(rows: Sequence[Row]) -> WidthTable | None:
    """Choose the drafts to make by RULE. None without figures of one request by some K.

    If all workloads have a temperature, the drafts are theirs; if none has, requests with one draft, too.
    """
    greedy, sampled = (ratios(row for row in rows if (row.workload.temperature > 0) == hot) for hot in (False, True))
    by_slots = greedy or sampled
    if 1 not in by_slots:
        return None
    best = {slots: max(by_k, key=lambda k: by_k[k]) for slots, by_k in by_slots.items()}
    drafts = {slots: k if by_slots[slots][k] > 1 else 0 for slots, k in best.items()}
    return WidthTable(drafts, sampled=1 not in sampled or max(sampled[1].values()) > 1)


def file_for(plan: Plan, path: Path) -> Path:
    """Return the file that the table goes to. Raises InputError if the plan gives none, or `path` cannot be written."""
    if 1 not in plan.concurrencies:
        raise InputError(
            "--write-widths needs figures of one request, too; give --concurrency 1 and others, as 1,2,4,8"
        )
    if all(k == AUTO for k in plan.ks):
        raise InputError(
            "--write-widths chooses among numbers of drafts, and -k names auto alone; give some, as -k 1-4"
        )
    if any(len(choices) > 1 for choices in (plan.drafters, plan.draft_vocabs, plan.drafter_windows)):
        raise InputError(
            "--write-widths is for one drafter with one vocabulary and one window; sweep each in a run of its own"
        )
    return widths_file(drafter_folder(path))


def write(folder: Folder, rows: Sequence[Row], file: Path) -> WidthTable:
    """Write the table, with its ratios and where it was measured. Raises InputError if there is none."""
    plan, first = folder.plan, folder.origins[0]
    table = best_table(rows)
    if table is None:
        raise InputError(f"{folder.path} holds no speed of one request by any K; resume it first")
    window = plan.drafter_windows[0]
    write_widths(
        file,
        table,
        rule=RULE,
        ratios=ratios(rows),
        **({} if window is None else {WINDOW_KEY: window if window == OFF else int(window)}),
        measured={
            "command": " ".join(first["command"]),
            "time": first["time"],
            "machine": "; ".join(dict.fromkeys(map(place_text, folder.origins))),
            "target": plan.target,
            "repeats": plan.repeats,
            "requests": sum(row.num_requests for row in alone(rows) if row.k == 0),
        },
    )
    return table
