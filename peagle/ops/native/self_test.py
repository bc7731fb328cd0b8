"""Compare products of a set of instructions that never ran in a test with float64, before their first use."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from peagle.ops.mxfp4 import BLOCK, dequantize

UNTESTED = ("avx512amx",)
ROWS, PANELS, PANEL_ROWS = 16, 5, 16  # tiles take four panels, then one
INPUTS = {"bfloat16": 84, "MXFP4": 96}  # bfloat16: the last of three blocks is not full
FAR = 1e-4  # relative to the largest output: far above float32 rounding


def find_fault(isa: str) -> str | None:
    """Describe what is wrong with a set's products of bfloat16 rows, if anything. The set is registered."""
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():  # now, even if the first call comes while a program is traced
        for name, inputs in INPUTS.items():
            x = rng.standard_normal((ROWS, inputs), np.float32).astype(ml_dtypes.bfloat16)
            data, scales, weights = (_bfloat16 if name == "bfloat16" else _mxfp4)(rng, inputs)
            output, alone = (_product(isa, rows, data, scales) for rows in (x, x[:1]))
            expected = x.astype(np.float64) @ weights.astype(np.float64).T
            far = np.abs(output - expected).max() / np.abs(expected).max()
            if not far < FAR:
                return f"a product with {name} weights is off by {far:.2g}; expected {FAR} at most"
            if not np.array_equal(output[:1], alone):
                return f"a row has other bits alone than among {ROWS}, with {name} weights"
    return None


def _product(isa: str, rows: np.ndarray, data: np.ndarray, scales: np.ndarray) -> np.ndarray:
    none = jnp.zeros((0,), jnp.float32)
    kernel = jax.ffi.ffi_call(
        f"peagle_linear_{isa}", jax.ShapeDtypeStruct((len(rows), PANELS * PANEL_ROWS), jnp.float32)
    )
    operands = (*map(jnp.asarray, (rows, none, data, scales)), none, none, jnp.zeros((0,), jnp.int32))
    return np.asarray(kernel(*operands, epsilon=np.float32(0)))


def _bfloat16(rng: np.random.Generator, inputs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw (packed data, no scales, the matrix [outputs, inputs])."""
    data = rng.standard_normal((PANELS, inputs // 2, PANEL_ROWS, 2), np.float32).astype(ml_dtypes.bfloat16)
    return data, np.zeros(0, np.uint8), data.swapaxes(1, 2).reshape(-1, inputs)


def _mxfp4(rng: np.random.Generator, inputs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw (packed data, packed scales, the matrix [outputs, inputs])."""
    data = rng.integers(0, 2**32, (PANELS, inputs // 8, PANEL_ROWS), np.uint32)
    scales = rng.integers(117, 121, (PANELS, inputs // BLOCK, PANEL_ROWS), np.uint8)
    words, powers = (np.ascontiguousarray(part.swapaxes(1, 2)) for part in (data, scales))
    return data, scales, dequantize(words.view(np.uint8).reshape(*powers.shape, -1), powers).reshape(-1, inputs)
