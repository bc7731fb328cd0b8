"""What a training begins with and is recorded by: data, shape, first parameters, deadline, evaluation."""

import bisect
import dataclasses
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from drafter.config import DrafterConfig, Kind
from drafter.dialects import default_dflash_layers, parse_config
from drafter.load import load_drafter, shared_tensors
from drafter.params import DrafterParams, init_params
from drafter.train.batches import Source, pack
from drafter.train.cod import Segments
from drafter.train.config import DrafterShape, KindName, TrainConfig
from drafter.train.folder import COMMAND, steps_done
from drafter.train.held_out import FILLED_FRAC, keep_back, rows_of_evaluation
from drafter.train.recipe import Recipe
from drafter.train.shards import KEPT, NAME, WEIGHTS, Document, read_manifest, read_shards, total_tokens
from drafter.train.trainer import Trainer
from drafter.trained import COVERAGE, RECIPE, read_record
from drafter.vocabulary import Coverage, DraftVocab, by_frequency, check_count, choose, coverage, first_of
from peagle.checkpoints import resolve
from peagle.config import AUTO
from peagle.engine.request import fold_seed
from peagle.fit import chosen_window, fitting_aux_layers, parse_window, windowed
from peagle.measure.provenance import provenance
from peagle.ops import interrupt
from peagle.ops.checkpoint import read_checkpoint
from peagle.ops.errors import InputError, InputWarning
from peagle.ops.files import holds_files, write_text_whole
from peagle.ops.records import difference_in_words, flat
from peagle.ops.rope import RopeConfig
from peagle.ops.strict_json import dumps
from peagle.workflows.dataset import chosen_taps
from target.config import TargetConfig
from target.load import LoadedTarget
from target.params import TargetParams

ROOM_QUANTILE = 0.75  # of the rows, as many as have no more trained tokens than the program's shapes have room for
EDGE = 2  # a chain begins up to so many tokens before the first one that it predicts
SHORT_ROW = 512  # tokens of a row, or a part of one, that need no further cut
KINDS: dict[KindName, Kind] = {"p-eagle": "P-EAGLE", "eagle-3": "EAGLE-3", "dflash": "DFlash"}
LAYERS: dict[Kind, int] = {"P-EAGLE": 4, "EAGLE-3": 1, "DFlash": 5}  # as their authors'
BLOCKS_FRAC = 1 / 6  # of a row's tokens that begin a DFlash drafter's block; its authors' 512 of 3072
DRAFT_DECAY = ((7, 4.0), (9, 5.0))  # up to so many drafts; its authors' for blocks of 8 and 10
LATEST_DECAY = 7.0  # their's for 16
MEASURED_STEPS, LEAST_MEASURED = 6, 3  # to find how many fit into --minutes; the first compiles
MEASURED_FRAC = 0.05  # of the time, if steps are slow
LEAST_BETWEEN, MEASURED_TIMES = 10, 20  # steps between losses on held-out documents, and how often they are measured
PLANNED_FRAC = 0.9  # of the time: a machine that is a little slower later still comes to the end of the schedule
OPTIONS = {  # of a record's values that are not called as their options are
    "rows_per_step": "--rows",
    "data.mix": "--mix",
    "data.held_out": "--held-out",
    "recipe.cod.depth": "--depth",
    "recipe.cod.ratio": "--ratio",
    "recipe.cod.min_ratio": "--min-ratio",
    "recipe.warmup_frac": "--warmup",
    "recipe.decay_frac": "--decay",
    "recipe.clip_norm": "--clip",
    "recipe.train_embedding": "--freeze-embedding",
    "recipe.compute_dtype": "--dtype",
    "drafter.windows": "--drafter-window",
}
# what a training may be continued with another of
GIVEN, LENGTH = "data.given", "recipe.steps"


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """The documents of a training, and the rows that those which are not held out are packed into."""

    sources: tuple[Source, ...]
    documents: list[Document]  # all
    held_out: list[Document]


def training_data(
    parts: Sequence[tuple[Path, int]],
    rows: int,
    width: int,
    mix: Sequence[tuple[int, int]] = (),
    held_out_frac: float = 0.0,
    seed: int = 0,
) -> TrainingData:
    """Read the folders with their shares of a step's rows, packed to rows of so many tokens.

    mix: shares by the length of a document instead. held_out_frac: at most that part of each folder's (or length's)
    documents is held out, and not more than an evaluation has room for. Raises InputError for shares that do not divide
    the rows, for a folder without a token to train on, and for rows longer than all the data.
    """
    total = sum(share for _, share in parts)
    if mix and total > len(parts):
        raise InputError("--mix gives shares by length, and --data by folder; expected one of the two")
    if not mix and (rows < 1 or any(rows * share % total for _, share in parts)):
        raise InputError(f"--rows is {rows}; expected a multiple of {total}, the sum of the shares of --data")
    folders = [read_shards(path) for path, _ in parts]
    for (path, _), own in zip(parts, folders, strict=True):
        if not any(document.trained.any() for document in own):
            raise InputError(f"{path} has no token to train on: all of it is masked")
    documents = [document for own in folders for document in own]
    num_tokens = total_tokens(documents)[0]
    if width > num_tokens:
        raise InputError(
            f"a row has {width} tokens (--width), and all of the data {num_tokens}: give --width {num_tokens} or less, "
            "or make more data"
        )
    if mix:
        groups = mixed(documents, mix, rows, width)
    else:
        groups = [(own, rows * share // total) for own, (_, share) in zip(folders, parts, strict=True)]
    room = FILLED_FRAC * width * rows_of_evaluation(rows) / rows
    sources, held_out = [], []
    for own, count in groups:
        trained, kept_back = keep_back(own, held_out_frac, int(room * count), seed)
        sources.append(Source(pack(trained, width), count))
        held_out += kept_back
    return TrainingData(tuple(sources), documents, held_out)


def parse_mix(typed: str) -> tuple[tuple[int, int], ...]:
    """Read (the most tokens of a document, its share) from LEN:SHARE,... Raises InputError for anything else."""
    try:
        found = tuple((int(most), int(share)) for most, share in (part.split(":") for part in typed.split(",")))
    except ValueError:
        found = ()
    lengths = [most for most, _ in found]
    if not found or lengths != sorted(set(lengths)) or min(lengths) < 1 or min(share for _, share in found) < 1:
        raise InputError(
            f"--mix is {typed!r}; expected lengths that rise, each with a whole share, as 512:5,2048:2,4096:1"
        )
    return found


def mixed(
    documents: Sequence[Document], mix: Sequence[tuple[int, int]], rows: int, width: int
) -> list[tuple[list[Document], int]]:
    """Split documents by length, each part with its number of a step's rows.

    Raises InputError for shares that do not divide the rows, for a length that no document has or no row can hold, and
    for documents that are longer than all of them.
    """
    total = sum(share for _, share in mix)
    if rows < 1 or any(rows * share % total for _, share in mix):
        raise InputError(f"--rows is {rows}; expected a multiple of {total}, the sum of the shares of --mix")
    longest = max(len(document.token_ids) for document in documents)
    if mix[-1][0] > width:
        raise InputError(f"--mix names documents of {mix[-1][0]} tokens; expected at most --width, {width}")
    if longest > mix[-1][0]:
        raise InputError(f"--mix ends at {mix[-1][0]} tokens, and the longest document has {longest}; name that, too")
    groups, least = [], 0
    for most, share in mix:
        group = [document for document in documents if least < len(document.token_ids) <= most]
        if not any(document.trained.any() for document in group):
            raise InputError(
                f"--mix names {most}, and no document of {least + 1} to {most} tokens is there to train on: the "
                f"longest has {longest}"
            )
        groups.append((group, rows * share // total))
        least = most
    return groups


def shares(given: Sequence[str]) -> list[tuple[Path, int]]:
    """Read (folder, its share of a step's rows) from each DIR[:SHARE]. Raises InputError for anything else."""
    if not given:
        raise InputError("no training data is given; expected --data DIR, a folder that peagle data wrote")
    parts = []
    for typed in given:
        folder, _, share = typed.rpartition(":") if ":" in typed else (typed, "", "1")
        if not share.isdecimal() or int(share) < 1:
            raise InputError(f"--data {typed}: a share of {share!r}; expected a whole number, as in DIR:5")
        parts.append((Path(folder), int(share)))
    return parts


def anchors(sources: Sequence[Source], segments: Segments) -> tuple[int, int]:
    """For how many trained tokens of a row, and of the fullest part of one, the chains have room.

    Most rows have no more; fuller ones are sampled.
    """
    ends = np.asarray(segments.ends)
    in_row, in_part = [], []
    for row in (row for source in sources for row in source.rows):
        trained = np.flatnonzero(np.concatenate([each.trained for each in row.documents]))
        in_row.append(len(trained))
        in_part.append(np.bincount(np.searchsorted(ends, trained, side="right"), minlength=len(ends)).max())
    room = min(segments.width, max(2, int(np.quantile(in_row, ROOM_QUANTILE))))
    return room, min(room, int(np.quantile(in_part, ROOM_QUANTILE)) + EDGE)


def even_parts(config: DrafterConfig, width: int) -> int:
    """Cut a row in as many parts as need, each with the context that its windows reach, the memory of a short row.

    One if a layer sees all, or if the parts would not be of equal length.
    """
    if config.context_reach is None:
        return 1
    parts = max(1, width // max(SHORT_ROW, config.context_reach))
    return max(count for count in range(1, parts + 1) if width % count == 0)


def check_parts(config: DrafterConfig, recipe: Recipe) -> None:
    """Raises InputError for parts of a row that differ in length, if the drafter has windows."""
    if config.context_reach is not None and recipe.width % recipe.parts:
        raise InputError(
            f"--parts is {recipe.parts}, and does not divide the {recipe.width} tokens of --width; expected parts of "
            "equal length, since the drafter has a window"
        )


def check_window(config: DrafterConfig, target: TargetConfig, depth: int, *, given: bool) -> None:
    """Raises InputError for a window that hides its own chain's anchor from a row, or that hides nothing."""
    window = config.narrowest_window
    if window is None:
        return
    name = "--drafter-window" if given else "the drafter's window"
    if window < depth + 1:
        raise InputError(
            f"{name} is {window}; expected {depth + 1} or more: --depth {depth} tokens are drafted behind one that all "
            "of them see"
        )
    if given and window > target.max_positions:
        raise InputError(
            f"{name} is {window}, the target has {target.max_positions} positions, so it would hide nothing; expected "
            "fewer, or off"
        )


def kind_of(shape: DrafterShape) -> Kind | None:
    """Return the kind of drafter that is asked for; None: no option says."""
    if shape.autoregressive:
        return "EAGLE-3"
    return None if shape.kind is None else KINDS[shape.kind]


def with_blocks(learning: TrainConfig, config: DrafterConfig) -> TrainConfig:
    """Decide what a config leaves open about the blocks of a DFlash drafter.

    Raises InputError for what only a DFlash drafter has, and for a depth that is not that of its blocks.
    """
    if config.most_drafts is None:
        for name, value in (("blocks", learning.blocks), ("draft_decay", learning.draft_decay)):
            if value is not None:
                raise InputError(f"{name} is given, and a {config.kind} drafter has none; leave it out", name)
        return learning
    if learning.cod.depth != config.most_drafts:
        raise InputError(
            f"depth is {learning.cod.depth}, and a block of the drafter has {config.most_drafts} drafts; expected the "
            "same",
            "depth",
        )
    if config.most_drafts < 2:
        raise InputError("depth is 1; expected 2 or more, the drafts of a DFlash drafter's block", "depth")
    decay = next((decay for most, decay in DRAFT_DECAY if config.most_drafts <= most), LATEST_DECAY)
    return dataclasses.replace(
        learning,
        blocks=learning.blocks or max(1, round(BLOCKS_FRAC * learning.width)),
        draft_decay=learning.draft_decay or decay,
    )


def self_contained(documents: Sequence[Document]) -> bool:
    """Whether the data holds both the taps and the target's best tokens, so that the target need not run."""
    return all("aux_hidden" in each.teacher and "top_ids" in each.teacher for each in documents)


def drafter_config(
    shape: DrafterShape,
    target: TargetConfig,
    stop_token_ids: tuple[int, ...],
    directory: Path,
    documents: Sequence[Document],
    depth: int,
) -> tuple[DrafterConfig, DraftVocab | None]:
    """The drafter's shape: that of --init, or as wide as the target where nothing else is said.

    depth: drafts that are trained, of which a new DFlash drafter's block has room for as many.
    """
    vocab, kind = None, kind_of(shape)
    if shape.draft_vocab is not None:
        vocab = _draft_vocab(shape.draft_vocab, directory, target.vocab_size, stop_token_ids, documents)
    if shape.init is not None:
        given, checkpoint = shape.aux_layer_ids, read_checkpoint(resolve(shape.init, "drafter"))
        config = parse_config(checkpoint, given)
        if (config.target_hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
            raise InputError(f"--init {shape.init} does not fit the target; use a drafter of this target")
        if kind not in (None, config.kind):
            option = "--autoregressive" if shape.autoregressive else "--drafter"
            raise InputError(f"--init {shape.init} is a {config.kind} drafter; leave out {option}, or --init")
        if vocab is not None:
            raise InputError("--init has its own draft vocabulary; leave out --draft-vocab, or --init")
        layers = fitting_aux_layers(target, checkpoint, directory, shape.init, given)
        if layers.doubt is not None:
            warnings.warn(layers.doubt, InputWarning, stacklevel=2)
        config = dataclasses.replace(config, aux_layer_ids=layers.outputs)
        _check_shape_of_init(shape, config)
        return _with_window(config, shape), None
    if shape.aux_layer_ids is not None:
        raise InputError("--aux-layer-ids says what --init reads, and there is none; a new drafter's are --taps")
    kind = kind or "P-EAGLE"
    num_layers = shape.layers or LAYERS[kind]
    taps = shape.taps
    if kind == "DFlash":
        _check_shape_of_block(shape, target)
        taps = taps or tuple(sorted(set(default_dflash_layers(num_layers, target.num_layers))))
    taps = chosen_taps(taps, target.num_layers)
    hidden = shape.hidden_size or target.hidden_size
    head_dim = shape.head_dim or target.head_dim
    if kind == "EAGLE-3" and (shape.mask_token is not None or shape.mask_hiddens > 1):
        raise InputError("an EAGLE-3 drafter has no mask slots; leave out --mask-token and --mask-hiddens")
    mask_token = shape.mask_token
    if mask_token is None and kind != "EAGLE-3":
        mask_token = _free_token(documents, target.vocab_size, stop_token_ids)
    config = DrafterConfig(
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=shape.heads or target.num_heads,
        num_kv_heads=shape.kv_heads or target.num_kv_heads,
        head_dim=head_dim,
        mlp_width=shape.mlp_width or 2 * hidden,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size if vocab is None else len(vocab.token_ids),
        mask_token_id=mask_token,
        num_mask_hiddens=shape.mask_hiddens,
        rope=RopeConfig(head_dim, 10000.0),
        num_taps=len(taps),
        aux_layer_ids=taps,
        rms_norm_eps=target.rms_norm_eps,
    )
    if kind == "DFlash":
        config = dataclasses.replace(config, qk_norm=True, block_size=depth + 1, num_target_layers=target.num_layers)
    return _with_window(config, shape), vocab


def _check_shape_of_block(shape: DrafterShape, target: TargetConfig) -> None:
    """Raise InputError for options that a new DFlash drafter cannot follow: it has its target's embedding and head."""
    if shape.hidden_size not in (None, target.hidden_size):
        raise InputError(
            f"hidden_size is {shape.hidden_size}; expected the target's {target.hidden_size}, since a DFlash drafter "
            "has its embedding and head",
            "hidden_size",
        )
    if shape.mask_hiddens > 1:
        raise InputError("a DFlash drafter has no mask hiddens; leave out --mask-hiddens", "mask_hiddens")
    if shape.draft_vocab is not None:
        raise InputError(
            "a DFlash drafter has its target's head, and drafts all tokens; leave out --draft-vocab, and narrow it "
            "when it is loaded",
            "draft_vocab",
        )


def _with_window(config: DrafterConfig, shape: DrafterShape) -> DrafterConfig:
    """Give the drafter the window asked for; by default the one that decoding with --init would take."""
    if shape.drafter_window == AUTO:
        window = None if shape.init is None else chosen_window(resolve(shape.init, "drafter"), AUTO)
    else:
        window = parse_window(shape.drafter_window)
    return windowed(config, window, by_option=shape.drafter_window != AUTO)[0]


def _draft_vocab(
    asked: str, directory: Path, vocab_size: int, stop_token_ids: tuple[int, ...], documents: Sequence[Document]
) -> DraftVocab:
    """A number: so many of the tokens that the target said most often in the data. Else a file that lists them."""
    if not asked.isdecimal():
        return choose(asked, directory, vocab_size, stop_token_ids)
    wanted = int(asked)
    check_count(wanted, vocab_size)
    said = np.concatenate(list(answers(documents)))
    frequent = by_frequency(np.bincount(said[(said >= 0) & (said < vocab_size)], minlength=vocab_size))
    return DraftVocab(first_of([*stop_token_ids, *frequent], vocab_size, wanted), "frequency in the training data")


def answers(documents: Sequence[Document]) -> Iterator[np.ndarray]:
    """Yield the tokens of each document that the target said."""
    return (document.token_ids[document.trained] for document in documents)


def data_coverage(documents: Sequence[Document], token_ids: np.ndarray, num_drafts: int) -> Coverage:
    """Measure how much of the answers a draft vocabulary covers. Raises InputError if that is nothing."""
    measured = coverage(answers(documents), token_ids, num_drafts)
    if not measured.frac:
        raise InputError(
            f"none of the {len(token_ids):,} tokens of the draft vocabulary is in an answer of the data; expected "
            "tokens that the target says: --draft-vocab N takes the most frequent of the data"
        )
    return measured


def _free_token(documents: Sequence[Document], vocab_size: int, stop_token_ids: Sequence[int]) -> int:
    """The highest token id that the data never uses, for mask slots; the rarest if it uses all."""
    ids = np.concatenate([document.token_ids for document in documents])
    uses = np.bincount(ids[(ids >= 0) & (ids < vocab_size)], minlength=vocab_size)
    uses[list(stop_token_ids)] = np.iinfo(uses.dtype).max
    return int(vocab_size - 1 - np.argmin(uses[::-1]))


def check_tokens(documents: Sequence[Document], config: DrafterConfig, shape: DrafterShape) -> None:
    """Raises InputError for data of another vocabulary or other taps, and for a --mask-token that the data holds.

    Warns of a mask token in the data that was not named: of --init, or because there is no free one.
    """
    uses = 0
    for document in documents:
        ids = document.token_ids
        if len(ids) and not 0 <= ids.min() <= ids.max() < config.vocab_size:
            raise InputError(
                f"the data holds token id {ids.max()}, the target's vocabulary has {config.vocab_size}; "
                "expected data of this target"
            )
        uses += int(np.sum(ids == config.mask_token_id)) if config.parallel else 0
        taps = document.teacher.get("aux_hidden")
        if taps is not None and taps.shape[1] != config.aux_width:
            raise InputError(
                f"the data's taps are {taps.shape[1]} wide, the drafter reads {config.aux_width}; expected the taps "
                "that peagle data was given"
            )
    if not uses:
        return
    total = total_tokens(documents)[0]
    line = f"the mask token {config.mask_token_id} is in use: {uses:,} of the data's {total:,} tokens"
    if shape.mask_token is not None and shape.init is None:
        raise InputError(f"{line}; expected one that the data lacks: name another, or leave out --mask-token")
    why = "--init was trained with it" if shape.init is not None else "it is the rarest token, and none is free"
    warnings.warn(f"{line}, and there the drafter takes it for a mask; {why}", InputWarning, stacklevel=2)


def _check_shape_of_init(shape: DrafterShape, config: DrafterConfig) -> None:
    """Raises InputError where an option asks for another shape than the drafter has that training begins with."""
    asked = {
        "--layers": (shape.layers, config.num_layers),
        "--hidden-size": (shape.hidden_size, config.hidden_size),
        "--heads": (shape.heads, config.num_heads),
        "--kv-heads": (shape.kv_heads, config.num_kv_heads),
        "--head-dim": (shape.head_dim, config.head_dim),
        "--mlp-width": (shape.mlp_width, config.mlp_width),
        "--taps": (shape.taps, config.aux_layer_ids),
        "--mask-token": (shape.mask_token, config.mask_token_id),
        "--mask-hiddens": (shape.mask_hiddens if shape.mask_hiddens > 1 else None, config.num_mask_hiddens),
    }
    for option, (wanted, has) in asked.items():
        if wanted is not None and wanted != has:
            raise InputError(f"{option} asks for {wanted}, but --init {shape.init} has {has}; leave out one of them")


def kept_of_prompts(folders: Sequence[Path]) -> int | None:
    """Return how many tokens of a prompt the data keeps at most; None: all."""
    kept = [read_manifest(folder).get(KEPT) for folder in folders]
    return min((number for number in kept if number is not None), default=None)


def check_teachers(folders: Sequence[Path], config: DrafterConfig, weights: str, depth: int, *, strict: bool) -> None:
    """Raises InputError where hidden states or logits that the data holds are not those that this target would give
    this drafter, or where the data lacks some that its windows reach; if strict, for text of another target, too.

    Warns of such text otherwise.
    """
    for folder in folders:
        manifest = read_manifest(folder)
        taps = manifest.get("taps")
        if taps and config.aux_layer_ids is not None and tuple(taps) != config.aux_layer_ids:
            told = ",".join(map(str, taps))
            raise InputError(
                f"{folder} holds the outputs of layers {taps}, the drafter reads {list(config.aux_layer_ids)}; "
                f"expected the same: give --taps {told}, or make the data with the drafter's"
            )
        reach, kept = config.context_reach, manifest.get(KEPT)
        if kept is not None and (reach is None or kept < reach + depth + 1):
            needs = (
                "all of them" if reach is None else f"the last {reach + depth + 1} with its windows and --depth {depth}"
            )
            raise InputError(
                f"{folder} holds the last {kept} tokens of a prompt, the drafter reads {needs}; give a smaller "
                "--drafter-window, or make the data with a larger --keep-prompt"
            )
        if manifest.get(WEIGHTS, weights) == weights:
            continue
        if taps or manifest.get("top"):
            raise InputError(
                f"{folder} holds what another target computed ({manifest.get(NAME)}); expected data of --target"
            )
        line = (
            f"{folder} holds what another target wrote ({manifest.get(NAME)}), and a drafter learns best from the "
            "answers of its own; expected data of --target: peagle data makes them"
        )
        if strict:
            raise InputError(line)
        warnings.warn(line, InputWarning, stacklevel=2)


def initial_params(
    init: str | None, seed: int, config: DrafterConfig, loaded: LoadedTarget, vocab: DraftVocab | None
) -> DrafterParams:
    """What training begins with: --init; or random layers, and from the target, where the widths agree, embedding,
    final norm and head, and an fc that passes the last tap through."""
    if init is not None:
        return given_params(init, loaded, config.aux_layer_ids)
    params = init_params(config, jax.random.key(fold_seed(seed)))
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


def given_params(name: str, loaded: LoadedTarget, aux_layer_ids: tuple[int, ...] | None = None) -> DrafterParams:
    """Load the drafter of --init; an embedding and head that it does not store are the target's."""
    directory = resolve(name, "drafter")
    embedding = lm_head = None
    if shared_tensors(directory):  # copies: a step of training overwrites them
        embedding, lm_head = jnp.array(loaded.params.embedding), jnp.array(cast(jax.Array, loaded.params.lm_head))
    return load_drafter(
        directory,
        jnp.float32,
        target_embedding=embedding,
        target_lm_head=lm_head,
        aux_layer_ids=aux_layer_ids,
    )[0]


def begun_in(out: Path) -> dict[str, Any] | None:
    """Read the record of the training that is under way in the folder; None for a new folder.

    Raises InputError for a folder of something else.
    """
    if (record := read_record(out)) is not None:
        return record
    if out.exists() and (not out.is_dir() or holds_files(out)):
        what = f"holds files, but no {RECIPE}" if out.is_dir() else "is a file"
        raise InputError(f"{out} {what}; expected a new folder, or one of a training")
    return None


def record_recipe(
    out: Path,
    begun: Mapping[str, Any] | None,
    recipe: Recipe,
    config: DrafterConfig,
    data: Sequence[str],
    rows: int,
    documents: Sequence[Document],
    weights: str,
    held_out_frac: float,
    command: Mapping[str, Any],
    covered: Coverage | None,
) -> None:
    """Write recipe.json, or check that it is the same. More steps are recorded, with the step they were `continued` at.

    command: the options as they were typed, for --resume. covered: by a narrowed vocabulary, of the data. Raises
    InputError that names every difference.
    """
    folders = [folder for folder, _ in shares(data)]
    record = {
        "schema": 1,
        "recipe": dataclasses.asdict(recipe),
        "drafter": dataclasses.asdict(config),
        "target": {WEIGHTS: weights},
        "data": {"given": list(data), "manifests": [read_manifest(folder) for folder in folders], "mix": command["mix"]}
        | {"documents": len(documents), "tokens": total_tokens(documents)[0], "held_out": held_out_frac},
        "rows_per_step": rows,
    }
    record = json.loads(dumps(record))
    if begun is None:
        out.mkdir(parents=True, exist_ok=True)
        known = {} if covered is None else {COVERAGE: dataclasses.asdict(covered)}
        _write_record(out, {**record, COMMAND: dict(command), **known, "provenance": provenance()})
        return
    stated = flat(record).keys()  # not what a later version adds
    then, now = (
        {key: value for key, value in flat(each).items() if key in stated and key not in (GIVEN, LENGTH)}
        for each in (with_held_out(begun), record)
    )
    if difference := difference_in_words(then, now, _option):
        raise InputError(f"{out} was begun with {difference}; expected the same: take another --out")
    steps = begun["recipe"]["steps"]
    if recipe.steps < steps:
        raise InputError(f"{out} was begun with {steps} steps, now it is {recipe.steps}; expected as many or more")
    if recipe.steps > steps:
        continued = [*begun.get("continued", ()), {"at": steps_done(out), "steps_before": steps}]
        _write_record(out, {**begun, "recipe": record["recipe"], "continued": continued})


def with_held_out(begun: Mapping[str, Any]) -> dict[str, Any]:
    """Return a training's record with the part of its documents that is held out: none in one of an older version."""
    return {**begun, "data": {"held_out": 0.0, **begun["data"]}}


def _option(key: str) -> str:
    """Name the option that a value of the record comes from, or the value if several do."""
    if key in OPTIONS:
        return OPTIONS[key]
    kind, _, name = key.partition(".")
    return {"data": "--data", "target": "--target", "drafter": f"the drafter's {name.replace('_', ' ')}"}.get(
        kind, "--" + name.replace("_", "-")
    )


def _write_record(out: Path, record: Mapping[str, Any]) -> None:
    write_text_whole(out / RECIPE, dumps(record, indent=1) + "\n")


class Deadline:
    """When so many minutes of training are over. They begin with the first step that may begin."""

    def __init__(self, minutes: float | None) -> None:
        self._seconds = math.inf if minutes is None else 60 * minutes
        self._end: float | None = None

    def over(self) -> bool:
        """Return whether no further step may begin; call it before each."""
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._seconds
        return now >= self._end


def held_out_every(steps: int) -> int:
    """Return how many steps lie between two losses on held-out documents."""
    return max(LEAST_BETWEEN, -(-steps // MEASURED_TIMES))


def planned_steps(
    minutes: float, step_s: float, evaluation_s: float, evaluate_every: int, held_out_s: float = 0.0
) -> int:
    """Return how many steps fit into most of so many minutes, with an evaluation at the end and after each so many.

    evaluation_s, held_out_s: of an evaluation, and of a loss on held-out documents; 0 without. evaluate_every: 0 for
    one at the end alone.
    """

    def seconds(steps: int) -> float:
        evaluations = -(-steps // evaluate_every) if evaluate_every else 1
        measured = min(MEASURED_TIMES, -(-steps // LEAST_BETWEEN))
        return steps * step_s + evaluations * evaluation_s + measured * held_out_s

    budget = PLANNED_FRAC * 60 * minutes
    return bisect.bisect_right(range(1, 1 + int(budget / step_s)), budget, key=seconds)


def seconds_per_step(
    trainer: Trainer, initial: DrafterParams, at_most_s: float, measured: Callable[[int, int], object]
) -> float:
    """Measure the median time of a step on throw-away parameters, without compilation.

    Slow steps are measured for about at_most_s. measured(number of runs done, of all) is called before the first and
    after each.
    """
    step, state = trainer.compiled(), trainer.begin(initial)
    times: list[float] = []
    while len(times) < MEASURED_STEPS and (len(times) < LEAST_MEASURED or sum(times[1:]) < at_most_s):
        measured(len(times), MEASURED_STEPS)
        interrupt.check()
        started = time.perf_counter()
        state, record = step(state, trainer.batches.at(len(times)))
        jax.block_until_ready(record)
        times.append(time.perf_counter() - started)
    return statistics.median(times[min(2, len(times) - 1) :])


def seconds_of_held_out(trainer: Trainer, initial: DrafterParams) -> float:
    """Measure the time of a loss on the held-out documents, without compilation; 0 without such documents."""
    if trainer.held_out is None:
        return 0.0
    state = trainer.begin(initial)
    trainer.held_out_figures(state)
    interrupt.check()
    started = time.perf_counter()
    trainer.held_out_figures(state)
    return time.perf_counter() - started
