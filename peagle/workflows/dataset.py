"""Training data: the target's answers, optionally with its hidden states and best next tokens, in shards."""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from drafter.train.shards import PART, TAUGHT, Document, read_part, shard_path, total_tokens, write_part, write_shard
from peagle.base import interrupt
from peagle.base.errors import InputError
from peagle.base.files import reason_of
from peagle.loading.defaults import default_dtype
from peagle.workflows.answers import is_cut
from target.config import default_aux_layer_ids
from target.load import load_target
from target.teacher import Teacher

PASS_DOCUMENTS, PASS_TOKENS = 32, 32 * 512  # the most of a teacher's pass; tokens include padding
SHORT, STEP, LONG_STEP = 512, 128, 1024  # a pass is a multiple of STEP wide; of LONG_STEP if wider than SHORT
TOP = 32  # best next tokens of the target that are stored
SHARD_PROMPTS, SHARD_BYTES = 512, 2_000_000_000  # the most of a shard
SAVE_S = 60.0  # between two writes of a part; a killed process loses the answers since the last one
STOP, NEW, CONTEXT, NO_STOP = "a stop token", "-n", "--context", "another token"  # where an answer ends
LENGTHS = (512, 1024, 2048, 4096, 8192)  # bins of documents in a message


@dataclasses.dataclass
class Tally:
    """What a run made."""

    stop_token_ids: Sequence[int]
    generated: bool  # else recorded
    max_new_tokens: int | None
    context: int
    num_documents: int = 0
    num_tokens: int = 0
    num_trained: int = 0  # tokens of answers
    num_kept: int = 0  # documents of an interrupted run
    num_kept_trained: int = 0
    ends: Counter[str] = dataclasses.field(default_factory=Counter)  # answers, by where they end
    lengths: list[int] = dataclasses.field(default_factory=list)  # of documents before their prompts are cut
    num_left_out: int = 0  # turns
    why: str | None = None  # the first of them

    @property
    def limits(self) -> dict[str, int]:
        """The limits at which answers may be cut, by option."""
        return {**({} if self.max_new_tokens is None else {NEW: self.max_new_tokens}), CONTEXT: self.context}

    def skip(self, reason: str, num_turns: int) -> None:
        self.num_left_out += num_turns
        self.why = self.why or reason

    def keep(self, documents: Sequence[Document]) -> None:
        """Count the documents of an interrupted run, which `add` counts again with the others."""
        self.num_kept += len(documents)
        self.num_kept_trained += total_tokens(documents)[1]

    def end(self, documents: Sequence[Document]) -> None:
        """Count the ends of whole documents."""
        self.lengths += [len(document.token_ids) for document in documents]
        self.ends.update(map(self._end, documents))

    def add(self, documents: Sequence[Document]) -> None:
        """Count what is written."""
        tokens, trained = total_tokens(documents)
        self.num_documents += len(documents)
        self.num_tokens += tokens
        self.num_trained += trained

    def _end(self, document: Document) -> str:
        if not is_cut(document, self.stop_token_ids):
            return STOP
        if self.generated:
            return NEW if document.trained.sum() == self.max_new_tokens else CONTEXT
        return CONTEXT if len(document.token_ids) == self.context else NO_STOP


def chosen_aux_layers(typed: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    """Return the layers of aux_hidden: those of --aux-layer-ids, or the default. Raises InputError for bad ones."""
    if typed is None:
        if num_layers < 7:
            raise InputError(
                f"a target of {num_layers} layers has no default aux layers; name them with --aux-layer-ids, as 0,1,2"
            )
        return default_aux_layer_ids(num_layers)
    if outside := [layer for layer in typed if not 0 <= layer < num_layers]:
        raise InputError(f"--aux-layer-ids names the output of layer {outside[0]}; expected 0..{num_layers - 1}")
    if len(set(typed)) < len(typed):
        raise InputError(f"--aux-layer-ids is {','.join(map(str, typed))}; expected each layer once")
    return typed


def cut_prompt(document: Document, keep_prompt: int | None) -> Document:
    """Keep the last keep_prompt tokens of a document's prompt, with what the teacher computed for them; None: all."""
    if keep_prompt is None or len(document.prompt) <= keep_prompt:
        return document
    kept = slice(len(document.prompt) - keep_prompt, None)
    teacher = {name: values[kept] for name, values in document.teacher.items()}
    return dataclasses.replace(
        document, token_ids=document.token_ids[kept], trained=document.trained[kept], teacher=teacher
    )


def lengths_in_words(sizes: Sequence[int]) -> str:
    """Say how long documents are, at least one. Example: 94 to 2,711 tokens; 40 up to 512, 12 up to 4,096."""
    counts = np.bincount(np.searchsorted(LENGTHS, sizes), minlength=len(LENGTHS) + 1)
    parts = [f"{count:,} up to {most:,}" for count, most in zip(counts, LENGTHS, strict=False) if count]
    parts += [f"{counts[-1]:,} longer than {LENGTHS[-1]:,}"] if counts[-1] else []
    return f"{min(sizes):,} to {max(sizes):,} tokens; {', '.join(parts)}"


def load_teacher(directory: Path, aux_layer_ids: Sequence[int]) -> Teacher:
    """Load the target as a teacher that returns the hidden states of these layers."""
    loaded = load_target(directory, dtype=np.dtype(default_dtype(directory, "xla")))
    return Teacher(loaded.params, loaded.config, tuple(aux_layer_ids))


def with_teacher(
    documents: Sequence[Document],
    teacher: Teacher,
    keep_prompt: int | None,
    progress: Callable[[int, int], None] = lambda *_: None,
    done: dict[int, Document] | None = None,
) -> Iterator[Document]:
    """Add the target's aux_hidden and its TOP best next tokens to documents.

    The target reads whole documents; then prompts are cut (`cut_prompt`). Calls progress(documents done, total) after
    each pass. done: finished documents by their place; each pass adds its own.
    """
    done = {} if done is None else done

    @jax.jit
    def compute(token_ids: jax.Array) -> dict[str, jax.Array]:
        positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None], token_ids.shape)
        logits, aux_hidden = teacher(token_ids, positions, jnp.ones_like(token_ids))
        logits = logits.astype(jnp.float32)
        best, ids = jax.lax.top_k(logits, min(TOP, logits.shape[-1]))
        total = jax.nn.logsumexp(logits, axis=-1)
        return {"aux_hidden": aux_hidden, "top_ids": ids, "top_logits": best, "log_total": total}

    missing = [index for index in range(len(documents)) if index not in done]
    for group, width in passes([len(documents[index].token_ids) for index in missing]):
        interrupt.check()
        padded = np.zeros((rows_of_pass(width), width), np.int32)
        indexes = [missing[place] for place in group]
        for row, index in enumerate(indexes):
            padded[row, : len(documents[index].token_ids)] = documents[index].token_ids
        results = {name: np.asarray(values) for name, values in compute(jnp.asarray(padded)).items()}
        results["aux_hidden"] = results["aux_hidden"].astype(ml_dtypes.bfloat16)
        for row, index in enumerate(indexes):
            own = {name: values[row, : len(documents[index].token_ids)] for name, values in results.items()}
            done[index] = cut_prompt(dataclasses.replace(documents[index], teacher=own), keep_prompt)
        progress(len(done), len(documents))
    for index, document in enumerate(documents):
        yield dataclasses.replace(done[index], conversation=document.conversation)


def passes(sizes: Sequence[int]) -> Iterator[tuple[list[int], int]]:
    """Group documents into passes by size, the shortest first; yield (their indices, the width of the pass)."""
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    while order:
        group = order[:PASS_DOCUMENTS]
        while len(group) > rows_of_pass(width := _width(sizes[group[-1]])):
            group = group[:-1]
        yield group, width
        order = order[len(group) :]


def rows_of_pass(width: int) -> int:
    """Return the most documents of a teacher's pass of this width."""
    return min(PASS_DOCUMENTS, max(1, PASS_TOKENS // width))


def _width(size: int) -> int:
    step = STEP if size <= SHORT else LONG_STEP
    return -(-size // step) * step


class Unfinished:
    """The finished documents of a shard that is being made: those of an earlier run, and new ones.

    documents: answers. taught: those with the teacher's results, by their place in the shard. Both are written as parts
    if the block fails or is interrupted, and answers every SAVE_S.
    """

    def __init__(self, out: Path, number: int) -> None:
        self.documents = read_part(out, number)
        self.taught = {document.conversation: document for document in read_part(out, number, TAUGHT)}
        self._out, self._number = out, number
        self._num_written = {PART: len(self.documents), TAUGHT: len(self.taught)}
        self._written_s = time.monotonic()

    def __enter__(self) -> "Unfinished":
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is not None:
            self._write(PART, self.documents)
            taught = [dataclasses.replace(document, conversation=place) for place, document in self.taught.items()]
            self._write(TAUGHT, taught)

    def add(self, document: Document) -> None:
        self.documents.append(document)
        if time.monotonic() - self._written_s > SAVE_S:
            self._written_s = time.monotonic()
            self._write(PART, self.documents)

    def _write(self, kind: str, documents: Sequence[Document]) -> None:
        if len(documents) > self._num_written[kind]:
            with contextlib.suppress(OSError):  # the shard's own error says why it cannot be written
                write_part(self._out, self._number, documents, kind)
                self._num_written[kind] = len(documents)


def write_documents(out: Path, number: int, documents: Sequence[Document]) -> None:
    """Write a shard. Raises InputError if it cannot be written."""
    try:
        write_shard(out, number, documents)
    except OSError as error:
        raise InputError(
            f"{shard_path(out, number)} cannot be written: {reason_of(error)}; the shards before it are whole, "
            "and the same command continues after them"
        ) from None


def bytes_per_token(aux_width: int) -> int:
    """Return the room that a token takes in a shard: its id and mark, and what the teacher computes for it, if any."""
    return 4 + 1 + (2 * aux_width + 8 * TOP + 4 if aux_width else 0)


def prompts_per_shard(document_bytes: int) -> int:
    """Return how many prompts of so many bytes a shard has, since a whole shard is in memory."""
    return max(1, min(SHARD_PROMPTS, SHARD_BYTES // document_bytes))
