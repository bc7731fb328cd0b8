"""A checkpoint loaded for a TPU, its kernels interpreted, compared with XLA."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.ops import tpu
from peagle.ops.expert_matmul import TpuExperts
from peagle.ops.linear import linear
from peagle.workflows.check import MOST_OFF_TYPICAL
from peagle.workflows.random_checkpoint import SIZES, write_random_checkpoint
from target.load import load_target
from target.model import GptOss

pytestmark = pytest.mark.compile
CONFIG = SIZES["tiny"]


@pytest.mark.slow
def test_a_model_laid_out_for_a_tpu_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, then a few rows; the padding of layouts does not show."""
    monkeypatch.setattr(tpu, "interpreted", True)
    write_random_checkpoint(tmp_path / "model", CONFIG)
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 14), np.int32)
    logits = {}
    for implementation, dtype in (("xla", jnp.float32), ("tpu", jnp.bfloat16)):
        params = load_target(tmp_path / "model", dtype=dtype, experts="packed", implementation=implementation).params  # type: ignore[arg-type]
        model = GptOss(params, CONFIG)
        cache, outputs = model.init_cache(2, 32, 11), []
        for first, last in ((0, 11), (11, 14)):
            positions = np.tile(np.arange(first, last, dtype=np.int32), (2, 1))
            output, cache = jax.jit(GptOss.extend)(model, ids[:, first:last], positions, cache)
            outputs.append(np.asarray(output.logits, np.float32))
        logits[implementation] = np.concatenate(outputs, axis=1)
    assert isinstance(params.layers[0].moe.experts, TpuExperts)
    assert params.embedding.shape[1] % tpu.LANES == 0
    off = (logits["tpu"] - logits["xla"]) / logits["xla"].std()
    assert np.median(np.sqrt(np.mean(off**2, axis=-1))) < MOST_OFF_TYPICAL


@pytest.mark.parametrize("shape", [(1,), (2, 3), (8,)])
def test_products_of_whole_tiles_are_the_products(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, weight, residual = (rng.standard_normal(size, np.float32) for size in ((*shape, 24), (24, 5), (*shape, 5)))
    out = linear(jnp.asarray(x), jnp.asarray(weight), residual=jnp.asarray(residual), implementation="tpu")
    np.testing.assert_allclose(out, x @ weight + residual, rtol=1e-5, atol=1e-5)
