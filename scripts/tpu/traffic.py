"""Count what a compiled TPU program moves to and from HBM, from its text.

XLA's own count (`cost_analysis`) adds what moves within VMEM: a weight that is prefetched counts three times. Here only
operands and results in HBM count. A loop counts as often as it turns if its limit is a constant, else once; of branches
the one that moves most. What touches a part of an operand (a slice, a gather, an update in place) counts as large as
the part. Kernels count as their own estimates. The text is documented nowhere: the sums hold to a few per cent.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

SIZES = {
    **dict.fromkeys(("pred", "u8", "s8", "f8e5m2"), 1),
    **dict.fromkeys(("bf16", "u16", "f16"), 2),
    **dict.fromkeys(("f32", "u32", "s32"), 4),
    "s64": 8,
}
SHAPE = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
INSTRUCTION = re.compile(r"\s*(?:ROOT )?(%\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*)")
COMPUTATION = re.compile(r"^(ENTRY )?(%[\w.<>-]+) \([^\n]*\{\n(.*?)^\}", re.M | re.S)
NAMES = re.compile(r"%[\w.<>-]+")
COPIES = ("copy-start", "slice-start", "async-start")
MOVES_NOTHING = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape", "while", "conditional"),
    *("copy-done", "slice-done", "async-done"),
)
SMALL = 4_000_000  # bytes: of an operand beside one that is read in part
HOST = re.compile(r" (infeed|outfeed|send|recv)\(|custom_call_target=\"[^\"]*callback|S\(5\)")


@dataclasses.dataclass(frozen=True)
class Buffer:
    size: int  # bytes
    in_hbm: bool


@dataclasses.dataclass(frozen=True)
class Traffic:
    """hbm_bytes: moved. copy_bytes: of the largest copy within HBM. host_transfers: to or from the host."""

    hbm_bytes: int
    copy_bytes: int
    host_transfers: int


def traffic(text: str, without: Sequence[str] = ()) -> Traffic:
    """Count the traffic of a program, compiled.as_text().

    without: named scopes of loops and branches that do not count.
    """
    bodies = {match[2]: match[3] for match in COMPUTATION.finditer(text)}
    entry = next(match[2] for match in COMPUTATION.finditer(text) if match[1])
    moved = list(_visit(entry, bodies, 1, without))
    copies = (size for size, is_copy in moved if is_copy)
    return Traffic(sum(size for size, _ in moved), max(copies, default=0) // 2, len(HOST.findall(text)))


def _buffers(text: str) -> list[Buffer]:
    """Find the buffers of a result; S(1) is VMEM, S(2) is scalar memory."""
    buffers = []
    for kind, dims, layout in SHAPE.findall(text):
        if kind in SIZES:
            size = SIZES[kind] * math.prod(int(dim) for dim in dims.split(",") if dim)
            buffers.append(Buffer(size, "S(1)" not in layout and "S(2)" not in layout))
    return buffers


def _visit(name: str, bodies: dict[str, str], times: int, without: Sequence[str]) -> Iterator[tuple[int, bool]]:
    """Yield (bytes, whether it copies within HBM) of each instruction of a computation."""
    results: dict[str, list[Buffer]] = {}
    for line in bodies[name].splitlines():
        if (match := INSTRUCTION.match(line)) is None:
            continue
        result, shapes, op, rest = match.groups()
        results[result] = _buffers(shapes)
        if any(f"/{scope}/{kind}" in line for scope in without for kind in ("while", "cond")):
            continue
        if op == "while":
            body, condition = (re.search(rf"{part}=(%[\w.<>-]+)", line) for part in ("body", "condition"))
            assert body is not None
            assert condition is not None
            limits = re.findall(r"s32\[\]\S* constant\((\d+)\)", bodies[condition[1]])
            yield from _visit(body[1], bodies, times * (int(limits[0]) if len(limits) == 1 else 1), without)
        if op == "conditional":
            branches = line.split("branch_computations={")[-1].split("}")[0]
            moved = [list(_visit(branch, bodies, times, without)) for branch in NAMES.findall(branches)]
            yield from max(moved, key=lambda branch: sum(size for size, _ in branch))
        if op in MOVES_NOTHING or "ConcatBitcast" in line:
            continue
        read = [buffer for operand in NAMES.findall(rest.split("), ")[0]) for buffer in results.get(operand, [])[:1]]
        size = _moved(line, op, results[result], read, bodies)
        is_copy = op in ("copy", "bitcast-convert") and all(buffer.in_hbm for buffer in (*read, *results[result]))
        yield size * times, is_copy


def _moved(line: str, op: str, result: list[Buffer], read: list[Buffer], bodies: dict[str, str]) -> int:
    if op in COPIES:
        size = min((buffer.size for buffer in result if buffer.size > 4), default=0)
        return size * (1 if op == "slice-start" else sum(buffer.in_hbm for buffer in result[:2]))
    if "tpu_custom_call" in line and (cost := re.search(r'bytes_accessed":"?(\d+)', line)):
        return int(cost[1])
    call = re.search(r"calls=(%[\w.<>-]+)", line)
    inside = bodies.get(call[1], "") if call else f"{op}("
    parts = re.findall(r"= (\S+) (?:dynamic-slice|gather)\(", inside)
    in_hbm = [buffer.size for buffer in read if buffer.in_hbm]
    if parts or re.search(r"dynamic-update-slice\(|scatter\(", inside):
        of_parts = sum(buffer.size for part in parts for buffer in _buffers(part)) if in_hbm else 0
        return of_parts + sum(size for size in in_hbm if size < SMALL)
    return sum(in_hbm) + sum(buffer.size for buffer in result if buffer.in_hbm)
