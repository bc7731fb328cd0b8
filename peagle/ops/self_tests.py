"""What the kernels' checks before their first use share."""

import jax.numpy as jnp
import numpy as np

FAR = 0.02  # relative to the largest output: above bfloat16 rounding, below the error of a wrong kernel


def random_halves(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)


def expect_near(output: np.ndarray, expected: np.ndarray, what: str, error: type[Exception]) -> None:
    """Raise the error for a result far from the expected one. what: whose check fails, and on what."""
    far = np.abs(output - expected).max() / np.abs(expected).max()
    if not far < FAR:
        raise error(f"{what}: off by {far:.2g}; expected {FAR} at most")
