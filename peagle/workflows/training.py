"""What a training begins with and is recorded by: data, shape, first parameters, deadline, evaluation."""

import dataclasses
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from drafter.config import DrafterConfig
from drafter.load import load_drafter, parse_config, shared_tensors
from drafter.params import DrafterParams, init_params
from drafter.propose import drafter_of
from drafter.train.batches import Source, pack
from drafter.train.cod import Segments
from drafter.train.folder import COMMAND, RECIPE, read_record, steps_done
from drafter.train.recipe import Recipe
from drafter.train.shards import KEPT, NAME, WEIGHTS, Document, read_manifest, read_shards, total_tokens
from drafter.train.trainer import Trainer
from drafter.vocabulary import DraftVocab, by_frequency, check_count, choose, first_of
from peagle.api import Pair
from peagle.engine.engine import Engine
from peagle.loading import AUTO, asked_window, fitting_aux_layers, read_asked_window, resolve, windowed
from peagle.measure.metrics import pooled_counters
from peagle.measure.provenance import provenance
from peagle.ops import interrupt
from peagle.ops.checkpoint import read_checkpoint
from peagle.ops.errors import InputError, InputWarning
from peagle.ops.files import holds_files, write_text_whole
from peagle.ops.records import difference_in_words, flat
from peagle.ops.rope import RopeConfig
from peagle.ops.strict_json import dumps
from peagle.result import decode
from peagle.text.prompt_files import PromptSet
from peagle.text.prompts import Rendering
from peagle.workflows.dataset import chosen_taps
from target.config import TargetConfig
from target.load import LoadedTarget
from target.model import GptOss
from target.params import TargetParams

ROOM_QUANTILE = 0.75  # of the rows, as many as have no more trained tokens than the program's shapes have room for
EDGE = 2  # a chain begins up to so many tokens before the first one that it predicts
SHORT_ROW = 512  # tokens of a row, or a part of one, that need no further cut
PEAGLE_LAYERS, EAGLE3_LAYERS = 4, 1  # as their authors'
MEASURED_STEPS = 6  # to find how many fit into --minutes
PLANNED_FRAC = 0.9  # of the time: a machine that is a little slower later still comes to the end of the schedule
EVALUATION_TOKENS = 256
OPTIONS = {  # of a record's values that are not called as their options are
    "rows_per_step": "--rows",
    "data.mix": "--mix",
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
class DrafterShape:
    """Which drafter is trained: that of `init`, or a new one. None stands for the default, which the target gives."""

    init: str | None = None
    aux_layer_ids: tuple[int, ...] | None = None  # what `init` reads
    autoregressive: bool = False
    layers: int | None = None
    hidden_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp_width: int | None = None
    taps: tuple[int, ...] | None = None  # what a new one reads
    drafter_window: str = AUTO  # or positions, or OFF
    mask_token: int | None = None
    mask_hiddens: int = 1
    draft_vocab: str | None = None


def sources(
    parts: Sequence[tuple[Path, int]], rows: int, width: int, mix: Sequence[tuple[int, int]] = ()
) -> tuple[tuple[Source, ...], list[Document]]:
    """Read the folders with their shares of a step's rows, packed to rows of so many tokens; and all their documents.

    mix: shares by the length of a document instead. Raises InputError for shares that do not divide the rows, for a
    folder without a token to train on, and for rows longer than all the data.
    """
    total = sum(share for _, share in parts)
    if mix and total > len(parts):
        raise InputError("--mix gives shares by length, and --data by folder; expected one of the two")
    if not mix and (rows < 1 or any(rows * share % total for _, share in parts)):
        raise InputError(f"--rows is {rows}; expected a multiple of {total}, the sum of the shares of --data")
    folders = [read_shards(path) for path, _ in parts]
    for (path, _), own in zip(parts, folders, strict=True):
        if not any(each.trained.any() for each in own):
            raise InputError(f"{path} has no token to train on: all of it is masked")
    documents = [each for own in folders for each in own]
    num_tokens = total_tokens(documents)[0]
    if width > num_tokens:
        raise InputError(
            f"a row has {width} tokens (--width), and all of the data {num_tokens}: give --width {num_tokens} or less, "
            "or make more data"
        )
    if mix:
        return mixed(documents, mix, rows, width), documents
    counts = [rows * count // total for _, count in parts]
    return tuple(Source(pack(own, width), count) for own, count in zip(folders, counts, strict=True)), documents


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


def mixed(documents: Sequence[Document], mix: Sequence[tuple[int, int]], rows: int, width: int) -> tuple[Source, ...]:
    """Split documents by length, each part with its share of a step's rows.

    Raises InputError for shares that do not divide the rows, for a length that no document has or no row can hold, and
    for documents that are longer than all of them.
    """
    total = sum(share for _, share in mix)
    if rows < 1 or any(rows * share % total for _, share in mix):
        raise InputError(f"--rows is {rows}; expected a multiple of {total}, the sum of the shares of --mix")
    longest = max(len(each.token_ids) for each in documents)
    if mix[-1][0] > width:
        raise InputError(f"--mix names documents of {mix[-1][0]} tokens; expected at most --width, {width}")
    if longest > mix[-1][0]:
        raise InputError(f"--mix ends at {mix[-1][0]} tokens, and the longest document has {longest}; name that, too")
    found, least = [], 0
    for most, share in mix:
        some = [each for each in documents if least < len(each.token_ids) <= most]
        if not any(each.trained.any() for each in some):
            raise InputError(
                f"--mix names {most}, and no document of {least + 1} to {most} tokens is there to train on: the "
                f"longest has {longest}"
            )
        found.append(Source(pack(some, width), rows * share // total))
        least = most
    return tuple(found)


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


def self_contained(documents: Sequence[Document]) -> bool:
    """Whether the data holds both the taps and the target's best tokens, so that the target need not run."""
    return all("aux_hidden" in each.teacher and "top_ids" in each.teacher for each in documents)


def drafter_config(
    shape: DrafterShape,
    target: TargetConfig,
    stop_token_ids: tuple[int, ...],
    directory: Path,
    documents: Sequence[Document],
) -> tuple[DrafterConfig, DraftVocab | None]:
    """The drafter's shape: that of --init, or as wide as the target where nothing else is said."""
    vocab = None
    if shape.draft_vocab is not None:
        vocab = _draft_vocab(shape.draft_vocab, directory, target.vocab_size, stop_token_ids, documents)
    if shape.init is not None:
        given, checkpoint = shape.aux_layer_ids, read_checkpoint(resolve(shape.init, "drafter"))
        config = parse_config(checkpoint, given)
        if (config.target_hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
            raise InputError(f"--init {shape.init} does not fit the target; use a drafter of this target")
        if shape.autoregressive and config.parallel:
            raise InputError(f"--init {shape.init} is a P-EAGLE drafter; leave out --autoregressive, or --init")
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
    taps = chosen_taps(shape.taps, target.num_layers)
    hidden = shape.hidden_size or target.hidden_size
    head_dim = shape.head_dim or target.head_dim
    if shape.autoregressive and (shape.mask_token is not None or shape.mask_hiddens > 1):
        raise InputError("an EAGLE-3 drafter has no mask slots; leave out --mask-token and --mask-hiddens")
    mask_token = shape.mask_token
    if mask_token is None and not shape.autoregressive:
        mask_token = _free_token(documents, target.vocab_size, stop_token_ids)
    config = DrafterConfig(
        hidden_size=hidden,
        num_layers=shape.layers or (EAGLE3_LAYERS if shape.autoregressive else PEAGLE_LAYERS),
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
    return _with_window(config, shape), vocab


def _with_window(config: DrafterConfig, shape: DrafterShape) -> DrafterConfig:
    """Give the drafter the window asked for; by default the one that decoding with --init would take."""
    if shape.drafter_window == AUTO:
        window = None if shape.init is None else asked_window(resolve(shape.init, "drafter"), AUTO)
    else:
        window = read_asked_window(shape.drafter_window)
    return windowed(config, window, given=shape.drafter_window != AUTO)[0]


def _draft_vocab(
    asked: str, directory: Path, vocab_size: int, stop_token_ids: tuple[int, ...], documents: Sequence[Document]
) -> DraftVocab:
    """A number: so many of the tokens that the target said most often in the data. Else a file that lists them."""
    if not asked.isdecimal():
        return choose(asked, directory, vocab_size, stop_token_ids)
    wanted = int(asked)
    check_count(wanted, vocab_size)
    said = np.concatenate([each.token_ids[each.trained] for each in documents])
    frequent = by_frequency(np.bincount(said[(said >= 0) & (said < vocab_size)], minlength=vocab_size))
    return DraftVocab(first_of([*stop_token_ids, *frequent], vocab_size, wanted), "frequency in the training data")


def _free_token(documents: Sequence[Document], vocab_size: int, stop_token_ids: Sequence[int]) -> int:
    """The highest token id that the data never uses, for mask slots."""
    used = np.zeros((vocab_size,), bool)
    used[list(stop_token_ids)] = True
    for each in documents:
        used[each.token_ids[each.token_ids < vocab_size]] = True
    free = np.flatnonzero(~used)
    return int(free[-1]) if len(free) else vocab_size - 1


def check_tokens(documents: Sequence[Document], config: DrafterConfig) -> None:
    for each in documents:
        if len(each.token_ids) and not 0 <= each.token_ids.min() <= each.token_ids.max() < config.vocab_size:
            raise InputError(
                f"the data holds token id {each.token_ids.max()}, the target's vocabulary has {config.vocab_size}; "
                "expected data of this target"
            )
        if config.parallel and np.any(each.token_ids == config.mask_token_id):
            raise InputError(
                f"the mask token {config.mask_token_id} is in use: the data holds it; give another with --mask-token"
            )
        taps = each.teacher.get("aux_hidden")
        if taps is not None and taps.shape[1] != config.aux_width:
            raise InputError(
                f"the data's taps are {taps.shape[1]} wide, the drafter reads {config.aux_width}; expected the taps "
                "that peagle data was given"
            )


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


def check_teachers(folders: Sequence[Path], config: DrafterConfig, weights: str, depth: int) -> None:
    """Raises InputError where hidden states or logits that the data holds are not those that this target would give
    this drafter, or where the data lacks some that its windows reach."""
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
        if (taps or manifest.get("top")) and manifest.get(WEIGHTS, weights) != weights:
            raise InputError(
                f"{folder} holds what another target computed ({manifest.get(NAME)}); expected data of --target"
            )


def initial_params(
    init: str | None, seed: int, config: DrafterConfig, loaded: LoadedTarget, vocab: DraftVocab | None
) -> DrafterParams:
    """What training begins with: --init; or random layers, and from the target, where the widths agree, embedding,
    final norm and head, and an fc that passes the last tap through."""
    if init is not None:
        return given_params(init, loaded, config.aux_layer_ids)
    params = init_params(config, jax.random.key(seed))
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
    command: Mapping[str, Any],
) -> None:
    """Write recipe.json, or check that it is the same. More steps are recorded, with the step they were `continued` at.

    command: the options as they were typed, for --resume. Raises InputError that names every difference.
    """
    folders = [folder for folder, _ in shares(data)]
    record = {
        "schema": 1,
        "recipe": dataclasses.asdict(recipe),
        "drafter": dataclasses.asdict(config),
        "target": {WEIGHTS: weights},
        "data": {"given": list(data), "manifests": [read_manifest(folder) for folder in folders], "mix": command["mix"]}
        | {"documents": len(documents), "tokens": sum(len(each.token_ids) for each in documents)},
        "rows_per_step": rows,
    }
    record = json.loads(dumps(record))
    if begun is None:
        out.mkdir(parents=True, exist_ok=True)
        _write_record(out, {**record, COMMAND: dict(command), "provenance": provenance()})
        return
    stated = flat(record).keys()  # not what a later version adds
    then, now = (
        {key: value for key, value in flat(each).items() if key in stated and key not in (GIVEN, LENGTH)}
        for each in (begun, record)
    )
    if difference := difference_in_words(then, now, _option):
        raise InputError(f"{out} was begun with {difference}; expected the same: take another --out")
    steps = begun["recipe"]["steps"]
    if recipe.steps < steps:
        raise InputError(f"{out} was begun with {steps} steps, now it is {recipe.steps}; expected as many or more")
    if recipe.steps > steps:
        continued = [*begun.get("continued", ()), {"at": steps_done(out), "steps_before": steps}]
        _write_record(out, {**begun, "recipe": record["recipe"], "continued": continued})


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


def planned_steps(minutes: float, step_s: float, evaluation_s: float, evaluate_every: int) -> int:
    """Return how many steps fit into most of so many minutes, with an evaluation at the end and after each so many.

    evaluation_s: 0 without evaluations. evaluate_every: 0 for one at the end alone.
    """
    of_each = step_s + (evaluation_s / evaluate_every if evaluate_every else 0.0)
    return max(0, int((PLANNED_FRAC * 60 * minutes - evaluation_s) / of_each))


def seconds_per_step(trainer: Trainer, initial: DrafterParams, measured: Callable[[int, int], object]) -> float:
    """Measure the median time of a step on throw-away parameters, without compilation.

    measured(number of runs done, of all) is called before the first and after each.
    """
    step, state = trainer.compiled(), trainer.begin(initial)
    times: list[float] = []
    for number in range(MEASURED_STEPS):
        measured(number, MEASURED_STEPS)
        interrupt.check()
        started = time.perf_counter()
        state, record = step(state, trainer.batches.at(number))
        jax.block_until_ready(record)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


class Acceptance:
    """What the real engine accepts of a drafter's drafts on held-out prompts, greedy."""

    def __init__(
        self, pair: Pair, config: DrafterConfig, prompts: PromptSet, num_prompts: int, num_drafts: int
    ) -> None:
        conversations = prompts.conversations[:num_prompts]
        assert isinstance(pair.plain_target, GptOss)
        self._target = dataclasses.replace(pair.plain_target, aux_layer_ids=config.aux_layer_ids or ())
        self._pair, self._config = pair, config
        self._num_left_out = len(prompts.left_out)
        self._requests = [
            pair.request(each, [], Rendering(), max_new_tokens=EVALUATION_TOKENS, index=index)
            for index, each in enumerate(conversations)
        ]
        self._shape = pair.engine_config(num_drafts, capacity=pair.capacity(self._requests))

    def of(self, params: DrafterParams) -> dict[str, Any]:
        """Figures of the drafter."""
        interrupt.check()
        drafter = drafter_of(params, self._config)
        engine = Engine(self._target, drafter, self._shape, self._pair.stop_token_ids)
        engine.warm_up()
        results = [result for request in self._requests for result in decode(engine, [request], None)]
        quiet = [result for result in results if not result.loops]
        whole, calm = pooled_counters(results), pooled_counters(quiet)
        assert whole is not None
        return {
            "num_speculative_tokens": self._shape.num_speculative_tokens,
            "num_outputs": len(results),
            "num_left_out": self._num_left_out,
            "num_outputs_without_loops": len(quiet),
            "acceptance_length": whole.acceptance_length,
            "acceptance_length_without_loops": None if calm is None else calm.acceptance_length,
            "acceptance_rate_per_position": list(whole.acceptance_rate_per_position),
        }
