"""`peagle data`: let the target answer prompts, and write its answers to shards of training data."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drafter.train.shards import KEPT, NAME, WEIGHTS, expect_folder, open_folder, shard_path, total_tokens
from peagle.checkpoints import or_demo, resolve
from peagle.cli.data import Data
from peagle.cli.decoding import load_pair, not_shown, without_effect
from peagle.cli.display import Advance, Display
from peagle.ops.checkpoint import fingerprint
from peagle.ops.errors import InputError
from peagle.ops.files import locked
from peagle.ops.strict_json import dumps
from peagle.text.prompt_files import Skipped, read_prompts, skipped_line
from peagle.text.prompts import Conversation
from peagle.workflows.answers import Asking, answer
from peagle.workflows.dataset import chosen_aux_layers, document, lengths_in_words, taught, teacher_of, write
from target.load import inspect_target


@dataclass(frozen=True)
class CheckedData:
    """Checked options: everything that is known before weights are loaded."""

    name: str  # of the target, as typed
    directory: Path
    out: Path
    made_by: dict[str, Any]
    conversations: Sequence[Conversation]
    skipped: Sequence[Skipped]
    warnings: Sequence[str]
    taps: tuple[int, ...]
    starts: range  # the first conversation of each shard
    missing: Sequence[int]  # numbers of the shards still to write

    def part(self, number: int) -> Sequence[Conversation]:
        return self.conversations[self.starts[number] : self.starts[number] + self.starts.step]


def make_data(settings: Data) -> int:
    """Answer the prompts of every missing shard. Return the exit code.

    Raises InputError, before any weights are read, for bad options and prompts; later if a shard cannot be written.
    """
    with locked(Path(settings.out)):
        return _data(settings)


def _data(settings: Data) -> int:
    display = Display(quiet=settings.quiet)
    with display.stage("reading the prompts"):
        checked = _checked(settings)
    display.warn(checked.warnings)
    display.warn(without_effect(settings.sampling))
    if not checked.missing:
        display.note(f"{checked.out} is complete: {len(checked.starts)} shards")
        return 0
    skipped: list[str] = []
    lengths: list[int] = []
    (num_documents, num_tokens, num_answered), seconds = _answered(checked, settings, display, skipped, lengths)
    lines = [
        f"data         {len(checked.starts)} shards in {checked.out}, {len(checked.missing)} of them made now",
        f"made now     {num_documents} documents, {num_tokens:,} tokens, {num_answered:,} of them the target's, "
        f"{num_answered / seconds:,.0f} tok/s",
        f"lengths      {lengths_in_words(lengths)}",
    ]
    if checked.skipped:
        lines.append(f"left out     {skipped_line(checked.skipped)}")
    lost = [f"{len(skipped)} prompts that cannot be answered, the first: {skipped[0]}"] if skipped else []
    display.summary([*lines, *(f"skipped      {line}" for line in lost)])
    if settings.quiet:  # else the summary has it
        display.warn(lost)
    return 0


def _checked(settings: Data) -> CheckedData:
    """Read the prompts and the folder. Raises InputError for prompts, options and folders that cannot be used."""
    name = or_demo(settings.load.target)
    directory = resolve(name, "target")
    sets = [read_prompts(path, directory, settings.rendering, strict=settings.strict) for path in settings.prompt_file]
    conversations = [conversation for prompts in sets for conversation in prompts.conversations]
    if settings.num_prompts is not None:
        conversations = conversations[: settings.num_prompts]
    config = inspect_target(directory).config
    if settings.top > config.vocab_size:
        raise InputError(f"--top is {settings.top}; expected at most {config.vocab_size}, the target's vocabulary")
    taps, out = chosen_aux_layers(settings.taps, config.num_layers) if settings.hidden else (), Path(settings.out)
    starts = range(0, len(conversations), settings.shard_prompts)
    made_by = _made_by(settings, name, fingerprint(directory), len(conversations), taps)
    expect_folder(out, made_by)
    return CheckedData(
        name=name, directory=directory, out=out, made_by=made_by, conversations=conversations,
        skipped=[row for prompts in sets for row in prompts.skipped],
        warnings=[line for prompts in sets for line in prompts.warnings],
        taps=taps, starts=starts,
        missing=[number for number in range(len(starts)) if not shard_path(out, number).exists()],
    )  # fmt: skip


def _answered(
    checked: CheckedData, settings: Data, display: Display, skipped: list[str], lengths: list[int]
) -> tuple[Sequence[int], float]:
    """Write the missing shards, with progress; return ((documents, tokens, answered tokens), seconds).

    skipped: gets a line for each prompt without an answer. lengths: gets the tokens of each document before it is cut.
    """
    pair = load_pair(checked.name, None, settings.load, display)
    wants_teacher = settings.hidden or settings.top
    teacher = teacher_of(checked.directory, pair.loaded.dtype, checked.taps) if wants_teacher else None
    display.warn(not_shown(settings.rendering, pair, checked.name))
    engine = settings.engine
    context = pair.room(None if engine.context is None else min(engine.context, pair.max_positions))
    if context != engine.context != Data.engine.context:
        display.warn([f"--context is {engine.context}, more than {checked.name} has; {context} is used"])
    asking = Asking(settings.rendering, settings.sampling, settings.answer.max_new_tokens, context, engine.slots)
    open_folder(checked.out, checked.made_by)
    finished, total = 0, sum(len(checked.part(number)) for number in checked.missing)
    counts, started = np.zeros((3,), np.int64), time.perf_counter()

    def kept() -> str:
        there = sum(shard_path(checked.out, number).exists() for number in range(len(checked.starts)))
        return f"{there} of {len(checked.starts)} shards are in {checked.out}; the same command goes on after them"

    with display.keeping(kept):
        for place, number in enumerate(checked.missing):
            with display.stage(f"answering {total} prompts", animated=False) as progress:

                def done(more: int, progress: Advance = progress) -> None:
                    nonlocal finished
                    finished += more
                    spent_s = time.perf_counter() - started  # the teacher's part, too
                    progress(finished, total, spent_s / finished * (total - finished))

                answers = answer(pair, checked.part(number), asking, checked.starts[number], skipped.append, done)
                documents = [document(conversation) for conversation in answers]
            lengths += [len(one.token_ids) for one in documents]
            if teacher is not None:
                shard = f"shard {place + 1} of {len(checked.missing)}"
                with display.stage(f"computing hidden states and logits of {shard}", animated=False) as progress:
                    keep = settings.keep_prompt
                    documents = list(taught(documents, teacher, settings.hidden, settings.top, keep, progress))
            write(checked.out, number, documents, skipped)
            counts += (len(documents), *total_tokens(documents))
    return counts.tolist(), time.perf_counter() - started


def _made_by(settings: Data, name: str, weights: str, num_prompts: int, taps: Sequence[int]) -> dict[str, Any]:
    """Return the manifest: everything on which the shards depend."""
    depends_on: dict[str, Any] = {
        NAME: name,
        WEIGHTS: weights,
        **{kind: getattr(settings.load, kind) for kind in ("dtype", "experts", "kernels")},
        "prompts": [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in settings.prompt_file],
        "num_prompts": num_prompts,
        "shard_prompts": settings.shard_prompts,
        "max_new_tokens": settings.answer.max_new_tokens,
        "context": settings.engine.context,
        "rendering": dataclasses.asdict(settings.rendering),
        "sampling": dataclasses.asdict(settings.sampling),
        "taps": list(taps),
        "top": settings.top,
        **({} if settings.keep_prompt is None else {KEPT: settings.keep_prompt}),
    }
    loaded: dict[str, Any] = json.loads(dumps(depends_on))
    return loaded
