"""Random weights made in memory are a whole model that stays finite."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from peagle.workflows.random_checkpoint import SIZES
from target.dialects import tensor_shapes
from target.model import forward
from target.random import random_bytes, random_params


def test_random_weights_are_a_whole_model_that_stays_finite() -> None:
    config = dataclasses.replace(SIZES["tiny"], layer_types=SIZES["tiny"].layer_types[:2])
    params = random_params(config, 0, jnp.float32)
    leaves = jax.tree.leaves(params)
    assert sum(leaf.nbytes for leaf in leaves) == random_bytes(config, jnp.float32)
    # as many parameters as a checkpoint has, four-bit codes in pairs
    stored = sum(int(np.prod(shape)) for shape in tensor_shapes(config, mxfp4=True).values())
    assert sum(leaf.size for leaf in leaves) == stored
    ids = jnp.arange(24, dtype=jnp.int32)[None] % config.vocab_size
    logits, _ = jax.jit(lambda params: forward(params, config, ids, jnp.arange(24, dtype=jnp.int32)[None]))(params)
    assert bool(jnp.isfinite(logits).all())
    assert 0.3 < float(logits.std()) < 3
