"""The check on a GPU, as far as it can be tried without one."""

import json
import subprocess
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from peagle.measure.reports import markdown
from scripts import gpu_check
from scripts.gpu import page, shape
from scripts.gpu.serving import over_engine
from scripts.serving.models import Load

pytestmark = pytest.mark.compile


def call(*arguments: object) -> int:
    return gpu_check.main([*map(str, arguments)])


def test_a_machine_without_a_gpu_is_told_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call("--out", tmp_path / "run") == 2
    assert "not on a GPU; give --any-device" in capsys.readouterr().err
    assert call("--out", tmp_path / "run", "--shapes", "7b", "--any-device") == 2
    assert "--shapes names 7b" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_suite_that_cannot_run_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "SUITE_NEEDS", ("pytest", "no_such_module"))
    assert list(gpu_check.conformance()) == [
        {"ok": False, "error": "not run: it needs no_such_module; pip install '.[test]'"}
    ]


def test_a_section_that_fails_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("no such instruction")

    def slow() -> None:
        raise subprocess.TimeoutExpired(["a", "suite"], 180)

    for name in ("check_logits", "check_losslessness", "conformance"):
        monkeypatch.setattr(gpu_check, name, lambda *_: broken())
    monkeypatch.setattr(gpu_check, "peers", slow)
    for name in ("target_alone", "speculation", "server", "by_part"):
        monkeypatch.setattr(shape.Shape, name, lambda *_: iter(()))
    out = tmp_path / "run"
    only = ("--only", "kernels,bandwidth,parity,losslessness,conformance,peers,tiny")
    assert call("--out", out, "--shapes", "tiny", "--any-device", *only) == 1
    rows = [json.loads(line) for line in (out / "raw.jsonl").read_text().splitlines()]
    assert [row["section"] for row in rows if row.get("ok") is False] == ["parity", "losslessness", "conformance"]
    assert any("copy_gb_per_s" in row for row in rows)
    assert any("weight_bytes" in row for row in rows)
    left_out = {row["section"]: row["left_out"] for row in rows if "left_out" in row}
    assert left_out == {"peers": "it was stopped after 180 s"}
    page = (out / "README.md").read_text()
    assert "no such instruction" in page
    assert "| kernels | check kernels, ok True, found " in page
    assert json.loads((out / "run.json").read_text())["rows"] == rows


def test_sections_alone_and_a_time_that_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def endless() -> Iterator[dict[str, object]]:
        while True:
            yield {"engine": "nobody"}
            clock[0] += 40

    clock = [0.0]
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(gpu_check, "peers", endless)
    monkeypatch.setattr(gpu_check, "page", lambda _: [])
    out = tmp_path / "run"
    options = ("--any-device", "--shapes", "tiny", "--minutes", "2")
    assert call("--out", out, *options, "--only", "kernels,peers") == 0
    rows = [json.loads(line) for line in (out / "raw.jsonl").read_text().splitlines()]
    assert [row["section"] for row in rows] == ["kernels"] + ["peers"] * 6
    assert rows[-1]["left_out"] == "the rest, at the end of --minutes 2"


def test_a_section_that_there_is_not_is_told_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--any-device", "--shapes", "tiny", "--only", "speed")
    assert call("--out", tmp_path / "run", *options) == 2
    error = capsys.readouterr().err
    assert "--only speed names no section; they are kernels, bandwidth, parity" in error
    assert "losslessness, tiny: sizes, tiny: 1 after 512, tiny: 8 after 512, " in error
    assert "tiny: P-EAGLE, 4 layers, tiny: auto, tiny: sampled, tiny: server, tiny: parts, tiny: EAGLE-3" in error
    assert error.endswith("tiny: 1 after 512 by XLA, conformance, peers\n")
    assert not (tmp_path / "run").exists()


def test_the_page_has_every_table() -> None:
    spread = {"median": 2.0, "lowest": 1.5, "highest": 2.5}
    step = {"shape": "20b", "draft_vocab": 9, "vocab_size": 9, "batch": 1, "step_ms": 2.0, "tokens_a_step": 3.0}
    step |= {"temperature": 0.0, "drafter": "P-EAGLE, 4 layers", "k": 7}
    rows = [
        {"copy_gb_per_s": 2000.0},
        {"ok": True, "at": "not shown"},
        {"shape": "20b", "part": "attention", "batch": 4, "mb": 100.0, "us": 100.0, "gb_per_s": 1000.0},
        {"shape": "20b", "kernels": "CUDA", "kind": "verify", "size": 4, "batch": 1, "context": 512,
         "ms_per_pass": spread, "tok_per_s": spread, "v": 1.25, "peak_bytes": 14_000_000_000},
        {**step, "cycle_cost": 1.6, "tok_per_s": 600.0},
        {**step, **dict.fromkeys(page.TABLES["host_ms"][3:], 0.25)},
        {**step, "cycle_cost": 1.8, "tok_per_s": 400.0, "temperature": 1.0},
        {"shape": "20b", "clients": 32, "tokens_in": 512, "tokens_out": 128, "tok_per_s": 1700.0, "over_engine": 0.85,
         "engine_tok_per_s": 2000.0, "ttft_p50_s": 0.5, "itl_p50_s": 0.004, "itl_p99_s": 0.04},
        {"model": "L", "engine": "transformers-bf16", "tok_per_s": spread, "ours_over_peer": spread},
        {"model": "L", "engine": "transformers-bf16", "computes": "torch"},
    ]  # fmt: skip
    device = {"kind": "NVIDIA H100", "platform": "gpu"}
    source = {"command": "python", "device": device, "git": None, "packages": {}, "time": "now"}
    config = {"synthetic_acceptance": 0.76, "published": gpu_check.PUBLISHED}
    text = markdown(
        page.page({"provenance": source, "config": config, "rows": [{"section": "all", **row} for row in rows]})
    )
    assert "| all | ok True |" in text
    assert "| 20b | 4 | attention | 100 | 100 | 1,000 |" in text
    assert "| 20b | P-EAGLE, 4 layers | 7 | 3.7 | vLLM's post | 1,850 | 2.31 |" in text  # 3.7 tokens in 2 ms
    assert text.count("\n|---") == 1 + len(page.TABLES)


def test_a_shape_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shape, "ROOM", 1e30)
    monkeypatch.setattr(shape.jax, "devices", lambda: [Device()])
    out = tmp_path / "run"
    assert call("--out", out, "--any-device", "--shapes", "tiny", "--only", "tiny: parts") == 0
    (row,) = [json.loads(line) for line in (out / "raw.jsonl").read_text().splitlines()]
    assert row["left_out"].endswith(" GB, and 80.0 GB are free")


def test_a_shapes_weights_are_gone_when_the_next_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held: dict[str, weakref.ref[Weights]] = {}

    def by_part(self: shape.Shape) -> Iterator[dict[str, object]]:
        held[self.name] = weakref.ref(self.weights)
        yield {"alive": [name for name, weights in held.items() if weights() is not None]}
        raise RuntimeError("and nothing else of it runs")

    monkeypatch.setattr(shape, "random_params", lambda *_: Weights())
    monkeypatch.setattr(shape.Shape, "by_part", by_part)
    options = ("--any-device", "--shapes", "tiny,S", "--only", "tiny: parts,S: parts")
    assert call("--out", tmp_path / "run", *options) == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "raw.jsonl").read_text().splitlines()]
    assert [row["alive"] for row in rows if "alive" in row] == [["tiny"], ["S"]]


class Weights:
    """What a weak reference can be to."""


class Device:
    platform = device_kind = "a device"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 90_000_000_000, "bytes_in_use": 10_000_000_000}


def test_a_server_is_measured_beside_its_engine() -> None:
    """The shape's own engine, served in this process; the clients are another."""
    tiny = shape.Shape("tiny")
    (row,) = over_engine(tiny.pair(), [Load(2, 2, 16, 12, rounds=1)])
    assert (row["clients"], row["tokens_in"], row["tokens_out"]) == (2, 16, 12)
    assert row["over_engine"] == pytest.approx(row["tok_per_s"] / row["engine_tok_per_s"])
    assert all(row[name] > 0 for name in ("ttft_p50_s", "itl_p50_s", "itl_p99_s"))
