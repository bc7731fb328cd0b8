"""`peagle data`: the target answers prompts, and shards of training data hold what it said."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafter.train.shards import (
    NAME,
    WEIGHTS,
    expect_folder,
    open_folder,
    shard_path,
    total_tokens,
)
from peagle.cli.display import Display
from peagle.cli.settings.data import DataSettings
from peagle.cli.settings.shared import DraftOptions, chosen_slots, parse_layers
from peagle.cli.speculate import load_pair
from peagle.loading import DEMO, resolve
from peagle.ops.checkpoint import fingerprint
from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps
from peagle.text.prompt_files import left_out_line, read_prompts
from peagle.workflows.answers import Asking, answer
from peagle.workflows.dataset import chosen_taps, document, taught, teacher_of, write
from target.load import inspect_target


def data_command(settings: DataSettings) -> int:
    """The folder holds every shard. Returns the exit code. What is there already is not made again.

    Raises InputError before any weights are read for whatever can be told then, and where a shard cannot be written.
    """
    name, asked_taps = settings.model.target or DEMO, parse_layers(settings.taps, "--taps")
    slots = chosen_slots(settings.slots, settings.batch, 32)
    directory = resolve(name, "target")
    rendering = settings.rendering.rendering()
    sets = [read_prompts(path, directory, rendering, strict=settings.strict) for path in settings.prompt_file]
    conversations = [each for one in sets for each in one.conversations]
    left_out = [line for one in sets for line in one.left_out]
    if settings.num_prompts is not None:
        conversations = conversations[: settings.num_prompts]
    if min(settings.shard_prompts, slots, settings.max_new_tokens) < 1 or min(settings.top, settings.sampling.seed) < 0:
        raise InputError("--shard-prompts, --slots and -n must be 1 or more, --top and --seed 0 or more")
    sampling = settings.sampling.params()
    starts = range(0, len(conversations), settings.shard_prompts)
    out = Path(settings.out)
    config = inspect_target(directory).config
    if settings.top > config.vocab_size:
        raise InputError(f"--top is {settings.top}; expected at most {config.vocab_size}, the target's vocabulary")
    if asked_taps is not None and not settings.hidden:
        raise InputError("--taps names hidden states to keep, and none are kept: give --hidden, too, or leave it out")
    taps = chosen_taps(asked_taps, config.num_layers) if settings.hidden else ()
    made_by = _made_by(settings, name, fingerprint(directory), len(conversations), taps)
    expect_folder(out, made_by)
    missing = [number for number in range(len(starts)) if not shard_path(out, number).exists()]
    display = Display(text=False, quiet=settings.quiet, total=1, streaming=False)
    if left_out:
        display.note(f"left out: {left_out_line(left_out)}")
    if not missing:
        display.note(f"{out} is complete: {len(starts)} shards")
        return 0

    pair = load_pair(name, None, settings.model, DraftOptions(), display)
    teacher = teacher_of(directory, pair.dtype, taps) if settings.hidden or settings.top else None
    asking = Asking(
        rendering,
        sampling,
        settings.max_new_tokens,
        pair.room(None if settings.context is None else min(settings.context, pair.max_positions)),
        slots,
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
                documents = list(taught(documents, teacher, settings.hidden, settings.top))
            write(out, number, documents, skipped)
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


def _made_by(settings: DataSettings, name: str, weights: str, num_prompts: int, taps: Sequence[int]) -> dict[str, Any]:
    """Return everything that the shards depend on, for their manifest."""
    made: dict[str, Any] = {
        NAME: name,
        WEIGHTS: weights,
        **{kind: getattr(settings.model, kind) for kind in ("dtype", "experts", "kernels")},
        "prompts": [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in settings.prompt_file],
        "num_prompts": num_prompts,
        "shard_prompts": settings.shard_prompts,
        "max_new_tokens": settings.max_new_tokens,
        "context": settings.context,
        "rendering": dataclasses.asdict(settings.rendering.rendering()),
        "sampling": dataclasses.asdict(settings.sampling.params()),
        "taps": list(taps),
        "top": settings.top,
    }
    loaded: dict[str, Any] = json.loads(dumps(made))
    return loaded
