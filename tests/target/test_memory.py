"""Peak memory of loading a checkpoint of some 300 MB and decoding, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from peagle.ops import native
from peagle.workflows.random_checkpoint import geometry, random_tensors
from target.load import inspect_target, load_target, weight_bytes, write_target

pytestmark = pytest.mark.compile

CONFIG = geometry(
    hidden=1024, layers=3, heads=(16, 4), head_dim=64, vocab=32768, experts=(32, 4), expert_width=1024, window=64
)
# memory for compiling the two programs of a decoding, for any weights
COMPILER_BYTES = {"native": 128_000_000, "xla": 256_000_000}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("memory") / "target"
    tensors = random_tensors(CONFIG, mxfp4=True, seed=0)
    write_target(path, CONFIG, tensors, mxfp4=True, shard_bytes=100_000_000)
    return path


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a checkpoint of some 10 MB."""
    path: Path = tmp_path_factory.mktemp("smaller") / "target"
    config = geometry(
        hidden=512, layers=2, heads=(8, 2), head_dim=64, vocab=4096, experts=(8, 2), expert_width=512, window=64
    )
    write_target(path, config, random_tensors(config, mxfp4=True, seed=0), mxfp4=True)
    return path


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("kernels", ["native", pytest.param("xla", marks=pytest.mark.slow)])
def test_memory_peaks_within_15_percent_of_weights_and_caches(directory: Path, kernels: str) -> None:
    """While loading, and while decoding, where the compiler's memory comes on top."""
    measured = measure(directory, kernels)
    assert measured["weights"] <= measured["loading"] + 1e6  # untouched pages do not count, and loading touches all
    assert measured["loading"] <= 1.15 * measured["weights"]
    assert measured["decoding"] <= 1.15 * (measured["weights"] + measured["caches"]) + COMPILER_BYTES[kernels]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_ranks_are_loaded_within_15_percent_of_their_parts(directory: Path) -> None:
    """Several at once, and put side by side without a copy, in one memory."""
    measured = measure(directory, "native", "tp=4")
    assert measured["weights"] > 400e6  # with what is on every one
    assert measured["weights"] <= measured["loading"] + 1e6
    assert measured["loading"] <= 1.15 * measured["weights"]


def measure(directory: Path, kernels: str, *mesh: str) -> dict[str, int]:
    """Measure in a process of its own."""
    if kernels == "native" and not native.available():
        pytest.skip(native.status()[1])
    command = [sys.executable, "-m", "tests.target.peak_memory", str(directory), kernels, *mesh]
    environment = os.environ | {"MALLOC_ARENA_MAX": "2", "JAX_NUM_CPU_DEVICES": "4"}
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True)
    measured: dict[str, int] = json.loads(run.stdout)
    assert measured["weights"] > 250e6
    return measured


@pytest.mark.parametrize(
    ("experts", "implementation", "dtype"),
    [
        ("packed", "native", jnp.float32),
        ("packed", "native", jnp.bfloat16),
        ("packed", None, jnp.float32),
        ("packed", None, jnp.bfloat16),
        ("expanded", "native", jnp.float32),
    ],
)
def test_weight_bytes_are_those_of_the_loaded_weights(
    smaller: Path, experts: str, implementation: str | None, dtype: object
) -> None:
    if implementation == "native" and not native.available():
        pytest.skip(native.status()[1])
    options = {"dtype": dtype, "experts": experts, "implementation": implementation}
    loaded = load_target(smaller, **options)  # type: ignore[arg-type]
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
    assert weight_bytes(smaller, **options) == pytest.approx(held, rel=0.01)  # type: ignore[arg-type]
    if (experts, implementation) == ("packed", "native"):
        assert held == pytest.approx(inspect_target(smaller).tensor_bytes, rel=0.01)  # as stored
