"""The types of the HTTP interface: bodies, replies and events. `/openapi.json` is written from them.

A body is a pydantic model: unknown fields are refused by name. Ranges are published here, and checked by the code that
uses the values (`peagle.config`, `peagle.engine.request`). A reply or an event is a typed dictionary: mypy checks the
code that writes it, at no cost per token.
"""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias

import pydantic
from pydantic import Discriminator, Tag
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import core_schema
from typing_extensions import TypedDict  # pydantic reads that of typing from Python 3.12 on

from peagle.config import HOTTEST, LARGEST_PENALTY, LARGEST_SEED, MOST_LOGPROBS, MOST_STOP_STRINGS, SMALLEST_SEED
from peagle.ops.strict_json import Written, dumps
from peagle.serve.names import CHAT, Names

MOST_CHOICES = 16  # of each prompt
CUSTOM_INPUT = "input"  # the only parameter of a custom tool, as a function
FUNCTIONS = "functions"  # the namespace of functions without one
# values by which an unsupported field asks for nothing; null always does
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "best_of": (1,),
    "suffix": ("",),
    "store": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
    "background": (False,),
    "truncation": ("disabled",),
    "stream_options": ({"include_obfuscation": False},),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "audio": ({},),
    "annotations": ([],),
}
HOSTED = (  # tools that OpenAI's servers run, by their types
    *("apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview", "file_search"),
    *("image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search"),
    *("web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
)


def published(**limits: Any) -> Any:
    """Publish the limits of a field. The code that uses the value checks them."""
    return pydantic.Field(json_schema_extra=limits)


PENALTY = Annotated[float, published(minimum=-LARGEST_PENALTY, maximum=LARGEST_PENALTY)]
LIMIT = Annotated[int | None, published(minimum=1)]
LOGPROBS = Annotated[int | None, published(minimum=0, maximum=MOST_LOGPROBS)]
TOKEN_ID = Annotated[int, published(minimum=0)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def kind_of(value: Any) -> str:
    """Name the branch of a union of objects by their type."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"[{kind}]"


def list_or_text(value: Any) -> str:
    """Name the branch of a union of a text and a list."""
    return "[list]" if isinstance(value, list) else "[text]"


def object_or_text(value: Any) -> str:
    """Name the branch of a union of a text and an object."""
    return "[object]" if isinstance(value, dict | pydantic.BaseModel) else "[text]"


BY_TYPE, LIST_OR_TEXT, OBJECT_OR_TEXT = map(Discriminator, (kind_of, list_or_text, object_or_text))


class Body(pydantic.BaseModel):
    """An object of a body. Branches of its unions have names in brackets, which are no fields (`_refusal`)."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, fields: Any) -> Any:
        """Leave out nulls, and neutral values of unsupported fields."""
        if not isinstance(fields, dict):
            return fields
        return {
            key: value
            for key, value in fields.items()
            if value is not None
            and (key in cls.model_fields or not any(_same(value, neutral) for neutral in NEUTRAL.get(key, ())))
        }


class Marked(Body):
    """An object that clients mark for a cache of prompts. No effect: every prompt is looked up in the cache."""

    cache_control: dict[str, Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class StreamOptions(Body):
    """continuous_usage_stats: with include_usage, each chunk has the usage so far, as in vLLM."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class TextPart(Marked):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """The refusal of a past answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


ContentPart = Annotated[Annotated[TextPart, Tag("[text]")] | Annotated[RefusalPart, Tag("[refusal]")], BY_TYPE]
Text = Annotated[str, Tag("[text]")]
Content = Annotated[Text | Annotated[list[ContentPart], Tag("[list]")], LIST_OR_TEXT]


class Function(Marked):
    """A function that the model may call. strict: its arguments must follow the schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Marked):
    type: Literal["function"]
    function: Function

    @property
    def name(self) -> str:
        return self.function.name


class Syntax(Body):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(Body):
    """The input of a custom tool. A grammar is told to the model, and does not bind the input."""

    type: Literal["text", "grammar"]
    grammar: Syntax | None = None


class Custom(Marked):
    """A tool whose input is a text. The model calls it as a function of that text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


class CustomTool(Marked):
    type: Literal["custom"]
    custom: Custom

    @property
    def name(self) -> str:
        return self.custom.name

    @property
    def function(self) -> Function:
        """The tool as the model sees it."""
        custom = self.custom
        grammar = None if custom.format is None else custom.format.grammar
        rules = f"The input follows this grammar ({grammar.syntax}):\n{grammar.definition}" if grammar else ""
        return Function(
            name=custom.name,
            description="\n\n".join(filter(None, (custom.description, rules))),
            parameters={
                "type": "object",
                "properties": {CUSTOM_INPUT: {"type": "string"}},
                "required": [CUSTOM_INPUT],
                "additionalProperties": False,
            },
        )


Tool = FunctionTool | CustomTool
ANY_TOOL = Annotated[Annotated[FunctionTool, Tag("[function]")] | Annotated[CustomTool, Tag("[custom]")], BY_TYPE]


class ToolName(Body):
    name: str


def text_of(content: Any) -> str:
    """Return the text of a content: a text, or parts of texts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def qualified(namespace: str | None, name: str) -> str:
    """Return a tool's name as the model sees it: with its namespace, but for that of plain functions."""
    return name if namespace in (None, FUNCTIONS) else f"{namespace}.{name}"


class NamedFunction(Body):
    type: Literal["function"]
    function: ToolName

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustom(Body):
    type: Literal["custom"]
    custom: ToolName

    @property
    def name(self) -> str:
        return self.custom.name


NamedTool = NamedFunction | NamedCustom
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[text]")]
    | Annotated[
        Annotated[NamedFunction, Tag("[function]")] | Annotated[NamedCustom, Tag("[custom]")], BY_TYPE, Tag("[object]")
    ],
    OBJECT_OR_TEXT,
]


class CalledFunction(Body):
    """parsed_arguments: of clients that send back parsed messages; no effect."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class CalledCustom(Body):
    name: str
    input: str


class PastFunctionCall(Body):
    """A call in a past answer. index: of clients that send back a stream's calls; no effect."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class PastCustomCall(Body):
    id: str
    type: Literal["custom"]
    custom: CalledCustom
    index: int | None = None

    @property
    def function(self) -> CalledFunction:
        """The call as the model wrote it."""
        arguments = dumps({CUSTOM_INPUT: self.custom.input}, ensure_ascii=False)
        return CalledFunction(name=self.custom.name, arguments=arguments)


def _kind_of_call(value: Any) -> str:
    return "[custom]" if kind_of(value) == "[custom]" else "[function]"


PastCall = Annotated[
    Annotated[PastFunctionCall, Tag("[function]")] | Annotated[PastCustomCall, Tag("[custom]")],
    Discriminator(_kind_of_call),
]


class ChatMessage(Marked):
    """A message. `reasoning` is left out, as by chat templates, unless it led to calls.

    parsed: of clients that send back parsed messages; no effect.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""
    refusal: str | None = None
    tool_calls: list[PastCall] = []
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    parsed: Any = None

    @property
    def text(self) -> str:
        """Its texts joined; of an answer that refused, the refusal."""
        return text_of(self.content) or self.refusal or ""


class Speculative(Body):
    """The most drafts of a step of this request; None: the server's."""

    num_speculative_tokens: Annotated[int | None, published(minimum=0)] = None


class JsonSchema(Body):
    """A schema with its name. strict: no effect, since every answer follows its schema."""

    name: str
    description: str | None = None
    strict: bool | None = None
    of: dict[str, Any] = pydantic.Field(alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    of_json: str | dict[str, Any] | None = pydantic.Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Structured(Body):
    """The fields that constrain an answer, at most one per body. `guided_*` are vLLM's former names."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def names(self) -> Names:
        """How refusals name the fields."""
        return CHAT


class AnswerBody(Body):
    """Fields of every body that asks for an answer. prompt_cache_key, safety_identifier, user: no effect."""

    model: str | None = None
    temperature: Annotated[float, published(minimum=0, maximum=HOTTEST)] = 1.0
    top_p: Annotated[float, published(exclusiveMinimum=0, maximum=1)] = 1.0
    seed: Annotated[int | None, published(minimum=SMALLEST_SEED, maximum=LARGEST_SEED)] = None
    stream: bool = False
    speculative: Speculative | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class Sampled(AnswerBody, Structured):
    """Fields of both kinds of completion. None: the default of the interface."""

    top_k: Annotated[int, published(minimum=-1, exclusiveMaximum=2**31)] = 0
    min_p: Annotated[float, published(minimum=0, maximum=1)] = 0.0
    max_tokens: LIMIT = None
    min_tokens: Annotated[int, published(minimum=0)] = 0
    stop: Annotated[str | list[str], published(minLength=1, maxItems=MOST_STOP_STRINGS)] = []
    stop_token_ids: list[TOKEN_ID] = []
    ignore_eos: bool = False
    n: Annotated[int, published(minimum=1, maximum=MOST_CHOICES)] = 1
    logit_bias: Annotated[dict[str, float], published(propertyNames={"pattern": "^[0-9]+$"})] = {}
    presence_penalty: PENALTY = 0.0
    frequency_penalty: PENALTY = 0.0
    repetition_penalty: Annotated[float, published(exclusiveMinimum=0)] = 1.0
    stream_options: StreamOptions | None = None


class ChatBody(Sampled):
    messages: Annotated[list[ChatMessage], published(minItems=1)]
    max_completion_tokens: LIMIT = None
    logprobs: bool = False
    top_logprobs: LOGPROBS = None
    reasoning_effort: Effort | None = None
    tools: list[ANY_TOOL] = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    return_token_origins: bool = False  # of the page: which token came from which draft


class CompletionBody(Sampled):
    """max_tokens: with echo it may be 0."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int | None, published(minimum=0)] = None
    echo: bool = False
    logprobs: LOGPROBS = None

    @property
    def only_echo(self) -> bool:
        """Whether the prompts are the answers."""
        return self.echo and self.max_tokens == 0


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    reasoning_effort: Effort | None = None
    tools: list[ANY_TOOL] = []
    add_special_tokens: bool = True  # that the tokenizer puts before a text


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TOKEN_ID]


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


class ReasoningOptions(Body):
    effort: Effort | None = None
    summary: Literal["auto"] | None = None  # there is none; the reasoning itself is in the reply


class Offered(Marked):
    """A tool that the client runs. allowed_callers, defer_loading, async: no effect."""

    name: str
    description: str | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    run_async: bool | None = pydantic.Field(None, alias="async")


class OfferedFunction(Offered):
    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None


class InputFormat(Body):
    """The input of a custom tool. A grammar is told to the model, and does not bind the input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class OfferedCustom(Offered):
    type: Literal["custom"]
    format: InputFormat | None = None


OfferedTool = Annotated[
    Annotated[OfferedFunction, Tag("[function]")] | Annotated[OfferedCustom, Tag("[custom]")], BY_TYPE
]


class Namespace(Marked):
    """Tools whose names have a common prefix for the model: NAMESPACE.NAME."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[OfferedTool]


class HostedTool(Body):
    """A tool of OpenAI's servers alone. It is left out of the prompt."""

    model_config = pydantic.ConfigDict(extra="allow")

    type: str


def _kind_of_tool(value: Any) -> str:
    kind = kind_of(value)
    return "[hosted tool]" if kind.strip("[]") in HOSTED else kind


AnyTool = Annotated[
    Annotated[OfferedFunction, Tag("[function]")]
    | Annotated[OfferedCustom, Tag("[custom]")]
    | Annotated[Namespace, Tag("[namespace]")]
    | Annotated[HostedTool, Tag("[hosted tool]")],
    Discriminator(_kind_of_tool),
]


class ChosenFunction(Body):
    type: Literal["function"]
    name: str

    @property
    def as_in_chat(self) -> NamedFunction:
        return NamedFunction(type="function", function=ToolName(name=self.name))


class ChosenCustom(Body):
    type: Literal["custom"]
    name: str

    @property
    def as_in_chat(self) -> NamedCustom:
        return NamedCustom(type="custom", custom=ToolName(name=self.name))


ChosenTool = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[text]")]
    | Annotated[
        Annotated[ChosenFunction, Tag("[function]")] | Annotated[ChosenCustom, Tag("[custom]")],
        BY_TYPE,
        Tag("[object]"),
    ],
    OBJECT_OR_TEXT,
]


class TextFormat(Body):
    """The format of the final text. strict: no effect, since every answer follows its schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    of: dict[str, Any] | None = pydantic.Field(None, alias="schema")


class TextOptions(Body):
    format: TextFormat = pydantic.Field(default_factory=lambda: TextFormat(schema=None))
    verbosity: Literal["medium"] | None = None


class Item(Body):
    """An item of the input. id, status: of clients that send back output items; no effect."""

    id: str | None = None
    status: str | None = None


class InputText(Marked):
    type: Literal["input_text", "text"]
    text: str


class PastText(Marked):
    """A part of a past answer. Only its text has an effect."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


def _kind_of_part(value: Any) -> str:
    kind = kind_of(value)
    return "[input_text]" if kind == "[text]" else kind


InputPart = Annotated[
    Annotated[InputText, Tag("[input_text]")]
    | Annotated[PastText, Tag("[output_text]")]
    | Annotated[RefusalPart, Tag("[refusal]")],
    Discriminator(_kind_of_part),
]
InputContent = Annotated[Text | Annotated[list[InputPart], Tag("[list]")], LIST_OR_TEXT]


class InputMessage(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: InputContent
    phase: str | None = None


class CallItem(Item):
    """A call, or its result. caller, async: of clients that send back output items; no effect."""

    call_id: str
    namespace: str | None = None
    caller: dict[str, Any] | None = None
    run_async: bool | None = pydantic.Field(None, alias="async")


class InputCall(CallItem):
    type: Literal["function_call"]
    name: str
    arguments: str
    parsed_arguments: Any = None

    @property
    def as_in_chat(self) -> PastFunctionCall:
        function = CalledFunction(name=qualified(self.namespace, self.name), arguments=self.arguments)
        return PastFunctionCall(id=self.call_id, function=function)


class InputCustomCall(CallItem):
    type: Literal["custom_tool_call"]
    name: str
    input: str

    @property
    def as_in_chat(self) -> PastCustomCall:
        custom = CalledCustom(name=qualified(self.namespace, self.name), input=self.input)
        return PastCustomCall(id=self.call_id, type="custom", custom=custom)


class InputResult(CallItem):
    type: Literal["function_call_output", "custom_tool_call_output"]
    output: InputContent
    name: str | None = None


class ReasoningText(Body):
    type: Literal["reasoning_text", "text"]
    text: str


class InputReasoning(Item):
    """Reasoning of a past answer. It reaches the model if it led to calls. Nothing here is encrypted."""

    type: Literal["reasoning"]
    summary: list[Any] = []
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


def _kind_of_item(value: Any) -> str:
    if isinstance(value, dict) and value.get("type") is None:
        return "[message]" if "role" in value or "id" not in value else "[item_reference]"
    return kind_of(value)


AnyItem = Annotated[
    Annotated[InputMessage, Tag("[message]")]
    | Annotated[InputCall, Tag("[function_call]")]
    | Annotated[InputResult, Tag("[function_call_output]")]
    | Annotated[InputCustomCall, Tag("[custom_tool_call]")]
    | Annotated[InputResult, Tag("[custom_tool_call_output]")]
    | Annotated[InputReasoning, Tag("[reasoning]")],
    Discriminator(_kind_of_item),
]


class ResponsesBody(AnswerBody):
    """client_metadata, prompt_cache_key, safety_identifier, user: no effect."""

    input: Annotated[Text | Annotated[list[AnyItem], Tag("[list]")], LIST_OR_TEXT]
    instructions: str | None = None
    max_output_tokens: LIMIT = None
    reasoning: ReasoningOptions = ReasoningOptions()
    tools: list[AnyTool] = []
    tool_choice: ChosenTool = "auto"
    parallel_tool_calls: bool = True
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] = []
    top_logprobs: LOGPROBS = None
    text: TextOptions = TextOptions()
    store: bool = False
    metadata: dict[str, str] = {}
    client_metadata: dict[str, Any] | None = None


@pydantic.with_config(pydantic.ConfigDict(extra="forbid", strict=True))
class Reply(TypedDict):
    """A reply, an event, or a part of one."""


Number: TypeAlias = float | None  # a number that is not finite is null
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


class Speculation(Reply):
    """The figures of a reply's steps, under vLLM's names."""

    mean_acceptance_length: Number
    draft_acceptance_rate: Number
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_looked_up_draft_tokens: int
    num_proposed_draft_tokens: int
    num_spec_tokens: int


class Figures(Reply):
    speculative_decoding: Speculation


class Head(Reply):
    """What the replies and events of completions have."""

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


class Reasoning(Reply):
    effort: str | None
    summary: None


class Response(Reply):
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
    metrics: NotRequired[Figures]


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

    status: Literal["ok", "failed", "stalled", "draining"]
    model: str
    requests_running: int
    requests_waiting: int
    error: str | None
    kv_cache_tokens: NotRequired[int | None]  # absent: the engines are elsewhere
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


class ChatChunk(Head):
    """An event of a chat's stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


class CompletionChunk(Head):
    """An event of a completion's stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]


class ResponseEvent(Reply):
    """An event of a response's stream. Its type decides which fields it has."""

    type: str
    sequence_number: NotRequired[int]  # set as it is sent
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
