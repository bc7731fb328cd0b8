"""The kernels' bits do not depend on the optimiser.

One that fused a multiplication with an addition in one loop and not in another would make a row's bits depend on the
rows beside it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peagle.ops import native
from peagle.ops.native import build
from tests.ops.conftest import CANNOT

ROOT = Path(__file__).parents[3]
# the demo's logits of a pass over many rows, and of passes of eight and of one
LOGITS = """
import hashlib
import jax.numpy as jnp
import peagle

target, ids, digest = peagle.load().plain_target, jnp.arange(5, 105, dtype=jnp.int32)[None], hashlib.sha256()
cache = target.init_cache(1, 128, 100)
for at, width in ((0, 100), (100, 8), (108, 1), (109, 8)):
    positions = at + jnp.arange(width, dtype=jnp.int32)[None]
    output, cache = target.extend(ids[:, :width], positions, cache)
    digest.update(jnp.asarray(output.logits).tobytes())
print(digest.hexdigest())
"""


def logits(isa: str, directory: Path) -> str:
    environment = os.environ | {native.VARIABLE: isa, native.DIRECTORY: str(directory), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", LOGITS], cwd=ROOT, env=environment, capture_output=True, text=True)
    if any(words in done.stderr for words in CANNOT):
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def hardly_optimised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        build.compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("libraries")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", tuple("-O1" if flag == "-O3" else flag for flag in build.FLAGS))
        assert "-O1" in build.FLAGS
        build.build(directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("isa", build.instruction_sets())
def test_the_bits_are_those_of_the_source(isa: str, hardly_optimised: Path) -> None:
    assert logits(isa, hardly_optimised) == logits(isa, build.HERE)
