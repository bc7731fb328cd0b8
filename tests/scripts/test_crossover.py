"""What scripts.crossover counts and what it says."""

import json
from pathlib import Path

import pytest

from peagle.workflows.random_checkpoint import SIZES
from scripts import crossover
from scripts.crossover import IN_TURN, KINDS, by_bytes, cheaper_from


def test_bytes_of_drafting_are_those_of_the_matrices_a_pass_reads() -> None:
    target = SIZES["tiny"]
    d, heads = target.hidden_size, (target.num_heads + 2 * target.num_kv_heads) * target.head_dim
    out, mlp = target.num_heads * target.head_dim * d, 3 * d * 2 * d
    first = 2 * d * heads + out + mlp + 3 * d  # with three norms
    later = first - d * heads - d
    fc, head = 3 * d * d, d * target.vocab_size
    for kind in KINDS:
        layers = first + (kind.layers - 1) * later
        for k in (1, 4):
            passes = 1 if kind.parallel else k
            assert kind.draft_bytes(kind.config(target), k) == 2 * (fc + passes * (layers + head))


def test_by_bytes_one_draft_is_cheapest_in_one_layer_and_many_in_one_pass() -> None:
    cost = {
        (row["drafter"], row["k"], row["draft_vocab"]): row["cost"] for row in by_bytes("20b", SIZES["20b"], [1, 7])
    }
    whole = SIZES["20b"].vocab_size
    names = [kind.name for kind in KINDS]
    assert sorted(names, key=lambda name: cost[name, 1, whole]) == names
    assert cost[IN_TURN.name, 7, whole] > max(cost[name, 7, whole] for name in names[1:])
    assert all(cost[name, 7, whole] > cost[name, 7, crossover.NARROW_VOCAB] for name in names)


@pytest.mark.parametrize(
    ("gains", "first"),
    [
        ([(1, 0.9), (3, 1.2), (7, 1.5)], 3),
        ([(1, 1.1), (3, 0.9), (7, 1.5)], 7),
        ([(7, 1.5), (1, 1.1), (3, 1.2)], 1),
        ([(1, 1.1), (3, 1.2), (7, 1.0)], None),
    ],
)
def test_cheaper_from_is_where_all_larger_numbers_gain(gains: list[tuple[int, float]], first: int | None) -> None:
    assert cheaper_from(gains) == first


@pytest.mark.slow
def test_a_run_leaves_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = ["crossover", "--out", str(out), "demo", "-k", "1,2", "--rounds", "2", "--steps", "4", "--draft-vocab"]
    monkeypatch.setattr("sys.argv", [*command, "2049"])
    assert crossover.main() == 2
    assert "--draft-vocab is 2049; expected 1 to 2048" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", [*command, "1024"])
    assert crossover.main() == 0
    record = json.loads((out / "run.json").read_text())
    assert len(record["rows"]) == 2 * len(KINDS)
    assert all(row["cost"] > 0 for row in record["rows"])
    lines = [json.loads(line) for line in (out / "raw.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * (1 + 2 * len(KINDS))
    page = (out / "README.md").read_text()
    assert "## demo: a plain step takes" in page
    assert "| 120b, 32,768, P-EAGLE, 4 layers |" in page
    assert "Random drafters that propose 1,024 tokens, " in page
    first = next(row for row in record["rows"] if row["k"] == 1)
    assert f" {1.76 / first['cost']:.2f} |" in page, "what its cost is worth at the published rate"
    assert "| demo, measured |" in page
    assert "| 20b, 201,088 draft tokens, by bytes | 2 | 2 |" in page
    assert (out / "crossover.png").stat().st_size > 20_000
    assert crossover.main() == 2
    assert "so that no result is overwritten" in capsys.readouterr().err
