"""Describe checkpoints in rows of a table, from config.json and the headers of the weights."""

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from drafter.aux_layers import named_aux_layers
from drafter.config import DrafterConfig
from drafter.load import weight_bytes as drafter_weight_bytes
from drafter.propose import cache_groups as drafter_groups
from drafter.trained import recorded_coverage
from peagle.base.checkpoint import Checkpoint, weight_files
from peagle.base.errors import InputError
from peagle.base.memory import available_memory_bytes
from peagle.base.sizes import format_size
from peagle.config import AUTO
from peagle.engine.memory.kv_memory import Sizing, page_bytes
from peagle.engine.resolved import ResolvedConfig, shared_slots
from peagle.loading.checkpoints import auto_drafts
from peagle.loading.defaults import default_chunk, default_dtype, steps_per_dispatch
from peagle.loading.fit import chosen_window, describe_aux_layers, windowed
from peagle.loading.load import NO_STOP_TOKEN
from peagle.loading.speculation import SPECULATION_FILE
from peagle.ops.attention import PAGE_SIZE, CacheGroup, Pages, init_pools
from peagle.ops.kernels import describe_kernels, for_weights
from peagle.ops.native import available as native_available
from peagle.parallel.mesh import MeshShape
from peagle.text.tokenizer import TOKENIZER_FILE
from peagle.workflows.export import coverage_in_data
from peagle.workflows.mesh_plan import HOPPER, memory_of, rank_bytes, rank_cache_bytes, target_pages
from target.config import FULL, SLIDING, default_aux_layer_ids
from target.load import TargetFiles, cut_not_for_hopper, weight_bytes
from target.shard import Rank

TOKENS = 1000  # for which the table shows the memory of the KV cache
LONG = 1 << 17  # context at which the pages of a window are all in use
ONE_STEP = "K = {k}, one step per dispatch"
FLOAT32, BFLOAT16 = np.dtype(np.float32), jnp.dtype(jnp.bfloat16)
INT8 = jnp.dtype(jnp.int8)  # with one byte per value, the bytes of a page count its values

Rows = list[tuple[str, str]]


def target_rows(files: TargetFiles, path: Path, k: int) -> Rows:
    """Make the rows of a target. k: drafts of a step."""
    c = files.config
    kinds = {kind: c.layer_types.count(kind) for kind in (SLIDING, FULL)}
    per_token, per_slot = _kv_values(*target_pages(c, INT8), k)
    retained, _ = _kv_values(*target_pages(c, INT8, retain_full_kv=True), k)
    try:
        aux_layers = _list(default_aux_layer_ids(c.num_layers))
    except InputError:
        aux_layers = "none by default below 7 layers; a drafter names its own"
    stop_tokens = f"none. WARNING: {NO_STOP_TOKEN}"
    if files.stop_token_ids:
        stop_tokens = f"{_list(files.stop_token_ids)}, by {files.stop_tokens_from}"
    needed, available = _weight_bytes(path), available_memory_bytes()
    fits = f"{'fits' if needed <= available else 'does not fit'} into the {format_size(available)} available now"
    return [
        ("layers", f"{c.num_layers}: {kinds[SLIDING]} sliding (window {c.sliding_window}), {kinds[FULL]} full"),
        ("hidden size", f"{c.hidden_size:,}"),
        ("attention", f"{c.num_heads} query heads, {c.num_kv_heads} key/value heads, {c.head_dim} wide"),
        ("experts", f"{c.num_experts}, {c.top_k} per token, {c.expert_width:,} wide"),
        ("vocabulary", f"{c.vocab_size:,}"),
        ("positions", f"{c.max_positions:,}"),
        ("parameters", f"{files.num_parameters:,}, {files.num_expert_parameters:,} of them in experts"),
        ("weights", f"{'MXFP4 experts, the rest' if files.mxfp4 else 'not quantised,'} as stored"),
        ("on disk", format_size(_disk_bytes(path))),
        ("in memory", _target_memory(files)),
        ("loaded here", f"{format_size(needed)} for {_dtype(path).name} arithmetic; {fits}"),
        (f"KV cache per {TOKENS:,} tokens", f"{_memory_of(per_token)} (full layers)"),
        ("KV pages per slot", f"{_memory_of(per_slot)} (sliding layers, {ONE_STEP.format(k=k)})"),
        ("with --retain-full-kv", f"{_memory_of(retained)} per {TOKENS:,} tokens, and no pages per slot"),
        ("default aux layers", aux_layers),
        ("stop tokens", stop_tokens),
        ("tokenizer", "yes" if (path / TOKENIZER_FILE).is_file() else "no: token ids only"),
        ("kernels", describe_kernels()),
    ]


def mesh_rows(files: TargetFiles, shape: MeshShape, device: str, slots: int, positions: int, k: int) -> Rows:
    """Make the rows of a target on a mesh. k: drafts of a step."""
    c = files.config
    of_ranks = rank_bytes(c, files.mxfp4, shape)
    first, last = of_ranks[0], of_ranks[-1]
    own = shared_slots(slots, shape.dp)
    caches = rank_cache_bytes(c, shape, own, positions, k)
    total = first.total + caches
    shared = "the embedding, routers and norms" + (", shared kv heads" if shape.ranks > c.num_kv_heads else "")
    memory, cut = memory_of(device), cut_not_for_hopper(c, Rank(0, shape.tp, shape.ep))
    fits = "fits" if total <= memory else "does not fit"
    replicas = f": {shape.dp} replicas on {shape.ranks} each, of {own} slots each"
    kinds = ", ".join(f"{kind} {format_size(size)}" for kind, size in first.kinds.items())
    return [
        (f"over {shape}", f"{shape.devices} devices" + replicas * (shape.dp > 1)),
        ("  weights of each", f"{format_size(first.total)}: {kinds}"),
        ("  replicated on all", f"{format_size(first.replicated)}: {shared}"),
        ("  padding of the last", f"{format_size(last.padding)} of zeros"),
        (
            "  loading each",
            f"reads {format_size(first.total - first.padding)} of {format_size(files.tensor_bytes)}; on CPU it "
            "takes at most 1.15 of its weights",
        ),
        ("  pages of each", f"{format_size(caches)} bfloat16, with --slots {slots} --context {positions}"),
        (f"  together on an {device.upper()}", f"{format_size(total)}; {fits} into its {format_size(memory)}"),
        *([("  kernels for experts", cut)] if cut is not None and files.mxfp4 and device.upper() in HOPPER else []),
    ]


def drafter_rows(
    checkpoint: Checkpoint, config: DrafterConfig, path: Path, aux_layer_ids: Sequence[int] | None = None
) -> Rows:
    named = named_aux_layers(checkpoint.config)
    weights = [name for name in checkpoint.names if name not in ("d2t", "t2d")]
    parameters = sum(int(np.prod(checkpoint.shape(name))) for name in weights)
    c, window = windowed(config, chosen_window(path, AUTO), by_option=False)
    k = auto_drafts(path)
    per_token, per_slot = _kv_values(*_drafter_pages(c), k)
    proposes = f"all of the target's {c.vocab_size:,} tokens"
    if c.draft_vocab_size < c.vocab_size:
        unknown = "; peagle parity measures how many of an answer's they are"
        coverage = coverage_in_data(recorded_coverage(path)) or unknown
        proposes = f"{c.draft_vocab_size:,} of the target's {c.vocab_size:,} tokens{coverage}"
    return [
        ("layers", f"{c.num_layers}"),
        ("hidden size", f"{c.hidden_size:,}, reading hidden states of size {c.target_hidden_size:,}"),
        ("attention", f"{c.num_heads} query heads, {c.num_kv_heads} key/value heads, {c.head_dim} wide"),
        ("MLP", f"{c.mlp_width:,} wide"),
        ("proposes", proposes),
        ("mask token", f"{c.mask_token_id}" if c.parallel else "none: a pass per draft"),
        *([] if c.block_drafts is None else [("block", f"{c.block_size} rows: up to {c.block_drafts} drafts")]),
        ("aux layers", f"{c.num_aux_layers}: {describe_aux_layers(c.aux_layer_ids, named, aux_layer_ids is not None)}"),
        ("window", window),
        ("drafts by auto", _drafts(path, k)),
        ("parameters", f"{parameters:,}"),
        ("on disk", format_size(_disk_bytes(path))),
        ("in memory", _memory_of(parameters)),
        *([(f"KV cache per {TOKENS:,} tokens", _memory_of(per_token))] if per_token else []),
        *(
            [("KV pages per slot", f"{_memory_of(per_slot)} (layers with a window, {ONE_STEP.format(k=k)})")]
            if per_slot
            else []
        ),
        ("kernels", describe_kernels()),
    ]


def engine_rows(
    slots: int, context: int, target: tuple[Path, TargetFiles], drafter: tuple[Path, DrafterConfig] | None
) -> Rows:
    """Make the rows of an engine: the pages that its slots reserve, and the tokens that fit into memory."""
    weights, drafter_config, dtype = _weight_bytes(target[0]), None, _dtype(target[0])
    config = ResolvedConfig(
        auto_drafts(drafter[0]) if drafter else 0,
        slots,
        context,
        prefill_chunk=min(default_chunk(), context),
        steps_per_dispatch=steps_per_dispatch(weights),
    )
    models = [target_pages(target[1].config, INT8)]
    if drafter is not None:
        path, unwindowed = drafter
        drafter_config, _ = windowed(unwindowed, chosen_window(path, AUTO), by_option=False)
        models.append(_drafter_pages(drafter_config))
        weights += drafter_weight_bytes(path, dtype, implementation=for_weights())
    groups, page_values = ([item for items in both for item in items] for both in zip(*models, strict=True))
    block_drafts = None if drafter_config is None else drafter_config.block_drafts
    sizing = Sizing(tuple(groups), tuple(page_values), config, block_drafts)
    num_pages = sizing.num_pages
    reserved = sum(count * size for count, size in zip(num_pages, page_values, strict=True))
    windows = [count for count, group in zip(num_pages, groups, strict=True) if group.window is not None]
    fits = "any number: every layer has a window"
    if sum(sizing.page_bytes):
        fitting = sizing.full_pages_in((available_memory_bytes() - weights) // dtype.itemsize)
        fits = f"{max(fitting, 0) * PAGE_SIZE:,} in the memory that the weights leave now ({dtype.name})"
        fits += f"; too few for one request of {config.context:,}" if fitting < sizing.request_pages else ""
    return [
        ("slots", f"{config.slots}, {f'K <= {config.num_drafts}' if drafter else 'plain decoding'}"),
        ("tokens reserved", f"{num_pages[0] * PAGE_SIZE:,}, in {num_pages[0]:,} pages of {PAGE_SIZE}"),
        *([("pages of windows", " + ".join(f"{count:,}" for count in windows))] if windows else []),
        ("in memory", _memory_of(reserved)),
        ("tokens that fit", fits),
    ]


def _drafts(path: Path, k: int) -> str:
    """Describe how `auto` drafts, and the file that says so."""
    source = f"by {SPECULATION_FILE}" if (path / SPECULATION_FILE).is_file() else f"there is no {SPECULATION_FILE}"
    return f"{k} at most per step; {source}"


def _target_memory(files: TargetFiles) -> str:
    def of(dtype: np.dtype, packed: bool) -> str:
        experts = files.expert_tensor_bytes if packed else files.num_expert_parameters * dtype.itemsize
        return format_size((files.num_parameters - files.num_expert_parameters) * dtype.itemsize + experts)

    layouts = [("expanded", False)] + ([("packed", True)] if files.mxfp4 else [])
    stored = f"{format_size(files.tensor_bytes)} as stored; without native kernels " if native_available() else ""
    return stored + "; ".join(
        f"{name} {of(FLOAT32, packed)} float32, {of(BFLOAT16, packed)} bfloat16" for name, packed in layouts
    )


def _weight_bytes(path: Path) -> int:
    return weight_bytes(path, dtype=_dtype(path), implementation=for_weights())


def _dtype(target: Path) -> np.dtype:
    return jnp.dtype(default_dtype(target, for_weights()))


def _drafter_pages(config: DrafterConfig) -> tuple[tuple[CacheGroup, ...], tuple[int, ...]]:
    """Return (a drafter's cache groups, the number of cached values in a page of each)."""
    groups = drafter_groups(config)

    def init_pages(num_pages: Sequence[int]) -> tuple[Pages, ...]:
        return init_pools(groups, num_pages, config.num_kv_heads, config.head_dim, INT8)

    return groups, page_bytes(groups, init_pages)


def _kv_values(groups: tuple[CacheGroup, ...], page_values: tuple[int, ...], k: int) -> tuple[int, int]:
    """Count cached values: (of TOKENS tokens in full layers, in the window pages of one slot).

    page_values: values in a page, by group. k: drafts of a step.
    """
    full = sum(size for size, group in zip(page_values, groups, strict=True) if group.window is None)
    slot_pages = Sizing(groups, page_values, ResolvedConfig(k, context=LONG)).slot_pages
    return TOKENS * full // PAGE_SIZE, sum(count * size for count, size in zip(slot_pages, page_values, strict=True))


def _memory_of(num_values: int) -> str:
    return f"{format_size(4 * num_values)} float32, {format_size(2 * num_values)} bfloat16"


def _disk_bytes(path: Path) -> int:
    return sum((path / file).stat().st_size for file in weight_files(path))


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
