"""P-EAGLE and EAGLE-3: one stack of layers, and the ways through it.

    forward           no cache: rows (anchor, depth) under the group-causal mask (references)
    prefill           a prompt's rows into empty caches, at a padded length; no logits
    absorb            rows committed since, or the next chunk of a prompt, written to the caches; no logits
    propose           the rows committed last and K-1 mask slots, written to the caches, then attended: P-EAGLE
    propose_in_turn   the rows committed last, then K-1 passes of one row, each of the draft before it: EAGLE-3

Positions do not shift, tokens do: row p is (embedding of token[p+1], fc(aux_hidden[p])) at RoPE position p, and
predicts token[p+2]. A mask slot is (embedding of the mask token, fc(mask_hidden)); the row of a draft is (its
embedding, what the layers made of the row before). All run `run_layers`; they differ in what attention reads, which
each passes in as `attend`.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from drafter.config import DrafterConfig
from drafter.params import DrafterParams
from peagle.ops.attention import attend_rows, attention, decode_attention, split_heads
from peagle.ops.kv_cache import KVCache, init_kv_cache, write_kv
from peagle.ops.likeliest import likeliest
from peagle.ops.linear import embed, linear
from peagle.ops.mask import group_causal_mask
from peagle.ops.messages import Fresh
from peagle.ops.norm import Norm, rms_norm
from peagle.ops.rope import rope_tables

# (layer, query, key, value) -> attention output [B, T, N, H]
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
# (layer, qkv [B, T, (N + 2G) H], cos, sin) -> attention output [B, T, N H]
AttendProjected = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


@flax.struct.dataclass
class Rows:
    """What one proposing pass computes, row by row (`lay_out_rows`)."""

    token_ids: jax.Array  # [B, T], T = F+K-1
    positions: jax.Array  # [B, T]; -1 in padding, and in an inactive sequence
    committed: jax.Array  # [B, T] bool: rows with a true aux hidden; the others are mask slots or padding
    draft_rows: jax.Array  # [B, K]: the row that gives draft i


def forward(
    params: DrafterParams,
    config: DrafterConfig,
    token_ids: Int[Array, "B T"],
    aux_hidden: Float[Array, "B T A"],
    anchor: Int[Array, "B T"],
    depth: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T U"]:
    """A P-EAGLE drafter's logits over the draft vocabulary of every row (anchor, depth), without a cache, under
    `group_causal_mask`.

    A row of depth 0 at anchor p carries token[p+1] and aux_hidden[p]; whatever a row of depth > 0 carries is replaced
    by the mask token and mask_hidden. Row (p, d) stands at RoPE position p + d and predicts token[p + d + 2]. Rows of
    negative anchor are padding. Segments, if given, do not see one another (anchors may repeat across them).
    """
    mask = group_causal_mask(anchor, depth)
    if segment_ids is not None:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:  # noqa: ARG001
        return attention(query, key, value, mask)

    masked = depth > 0
    token_ids = jnp.where(masked, mask_token_of(config), token_ids)
    slots = mask_slots(params, config)[jnp.clip(depth - 1, 0, config.num_mask_hiddens - 1)]
    hidden = jnp.where(masked[:, :, None], slots, project_taps(params, config, aux_hidden.astype(params.dtype)))
    x = run_layers(params, config, token_ids, hidden, anchor + depth, rotated(config, attend))
    return _logits(params, config, x)


def init_caches(config: DrafterConfig, batch: int, capacity: int, dtype: DTypeLike) -> tuple[KVCache, ...]:
    """Empty full caches, one per layer. The capacity must hold the widest write: 2K positions from the highest first
    position on; rows beyond it would be dropped and not seen."""
    return tuple(
        init_kv_cache(batch, capacity, config.num_kv_heads, config.head_dim, dtype) for _ in range(config.num_layers)
    )


def prefill(
    params: DrafterParams,
    config: DrafterConfig,
    token_ids: Int[Array, "B T"],
    aux_hidden: Float[Array, "B T A"],
    lengths: Int[Array, " B"],
    caches: tuple[KVCache, ...],
) -> tuple[KVCache, ...]:
    """The caches holding rows 0..length-1 of each sequence. They must be empty.

    token_ids are already shifted: row p is (token[p+1], aux_hidden[p]). Rows from `lengths` on are padding: inactive
    and never written. Example: of a prompt of P tokens rows 0..P-2 are written (length P-1); row P-1 needs the first
    sampled token and comes with the first `propose`.
    """
    width = token_ids.shape[1]
    index = jnp.arange(width, dtype=jnp.int32)[None, :]
    positions = jnp.where(index < lengths[:, None], index, -1)
    written = list(caches)

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        written[layer] = write_kv(caches[layer], key, value, positions)
        return attend_rows(query, key, value, positions, native=params.native)

    # what the last layer does after its keys and values is not used, so a compiled prefill does not contain it
    hidden = project_taps(params, config, aux_hidden.astype(params.dtype))
    run_layers(params, config, token_ids, hidden, positions, rotated(config, attend))
    return tuple(written)


def absorb(
    params: DrafterParams,
    config: DrafterConfig,
    token_ids: Int[Array, "B T"],
    aux_hidden: Float[Array, "B T A"],
    positions: Int[Array, "B T"],
    caches: tuple[KVCache, ...],
) -> tuple[KVCache, ...]:
    """Write committed rows to the caches, behind those that they hold; nothing is proposed.

    token_ids are already shifted: the row at position p is (token[p+1], aux_hidden[p]). Rows of negative position are
    inactive and never written. Example: of a prompt of P tokens rows 0..P-2 can be written; row P-1 needs the first
    sampled token and comes with the first `propose`.
    """
    # what the last layer does after its keys and values is not used, so a compiled program does not contain it
    hidden = project_taps(params, config, aux_hidden.astype(params.dtype), positions)
    no_gap = jnp.zeros(positions.shape[:1], jnp.int32)
    return _cached_pass(params, config, token_ids, hidden, positions, no_gap, caches)[1]


def lay_out_rows(
    fresh_token_ids: Int[Array, "B F"],
    num_fresh: Int[Array, " B"],
    first_position: Int[Array, " B"],
    num_drafts: int,
    mask_token_id: int,
    widths: Int[Array, " B"] | None = None,
) -> Rows:
    """The F+K-1 rows of one proposing pass: C = num_fresh committed rows, K-1 mask slots, padding, at consecutive
    positions. Draft i is read from row C-1+i. With F = K+1, what one step commits at most, that is 2K rows. If widths
    are given, row b proposes widths[b] <= K drafts: its further mask slots are padding, too.

    Example (the rows of vLLM's own test; K = 3, mask id M): C = 3 fresh rows 11 12 100 from position 5, and C = 4,
    21 22 23 200, from 10:

        row          0    1    2    3    4    5
        token_ids    11   12   100  M    M    (M)      draft_rows 2 3 4; row 5 is padding
        positions    5    6    7    8    9    -1
        token_ids    21   22   23   200  M    M        draft_rows 3 4 5
        positions    10   11   12   13   14   15

    A padding row is inactive: it has no position, and writes nothing. The mask slots' cache entries are written over
    before they are read: a query sees what lies before it, and all that lies between the committed rows and it is
    written by its own pass.
    """
    width = fresh_token_ids.shape[1] + num_drafts - 1
    row = jnp.arange(width, dtype=jnp.int32)[None, :]
    committed = row < num_fresh[:, None]
    first_position = first_position[:, None]
    num_masks = num_drafts - 1 if widths is None else jnp.maximum(widths - 1, 0)[:, None]
    active = (first_position >= 0) & (row < num_fresh[:, None] + num_masks)
    padded = jnp.pad(fresh_token_ids, ((0, 0), (0, width - fresh_token_ids.shape[1])))
    draft = jnp.arange(num_drafts, dtype=jnp.int32)[None, :]
    return Rows(
        token_ids=jnp.where(committed, padded, mask_token_id),
        positions=jnp.where(active, first_position + row, -1),
        committed=committed,
        draft_rows=jnp.maximum(num_fresh[:, None] - 1, 0) + draft,
    )


def propose(
    params: DrafterParams,
    config: DrafterConfig,
    fresh: Fresh,
    num_held: Int[Array, " B"],
    caches: tuple[KVCache, ...],
    num_drafts: int,
    widths: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B K U"], tuple[KVCache, ...]]:
    """(logits of the K drafts over the draft vocabulary, caches), in one pass of F+K-1 rows.

    The caches hold num_held rows, in their first slots: rows 0..first_position-1, or fewer where some in the middle
    were never given. Afterwards they hold those and the fresh rows, and what lies behind is dead (`lay_out_rows`):
    nothing has to be taken back when drafts are rejected. Draft i predicts token[first_position + num + 1 + i]. A
    sequence of negative first_position is inactive: it writes nothing and its logits mean nothing. If widths are given,
    row b is asked for widths[b] <= K drafts: the logits of further ones mean nothing.
    """
    if num_drafts < 1:
        raise ValueError(f"{num_drafts} drafts; expected K >= 1")
    rows = lay_out_rows(fresh.token_ids, fresh.num, fresh.first_position, num_drafts, mask_token_of(config), widths)
    hidden = _slot_hidden(params, config, fresh, rows)
    gap = num_held - fresh.first_position
    wanted, asked = rows.draft_rows, None
    if widths is not None:
        asked = jnp.where(jnp.arange(num_drafts, dtype=jnp.int32)[None, :] < widths[:, None], 0, -1)
        wanted = jnp.where(asked < 0, -1, wanted)
    x, caches = _cached_pass(params, config, rows.token_ids, hidden, rows.positions, gap, caches, wanted)
    return _logits(params, config, x, asked), caches


def propose_in_turn(
    params: DrafterParams,
    config: DrafterConfig,
    fresh: Fresh,
    num_held: Int[Array, " B"],
    caches: tuple[KVCache, ...],
    num_drafts: int,
    widths: Int[Array, " B"] | None = None,
) -> tuple[Int[Array, "B K"], Float[Array, "B K"], tuple[KVCache, ...]]:
    """(drafts, ids of the target's vocabulary; the drafter's probability of each; caches): a pass over the fresh rows,
    then one over each draft but the last. Everything else is as `propose` says.

    Row first_position + num - 1 + i, i >= 1, is (embedding of draft i-1, what came out of the row before) and
    gives draft i.
    """
    if num_drafts < 1:
        raise ValueError(f"{num_drafts} drafts; expected K >= 1")
    # without mask slots: a layout of one draft
    rows = lay_out_rows(fresh.token_ids, fresh.num, fresh.first_position, 1, 0)
    real = jnp.where(rows.committed, 0, -1)
    hidden = project_taps(params, config, fresh.aux_hidden.astype(params.dtype), real)
    gap, drafts, confidence = num_held - fresh.first_position, [], []
    token_ids, positions = rows.token_ids, rows.positions
    widest = jnp.full_like(fresh.num, num_drafts) if widths is None else widths
    asked = jnp.where(fresh.first_position < 0, 0, widest)[:, None]
    wanted: jax.Array | None = jnp.where(asked > 0, rows.draft_rows, -1)
    for number in range(num_drafts):
        x, caches = _cached_pass(params, config, token_ids, hidden, positions, gap, caches, wanted)
        ids, probability = likeliest(_logits(params, config, x, jnp.where(asked > number, 0, -1)))
        drafts.append(to_target_ids(params, ids))
        confidence.append(probability)
        token_ids, hidden, wanted = drafts[-1], fed_back(params, config, x), None
        following = (fresh.first_position + fresh.num + number)[:, None]
        positions = jnp.where(asked > number + 1, following, -1)
    return jnp.concatenate(drafts, axis=1), jnp.concatenate(confidence, axis=1), caches


def fed_back(params: DrafterParams, config: DrafterConfig, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """What an EAGLE-3 drafter's next pass reads, of what came out of the layers."""
    return rms_norm(x, params.norm, config.rms_norm_eps) if config.norm_output else x


def to_target_ids(params: DrafterParams, draft_ids: Int[Array, "B K"]) -> Int[Array, "B K"]:
    """Ids of the target's vocabulary for ids of the draft vocabulary; NO_TOKEN, which is negative, stays."""
    if params.draft_to_target is None:
        return draft_ids
    return jnp.where(draft_ids < 0, draft_ids, params.draft_to_target[jnp.maximum(draft_ids, 0)])


def mask_token_of(config: DrafterConfig) -> int:
    """The token of a P-EAGLE drafter's mask slots. Raises ValueError for a drafter that has none."""
    if config.mask_token_id is None:
        raise ValueError("an EAGLE-3 drafter has no mask slots; it proposes in turn")
    return config.mask_token_id


def mask_slots(params: DrafterParams, config: DrafterConfig) -> Float[Array, "M D"]:
    """fc of every mask_hidden."""
    assert params.mask_hidden is not None
    return project_taps(params, config, params.mask_hidden[None])[0]


def _cached_pass(
    params: DrafterParams,
    config: DrafterConfig,
    token_ids: Int[Array, "B T"],
    hidden: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    gap: Int[Array, " B"],
    caches: tuple[KVCache, ...],
    wanted: Int[Array, "B K"] | None = None,
) -> tuple[Float[Array, "B t D"], tuple[KVCache, ...]]:
    """(residual stream of the wanted rows, or of all; caches with the rows written): each row sees what the caches hold
    up to it. Its slot is its position + gap: its place among the rows held, since keys carry their rotation."""
    slots = jnp.where(positions < 0, -1, positions + gap[:, None])
    written = list(caches)

    def attend(layer: int, qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        out, written[layer] = decode_attention(
            qkv, cos, sin, caches[layer], slots, config.num_heads, native=params.native, xla=params.xla
        )
        return out

    x = run_layers(params, config, token_ids, hidden, positions, attend, wanted)
    return x, tuple(written)


def _slot_hidden(params: DrafterParams, config: DrafterConfig, fresh: Fresh, rows: Rows) -> jax.Array:
    """fc of the true aux hiddens in committed rows and of mask_hidden elsewhere [B, T, D], reading fc once."""
    assert params.mask_hidden is not None
    batch, width, aux_width = fresh.aux_hidden.shape
    masks = params.mask_hidden.shape[0]
    mask_hidden = jnp.broadcast_to(params.mask_hidden[None], (batch, masks, aux_width))
    aux_hidden = jnp.concatenate([fresh.aux_hidden.astype(params.dtype), mask_hidden], axis=1)
    wanted = jnp.pad(jnp.where(rows.committed[:, :width], 0, -1), ((0, 0), (0, masks)))
    hidden = project_taps(params, config, aux_hidden, wanted)
    # row r reads fresh row r; the mask slots those behind them, one after the other as far as there are different ones
    row = jnp.arange(rows.committed.shape[1], dtype=jnp.int32)[None, :]
    source = jnp.where(rows.committed, row, width + jnp.clip(row - fresh.num[:, None], 0, masks - 1))
    return jnp.take_along_axis(hidden, source[:, :, None], axis=1)


def project_taps(
    params: DrafterParams,
    config: DrafterConfig,
    aux_hidden: Float[Array, "B T A"],
    positions: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """fc of the taps, normalised first where the config says so. mask_hidden takes the same way. Rows of negative
    position, where positions are given, mean nothing."""
    if config.aux_norm is not None and params.aux_norm is not None:
        groups = config.num_taps if config.aux_norm == "per_tap" else 1
        taps, weights = jnp.split(aux_hidden, groups, axis=-1), jnp.split(params.aux_norm, groups)
        normed = [rms_norm(tap, weight, config.rms_norm_eps) for tap, weight in zip(taps, weights, strict=True)]
        aux_hidden = jnp.concatenate(normed, axis=-1)
    return linear(aux_hidden, params.fc, positions=positions)


def rotated(config: DrafterConfig, attend: Attend) -> AttendProjected:
    """The same on projections that are still side by side and not yet rotated."""

    def projected(layer: int, qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        query, key, value = split_heads(qkv, config.num_heads, config.num_kv_heads, cos, sin)
        return attend(layer, query, key, value).reshape(*qkv.shape[:2], -1)

    return projected


def run_layers(
    params: DrafterParams,
    config: DrafterConfig,
    token_ids: jax.Array,
    hidden: jax.Array,
    positions: jax.Array,
    attend: AttendProjected,
    wanted: Int[Array, "B K"] | None = None,
) -> jax.Array:
    """Residual stream after the last layer [B, T, D], from the tokens and fc's output for each row; of the `wanted`
    rows alone [B, K, D], where some are named: of the others the last layer needs only keys and values. A wanted row of
    negative index means nothing."""
    eps = config.rms_norm_eps
    cos, sin = rope_tables(config.rope, positions, hidden.dtype, native=params.native)
    x = hidden
    for index, p in enumerate(params.layers):
        if p.hidden_norm is None:
            qkv = linear(x, p.qkv, p.qkv_bias, norm=Norm(p.norm, eps), positions=positions)
        else:
            normed = rms_norm(x, p.hidden_norm, eps)
            embedded = rms_norm(embed(params.embedding, token_ids, hidden.dtype), p.norm, eps)
            qkv = linear(jnp.concatenate([embedded, normed], axis=-1), p.qkv, p.qkv_bias, positions=positions)
            x = normed if config.norm_before_residual else x
        out = attend(index, qkv, cos, sin)
        if wanted is not None and index == len(params.layers) - 1:
            taken = jnp.maximum(wanted, 0)
            out, x = (jnp.take_along_axis(rows, taken[:, :, None], axis=1) for rows in (out, x))
            positions = jnp.where(wanted < 0, -1, jnp.take_along_axis(positions, taken, axis=1))
        x = linear(out, p.out, p.out_bias, residual=x, positions=positions)
        gate, up = jnp.split(
            linear(x, p.gate_up, p.gate_up_bias, norm=Norm(p.mlp_norm, eps), positions=positions), 2, axis=-1
        )
        x = linear(jax.nn.silu(gate) * up, p.down, p.down_bias, residual=x, positions=positions)
    return x


def _logits(
    params: DrafterParams, config: DrafterConfig, x: jax.Array, positions: jax.Array | None = None
) -> jax.Array:
    return linear(x, params.lm_head, norm=Norm(params.norm, config.rms_norm_eps), positions=positions)
