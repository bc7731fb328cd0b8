"""Training data: what the target answered, with its hidden states and best tokens if wanted, in shards."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from drafter.train.shards import (
    Document,
    shard_path,
    write_shard,
)
from peagle.ops import interrupt
from peagle.ops.errors import InputError
from peagle.workflows.answers import Answer
from target.config import default_aux_layer_ids
from target.load import load_target
from target.teacher import Teacher

TOGETHER = 32  # documents that the teacher reads in one pass


def chosen_taps(asked: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    """The taps a drafter is to be trained on: those asked for, or the default. Raises InputError where they are not."""
    if asked is None:
        if num_layers < 7:
            raise InputError(f"a target of {num_layers} layers has no default taps; name them with --taps, as 0,1,2")
        return default_aux_layer_ids(num_layers)
    if outside := [tap for tap in asked if not 0 <= tap < num_layers]:
        raise InputError(f"--taps names the output of layer {outside[0]}; expected 0..{num_layers - 1}")
    if len(set(asked)) < len(asked):
        raise InputError(f"--taps is {','.join(map(str, asked))}; expected each layer once")
    return asked


def document(each: Answer) -> Document:
    """The turn as training data: what the target said is trained on."""
    ids = np.array([*each.prompt_ids, *each.output_ids], np.int32)
    return Document(ids, np.arange(len(ids)) >= len(each.prompt_ids))


def teacher_of(directory: Path, dtype: str, taps: Sequence[int]) -> Teacher:
    loaded = load_target(directory, dtype=np.dtype(dtype))
    return Teacher(loaded.params, loaded.config, tuple(taps))


def taught(documents: Sequence[Document], teacher: Teacher, hidden: bool, top: int) -> Iterator[Document]:
    """Add to each token of the documents its aux_hidden (if hidden), and the target's `top` best next tokens."""

    @jax.jit
    def look(token_ids: jax.Array) -> dict[str, jax.Array]:
        positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None], token_ids.shape)
        logits, aux_hidden = teacher(token_ids, positions, jnp.ones_like(token_ids))
        logits = logits.astype(jnp.float32)
        best, ids = jax.lax.top_k(logits, max(top, 1))
        total = jax.nn.logsumexp(logits, axis=-1)
        return {"aux_hidden": aux_hidden, "top_ids": ids, "top_logits": best, "log_total": total}

    kept = [
        *(["aux_hidden"] if hidden else []),
        *(["top_ids", "top_logits", "log_total"] if top else []),
    ]
    for start in range(0, len(documents), TOGETHER):
        interrupt.check()
        group = documents[start : start + TOGETHER]
        width = -(-max(len(each.token_ids) for each in group) // 128) * 128
        padded = np.zeros((TOGETHER, width), np.int32)
        for row, each in enumerate(group):
            padded[row, : len(each.token_ids)] = each.token_ids
        found = {name: np.asarray(values) for name, values in look(jnp.asarray(padded)).items() if name in kept}
        if "aux_hidden" in found:
            found["aux_hidden"] = found["aux_hidden"].astype(ml_dtypes.bfloat16)
        for row, each in enumerate(group):
            size = len(each.token_ids)
            yield dataclasses.replace(each, teacher={name: values[row, :size] for name, values in found.items()})


def write(out: Path, number: int, documents: Sequence[Document], skipped: Sequence[str]) -> None:
    if not documents:
        raise InputError(f"none of the prompts of shard {number} can be answered, the last: {skipped[-1]}")
    try:
        write_shard(out, number, documents)
    except OSError as error:
        raise InputError(
            f"{shard_path(out, number)} cannot be written: {error.strerror or error}; the shards before it are whole, "
            "and the same command goes on behind them"
        ) from None
