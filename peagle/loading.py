"""Load checkpoints as a `Pair`: read both models, check that they fit each other and the memory, choose kernels.

Start at `load`. Apart from workflows/ and the commands, only this module of peagle/ imports target/ and drafter/.
"""

import dataclasses
import hashlib
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from peagle.api import DEFAULT_WIDTHS, Pair
from peagle.config import AUTO, DEFAULT_CHUNK, GPU_CHUNK
from peagle.drafters.ngram import NGram
from peagle.engine.handoff import Fingerprints
from peagle.engine.remote import Lead
from peagle.engine.widths import OFF, SPECULATION_FILE, WidthTable, read_widths, read_window
from peagle.hub import cached, is_name
from peagle.ops import cuda
from peagle.ops.attention import CacheGroup, PagedCache, Pages
from peagle.ops.checkpoint import CONFIG, Checkpoint, fingerprint, read_checkpoint, read_json
from peagle.ops.errors import InputError, InputWarning, cannot_start
from peagle.ops.kernels import Implementation, for_weights
from peagle.ops.kernels import in_words as kernels_in_words
from peagle.ops.linear import PackedMatrix
from peagle.ops.memory import refuse_too_large, size_in_words, tree_bytes
from peagle.ops.messages import VerifyOutput
from peagle.ops.native import available as native_available
from peagle.parallel import MeshShape, Sharded, make_meshes, parse_mesh, ranks_of, replicate, shard
from peagle.protocols import Drafter, Target
from peagle.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from drafter.config import DrafterConfig
    from drafter.dialects import NamedAuxLayers
    from drafter.params import DrafterParams
    from drafter.vocabulary import DraftVocab
    from target.config import TargetConfig
    from target.load import LoadedTarget
    from target.model import GptOss

DEMO, DEMO_EAGLE3, NGRAM = "demo", "demo-eagle3", "ngram"
DEMO_DIRECTORY = Path(__file__).parent / "demo"
HELD_OUT = DEMO_DIRECTORY / "heldout_prompts.jsonl"  # not in the demo pair's training data
MOST_STEPS_PER_DISPATCH = 24
NO_STOP_TOKEN = (  # a warning; the directory stands before it
    "no stop token is named in generation_config.json, config.json or the tokenizer's files, so every answer takes its "
    "whole budget; expected eos_token_id in generation_config.json"
)


@dataclass(frozen=True)
class Weightless:
    """A drafter without weights, which is asked for by its name."""

    make: Callable[[], Drafter]
    widths: WidthTable  # its drafts by load


WEIGHTLESS = {
    # more drafts, or any with a temperature, do not pay
    NGRAM: Weightless(NGram, WidthTable({1: 2, 4: 1}, sampled=False)),
}
DtypeName = Literal["float32", "bfloat16"]
ExpertsChoice = Literal["auto", "packed", "expanded"]
KernelsChoice = Literal["auto", "native", "xla"]


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
    reduce: Literal["ordered", "psum"] = "ordered",
    retain_full_kv: bool = False,
    progress: Callable[[int, int], None] | None = None,
    lead: Lead | None = None,
) -> Pair:
    """Load a target and a drafter from checkpoint directories, or the demo pair of the package.

    drafter: "demo-eagle3" is the demo's autoregressive drafter, for comparison; "ngram" needs no weights; None: plain
    decoding only. Give a directory of such a name as "./demo". dtype: by default float32 on CPU, bfloat16 elsewhere.
    experts: "packed" keeps MXFP4 in memory, "expanded" dequantises at load, "auto" takes the fastest that fits.
    kernels: "native" runs the compiled CPU kernels or raises, "xla" runs without them, "auto" uses them if they run
    (see `peagle info`). draft_vocab: propose only this many of the most frequent tokens, or the tokens listed in a file
    (drafter.vocabulary). drafter_window: the drafter's attention sees this many last positions only, or all if "off";
    "auto" takes the window in speculation.json beside the drafter, else those of its config.json (see
    `Pair.drafter_window`). aux_layer_ids: the 0-based layers of the target whose outputs the drafter reads, instead of
    those in its config.json (see `Pair.aux_layers`). mesh: cut the target over devices, as "tp=2" or "tp=2,ep=4"
    (peagle.parallel); the drafter is on each of them, but for its head, which is cut. With "dp=2" there are two such
    copies, which share the slots of an engine (`Pair.replicas`). reduce: sum over devices in order, or by "psum", an
    all-reduce.
    retain_full_kv: layers with a window keep all positions, so that requests begin anywhere in what the prefix cache
    holds. progress(bytes of the target read, total bytes) is called during the load. lead: of a mesh over several
    processes, what this one sends to the others (peagle.workflows.follow).

    Raises InputError for checkpoints that cannot be run, do not fit together, or take more memory than there is; if
    possible before any weights are read. Warns (InputWarning) if aux layers or a vocabulary map look like another
    convention's, a window hides nothing, or there is no stop token.
    """
    from target.load import load_target
    from target.model import GptOss

    shape = _mesh_shape(mesh, reduce)
    target_directory = resolve(target, "target")
    drafter_directory = drafter_path(target, drafter)
    _aux_layers(target_directory, drafter_directory, aux_layer_ids)  # check them before weights are read
    if draft_vocab is not None:
        _vocabulary(target_directory, drafter_directory, draft_vocab)
    asked_window(drafter_directory, drafter_window)
    tokenizer = load_tokenizer(target_directory)
    dtype = dtype or default_dtype()
    implementation = _implementation(kernels)

    _refuse_too_large(target_directory, drafter_directory, dtype, experts, implementation, shape or MeshShape())
    options: Any = {"dtype": jnp.dtype(dtype), "experts": experts, "implementation": implementation}
    plain: Target
    if shape is None:
        loaded = load_target(target_directory, **options, progress=progress)
        plain = GptOss(loaded.params, loaded.config, retain_full_kv=retain_full_kv)
    else:
        in_order = reduce == "ordered"
        options |= {"in_order": in_order, "retain_full_kv": retain_full_kv, "progress": progress}
        plain, loaded = load_over(target_directory, shape, **options)
    if not loaded.stop_token_ids:
        warnings.warn(f"{target_directory}: {NO_STOP_TOKEN}", InputWarning, stacklevel=2)
    pair = Pair(
        target=plain,
        plain_target=plain,
        drafter=None,
        tokenizer=tokenizer,
        stop_token_ids=loaded.stop_token_ids,
        dtype=dtype,
        experts=loaded.experts,
        kernels=kernels_in_words() if kernels != "xla" else "XLA",
        mesh=None if shape is None else f"{shape.devices} devices, {shape}",
        retain_full_kv=retain_full_kv,
        steps_per_dispatch=steps_per_dispatch(tree_bytes(loaded.params)),
        prefill_chunk=default_chunk(),
        programs_by_width=implementation != "native",
        fingerprints=Fingerprints(_digest(fingerprint(target_directory), dtype)),
        lead=lead,
    )
    if shape is not None and isinstance(plain, Sharded):
        copies = map(plain.on, make_meshes(shape)[1:])
        others = tuple(dataclasses.replace(pair, target=copy, plain_target=copy, _engines={}) for copy in copies)
        pair = dataclasses.replace(pair, replicas=others)
    return with_drafter(
        pair, target, drafter, draft_vocab=draft_vocab, drafter_window=drafter_window, aux_layer_ids=aux_layer_ids
    )


def _mesh_shape(mesh: str | None, reduce: str) -> MeshShape | None:
    """Read the shape of a mesh; None: one device.

    Raises InputError for a way to sum that is none, or one without a mesh.
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
    retain_full_kv: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> tuple[Sharded, "LoadedTarget"]:
    """Load a target over the devices of a mesh, each rank its own bytes, several at once (`peagle.parallel.shard`).

    With dp, over those of the first replica. Options are those of target.load.load_target, and so is the bound of
    memory: on CPU, where all ranks share one, within 1.15 of their parts together.

    in_order: sum in rank order (peagle.ops.collectives.Ranks). Returns the target, and what was loaded with its
    parameters side by side. Raises InputError, before any weights are read, for a model that cannot be cut so, or too
    few devices.
    """
    from target.load import LoadedTarget, chosen_experts, inspect_target, load_target
    from target.model import GptOss
    from target.shard import Place, check_ranks

    config = inspect_target(directory).config
    check_ranks(config, shape.tp, shape.ep)
    mesh = make_meshes(shape)[0]
    # chosen once: what is free changes from rank to rank
    options["experts"] = chosen_experts(
        directory, options.get("dtype", jnp.float32), options.get("experts", "auto"), options.get("implementation")
    )
    loaded: list[dict[str, Any]] = []  # what each rank loads beside the parameters
    read: dict[int, float] = {}  # the share of each rank's bytes
    reporting = threading.Lock()

    def of_rank(rank: int, go_on: Callable[[], None]) -> GptOss:
        def watch(done: int, total: int) -> None:
            go_on()
            if progress is not None:
                with reporting:
                    read[rank] = done / total
                    progress(round(sum(read.values()) * total), len(mesh.local_devices) * total)

        part = load_target(directory, place=Place(rank, shape.tp, shape.ep), progress=watch, **options)
        loaded.append({name: value for name, value in vars(part).items() if name != "params"})
        return GptOss(part.params, part.config, tuple(aux_layer_ids), retain_full_kv, ranks_of(shape, in_order))

    parts = shard(of_rank, mesh)
    kv_copies = max(shape.ranks // config.num_kv_heads, 1)
    return Sharded(parts, mesh, kv_copies), LoadedTarget(**loaded[0], params=parts.params)


def experts_in_memory(
    target: str | Path, dtype: DtypeName, experts: ExpertsChoice, kernels: KernelsChoice
) -> ExpertsChoice:
    """Decide what "auto" is here, for several processes that must decide alike. Raises InputError as `load` does."""
    from target.load import chosen_experts

    return chosen_experts(resolve(target, "target"), jnp.dtype(dtype), experts, _implementation(kernels))


@dataclass(frozen=True)
class _TargetElsewhere:
    """The target of a pair that only makes requests: its weights are in other processes."""

    vocab_size: int
    max_positions: int
    cache_groups: tuple[CacheGroup, ...]

    def init_pages(self, *_: Any, **__: Any) -> tuple[Pages, ...]:
        raise self._refusal()

    def init_cache(self, *_: Any, **__: Any) -> PagedCache:
        raise self._refusal()

    def extend(self, *_: Any, **__: Any) -> tuple[VerifyOutput, PagedCache]:
        raise self._refusal()

    def _refusal(self) -> InputError:
        return InputError("this target was read without its weights; expected a pair made by load")


def without_weights(target: str | Path) -> Pair:
    """Read what makes requests for a target: its tokenizer, vocabulary, positions and stop tokens."""
    from target.load import inspect_target
    from target.model import cache_groups

    directory = resolve(target, "target")
    files = inspect_target(directory)
    config = files.config
    elsewhere = _TargetElsewhere(config.vocab_size, config.max_positions, cache_groups(config))
    return Pair(elsewhere, elsewhere, None, load_tokenizer(directory), files.stop_token_ids)


def _refuse_too_large(
    target_directory: Path,
    drafter_directory: Path | None,
    dtype: DtypeName,
    experts: ExpertsChoice,
    implementation: Implementation | None,
    shape: MeshShape,
) -> None:
    """Raise InputError for weights that take more memory than there is; it names the smallest choice.

    Devices of a mesh share one memory on CPU; elsewhere the first of them, which has most to hold, is looked at.
    """
    from drafter.load import weight_bytes as drafter_bytes
    from target.load import inspect_target
    from target.load import weight_bytes as target_bytes
    from target.shard import Place

    ranks = range(shape.ranks // jax.process_count() if jax.default_backend() == "cpu" else 1)
    replicas = shape.dp if jax.default_backend() == "cpu" else 1

    def needed(dtype: DtypeName, experts: ExpertsChoice) -> dict[str, int]:
        options: Any = {"dtype": jnp.dtype(dtype), "experts": experts, "implementation": implementation}
        parts = (target_bytes(target_directory, **options, place=Place(rank, shape.tp, shape.ep)) for rank in ranks)
        sizes = {"the target": replicas * sum(parts)}
        if drafter_directory is not None:
            size = drafter_bytes(drafter_directory, jnp.dtype(dtype), implementation=implementation)
            sizes["the drafter"] = size * len(ranks) * replicas
        return sizes

    def least() -> str:
        packed = inspect_target(target_directory).mxfp4
        size = size_in_words(sum(needed("bfloat16", "packed" if packed else "auto").values()))
        options = "--experts packed --dtype bfloat16" if packed else "--dtype bfloat16"
        return f"{options} takes the least, {size}; or take a smaller model"

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
    """Replace the drafter of a pair, as `load` would make it, without loading the target again.

    `target` must be the argument from which the pair was loaded. Raises InputError, and warns, as `load` does.
    """
    from drafter.propose import drafter_of
    from drafter.vocabulary import narrow

    target_directory, drafter_directory = resolve(target, "target"), drafter_path(target, drafter)
    plain = pair.plain_target
    drafting = WEIGHTLESS[str(drafter)].make() if drafter in WEIGHTLESS else None
    layers = _aux_layers(target_directory, drafter_directory, aux_layer_ids)
    narrowed = window_in_words = drafted = None
    print_of_drafter = "" if drafter is None else str(drafter)  # n-gram: no files
    widths = widths_of(drafter, drafter_directory)
    window = asked_window(drafter_directory, drafter_window)
    vocab = None if draft_vocab is None else _vocabulary(target_directory, drafter_directory, draft_vocab)
    if drafter_directory is not None:
        named = layers.outputs if layers is not None and layers.reread else aux_layer_ids
        params, config = _load_drafter(drafter_directory, pair, target_directory, named)
        if vocab is not None:
            params, config = narrow(params, config, vocab)
            drafted = vocab.token_ids
            narrowed = f"{config.draft_vocab_size} tokens, by {vocab.source}"
        config, window_in_words = windowed(config, window, given=drafter_window != AUTO)
        _warn_of_windows(config, plain.max_positions)
        drafting = dataclasses.replace(drafter_of(params, config), retain_full_kv=pair.retain_full_kv)
        seen = (None if layers is None else layers.outputs, config.windows, drafted)
        print_of_drafter = _digest(fingerprint(drafter_directory), pair.dtype, *seen)
        if (other := another_target(drafter_directory, target_directory)) is not None:
            warnings.warn(other, InputWarning, stacklevel=2)
    if layers is not None and layers.doubt is not None:
        warnings.warn(layers.doubt, InputWarning, stacklevel=2)
    aux_layer_ids = () if layers is None else layers.outputs
    replicas = (_drafting(each, drafting, aux_layer_ids) for each in pair.replicas)
    return dataclasses.replace(
        _drafting(pair, drafting, aux_layer_ids),
        replicas=tuple(replicas),
        aux_layers=None if layers is None else layers.description,
        draft_vocab=narrowed,
        drafter_window=window_in_words,
        widths=widths,
        fingerprints=Fingerprints(pair.fingerprints.target, print_of_drafter),
    )


def _drafting(pair: Pair, drafter: Drafter | None, aux_layer_ids: tuple[int, ...]) -> Pair:
    """Give a pair another drafter, on its own devices, and the aux_hidden that this reads."""
    plain = pair.plain_target
    with_aux = local_model(plain).replace(aux_layer_ids=aux_layer_ids)  # type: ignore[attr-defined]
    target = plain.replace(parts=with_aux) if isinstance(plain, Sharded) else with_aux  # type: ignore[attr-defined]
    own = drafter_over(drafter, plain.mesh) if isinstance(plain, Sharded) else drafter
    return dataclasses.replace(pair, target=target, drafter=own, _engines={})


def drafter_over(drafter: Drafter | None, mesh: Mesh) -> Drafter | None:
    """Put a drafter on the devices of a mesh: its head cut, if it has one (drafter.shard), the rest on each."""
    from drafter.params import DrafterParams
    from drafter.shard import split

    params = getattr(drafter, "params", None)
    if isinstance(params, DrafterParams) and mesh.size > 1:
        drafter = drafter.replace(params=split(params, mesh))  # type: ignore[union-attr]
    return replicate(drafter, mesh)


def _digest(*parts: object) -> str:
    """Hash what must be equal where a sequence goes on (peagle.engine.handoff)."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _load_drafter(
    directory: Path, pair: Pair, target_directory: Path, aux_layer_ids: Sequence[int] | None
) -> "tuple[DrafterParams, DrafterConfig]":
    """Load a drafter with weights, sharing the target's embedding and head if it has none of its own.

    Raises InputError for weights that take more memory than there is.
    """
    from drafter.load import load_drafter, weight_bytes

    target, dtype = pair.plain_target, jnp.dtype(pair.dtype)
    implementation = local_model(target).params.implementation
    size = weight_bytes(directory, dtype, implementation=implementation)
    if isinstance(target, Sharded) and jax.default_backend() == "cpu":
        size *= target.local_ranks * (1 + len(pair.replicas))  # which share one memory
    refuse_too_large({f"the drafter {directory}": size}, lambda: "take a smaller drafter, or --dtype bfloat16")
    embedding, lm_head = _ends(target, target_directory, dtype, directory)
    return load_drafter(
        directory,
        dtype,
        implementation=implementation,
        target_embedding=embedding,
        target_lm_head=lm_head,
        aux_layer_ids=aux_layer_ids,
    )


def _warn_of_windows(config: "DrafterConfig", max_positions: int) -> None:
    """Warn of a window that is wider than all positions of the target."""
    if (widest := max((each or 0 for each in config.windows or ()), default=0)) > max_positions:
        warnings.warn(
            f"the drafter's window of {widest} positions is larger than the target's {max_positions}, so it hides "
            "nothing",
            InputWarning,
            stacklevel=3,
        )


def local_model(target: Target) -> "GptOss":
    """Return the model of a loaded target; of one over a mesh the ranks' parts, side by side in every array."""
    from target.model import GptOss

    model = target.parts if isinstance(target, Sharded) else target
    assert isinstance(model, GptOss)
    return model


def _ends(
    target: Target, target_directory: Path, dtype: jnp.dtype, drafter_directory: Path
) -> tuple[jax.Array | None, jax.Array | PackedMatrix | None]:
    """Return the target's embedding and head, whole, for a drafter that may share them.

    No rank of a target over a mesh has all of them: they are read again if the drafter's files lack its own, else None.
    """
    from drafter.load import shared_tensors
    from target.load import load_ends

    params = local_model(target).params
    if not isinstance(target, Sharded):
        return params.embedding, params.lm_head
    return (
        load_ends(target_directory, dtype, params.implementation) if shared_tensors(drafter_directory) else (None, None)
    )


def _aux_layers(
    target_directory: Path, drafter_directory: Path | None, aux_layer_ids: Sequence[int] | None
) -> "AuxLayers | None":
    """Find the aux layers of a drafter with weights; None for another drafter.

    Raises InputError as `check_fit` does, and for aux_layer_ids without such a drafter.
    """
    if drafter_directory is not None:
        return check_fit(target_directory, drafter_directory, aux_layer_ids)
    if aux_layer_ids is not None:
        raise InputError("aux layers are given, but there is no drafter with weights that reads any; leave them out")
    return None


def _vocabulary(target_directory: Path, drafter_directory: Path | None, draft_vocab: int | str) -> "DraftVocab":
    """Choose the draft vocabulary.

    Raises InputError if it is impossible, or there is no head to narrow.
    """
    from drafter.vocabulary import choose
    from target.load import inspect_target

    if drafter_directory is None:
        raise InputError("a draft vocabulary is given, but no drafter with weights; give a drafter, or leave it out")
    files = inspect_target(target_directory)
    return choose(str(draft_vocab), drafter_directory, files.config.vocab_size, files.stop_token_ids)


def asked_window(drafter_directory: Path | None, asked: int | str) -> int | Literal["off"] | None:
    """Read the window asked for, or the one in speculation.json; None: neither, so config.json decides.

    Raises InputError for a value that is no window, and for a window without a drafter.
    """
    if asked == AUTO:
        return None if drafter_directory is None else read_window(drafter_directory)
    if drafter_directory is None:
        raise InputError("a drafter window is given, but there is no drafter with weights; leave it out")
    return read_asked_window(asked)


def read_asked_window(asked: int | str) -> int | Literal["off"]:
    """Read a window that is given, not "auto". Raises InputError for anything else."""
    if asked == OFF:
        return OFF
    try:
        window = int(asked)
    except ValueError:
        window = 0
    if window < 1:
        raise InputError(
            f"the drafter window is {asked!r}; expected the positions that its attention sees, {AUTO} or {OFF}",
            "drafter_window",
        )
    return window


def windowed(
    config: "DrafterConfig", window: int | Literal["off"] | None, *, given: bool
) -> tuple["DrafterConfig", str]:
    """Give every layer that window, None leaving the config as it is; with the windows in words, and their source."""
    if window is None:
        return config, windows_in_words(config)
    source = "given" if given else f"by {SPECULATION_FILE}"
    if isinstance(window, int):
        return config.with_window(window), f"{window} positions, {source}"
    return config.with_window(None), f"{OFF}, {source}"


def windows_in_words(config: "DrafterConfig") -> str:
    """Say how far the layers of a drafter see by its config.json. Example: 2048 positions in 3 of 4 layers, by
    config.json."""
    windows = [window for window in config.windows or () if window is not None]
    if not windows:
        return f"{OFF}, by default: no file names one"
    where = "" if len(windows) == config.num_layers else f" in {len(windows)} of {config.num_layers} layers"
    return f"{' and '.join(map(str, sorted(set(windows))))} positions{where}, by config.json"


def or_demo(name: str | None) -> str:
    """Return a name as typed, by default the demo's. Raises InputError for an empty one, as of an unset variable."""
    if name == "":
        raise InputError("a target's or a drafter's name is empty; expected a directory or a name, or leave it out")
    return DEMO if name is None else name


def resolve(name: str | Path, part: Literal["target", "drafter"]) -> Path:
    """Return the directory of a name: one of the demo's, itself, or of OWNER/NAME in the local Hugging Face cache.

    A drafter may be named by the folder of its training. Nothing is fetched. Raises InputError without a demo, and for
    an OWNER/NAME that is neither a path nor in the cache.
    """
    if name == DEMO_EAGLE3 and part == "drafter":
        directory = DEMO_DIRECTORY / "drafter_eagle3"
    elif name == DEMO:
        directory = DEMO_DIRECTORY / part
    else:
        directory = cached(str(name)) if is_name(name) else Path(name)
        return drafter_folder(directory) if part == "drafter" else directory
    if not (directory / "config.json").is_file():
        raise InputError(
            f"this installation of peagle comes without the demo {part}; give checkpoint directories with --target and "
            "--drafter, or train the demo with scripts/demo"
        )
    return directory


def target_folder(name: str) -> Path | None:
    """Return the directory of a target's name; None if it is not on this machine."""
    try:
        directory = resolve(name, "target")
    except InputError:
        return None
    return directory if directory.is_dir() else None


def name_for_others(target: str | None) -> str | None:
    """Name a target for programs that look from elsewhere: a folder by its whole path, OWNER/NAME as it is.

    None if it is neither.
    """
    if target is None or is_name(target):
        return target
    directory = target_folder(target)
    return None if directory is None else str(directory.resolve())


def drafter_folder(directory: Path) -> Path:
    """Return the drafter's folder in a folder of peagle train, with a warning that names it; another folder as it is.

    Raises InputError for a training that has not written its drafter yet.
    """
    from drafter.trained import drafter_in

    inner = drafter_in(directory)
    if inner is None:
        return directory
    warnings.warn(f"{directory} is a folder of peagle train: the drafter is {inner}", InputWarning, stacklevel=3)
    return inner


def another_target(drafter_directory: Path, target_directory: Path) -> str | None:
    """Return a warning about a drafter whose training was for another target, by the record beside it; else None."""
    from drafter.trained import RECIPE, trained_for

    if trained_for(drafter_directory) in (None, fingerprint(target_directory)):
        return None
    return (
        f"{drafter_directory} was trained for another target than {target_directory}, by {RECIPE} beside it, so fewer "
        "drafts may be accepted; expected that target, or --init in a training on data of this one"
    )


def drafter_path(target: str | Path, drafter: str | Path | None) -> Path | None:
    """Return the drafter's directory; None for a drafter without weights.

    Raises InputError for a demo drafter with another target.
    """
    if drafter is None or drafter in WEIGHTLESS:
        return None
    if drafter in (DEMO, DEMO_EAGLE3) and target != DEMO:
        read_json(resolve(target, "target"), CONFIG)  # what is no checkpoint needs none
        raise InputError(
            f"the target {target} needs its own drafter (the demo's drafters fit only the demo target); give "
            "--drafter DIR, or --drafter ngram, which needs no weights"
        )
    directory = resolve(drafter, "drafter")
    if not directory.exists():
        raise InputError(
            f"{directory} does not exist; expected a drafter's directory, {DEMO}, {DEMO_EAGLE3}, or {NGRAM}"
        )
    return directory


def widths_of(drafter: str | Path | None, directory: Path | None) -> WidthTable:
    """Return the drafts by load: of the table beside the drafter, else the default of such drafters.

    directory: what `drafter_path` found. Raises InputError for a table that cannot be read.
    """
    if drafter in WEIGHTLESS:
        return WEIGHTLESS[str(drafter)].widths
    return (None if directory is None else read_widths(directory)) or DEFAULT_WIDTHS


@dataclass(frozen=True)
class AuxLayers:
    """The layers of a target whose outputs a drafter reads."""

    outputs: tuple[int, ...]
    description: str  # the same in words, and their source
    doubt: str | None = None  # a warning, if their numbers look like another convention's
    reread: bool = False  # the ids of config.json are read by the other convention, the only one that fits


def check_fit(target_directory: Path, drafter_directory: Path, aux_layer_ids: Sequence[int] | None = None) -> AuxLayers:
    """Check that a drafter fits a target, and find its aux layers, without reading weights.

    They are those given, or its config.json's, or the target's default. Raises InputError, naming both sides, if hidden
    size, vocabulary or aux layers do not fit.
    """
    from target.load import inspect_target

    target = inspect_target(target_directory).config
    return fitting_aux_layers(
        target, read_checkpoint(drafter_directory), target_directory, drafter_directory, aux_layer_ids
    )


def fitting_aux_layers(
    target: "TargetConfig",
    checkpoint: Checkpoint,
    target_name: str | Path,
    drafter_name: str | Path,
    aux_layer_ids: Sequence[int] | None = None,
) -> AuxLayers:
    """See `check_fit`; the names are for messages."""
    from drafter.dialects import TOP_AUX_LAYERS, named_aux_layers, parse_config
    from target.config import default_aux_layer_ids

    drafter = parse_config(checkpoint, aux_layer_ids)

    def refuse(why: str) -> InputError:
        return InputError(f"the drafter {drafter_name} does not fit the target {target_name}: {why}")

    def other(seen: str, drafters: object, targets: object) -> InputError:
        return refuse(f"{seen} {drafters}, the target's is {targets}; use the drafter that was trained for this target")

    if drafter.target_hidden_size != target.hidden_size:
        raise other("it reads hidden states of size", drafter.target_hidden_size, target.hidden_size)
    if drafter.vocab_size != target.vocab_size:
        raise other("its vocabulary has size", drafter.vocab_size, target.vocab_size)
    n, named = target.num_layers, named_aux_layers(checkpoint.config)
    outputs = drafter.aux_layer_ids
    if aux_layer_ids is None and named and named[0].are_outputs and max(named[0].ids) == n:
        inputs = dataclasses.replace(named[0], are_outputs=False)
        why = (
            f"{drafter_name}: {inputs.key} {list(inputs.ids)} in config.json are read as inputs, which are the outputs "
            f"{list(inputs.outputs)}, since {n} is no output of the target's {n} layers; if few drafts are accepted, "
            "give the outputs with --aux-layer-ids"
        )
        return AuxLayers(inputs.outputs, aux_layers_in_words(inputs.outputs, [inputs]), why, reread=True)
    if outputs is None:
        outputs = default_aux_layer_ids(n)
        if len(outputs) != drafter.num_taps:
            raise InputError(
                f"the drafter {drafter_name} reads {drafter.num_taps} aux layers and does not name them, and the "
                f"default for the target {target_name} is {len(outputs)}: {list(outputs)}; give --aux-layer-ids, or "
                f"name the layers whose inputs they are in its config.json, under {TOP_AUX_LAYERS.key}"
            )
        return AuxLayers(outputs, aux_layers_in_words(outputs, named))
    if outside := [layer for layer in outputs if not 0 <= layer < n]:
        if aux_layer_ids is not None:
            raise refuse(f"--aux-layer-ids names the output of layer {outside[0]}; expected 0..{n - 1}")
        (wrong,), (first, last) = named[0].written(outside[:1]), named[0].written((0, n - 1))
        raise refuse(
            f"{named[0].key} in its config.json is {list(named[0].ids)}, and {wrong} names no layer; expected "
            f"{first}..{last} there, for the target's layers 0..{n - 1}: use the drafter that was trained for it, or "
            "give --aux-layer-ids"
        )
    given = aux_layer_ids is not None
    doubt = None if given else doubtful_aux_layers(named, drafter_name, n)
    return AuxLayers(outputs, aux_layers_in_words(outputs, named, given), doubt)


def aux_layers_in_words(outputs: Sequence[int] | None, named: Sequence["NamedAuxLayers"], given: bool = False) -> str:
    """Describe the aux layers of a drafter (None: the target's default) and their source."""
    which = "outputs" if outputs is None else f"outputs {', '.join(map(str, outputs))}"
    if not named:
        return f"{which}, given" if given else f"{which} by the target's default, as config.json names none"
    ids = f"config.json's {named[0].key} {list(named[0].ids)}"
    return f"{which}, given instead of {ids}" if given else f"{which}: {ids} are {named[0].meaning}"


def doubtful_aux_layers(
    named: Sequence["NamedAuxLayers"], drafter_name: str | Path, num_layers: int | None = None
) -> str | None:
    """Warn if the ids in config.json look like the other convention's, or several keys disagree.

    Returns a line, or None. num_layers: the target's, if it is known.
    """
    if not named:
        return None
    used = named[0]

    def line(but: str, outputs: Sequence[int]) -> str:
        typed = ",".join(map(str, outputs))
        return (
            f"{drafter_name}: {used.key} {list(used.ids)} in config.json are read as {used.meaning}, but {but}; if few "
            f"drafts are accepted, try --aux-layer-ids {typed}, and if it helps write {used.written(outputs)} there"
        )

    for each in named[1:]:
        if each.outputs != used.outputs:
            return line(f"{each.key} {list(each.ids)}, which are {each.meaning}, name others", each.outputs)
    # all known defaults begin with the output of layer 1, which is the input of layer 2; some exporters write inputs
    # where others write outputs, so outputs that begin elsewhere may be inputs
    flipped = dataclasses.replace(used, are_outputs=not used.are_outputs)
    unusual = min(used.ids) != 1 if used.are_outputs else min(used.ids) == 1
    first = flipped.written((0,))[0]
    fits = min(used.ids) >= first and (num_layers is None or max(flipped.outputs) < num_layers)
    if unusual and fits:
        if used.are_outputs and min(used.ids) != 2:
            return line("outputs usually begin with 1, and some exporters write inputs there", flipped.outputs)
        kind = "outputs" if flipped.are_outputs else "inputs"
        return line(f"{kind} usually begin with {min(used.ids)}", flipped.outputs)
    return None


def default_chunk() -> int:
    """Return how many tokens of a prompt go through one pass on JAX's default device."""
    return GPU_CHUNK if jax.default_backend() == "gpu" else DEFAULT_CHUNK


def steps_per_dispatch(num_bytes: int) -> int:
    """Choose steps per dispatch on CPU by the bytes of the weights read, about 640 MB: 10 to 30 ms.

    Beside that the host's millisecond for a dispatch does not count (for a step of 4 ms it was 8 %). One on other
    devices, whose loop over steps would synchronise with the host after each.
    """
    if jax.default_backend() != "cpu":
        return 1
    return int(np.clip(640_000_000 // num_bytes, 1, MOST_STEPS_PER_DISPATCH))


def _implementation(kernels: KernelsChoice) -> Implementation | None:
    """Choose the implementation of a pair's ops. Raises InputError if "native" is named and no kernels run here."""
    if kernels == "native" and not (native_available() or cuda.available()):
        raise InputError(f"the native kernels do not run here: {kernels_in_words().removeprefix('XLA: ')}")
    return "xla" if kernels == "xla" else for_weights()


def default_dtype() -> DtypeName:
    """Return float32 on CPU, bfloat16 elsewhere.

    Raises InputError if JAX cannot start on its platform.
    """
    try:
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"
    except (RuntimeError, AssertionError) as error:
        raise InputError(cannot_start(error)) from None
