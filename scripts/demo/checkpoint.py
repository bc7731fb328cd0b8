"""Checkpoints of the demo's training: a pytree of arrays in one .npz file, leaves named by their path; no pickle.

A finished target is loaded with

    config, params = load_target(folder)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle.ops.files import write_whole
from target.config import TargetConfig, parse_config
from target.params import TargetParams, init_params


def save_tree(path: Path, tree: Any) -> None:
    """Write the tree's leaves; a reader never sees a half-written file."""
    leaves = {jax.tree_util.keystr(key): np.asarray(leaf) for key, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:  # savez names files of its own
            np.savez(file, **leaves)

    write_whole(path, write)


def load_tree(path: Path, like: Any) -> Any:
    """The tree of the shapes and types of `like` that was saved at path; exits where they differ."""
    with np.load(path, allow_pickle=False) as stored:
        leaves_like, structure = jax.tree_util.tree_flatten_with_path(like)
        names = [jax.tree_util.keystr(key) for key, _ in leaves_like]
        if sorted(names) != sorted(stored.files):
            raise SystemExit(f"{path}: holds other leaves than expected: {sorted(set(names) ^ set(stored.files))[:4]}")
        leaves = []
        for name, (_, leaf) in zip(names, leaves_like, strict=True):
            value = stored[name]
            if value.shape != leaf.shape or value.dtype != leaf.dtype:
                raise SystemExit(f"{path}: {name} is {value.dtype}{value.shape}, expected {leaf.dtype}{leaf.shape}")
            leaves.append(jnp.asarray(value))
    return jax.tree_util.tree_unflatten(structure, leaves)


def read_config(folder: Path) -> TargetConfig:
    """The target described by folder/config.json."""
    return parse_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def load_target(folder: Path) -> tuple[TargetConfig, TargetParams]:
    """Config and float32 parameters (fused experts) of folder/config.json and folder/params.npz."""
    config = read_config(folder)
    like = jax.eval_shape(lambda: init_params(config, jax.random.key(0), jnp.float32))
    return config, load_tree(folder / "params.npz", like)
