"""A reference drafter in NumPy float64, without a cache, for parity tests.

It shares no code with model.py or the loader: it reads a checkpoint's tensors as stored (output dimension first), and
is written from the models' descriptions (arXiv 2602.01469, 2602.06036; checkpoint layouts as vLLM and speculators read
them). Heads and rows are loops, so that no axis can be confused with another.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from drafter.config import DrafterConfig
from peagle.ops.rope import Yarn

Tensors = Mapping[str, np.ndarray]


def draft_logits(
    tensors: Tensors, config: DrafterConfig, token_ids: Sequence[int], aux_hidden: np.ndarray, num_drafts: int
) -> np.ndarray:
    """Compute the logits [K, U] of the K drafts that follow token_ids [n+1].

    aux_hidden is [n, A], n >= 1: the last token has none yet. Rows 0..n-1 are (token[p+1], fc of aux_hidden[p]). Rows
    n..n+K-2 are K-1 mask slots (P-EAGLE), or, one after the other, (the best draft of the row before, that row's last
    hidden state) (EAGLE-3). Each row attends to the rows up to itself, with a window of W only to the last W of them.
    Rows n-1..n+K-2 predict the drafts: draft i is token n+1+i. DFlash: see `_block_logits`.
    """
    known = len(token_ids) - 1
    if len(aux_hidden) != known or known < 1:
        raise ValueError(
            f"{len(aux_hidden)} rows of aux_hidden for {known + 1} tokens; expected one less than tokens, at least one"
        )
    if config.block_size is not None:
        return _block_logits(tensors, config, token_ids[-1], aux_hidden, num_drafts)
    rows = [(int(token), projected(tensors, config, aux)) for token, aux in zip(token_ids[1:], aux_hidden, strict=True)]
    if config.mask_token_id is not None:
        masks = tensors["mask_hidden"].reshape(-1, config.aux_width)
        rows += [
            (config.mask_token_id, projected(tensors, config, masks[min(slot, len(masks) - 1)]))
            for slot in range(num_drafts - 1)
        ]
        return _causal(tensors, config, rows)[0][known - 1 :]
    draft_logits: list[np.ndarray] = []
    while len(draft_logits) < num_drafts:
        logits, hidden = _causal(tensors, config, rows)
        draft_logits.append(logits[-1])
        best = int(logits[-1].argmax())
        token = best + int(tensors["d2t"][best]) if "d2t" in tensors else best
        last = _rms(hidden[-1], tensors["norm.weight"], config.rms_norm_eps) if config.norm_output else hidden[-1]
        rows.append((token, last))
    return np.stack(draft_logits)


def draft_ids(
    tensors: Tensors, config: DrafterConfig, token_ids: Sequence[int], aux_hidden: np.ndarray, num_drafts: int
) -> np.ndarray:
    best = draft_logits(tensors, config, token_ids, aux_hidden, num_drafts).argmax(axis=-1)
    return best + tensors["d2t"][best] if "d2t" in tensors else best


def _block_logits(
    tensors: Tensors, config: DrafterConfig, pending: int, aux_hidden: np.ndarray, num_drafts: int
) -> np.ndarray:
    """Compute the logits [K, V] of a DFlash drafter: of the first K of the B - 1 mask slots after the pending token.

    Rows 0..n-1 are the context, the normalised fc of aux_hidden, the same in every layer; rows n..n+B-1 are the block.
    Each row of the block attends to all rows, with a window of W only to the W-1 rows before it and all later ones. The
    embedding and the head are the target's.
    """
    weights = {name: np.asarray(value).astype(np.float64) for name, value in tensors.items()}
    eps, known = config.rms_norm_eps, len(aux_hidden)
    context = np.stack([projected(tensors, config, aux) for aux in aux_hidden])
    context = _rms(context, weights["hidden_norm.weight"], eps)
    assert config.block_size is not None
    hidden = weights["embed_tokens.weight"][[int(pending)] + [config.mask_token_id] * (config.block_size - 1)]
    rows = list(range(known + config.block_size))
    visible = [[row] for row in rows[:known]] + [rows] * config.block_size  # context rows are not used as queries
    for layer in range(config.num_layers):
        name = f"layers.{layer}"
        read = np.concatenate([context, _rms(hidden, weights[f"{name}.input_layernorm.weight"], eps)])
        attended = _attend(weights, f"{name}.self_attn", config, read, rows, visible, config.window(layer))
        hidden = _feed_forward(weights, name, config, hidden + attended[known:])
    return _apply(weights, "lm_head", _rms(hidden[1 : num_drafts + 1], weights["norm.weight"], eps))


def _causal(
    tensors: Tensors, config: DrafterConfig, rows: Sequence[tuple[int, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    visible = [list(range(row + 1)) for row in range(len(rows))]
    return row_outputs(tensors, config, rows, list(range(len(rows))), visible)


def projected(tensors: Tensors, config: DrafterConfig, aux_hidden: np.ndarray) -> np.ndarray:
    weights = {name: np.asarray(value).astype(np.float64) for name, value in tensors.items() if "norm" in name}
    out: np.ndarray = tensors["fc.weight"].astype(np.float64) @ _normed_aux(weights, config, aux_hidden)
    return out


def row_outputs(
    tensors: Tensors,
    config: DrafterConfig,
    rows: Sequence[tuple[int, np.ndarray]],
    positions: Sequence[int],
    visible: Sequence[Sequence[int]],
) -> tuple[np.ndarray, np.ndarray]:
    """Compute (logits [T, U], residual stream after the last layer [T, D]) of rows at RoPE positions.

    A row is (token, hidden state that layer 0 reads); it attends to the rows that `visible` lists.
    """
    weights = {name: np.asarray(value).astype(np.float64) for name, value in tensors.items() if name != "t2d"}
    eps = config.rms_norm_eps
    hidden = np.stack([np.asarray(state, np.float64) for _, state in rows])
    for layer in range(config.num_layers):
        name = "midlayer" if f"layers.{layer}.input_layernorm.weight" not in weights else f"layers.{layer}"
        if layer == 0:
            embedding = weights["embed_tokens.weight"][[token for token, _ in rows]]
            normed = _rms(hidden, weights[f"{name}.hidden_norm.weight"], eps)
            read = np.concatenate([_rms(embedding, weights[f"{name}.input_layernorm.weight"], eps), normed], axis=-1)
            residual = normed if config.norm_before_residual else hidden
        else:
            read = _rms(hidden, weights[f"{name}.input_layernorm.weight"], eps)
            residual = hidden
        window = config.window(layer)
        attended = residual + _attend(weights, f"{name}.self_attn", config, read, positions, visible, window)
        hidden = _feed_forward(weights, name, config, attended)
    return _apply(weights, "lm_head", _rms(hidden, weights["norm.weight"], eps)), hidden


def _feed_forward(weights: Tensors, name: str, config: DrafterConfig, hidden: np.ndarray) -> np.ndarray:
    read = _rms(hidden, weights[f"{name}.post_attention_layernorm.weight"], config.rms_norm_eps)
    gate, up = _apply(weights, f"{name}.mlp.gate_proj", read), _apply(weights, f"{name}.mlp.up_proj", read)
    out: np.ndarray = hidden + _apply(weights, f"{name}.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
    return out


def _normed_aux(weights: Tensors, config: DrafterConfig, aux: np.ndarray) -> np.ndarray:
    aux = np.asarray(aux, np.float64)
    if "input_norm.weight" in weights:
        return _rms(aux, weights["input_norm.weight"], config.rms_norm_eps)
    if "fc_norm.0.weight" in weights:
        parts = aux.reshape(config.num_aux_layers, -1)
        return np.concatenate(
            [_rms(part, weights[f"fc_norm.{i}.weight"], config.rms_norm_eps) for i, part in enumerate(parts)]
        )
    return aux


def _attend(
    weights: Tensors,
    name: str,
    config: DrafterConfig,
    read: np.ndarray,
    positions: Sequence[int],
    visible: Sequence[Sequence[int]],
    window: int | None,
) -> np.ndarray:
    width, per_kv_head = config.head_dim, config.num_heads // config.num_kv_heads
    query, key, value = (_apply(weights, f"{name}.{x}_proj", read) for x in "qkv")
    if f"{name}.q_norm.weight" in weights:
        query, key = (
            np.concatenate(
                [_rms(head, weights[f"{name}.{x}_norm.weight"], config.rms_norm_eps) for head in heads], axis=-1
            )
            for x, heads in (
                ("q", np.split(query, config.num_heads, -1)),
                ("k", np.split(key, config.num_kv_heads, -1)),
            )
        )
    frequencies, concentration = _frequencies(config), _concentration(config)
    out = np.zeros((len(read), config.num_heads * width))
    for head in range(config.num_heads):
        query_columns = slice(head * width, (head + 1) * width)
        kv_columns = slice(head // per_kv_head * width, (head // per_kv_head + 1) * width)
        queries = [
            concentration * _rotate(row[query_columns], p, frequencies) for row, p in zip(query, positions, strict=True)
        ]
        keys = [concentration * _rotate(row[kv_columns], p, frequencies) for row, p in zip(key, positions, strict=True)]
        for row, key_rows in enumerate(visible):
            in_window = [other for other in key_rows if window is None or positions[row] - positions[other] < window]
            scores = np.array([queries[row] @ keys[other] for other in in_window]) / math.sqrt(width)
            shares = np.exp(scores - scores.max())
            out[row, query_columns] = shares @ value[in_window, kv_columns] / shares.sum()
    return _apply(weights, f"{name}.o_proj", out)


def _rotate(vector: np.ndarray, position: int, frequencies: np.ndarray) -> np.ndarray:
    """Rotate pairs (x_i, x_{i + half}) by position * frequency_i, as complex numbers."""
    half = len(vector) // 2
    turned = (vector[:half] + 1j * vector[half:]) * np.exp(1j * position * frequencies)
    return np.concatenate([turned.real, turned.imag])


def _frequencies(config: DrafterConfig) -> np.ndarray:
    rope = config.rope
    plain = [rope.theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)]
    if rope.scaling is None:
        return np.array(plain)
    if isinstance(rope.scaling, Yarn):
        return np.array([_yarn(frequency, pair, config) for pair, frequency in enumerate(plain)])
    scaled = []
    for frequency in plain:
        turns = rope.scaling.original_length * frequency / (2 * math.pi)  # within the original context
        if turns < rope.scaling.low_freq_factor:
            scaled.append(frequency / rope.scaling.factor)
        elif turns > rope.scaling.high_freq_factor:
            scaled.append(frequency)
        else:
            span = rope.scaling.high_freq_factor - rope.scaling.low_freq_factor
            kept = (turns - rope.scaling.low_freq_factor) / span
            scaled.append((1 - kept) * frequency / rope.scaling.factor + kept * frequency)
    return np.array(scaled)


def _yarn(frequency: float, pair: int, config: DrafterConfig) -> float:
    """Scale a pair's frequency (arXiv 2309.00071): fast pairs keep it, slow pairs divide it by the factor."""
    yarn, theta = config.rope.scaling, config.rope.theta
    assert isinstance(yarn, Yarn)

    def pair_that_turns(times: float) -> float:
        """Return the pair, as a real number, whose wavelength fits `times` times into the original length."""
        return config.head_dim / 2 * math.log(yarn.original_length / (2 * math.pi * times)) / math.log(theta)

    first, last = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, config.head_dim - 1.0)
    slow = min(max((pair - first) / max(last - first, 1e-3), 0.0), 1.0)
    return frequency * ((1 - slow) + slow / yarn.factor)


def _concentration(config: DrafterConfig) -> float:
    """Return the factor of YaRN's cosines and sines; 1 for other RoPEs."""
    yarn = config.rope.scaling
    if not isinstance(yarn, Yarn):
        return 1.0
    return 0.1 * math.log(yarn.factor) + 1 if yarn.concentration is None else yarn.concentration


def _rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def _apply(weights: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out
