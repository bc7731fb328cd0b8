"""Decide every value of a TrainConfig, and make its optimizer."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from drafter.params import DrafterParams
from drafter.train.cod import Partition
from drafter.train.config import OptimizerName, TrainConfig
from peagle.base.flag import check_least

SHORT_STEPS = 3000  # fewer steps are a short training
MEASURED_WIDTH = 192  # hidden size of the drafter for which the rates of short trainings were measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(TrainConfig):
    """A TrainConfig with every value decided, and the number of steps.

    Only `steps` may change when a training is resumed. Every later step has the rate of a training of the new length.
    So a training of 1000 steps, resumed up to 2000, differs from one of 2000 steps: with decay_frac 1 its rate falls to
    0 at step 1000, then continues at half its peak.
    """

    steps: int
    parts: int = 1  # of a sequence; their gradients are computed one after the other (Algorithm 1)
    optimizer: OptimizerName = "adamw"
    learning_rate: float = 1e-4
    other_rate: float = 1e-4
    warmup_frac: float = 0.0025
    decay_frac: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, steps=1)

    @property
    def partition(self) -> Partition:
        return Partition.even(self.width, self.parts)


def rate_schedule(recipe: Recipe, steps: jax.Array, peak: float) -> optax.Schedule:
    """Make the learning rate of a training of `steps` steps: it rises to `peak`, stays, and falls to 0."""
    warmup = jnp.maximum(1.0, jnp.floor(steps * recipe.warmup_frac))
    decay = jnp.clip(jnp.floor(steps * recipe.decay_frac), 1.0, jnp.maximum(1.0, steps - warmup))
    return lambda step: peak * jnp.clip(jnp.minimum(step / warmup, (steps - step) / decay), 0.0, 1.0)


def optimizer(recipe: Recipe, steps: jax.Array) -> optax.GradientTransformation:
    """Make the recipe's optimizer for `steps` steps, which replace the recipe's own number.

    Muon: orthogonalised momentum for layer matrices and fc, Adam for the rest.
    """

    def schedule(peak: float) -> optax.Schedule:
        return rate_schedule(recipe, steps, peak)

    if recipe.optimizer == "adamw":
        rule = optax.adamw(schedule(recipe.learning_rate), weight_decay=recipe.weight_decay)
    else:
        rule = optax.contrib.muon(
            schedule(recipe.learning_rate),
            weight_decay=recipe.weight_decay,
            adam_b2=0.98,
            adam_learning_rate=schedule(recipe.other_rate),
            muon_weight_dimension_numbers=_by_muon,
            consistent_rms=0.2,
        )
    return rule if recipe.clip_norm is None else optax.chain(optax.clip_by_global_norm(recipe.clip_norm), rule)


def _by_muon(params: DrafterParams) -> DrafterParams:
    spec = optax.contrib.MuonDimensionNumbers()
    marks = jax.tree.map(lambda leaf: spec if leaf.ndim == 2 else None, params)
    result: DrafterParams = marks.replace(embedding=None, lm_head=None, mask_hidden=None)
    return result


@dataclasses.dataclass(frozen=True)
class Update:
    """The optimizer and its rates: the fields of Recipe whose defaults depend on the number of steps."""

    optimizer: OptimizerName
    learning_rate: float
    other_rate: float
    warmup_frac: float
    decay_frac: float

    def describe(self) -> str:
        """Example: muon at rates 0.008 and 0.003, rising over 2% of the steps, falling over the last 60%."""
        rates = f"a rate of {self.learning_rate:.2g}"
        if self.optimizer == "muon":
            rates = f"rates of {self.learning_rate:.2g} and {self.other_rate:.2g}"
        rises, falls = (f"{100 * frac:.3g}%" for frac in (self.warmup_frac, self.decay_frac))
        return f"{self.optimizer} at {rates}, rising over {rises} of the steps and falling over the last {falls}"


def typed_update(config: TrainConfig) -> dict[str, Any]:
    """Return the fields of `Update` that the user set."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(Update)}
    return {name: value for name, value in values.items() if value is not None}


def decided(config: TrainConfig, steps: int, parts: int, update: Update) -> Recipe:
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(TrainConfig)}
    return Recipe(**{**values, **dataclasses.asdict(update), "steps": steps, "parts": parts})


PAPER = Update("adamw", 1e-4, 1e-4, 0.0025, 1.0)  # arXiv 2602.01469


def short_update(width: int) -> Update:
    """Return the update of a short training, for a drafter of that hidden size: muon, with high rates.

    The rates were measured at MEASURED_WIDTH. For wider drafters they are scaled as in arXiv 2203.03466: a matrix's
    relative change per step (muon) and the change of a layer's output (Adam) stay the same.
    """
    scale = min(1.0, MEASURED_WIDTH / width)
    return Update("muon", 0.008 * math.sqrt(scale), 0.003 * scale, 0.02, 0.6)


def chosen_update(steps: int, width: int, *, from_trained: bool, typed: Mapping[str, Any]) -> Update:
    """Choose the update by the number of steps, except for fields that the user set.

    A rate without an optimizer is adamw's, or muon's if other_rate is set. from_trained: take low rates, which preserve
    a trained drafter.
    """
    optimizer = typed.get("optimizer")
    if optimizer is None and "other_rate" in typed:
        optimizer = "muon"
    elif optimizer is None and ("learning_rate" in typed or from_trained or steps >= SHORT_STEPS):
        optimizer = "adamw"
    update = dataclasses.replace(PAPER if optimizer == "adamw" else short_update(width), **typed)
    return update if update.optimizer == "muon" else dataclasses.replace(update, other_rate=update.learning_rate)
