"""The GGUF file of a target: it holds the checkpoint's own bits, as the gguf package reads them."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peagle.ops.checkpoint import read_checkpoint
from peagle.ops.errors import InputError
from peagle.ops.mxfp4 import CODES
from peagle.workflows.random_checkpoint import random_tensors
from scripts.peers import gguf_file
from target.load import inspect_target, write_target
from tests.scripts.conftest import GEOMETRY


@pytest.fixture(scope="module")
def gguf_reader(checkpoint: Path) -> Any:
    gguf = pytest.importorskip("gguf")
    path = checkpoint.parent / "model.gguf"
    gguf_file.write_gguf(checkpoint, path)
    return gguf.GGUFReader(path)


def ggml_codes(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes [..., 32], scales) of ggml's blocks, by the rule of block_mxfp4: byte j holds values j and j + 16."""
    blocks = packed.reshape(*packed.shape[:-1], -1, 17)
    return np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1), blocks[..., 0]


def test_mxfp4_blocks_keep_every_code_and_scale() -> None:
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (3, 4, 2, 16), np.uint8), rng.integers(0, 255, (3, 4, 2), np.uint8)
    packed = gguf_file.ggml_mxfp4(blocks, scales)
    assert packed.shape == (3, 4, 34)
    codes, kept = ggml_codes(packed)
    np.testing.assert_array_equal(kept, scales)
    np.testing.assert_array_equal(codes[..., 0::2], blocks & 15)
    np.testing.assert_array_equal(codes[..., 1::2], blocks >> 4)


def test_the_file_holds_the_checkpoints_experts_bit_for_bit(checkpoint: Path, gguf_reader: Any) -> None:
    """Read back by the gguf package, whose own dequantisation gives the values of the checkpoint."""
    from gguf import dequantize

    files, source = inspect_target(checkpoint), read_checkpoint(checkpoint)
    tensors = {tensor.name: tensor for tensor in gguf_reader.tensors}
    for layer in range(GEOMETRY.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        for name, matrix, rows in (
            ("gate", "gate_up_proj", slice(0, None, 2)),
            ("up", "gate_up_proj", slice(1, None, 2)),
            ("down", "down_proj", slice(None)),
        ):
            written = tensors[f"blk.{layer}.ffn_{name}_exps.weight"]
            values = dequantize(np.asarray(written.data), written.tensor_type)
            if files.mxfp4:
                assert written.tensor_type.name == "MXFP4"
                blocks, scales = source.take(f"{prefix}{matrix}_blocks"), source.take(f"{prefix}{matrix}_scales")
                codes, kept = ggml_codes(np.asarray(written.data))
                np.testing.assert_array_equal(kept, scales[:, rows])
                expected = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
                np.testing.assert_array_equal(codes, expected[:, rows])
                decoded = CODES[codes] * np.exp2(kept.astype(np.float32) - 127)[..., None]
                np.testing.assert_array_equal(values, decoded.reshape(values.shape))
            else:
                expected = source.take(prefix + matrix).swapaxes(-1, -2)[:, rows].astype(np.float32)
                np.testing.assert_array_equal(values, expected)
            bias = tensors[f"blk.{layer}.ffn_{name}_exps.bias"]
            np.testing.assert_array_equal(bias.data, source.take(f"{prefix}{matrix}_bias")[:, rows].astype(np.float32))


def test_the_file_holds_all_else_and_what_describes_it(checkpoint: Path, gguf_reader: Any) -> None:
    from gguf import dequantize

    source = read_checkpoint(checkpoint)
    tensors = {tensor.name: tensor for tensor in gguf_reader.tensors}
    for name, theirs in {
        "output.weight": "lm_head.weight",
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.1.attn_k.weight": "model.layers.1.self_attn.k_proj.weight",
        "blk.2.attn_sinks.weight": "model.layers.2.self_attn.sinks",
        "blk.0.ffn_gate_inp.weight": "model.layers.0.mlp.router.weight",
    }.items():
        values = dequantize(np.asarray(tensors[name].data), tensors[name].tensor_type)
        np.testing.assert_array_equal(values, source.take(theirs).astype(np.float32))
    described = {key: gguf_reader.get_field(f"gpt-oss.{key}").contents() for key in ("vocab_size", "expert_used_count")}
    assert described == {"vocab_size": 89, "expert_used_count": 2}
    pattern = gguf_reader.get_field("gpt-oss.attention.sliding_window_pattern").contents()
    assert pattern == [True, False, True]


def test_checkpoint_that_gguf_cannot_express_is_refused(tmp_path: Path) -> None:
    other = dataclasses.replace(GEOMETRY, swiglu_limit=5.0)
    write_target(tmp_path / "other", other, random_tensors(other, True, seed=1), mxfp4=True)
    with pytest.raises(InputError, match=r"swiglu_limit is 5\.0"):
        gguf_file.write_gguf(tmp_path / "other", tmp_path / "model.gguf")
