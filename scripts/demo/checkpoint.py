"""Checkpoints of the demo's training, and the one that ships.

A training's is a pytree of arrays in one .npz file, leaves named by their path; no pickle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformers import AutoTokenizer

from peagle.ops.files import write_whole
from target.config import TargetConfig
from target.dialects import parse_config
from target.load import save_target
from target.params import TargetParams, init_params

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def save_tree(path: Path, tree: Any) -> None:
    """Write the tree's leaves; a reader never sees a half-written file."""
    leaves = {jax.tree_util.keystr(key): np.asarray(leaf) for key, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:  # savez names files of its own
            np.savez(file, **leaves)

    write_whole(path, write)


def load_tree(path: Path, like: Any) -> Any:
    """Read the tree that was saved at path; exits if shapes or types differ from those of `like`."""
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
    """Read folder/config.json."""
    return parse_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def load_target(folder: Path) -> tuple[TargetConfig, TargetParams]:
    """Read (config, float32 parameters with fused experts) of folder/config.json and folder/params.npz."""
    config = read_config(folder)
    like = jax.eval_shape(lambda: init_params(config, jax.random.key(0), jnp.float32))
    return config, load_tree(folder / "params.npz", like)


def export(run: Path, tokenizer: Path, out: Path) -> None:
    """Write a trained target as it ships: MXFP4 experts, the rest bfloat16, with its tokenizer."""
    encoder = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    config, params = load_target(run)
    save_target(
        out,
        params,
        config,
        stop_token_ids=[encoder.eos_token_id, encoder.pad_token_id],
        pad_token_id=encoder.pad_token_id,
        extra_files={name: (tokenizer / name).read_bytes() for name in TOKENIZER_FILES},
    )
