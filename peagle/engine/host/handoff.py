"""Hand a sequence to another engine: its keys, values and tokens as the bytes of one safetensors file.

A message depends on the sequence alone, not on the sender's slots, memory, chunks or devices. It holds the valid rows
of each layer in order of index: all rows of a full layer, those of a windowed one that some request sees which
continues at the last whole page. A kv head that several devices hold is sent once.

    sender, pages 7 2 9      | 0 .. 63 | 64 .. 127 | 128 .. 140 |     window 20, length 141
    message                            | 64 .. 127 | 128 .. 140 |     108 .. 127 are in the window of row 127
    receiver, pages 4 0                | 64 .. 127 | 128 .. 140 |

The receiver writes the rows to its own pages, except those that its prefix cache has, and publishes them there as if it
had computed them. So one that continues the request also knows its tokens in the next turn. It computes the last row
again, for the aux_hidden that the drafter reads next. The last token is pending, and in no page.

The header names the format and the fingerprints of the models. It holds no code, and nothing is unpickled. Without
authentication a message is as trustworthy as the network that brought it, for later requests with its tokens, too.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from peagle.base.errors import InputError
from peagle.base.strict_json import dumps
from peagle.engine.host.executor import Executor
from peagle.engine.memory.kv_memory import KVMemory
from peagle.engine.memory.pages import UNMAPPED, PageTable
from peagle.engine.request import Request
from peagle.ops.attention import PAGE_SIZE
from peagle.protocols import OverDevices

TensorShape: TypeAlias = tuple[tuple[int, ...], np.dtype]
FORMAT = "peagle hand-off 3"
NO_DRAFTER = "none"  # in place of the drafter's fingerprint
MOST_HEADER_BYTES = 1 << 20
ALIGNED = 64  # bytes; the tensors begin at a multiple
TOKEN_IDS = "token_ids"
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
    """Fingerprints of the models, which must be equal on both sides. Made by peagle.loading.load.

    They cover files and dtype, and the drafter's aux layers and window. Empty for models that were not loaded from
    files.
    """

    target: str = ""
    drafter: str = ""


@dataclass(frozen=True, eq=False)
class HandOff:
    """One sequence on its way to another engine. Everything in it is a view of `data`."""

    data: np.ndarray  # uint8: the message
    token_ids: tuple[int, ...]  # prompt and output; the last one is pending, and in no page
    fingerprints: Fingerprints
    with_drafter: bool  # the drafter's rows are there, and complete, so the sequence may draft
    tensors: Mapping[str, np.ndarray]

    @property
    def length(self) -> int:
        """Tokens in the target's pages."""
        return len(self.token_ids) - 1


@dataclass(frozen=True)
class _Layer:
    """A layer of target or drafter, and the layout of its rows."""

    name: str
    number: int  # of Executor.read_pages
    group: int  # of KVMemory
    offset: int  # the index of position 0
    first: int  # the first index that a message has
    row: tuple[int]  # values of a row in a message
    dtype: np.dtype
    part: int  # values of a part of a row (peagle.protocols.OverDevices)
    copies: int  # of each part, side by side in the pages; a message has one


def _layers(executor: Executor, memory: KVMemory, length: int) -> list[_Layer]:
    """List the layers for a sequence of this length."""
    target = executor.target
    target_parts, target_copies = (target.kv_parts, target.kv_copies) if isinstance(target, OverDevices) else (1, 1)
    target_pages = executor.shapes.target_cache.pages
    drafter_pages = getattr(executor.shapes.drafter_state, "pages", ())
    layers: list[_Layer] = []
    for model, pools, first_group, parts, copies in (
        ("target", target_pages, 0, target_parts, target_copies),
        ("drafter", drafter_pages, memory.num_target_groups, 1, 1),
    ):
        for layer, pool in enumerate(pools):
            numbers = range(first_group, len(memory.groups))
            group = next(number for number in numbers if layer in memory.groups[number].layers)
            offset = memory.groups[group].offset
            first = max(offset, memory.pool.first_needed(group, length // PAGE_SIZE) * PAGE_SIZE)
            width, dtype = pool.key.shape[2], np.dtype(pool.key.dtype)
            row, part = (width // copies,), width // parts
            layers.append(_Layer(f"{model}.{layer}", len(layers), group, offset, first, row, dtype, part, copies))
    return layers


# --- the sender -------------------------------------------------------------------------------------------------------


def pack(
    executor: Executor,
    memory: KVMemory,
    table: PageTable,
    token_ids: tuple[int, ...],
    fingerprints: Fingerprints,
    with_drafter: bool,
) -> HandOff:
    """Make the message of a request whose pages hold all of these tokens but the last.

    with_drafter: the drafter's rows are complete, and are sent, too.
    """
    length = len(token_ids) - 1
    layers = [layer for layer in _layers(executor, memory, length) if with_drafter or layer.name.startswith("target.")]
    shapes: dict[str, TensorShape] = {TOKEN_IDS: ((length + 1,), np.dtype(np.int32))}
    for layer in layers:
        shape = (length - layer.first, *layer.row)
        shapes |= {f"{layer.name}.{part}": (shape, layer.dtype) for part in ("key", "value")}
    drafter = NO_DRAFTER if executor.drafter is None else fingerprints.drafter
    metadata = {"format": FORMAT, "target": fingerprints.target, "drafter": drafter, "drafts": str(with_drafter)}
    data, tensors = _allocate(shapes, metadata)
    tensors[TOKEN_IDS][:] = token_ids
    for layer in layers:
        begin = layer.first // PAGE_SIZE
        numbers = table.pages[layer.group][begin : -(-length // PAGE_SIZE)]
        assert UNMAPPED not in numbers, "pages that a later request sees"
        for part, pages in zip(("key", "value"), executor.read_pages(layer.number, numbers), strict=True):
            rows = pages.reshape(-1, pages.shape[2])[layer.first - begin * PAGE_SIZE : length - begin * PAGE_SIZE]
            once = rows.reshape(len(rows), rows.shape[1] // layer.part, layer.part)[:, :: layer.copies]
            tensors[f"{layer.name}.{part}"][...] = once.reshape(len(rows), *layer.row)
    return HandOff(data, token_ids, Fingerprints(fingerprints.target, drafter), with_drafter, tensors)


def _allocate(
    shapes: Mapping[str, TensorShape], metadata: Mapping[str, str]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Make a safetensors file of empty tensors: 8 bytes of header size, the header, the tensors."""
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
        name: body[ends[place] : ends[place + 1]].view(dtype).reshape(shape)
        for place, (name, (shape, dtype)) in enumerate(shapes.items())
    }


# --- the receiver -----------------------------------------------------------------------------------------------------


def parse(data: bytes | bytearray | memoryview | np.ndarray) -> HandOff:
    """Read a message without a copy. Raises InputError if it is not a whole hand-off of this format."""
    whole = np.frombuffer(data, np.uint8)
    try:
        about, tensors = _read(whole)
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']!r}")
        token_ids, drafts = tuple(tensors[TOKEN_IDS].tolist()), {"True": True, "False": False}[about["drafts"]]
        target, drafter = about["target"], about["drafter"]
        if not isinstance(target, str) or not isinstance(drafter, str):
            raise ValueError("it has no fingerprints")
        if tensors[TOKEN_IDS].dtype != np.int32 or tensors[TOKEN_IDS].ndim != 1 or len(token_ids) < 2:
            raise ValueError("it has no tokens")
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise InputError(f"these {len(whole)} bytes are no whole hand-off ({str(error)[:100]}){ANOTHER}") from None
    return HandOff(whole, token_ids, Fingerprints(target, drafter), drafts, tensors)


def _read(data: np.ndarray) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the metadata and views of the tensors. Raises Python's own errors for other bytes."""
    size = int.from_bytes(data[:8].tobytes(), "little")
    if size > MOST_HEADER_BYTES:
        raise ValueError("its header is too long")
    header, body = json.loads(data[8 : 8 + size].tobytes()), data[8 + size :]
    about, tensors, end = header.pop("__metadata__"), {}, 0
    for name, entry in header.items():
        begin, (first, end) = end, entry["data_offsets"]
        if first != begin:  # tensors follow each other
            raise ValueError(f"the place of {name!r} is wrong")
        tensors[name] = body[begin:end].view(DTYPES[entry["dtype"]]).reshape(tuple(entry["shape"]))
    if end != len(body):
        raise ValueError(f"it has {len(body)} of {end} bytes")
    return about, tensors


def check(executor: Executor, memory: KVMemory, capacity: int, fingerprints: Fingerprints, hand_off: HandOff) -> None:
    """Raise InputError for a hand-off that an engine cannot take. capacity: most positions of a request."""
    if not executor.has_whole_pages:
        raise InputError("a target over several processes takes no hand-offs; send the request without one")
    if hand_off.length >= capacity:
        raise InputError(
            f"the hand-off has {len(hand_off.token_ids)} tokens; expected at most {capacity}, the context of this "
            "engine: raise it, or send the request elsewhere"
        )
    sender, with_drafter = hand_off.fingerprints, executor.drafter is not None
    for model, theirs, ours in [
        ("target", sender.target, fingerprints.target),
        *([("drafter", sender.drafter, fingerprints.drafter)] if with_drafter else []),
    ]:
        if theirs != ours:
            raise InputError(
                f"the hand-off is of another {model} ({theirs[:12] or 'of no files'}; this engine has "
                f"{ours[:12] or 'one of no files'}); expected equal checkpoints, dtype, aux layers and windows"
            )
    for layer in _layers(executor, memory, hand_off.length):
        if hand_off.with_drafter or layer.name.startswith("target."):
            for part in ("key", "value"):
                _check_tensor(hand_off, f"{layer.name}.{part}", layer)


def _check_tensor(hand_off: HandOff, name: str, layer: _Layer) -> None:
    """Raise InputError unless a tensor has the rows that a layer needs. A sender without windows has more of them."""
    rows, needed, most = (
        hand_off.tensors.get(name),
        hand_off.length - layer.first,
        hand_off.length - layer.offset,
    )
    if rows is None:
        problem = "is missing"
    elif rows.dtype != layer.dtype or rows.shape[1:] != layer.row:
        problem = f"has rows of {rows.dtype} {list(rows.shape[1:])}"
    elif not needed <= len(rows) <= most:
        problem = f"has {len(rows)} rows of {needed}"
    else:
        return
    raise InputError(
        f"the hand-off's {name} {problem}; expected rows of {layer.dtype} {list(layer.row)}: both sides must have the "
        "same models and retain_full_kv"
    )


def check_request(hand_off: HandOff, request: Request, stop_token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raise InputError if a hand-off is of another request, or of one that has ended."""
    prompt, tokens = request.prompt_ids, hand_off.token_ids
    if tokens[: len(prompt)] != prompt or len(tokens) <= len(prompt):
        raise InputError(f"the hand-off does not begin with {request.name}; expected the hand-off of this request")
    if not all(0 <= token < vocab_size for token in tokens):
        raise InputError(
            f"the hand-off of {request.name} has tokens outside of the vocabulary of {vocab_size}{ANOTHER}"
        )
    if len(tokens) - len(prompt) >= request.max_new_tokens or tokens[-1] in stop_token_ids:
        raise InputError(f"{request.name} had ended when it was handed over; expected one that goes on")


def put(executor: Executor, memory: KVMemory, table: PageTable, hand_off: HandOff) -> None:
    """Write a hand-off that has passed `check` to the pages of a request, except those that it shares."""
    length = hand_off.length
    for layer in _layers(executor, memory, length):
        begin = max(layer.first, table.num_cached_tokens) // PAGE_SIZE
        numbers = table.pages[layer.group][begin : -(-length // PAGE_SIZE)]
        if not numbers or f"{layer.name}.key" not in hand_off.tensors:
            continue
        first = max(layer.first, begin * PAGE_SIZE)
        pages = []
        for part in ("key", "value"):
            rows = hand_off.tensors[f"{layer.name}.{part}"]
            whole = np.zeros((len(numbers) * PAGE_SIZE, *layer.row), layer.dtype)
            whole[first - begin * PAGE_SIZE : length - begin * PAGE_SIZE] = rows[len(rows) - (length - first) :]
            parts = whole.reshape(len(whole), layer.row[0] // layer.part, layer.part)
            copied = parts if layer.copies == 1 else np.repeat(parts, layer.copies, axis=1)
            pages.append(copied.reshape(len(numbers), PAGE_SIZE, layer.row[0] * layer.copies))
        executor.write_pages(layer.number, numbers, *pages)
