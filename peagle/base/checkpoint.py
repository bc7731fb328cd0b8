"""Read and write checkpoints in the Hugging Face layout: config.json beside safetensors files.

Downloaded files are not trusted: no pickle, no code, no path in an index. Links are the owner's, and are followed.
Missing and surplus tensors are errors. Bad files raise InputError.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from peagle.base import interrupt
from peagle.base.errors import InputError
from peagle.base.files import reason_of, umask, writing
from peagle.base.memory import aligned
from peagle.base.strict_json import dumps

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PIECE_BYTES = 1 << 22  # read at a time
_FINGERPRINT_BLOCKS = 16  # blocks of 64 KiB, spread over a file
# buffers that some writers store; loaders compute them from config.json
_BUFFERS = ("rotary_emb.inv_freq",)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}


@dataclasses.dataclass(frozen=True)
class Cut:
    """A part of an axis: these slices, one after the other, then zeros up to `width`. By default the whole axis."""

    slices: tuple[slice, ...] = ()
    width: int | None = None

    def indices(self, size: int) -> np.ndarray:
        """Return the indices of the slices within an axis of `size` elements."""
        if self.width is None:
            return np.arange(size)
        return np.concatenate([np.arange(part.start, part.stop) for part in self.slices])


class Checkpoint:
    """An open directory: its config, and its tensors by name, which are read from mapped files when they are taken.

    A loader takes or ignores every tensor, then calls `finish`, which refuses tensors that are left over.
    """

    def __init__(
        self,
        directory: Path,
        config: dict[str, Any],
        shard_of: dict[str, Any],
        stored_names: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.config = config
        self._shard_of = shard_of  # open safetensors files by tensor name
        self._stored_names = stored_names or {}  # names of renamed tensors in their files
        self._left = set(shard_of)
        self._progress: Callable[[int, int], None] | None = None
        self._taken_bytes = self._all_bytes = 0

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors, taken or not."""
        return frozenset(self._shard_of)

    def has(self, name: str) -> bool:
        return name in self._shard_of

    def without_prefix(self, prefix: str) -> "Checkpoint":
        """Strip a prefix from the tensors' names.

        Returns the checkpoint unchanged if no name has the prefix, or if two tensors would share a name.
        """
        stored = {name.removeprefix(prefix): name for name in self._shard_of}
        if len(stored) < len(self._shard_of) or stored.keys() == self._shard_of.keys():
            return self
        shards = {name: self._shard_of[whole] for name, whole in stored.items()}
        return Checkpoint(self.directory, self.config, shards, stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises InputError if it is missing."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> np.dtype:
        """Return a tensor's dtype. Raises InputError if it is missing, or if numpy has no such dtype."""
        stored = self._slice(name).get_dtype()
        if stored not in _DTYPES:
            raise InputError(
                f"{self.directory}: tensor {name} has dtype {stored}; expected one of {', '.join(_DTYPES)}"
            )
        return _DTYPES[stored]

    def watch(self, progress: Callable[[int, int], None], total_bytes: int | None = None) -> None:
        """Call progress(bytes read from now on, total_bytes) after each piece. Default: the bytes of all tensors."""
        self._progress = progress
        everything = sum(math.prod(self.shape(name)) * self.dtype(name).itemsize for name in self.names)
        self._all_bytes = everything if total_bytes is None else total_bytes

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the checkpoint holds exactly these tensors, before a load takes minutes. Reads none.

        Raises InputError for tensors that are missing, surplus or of another shape.
        """
        if missing := shapes.keys() - self.names:
            raise InputError(
                f"{self.directory}: tensors are missing: {_some(missing)}; the checkpoint is "
                "incomplete, or config.json belongs to another one"
            )
        for name, shape in shapes.items():
            self._check_shape(name, shape)
        self._refuse_surplus(self.names - shapes.keys())

    def take(self, name: str, shape: tuple[int, ...] | None = None, cuts: Sequence[Cut] = ()) -> np.ndarray:
        """Read the tensor, in its stored dtype, and mark it as taken.

        cuts: the part to read, by its first axes. Only the first may have several slices. The array is aligned, so
        peagle.base.memory.to_device does not copy it. Raises InputError if the tensor is missing or has another shape.
        """
        self._mark_taken(name, shape)
        whole = self.shape(name)
        first, rest = (cuts[0] if cuts else Cut()), _slices(cuts[1:], whole[1:])
        tensor = aligned(_cut_shape(whole, cuts), self.dtype(name))
        if not whole:
            tensor[...] = self._read(name, ...)
            return tensor
        step = max(1, PIECE_BYTES * len(tensor) // max(1, tensor.nbytes))
        filled = 0
        slices = (slice(0, whole[0]),) if first.width is None else first.slices
        for part in slices if all(part.start != part.stop for part in rest) else ():
            for start in range(part.start, part.stop, step):
                piece = self._read(name, (slice(start, min(start + step, part.stop)), *rest))
                tensor[(slice(filled, filled + len(piece)), *map(slice, piece.shape[1:]))] = piece
                filled += len(piece)
        return tensor

    def parts(self, name: str, shape: tuple[int, ...], cuts: Sequence[Cut] = ()) -> Iterator[np.ndarray]:
        """Read tensor[0], tensor[1], ... lazily, one copy at a time; otherwise as `take`."""
        self._mark_taken(name, shape)
        first, rest = (cuts[0] if cuts else Cut()), _slices(cuts[1:], shape[1:])
        padded_shape = _cut_shape(shape, cuts)[1:]
        empty = any(part.start == part.stop for part in rest)
        for index in first.indices(shape[0]).tolist():
            piece = np.zeros((), self.dtype(name)) if empty else self._read(name, (index, *rest) if rest else index)
            if piece.shape != padded_shape:
                padded = np.zeros(padded_shape, piece.dtype)
                padded[tuple(map(slice, piece.shape))] = piece
                piece = padded
            yield piece

    def ignore(self, name: str) -> None:
        """Mark the tensor as taken, if it exists, without reading it."""
        self._left.discard(name)

    def finish(self) -> None:
        """Raise InputError naming the tensors that were neither taken nor ignored."""
        self._refuse_surplus(self._left)

    def _mark_taken(self, name: str, shape: tuple[int, ...] | None) -> None:
        self.dtype(name)
        if shape is not None:
            self._check_shape(name, shape)
        self._left.discard(name)

    def _read(self, name: str, index: Any) -> np.ndarray:
        try:
            piece: np.ndarray = self._slice(name)[index]
        except (SafetensorError, OSError) as error:
            raise InputError(f"{self.directory}: tensor {name} cannot be read: {reason_of(error)}") from None
        if self._progress is not None:
            self._taken_bytes += piece.nbytes
            self._progress(self._taken_bytes, self._all_bytes)
        interrupt.check()
        return piece

    def _refuse_surplus(self, names: Set[str]) -> None:
        if names := {name for name in names if not name.endswith(_BUFFERS)}:
            raise InputError(
                f"{self.directory} holds tensors that this model has no place for: {_some(names)}; remove "
                "them, or use the checkpoint that belongs to this config.json"
            )

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if self.shape(name) != tuple(shape):
            raise InputError(
                f"{self.directory}: tensor {name} has shape {list(self.shape(name))}, expected {list(shape)} by "
                "config.json; weights and config.json do not belong together"
            )

    def _slice(self, name: str) -> Any:
        if name not in self._shard_of:
            raise InputError(
                f"{self.directory}: tensor {name} is missing; the checkpoint is incomplete or not of this kind"
            )
        return self._shard_of[name].get_slice(self._stored_names.get(name, name))


def _slices(cuts: Sequence[Cut], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the single slice of each cut."""
    pairs = zip(cuts, shape, strict=False)
    return tuple(slice(0, size) if cut.width is None else cut.slices[0] for cut, size in pairs)


def _cut_shape(shape: tuple[int, ...], cuts: Sequence[Cut]) -> tuple[int, ...]:
    cut = tuple(size if axis.width is None else axis.width for axis, size in zip(cuts, shape, strict=False))
    return cut + shape[len(cut) :]


def read_checkpoint(directory: Path) -> Checkpoint:
    """Open the checkpoint in a directory: check every weights file's header and the index, read no tensor yet.

    Weights are `model.safetensors`, or the shards that `model.safetensors.index.json` names. Raises InputError for
    files that are missing or corrupt, and for an index that names a path.
    """
    directory = Path(directory)
    config = read_json(directory, CONFIG)
    if (directory / WEIGHTS).is_file():
        weights = _open(directory / WEIGHTS)
        return Checkpoint(directory, config, dict.fromkeys(weights.keys(), weights))
    if (directory / INDEX).is_file():
        return Checkpoint(directory, config, _open_shards(directory))
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        raise InputError(
            f"{directory} holds only pickled weights ({_some(pickles)}), which can run code and are never read; "
            f"convert them to {WEIGHTS} first (safetensors.torch.save_file)"
        )
    raise InputError(f"{directory} has no weights: expected {WEIGHTS} or {INDEX}")


def fingerprint(directory: Path) -> str:
    """Hash config.json, and of each file of the weights that are read the name, the size and a few blocks."""
    digest = hashlib.sha256()
    config = directory / CONFIG
    digest.update(config.read_bytes() if config.is_file() else b"")
    for path in (directory / name for name in weight_files(directory)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for part in range(_FINGERPRINT_BLOCKS):
                file.seek(size * part // _FINGERPRINT_BLOCKS)
                digest.update(file.read(1 << 16))
    return digest.hexdigest()


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Read the JSON object in directory/name. Raises InputError if either is missing, or it is not an object."""
    directory = Path(directory)
    path = directory / name
    if not directory.exists():
        raise InputError(f"{directory} does not exist; expected a directory with {CONFIG} and {WEIGHTS}")
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory; expected a directory with {CONFIG} and {WEIGHTS}")
    if not path.is_file():
        raise InputError(f"{directory} has no {name}; expected a checkpoint in the Hugging Face layout")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {reason_of(error)}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {reason_of(error)}; fetch the file again") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value


def save_tensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file. Raises OSError, not the library's own error, if it cannot be written."""
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number.group(1))
        raise OSError(code, os.strerror(code), str(path)) from None


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray]],
    shard_bytes: int | None = None,
    extra_files: Mapping[str, bytes | Mapping[str, Any]] | None = None,
) -> None:
    """Write a checkpoint to a directory. Replaces an older checkpoint's files and keeps unrelated files.

    shard_bytes: write weights to shards of at most this size (a larger tensor gets its own) with an index; None: to one
    file. tensors: a mapping, or a generator of (name, array), of which only one shard is in memory. extra_files: bytes,
    or objects that become JSON.

    Files are written under a temporary name and renamed. An existing directory has no config.json while its files are
    replaced, so a reader meanwhile, or after a crash, gets an error rather than a mixture.
    """
    directory = Path(directory).absolute()
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file; expected a directory to write a checkpoint to")
    with writing(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        # a rename needs the same file system: inside the directory if it exists, else beside it
        parent = directory if directory.exists() else directory.parent
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".partial", dir=parent))
        try:
            os.chmod(temporary, 0o777 & ~umask())
            _write_weights(temporary, tensors, shard_bytes)
            for name, content in (extra_files or {}).items():
                data = content if isinstance(content, bytes) else _json_bytes(content)
                (temporary / name).write_bytes(data)
            (temporary / CONFIG).write_bytes(_json_bytes(config))
            if parent is directory:
                _replace_files(directory, temporary)
            else:
                temporary.rename(directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path} is not a whole safetensors file: {reason_of(error)}; it is truncated or corrupt, fetch it again"
        ) from None


def weight_files(directory: Path) -> list[str]:
    """List the files that hold a checkpoint's weights; empty if there are none. Raises InputError for a bad index."""
    if (directory / WEIGHTS).is_file():
        return [WEIGHTS]
    return sorted(set(_weight_map(directory).values())) if (directory / INDEX).is_file() else []


def _weight_map(directory: Path) -> dict[str, str]:
    """Read which shard holds each tensor. Raises InputError if the index does not say so."""
    weight_map = read_json(directory, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InputError(f"{directory / INDEX} has no weight_map from tensor names to file names")
    return weight_map


def _open_shards(directory: Path) -> dict[str, Any]:
    weight_map = _weight_map(directory)
    shard_of: dict[str, Any] = {}
    for shard in sorted(set(weight_map.values())):
        weights = _open(_shard(directory, shard))
        named = {name for name, file in weight_map.items() if file == shard}
        held = set(weights.keys())
        if absent := named - held:
            raise InputError(f"{directory / shard} lacks {_some(absent)}, which {INDEX} places there; fetch it again")
        if unnamed := held - named:
            raise InputError(
                f"{directory / shard} holds {_some(unnamed)}, which {INDEX} does not place there; fetch both again"
            )
        shard_of.update(dict.fromkeys(named, weights))
    return shard_of


def _shard(directory: Path, name: str) -> Path:
    """Return the path of a shard that the index names. Raises InputError if it is not the name of a file beside it.

    The file may be a link to any place, as the directory's owner made it; an index comes with the download.
    """
    if Path(name).name != name or "\0" in name:
        raise InputError(f"{directory / INDEX} names the shard {name!r}; expected the name of a file in its directory")
    if not (directory / name).is_file():
        raise InputError(f"{directory / INDEX} names the shard {name!r}, but there is no such file; fetch it again")
    return directory / name


def _write_weights(
    directory: Path, tensors: Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray]], shard_bytes: int | None
) -> None:
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    limit = math.inf if shard_bytes is None else shard_bytes
    shards: list[list[str]] = []
    shard: dict[str, np.ndarray] = {}
    held = total = 0

    def flush() -> None:
        path = directory / f"shard-{len(shards)}"
        save_tensors(path, shard, {"format": "pt"})
        path.chmod(0o666 & ~umask())  # the library permits only the owner to read it
        shards.append(list(shard))
        shard.clear()

    for name, value in pairs:
        # C order, because safetensors writes the raw buffer: a transposed view would come back scrambled
        array = np.asarray(value, order="C")
        if shard and held + array.nbytes > limit:
            flush()
            held = 0
        shard[name] = array
        held, total = held + array.nbytes, total + array.nbytes
    if shard or not shards:
        flush()
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / WEIGHTS)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{number}").rename(directory / file)
        weight_map.update(dict.fromkeys(names, file))
    (directory / INDEX).write_bytes(_json_bytes({"metadata": {"total_size": total}, "weight_map": weight_map}))


def _replace_files(directory: Path, new: Path) -> None:
    """Replace an older checkpoint's files by those in `new`, config.json last."""
    (directory / CONFIG).unlink(missing_ok=True)
    for old in [*directory.glob("model*.safetensors"), directory / INDEX, directory / "generation_config.json"]:
        old.unlink(missing_ok=True)
    for path in sorted(new.iterdir(), key=lambda path: path.name == CONFIG):
        os.replace(path, directory / path.name)


def _json_bytes(value: Mapping[str, Any]) -> bytes:
    return (dumps(value, indent=2) + "\n").encode()


def _some(names: Iterable[str], most: int = 4) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:most]) + (f" and {len(ordered) - most} more" if len(ordered) > most else "")
