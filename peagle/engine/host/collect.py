"""Read the results of dispatches: what they emitted for each request, and its chunk of tokens."""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from peagle.base.errors import InputError
from peagle.engine.grammar import GrammarError
from peagle.engine.host.constrained import renew
from peagle.engine.host.executor import Executor, ModelName
from peagle.engine.host.handle import Handle
from peagle.engine.host.in_flight import InFlight
from peagle.engine.request import Drafting, FinishReason, StepRecord, TokenChunk, TokenLogprobs
from peagle.engine.step.sampling import LogProbs
from peagle.engine.step.step_kinds import StepOutput
from peagle.ops.likeliest import NO_TOKEN
from peagle.protocols import Explains

# a chunk of what a dispatch emitted for a request, and the model whose next logits are not finite
Emitted: TypeAlias = tuple[Handle, TokenChunk, ModelName | None]


def read(sent: InFlight, values: np.ndarray, now: float) -> list[Emitted]:
    """Read the result of a dispatch. Requests that have ended since it was sent get nothing."""
    if sent.batch is None:
        return _read_first(values, sent.requests, now)
    return _read_steps(StepOutput.unpack(values, sent.batch.kind.num_drafts), sent.requests, now)


def _read_first(values: np.ndarray, requests: Sequence[Handle | None], now: float) -> list[Emitted]:
    """Read first tokens. A resumed request has emitted its first token before."""
    read: list[Emitted] = []
    for row, handle in enumerate(requests):
        if handle is None or handle.output_ids or handle.finished is not None:
            continue
        token = int(values[row, 0])
        if token == NO_TOKEN:
            read.append((handle, TokenChunk(handle.request, (), now), "target"))
            continue
        logprobs = tuple(_logprobs(LogProbs.unpack(values[row][None, 1:]), (token,), handle.request.logprobs))
        cached, queued_s = handle.num_cached_tokens, handle.queued_s
        read.append((handle, TokenChunk(handle.request, (token,), now, (), None, logprobs, cached, queued_s), None))
    return read


def _read_steps(output: StepOutput, requests: Sequence[Handle | None], now: float) -> list[Emitted]:
    """Read steps; add up the length of each request, and what it and its drafter have read."""
    read: list[Emitted] = []
    for row, handle in enumerate(requests):
        if handle is None or handle.finished is not None:
            continue
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        records: list[StepRecord] = []
        broken: ModelName | None = None
        for index in np.flatnonzero(output.num_accepted[:, row] >= 0).tolist():
            accepted, verified = int(output.num_accepted[index, row]), int(output.num_verified[index, row])
            tokens = output.token_ids[index, row].tolist()
            drafts = tuple(output.draft_token_ids[index, row, :verified].tolist())
            emitted = tokens[: int(output.count[index, row])]
            if NO_TOKEN in emitted or NO_TOKEN in drafts:
                broken = "target" if NO_TOKEN in emitted else "drafter"
                token_ids += tokens[:accepted]
                break
            drafted, source = int(output.num_drafted[index, row]), int(output.source[index, row])
            records.append(StepRecord(handle.length, drafts, accepted, tokens[accepted], drafted, source))
            token_ids += emitted
            if output.log_probs is not None:
                logprobs += _logprobs(output.log_probs.at(index, row), emitted, handle.request.logprobs)
            if output.caught_up[index, row]:
                handle.drafter_rows = handle.length + 1
            handle.length += accepted + 1
            handle.drafting = Drafting(min(handle.drafting, int(output.drafting[index, row])))
        if records or broken is not None:
            parts = tuple(token_ids), now, tuple(records), None, tuple(logprobs)
            read.append((handle, TokenChunk(handle.request, *parts), broken))
    return read


def append(handle: Handle, chunk: TokenChunk, hands_over: bool) -> tuple[TokenChunk, InputError | None]:
    """Append a chunk's tokens to their request; return the chunk, and the error if the request has failed.

    The chunk has a finish_reason after a stop token, at the budget, and if the engine hands requests over.
    """
    token_ids = chunk.token_ids
    handle.output_ids += token_ids
    # rows after a stop token do not count
    handle.length = min(handle.length, len(handle.request.prompt_ids) + len(handle.output_ids) - 1)
    reason: FinishReason | None = "handed_off" if hands_over else None
    failed: InputError | None = None
    if token_ids and token_ids[-1] in handle.stop_token_ids:
        reason = "stop"
    elif len(handle.output_ids) >= handle.request.max_new_tokens:
        reason = "length"
    if handle.matcher is not None and reason != "length":
        handle.matcher.read(token_ids if reason is None else token_ids[:-1])
        if reason == "stop" and handle.matcher.limited:
            renew(handle, handle.output_ids[:-1])
        if reason == "stop" and (failure := handle.matcher.failure):
            failed, reason = GrammarError(f"{handle.request.name}: {failure}"), "error"
    if reason is None:
        return chunk, None
    return dataclasses.replace(chunk, finish_reason=reason, error=None if failed is None else str(failed)), failed


def not_finite(handle: Handle, token_ids: Sequence[int], name: ModelName, executor: Executor) -> InputError:
    """Make the error of a request whose logits after these tokens are not finite.

    A diagnostic pass over the tokens names the model's first output that is not finite.
    """
    request, tokens = handle.request, [*handle.token_ids, *token_ids]
    message = (
        f"the {name}'s logits for token {len(tokens) - len(request.prompt_ids)} of the answer to {request.name} are "
        "not finite"
    )
    if isinstance(executor.target if name == "target" else executor.drafter, Explains):
        where = executor.first_not_finite(name, tokens)
        first = f"; the first output that is not finite is that of {where}"
        message += first if where else ", but a second pass gives finite ones"
    todo = "check the weights, or try --dtype float32 or PEAGLE_KERNELS=xla"
    return InputError(f"{message}; expected finite ones: {todo}")


def _logprobs(log_probs: LogProbs, token_ids: Sequence[int], num_best: int | None) -> list[TokenLogprobs]:
    """Make the entries of tokens, with num_best alternatives per token; none if num_best is None."""
    if num_best is None:
        return []
    chosen, best, ids = (np.asarray(leaf).tolist() for leaf in (log_probs.chosen, log_probs.best, log_probs.best_ids))
    return [
        TokenLogprobs(token, chosen[place], tuple(zip(ids[place], best[place], strict=True))[:num_best])
        for place, token in enumerate(token_ids)
    ]
