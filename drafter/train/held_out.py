"""Hold documents out of a training, to show whether the drafter learns or memorises."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from drafter.train.batches import Batch, Batches, Row, Source, pack
from drafter.train.config import LossName
from drafter.train.shards import Document
from peagle.ops.errors import InputError

DEFAULT_FRAC = 0.1
LEAST_ROWS = 8  # per evaluation; more if a step has more
FILLED_FRAC = 0.85  # typical share of a row that packed documents fill


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Held-out documents, packed into batches of the training's size.

    digest: of the documents, because losses on different documents are not comparable.
    """

    batches: Batches
    digest: str

    @classmethod
    def of(cls, documents: Sequence[Document], batches: Batches) -> "HeldOut":
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
        return cls(dataclasses.replace(batches, sources=(Source(rows, per_step),)), digest.hexdigest()[:12])

    def __iter__(self) -> Iterator[Batch]:
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
    """Return the rows of an evaluation: those of whole steps, at least LEAST_ROWS."""
    return -(-LEAST_ROWS // rows_per_step) * rows_per_step


def keep_back(
    documents: Sequence[Document], frac: float, num_tokens: int, seed: int
) -> tuple[list[Document], list[Document]]:
    """Split documents into (trained, held out): hold out at most `frac` of the conversations, and num_tokens.

    A conversation's turns stay together, because each turn repeats those before it.
    """
    conversations = _conversations(documents)
    held: set[int] = set()
    tokens = 0
    for index in np.random.default_rng((seed, 2)).permutation(len(conversations))[: int(frac * len(conversations))]:
        tokens += sum(len(document.token_ids) for document in conversations[index])
        if tokens > num_tokens and held:
            break
        held.add(int(index))
    trained, held_out = (
        [document for index, turns in enumerate(conversations) if (index in held) == is_held for document in turns]
        for is_held in (False, True)
    )
    return trained, held_out


def _conversations(documents: Sequence[Document]) -> list[list[Document]]:
    """Group consecutive documents that begin with the same prompt."""
    conversations: list[list[Document]] = []
    for document in documents:
        if conversations and _repeats(document, conversations[-1][-1]):
            conversations[-1].append(document)
        else:
            conversations.append([document])
    return conversations


def _repeats(document: Document, before: Document) -> bool:
    """Whether a document begins with the prompt of the document before it."""
    size = int(np.argmax(before.trained)) if before.trained.any() else 0
    return size > 0 and np.array_equal(document.token_ids[:size], before.token_ids[:size])
