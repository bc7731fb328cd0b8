"""Checkpoints of random weights in GPT-OSS's layout, to measure speed and memory, and to test the format.

Tensors are drawn and written one by one, so a checkpoint of the 20b's size (13 GB) needs the memory of one shard. Equal
arguments give equal bytes. Values are scaled as at the start of a training: activations stay finite, and routing is
spread.
"""

import dataclasses
import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from drafter.aux_layers import default_dflash_layers
from drafter.config import DrafterConfig, Kind
from drafter.load import save_drafter
from drafter.params import init_params
from peagle.ops.draw import KEYS
from peagle.ops.mxfp4 import BLOCK
from peagle.ops.rope import RopeConfig, Yarn
from target.config import FULL, SLIDING, TargetConfig
from target.dialects import tensor_shapes
from target.load import write_target

SHARD_BYTES = 2 << 30
PIECE = 1 << 24  # values drawn at a time
NO_SCALE = 127  # the scale byte of 2^0


def geometry(
    *,
    hidden: int,
    layers: int,
    heads: tuple[int, int],
    head_dim: int,
    vocab: int,
    experts: tuple[int, int],
    expert_width: int,
    window: int = 128,
    original_length: int = 4096,
    max_positions: int = 131072,
) -> TargetConfig:
    """Make a TargetConfig of this geometry; other values are as in all GPT-OSS models.

    heads: (query, key/value). experts: (number, selected by a token).
    """
    return TargetConfig(
        hidden_size=hidden,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        vocab_size=vocab,
        layer_types=tuple(FULL if layer % 2 else SLIDING for layer in range(layers)),
        sliding_window=window,
        num_experts=experts[0],
        top_k=experts[1],
        expert_width=expert_width,
        swiglu_limit=7.0,
        rms_norm_eps=1e-5,
        max_positions=max_positions,
        rope=RopeConfig(head_dim, 150000.0, Yarn(factor=32.0, original_length=original_length, truncate=False)),
    )


# S, M, L have 11 M, 183 M and 1.8 G parameters, as in results/; L has layers of the 20b
SIZES = {
    "tiny": geometry(
        hidden=96,
        layers=8,
        heads=(6, 2),
        head_dim=16,
        vocab=320,
        experts=(5, 2),
        expert_width=64,
        window=24,
        original_length=128,
        max_positions=4096,
    ),
    "S": geometry(hidden=256, layers=8, heads=(8, 2), head_dim=64, vocab=4096, experts=(16, 4), expert_width=64),
    "M": geometry(hidden=768, layers=12, heads=(12, 4), head_dim=64, vocab=32768, experts=(32, 4), expert_width=128),
    "L": geometry(hidden=2880, layers=2, heads=(64, 8), head_dim=64, vocab=32768, experts=(32, 4), expert_width=2880),
    "20b": geometry(
        hidden=2880, layers=24, heads=(64, 8), head_dim=64, vocab=201088, experts=(32, 4), expert_width=2880
    ),
    "120b": geometry(
        hidden=2880, layers=36, heads=(64, 8), head_dim=64, vocab=201088, experts=(128, 4), expert_width=2880
    ),
}


@dataclasses.dataclass(frozen=True)
class DrafterGeometry:
    """A drafter's geometry, except for sizes that follow the target's."""

    name: str
    layers: int
    kind: Kind

    def config(self, target: TargetConfig, draft_vocab: int | None = None) -> DrafterConfig:
        """Make a config with the defaults of `peagle train`; for DFlash, with the values of the public drafters."""
        aux_layer_ids = tuple(sorted((min(1, target.num_layers - 1), target.num_layers // 2, target.num_layers - 1)))
        config = DrafterConfig(
            hidden_size=target.hidden_size,
            num_layers=self.layers,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            mlp_width=2 * target.hidden_size,
            target_hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab or target.vocab_size,
            mask_token_id=None if self.kind == "EAGLE-3" else target.vocab_size - 1,
            rope=RopeConfig(target.head_dim, 10000.0),
            aux_layer_ids=aux_layer_ids,
        )
        if self.kind != "DFlash":
            return config
        aux_layer_ids = tuple(dict.fromkeys(default_dflash_layers(DFLASH_AUX_LAYERS, target.num_layers)))
        return dataclasses.replace(
            config,
            mlp_width=target.hidden_size * 8 // 3,
            rope=target.rope,
            num_aux_layers=len(aux_layer_ids),
            aux_layer_ids=aux_layer_ids,
            qk_norm=True,
            attention_bias=True,
            block_size=8,
        )


DFLASH_AUX_LAYERS = 5
EAGLE_3 = DrafterGeometry("EAGLE-3, 1 layer", 1, "EAGLE-3")
P_EAGLE = DrafterGeometry("P-EAGLE, 4 layers", 4, "P-EAGLE")  # as the public drafter of the 20b
DFLASH = DrafterGeometry("DFlash, 8 layers", 8, "DFlash")  # likewise
LEAST_LAYERS = 4  # of a target, so that three distinct layers can be read


def write_random_drafter(directory: Path, geometry: DrafterGeometry, target: TargetConfig) -> None:
    """Write a drafter of random weights in bfloat16 for a target."""
    config = geometry.config(target)
    params = jax.jit(lambda key: init_params(config, key, jnp.bfloat16))(jax.random.key(3, impl=KEYS))
    save_drafter(directory, params, config)


def write_random_checkpoint(directory: Path, config: TargetConfig, *, mxfp4: bool = True, seed: int = 0) -> None:
    """Write a checkpoint of random weights. mxfp4: experts in MXFP4, else in bfloat16.

    Raises InputError if the directory is a file, and if it cannot be written.
    """
    write_target(
        directory,
        config,
        random_tensors(config, mxfp4, seed),
        mxfp4=mxfp4,
        stop_token_ids=(config.vocab_size - 1,),
        shard_bytes=SHARD_BYTES,
    )


def random_tensors(config: TargetConfig, mxfp4: bool, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Draw all tensors (name, array). An array depends on the seed and its name alone."""
    for name, shape in tensor_shapes(config, mxfp4).items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if name.endswith("_blocks"):
            yield name, np.frombuffer(rng.bytes(int(np.prod(shape))), np.uint8).reshape(shape)
        elif name.endswith("_scales"):
            # random codes have a root mean square of 2.93; scales differ, so that a test sees them mixed up
            centre = NO_SCALE - round(math.log2(2.93 * math.sqrt(shape[-1] * BLOCK)))
            yield name, rng.integers(centre - 1, centre + 2, shape, np.uint8)
        elif name.endswith("norm.weight"):
            yield name, _normal(rng, shape, mean=1.0, spread=0.1)
        elif name.endswith(("bias", "sinks")):
            yield name, _normal(rng, shape, spread=0.1)
        elif "embed_tokens" in name:
            yield name, _normal(rng, shape)
        else:
            inputs = shape[-1] if len(shape) == 2 else shape[-2]
            yield name, _normal(rng, shape, spread=inputs**-0.5)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], mean: float = 0.0, spread: float = 1.0) -> np.ndarray:
    """Draw bfloat16 values by pieces, so that few float32 values are in memory."""
    values = np.empty(int(np.prod(shape)), ml_dtypes.bfloat16)
    for start in range(0, values.size, PIECE):
        part = values[start : start + PIECE]
        part[:] = mean + spread * rng.standard_normal(part.size, np.float32)
    return values.reshape(shape)
