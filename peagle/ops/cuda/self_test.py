"""Compare the CUDA kernels with a float64 reference before their first use, in one small case per code path."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from peagle.ops.cuda import calls
from peagle.ops.cuda.calls import HEAD_DIM, PAGE
from peagle.ops.cuda.nvrtc import CudaError
from peagle.ops.cuda.pack import pack
from peagle.ops.draw import KEYS
from peagle.ops.mxfp4 import BLOCK, dequantize
from peagle.ops.norm import Norm, rms_norm
from peagle.ops.self_tests import expect_near, random_halves

EXPERTS, TOP_K, EXPERT_WIDTH, LIMIT = 6, 3, 96, 7.0
SMALL, LARGE = 121, 128  # the first of four scales; scales above 128 take another code path
# of `experts`, (rows, width, scales): few rows (one and two tiles, several rounds of loads), then many rows (one tile
# of an expert, or several)
CASES = (
    *((1, 1632, SMALL), (8, 160, LARGE), (13, 160, SMALL), (16, 160, SMALL)),
    *((17, 1632, SMALL), (70, 160, SMALL), (200, 160, LARGE)),
)
# of `linear`: (rows, inputs, outputs), of 32 and of 64 outputs a block
PRODUCTS = ((1, 2080, 32), (9, 80, 4224), (16, 2080, 96))
# (rows, padding rows among them at the end, pages of the table, window, tokens before): several chunks and tiles of
# queries, a window, a table that repeats its pages, several chunks of a split; many rows, some pages whole for all
ATTENDED = (
    *((1, 0, 10, 0, 400), (7, 2, 5, 20, 290), (3, 1, 2, 24, 1022), (1, 0, 162, 0, 10_300)),
    *((20, 3, 5, 24, 250), (40, 0, 10, 0, 400)),
)
# rows of `expert_block`: one case per kernel (by an expert's most rows), and both ways of routing
TILED_ROWS, TILED_EXPERTS = (1, 13, 40, 64, 100, 300), 8


def check(*, tiles: bool) -> None:
    """Raise CudaError if a kernel's result is far from the reference. tiles: also check the kernels for Hopper GPUs."""
    for rows, inputs, outputs in PRODUCTS:
        check_linear(rows, inputs, outputs)
    check_experts()
    if tiles:
        check_expert_block()
    for case in ATTENDED:
        check_attention(*case)


def check_linear(rows: int, inputs: int, outputs: int) -> None:
    rng = np.random.default_rng(3)
    x, weights, bias, residual = (
        random_halves(rng, *shape) for shape in ((rows, inputs), (inputs, outputs), (outputs,), (rows, outputs))
    )
    product = x.astype(np.float64) @ weights.astype(np.float64)
    for addends in ((None, None), (bias, residual)):
        expected = product + sum(term.astype(np.float64) for term in addends if term is not None)
        operands = (None if term is None else jnp.asarray(term) for term in addends)
        output = np.asarray(calls.linear(jnp.asarray(x), jnp.asarray(weights), *operands), np.float64)
        _expect_near(output, expected, f"a product of {rows} rows, {inputs} x {outputs}")


def check_experts() -> None:
    rng = np.random.default_rng(0)
    halves = functools.partial(random_halves, rng)

    def codes(outputs: int, inputs: int, scales: int) -> tuple[np.ndarray, np.ndarray]:
        blocks = rng.integers(0, 256, (EXPERTS, outputs, inputs // BLOCK, BLOCK // 2), np.uint8)
        return blocks, rng.integers(scales, scales + 4, blocks.shape[:-1], np.uint8)

    for rows, width, scales in CASES:
        gate_up, gate_up_bias = codes(2 * EXPERT_WIDTH, width, scales), halves(EXPERTS, 2 * EXPERT_WIDTH)
        down, down_bias = codes(width, EXPERT_WIDTH, scales), halves(EXPERTS, width)
        x = (halves(rows, width) * 2.0 ** (SMALL - scales)).astype(jnp.bfloat16)
        ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(rows)]).astype(np.int32)
        matrices = (*gate_up, gate_up_bias), (*down, down_bias)
        output = np.asarray(calls.experts(*jax.tree.map(jnp.asarray, (x, ids, *matrices)), limit=LIMIT))
        hidden = np.einsum("toi,ti->to", *_chosen(gate_up, ids, x)) + gate_up_bias[ids.ravel()].astype(np.float64)
        gate, up = np.minimum(hidden[:, 0::2], LIMIT), np.clip(hidden[:, 1::2], -LIMIT, LIMIT)
        active = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        weights = dequantize(*down)[ids.ravel()].astype(np.float64)
        expected = np.einsum("toi,ti->to", weights, active) + down_bias[ids.ravel()].astype(np.float64)
        _expect_near(output.reshape(expected.shape), expected, f"experts of {rows} rows")


def check_expert_block() -> None:
    """Compare the kernels for Hopper GPUs with the others, and a row's bits alone with its bits among other rows."""
    keys = iter(jax.random.split(jax.random.key(0, impl=KEYS), 6))
    width, count = calls.TILED_WIDTH, TILED_EXPERTS

    def matrix(outputs: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        blocks = jax.random.bits(next(keys), (count, outputs, width // BLOCK, BLOCK // 2), jnp.uint8)
        scales = jax.random.randint(next(keys), blocks.shape[:-1], 117, 121).astype(jnp.uint8)
        return blocks, scales, jax.random.normal(next(keys), (count, outputs), jnp.bfloat16)

    gate_up, down = matrix(2 * width), matrix(width)
    laid_out = jax.jit(pack)
    packed = (laid_out(*gate_up[:2]), gate_up[2]), (laid_out(*down[:2]), down[2])
    rng, most = np.random.default_rng(2), max(TILED_ROWS)
    x, router, bias = random_halves(rng, most, width), random_halves(rng, width, count), random_halves(rng, count)
    norm, next_norm = (Norm(jnp.asarray(random_halves(rng, width)), 1e-5) for _ in range(2))
    positions = np.where(np.arange(most) % 7 == 3, -1, np.arange(most)).astype(np.int32)

    scaled = x / np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=1, keepdims=True) + norm.epsilon)
    rows_of_experts = (scaled * np.asarray(norm.weight, np.float64)).astype(jnp.bfloat16)
    logits = scaled * np.asarray(norm.weight, np.float64) @ router.astype(np.float64) + bias.astype(np.float64)
    ids = np.argsort(-logits, axis=1, kind="stable")[:, : calls.TILED_TOP_K].astype(np.int32)
    weights = np.exp(np.take_along_axis(logits, ids, axis=1) - logits.max(axis=1, keepdims=True))
    weights = np.where(positions[:, None] < 0, 0, weights / weights.sum(axis=1, keepdims=True))
    pairs = calls.experts(jnp.asarray(rows_of_experts), jnp.asarray(ids), gate_up, down, limit=LIMIT)
    expected = np.einsum("tkd,tk->td", np.asarray(pairs), weights)
    half, first = count // 2, None
    halves = {start: jax.tree.map(lambda leaf, at=start: leaf[at : at + half], packed) for start in (0, half)}
    for rows in TILED_ROWS:
        some, places = jnp.asarray(x[:rows]), jnp.asarray(positions[:rows])
        routing = jnp.asarray(router), jnp.asarray(bias)
        y, normalised = calls.expert_block(some, norm, *routing, places, *packed, next_norm, limit=LIMIT)
        output, of_norm = np.asarray(y), np.asarray(normalised, np.float64)
        _expect_near(of_norm, np.asarray(rms_norm(y, *next_norm), np.float64), f"the norm after experts of {rows} rows")
        added = output.astype(np.float64) - x[:rows].astype(np.float64)
        _expect_near(added, expected[:rows], f"experts of {rows} rows, in tiles")
        first = output[0] if first is None else first
        total = np.zeros_like(expected[:rows])
        for first_here, (of_gate_up, of_down) in halves.items():
            operands = some, norm, *routing, places, of_gate_up, of_down, None
            total += np.asarray(calls.expert_block(*operands, limit=LIMIT, first=jnp.int32(first_here))[0])
        _expect_near(total, expected[:rows], f"experts of {rows} rows, in tiles, in two parts")
        if not np.array_equal(output[0], first):
            raise CudaError(f"the GPU kernels fail their check: a row has other bits alone than among {rows}")


def check_attention(width: int, padding: int, num_pages: int, window: int, length: int) -> None:
    rng, kv_heads, heads, active = np.random.default_rng(1), 2, 8, width - padding
    halves = functools.partial(random_halves, rng)
    qkv = halves(1, width, (heads + 2 * kv_heads) * HEAD_DIM)
    key, value = halves(2, num_pages, PAGE, kv_heads, HEAD_DIM)
    angles, sinks = rng.standard_normal((1, width, HEAD_DIM // 2)), halves(heads)
    cos, sin = np.cos(angles).astype(jnp.bfloat16), np.sin(angles).astype(jnp.bfloat16)
    table = np.arange(num_pages, dtype=np.int32)[None, ::-1]
    index = length + np.arange(active, dtype=np.int32)
    last = np.pad(index, (0, padding), constant_values=-1)[None]
    first = np.maximum(last - window + 1, 0) if window else np.zeros_like(last)
    pools = (pool.reshape(num_pages, PAGE, -1) for pool in (key, value))
    operands = (qkv, cos, sin, *pools, table, last, first, last, sinks)
    out, new_key, new_value = calls.paged_attention(*map(jnp.asarray, operands), span=num_pages * PAGE)

    def rotated(x: np.ndarray) -> np.ndarray:
        left, right = np.split(x, 2, axis=-1)
        c, s = (part.astype(np.float64)[0, :, None] for part in (cos, sin))
        return np.concatenate([left * c - right * s, right * c + left * s], axis=-1)

    rows = qkv.astype(np.float64).reshape(width, -1, HEAD_DIM)
    queries, keys = (rotated(part)[:active] for part in (rows[:, :heads], rows[:, heads : heads + kv_heads]))
    before = np.arange(first[0, 0], length)
    places = (table[0, before // PAGE % num_pages], before % PAGE)
    all_keys = np.concatenate([key[places].astype(np.float64), keys])
    all_values = np.concatenate([value[places].astype(np.float64), rows[:active, heads + kv_heads :]])
    at = np.concatenate([before, index])
    expected = np.zeros((active, heads, HEAD_DIM))
    for t, n in np.ndindex(active, heads):
        visible = (at >= first[0, t]) & (at <= last[0, t])
        kv_head, sink = n // (heads // kv_heads), np.exp(sinks[n].astype(np.float64))
        scores = np.exp(all_keys[visible, kv_head] @ queries[t, n] / HEAD_DIM**0.5)
        expected[t, n] = scores @ all_values[visible, kv_head] / (scores.sum() + sink)
    result = np.asarray(out, np.float64).reshape(width, heads, HEAD_DIM)[:active]
    what = f"attention of {width} rows, {padding} padding, a window of {window}"
    _expect_near(result, expected, what)
    written = (table[0, index // PAGE % num_pages], index % PAGE)
    _expect_near(np.asarray(new_key, np.float64).reshape(key.shape)[written], keys, f"the keys of {what}")
    new_values = np.asarray(new_value, np.float64).reshape(value.shape)
    _expect_near(new_values[written], all_values[-active:], f"the values of {what}")


def _expect_near(output: np.ndarray, expected: np.ndarray, what: str) -> None:
    expect_near(output, expected, f"the GPU kernels fail their check: {what}", CudaError)


def _chosen(codes: tuple[np.ndarray, np.ndarray], ids: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gather (matrices, vectors) of all (row, expert) pairs, in float64."""
    return dequantize(*codes)[ids.ravel()].astype(np.float64), np.repeat(x, ids.shape[1], axis=0).astype(np.float64)
