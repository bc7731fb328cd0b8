"""Requests, and the chunks, steps and log-probabilities that the engine returns for them."""

import hashlib
import itertools
from dataclasses import dataclass
from typing import Literal

from peagle.engine.grammar import CompiledGrammar
from peagle.ops.errors import InputError

MOST_STOP_TOKENS = 16  # of each slot
MOST_BIASES = 300  # biased tokens of each slot; the limit of OpenAI's API
MOST_LOGPROBS = 20  # log-probabilities of the likeliest tokens; the limit of OpenAI's API
MOST_STOP_STRINGS, LONGEST_STOP_STRING = 64, 1024  # the length in characters
SMALLEST_SEED, LARGEST_SEED = -(2**63), 2**64 - 1  # 64 bits, with a sign or without, as OpenAI and vLLM take them
LARGEST_INDEX = 2**31 - 1
GREEDY_BELOW = 1e-5  # the temperature; above it, logits that differ in float32's last place at 10 differ by 0.1
HOTTEST = 1e30  # the temperature: float32 holds it and its reciprocal, by which XLA multiplies
LARGEST_PENALTY = 2.0  # presence and frequency, as in OpenAI's API
LARGEST_BIAS = 1e9
DEFAULT_CHUNK, GPU_CHUNK = 128, 2048  # prompt tokens of one prefill pass; a GPU multiplies more rows in the same time
MAX_NUM_DRAFTS = 128  # no acceptance pays for a wider pass

FinishReason = Literal["stop", "length", "aborted", "timeout", "error", "handed_off"]


def fold_seed(seed: int) -> int:
    """Return the int32 of a seed for the device: itself if it fits, else 31 bits that depend on all of its 64."""
    if 0 <= seed < 2**31:
        return seed
    digest = hashlib.blake2b((seed % 2**64).to_bytes(8, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def check_num_drafts(k: int, plain: bool = True, instead: str = "") -> None:
    """Raise InputError for a K that no engine takes; plain: 0 is one. instead: ends the message."""
    if not (0 if plain else 1) <= k <= MAX_NUM_DRAFTS:
        least = "0 (plain decoding)" if plain else "1"
        raise InputError(f"K is {k}; expected {least} to {MAX_NUM_DRAFTS} drafted tokens{instead}")


def check_rates(rates: tuple[float, ...] | None, num_drafts: int) -> None:
    """Raise InputError for rates of synthetic acceptance that are impossible or too few."""
    if rates is None:
        return
    if any(not 0 <= after <= before for before, after in itertools.pairwise((1.0, *rates))):
        raise InputError(
            f"synthetic acceptance is {list(rates)}; expected rates between 0 and 1 that never rise: each is a share "
            "of all steps, not of those that accepted the draft before"
        )
    if len(rates) < num_drafts:
        raise InputError(
            f"synthetic acceptance has {len(rates)} rates for K = {num_drafts}; expected one for each draft"
        )


def check_stop_strings(stop: tuple[str, ...]) -> None:
    """Raise InputError for stop strings that are empty, not Unicode text, too long or too many."""
    if len(stop) > MOST_STOP_STRINGS:
        raise InputError(
            f"{len(stop)} stop strings are given; expected at most {MOST_STOP_STRINGS}: leave some out", "stop"
        )
    for number, text in enumerate(stop, 1):
        which = f"stop string {number} of {len(stop)}"
        if not text:
            raise InputError(f"{which} is empty; expected a character or more: leave it out", "stop")
        if len(text) > LONGEST_STOP_STRING:
            raise InputError(
                f"{which} has {len(text)} characters; expected at most {LONGEST_STOP_STRING}: give only its beginning",
                "stop",
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InputError(f"{which} is not valid Unicode text; expected UTF-8", "stop") from None


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request.

    A temperature below GREEDY_BELOW is greedy; top_k 0, top_p 1, min_p 0, penalties 0 (repetition_penalty 1) and
    min_tokens 0 are off. min_tokens: no stop token is emitted before that many tokens.

    Order: min_tokens, biases and penalties (peagle.engine.adjust), then temperature, top-k, top-p, min-p; all of them
    on the target's logits, before acceptance. Random numbers depend only on (seed, the request's index, position):
    never on other requests, slot or time.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= HOTTEST:
            raise InputError(
                f"temperature is {self.temperature}; expected a number between 0 (greedy) and {HOTTEST:g}",
                "temperature",
            )
        if not 0 <= self.top_k < 2**31:
            raise InputError(f"top-k is {self.top_k}; expected 0 (off) or more", "top_k")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top-p is {self.top_p}; expected a number above 0 and at most 1 (off)", "top_p")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min-p is {self.min_p}; expected a number from 0 (off) to 1", "min_p")
        if not SMALLEST_SEED <= self.seed <= LARGEST_SEED:
            raise InputError(
                f"seed is {self.seed}; expected an integer of 64 bits, {SMALLEST_SEED}..{LARGEST_SEED}", "seed"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not -LARGEST_PENALTY <= value <= LARGEST_PENALTY:
                raise InputError(
                    f"{name.replace('_', ' ')} is {value}; expected a number from {-LARGEST_PENALTY:g} to "
                    f"{LARGEST_PENALTY:g}",
                    name,
                )
        if not 1 / HOTTEST <= self.repetition_penalty <= HOTTEST:
            raise InputError(
                f"repetition penalty is {self.repetition_penalty}; expected a number from {1 / HOTTEST:g} to "
                f"{HOTTEST:g} (1 is off)",
                "repetition_penalty",
            )
        if len(self.logit_bias) > MOST_BIASES:
            raise InputError(
                f"{len(self.logit_bias)} logit biases are given; expected at most {MOST_BIASES}", "logit_bias"
            )
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise InputError("logit bias names a token twice; expected one value for each", "logit_bias")
        for token, value in self.logit_bias:
            if token < 0 or not -LARGEST_BIAS <= value <= LARGEST_BIAS:
                raise InputError(
                    f"logit bias of token {token} is {value}; expected a token id of 0 or more and a number from "
                    f"{-LARGEST_BIAS:g} to {LARGEST_BIAS:g}",
                    "logit_bias",
                )
        if not 0 <= self.min_tokens < 2**31:
            raise InputError(f"min tokens are {self.min_tokens}; expected 0 (off) or more", "min_tokens")

    @property
    def adjusts(self) -> bool:
        """Whether `peagle.engine.adjust` changes the target's logits."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
            or bool(self.logit_bias)
            or self.min_tokens > 0
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    stop_token_ids None: those of the engine. logprobs: how many of the likeliest tokens to return with each emitted
    one, with their log-probabilities; None: no log-probabilities. `index` distinguishes requests of the same seed, such
    as the prompts of a file or several answers to one; requests in an engine may share one. `name` is the prompt's name
    in messages. `stop`: the answer's text ends before the first of these strings; peagle.result.Assembler applies
    them, since the engine works on tokens only. num_speculative_tokens: the most drafts of a step of this request;
    None: the engine's; a request with its own K is never paused for what drafting costs. `grammar`: what the answer
    must be (peagle.engine.grammar); it masks the target's logits before acceptance, as other adjustments change them.
    An answer that the budget, a stop string or a stop token of the request's own cuts is only the beginning of such a
    text.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: tuple[int, ...] | None = None
    index: int = 0
    name: str = "the prompt"
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    num_speculative_tokens: int | None = None
    grammar: CompiledGrammar | None = None

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise InputError(f"{self.name} is empty; expected at least one token", "prompt")
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; expected 1 or more")
        if not 0 <= self.index <= LARGEST_INDEX:
            raise InputError(f"the request's index is {self.index}; expected an integer in 0..{LARGEST_INDEX}")
        if self.stop_token_ids is not None and len(self.stop_token_ids) > MOST_STOP_TOKENS:
            raise InputError(
                f"{len(self.stop_token_ids)} stop tokens are given; expected at most {MOST_STOP_TOKENS}",
                "stop_token_ids",
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise InputError(f"logprobs is {self.logprobs}; expected 0..{MOST_LOGPROBS}", "logprobs")
        if self.num_speculative_tokens is not None:
            check_num_drafts(self.num_speculative_tokens)
        check_stop_strings(self.stop)

    def drafts(self, most: int) -> int:
        """Return the most drafts of a step of this request in an engine whose most are `most`."""
        return most if self.num_speculative_tokens is None else min(self.num_speculative_tokens, most)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InputError for token ids outside a vocabulary of this size."""
        for source, ids in (
            (f"{self.name} holds", self.prompt_ids),
            ("logit bias names", tuple(token for token, _ in self.sampling.logit_bias)),
        ):
            if outside := [each for each in ids if not 0 <= each < vocab_size]:
                raise InputError(
                    f"{source} token id {outside[0]}, outside the target's vocabulary; expected 0..{vocab_size - 1}"
                )

    @property
    def full(self) -> bool:
        """Whether steps adjust this request's logits or return log-probabilities: `StepKind.full`."""
        return self.sampling.adjusts or self.logprobs is not None or self.grammar is not None


@dataclass(frozen=True)
class StepRecord:
    """The outcome of one step for one request, before a stop token or the budget cut it."""

    length: int  # before the step: prompt + emitted - 1
    draft_token_ids: tuple[int, ...]  # the verified ones: none in a plain step
    num_accepted: int
    next_token: int


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one emitted token and of the likeliest tokens at its position.

    They are the log-softmax of the target's logits, before adjustments, temperature and truncation.
    """

    token_id: int
    logprob: float
    best: tuple[tuple[int, float], ...]  # (token id, log-probability), best first


@dataclass(frozen=True)
class TokenChunk:
    """Tokens that one dispatch emitted for one request.

    `steps` is empty in the chunk of the first token, which comes from prefill. `logprobs` has an entry for each token
    if the request sets logprobs. The last chunk of a request has a finish_reason, and if that is "error", the error.
    `time_s` is a reading of time.perf_counter() on arrival at the host.
    """

    request: Request
    token_ids: tuple[int, ...]
    time_s: float
    steps: tuple[StepRecord, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0  # in the first chunk: tokens of the prompt that the prefix cache held
    error: str | None = None
