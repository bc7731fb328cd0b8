"""Hold documents out of a training, to show whether the drafter learns or memorises."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from drafter.train.recipe import LossName
from drafter.train.row_batches import DocumentSource, Row, RowBatch, RowBatches, pack
from drafter.train.shards import ALONE, Document
from peagle.base.errors import InputError

DEFAULT_FRAC = 0.1
ROWS = 32  # of an evaluation, if the documents suffice; more if a step has more
FILLED_FRAC = 0.85  # typical share of a row that packed documents fill


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Held-out documents, packed into batches of the training's size.

    digest: of the documents, because losses on different documents are not comparable.
    """

    batches: RowBatches
    digest: str

    @classmethod
    def of(cls, documents: Sequence[Document], batches: RowBatches) -> "HeldOut":
        """Pack documents as `batches` are packed. Raises InputError if none has a trained token."""
        if not any(document.trained.any() for document in documents):
            raise InputError("the held-out documents have no token that the target wrote; expected some")
        rows, per_step = pack(documents, batches.recipe.width), batches.rows_per_step
        padding = dataclasses.replace(
            documents[0],
            token_ids=documents[0].token_ids[:1],
            trained=np.zeros((1,), bool),
            teacher={name: values[:1] for name, values in documents[0].teacher.items()},
        )
        rows += [Row((padding,))] * (-len(rows) % per_step)
        digest = hashlib.sha256(b"".join(document.token_ids.tobytes() for document in documents))
        return cls(dataclasses.replace(batches, sources=(DocumentSource(rows, per_step),)), digest.hexdigest()[:12])

    def __iter__(self) -> Iterator[RowBatch]:
        """Yield every row once, with the same chains each time."""
        (source,) = self.batches.sources
        return map(self.batches.at, range(len(source.rows) // source.rows_per_step))


def score_of(loss: LossName, mean_loss: float, hits_by_depth: Sequence[float]) -> float:
    """Return the score by which the best step is chosen: the acceptance length that the hits imply.

    With total_variation it is the share of sampled drafts that are accepted. The loss does not rank greedy drafters: it
    may rise with confidence in wrong drafts while more drafts are right.
    """
    return 1 - mean_loss if loss == "total_variation" else 1 + float(np.cumprod(hits_by_depth).sum())


def rows_of_evaluation(rows_per_step: int) -> int:
    """Return the most rows of an evaluation: those of whole steps, at least ROWS."""
    return -(-ROWS // rows_per_step) * rows_per_step


def keep_back(
    parts: Sequence[tuple[Sequence[Document], int]], frac: float, seed: int
) -> list[tuple[list[Document], list[Document]]]:
    """Split the documents of each part into (trained, held out), so that no held-out prompt is trained on.

    parts: (documents, the most tokens to hold out). Documents that belong together (`related`) are all held out, in
    every part, or none is: at most `frac` of the groups of a part, and no group that is most of it. Every part keeps
    documents to train on.
    """
    groups = iter(related([document for documents, _ in parts for document in documents]))
    numbered = [[(next(groups), document) for document in documents] for documents, _ in parts]
    sizes = [Counter(number for number, document in part if document.trained.any()) for part in numbered]
    most_of_a_part = {number for size in sizes for number in size if 2 * size[number] > size.total()}
    left = [int(frac * len(size)) for size in sizes]  # groups that each part may still lose
    held: set[int] = set()
    for part, size, (_, most) in zip(numbered, sizes, parts, strict=True):
        tokens = Counter[int]()
        for number, document in part:
            tokens[number] += len(document.token_ids)
        total = sum(tokens[number] for number in held)
        for number in np.random.default_rng((seed, 2)).permutation(list(size)).tolist():
            having = [index for index, other in enumerate(sizes) if number in other]
            if number in held or number in most_of_a_part or not all(left[index] for index in having):
                continue
            if total and total + tokens[number] > most:
                break
            held.add(number)
            total += tokens[number]
            for index in having:
                left[index] -= 1
    return [
        ([document for number, document in part if number not in held], [d for number, d in part if number in held])
        for part in numbered
    ]


def related(documents: Sequence[Document]) -> list[int]:
    """Number the groups of documents that share a conversation, or whose prompt begins with the prompt of another.

    Equal prompts do, and later turns, also where each turn is a row of its own in the file of prompts. A document
    without a prompt counts as one.
    """
    prompts = [
        (document.prompt if len(document.prompt) else document.token_ids).astype(np.int32).tobytes()
        for document in documents
    ]
    return groups_of(prompts, [None if one.conversation == ALONE else one.conversation for one in documents])


def groups_of(prompts: Sequence[bytes], conversations: Sequence[Hashable | None]) -> list[int]:
    """Number the groups of items that share a conversation, or of which a prompt begins another, by an item of each.

    An empty prompt and None join nothing.
    """
    joined = list(range(len(prompts)))

    def root(index: int) -> int:
        while joined[index] != index:
            joined[index] = index = joined[joined[index]]
        return index

    first: dict[Hashable, int] = {}
    for index, conversation in enumerate(conversations):
        if conversation is not None:
            joined[root(index)] = root(first.setdefault(conversation, index))
    before: int | None = None  # the last prompt that begins another or itself
    for index in sorted(filter(prompts.__getitem__, range(len(prompts))), key=prompts.__getitem__):
        if before is not None and prompts[index].startswith(prompts[before]):
            joined[root(index)] = root(before)
        else:
            before = index
    return [root(index) for index in range(len(prompts))]
