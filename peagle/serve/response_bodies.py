"""The body of /v1/responses, with its items, parts and tools. See bodies.py, too."""

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Discriminator, Tag

from peagle.serve.bodies import (
    BY_TYPE,
    LIST_OR_TEXT,
    OBJECT_OR_TEXT,
    TOOL_CURES,
    AnswerBody,
    Body,
    CalledCustom,
    CalledFunction,
    Content,
    Effort,
    Marked,
    NamedCustom,
    NamedFunction,
    NumLogprobs,
    Past,
    PastCustomCall,
    PastFunctionCall,
    Text,
    TokenLimit,
    ToolName,
    Verbosity,
    qualified,
    reasoning_of,
    text_of,
    type_tag,
)

HOSTED = (  # types of tools that OpenAI's servers run
    *("apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview", "file_search"),
    *("image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search"),
    *("web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
)
Summary = Literal["auto", "concise", "detailed"]
Included = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    # outputs of tools that run nowhere here, and of inputs that are refused: there are none
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]


class ReasoningOptions(Body):
    """summary, generate_summary: no effect, since replies have the reasoning itself."""

    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    context: Literal["auto", "current_turn"] | None = None
    mode: Literal["standard"] | None = None


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
    """The input of a custom tool. The prompt shows a grammar to the model; it does not constrain the input."""

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
    """Tools that the model sees as NAMESPACE.NAME."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[OfferedTool]


class HostedTool(Body):
    """A tool that only OpenAI's servers run. The prompt leaves it out."""

    model_config = pydantic.ConfigDict(extra="allow")

    type: str


def _tag_of_tool(value: Any) -> str:
    kind = type_tag(value)
    return "[hosted tool]" if kind.strip("[]") in HOSTED else kind


ResponsesTool = Annotated[
    Annotated[OfferedFunction, Tag("[function]")]
    | Annotated[OfferedCustom, Tag("[custom]")]
    | Annotated[Namespace, Tag("[namespace]")]
    | Annotated[HostedTool, Tag("[hosted tool]")],
    Discriminator(_tag_of_tool),
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
    """The format of the final text. strict: a keyword that cannot be enforced is refused, not left out."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = pydantic.Field(None, alias="schema")


class TextOptions(Body):
    format: TextFormat = pydantic.Field(default_factory=lambda: TextFormat(schema=None))
    verbosity: Verbosity | None = None  # no effect


class Item(Past):
    """An item of the input. id, status: no effect; clients send them if they return an output item."""

    id: str | None = None
    status: str | None = None


class ItemReference(Body):
    """An item of a response that the server keeps."""

    type: Literal["item_reference"] = "item_reference"
    id: str


class InputMessage(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Content
    phase: str | None = None

    @property
    def thinking(self) -> str:
        return reasoning_of(self.content)


class CallItem(Item):
    """A call or its result. caller, async: no effect; clients send them if they return an output item."""

    call_id: str
    namespace: str | None = None
    caller: dict[str, Any] | None = None
    run_async: bool | None = pydantic.Field(None, alias="async")


class InputCall(CallItem):
    type: Literal["function_call"]
    name: str
    arguments: str

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
    output: Content
    name: str | None = None


class ReasoningText(Past):
    type: Literal["reasoning_text", "text"]
    text: str


class InputReasoning(Item):
    """Reasoning of a past answer. The prompt has it only if calls follow it. encrypted_content: no effect."""

    type: Literal["reasoning"]
    summary: list[Any] = []
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None

    @property
    def thinking(self) -> str:
        return text_of(self.content or "")


def _tag_of_item(value: Any) -> str:
    if isinstance(value, dict) and value.get("type") is None:
        return "[message]" if "role" in value or "id" not in value else "[item_reference]"
    return type_tag(value)


InputItem = Annotated[
    Annotated[InputMessage, Tag("[message]")]
    | Annotated[InputCall, Tag("[function_call]")]
    | Annotated[InputResult, Tag("[function_call_output]")]
    | Annotated[InputCustomCall, Tag("[custom_tool_call]")]
    | Annotated[InputResult, Tag("[custom_tool_call_output]")]
    | Annotated[InputReasoning, Tag("[reasoning]")]
    | Annotated[ItemReference, Tag("[item_reference]")],
    Discriminator(_tag_of_item),
]


class ResponsesBody(AnswerBody):
    """client_metadata, max_tool_calls: no effect; no tools run here.

    previous_response_id: of a response that the server keeps; the input follows its input and output. store: keep the
    response.
    """

    cures = TOOL_CURES | {
        "conversation": "send its items in input, or a previous_response_id",
        "prompt": "send its text in instructions or input",
    }

    input: Annotated[Text | Annotated[list[InputItem], Tag("[list]")], LIST_OR_TEXT]
    instructions: str | None = None
    max_output_tokens: TokenLimit = None
    reasoning: ReasoningOptions = ReasoningOptions()
    tools: list[ResponsesTool] = []
    tool_choice: ChosenTool = "auto"
    parallel_tool_calls: bool = True
    include: list[Included] = []
    max_tool_calls: int | None = None
    top_logprobs: NumLogprobs = None
    text: TextOptions = TextOptions()
    store: bool = True
    previous_response_id: str | None = None
    client_metadata: dict[str, Any] | None = None
