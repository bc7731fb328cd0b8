"""The drafter that a training begins with: its config, draft vocabulary and first parameters."""

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from drafter.aux_layers import default_dflash_layers
from drafter.config import DrafterConfig, Kind
from drafter.dialects import open_drafter
from drafter.load import inspect_drafter, load_drafter, shared_tensors
from drafter.params import DrafterParams, init_params
from drafter.train.recipe import DrafterShape, KindName
from drafter.train.shards import Document
from drafter.vocabulary import DraftVocab, by_frequency, check_count, choose, first_of
from peagle.base.errors import InputError, InputWarning
from peagle.config import AUTO
from peagle.engine.request import fold_seed
from peagle.loading.checkpoints import resolve
from peagle.loading.fit import chosen_window, fitting_aux_layers, parse_window, windowed
from peagle.ops.draw import KEYS
from peagle.ops.rope import RopeConfig
from peagle.workflows.dataset import chosen_aux_layers
from peagle.workflows.training_data import answer_tokens
from target.config import TargetConfig
from target.load import LoadedTarget
from target.params import TargetParams

KINDS: dict[KindName, Kind] = {"p-eagle": "P-EAGLE", "eagle-3": "EAGLE-3", "dflash": "DFlash"}
LAYERS: dict[Kind, int] = {"P-EAGLE": 4, "EAGLE-3": 1, "DFlash": 5}  # as in the papers


def drafter_config(
    shape: DrafterShape,
    target: TargetConfig,
    stop_token_ids: tuple[int, ...],
    directory: Path,
    documents: Sequence[Document],
    depth: int,
) -> tuple[DrafterConfig, DraftVocab | None]:
    """Return the config of --init, or a new one with the target's sizes; and a new draft vocabulary.

    depth: the drafts to train, and those of a new DFlash drafter's block. Raises InputError for options that contradict
    each other, --init or the target.
    """
    vocab, kind = None, None if shape.kind is None else KINDS[shape.kind]
    if shape.draft_vocab is not None:
        vocab = _draft_vocab(shape.draft_vocab, directory, target.vocab_size, stop_token_ids, documents)
    if shape.init is not None:
        config = _config_of_init(shape, shape.init, kind, target, directory)
        if vocab is not None:
            raise InputError("--init has its own draft vocabulary; leave out --draft-vocab, or --init")
        return _with_window(config, shape), None
    mask_token = None if kind == "EAGLE-3" else _free_token(documents, target.vocab_size, stop_token_ids)
    config = _new_config(shape, kind or "P-EAGLE", target, mask_token, depth)
    if vocab is not None:
        config = dataclasses.replace(config, draft_vocab_size=len(vocab.token_ids))
    return _with_window(config, shape), vocab


def _config_of_init(
    shape: DrafterShape, init: str, kind: Kind | None, target: TargetConfig, directory: Path
) -> DrafterConfig:
    """Read the config of --init, and check it against the target and the other options."""
    checkpoint, config = inspect_drafter(resolve(init, "drafter"), shape.aux_layer_ids)
    if (config.target_hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
        raise InputError(f"--init {init} does not fit the target; use a drafter of this target")
    if kind not in (None, config.kind):
        raise InputError(f"--init {init} is a {config.kind} drafter; leave out --drafter, or --init")
    layers = fitting_aux_layers(target, checkpoint, directory, init, shape.aux_layer_ids)
    if layers.warning is not None:
        warnings.warn(layers.warning, InputWarning, stacklevel=2)
    config = dataclasses.replace(config, aux_layer_ids=layers.outputs)
    options = {
        "--layers": (shape.layers, config.num_layers),
        "--hidden-size": (shape.hidden_size, config.hidden_size),
        "--mlp-width": (shape.mlp_width, config.mlp_width),
        "--mask-hiddens": (shape.mask_hiddens if shape.mask_hiddens > 1 else None, config.num_mask_hiddens),
    }
    for option, (typed, has) in options.items():
        if typed is not None and typed != has:
            raise InputError(f"{option} asks for {typed}, but --init {init} has {has}; leave out one of them")
    return config


def _new_config(
    shape: DrafterShape, kind: Kind, target: TargetConfig, mask_token: int | None, depth: int
) -> DrafterConfig:
    """Make the config of a new drafter of all tokens."""
    num_layers = shape.layers or LAYERS[kind]
    aux_layer_ids = shape.aux_layer_ids
    if kind == "DFlash":
        _check_dflash(shape, target)
        aux_layer_ids = aux_layer_ids or tuple(sorted(set(default_dflash_layers(num_layers, target.num_layers))))
    aux_layer_ids = chosen_aux_layers(aux_layer_ids, target.num_layers)
    most = max(1, depth - 1) if kind == "P-EAGLE" else 1
    if shape.mask_hiddens > most:
        message = f"mask_hiddens is {shape.mask_hiddens}; expected 1 to {most}, as many as a {kind} drafter has"
        raise InputError(message, "mask_hiddens")
    hidden = shape.hidden_size or target.hidden_size
    config = DrafterConfig(
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        mlp_width=shape.mlp_width or 2 * hidden,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        mask_token_id=mask_token,
        num_mask_hiddens=shape.mask_hiddens,
        rope=RopeConfig(target.head_dim, 10000.0),
        num_aux_layers=len(aux_layer_ids),
        aux_layer_ids=aux_layer_ids,
        rms_norm_eps=target.rms_norm_eps,
    )
    if kind != "DFlash":
        return config
    return dataclasses.replace(config, qk_norm=True, block_size=depth + 1, num_target_layers=target.num_layers)


def _check_dflash(shape: DrafterShape, target: TargetConfig) -> None:
    """Raise InputError for options that do not fit a DFlash drafter, which has the target's embedding and head."""
    if shape.hidden_size not in (None, target.hidden_size):
        raise InputError(
            f"hidden_size is {shape.hidden_size}; expected the target's {target.hidden_size}, since a DFlash drafter "
            "has its embedding and head",
            "hidden_size",
        )
    if shape.draft_vocab is not None:
        raise InputError(
            "a DFlash drafter has its target's head, and drafts all tokens; leave out --draft-vocab, and narrow it "
            "when it is loaded",
            "draft_vocab",
        )


def _with_window(config: DrafterConfig, shape: DrafterShape) -> DrafterConfig:
    """Set the window of the option; by default the one with which --init decodes."""
    if shape.drafter_window == AUTO:
        window = None if shape.init is None else chosen_window(resolve(shape.init, "drafter"), AUTO)
    else:
        window = parse_window(shape.drafter_window)
    return windowed(config, window, by_option=shape.drafter_window != AUTO)[0]


def _draft_vocab(
    typed: str, directory: Path, vocab_size: int, stop_token_ids: tuple[int, ...], documents: Sequence[Document]
) -> DraftVocab:
    """Choose the N most frequent tokens of the data's answers, or those of a file."""
    if not typed.isdecimal():
        return choose(typed, directory, vocab_size, stop_token_ids)
    count = int(typed)
    check_count(count, vocab_size)
    written = np.concatenate(list(answer_tokens(documents)))
    frequent = by_frequency(np.bincount(written[(written >= 0) & (written < vocab_size)], minlength=vocab_size))
    return DraftVocab(first_of([*stop_token_ids, *frequent], vocab_size, count), "frequency in the training data")


def _free_token(documents: Sequence[Document], vocab_size: int, stop_token_ids: Sequence[int]) -> int:
    """Return the highest token id that the data does not use, for mask slots; else the rarest."""
    ids = np.concatenate([document.token_ids for document in documents])
    uses = np.bincount(ids[(ids >= 0) & (ids < vocab_size)], minlength=vocab_size)
    uses[list(stop_token_ids)] = np.iinfo(uses.dtype).max
    return int(vocab_size - 1 - np.argmin(uses[::-1]))


def check_window(config: DrafterConfig, target: TargetConfig, depth: int, *, by_option: bool) -> None:
    """Raise InputError for a window too small for --depth, and for an option that hides nothing."""
    window = config.narrowest_window
    if window is None:
        return
    name = "--drafter-window" if by_option else "the drafter's window"
    if window < depth + 1:
        raise InputError(
            f"{name} is {window}; expected {depth + 1} or more, for the drafts of --depth {depth} and the token "
            "before them"
        )
    if by_option and window > target.max_positions:
        raise InputError(
            f"{name} is {window}, the target has {target.max_positions} positions, so it would hide nothing; expected "
            "fewer, or off"
        )


def initial_params(
    init: str | None, seed: int, config: DrafterConfig, loaded: LoadedTarget, vocab: DraftVocab | None
) -> DrafterParams:
    """Load the parameters of --init, or make new ones.

    New layers are random. If the hidden sizes agree, the embedding, final norm and head are the target's, and fc passes
    the last of the aux_hidden through.
    """
    if init is not None:
        return init_params_of(init, loaded, config.aux_layer_ids)
    params = init_params(config, jax.random.key(fold_seed(seed), impl=KEYS))
    ids = None if vocab is None else jnp.asarray(sorted(vocab.token_ids), jnp.int32)
    params = dataclasses.replace(params, draft_to_target=ids)
    if config.hidden_size != config.target_hidden_size:
        return params
    target: TargetParams = loaded.params
    hidden = config.hidden_size
    head = jnp.asarray(target.lm_head, jnp.float32)
    return dataclasses.replace(
        params,
        embedding=jnp.array(target.embedding, jnp.float32),
        norm=jnp.array(target.norm, jnp.float32),
        lm_head=jnp.array(head if ids is None else head[:, ids]),
        fc=jnp.zeros((config.aux_width, hidden)).at[-hidden:].set(jnp.eye(hidden)),
    )


def init_params_of(init: str, loaded: LoadedTarget, aux_layer_ids: tuple[int, ...] | None = None) -> DrafterParams:
    """Load the parameters of --init, with the target's embedding and head if it stores none."""
    directory = resolve(init, "drafter")
    embedding = lm_head = None
    if shared_tensors(open_drafter(directory)):  # copies, because training overwrites them
        embedding, lm_head = jnp.array(loaded.params.embedding), jnp.array(cast(jax.Array, loaded.params.lm_head))
    return load_drafter(
        directory, jnp.float32, target_embedding=embedding, target_lm_head=lm_head, aux_layer_ids=aux_layer_ids
    )[0]
