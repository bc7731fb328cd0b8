"""Read and write target checkpoints: tensors to parameters and back, by the names in dialects.py."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from peagle.base.checkpoint import write_checkpoint
from peagle.base.errors import InputError
from peagle.base.memory import aligned, available_memory_bytes, stack, to_device
from peagle.ops.expert_matmul import (
    ExpandedExperts,
    Experts,
    FusedExperts,
    NativeExperts,
    PackedExperts,
    TiledExperts,
    TpuExperts,
    takes_tiled,
    tiled_experts,
    to_panels,
    tpu_experts,
)
from peagle.ops.kernels import Implementation
from peagle.ops.linear import PackedMatrix, arrange, arrange_embedding, as_matrix
from peagle.ops.linear.packed import BFLOAT16, pack_floats, pack_mxfp4
from peagle.ops.mxfp4 import NAN_SCALE, dequantize, quantize
from target.config import TargetConfig
from target.dialects import (
    TRANSFORMERS,
    Dialect,
    TargetCheckpoint,
    open_target,
    render_config,
    stop_tokens,
    tensor_shapes,
)
from target.params import AttentionParams, LayerParams, MoeParams, TargetParams
from target.shard import ModelShard, Rank, TensorKind

# Up to this many experts per selected one, dense experts are concatenated in two matrices (FusedExperts). That computes
# the unselected experts, too, and saves every gather. At 8 experts top-4 the plain matmuls win at any number of rows.
# At 32 top-4 a decoded token would read eight times the weights it needs.
FUSED_UP_TO = 4
_MEMORY_SHARE = 0.8  # of the free memory; the rest is for caches, activations and other processes
WHOLE = Rank()

ExpertsChoice = Literal["auto", "packed", "expanded"]
Layout = Literal["packed", "expanded", "fused"]


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A model in memory, and its directory's other settings."""

    params: TargetParams
    config: TargetConfig  # for one rank: its local geometry
    stop_token_ids: tuple[int, ...]
    experts: Layout  # in memory
    mxfp4: bool  # the files hold quantised experts


@dataclasses.dataclass(frozen=True)
class TargetFiles:
    """The content of a checkpoint's directory, from config.json and the headers of its tensors."""

    config: TargetConfig
    stop_token_ids: tuple[int, ...]
    stop_tokens_from: str | None  # the file that names them
    mxfp4: bool
    num_parameters: int
    num_expert_parameters: int  # included in num_parameters: the experts' matrices
    tensor_bytes: int
    expert_tensor_bytes: int  # included in tensor_bytes: what experts "packed" keeps as it is


def _num_values(kind: TensorKind, shape: tuple[int, ...]) -> int:
    """Count a tensor's values: two per byte of MXFP4 blocks, none in MXFP4 scales."""
    return math.prod(shape) * ((2 if len(shape) == 4 else 0) if kind.mxfp4 else 1)


def inspect_target(directory: Path) -> TargetFiles:
    """Check a directory as load_target does, without reading weights. Raises the same InputErrors."""
    files = open_target(directory)
    counts, sizes = {True: 0, False: 0}, {True: 0, False: 0}  # True: expert matrices
    for name, (kind, shape) in files.tensors.items():
        counts[kind.of_experts] += _num_values(kind, shape)
        sizes[kind.of_experts] += math.prod(shape) * files.checkpoint.dtype(name).itemsize
    stops = stop_tokens(files.checkpoint, files.config.vocab_size)
    totals = (sum(counts.values()), counts[True], sum(sizes.values()), sizes[True])
    return TargetFiles(files.config, *stops, files.mxfp4, *totals)


def stored_dtype(directory: Path) -> np.dtype:
    """Return the dtype of a directory's first tensor that is not of MXFP4. Raises the InputErrors of load_target."""
    files = open_target(directory)
    return next(files.checkpoint.dtype(name) for name, (kind, _) in files.tensors.items() if not kind.mxfp4)


def weight_bytes(
    directory: Path,
    *,
    dtype: Any = jnp.float32,
    experts: ExpertsChoice = "auto",
    implementation: Implementation | None = None,
    rank: Rank = WHOLE,
) -> int:
    """Compute the memory that load_target takes with these options, to a percent.

    Reads no weights. Raises the same InputErrors.
    """
    files, native = open_target(directory), implementation == "native"
    layout, part = _choose_layout(files, dtype, experts, native), ModelShard(files.config, rank, files.mxfp4)
    total = 0
    for name, (kind, shape) in files.tensors.items():
        local_shape = part.shape(kind, shape)
        if kind.mxfp4 and layout == "packed":
            total += math.prod(local_shape)
        else:
            narrow = native and (kind.mxfp4 or files.checkpoint.dtype(name) == BFLOAT16)
            total += _num_values(kind, local_shape) * (BFLOAT16 if narrow else np.dtype(dtype)).itemsize
    return total


def load_target(
    directory: Path,
    *,
    dtype: Any = jnp.float32,
    experts: ExpertsChoice = "auto",
    implementation: Implementation | None = None,
    progress: Callable[[int, int], None] | None = None,
    rank: Rank = WHOLE,
) -> LoadedTarget:
    """Load the model in a directory: float parameters in `dtype`, on JAX's default device.

    rank: load only this rank's part (target.shard), and read only its bytes.

    experts "packed" keeps MXFP4 experts as they are, "expanded" dequantises them once, at load. "auto" expands on CPU
    if that fits in free memory (dequantising inside the graph is many times slower there), and packs on accelerators.
    Unquantised experts are always expanded. Calls progress(bytes read, all bytes) while it reads.

    implementation "native" packs all matrices for the compiled CPU kernels, which must run here. bfloat16 matrices then
    stay bfloat16, for activations in `dtype`, and MXFP4 experts stay MXFP4, or become bfloat16 by "expanded".

    On CPU, memory peaks within 1.15 of the parameters (`weight_bytes`): files are mapped; at any time one expert, or
    one other matrix, is in memory twice, and the largest matrix comes first.

    Raises InputError for a tensor that is missing, surplus, corrupt or of another shape, a config that is not GPT-OSS,
    and "packed" for a checkpoint that is not MXFP4.
    """
    files = open_target(directory)
    stop_token_ids, _ = stop_tokens(files.checkpoint, files.config.vocab_size)
    layout = _choose_layout(files, dtype, experts, implementation == "native")
    part = ModelShard(files.config, rank, files.mxfp4)
    if progress is not None:
        sizes = (part.read_size(*kind) * files.checkpoint.dtype(name).itemsize for name, kind in files.tensors.items())
        files.checkpoint.watch(progress, sum(sizes))
    params = _TargetReader(files, part, np.dtype(dtype), implementation).params(layout)
    files.checkpoint.finish()
    return LoadedTarget(params, part.config, stop_token_ids, layout, files.mxfp4)


def chosen_experts(
    directory: Path, dtype: Any, experts: ExpertsChoice, implementation: Implementation | None
) -> Literal["packed", "expanded"]:
    """Resolve experts "auto" as load_target would with these options. Raises the same InputErrors."""
    layout = _choose_layout(open_target(directory), dtype, experts, implementation == "native")
    return "packed" if layout == "packed" else "expanded"


def cut_not_for_hopper(config: TargetConfig, rank: Rank) -> str | None:
    """Say why the kernels for Hopper GPUs take a model's MXFP4 experts, but not the part that a rank has of each."""
    width = ModelShard(config, rank, mxfp4=True).config.expert_width
    whole, cut = (
        takes_tiled(config.hidden_size, expert_width, config.num_experts, config.top_k)
        for expert_width in (config.expert_width, width)
    )
    if cut or not whole:
        return None
    return (
        f"tp={rank.tp} leaves each device {width:,} of an expert's {config.expert_width:,} columns, but the fast "
        "kernels for Hopper GPUs take whole experts; slower ones run; ep in place of tp keeps the fast ones"
    )


def load_embedding_and_head(
    directory: Path, dtype: Any = jnp.float32, implementation: Implementation | None = None
) -> tuple[jax.Array, jax.Array | PackedMatrix]:
    """Read only a target's embedding [V, D] and head [D, V]. Raises InputError as load_target does."""
    files = open_target(directory)
    return _TargetReader(
        files, ModelShard(files.config, WHOLE, files.mxfp4), np.dtype(dtype), implementation
    ).embedding_and_head()


def save_target(
    directory: Path,
    params: TargetParams,
    config: TargetConfig,
    *,
    dtype: Any = ml_dtypes.bfloat16,
    mxfp4: bool = True,
    **options: Any,
) -> None:
    """Write parameters to a directory as a Hugging Face checkpoint, from the expert layouts of XLA.

    mxfp4: round experts to MXFP4; else store them in `dtype` like the rest. With dtype float32 and mxfp4 False,
    load_target returns equal parameters, even if the experts were MXFP4 before. options: those of write_target.

    Raises InputError for MXFP4 with widths that are not multiples of 32, or if a value is not finite.
    """
    tensor_shapes(config, mxfp4)  # raises for widths that do not fit, before anything is written
    write_target(directory, config, _tensors(params, config, np.dtype(dtype), mxfp4), mxfp4=mxfp4, **options)


def write_target(
    directory: Path,
    config: TargetConfig,
    tensors: Iterator[tuple[str, np.ndarray]],
    *,
    mxfp4: bool,
    stop_token_ids: Sequence[int] = (),
    pad_token_id: int | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    shard_bytes: int | None = None,
) -> None:
    """Write a checkpoint of tensors by name, in the shapes of `tensor_shapes`. A generator may make them one by one."""
    pad: dict[str, Any] = {} if pad_token_id is None else {"pad_token_id": pad_token_id}
    stops: dict[str, Any] = {"eos_token_id": list(stop_token_ids)} if stop_token_ids else {}
    rendered = render_config(config, mxfp4) | {key: ids[0] for key, ids in stops.items()} | pad
    generation = {"generation_config.json": stops | pad} if stops or pad else {}
    write_checkpoint(directory, rendered, tensors, shard_bytes, {**(extra_files or {}), **generation})


def _choose_layout(files: TargetCheckpoint, dtype: Any, experts: ExpertsChoice, native: bool) -> Layout:
    """Choose the experts' layout in memory. Raises InputError for an unknown choice, or one the files do not allow."""
    if experts not in ("auto", "packed", "expanded"):
        raise InputError(f"experts is {experts!r}; expected auto, packed or expanded", "experts")
    if experts == "packed" and not files.mxfp4:
        raise InputError(
            f"{files.checkpoint.directory}: experts packed needs an MXFP4 checkpoint, but this one's experts are not "
            "quantised",
            "experts",
        )
    if experts == "packed" or (experts == "auto" and files.mxfp4 and (native or not _expanding_pays(files, dtype))):
        return "packed"
    return "fused" if not native and files.config.num_experts <= FUSED_UP_TO * files.config.top_k else "expanded"


def _expanding_pays(files: TargetCheckpoint, dtype: Any) -> bool:
    if jax.default_backend() != "cpu":
        return False
    weights = sum(math.prod(shape) for shape in tensor_shapes(files.config, mxfp4=False).values())
    return weights * np.dtype(dtype).itemsize <= _MEMORY_SHARE * available_memory_bytes()


@dataclasses.dataclass
class _TargetReader:
    files: TargetCheckpoint
    part: ModelShard
    dtype: np.dtype
    implementation: Implementation | None

    def __post_init__(self) -> None:
        self.checkpoint, self.dialect, _, self.mxfp4 = self.files
        self.tensors = self.files.tensors

    def embedding_and_head(self) -> tuple[jax.Array, jax.Array | PackedMatrix]:
        names = self.dialect.names
        # the head first: the largest matrix is in memory twice for a moment, while nothing else is
        lm_head = self._matrix(names["lm_head"])
        return arrange_embedding(self._floats(names["embedding"]), self.dtype, self.implementation), lm_head

    def params(self, layout: Layout) -> TargetParams:
        embedding, lm_head = self.embedding_and_head()
        return TargetParams(
            embedding=embedding,
            layers=tuple(self._layer(self.dialect.of_layer(i), layout) for i in range(self.part.config.num_layers)),
            norm=self._vector(self.dialect.names["norm"]),
            lm_head=lm_head,
            implementation=self.implementation,
        )

    def _layer(self, dialect: Dialect, layout: Layout) -> LayerParams:
        """dialect: with the names of this layer."""
        names = dialect.names
        read = self._packed if layout == "packed" else self._dense
        experts = (self._native if self.implementation == "native" else read)(names, layout)
        return LayerParams(
            attention=AttentionParams(
                norm=self._vector(names["attention_norm"]),
                qkv=self._matrix(*(f"{module}.weight" for module in dialect.qkv)),
                qkv_bias=self._vector(*(f"{module}.bias" for module in dialect.qkv)),
                out=self._matrix(f"{names['out']}.weight"),
                out_bias=self._vector(f"{names['out']}.bias"),
                sinks=self._vector(names["sinks"]),
            ),
            moe=MoeParams(
                norm=self._vector(names["moe_norm"]),
                router=self._matrix(f"{names['router']}.weight"),
                router_bias=self._vector(f"{names['router']}.bias"),
                experts=experts,
            ),
        )

    def _floats(self, name: str) -> np.ndarray:
        kind, shape = self.tensors[name]
        if not self.part.has(kind):
            self.checkpoint.ignore(name)
            return np.zeros(self.part.shape(kind, shape), self.checkpoint.dtype(name))
        return self.checkpoint.take(name, shape, self.part.cuts(kind))

    def _by_expert(self, name: str) -> Iterator[np.ndarray]:
        """Read a tensor of one local expert after the other."""
        kind, shape = self.tensors[name]
        return self.checkpoint.parts(name, shape, self.part.cuts(kind))

    def _vector(self, *names: str) -> jax.Array:
        return to_device(np.concatenate([self._floats(name).astype(self.dtype) for name in names]))

    def _matrix(self, *names: str) -> jax.Array | PackedMatrix:
        """Read matrices [outputs, inputs] and concatenate their outputs."""
        stacked = self._floats(names[0]) if len(names) == 1 else np.concatenate([self._floats(name) for name in names])
        return arrange(stacked, self.dtype, self.implementation)

    def _packed_experts(self, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Read (blocks, scales) of one expert after the other."""
        names = [name + self.dialect.blocks, name + self.dialect.scales]
        for blocks, scales in zip(*map(self._by_expert, names), strict=True):
            if np.any(scales == NAN_SCALE):
                raise InputError(
                    f"{self.checkpoint.directory}: tensor {names[1]} has a scale of 255 (NaN): the file is corrupt"
                )
            yield blocks, scales

    def _expert_matrices(self, name: str) -> Iterator[np.ndarray]:
        """Read [inputs, outputs] of one expert after the other, before conversion to the dtype."""
        if self.mxfp4:
            for blocks, scales in self._packed_experts(name):
                yield dequantize(blocks, scales).T
        else:
            yield from self._by_expert(name)

    def _packed(self, names: Mapping[str, str], _: Layout) -> Experts:
        """Read a layer's experts as stored; on a Hopper GPU or a TPU lay them out for its kernels, layer by layer."""
        parts: list[jax.Array] = []
        for matrix in ("gate_up", "down"):
            parts += [*self._on_device(self._packed_experts(names[matrix])), self._vector(names[f"{matrix}_bias"])]
        packed = PackedExperts(*parts)
        if self.implementation == "tpu":
            return tpu_experts(packed)
        if self.implementation == "xla":
            return packed
        return tiled_experts(packed, self.part.config.num_experts, self.part.config.top_k)

    def _dense(self, names: Mapping[str, str], layout: Layout) -> Experts:
        """Read a layer's experts in the dtype, gates and ups apart."""
        count, hidden, width = self.part.num_experts, self.part.config.hidden_size, self.part.config.expert_width
        fused = layout == "fused"
        gate_up = aligned((hidden, 2, count, width) if fused else (count, hidden, 2, width), self.dtype)
        by_expert = gate_up.transpose(2, 0, 1, 3) if fused else gate_up
        for expert, matrix in enumerate(self._expert_matrices(names["gate_up"])):
            by_expert[expert, :, 0] = matrix[:, 0::2]
            by_expert[expert, :, 1] = matrix[:, 1::2]
        down = aligned((count, width, hidden), self.dtype)
        for expert, matrix in enumerate(self._expert_matrices(names["down"])):
            down[expert] = matrix
        bias: np.ndarray = self._floats(names["gate_up_bias"]).astype(self.dtype).reshape(count, width, 2)
        down_bias = self._vector(names["down_bias"])
        if fused:
            gate_up, bias, down = gate_up.reshape(hidden, -1), bias.transpose(2, 0, 1).ravel(), down.reshape(-1, hidden)
            return FusedExperts(to_device(gate_up), to_device(bias), to_device(down), down_bias)
        gate_up, bias = gate_up.reshape(count, hidden, -1), bias.swapaxes(1, 2).reshape(count, -1)
        return ExpandedExperts(to_device(gate_up), to_device(bias), to_device(down), down_bias)

    def _native(self, names: Mapping[str, str], layout: Layout) -> NativeExperts:
        hidden, width = self.part.config.hidden_size, self.part.config.expert_width
        gate_up_bias = to_panels(self._floats(names["gate_up_bias"]).astype(np.float32))
        return NativeExperts(
            gate_up=self._pack(names["gate_up"], layout, (hidden, gate_up_bias.shape[1]), to_panels),
            gate_up_bias=to_device(gate_up_bias),
            down=self._pack(names["down"], layout, (width, hidden), lambda rows: rows),
            down_bias=to_device(self._floats(names["down_bias"]).astype(np.float32)),
            hidden=width,
        )

    def _pack(
        self, name: str, layout: Layout, shape: tuple[int, int], order: Callable[[np.ndarray], np.ndarray]
    ) -> PackedMatrix:
        """Pack all experts' matrices. shape: (inputs, outputs). `order` reorders the outputs of [1, outputs, *rest]."""
        if layout == "packed":
            data, scales = self._on_device(
                pack_mxfp4(order(blocks[None])[0], order(scales[None])[0])
                for blocks, scales in self._packed_experts(name)
            )
            return PackedMatrix(data, scales, *shape)
        # MXFP4 values are exact in bfloat16
        dtype = BFLOAT16 if self.mxfp4 else self.dtype
        rows = (order(matrix.T[None])[0] for matrix in self._expert_matrices(name))
        (data,) = self._on_device(
            (pack_floats(matrix if matrix.dtype == BFLOAT16 else matrix.astype(dtype)),) for matrix in rows
        )
        return PackedMatrix(data, None, *shape)

    def _on_device(self, experts: Iterable[tuple[np.ndarray, ...]]) -> tuple[jax.Array, ...]:
        """Stack the experts' arrays on the device; at most one expert is in memory twice."""
        return tuple(map(to_device, stack(experts, self.part.num_experts)))


def _tensors(
    params: TargetParams, config: TargetConfig, dtype: np.dtype, mxfp4: bool
) -> Iterator[tuple[str, np.ndarray]]:
    ends, kv_width = TRANSFORMERS.names, config.num_kv_heads * config.head_dim
    splits = np.cumsum([config.num_heads * config.head_dim, kv_width])

    def stored(name: str, value: Any) -> tuple[str, np.ndarray]:
        value = np.asarray(value)
        return name, value if value.dtype == np.uint8 else _finite(name, value).astype(dtype)

    yield stored(ends["embedding"], params.embedding)
    for index, layer in enumerate(params.layers):
        dialect, attention, moe = TRANSFORMERS.of_layer(index), layer.attention, layer.moe
        names = dialect.names
        values: dict[str, Any] = {names["attention_norm"]: attention.norm}
        weights, biases = np.split(as_matrix(attention.qkv).T, splits), np.split(np.asarray(attention.qkv_bias), splits)
        for module, weight, bias in zip(dialect.qkv, weights, biases, strict=True):
            values |= {f"{module}.weight": weight, f"{module}.bias": bias}
        values |= {
            f"{names['out']}.weight": as_matrix(attention.out).T,
            f"{names['out']}.bias": attention.out_bias,
            names["sinks"]: attention.sinks,
            names["moe_norm"]: moe.norm,
            f"{names['router']}.weight": as_matrix(moe.router).T,
            f"{names['router']}.bias": moe.router_bias,
            **_expert_tensors(moe.experts, config, mxfp4, dialect),
        }
        yield from (stored(name, value) for name, value in values.items())
    yield stored(ends["norm"], params.norm)
    yield stored(ends["lm_head"], as_matrix(params.lm_head).T)


def _expert_tensors(experts: Experts, config: TargetConfig, mxfp4: bool, dialect: Dialect) -> dict[str, Any]:
    """Return a layer's expert tensors by name, gates and ups interleaved. dialect: with the names of this layer."""
    if isinstance(experts, NativeExperts | TiledExperts | TpuExperts):
        raise TypeError("a model packed for the kernels cannot be saved; load it for 'xla'")
    names, count, width, hidden = dialect.names, config.num_experts, config.expert_width, config.hidden_size
    bias = np.asarray(experts.gate_up_bias)
    # for (gate and up, down): matrices [E, inputs, outputs], or pairs (blocks, scales) of MXFP4
    matrices, pairs = [], []
    if isinstance(experts, PackedExperts):
        packed = ((experts.gate_up_blocks, experts.gate_up_scales), (experts.down_blocks, experts.down_scales))
        pairs = [(np.asarray(blocks), np.asarray(scales)) for blocks, scales in packed]
        matrices = [] if mxfp4 else [dequantize(*pair).swapaxes(-1, -2) for pair in pairs]
    else:
        gate_up = np.asarray(experts.gate_up)
        if isinstance(experts, FusedExperts):
            gate_up = gate_up.reshape(hidden, 2, count, width).transpose(2, 0, 3, 1)
            bias = bias.reshape(2, count, width).transpose(1, 2, 0)
        else:
            gate_up = gate_up.reshape(count, hidden, 2, width).swapaxes(-1, -2)
            bias = bias.reshape(count, 2, width).swapaxes(-1, -2)
        matrices = [gate_up.reshape(count, hidden, -1), np.asarray(experts.down).reshape(count, width, hidden)]
        bias = bias.reshape(count, -1)
        if mxfp4:
            finite = (_finite(names[name], matrix) for name, matrix in zip(("gate_up", "down"), matrices, strict=True))
            pairs = [quantize(matrix.swapaxes(-1, -2).astype(np.float32)) for matrix in finite]
    biases = {names["gate_up_bias"]: bias, names["down_bias"]: experts.down_bias}
    if not mxfp4:
        return dict(zip((names["gate_up"], names["down"]), matrices, strict=True)) | biases
    stored = zip((names["gate_up"], names["down"]), pairs, strict=True)
    suffixes = (dialect.blocks, dialect.scales)
    return {name + suffix: part for name, pair in stored for suffix, part in zip(suffixes, pair, strict=True)} | biases


def _finite(name: str, value: np.ndarray) -> np.ndarray:
    if not np.all(np.isfinite(value)):
        raise InputError(f"tensor {name} has values that are not finite: the model diverged, nothing was written")
    return value
