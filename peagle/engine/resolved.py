"""The config of an engine, every value decided."""

import dataclasses
from dataclasses import dataclass

from peagle.base.errors import InputError
from peagle.config import DEFAULT_CHUNK, EngineConfig, check_rates
from peagle.engine.request import Request

MOST_RESERVED = 8192  # positions per slot that default memory holds; longer requests share it
SHORT_PROMPT = 64  # rows of a prompt that shares a pass


@dataclass(frozen=True)
class ResolvedConfig(EngineConfig):
    """An EngineConfig in which a pair has decided every value (`Pair.resolve`).

    prefix_cache         bytes besides kv_memory, for prompts and answers that later requests may begin with
    kv_memory            None: for the context of every slot, MOST_RESERVED positions at most
    steps_per_dispatch   changes when tokens reach the host, never which tokens
    adaptive             steps choose how many drafts to verify, num_drafts at most, by costs measured
                         at warm-up (peagle.engine.auto)
    k_per_request        requests may set num_speculative_tokens; plain steps are then compiled, too
    prefill_only         computes prompts and their first tokens, and hands the requests over to another engine
                         (peagle.engine.host.handoff)
    """

    num_speculative_tokens: int = 0
    context: int = 512
    prefill_chunk: int = DEFAULT_CHUNK
    prefix_cache: int = 0
    steps_per_dispatch: int = 1
    adaptive: bool = False
    k_per_request: bool = False
    prefill_only: bool = False

    @property
    def num_drafts(self) -> int:
        """K: num_speculative_tokens by the name that everything inside has for it."""
        return self.num_speculative_tokens

    def _check_together(self) -> None:
        if self.context < 2:
            message = f"context is {self.context} positions; expected room for a prompt token and an output token"
            raise InputError(message, "context")
        if self.adaptive and self.num_drafts < 1:
            raise InputError(
                "K is 0 in adaptive drafting; expected 1 or more, the most tokens to draft in a step",
                "num_speculative_tokens",
            )
        check_rates(self.synthetic_acceptance, self.num_drafts)

    @property
    def pass_shapes(self) -> tuple[tuple[int, int], ...]:
        """Passes over prompts: (prompts, rows per prompt), the first for one prompt. Short prompts share a pass."""
        rows = max(2, min(self.prefill_chunk, self.context))  # a cached token may come first
        shapes = [(count, max(rows // count, SHORT_PROMPT)) for count in (4, 8) if rows >= count * SHORT_PROMPT // 2]
        return ((1, rows), *(shape for shape in shapes if shape[0] <= self.slots))

    def share(self, count: int) -> "ResolvedConfig":
        """Return the config of each of `count` engines that share the slots. Raises InputError if they cannot."""
        slots = shared_slots(self.slots, count)
        memory = None if self.kv_memory is None else self.kv_memory // count
        kept = -(-self.prefix_cache // count)  # 0 only if there is none
        return dataclasses.replace(self, slots=slots, kv_memory=memory, prefix_cache=kept)

    def check(self, request: Request, vocab_size: int) -> None:
        """Raise InputError for a request that an engine of this config cannot run."""
        request.check_vocabulary(vocab_size)
        if len(request.prompt_ids) + request.max_new_tokens > self.context:
            raise InputError(beyond_context(request, request.max_new_tokens, self.context))
        k, most = request.num_speculative_tokens, self.num_drafts
        if k is not None and k > most:
            raise InputError(f"K is {k} for {request.name}; expected at most {most}, the engine's")
        if k is not None and not self.k_per_request:
            raise InputError("K is set for one request; expected an engine with k_per_request")


def beyond_context(request: Request, max_new_tokens: int, context: int) -> str:
    """Say that a request's prompt and so many new tokens exceed the context."""
    return (
        f"{request.name} has {len(request.prompt_ids)} tokens and at most {max_new_tokens} new ones; expected a sum of "
        f"at most {context}, the context: shorten one of them or raise the context"
    )


def shared_slots(slots: int, count: int) -> int:
    """Return the slots per engine of `count` engines. Raises InputError if they cannot share these."""
    if slots % count:
        message = f"slots is {slots}; expected a multiple of {count}, the replicas (dp) that share them"
        raise InputError(message, "slots")
    return slots // count
