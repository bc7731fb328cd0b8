"""Run P-EAGLE and EAGLE-3 drafters: one stack of layers, four passes over it.

    forward           without a cache: rows (anchor, depth) under the group-causal mask (references)
    absorb            write committed rows to the cache; no logits
    propose           P-EAGLE: one pass over the rows committed last and K - 1 mask slots
    propose_in_turn   EAGLE-3: one pass over the rows committed last, then K - 1 passes over the latest draft

Row p is (embedding of token[p+1], fc(aux_hidden[p])) at RoPE position p, and predicts token[p+2]. A mask slot is
(embedding of mask_token_id, fc(mask_hidden)). The row of a draft is (its embedding, the last layer's output at the row
before). Every pass runs `run_layers` with its own `attend`.
"""

import functools
from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from drafter.config import DrafterConfig
from drafter.params import DrafterParams, LayerParams
from peagle.ops.attention import Attend, CacheGroup, PagedCache, after_rope, attend_paged, attention, group_layers
from peagle.ops.kernels import Implementation
from peagle.ops.linear import embed, linear
from peagle.ops.mask import group_causal_mask
from peagle.ops.messages import Choose, Chosen, DrafterInput, likeliest_of
from peagle.ops.norm import Norm, rms_norm
from peagle.ops.rope import rope_tables


@flax.struct.dataclass
class Rows:
    """The rows of one proposing pass (`lay_out_rows`)."""

    token_ids: jax.Array  # [B, T], T = F+K-1
    positions: jax.Array  # [B, T]; -1 in padding, and in an inactive sequence
    committed: jax.Array  # [B, T] bool: rows with a true aux_hidden; the others are mask slots or padding
    draft_rows: jax.Array  # [B, K]: the row that predicts draft i


def forward(
    params: DrafterParams,
    config: DrafterConfig,
    token_ids: Int[Array, "B T"],
    aux_hidden: Float[Array, "B T A"],
    anchor: Int[Array, "B T"],
    depth: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T U"]:
    """Compute a P-EAGLE drafter's logits of every row (anchor, depth), without a cache.

    Attention is masked by `group_causal_mask`. A row of depth 0 at anchor p holds token[p+1] and aux_hidden[p]; a row
    of depth > 0 holds the mask token and mask_hidden instead. Row (p, d) has RoPE position p + d and predicts token[p +
    d + 2]. Rows of negative anchor are padding. With segments, rows attend within their own segment only, and anchors
    may repeat across segments.
    """
    mask = group_causal_mask(anchor, depth)
    if segment_ids is not None:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    behind = (anchor + depth)[:, :, None] - (anchor + depth)[:, None, :]

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        window = config.window(layer)
        return attention(query, key, value, mask if window is None else mask & (behind < window))

    masked = depth > 0
    token_ids = jnp.where(masked, mask_token_of(config), token_ids)
    slots = mask_slots(params, config)[jnp.clip(depth - 1, 0, config.num_mask_hiddens - 1)]
    hidden = jnp.where(masked[:, :, None], slots, project_aux(params, config, aux_hidden.astype(params.dtype)))
    x = run_layers(
        params, config, token_ids, hidden, anchor + depth, after_rope(attend, config.num_heads, config.num_kv_heads)
    )
    return head(params, config, x)


def cache_groups(config: DrafterConfig, retain_full_kv: bool = False) -> tuple[CacheGroup, ...]:
    """Group the layers by what their caches keep. retain_full_kv: windowed layers keep all positions, too.

    The row at position p holds token p + 1 and has index p + 1, so the content of a page depends only on its own tokens
    and on those before. Index 0 stays empty.
    """
    windows = [None if retain_full_kv else config.window(layer) for layer in range(config.num_layers)]
    return group_layers(windows, offset=1)


def absorb(
    params: DrafterParams,
    config: DrafterConfig,
    token_ids: Int[Array, "B T"],
    aux_hidden: Float[Array, "B T A"],
    positions: Int[Array, "B T"],
    cache: PagedCache,
    groups: Sequence[CacheGroup],
) -> PagedCache:
    """Write committed rows to the cache, without proposing.

    token_ids are already shifted: the row at position p is (token[p+1], aux_hidden[p]). Rows of negative position are
    inactive: they are not written. Example: of a prompt of P tokens, rows 0..P-2 can be written; row P-1 needs the
    first sampled token and comes with the first `propose`.
    """
    # XLA drops the last layer's work after its keys and values, because nothing reads it
    hidden = project_aux(params, config, aux_hidden.astype(params.dtype), positions)
    return _cached_pass(params, config, token_ids, hidden, positions, cache, groups)[1]


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


def propose(
    params: DrafterParams,
    config: DrafterConfig,
    drafter_input: DrafterInput,
    widths: Int[Array, " B"],
    cache: PagedCache,
    groups: Sequence[CacheGroup],
    num_drafts: int,
) -> tuple[Float[Array, "B K U"], PagedCache]:
    """Propose K drafts in one pass of F+K-1 rows; return (logits over the draft vocabulary, the cache).

    The cache holds rows 0..first_position-1 before the pass, and also the input's committed rows after it. Later
    entries are never read (`lay_out_rows`), so rejected drafts need no rollback. Draft i predicts token[first_position
    + num + 1 + i]; ignore logits of drafts from widths[b] on. A sequence of negative first_position is inactive: it
    writes nothing; ignore its logits.
    """
    if num_drafts < 1:
        raise ValueError(f"{num_drafts} drafts; expected K >= 1")
    token_ids, num, first = drafter_input.token_ids, drafter_input.num, drafter_input.first_position
    rows = lay_out_rows(token_ids, num, first, num_drafts, mask_token_of(config), widths)
    hidden = _slot_hidden(params, config, drafter_input, rows)
    output_rows = jnp.where(jnp.arange(num_drafts, dtype=jnp.int32)[None, :] < widths[:, None], rows.draft_rows, -1)
    x, cache = _cached_pass(params, config, rows.token_ids, hidden, rows.positions, cache, groups, output_rows)
    return head(params, config, x, output_rows), cache


def propose_in_turn(
    params: DrafterParams,
    config: DrafterConfig,
    drafter_input: DrafterInput,
    widths: Int[Array, " B"],
    cache: PagedCache,
    groups: Sequence[CacheGroup],
    num_drafts: int,
    choose: Choose = likeliest_of,
) -> tuple[Chosen, PagedCache]:
    """Propose K drafts in K passes; return (drafts as ids of the target's vocabulary with confidence, the cache).

    The first pass covers the committed rows, each later pass the draft before; the last draft needs no row. The row at
    first_position + num - 1 + i, i >= 1, is (embedding of draft i-1, `next_input` of the row before) and predicts
    draft i. The cache and inactive sequences are as in `propose`.
    """
    if num_drafts < 1:
        raise ValueError(f"{num_drafts} drafts; expected K >= 1")
    num, first = drafter_input.num, drafter_input.first_position
    rows = lay_out_rows(drafter_input.token_ids, num, first, 1, 0)  # for one draft: no mask slots
    real = jnp.where(rows.committed, 0, -1)
    hidden = project_aux(params, config, drafter_input.aux_hidden.astype(params.dtype), real)
    drafts, confidence = [], []
    token_ids, positions = rows.token_ids, rows.positions
    output_rows: jax.Array | None = jnp.where(widths[:, None] > 0, rows.draft_rows, -1)
    for number in range(num_drafts):
        x, cache = _cached_pass(params, config, token_ids, hidden, positions, cache, groups, output_rows)
        needed = jnp.where(first >= 0, widths, 0)[:, None] > number
        logits = head(params, config, x, jnp.where(needed, 0, -1))
        index, probability = choose(logits, params.draft_to_target, number)
        drafts.append(to_target_ids(params, index))
        confidence.append(probability)
        token_ids, hidden, output_rows = drafts[-1], next_input(params, config, x), None
        positions = jnp.where(widths > number + 1, jnp.where(first < 0, -1, first + num + number), -1)[:, None]
    probabilities = [probability for probability in confidence if probability is not None]
    chosen = jnp.concatenate(drafts, axis=1), jnp.concatenate(probabilities, axis=1) if probabilities else None
    return chosen, cache


def next_input(params: DrafterParams, config: DrafterConfig, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Turn the last layer's output into the hidden state that an EAGLE-3 drafter's next pass reads."""
    return rms_norm(x, params.norm, config.rms_norm_eps) if config.norm_output else x


def to_target_ids(params: DrafterParams, draft_ids: Int[Array, "B K"]) -> Int[Array, "B K"]:
    """Map ids of the draft vocabulary to ids of the target's; NO_TOKEN stays."""
    if params.draft_to_target is None:
        return draft_ids
    return jnp.where(draft_ids < 0, draft_ids, params.draft_to_target[jnp.maximum(draft_ids, 0)])


def mask_token_of(config: DrafterConfig) -> int:
    """Return the token of mask slots. Raises ValueError for an EAGLE-3 drafter."""
    if config.mask_token_id is None:
        raise ValueError("an EAGLE-3 drafter has no mask slots; it proposes in turn")
    return config.mask_token_id


def mask_slots(params: DrafterParams, config: DrafterConfig) -> Float[Array, "M D"]:
    assert params.mask_hidden is not None
    return project_aux(params, config, params.mask_hidden[None])[0]


def _cached_pass(
    params: DrafterParams,
    config: DrafterConfig,
    token_ids: Int[Array, "B T"],
    hidden: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    cache: PagedCache,
    groups: Sequence[CacheGroup],
    output_rows: Int[Array, "B K"] | None = None,
) -> tuple[Float[Array, "B t D"], PagedCache]:
    """Write the rows to the cache, then let each row attend up to its own position.

    Returns (residual stream of the output rows, by default of all; the cache).
    """
    attend, written = attend_to(params, config, cache, groups, positions)
    x = run_layers(params, config, token_ids, hidden, positions, attend, output_rows)
    return x, written()


def attend_to(
    params: DrafterParams,
    config: DrafterConfig,
    cache: PagedCache,
    groups: Sequence[CacheGroup],
    positions: Int[Array, "B T"],
    until: Int[Array, "B T"] | None = None,
) -> tuple[Attend, Callable[[], PagedCache]]:
    """Call `attend_paged` for a drafter's layers."""
    windows = [config.window(layer) for layer in range(config.num_layers)]
    implementation = params.implementation
    return attend_paged(cache, groups, windows, positions, config.num_heads, until=until, implementation=implementation)


def _slot_hidden(params: DrafterParams, config: DrafterConfig, drafter_input: DrafterInput, rows: Rows) -> jax.Array:
    """Project aux_hidden in committed rows and mask_hidden elsewhere [B, T, D], reading fc once."""
    assert params.mask_hidden is not None
    batch, width, aux_width = drafter_input.aux_hidden.shape
    masks = params.mask_hidden.shape[0]
    mask_hidden = jnp.broadcast_to(params.mask_hidden[None], (batch, masks, aux_width))
    aux_hidden = jnp.concatenate([drafter_input.aux_hidden.astype(params.dtype), mask_hidden], axis=1)
    real = jnp.pad(jnp.where(rows.committed[:, :width], 0, -1), ((0, 0), (0, masks)))
    hidden = project_aux(params, config, aux_hidden, real)
    # committed row r reads projection r; mask slot m reads projection F + m, or the last one if there are fewer
    row = jnp.arange(rows.committed.shape[1], dtype=jnp.int32)[None, :]
    source = jnp.where(rows.committed, row, width + jnp.clip(row - drafter_input.num[:, None], 0, masks - 1))
    return jnp.take_along_axis(hidden, source[:, :, None], axis=1)


def project_aux(
    params: DrafterParams,
    config: DrafterConfig,
    aux_hidden: Float[Array, "B T A"],
    positions: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """Project aux_hidden (or mask_hidden) by fc, after the config's norm, if any. Ignore rows of negative position."""
    if config.aux_norm is not None and params.aux_norm is not None:
        groups = config.num_taps if config.aux_norm == "per_tap" else 1
        parts, weights = jnp.split(aux_hidden, groups, axis=-1), jnp.split(params.aux_norm, groups)
        normed = [rms_norm(part, weight, config.rms_norm_eps) for part, weight in zip(parts, weights, strict=True)]
        aux_hidden = jnp.concatenate(normed, axis=-1)
    return linear(aux_hidden, params.fc, positions=positions, implementation=params.implementation)


def run_layers(
    params: DrafterParams,
    config: DrafterConfig,
    token_ids: jax.Array,
    hidden: jax.Array,
    positions: jax.Array,
    attend: Attend,
    output_rows: Int[Array, "B K"] | None = None,
) -> jax.Array:
    """Return the residual stream after the last layer [B, T, D], from each row's token and fc output.

    output_rows: return only these rows [B, K, D]; of the others the last layer computes only keys and values. Ignore
    the result of a negative index.
    """
    eps = config.rms_norm_eps
    product = functools.partial(linear, implementation=params.implementation)
    cos, sin = rope_tables(config.rope, positions, hidden.dtype, implementation=params.implementation)
    x = hidden
    for index, p in enumerate(params.layers):
        if p.hidden_norm is None:
            qkv = product(x, p.qkv, p.qkv_bias, norm=Norm(p.norm, eps), positions=positions)
        else:
            normed = rms_norm(x, p.hidden_norm, eps)
            embedded = rms_norm(embed(params.embedding, token_ids, hidden.dtype), p.norm, eps)
            qkv = product(jnp.concatenate([embedded, normed], axis=-1), p.qkv, p.qkv_bias, positions=positions)
            x = normed if config.norm_before_residual else x
        out = attend(index, norm_heads(qkv, p, config), cos, sin)
        if output_rows is not None and index == len(params.layers) - 1:
            taken = jnp.maximum(output_rows, 0)
            out, x = (jnp.take_along_axis(rows, taken[:, :, None], axis=1) for rows in (out, x))
            positions = jnp.where(output_rows < 0, -1, jnp.take_along_axis(positions, taken, axis=1))
        x = product(out, p.out, p.out_bias, residual=x, positions=positions)
        x = feed_forward(p, x, eps, positions, params.implementation)
    return x


def feed_forward(
    p: LayerParams,
    x: Float[Array, "B T D"],
    eps: float,
    positions: Int[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T D"]:
    product = functools.partial(linear, positions=positions, implementation=implementation)
    gate, up = jnp.split(product(x, p.gate_up, p.gate_up_bias, norm=Norm(p.mlp_norm, eps)), 2, axis=-1)
    return product(jax.nn.silu(gate) * up, p.down, p.down_bias, residual=x)


def norm_heads(qkv: jax.Array, p: LayerParams, config: DrafterConfig) -> jax.Array:
    if p.query_norm is None or p.key_norm is None:
        return qkv
    heads = qkv.reshape(*qkv.shape[:-1], -1, config.head_dim)
    cuts = (config.num_heads, config.num_heads + config.num_kv_heads)
    query, key, value = jnp.split(heads, cuts, axis=-2)
    eps = config.rms_norm_eps
    normed = (rms_norm(query, p.query_norm, eps), rms_norm(key, p.key_norm, eps), value)
    return jnp.concatenate(normed, axis=-2).reshape(qkv.shape)


def head(
    params: DrafterParams,
    config: DrafterConfig,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T U"]:
    """Compute the logits over the draft vocabulary. Ignore rows of negative position."""
    norm = Norm(params.norm, config.rms_norm_eps)
    return linear(x, params.lm_head, norm=norm, positions=positions, implementation=params.implementation)
