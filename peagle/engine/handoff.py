"""Hand a sequence to another engine: its Prefix and the token that follows, as the bytes of one safetensors file.

A message depends on the sequence alone, not on the sender's slots, capacity, chunks or devices. A cache travels as its
valid rows in order of position: a full layer with all of them, a ring with those that its window reaches. A kv head
that several devices hold travels once.

    sender, ring of 8    | 8 9 | 2 3 4 5 6 7 |     window 5, length 10
    message                5 6 7 8 9
    receiver, ring of 6  | 6 7 8 9 . 5 |           slot = position mod 6

The drafter's caches end one row earlier (peagle.engine.state.Prefix). A sender's rows are
copied as they lie in the host's memory, or cut on its device block by block; a receiver puts them in block by block, as
those of the prefix cache. Neither side holds a second copy of the caches.

The header names the format and the fingerprints of the models. It holds no code, and nothing is unpickled. A message
without authentication is as trustworthy as the network that brought it.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from peagle.engine.prefill import is_full, nodes
from peagle.engine.prefix_cache import BLOCK
from peagle.engine.programs import Programs
from peagle.engine.request import Request
from peagle.engine.state import Prefix
from peagle.ops.errors import InputError
from peagle.ops.kv_cache import KVCache
from peagle.ops.strict_json import dumps

Shape: TypeAlias = tuple[tuple[int, ...], np.dtype]
FORMAT = "peagle hand-off 1"
NO_DRAFTER = "none"  # in place of its fingerprint
MOST_HEADER_BYTES = 1 << 20
ALIGNED = 64  # bytes; the tensors begin at a multiple
TOKEN_IDS, AUX_HIDDEN = "token_ids", "aux_hidden"
METADATA = ("target", "drafter", "drafts")  # beside the format
DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "I32": np.dtype(np.int32),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ANOTHER = "; expected a message of the same version of peagle: hand the request over again"


@dataclass(frozen=True)
class Fingerprints:
    """What must be equal on both sides: of the target its files and dtype; of the drafter also what it reads and sees.

    Made by peagle.loading; empty for models that come from no files.
    """

    target: str = ""
    drafter: str = ""


@dataclass(frozen=True, eq=False)
class HandOff:
    """One sequence on its way to another engine. Everything in it is a view of `data`."""

    data: np.ndarray  # uint8: the message
    token_ids: tuple[int, ...]  # prompt and output; the last of them is pending, and in no cache
    fingerprints: Fingerprints
    drafts: bool  # the drafter's rows are complete, so the sequence may draft
    tensors: Mapping[str, np.ndarray]

    @property
    def length(self) -> int:
        """Tokens in the target's caches."""
        return len(self.token_ids) - 1


@dataclass(frozen=True)
class _Part:
    """A cache, or another leaf, of a Prefix. valid: rows that hold something. node: its shape.

    copies: of each kv head, side by side in the cache; a message has one of them.
    """

    name: str
    node: Any
    valid: int
    copies: int = 1

    @property
    def fields(self) -> dict[str, Any]:
        """The arrays of it, by their names in a message."""
        if isinstance(self.node, KVCache):
            return {f"{self.name}.key": self.node.key, f"{self.name}.value": self.node.value}
        return {self.name: self.node}

    def row(self, leaf: Any) -> tuple[int, ...]:
        """Return the shape of a row of a leaf [1, rows, *row] in a message."""
        row: tuple[int, ...] = leaf.shape[2:]
        return (row[0] // self.copies, *row[1:]) if isinstance(self.node, KVCache) else row

    def once(self, rows: np.ndarray) -> np.ndarray:
        """Take one copy of each kv head of a cache's rows [rows, G, H]."""
        return rows[:, :: self.copies]

    def copied(self, rows: np.ndarray) -> np.ndarray:
        """Put the copies of each kv head of a message's rows [1, rows, G, H] side by side."""
        return rows if self.copies == 1 else np.repeat(rows, self.copies, axis=2)


def _parts(programs: Programs, prefix: Prefix, length: int) -> list[_Part]:
    """List the target's parts, then the drafter's."""
    copies = programs.kv_copies
    found = [_Part(f"target.{i}", node, length, copies) for i, node in enumerate(nodes(prefix.target_cache))]
    return found + [_Part(f"drafter.{i}", node, length - 1) for i, node in enumerate(nodes(prefix.drafter_state))]


# --- the sender -------------------------------------------------------------------------------------------------------


def pack(
    programs: Programs, lane: Prefix, token_ids: tuple[int, ...], fingerprints: Fingerprints, drafts: bool
) -> HandOff:
    """Make the message of a lane, which holds all of these tokens but the last.

    drafts: whether the drafter's rows are complete; else they stay out.
    """
    length = len(token_ids) - 1
    kept, aux_hidden = programs.cut_snapshot(lane, length)
    parts, rest = _parts(programs, lane, length), iter(kept)
    ends = [part if is_full(part.node) else dataclasses.replace(part, node=next(rest)) for part in parts]
    sent = [part for part in ends if drafts or part.name.startswith("target.")]
    shapes: dict[str, Shape] = {TOKEN_IDS: ((length + 1,), np.dtype(np.int32))}
    if lane.drafter_state is not None:
        shapes[AUX_HIDDEN] = (aux_hidden.shape[1:], np.dtype(aux_hidden.dtype))
    shapes |= {name: _sent_shape(part, leaf) for part in sent for name, leaf in part.fields.items()}
    drafter = NO_DRAFTER if lane.drafter_state is None else fingerprints.drafter
    metadata = {"format": FORMAT, "target": fingerprints.target, "drafter": drafter, "drafts": str(drafts)}
    data, tensors = _allocate(shapes, metadata)
    tensors[TOKEN_IDS][:] = token_ids
    if AUX_HIDDEN in tensors:
        tensors[AUX_HIDDEN][:] = np.asarray(aux_hidden)[0]
    for part in sent:
        if not is_full(part.node):
            for name, leaf in part.fields.items():
                tensors[name][...] = _in_order(part, np.asarray(leaf))
    _fill_full(programs, lane, parts, tensors, length)
    return HandOff(data, token_ids, Fingerprints(fingerprints.target, drafter), drafts, tensors)


def _sent_shape(part: _Part, leaf: Any) -> Shape:
    shape = leaf.shape[1:]
    if isinstance(part.node, KVCache):
        shape = (part.valid if is_full(part.node) else min(part.valid, shape[0]), *part.row(leaf))
    return shape, np.dtype(leaf.dtype)


def _in_order(part: _Part, leaf: np.ndarray) -> np.ndarray:
    """Take the one row of a leaf, or a ring's valid rows in order of position."""
    if not isinstance(part.node, KVCache):
        return leaf[0, ...]
    capacity = leaf.shape[1]
    count = min(part.valid, capacity)
    return part.once(leaf[0, np.arange(part.valid - count, part.valid) % capacity])


def _fill_full(
    programs: Programs, lane: Prefix, parts: list[_Part], tensors: Mapping[str, np.ndarray], length: int
) -> None:
    """Copy the full caches' rows: as they lie in the host's memory, or block by block from a device."""
    full = [part for part in parts if is_full(part.node)]
    if all(_on_host(leaf) for part in full for leaf in part.fields.values()):
        for part in full:
            for name, leaf in part.fields.items():
                if name in tensors:
                    tensors[name][...] = part.once(np.asarray(leaf)[0, : part.valid])
        return
    starts = range(0, length if full else 0, BLOCK)
    ahead = programs.cut_block(lane, 0) if starts else []
    for start in starts:
        blocks = ahead
        if start + BLOCK in starts:  # the device cuts while the host copies
            ahead = programs.cut_block(lane, start + BLOCK)
        for part, block in zip(full, blocks, strict=True):
            first = _first_row(part, start)
            for name, rows in zip(part.fields, (block.key, block.value), strict=True):
                if name in tensors:
                    into = tensors[name][first : first + rows.shape[1]]
                    into[...] = part.once(np.asarray(rows)[0, : len(into)])


def _on_host(leaf: jax.Array) -> bool:
    """Whether NumPy reads an array as it lies: it is whole, in the host's memory."""
    devices = leaf.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def _first_row(part: _Part, start: int) -> int:
    """Return the first row of a full cache's block, which ends within the cache (peagle.engine.prefill.cut_block)."""
    first = start if part.name.startswith("target.") else max(start - 1, 0)
    capacity: int = part.node.capacity
    return min(first, capacity - min(BLOCK, capacity))


def _allocate(shapes: Mapping[str, Shape], metadata: Mapping[str, str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Make a safetensors file of tensors to be filled: 8 bytes of the header's size, the header, the tensors."""
    sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes.values()]
    ends = list(itertools.accumulate(sizes, initial=0))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for place, (name, (shape, dtype)) in enumerate(shapes.items()):
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [ends[place], ends[place + 1]]}
    text = dumps(header).encode()
    text += b" " * (-(len(text) + 8) % ALIGNED)
    data = np.empty(8 + len(text) + ends[-1], np.uint8)
    data[:8] = np.frombuffer(len(text).to_bytes(8, "little"), np.uint8)
    data[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
    body = data[8 + len(text) :]
    return data, {
        name: _view(body[ends[place] : ends[place + 1]], shape, dtype)
        for place, (name, (shape, dtype)) in enumerate(shapes.items())
    }


def _view(body: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return body.view(dtype).reshape(shape)


# --- the receiver -----------------------------------------------------------------------------------------------------


def parse(data: bytes | bytearray | memoryview | np.ndarray) -> HandOff:
    """Read a message; nothing is copied. Raises InputError for one that is no hand-off, of another format, or cut."""
    whole = np.frombuffer(data, np.uint8)
    header, body = _header(whole)
    metadata = header.pop("__metadata__", None)
    seen = metadata.get("format") if isinstance(metadata, dict) else None
    if seen != FORMAT:
        raise InputError(f"the hand-off has the format {str(seen)[:40]!r}{ANOTHER}")
    tensors = {name: _tensor(name, entry, body) for name, entry in header.items()}
    if (named := sum(each.nbytes for each in tensors.values())) != len(body):
        raise InputError(f"the hand-off has {len(body)} bytes of tensors; its header names {named}{ANOTHER}")
    ids, (target, drafter, drafts) = tensors.get(TOKEN_IDS), (metadata.get(name) for name in METADATA)
    if ids is None or ids.ndim != 1 or len(ids) < 2 or ids.dtype != np.int32 or drafts not in ("True", "False"):
        raise InputError(f"the hand-off has no tokens, or does not say whether they may draft{ANOTHER}")
    if not isinstance(target, str) or not isinstance(drafter, str):
        raise InputError(f"the hand-off has no fingerprints{ANOTHER}")
    return HandOff(whole, tuple(ids.tolist()), Fingerprints(target, drafter), drafts == "True", tensors)


def _header(data: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    size = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or not 2 <= size <= MOST_HEADER_BYTES:
        raise InputError(f"these {len(data)} bytes are no hand-off{ANOTHER}")
    if len(data) < 8 + size:
        raise _truncated(len(data), 8 + size)
    try:
        header = json.loads(data[8 : 8 + size].tobytes())
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise InputError(f"the hand-off's header is no JSON object{ANOTHER}")
    return header, data[8 + size :]


def _truncated(seen: int, expected: int) -> InputError:
    return InputError(f"the hand-off is cut off: {seen} of {expected} bytes arrived; hand the request over again")


def _tensor(name: str, entry: Any, body: np.ndarray) -> np.ndarray:
    """Make the view of a tensor. Raises InputError if its entry contradicts itself or the message is too short."""
    try:
        shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
        begin, end = entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        whole = False
    wrong = InputError(f"the hand-off's entry of {name[:40]!r} contradicts itself{ANOTHER}")
    if not whole or end - begin != math.prod(shape) * dtype.itemsize:
        raise wrong
    if end > len(body):
        raise _truncated(len(body), end)
    try:
        return _view(body[begin:end], shape, dtype)
    except (ValueError, OverflowError):  # more axes than an array has, or an axis beyond all memory beside an empty one
        raise wrong from None


def check(programs: Programs, hand_off: HandOff, capacity: int, fingerprints: Fingerprints) -> None:
    """Raise InputError for a hand-off that the programs' lane cannot take. capacity: positions of a slot."""
    lane = programs.lane_shapes
    if hand_off.length >= capacity:
        raise InputError(
            f"the hand-off has {len(hand_off.token_ids)} tokens; expected at most {capacity}, the context of this "
            "engine: raise it, or send the request elsewhere"
        )
    seen, drafts = hand_off.fingerprints, lane.drafter_state is not None
    for model, theirs, ours in [
        ("target", seen.target, fingerprints.target),
        *([("drafter", seen.drafter, fingerprints.drafter)] if drafts else []),
    ]:
        if theirs != ours:
            raise InputError(
                f"the hand-off is of another {model} ({theirs[:12] or 'of no files'}; this engine has "
                f"{ours[:12] or 'one of no files'}); expected equal checkpoints, dtype, aux layers and windows"
            )
    kept = iter(programs.kept_shapes)
    for part in _parts(programs, lane, hand_off.length):
        seen_by = next(kept) if not is_full(part.node) else None
        # a full layer may take what was a ring: only its sender's window would tell how many rows that needs
        least = min(part.valid, seen_by.capacity if isinstance(seen_by, KVCache) else 1)
        if hand_off.drafts or part.name.startswith("target."):
            for name, leaf in part.fields.items():
                rows = (least, part.valid) if isinstance(part.node, KVCache) else None
                _check_tensor(hand_off, name, leaf, part.row(leaf), rows)
    if drafts:
        aux_hidden = lane.aux_hidden
        _check_tensor(hand_off, AUX_HIDDEN, aux_hidden, aux_hidden.shape[2:], (aux_hidden.shape[1],) * 2)


def _check_tensor(hand_off: HandOff, name: str, leaf: Any, row: tuple[int, ...], rows: tuple[int, int] | None) -> None:
    """Raise InputError unless a tensor is like a leaf of the lane, of such rows.

    rows: the least and most it may have; None: any.
    """
    given = hand_off.tensors.get(name)
    if given is None:
        seen = "is missing"
    elif given.dtype != leaf.dtype or given.ndim != leaf.ndim - 1 or given.shape[1:] != row:
        seen = f"has rows of {given.dtype} {list(given.shape[1:])}"
    elif rows is not None and not rows[0] <= len(given) <= rows[1]:
        seen = f"has {len(given)} rows of {rows[1]}"
    else:
        return
    raise InputError(
        f"the hand-off's {name} {seen}; expected rows of {leaf.dtype} {list(row)}: both sides must have the same models"
    )


def check_request(hand_off: HandOff, request: Request, stop_token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raise InputError if a hand-off is not of this request, or nothing is left to do."""
    prompt, tokens = request.prompt_ids, hand_off.token_ids
    if tokens[: len(prompt)] != prompt or len(tokens) <= len(prompt):
        raise InputError(f"the hand-off does not begin with {request.name}; expected the hand-off of this request")
    if not all(0 <= token < vocab_size for token in tokens):
        raise InputError(
            f"the hand-off of {request.name} has tokens outside of the vocabulary of {vocab_size}{ANOTHER}"
        )
    if len(tokens) - len(prompt) >= request.max_new_tokens or tokens[-1] in stop_token_ids:
        raise InputError(f"{request.name} had ended when it was handed over; expected one that goes on")


def put(programs: Programs, lane: Prefix, hand_off: HandOff) -> Prefix:
    """Load a lane with a hand-off that `check` has passed. The lane is donated."""
    parts, length = _parts(programs, lane, hand_off.length), hand_off.length
    full = [part for part in parts if is_full(part.node)]

    def blocks() -> Iterator[list[KVCache]]:
        for start in range(0, length if full else 0, BLOCK):
            yield [_block(hand_off, part, _first_row(part, start)) for part in full]

    kept = [
        _at_the_end(hand_off, part, shape)
        for part, shape in zip((part for part in parts if not is_full(part.node)), programs.kept_shapes, strict=True)
    ]
    aux_hidden = np.zeros(lane.aux_hidden.shape, lane.aux_hidden.dtype)
    if lane.drafter_state is not None:
        aux_hidden[0] = hand_off.tensors[AUX_HIDDEN]
    return programs.put_snapshot(programs.put_blocks(lane, blocks()), (kept, jnp.asarray(aux_hidden)), length)


def _block(hand_off: HandOff, part: _Part, first: int) -> KVCache:
    """Make the rows first.. of a full cache; those that the message lacks are zeros, and dead."""
    count = min(BLOCK, part.node.capacity)
    found = []
    for name, leaf in part.fields.items():
        given = hand_off.tensors.get(name)
        sent_from = part.valid if given is None else part.valid - len(given)  # a ring's rows begin later
        if given is not None and sent_from <= first and first + count <= part.valid:
            found.append(part.copied(given[None, first - sent_from : first - sent_from + count]))
            continue
        rows = np.zeros((1, count, *part.row(leaf)), leaf.dtype)
        begin, end = max(first, sent_from), min(first + count, part.valid)
        if given is not None and begin < end:
            rows[0, begin - first : end - first] = given[begin - sent_from : end - sent_from]
        found.append(part.copied(rows))
    return _cache(found, ring=False)


def _at_the_end(hand_off: HandOff, part: _Part, shape: Any) -> Any:
    """Make what a snapshot keeps of a part: a ring's rows in their slots, or another leaf, as it is.

    A longer leaf is cut: what is beyond the sequence is dead.
    """
    found = []
    is_cache = isinstance(part.node, KVCache)
    for name, leaf in dataclasses.replace(part, node=shape).fields.items():
        whole = (1, leaf.shape[1], *part.row(leaf)) if is_cache else leaf.shape
        rows, given = np.zeros(whole, leaf.dtype), hand_off.tensors.get(name)
        if given is not None and is_cache:
            count = min(len(given), rows.shape[1])
            rows[0, np.arange(part.valid - count, part.valid) % rows.shape[1]] = given[len(given) - count :]
        elif given is not None:
            room: tuple[Any, ...] = tuple(slice(min(a, b)) for a, b in zip(given.shape, rows.shape[1:], strict=True))
            rows[(0, *room)] = given[room]
        found.append(part.copied(rows) if is_cache else rows)
    return _cache(found, ring=True) if is_cache else found[0]


def _cache(rows: list[np.ndarray], ring: bool) -> KVCache:
    key, value = rows
    return KVCache(key, value, ring)  # type: ignore[arg-type]  # NumPy's, too
