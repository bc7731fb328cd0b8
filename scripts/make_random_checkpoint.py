"""Writes a GPT-OSS checkpoint of random weights in the real layout: for speed, memory and format, not for sense.

    python -m scripts.make_random_checkpoint M /tmp/gpt-oss-m --unquantized --seed 1

Tensors are drawn and written one after the other, so the 20b geometry (13 GB) needs the memory of one shard. Equal
arguments give equal bytes. Scales are those of a fresh initialisation: activations stay finite and routing is spread.
"""

import argparse
import math
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from peagle.ops.errors import InputError
from peagle.ops.mxfp4 import BLOCK
from peagle.ops.rope import RopeConfig, Yarn
from target.config import FULL, SLIDING, TargetConfig
from target.load import tensor_shapes, write_target

SHARD_BYTES = 2 << 30
PIECE = 1 << 24
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
    """A TargetConfig with what all GPT-OSS models share filled in.

    heads are query and key/value heads; experts are all of them and those a token selects.
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


# S, M, L: the sizes of the published baselines (11 M, 183 M, 1.8 G parameters); L has the 20b's own layers
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


def random_tensors(config: TargetConfig, mxfp4: bool, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of every tensor, each drawn from the seed and its own name, so that order does not matter."""
    for name, shape in tensor_shapes(config, mxfp4).items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if name.endswith("_blocks"):
            yield name, np.frombuffer(rng.bytes(int(np.prod(shape))), np.uint8).reshape(shape)
        elif name.endswith("_scales"):
            # random codes have a root mean square of 2.93; a bit more or less, so that scales tell apart
            centre = NO_SCALE - round(math.log2(2.93 * math.sqrt(shape[-1] * BLOCK)))
            yield name, rng.integers(centre - 1, centre + 2, shape, np.uint8)
        elif name.endswith("norm.weight"):
            yield name, normal(rng, shape, mean=1.0, spread=0.1)
        elif name.endswith(("bias", "sinks")):
            yield name, normal(rng, shape, spread=0.1)
        elif "embed_tokens" in name:
            yield name, normal(rng, shape)
        else:
            inputs = shape[-1] if len(shape) == 2 else shape[-2]
            yield name, normal(rng, shape, spread=inputs**-0.5)


def normal(rng: np.random.Generator, shape: tuple[int, ...], mean: float = 0.0, spread: float = 1.0) -> np.ndarray:
    """bfloat16 values, drawn in pieces: the float32 values are never in memory all at once."""
    values = np.empty(int(np.prod(shape)), ml_dtypes.bfloat16)
    for start in range(0, values.size, PIECE):
        part = values[start : start + PIECE]
        part[:] = mean + spread * rng.standard_normal(part.size, np.float32)
    return values.reshape(shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("directory", type=Path)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--mxfp4", dest="mxfp4", action="store_true", default=True, help="experts in MXFP4 (default)")
    kind.add_argument("--unquantized", dest="mxfp4", action="store_false", help="experts in bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = SIZES[args.size]
    try:
        write_target(
            args.directory,
            config,
            random_tensors(config, args.mxfp4, args.seed),
            mxfp4=args.mxfp4,
            stop_token_ids=(config.vocab_size - 1,),
            shard_bytes=SHARD_BYTES,
        )
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
