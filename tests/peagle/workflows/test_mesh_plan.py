"""What each device holds, on paper, is what loading puts there."""

import dataclasses
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from peagle.base.errors import InputError
from peagle.cli import main
from peagle.parallel.mesh import MeshShape
from peagle.workflows.mesh_plan import DEVICES, device_named, pass_s, rank_bytes, rank_cache_bytes
from peagle.workflows.random_checkpoint import SIZES, random_tensors
from target.load import weight_bytes, write_target
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


def test_more_rows_read_more_and_one_device_has_no_collectives() -> None:
    device = dataclasses.replace(DEVICES["H100"], latency_s=1e-5)
    alone, over = (pass_s(SIZES["20b"], True, shape, device, 1) for shape in (MeshShape(), MeshShape(2)))
    assert alone[1] == 0
    assert over[1] > 49e-5
    assert alone[0] / 2 == pytest.approx(over[0], rel=0.01)
    assert pass_s(SIZES["20b"], True, MeshShape(), device, 4)[0] > alone[0]


def test_bad_plans_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="the device is 'X'; expected H100, H200, B200"):
        device_named("X")
    for arguments, message in (
        (("--mesh", "tp=2"), "--mesh asks for tp=2, but the target has 3 heads"),
        (("--mesh", "tp=3", "--device", "X"), "--device is 'X'"),
        (("--mesh", "3"), "--mesh is '3'"),
    ):
        assert main(["info", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_info_and_the_script_show_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--mesh", "tp=3", "--slots", "2", "--context", "256"]) == 0
    shown = capsys.readouterr().out
    assert "over tp=3,ep=1                3 devices" in shown
    assert "17 collectives" in shown
    assert re.search(r"  loading each +reads ([\d.]+) MB of [\d.]+ MB; on CPU", shown)
    assert "--slots 2 --context 256" in shown
    assert main(["info", "--mesh", "dp=2,tp=3", "--slots", "4", "--context", "256"]) == 0
    replicated = capsys.readouterr().out
    assert "over dp=2,tp=3,ep=1           6 devices: 2 replicas on 3 each, of 2 slots each" in replicated
    rows = [next(line for line in text.splitlines() if "pages of each" in line) for text in (shown, replicated)]
    assert rows[0] == rows[1].replace("--slots 4", "--slots 2")
