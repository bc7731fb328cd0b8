"""Costs on paper follow from bytes and products that are counted here by hand."""

import dataclasses
from pathlib import Path

import pytest

from peagle.ops.errors import InputError
from peagle.parallel import MeshShape
from peagle.workflows.plan import DEVICES
from peagle.workflows.random_checkpoint import SIZES
from scripts.fleet_sim.paper import Reached, Replica, paper_costs
from scripts.fleet_sim.simulation import Arrangement, Lengths, Target, highest_rate, read_costs
from scripts.simulate_fleet import main

ONE = Replica(SIZES["20b"], MeshShape(), DEVICES["H100"])


def test_a_row_reads_weights_and_many_rows_multiply() -> None:
    assert pytest.approx(ONE.row_weights + ONE.head_weights, rel=0.02) == 3.6e9  # 3.6 G active parameters, published
    assert ONE.pass_s(1) == pytest.approx(1 / 305, rel=0.05)  # what the share of the memory's speed comes from
    rows = 4096
    flop = 2 * rows * ONE.row_weights + 2 * ONE.head_weights
    assert ONE.pass_s(rows, heads=1) == pytest.approx(flop / (ONE.reached.arithmetic * 989e12))


def test_a_long_prompt_multiplies_each_row_with_the_keys_before_it() -> None:
    tokens = 32768
    scores = 2 * 2 * 12 * 64 * 64 * tokens * tokens / 2  # q k and p v, 12 full layers of 64 heads of 64
    assert ONE.prompt_s(tokens) - tokens / 2048 * ONE.prompt_s(2048) == pytest.approx(
        (scores - 16 * scores / 256) / (ONE.reached.arithmetic * 989e12), rel=1e-6
    )


def test_a_position_is_read_from_the_full_layers_alone() -> None:
    assert ONE.position_s == pytest.approx(12 * 2 * 8 * 64 * 2 / (ONE.reached.memory * 3.35e12))
    assert dataclasses.replace(ONE, mesh=MeshShape(4)).position_s == pytest.approx(ONE.position_s / 4)


def test_costs_are_written_and_sized_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    assert main(["--paper", str(path), "--size", "120b", "--mesh", "tp=2", "--slots", "8"]) == 0
    costs = read_costs(path)
    assert costs == paper_costs(Replica(SIZES["120b"], MeshShape(2), DEVICES["H100"]), 8, [3], 0.76)
    lengths, wanted = Lengths((512, 512), (128, 128)), Target(1.0, 0.05)
    plain, drafting = (highest_rate(costs, Arrangement(0, 1, 8, k), lengths, wanted, 60) for k in (0, 3))
    assert 0 < plain < drafting
    assert main(["--paper", str(path), "--mesh", "tp=3"]) == 2
    assert "tp" in capsys.readouterr().err


@pytest.mark.parametrize(("slots", "ks", "kept"), [(0, [3], 0.5), (1, [-1], 0.5), (1, [3], 1.0)])
def test_what_cannot_be_is_refused(slots: int, ks: list[int], kept: float) -> None:
    with pytest.raises(InputError, match="expected"):
        paper_costs(ONE, slots, ks, kept)
    with pytest.raises(InputError, match="shares"):
        Reached(memory=1.5)
