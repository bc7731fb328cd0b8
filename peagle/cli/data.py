"""`peagle data`: the target answers prompts, and shards of training data hold what it said."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from drafter.train.shards import (
    NAME,
    WEIGHTS,
    Document,
    expect_folder,
    open_folder,
    shard_path,
    total_tokens,
    write_shard,
)
from peagle.cli.display import Display
from peagle.cli.run import rendering_of
from peagle.cli.settings import DataSettings
from peagle.engine.request import SamplingParams
from peagle.loading import DEMO, load, resolve
from peagle.ops import interrupt
from peagle.ops.checkpoint import fingerprint
from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps
from peagle.text.prompt_files import left_out_line, read_prompts
from peagle.text.prompts import Rendering
from peagle.workflows.answers import Answer, Asking, answer
from target.config import default_aux_layer_ids
from target.load import inspect_target, load_target
from target.teacher import Teacher

BEHIND = 32  # documents that the teacher reads together


def data_command(settings: DataSettings) -> int:
    """The folder holds every shard. Returns the exit code. What is there already is not made again.

    Raises InputError before any weights are read for whatever can be told then, and where a shard cannot be written.
    """
    name = DEMO if settings.target is None else settings.target
    directory = resolve(name, "target")
    rendering = rendering_of(settings)
    sets = [read_prompts(path, directory, rendering, strict=settings.strict) for path in settings.prompt_files]
    conversations = [each for one in sets for each in one.conversations]
    left_out = [line for one in sets for line in one.left_out]
    if settings.num_prompts is not None:
        conversations = conversations[: settings.num_prompts]
    if min(settings.shard_prompts, settings.slots, settings.max_new_tokens) < 1 or min(settings.top, settings.seed) < 0:
        raise InputError("--shard-prompts, --slots and -n must be 1 or more, --top and --seed 0 or more")
    sampling = SamplingParams(settings.temperature, settings.top_k, settings.top_p, seed=settings.seed)
    starts = range(0, len(conversations), settings.shard_prompts)
    out = Path(settings.out)
    config = inspect_target(directory).config
    if settings.top > config.vocab_size:
        raise InputError(f"--top is {settings.top}; expected at most {config.vocab_size}, the target's vocabulary")
    if settings.taps is not None and not settings.hidden:
        raise InputError("--taps names hidden states to keep, and none are kept: give --hidden, too, or leave it out")
    taps = chosen_taps(settings.taps, config.num_layers) if settings.hidden else ()
    made_by = _made_by(settings, name, fingerprint(directory), len(conversations), rendering, sampling, taps)
    expect_folder(out, made_by)
    missing = [number for number in range(len(starts)) if not shard_path(out, number).exists()]
    display = Display(text=False, quiet=settings.quiet, total=1, streaming=False)
    if left_out:
        display.note(f"left out: {left_out_line(left_out)}")
    if not missing:
        display.note(f"{out} is complete: {len(starts)} shards")
        return 0

    with display.stage(f"loading {'the demo target' if name == DEMO else name}") as progress:
        kinds: Any = {"dtype": settings.dtype, "experts": settings.experts, "kernels": settings.kernels}
        pair = load(name, None, **kinds, progress=progress)
        teacher = _teacher(directory, pair.dtype, taps) if settings.hidden or settings.top else None
    asking = Asking(
        rendering,
        sampling,
        settings.max_new_tokens,
        pair.room(None if settings.context is None else min(settings.context, pair.max_positions)),
        settings.slots,
    )
    open_folder(out, made_by)
    skipped: list[str] = []
    finished, wanted = 0, sum(len(conversations[starts[n] : starts[n] + settings.shard_prompts]) for n in missing)
    counts, started = np.zeros((3,), np.int64), time.perf_counter()

    def kept() -> str:
        there = sum(shard_path(out, number).exists() for number in range(len(starts)))
        return f"{there} of {len(starts)} shards are in {out}; the same command goes on behind them"

    with display.keeping(kept), display.stage(f"answering {wanted} prompts", animated=False) as progress:

        def done(more: int) -> None:
            nonlocal finished
            finished += more
            progress(finished, wanted)

        for number in missing:
            start = starts[number]
            part = conversations[start : start + settings.shard_prompts]
            answers = list(answer(pair, part, asking, start, skipped.append, done))
            documents = [document(each) for each in answers]
            if teacher is not None:
                documents = list(_taught(documents, teacher, settings))
            _write(out, number, documents, skipped)
            counts += (len(documents), *total_tokens(documents))
    seconds = time.perf_counter() - started
    lines = [
        f"data         {len(starts)} shards in {out}, {len(missing)} of them made now",
        f"made now     {counts[0]} documents, {counts[1]:,} tokens, {counts[2]:,} of them the target's, "
        f"{counts[2] / seconds:,.0f} tok/s",
    ]
    if left_out:
        lines.append(f"left out     {left_out_line(left_out)}")
    if skipped:
        lines.append(f"skipped      {len(skipped)} prompts that cannot be answered, the first: {skipped[0]}")
    display.summary(lines)
    return 0


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


def _made_by(
    settings: DataSettings,
    name: str,
    weights: str,
    num_prompts: int,
    rendering: Rendering,
    sampling: SamplingParams,
    taps: Sequence[int],
) -> dict[str, Any]:
    """What the shards are a function of, for their manifest."""
    made: dict[str, Any] = {
        NAME: name,
        WEIGHTS: weights,
        **{kind: getattr(settings, kind) for kind in ("dtype", "experts", "kernels")},
        "prompts": [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in settings.prompt_files],
        "num_prompts": num_prompts,
        "shard_prompts": settings.shard_prompts,
        "max_new_tokens": settings.max_new_tokens,
        "context": settings.context,
        "rendering": dataclasses.asdict(rendering),
        "sampling": dataclasses.asdict(sampling),
        "taps": list(taps),
        "top": settings.top,
    }
    loaded: dict[str, Any] = json.loads(dumps(made))
    return loaded


def _teacher(directory: Path, dtype: str, taps: Sequence[int]) -> Teacher:
    loaded = load_target(directory, dtype=np.dtype(dtype))
    return Teacher(loaded.params, loaded.config, tuple(taps))


def _taught(documents: Sequence[Document], teacher: Teacher, settings: DataSettings) -> Iterator[Document]:
    """The documents with the taps, or the target's best tokens, or both, behind each token."""

    @jax.jit
    def look(token_ids: jax.Array) -> dict[str, jax.Array]:
        positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None], token_ids.shape)
        logits, aux_hidden = teacher(token_ids, positions, jnp.ones_like(token_ids))
        logits = logits.astype(jnp.float32)
        best, ids = jax.lax.top_k(logits, max(settings.top, 1))
        total = jax.nn.logsumexp(logits, axis=-1)
        return {"aux_hidden": aux_hidden, "top_ids": ids, "top_logits": best, "log_total": total}

    kept = [
        *(["aux_hidden"] if settings.hidden else []),
        *(["top_ids", "top_logits", "log_total"] if settings.top else []),
    ]
    for start in range(0, len(documents), BEHIND):
        interrupt.check()
        group = documents[start : start + BEHIND]
        width = -(-max(len(each.token_ids) for each in group) // 128) * 128
        padded = np.zeros((BEHIND, width), np.int32)
        for row, each in enumerate(group):
            padded[row, : len(each.token_ids)] = each.token_ids
        found = {name: np.asarray(values) for name, values in look(jnp.asarray(padded)).items() if name in kept}
        if "aux_hidden" in found:
            found["aux_hidden"] = found["aux_hidden"].astype(ml_dtypes.bfloat16)
        for row, each in enumerate(group):
            size = len(each.token_ids)
            yield dataclasses.replace(each, teacher={name: values[row, :size] for name, values in found.items()})


def _write(out: Path, number: int, documents: Sequence[Document], skipped: Sequence[str]) -> None:
    if not documents:
        raise InputError(f"none of the prompts of shard {number} can be answered, the last: {skipped[-1]}")
    try:
        write_shard(out, number, documents)
    except OSError as error:
        raise InputError(
            f"{shard_path(out, number)} cannot be written: {error.strerror or error}; the shards before it are whole, "
            "and the same command goes on behind them"
        ) from None
