"""Make a recipe's optimizer and the schedule of its learning rates."""

import jax
import jax.numpy as jnp
import optax

from drafter.params import DrafterParams
from drafter.train.recipe import Recipe


def rate_schedule(recipe: Recipe, steps: jax.Array, peak: float | None) -> optax.Schedule:
    """Make the learning rate of a training of `steps` steps: it rises to `peak`, stays, and falls to 0."""
    assert peak is not None, "a recipe that is not filled"
    warmup = jnp.maximum(1.0, jnp.floor(steps * recipe.warmup_frac))
    decay = jnp.clip(jnp.floor(steps * recipe.decay_frac), 1.0, jnp.maximum(1.0, steps - warmup))
    return lambda step: peak * jnp.clip(jnp.minimum(step / warmup, (steps - step) / decay), 0.0, 1.0)


def optimizer(recipe: Recipe, steps: jax.Array) -> optax.GradientTransformation:
    """Make the optimizer of a training of `steps` steps.

    Muon: orthogonalised momentum for layer matrices and fc, Adam for the rest.
    """
    rate = rate_schedule(recipe, steps, recipe.learning_rate)
    if recipe.optimizer == "adamw":
        return optax.adamw(rate, weight_decay=recipe.weight_decay)
    return optax.contrib.muon(
        rate,
        weight_decay=recipe.weight_decay,
        adam_b2=0.98,
        adam_learning_rate=rate_schedule(recipe, steps, recipe.other_rate),
        muon_weight_dimension_numbers=_by_muon,
        consistent_rms=0.2,
    )


def _by_muon(params: DrafterParams) -> DrafterParams:
    spec = optax.contrib.MuonDimensionNumbers()
    marks = jax.tree.map(lambda leaf: spec if leaf.ndim == 2 else None, params)
    result: DrafterParams = marks.replace(embedding=None, lm_head=None, mask_hidden=None)
    return result
