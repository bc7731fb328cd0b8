"""Messages about a training: its recipe, memorised data, a weak drafter and what to try next."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafter.train.fill import SHORT_STEPS
from drafter.train.folder import EVALUATION, HELD_OUT, best_held_out
from drafter.train.recipe import Recipe
from drafter.train.shards import Document
from drafter.trained import DRAFTER
from drafter.vocabulary import Coverage
from peagle.workflows.training_data import answer_tokens

RISEN = 1.02  # a held-out loss has risen if it is above this many times the best one
MEMORISED_HITS = 0.2  # data is memorised if the share of right first drafts exceeds the held-out one by this
WEAK_ACCEPTANCE = 2
FEW_EPOCHS = 2  # a training of fewer lacks steps rather than prompts


def recipe_in_words(recipe: Recipe, typed: Recipe, steps: int, *, init: bool) -> str:
    """Describe the optimizer's rates and the reason for them. typed: the recipe before it was filled."""
    if typed.optimizer or typed.learning_rate:
        why = "as given"
    elif init:
        why = "low, to keep what --init knows; --optimizer muon learns faster"
    elif steps < SHORT_STEPS:
        why = f"for a short training, of fewer than {SHORT_STEPS:,} steps"
    else:
        why = f"the paper's, for {SHORT_STEPS:,} steps and more"
    return f"{recipe.describe()}: {why}"


def epochs_in_words(epochs: Sequence[float]) -> str:
    """Format the epochs of each part of the data. Example: 2.4 and 0.6 epochs."""
    return f"{' and '.join(f'{count:.1f}' for count in epochs)} epochs"


def share(value: float) -> str:
    """Format a share with two digits. Example: .57."""
    return f"{value:.2f}".removeprefix("0")


def memorised_data(log: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a warning about a drafter that memorises its data, or None.

    Its loss rises on held-out documents and falls in training, or its drafts are right far more often in training.
    """
    measured, best = [line for line in log if HELD_OUT in line], best_held_out(log)
    trained = {line["step"]: line for line in log if "loss" in line}
    if best is None or measured[-1]["step"] not in trained:
        return None
    last, now = measured[-1], trained[measured[-1]["step"]]
    then = trained.get(best["step"], now)  # step 0 has no loss in training
    in_training, held_out = now["hits_by_depth"][0], last[HELD_OUT]["hits_by_depth"][0]
    rises = last[HELD_OUT]["loss"] > RISEN * best[HELD_OUT]["loss"] and now["loss"] < then["loss"]
    if not rises and in_training - held_out < MEMORISED_HITS:
        return None
    return (
        f"the drafter memorises its data: at step {last['step']}, after {epochs_in_words(now['epochs'])}, the first "
        f"draft is right in {share(in_training)} of the places there and in {share(held_out)} of held-out ones (best "
        f"step: {best['step']}); more prompts help more than more steps"
    )


def no_gain(log: Sequence[Mapping[str, Any]], init: str | None) -> str | None:
    """Return a warning about a training whose best step on held-out documents is its start, --init; else None."""
    best = best_held_out(log)
    if best is None or best["step"]:
        return None
    return (
        f"no step is better on held-out documents than the start, --init {init}, so the drafter is that one; next try "
        "more prompts like those you serve (peagle data), or a lower --learning-rate"
    )


def weak_drafter(log: Sequence[Mapping[str, Any]], out: Path, *, init: bool) -> str | None:
    """Return a warning about low acceptance with the next things to try, or None."""
    evaluated = [line[EVALUATION]["acceptance_length"] for line in log if EVALUATION in line]
    trained = [line for line in log if "loss" in line]
    best = best_held_out(log)
    if evaluated and evaluated[-1] is not None:
        length, figure = evaluated[-1], f"the acceptance length is {evaluated[-1]:.2f}"
    elif trained:
        hits = trained[-1]["hits_by_depth"] if best is None else best[HELD_OUT]["hits_by_depth"]
        length = 1 + float(np.cumprod(hits).sum())
        figure = f"the first draft is right in {share(hits[0])} of the places"
    else:
        return None
    if length >= WEAK_ACCEPTANCE:
        return None
    prompts, minutes = "more prompts (peagle data)", f"more minutes (--out {out} --resume --minutes N)"
    epochs = max(trained[-1]["epochs"]) if trained else 0.0
    tries = [minutes, prompts] if epochs < FEW_EPOCHS else [prompts, minutes]
    if memorised_data(log):
        tries.remove(minutes)
    if not init:
        tries.append("--init with a trained drafter")
    tries.append(f"peagle parity --drafter {out / DRAFTER}, which looks for other causes")
    return f"{figure}, and drafting gains little below {WEAK_ACCEPTANCE}; next try {', '.join(tries)}"


def coverage_in_words(documents: Sequence[Document], token_ids: np.ndarray, measured: Coverage) -> str:
    """Describe a draft vocabulary. Example: 512 tokens, 12 of which no answer holds: ..."""
    absent = int(np.sum(~np.isin(token_ids, np.concatenate(list(answer_tokens(documents))))))
    lacking = f", {absent:,} of which no answer holds" if absent else ""
    return f"{len(token_ids):,} tokens{lacking}: {measured.describe()}"
