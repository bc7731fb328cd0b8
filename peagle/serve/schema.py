"""The bodies of requests: types and names. Unknown fields, and known ones that are not supported, are refused by name.

Ranges are checked where the values are used (`peagle.engine.request`).
"""

import re
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import pydantic_core

from peagle.config import HOTTEST, LARGEST_PENALTY, LARGEST_SEED, SMALLEST_SEED
from peagle.engine.request import MOST_LOGPROBS, MOST_STOP_STRINGS
from peagle.ops.strict_json import dumps
from peagle.serve.errors import ApiError
from peagle.text.prompts import brief

MOST_CHOICES = 16  # of each prompt
MOST_PROMPTS = 64  # of each call
MOST_TOOLS = 128  # the limit of OpenAI's API
TOKENS_OF_A_MESSAGE = 4  # at least, in harmony: its start, role, channel or text, and end
LISTS = {"messages": ("tool_calls", "content"), "input": ("content", "output")}  # fields of chats: lists in their items
CUSTOM_INPUT = "input"  # the only parameter of a custom tool, as a function
# values of unsupported fields that ask for nothing; null always does
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

EXPECTED = {  # of fields of several types
    "prompt": "expected a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "expected a text or a list of texts",
    "input": "expected a text or a list of items",
    "tool_choice": "expected 'none', 'auto', 'required', or a tool by its name",
    "content": "expected a text or a list of parts",  # of any message
    "output": "expected a text or a list of parts",
}
HINTS = {"item_reference": "nothing is stored here: send the item itself"}  # of types of objects


def published(**limits: Any) -> Any:
    """Name the limits of a field in the published document. They are checked where the value is used."""
    return pydantic.Field(json_schema_extra=limits)


TEMPERATURE = Annotated[float, published(minimum=0, maximum=HOTTEST)]
TOP_P = Annotated[float, published(exclusiveMinimum=0, maximum=1)]
PENALTY = Annotated[float, published(minimum=-LARGEST_PENALTY, maximum=LARGEST_PENALTY)]
SEED = Annotated[int | None, published(minimum=SMALLEST_SEED, maximum=LARGEST_SEED)]
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


class Body(pydantic.BaseModel):
    """An object of a body. Branches of its unions have names in brackets, which are no fields (`_refusal`)."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, fields: Any) -> Any:
        """Leave out what asks for nothing: nulls, and neutral values of fields that are not supported."""
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
    """What a past answer refused with."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


ContentPart = Annotated[
    Annotated[TextPart, pydantic.Tag("[text]")] | Annotated[RefusalPart, pydantic.Tag("[refusal]")],
    pydantic.Discriminator(kind_of),
]
Text = Annotated[str, pydantic.Tag("[text]")]
Content = Annotated[Text | Annotated[list[ContentPart], pydantic.Tag("[list]")], pydantic.Discriminator(list_or_text)]


class Function(Marked):
    """A function that the model may call. strict: its arguments are held to the schema of its parameters."""

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
    """What the input of a custom tool is. The model is told of a grammar; it does not bind the input."""

    type: Literal["text", "grammar"]
    grammar: Syntax | None = None


class Custom(Marked):
    """A tool whose input is a text. The model calls it as a function whose only parameter is that text."""

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
ANY_TOOL = Annotated[
    Annotated[FunctionTool, pydantic.Tag("[function]")] | Annotated[CustomTool, pydantic.Tag("[custom]")],
    pydantic.Discriminator(kind_of),
]


class ToolName(Body):
    name: str


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
    Annotated[Literal["none", "auto", "required"], pydantic.Tag("[text]")]
    | Annotated[
        Annotated[NamedFunction, pydantic.Tag("[function]")] | Annotated[NamedCustom, pydantic.Tag("[custom]")],
        pydantic.Discriminator(kind_of),
        pydantic.Tag("[object]"),
    ],
    pydantic.Discriminator(object_or_text),
]


class CalledFunction(Body):
    """parsed_arguments: of clients that send what they have read; no effect."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class CalledCustom(Body):
    name: str
    input: str


class PastFunctionCall(Body):
    """A call in a past answer. `index`: of clients that send what they received in a stream."""

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
    Annotated[PastFunctionCall, pydantic.Tag("[function]")] | Annotated[PastCustomCall, pydantic.Tag("[custom]")],
    pydantic.Discriminator(_kind_of_call),
]


class ChatMessage(Marked):
    """A message. `reasoning` is left out, as by chat templates, unless it led to calls.

    parsed: of clients that send what they have read; no effect.
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
        joined = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return joined or self.refusal or ""


class Speculative(Body):
    """The most drafts of a step of this request; None: the server's."""

    num_speculative_tokens: Annotated[int | None, published(minimum=0)] = None


class JsonSchema(Body):
    """A schema with its name; `strict` changes nothing, since every answer follows its schema."""

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
    """The fields that constrain an answer; at most one of them may. `guided_*` are vLLM's former names."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class Sampled(Structured):
    """Fields of both kinds of completion. None: the default of the interface.

    prompt_cache_key, safety_identifier, user: no effect.
    """

    model: str | None = None
    temperature: TEMPERATURE = 1.0
    top_p: TOP_P = 1.0
    top_k: Annotated[int, published(minimum=-1, exclusiveMaximum=2**31)] = 0
    min_p: Annotated[float, published(minimum=0, maximum=1)] = 0.0
    seed: SEED = None
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
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    speculative: Speculative | None = None


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


Kind = TypeVar("Kind", bound=Body)
_NO_BRACKETS = str.maketrans("", "", "[]")


def parse(kind: type[Kind], body: bytes, context: int | None = None) -> Kind:
    """Read the JSON of a request. Raises ApiError with the name of the field that is wrong.

    context: its positions. More messages, calls and parts than it can hold are refused before they are looked at.
    """
    try:
        given = pydantic_core.from_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}; expected an object in UTF-8") from None
    if not isinstance(given, dict):
        raise ApiError(400, f"the body is {brief(given)}; expected a JSON object")
    if context is not None:
        _check_count(given, context)
    return validated(kind, given)


def _check_count(given: dict[str, Any], context: int) -> None:
    """Raise ApiError for more ids, messages, calls and parts than so many positions can hold, and too many tools.

    To check the type of each takes seconds, in the thread that encodes everybody's texts.
    """
    limits = {"prompt": max(context, MOST_PROMPTS), "tokens": context, "tools": MOST_TOOLS}
    for name, most in limits.items():
        items = given.get(name)
        for each in (items, *(items if isinstance(items, list) else ())):  # prompts may be lists in a list
            if isinstance(each, list) and len(each) > most:
                code = None if name == "tools" else "context_length_exceeded"
                raise ApiError(400, f"{name} has {len(each)} items; expected at most {most}", name, code)
    most = max(1, context // TOKENS_OF_A_MESSAGE)
    for name, lists in LISTS.items():
        items = given.get(name)
        if not isinstance(items, list):
            continue
        inner = (item[key] for item in items if isinstance(item, dict) for key in lists if key in item)
        count = len(items) + sum(len(each) for each in inner if isinstance(each, list))
        if count > most:
            things = "items" if name == "input" else "messages, calls"
            message = f"{count} {things} and parts are given; expected at most {most}, since the context holds"
            raise ApiError(400, f"{message} {context} tokens", name, "context_length_exceeded")


def validated(kind: type[Kind], body: Any) -> Kind:
    """Check the value of a body. Raises ApiError with the name of the field that is wrong."""
    try:
        return kind.model_validate(body)
    except pydantic.ValidationError as error:
        raise _refusal(error) from None


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def _refusal(error: pydantic.ValidationError) -> ApiError:
    """Name the first field that is wrong."""
    first, *_ = error.errors(include_url=False)
    # branches of a union are part of the place, but no field of the body
    place = [str(part) for part in first["loc"] if isinstance(part, int) or "[" not in part]
    place = [part for part in place if part != "str"]
    name, value = ".".join(place) or "the body", first["input"]
    if first["type"] == "union_tag_invalid":
        if isinstance(value, dict) and value.get("type") is None:
            name += ".type"
            return ApiError(400, f"{name} is missing; add it", name, "missing_required_parameter")
        if isinstance(value, dict):
            tags = first["ctx"]["expected_tags"].translate(_NO_BRACKETS)
            expected = HINTS.get(str(value["type"]), f"expected {' or '.join(tags.rsplit(', ', 1))}")
            message = f"{name}.type is {brief(value['type'])}; {expected}"
            return ApiError(400, message, f"{name}.type", "unsupported_parameter")
    if first["type"] == "extra_forbidden":
        return ApiError(
            400, f"{name} is not supported here (it is {brief(value)}); leave it out", name, "unsupported_parameter"
        )
    if first["type"] == "missing":
        return ApiError(400, f"{name} is missing; add it", name, "missing_required_parameter")
    is_union = first["type"] == "union_tag_invalid"
    field = place[-1] if place and place[-1] in ("content", "output") else name
    expected = "expected an object" if is_union else EXPECTED.get(field, _in_words(first["msg"]))
    return ApiError(400, f"{name} is {brief(value)}; {expected}", name, "invalid_type")


def _in_words(message: str) -> str:
    """Say what the type checker expected."""
    message = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", message.removeprefix("Value error, "))
    return (
        message.replace("Input should be", "expected")
        .replace("a valid string", "a text")
        .replace("a valid i", "an i")
        .replace("a valid ", "a ")
    )
