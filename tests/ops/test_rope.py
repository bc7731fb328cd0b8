"""RoPE frequencies by the papers' formulas and, in test_rope_oracle.py, against transformers' own."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from peagle.base.errors import InputError
from peagle.ops.rope import Llama3, RopeConfig, Yarn, apply_rope, parse_rope, rope_frequencies, rope_tables

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_gpt_oss_constants() -> None:
    """The ramp's bounds and the concentration of openai's code for head_dim 64."""
    frequencies, concentration = rope_frequencies(parse_rope(64, {"rope_scaling": YARN, "rope_theta": 150000}, 1.0))
    assert concentration == pytest.approx(1.3465736, abs=1e-7)
    low, high = 8.0928, 17.3980
    plain = 150000.0 ** -(np.arange(32) / 32)
    ramp = np.clip((np.arange(32) - low) / (high - low), 0, 1)
    np.testing.assert_allclose(frequencies, plain / 32 * ramp + plain * (1 - ramp), rtol=1e-4)
    np.testing.assert_allclose(frequencies[:9], plain[:9], rtol=1e-6)  # fast ones are kept,
    np.testing.assert_allclose(frequencies[18:], plain[18:] / 32, rtol=1e-6)  # slow ones stretched


@pytest.mark.parametrize(("scaling", "kind"), [(YARN, Yarn), (LLAMA3, Llama3)], ids=["yarn", "llama3"])
def test_all_spellings_mean_the_same(scaling: dict, kind: type) -> None:
    older = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    whole = {**scaling, "rope_theta": 5e5}
    spellings = [
        {"rope_scaling": scaling, "rope_theta": 5e5},
        {"rope_scaling": older, "rope_theta": 5e5},
        {"rope_parameters": whole},
        {"rope_parameters": whole, "rope_scaling": None},
        {"rope_parameters": {"full_attention": whole, "sliding_attention": dict(whole)}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": scaling},
        {"rope_parameters": whole, "rope_scaling": older, "rope_theta": 500000},
    ]
    first, *others = (parse_rope(64, config, 1.0) for config in spellings)
    assert first.theta == 5e5
    assert isinstance(first.scaling, kind)
    assert others == [first] * len(others)


def test_no_scaling_is_plain() -> None:
    assert parse_rope(16, {"rope_theta": 1e4}, 1.0) == RopeConfig(16, 1e4)
    assert parse_rope(16, {"rope_scaling": None}, 7.0) == RopeConfig(16, 7.0)
    frequencies, concentration = rope_frequencies(RopeConfig(16, 1e4))
    assert concentration == 1.0
    np.testing.assert_allclose(frequencies, [10 ** (-i / 2) for i in range(8)], rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, "lacks 'factor'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "lacks original_max_position_embeddings"),
        ({"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}, "mscale"),
        ({"rope_scaling": {**YARN, "mscale": 1.0}}, "mscale"),
        ({"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"factor": 32.0}}, "'default' has factor, which it does not use"),
        ({"rope_scaling": {**LLAMA3, "truncate": False}}, "'llama3' has truncate"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "less than its high_freq_factor"),
        ({"rope_scaling": {**YARN, "factor": 0}}, "factor is 0; expected a number above 0"),
        ({"rope_scaling": {**YARN, "rope_theta": 1}}, "rope_theta is 1; expected a number above 1"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; expected an object"),
        ({"rope_ntk_alpha": 2.0}, "rope_ntk_alpha is 2.0, which is not supported"),
        # two places disagree
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN},
            "rope_type is 'default' in rope_parameters and 'yarn' in rope_scaling",
        ),
        (
            {"rope_parameters": YARN, "rope_scaling": {**YARN, "factor": 8.0}},
            "factor is 32.0 .* and 8.0 in rope_scaling",
        ),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 10000.0 in config.json itself"),
        (
            {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}},
            "rope_parameters differ between full_attention and sliding_attention",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"full_attention": {**YARN, "rope_theta": 5e5}}},
            "500000.0 in rope_parameters.full_attention",
        ),
    ],
)
def test_unsupported_settings_are_refused(config: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_rope(64, config, 1.0)


def test_rotation_turns_each_pair_by_its_angle() -> None:
    config = RopeConfig(6, 100.0)
    positions = jnp.array([[0, 3, 50]], jnp.int32)
    x = np.random.default_rng(0).standard_normal((1, 3, 2, 6), np.float32)
    out = np.asarray(apply_rope(jnp.asarray(x), *rope_tables(config, positions, jnp.float32)))
    for t, position in enumerate([0, 3, 50]):
        for i in range(3):
            angle = position * 100.0 ** (-i / 3)
            turn = complex(math.cos(angle), math.sin(angle))
            turned = (x[0, t, :, i] + 1j * x[0, t, :, i + 3]) * turn
            np.testing.assert_allclose(out[0, t, :, i], turned.real, atol=2e-5)
            np.testing.assert_allclose(out[0, t, :, i + 3], turned.imag, atol=2e-5)


def test_tables_are_cast_last_and_precise_at_far_positions() -> None:
    """Angles are float32 products, not products of bfloat16 positions; the concentration multiplies before the cast."""
    config = parse_rope(64, {"rope_scaling": YARN, "rope_theta": 150000}, 1.0)
    positions = jnp.array([[131071]], jnp.int32)
    cos, sin = rope_tables(config, positions, jnp.bfloat16)
    assert cos.dtype == sin.dtype == jnp.bfloat16
    frequencies, concentration = rope_frequencies(config)
    angles = np.float32(131071) * frequencies  # rounded once, as a float32 product is
    np.testing.assert_allclose(
        np.asarray(cos, np.float32)[0, 0], np.cos(angles.astype(np.float64)) * concentration, atol=8e-3
    )
    np.testing.assert_allclose(
        np.asarray(sin, np.float32)[0, 0], np.sin(angles.astype(np.float64)) * concentration, atol=8e-3
    )
