"""The check before the TPU kernels' first use, interpreted; and what a fault that only a device has would do to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from peagle.ops import native, tpu
from peagle.ops.attention import tpu as attention
from peagle.ops.expert_matmul import tpu as expert_matmul
from peagle.ops.kernels import describe_kernels, for_weights
from peagle.ops.tpu import self_test

pytestmark = pytest.mark.compile


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "interpreted", True)
    monkeypatch.setattr(tpu, "status", tpu.status.__wrapped__)  # without its cache
    monkeypatch.setattr(native, "status", lambda: (None, "XLA: the native kernels are for CPUs"))
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")


def test_a_tpu_that_flushes_denormal_codes_runs_xlas_code(monkeypatch: pytest.MonkeyPatch) -> None:
    planes = expert_matmul._planes

    def flushed(words: jax.Array) -> list[jax.Array]:
        def normal(plane: jax.Array) -> jax.Array:
            return jnp.where(jnp.abs(plane.astype(jnp.float32)) < 2.0**-14, jnp.zeros((), plane.dtype), plane)

        return [normal(plane) for plane in planes(words)]

    monkeypatch.setattr(expert_matmul, "_planes", flushed)
    assert for_weights() is None
    assert describe_kernels().startswith("XLA: the TPU kernels fail their check: codes of 0.5: off by")


def test_a_page_too_far_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = attention.attend
    monkeypatch.setattr(attention, "attend", lambda q, k, v, table, *rest: real(q, k, v, table[:, ::-1], *rest))
    with pytest.raises(self_test.WrongKernel, match="attention: off by"):
        self_test.check_attention(np.random.default_rng(0), *self_test.ATTENDED[0])


@pytest.mark.slow
def test_the_kernels_pass_and_do_not_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """With simulated copies that take as long as they can, in which races are errors."""
    options = pltpu.InterpretParams(dma_execution_mode="on_wait", detect_races=True)
    monkeypatch.setattr(tpu, "interpreted", options)
    self_test.check()
