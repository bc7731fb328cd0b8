"""A small checkpoint for the tests of scripts."""

from pathlib import Path

import pytest

from peagle.workflows.random_checkpoint import geometry, write_random_checkpoint

GEOMETRY = geometry(
    hidden=96, layers=3, heads=(6, 2), head_dim=16, vocab=89, experts=(5, 2), expert_width=64, window=24
)


@pytest.fixture(scope="module", params=[True, False], ids=["mxfp4", "unquantised"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "small"
    write_random_checkpoint(directory, GEOMETRY, mxfp4=request.param, seed=1)
    return directory
