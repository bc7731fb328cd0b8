"""Can a drafter's confidences be believed? How often drafts of a given confidence are right, before and after the
running correction that `-k auto` decides by (peagle.policy).

    python -m scripts.reliability --out RUN

Every held-out prompt is decoded with K drafts a step. A draft counts where all before it were right: what its
confidence is worth decides whether one more row is verified. The correction is learnt as in a run, step after step from
prompt to prompt, and judged on drafts that it has not seen yet.

Afterwards `--out` (which must not exist yet) holds run.json, raw.jsonl (a line per prompt: confidences, corrected ones,
and how many drafts were right, of each step), README.md and reliability.png.
"""

import argparse
import functools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import peagle
from peagle import policy
from peagle.config import SpeculationConfig
from peagle.metrics import decode
from peagle.ops.files import expect_new
from peagle.policy import Costs, Outlook
from scripts import held_out
from scripts.results import in_one_line, origin, write_run

KINDS = ("confidence", "corrected")
EDGES = np.linspace(0, 1, 11)  # of the bins of the figure
FEWEST = 20  # drafts of a bin that is drawn


@dataclass(frozen=True)
class Seen:
    """Every draft that was tried with all before it right."""

    position: np.ndarray  # 0 is the first draft of a step
    confidence: np.ndarray
    corrected: np.ndarray
    right: np.ndarray  # bool

    def of(self, chosen: np.ndarray) -> "Seen":
        return Seen(self.position[chosen], self.confidence[chosen], self.corrected[chosen], self.right[chosen])


Step = tuple[Sequence[float], int]  # confidences of the drafts, how many were right


class Replay:
    """What a run of `-k auto` would have corrected the confidences to, were all its drafts verified."""

    def __init__(self, num_drafts: int) -> None:
        self._ladder = (0, num_drafts)
        self._outlook = policy.begin(self._ladder, Costs.even(self._ladder))

    def corrected(self, steps: Sequence[Step]) -> list[list[float]]:
        """Of each step's drafts, before the step itself is learnt from."""
        found = []
        for confidence, accepted in steps:
            row = jnp.asarray([confidence], jnp.float32)
            values, self._outlook = _learn(self._outlook, row, jnp.asarray([accepted], jnp.int32), ladder=self._ladder)
            found.append(np.asarray(values)[0].tolist())
        return found


@functools.partial(jax.jit, static_argnames="ladder")
def _learn(
    outlook: Outlook, confidence: jax.Array, accepted: jax.Array, *, ladder: tuple[int, ...]
) -> tuple[jax.Array, Outlook]:
    all_of_them, active = jnp.ones((), jnp.int32), jnp.ones((1,), bool)
    learnt = policy.learn(outlook, ladder, all_of_them, all_of_them, confidence, accepted, active)
    return policy.chances(outlook, confidence), learnt


def seen(raw: Sequence[dict[str, Any]]) -> Seen:
    """The drafts of raw lines that count."""
    rows: list[tuple[int, float, float, bool]] = []
    for line in raw:
        for confidence, corrected, accepted in zip(
            line["confidence"], line["corrected"], line["num_accepted"], strict=True
        ):
            tried = min(accepted + 1, len(confidence))
            rows += [(i, confidence[i], corrected[i], i < accepted) for i in range(tried)]
    position, confidence, corrected, right = zip(*rows, strict=True)
    return Seen(np.array(position), np.array(confidence), np.array(corrected), np.array(right))


def figures(drafts: Seen) -> dict[str, Any]:
    """Of these drafts: how many, the share that was right, and for each kind of confidence its mean, its expected
    calibration error (bins of a tenth, weighted by their drafts) and its Brier score."""
    right = drafts.right.astype(float)
    found: dict[str, Any] = {"drafts": len(right), "right": float(right.mean())}
    for kind in KINDS:
        said = getattr(drafts, kind)
        error = sum(abs(part.said - part.right) * part.count for part in bins(said, drafts.right)) / len(right)
        found[kind] = {"mean": float(said.mean()), "ece": float(error), "brier": float(np.mean((said - right) ** 2))}
    return found


@dataclass(frozen=True)
class Bin:
    said: float  # mean confidence
    right: float  # share of the drafts
    count: int


def bins(said: np.ndarray, right: np.ndarray) -> Iterator[Bin]:
    """Those of EDGES that hold a draft."""
    place = np.clip(np.digitize(said, EDGES) - 1, 0, len(EDGES) - 2)
    for index in np.unique(place):
        inside = place == index
        yield Bin(float(said[inside].mean()), float(right[inside].mean()), int(inside.sum()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("-k", type=int, default=7, help="drafts of each step (default %(default)s)")
    held_out.add_options(parser)
    arguments = parser.parse_args()
    return in_one_line("reliability", lambda: measure(arguments))


def measure(arguments: argparse.Namespace) -> int:
    """Everything is checked before anything runs."""
    held_out.check(arguments)
    expect_new(arguments.out)
    pair = peagle.load(arguments.target, arguments.drafter)
    requests = held_out.asked_for(arguments, pair)
    k, _ = pair.num_drafts(arguments.k)
    engine = pair.engine(SpeculationConfig(k, 1, pair.capacity(requests)))
    replay = Replay(k)
    raw: list[dict[str, Any]] = []
    started = time.monotonic()
    for number, request in enumerate(requests, start=1):
        steps = [(d.confidence, d.num_accepted) for d in decode(engine, [request], None)[0].decisions]
        raw.append(
            {
                "request": request.index,
                "num_accepted": [accepted for _, accepted in steps],
                "confidence": [[round(value, 5) for value in confidence] for confidence, _ in steps],
                "corrected": [[round(value, 5) for value in values] for values in replay.corrected(steps)],
            }
        )
        left = (time.monotonic() - started) / number * (len(requests) - number)
        print(f"\r{number}/{len(requests)} prompts, {left:.0f} s left ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    drafts = seen(raw)
    rows = [{"position": position + 1, **figures(drafts.of(drafts.position == position))} for position in range(k)]
    record = {
        "schema": 1,
        "provenance": origin("scripts.reliability"),
        "config": held_out.described(arguments, len(requests)) | {"num_speculative_tokens": k},
        "rows": [{"position": None, **figures(drafts)}, *rows],
    }
    write_run(arguments.out, record, raw, page(record))
    draw(drafts, arguments.out / "reliability.png")
    return 0


def page(record: dict[str, Any]) -> str:
    """README.md of the run."""
    config, source = record["config"], record["provenance"]
    lines = [
        "# Can the confidences be believed?",
        "",
        f"`{source['command']}`",
        "",
        f"Target {config['target']}, drafter {config['drafter']}; {config['num_prompts']} prompts of "
        f"{config['prompts']}, greedy, K = {config['num_speculative_tokens']}, at most {config['max_new_tokens']} new "
        f"tokens; jaxlib {source['packages']['jaxlib']}; {source['time']}. Only drafts with all before them right. "
        "ECE: expected calibration error, bins of a tenth; both it and the Brier score are better when smaller.",
        "",
        "| draft | how many | right | mean confidence | ECE | Brier | corrected: mean | ECE | Brier |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in record["rows"]:
        cells = [f"{row[kind][key]:.3f}" for kind in KINDS for key in ("mean", "ece", "brier")]
        name = "all" if row["position"] is None else row["position"]
        lines.append(f"| {name} | {row['drafts']} | {row['right']:.3f} | {' | '.join(cells)} |")
    lines += [
        "",
        "Corrected is what `-k auto` decides by: each confidence moved by what drafts of its bin lately turned out to "
        "be, learnt as it goes and judged on drafts not yet learnt from.",
        "",
        "![reliability](reliability.png)",
        "",
    ]
    return "\n".join(lines)


def draw(drafts: Seen, path: Path) -> None:
    """The share of right drafts against what was said, for all drafts and for the first, second and later ones."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = {
        "all drafts": np.ones(len(drafts.right), bool),
        "first": drafts.position == 0,
        "second": drafts.position == 1,
        "third and later": drafts.position >= 2,
    }
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained", sharey=True)
    for axis, kind, title in zip(axes, KINDS, ("the drafter's confidence", "corrected as it goes"), strict=True):
        axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle=":")
        for name, chosen in groups.items():
            part = drafts.of(chosen)
            shown = [each for each in bins(getattr(part, kind), part.right) if each.count >= FEWEST]
            said, right = [each.said for each in shown], np.array([each.right for each in shown])
            spread = 1.96 * np.sqrt(right * (1 - right) / np.array([each.count for each in shown]))
            whole = name == "all drafts"
            axis.errorbar(
                said, right, spread, label=name, marker="o", markersize=5 if whole else 3, capsize=2,
                linewidth=2 if whole else 1, color="black" if whole else None, alpha=1 if whole else 0.7,
            )  # fmt: skip
        axis.set(xlabel=title, xlim=(0, 1), ylim=(0, 1))
    axes[0].set(ylabel="share of drafts that were right (bars: 95 %)")
    axes[0].legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
