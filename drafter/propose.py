"""The engine's view of a drafter: PEagle, Eagle3 and DFlash satisfy peagle.protocols.Drafter without importing it.

    PEagle    one pass over the rows committed last and K - 1 mask slots, each of which sees those before it
    Eagle3    one pass over the rows committed last, then K - 1 passes over the latest draft
    DFlash    one pass over the rows committed last, as context, and a block whose rows see each other (dflash.py)

Before `propose` the cache holds rows 0..first_position-1, afterwards also the input's committed rows. Later entries are
never read, so rejected drafts need no rollback. Draft i predicts token[first_position + num + 1 + i]; ignore drafts
from widths[b] on. A sequence of negative first_position is inactive: it writes nothing; ignore its drafts.
"""

from collections.abc import Sequence
from typing import TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from drafter import dflash, model
from drafter.config import DrafterConfig, Kind
from drafter.params import DrafterParams
from peagle.ops.attention import (
    MASKED,
    CacheGroup,
    PagedAttention,
    PagedCache,
    Pages,
    attend_paged,
    group_layers,
    init_pools,
    own_cache,
)
from peagle.ops.linear import SplitMatrix, embed, linear
from peagle.ops.messages import Choose, DrafterInput, DraftOutput, likeliest_of
from peagle.ops.norm import rms_norm
from peagle.ops.rope import rope_tables


def cache_groups(config: DrafterConfig, retain_full_kv: bool = False) -> tuple[CacheGroup, ...]:
    """Group the layers by what their caches keep. retain_full_kv: windowed layers keep all positions, too.

    The row at position p holds token p + 1 and has index p + 1, so the content of a page depends only on its own tokens
    and on those before. Index 0 stays empty.
    """
    return group_layers([None] * config.num_layers if retain_full_kv else _windows(config), offset=1)


def _windows(config: DrafterConfig) -> list[int | None]:
    return [config.window(layer) for layer in range(config.num_layers)]


@flax.struct.dataclass
class _Cached:
    """A drafter with KV caches. retain_full_kv: windowed layers keep all positions."""

    params: DrafterParams
    config: DrafterConfig = flax.struct.field(pytree_node=False)
    retain_full_kv: bool = flax.struct.field(pytree_node=False, default=False, kw_only=True)

    @property
    def aux_layer_ids(self) -> tuple[int, ...] | None:
        """The target's layers whose outputs the drafter reads; None: the target's default."""
        return self.config.aux_layer_ids

    @property
    def window(self) -> int | None:
        """Smallest window of a layer, in positions; None: every layer sees all."""
        return self.config.narrowest_window

    @property
    def block_drafts(self) -> int | None:
        """Most drafts of a step; None: any number."""
        return self.config.block_drafts

    @property
    def trained_positions(self) -> int | None:
        """The positions of config.json, if a layer sees all; None: windows keep RoPE's distances small."""
        windows = self.config.windows or (None,)
        return self.config.max_positions if None in windows else None

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return cache_groups(self.config, self.retain_full_kv)

    def init_pages(self, num_pages: Sequence[int]) -> tuple[Pages, ...]:
        """Make the empty pools of all layers. num_pages: of each group."""
        config = self.config
        return init_pools(self.cache_groups, num_pages, config.num_kv_heads, config.head_dim, self.params.dtype)

    def init_state(self, batch: int, capacity: int, widest_write: int) -> PagedCache:
        """Make empty caches with their own pages, for `capacity` positions of the target and a pass of rows."""
        widest_write += self.block_drafts or 0  # a DFlash pass writes its whole block, for any number of drafts
        return own_cache(self.cache_groups, self.init_pages, batch, capacity, widest_write)

    def absorb(
        self,
        state: PagedCache,
        token_ids: Int[Array, "B T"],
        aux_hidden: Float[Array, "B T A"],
        positions: Int[Array, "B T"],
    ) -> PagedCache:
        """Write committed rows to the cache, without proposing.

        token_ids are already shifted: the row at position p is (token[p+1], aux_hidden[p]). Rows of negative position
        are inactive: they are not written. Example: of a prompt of P tokens, rows 0..P-2 can be written; row P-1 needs
        the first sampled token and comes with the first `propose`.
        """
        # XLA drops the last layer's work after its keys and values, because nothing reads it
        hidden = model.project_aux(self.params, self.config, aux_hidden.astype(self.params.dtype), positions)
        return self._run(state, token_ids, hidden, positions)[1]

    def _run(
        self,
        cache: PagedCache,
        token_ids: Int[Array, "B T"],
        hidden: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        output_rows: Int[Array, "B K"] | None = None,
    ) -> tuple[Float[Array, "B t D"], PagedCache]:
        """Write the rows to the cache, then let each row attend up to its own position.

        Returns (residual stream of the output rows, by default of all; the cache).
        """
        attend = self._attend(cache, positions)
        x = model.run_layers(self.params, self.config, token_ids, hidden, positions, attend, output_rows)
        return x, attend.cache

    def _attend(
        self, cache: PagedCache, positions: Int[Array, "B T"], until: Int[Array, "B T"] | None = None
    ) -> PagedAttention:
        head = self.params.lm_head
        return attend_paged(
            cache,
            self.cache_groups,
            _windows(self.config),
            positions,
            self.config.num_heads,
            until=until,
            implementation=self.params.implementation,
            mesh=head.mesh if isinstance(head, SplitMatrix) else None,
        )


@flax.struct.dataclass
class _OnePass(_Cached):
    """A drafter that computes the logits of all drafts in one pass.

    with_logits: also return logits over the target's vocabulary, for comparison with a reference.
    """

    with_logits: bool = flax.struct.field(pytree_node=False, default=False)

    def _chosen(self, logits: Float[Array, "B K U"], choose: Choose) -> DraftOutput:
        full = to_target_logits(self.params, self.config, logits) if self.with_logits else None
        drafts, confidence = choose(logits, self.params.draft_to_target, 0)
        return DraftOutput(to_target_ids(self.params, drafts), full, confidence)


@flax.struct.dataclass
class PEagle(_OnePass):
    def propose(
        self,
        state: PagedCache,
        drafter_input: DrafterInput,
        widths: Int[Array, " B"],
        num_drafts: int,
        choose: Choose = likeliest_of,
    ) -> tuple[DraftOutput, PagedCache]:
        """Propose K drafts in one pass of F+K-1 rows (`lay_out_rows`)."""
        _expect_drafts(num_drafts)
        token_ids, num, first = drafter_input.token_ids, drafter_input.num, drafter_input.first_position
        rows = lay_out_rows(token_ids, num, first, num_drafts, model.mask_token_of(self.config), widths)
        hidden = _slot_hidden(self.params, self.config, drafter_input, rows)
        drafted = jnp.arange(num_drafts, dtype=jnp.int32)[None, :] < widths[:, None]
        output_rows = jnp.where(drafted, rows.draft_rows, -1)
        x, cache = self._run(state, rows.token_ids, hidden, rows.positions, output_rows)
        return self._chosen(model.head(self.params, self.config, x, output_rows), choose), cache


@flax.struct.dataclass
class Eagle3(_Cached):
    def propose(
        self,
        state: PagedCache,
        drafter_input: DrafterInput,
        widths: Int[Array, " B"],
        num_drafts: int,
        choose: Choose = likeliest_of,
    ) -> tuple[DraftOutput, PagedCache]:
        """Propose K drafts in K passes.

        The first pass covers the committed rows, each later pass the draft before; the last draft needs no row. The row
        at first_position + num - 1 + i, i >= 1, is (embedding of draft i-1, `next_input` of the row before) and
        predicts draft i.
        """
        _expect_drafts(num_drafts)
        params, config, cache = self.params, self.config, state
        num, first = drafter_input.num, drafter_input.first_position
        rows = lay_out_rows(drafter_input.token_ids, num, first, 1, 0)  # for one draft: no mask slots
        aux_hidden, real = drafter_input.aux_hidden.astype(params.dtype), jnp.where(rows.committed, 0, -1)
        hidden = model.project_aux(params, config, aux_hidden, real)
        drafts, confidence = [], []
        token_ids, positions = rows.token_ids, rows.positions
        output_rows: jax.Array | None = jnp.where(widths[:, None] > 0, rows.draft_rows, -1)
        for number in range(num_drafts):
            x, cache = self._run(cache, token_ids, hidden, positions, output_rows)
            needed = jnp.where(first >= 0, widths, 0)[:, None] > number
            logits = model.head(params, config, x, jnp.where(needed, 0, -1))
            index, probability = choose(logits, params.draft_to_target, number)
            drafts.append(to_target_ids(params, index))
            confidence.append(probability)
            token_ids, hidden, output_rows = drafts[-1], model.next_input(params, config, x), None
            positions = jnp.where(widths > number + 1, jnp.where(first < 0, -1, first + num + number), -1)[:, None]
        probabilities = [probability for probability in confidence if probability is not None]
        joined = jnp.concatenate(probabilities, axis=1) if probabilities else None
        return DraftOutput(jnp.concatenate(drafts, axis=1), confidence=joined), cache


@flax.struct.dataclass
class DFlash(_OnePass):
    def absorb(
        self,
        state: PagedCache,
        token_ids: Int[Array, "B T"],  # noqa: ARG002  # the context has no tokens
        aux_hidden: Float[Array, "B T A"],
        positions: Int[Array, "B T"],
    ) -> PagedCache:
        """Write context rows to the cache. Rows of negative position are inactive: they are not written."""
        params, config = self.params, self.config
        context = dflash.project_context(params, config, aux_hidden.astype(params.dtype), positions)
        attend = self._attend(state, positions, until=jnp.full_like(positions, -1))
        cos, sin = rope_tables(config.rope, positions, params.dtype, implementation=params.implementation)
        for layer, p in enumerate(params.layers):
            qkv = linear(context, p.qkv, p.qkv_bias, positions=positions, implementation=params.implementation)
            attend(layer, model.norm_heads(qkv, p, config), cos, sin)
        return attend.cache

    def propose(
        self,
        state: PagedCache,
        drafter_input: DrafterInput,
        widths: Int[Array, " B"],
        num_drafts: int,
        choose: Choose = likeliest_of,
    ) -> tuple[DraftOutput, PagedCache]:
        """Propose K drafts in one pass (`dflash.lay_out_block`).

        Raises ValueError for more drafts than a block has mask slots.
        """
        params, config, by = self.params, self.config, self.params.implementation
        assert config.block_size is not None
        if not 1 <= num_drafts < config.block_size:
            raise ValueError(f"{num_drafts} drafts; expected 1 to {config.block_drafts}, the mask slots of a block")
        rows = dflash.lay_out_block(drafter_input, widths > 0, config.block_size, model.mask_token_of(config))
        num_context = drafter_input.token_ids.shape[1]
        aux_hidden, before = drafter_input.aux_hidden.astype(params.dtype), rows.positions[:, :num_context]
        context = dflash.project_context(params, config, aux_hidden, before)
        positions = rows.positions[:, num_context:]
        attend = self._attend(state, rows.positions, until=rows.until)
        cos, sin = rope_tables(config.rope, rows.positions, params.dtype, implementation=by)
        x = embed(params.embedding, rows.token_ids, params.dtype, config.hidden_size)
        for layer, p in enumerate(params.layers):
            read = jnp.concatenate([context, rms_norm(x, p.norm, config.rms_norm_eps)], axis=1)
            qkv = linear(read, p.qkv, p.qkv_bias, positions=rows.positions, implementation=by)
            out = attend(layer, model.norm_heads(qkv, p, config), cos, sin)[:, num_context:]
            if layer == config.num_layers - 1:  # of the last layer's output only the first K drafts are read
                out, x = out[:, 1 : num_drafts + 1], x[:, 1 : num_drafts + 1]
                drafted = jnp.arange(num_drafts, dtype=jnp.int32)[None, :] < widths[:, None]
                positions = jnp.where(drafted, positions[:, 1 : num_drafts + 1], -1)
            x = linear(out, p.out, p.out_bias, residual=x, positions=positions, implementation=by)
            x = model.feed_forward(p, x, config.rms_norm_eps, positions, by)
        return self._chosen(model.head(params, config, x, positions), choose), attend.cache


AnyDrafter: TypeAlias = PEagle | Eagle3 | DFlash


def drafter_of(params: DrafterParams, config: DrafterConfig) -> AnyDrafter:
    kinds: dict[Kind, type[AnyDrafter]] = {"P-EAGLE": PEagle, "EAGLE-3": Eagle3, "DFlash": DFlash}
    return kinds[config.kind](params, config)


def to_target_logits(
    params: DrafterParams, config: DrafterConfig, logits: Float[Array, "B K U"]
) -> Float[Array, "B K V"]:
    """Spread logits over the target's vocabulary, in float32.

    Tokens that the drafter cannot propose get MASKED, whose probability is exactly zero.
    """
    logits = logits.astype(jnp.float32)
    if params.draft_to_target is None:
        return logits
    full = jnp.full((*logits.shape[:2], config.vocab_size), MASKED, jnp.float32)
    return full.at[:, :, params.draft_to_target].set(logits)


def to_target_ids(params: DrafterParams, draft_ids: Int[Array, "B K"]) -> Int[Array, "B K"]:
    """Map ids of the draft vocabulary to ids of the target's; NO_TOKEN stays."""
    if params.draft_to_target is None:
        return draft_ids
    return jnp.where(draft_ids < 0, draft_ids, params.draft_to_target[jnp.maximum(draft_ids, 0)])


def _expect_drafts(num_drafts: int) -> None:
    if num_drafts < 1:
        raise ValueError(f"{num_drafts} drafts; expected K >= 1")


@flax.struct.dataclass
class Rows:
    """The rows of one proposing pass (`lay_out_rows`)."""

    token_ids: jax.Array  # [B, T], T = F+K-1
    positions: jax.Array  # [B, T]; -1 in padding, and in an inactive sequence
    committed: jax.Array  # [B, T] bool: rows with a true aux_hidden; the others are mask slots or padding
    draft_rows: jax.Array  # [B, K]: the row that predicts draft i


def lay_out_rows(
    token_ids: Int[Array, "B F"],
    num_committed: Int[Array, " B"],
    first_position: Int[Array, " B"],
    num_drafts: int,
    mask_token_id: int,
    widths: Int[Array, " B"] | None = None,
) -> Rows:
    """Lay out the F+K-1 rows of one proposing pass: C = num_committed committed rows, K-1 mask slots, padding.

    Positions are consecutive. Row C-1+i predicts draft i. With F = K+1, the most that one step commits, a pass has 2K
    rows. widths: sequence b proposes widths[b] <= K drafts, and its further mask slots are padding; None: K.

    Example (the rows of vLLM's own test; K = 3, mask id M): C = 3 committed rows 11 12 100 from position 5, and C = 4,
    21 22 23 200, from 10:

        row          0    1    2    3    4    5
        token_ids    11   12   100  M    M    (M)      draft_rows 2 3 4; row 5 is padding
        positions    5    6    7    8    9    -1
        token_ids    21   22   23   200  M    M        draft_rows 3 4 5
        positions    10   11   12   13   14   15

    A padding row is inactive: it has no position and writes nothing. The cache entries of mask slots are overwritten
    before any later pass reads them, because a pass writes every position from its committed rows to its last query.
    """
    width = token_ids.shape[1] + num_drafts - 1
    row = jnp.arange(width, dtype=jnp.int32)[None, :]
    committed = row < num_committed[:, None]
    first_position = first_position[:, None]
    num_masks = num_drafts - 1 if widths is None else jnp.maximum(widths - 1, 0)[:, None]
    active = (first_position >= 0) & (row < num_committed[:, None] + num_masks)
    padded = jnp.pad(token_ids, ((0, 0), (0, width - token_ids.shape[1])))
    draft = jnp.arange(num_drafts, dtype=jnp.int32)[None, :]
    return Rows(
        token_ids=jnp.where(committed, padded, mask_token_id),
        positions=jnp.where(active, first_position + row, -1),
        committed=committed,
        draft_rows=jnp.maximum(num_committed[:, None] - 1, 0) + draft,
    )


def _slot_hidden(params: DrafterParams, config: DrafterConfig, drafter_input: DrafterInput, rows: Rows) -> jax.Array:
    """Project aux_hidden in committed rows and mask_hidden elsewhere [B, T, D], reading fc once."""
    assert params.mask_hidden is not None
    batch, width, aux_width = drafter_input.aux_hidden.shape
    masks = params.mask_hidden.shape[0]
    mask_hidden = jnp.broadcast_to(params.mask_hidden[None], (batch, masks, aux_width))
    aux_hidden = jnp.concatenate([drafter_input.aux_hidden.astype(params.dtype), mask_hidden], axis=1)
    real = jnp.pad(jnp.where(rows.committed[:, :width], 0, -1), ((0, 0), (0, masks)))
    hidden = model.project_aux(params, config, aux_hidden, real)
    # committed row r reads projection r; mask slot m reads projection F + m, or the last one if there are fewer
    row = jnp.arange(rows.committed.shape[1], dtype=jnp.int32)[None, :]
    source = jnp.where(rows.committed, row, width + jnp.clip(row - drafter_input.num[:, None], 0, masks - 1))
    return jnp.take_along_axis(hidden, source[:, :, None], axis=1)
