"""The mixture-of-experts op in a Pallas kernel for TPUs, and the layout it reads. Products are of codes, in MXFP4.

Choices are sorted by expert. A tile has choices of one expert: of few rows (those of steps) all of them, so that an
expert is read once. It takes its rows from VMEM and adds its outputs there, in ascending order of the experts. The grid
is (tile, step). The first S1 steps of a tile multiply by parts of gate and up, the last S2 by parts of down, while the
next part is on its way from HBM:

    step      0          1          2          3       4       5
    reads     gate, up 0 gate, up 1 gate, up 2 down 0  down 1  down 2       S1 = S2 = 3 at 2880 = 3 * 960
    copies    gate, up 1 gate, up 2 down 0     down 1  down 2  gate, up 0 of the next expert

Few rows are multiplied by the codes themselves, since a TPU's matrix unit takes float8 (e5m2) beside bfloat16. The
scale belongs to a sum over 32 inputs, so each such sum is a row of its own: of four copies of the rows each has zeros
outside of its 32 of 128 inputs. For many rows that would be four times the work of the matrix unit; there the codes are
dequantised to bfloat16. So the two give other bits.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float, Int, UInt8, UInt32

from peagle.ops import tpu
from peagle.ops.expert_matmul.reference import swiglu
from peagle.ops.expert_matmul.routing import Choices
from peagle.ops.expert_matmul.weights import PackedExperts, TpuExperts
from peagle.ops.mxfp4 import BLOCK
from peagle.ops.tpu import LANES, ROWS

GROUP = 2 * BLOCK  # inputs of eight words: two planes of 32
SCALE_ROWS = 32  # of a tile of bytes: the scales of one part, padded
FEW = 128  # most rows that are multiplied by codes: 8 sequences with K = 15
TILE = 128  # choices of a tile, of more rows
WIDE = 2 * ROWS  # rows of a product by codes, if an expert has more than ROWS
MOST = 512  # rows that are in VMEM at once
DEPTH = 128  # inputs of a product
COPIES = DEPTH // BLOCK
CHUNK = 512  # outputs that are computed at once
EXPONENT = 14  # a code's bits as e5m2 are 2^-14 times its value
LARGEST_SCALE = 254 - EXPONENT  # beyond, the scale with this exponent is no float32
# (words [k/8, n], scales [32, n], sums [M, n]) in VMEM
Matrix: TypeAlias = tuple[Any, Any, Any]


def tpu_experts(experts: PackedExperts) -> PackedExperts | TpuExperts:
    """Lay out a layer's experts for a TPU; unchanged if the kernels do not take them."""
    largest = max(int(scales.max()) for scales in (experts.gate_up_scales, experts.down_scales))
    takes = experts.gate_up_bias.dtype == jnp.bfloat16 and largest <= LARGEST_SCALE
    return lay_out(experts) if takes else experts


@jax.jit
def lay_out(experts: PackedExperts) -> TpuExperts:
    """Lay out a layer's experts, one after the other, which takes the memory of one."""
    return jax.lax.map(_one_laid_out, experts)  # type: ignore[no-any-return]


def _one_laid_out(e: PackedExperts) -> TpuExperts:
    def pair(lay: Callable[[jax.Array], jax.Array], rows: jax.Array, axis: int) -> jax.Array:
        return jnp.stack([lay(rows[0::2]), lay(rows[1::2])], axis=axis)

    return TpuExperts(
        pair(_words, e.gate_up_blocks, 1),
        pair(_scales, e.gate_up_scales, 1),
        pair(_floats, e.gate_up_bias, 0)[None],
        _words(e.down_blocks),
        _scales(e.down_scales),
        _floats(e.down_bias)[None],
    )


def _part(inputs: int) -> int:
    """Return the inputs of a part: the most that its scales' rows hold, and that divide the inputs, in whole groups."""
    groups = -(-inputs // GROUP)
    return GROUP * max(n for n in range(1, SCALE_ROWS // 2 + 1) if groups % n == 0)


def _words(blocks: UInt8[Array, "N n 16"]) -> UInt32[Array, "parts words lanes"]:
    """Put eight codes in a word: of byte j of word r of a group, the inputs 4 r + j and 32 + 4 r + j.

    The first is s...eem. and the second .eem...s, so that either takes two operations to be e5m2, seem between zeros.
    """
    outputs, count, _ = blocks.shape
    blocks = jnp.pad(blocks, ((0, 0), (0, count % 2), (0, 0)))
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(outputs, -1, 2, 8, 4)
    first, second = codes[:, :, 0], codes[:, :, 1]
    joined = (first >> 3 << 7) | ((first & 7) << 1) | ((second & 7) << 4) | (second >> 3)
    words = jax.lax.bitcast_convert_type(joined, jnp.uint32).reshape(outputs, -1)
    return _to_lanes(words.T.reshape(-1, _part(count * BLOCK) // 8, outputs))


def _scales(scales: UInt8[Array, "N n"]) -> UInt8[Array, "parts 32 lanes"]:
    """Give each scale a row of outputs, which is cheap to broadcast along the inputs."""
    outputs, count = scales.shape
    rows = jnp.pad(scales, ((0, 0), (0, count % 2))).T.reshape(-1, _part(count * BLOCK) // BLOCK, outputs)
    return _to_lanes(jnp.pad(rows, ((0, 0), (0, SCALE_ROWS - rows.shape[1]), (0, 0))))


def _floats(bias: Float[Array, " N"]) -> Float[Array, " lanes"]:
    return _to_lanes(bias.astype(jnp.float32))


def _to_lanes(rows: jax.Array) -> jax.Array:
    return jnp.pad(rows, [*[(0, 0)] * (rows.ndim - 1), (0, -rows.shape[-1] % LANES)])


class Tiles(NamedTuple):
    """Tiles of the choices of one expert each, ascending by expert; scalars for the kernel."""

    expert: Int[Array, " X"]
    first: Int[Array, " X"]  # of its choices
    length: Int[Array, " X"]
    row: Int[Array, " N"]  # of each choice, sorted by expert
    weight: Float[Array, " N"]


def routed(x: BFloat16[Array, "T D"], choices: Choices, experts: TpuExperts, limit: float) -> Float[Array, "T D"]:
    """Compute a `reference.Form` in float32. Experts that no id selects are not read.

    A row's bits depend neither on the other rows nor, up to FEW and beyond it, on their number.
    """
    block = functools.partial(_of_block, experts=experts, limit=limit, few=len(x) <= FEW)
    if len(x) <= MOST:
        return block((x, choices))

    def blocks(leaf: jax.Array) -> jax.Array:
        nothing = experts.num_experts  # as an id
        return jnp.pad(leaf, ((0, -len(x) % MOST), (0, 0)), constant_values=nothing).reshape(-1, MOST, leaf.shape[1])

    out: jax.Array = jax.lax.map(block, jax.tree.map(blocks, (x, choices)))
    return out.reshape(-1, x.shape[1])[: len(x)]


def _tiles(choices: Choices, num_experts: int, size: int) -> tuple[Tiles, jax.Array]:
    """Make tiles of at most `size` choices; return (tiles, the number of those that have any)."""
    (num_rows, top_k), ids = choices.ids.shape, choices.ids.reshape(-1)
    order = jnp.argsort(ids).astype(jnp.int32)  # stable
    of_expert = jnp.sum(ids[:, None] == jnp.arange(num_experts, dtype=jnp.int32)[None], axis=0, dtype=jnp.int32)
    ends, tiles = jnp.cumsum(of_expert, dtype=jnp.int32), pl.cdiv(of_expert, size)
    lasts = jnp.cumsum(tiles, dtype=jnp.int32)  # after each expert's last tile
    chosen = min(num_experts, ids.size)  # at most, each with as many choices as there are rows
    most = min(chosen * pl.cdiv(num_rows, size), chosen + ids.size // size)
    numbers = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.sum(numbers[:, None] >= lasts[None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)
    first = (ends - of_expert)[expert] + (numbers - (lasts - tiles)[expert]) * size
    length = jnp.clip(ends[expert] - first, 0, size)
    return Tiles(expert, first, length, order // top_k, choices.weights.reshape(-1)[order]), lasts[-1]


def _of_block(
    rows: tuple[BFloat16[Array, "T D"], Choices], *, experts: TpuExperts, limit: float, few: bool
) -> Float[Array, "T D"]:
    """Compute `routed` for up to MOST rows, which stay in VMEM, as do their sums."""
    x, choices = rows
    size = TILE if not few else ROWS if len(x) <= ROWS else pl.cdiv(len(x), WIDE) * WIDE
    tiles, num_tiles = _tiles(choices, experts.num_experts, size)
    _, gate_steps, _, words, width = experts.gate_up.shape
    _, down_steps, down_words, outputs = experts.down.shape
    gate_part, down_part = 8 * words, 8 * down_words
    x_parts = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, gate_steps * gate_part - x.shape[1])))
    x_parts = jnp.swapaxes(x_parts.reshape(-1, gate_steps, gate_part), 0, 1)

    def spec(leaf: jax.Array, of_down: bool) -> pl.BlockSpec:
        def index(tile: Any, step: Any, expert: Any, *_: Any) -> tuple[Any, ...]:
            part = jnp.minimum(step, leaf.shape[1] - 1)
            if of_down:
                # before its own steps stay at the last part of the tile before: a new one would be copied too early
                early = step < gate_steps
                part = jnp.where(early, jnp.where(tile > 0, down_steps - 1, 0), step - gate_steps)
                tile = jnp.where(early, jnp.maximum(tile - 1, 0), tile)
            return expert[tile], part, *(0,) * (leaf.ndim - 2)

        return pl.BlockSpec((1, 1, *leaf.shape[2:]), index)

    stored, in_vmem = jax.tree.leaves(experts), pl.BlockSpec(memory_space=pltpu.VMEM)
    specs = map(spec, stored, (False, False, False, True, True, False))
    most = len(tiles.expert)
    out = tpu.call(
        functools.partial(_kernel, few=few, limit=limit),
        "experts_few" if few else "experts_many",
        (jnp.maximum(num_tiles, 1), gate_steps + down_steps),
        tiles,
        [(x_parts, in_vmem), *zip(map(tpu.in_hbm, stored), specs, strict=True)],
        (jax.ShapeDtypeStruct((len(x), outputs), jnp.float32), in_vmem),
        [
            pltpu.VMEM((size, gate_part), jnp.float32),
            pltpu.VMEM((2, size, width), jnp.float32),
            pltpu.VMEM((down_steps, size, down_part), x.dtype),
            pltpu.VMEM((size, outputs), jnp.float32),
            pltpu.VMEM((pl.cdiv(max(gate_part, down_part), DEPTH), COPIES * min(size, WIDE), DEPTH), x.dtype),
        ],
        pl.CostEstimate(
            flops=6 * most * size * width * outputs,
            bytes_accessed=most * sum(leaf.nbytes for leaf in stored) // experts.num_experts,
            transcendentals=most * size * width,
        ),
    )
    return out[:, : x.shape[1]]


def _kernel(*refs: Any, few: bool, limit: float) -> None:
    """Run one step of one tile."""
    tiles, x, e, out = Tiles(*refs[:5]), refs[5], TpuExperts(*refs[6:12]), refs[12]
    own, both, hidden, total, copies = refs[13:]  # scratch; both: sums of gates and of ups
    tile, step = pl.program_id(0), pl.program_id(1)
    gate_steps, (down_steps, size, part) = x.shape[0], hidden.shape
    start, num_rows = tiles.first[tile], tiles.length[tile]

    @pl.when((step == 0) & (tile == 0))
    def _begin() -> None:
        out[...] = jnp.zeros_like(out)

    @pl.when(step == 0)
    def _begin_tile() -> None:
        for sums in (both, total):
            sums[...] = jnp.zeros_like(sums)

    def multiply(rows: Any, matrices: Sequence[Matrix]) -> None:
        """Add the tile's rows @ each matrix to its sums."""

        def by_codes(group: Any, count: int) -> None:
            at = pl.ds(pl.multiple_of(group * count, count), count)
            of_rows = [(words, scales, sums.at[at]) for words, scales, sums in matrices]
            _product_of_codes(rows[at].astype(hidden.dtype), of_rows, copies.at[:, : COPIES * count])

        if not few:
            _product_of_floats(rows[...].astype(hidden.dtype), matrices)
            return
        pl.when(num_rows <= ROWS)(lambda: by_codes(0, ROWS))
        if size > ROWS:
            groups = jnp.where(num_rows <= ROWS, 0, pl.cdiv(num_rows, WIDE))
            jax.lax.fori_loop(0, groups, lambda group, _: by_codes(group, WIDE), None)

    @pl.when(step < gate_steps)
    def _gate_and_up() -> None:
        def take(i: Any, _: None) -> None:
            own[pl.ds(i, 1)] = x[step, pl.ds(tiles.row[start + i], 1)]

        jax.lax.fori_loop(0, num_rows, take, None)
        multiply(own, [(e.gate_up.at[0, 0, i], e.gate_up_scales.at[0, 0, i], both.at[i]) for i in (0, 1)])

    @pl.when(step == gate_steps - 1)
    def _activate() -> None:
        gate, up = (both[i] + e.gate_up_bias[0, 0, i : i + 1] for i in (0, 1))
        active = swiglu(gate, up, limit).astype(hidden.dtype)
        for j in range(down_steps):
            hidden[j] = active[:, j * part : (j + 1) * part]

    @pl.when(step >= gate_steps)
    def _down() -> None:
        multiply(hidden.at[step - gate_steps], [(e.down.at[0, 0], e.down_scales.at[0, 0], total)])

    @pl.when(step == gate_steps + down_steps - 1)
    def _add() -> None:
        def add(i: Any, _: None) -> None:
            at = pl.ds(tiles.row[start + i], 1)
            out[at] += (total[pl.ds(i, 1)] + e.down_bias[0]) * tiles.weight[start + i]

        jax.lax.fori_loop(0, num_rows, add, None)


def _product_of_codes(rows: jax.Array, matrices: Sequence[Matrix], copies: Any) -> None:
    """Add rows [M, k] @ each matrix to its sums. copies: scratch [k/128, 4 M, 128]."""
    for piece in range(pl.cdiv(rows.shape[1], DEPTH)):
        some = _apart(rows[:, piece * DEPTH : (piece + 1) * DEPTH])
        copies[piece, :, : some.shape[1]] = some
    for words, scales, sums in matrices:
        _in_chunks(sums.shape[1], functools.partial(_chunk_of_codes, copies, words, scales, sums))


def _apart(rows: BFloat16[Array, "M k"]) -> BFloat16[Array, "4*M k"]:
    """Repeat the rows four times; copy c has zeros outside of its 32 of up to 128 inputs."""
    repeated = jnp.concatenate([rows] * COPIES, axis=0)
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, repeated.shape, axis) for axis in (0, 1))
    return jnp.where(row // len(rows) == lane // BLOCK, repeated, jnp.zeros((), rows.dtype))


def _chunk_of_codes(copies: Any, words: Any, scales: Any, sums: Any, columns: Any) -> None:
    powers, planes, total = _powers(scales[:, columns]), _planes(words[:, columns]), sums[:, columns]
    num_rows = len(total)
    for first in range(0, len(planes), COPIES):
        codes = jnp.concatenate(planes[first : first + COPIES], axis=0)
        count = codes.shape[0] // BLOCK
        rows = copies[first // COPIES, : count * num_rows, : codes.shape[0]]
        products = jnp.dot(rows, codes, preferred_element_type=jnp.float32)
        for c in range(count):
            total += products[c * num_rows : (c + 1) * num_rows] * powers[first + c : first + c + 1]
    sums[:, columns] = total


def _product_of_floats(rows: jax.Array, matrices: Sequence[Matrix]) -> None:
    """Add rows [M, k] @ each matrix, in bfloat16, to its sums."""
    dtype = jnp.bfloat16 if tpu.multiplies_bfloat16() else jnp.float32  # of products with scales, which are exact

    def one(words: Any, scales: Any, sums: Any, columns: Any) -> None:
        powers, planes = _powers(scales[:, columns]).astype(dtype), _planes(words[:, columns])
        scaled = [
            (plane.astype(dtype) * powers[block : block + 1]).astype(jnp.bfloat16) for block, plane in enumerate(planes)
        ]
        sums[:, columns] += jnp.dot(rows, jnp.concatenate(scaled, axis=0), preferred_element_type=jnp.float32)

    for words, scales, sums in matrices:
        _in_chunks(sums.shape[1], functools.partial(one, words, scales, sums))


def _in_chunks(lanes: int, one: Callable[[Any], None]) -> None:
    """Call `one` with slices of the lanes, which are a multiple of 128."""

    def body(chunk: jax.Array, _: None) -> None:
        one(pl.ds(pl.multiple_of(chunk * CHUNK, LANES), CHUNK))

    if chunks := lanes // CHUNK:
        jax.lax.fori_loop(0, chunks, body, None)
    if rest := lanes % CHUNK:
        one(pl.ds(lanes - rest, rest))


def _planes(words: UInt32[Array, "words n"]) -> list[jax.Array]:
    """Unpack planes [32, n] of e5m2, two of eight words. Each is 2^-14 times its code, the denormal 0.5 included."""
    planes = []
    for first in range(0, words.shape[0], 8):
        some = words[first : first + 8]
        planes.append(some & jnp.uint32(0x8E8E8E8E))
        planes.append(((some >> 3) & jnp.uint32(0x0E0E0E0E)) | ((some << 7) & jnp.uint32(0x80808080)))
    return [pltpu.bitcast(plane, jnp.float8_e5m2) for plane in planes]


def _powers(scales: UInt8[Array, "32 n"]) -> Float[Array, "32 n"]:
    """Build the scales from their exponent bits, with the factor that the planes lack."""
    return pltpu.bitcast((scales.astype(jnp.int32) + EXPONENT) << 23, jnp.float32)
