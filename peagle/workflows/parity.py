"""Explain a pair's acceptance: compare it with references, and try other readings of the drafter's checkpoint."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from drafter import reference
from drafter.aux_layers import DFLASH_CONFIG, TOP_AUX_LAYERS, named_aux_layers
from drafter.config import DrafterConfig
from drafter.dialects import MASK_TOKEN_KEYS
from drafter.load import STORE_OFFSETS
from drafter.params import DrafterParams
from drafter.propose import AnyDrafter, DFlash, PEagle
from drafter.tensors import EMBEDDING, LM_HEAD
from drafter.vocabulary import Coverage, coverage
from peagle.answers.result import decode
from peagle.base import interrupt, strict_json
from peagle.base.checkpoint import Checkpoint
from peagle.base.errors import InputError
from peagle.loading.speculation import OFF, SPECULATION_FILE, WINDOW_KEY
from peagle.measure.estimates import estimate, ratio
from peagle.ops.linear import PackedMatrix, as_matrix
from peagle.ops.norm import rms_norm
from peagle.pair import Pair
from peagle.text.prompts import Conversation, Rendering
from peagle.workflows.draft_parity import (
    Cause,
    DraftDifference,
    DraftedText,
    Reading,
    accepted,
    causes,
    compare,
    padded,
    replay,
)
from peagle.workflows.hf_reference import EmittedText, Outputs
from target.model import GptOss

WINDOWS = (None, 128, 256, 512)  # to try, in positions; None: no window
MOST_MASK_TOKENS = 24  # ids to try in the mask slots
CLOSE = {"float32": 1e-3, "bfloat16": 0.2}  # the largest equal difference, in standard deviations of the logits
ROUNDED_FRAC = {"float32": 0.02, "bfloat16": 0.15}  # the share of steps whose drafts rounding may change
SPECIAL = re.compile(rb"<\|.*\|>|<[a-z_0-9/]+>|\[[A-Z_0-9]+\]")  # spellings of special tokens
Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class ParityConfig:
    """How to decode the texts to compare on."""

    num_speculative_tokens: int = 5
    max_new_tokens: int = 64
    reference_steps: int = 6  # to compare with the float64 reference, which is slow
    raw: bool = False


@dataclasses.dataclass(frozen=True)
class DraftedTexts:
    """The pair's answers to the prompts in one rendering, without those in which nothing was drafted."""

    texts: tuple[DraftedText, ...]  # with the aux_hidden of the config's layers
    hiddens: tuple[np.ndarray, ...]  # [n, L, D] by text: the outputs of all layers
    rows: tuple[int, ...]  # by text: index of its conversation
    capacity: int  # length of the caches

    @property
    def num_accepted(self) -> np.ndarray:
        """The accepted drafts of the engine's steps; [S]."""
        return np.concatenate([accepted(np.array(text.drafts), text) for text in self.texts])


@dataclasses.dataclass(frozen=True)
class Logits:
    """The drafter's logits compared with the float64 reference's."""

    num_steps: int
    cosine: float  # the least
    max_difference: float  # in standard deviations of the reference's logits
    same_drafts_frac: float
    close: bool


@dataclasses.dataclass(frozen=True)
class Findings:
    """The results. Their names are keys of --json."""

    logits: Logits | None  # None: not compared, as of EAGLE-3 drafters
    same_drafts_frac: float | None  # share of the reference's drafts that are the drafter's, too; None: not compared
    difference: DraftDifference | None
    acceptance_length: float  # in the engine
    expected: float  # that of the drafter replayed along the texts
    other_rendering: float | None  # that with the prompts as raw text, or in the chat template
    readings: dict[str, float]  # that by other reading
    causes: tuple[Cause, ...]
    allowed_frac: float  # as ROUNDED_FRAC
    vocabulary: Coverage | None  # of the answers, by a narrowed draft vocabulary

    @property
    def drafts_fine(self) -> bool:
        return self.difference is None or self.difference.frac <= self.allowed_frac

    @property
    def fine(self) -> bool:
        return self.drafts_fine and not self.causes and (self.logits is None or self.logits.close)


def draft_texts(
    pair: Pair, conversations: Sequence[Conversation], config: ParityConfig, *, raw: bool, at_least: int = 0
) -> DraftedTexts:
    """Answer the prompts greedily, and compute all hidden states. at_least: the least length of the caches."""
    rendering = Rendering(raw=raw)
    requests = [
        pair.request(conversation, [], rendering, max_new_tokens=config.max_new_tokens, index=index)
        for index, conversation in enumerate(conversations)
    ]
    capacity = pair.capacity(requests, at_least)
    engine = pair.engine(pair.engine_config(config.num_speculative_tokens, context=capacity))
    target = cast(GptOss, pair.target)
    all_layers = dataclasses.replace(target, aux_layer_ids=tuple(range(target.config.num_layers)))
    texts, hiddens, rows = [], [], []
    for request in requests:
        result = decode(engine, [request], None)[0]
        steps = [step for step in result.steps if step.draft_token_ids]
        if not steps:
            continue
        ids = np.array([*request.prompt_ids, *result.output_ids], np.int32)
        outputs = np.asarray(_aux_hidden(all_layers, padded(ids, capacity)))
        hidden = outputs[0, : len(ids)].astype(np.float32).reshape(len(ids), target.config.num_layers, -1)
        hiddens.append(hidden)
        rows.append(request.index)
        texts.append(
            DraftedText(
                ids,
                _aux_of(hidden, target.aux_layer_ids),
                tuple(step.length for step in steps),
                tuple(step.draft_token_ids for step in steps),
                tuple(step.num_accepted for step in steps),
            )
        )
    if not texts:
        raise InputError("no answer is longer than its first token, so nothing was drafted; give other prompts")
    return DraftedTexts(tuple(texts), tuple(hiddens), tuple(rows), capacity)


@jax.jit
def _aux_hidden(target: GptOss, ids: Any) -> jax.Array:
    """Compute aux_hidden [1, T, A] of a text that is padded to T tokens."""
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
    cache = target.init_cache(1, ids.shape[1], ids.shape[1])
    return target.extend(ids, positions, cache, jnp.zeros((1, 1), jnp.int32))[0].aux_hidden


def emitted_texts(pair: Pair, drafted: DraftedTexts) -> Iterator[EmittedText]:
    """Yield the texts with the target's outputs, for `compare_target`; logits from the prompt's last token on."""
    target = cast(GptOss, pair.plain_target)
    most = max(len(text.token_ids) - text.lengths[0] for text in drafted.texts) + 1
    for text, hidden in zip(drafted.texts, drafted.hiddens, strict=True):
        ids, first = text.token_ids, text.lengths[0] - 1
        rows = np.minimum(first + np.arange(most, dtype=np.int32), len(ids) - 1)[None]
        logits = np.asarray(_logits(target, padded(ids, drafted.capacity), rows))[0, : len(ids) - first]
        norm = rms_norm(jnp.asarray(hidden[:, -1]), target.params.norm, target.config.rms_norm_eps)
        yield EmittedText(ids, Outputs(hidden, np.asarray(norm), logits.astype(np.float32)))


@jax.jit
def _logits(target: GptOss, ids: Any, rows: Any) -> jax.Array:
    """Compute the logits [1, L, V] of rows [1, L] of a text that is padded to T tokens."""
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
    return target.extend(ids, positions, target.init_cache(1, ids.shape[1], ids.shape[1]), rows)[0].logits


def examine(
    pair: Pair,
    model: AnyDrafter,
    checkpoint: Checkpoint,
    drafted: DraftedTexts,
    conversations: Sequence[Conversation],
    config: ParityConfig,
    progress: Callable[[int, int], None],
) -> Findings:
    """Compare the drafts of the engine, of the replayed drafter and of the float64 reference; try other readings.

    model: the drafter as loaded from the checkpoint.
    """
    k, texts = config.num_speculative_tokens, drafted.texts
    replayed = [replay(model, text, k).token_ids for text in texts]
    logits, same = against_reference(pair, model, checkpoint, texts, config)
    as_it_is = np.concatenate([accepted(drafts, text) for drafts, text in zip(replayed, texts, strict=True)])
    candidates = list(readings(pair, model, checkpoint, drafted))
    results = []
    for number, candidate in enumerate(candidates):
        steps = [accepted(replay(candidate.model, text, k).token_ids, text) for text in candidate.texts]
        results.append(Reading(candidate.name, np.concatenate(steps), candidate.cure))
        progress(number + 1, len(candidates))
    vocabulary = None
    ids = model.params.draft_to_target
    if ids is not None and len(ids) < model.config.vocab_size:
        vocabulary = coverage([text.token_ids[text.lengths[0] + 1 :] for text in texts], np.asarray(ids), k)
        results.append(with_all_tokens(texts, replayed, np.asarray(ids), vocabulary))
    likely = causes(as_it_is, results)
    other_rendering = None
    if pair.tokenizer is not None and all(conversation.turns for conversation in conversations):
        try:
            # with caches of the same length, for which the programs are compiled already
            other = draft_texts(pair, conversations, config, raw=not config.raw, at_least=drafted.capacity)
        except InputError:  # no chat template, or prompts that need one
            pass
        else:
            other_rendering = 1 + float(other.num_accepted.mean())
            if config.raw:
                likely = [*_missing_template(drafted, other), *likely]
    return Findings(
        logits=logits,
        same_drafts_frac=same,
        difference=compare(texts, replayed),
        acceptance_length=1 + float(drafted.num_accepted.mean()),
        expected=1 + float(as_it_is.mean()),
        other_rendering=other_rendering,
        readings={reading.name: 1 + float(reading.accepted.mean()) for reading in results},
        causes=tuple(likely),
        allowed_frac=ROUNDED_FRAC[pair.loaded.dtype],
        vocabulary=vocabulary,
    )


def with_all_tokens(texts: Sequence[DraftedText], drafts: Sequence[Any], ids: np.ndarray, covered: Coverage) -> Reading:
    """Count the acceptance if all tokens that the drafter cannot propose were drafted right."""
    counts = []
    for text, steps in zip(texts, drafts, strict=True):
        best = []
        for length, step in zip(text.lengths, steps, strict=True):
            following = text.token_ids[length + 1 : length + 1 + len(step)]
            best.append(np.where(np.isin(following, ids), step[: len(following)], following))
        counts.append(accepted(best, text))
    name = (
        f"vocabulary: {1 - covered.frac:.1%} of the answers' tokens are not among its {len(ids):,}; with them, at best"
    )
    cure = "train with a larger --draft-vocab, or with a list of the tokens that such answers hold"
    return Reading(name, np.concatenate(counts), cure)


def against_reference(
    pair: Pair, model: AnyDrafter, checkpoint: Checkpoint, texts: Sequence[DraftedText], config: ParityConfig
) -> tuple[Logits | None, float | None]:
    """Compare the first steps with drafter/reference.py; return (logits, share of equal drafts).

    (None, None) for a drafter without a head, which the reference needs.
    """
    k, draft_to_target = config.num_speculative_tokens, model.params.draft_to_target
    tensors = _tensors(checkpoint, pair, model.config)
    if isinstance(model.params.lm_head, PackedMatrix) and model.params.lm_head.scales is not None:
        tensors[LM_HEAD] = as_matrix(model.params.lm_head).T  # rounded when it was loaded
    if LM_HEAD not in tensors:
        return None, None
    by_step = ("lengths", "drafts", "num_accepted")
    text = dataclasses.replace(
        texts[0], **{name: getattr(texts[0], name)[: config.reference_steps] for name in by_step}
    )
    ours = replay(
        dataclasses.replace(model, with_logits=True) if isinstance(model, PEagle | DFlash) else model, text, k
    )
    same, cosine, largest = [], 1.0, 0.0
    for step, length in enumerate(text.lengths):
        interrupt.check()
        known = text.token_ids[: length + 1].tolist(), text.aux_hidden[:length]
        expected = reference.draft_logits(tensors, model.config, *known, k)
        ids = expected.argmax(-1)
        ids = ids + tensors["d2t"][ids] if "d2t" in tensors else ids
        same.append((ids == ours.token_ids[step]).mean())
        if ours.logits is not None:
            logits = ours.logits[step] if draft_to_target is None else ours.logits[step][:, np.asarray(draft_to_target)]
            dots = (logits * expected).sum(-1) / np.linalg.norm(logits, axis=-1) / np.linalg.norm(expected, axis=-1)
            cosine = min(cosine, float(dots.min()))
            largest = max(largest, float(np.abs(logits - expected).max() / expected.std()))
    frac = float(np.mean(same))
    if ours.logits is None:
        return None, frac
    return Logits(len(text.lengths), cosine, largest, frac, largest < CLOSE[pair.loaded.dtype]), frac


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Another reading of a checkpoint, to try."""

    name: str
    cure: str
    model: AnyDrafter
    texts: Sequence[DraftedText]  # with the aux_hidden that it reads


def readings(pair: Pair, model: AnyDrafter, checkpoint: Checkpoint, drafted: DraftedTexts) -> Iterator[Candidate]:
    """Yield the readings of this checkpoint that a wrong config.json, or wrong tensors, are known to hide."""
    params, config = model.params, model.config
    aux_layers = [*named_aux_layers(checkpoint.config), TOP_AUX_LAYERS][0]
    texts, layers = drafted.texts, cast(GptOss, pair.target).aux_layer_ids
    num_layers = drafted.hiddens[0].shape[1]

    def flipped(key: str) -> Candidate:
        change: dict[str, Any] = {key: not getattr(config, key)}
        other = dataclasses.replace(model, config=dataclasses.replace(config, **change))
        return Candidate(f"{key}: {strict_json.dumps(change[key])}", _key(key, change[key]), other, texts)

    for shift in (-1, 1):
        moved = tuple(layer + shift for layer in layers)
        if all(0 <= layer < num_layers for layer in moved):
            shifted = [
                dataclasses.replace(text, aux_hidden=_aux_of(hidden, moved))
                for text, hidden in zip(texts, drafted.hiddens, strict=True)
            ]
            name = (
                f"aux layers: every one is off by {-shift:+d}, it reads outputs {list(layers)} instead of {list(moved)}"
            )
            typed = ",".join(map(str, moved))
            cure = f"{_key(aux_layers.key, aux_layers.written(moved))}, or give --aux-layer-ids {typed}"
            yield Candidate(name, cure, model, shifted)
    if config.kind != "DFlash":
        yield flipped("norm_before_residual")
    target_embedding = cast(GptOss, pair.plain_target).params.embedding
    if checkpoint.has(EMBEDDING) and target_embedding.shape == params.embedding.shape:
        shared = dataclasses.replace(model, params=dataclasses.replace(params, embedding=target_embedding))
        cure = f"take the tensor {EMBEDDING} out of the drafter's file: it then shares the target's"
        yield Candidate("embedding: the target's instead of the stored one", cure, shared, texts)
    if config.mask_token_id is not None:
        keys = {**checkpoint.config.get(DFLASH_CONFIG, {}), **checkpoint.config}
        mask_key = next(key for key in MASK_TOKEN_KEYS if keys.get(key) is not None)
        for token in mask_tokens(pair, config):
            embedding = params.embedding.at[config.mask_token_id].set(params.embedding[token])
            other = dataclasses.replace(model, params=dataclasses.replace(params, embedding=embedding))
            name = f"mask token: {token} instead of {config.mask_token_id}"
            yield Candidate(name, _key(mask_key, token), other, texts)
    else:
        yield flipped("norm_output")
    longest = max(len(text.token_ids) for text in texts)

    def hidden_positions(config: DrafterConfig) -> list[int]:
        """Count by layer the positions of the longest text that its window hides."""
        windows = (config.window(layer) for layer in range(config.num_layers))
        return [0 if window is None else max(longest - window, 0) for window in windows]

    tried = [hidden_positions(config)]
    for window in WINDOWS:
        changed = config.with_window(window)
        if hidden_positions(changed) not in tried:
            tried.append(hidden_positions(changed))
            value = OFF if window is None else window
            cure = f"give --drafter-window {value}, or write {strict_json.dumps({WINDOW_KEY: value})} into "
            cure += f"{SPECULATION_FILE} beside the drafter"
            yield Candidate(f"window: {value}", cure, dataclasses.replace(model, config=changed), texts)
    for name, cure, ids in vocabularies(checkpoint, params, config):
        mapped = dataclasses.replace(params, draft_to_target=jnp.asarray(ids, jnp.int32))
        yield Candidate(f"vocabulary map: {name}", cure, dataclasses.replace(model, params=mapped), texts)


def _key(key: str, value: object) -> str:
    """Describe the change of a key in config.json."""
    return f'write "{key}": {strict_json.dumps(value)} into the drafter\'s config.json'


def mask_tokens(pair: Pair, config: DrafterConfig) -> list[int]:
    """List ids that mask slots may have had in training: the last and the first special tokens, and the last id."""
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
    """Yield (name, cure, ids) of other maps to the target's ids that the files may mean."""
    if params.draft_to_target is None or not checkpoint.has(LM_HEAD):  # a shared head is cut by the map
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


def _missing_template(raw: DraftedTexts, chat: DraftedTexts) -> list[Cause]:
    """Name the missing chat template as a cause, if acceptance is surely higher with it."""
    in_chat = dict(zip(chat.rows, chat.texts, strict=True))
    both = [(text, in_chat[row]) for row, text in zip(raw.rows, raw.texts, strict=True) if row in in_chat]
    counts = [[n for text in texts for n in (sum(text.num_accepted), len(text.num_accepted))] for texts in both]
    table = np.array(counts, np.float64).reshape(-1, 4)
    gain = estimate(table, lambda tables: ratio(tables[..., 2:]) - ratio(tables[..., :2]))
    if gain is None or (gain.low or 0.0) <= 0:
        return []
    better = 1 + float(chat.num_accepted.mean())
    return [Cause("the prompts are raw", better, gain, "put them into the chat template: leave out --raw-prompt")]


def _aux_of(hidden: np.ndarray, layers: Sequence[int]) -> np.ndarray:
    """Make aux_hidden [n, A] of the outputs of these layers."""
    return hidden[:, list(layers)].reshape(len(hidden), -1)


def _tensors(checkpoint: Checkpoint, pair: Pair, config: DrafterConfig) -> Tensors:
    """Read a drafter's tensors as stored, and from the target those that it shares."""
    tensors = {name: checkpoint.take(name) for name in checkpoint.names}
    target = cast(GptOss, pair.plain_target).params
    if EMBEDDING not in tensors:
        bits = np.asarray(target.embedding)
        tensors[EMBEDDING] = bits.view(jnp.bfloat16) if bits.dtype == np.uint16 else bits
    if config.kind == "DFlash":
        tensors[LM_HEAD] = as_matrix(target.lm_head).T
    return tensors
