"""`peagle info`: what checkpoints are, how their files are read, whether they fit, and what they take of memory."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import peagle.workflows.inspection
from drafter.load import weight_bytes as drafter_weight_bytes
from peagle.base.memory import tree_bytes
from peagle.loading.load import load
from peagle.ops.kernels import for_weights
from target.load import weight_bytes
from tests.support.checkpoints import GONE, copy_changed
from tests.support.commands import Captured, all_refused, refused
from tests.support.pairs import Directories, edit_json

Run = Callable[..., Captured]
KEY = "eagle_aux_hidden_state_layer_ids"


def test_info_tells_what_checkpoints_are_and_whether_they_fit(real: Run, directories: Directories) -> None:
    target, drafter = str(directories.target), str(directories.drafter)
    for names in ((target, drafter), (drafter, target)):
        code, out, err = real("info", *names)
        assert (code, err) == (0, "")
        for part in ("GPT-OSS target", "P-EAGLE drafter", "MXFP4", "They fit", "layers 0, 1, 2", "stop tokens"):
            assert part in out
    assert "They fit" not in real("info", target)[1]
    assert f"{(directories.target / 'model.safetensors').stat().st_size / 1e3:.1f} kB" in real("info", target)[1]


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        ({}, {"norm.weight": GONE}, "tensors are missing: norm.weight;"),
        ({}, {"layers.1.mlp.down_proj.weight": np.zeros((3, 3), np.float32)}, "down_proj.weight has shape [3, 3]"),
    ],
)
def test_info_refuses_a_drafter_as_loading_does(
    real: Run, directories: Directories, tmp_path: Path, config: Any, tensors: Any, says: str
) -> None:
    drafter = str(copy_changed(directories.drafter, tmp_path / "drafter", config, tensors))
    for names in ((drafter,), (str(directories.target), drafter)):
        refused(real("info", *names), says)
    refused(real("speculate", "--target", str(directories.target), "--drafter", drafter, "Hi"), says)


def test_a_drafter_that_takes_its_targets_embedding_has_its_width(
    real: Run, directories: Directories, tmp_path: Path
) -> None:
    drafter = str(copy_changed(directories.drafter, tmp_path / "drafter", {}, {"embed_tokens.weight": GONE}))
    says = "it takes embed_tokens.weight from its target and has a width of 40, the target's is 64"
    code, out, err = real("info", str(directories.target), drafter)  # after the tables of both
    assert code == 2
    assert says in err
    assert "They fit" not in out
    refused(real("speculate", "--target", str(directories.target), "--drafter", drafter, "Hi"), says)


def test_info_counts_memory_by_the_shapes(real: Run, directories: Directories) -> None:
    """Parameters and cache bytes are those of the loaded model."""
    pair = load(directories.target, None, kernels="xla")
    out = real("info", str(directories.target))[1].partition("\nan engine")[0]
    lines = dict(line.strip().split("  ", 1) for line in out.splitlines()[1:])
    params = pair.plain_target.params  # type: ignore[attr-defined]
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert f"{count:,}," in lines["parameters"]
    assert f"expanded {4 * count / 1e3:.1f} kB float32" in lines["in memory"]
    full, sliding = (
        tree_bytes(jax.eval_shape(lambda counts=counts: pair.plain_target.init_pages(counts)))
        for counts in ((1, 0), (0, 1))
    )
    assert f"{1000 * full / 64 / 1e3:.1f} kB float32" in lines["KV cache per 1,000 tokens"]
    # a window of 24 positions and 24 rows of steps in flight are less than a page; one more at either end
    assert f"{3 * sliding / 1e3:.1f} kB float32" in lines["KV pages per slot"]
    assert f"{1000 * (full + sliding) / 64 / 1e3:.1f} kB float32" in lines["with --retain-full-kv"]


def test_info_says_what_an_engine_takes(real: Run, directories: Directories, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of an engine of that shape, and the tokens of one that has all the memory."""
    pair = load(directories.target, directories.drafter, kernels="xla", dtype="bfloat16")
    free = 1_000_000
    options: dict[str, Any] = {"dtype": jnp.dtype(jnp.bfloat16), "implementation": for_weights()}
    weights = weight_bytes(directories.target, **options) + drafter_weight_bytes(directories.drafter, **options)
    monkeypatch.setattr(peagle.workflows.inspection, "available_memory_bytes", lambda: weights + free)
    typed = ("info", str(directories.target), str(directories.drafter), "--context", "300")
    code, out, _ = real(*typed, "--slots", "3")
    config = pair.engine_config(7, slots=3, context=300)
    memory = pair.engine(config).memory
    assert code == 0
    assert f"{memory.page_use.num_tokens:,}, in {memory.num_pages[0]} pages of 64" in out
    assert f"{sum(memory.num_bytes) / 1e3:.1f} kB bfloat16" in out
    filled = pair.engine(dataclasses.replace(config, kv_memory=free)).memory
    assert f"{filled.page_use.num_tokens:,} in the memory that the weights leave now (bfloat16)\n" in out
    monkeypatch.setattr(peagle.workflows.inspection, "available_memory_bytes", lambda: weights)
    assert "0 in the memory" in (out := real(*typed)[1])
    assert "; too few for one request of 300" in out


def test_info_refuses_what_is_no_pair(
    capsys: pytest.CaptureFixture[str], real: Run, directories: Directories, tmp_path: Path
) -> None:
    target, drafter, other = str(directories.target), str(directories.drafter), tmp_path / "other"
    table: list[tuple[list[str], str]] = [
        ([target, target], "both targets"),
        ([target, drafter, target], "3 directories"),
        ([str(tmp_path)], "no config.json"),
        ([""], "name is empty; expected a directory"),
        (["demo", "ngram"], "ngram has no checkpoint to inspect; expected a directory or demo, demo-eagle3"),
        ([target, "--aux-layer-ids", "0,1,2"], "--aux-layer-ids is given"),
        ([drafter, "--aux-layer-ids", "one"], "--aux-layer-ids is 'one'"),
    ]
    all_refused(capsys, ["info"], table)
    shutil.copytree(directories.drafter, other)
    edit_json(other / "config.json", **{KEY: [1, 2, 9]})
    code, out, err = real("info", target, str(other))
    assert (code, "They fit" in out, "9 names no layer" in err) == (2, False, True)
