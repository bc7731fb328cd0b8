"""Fill a recipe: decide what a person left open."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from drafter.config import DrafterConfig
from drafter.train.cod import Partition
from drafter.train.recipe import Recipe
from drafter.train.row_batches import DocumentSource
from peagle.base.errors import InputError

SHORT_STEPS = 3000  # fewer steps are a short training
MEASURED_WIDTH = 192  # hidden size of the drafter for which the rates of short trainings were measured
MUON_RATE, MUON_OTHERS = 0.008, 0.375  # measured; others: the rate of all but matrices, relative to that of matrices
ADAMW_RATE = 1e-4  # of the paper, arXiv 2602.01469
SHORT_ROW = 512  # parts of a row are not shorter than this many tokens
BLOCKS_FRAC = 1 / 6  # blocks of a row per token, for DFlash; in its paper 512 blocks in 3072 tokens
DRAFT_DECAY = ((7, 4.0), (9, 5.0), (math.inf, 7.0))  # (most drafts of a block, decay) for blocks of 8, 10 and 16 there
ROOM_QUANTILE = 0.75  # the share of rows whose trained tokens all have room in the program's shapes
EDGE = 2  # a chain begins up to this many tokens before the first token that it predicts


def fill(
    recipe: Recipe, config: DrafterConfig, sources: Sequence[DocumentSource], steps: int, *, from_trained: bool
) -> Recipe:
    """Decide every value by the drafter, the data and the number of steps; what is typed stays.

    from_trained: take low rates, which preserve a trained drafter. Raises InputError for values that do not fit the
    drafter.
    """
    recipe = _with_parts(_with_blocks(recipe, config), config)
    return dataclasses.replace(_with_rates(recipe, config, steps, from_trained), room=_room(recipe, sources))


def _with_blocks(recipe: Recipe, config: DrafterConfig) -> Recipe:
    if config.block_drafts is None:
        if recipe.blocks is not None:
            raise InputError(f"blocks is given, and a {config.kind} drafter has none; leave it out", "blocks")
        return recipe
    if recipe.depth != config.block_drafts:
        raise InputError(
            f"depth is {recipe.depth}, and a block of the drafter has {config.block_drafts} drafts; expected the same",
            "depth",
        )
    if recipe.depth < 2:
        raise InputError("depth is 1; expected 2 or more, the drafts of a DFlash drafter's block", "depth")
    decay = next(decay for most, decay in DRAFT_DECAY if recipe.depth <= most)
    blocks = recipe.blocks or max(1, round(BLOCKS_FRAC * recipe.width))
    return dataclasses.replace(recipe, blocks=blocks, draft_decay=decay)


def _with_parts(recipe: Recipe, config: DrafterConfig) -> Recipe:
    """Cut rows so that a part takes the memory of a short row, if every layer has a window."""
    if config.receptive_field is None:
        return dataclasses.replace(recipe, parts=recipe.parts or 1)
    if recipe.parts is not None and recipe.width % recipe.parts:
        raise InputError(
            f"parts is {recipe.parts}, and does not divide the {recipe.width} tokens of --width; expected parts of "
            "equal length, since the drafter has a window",
            "parts",
        )
    most = max(1, recipe.width // max(SHORT_ROW, config.receptive_field))
    parts = recipe.parts or max(n for n in range(1, most + 1) if recipe.width % n == 0)
    return dataclasses.replace(recipe, parts=parts)


def _with_rates(recipe: Recipe, config: DrafterConfig, steps: int, from_trained: bool) -> Recipe:
    """Choose the optimizer by the number of steps, and its rates.

    Muon's rates are scaled for wider drafters as in arXiv 2203.03466: a matrix's relative change per step (muon) and
    the change of a layer's output (Adam) stay the same. A rate without an optimizer is adamw's.
    """
    name = recipe.optimizer
    if name is None:
        slow = recipe.learning_rate is not None or from_trained or steps >= SHORT_STEPS
        name = "adamw" if slow else "muon"
    if name == "adamw":
        return dataclasses.replace(recipe, optimizer=name, learning_rate=recipe.learning_rate or ADAMW_RATE)
    scale = min(1.0, MEASURED_WIDTH / config.hidden_size)
    rate = recipe.learning_rate or MUON_RATE * math.sqrt(scale)
    others = MUON_OTHERS * math.sqrt(scale) * rate
    return dataclasses.replace(
        recipe, optimizer=name, learning_rate=rate, other_rate=others, warmup_frac=0.02, decay_frac=0.6
    )


def _room(recipe: Recipe, sources: Sequence[DocumentSource]) -> tuple[tuple[int, ...], ...]:
    """Return the room for chains, so that it suffices for most rows; those of fuller rows are sampled."""
    partition = Partition.of(recipe)
    if recipe.blocks is not None:
        return partition.block_counts(recipe.depth, recipe.blocks)
    ends = np.asarray(partition.ends)
    in_row, in_part = [], []
    for row in (row for source in sources for row in source.rows):
        trained = np.flatnonzero(np.concatenate([document.trained for document in row.documents]))
        in_row.append(len(trained))
        in_part.append(np.bincount(np.searchsorted(ends, trained, side="right"), minlength=len(ends)).max())
    most = min(recipe.width, max(2, int(np.quantile(in_row, ROOM_QUANTILE))))
    return partition.counts(recipe, most, min(most, int(np.quantile(in_part, ROOM_QUANTILE)) + EDGE))
