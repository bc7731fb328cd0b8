"""Make the engine's requests of a body. Call the methods in one thread: tokenizers are not thread-safe."""

import dataclasses
import functools
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.base.errors import InputError
from peagle.base.settings import brief
from peagle.config import MOST_LOGPROBS, SamplingParams
from peagle.engine.grammar import CompiledGrammar, Grammar, GrammarError
from peagle.engine.request import Request, TokenLogprobs
from peagle.measure.logprobs import output_logprobs
from peagle.pair import Pair
from peagle.serve.bodies import (
    MOST_CHOICES,
    MOST_PROMPTS,
    ChatBody,
    ChatMessage,
    CompletionBody,
    CustomTool,
    DetokenizeBody,
    Effort,
    Sampled,
    StreamOptions,
    TokenizeBody,
)
from peagle.serve.errors import ApiError
from peagle.serve.structured import constraint_field, grammar_error, grammar_of
from peagle.serve.system_messages import INSTRUCTION_ROLES, as_instructions, instructions_first
from peagle.serve.tools import (
    begin_call,
    call_grammars,
    must_call,
    template_messages,
    template_tools,
)
from peagle.text.channels import CALL, control_ids
from peagle.text.prompts import check_encodable
from peagle.text.tokenizer import Message, TemplateError, TextTooLong, Tokenizer, detokenize

# efforts that GPT-OSS does not know -> the nearest one
EFFORTS: Mapping[Effort | None, Effort] = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
SAMPLING = [field.name for field in dataclasses.fields(SamplingParams)]  # fields of bodies, too
PROBE = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {}}}
TOKEN_ID = re.compile(r"[0-9]{1,10}")  # as a key of an object


@dataclass(frozen=True)
class RequestBuilder:
    """Makes the engine's requests for one pair and context.

    date: for chat templates that show one. num_speculative_tokens: the most that a request may set.
    """

    pair: Pair
    context: int
    date: str
    num_speculative_tokens: int

    @property
    def tokenizer(self) -> Tokenizer:
        """The pair's tokenizer. Raises ApiError if it has none."""
        if self.pair.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer; only /v1/completions with token ids is possible")
        return self.pair.tokenizer

    @functools.cached_property
    def supports_tools(self) -> bool:
        """Whether the chat template renders tools."""
        chat = [{"role": "user", "content": "a"}]
        try:
            return self.tokenizer.encode_chat(chat, tools=[PROBE]) != self.tokenizer.encode_chat(chat)
        except TemplateError:
            return False

    def grammar(self, body: Sampled) -> CompiledGrammar | None:
        """Compile the grammar of the answers, in a chat that of final messages and calls; None: they are free.

        Thread-safe.
        """
        grammar, field = grammar_of(body) or (None, None)
        if isinstance(body, ChatBody) and body.tools:
            return self._grammar_with_tools(body, grammar, field)
        if grammar is None:
            return None
        try:
            return self.pair.grammars.compile(grammar, channels=isinstance(body, ChatBody))
        except GrammarError as error:
            raise grammar_error(error, field) from None

    def _grammar_with_tools(self, body: ChatBody, grammar: Grammar | None, field: str | None) -> CompiledGrammar | None:
        """Compile the grammar of final messages and calls. grammar, field: of the final message.

        An answer that must be a call has no final message, so a format of it constrains nothing, as in OpenAI's API.
        """
        tools, only = template_tools(body.tools, body.tool_choice, supported=True)
        calls = call_grammars(body.tools, body.tool_choice) if tools else {}
        must = must_call(body.tool_choice)
        if must and grammar is not None and not (field or "").startswith("response_format"):
            message = f"tool_choice makes the answer a call, which {field} cannot constrain; leave one of them out"
            raise ApiError(400, message, "tool_choice")
        grammar = None if must else grammar
        if grammar is None and not any(calls.values()):
            return None
        try:
            if only is not None:  # the prompt ends with the call's header
                return self.pair.grammars.compile(calls[only], channels=False)
            return self.pair.grammars.compile(grammar, channels=True, calls=calls, must_call=must)
        except GrammarError as error:
            raise grammar_error(error, field or "tools") from None

    def chat(self, body: ChatBody, grammar: CompiledGrammar | None = None) -> list[Request]:
        """Make the n requests of a chat. grammar: see the method `grammar`."""
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs is given without logprobs; set logprobs to true", "top_logprobs")
        if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MOST_LOGPROBS:
            raise ApiError.wrong("top_logprobs", body.top_logprobs, f"0..{MOST_LOGPROBS}")
        limits = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; leave out max_tokens", "max_tokens")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        supported = bool(body.tools) and self.supports_tools
        tools, forced = template_tools(body.tools, body.tool_choice, supported)
        prompt_ids = self.encode_chat(body.messages, body.reasoning_effort, tools)
        if forced is not None:
            prompt_ids = begin_call(self.tokenizer, prompt_ids, forced)
        if grammar is not None:
            try:
                grammar = self.pair.grammars.begin(grammar, prompt_ids)
            except GrammarError as error:
                raise ApiError.of(error, constraint_field(body)) from None
        call_end = control_ids(self.tokenizer).get(CALL) if tools else None
        stops = () if call_end is None else (call_end,)  # a call ends the answer
        return self._requests(body, [prompt_ids], 1, limits.pop() if limits else None, logprobs, grammar, stops)

    def completion(
        self, body: CompletionBody, grammar: CompiledGrammar | None = None
    ) -> tuple[list[Request], list[str]]:
        """Return (n requests for each prompt, the text of each request's prompt if the body sets echo)."""
        prompts = _prompts(body)
        if len(prompts) > MOST_PROMPTS:
            raise ApiError(400, f"{len(prompts)} prompts are given; expected at most {MOST_PROMPTS}", "prompt")
        limit = 16 if body.max_tokens is None else body.max_tokens
        if body.only_echo:  # the engine does not run, but a request needs a limit
            limit = 1
        encoded = map(self._prompt_ids, prompts)  # lazy: the first prompt that is too long is refused before the next
        requests = self._requests(body, encoded, len(prompts), limit, body.logprobs, grammar)
        if not body.echo:
            return requests, []
        texts = [prompt if isinstance(prompt, str) else detokenize(self.tokenizer, tuple(prompt)) for prompt in prompts]
        return requests, [text for text in texts for _ in range(body.n)]

    def _prompt_ids(self, prompt: str | list[int]) -> tuple[int, ...]:
        ids = self.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        self.check_ids(ids, "prompt")
        return ids

    def prompt_logprobs(self, request: Request) -> list[TokenLogprobs]:
        """Compute the log-probabilities of all prompt tokens after the first.

        All requests share one compiled program, for the whole context and MOST_LOGPROBS likeliest tokens.
        """
        first, *others = request.prompt_ids
        tokens = output_logprobs(self.pair.plain_target, [first], others, MOST_LOGPROBS, self.context)
        return [dataclasses.replace(token, best=token.best[: request.logprobs]) for token in tokens]

    def tokenize(self, body: TokenizeBody) -> tuple[int, ...]:
        """Return the ids of a text, or of a chat up to its next answer."""
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "expected exactly one of prompt and messages", "prompt")
        if body.prompt is not None:
            ids = self.encode(body.prompt)
            return ids if body.add_special_tokens else ids[len(self.encode("")) :]
        assert body.messages is not None
        tools, _ = template_tools(body.tools, "auto", bool(body.tools) and self.supports_tools)
        return self.encode_chat(body.messages, body.reasoning_effort, tools)

    def detokenize(self, body: DetokenizeBody) -> str:
        self.check_ids(body.tokens, "tokens")
        return detokenize(self.tokenizer, body.tokens)

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode a raw text. Special tokens spelled in it are characters."""
        check_encodable(text, "the prompt")
        try:
            return tuple(self.tokenizer.encode(text, most_tokens=self.context))
        except TextTooLong as error:
            raise self._too_long("the prompt", error, "prompt") from None

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        effort: Effort | None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:
        """Encode a chat up to the next answer."""
        if not messages:
            raise ApiError(400, "messages is empty; expected at least one message", "messages")
        for index, message in enumerate(messages):
            _check_message(f"messages.{index}", message)
        try:
            chat = template_messages(messages)
            later = {message["role"] for message in chat[1:]} & {*INSTRUCTION_ROLES}
            if not later or later <= self.roles_anywhere:
                return self._render(chat, effort, tools)
            chat, disguised = instructions_first(chat)
            prompt_ids = as_instructions(self.tokenizer, self._render(chat, effort, tools), chat, disguised)
        except TextTooLong as error:
            raise self._too_long("the chat", error, "messages") from None
        except TemplateError as error:
            field = "tools" if tools and not self._renders(tools) else "messages"
            reason = f"the model's chat template refuses the {field}: {error.reason}"
            raise ApiError(400, reason, field) from None
        if prompt_ids is None:
            fault = "the model's chat template leaves out instructions that are not first; put them first"
            raise ApiError(400, fault, "messages")
        return prompt_ids

    def _render(
        self, chat: Sequence[Message], effort: Effort | None = None, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        effort = EFFORTS.get(effort, effort)
        ids = self.tokenizer.encode_chat(
            chat, reasoning_effort=effort, date=self.date, tools=tools, most_tokens=self.context
        )
        return tuple(ids)

    @functools.cached_property
    def roles_anywhere(self) -> frozenset[str]:
        """The roles whose instructions the chat template renders anywhere, not only in the first message."""
        user, roles = {"role": "user", "content": "a"}, set()
        for role in INSTRUCTION_ROLES:
            later = [{"role": role, "content": text} for text in ("first", "next to it", "in the midst")]
            try:
                text = detokenize(self.tokenizer, self._render([*later[:2], user, later[2], user]))
            except TemplateError:
                continue
            if all(message["content"] in text for message in later):
                roles.add(role)
        return frozenset(roles)

    def _too_long(self, name: str, error: TextTooLong, field: str) -> ApiError:
        return self._beyond_context(
            f"{name} has {error.num_bytes} bytes, {error.least_tokens} tokens or more",
            field,
            f"at most {self.context - 1} tokens: shorten it",
        )

    def _beyond_context(self, fault: str, field: str, expected: str) -> ApiError:
        message = f"{fault}, but the context holds {self.context} positions; expected {expected}"
        return ApiError(400, message, field, "context_length_exceeded")

    def _renders(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Test whether the chat template renders these tools before a plain message."""
        try:
            self._render([{"role": "user", "content": "a"}], tools=tools)
        except TemplateError:
            return False
        return True

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise ApiError for an id outside the target's vocabulary."""
        size = self.pair.target.vocab_size
        if bad := [token for token in ids if not 0 <= token < size]:
            raise ApiError(400, f"{param} holds token id {brief(bad[0])}; expected 0..{size - 1}", param)

    def _requests(
        self,
        body: Sampled,
        prompts: Iterable[tuple[int, ...]],
        num_prompts: int,
        limit: int | None,
        logprobs: int | None,
        grammar: CompiledGrammar | None = None,
        more_stops: Sequence[int] = (),
    ) -> list[Request]:
        """Make n requests for each prompt. more_stops: stop tokens besides those of the model and of the body."""
        if not 1 <= body.n <= MOST_CHOICES:
            raise ApiError.wrong("n", body.n, f"1..{MOST_CHOICES}")
        if body.stream_options not in (None, StreamOptions()) and not body.stream:
            raise ApiError(400, "stream_options is given without stream; set stream to true", "stream_options")
        stop_strings = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
        self.check_ids(body.stop_token_ids, "stop_token_ids")
        stop_ids = () if body.ignore_eos else (*self.pair.stop_token_ids, *more_stops)
        stop_ids = tuple(dict.fromkeys((*stop_ids, *body.stop_token_ids)))
        drafts, sampling = self._num_drafts(body), self._sampling(body)
        requests = []
        for number, prompt_ids in enumerate(prompts, 1):
            name = "the prompt" if num_prompts == 1 else f"prompt {number}"
            budget = self._budget(body, len(prompt_ids), limit, name)
            if body.min_tokens > budget:
                raise ApiError.wrong("min_tokens", body.min_tokens, f"at most {budget}, the most tokens")
            first = Request(prompt_ids, budget, sampling, stop_ids, 0, name, logprobs, stop_strings, drafts, grammar)
            requests += [dataclasses.replace(first, index=index) for index in range(body.n)]
        return requests

    def _num_drafts(self, body: Sampled) -> int | None:
        """Return the body's K; None: the server's."""
        k = None if body.speculative is None else body.speculative.num_speculative_tokens
        if k is not None and not 0 <= k <= self.num_speculative_tokens:
            expected = f"0 (plain decoding) to {self.num_speculative_tokens}, the server's K"
            raise ApiError.wrong("speculative.num_speculative_tokens", k, expected)
        return k

    def _budget(self, body: Sampled, length: int, limit: int | None, name: str) -> int:
        """Return the most tokens of an answer. length: of the prompt `name`. limit: of the body."""
        room, field, limit_field = self.context - length, "prompt", "max_tokens"
        if isinstance(body, ChatBody):
            field = "messages"
            limit_field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        if room < 1:
            raise self._beyond_context(f"{name} has {length} tokens", field, f"at most {self.context - 1}: shorten it")
        if limit is None:
            return room
        if limit < 1:
            raise ApiError.wrong(limit_field, limit, "1 or more")
        if limit > room:
            fault = f"{name} has {length} tokens and {limit_field} is {limit}"
            raise self._beyond_context(fault, limit_field, f"{limit_field} of at most {room}")
        return limit

    def _sampling(self, body: Sampled) -> SamplingParams:
        if bad := [key for key in body.logit_bias if not TOKEN_ID.fullmatch(key)]:
            raise ApiError(400, f"logit_bias has the key {brief(bad[0])}; expected token ids as keys", "logit_bias")
        bias = tuple((int(token), value) for token, value in body.logit_bias.items())
        self.check_ids([token for token, _ in bias], "logit_bias")
        values = {name: getattr(body, name) for name in SAMPLING}
        values["top_k"] = 0 if body.top_k == -1 else body.top_k  # -1 is off in vLLM
        values["top_p"] = body.top_p or 1.0
        values["seed"] = secrets.randbits(31) if body.seed is None else body.seed
        sampling = SamplingParams(**{**values, "logit_bias": bias})
        return sampling if body.top_p else dataclasses.replace(sampling, temperature=0.0)  # 0: the likeliest token


def notes(body: ChatBody) -> list[str]:
    """Return lines for the server's log: how the prompt differs from the body."""
    lines, effort = [], body.reasoning_effort
    if effort in EFFORTS:
        lines.append(f"the reasoning effort {effort} is not one of GPT-OSS: the prompt says {EFFORTS[effort]}")
    if body.verbosity not in (None, "medium"):
        lines.append(f"the verbosity {body.verbosity} has no effect: GPT-OSS knows none")
    if any(isinstance(tool, CustomTool) and tool.custom.format is not None for tool in body.tools):
        lines.append("the prompt shows grammars of custom tools to the model; they do not constrain the inputs")
    return lines


def _prompts(body: CompletionBody) -> list[str] | list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt is empty; expected a text or token ids", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return prompt  # type: ignore[return-value]


def _check_message(where: str, message: ChatMessage) -> None:
    """Raise ApiError for a message without a field of its role, or with one of another role."""
    if message.role != "assistant" and "content" not in message.model_fields_set:
        raise ApiError(400, f"{where}, a message of the {message.role}, has no content; add it", f"{where}.content")
    try:
        check_encodable(message.text, where)
    except InputError as error:
        raise ApiError.of(error, where) from None
    for name, role in (("tool_calls", "assistant"), ("refusal", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) and message.role != role:
            text = f"{where}.{name} is not supported in a message of the {message.role}; leave it out"
            raise ApiError(400, text, f"{where}.{name}", "unsupported_parameter")
