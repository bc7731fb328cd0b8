"""The check on a GPU, as far as it can be tried without one."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts import gpu_check
from scripts.make_random_checkpoint import SIZES
from target.load import tensor_shapes
from target.model import forward
from target.random import random_bytes, random_params


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *map(str, arguments)])
    return gpu_check.main()


def test_random_weights_are_a_whole_model_that_stays_finite() -> None:
    config = SIZES["tiny"]
    params = random_params(config, 0, jnp.float32)
    leaves = jax.tree.leaves(params)
    assert sum(leaf.nbytes for leaf in leaves) == random_bytes(config, jnp.float32)
    # as many parameters as a checkpoint has, four-bit codes in pairs
    stored = sum(int(np.prod(shape)) for shape in tensor_shapes(config, mxfp4=True).values())
    assert sum(leaf.size for leaf in leaves) == stored
    ids = jnp.arange(24, dtype=jnp.int32)[None] % config.vocab_size
    logits, _ = jax.jit(lambda params: forward(params, config, ids, jnp.arange(24, dtype=jnp.int32)[None]))(params)
    assert bool(jnp.isfinite(logits).all())
    assert 0.3 < float(logits.std()) < 3


def test_a_machine_without_a_gpu_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(monkeypatch, "--out", tmp_path / "run") == 2
    assert "not on a GPU; give --any-device" in capsys.readouterr().err
    assert call(monkeypatch, "--out", tmp_path / "run", "--shapes", "7b", "--any-device") == 2
    assert "--shapes names 7b" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_section_that_fails_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("no such instruction")

    for name in ("parity", "losslessness", "conformance"):
        monkeypatch.setattr(gpu_check, name, broken)
    monkeypatch.setattr(gpu_check, "target_alone", lambda *_: iter(()))
    monkeypatch.setattr(gpu_check, "speculation", lambda *_: iter(()))
    out = tmp_path / "run"
    assert call(monkeypatch, "--out", out, "--shapes", "tiny", "--any-device") == 1
    rows = [json.loads(line) for line in (out / "raw.jsonl").read_text().splitlines()]
    assert [row["section"] for row in rows if row.get("ok") is False] == ["parity", "losslessness", "conformance"]
    assert any("copy_gb_per_s" in row for row in rows)
    assert any("weight_bytes" in row for row in rows)
    page = (out / "README.md").read_text()
    assert "no such instruction" in page
    assert json.loads((out / "run.json").read_text())["rows"] == rows
