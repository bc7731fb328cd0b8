"""The data of a training: documents of `peagle data`, packed into rows, and checks against target and drafter."""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from drafter.config import DrafterConfig
from drafter.train.held_out import FILLED_FRAC, keep_back, rows_of_evaluation
from drafter.train.recipe import Recipe
from drafter.train.row_batches import DocumentSource, pack
from drafter.train.shards import ALONE, KEPT, NAME, WEIGHTS, Document, read_manifest, read_shards, total_tokens
from drafter.vocabulary import Coverage, coverage
from peagle.base.errors import InputError, InputWarning


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """The documents of a training."""

    sources: tuple[DocumentSource, ...]  # rows of the documents that are not held out
    documents: list[Document]  # all
    held_out: list[Document]
    held_out_frac: float  # as asked for
    num_repeated: int  # documents with the prompt of one before them


def training_data(parts: Sequence[tuple[Path, int]], recipe: Recipe, held_out_frac: float) -> TrainingData:
    """Read folders, and pack their documents into rows.

    parts: (folder, share of a step's rows). held_out_frac: the most of each part's conversations to hold out; fewer if
    an evaluation lacks room. Raises InputError for shares that do not divide the rows, a folder without a token to
    train on, and rows longer than all the data.
    """
    total, rows, width = sum(share for _, share in parts), recipe.rows, recipe.width
    if any(rows * share % total for _, share in parts):
        raise InputError(f"--rows is {rows}; expected a multiple of {total}, the sum of the shares of --data")
    folders = _numbered_apart([read_shards(path) for path, _ in parts])
    for (path, _), own in zip(parts, folders, strict=True):
        if not any(document.trained.any() for document in own):
            raise InputError(f"{path} has no token to train on: all of it is masked")
    documents = [document for own in folders for document in own]
    num_tokens = total_tokens(documents)[0]
    if width > num_tokens:
        raise InputError(
            f"a row has {width} tokens (--width), and all of the data {num_tokens}: give --width {num_tokens} or less, "
            "or make more data"
        )
    groups = [(own, rows * share // total) for own, (_, share) in zip(folders, parts, strict=True)]
    room = FILLED_FRAC * width * rows_of_evaluation(rows) / rows
    split = keep_back([(own, int(room * count)) for own, count in groups], held_out_frac, recipe.seed)
    sources = tuple(
        DocumentSource(pack(trained, width), count) for (trained, _), (_, count) in zip(split, groups, strict=True)
    )
    held_out = [document for _, kept_back in split for document in kept_back]
    if not held_out and int(held_out_frac * len(documents)):
        _warn_of_none_held_out(len(documents))
    num_repeated = len(documents) - len({document.prompt.tobytes() for document in documents})
    return TrainingData(sources, documents, held_out, held_out_frac, num_repeated)


def _warn_of_none_held_out(num_documents: int) -> None:
    line = (
        f"none of the {num_documents:,} documents is held out, because they are turns of too few conversations or "
        "answers to too few prompts; expected more, or --evaluate FILE of others"
    )
    warnings.warn(line, InputWarning, stacklevel=3)


def _numbered_apart(folders: Sequence[Sequence[Document]]) -> list[list[Document]]:
    """Renumber conversations, so that those of different folders differ."""
    numbered, start = [], 0
    for documents in folders:
        numbered.append(
            [
                document
                if document.conversation == ALONE
                else dataclasses.replace(document, conversation=start + document.conversation)
                for document in documents
            ]
        )
        start += 1 + max(document.conversation for document in documents)
    return numbered


def shares(typed: Sequence[str]) -> list[tuple[Path, int]]:
    """Parse --data, each DIR[:SHARE], to (folder, share of a step's rows). Raises InputError."""
    if not typed:
        raise InputError("no training data is given; expected --data DIR, a folder that peagle data wrote")
    parts = []
    for text in typed:
        folder, _, share = text.rpartition(":") if ":" in text else (text, "", "1")
        if not share.isdecimal() or int(share) < 1:
            raise InputError(f"--data {text}: a share of {share!r}; expected a whole number, as in DIR:5")
        parts.append((Path(folder), int(share)))
    return parts


def answer_tokens(documents: Sequence[Document]) -> Iterator[np.ndarray]:
    """Yield the target's own tokens of each document."""
    return (document.token_ids[document.trained] for document in documents)


def data_coverage(documents: Sequence[Document], token_ids: np.ndarray, num_drafts: int) -> Coverage:
    """Measure how much of the answers a draft vocabulary covers. Raises InputError if it is nothing."""
    measured = coverage(answer_tokens(documents), token_ids, num_drafts)
    if not measured.frac:
        raise InputError(
            f"none of the {len(token_ids):,} tokens of the draft vocabulary is in an answer of the data; expected "
            "tokens that the target writes: --draft-vocab N takes the most frequent of the data"
        )
    return measured


def self_contained(documents: Sequence[Document]) -> bool:
    """Test whether the data holds what the target computes, so that training does not run it."""
    return all(document.teacher for document in documents)


def check_tokens(documents: Sequence[Document], config: DrafterConfig, init: str | None) -> None:
    """Raise InputError for data of another vocabulary or other layers.

    Warns of a mask token in the data: that of --init, or the rarest token if none is free.
    """
    uses = 0  # of the mask token
    for document in documents:
        ids = document.token_ids
        if len(ids) and not 0 <= ids.min() <= ids.max() < config.vocab_size:
            raise InputError(
                f"the data holds token id {ids.max()}, the target's vocabulary has {config.vocab_size}; "
                "expected data of this target"
            )
        uses += int(np.sum(ids == config.mask_token_id)) if config.parallel else 0
        aux_hidden = document.teacher.get("aux_hidden")
        if aux_hidden is not None and aux_hidden.shape[1] != config.aux_width:
            raise InputError(
                f"the data's hidden states are {aux_hidden.shape[1]} wide, the drafter reads {config.aux_width}; "
                "expected the same --aux-layer-ids in peagle data and peagle train"
            )
    if not uses:
        return
    why = "it is the rarest token, and none is free" if init is None else "--init was trained with it"
    warnings.warn(
        f"the mask token {config.mask_token_id} is in use: {uses:,} of the data's {total_tokens(documents)[0]:,} "
        f"tokens, and there the drafter takes it for a mask; {why}",
        InputWarning,
        stacklevel=2,
    )


def check_teachers(folders: Sequence[Path], config: DrafterConfig, weights: str, depth: int) -> None:
    """Raise InputError for hidden states or logits of another target or of other layers, and for prompts cut too short.

    Text of another target is a warning.
    """
    for folder in folders:
        manifest = read_manifest(folder)
        layers = manifest.get("aux_layer_ids")
        if layers and config.aux_layer_ids is not None and tuple(layers) != config.aux_layer_ids:
            listed = ",".join(map(str, layers))
            raise InputError(
                f"{folder} holds the outputs of layers {layers}, the drafter reads {list(config.aux_layer_ids)}; "
                f"expected the same: make the data with the drafter's, or give --aux-layer-ids {listed} for a new one"
            )
        field, kept = config.receptive_field, manifest.get(KEPT)
        if kept is not None and (field is None or kept < field + depth + 1):
            needs = (
                "all of them" if field is None else f"the last {field + depth + 1} with its windows and --depth {depth}"
            )
            raise InputError(
                f"{folder} holds the last {kept} tokens of a prompt, the drafter reads {needs}; give a smaller "
                "--drafter-window, or make the data with a larger --keep-prompt"
            )
        if manifest.get(WEIGHTS, weights) == weights:
            continue
        if layers:
            raise InputError(
                f"{folder} holds what another target computed ({manifest.get(NAME)}); expected data of --target"
            )
        line = (
            f"{folder} holds what another target wrote ({manifest.get(NAME)}), and a drafter learns best from the "
            "answers of its own; expected data of --target: peagle data makes them"
        )
        warnings.warn(line, InputWarning, stacklevel=2)
