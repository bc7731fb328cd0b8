"""Requests, and the chunks, steps and log-probabilities that the engine returns for them."""

import enum
import hashlib
from dataclasses import dataclass
from typing import Literal

from peagle.base.errors import InputError
from peagle.config import SamplingParams, check_logprobs, check_num_drafts, check_stop_strings
from peagle.engine.grammar import CompiledGrammar

MOST_STOP_TOKENS = 16  # of each slot
LARGEST_INDEX = 2**31 - 1
FinishReason = Literal["stop", "length", "aborted", "error", "handed_off"]


def fold_seed(seed: int) -> int:
    """Fold a seed into an int32 for the device: itself if it fits, else 31 bits of a hash of all 64."""
    if 0 <= seed < 2**31:
        return seed
    digest = hashlib.blake2b((seed % 2**64).to_bytes(8, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    stop_token_ids           None: those of the engine
    logprobs                 how many of the likeliest tokens to return with each emitted one, with their
                             log-probabilities; None: no log-probabilities
    index                    distinguishes requests of the same seed, such as the prompts of a file or several
                             answers to one; requests in an engine may share one
    name                     the prompt's name in messages
    stop                     the answer's text ends before the first of these strings; peagle.answers.result.Assembler
                             applies them, since the engine works on tokens only
    num_speculative_tokens   most drafts of a step of this request; None: the engine's
    grammar                  of the answer (peagle.engine.grammar); it masks the target's logits before acceptance,
                             like other adjustments. If the budget, a stop string or one of the request's stop
                             tokens cuts the answer, it is only the beginning of a text of the grammar
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009  # frozen
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
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; expected 1 or more", "max_new_tokens")
        if not 0 <= self.index <= LARGEST_INDEX:
            raise InputError(f"the request's index is {self.index}; expected an integer in 0..{LARGEST_INDEX}")
        if self.stop_token_ids is not None and len(self.stop_token_ids) > MOST_STOP_TOKENS:
            raise InputError(
                f"{len(self.stop_token_ids)} stop tokens are given; expected at most {MOST_STOP_TOKENS}",
                "stop_token_ids",
            )
        check_logprobs(self.logprobs)
        if self.num_speculative_tokens is not None:
            check_num_drafts(self.num_speculative_tokens)
        check_stop_strings(self.stop)

    def limit_drafts(self, most: int) -> int:
        """Return the most drafts of a step of this request in an engine with at most `most`."""
        return most if self.num_speculative_tokens is None else min(self.num_speculative_tokens, most)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InputError for token ids outside a vocabulary of this size."""
        for source, ids in (
            (f"{self.name} holds", self.prompt_ids),
            ("logit bias names", tuple(token for token, _ in self.sampling.logit_bias)),
        ):
            if outside := [token for token in ids if not 0 <= token < vocab_size]:
                raise InputError(
                    f"{source} token id {outside[0]}, outside the target's vocabulary; expected 0..{vocab_size - 1}"
                )

    @property
    def full_logits(self) -> bool:
        """Whether steps adjust this request's logits or return log-probabilities."""
        return self.sampling.adjusts or self.logprobs is not None or self.grammar is not None


class Drafting(enum.IntEnum):
    """How a slot drafts. It never becomes larger while the request has its slot."""

    NEVER = 0
    LOOKUP_ONLY = 1  # the drafter never reads its rows again, because catching up would cost too much
    ALWAYS = 2  # by the drafter and by lookups, where drafts gain more than they cost


@dataclass(frozen=True)
class StepRecord:
    """The outcome of one step for one request, before a stop token or the budget cuts it."""

    length: int  # before the step: prompt + emitted - 1
    draft_token_ids: tuple[int, ...]  # those verified: none in a plain step
    num_accepted: int
    next_token: int
    num_drafted: int = 0  # by the slot's source; draft_token_ids are the first of them
    source: int = 0  # 0: the drafter; 1: the lookup drafter


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

    `steps` is empty in the chunk of the first token, which comes from prefill. `logprobs` has an entry per token if the
    request sets logprobs. The last chunk of a request has a finish_reason, and the error if that is "error". `time_s`
    is time.perf_counter() on arrival at the host.
    """

    request: Request
    token_ids: tuple[int, ...]
    time_s: float
    steps: tuple[StepRecord, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0  # in the first chunk: tokens of the prompt that were in the prefix cache
    queued_s: float | None = None  # in the first chunk: seconds in the queue, before the request had a slot
    error: str | None = None
