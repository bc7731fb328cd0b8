"""Recording vLLM: the copy for it holds the target's own values, and any failure is one line.

A stand-in answers for vLLM here; tests/golden/test_vllm.py compares with what vLLM gave.
"""

import ast
import sys
from pathlib import Path

import jax
import numpy as np

from peagle.base.checkpoint import read_checkpoint
from scripts.golden import vllm
from scripts.peers import worker
from target.load import load_target


def test_the_copy_for_vllm_holds_the_targets_own_values(tmp_path: Path, checkpoint: Path) -> None:
    vllm.write_unquantised(checkpoint, tmp_path / "copy", np.float32)
    copy = read_checkpoint(tmp_path / "copy")
    assert {str(copy.dtype(name)) for name in copy.names} == {"float32"}
    ours, theirs = (load_target(path, experts="expanded") for path in (checkpoint, tmp_path / "copy"))
    assert (ours.config, ours.stop_token_ids) == (theirs.config, theirs.stop_token_ids)
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


def test_vllms_worker_imports_nothing_of_ours() -> None:
    """Its environment has none of our packages."""
    for name in ("worker.py", "vllm_engine.py"):
        tree = ast.parse((Path(worker.__file__).parent / name).read_text(encoding="utf-8"))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {name.partition(".")[0] for name in imported} <= {*sys.stdlib_module_names, "torch", "vllm"}
