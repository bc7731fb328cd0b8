"""Count how often drafts are right by the drafter's probability of them. `-k auto` begins with these counts.

Every request is decoded once more by an adaptive engine that verifies every draft (`count_acceptance`).
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from peagle.base.errors import InputError
from peagle.config import SamplingParams
from peagle.engine.auto.speculation import OFF, WINDOW_KEY, Speculation, speculation_file, write_speculation
from peagle.engine.auto.state import MIDDLES, Counts
from peagle.engine.host.inspection import count_acceptance
from peagle.loading.checkpoints import drafter_folder
from peagle.measure.provenance import origin_text
from peagle.measure.sweep.plan import Plan
from peagle.measure.sweep.runner import Progress, SweepRun, models_of
from peagle.measure.sweep.store import Folder

KINDS = ("greedy", "sampled")
LEAST_TRIES = 8  # drafts behind a point of the picture


@dataclass(frozen=True)
class Calibration:
    """The counts of a drafter. num_drafts: the most of a step."""

    label: str
    num_drafts: int
    counts: Counts

    def to_json(self) -> dict[str, Any]:
        counts = dict(zip(KINDS, self.counts, strict=True))
        return {"label": self.label, "num_drafts": self.num_drafts, "counts": counts}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Calibration":
        """Undo `to_json`."""
        return cls(value["label"], value["num_drafts"], _counts([value["counts"][kind] for kind in KINDS]))

    def points(self, kind: str) -> list[tuple[float, float]]:
        """Return (the drafter's probability, share of right drafts) of the bins, over all positions of a step."""
        bins = np.sum(self.counts[KINDS.index(kind)], axis=0)
        return [
            (middle, float(right / tried))
            for middle, (tried, right) in zip(MIDDLES, bins, strict=True)
            if tried >= LEAST_TRIES
        ]


def calibrate(run: SweepRun, progress: Progress) -> list[Calibration]:
    """Count the acceptance of each drafter that a variant with `auto` uses."""
    plan = run.plan
    variants = {models_of(variant): variant for variant in plan.variants if not isinstance(variant.k, int)}
    work = list(itertools.product(variants.values(), run.requests.items()))
    by_label: dict[str, list[Calibration]] = {}
    for done, (variant, (workload, requests)) in enumerate(work):
        progress(done, len(work))
        if (workload, variant) in run.failed:
            continue
        sampling = SamplingParams(workload.temperature, seed=plan.seed)
        engine, num_drafts = run.counting_engine(variant)
        engine.warm_up(sampled=not sampling.greedy)
        counts = count_acceptance(engine.one, [run.request(request, sampling) for request in requests])
        label = variant.drafter or "the drafter"
        by_label.setdefault(label, []).append(Calibration(label, num_drafts, counts))
    return [_pooled(parts) for parts in by_label.values()]


def _pooled(parts: Sequence[Calibration]) -> Calibration:
    """Add up the counts of one drafter in several workloads."""
    total = np.sum([np.asarray(part.counts) for part in parts], axis=0)
    return Calibration(parts[0].label, parts[0].num_drafts, _counts(total.tolist()))


def _counts(lists: Sequence[Any]) -> Counts:
    return tuple(tuple(tuple((tried, right) for tried, right in bins) for bins in kind) for kind in lists)


def calibrations_of(folder: Folder) -> list[Calibration]:
    """Read the calibrations of a run; none before it ends, or without `auto`."""
    return [Calibration.from_json(value) for value in folder.record.get("calibrations", ())]


def file_for(plan: Plan, path: Path) -> Path:
    """Return the file of --write-widths. Raises InputError for a plan without `auto`, or with several drafters."""
    if all(isinstance(k, int) for k in plan.ks):
        raise InputError("--write-widths is for auto, and -k does not name it; add it, as -k 1-7,auto")
    if any(len(choices) > 1 for choices in (plan.drafters, plan.draft_vocabs, plan.drafter_windows)):
        raise InputError(
            "--write-widths is for one drafter with one vocabulary and one window; sweep each in a run of its own"
        )
    return speculation_file(drafter_folder(path))


def write(folder: Folder, file: Path) -> Calibration:
    """Write the counts and their origin into the file of --write-widths. Raises InputError if there are none."""
    plan, first = folder.plan, folder.origins[0]
    if not (calibrations := calibrations_of(folder)):
        raise InputError(f"{folder.path} counted no drafts of auto; resume it first")
    calibration, window = calibrations[0], plan.drafter_windows[0]
    write_speculation(
        file,
        Speculation(calibration.num_drafts, calibration.counts),
        **({} if window is None else {WINDOW_KEY: window if window == OFF else int(window)}),
        measured={
            "command": " ".join(first["command"]),
            "time": first["time"],
            "machine": "; ".join(dict.fromkeys(map(origin_text, folder.origins))),
            "target": plan.target,
        },
    )
    return calibration
