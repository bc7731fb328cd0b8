"""The curve of a training, from its log."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafter.train.folder import HELD_OUT
from peagle.measure.sweep.charts import can_draw

CURVE = "curve.png"
FEW_POINTS = 20  # a line of so few is drawn with its points


def draw(log: Sequence[Mapping[str, Any]], out: Path) -> str:
    """Draw loss, right drafts by depth, and the engine's acceptance over the steps to out/curve.png.

    Return where it is, or why there is none.
    """
    if not can_draw():
        return "none: matplotlib is not installed (pip install matplotlib)"
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    trained = [line for line in log if "loss" in line]
    evaluated = [line for line in log if "evaluation" in line]
    figure, axes = plt.subplots(1, 3 if evaluated else 2, figsize=(15 if evaluated else 10, 4), layout="constrained")
    steps, marker = [line["step"] for line in trained], "o" if len(trained) < FEW_POINTS else ""
    axes[0].plot(steps, [line["loss"] for line in trained], marker=marker)
    if held_out := [line for line in log if HELD_OUT in line]:
        axes[0].plot([line["step"] for line in held_out], [line[HELD_OUT]["loss"] for line in held_out], marker="o")
        axes[0].legend(["training", "held out"])
    axes[0].set(title="Loss", ylabel="nats a row")
    depths = len(trained[0]["hits_by_depth"]) if trained else 0
    for depth in range(depths):
        color = plt.colormaps["viridis"](0.9 * depth / max(1, depths - 1))
        label = "next token" if depth == 0 else f"{depth + 1} ahead"
        hits = [line["hits_by_depth"][depth] for line in trained]
        axes[1].plot(steps, hits, marker=marker, label=label, color=color)
    axes[1].set(title="Drafts that are the target's best token", ylabel="part of the places", ylim=(0, 1))
    axes[1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    for key, label in (("acceptance_length", "all"), ("acceptance_length_without_loops", "without loops")):
        known = [line for line in evaluated if line["evaluation"][key] is not None]
        if known:
            found = [line["evaluation"][key] for line in known]
            axes[2].plot([line["step"] for line in known], found, marker="o", label=label)
    if evaluated:
        most = 1 + evaluated[-1]["evaluation"]["num_speculative_tokens"]
        axes[2].set(
            title="Acceptance length on held-out prompts", ylabel=f"tokens a step, at most {most}", ylim=(1, most)
        )
        axes[2].legend()
    for axis in axes:
        axis.set(xlabel="steps", xlim=(0, 1.02 * log[-1]["step"] if log else 1))
    figure.savefig(out / CURVE, dpi=130)
    plt.close(figure)
    return str(out / CURVE)
