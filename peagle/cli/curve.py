"""The curve of a training, from its log."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.measure.sweep.charts import can_draw

CURVE = "curve.png"


def draw(log: Sequence[Mapping[str, Any]], out: Path) -> str:
    """Draws loss, right drafts by depth, and the engine's acceptance over the steps to out/curve.png. What is returned
    says where it is, or why there is none."""
    if not can_draw():
        return "none: matplotlib is not installed (pip install matplotlib)"
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    trained = [line for line in log if "loss" in line]
    evaluated = [line for line in log if "evaluation" in line]
    figure, axes = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    steps = [line["step"] for line in trained]
    axes[0].plot(steps, [line["loss"] for line in trained])
    axes[0].set(title="Loss", ylabel="nats a row")
    for depth in range(len(trained[0]["hits_by_depth"]) if trained else 0):
        axes[1].plot(steps, [line["hits_by_depth"][depth] for line in trained], label=str(depth))
    axes[1].set(title="Drafts that are the target's best token, by depth (teacher-forced)", ylim=(0, 1))
    axes[1].legend(ncols=2, fontsize="small")
    for key, label in (("acceptance_length", "all"), ("acceptance_length_without_loops", "without loops")):
        known = [line for line in evaluated if line["evaluation"][key] is not None]
        axes[2].plot(
            [line["step"] for line in known], [line["evaluation"][key] for line in known], marker="o", label=label
        )
    axes[2].set(
        title="Acceptance length of the engine, held-out prompts" if evaluated else "No evaluation was asked for"
    )
    if evaluated:
        axes[2].set(ylim=(1, None))
        axes[2].legend()
    for axis in axes:
        axis.set(xlabel="steps")
    figure.savefig(out / CURVE, dpi=130)
    plt.close(figure)
    return str(out / CURVE)
