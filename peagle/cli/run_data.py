"""Run `peagle data`: let the target answer prompts, and write its answers to shards of training data."""

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
from peagle.cli.display import Display, Stage
from peagle.cli.models import load_pair, unused_rendering, unused_sampling
from peagle.ops.checkpoint import fingerprint
from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps
from peagle.text.prompt_files import Skipped, read_prompts, skipped_line
from peagle.text.prompts import Conversation
from peagle.workflows.answers import AnswerOptions, answer
from peagle.workflows.dataset import chosen_aux_layers, lengths_in_words, load_teacher, with_teacher, write_answers
from target.load import inspect_target


@dataclass(frozen=True)
class CheckedData:
    """Checked options: everything that is known before weights are loaded."""

    name: str  # of the target, as typed
    directory: Path  # of the target
    out: Path
    manifest: dict[str, Any]
    conversations: Sequence[Conversation]
    skipped: Sequence[Skipped]
    warnings: Sequence[str]
    aux_layers: tuple[int, ...]  # to store; none without --hidden
    starts: range  # the first conversation of every shard
    missing: Sequence[int]  # numbers of the shards still to write

    def shard(self, number: int) -> Sequence[Conversation]:
        return self.conversations[self.starts[number] : self.starts[number] + self.starts.step]


def make_data(settings: Data) -> int:
    """Answer the prompts of every missing shard. Return the exit code.

    Raises InputError for bad options and prompts before it loads weights; later if a shard cannot be written.
    """
    display = Display(quiet=settings.quiet)
    with display.stage("reading the prompts"):
        checked = _check(settings)
    display.warn(checked.warnings)
    display.warn(unused_sampling(settings.sampling))
    if not checked.missing:
        display.note(f"{checked.out} is complete: {len(checked.starts)} shards")
        return 0
    skipped: list[str] = []
    lengths: list[int] = []
    (num_documents, num_tokens, num_answered), seconds = _answer_shards(checked, settings, display, skipped, lengths)
    lines = [
        f"data         {len(checked.starts)} shards in {checked.out}, {len(checked.missing)} of them made now",
        f"made now     {num_documents} documents, {num_tokens:,} tokens, {num_answered:,} of them the target's, "
        f"{num_answered / seconds:,.0f} tok/s",
        f"lengths      {lengths_in_words(lengths)}",
    ]
    if checked.skipped:
        lines.append(f"left out     {skipped_line(checked.skipped)}")
    unanswered = [f"{len(skipped)} prompts that cannot be answered, the first: {skipped[0]}"] if skipped else []
    display.summary([*lines, *(f"skipped      {line}" for line in unanswered)])
    if settings.quiet:  # otherwise the summary has it
        display.warn(unanswered)
    return 0


def _check(settings: Data) -> CheckedData:
    """Read the prompts and check the folder. Raises InputError for prompts, options and folders that do not work."""
    name = or_demo(settings.load.target)
    directory = resolve(name, "target")
    sets = [read_prompts(path, directory, settings.rendering, strict=settings.strict) for path in settings.prompt_file]
    conversations = [conversation for prompts in sets for conversation in prompts.conversations]
    if settings.num_prompts is not None:
        conversations = conversations[: settings.num_prompts]
    config = inspect_target(directory).config
    if settings.top > config.vocab_size:
        raise InputError(f"--top is {settings.top}; expected at most {config.vocab_size}, the target's vocabulary")
    aux_layers = chosen_aux_layers(settings.taps, config.num_layers) if settings.hidden else ()
    out = Path(settings.out)
    starts = range(0, len(conversations), settings.shard_prompts)
    manifest = _manifest(settings, name, fingerprint(directory), len(conversations), aux_layers)
    expect_folder(out, manifest)
    return CheckedData(
        name=name, directory=directory, out=out, manifest=manifest, conversations=conversations,
        skipped=[row for prompts in sets for row in prompts.skipped],
        warnings=[line for prompts in sets for line in prompts.warnings],
        aux_layers=aux_layers, starts=starts,
        missing=[number for number in range(len(starts)) if not shard_path(out, number).exists()],
    )  # fmt: skip


def _answer_shards(
    checked: CheckedData, settings: Data, display: Display, skipped: list[str], lengths: list[int]
) -> tuple[Sequence[int], float]:
    """Write the missing shards, with progress; return ((documents, tokens, answered tokens), seconds).

    Appends to `skipped` a line for a prompt without an answer, and to `lengths` the tokens of a document before it is
    cut.
    """
    pair = load_pair(checked.name, None, settings.load, display)
    wants_teacher = settings.hidden or settings.top
    teacher = load_teacher(checked.directory, pair.loaded.dtype, checked.aux_layers) if wants_teacher else None
    display.warn(unused_rendering(settings.rendering, pair, checked.name))
    engine = settings.engine
    context = pair.room(None if engine.context is None else min(engine.context, pair.max_positions))
    if context != engine.context != Data.engine.context:
        display.warn([f"--context is {engine.context}, more than {checked.name} has; {context} is used"])
    options = AnswerOptions(
        settings.rendering, settings.sampling, settings.answer.max_new_tokens, context, engine.slots
    )
    open_folder(checked.out, checked.manifest)
    finished, total = 0, sum(len(checked.shard(number)) for number in checked.missing)
    counts, started = np.zeros((3,), np.int64), time.perf_counter()

    def kept() -> str:
        count = sum(shard_path(checked.out, number).exists() for number in range(len(checked.starts)))
        return f"{count} of {len(checked.starts)} shards are in {checked.out}; the same command goes on after them"

    with display.on_interrupt(kept):
        for index, number in enumerate(checked.missing):
            with display.stage(f"answering {total} prompts", animated=False) as progress:

                def done(progress: Stage = progress) -> None:
                    nonlocal finished
                    finished += 1
                    spent_s = time.perf_counter() - started  # includes the teacher's passes
                    progress(finished, total, spent_s / finished * (total - finished))

                first, conversations = checked.starts[number], checked.shard(number)
                documents = list(answer(pair, conversations, options, first, skipped.append, done))
            lengths += [len(row.token_ids) for row in documents]
            if teacher is not None:
                shard = f"shard {index + 1} of {len(checked.missing)}"
                with display.stage(f"computing hidden states and logits of {shard}", animated=False) as progress:
                    keep = settings.keep_prompt
                    documents = list(with_teacher(documents, teacher, settings.hidden, settings.top, keep, progress))
            write_answers(checked.out, number, documents, skipped)
            counts += (len(documents), *total_tokens(documents))
    return counts.tolist(), time.perf_counter() - started


def _manifest(settings: Data, name: str, weights: str, num_prompts: int, aux_layers: Sequence[int]) -> dict[str, Any]:
    """Return everything on which the shards depend, as JSON. weights: the target's fingerprint."""
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
        "taps": list(aux_layers),
        "top": settings.top,
        **({} if settings.keep_prompt is None else {KEPT: settings.keep_prompt}),
    }
    loaded: dict[str, Any] = json.loads(dumps(depends_on))
    return loaded
