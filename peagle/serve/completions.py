"""/v1/completions: start the requests of a body, and write their reply or events."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peagle.answers.result import Piece
from peagle.base.strict_json import Written, number
from peagle.engine.request import TokenLogprobs
from peagle.serve.bodies import CompletionBody, StreamOptions
from peagle.serve.formatter import ChoicesFormatter
from peagle.serve.generation import Generation
from peagle.serve.replies import CompletionChunkChoice, CompletionLogprobs
from peagle.serve.shared_state import SharedState
from peagle.text.channels import Delta
from peagle.text.tokenizer import Detokenizer, detokenize

COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
Row = tuple[str, str, str, str]  # of a token: the JSON of its value in each column


async def start(shared: SharedState, body: CompletionBody, _owner: str = "") -> Generation:
    """Send the requests of a body to the engine."""
    requests, echoed = await shared.in_tokenizer_thread(shared.builder.completion, body, await shared.grammar(body))
    formatter = CompletionFormatter(
        shared.model,
        shared.builder.pair.tokenizer,
        logprobs=body.logprobs is not None,
        echoed=echoed,
        options=body.stream_options or StreamOptions(),
    )
    if body.echo and body.logprobs is not None:
        formatter.prompts = [request.prompt_ids for request in requests]
        formatter.prompt_logprobs = await shared.prompt_logprobs(requests)
    return shared.generation(body, formatter, requests, decode=not body.only_echo)


@dataclass
class CompletionFormatter(ChoicesFormatter):
    """Completions of raw text."""

    logprobs: bool = False
    echoed: Sequence[str] = ()  # the text of each answer's prompt, if the body sets echo
    prompts: Sequence[tuple[int, ...]] = ()  # their token ids, if the body sets logprobs, too
    prompt_logprobs: Sequence[Sequence[TokenLogprobs]] = ()  # of their tokens after the first

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def _choices(self, piece: Piece, is_first: bool) -> list[CompletionChunkChoice]:
        choices = [self._piece(piece, delta) for delta in piece.deltas]
        if is_first and self.echoed:
            choices.insert(0, self._echo(piece.index))
        if piece.finish_reason is not None:
            choices.append(_choice(piece.index, "", piece.finish_reason))
        return choices

    def _echo(self, index: int) -> CompletionChunkChoice:
        choice = _choice(index, self.echoed[index], None)
        if self.logprobs:
            choice["logprobs"] = _columns(self._prompt_rows(index))
        return choice

    def _piece(self, piece: Piece, delta: Delta) -> CompletionChunkChoice:
        choice = _choice(piece.index, delta.text, None)
        start = len(self.echoed[piece.index]) if self.echoed else 0
        if rows := [self._row(logprobs, start + token.offset) for token, logprobs in piece.logprobs_of(delta)]:
            choice["logprobs"] = _columns(rows)
        return choice

    def _whole(self, choice: dict[str, Any]) -> CompletionChunkChoice:
        return {**choice, "logprobs": choice["logprobs"] or (_columns(()) if self.logprobs else None)}  # type: ignore[typeddict-item]

    def _prompt_rows(self, index: int) -> list[Row]:
        """Make the rows of an echoed prompt. Its first token has no log-probability."""
        first, *others = self._offsets(self.prompts[index], self.echoed[index])
        rows = [(self._token_json(self.prompts[index][0]), "null", "null", str(first))]
        return rows + list(map(self._row, self.prompt_logprobs[index], others))

    def _offsets(self, prompt: Sequence[int], text: str) -> list[int]:
        """Return where a prompt's tokens begin in its text. The tokenizer may have put a token before the text."""
        if self.tokenizer is None:
            return [0] * len(prompt)
        texts = Detokenizer(self.tokenizer)
        lengths = [len(texts.add((token,))) for token in prompt]
        if detokenize(self.tokenizer, prompt) != text:
            lengths[0] = 0
        return [0, *itertools.accumulate(lengths[:-1])]

    def _row(self, token: TokenLogprobs, offset: int) -> Row:
        """Write a token's row. offset: of the token in the text."""
        best = {self._token_json(token_id): number(value) for token_id, value in token.best}  # texts may be equal
        top = ", ".join(f"{text}: {value}" for text, value in best.items())
        return self._token_json(token.token_id), number(token.logprob), f"{{{top}}}", str(offset)


def _choice(index: int, text: str, reason: Any) -> CompletionChunkChoice:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _columns(rows: Sequence[Row]) -> CompletionLogprobs:
    columns: Any = {name: Written.array(row[column] for row in rows) for column, name in enumerate(COLUMNS)}
    return columns
