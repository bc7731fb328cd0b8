"""MXFP4 bit by bit against transformers' own dequantisation (in a file of its own, since it needs torch)."""

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

from peagle.ops.mxfp4 import NAN_SCALE, dequantize  # noqa: E402
from tests.ops.test_mxfp4 import every_byte_and_scale  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_under_every_scale_is_bit_equal(dtype: torch.dtype) -> None:
    """Zeros' signs, denormals and infinities included; bfloat16 holds every MXFP4 value that float32 does."""
    blocks, scales = every_byte_and_scale(range(NAN_SCALE))
    # transformers transposes to input dimension first, so swap back
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks)[None], torch.from_numpy(scales)[None], dtype=dtype)
    theirs = theirs.swapaxes(1, 2)[0]
    assert theirs.dtype == dtype
    ours = dequantize(blocks, scales)
    assert ours.dtype == np.float32
    if dtype == torch.bfloat16:
        bits, ours = theirs.view(torch.uint16).numpy(), ours.astype(ml_dtypes.bfloat16).view(np.uint16)
    else:
        bits, ours = theirs.view(torch.uint32).numpy(), ours.view(np.uint32)
    np.testing.assert_array_equal(ours, bits)
