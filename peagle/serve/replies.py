"""The types of replies and of events. `/openapi.json` is made from them.

They are typed dictionaries, so that mypy checks the code that makes them, at no cost per token.
"""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias

import pydantic
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import core_schema
from typing_extensions import TypedDict  # pydantic takes the one of typing only on Python 3.12 or newer

from peagle.base.strict_json import Written


@pydantic.with_config(pydantic.ConfigDict(extra="forbid", strict=True))
class Reply(TypedDict):
    """A reply, an event, or a part of one."""


Number: TypeAlias = float | None  # null: not finite
JsonText: TypeAlias = SkipJsonSchema[
    Annotated[Written, pydantic.GetPydanticSchema(lambda *_: core_schema.is_instance_schema(Written))]
]  # a list that is JSON text already
FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorBody(Reply):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Reply):
    error: ErrorBody


class PromptDetails(Reply):
    cached_tokens: int


class CompletionDetails(Reply):
    reasoning_tokens: int


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class SpeculativeDecoding(Reply):
    """Counts of a reply's steps, under vLLM's names."""

    mean_acceptance_length: Number
    draft_acceptance_rate: Number
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_looked_up_draft_tokens: int
    num_proposed_draft_tokens: int
    num_spec_tokens: int
    num_truncated_tokens: int


class Figures(Reply):
    speculative_decoding: SpeculativeDecoding


class Head(Reply):
    """The common fields of replies and events of chats and completions."""

    id: str
    created: int
    model: str
    metrics: NotRequired[Figures]


class CalledByName(Reply):
    name: str
    arguments: str


class FunctionCall(Reply):
    id: str
    type: Literal["function"]
    function: CalledByName


class CustomInput(Reply):
    name: str
    input: str


class CustomCall(Reply):
    id: str
    type: Literal["custom"]
    custom: CustomInput


class Message(Reply):
    """An answer. Reasoning has two names, since clients differ."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[Annotated[FunctionCall | CustomCall, pydantic.Field(discriminator="type")]]]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]


class TokenLogprob(Reply):
    token: str
    logprob: Number
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Reply):
    content: list[ChosenLogprob] | JsonText
    refusal: None


class ChatChoice(Reply):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(Reply):
    tokens: list[str] | JsonText
    token_logprobs: list[Number] | JsonText
    top_logprobs: list[dict[str, Number] | None] | JsonText
    text_offset: list[int] | JsonText


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class Completion(Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class OutputText(Reply):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[ChosenLogprob] | JsonText


class OutputReasoningText(Reply):
    type: Literal["reasoning_text"]
    text: str


ItemStatus = Literal["completed", "incomplete"]


class OutputItem(Reply):
    id: str
    status: ItemStatus


class OutputMessage(OutputItem):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(OutputItem):
    type: Literal["reasoning"]
    summary: list[None]
    encrypted_content: None
    content: list[OutputReasoningText]


class AnyOutputCall(OutputItem):
    call_id: str
    name: str
    namespace: NotRequired[str]


class OutputCall(AnyOutputCall):
    type: Literal["function_call"]
    arguments: str


class OutputCustomCall(AnyOutputCall):
    type: Literal["custom_tool_call"]
    input: str


Output = Annotated[
    OutputMessage | OutputReasoning | OutputCall | OutputCustomCall, pydantic.Field(discriminator="type")
]


class InputDetails(PromptDetails):
    cache_write_tokens: int


class ResponseUsage(Reply):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class Incomplete(Reply):
    reason: Literal["max_output_tokens"]


class Failure(Reply):
    code: Literal["server_error"]
    message: str


class Reasoning(Reply):
    effort: str | None
    summary: None


class Response(Reply):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "cancelled"]
    error: Failure | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Output]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Reasoning
    store: bool
    temperature: float
    text: dict[str, pydantic.JsonValue]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, pydantic.JsonValue]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    metrics: NotRequired[Figures]


class DeletedResponse(Reply):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Reply):
    object: Literal["list"]
    data: list[dict[str, pydantic.JsonValue]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Tokenized(Reply):
    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(Reply):
    prompt: str


class ModelCard(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(Reply):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizerInfo(Reply):
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    tokenizer_class: str
    model_max_length: int


class Health(Reply):
    """kv_cache_tokens: capacity of the pages. kv_cache_usage: fraction of the pages that requests hold."""

    status: Literal["ok", "loading", "failed", "stalled", "draining"]
    model: str
    requests_running: int
    requests_waiting: int
    error: str | None
    kv_cache_tokens: NotRequired[int | None]  # not of a fleet
    kv_cache_usage: NotRequired[float | None]


class TextOfFunction(Reply):
    name: NotRequired[str]
    arguments: str


class TextOfCustom(Reply):
    name: NotRequired[str]
    input: str


class CallDelta(Reply):
    """A part of a call. The first has id, type and name and no text, since clients join the texts of all parts."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function", "custom"]]
    function: NotRequired[TextOfFunction]
    custom: NotRequired[TextOfCustom]


class ChatDelta(Reply, total=False):
    role: Literal["assistant"]
    content: str
    reasoning: str
    reasoning_content: str
    tool_calls: list[CallDelta]


class TokenOrigin(Reply):
    text: str
    kind: str
    origin: str


class ChatChunkChoice(Reply):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    tokens: NotRequired[list[TokenOrigin]]


class CompletionChunkChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class ResponseEvent(Reply):
    """An event of a response's stream. Which fields it has depends on its type."""

    type: str
    sequence_number: NotRequired[int]  # set when it is sent
    response: NotRequired[dict[str, Any]]
    item_id: NotRequired[str]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    item: NotRequired[dict[str, Any]]
    part: NotRequired[dict[str, Any]]
    delta: NotRequired[str]
    text: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]
    logprobs: NotRequired[list[ChosenLogprob] | JsonText]
