"""Measure each operation of a pass through the target by itself: the bytes it has to read, and its time.

Each runs with the weights (or caches) of several layers, one layer after the other in one program, as in a model; a
figure is one layer's. A bandwidth is given only if all layers' bytes exceed the device's own caches: else it would be
theirs, and such small operations take as long as their launch. Experts run in every form that there is, on the same
routing.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle.ops import cuda
from peagle.ops.attention import (
    PAGE_SIZE,
    PagedRows,
    Pages,
    causal_rows,
    init_pool,
    own_tables,
    paged_attention,
)
from peagle.ops.cuda import calls
from peagle.ops.expert_matmul import TiledExperts, expert_block, expert_mlp, reference
from peagle.ops.expert_matmul.routing import route_top_k
from peagle.ops.kernels import Implementation
from peagle.ops.linear import linear
from peagle.ops.norm import Norm
from peagle.ops.rope import rope_tables
from scripts.gpu.parts import expert_bytes
from target.config import TargetConfig
from target.model import cache_groups
from target.params import MoeParams, TargetParams

Json = dict[str, Any]
CACHED = 128e6  # bytes: twice a large GPU's second-level cache
MOST_LAYERS = 12  # a program of all of them compiles for long
FORMS: tuple[tuple[str, Implementation | None], ...] = (("XLA", "xla"), ("CUDA", None))  # of attention
REPEATS, PASSES = 5, 10  # so many times, so many passes dispatched together


@dataclass(frozen=True)
class Operation:
    """An operation: one(what it writes, if anything; operands of a layer) gives (its result, what it has written)."""

    name: str
    one: Callable[..., tuple[jax.Array, Any]]
    written: list[Any]  # by layer
    operands: list[tuple[Any, ...]]  # by layer
    num_bytes: float  # that a layer's has to read


def costs(params: TargetParams, config: TargetConfig, rows: int, contexts: tuple[int, ...]) -> Iterator[Json]:
    """Yield a line per operation of a pass of `rows` rows of one sequence; of attention, after so many tokens."""
    for operation in operations(params, config, rows, contexts):
        seconds = measure(operation)
        large = operation.num_bytes * len(operation.operands) > CACHED
        yield {
            "operation": operation.name,
            "rows": rows,
            "mb": operation.num_bytes / 1e6,
            "us": 1e6 * statistics.median(seconds),
            "us_lowest": 1e6 * min(seconds),
            "us_highest": 1e6 * max(seconds),
            "gb_per_s": operation.num_bytes / statistics.median(seconds) / 1e9 if large else None,
        }


def measure(operation: Operation) -> list[float]:
    """Time a layer's operation, REPEATS times."""

    def run(written: list[Any], operands: list[tuple[Any, ...]]) -> tuple[list[jax.Array], list[Any]]:
        outputs, kept = [], []
        for own, (x, *rest) in zip(written, operands, strict=True):
            if outputs:  # in order: XLA would merge the operations of several layers
                x, _ = jax.lax.optimization_barrier((x, outputs[-1]))
            output, own = operation.one(own, x, *rest)
            outputs.append(output)
            kept.append(own)
        return outputs, kept

    program = jax.jit(run, donate_argnums=0)
    _, written = jax.block_until_ready(program(operation.written, operation.operands))
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(PASSES):
            out, written = program(written, operation.operands)
        jax.block_until_ready((out, written))
        seconds.append((time.perf_counter() - started) / PASSES / len(operation.operands))
    return seconds


def operations(params: TargetParams, config: TargetConfig, rows: int, contexts: tuple[int, ...]) -> Iterator[Operation]:
    """See `costs`."""
    layers, dtype = params.layers[:MOST_LAYERS], params.lm_head.dtype
    draw = np.random.default_rng(rows)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(draw.standard_normal(shape), dtype)

    def dense(name: str, weights: list[jax.Array]) -> Operation:
        operands = [(drawn(rows, weight.shape[0]), weight) for weight in weights]
        return Operation(name, _dense, [None] * len(weights), operands, weights[0].nbytes)

    yield dense("qkv", [layer.attention.qkv for layer in layers])
    yield dense("attention out", [layer.attention.out for layer in layers])
    yield dense("router", [layer.moe.router for layer in layers])
    yield from _experts(params, config, [drawn(rows, config.hidden_size) for _ in layers], draw)
    yield dense("head", [params.lm_head])
    for context in contexts:
        heads = config.num_heads + 2 * config.num_kv_heads
        positions = context + jnp.arange(rows, dtype=jnp.int32)[None]
        cos_sin = rope_tables(config.rope, positions, dtype)
        groups = cache_groups(config)
        tables = own_tables(groups, 1, context + rows, rows)
        pools = init_pool(groups, [table.size for table in tables], config.num_kv_heads, config.head_dim, dtype)
        for group, table in reversed([*zip(groups, tables, strict=True)]):
            own = [layer for layer in group.layers if layer < len(layers)]
            if not own:
                continue
            window, placed = group.window, causal_rows(table, positions, PAGE_SIZE, group.window, group.offset)
            operands = [(drawn(1, rows, heads * config.head_dim), *cos_sin, placed) for _ in own]
            visible = context + rows if window is None else min(context, window - 1) + rows
            read = 2 * visible * config.num_kv_heads * config.head_dim * dtype.itemsize
            name = "attention, all" if window is None else f"attention, window {window}"
            for form, implementation in FORMS if cuda.available() else FORMS[:1]:
                one = functools.partial(_attention, num_heads=config.num_heads, implementation=implementation)
                written = [jax.tree.map(jnp.copy, pools[layer]) for layer in own]  # which is donated
                yield Operation(f"{name}, after {context}: {form}", one, written, operands, read)


def _experts(
    params: TargetParams, config: TargetConfig, x: list[jax.Array], draw: np.random.Generator
) -> Iterator[Operation]:
    rows, weights = x[0].shape[0], [layer.moe.experts for layer in params.layers[: len(x)]]
    if isinstance(weights[0], TiledExperts):
        yield from _expert_blocks(params, config, x)
        return
    logits = [jnp.asarray(draw.standard_normal((rows, config.num_experts)), jnp.float32) for _ in weights]
    one_expert = sum(leaf.nbytes for leaf in jax.tree.leaves(weights[0])) / config.num_experts
    selected = [np.unique(np.asarray(route_top_k(rows_logits, config.top_k)[0])).size for rows_logits in logits]
    forms = [("CUDA", expert_mlp)] if cuda.available() else []
    if rows > calls.FEW_ROWS:  # a prefill's
        forms += [("XLA, all experts", reference.each_expert_once), ("XLA, in blocks", reference.in_blocks)]
    else:
        forms.append(("XLA, all pairs at once", reference.all_pairs))
        if rows == 1:  # these loop: over pairs, and over all experts
            forms += [("XLA, pair by pair", reference.selected), ("XLA, all experts", reference.each_expert_once)]
    for name, form in forms:
        one = functools.partial(_routed, form=form, top_k=config.top_k, limit=config.swiglu_limit)
        operands = list(zip(x, logits, weights, strict=True))
        yield Operation(
            f"experts: {name}", one, [None] * len(weights), operands, one_expert * statistics.mean(selected)
        )


def _expert_blocks(params: TargetParams, config: TargetConfig, x: list[jax.Array]) -> Iterator[Operation]:
    """Yield the second halves of layers, of which the kernels make one operation."""
    moes = [layer.moe for layer in params.layers[: len(x)]]
    read = expert_bytes(moes[:1], config, len(x[0]))
    one = functools.partial(_expert_block, config=config)
    yield Operation("expert block: CUDA", one, [None] * len(x), list(zip(x, moes, strict=True)), read)


def _expert_block(_: None, x: jax.Array, moe: MoeParams, config: TargetConfig) -> tuple[jax.Array, None]:
    norm = Norm(moe.norm, config.rms_norm_eps)
    operands = (x, norm, moe.router, moe.router_bias, moe.experts, config.top_k, config.swiglu_limit)
    return expert_block(*operands)[0], None


def _dense(_: None, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
    return linear(x, weight), None


def _routed(
    _: None, x: jax.Array, logits: jax.Array, experts: Any, form: Callable[..., jax.Array], top_k: int, limit: float
) -> tuple[jax.Array, None]:
    return form(x, logits, experts, top_k, limit), None


def _attention(
    pages: Pages,
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    rows: PagedRows,
    num_heads: int,
    implementation: Implementation | None,
) -> tuple[jax.Array, Pages]:
    return paged_attention(qkv, cos, sin, pages, rows, num_heads, implementation=implementation)
