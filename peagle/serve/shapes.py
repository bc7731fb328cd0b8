"""The shapes of replies, for the published document. Replies are made as plain dicts: nothing checks them at run time.

The tests hold every reply to its shape.
"""

from typing import Annotated, Literal, TypeAlias

import pydantic
from pydantic.json_schema import SkipJsonSchema


class Shape(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


Number: TypeAlias = float | None  # a number that is not finite is null
Absent = SkipJsonSchema[None]  # of fields that may be left out
FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorBody(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Shape):
    error: ErrorBody


class PromptDetails(Shape):
    cached_tokens: int


class CompletionDetails(Shape):
    reasoning_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Speculation(Shape):
    mean_acceptance_length: Number
    draft_acceptance_rate: Number
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class Metrics(Shape):
    speculative_decoding: Speculation


class Reply(Shape):
    """What replies of both kinds of completion share."""

    id: str
    created: int
    model: str
    usage: Usage
    metrics: Metrics | Absent = None


class Called(Shape):
    name: str
    arguments: str


class Call(Shape):
    id: str
    type: Literal["function"]
    function: Called


class CalledCustom(Shape):
    name: str
    input: str


class CustomCall(Shape):
    id: str
    type: Literal["custom"]
    custom: CalledCustom


class Message(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[Annotated[Call | CustomCall, pydantic.Field(discriminator="type")]] | Absent = None
    reasoning: str | Absent = None
    reasoning_content: str | Absent = None


class TokenLogprob(Shape):
    token: str
    logprob: Number
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Shape):
    content: list[ChosenLogprob]
    refusal: None


class ChatChoice(Shape):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Reply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[Number]
    top_logprobs: list[dict[str, Number] | None]
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class Completion(Reply):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class OutputText(Shape):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[ChosenLogprob]


class OutputReasoningText(Shape):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]
    status: Literal["completed", "incomplete"]


class OutputReasoning(Shape):
    id: str
    type: Literal["reasoning"]
    summary: list[None]
    encrypted_content: None
    content: list[OutputReasoningText]
    status: Literal["completed", "incomplete"]


class OutputCall(Shape):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | Absent = None
    arguments: str
    status: Literal["completed", "incomplete"]


class OutputCustomCall(Shape):
    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | Absent = None
    input: str
    status: Literal["completed", "incomplete"]


Output = Annotated[
    OutputMessage | OutputReasoning | OutputCall | OutputCustomCall, pydantic.Field(discriminator="type")
]


class InputDetails(PromptDetails):
    cache_write_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class Incomplete(Shape):
    reason: Literal["max_output_tokens"]


class Reasoning(Shape):
    effort: str | None
    summary: None


class Response(Shape):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Output]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: Reasoning
    store: Literal[False]
    temperature: float
    text: dict[str, pydantic.JsonValue]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, pydantic.JsonValue]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage
    user: str | None
    metrics: Metrics | Absent = None


class Tokenized(Shape):
    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(Shape):
    prompt: str


class ModelCard(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(Shape):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizerInfo(Shape):
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    tokenizer_class: str
    model_max_length: int


class Health(Shape):
    status: Literal["ok", "failed", "stalled", "draining"]
    model: str
    requests_running: int
    requests_waiting: int
    error: str | None
    kv_cache_tokens: int | None = None  # that pages hold; None: the engines are elsewhere
    kv_cache_usage: float | None = None  # share of the pages that requests hold
