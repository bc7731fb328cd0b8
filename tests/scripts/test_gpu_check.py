"""The check on a GPU, as far as it can be tried without one."""

import json
from pathlib import Path

import pytest

from scripts import gpu_check
from scripts.gpu import page, shape
from scripts.gpu.serving import over_engine
from scripts.serving.models import Load

pytestmark = pytest.mark.compile


def call(*arguments: object) -> int:
    return gpu_check.main([*map(str, arguments)])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", "not on a GPU; give --any-device"),
        ("--shapes 7b --any-device", "--shapes names 7b"),
        ("--shapes tiny --any-device --only speed", "names no section; they are kernels, bandwidth, parity, loss"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: str, says: str
) -> None:
    assert call("--out", tmp_path / "run", *options.split()) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_section_that_fails_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("no such instruction")

    for name in ("check_logits", "check_losslessness"):
        monkeypatch.setattr(gpu_check, name, lambda *_: broken())
    for name in ("target_alone", "speculation", "server", "by_part"):
        monkeypatch.setattr(shape.Shape, name, lambda *_: iter(()))
    out = tmp_path / "run"
    only = ("--only", "kernels,bandwidth,parity,losslessness,tiny")
    assert call("--out", out, "--shapes", "tiny", "--any-device", *only) == 1
    rows = [json.loads(line) for line in (out / "raw.jsonl").read_text().splitlines()]
    assert [row["section"] for row in rows if row.get("ok") is False] == ["parity", "losslessness"]
    assert any("copy_gb_per_s" in row for row in rows)
    assert any("weight_bytes" in row for row in rows)
    page = (out / "README.md").read_text()
    assert "no such instruction" in page
    assert "| kernels | check kernels, ok True, found " in page
    assert json.loads((out / "run.json").read_text())["rows"] == rows


def test_steps_are_projected_at_published_acceptance_lengths() -> None:
    step = {"section": "all", "shape": "20b", "drafter": "P-EAGLE, 4 layers", "k": 7, "draft_vocab": 9, "vocab_size": 9}
    step |= {"batch": 1, "step_ms": 2.0, "cycle_cost": 1.6, "temperature": 0.0}
    rows = [step, {**step, "batch": 8}, {**step, "temperature": 1.0}, {**step, "draft_vocab": 5}]
    (row,) = page.published(rows, gpu_check.PUBLISHED)
    assert (row["acceptance_length"], row["tok_per_s"], row["over_plain"]) == (3.7, 1850, 3.7 / 1.6)


def test_a_server_is_measured_beside_its_engine() -> None:
    """The shape's own engine, served in this process; the clients are another."""
    tiny = shape.Shape("tiny")
    (row,) = over_engine(tiny.pair(), [Load(2, 2, 16, 12, rounds=1)])
    assert (row["clients"], row["tokens_in"], row["tokens_out"]) == (2, 16, 12)
    assert row["over_engine"] == pytest.approx(row["tok_per_s"] / row["engine_tok_per_s"])
    assert all(row[name] > 0 for name in ("ttft_p50_s", "itl_p50_s", "itl_p99_s"))
