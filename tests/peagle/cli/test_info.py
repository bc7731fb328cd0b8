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
from tests.support.pairs import STOP, Directories, edit_json

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


@pytest.mark.parametrize(("name", "kind"), [("demo", "P-EAGLE"), ("demo-eagle3", "EAGLE-3"), ("demo-dflash", "DFlash")])
def test_info_knows_the_demo_models_by_name(real: Run, name: str, kind: str) -> None:
    code, out, _ = real("info", "demo", name)
    assert code == 0
    for part in ("GPT-OSS target", f"{kind} drafter", "They fit"):
        assert part in out
    assert f"{kind if name != 'demo' else 'GPT-OSS'}" in real("info", name)[1]
    if name != "demo":
        assert "They fit" in real("info", name, "demo")[1]


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


def test_info_refuses_a_target_as_loading_does(real: Run, directories: Directories, tmp_path: Path) -> None:
    target = str(copy_changed(directories.target, tmp_path / "target", {}, {"model.norm.weight": GONE}))
    says = "tensors are missing: model.norm.weight"
    refused(real("info", target), says)
    refused(real("speculate", "-k", "0", "--target", target, "--prompt-ids", "1"), says)


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


def test_info_says_how_aux_layers_are_read_and_warns(real: Run, directories: Directories, tmp_path: Path) -> None:
    """Which, and why, and whether they look like the other kind."""
    drafter, target = tmp_path / "drafter", str(directories.target)
    shutil.copytree(directories.drafter, drafter)
    edit_json(drafter / "config.json", **{KEY: [1, 2, 3]})
    alone, both = real("info", str(drafter))[1], real("info", target, str(drafter))[1]
    assert f"outputs 0, 1, 2: config.json's {KEY} [1, 2, 3] are inputs" in alone
    assert "WARNING" in alone
    assert "WARNING" not in both  # the target has no layer 3
    told = real("info", target, str(drafter), "--aux-layer-ids", "0,2,1")[1]
    assert "outputs 0, 2, 1, given instead of" in told
    assert "the target's layers 0, 2, 1" in told
    edit_json(drafter / "config.json", **{KEY: None, "eagle_config": {KEY: [0, 1, 2]}})
    assert f"outputs 0, 1, 2: config.json's eagle_config.{KEY} [0, 1, 2] are outputs" in real("info", str(drafter))[1]


def test_info_says_where_stop_tokens_come_from_and_warns(real: Run, directories: Directories, tmp_path: Path) -> None:
    """The commands warn, too, even if they are quiet."""
    target = tmp_path / "target"
    shutil.copytree(directories.target, target)
    assert f"{STOP}, by generation_config.json" in real("info", str(target))[1]
    (target / "generation_config.json").unlink()
    assert f"{STOP}, by config.json" in real("info", str(target))[1]
    edit_json(target / "config.json", eos_token_id=None)
    assert f"{STOP}, by tokenizer_config.json" in real("info", str(target))[1]
    (target / "tokenizer.json").unlink()
    assert "WARNING: no stop token" in real("info", str(target))[1]
    code, _, err = real("speculate", "-k", "0", "--target", str(target), "--prompt-ids", "5,6", "-n", "2", "-q")
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith("peagle: warning: ")
    assert "no stop token" in err


def test_info_says_what_auto_drafts(real: Run, directories: Directories, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(directories.drafter, drafter)

    def line() -> str:
        said = next(line for line in real("info", str(drafter))[1].splitlines() if "drafts by auto" in line)
        return said.split("auto")[1].strip()

    assert line() == "7 at most per step; there is no speculation.json"
    (drafter / "speculation.json").write_text('{"num_speculative_tokens": 5}')
    assert line() == "5 at most per step; by speculation.json"
    (drafter / "speculation.json").write_text('{"num_speculative_tokens": "5"}')
    refused(real("info", str(drafter)), "speculation.json has num_speculative_tokens '5'; expected")


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
