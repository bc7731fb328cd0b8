"""`peagle train`: everything is checked, the recipe is written, then the drafter is trained and exported."""

import dataclasses
import json
import math
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from drafter.config import DrafterConfig
from drafter.load import load_drafter, parse_config, shared_tensors, sort_aux_layers
from drafter.params import DrafterParams, init_params
from drafter.propose import drafter_of
from drafter.train.batches import Batches, Source, pack
from drafter.train.cod import Cod
from drafter.train.folder import LOG, RECIPE, read_log, steps_done
from drafter.train.shards import NAME, WEIGHTS, Document, read_manifest, read_shards
from drafter.train.trainer import Recipe, Trainer, TrainingStopped
from drafter.vocabulary import DraftVocab, by_frequency, choose, first_of
from peagle.api import Pair
from peagle.cli.curve import draw
from peagle.cli.data import chosen_taps
from peagle.cli.display import Display
from peagle.cli.export import with_positions, write_with_card
from peagle.cli.settings import TrainSettings, parse_layers
from peagle.engine.engine import Engine
from peagle.loading import DEMO, default_dtype, fitting_aux_layers, load, resolve
from peagle.measure.metrics import figure_text, pooled_counters
from peagle.measure.provenance import provenance
from peagle.ops import interrupt
from peagle.ops.checkpoint import fingerprint, read_checkpoint
from peagle.ops.errors import InputError, InputWarning
from peagle.ops.files import holds_files, write_text_whole
from peagle.ops.rope import RopeConfig
from peagle.ops.strict_json import dumps
from peagle.result import decode
from peagle.text.prompt_files import PromptSet, left_out_line, read_prompts
from peagle.text.prompts import Rendering
from target.config import TargetConfig
from target.load import LoadedTarget, inspect_target, load_target
from target.model import GptOss
from target.params import TargetParams
from target.teacher import Teacher

ROOM_QUANTILE = 0.75  # of the rows, as many as have no more trained tokens than the program's shapes have room for
PEAGLE_LAYERS, EAGLE3_LAYERS = 4, 1  # as their authors'
MEASURED_STEPS = 6  # to find how many fit into --minutes
PLANNED_FRAC = 0.9  # of the time: a machine that is a little slower later still comes to the end of the schedule
EVALUATION_TOKENS = 256
LENGTH = "recipe.steps"  # the one value of a record that a training may be continued with another of


def train_command(settings: TrainSettings) -> int:
    """The folder --out holds the recipe, the log, checkpoints, a curve, and in drafter/ the trained drafter. Returns
    the exit code.

    Raises InputError before anything is written for whatever can be told then, and for a training that cannot go on;
    KeyboardInterrupt after Ctrl-C, where the newest checkpoint holds the last step.
    """
    if settings.minutes is not None and not 0 < settings.minutes < math.inf:
        raise InputError(f"--minutes is {settings.minutes:g}; expected a number above 0")
    name = DEMO if settings.target is None else settings.target
    directory = resolve(name, "target")
    files = inspect_target(directory)
    out = Path(settings.out)
    sources, documents = _sources(settings)
    config, vocab = _drafter_config(settings, files.config, files.stop_token_ids, directory, documents)
    _check_tokens(documents, config)
    weights = fingerprint(directory)
    _check_teachers(settings, config, weights)
    recipe = _recipe(settings, steps=settings.steps or 1)
    if not 1 <= settings.mask_hiddens <= max(1, settings.depth - 1):
        raise InputError(f"--mask-hiddens is {settings.mask_hiddens}; expected 1..{max(1, settings.depth - 1)}")
    counts = recipe.segments.counts(recipe.cod, _anchors(sources, recipe.width))
    batches = Batches(sources, recipe.width, recipe.cod, recipe.segments, counts, recipe.seed)
    begun = _begun(out)
    if begun is None and settings.steps is None and settings.minutes is None:
        raise InputError("a new training needs --steps or --minutes")
    display = Display(text=False, quiet=settings.quiet, total=1, streaming=False)

    held_out = None
    if settings.evaluate is not None:
        held_out = read_prompts(Path(settings.evaluate), directory, Rendering(), strict=settings.strict)
        if held_out.left_out:
            display.note(f"left out: {left_out_line(held_out.left_out)}")
    with display.stage(f"loading {'the demo target' if name == DEMO else name}") as progress:
        loaded = load_target(directory, dtype=jnp.dtype(default_dtype()), progress=progress)
    initial = _initial(settings, config, loaded, vocab)
    ids = None if initial.draft_to_target is None else np.asarray(initial.draft_to_target)
    teacher = None if _self_contained(documents) else Teacher(loaded.params, loaded.config, config.aux_layer_ids or ())
    deadline = _Deadline(settings.minutes)
    evaluate = None
    if held_out is not None:
        acceptance = _Acceptance(load(name, None), config, held_out, settings)

        def evaluate(params: DrafterParams) -> Mapping[str, Any]:
            with deadline.moved():
                return acceptance.of(params)

    trainer = Trainer(out, config, recipe, batches, teacher, ids)
    steps = begun["recipe"]["steps"] if begun is not None and settings.steps is None else settings.steps
    if steps is None:
        steps = _planned(settings, trainer, initial, display)
    recipe = dataclasses.replace(recipe, steps=steps)
    _record(out, begun, recipe, config, settings, documents, weights)

    def kept() -> str:
        return f"{steps_done(out)} of {steps} steps are kept in {out}; the same command goes on behind them"

    started, before = time.monotonic(), steps_done(out)
    if begun is not None and begun["recipe"]["steps"] != steps:
        display.note(
            f"goes on from step {before} with {steps} steps instead of {begun['recipe']['steps']}: the learning rate "
            f"is from here on that of a training of {steps} steps"
        )
    if before < steps:
        display.note(f"training steps {before + 1} to {steps}; the first one compiles")
    else:
        display.note(f"{out} has all of its steps, {steps}; a larger --steps goes on with more")
    with display.keeping(kept), display.stage("training", animated=False) as progress:

        def watch(line: Mapping[str, Any]) -> None:
            progress(line["step"], recipe.steps)
            display.note(_shown(line))

        trainer = dataclasses.replace(
            trainer,
            recipe=recipe,
            evaluate=evaluate,
            evaluate_every=settings.evaluate_every,
            save_every=settings.save_every,
            watch=watch,
            should_stop=lambda: interrupt.asked() or deadline.over(),
        )
        try:
            params = trainer.run(initial)
        except TrainingStopped as error:
            raise InputError(str(error)) from None
        interrupt.check()
    if steps_done(out) < steps:
        display.note(f"--minutes {settings.minutes:g} are over: {kept()}")
    trained = dataclasses.replace(params, draft_to_target=None)
    shipped = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), trained)
    shipped = dataclasses.replace(shipped, draft_to_target=params.draft_to_target)
    shipped, config = sort_aux_layers(shipped, with_positions(config, files.config, out))
    write_with_card(out / "drafter", shipped, config, cast(Any, settings.dialect), name, files.config, out)
    lines = [f"drafter      {out / 'drafter'} | {steps_done(out)} steps | {time.monotonic() - started:.0f} s now"]
    lines.append(f"curve        {draw(list(read_log(out / LOG)), out)}")
    if held_out is not None and held_out.left_out:
        lines.append(f"left out     of --evaluate {left_out_line(held_out.left_out)}")
    display.summary(lines)
    return 0


def _sources(settings: TrainSettings) -> tuple[tuple[Source, ...], list[Document]]:
    """The folders named by --data, with their shares of a step's rows; and all their documents."""
    parts = _shares(settings)
    total = sum(share for _, share in parts)
    if settings.rows < 1 or any(settings.rows * share % total for _, share in parts):
        raise InputError(f"--rows is {settings.rows}; expected a multiple of {total}, the sum of the shares of --data")
    sources: list[Source] = []
    documents: list[Document] = []
    for path, count in parts:
        own = read_shards(path)
        if not any(each.trained.any() for each in own):
            raise InputError(f"{path} has no token to train on: all of it is masked")
        sources.append(Source(pack(own, settings.width), settings.rows * count // total))
        documents += own
    return tuple(sources), documents


def _shares(settings: TrainSettings) -> list[tuple[Path, int]]:
    """(folder, its share of a step's rows) of each --data."""
    if not settings.data:
        raise InputError("no training data is given; expected --data DIR, a folder that peagle data wrote")
    parts = []
    for typed in settings.data:
        folder, _, share = typed.rpartition(":") if ":" in typed else (typed, "", "1")
        if not share.isdecimal() or int(share) < 1:
            raise InputError(f"--data {typed}: a share of {share!r}; expected a whole number, as in DIR:5")
        parts.append((Path(folder), int(share)))
    return parts


def _anchors(sources: Sequence[Source], width: int) -> int:
    """For how many trained tokens of a row the chains have room: most rows have no more; fuller ones are sampled."""
    trained = [sum(int(each.trained.sum()) for each in row.documents) for source in sources for row in source.rows]
    return min(width, max(2, int(np.quantile(trained, ROOM_QUANTILE))))


def _self_contained(documents: Sequence[Document]) -> bool:
    """Whether the data holds both the taps and the target's best tokens, so that the target need not run."""
    return all("aux_hidden" in each.teacher and "top_ids" in each.teacher for each in documents)


def _drafter_config(
    settings: TrainSettings,
    target: TargetConfig,
    stop_token_ids: tuple[int, ...],
    directory: Path,
    documents: Sequence[Document],
) -> tuple[DrafterConfig, DraftVocab | None]:
    """The drafter's shape: that of --init, or as wide as the target where nothing else is said."""
    vocab = None
    if settings.draft_vocab is not None:
        vocab = _draft_vocab(settings.draft_vocab, directory, target.vocab_size, stop_token_ids, documents)
    if settings.init is not None:
        given, checkpoint = parse_layers(settings.aux_layer_ids), read_checkpoint(resolve(settings.init, "drafter"))
        config = parse_config(checkpoint, given)
        if (config.target_hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
            raise InputError(f"--init {settings.init} does not fit the target; use a drafter of this target")
        if settings.autoregressive and config.parallel:
            raise InputError(f"--init {settings.init} is a P-EAGLE drafter; leave out --autoregressive, or --init")
        if vocab is not None:
            raise InputError("--init has its own draft vocabulary; leave out --draft-vocab, or --init")
        layers = fitting_aux_layers(target, checkpoint, directory, settings.init, given)
        if layers.doubt is not None:
            warnings.warn(layers.doubt, InputWarning, stacklevel=2)
        config = dataclasses.replace(config, aux_layer_ids=layers.outputs)
        _check_shape_of_init(settings, config)
        return config, None
    if settings.aux_layer_ids is not None:
        raise InputError("--aux-layer-ids says what --init reads, and there is none; a new drafter's are --taps")
    taps = chosen_taps(settings.taps, target.num_layers)
    hidden = settings.hidden_size or target.hidden_size
    head_dim = settings.head_dim or target.head_dim
    if settings.autoregressive and (settings.mask_token is not None or settings.mask_hiddens > 1):
        raise InputError("an EAGLE-3 drafter has no mask slots; leave out --mask-token and --mask-hiddens")
    mask_token = settings.mask_token
    if mask_token is None and not settings.autoregressive:
        mask_token = _free_token(documents, target.vocab_size, stop_token_ids)
    config = DrafterConfig(
        hidden_size=hidden,
        num_layers=settings.layers or (EAGLE3_LAYERS if settings.autoregressive else PEAGLE_LAYERS),
        num_heads=settings.heads or target.num_heads,
        num_kv_heads=settings.kv_heads or target.num_kv_heads,
        head_dim=head_dim,
        mlp_width=settings.mlp_width or 2 * hidden,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size if vocab is None else len(vocab.token_ids),
        mask_token_id=mask_token,
        num_mask_hiddens=settings.mask_hiddens,
        rope=RopeConfig(head_dim, 10000.0),
        num_taps=len(taps),
        aux_layer_ids=taps,
        rms_norm_eps=target.rms_norm_eps,
    )
    return config, vocab


def _draft_vocab(
    asked: str, directory: Path, vocab_size: int, stop_token_ids: tuple[int, ...], documents: Sequence[Document]
) -> DraftVocab:
    """A number: so many of the tokens that the target said most often in the data. Else a file that lists them."""
    if not asked.isdecimal():
        return choose(asked, directory, vocab_size, stop_token_ids)
    wanted = int(asked)
    if not 1 <= wanted <= vocab_size:
        raise InputError(f"--draft-vocab is {wanted}; expected 1..{vocab_size}")
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


def _check_tokens(documents: Sequence[Document], config: DrafterConfig) -> None:
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


def _check_shape_of_init(settings: TrainSettings, config: DrafterConfig) -> None:
    """Raises InputError where an option asks for another shape than the drafter has that training begins with."""
    asked = {
        "--layers": (settings.layers, config.num_layers),
        "--hidden-size": (settings.hidden_size, config.hidden_size),
        "--heads": (settings.heads, config.num_heads),
        "--kv-heads": (settings.kv_heads, config.num_kv_heads),
        "--head-dim": (settings.head_dim, config.head_dim),
        "--mlp-width": (settings.mlp_width, config.mlp_width),
        "--taps": (settings.taps, config.aux_layer_ids),
        "--mask-token": (settings.mask_token, config.mask_token_id),
        "--mask-hiddens": (settings.mask_hiddens if settings.mask_hiddens > 1 else None, config.num_mask_hiddens),
    }
    for option, (wanted, has) in asked.items():
        if wanted is not None and wanted != has:
            raise InputError(f"{option} asks for {wanted}, but --init {settings.init} has {has}; leave out one of them")


def _check_teachers(settings: TrainSettings, config: DrafterConfig, weights: str) -> None:
    """Raises InputError where hidden states or logits that the data holds are not those that this target would give
    this drafter."""
    for folder, _ in _shares(settings):
        manifest = read_manifest(folder)
        taps = manifest.get("taps")
        if taps and config.aux_layer_ids is not None and tuple(taps) != config.aux_layer_ids:
            told = ",".join(map(str, taps))
            raise InputError(
                f"{folder} holds the outputs of layers {taps}, the drafter reads {list(config.aux_layer_ids)}; "
                f"expected the same: give --taps {told}, or make the data with the drafter's"
            )
        if (taps or manifest.get("top")) and manifest.get(WEIGHTS, weights) != weights:
            raise InputError(
                f"{folder} holds what another target computed ({manifest.get(NAME)}); expected data of --target"
            )


def _recipe(settings: TrainSettings, steps: int) -> Recipe:
    return Recipe(
        steps=steps,
        width=settings.width,
        cod=Cod(settings.depth, settings.ratio, settings.min_ratio),
        parts=settings.parts,
        loss=cast(Any, settings.loss),
        optimizer=cast(Any, settings.optimizer),
        learning_rate=settings.learning_rate,
        other_rate=settings.learning_rate if settings.other_rate is None else settings.other_rate,
        weight_decay=settings.weight_decay,
        warmup_frac=settings.warmup,
        decay_frac=settings.decay,
        clip_norm=settings.clip,
        train_embedding=not settings.freeze_embedding,
        compute_dtype=cast(Any, settings.dtype),
        seed=settings.seed,
    )


def _initial(
    settings: TrainSettings, config: DrafterConfig, loaded: LoadedTarget, vocab: DraftVocab | None
) -> DrafterParams:
    """What training begins with: --init; or random layers, and from the target, where the widths agree, embedding,
    final norm and head, and an fc that passes the last tap through."""
    if settings.init is not None:
        return _given(settings.init, loaded, config.aux_layer_ids)
    params = init_params(config, jax.random.key(settings.seed))
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


def _given(name: str, loaded: LoadedTarget, aux_layer_ids: tuple[int, ...] | None = None) -> DrafterParams:
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


def _begun(out: Path) -> dict[str, Any] | None:
    """What recorded the training that is under way in the folder. Raises InputError for a folder of something else."""
    path = out / RECIPE
    if path.exists():
        try:
            return cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            raise InputError(f"{path} cannot be read; expected what peagle train writes: take another --out") from None
    if out.exists() and (not out.is_dir() or holds_files(out)):
        what = f"holds files, but no {RECIPE}" if out.is_dir() else "is a file"
        raise InputError(f"{out} {what}; expected a new folder, or one of a training")
    return None


def _record(
    out: Path,
    begun: Mapping[str, Any] | None,
    recipe: Recipe,
    config: DrafterConfig,
    settings: TrainSettings,
    documents: Sequence[Document],
    weights: str,
) -> None:
    """recipe.json is there; where it was, it says the same, or fewer steps: then it says from now on how many there
    are, and at which step it was `continued`. Raises InputError where it says something else."""
    folders = [folder for folder, _ in _shares(settings)]
    record = {
        "schema": 1,
        "recipe": dataclasses.asdict(recipe),
        "drafter": dataclasses.asdict(config),
        "target": {WEIGHTS: weights},
        "data": {"given": list(settings.data), "manifests": [read_manifest(folder) for folder in folders]}
        | {"documents": len(documents), "tokens": sum(len(each.token_ids) for each in documents)},
        "rows_per_step": settings.rows,
    }
    record = json.loads(dumps(record))
    if begun is None:
        out.mkdir(parents=True, exist_ok=True)
        _write_record(out, {**record, "provenance": provenance()})
        return
    then, now = _flat(begun), _flat(record)
    differing = [key for key in now if key not in ("data.given", LENGTH) and then.get(key) != now[key]]
    if differing:
        key = differing[0]
        raise InputError(
            f"{out} was begun with {key} {then.get(key)!r}, now it is {now[key]!r}; expected the same: take "
            "another --out"
        )
    if recipe.steps < then[LENGTH]:
        raise InputError(
            f"{out} was begun with {then[LENGTH]} steps, now it is {recipe.steps}; expected as many or more"
        )
    if recipe.steps > then[LENGTH]:
        continued = [*begun.get("continued", ()), {"at": steps_done(out), "steps_before": then[LENGTH]}]
        _write_record(out, {**begun, "recipe": record["recipe"], "continued": continued})


def _write_record(out: Path, record: Mapping[str, Any]) -> None:
    write_text_whole(out / RECIPE, dumps(record, indent=1) + "\n")


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a.b": value} of {"a": {"b": value}}."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _planned(settings: TrainSettings, trainer: Trainer, initial: DrafterParams, display: Display) -> int:
    """Plan as many steps as fit into most of --minutes, by a measured one. Raises InputError where not one does."""
    assert settings.minutes is not None
    display.note(f"compiling, and measuring {MEASURED_STEPS} steps: how many fit into {settings.minutes:g} minutes")
    with display.stage("measuring a step", animated=False):
        step_s = _seconds_per_step(trainer, initial)
    steps = int(PLANNED_FRAC * 60 * settings.minutes / step_s)
    if not steps:
        raise InputError(
            f"--minutes is {settings.minutes:g}, and a step takes {step_s:.2g} s; expected time for a step, or --steps"
        )
    display.note(f"a step takes {step_s:.2g} s: {steps} steps are planned")
    return steps


class _Deadline:
    """When so many minutes of training are over: without its first step, which compiles, and without evaluations."""

    def __init__(self, minutes: float | None) -> None:
        self._seconds = math.inf if minutes is None else 60 * minutes
        self._asked, self._end = 0, math.inf

    def over(self) -> bool:
        """Say whether no further step may begin; asked before each."""
        self._asked += 1
        if self._asked == 2:
            self._end = time.monotonic() + self._seconds
        return time.monotonic() >= self._end

    @contextmanager
    def moved(self) -> Iterator[None]:
        """Move the end by the time that what goes on within takes."""
        began = time.monotonic()
        yield
        self._end += time.monotonic() - began


def _seconds_per_step(trainer: Trainer, initial: DrafterParams) -> float:
    """The median time of a step on throw-away parameters, compilation left out."""
    step, state = trainer.compiled(), trainer.begin(initial)
    times = []
    for number in range(MEASURED_STEPS):
        interrupt.check()
        started = time.perf_counter()
        state, record = step(state, trainer.batches.at(number))
        jax.block_until_ready(record)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def _shown(line: Mapping[str, Any]) -> str:
    """A line of the log, for a person."""
    if "evaluation" in line:
        found = line["evaluation"]
        lengths = [figure_text(found[f"acceptance_length{of}"], ".2f") for of in ("", "_without_loops")]
        return (
            f"step {line['step']}: acceptance length {lengths[0]}, without loops {lengths[1]}, of "
            f"{found['num_outputs']} held-out prompts"
        )
    minutes = line["left_s"] / 60
    return (
        f"step {line['step']} of {line['steps']}: loss {line['loss']:.3f}, right by depth "
        f"{' '.join(format(x, '.2f').lstrip('0') for x in line['hits_by_depth'])}, {minutes:.0f} min left"
    )


class _Acceptance:
    """What the real engine accepts of a drafter's drafts on held-out prompts, greedy."""

    def __init__(self, pair: Pair, config: DrafterConfig, prompts: PromptSet, settings: TrainSettings) -> None:
        conversations = prompts.conversations[: settings.evaluate_prompts]
        assert isinstance(pair.plain_target, GptOss)
        self._target = dataclasses.replace(pair.plain_target, aux_layer_ids=config.aux_layer_ids or ())
        self._pair, self._config = pair, config
        self._num_left_out = len(prompts.left_out)
        self._requests = [
            pair.request(each, [], Rendering(), max_new_tokens=EVALUATION_TOKENS, index=index)
            for index, each in enumerate(conversations)
        ]
        self._shape = pair.engine_config(settings.num_speculative_tokens, capacity=pair.capacity(self._requests))

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
