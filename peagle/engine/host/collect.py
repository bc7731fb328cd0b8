"""Turn the results of dispatches into chunks of tokens."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np

from peagle.engine.grammar import GrammarError
from peagle.engine.host.executor import ModelName
from peagle.engine.host.handle import Chunks, Handle
from peagle.engine.host.scheduler import Chunk, Steps
from peagle.engine.request import Drafting, FinishReason, StepRecord, TokenChunk, TokenLogprobs
from peagle.engine.step.sampling import LogProbs
from peagle.engine.step.step_kinds import StepOutput
from peagle.ops.errors import InputError
from peagle.ops.likeliest import NO_TOKEN
from peagle.protocols import Explains

if TYPE_CHECKING:
    from peagle.engine.host.engine import Engine


@dataclass(frozen=True)
class InFlight:
    """A dispatch that was sent and not yet read."""

    action: Chunk[Handle] | Steps
    result: jax.Array
    requests: tuple[Handle | None, ...]  # of each row of the result; () if a chunk completed no prompt
    sent_s: float
    num_drafts: int = 0
    num_steps: int = 0

    @property
    def most_tokens(self) -> int:
        """The most tokens that its steps add to a request."""
        return self.num_steps * (self.num_drafts + 1)

    @property
    def ready(self) -> bool:
        return bool(self.result.is_ready())  # type: ignore[attr-defined]


class Collector:
    """Reads the dispatches of an engine, and ends requests that are complete."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    def read(self, sent: InFlight, values: np.ndarray, now: float) -> Chunks:
        if isinstance(sent.action, Chunk):
            return self._read_first(values, sent, now)
        return self._read_steps(StepOutput.unpack(values, sent.num_drafts), sent, now)

    def _read_first(self, values: np.ndarray, sent: InFlight, now: float) -> Chunks:
        """Make the chunks of first tokens. A resumed request has emitted its first token before."""
        chunks = []
        for row, handle in enumerate(sent.requests):
            if handle is None or handle.output_ids or not self._engine.is_alive(handle):
                continue
            token = int(values[row, 0])
            if token == NO_TOKEN:
                chunks.append((handle, self._not_finite(handle, "target", (), ())))
                continue
            logprobs = _logprobs(LogProbs.unpack(values[row][None, 1:]), (token,), handle.request.logprobs)
            chunks.append((handle, self._chunk(handle, (token,), now, (), logprobs)))
        return chunks

    def _read_steps(self, output: StepOutput, sent: InFlight, now: float) -> Chunks:
        chunks = []
        for row, handle in enumerate(sent.requests):
            if handle is None or not self._engine.is_alive(handle):
                continue
            token_ids: list[int] = []
            logprobs: list[TokenLogprobs] = []
            records: list[StepRecord] = []
            not_finite: ModelName | None = None
            for index in np.flatnonzero(output.num_accepted[:, row] >= 0).tolist():
                accepted, verified = int(output.num_accepted[index, row]), int(output.num_verified[index, row])
                tokens = output.token_ids[index, row].tolist()
                drafts = tuple(output.draft_token_ids[index, row, :verified].tolist())
                emitted = tokens[: int(output.count[index, row])]
                if NO_TOKEN in emitted or NO_TOKEN in drafts:
                    not_finite = "target" if NO_TOKEN in emitted else "drafter"
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
            if not_finite is not None:
                chunks.append((handle, self._not_finite(handle, not_finite, tuple(token_ids), tuple(records))))
            elif records:
                chunks.append((handle, self._chunk(handle, tuple(token_ids), now, tuple(records), logprobs)))
        return chunks

    def _not_finite(
        self, handle: Handle, model: ModelName, token_ids: tuple[int, ...], records: tuple[StepRecord, ...]
    ) -> TokenChunk:
        """End a request whose logits are not finite; return its last chunk, with these tokens.

        A diagnostic pass over the tokens names the model's first output that is not finite.
        """
        engine, tokens = self._engine, [*handle.token_ids, *token_ids]
        message = (
            f"the {model}'s logits for token {len(tokens) - len(handle.request.prompt_ids)} of the answer to "
            f"{handle.request.name} are not finite"
        )
        if isinstance(engine.target if model == "target" else engine.drafter, Explains):
            where = engine.executor.first_not_finite(model, tokens)
            first = f"; the first output that is not finite is that of {where}"
            message += first if where else ", but a second pass gives finite ones"
        todo = "expected finite ones: check the weights, or try --dtype float32 or --kernels xla"
        engine.finish(handle, "error", InputError(f"{message}; {todo}"))
        engine.memory.pool.free_cached()  # on XLA a row that is not finite spoils earlier rows of its pass
        return dataclasses.replace(handle.inbox.pop(), token_ids=token_ids, steps=records)

    def _chunk(
        self,
        handle: Handle,
        token_ids: tuple[int, ...],
        now: float,
        records: tuple[StepRecord, ...],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> TokenChunk:
        """Make the chunk of these tokens. End the request after a stop token, at its budget, or to hand it over."""
        engine = self._engine
        handle.output_ids += token_ids
        reason: FinishReason | None = None
        if token_ids and token_ids[-1] in handle.stop_token_ids:
            reason = "stop"
        elif len(handle.output_ids) >= handle.request.max_new_tokens:
            reason = "length"
        elif engine.config.role == "prefill":
            handle.hand_off, reason = engine.pack(handle), "handed_off"
        # rows after a stop token do not count
        handle.length = min(handle.length, len(handle.token_ids) - 1)
        engine.pages.publish_output(handle, ends=reason is not None)
        if reason is not None:
            handle.finished = reason
            engine.remove(handle)
        if handle.matcher is not None and reason != "length":
            handle.matcher.read(token_ids if reason is None else token_ids[:-1])
            if reason == "stop" and handle.matcher.limited:
                engine.constrained.renew(handle, handle.output_ids[:-1])
            if reason == "stop" and (failure := handle.matcher.failure):
                handle.error, reason = GrammarError(f"{handle.request.name}: {failure}"), "error"
                handle.finished = reason
        first = (0, None) if records else (handle.num_cached_tokens, handle.queued_s)
        error = None if handle.error is None else str(handle.error)
        return TokenChunk(handle.request, token_ids, now, records, reason, tuple(logprobs), *first, error)


def _logprobs(log_probs: LogProbs, token_ids: Sequence[int], num_best: int | None) -> list[TokenLogprobs]:
    """Make the entries of tokens, with num_best alternatives per token; none if num_best is None."""
    if num_best is None:
        return []
    chosen, best, ids = (np.asarray(leaf).tolist() for leaf in (log_probs.chosen, log_probs.best, log_probs.best_ids))
    return [
        TokenLogprobs(token, chosen[place], tuple(zip(ids[place], best[place], strict=True))[:num_best])
        for place, token in enumerate(token_ids)
    ]
