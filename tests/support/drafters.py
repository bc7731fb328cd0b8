"""Tiny drafters, pairwise distinct in every dimension, and texts for them."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drafter import reference
from drafter.config import DrafterConfig
from drafter.load import load_drafter, save_drafter, to_tensors
from drafter.params import DrafterParams, init_params
from drafter.propose import AnyDrafter, DFlash, Eagle3, PEagle, drafter_of
from peagle.ops.attention import MASKED, PagedCache
from peagle.ops.kernels import Implementation
from peagle.ops.linear import arrange, arrange_embedding
from peagle.ops.messages import DrafterInput, DraftOutput
from peagle.ops.rope import Llama3, RopeConfig, Yarn
from tests.support.paging import small_pages

LLAMA3 = Llama3(factor=4.0, original_length=24, low_freq_factor=1.0, high_freq_factor=4.0)


def _config(
    layers: int,
    heads: tuple[int, int, int],
    *,
    hidden: int,
    mlp: int,
    target: int,
    vocab: int,
    draft_vocab: int | None = None,
    mask: int | None = None,
    theta: float = 10000.0,
    scaling: Llama3 | Yarn | None = None,
    **more: Any,
) -> DrafterConfig:
    """Make a config. heads: (query heads, kv heads, width of a head)."""
    return DrafterConfig(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        mlp_width=mlp,
        target_hidden_size=target,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab or vocab,
        mask_token_id=mask,
        rope=RopeConfig(heads[2], theta, scaling),
        **more,
    )


CONFIGS = {
    "one layer, reduced vocabulary, llama3": _config(
        1, (6, 2, 8), hidden=20, mlp=28, target=12, vocab=61, draft_vocab=37, mask=60, scaling=LLAMA3,
        aux_layer_ids=(1, 4, 6),
    ),
    "two layers, norm before residual, biases": _config(
        2, (3, 3, 10), hidden=22, mlp=26, target=14, vocab=53, mask=3, theta=5000.0,
        num_aux_layers=2, aux_layer_ids=(0, 3), aux_norm="per_layer", norm_before_residual=True,
        attention_bias=True, mlp_bias=True,
    ),
    "four layers, one kv head": _config(
        4, (5, 1, 6), hidden=18, mlp=34, target=16, vocab=47, draft_vocab=29, mask=11,
        aux_norm="joint", rms_norm_eps=1e-5, max_positions=128,
    ),
    "two layers, a mask hidden for each depth": _config(
        2, (2, 1, 4), hidden=14, mlp=30, target=10, vocab=43, mask=2, num_mask_hiddens=3
    ),
    "EAGLE-3, one layer": _config(
        1, (4, 2, 6), hidden=16, mlp=22, target=12, vocab=59, draft_vocab=31, scaling=LLAMA3, aux_layer_ids=(2, 3, 5)
    ),
    "EAGLE-3, two layers, norm of the output": _config(
        2, (3, 1, 8), hidden=18, mlp=20, target=14, vocab=41,
        aux_norm="per_layer", norm_before_residual=True, norm_output=True,
    ),
    "three layers, a window in two": _config(
        3, (4, 2, 6), hidden=14, mlp=26, target=10, vocab=43, mask=2, windows=(9, None, 9)
    ),
    "EAGLE-3, a window": _config(
        1, (4, 2, 6), hidden=18, mlp=22, target=12, vocab=59, draft_vocab=31, scaling=LLAMA3, windows=(9,)
    ),
    "two layers, norms of queries and keys": _config(
        2, (6, 2, 10), hidden=22, mlp=26, target=14, vocab=53, draft_vocab=37, mask=3, theta=5000.0, qk_norm=True
    ),
}  # fmt: skip
ONE, TWO, FOUR, MASKS, EAGLE, EAGLE_NORMED, WINDOWS, EAGLE_WINDOW, HEADS_NORMED = CONFIGS

DFLASH_CONFIGS = {
    "DFlash, two layers, biases, YaRN": _config(
        2, (6, 2, 10), hidden=24, mlp=34, target=24, vocab=53, mask=3, theta=150000.0,
        scaling=Yarn(factor=8.0, original_length=16, truncate=False),
        num_aux_layers=2, aux_layer_ids=(0, 3), qk_norm=True, attention_bias=True,
        block_size=8, rms_norm_eps=1e-5, max_positions=131072,
    ),
    "DFlash, three layers, one kv head": _config(
        3, (5, 1, 6), hidden=18, mlp=28, target=18, vocab=47, mask=46,
        num_aux_layers=3, aux_layer_ids=(1, 4, 6), qk_norm=True, block_size=5, num_target_layers=8,
    ),
}  # fmt: skip
BIASED, PLAIN = DFLASH_CONFIGS
EVERY = CONFIGS | DFLASH_CONFIGS


@functools.cache
def random_params(config: DrafterConfig, seed: int = 0) -> DrafterParams:
    """Draw parameters far from neutral values: norms around one, biases around zero, a scattered draft vocabulary.

    Drawn by NumPy: compiling JAX's generator for each shape would take most of the tests' time."""
    shapes = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    rng = np.random.default_rng(seed)

    def draw(path: tuple[jax.tree_util.GetAttrKey, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path[-1:])
        if "mask_hidden" in name:
            values = rng.standard_normal(leaf.shape)
        elif leaf.ndim == 2:
            values = rng.standard_normal(leaf.shape) * leaf.shape[0] ** -0.5
        else:
            values = (1.0 if "norm" in name else 0.0) + 0.2 * rng.standard_normal(leaf.shape)
        return jnp.asarray(values, leaf.dtype)

    params = jax.tree_util.tree_map_with_path(draw, shapes.replace(draft_to_target=None))
    if shapes.draft_to_target is None:
        return params
    kept = rng.choice(config.vocab_size, config.draft_vocab_size, replace=False)
    return params.replace(draft_to_target=jnp.asarray(np.sort(kept), jnp.int32))


def drafter(name: str, with_logits: bool = False) -> PEagle:
    return PEagle(random_params(CONFIGS[name]), CONFIGS[name], with_logits)


def eagle3(name: str) -> Eagle3:
    return Eagle3(random_params(CONFIGS[name]), CONFIGS[name])


def dflash(name: str, with_logits: bool = False) -> DFlash:
    return DFlash(random_params(DFLASH_CONFIGS[name]), DFLASH_CONFIGS[name], with_logits)


def drafting(name: str) -> AnyDrafter:
    """Make a drafter that shows its logits, if its kind has any."""
    return _with_logits(drafter_of(random_params(EVERY[name]), EVERY[name]))


def _with_logits(drafter: AnyDrafter) -> AnyDrafter:
    return drafter if isinstance(drafter, Eagle3) else drafter.replace(with_logits=True)


def loaded(directory: Path, name: str, form: Implementation, dtype: Any = jnp.float32) -> AnyDrafter:
    """Write a drafter and load it; one that has its target's embedding and head takes them from beside the file."""
    config, params = EVERY[name], random_params(EVERY[name])
    save_drafter(directory / "drafter", params, config)
    ends = {}
    if config.kind == "DFlash":
        ends["target_embedding"] = arrange_embedding(np.asarray(params.embedding), dtype, form)
        ends["target_lm_head"] = arrange(np.asarray(params.lm_head).T, dtype, form)
    return _with_logits(drafter_of(*load_drafter(directory / "drafter", dtype, implementation=form, **ends)))


@functools.cache
def tensors_of(name: str) -> dict[str, np.ndarray]:
    """Return a drafter's tensors, with the embedding and the head of its target if it has none."""
    config, params = EVERY[name], random_params(EVERY[name])
    ends = {"embed_tokens.weight": np.asarray(params.embedding), "lm_head.weight": np.asarray(params.lm_head).T}
    return to_tensors(params, config) | (ends if config.kind == "DFlash" else {})


@dataclasses.dataclass(frozen=True)
class Text:
    """Tokens, each with its aux_hidden."""

    token_ids: np.ndarray  # [n]
    aux_hidden: np.ndarray  # [n, A]

    def fresh(self, first: int, num: int, num_drafts: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows first..first+num-1, then garbage up to K+1 rows."""
        width = num_drafts + 1
        token_ids, aux = np.full(width, 7, np.int32), np.full((width, self.aux_hidden.shape[1]), 9.0, np.float32)
        token_ids[:num] = self.token_ids[first + 1 : first + 1 + num]
        aux[:num] = self.aux_hidden[first : first + num]
        return token_ids, aux


def random_text(config: DrafterConfig, seed: int, length: int = 64) -> Text:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, length).astype(np.int32)
    return Text(tokens, (1.5 * rng.standard_normal((length, config.aux_width))).astype(np.float32))


def stack_fresh(texts: Sequence[Text], firsts: Sequence[int], nums: Sequence[int], num_drafts: int) -> DrafterInput:
    """Stack one sequence per text: its rows first..first+num-1 (a negative first: inactive)."""
    rows = [t.fresh(max(first, 0), num, num_drafts) for t, first, num in zip(texts, firsts, nums, strict=True)]
    return DrafterInput(
        token_ids=jnp.asarray(np.stack([row[0] for row in rows])),
        aux_hidden=jnp.asarray(np.stack([row[1] for row in rows])),
        num=jnp.asarray(nums, jnp.int32),
        first_position=jnp.asarray(firsts, jnp.int32),
    )


def prompt_state(
    drafter: AnyDrafter,
    texts: Sequence[Text],
    lengths: Sequence[int],
    num_drafts: int,
    capacity: int | None = None,
) -> PagedCache:
    """Prefill each text's first `length` tokens in one padded batch of one width; return the state.

    The caches have room for 80 rows unless a capacity is given (fewer shapes, fewer compilations)."""
    width, widest = 32, 2 * num_drafts + 2
    capacity = 80 - widest if capacity is None else capacity
    tokens = np.stack(
        [np.where(np.arange(width) < n, t.token_ids[:width], 5) for t, n in zip(texts, lengths, strict=True)]
    )
    aux = np.stack([t.aux_hidden[:width] for t in texts])
    state = small_pages(drafter, len(texts), capacity, widest)
    return prefill(drafter, state, jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32), jnp.asarray(aux))


@jax.jit
def prefill(
    drafter: AnyDrafter, state: PagedCache, token_ids: jax.Array, lengths: jax.Array, aux_hidden: jax.Array
) -> PagedCache:
    """Write rows 0..length-2 of each padded prompt to the caches: row length-1 needs a token more."""
    index = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
    positions = jnp.where(index < lengths[:, None] - 1, index, -1)
    return drafter.absorb(state, jnp.roll(token_ids, -1, axis=1), aux_hidden, positions)


@functools.partial(jax.jit, static_argnames="num_drafts")
def propose(
    drafter: AnyDrafter,
    state: PagedCache,
    fresh: DrafterInput,
    *,
    num_drafts: int,
    widths: jax.Array | None = None,
) -> tuple[DraftOutput, PagedCache]:
    """Propose num_drafts drafts for every sequence, or as many as widths."""
    widths = jnp.full(fresh.num.shape, num_drafts, jnp.int32) if widths is None else widths
    return drafter.propose(state, fresh, widths, num_drafts)


def absorbed(
    drafter: AnyDrafter, state: PagedCache, texts: Sequence[Text], lengths: Sequence[int], chunk: int, absorbing: Any
) -> PagedCache:
    """Prefill the texts chunk by chunk; padding follows the rows."""
    for begin in range(0, max(lengths) - 1, chunk):
        index = np.arange(begin, begin + chunk)
        positions = np.stack([np.where(index < length - 1, index, -1) for length in lengths]).astype(np.int32)
        token_ids = np.stack([text.token_ids[index + 1] for text in texts])
        aux = np.stack([text.aux_hidden[index] for text in texts])
        state = absorbing(drafter, state, token_ids, aux, positions)
    return state


@dataclasses.dataclass(frozen=True)
class Step:
    known: list[int]  # rows of each text that have a true aux_hidden, and there is one token more; 0: inactive
    draft: DraftOutput


def run_steps(
    drafter: AnyDrafter,
    state: PagedCache,
    texts: Sequence[Text],
    lengths: Sequence[int],
    accepted: Sequence[Sequence[int | None]],
    num_drafts: int,
    proposing: Any = None,
) -> tuple[list[Step], PagedCache]:
    """Run steps that accept so many drafts of each text (None: it pauses from here on); return them and the state."""
    firsts, nums, steps = [length - 1 for length in lengths], [1] * len(lengths), []
    for counts in accepted:
        fresh = stack_fresh(texts, firsts, nums, num_drafts)
        draft, state = (proposing or propose)(drafter, state, fresh, num_drafts=num_drafts)
        known = [first + num if first >= 0 else 0 for first, num in zip(firsts, nums, strict=True)]
        steps.append(Step(known, draft))
        firsts = [-1 if count is None else rows for count, rows in zip(counts, known, strict=True)]
        nums = [1 if count is None else count + 1 for count in counts]
    return steps, state


def reference_logits(name: str, config: DrafterConfig, text: Text, known: int, num_drafts: int) -> np.ndarray:
    """Compute the float64 reference's logits of the drafts after so many rows of a text."""
    read = text.token_ids[: known + 1].tolist(), text.aux_hidden[:known]
    return reference.draft_logits(tensors_of(name), config, *read, num_drafts)


def assert_reference(
    name: str, config: DrafterConfig, texts: Sequence[Text], steps: Sequence[Step], num_drafts: int
) -> None:
    """Assert that steps have the float64 reference's drafts, and its logits if they show any: MASKED is what is not
    in the draft vocabulary."""
    offsets = tensors_of(name).get("d2t")
    for step in steps:
        for row, (text, known) in enumerate(zip(texts, step.known, strict=True)):
            if not known:
                continue
            expected = reference_logits(name, config, text, known, num_drafts)
            ids = np.arange(expected.shape[1]) + (0 if offsets is None else offsets)
            assert step.draft.token_ids[row].tolist() == ids[expected.argmax(-1)].tolist()
            if step.draft.logits is not None:
                logits = np.asarray(step.draft.logits[row])
                np.testing.assert_allclose(logits[:, ids], expected, atol=1e-4)
                assert (np.delete(logits, ids, axis=1) == MASKED).all()


def logits_of(draft: DraftOutput) -> np.ndarray:
    assert draft.logits is not None
    return np.asarray(draft.logits)
