"""Rotary position embedding, half-split (NeoX) rotation, with the YaRN and llama3 frequency scalings."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from peagle.base.errors import InputError
from peagle.ops import native
from peagle.ops.kernels import Implementation


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071) as in GPT-OSS. truncate: round the ramp's bounds outwards."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    concentration: float | None = None  # None: 0.1 ln(factor) + 1


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Llama 3.1's scaling: stretch long wavelengths by `factor`, keep short ones, with a ramp between."""

    factor: float
    original_length: int
    low_freq_factor: float
    high_freq_factor: float


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """The settings of RoPE. theta: the base. scaling None: plain RoPE."""

    head_dim: int
    theta: float
    scaling: Yarn | Llama3 | None = None


# the keys of each kind of scaling, beside _COMMON: (required, optional)
_COMMON = {"rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "yarn": (("factor",), ("beta_fast", "beta_slow", "truncate", "attention_factor")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
}


def parse_rope(head_dim: int, config: Mapping[str, Any], default_theta: float) -> RopeConfig:
    """Read the RoPE settings of a config.json.

    Accepts `rope_parameters` (transformers 5, which has theta inside), for all layers or by layer type, and
    `rope_theta` beside `rope_scaling`. Raises InputError if two places disagree, if layer types differ, and for a
    scaling other than default, yarn or llama3, or with a missing or unknown key.
    """
    rope = rope_settings(config)
    kind = rope.get("rope_type", "default")
    if kind not in _KINDS:
        raise InputError(f"rope scaling {kind!r} is not supported; expected default, yarn or llama3")
    needed, optional = _KINDS[kind]
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError("partial_rotary_factor is not supported: heads are rotated whole")
    if {"mscale", "mscale_all_dim"} & rope.keys():
        raise InputError("rope scaling with mscale or mscale_all_dim is not supported; give attention_factor instead")
    if unknown := sorted(rope.keys() - _COMMON - {*needed, *optional}):
        raise InputError(
            f"rope scaling {kind!r} has {', '.join(unknown)}, which it does not use; expected "
            f"{', '.join([*needed, *optional]) or 'another rope_type, or no such key'}"
        )
    theta = _number("rope_theta", rope["rope_theta"], above=1.0) if "rope_theta" in rope else default_theta
    if kind == "default":
        return RopeConfig(head_dim, theta)
    # other keys are read only if the scaling itself does not have the length
    elsewhere = (config.get(key) for key in ("initial_context_length", "max_position_embeddings"))
    original = next((value for value in (rope.get("original_max_position_embeddings"), *elsewhere) if value), None)
    if original is None:
        raise InputError(f"rope scaling {kind!r} lacks original_max_position_embeddings")
    if missing := [key for key in needed if key not in rope]:
        raise InputError(f"rope scaling {kind!r} lacks {missing[0]!r}")
    numbers = {key: _number(key, rope[key]) for key in (*needed, *optional) if key in rope and key != "truncate"}
    length = int(_number("original_max_position_embeddings", original))
    if kind == "yarn":
        concentration = numbers.pop("attention_factor", None)
        truncate = bool(rope.get("truncate", True))
        return RopeConfig(
            head_dim, theta, Yarn(original_length=length, truncate=truncate, concentration=concentration, **numbers)
        )
    llama3 = Llama3(original_length=length, **numbers)
    if llama3.low_freq_factor >= llama3.high_freq_factor:
        raise InputError(
            f"rope scaling 'llama3' has low_freq_factor {llama3.low_freq_factor:g}; expected less than its "
            f"high_freq_factor, {llama3.high_freq_factor:g}"
        )
    return RopeConfig(head_dim, theta, llama3)


def render_rope(rope: RopeConfig) -> dict[str, Any]:
    """Render the settings as `rope_theta` beside `rope_scaling`, which parse_rope and older readers read."""
    if rope.scaling is None:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling = {key: value for key, value in dataclasses.asdict(rope.scaling).items() if value is not None}
    scaling["original_max_position_embeddings"] = scaling.pop("original_length")
    if "concentration" in scaling:
        scaling["attention_factor"] = scaling.pop("concentration")
    kind = "yarn" if isinstance(rope.scaling, Yarn) else "llama3"
    return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": kind, **scaling}}


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gather all RoPE settings of a config.json, under the keys of `rope_parameters`; null counts as absent.

    Raises InputError if two places give different values for one key, and for an unknown key.
    """
    known = ("rope_theta", "rope_parameters", "rope_scaling")
    if unknown := [key for key in config if key.startswith("rope_") and key not in known and config[key]]:
        raise InputError(f"{unknown[0]} is {config[unknown[0]]!r}, which is not supported; expected {', '.join(known)}")
    settings: dict[str, Any] = {}
    source: dict[str, str] = {}
    for place, own in _places(config):
        for key, value in own.items():
            if settings.setdefault(key, value) != value:
                raise InputError(
                    f"{key} is {settings[key]!r} in {source[key]} and {value!r} in {place}; expected them equal: take "
                    "out the one that the model was not trained with"
                )
            source.setdefault(key, place)
    return settings


def _places(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, settings) of each place in a config.json with RoPE settings."""
    top = ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor")
    yield "config.json itself", _without_nulls({key: config.get(key) for key in top})
    for name in ("rope_parameters", "rope_scaling"):
        value = config.get(name) or {}
        if not isinstance(value, Mapping):
            raise InputError(f"{name} is {value!r}; expected an object")
        by_layer_type = {key: _without_nulls(own) for key, own in value.items() if isinstance(own, Mapping)}
        yield name, _without_nulls({key: own for key, own in value.items() if key not in by_layer_type})
        first = next(iter(by_layer_type), "")
        for layer_type, own in by_layer_type.items():
            if own != by_layer_type[first]:
                raise InputError(
                    f"{name} differ between {first} and {layer_type}; expected them equal: a model whose "
                    "layers rotate differently is not supported"
                )
            yield f"{name}.{layer_type}", own


def _without_nulls(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_type" if key == "type" else key: value for key, value in part.items() if value is not None}


def _number(key: str, value: Any, above: float = 0.0) -> float:
    """Convert the value to a finite number. Raises InputError for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not above < number < math.inf:
        raise InputError(f"{key} is {value!r}; expected a number above {above:g}")
    return number


def rope_frequencies(config: RopeConfig) -> tuple[np.ndarray, float]:
    """Compute (inverse frequencies float32 [head_dim/2], concentration).

    angle = position * frequency; cos and sin are multiplied by the concentration, which is 1 except in YaRN.
    """
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
        high += 0.001  # as upstream: avoids division by zero
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
    config: RopeConfig,
    positions: Int[Array, "B T"],
    dtype: DTypeLike,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T h"], Float[Array, "B T h"]]:
    """Compute (cos, sin) [B, T, head_dim/2] at positions.

    Angles are float32; cosines and sines are multiplied by the concentration, then cast to the activation dtype, before
    they rotate anything (openai/gpt-oss). There is a native kernel because XLA on CPU calls the C library for each
    cosine, which took a fifth of a small model's prefill. Raises InputError for "cuda", which has no kernel.
    """
    frequencies, concentration = rope_frequencies(config)
    if implementation == "cuda":
        raise InputError("rope_tables has no CUDA kernel; leave the implementation out, or take 'xla'")
    if implementation == "native":
        table = jax.ShapeDtypeStruct((*positions.shape, len(frequencies)), dtype)
        operands = positions, jnp.asarray(frequencies)
        cos, sin = native.call("rope_tables", (table, table), *operands, concentration=np.float32(concentration))
        return cos, sin
    angles = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(frequencies)[None, None, :]
    return (jnp.cos(angles) * concentration).astype(dtype), (jnp.sin(angles) * concentration).astype(dtype)


def apply_rope(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T h"], sin: Float[Array, "B T h"]
) -> Float[Array, "B T N H"]:
    """Rotate x by halves: (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin)."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
