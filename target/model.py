"""Run GPT-OSS: one stack of layers, two passes over it.

    forward         without a cache: a batch of whole sequences at once (training, references)
    GptOss.extend   with a cache: T rows per sequence, such as a chunk of a prompt, or the pending token and its drafts

Every pass also returns aux_hidden, the outputs of the aux layers, which the drafter reads.
"""

from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from peagle.ops.attention import (
    Attend,
    AttendHeads,
    CacheGroup,
    PagedAttention,
    PagedCache,
    Pages,
    after_rope,
    attend_paged,
    attention,
    group_layers,
    init_pools,
    own_cache,
)
from peagle.ops.collectives import Ranks
from peagle.ops.expert_matmul import expert_block
from peagle.ops.linear import embed, linear, logits_dtype
from peagle.ops.mask import causal_mask
from peagle.ops.messages import VerifyOutput
from peagle.ops.norm import Norm
from peagle.ops.rope import rope_tables
from peagle.ops.row_blocks import in_row_blocks
from target.config import TargetConfig
from target.params import TargetParams

CHECKED_TOGETHER = 32  # tokens per pass of `GptOss.finite`
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
    attend: AttendHeads | None = None,
) -> tuple[Float[Array, "B T V"], Float[Array, "B T A"]]:
    """Compute (logits [B, T, V], aux_hidden [B, T, len(aux_layer_ids) * D]) of whole sequences, without a cache.

    Each row attends causally by position, within its own segment if there are segments. A trainer may pass in another
    implementation of that attention as `attend`.
    """
    model = GptOss(params, config, tuple(aux_layer_ids))
    heads = attend or _attend_within(params, config, positions, segment_ids)
    projected = after_rope(heads, config.num_heads, config.num_kv_heads)
    x, aux_hidden = model._run_layers(token_ids, positions, projected)
    return model._logits(x), aux_hidden


def _attend_within(
    params: TargetParams, config: TargetConfig, positions: jax.Array, segment_ids: jax.Array | None
) -> AttendHeads:
    """Make the attention among the rows of one pass: causal by position, by each layer's window, within segments."""
    masks = {window: causal_mask(positions, positions, window) for window in _windows(config)}
    if segment_ids is not None:
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        masks = {window: mask & same for window, mask in masks.items()}

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention(query, key, value, masks[config.window(layer)], params.layers[layer].attention.sinks)

    return attend


def cache_groups(config: TargetConfig, retain_full_kv: bool = False) -> tuple[CacheGroup, ...]:
    """Group the layers by what their caches keep. retain_full_kv: sliding layers keep all positions, too."""
    return group_layers([None] * config.num_layers if retain_full_kv else _windows(config))


def _windows(config: TargetConfig) -> list[int | None]:
    return [config.window(layer) for layer in range(config.num_layers)]


@flax.struct.dataclass
class GptOss:
    """The engine's view of a model (peagle.protocols.Target): parameters with their static settings.

    ranks: params, config and caches are this rank's part (target.shard), and every rank gets the whole result; None:
    the whole model, on one device. query_blocks, ffn_blocks: blocks of rows in which `extend` computes the two halves
    of a layer, attention and experts (`in_row_blocks`); more take less memory.
    """

    params: TargetParams
    config: TargetConfig = flax.struct.field(pytree_node=False)
    aux_layer_ids: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())
    retain_full_kv: bool = flax.struct.field(pytree_node=False, default=False)
    ranks: Ranks | None = flax.struct.field(pytree_node=False, default=None)
    query_blocks: int = flax.struct.field(pytree_node=False, default=1)
    ffn_blocks: int = flax.struct.field(pytree_node=False, default=1)

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
        return init_pools(self.cache_groups, num_pages, config.num_kv_heads, config.head_dim, self.params.dtype)

    def init_cache(self, batch: int, capacity: int, widest_write: int) -> PagedCache:
        """Make empty caches with their own pages, for `capacity` positions and a pass of `widest_write` rows."""
        return own_cache(self.cache_groups, self.init_pages, batch, capacity, widest_write)

    def extend(
        self,
        token_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: PagedCache,
        logit_rows: Int[Array, "B L"] | None = None,
        writes: Bool[Array, "B T"] | None = None,
    ) -> tuple[VerifyOutput, PagedCache]:
        """Run T rows at their positions: write them to the cache, then attend.

        Returns the logits of `logit_rows`, by default of all, and the aux_hidden of every row. writes: False in rows
        that are already in the cache. A row of negative position is inactive: it writes nothing; ignore its results.
        The positions of a sequence's active rows are consecutive. The caller's `length` decides how many of the written
        rows count: moving it back is the rollback.
        """
        attend = attend_paged(
            cache,
            self.cache_groups,
            _windows(self.config),
            positions,
            self.config.num_heads,
            sinks=[layer.attention.sinks for layer in self.params.layers],
            writes=writes,
            implementation=self.params.implementation,
        )
        x, aux_hidden = self._run_layers(token_ids, positions, attend)
        logits = self._logits(x, positions, logit_rows)
        logits = logits if self.ranks is None else self.ranks.gather(logits, self.config.vocab_size)
        return VerifyOutput(logits, aux_hidden), attend.cache

    def _embedded(self, token_ids: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (the tokens' embeddings, cos, sin)."""
        params = self.params
        tables = rope_tables(self.config.rope, positions, params.dtype, implementation=params.implementation)
        return embed(params.embedding, token_ids, params.dtype, self.config.hidden_size), *tables

    def _run_layers(
        self, token_ids: jax.Array, positions: jax.Array, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T A"]]:
        """Return (residual stream after the last layer, aux_hidden)."""
        x, cos, sin = self._embedded(token_ids, positions)
        aux_hidden: dict[int, jax.Array] = {}
        normalised = None
        for index in range(self.config.num_layers):
            x = self._attention_half(index, x, normalised, positions, cos, sin, attend)
            x, normalised = self._expert_half(index, x, positions)
            if index in self.aux_layer_ids:
                aux_hidden[index] = x
        none = jnp.zeros((*token_ids.shape, 0), x.dtype)
        return x, jnp.concatenate([aux_hidden[i] for i in self.aux_layer_ids], axis=-1) if self.aux_layer_ids else none

    def _attention_half(
        self,
        index: int,
        x: jax.Array,
        normalised: jax.Array | None,
        positions: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        attend: Attend,
    ) -> jax.Array:
        """Return x + the attention of norm(x), which is `normalised` if the layer before has computed it."""
        p, reduce = self.params.layers[index].attention, None if self.ranks is None else self.ranks.reduce
        by = self.params.implementation

        def half(
            x: jax.Array, positions: jax.Array, normalised: jax.Array | None, cos: jax.Array, sin: jax.Array
        ) -> jax.Array:
            norm = Norm(p.norm, self.config.rms_norm_eps) if normalised is None else None
            rows = x if normalised is None else normalised
            qkv = linear(rows, p.qkv, p.qkv_bias, norm=norm, positions=positions, implementation=by)
            out = attend(index, qkv, cos, sin)
            return linear(out, p.out, p.out_bias, residual=x, positions=positions, reduce=reduce, implementation=by)

        operands = (x, positions, normalised, cos, sin)
        if isinstance(attend, PagedAttention):
            return attend.in_blocks(index, self.query_blocks, half, *operands)
        return half(*operands)

    def _expert_half(self, index: int, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return (y = x + the experts of norm(x), the next layer's norm(y) or None). See `expert_block`."""
        moe, eps = self.params.layers[index].moe, self.config.rms_norm_eps
        has_next = index + 1 < self.config.num_layers and self.ffn_blocks == 1

        def half(x: jax.Array, _: None, positions: jax.Array) -> tuple[jax.Array, jax.Array | None]:
            return expert_block(
                x,
                Norm(moe.norm, eps),
                moe.router,
                moe.router_bias,
                moe.experts,
                self.config.top_k,
                self.config.swiglu_limit,
                positions,
                next_norm=Norm(self.params.layers[index + 1].attention.norm, eps) if has_next else None,
                implementation=self.params.implementation,
                ranks=self.ranks,
            )

        return in_row_blocks(half, self.ffn_blocks, x, None, positions)

    def _logits(self, x: jax.Array, positions: jax.Array | None = None, rows: jax.Array | None = None) -> jax.Array:
        """Compute the logits of `rows` [B, L], of all by default."""
        if rows is not None:
            x = jnp.take_along_axis(x, rows[:, :, None], axis=1)
            positions = None if positions is None else jnp.take_along_axis(positions, rows, axis=1)
        params, by = self.params, self.params.implementation
        norm = Norm(params.norm, self.config.rms_norm_eps)
        return linear(x, params.lm_head, norm=norm, positions=positions, dtype=logits_dtype(by), implementation=by)

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
            embedded = embed(self.params.embedding, some, self.params.dtype, self.config.hidden_size)
            outputs = (embedded, *jnp.split(output.aux_hidden, len(layers), axis=-1), output.logits)
            return cache, jnp.stack([jnp.isfinite(out[0]).all(axis=-1) for out in outputs])

        starts = jnp.arange(0, length, CHECKED_TOGETHER, dtype=jnp.int32)
        _, finite = jax.lax.scan(one, every.init_cache(1, length, CHECKED_TOGETHER), starts)
        return jnp.moveaxis(finite, 0, 1).reshape(len(layers) + 2, length)

    def first_not_finite(self, token_ids: Sequence[int], run: Run | None = None) -> str | None:
        """Run the tokens once more and name the first output that is not finite; None if all are.

        The order is by pass of CHECKED_TOGETHER tokens, then by layer, then by position. run: runs `finite` on the
        ranks of a model over several devices.
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
