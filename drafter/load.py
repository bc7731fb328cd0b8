"""Read and write drafter checkpoints: tensors to parameters and back, by the tables in tensors.py and dialects.py.

A file loads whole or not at all: an error names every tensor that is left over, every parameter that is missing, and
every setting that would change the result and is not supported.
"""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from drafter.config import DrafterConfig
from drafter.dialects import (
    FIRST_LAYERS,
    Dialect,
    first_layer_of,
    is_dflash_config,
    open_drafter,
    parse_config,
    render_config,
)
from drafter.params import DrafterLayerParams, DrafterParams
from drafter.tensors import (
    DRAFT_TO_TARGET,
    EMBEDDING,
    FC,
    IN_DRAFT_VOCAB,
    LM_HEAD,
    MASK_HIDDEN,
    Leaf,
    layer_leaves,
    own_leaves,
)
from peagle.base.checkpoint import Checkpoint, write_checkpoint
from peagle.base.errors import InputError, InputWarning
from peagle.base.memory import to_device
from peagle.ops.kernels import Implementation
from peagle.ops.linear import (
    PackedMatrix,
    SplitMatrix,
    arrange,
    arrange_embedding,
    as_matrix,
    embedding_width,
    take_outputs,
)
from peagle.ops.linear.packed import BFLOAT16


def load_drafter(
    directory: Path,
    dtype: DTypeLike | None = None,
    *,
    implementation: Implementation | None = None,
    target_embedding: jax.Array | np.ndarray | None = None,
    target_lm_head: jax.Array | np.ndarray | PackedMatrix | None = None,
    aux_layer_ids: Sequence[int] | None = None,
) -> tuple[DrafterParams, DrafterConfig]:
    """Load the drafter in a directory, in `dtype` or that of its fc weight.

    implementation "native" packs the matrices for the compiled CPU kernels, and bfloat16 matrices stay bfloat16.
    aux_layer_ids: the target's layers whose outputs it reads, instead of those in config.json.

    Some drafters share the target's embedding or head and do not store it. Such a file loads only with the target's
    tensors, loaded with the same implementation: target_embedding [V, D], target_lm_head [D, V] (narrowed to the draft
    vocabulary here). A stored tensor takes precedence over the target's.

    Raises InputError for a tensor or setting that is missing, surplus or not supported, or has another shape. Warns if
    the map from draft ids to the target's looks wrong.
    """
    checkpoint, config = inspect_drafter(directory, aux_layer_ids)
    dtype = jnp.dtype(checkpoint.dtype(FC) if dtype is None else dtype)
    dtype = jnp.dtype(jnp.float32) if dtype == np.float64 else dtype
    draft_to_target = _draft_to_target(checkpoint, config)
    if (warning := map_warning(checkpoint, config)) is not None:
        warnings.warn(warning, InputWarning, stacklevel=2)
    reader, first_layer = _DrafterReader(checkpoint, config, dtype, implementation), _first_layer(checkpoint, config)
    absent: dict[str, Any] = {field.name: None for field in dataclasses.fields(DrafterLayerParams)}
    params = DrafterParams(
        embedding=reader.embedding(target_embedding),
        mask_hidden=reader.mask_hidden(),
        **{"aux_norm": None, "hidden_norm": None} | reader.leaves(own_leaves(config)),
        layers=tuple(
            DrafterLayerParams(**absent | reader.leaves(layer_leaves(config, layer, first_layer)))
            for layer in range(config.num_layers)
        ),
        lm_head=reader.lm_head(target_lm_head, draft_to_target),
        draft_to_target=None if draft_to_target is None else jnp.asarray(draft_to_target),
        implementation=implementation,
    )
    return params, config


def inspect_drafter(directory: Path, aux_layer_ids: Sequence[int] | None = None) -> tuple[Checkpoint, DrafterConfig]:
    """Check a directory as load_drafter does, without reading weights. Raises the same InputErrors."""
    checkpoint = open_drafter(directory)
    config = parse_config(checkpoint, aux_layer_ids)
    shapes = _tensor_shapes(checkpoint, config)
    checkpoint.expect(shapes)
    for name in sorted(shapes.keys() - {DRAFT_TO_TARGET, IN_DRAFT_VOCAB}):
        if not jnp.issubdtype(stored := checkpoint.dtype(name), jnp.floating):
            raise InputError(
                f"{directory}: tensor {name} has dtype {stored}; expected floating-point weights (quantised drafters "
                "are not supported)"
            )
    _draft_to_target(checkpoint, config)
    return checkpoint, config


def _tensor_shapes(checkpoint: Checkpoint, config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a drafter needs, and of those that it may store. Reads no weights."""
    c, first_layer = config, _first_layer(checkpoint, config)
    leaves = [*own_leaves(c), *(leaf for layer in range(c.num_layers) for leaf in layer_leaves(c, layer, first_layer))]
    shapes: dict[str, tuple[int, ...]] = {
        name: (size,) if leaf.inputs is None else (size, leaf.inputs)
        for leaf in leaves
        for name, size in zip(leaf.names, leaf.outputs, strict=True)
    }
    if c.kind == "P-EAGLE":
        shapes[MASK_HIDDEN] = _mask_hidden_shape(checkpoint, c)
    optional: dict[str, tuple[int, ...]] = {DRAFT_TO_TARGET: (c.draft_vocab_size,)}
    if c.kind != "DFlash":
        optional |= {EMBEDDING: (c.vocab_size, c.hidden_size), LM_HEAD: (c.draft_vocab_size, c.hidden_size)}
    if checkpoint.has(IN_DRAFT_VOCAB):  # of any shape: it only confirms d2t (`map_warning`)
        optional[IN_DRAFT_VOCAB] = checkpoint.shape(IN_DRAFT_VOCAB)
    return {name: shape for name, shape in optional.items() if checkpoint.has(name)} | shapes


def _mask_hidden_shape(checkpoint: Checkpoint, config: DrafterConfig) -> tuple[int, ...]:
    """Return the stored shape. Raises InputError unless it holds num_mask_hiddens vectors of aux_width values."""
    shape, width, count = checkpoint.shape(MASK_HIDDEN), config.aux_width, config.num_mask_hiddens
    if not shape or shape[-1] != width or np.prod(shape) != count * width:
        raise InputError(
            f"{checkpoint.directory}: tensor {MASK_HIDDEN} has shape {list(shape)}; expected [1, {count}, {width}], "
            f"the width of {config.num_aux_layers} hidden states of {config.target_hidden_size}"
        )
    return shape


def _first_layer(checkpoint: Checkpoint, config: DrafterConfig) -> str:
    return FIRST_LAYERS["speculators"] if config.kind == "DFlash" else first_layer_of(checkpoint)


def weight_bytes(directory: Path, dtype: DTypeLike, *, implementation: Implementation | None = None) -> int:
    """Compute the memory that load_drafter takes with these options, without the target's, to a percent.

    Reads no weights. Raises InputError if the files cannot be read.
    """
    checkpoint = open_drafter(directory)
    total = 0
    for name in checkpoint.names - {DRAFT_TO_TARGET, IN_DRAFT_VOCAB}:
        stored = checkpoint.dtype(name)
        stays = implementation == "native" and stored == BFLOAT16
        itemsize = stored.itemsize if stays else jnp.dtype(dtype).itemsize
        total += int(np.prod(checkpoint.shape(name))) * itemsize
    return total


def shared_tensors(checkpoint: Checkpoint) -> list[str]:
    """List the tensors that a drafter takes from its target: its embedding, its head. Reads no weights."""
    names = set() if is_dflash_config(checkpoint.config) else checkpoint.names
    return [name for name in (EMBEDDING, LM_HEAD) if name not in names]


def save_drafter(
    directory: Path,
    params: DrafterParams,
    config: DrafterConfig,
    dialect: Dialect = "vllm",
    verifier: str | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write the drafter to a directory in a dialect; load_drafter returns the same bits and the same config.

    A DFlash drafter's embedding and head are its target's and are not written. verifier: the name or path by which the
    speculators package finds the target, without which it loads no drafter.
    """
    tensors = to_tensors(params, config, dialect)
    rendered = render_config(config, dialect, str(params.dtype), verifier)
    write_checkpoint(directory, rendered, tensors, extra_files=extra_files)


def sort_aux_layers(params: DrafterParams, config: DrafterConfig) -> tuple[DrafterParams, DrafterConfig]:
    """Sort the aux layers ascending, because vLLM reads them in that order whatever config.json says.

    Permutes fc, the norm before it and mask_hidden to match, so the drafter's outputs stay the same.
    """
    ids = config.aux_layer_ids
    if ids is None or list(ids) == sorted(ids):
        return params, config
    columns = np.arange(config.aux_width).reshape(config.num_aux_layers, -1)[np.argsort(ids)].ravel()
    moved: dict[str, Any] = {"fc": jnp.asarray(as_matrix(params.fc)[columns])}
    for field in ("aux_norm", "mask_hidden"):
        if (values := getattr(params, field)) is not None:
            moved[field] = jnp.asarray(np.asarray(values)[..., columns])
    in_order = dataclasses.replace(config, aux_layer_ids=tuple(sorted(ids)))
    return dataclasses.replace(params, **moved), in_order


def to_tensors(params: DrafterParams, config: DrafterConfig, dialect: Dialect = "vllm") -> dict[str, np.ndarray]:
    """Return a checkpoint's tensors by name, output dimension first, as every dialect stores them."""
    assert not isinstance(params.lm_head, SplitMatrix)
    own = config.kind != "DFlash"
    tensors = {EMBEDDING: np.asarray(params.embedding), LM_HEAD: as_matrix(params.lm_head).T} if own else {}
    if params.mask_hidden is not None:
        tensors[MASK_HIDDEN] = np.asarray(params.mask_hidden)[None]
    parts: list[tuple[DrafterParams | DrafterLayerParams, list[Leaf]]] = [(params, own_leaves(config))]
    for index, layer in enumerate(params.layers):
        parts.append((layer, layer_leaves(config, index, FIRST_LAYERS[dialect if own else "speculators"])))
    for owner, leaves in parts:
        for leaf in leaves:
            rows = as_matrix(getattr(owner, leaf.field)).T
            tensors |= zip(leaf.names, np.split(rows, np.cumsum(leaf.outputs)[:-1]), strict=True)
    ids = params.draft_to_target
    if ids is not None and not np.array_equal(ids, np.arange(config.vocab_size)):  # vLLM refuses a map to all tokens
        target_ids = np.asarray(ids).astype(np.int64)
        tensors[DRAFT_TO_TARGET] = target_ids - np.arange(config.draft_vocab_size)
        tensors[IN_DRAFT_VOCAB] = np.isin(np.arange(config.vocab_size), target_ids)
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


@dataclasses.dataclass
class _DrafterReader:
    """Read a checkpoint's tensors as parameters: cast vectors, arrange matrices for `linear`."""

    checkpoint: Checkpoint
    config: DrafterConfig
    dtype: jnp.dtype
    implementation: Implementation | None

    def leaves(self, leaves: Iterable[Leaf]) -> dict[str, Any]:
        return {leaf.field: self._leaf(leaf) for leaf in leaves}

    def _leaf(self, leaf: Leaf) -> jax.Array | PackedMatrix:
        parts = [self.checkpoint.take(name) for name in leaf.names]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        vectors = leaf.inputs is None
        return to_device(rows.astype(self.dtype)) if vectors else arrange(rows, self.dtype, self.implementation)

    def mask_hidden(self) -> jax.Array | None:
        if self.config.kind != "P-EAGLE":
            return None
        vectors = self.checkpoint.take(MASK_HIDDEN).reshape(self.config.num_mask_hiddens, -1)
        return to_device(vectors.astype(self.dtype))

    def embedding(self, shared: jax.Array | np.ndarray | None) -> jax.Array:
        if self._stores(EMBEDDING):
            return arrange_embedding(self.checkpoint.take(EMBEDDING), self.dtype, self.implementation)
        width = embedding_width(self.config.hidden_size, self.implementation)
        shared = self._shared(EMBEDDING, shared, (self.config.vocab_size, width))
        return jnp.asarray(shared) if self.implementation == "native" else jnp.asarray(shared).astype(self.dtype)

    def lm_head(
        self, shared: jax.Array | np.ndarray | PackedMatrix | None, draft_to_target: np.ndarray | None
    ) -> jax.Array | PackedMatrix:
        c = self.config
        if self._stores(LM_HEAD):
            return self._leaf(Leaf("lm_head", (LM_HEAD,), (c.draft_vocab_size,), c.hidden_size))
        shared = self._shared(LM_HEAD, shared, (c.hidden_size, c.vocab_size))
        head = shared if isinstance(shared, PackedMatrix) else jnp.asarray(shared).astype(self.dtype)
        return head if draft_to_target is None else take_outputs(head, draft_to_target)

    def _stores(self, name: str) -> bool:
        """Whether the drafter has its own embedding or head: a DFlash drafter never does."""
        return self.config.kind != "DFlash" and self.checkpoint.has(name)

    def _shared(self, name: str, tensor: Any, expected: tuple[int, int]) -> Any:
        """Return the target's tensor. Raises InputError if there is none, or it cannot replace the missing one."""
        missing = f"{self.checkpoint.directory}: tensor {name} is missing"
        stored = self.config.kind != "DFlash"
        if tensor is None:
            also = ", or store the tensor in it" if stored else ""
            raise InputError(f"{missing}: this drafter shares its target's; load it together with that target{also}")
        shape = (tensor.inputs, tensor.outputs) if isinstance(tensor, PackedMatrix) else tuple(tensor.shape)
        if shape != expected:
            raise InputError(
                f"{missing}, and the target's has shape {list(shape)}; expected {list(expected)} to share it: "
                + ("store the tensor in the drafter" if stored else "take the drafter of this target")
            )
        return tensor


def _draft_to_target(checkpoint: Checkpoint, config: DrafterConfig) -> np.ndarray | None:
    """Return the draft vocabulary's absolute target ids, int32; None if the vocabularies are the same.

    Example: d2t [0, 0, 3] -> ids [0, 1, 5].
    """
    if not checkpoint.has(DRAFT_TO_TARGET):
        if config.draft_vocab_size != config.vocab_size:
            raise InputError(
                f"{checkpoint.directory}: tensor d2t is missing; a draft vocabulary of {config.draft_vocab_size} needs "
                f"its map into the target's of {config.vocab_size}"
            )
        return None
    stored, index = _stored_map(checkpoint, config), np.arange(config.draft_vocab_size)
    target_ids = stored + index
    if (fault := _map_fault(target_ids, config.vocab_size)) is not None:
        absolute = "" if _map_fault(stored, config.vocab_size) else f"; if these are absolute ids, {STORE_OFFSETS}"
        raise InputError(
            f"{checkpoint.directory}: d2t {fault} (d2t holds offsets: target id = draft id + d2t[draft id]){absolute}"
        )
    same = config.draft_vocab_size == config.vocab_size and bool((target_ids == index).all())
    return None if same else target_ids.astype(np.int32)


STORE_OFFSETS = "store d2t - arange(len(d2t)) as d2t"
# Of `size` random tokens no two are neighbours with probability exp(-size^2 / vocab_size). Below exp(-20) such a map is
# no accident.
_RARE = 20.0


def map_warning(checkpoint: Checkpoint, config: DrafterConfig) -> str | None:
    """Return a warning if d2t, read as offsets, looks wrong; None if it looks right. Reads only d2t and t2d.

    It looks wrong if t2d marks other tokens or, without a t2d, if no two of its tokens have neighbouring ids.
    """
    if not checkpoint.has(DRAFT_TO_TARGET):
        return None
    stored = _stored_map(checkpoint, config)
    target_ids, prefix = stored + np.arange(len(stored)), f"{checkpoint.directory}: d2t is read as offsets, but"
    if checkpoint.has(IN_DRAFT_VOCAB):
        if checkpoint.shape(IN_DRAFT_VOCAB) != (config.vocab_size,):
            return (
                f"{checkpoint.directory}: t2d has shape {list(checkpoint.shape('t2d'))}, and is not compared with d2t; "
                f"expected [{config.vocab_size}], a mark for each of the target's tokens"
            )
        marked = np.flatnonzero(checkpoint.take(IN_DRAFT_VOCAB))
        if np.array_equal(np.sort(target_ids), marked):
            return None
        message = (
            f"{prefix} t2d marks other tokens ({len(np.intersect1d(target_ids, marked))} of {len(marked)} are the same)"
        )
        if np.array_equal(np.sort(stored), marked):
            return f"{message}; read as absolute ids it agrees with t2d: {STORE_OFFSETS}"
        return f"{message}; peagle parity finds which of the two the drafter follows"
    if len(stored) ** 2 > _RARE * config.vocab_size and (np.diff(stored) > 0).all():
        neighbours = f"no two of its {len(stored)} tokens are neighbours"
        return f"{prefix} then {neighbours}; if it holds absolute ids, {STORE_OFFSETS}"
    return None


def _stored_map(checkpoint: Checkpoint, config: DrafterConfig) -> np.ndarray:
    return checkpoint.take(DRAFT_TO_TARGET, (config.draft_vocab_size,)).astype(np.int64)


def _map_fault(target_ids: np.ndarray, vocab_size: int) -> str | None:
    """Describe why these are not valid target ids of a draft vocabulary; None if they are."""
    if target_ids.min() < 0 or target_ids.max() >= vocab_size:
        return f"maps to ids {target_ids.min()}..{target_ids.max()}; expected 0..{vocab_size - 1}"
    if (different := len(np.unique(target_ids))) < len(target_ids):
        return f"maps {len(target_ids)} draft ids to {different} target ids; expected one each"
    return None
