"""Run GPT-OSS: one stack of layers, three passes over it.

    forward   without a cache: a batch of whole sequences at once (training, references)
    extend    with a cache: T rows per sequence at given positions. A chunk of a prompt, or the pending token and its
              drafts, or one token
    prefill   with a cache: a whole prompt, each layer in blocks of rows. Its results equal `extend` over chunks

Every pass also returns aux_hidden, the outputs of the aux layers, which the drafter reads. The first two passes run
`_run_layers`, each with its own `attend`.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from peagle.ops.attention import (
    CacheGroup,
    PagedCache,
    PagedRows,
    Pages,
    attention,
    group_layers,
    init_pool,
    own_tables,
    paged_attention,
    rows_by_layer,
    split_heads,
)
from peagle.ops.collectives import Ranks
from peagle.ops.expert_matmul import expert_block
from peagle.ops.linear import embed, linear
from peagle.ops.mask import causal_mask
from peagle.ops.messages import VerifyOutput
from peagle.ops.norm import Norm
from peagle.ops.rope import rope_tables
from peagle.ops.row_blocks import RowBlocks
from target.config import TargetConfig
from target.params import AttentionParams, TargetParams

# (layer, its params, query, key, value) -> attention output [B, T, N, H]
Attend = Callable[[int, AttentionParams, jax.Array, jax.Array, jax.Array], jax.Array]
# (layer, its params, qkv [B, T, (N + 2G) H], cos, sin) -> attention output [B, T, N H]
AttendProjected = Callable[[int, AttentionParams, jax.Array, jax.Array, jax.Array], jax.Array]
T = TypeVar("T")

# (a function of a model and arrays, the arrays) -> its result
Run = Callable[[Callable[..., jax.Array], np.ndarray], jax.Array]


def forward(
    params: TargetParams,
    config: TargetConfig,
    token_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    aux_layer_ids: Sequence[int] = (),
    attend: Attend | None = None,
) -> tuple[Float[Array, "B T V"], Float[Array, "B T A"]]:
    """Compute (logits [B, T, V], aux_hidden [B, T, len(aux_layer_ids) * D]) of whole sequences, without a cache.

    Each row attends causally by position, within its own segment if there are segments. A trainer may pass in another
    implementation of that attention as `attend`.
    """
    attend = attend or _attend_within(config, positions, segment_ids)
    projected = _after_rope(config, attend)
    x, aux_hidden = _run_layers(params, config, token_ids, positions, projected, aux_layer_ids)
    return _logits(params, config, x), aux_hidden


def cache_groups(config: TargetConfig, retain_full_kv: bool = False) -> tuple[CacheGroup, ...]:
    """Group the layers by what their caches keep. retain_full_kv: sliding layers keep all positions, too."""
    return group_layers([None] * config.num_layers if retain_full_kv else _windows(config))


def _windows(config: TargetConfig) -> list[int | None]:
    return [config.window(layer) for layer in range(config.num_layers)]


def extend(
    params: TargetParams,
    config: TargetConfig,
    token_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: PagedCache,
    groups: Sequence[CacheGroup],
    aux_layer_ids: Sequence[int] = (),
    logit_rows: Int[Array, "B L"] | None = None,
    writes: Bool[Array, "B T"] | None = None,
    ranks: Ranks | None = None,
) -> tuple[Float[Array, "B L V"], Float[Array, "B T A"], PagedCache]:
    """Run T rows at their positions: write them to the cache, then attend.

    groups: `cache_groups`. writes: False in rows that are already in the cache; all others write. ranks: params, config
    and cache are this rank's part of the model (target.shard). Every rank gets the whole result.

    Returns (logits of the rows in logit_rows, of all by default; aux_hidden of every row; the cache). A row of negative
    position is inactive: it writes nothing; ignore its results. The caller's `length` decides how many of the written
    rows count: moving it back is the rollback. The positions of a sequence's active rows are consecutive.
    """
    pages = list(cache.pages)
    attend = _attend_paged(params, config, rows_by_layer(groups, _windows(config), cache, positions, writes), pages)
    x, aux_hidden = _run_layers(params, config, token_ids, positions, attend, aux_layer_ids, ranks)
    logits = _logits(params, config, x, positions, logit_rows)
    logits = logits if ranks is None else ranks.gather(logits, config.vocab_size)
    return logits, aux_hidden, PagedCache(tuple(pages), cache.tables)


def prefill(
    params: TargetParams,
    config: TargetConfig,
    token_ids: Int[Array, "1 T"],
    positions: Int[Array, "1 T"],
    cache: PagedCache,
    groups: Sequence[CacheGroup],
    aux_layer_ids: Sequence[int],
    logit_rows: Int[Array, "1 L"],
    blocks: RowBlocks,
    writes: Bool[Array, "1 T"] | None = None,
) -> tuple[Float[Array, "1 L V"], Float[Array, "1 T A"], PagedCache]:
    """Run a whole prompt layer by layer, and each layer's two halves in blocks of rows.

    Equals `extend` in chunks of `blocks.query_rows`, except that experts see more rows at once. Active rows come first;
    blocks without any take no time. The table of a windowed group may repeat its pages: it needs those that the window
    of a block's queries reaches.
    """
    x = embed(params.embedding, token_ids, params.dtype)
    cos, sin = rope_tables(config.rope, positions, x.dtype, implementation=params.implementation)
    aux_hidden = jnp.zeros((*token_ids.shape, len(aux_layer_ids) * config.hidden_size), x.dtype)
    pages = list(cache.pages)
    placed = rows_by_layer(groups, _windows(config), cache, positions, writes)
    for index in range(config.num_layers):
        x, pages[index] = _attention_by_blocks(
            params, config, index, x, positions, cos, sin, pages[index], placed[index], blocks.query_rows
        )
        x = _experts_by_blocks(params, config, index, x, positions, blocks.expert_rows)
        if index in aux_layer_ids:
            place = aux_layer_ids.index(index) * config.hidden_size
            aux_hidden = jax.lax.dynamic_update_slice_in_dim(aux_hidden, x, place, axis=2)
    return _logits(params, config, x, positions, logit_rows), aux_hidden, PagedCache(tuple(pages), cache.tables)


def _attention_by_blocks(
    params: TargetParams,
    config: TargetConfig,
    index: int,
    x: jax.Array,
    positions: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: Pages,
    rows: PagedRows,
    size: int,
) -> tuple[jax.Array, Pages]:
    def one(block: jax.Array, carry: tuple[jax.Array, Pages]) -> tuple[jax.Array, Pages]:
        x, pages = carry
        part, at, of_cos, of_sin, write, first, last = (
            _rows(leaf, block, size) for leaf in (x, positions, cos, sin, rows.write, rows.first, rows.last)
        )
        held = {index: pages}
        placed = rows.replace(write=write, first=first, last=last)  # type: ignore[attr-defined]
        attend = _attend_paged(params, config, {index: placed}, held)
        part = _attention_half(params, config, index, part, None, at, of_cos, of_sin, attend)
        return jax.lax.dynamic_update_slice_in_dim(x, part, block * size, axis=1), held[index]

    return _for_active_blocks(one, positions, size, (x, pages))


def _experts_by_blocks(
    params: TargetParams, config: TargetConfig, index: int, x: jax.Array, positions: jax.Array, size: int
) -> jax.Array:
    def one(block: jax.Array, x: jax.Array) -> jax.Array:
        rows, at = _rows(x, block, size), _rows(positions, block, size)
        part, _ = _expert_half(params, config, index, rows, at, norms_next=False)
        return jax.lax.dynamic_update_slice_in_dim(x, part, block * size, axis=1)

    return _for_active_blocks(one, positions, size, x)


def _for_active_blocks(one: Callable[[jax.Array, T], T], positions: jax.Array, size: int, carry: T) -> T:
    """Run `one` over the blocks with active rows."""
    num_active = jnp.sum(positions >= 0, dtype=jnp.int32)
    done: T = jax.lax.fori_loop(jnp.int32(0), (num_active + size - 1) // size, one, carry)
    return done


def _rows(of_all: jax.Array, block: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(of_all, block * size, size, axis=1)


def _attend_paged(
    params: TargetParams,
    config: TargetConfig,
    rows: Mapping[int, PagedRows],
    pages: MutableMapping[int, Pages] | list[Pages],
) -> AttendProjected:
    """Make the attention over pages: write the rows to the layer's pages, replaced in `pages`, then attend."""

    def attend(layer: int, p: AttentionParams, qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        out, pages[layer] = paged_attention(
            qkv,
            cos,
            sin,
            pages[layer],
            rows[layer],
            config.num_heads,
            p.sinks,
            implementation=params.implementation,
        )
        return out

    return attend


def _attend_within(config: TargetConfig, positions: jax.Array, segment_ids: jax.Array | None) -> Attend:
    """Make the attention among the rows of one pass: causal by position, by each layer's window, within segments."""
    masks = {
        window: causal_mask(positions, positions, window) for window in map(config.window, range(config.num_layers))
    }
    if segment_ids is not None:
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        masks = {window: mask & same for window, mask in masks.items()}

    def attend(layer: int, p: AttentionParams, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention(query, key, value, masks[config.window(layer)], p.sinks)

    return attend


def _after_rope(config: TargetConfig, attend: Attend) -> AttendProjected:
    """Wrap `attend` to take the qkv projection: split it into heads and apply RoPE first."""

    def projected(layer: int, p: AttentionParams, qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        query, key, value = split_heads(qkv, config.num_heads, config.num_kv_heads, cos, sin)
        return attend(layer, p, query, key, value).reshape(*qkv.shape[:2], -1)

    return projected


def _run_layers(
    params: TargetParams,
    config: TargetConfig,
    token_ids: jax.Array,
    positions: jax.Array,
    attend: AttendProjected,
    aux_layer_ids: Sequence[int],
    ranks: Ranks | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (residual stream after the last layer [B, T, D], aux_hidden [B, T, A])."""
    x = embed(params.embedding, token_ids, params.dtype)
    cos, sin = rope_tables(config.rope, positions, x.dtype, implementation=params.implementation)
    aux_hidden: dict[int, jax.Array] = {}
    normalised = None
    for index in range(config.num_layers):
        x = _attention_half(params, config, index, x, normalised, positions, cos, sin, attend, ranks)
        x, normalised = _expert_half(params, config, index, x, positions, ranks)
        if index in aux_layer_ids:
            aux_hidden[index] = x
    none = jnp.zeros((*token_ids.shape, 0), x.dtype)
    return x, jnp.concatenate([aux_hidden[i] for i in aux_layer_ids], axis=-1) if aux_layer_ids else none


def _attention_half(
    params: TargetParams,
    config: TargetConfig,
    index: int,
    x: jax.Array,
    normalised: jax.Array | None,
    positions: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    attend: AttendProjected,
    ranks: Ranks | None = None,
) -> jax.Array:
    """Return x + the attention of norm(x), which is `normalised` if the layer before has computed it."""
    p, reduce = params.layers[index].attention, None if ranks is None else ranks.reduce
    norm = Norm(p.norm, config.rms_norm_eps) if normalised is None else None
    by = params.implementation
    rows = x if normalised is None else normalised
    qkv = linear(rows, p.qkv, p.qkv_bias, norm=norm, positions=positions, implementation=by)
    out = attend(index, p, qkv, cos, sin)
    return linear(out, p.out, p.out_bias, residual=x, positions=positions, reduce=reduce, implementation=by)


def _expert_half(
    params: TargetParams,
    config: TargetConfig,
    index: int,
    x: jax.Array,
    positions: jax.Array,
    ranks: Ranks | None = None,
    *,
    norms_next: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """Return (y = x + the experts of norm(x), the next layer's norm(y) or None). See `expert_block`."""
    moe, following = params.layers[index].moe, index + 1
    has_next = norms_next and following < config.num_layers
    next_norm = params.layers[following].attention.norm if has_next else None
    return expert_block(
        x,
        Norm(moe.norm, config.rms_norm_eps),
        moe.router,
        moe.router_bias,
        moe.experts,
        config.top_k,
        config.swiglu_limit,
        positions,
        next_norm=None if next_norm is None else Norm(next_norm, config.rms_norm_eps),
        implementation=params.implementation,
        ranks=ranks,
    )


def _logits(
    params: TargetParams,
    config: TargetConfig,
    x: jax.Array,
    positions: jax.Array | None = None,
    rows: jax.Array | None = None,
) -> jax.Array:
    """Compute the logits of `rows` [B, L], of all by default."""
    if rows is not None:
        x = jnp.take_along_axis(x, rows[:, :, None], axis=1)
        positions = None if positions is None else jnp.take_along_axis(positions, rows, axis=1)
    norm = Norm(params.norm, config.rms_norm_eps)
    return linear(x, params.lm_head, norm=norm, positions=positions, implementation=params.implementation)


CHECKED_TOGETHER = 32  # tokens per pass of `GptOss.finite`


@flax.struct.dataclass
class GptOss:
    """The engine's view of a model (peagle.protocols.Target): parameters with their static settings."""

    params: TargetParams
    config: TargetConfig = flax.struct.field(pytree_node=False)
    aux_layer_ids: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())
    retain_full_kv: bool = flax.struct.field(pytree_node=False, default=False)
    ranks: Ranks | None = flax.struct.field(pytree_node=False, default=None)  # None: the whole model, on one device

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return cache_groups(self.config, self.retain_full_kv)

    def init_pages(self, num_pages: Sequence[int]) -> tuple[Pages, ...]:
        """Make the empty pools of all layers. num_pages: of each group."""
        config = self.config
        return init_pool(self.cache_groups, num_pages, config.num_kv_heads, config.head_dim, self.params.dtype)

    def init_cache(self, batch: int, capacity: int, widest_write: int) -> PagedCache:
        """Make empty caches with their own pages, for `capacity` positions and a pass of `widest_write` rows."""
        tables = own_tables(self.cache_groups, batch, capacity + widest_write, widest_write)
        return PagedCache(self.init_pages([table.size for table in tables]), tables)

    def extend(
        self,
        token_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: PagedCache,
        logit_rows: Int[Array, "B L"] | None = None,
        writes: Bool[Array, "B T"] | None = None,
    ) -> tuple[VerifyOutput, PagedCache]:
        logits, aux, cache = extend(
            self.params,
            self.config,
            token_ids,
            positions,
            cache,
            self.cache_groups,
            self.aux_layer_ids,
            logit_rows,
            writes,
            self.ranks,
        )
        return VerifyOutput(logits, aux), cache

    def prefill(
        self,
        token_ids: Int[Array, "1 T"],
        positions: Int[Array, "1 T"],
        cache: PagedCache,
        logit_rows: Int[Array, "1 L"],
        blocks: RowBlocks,
        writes: Bool[Array, "1 T"] | None = None,
    ) -> tuple[VerifyOutput, PagedCache]:
        logits, aux, cache = prefill(
            self.params,
            self.config,
            token_ids,
            positions,
            cache,
            self.cache_groups,
            self.aux_layer_ids,
            logit_rows,
            blocks,
            writes,
        )
        return VerifyOutput(logits, aux), cache

    def finite(self, token_ids: Int[Array, "one T"]) -> Bool[Array, "outputs T"]:
        """Run a sequence, T a multiple of CHECKED_TOGETHER; return whether each output is finite at each position.

        The outputs are the embedding's, each layer's and the head's.
        """
        layers = tuple(range(self.config.num_layers))
        every: GptOss = self.replace(aux_layer_ids=layers)  # type: ignore[attr-defined]
        length = token_ids.shape[1]

        def one(cache: PagedCache, start: jax.Array) -> tuple[PagedCache, jax.Array]:
            some = jax.lax.dynamic_slice_in_dim(token_ids, start, CHECKED_TOGETHER, axis=1)
            positions = start + jnp.arange(CHECKED_TOGETHER, dtype=jnp.int32)[None]
            output, cache = every.extend(some, positions, cache)
            embedded = embed(self.params.embedding, some, self.params.dtype)
            outputs = (embedded, *jnp.split(output.aux_hidden, len(layers), axis=-1), output.logits)
            return cache, jnp.stack([jnp.isfinite(out[0]).all(axis=-1) for out in outputs])

        starts = jnp.arange(0, length, CHECKED_TOGETHER, dtype=jnp.int32)
        _, finite = jax.lax.scan(one, every.init_cache(1, length, CHECKED_TOGETHER), starts)
        return jnp.moveaxis(finite, 0, 1).reshape(len(layers) + 2, length)

    def first_not_finite(self, token_ids: Sequence[int], run: Run | None = None) -> str | None:
        """Run the tokens once more and name the first output that is not finite; None if all are.

        Outputs are ordered by pass of CHECKED_TOGETHER tokens, then by layer, then by position. run: calls the method
        on the parts of a model that is cut.
        """
        last = self.config.num_layers - 1
        names = ["the embedding", *(f"layer {layer} of 0..{last}" for layer in range(last + 1)), "the head"]
        padded = np.zeros((1, -(-len(token_ids) // CHECKED_TOGETHER) * CHECKED_TOGETHER), np.int32)
        padded[0, : len(token_ids)] = token_ids
        finite = np.asarray(_finite(self, padded) if run is None else run(GptOss.finite, padded))
        for start in range(0, len(token_ids), CHECKED_TOGETHER):
            bad = np.argwhere(~finite[:, start : min(start + CHECKED_TOGETHER, len(token_ids))])
            if len(bad):
                output, row = bad[0]
                return f"{names[output]}, at position {start + row} (token {token_ids[start + row]})"
        return None


_finite = jax.jit(GptOss.finite)
