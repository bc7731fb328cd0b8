"""Plot a training's log."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafter.train.folder import HELD_OUT
from peagle.base.errors import InputWarning
from peagle.base.files import reason_of, write_text_whole
from peagle.measure.charts import can_draw, svg
from peagle.workflows.export import CURVE

FEW_POINTS = 20  # below this many, a line also shows its points
WIDTH, HEIGHT = 6.4, 2.6  # inches of a panel
DEPTHS = ("#440154", "#2c718e", "#2fb47c")  # colours from the first depth to the last; the first stands out most


def draw(log: Sequence[Mapping[str, Any]], out: Path) -> str:
    """Plot loss, correct drafts by depth, and acceptance length to out/curve.svg.

    Return its path, or the reason why there is none.
    """
    trained = [line for line in log if "loss" in line]
    evaluated = [line for line in log if "evaluation" in line]
    held_out = [line for line in log if HELD_OUT in line]
    depths = len(trained[0]["hits_by_depth"]) if trained else 0
    panels, colors = 3 if evaluated else 2, _shades(DEPTHS, max(depths, 2))

    def paint(axes: Any) -> None:
        steps, marker = [line["step"] for line in trained], "o" if len(trained) < FEW_POINTS else ""
        axes[0].plot(steps, [line["loss"] for line in trained], marker=marker, color=colors[0])
        if held_out:
            losses = [line[HELD_OUT]["loss"] for line in held_out]
            axes[0].plot([line["step"] for line in held_out], losses, marker="o", color=colors[-1])
            axes[0].legend(["training", "held out"], frameon=False)
        axes[0].set(title="Loss", ylabel="nats per row")
        for depth in range(depths):
            label = "next token" if depth == 0 else f"{depth + 1} ahead"
            hits = [line["hits_by_depth"][depth] for line in trained]
            axes[1].plot(steps, hits, marker=marker, label=label, color=colors[depth])
        axes[1].set(title="Drafts equal to the target's best token", ylabel="fraction of the positions", ylim=(0, 1))
        axes[1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small", frameon=False)
        if evaluated:
            _paint_evaluations(axes[2], evaluated, colors)
        axes[-1].set(xlabel="steps", xlim=(0, 1.02 * log[-1]["step"] if log else 1))

    drawing = svg(paint, panels=panels, size=(WIDTH, panels * HEIGHT))
    if drawing is None:
        (out / CURVE).unlink(missing_ok=True)  # that of an earlier run
        return "none" if can_draw() else "none: matplotlib is not installed (pip install matplotlib)"
    try:
        write_text_whole(out / CURVE, drawing)
    except OSError as error:
        warnings.warn(f"{out / CURVE} cannot be written: {reason_of(error)}", InputWarning, stacklevel=2)
        return "none"
    return str(out / CURVE)


def _paint_evaluations(axis: Any, evaluated: Sequence[Mapping[str, Any]], colors: Sequence[str]) -> None:
    lines = (
        ("acceptance_length", "greedy", colors[0], "-"),
        ("acceptance_length_without_loops", "without loops", colors[-1], "-"),
        ("acceptance_length_at_temperature_1", "temperature 1", colors[0], ":"),
    )
    for key, label, color, style in lines:
        known = [line["evaluation"] for line in evaluated if line["evaluation"][key] is not None]
        if known:
            known.sort(key=lambda figures: figures["step"])  # the last one may be of an earlier step, the best
            lengths = [figures[key] for figures in known]
            axis.plot([figures["step"] for figures in known], lengths, style, marker="o", label=label, color=color)
    most = 1 + evaluated[-1]["evaluation"]["num_speculative_tokens"]
    axis.set(title="Acceptance length on held-out prompts", ylabel=f"tokens per step, at most {most}", ylim=(1, most))
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small", frameon=False)


def _shades(colors: Sequence[str], count: int) -> list[str]:
    """Interpolate `count` colours in equal steps."""
    channels = np.array([[int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in colors])
    steps = np.linspace(0, len(colors) - 1, count)
    blended = np.stack([np.interp(steps, range(len(colors)), channel) for channel in channels.T], axis=1)
    return [f"#{''.join(f'{round(float(value)):02x}' for value in color)}" for color in blended]
