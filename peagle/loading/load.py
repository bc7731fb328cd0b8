"""Load checkpoints as a `Pair`: read both models, check that they fit each other and the memory, choose kernels.

Besides this room, only workflows/ and the commands import target/ and drafter/.
"""

import dataclasses
import hashlib
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from peagle.base.checkpoint import fingerprint
from peagle.base.errors import InputError, InputWarning
from peagle.base.memory import refuse_too_large, tree_bytes
from peagle.base.sizes import format_size
from peagle.config import AUTO, DtypeName, ExpertsChoice, KernelsChoice, Reduction
from peagle.engine.devices.remote import Coordinator
from peagle.engine.host.handoff import Fingerprints
from peagle.loading.checkpoints import DEMO, WEIGHTLESS, another_target, draft_limits, drafter_path, resolve
from peagle.loading.defaults import chosen_implementation, default_chunk, default_dtype, steps_per_dispatch
from peagle.loading.fit import AuxLayers, check_fit, chosen_window, warn_of_windows, windowed
from peagle.ops import cuda
from peagle.ops.attention import CacheGroup
from peagle.ops.collectives import Ranks
from peagle.ops.expert_matmul import PackedExperts
from peagle.ops.kernels import Implementation, describe_kernels
from peagle.ops.linear import PackedMatrix, SplitMatrix, split_outputs, to_mxfp4
from peagle.pair import Loaded, Pair
from peagle.parallel.mesh import AXIS, MeshShape, Sharded, make_meshes, parse_mesh, replicate, shard
from peagle.protocols import Drafter, Target
from peagle.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from drafter.config import DrafterConfig
    from drafter.params import DrafterParams
    from drafter.vocabulary import DraftVocab
    from target.load import LoadedTarget
    from target.model import GptOss

NO_STOP_TOKEN = (  # a warning, which follows the directory's name
    "no stop token is named in generation_config.json, config.json or the tokenizer's files, so every answer takes its "
    "whole budget; expected eos_token_id in generation_config.json"
)


def load(
    target: str | Path = DEMO,
    drafter: str | Path | None = DEMO,
    *,
    dtype: DtypeName | None = None,
    experts: ExpertsChoice = "auto",
    kernels: KernelsChoice = "auto",
    draft_vocab: int | str | None = None,
    drafter_window: int | str = AUTO,
    aux_layer_ids: Sequence[int] | None = None,
    mesh: str | None = None,
    reduce: Reduction = "ordered",
    retain_full_kv: bool = False,
    query_blocks: int = 1,
    ffn_blocks: int = 1,
    progress: Callable[[int, int], None] | None = None,
    coordinator: Coordinator | None = None,
) -> Pair:
    """Load a target and a drafter from checkpoint directories, or the demo pair of the package.

        target           a directory, or "demo"; a directory of that name is "./demo"
        drafter          a directory of P-EAGLE, EAGLE-3 or DFlash; "demo-eagle3" or "demo-dflash"; "ngram", without
                         weights; None: plain decoding only
        dtype            of arithmetic and caches; default: `default_dtype`
        experts          "packed" keeps MXFP4 in memory, "expanded" dequantises at load, "auto": the fastest that fits
        kernels          "native": the compiled kernels, or an error; "xla": XLA's own code; "auto": the compiled
                         kernels if they run here (`peagle info`)
        draft_vocab      propose only this many of the most frequent tokens, or those in a file (drafter.vocabulary)
        drafter_window   sliding window of the drafter's attention, in positions; "off": none; "auto": the window in
                         speculation.json beside the drafter, else those of its config.json
        aux_layer_ids    0-based target layers whose outputs the drafter reads; default: those in its config.json
        mesh             shard the target over devices, as "tp=2" or "tp=2,ep=4" (peagle.parallel.mesh), and the
                         drafter's head; the rest of the drafter is on each device. "dp=2": two such replicas, which
                         share the slots of an engine (`Pair.replicas`)
        reduce           sum over devices "ordered", in rank order, or by "psum", an all-reduce
        retain_full_kv   windowed layers keep all positions, so that a prompt reuses any cached prefix
        query_blocks, ffn_blocks
                         blocks of rows in which a pass over a prompt computes attention and experts; more take less
                         memory
        progress         called with (bytes of the target read, total bytes) during the load
        coordinator      sends to the other processes of a mesh (peagle.workflows.worker)

    `Pair.loaded` describes the choices. Raises InputError for checkpoints that cannot be run, do not fit together, or
    exceed the memory; if possible before any weights are read. Warns (InputWarning) if aux layers or a vocabulary map
    may follow another convention, a window hides nothing, or there is no stop token.
    """
    from target.load import load_target
    from target.model import GptOss

    shape = _mesh_shape(mesh, reduce)
    target_directory = resolve(target, "target")
    drafter_directory = drafter_path(target, drafter)
    _aux_layers(target_directory, drafter_directory, aux_layer_ids)  # check before weights are read
    if draft_vocab is not None:
        _vocabulary(target_directory, drafter_directory, draft_vocab)
    chosen_window(drafter_directory, drafter_window)
    tokenizer = load_tokenizer(target_directory)
    implementation = chosen_implementation(kernels)
    dtype = dtype or default_dtype(target_directory, implementation)

    _refuse_too_large(target_directory, drafter_directory, dtype, experts, implementation, shape or MeshShape())
    options: Any = {"dtype": jnp.dtype(dtype), "experts": experts, "implementation": implementation}
    settings: Any = {"retain_full_kv": retain_full_kv, "query_blocks": query_blocks, "ffn_blocks": ffn_blocks}
    plain: Target
    if shape is None:
        loaded = load_target(target_directory, **options, progress=progress)
        plain = GptOss(loaded.params, loaded.config, **settings)
    else:
        in_order = reduce == "ordered"
        options |= {"in_order": in_order, "settings": settings, "progress": progress}
        plain, loaded = load_over(target_directory, shape, **options)
    if not loaded.stop_token_ids:
        warnings.warn(f"{target_directory}: {NO_STOP_TOKEN}", InputWarning, stacklevel=2)
    pair = Pair(
        target=plain,
        plain_target=plain,
        drafter=None,
        tokenizer=tokenizer,
        stop_token_ids=loaded.stop_token_ids,
        loaded=Loaded(
            dtype=dtype,
            experts=loaded.experts,
            kernels=describe_kernels() if kernels != "xla" else "XLA",
            mesh=None if shape is None else f"{shape.devices} devices, {shape}",
        ),
        retain_full_kv=retain_full_kv,
        steps_per_dispatch=steps_per_dispatch(tree_bytes(loaded.params)),
        prefill_chunk=default_chunk(),
        fingerprints=Fingerprints(_digest(fingerprint(target_directory), dtype)),
        coordinator=coordinator,
    )
    if shape is not None and isinstance(plain, Sharded):
        copies = map(plain.on, make_meshes(shape)[1:])
        others = tuple(dataclasses.replace(pair, target=copy, plain_target=copy) for copy in copies)
        pair = dataclasses.replace(pair, replicas=others)
    return with_drafter(
        pair, target, drafter, draft_vocab=draft_vocab, drafter_window=drafter_window, aux_layer_ids=aux_layer_ids
    )


def _mesh_shape(mesh: str | None, reduce: str) -> MeshShape | None:
    """Read the shape of a mesh; None: one device.

    Raises InputError for an unknown `reduce`, or one without a mesh.
    """
    if reduce not in ("ordered", "psum"):
        raise InputError(f"reduce is {reduce!r}; expected ordered or psum")
    if mesh is None and reduce != "ordered":
        raise InputError(f"reduce is {reduce}, but there is no mesh of devices that sum; give --mesh, or leave it out")
    return None if mesh is None else parse_mesh(mesh)


def load_over(
    directory: Path,
    shape: MeshShape,
    *,
    in_order: bool = True,
    aux_layer_ids: Sequence[int] = (),
    settings: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> tuple[Sharded, "LoadedTarget"]:
    """Load a target over the devices of a mesh: several ranks at once, each reads its own bytes (`parallel.shard`).

    With dp, over the devices of the first replica. options: those of target.load.load_target, whose bound on memory
    holds for all ranks together. in_order: sum in rank order (peagle.ops.collectives.Ranks). settings: further fields
    of GptOss.

    Returns the target, and the loaded ranks with their parameters side by side. Raises InputError, before any weights
    are read, for a model that cannot be sharded so, or too few devices.
    """
    from target.load import LoadedTarget, chosen_experts, cut_not_for_hopper, inspect_target, load_target
    from target.model import GptOss
    from target.shard import Rank, check_ranks, lane_copies

    config = inspect_target(directory).config
    check_ranks(config, shape.tp, shape.ep)
    mesh = make_meshes(shape)[0]
    first = Rank(0, shape.tp, shape.ep, lane_copies(config, shape.ranks, options.get("implementation")))
    # resolved once: free memory changes while ranks load
    options["experts"] = chosen_experts(
        directory, options.get("dtype", jnp.float32), options.get("experts", "auto"), options.get("implementation")
    )
    loaded: list[dict[str, Any]] = []  # each rank's LoadedTarget without its parameters
    read: dict[int, float] = {}  # share of the bytes that are read, by rank
    reporting = threading.Lock()

    def of_rank(rank: int, go_on: Callable[[], None]) -> GptOss:
        def watch(done: int, total: int) -> None:
            go_on()
            if progress is not None:
                with reporting:
                    read[rank] = done / total
                    progress(round(sum(read.values()) * total), len(mesh.local_devices) * total)

        part = load_target(directory, rank=dataclasses.replace(first, index=rank), progress=watch, **options)
        loaded.append({name: value for name, value in vars(part).items() if name != "params"})
        ranks = Ranks(AXIS, shape.ranks, shape.ep, in_order)
        return GptOss(part.params, part.config, tuple(aux_layer_ids), ranks=ranks, **(settings or {}))

    parts = shard(of_rank, mesh)
    experts = parts.params.layers[0].moe.experts
    if options.get("implementation") != "xla" and cuda.has_tiles() and isinstance(experts, PackedExperts):
        cut = cut_not_for_hopper(config, first)
        if cut is not None and experts.gate_up_bias.dtype == jnp.bfloat16:
            warnings.warn(cut, InputWarning, stacklevel=2)
    copies = first.copies_of_head(config.num_kv_heads), first.kv_copies
    return Sharded(parts, mesh, *copies), LoadedTarget(**loaded[0], params=parts.params)


def resolve_layout(
    target: str | Path, dtype: DtypeName | None, experts: ExpertsChoice, kernels: KernelsChoice
) -> tuple[DtypeName, ExpertsChoice]:
    """Resolve dtype None and experts "auto" on this machine, for processes that must all use the same.

    Raises InputError as `load` does.
    """
    from target.load import chosen_experts

    directory, implementation = resolve(target, "target"), chosen_implementation(kernels)
    dtype = dtype or default_dtype(directory, implementation)
    return dtype, chosen_experts(directory, jnp.dtype(dtype), experts, implementation)


@dataclass(frozen=True)
class _WithoutWeights:
    """The target of a pair that only makes requests; other processes hold its weights."""

    vocab_size: int
    max_positions: int
    cache_groups: tuple[CacheGroup, ...]

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise InputError("this target was read without its weights; expected a pair made by load")

    init_pages = init_cache = extend = _refuse


def without_weights(target: str | Path) -> Pair:
    """Read what requests to a target need: tokenizer, vocabulary, positions and stop tokens."""
    from target.load import inspect_target
    from target.model import cache_groups

    directory = resolve(target, "target")
    files = inspect_target(directory)
    config = files.config
    model = _WithoutWeights(config.vocab_size, config.max_positions, cache_groups(config))
    return Pair(model, model, None, load_tokenizer(directory), files.stop_token_ids)


def _refuse_too_large(
    target_directory: Path,
    drafter_directory: Path | None,
    dtype: DtypeName,
    experts: ExpertsChoice,
    implementation: Implementation | None,
    shape: MeshShape,
) -> None:
    """Raise InputError, naming the options that need least, for weights that exceed the memory.

    On CPU the devices of a mesh share memory; elsewhere the first device is checked, which holds most.
    """
    from drafter.load import weight_bytes as drafter_bytes
    from target.load import inspect_target
    from target.load import weight_bytes as target_bytes
    from target.shard import Rank

    ranks = range(shape.ranks // jax.process_count() if jax.default_backend() == "cpu" else 1)
    replicas = shape.dp if jax.default_backend() == "cpu" else 1

    def needed(dtype: DtypeName, experts: ExpertsChoice) -> dict[str, int]:
        options: Any = {"dtype": jnp.dtype(dtype), "experts": experts, "implementation": implementation}
        parts = (target_bytes(target_directory, **options, rank=Rank(rank, shape.tp, shape.ep)) for rank in ranks)
        sizes = {"the target": replicas * sum(parts)}
        if drafter_directory is not None:
            size = drafter_bytes(drafter_directory, jnp.dtype(dtype), implementation=implementation)
            sizes["the drafter"] = size * len(ranks) * replicas
        return sizes

    def least() -> str:
        packed = inspect_target(target_directory).mxfp4
        size = format_size(sum(needed("bfloat16", "packed" if packed else "auto").values()))
        return f"--dtype bfloat16 takes the least, {size}; or take a smaller model"

    refuse_too_large(needed(dtype, experts), least)


def with_drafter(
    pair: Pair,
    target: str | Path,
    drafter: str | Path | None,
    *,
    draft_vocab: int | str | None = None,
    drafter_window: int | str = AUTO,
    aux_layer_ids: Sequence[int] | None = None,
) -> Pair:
    """Give a pair another drafter, as `load` would, without loading the target again.

    target: the argument that the pair was loaded with. Raises InputError, and warns, as `load` does.
    """
    from drafter.propose import drafter_of
    from drafter.vocabulary import narrow

    target_directory, drafter_directory = resolve(target, "target"), drafter_path(target, drafter)
    plain = pair.plain_target
    drafting = WEIGHTLESS[str(drafter)]() if drafter in WEIGHTLESS else None
    layers = _aux_layers(target_directory, drafter_directory, aux_layer_ids)
    narrowed = window_description = drafted = None
    drafter_fingerprint = "" if drafter is None else str(drafter)  # n-gram: no files
    most_drafts, trained_drafts = draft_limits(drafter_directory)
    window = chosen_window(drafter_directory, drafter_window)
    vocab = None if draft_vocab is None else _vocabulary(target_directory, drafter_directory, draft_vocab)
    if drafter_directory is not None:
        named = layers.outputs if layers is not None and layers.converted_from_inputs else aux_layer_ids
        params, config = _load_drafter(drafter_directory, pair, target_directory, named)
        if vocab is not None:
            params, config = narrow(params, config, vocab)
            drafted = vocab.token_ids
            narrowed = f"{config.draft_vocab_size} tokens, by {vocab.source}"
        if pair.loaded.dtype == "bfloat16" and isinstance(params.lm_head, PackedMatrix):
            # most of what a drafter reads; fewer bits cost less than 1 % of the acceptance length, and no output
            params = dataclasses.replace(params, lm_head=to_mxfp4(params.lm_head))
        config, window_description = windowed(config, window, by_option=drafter_window != AUTO)
        warn_of_windows(config, plain.max_positions)
        drafting = dataclasses.replace(drafter_of(params, config), retain_full_kv=pair.retain_full_kv)
        reads = (None if layers is None else layers.outputs, config, drafted)
        drafter_fingerprint = _digest(fingerprint(drafter_directory), pair.loaded.dtype, *reads)
        if (other := another_target(drafter_directory, target_directory)) is not None:
            warnings.warn(other, InputWarning, stacklevel=2)
    if layers is not None and layers.warning is not None:
        warnings.warn(layers.warning, InputWarning, stacklevel=2)
    aux_layer_ids = () if layers is None else layers.outputs
    replicas = (_drafting(replica, drafting, aux_layer_ids) for replica in pair.replicas)
    return dataclasses.replace(
        _drafting(pair, drafting, aux_layer_ids),
        replicas=tuple(replicas),
        loaded=dataclasses.replace(
            pair.loaded,
            aux_layers=None if layers is None else layers.description,
            draft_vocab=narrowed,
            drafter_window=window_description,
        ),
        auto_drafts=most_drafts,
        trained_drafts=trained_drafts,
        fingerprints=Fingerprints(pair.fingerprints.target, drafter_fingerprint),
    )


def _drafting(pair: Pair, drafter: Drafter | None, aux_layer_ids: tuple[int, ...]) -> Pair:
    """Put a drafter on a pair's devices, and let the target return the aux_hidden that it reads."""
    plain = pair.plain_target
    with_aux = local_model(plain).replace(aux_layer_ids=aux_layer_ids)  # type: ignore[attr-defined]
    target = plain.replace(parts=with_aux) if isinstance(plain, Sharded) else with_aux  # type: ignore[attr-defined]
    own = drafter_over(drafter, plain.mesh) if isinstance(plain, Sharded) else drafter
    return dataclasses.replace(pair, target=target, drafter=own)


def drafter_over(drafter: Drafter | None, mesh: Mesh) -> Drafter | None:
    """Copy a drafter to the devices of a mesh; shard its head, if it has one, by vocabulary.

    The head is most of what a drafter reads in a pass. Its layers are few and narrow: sharding them would save few
    bytes, for two sums over ranks per layer.
    """
    from drafter.params import DrafterParams

    params = getattr(drafter, "params", None)
    if isinstance(params, DrafterParams) and mesh.size > 1 and not isinstance(params.lm_head, SplitMatrix):
        params = dataclasses.replace(params, lm_head=split_outputs(params.lm_head, mesh))
        drafter = drafter.replace(params=params)  # type: ignore[union-attr]
    return replicate(drafter, mesh)


def _digest(*parts: object) -> str:
    """Hash values that must be equal on both sides of a hand-off (peagle.engine.host.handoff)."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _load_drafter(
    directory: Path, pair: Pair, target_directory: Path, aux_layer_ids: Sequence[int] | None
) -> "tuple[DrafterParams, DrafterConfig]":
    """Load a drafter with weights, which shares the target's embedding and head if it has none of its own.

    Raises InputError for weights that exceed the memory.
    """
    from drafter.load import load_drafter, weight_bytes

    target, dtype = pair.plain_target, jnp.dtype(pair.loaded.dtype)
    implementation = local_model(target).params.implementation
    size = weight_bytes(directory, dtype, implementation=implementation)
    if isinstance(target, Sharded) and jax.default_backend() == "cpu":
        size *= target.local_ranks * (1 + len(pair.replicas))  # all ranks share one memory
    refuse_too_large({f"the drafter {directory}": size}, lambda: "take a smaller drafter, or --dtype bfloat16")
    embedding, lm_head = _embedding_and_head(target, target_directory, dtype, directory)
    return load_drafter(
        directory,
        dtype,
        implementation=implementation,
        target_embedding=embedding,
        target_lm_head=lm_head,
        aux_layer_ids=aux_layer_ids,
    )


def local_model(target: Target) -> "GptOss":
    """Return the model of a loaded target; over a mesh, the ranks' parts side by side in every array."""
    from target.model import GptOss

    model = target.parts if isinstance(target, Sharded) else target
    assert isinstance(model, GptOss)
    return model


def _embedding_and_head(
    target: Target, target_directory: Path, dtype: jnp.dtype, drafter_directory: Path
) -> tuple[jax.Array | None, jax.Array | PackedMatrix | None]:
    """Return the target's embedding and head, whole, for a drafter that may share them.

    No rank of a sharded target holds the whole head: read both again if the drafter needs them, else return None.
    """
    from drafter.dialects import open_drafter
    from drafter.load import shared_tensors
    from target.load import load_embedding_and_head

    params = local_model(target).params
    if not isinstance(target, Sharded):
        return params.embedding, params.lm_head
    if not shared_tensors(open_drafter(drafter_directory)):
        return None, None
    return load_embedding_and_head(target_directory, dtype, params.implementation)


def _aux_layers(
    target_directory: Path, drafter_directory: Path | None, aux_layer_ids: Sequence[int] | None
) -> AuxLayers | None:
    """Return the aux layers of a drafter with weights; None for another drafter.

    Raises InputError as `check_fit` does, and for aux_layer_ids without such a drafter.
    """
    if drafter_directory is not None:
        return check_fit(target_directory, drafter_directory, aux_layer_ids)
    if aux_layer_ids is not None:
        raise InputError("aux layers are given, but there is no drafter with weights that reads any; leave them out")
    return None


def _vocabulary(target_directory: Path, drafter_directory: Path | None, draft_vocab: int | str) -> "DraftVocab":
    """Choose the draft vocabulary. Raises InputError if it is impossible, or there is no head to narrow."""
    from drafter.vocabulary import choose
    from target.load import inspect_target

    if drafter_directory is None:
        raise InputError("a draft vocabulary is given, but no drafter with weights; give a drafter, or leave it out")
    files = inspect_target(target_directory)
    return choose(str(draft_vocab), drafter_directory, files.config.vocab_size, files.stop_token_ids)
