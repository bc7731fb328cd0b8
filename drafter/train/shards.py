"""Training data on disk: a folder of shards with a manifest.

    manifest.json                the settings of `peagle data`; the folder continues only with the same settings
    shard_00000.safetensors      documents end to end, N tokens in all
        token_ids   int32 [N]
        trained     uint8 [N]    1: predicting this token counts (the target wrote it)
        ends        int64 [D]    where each document ends
        conversations int64 [D]  which conversation each document is a turn of; ALONE: of none
        and optionally, of the target:
        aux_hidden  [N, A]       the aux layers' hidden states at each token
        top_ids     int32 [N, n], top_logits float32 [N, n], log_total float32 [N]
                                 its n best logits after each token, and the logsumexp of all
    shard_00001.safetensors ...
    part_00002.safetensors       the finished answers of a shard that is not
    taught_00002.safetensors     those answers for which the target's results are computed, too

A shard is whole or absent, and has a digest of its content: a truncated or altered shard is an error. Parts are stored
like a shard: `conversations` is the number of the prompt, or in `taught` the place among the shard's documents.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from peagle.base.checkpoint import save_tensors
from peagle.base.errors import InputError
from peagle.base.files import holds_files, reason_of, write_text_whole, write_whole
from peagle.base.records import describe_difference, flat
from peagle.base.strict_json import dumps

MANIFEST = "manifest.json"
# manifest keys whose options have another name
OPTIONS = {
    "prompts": "--prompt-file",
    "weights": "--target",
    "template": "--target",
    "max_new_tokens": "-n",
    "raw": "--raw-prompt",
}
SCHEMA = 2
# keys of the manifest
NAME = "target"  # the target's path as typed
WEIGHTS = "weights"  # the target's peagle.base.checkpoint.fingerprint
KEPT = "keep_prompt"  # how many last tokens of a prompt were kept; absent: all
DIGEST = "sha256"  # key of the files' metadata
REQUIRED = ("token_ids", "trained", "ends", "conversations")
TEACHER = ("aux_hidden", "top_ids", "top_logits", "log_total")  # all or none
ALONE = -1
PART, TAUGHT = "part", "taught"  # of a shard that is not finished


@dataclasses.dataclass(frozen=True)
class Document:
    """A prompt and its answer. teacher: stored tensors of the target (TEACHER), with a row per token.

    conversation: its number among those of the folder, because each turn repeats those before it; ALONE: of none.
    """

    token_ids: np.ndarray  # [n]
    trained: np.ndarray  # [n] bool
    teacher: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    conversation: int = ALONE

    @property
    def prompt(self) -> np.ndarray:
        """The tokens before the first trained one; none if no token is trained."""
        return self.token_ids[: int(np.argmax(self.trained)) if self.trained.any() else 0]


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard_{number:05d}.safetensors"


def part_path(folder: Path, number: int, kind: str = PART) -> Path:
    return folder / f"{kind}_{number:05d}.safetensors"


def expect_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise InputError unless the folder is new or was begun with the same settings. Writes nothing.

    A folder without a shard or a part counts as new. The target's path may differ, because a directory can have several
    paths.
    """
    manifest = {"schema": SCHEMA, **settings}
    if (folder / MANIFEST).exists():
        if not _has_documents(folder):
            return
        stored = read_manifest(folder)
        records = flat(stored), flat(manifest)
        then, now = ({key: value for key, value in record.items() if key != NAME} for record in records)
        if difference := describe_difference(then, now, _option):
            raise InputError(f"{folder} was made with {difference}; expected the same: take another --out")
        return
    if folder.exists() and (not folder.is_dir() or holds_files(folder)):
        what = "holds files, but no " + MANIFEST if folder.is_dir() else "is a file"
        raise InputError(f"{folder} {what}; expected a new folder, or one of training data")


def _has_documents(folder: Path) -> bool:
    return any(any(folder.glob(f"{kind}_*.safetensors")) for kind in ("shard", PART, TAUGHT))


def _option(key: str) -> str:
    name = key.rpartition(".")[2]
    return OPTIONS.get(name) or OPTIONS.get(key.partition(".")[0]) or "--" + name.replace("_", "-")


def open_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Create the folder and its manifest, unless it holds documents. Raises InputError as `expect_folder`."""
    expect_folder(folder, settings)
    path = folder / MANIFEST
    if path.exists() and _has_documents(folder):
        return
    manifest = {"schema": SCHEMA, **settings}
    folder.mkdir(parents=True, exist_ok=True)
    write_text_whole(path, dumps(manifest, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the folder's manifest. Raises InputError if it is not training data, or of another schema."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {reason_of(error)}; expected what peagle data writes") from None
    except ValueError:
        raise InputError(f"{path} is not valid JSON; expected what peagle data writes") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        schema = manifest.get("schema") if isinstance(manifest, dict) else None
        raise InputError(f"{path} has schema {schema!r}; this version reads {SCHEMA}: make the data again")
    return manifest


def write_shard(folder: Path, number: int, documents: Sequence[Document]) -> None:
    """Write a shard, whole or not at all, and remove its parts. Raises OSError if it cannot be written."""
    _write(shard_path(folder, number), documents)
    for kind in (PART, TAUGHT):
        part_path(folder, number, kind).unlink(missing_ok=True)


def write_part(folder: Path, number: int, documents: Sequence[Document], kind: str = PART) -> None:
    """Write the finished documents of a shard, whole or not at all. Raises OSError if they cannot be written."""
    _write(part_path(folder, number, kind), documents)


def read_part(folder: Path, number: int, kind: str = PART) -> list[Document]:
    """Read the finished documents of a shard that is not; none without a part. Raises InputError as `read_shard`."""
    path = part_path(folder, number, kind)
    return read_shard(path) if path.exists() else []


def _write(path: Path, documents: Sequence[Document]) -> None:
    arrays = {
        "token_ids": _joined([np.asarray(document.token_ids, np.int32) for document in documents], np.int32),
        "trained": _joined([np.asarray(document.trained, np.uint8) for document in documents], np.uint8),
        "ends": np.cumsum([len(document.token_ids) for document in documents], dtype=np.int64),
        "conversations": np.array([document.conversation for document in documents], np.int64),
    }
    for name in documents[0].teacher if documents else ():
        arrays[name] = np.ascontiguousarray(np.concatenate([document.teacher[name] for document in documents]))
    metadata = {DIGEST: _digest(arrays)}
    write_whole(path, lambda temporary: save_tensors(temporary, arrays, metadata))


def _joined(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros((0,), dtype)


def read_shards(folder: Path) -> list[Document]:
    """Read all documents of a folder, in order.

    Raises InputError for a folder without any, and for a shard that is corrupt or does not match the others.
    """
    manifest = read_manifest(folder)
    paths = sorted(folder.glob("shard_*.safetensors"))
    if not paths:
        raise InputError(f"{folder} holds no shards; expected some: run peagle data to its end")
    expected = -(-manifest.get("num_prompts", 0) // manifest.get("shard_prompts", 1))
    if len(paths) < expected:
        raise InputError(
            f"{folder} holds {len(paths)} of {expected} shards; run peagle data to its end: the same command makes the "
            "missing ones"
        )
    documents = [document for path in paths for document in read_shard(path)]
    kinds = {tuple(sorted(document.teacher)) for document in documents}
    if len(kinds) > 1:
        raise InputError(f"{folder}: some shards hold the target's results and some do not; make the data again")
    if not documents:
        raise InputError(f"{folder} holds no documents; expected some")
    return documents


def read_shard(path: Path) -> list[Document]:
    """Read a shard's documents. Raises InputError if the shard is truncated or altered."""
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            digest = (file.metadata() or {}).get(DIGEST)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a whole shard: {error}; remove it, and peagle data makes it again") from None
    if missing := [name for name in REQUIRED if name not in arrays]:
        raise InputError(f"{path} has no {missing[0]}; expected a shard of peagle data")
    if digest != _digest(arrays):
        raise InputError(
            f"{path} is corrupt: its content does not match its digest; remove it, and peagle data makes it again"
        )
    ends, conversations = arrays["ends"].tolist(), arrays["conversations"].tolist()
    teacher = {name: arrays[name] for name in TEACHER if name in arrays}
    return [
        Document(
            arrays["token_ids"][start:end],
            arrays["trained"][start:end].astype(bool),
            {name: values[start:end] for name, values in teacher.items()},
            conversation,
        )
        for start, end, conversation in zip([0, *ends[:-1]] if ends else [], ends, conversations, strict=True)
    ]


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        values = arrays[name]
        digest.update(f"{name} {values.dtype} {values.shape}\n".encode())
        digest.update(np.ascontiguousarray(values).view(np.uint8).data if values.size else b"")
    return digest.hexdigest()


def total_tokens(documents: Iterable[Document]) -> tuple[int, int]:
    sizes = [(len(document.token_ids), int(document.trained.sum())) for document in documents]
    return sum(size for size, _ in sizes), sum(trained for _, trained in sizes)
