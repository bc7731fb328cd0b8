"""Explain a pair's acceptance: compare it with references, and try other readings of its checkpoint."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from drafter import reference
from drafter.config import DrafterConfig
from drafter.dialects import (
    DFLASH_CONFIG,
    EMBEDDING,
    LM_HEAD,
    MASK_TOKEN_KEYS,
    PREFIX,
    TOP_AUX_LAYERS,
    named_aux_layers,
)
from drafter.load import STORE_OFFSETS
from drafter.params import DrafterParams
from drafter.propose import AnyDrafter, DFlash, PEagle
from drafter.vocabulary import Coverage, coverage
from peagle.engine.speculation import OFF, SPECULATION_FILE, WINDOW_KEY
from peagle.measure.estimates import estimate, ratio
from peagle.ops import interrupt, strict_json
from peagle.ops.checkpoint import Checkpoint
from peagle.ops.errors import InputError
from peagle.ops.linear import as_matrix
from peagle.pair import Pair
from peagle.result import decode
from peagle.text.prompts import Conversation, Rendering
from peagle.workflows.parity import Cause, Difference, Reading, Text, accepted, causes, compare, replay
from target.model import GptOss

WINDOWS = (None, 128, 256, 512)  # positions to try; None: all
MOST_MASK_TOKENS = 24  # other ids to try in the mask slots
# the most difference, of the spread of the reference's logits; and the share of steps whose drafts rounding may change
CLOSE, TURNED_FRAC = {"float32": 1e-3, "bfloat16": 0.2}, {"float32": 0.02, "bfloat16": 0.15}
SPECIAL = re.compile(rb"<\|.*\|>|<[a-z_0-9/]+>|\[[A-Z_0-9]+\]")  # spellings of tokens that stand for no text
Tensors = dict[str, np.ndarray]
Model = AnyDrafter


@dataclasses.dataclass(frozen=True)
class ParityConfig:
    """The size of a comparison: drafts a step, tokens an answer, steps of the reference."""

    num_speculative_tokens: int = 5
    max_new_tokens: int = 64
    reference_steps: int = 6
    raw: bool = False
    special_tokens: bool = False

    def rendering(self, raw: bool) -> Rendering:
        return Rendering(raw=raw, special_tokens=raw and self.special_tokens)


@dataclasses.dataclass(frozen=True)
class Replies:
    """The pair's answers to all prompts, in one rendering."""

    texts: tuple[Text, ...]  # with the aux_hidden of the config's layers
    hiddens: tuple[np.ndarray, ...]  # [n, L, D] by text: the output of every layer
    rows: tuple[int, ...]  # by text: its conversation
    capacity: int  # tokens that the caches held

    @property
    def num_accepted(self) -> np.ndarray:
        """Count the accepted drafts of every step of the engine; [S]."""
        return np.concatenate([accepted(np.array(text.drafts), text) for text in self.texts])


@dataclasses.dataclass(frozen=True)
class Logits:
    """The drafter's arithmetic against the float64 reference's."""

    num_steps: int
    cosine: float  # the least
    max_difference: float  # of the spread (standard deviation) of the reference's logits
    same_drafts_frac: float
    close: bool


@dataclasses.dataclass(frozen=True)
class Findings:
    """The results. `expected`: the acceptance length of the drafter replayed along the texts."""

    logits: Logits | None  # None: an EAGLE-3 drafter, whose drafts alone are compared
    same_drafts_frac: float | None
    difference: Difference | None
    seen: float  # acceptance length
    expected: float
    other_rendering: float | None
    readings: dict[str, float]  # acceptance length of each
    causes: tuple[Cause, ...]
    allowed_frac: float  # of steps that may differ by rounding
    vocabulary: Coverage | None  # of the answers, by a narrowed draft vocabulary

    @property
    def drafts_fine(self) -> bool:
        return self.difference is None or self.difference.frac <= self.allowed_frac

    @property
    def fine(self) -> bool:
        return self.drafts_fine and not self.causes and (self.logits is None or self.logits.close)


def ask(
    pair: Pair, conversations: Sequence[Conversation], config: ParityConfig, *, raw: bool, at_least: int = 0
) -> Replies:
    """Answer the prompts greedily, and read all hidden states. at_least: the caches' tokens."""
    requests = [
        pair.request(conversation, [], config.rendering(raw), max_new_tokens=config.max_new_tokens, index=index)
        for index, conversation in enumerate(conversations)
    ]
    capacity = pair.capacity(requests, at_least)
    engine = pair.engine(pair.engine_config(config.num_speculative_tokens, context=capacity))
    target = cast(GptOss, pair.target)
    open_target = dataclasses.replace(target, aux_layer_ids=tuple(range(target.config.num_layers)))
    texts, hiddens, rows = [], [], []
    for request in requests:
        result = decode(engine, [request], None)[0]
        steps = [step for step in result.steps if step.draft_token_ids]
        if not steps:
            continue
        ids = np.array([*request.prompt_ids, *result.output_ids], np.int32)
        padded = np.pad(ids, (0, capacity - len(ids)))[None]
        outputs = np.asarray(_aux_hidden(open_target, padded))
        hidden = outputs[0, : len(ids)].astype(np.float32).reshape(len(ids), target.config.num_layers, -1)
        hiddens.append(hidden)
        rows.append(request.index)
        texts.append(
            Text(
                ids,
                _side_by_side(hidden, target.aux_layer_ids),
                tuple(step.length for step in steps),
                tuple(step.draft_token_ids for step in steps),
                tuple(step.num_accepted for step in steps),
            )
        )
    if not texts:
        raise InputError("no answer is longer than its first token, so nothing was drafted; give other prompts")
    return Replies(tuple(texts), tuple(hiddens), tuple(rows), capacity)


@jax.jit
def _aux_hidden(target: GptOss, ids: Any) -> jax.Array:
    """Compute aux_hidden [1, T, A] of a text that is padded to T tokens."""
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
    cache = target.init_cache(1, ids.shape[1], ids.shape[1])
    return target.extend(ids, positions, cache, jnp.zeros((1, 1), jnp.int32))[0].aux_hidden


def examine(
    pair: Pair,
    model: Model,
    checkpoint: Checkpoint,
    replies: Replies,
    conversations: Sequence[Conversation],
    settings: ParityConfig,
    progress: Any,
) -> Findings:
    """Compare drafts of engine, model and float64 reference, and try other readings.

    model: the drafter as it is loaded; the pair's own may be another.
    """
    k = settings.num_speculative_tokens
    texts = replies.texts
    replayed = [replay(model, text, k).token_ids for text in texts]
    blind = [replay(model, text, k, blind=True).token_ids for text in texts]
    logits, same = against_reference(pair, model, checkpoint, texts, settings)
    as_it_is = np.concatenate([accepted(drafts, text) for drafts, text in zip(replayed, texts, strict=True)])
    others = list(readings(pair, model, checkpoint, replies))
    results = []
    for number, other in enumerate(others):
        steps = [accepted(replay(other.model, text, k).token_ids, text) for text in other.texts]
        results.append(Reading(other.name, np.concatenate(steps), other.cure))
        progress(number + 1, len(others))
    vocabulary = None
    ids = model.params.draft_to_target
    if ids is not None and len(ids) < model.config.vocab_size:
        vocabulary = coverage([text.token_ids[text.places[0] + 1 :] for text in texts], np.asarray(ids), k)
        results.append(with_all_tokens(texts, replayed, np.asarray(ids), vocabulary))
    likely = causes(as_it_is, results)
    other_rendering = None
    if pair.tokenizer is not None and all(conversation.turns for conversation in conversations):
        try:
            # with caches of the same length, for which programs are compiled
            answered = ask(pair, conversations, settings, raw=not settings.raw, at_least=replies.capacity)
        except InputError:  # no chat template, or prompts that need one
            pass
        else:
            other_rendering = 1 + float(answered.num_accepted.mean())
            if settings.raw:
                likely = [*_template(replies, answered), *likely]
    return Findings(
        logits=logits,
        same_drafts_frac=same,
        difference=compare(texts, replayed, blind),
        seen=1 + float(replies.num_accepted.mean()),
        expected=1 + float(as_it_is.mean()),
        other_rendering=other_rendering,
        readings={reading.name: 1 + float(reading.accepted.mean()) for reading in results},
        causes=tuple(likely),
        allowed_frac=TURNED_FRAC[pair.loaded.dtype],
        vocabulary=vocabulary,
    )


def with_all_tokens(texts: Sequence[Text], drafts: Sequence[np.ndarray], ids: np.ndarray, covered: Coverage) -> Reading:
    """Count the acceptance if every token that the drafter cannot propose were drafted right."""
    counts = []
    for text, steps in zip(texts, drafts, strict=True):
        best = []
        for place, step in zip(text.places, steps, strict=True):
            following = text.token_ids[place + 1 : place + 1 + len(step)]
            best.append(np.where(np.isin(following, ids), step[: len(following)], following))
        counts.append(accepted(best, text))
    name = (
        f"vocabulary: {1 - covered.frac:.1%} of the answers' tokens are not among its {len(ids):,}; with them, at best"
    )
    cure = "train with a larger --draft-vocab, or with a list of the tokens that such answers hold"
    return Reading(name, np.concatenate(counts), cure)


def against_reference(
    pair: Pair, model: Model, checkpoint: Checkpoint, texts: Sequence[Text], settings: ParityConfig
) -> tuple[Logits | None, float | None]:
    """Compare first steps with drafter/reference.py: (logits, share of equal drafts).

    (None, None) for a drafter that shares the target's head, which the reference needs.
    """
    config, k = model.config, settings.num_speculative_tokens
    tensors = _tensors(checkpoint, pair, config)
    if LM_HEAD not in tensors:  # the target's
        return None, None
    text = dataclasses.replace(
        texts[0],
        **{name: getattr(texts[0], name)[: settings.reference_steps] for name in ("places", "drafts", "num_accepted")},
    )
    loud = dataclasses.replace(model, with_logits=True) if isinstance(model, PEagle | DFlash) else model
    ours = replay(loud, text, k)
    same, cosine, largest = [], 1.0, 0.0
    for step, place in enumerate(text.places):
        interrupt.check()
        known = text.token_ids[: place + 1].tolist(), text.aux_hidden[:place]
        theirs = reference.draft_logits(tensors, config, *known, k)
        ids = theirs.argmax(-1)
        same.append((_to_target(tensors, ids) == ours.token_ids[step]).mean())
        if ours.logits is not None:
            mine = ours.logits[step]
            mine = mine if model.params.draft_to_target is None else mine[:, np.asarray(model.params.draft_to_target)]
            dots = (mine * theirs).sum(-1) / np.linalg.norm(mine, axis=-1) / np.linalg.norm(theirs, axis=-1)
            cosine = min(cosine, float(dots.min()))
            largest = max(largest, float(np.abs(mine - theirs).max() / theirs.std()))
    frac = float(np.mean(same))
    if ours.logits is None:
        return None, frac
    return Logits(len(text.places), cosine, largest, frac, largest < CLOSE[pair.loaded.dtype]), frac


@dataclasses.dataclass(frozen=True)
class Other:
    """Another way to read a checkpoint."""

    name: str
    cure: str
    model: Model
    texts: Sequence[Text]  # with the aux_hidden that it reads


def readings(pair: Pair, model: Model, checkpoint: Checkpoint, replies: Replies) -> Iterator[Other]:
    """Yield other readings of this checkpoint that have caused low acceptance before."""
    params, config = model.params, model.config
    aux_layers = [*named_aux_layers(checkpoint.config), TOP_AUX_LAYERS][0]
    texts, layers = replies.texts, cast(GptOss, pair.target).aux_layer_ids
    num_layers = replies.hiddens[0].shape[1]
    for shift in (-1, 1):
        moved = tuple(layer + shift for layer in layers)
        if all(0 <= layer < num_layers for layer in moved):
            shifted = [t.with_aux(_side_by_side(h, moved)) for t, h in zip(texts, replies.hiddens, strict=True)]
            name = f"taps: every one is off by {-shift:+d}, it reads outputs {list(layers)} instead of {list(moved)}"
            typed = ",".join(map(str, moved))
            cure = f"{_key(aux_layers.key, aux_layers.written(moved))}, or give --aux-layer-ids {typed}"
            yield Other(name, cure, model, shifted)
    if config.kind != "DFlash":  # which has no such choice
        flipped = dataclasses.replace(config, norm_before_residual=not config.norm_before_residual)
        flipped_key = "norm_before_residual", flipped.norm_before_residual
        yield Other(_plain(*flipped_key), _key(*flipped_key), dataclasses.replace(model, config=flipped), texts)
    target_embedding = cast(GptOss, pair.plain_target).params.embedding
    if checkpoint.has(EMBEDDING) and target_embedding.shape == params.embedding.shape:
        shared = dataclasses.replace(model, params=dataclasses.replace(params, embedding=target_embedding))
        cure = f"take the tensor {EMBEDDING} out of the drafter's file: it then shares the target's"
        yield Other("embedding: the target's instead of the stored one", cure, shared, texts)
    if config.mask_token_id is not None:
        places = {**checkpoint.config.get(DFLASH_CONFIG, {}), **checkpoint.config}
        mask_key = next(key for key in MASK_TOKEN_KEYS if places.get(key) is not None)
        for token in mask_tokens(pair, config):
            embedding = params.embedding.at[config.mask_token_id].set(params.embedding[token])
            other = dataclasses.replace(model, params=dataclasses.replace(params, embedding=embedding))
            yield Other(f"mask token: {token} instead of {config.mask_token_id}", _key(mask_key, token), other, texts)
    else:
        flipped = dataclasses.replace(config, norm_output=not config.norm_output)
        flipped_key = "norm_output", flipped.norm_output
        yield Other(_plain(*flipped_key), _key(*flipped_key), dataclasses.replace(model, config=flipped), texts)
    longest = max(len(text.token_ids) for text in texts)

    def hidden(config: DrafterConfig) -> list[int]:
        """Count the positions of the longest text that a layer does not see, by layer."""
        windows = (config.window(layer) for layer in range(config.num_layers))
        return [0 if window is None else max(longest - window, 0) for window in windows]

    known = [hidden(config)]
    for window in WINDOWS:
        changed = config.with_window(window)
        if hidden(changed) not in known:
            known.append(hidden(changed))
            value = OFF if window is None else window
            cure = f"give --drafter-window {value}, or write {strict_json.dumps({WINDOW_KEY: value})} into "
            cure += f"{SPECULATION_FILE} beside the drafter"
            yield Other(f"window: {value}", cure, dataclasses.replace(model, config=changed), texts)
    for name, cure, ids in vocabularies(checkpoint, params, config):
        mapped = dataclasses.replace(params, draft_to_target=jnp.asarray(ids, jnp.int32))
        yield Other(f"vocabulary map: {name}", cure, dataclasses.replace(model, params=mapped), texts)


def _key(key: str, value: object) -> str:
    """Name the change of a config.json."""
    return f'write "{key}": {strict_json.dumps(value)} into the drafter\'s config.json'


def _plain(key: str, value: object) -> str:
    return f"{key}: {strict_json.dumps(value)}"


def mask_tokens(pair: Pair, config: DrafterConfig) -> list[int]:
    """List ids that mask slots may have had in training: special and unknown, the last first."""
    tokenizer = pair.tokenizer
    special = [
        token
        for token in range(config.vocab_size)
        if tokenizer is None or not (spelled := tokenizer.token_bytes(token)) or SPECIAL.fullmatch(spelled)
    ]
    ordered = dict.fromkeys(
        [*special[-MOST_MASK_TOKENS // 2 :], *special[: MOST_MASK_TOKENS // 2], config.vocab_size - 1]
    )
    return [token for token in ordered if token != config.mask_token_id][:MOST_MASK_TOKENS]


def vocabularies(
    checkpoint: Checkpoint, params: DrafterParams, config: DrafterConfig
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield other maps to the target's ids that the files may mean: (name, cure, ids)."""
    if params.draft_to_target is None or not checkpoint.has(LM_HEAD):  # a shared head follows the map
        return
    used = np.asarray(params.draft_to_target)
    maps = [("d2t holds absolute ids, not offsets", STORE_OFFSETS, checkpoint.take("d2t").astype(np.int64))]
    if checkpoint.has("t2d"):
        marked = np.flatnonzero(checkpoint.take("t2d"))
        maps.append(("that of t2d", "store numpy.flatnonzero(t2d) - arange(len(d2t)) as d2t", marked))
    maps.append(("none", "store zeros as d2t", np.arange(len(used))))
    tried = [used]
    for name, cure, ids in maps:
        fits = len(ids) == len(used) and ids.min() >= 0 and ids.max() < config.vocab_size
        if fits and not any(np.array_equal(ids, known) for known in tried):
            tried.append(ids)
            yield name, cure, ids


def _template(raw: Replies, chat: Replies) -> list[Cause]:
    """Name the missing chat template as the cause, if acceptance is surely higher with it."""
    theirs = dict(zip(chat.rows, chat.texts, strict=True))
    both = [(text, theirs[row]) for row, text in zip(raw.rows, raw.texts, strict=True) if row in theirs]
    counts = [[n for text in texts for n in (sum(text.num_accepted), len(text.num_accepted))] for texts in both]
    table = np.array(counts, np.float64).reshape(-1, 4)
    gain = estimate(table, lambda tables: ratio(tables[..., 2:]) - ratio(tables[..., :2]))
    if gain is None or (gain.low or 0.0) <= 0:
        return []
    better = 1 + float(chat.num_accepted.mean())
    return [Cause("the prompts are raw", better, gain, "put them into the chat template: --render chat")]


def _side_by_side(hidden: np.ndarray, layers: Sequence[int]) -> np.ndarray:
    """Join the outputs of these layers to aux_hidden [n, A]."""
    return hidden[:, list(layers)].reshape(len(hidden), -1)


def _to_target(tensors: Tensors, ids: np.ndarray) -> np.ndarray:
    return ids + tensors["d2t"][ids] if "d2t" in tensors else ids


def _tensors(checkpoint: Checkpoint, pair: Pair, config: DrafterConfig) -> Tensors:
    """Read a drafter's tensors as they are stored, and those that it shares from the target."""
    checkpoint = checkpoint.without_prefix(PREFIX)
    tensors = {name: checkpoint.take(name) for name in checkpoint.names}
    target = cast(GptOss, pair.plain_target).params
    if EMBEDDING not in tensors:
        bits = np.asarray(target.embedding)
        tensors[EMBEDDING] = bits.view(jnp.bfloat16) if bits.dtype == np.uint16 else bits
    if config.kind == "DFlash":
        tensors[LM_HEAD] = as_matrix(target.lm_head).T
    return tensors
