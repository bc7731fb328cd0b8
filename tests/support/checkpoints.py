"""Checkpoints with changes, for tables of what is read and what is refused."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from peagle.base.checkpoint import read_checkpoint, write_checkpoint
from peagle.base.errors import InputError

GONE: Any = object()  # as a value: the key or the tensor is removed


def changed(old: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Change the entries of a mapping, and of the mappings in it."""
    both = {
        key: changed(old[key], value) if isinstance(value, dict) and isinstance(old.get(key), dict) else value
        for key, value in changes.items()
    }
    return {key: value for key, value in {**old, **both}.items() if value is not GONE}


def contents(directory: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read the config and the tensors."""
    checkpoint = read_checkpoint(directory)
    return dict(checkpoint.config), {name: checkpoint.take(name) for name in checkpoint.names}


def copy_changed(directory: Path, to: Path, config: Mapping[str, Any] = {}, tensors: Mapping[str, Any] = {}) -> Path:
    """Copy a checkpoint with its config and tensors changed."""
    old_config, old_tensors = contents(directory)
    write_checkpoint(to, changed(old_config, config), changed(old_tensors, tensors))
    return to


def refusal(load: Callable[[Path], object], directory: Path) -> str:
    """Return the line that refuses to load a directory; it begins with the directory."""
    with pytest.raises(InputError) as caught:
        load(directory)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(str(directory))
    return line


def assert_same(one: Any, other: Any) -> None:
    """Assert that two trees of arrays have the same structure, dtypes and bits."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype, jax.tree_util.keystr(path)
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))
