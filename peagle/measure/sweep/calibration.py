"""Count how often drafts are right by the drafter's probability of them. `-k auto` begins with these counts.

Every request is decoded once more by an adaptive engine that verifies every draft (`count_acceptance`).
"""

from pathlib import Path
from typing import Any

import numpy as np

from peagle.base.errors import InputError
from peagle.config import AUTO, SamplingParams
from peagle.engine.auto.speculation import OFF, WINDOW_KEY, Speculation, speculation_file, write_speculation
from peagle.engine.host.inspection import count_acceptance
from peagle.loading.checkpoints import drafter_folder
from peagle.measure.provenance import origin_text
from peagle.measure.sweep.plan import Plan
from peagle.measure.sweep.runner import Progress, SweepRun


def file_for(plan: Plan, path: Path) -> Path:
    """Return the file of --write-widths. Raises InputError for a plan without `auto`, or with several drafters."""
    if all(isinstance(k, int) for k in plan.ks):
        raise InputError("--write-widths is for auto, and -k does not name it; add it, as -k 1-7,auto")
    if any(len(choices) > 1 for choices in (plan.drafters, plan.draft_vocabs)):
        raise InputError("--write-widths is for one drafter with one vocabulary; sweep each in a run of its own")
    return speculation_file(drafter_folder(path))


def calibrate(run: SweepRun, file: Path, progress: Progress) -> Speculation:
    """Count the acceptance of the drafter over all workloads, and write it with its origin into a file."""
    plan, origins, window = run.plan, run.folder.origins, run.plan.drafter_window
    engine, num_drafts = run.counting_engine(next(v for v in plan.variants if not isinstance(v.k, int)))
    counts: Any = 0
    for done, (workload, requests) in enumerate(run.requests.items()):
        progress(done, len(run.requests))
        sampling = SamplingParams(workload.temperature, seed=plan.seed)
        engine.warm_up(sampled=not sampling.greedy)
        counts += np.asarray(count_acceptance(engine.one, [run.request(request, sampling) for request in requests]))
    pooled = tuple(tuple(tuple((tried, right) for tried, right in bins) for bins in kind) for kind in counts.tolist())
    speculation = Speculation(num_drafts, pooled)
    write_speculation(
        file,
        speculation,
        **({} if window == AUTO else {WINDOW_KEY: window if window == OFF else int(window)}),
        measured={
            "command": " ".join(origins[0]["command"]),
            "time": origins[0]["time"],
            "machine": "; ".join(dict.fromkeys(map(origin_text, origins))),
            "target": plan.target,
        },
    )
    return speculation
