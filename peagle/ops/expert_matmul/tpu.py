"""The mixture-of-experts op in a Pallas kernel for TPUs, and the layout it reads. Products are of codes, in MXFP4.

    few_rows    up to 16 rows meet every expert that one of them selected, in ascending order; the sums stay in VMEM
    many_rows   pairs (row, expert) sorted by expert, in tiles of rows of one expert each

The grid is (tile of rows, step). The first S1 steps of a tile multiply by parts of gate and up, the last S2 by parts of
down, while the next part is on its way from HBM:

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
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float, UInt8, UInt32

from peagle.ops import tpu
from peagle.ops.expert_matmul.reference import by_expert, swiglu
from peagle.ops.expert_matmul.routing import Choices
from peagle.ops.expert_matmul.weights import PackedExperts, TpuExperts
from peagle.ops.mxfp4 import BLOCK
from peagle.ops.tpu import LANES, ROWS

GROUP = 2 * BLOCK  # inputs of eight words: two planes of 32
SCALE_ROWS = 32  # of a tile of bytes: the scales of one part, padded
FEW = 16  # most rows of few_rows: two products of 8, so that a row's bits do not depend on their number
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
        pair(_floats, e.gate_up_bias, 0),
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


def routed(x: BFloat16[Array, "T D"], choices: Choices, experts: TpuExperts, limit: float) -> Float[Array, "T D"]:
    """Compute a `reference.Form` in float32. Experts that no id selects are not read.

    A row's bits depend neither on the other rows nor, up to FEW and beyond it, on their number.
    """
    return (few_rows if x.shape[0] <= FEW else many_rows)(x, choices, experts, limit)


def few_rows(x: BFloat16[Array, "T D"], choices: Choices, experts: TpuExperts, limit: float) -> Float[Array, "T D"]:
    num_rows, num_experts = x.shape[0], experts.num_experts
    ids, weights = tpu.pad_rows(choices.ids, num_experts), tpu.pad_rows(choices.weights)
    numbers = jnp.arange(num_experts, dtype=jnp.int32)[None, :]
    chosen = jnp.any(ids.reshape(-1, 1) == numbers, axis=0)
    ascending = jnp.argsort(~chosen, stable=True).astype(jnp.int32)[: choices.ids.size]
    num_tiles = jnp.maximum(jnp.sum(chosen, dtype=jnp.int32), 1)
    out = _call(tpu.pad_rows(x)[None], Choices(ids[None], weights[None]), ascending, num_tiles, experts, limit)
    return out[0, :num_rows, : x.shape[1]]


def many_rows(x: BFloat16[Array, "T D"], choices: Choices, experts: TpuExperts, limit: float) -> Float[Array, "T D"]:
    (ids, weights), num_experts, top_k = choices, experts.num_experts, choices.ids.shape[1]
    size = 32 if x.shape[0] <= 128 else 128
    order, begins, ends = by_expert(ids, num_experts)
    tiles = (ends - begins + size - 1) // size
    lasts = jnp.cumsum(tiles, dtype=jnp.int32)  # after each expert's last tile
    firsts = lasts - tiles
    numbers = jnp.arange(-(-ids.size // size) + min(num_experts, ids.size), dtype=jnp.int32)
    expert_of = jnp.minimum(jnp.searchsorted(lasts, numbers, side="right"), num_experts - 1).astype(jnp.int32)
    starts = begins[expert_of] + (numbers - firsts[expert_of]) * size
    place = starts[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]  # among the sorted pairs
    there = (place < ends[expert_of][:, None]) & (numbers < lasts[-1])[:, None]
    pair = order[jnp.minimum(place, ids.size - 1)]
    own = Choices(jnp.where(there, expert_of[:, None], num_experts)[..., None], weights.reshape(-1)[pair][..., None])
    out = _call(x[pair // top_k], own, expert_of, jnp.maximum(lasts[-1], 1), experts, limit)
    flat = out.reshape(-1, out.shape[2])[:, : x.shape[1]]
    sorted_at = jnp.argsort(order).astype(jnp.int32).reshape(ids.shape)
    expert = jnp.minimum(ids, num_experts - 1)
    at = jnp.minimum(firsts[expert] * size + sorted_at - begins[expert], len(flat) - 1)
    total = jnp.zeros(x.shape, jnp.float32)
    for choice in range(top_k):  # one after the other, without an array of all choices
        total += jnp.where(ids[:, choice, None] < num_experts, flat[at[:, choice]], 0.0)
    return total


def _call(
    x: BFloat16[Array, "X M D"],
    choices: Choices,
    expert_of: jax.Array,
    num_tiles: jax.Array,
    e: TpuExperts,
    limit: float,
) -> Float[Array, "X M lanes"]:
    """Run tiles of rows, each through its expert; if there is one tile (X = 1), all experts add to it.

    choices: [X, M, k]. A row counts where an id is the tile's expert. num_tiles: those of expert_of that run.
    """
    few, (_, rows, top_k) = len(x) == 1, choices.ids.shape
    gate_steps, gate_part, width = e.gate_up.shape[1], 8 * e.gate_up.shape[3], e.gate_up.shape[4]
    down_steps, down_part, outputs = e.down.shape[1], 8 * e.down.shape[2], e.down.shape[3]
    x = jnp.pad(x, ((0, 0), (0, 0), (0, gate_steps * gate_part - x.shape[2])))
    x = jnp.swapaxes(x.reshape(-1, rows, gate_steps, gate_part), 1, 2)

    def of_tile(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *block), lambda tile, *_: (0 if few else tile, *(0 for _ in block)))

    def of_expert(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *block), lambda tile, _, expert_of: (expert_of[tile], *(0 for _ in block)))

    def gate_up_part(*block: int) -> pl.BlockSpec:
        def index(tile: Any, step: Any, expert_of: Any) -> tuple[Any, ...]:
            return expert_of[tile], jnp.minimum(step, gate_steps - 1), *(0 for _ in block)

        return pl.BlockSpec((1, 1, *block), index)

    def down_part_of(*block: int) -> pl.BlockSpec:
        def index(tile: Any, step: Any, expert_of: Any) -> tuple[Any, ...]:
            # before its own steps stay at the last part of the tile before: a new one would be copied too early
            early = step < gate_steps
            before = jnp.where(tile > 0, down_steps - 1, 0)
            own = expert_of[jnp.where(early, jnp.maximum(tile - 1, 0), tile)]
            return own, jnp.where(early, before, step - gate_steps), *(0 for _ in block)

        return pl.BlockSpec((1, 1, *block), index)

    stored = [tpu.in_hbm(leaf) for leaf in jax.tree.leaves(e)]
    specs = [
        gate_up_part(2, gate_part // 8, width),
        gate_up_part(2, SCALE_ROWS, width),
        of_expert(2, width),
        down_part_of(down_part // 8, outputs),
        down_part_of(SCALE_ROWS, outputs),
        of_expert(1, outputs),
    ]
    pieces = -(-max(gate_part, down_part) // DEPTH)
    product: Any = _product_of_codes
    if not few:
        product = functools.partial(
            _product_of_floats, dtype=jnp.bfloat16 if tpu.multiplies_bfloat16() else jnp.float32
        )
    num_experts = len(expert_of)
    expert_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(e)) // e.num_experts
    return tpu.call(
        functools.partial(_kernel, product=product, few=few, limit=limit),
        "experts_few" if few else "experts_many",
        (num_tiles, gate_steps + down_steps),
        [expert_of],
        [
            (choices.ids, of_tile(rows, top_k)),
            (choices.weights, of_tile(rows, top_k)),
            (x, of_tile(gate_steps, rows, gate_part)),
            *zip(stored, specs, strict=True),
        ],
        (jax.ShapeDtypeStruct((len(x), rows, outputs), jnp.float32), of_tile(rows, outputs)),
        [
            pltpu.VMEM((rows, width), jnp.float32),
            pltpu.VMEM((rows, width), jnp.float32),
            pltpu.VMEM((down_steps, rows, down_part), x.dtype),
            pltpu.VMEM((rows, outputs), jnp.float32),
            pltpu.VMEM((pieces, rows // ROWS, COPIES * ROWS, DEPTH) if few else (1, 1, ROWS, LANES), x.dtype),
        ],
        pl.CostEstimate(
            flops=6 * num_experts * rows * width * outputs,
            bytes_accessed=num_experts * expert_bytes,
            transcendentals=num_experts * rows * width,
        ),
    )


def _kernel(
    expert_of: Any,
    ids: Any,
    weights: Any,
    x: Any,
    gate_up: Any,
    gate_up_scales: Any,
    gate_up_bias: Any,
    down: Any,
    down_scales: Any,
    down_bias: Any,
    out: Any,
    gate: Any,
    up: Any,
    hidden: Any,
    total: Any,
    copies: Any,
    *,
    product: Callable[..., None],
    few: bool,
    limit: float,
) -> None:
    """Run one step of one tile. All operands are one block in VMEM, but expert_of; the last five are scratch."""
    tile, step = pl.program_id(0), pl.program_id(1)
    gate_steps, (down_steps, _, part) = x.shape[1], hidden.shape

    @pl.when(step == 0)
    def _begin() -> None:
        for sums in (gate, up, total):
            sums[...] = jnp.zeros_like(sums)

    @pl.when((step == 0) & ((tile == 0) | (not few)))
    def _begin_output() -> None:
        out[...] = jnp.zeros_like(out)

    @pl.when(step < gate_steps)
    def _gate_and_up() -> None:
        matrices = [(gate_up.at[0, 0, i], gate_up_scales.at[0, 0, i], sums) for i, sums in enumerate((gate, up))]
        product(x[0, step], matrices, copies)

    @pl.when(step == gate_steps - 1)
    def _activate() -> None:
        active = swiglu(gate[...] + gate_up_bias[0, 0:1], up[...] + gate_up_bias[0, 1:2], limit).astype(hidden.dtype)
        for j in range(down_steps):
            hidden[j] = active[:, j * part : (j + 1) * part]

    @pl.when(step >= gate_steps)
    def _down() -> None:
        product(hidden[step - gate_steps], [(down.at[0, 0], down_scales.at[0, 0], total)], copies)

    @pl.when(step == gate_steps + down_steps - 1)
    def _add() -> None:
        chosen = ids[0] == expert_of[tile]
        weight = jnp.sum(jnp.where(chosen, weights[0], 0.0), axis=1, keepdims=True)
        counts = jnp.sum(chosen.astype(jnp.float32), axis=1, keepdims=True) > 0
        # a row that did not select the expert adds +0, even if its output is NaN
        out[0] += jnp.where(counts, (total[...] + down_bias[0]) * weight, 0.0)


def _product_of_codes(rows: jax.Array, matrices: Sequence[Matrix], copies: Any) -> None:
    """Add rows [M, k] @ each matrix to its sums; M a multiple of 8. copies: scratch [k/128, M/8, 32, 128]."""
    num_rows, inputs = rows.shape
    for piece in range(-(-inputs // DEPTH)):
        some = rows[:, piece * DEPTH : (piece + 1) * DEPTH]
        if missing := DEPTH - some.shape[1]:
            some = jnp.concatenate([some, jnp.zeros((num_rows, missing), rows.dtype)], axis=1)
        for t in range(num_rows // ROWS):
            copies[piece, t] = _apart(some[t * ROWS : (t + 1) * ROWS])
    for words, scales, sums in matrices:
        _in_chunks(sums.shape[1], functools.partial(_chunk_of_codes, copies, words, scales, sums))


def _apart(rows: BFloat16[Array, "8 128"]) -> BFloat16[Array, "32 128"]:
    """Repeat eight rows four times; copy c has zeros outside of its 32 inputs."""
    repeated = jnp.concatenate([rows] * COPIES, axis=0)
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, repeated.shape, axis) for axis in (0, 1))
    return jnp.where(row // ROWS == lane // BLOCK, repeated, jnp.zeros((), rows.dtype))


def _chunk_of_codes(copies: Any, words: Any, scales: Any, sums: Any, columns: Any) -> None:
    powers, packed = _powers(scales[:, columns]), words[:, columns]
    totals = [sums[t * ROWS : (t + 1) * ROWS, columns] for t in range(copies.shape[1])]
    planes = [plane for word in range(0, packed.shape[0], 8) for plane in _planes(packed[word : word + 8])]
    for first in range(0, len(planes), COPIES):
        some = planes[first : first + COPIES]
        codes = jnp.concatenate(some, axis=0)
        for t in range(copies.shape[1]):
            rows = copies[first // COPIES, t, : len(some) * ROWS, : codes.shape[0]]
            products = jnp.dot(rows, codes, preferred_element_type=jnp.float32)
            for c in range(len(some)):
                totals[t] += products[c * ROWS : (c + 1) * ROWS] * powers[first + c : first + c + 1]
    for t, total in enumerate(totals):
        sums[t * ROWS : (t + 1) * ROWS, columns] = total


def _product_of_floats(rows: jax.Array, matrices: Sequence[Matrix], _: Any, *, dtype: Any) -> None:
    """Add rows [M, k] @ each matrix, in bfloat16, to its sums. dtype: in which the scales are multiplied, exactly."""

    def one(words: Any, scales: Any, sums: Any, columns: Any) -> None:
        powers, packed = _powers(scales[:, columns]).astype(dtype), words[:, columns]
        planes = [plane for word in range(0, packed.shape[0], 8) for plane in _planes(packed[word : word + 8])]
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


def _planes(words: UInt32[Array, "8 n"]) -> tuple[jax.Array, jax.Array]:
    """Unpack two planes [32, n] of e5m2, each 2^-14 times its code, zero and the denormal 0.5 included."""
    first = words & jnp.uint32(0x8E8E8E8E)
    second = ((words >> 3) & jnp.uint32(0x0E0E0E0E)) | ((words << 7) & jnp.uint32(0x80808080))
    return pltpu.bitcast(first, jnp.float8_e5m2), pltpu.bitcast(second, jnp.float8_e5m2)


def _powers(scales: UInt8[Array, "32 n"]) -> Float[Array, "32 n"]:
    """Build the scales from their exponent bits, with the factor that the planes lack."""
    return pltpu.bitcast((scales.astype(jnp.int32) + EXPONENT) << 23, jnp.float32)
