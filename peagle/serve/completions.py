"""/v1/completions: start the requests of a body, and write their reply or events."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peagle.engine.request import TokenLogprobs
from peagle.ops.strict_json import Written, number
from peagle.result import Result
from peagle.serve.bodies import CompletionBody, StreamOptions
from peagle.serve.formatter import ChoicesFormatter, Generation
from peagle.serve.outputs import OutputChunk, OutputCollector
from peagle.serve.replies import CompletionChunkChoice, CompletionLogprobs
from peagle.serve.service import Service
from peagle.serve.structured import constraint
from peagle.text.channels import Delta
from peagle.text.tokenizer import Detokenizer, detokenize


async def start(service: Service, body: CompletionBody) -> Generation:
    """Send the requests of a body to the engine."""
    requests, echoed = await service.in_tokenizer_thread(service.builder.completion, body, await service.grammar(body))
    tokenizer = service.builder.pair.tokenizer
    formatter = CompletionFormatter(
        service.model,
        tokenizer,
        logprobs=body.logprobs is not None,
        echoed=echoed,
        options=body.stream_options or StreamOptions(),
    )
    if body.echo and body.logprobs is not None:
        formatter.prompts = [request.prompt_ids for request in requests]
        formatter.prompt_logprobs = await service.prompt_logprobs(requests)
    outputs = OutputCollector(service.loop, requests, tokenizer, constraint=constraint(body), decode=not body.only_echo)
    return Generation(body.stream, formatter, outputs)


@dataclass
class CompletionFormatter(ChoicesFormatter):
    """Completions of raw text.

    echoed: the text of each answer's prompt, if the body sets echo; with log-probabilities, `prompts` has their ids,
    and `prompt_logprobs` those of all tokens after the first.
    """

    logprobs: bool = False
    echoed: Sequence[str] = ()
    prompts: Sequence[tuple[int, ...]] = ()
    prompt_logprobs: Sequence[Sequence[TokenLogprobs]] = ()
    _entries: dict[int, dict[str, list[str]]] = field(default_factory=dict)

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def _first(self, place: int) -> list[CompletionChunkChoice]:
        if not self.echoed:
            return []
        choice = _choice(place, self.echoed[place], None)
        if self.logprobs:
            choice["logprobs"] = self._kept(place, self._of_prompt(place))
        return [choice]

    def _middle(self, chunk: OutputChunk) -> list[CompletionChunkChoice]:
        return [self._piece(chunk, delta) for delta in chunk.deltas]

    def _piece(self, chunk: OutputChunk, delta: Delta) -> CompletionChunkChoice:
        choice = _choice(chunk.place, delta.text, None)
        if tokens := chunk.logprobs_of(delta):
            start = len(self.echoed[chunk.place]) if self.echoed else 0
            places = [start + token.offset for token, _ in tokens]
            choice["logprobs"] = self._kept(chunk.place, self._columns([logprobs for _, logprobs in tokens], places))
        return choice

    def _last(self, place: int, reason: str) -> CompletionChunkChoice:
        return _choice(place, "", reason)

    def _whole(self, place: int, result: Result) -> CompletionChunkChoice:
        prompt = self.echoed[place] if self.echoed else ""
        choice = _choice(place, prompt + (result.text or ""), result.finish_reason)
        if self.logprobs:
            choice["logprobs"] = _joined(self._entries.get(place, self._columns([], [])))
        return choice

    def _kept(self, place: int, columns: dict[str, list[str]]) -> CompletionLogprobs:
        """Keep entries of log-probabilities for the whole reply; return them joined."""
        kept = self._entries.setdefault(place, {})
        for name, entries in columns.items():
            kept.setdefault(name, []).extend(entries)
        return _joined(columns)

    def _of_prompt(self, place: int) -> dict[str, list[str]]:
        """Make the entries of an echoed prompt. Its first token has no log-probability."""
        prompt, known = self.prompts[place], [TokenLogprobs(self.prompts[place][0], 0.0, ())]
        columns = self._columns([*known, *self.prompt_logprobs[place]], self._places(prompt, self.echoed[place]))
        columns["token_logprobs"][0] = columns["top_logprobs"][0] = "null"
        return columns

    def _places(self, prompt: Sequence[int], text: str) -> list[int]:
        """Find where a prompt's tokens stand in its text, before which the tokenizer may have put one."""
        if self.tokenizer is None:
            return [0] * len(prompt)
        texts = Detokenizer(self.tokenizer)
        lengths = [len(texts.add((token,))) for token in prompt]
        if detokenize(self.tokenizer, prompt) != text:
            lengths[0] = 0
        return [0, *itertools.accumulate(lengths[:-1])]

    def _columns(self, tokens: Sequence[TokenLogprobs], places: Sequence[int]) -> dict[str, list[str]]:
        """Write the entries of tokens, token column as texts of JSON. places: of the tokens in the text."""
        return {
            "tokens": [self._written(token.token_id) for token in tokens],
            "token_logprobs": [number(token.logprob) for token in tokens],
            "top_logprobs": [self._best(token) for token in tokens],
            "text_offset": list(map(str, places)),
        }

    def _best(self, entry: TokenLogprobs) -> str:
        values = {self._written(token): number(value) for token, value in entry.best}  # texts may be equal
        return f"{{{', '.join(f'{text}: {value}' for text, value in values.items())}}}"


def _choice(place: int, text: str, reason: Any) -> CompletionChunkChoice:
    return {"index": place, "text": text, "logprobs": None, "finish_reason": reason}


def _joined(columns: Mapping[str, Sequence[str]]) -> CompletionLogprobs:
    joined: Any = {name: Written.array(entries) for name, entries in columns.items()}
    return joined
