"""What each device holds, on paper, is what loading puts there."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from peagle.cli import main
from peagle.parallel.mesh import MeshShape
from peagle.workflows.inspection import mesh_rows
from peagle.workflows.mesh_plan import rank_bytes, rank_cache_bytes
from peagle.workflows.random_checkpoint import SIZES, random_tensors
from target.load import TargetFiles, weight_bytes, write_target
from target.shard import Rank
from tests.target.test_shard import CONFIG

MESHES = [MeshShape(2), MeshShape(8), MeshShape(1, 4), MeshShape(2, 2)]


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_the_plan_is_what_is_loaded(shape: MeshShape, tmp_path: Path) -> None:
    write_target(tmp_path, CONFIG, random_tensors(CONFIG, True, 1), mxfp4=True)
    for rank, planned in enumerate(rank_bytes(CONFIG, True, shape)):
        own = Rank(rank, shape.tp, shape.ep)
        loaded = weight_bytes(tmp_path, dtype=jnp.bfloat16, experts="packed", implementation="xla", rank=own)
        assert planned.total == loaded


def test_parts_padding_and_copies_add_up() -> None:
    (whole,) = rank_bytes(CONFIG, True, MeshShape())
    assert whole.padding == 0
    for shape in (MeshShape(2), MeshShape(1, 2)):
        parts = rank_bytes(CONFIG, True, shape)
        own = sum(part.total - part.padding - part.replicated for part in parts)
        assert own + whole.replicated == whole.total


def test_the_published_models() -> None:
    (whole,) = rank_bytes(SIZES["120b"], True, MeshShape())
    assert whole.total / 1e9 == pytest.approx(65.25, abs=0.05)  # the size of its files
    last = rank_bytes(SIZES["20b"], True, MeshShape(8))[-1]
    assert last.padding > 0.3 * last.kinds["experts"]  # 192 of 384 columns
    one, two = (rank_cache_bytes(SIZES["20b"], MeshShape(tp), 8, 4096, 3) for tp in (1, 2))
    assert one == 2 * two
    sixteen = rank_cache_bytes(SIZES["20b"], MeshShape(16), 8, 4096, 3)
    assert sixteen == one // 8  # 8 kv heads, each on two devices


def test_the_plan_says_where_the_fast_kernels_do_not_take_a_cut() -> None:
    def said(shape: MeshShape, device: str, size: str = "20b") -> str | None:
        files = TargetFiles(SIZES[size], (), None, True, 0, 0, 0, 0)
        return dict(mesh_rows(files, shape, device, 8, 4096, 3)).get("  kernels for experts")

    assert "tp=8 leaves each device 384 of an expert's 2,880 columns" in (said(MeshShape(8), "H200") or "")
    assert "tp=2 leaves" in (said(MeshShape(2, 4), "H100", "120b") or "")
    assert said(MeshShape(1, 8), "H100", "120b") is None
    assert said(MeshShape(2), "B200") is None
    assert said(MeshShape(2), "H100", "S") is None  # no size of theirs, cut or not


def test_bad_plans_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (("--mesh", "tp=2"), "--mesh asks for tp=2, but the target has 3 heads"),
        (("--mesh", "tp=3", "--device", "X"), "--device is 'X'; expected H100, H200, B200"),
        (("--mesh", "3"), "--mesh is '3'"),
    ):
        assert main(["info", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
