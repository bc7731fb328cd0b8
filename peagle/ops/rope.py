"""Rotary position embedding, half-split (NeoX) rotation, with the YaRN and llama3 frequency scalings."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from peagle.ops import native as kernels
from peagle.ops.errors import InputError


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071) as GPT-OSS uses it; `truncate` rounds the ramp's bounds outwards."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    concentration: float | None = None  # None: 0.1 ln(factor) + 1


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Llama 3.1's scaling: long wavelengths are stretched by factor, short ones kept, a ramp between."""

    factor: float
    original_length: int
    low_freq_factor: float
    high_freq_factor: float


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """What decides the rotation: width of a head, base, scaling (None: plain)."""

    head_dim: int
    theta: float
    scaling: Yarn | Llama3 | None = None


def parse_rope(head_dim: int, config: Mapping[str, Any], default_theta: float) -> RopeConfig:
    """The rotation a config.json asks for.

    Accepts both spellings: `rope_parameters` (transformers 5, theta inside) and `rope_theta` + `rope_scaling`.
    Raises InputError for a scaling that is not one of default, yarn, llama3, or that lacks what it needs.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", config.get("rope_theta", default_theta))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    original = (
        scaling.get("original_max_position_embeddings")
        or config.get("initial_context_length")
        or config.get("original_max_position_embeddings")
        or config.get("max_position_embeddings")
        or 0
    )
    if config.get("partial_rotary_factor", scaling.get("partial_rotary_factor")) not in (None, 1.0):
        raise InputError("partial_rotary_factor is not supported: heads are rotated whole")
    if kind == "default":
        return RopeConfig(head_dim, float(theta))
    if kind not in ("yarn", "llama3"):
        raise InputError(f"rope scaling {kind!r} is not supported; expected default, yarn or llama3")
    if original <= 0:
        raise InputError(f"rope scaling {kind!r} lacks original_max_position_embeddings")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        raise InputError("rope scaling with mscale and mscale_all_dim is not supported; give attention_factor instead")
    try:
        if kind == "yarn":
            return RopeConfig(
                head_dim,
                float(theta),
                Yarn(
                    factor=float(scaling["factor"]),
                    original_length=int(original),
                    beta_fast=float(scaling.get("beta_fast") or 32.0),
                    beta_slow=float(scaling.get("beta_slow") or 1.0),
                    truncate=bool(scaling.get("truncate", True)),
                    concentration=scaling.get("attention_factor"),
                ),
            )
        return RopeConfig(
            head_dim,
            float(theta),
            Llama3(
                factor=float(scaling["factor"]),
                original_length=int(original),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
            ),
        )
    except KeyError as missing:
        raise InputError(f"rope scaling {kind!r} lacks {missing}") from None


def rope_frequencies(config: RopeConfig) -> tuple[np.ndarray, float]:
    """(inverse frequencies float32 [head_dim/2], concentration): angle = position * frequency; cos and sin are
    multiplied by the concentration (1 but for YaRN)."""
    dim, theta, scaling = config.head_dim, config.theta, config.scaling
    plain = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is None:
        return plain.astype(np.float32), 1.0
    if isinstance(scaling, Llama3):
        return _llama3_frequencies(plain, scaling).astype(np.float32), 1.0
    concentration = scaling.concentration
    if concentration is None:
        concentration = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return _yarn_frequencies(plain, dim, theta, scaling).astype(np.float32), float(concentration)


def _yarn_frequencies(plain: np.ndarray, dim: int, theta: float, yarn: Yarn) -> np.ndarray:
    def bound(rotations: float) -> float:
        return dim * math.log(yarn.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = bound(yarn.beta_fast), bound(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as upstream: no division by zero
    ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def _llama3_frequencies(plain: np.ndarray, scaling: Llama3) -> np.ndarray:
    wavelength = 2 * np.pi / plain
    ramp = (scaling.original_length / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    ramp = np.clip(ramp, 0, 1)
    return (1 - ramp) * plain / scaling.factor + ramp * plain


def rope_tables(
    config: RopeConfig, positions: Int[Array, "B T"], dtype: DTypeLike, *, native: bool = False
) -> tuple[Float[Array, "B T h"], Float[Array, "B T h"]]:
    """(cos, sin) [B, T, head_dim/2] at the given positions: angles in float32, times the concentration, then cast
    to the activation dtype before they rotate anything (openai/gpt-oss).

    native: by the compiled kernels. XLA on CPU calls the C library for each cosine, which took a fifth of a small
    model's prefill.
    """
    frequencies, concentration = rope_frequencies(config)
    if native:
        table = jax.ShapeDtypeStruct((*positions.shape, len(frequencies)), dtype)
        operands = positions, jnp.asarray(frequencies)
        cos, sin = kernels.call("rope_tables", (table, table), *operands, concentration=np.float32(concentration))
        return cos, sin
    angles = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(frequencies)[None, None, :]
    return (jnp.cos(angles) * concentration).astype(dtype), (jnp.sin(angles) * concentration).astype(dtype)


def apply_rope(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T h"], sin: Float[Array, "B T h"]
) -> Float[Array, "B T N H"]:
    """x with its halves (x1, x2) rotated to (x1 cos - x2 sin, x2 cos + x1 sin)."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
