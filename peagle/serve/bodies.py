"""The bodies of requests, as pydantic models, from which `/openapi.json` is made. See response_bodies.py, too.

Unknown fields are refused by name, except in past messages (`Past`). Ranges are only published here; the code that uses
a value checks its range (`peagle.config`, `peagle.engine.request`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
import pydantic_core
from pydantic import Discriminator, Tag

from peagle.base.strict_json import dumps
from peagle.config import HOTTEST, LARGEST_PENALTY, LARGEST_SEED, MOST_LOGPROBS, MOST_STOP_STRINGS, SMALLEST_SEED

MOST_CHOICES = 128  # of one prompt; the limit of OpenAI's API
MOST_PROMPTS = 64  # of one body
MOST_TOOLS = 128  # the limit of OpenAI's API
CUSTOM_INPUT = "input"  # the only parameter of a custom tool, which the model sees as a function
DEFAULT_NAMESPACE = "functions"  # of tools without a namespace
# values of unsupported fields that are accepted, since they change nothing; null always is
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "functions": ([],),
    "function_call": ("auto", "none"),
    "best_of": (1,),
    "suffix": ("",),
    "store": (False,),
    "modalities": (["text"],),
    "background": (False,),
    "truncation": ("auto", "disabled"),  # auto: an input beyond the context is refused all the same
    "stream_options": ({}, {"include_obfuscation": False}),
    "audio": ({},),
    # vLLM's
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "priority": (0,),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "vllm_xargs": ({},),
    "documents": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    # of SGLang and llama.cpp
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "return_hidden_states": (False,),
    "no_stop_trim": (False,),
    "cache_prompt": (True,),
}
# by unsupported field
TOOL_CURES = {"functions": "send tools", "function_call": "send tool_choice"}


def published(**limits: Any) -> Any:
    """Publish the limits of a field in the schema only."""
    return pydantic.Field(json_schema_extra=limits)


def _whole(value: Any) -> Any:
    """Return 10 for 10.0, as which some clients write an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


Whole = Annotated[int, pydantic.BeforeValidator(_whole)]
Penalty = Annotated[float, published(minimum=-LARGEST_PENALTY, maximum=LARGEST_PENALTY)]
TokenLimit = Annotated[Whole | None, published(minimum=1)]
NumLogprobs = Annotated[Whole | None, published(minimum=0, maximum=MOST_LOGPROBS)]
TokenId = Annotated[int, published(minimum=0)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


def type_tag(value: Any) -> str:
    """Return the tag of a union's branch: the type of the object."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"[{kind}]"


BY_TYPE = Discriminator(type_tag)
LIST_OR_TEXT = Discriminator(lambda value: "[list]" if isinstance(value, list) else "[text]")
OBJECT_OR_TEXT = Discriminator(lambda value: "[object]" if isinstance(value, dict | pydantic.BaseModel) else "[text]")


def _is_neutral(key: str, value: Any) -> bool:
    is_bool = isinstance(value, bool)  # in Python, 1 equals True
    return any(value == neutral and is_bool == isinstance(neutral, bool) for neutral in NEUTRAL.get(key, ()))


class Body(pydantic.BaseModel):
    """An object of a body. Tags of unions stand in brackets, to tell them from fields (see `request_body._refusal`).

    cures: what to send instead of an unsupported field, without which the model would not read what the client means.
    """

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    cures: ClassVar[Mapping[str, str]] = {}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, fields: Any) -> Any:
        """Drop nulls, and neutral values of unsupported fields."""
        if not isinstance(fields, dict):
            return fields
        return {
            key: value
            for key, value in fields.items()
            if value is not None and (key in cls.model_fields or not _is_neutral(key, value))
        }


class Past(Body):
    """An object of a past message. Its unknown fields have no effect: other servers write many into their answers."""

    model_config = pydantic.ConfigDict(extra="ignore")


def _refuse(value: Any) -> None:
    if value:
        raise pydantic_core.PydanticCustomError("extra_forbidden", "is not supported")


Unsupported = Annotated[None, pydantic.BeforeValidator(_refuse)]  # a field that no prompt can have; it may be empty


class Marked(Body):
    """An object that clients mark for prompt caching. No effect: the prefix cache sees every prompt."""

    cache_control: dict[str, Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class StreamOptions(Body):
    """continuous_usage_stats: with include_usage, each chunk has the usage so far, as in vLLM."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class TextPart(Past):
    type: Literal["text", "input_text", "output_text"]
    text: str


class ReasoningPart(Past):
    """Reasoning of a past answer, under the names of several APIs. The prompt has it only if calls follow it."""

    type: Literal["reasoning", "thinking", "redacted_thinking"]
    text: str = ""
    reasoning: str = ""
    thinking: str = ""


class RefusalPart(Past):
    """The refusal of a past answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


_PART_TAGS = {"[input_text]": "[text]", "[output_text]": "[text]"}
_PART_TAGS |= {"[thinking]": "[reasoning]", "[redacted_thinking]": "[reasoning]"}


def _tag_of_part(value: Any) -> str:
    kind = type_tag(value)
    return _PART_TAGS.get(kind, kind)


ContentPart = Annotated[
    Annotated[TextPart, Tag("[text]")]
    | Annotated[RefusalPart, Tag("[refusal]")]
    | Annotated[ReasoningPart, Tag("[reasoning]")],
    Discriminator(_tag_of_part),
]
Text = Annotated[str, Tag("[text]")]
Content = Annotated[Text | Annotated[list[ContentPart], Tag("[list]")], LIST_OR_TEXT]


class Named(Body):
    """An object whose field of its type, such as `function`, has its name."""

    type: str

    @property
    def name(self) -> str:
        name: str = getattr(self, self.type).name
        return name


class Function(Marked):
    """A function that the model may call. strict: its arguments must follow the schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Named, Marked):
    type: Literal["function"]
    function: Function


class Syntax(Body):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(Body):
    """The input of a custom tool. The prompt shows a grammar to the model; it does not constrain the input."""

    type: Literal["text", "grammar"]
    grammar: Syntax | None = None


class Custom(Marked):
    """A tool whose input is a text. The model sees a function with one text parameter."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


class CustomTool(Named, Marked):
    type: Literal["custom"]
    custom: Custom

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


Tool = Annotated[Annotated[FunctionTool, Tag("[function]")] | Annotated[CustomTool, Tag("[custom]")], BY_TYPE]


class ToolName(Body):
    name: str


def text_of(content: Any) -> str:
    """Return the text of a message's content, or of its parts, without reasoning."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if not isinstance(part, ReasoningPart))


def reasoning_of(content: Any) -> str:
    """Return the reasoning in the parts of a message's content."""
    parts = [] if isinstance(content, str) else [part for part in content if isinstance(part, ReasoningPart)]
    return "".join(part.thinking or part.reasoning or part.text for part in parts)


def qualified(namespace: str | None, name: str) -> str:
    """Return a tool's name as the model sees it: NAMESPACE.NAME, or NAME in the default namespace."""
    return name if namespace in (None, DEFAULT_NAMESPACE) else f"{namespace}.{name}"


class NamedFunction(Named):
    type: Literal["function"]
    function: ToolName


class NamedCustom(Named):
    type: Literal["custom"]
    custom: ToolName


NamedTool = NamedFunction | NamedCustom
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[text]")]
    | Annotated[
        Annotated[NamedFunction, Tag("[function]")] | Annotated[NamedCustom, Tag("[custom]")], BY_TYPE, Tag("[object]")
    ],
    OBJECT_OR_TEXT,
]


class CalledFunction(Past):
    name: str
    arguments: str


class CalledCustom(Past):
    name: str
    input: str


class PastFunctionCall(Past):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class PastCustomCall(Past):
    id: str
    type: Literal["custom"]
    custom: CalledCustom

    @property
    def function(self) -> CalledFunction:
        """The call as the model wrote it."""
        arguments = dumps({CUSTOM_INPUT: self.custom.input}, ensure_ascii=False)
        return CalledFunction(name=self.custom.name, arguments=arguments)


PastCall = Annotated[
    Annotated[PastFunctionCall, Tag("[function]")] | Annotated[PastCustomCall, Tag("[custom]")],
    Discriminator(lambda value: "[custom]" if type_tag(value) == "[custom]" else "[function]"),
]


class ChatMessage(Past):
    """A message of a chat. reasoning: the prompt has it only if calls follow it, as chat templates do."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""
    refusal: str | None = None
    tool_calls: list[PastCall] = []
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    audio: Unsupported = None
    function_call: Unsupported = None
    images: Unsupported = None
    attachments: Unsupported = None

    @property
    def text(self) -> str:
        """The joined texts of its parts; the refusal, if it has no text."""
        return text_of(self.content) or self.refusal or ""

    @property
    def thinking(self) -> str:
        """Its reasoning, under any of its names."""
        return self.reasoning or self.reasoning_content or reasoning_of(self.content)


class Speculative(Body):
    """num_speculative_tokens: the most drafts of a step of this request; None: the server's K."""

    num_speculative_tokens: Annotated[Whole | None, published(minimum=0)] = None


class JsonSchema(Body):
    """A schema with its name. strict: a keyword that cannot be enforced is refused, not left out."""

    name: str
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = pydantic.Field(alias="schema")


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
    """The fields that constrain an answer. A body may set one of them. `guided_*` are vLLM's former names."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class AnswerBody(Body):
    """Fields of all bodies whose replies the model writes. The last ones, from user on, have no effect."""

    model: str | None = None
    temperature: Annotated[float, published(minimum=0, maximum=HOTTEST)] = 1.0
    top_p: Annotated[float, published(minimum=0, maximum=1)] = 1.0  # 0: the likeliest token
    seed: Annotated[Whole | None, published(minimum=SMALLEST_SEED, maximum=LARGEST_SEED)] = None
    stream: bool = False
    speculative: Speculative | None = None
    user: str | None = None
    metadata: dict[str, str] = {}
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class Sampled(AnswerBody, Structured):
    """Fields of chats and completions. None: OpenAI's default."""

    top_k: Annotated[Whole, published(minimum=-1, exclusiveMaximum=2**31)] = 0
    min_p: Annotated[float, published(minimum=0, maximum=1)] = 0.0
    max_tokens: TokenLimit = None
    min_tokens: Annotated[Whole, published(minimum=0)] = 0
    stop: Annotated[str | list[str], published(minLength=1, maxItems=MOST_STOP_STRINGS)] = []
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    n: Annotated[Whole, published(minimum=1, maximum=MOST_CHOICES)] = 1
    logit_bias: Annotated[dict[str, float], published(propertyNames={"pattern": "^[0-9]+$"})] = {}
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, published(exclusiveMinimum=0)] = 1.0
    stream_options: StreamOptions | None = None


class ChatBody(Sampled):
    """verbosity, prediction: no effect."""

    cures = TOOL_CURES

    messages: Annotated[list[ChatMessage], published(minItems=1)]
    max_completion_tokens: TokenLimit = None
    logprobs: bool = False
    top_logprobs: NumLogprobs = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    prediction: dict[str, Any] | None = None
    add_special_tokens: Literal[False] = False  # the chat template has them
    tools: list[Tool] = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    return_token_origins: bool = False  # for the page: whether each token was drafted, and at which position


class CompletionBody(Sampled):
    """max_tokens: it may be 0 if echo is set."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[Whole | None, published(minimum=0)] = None
    echo: bool = False
    add_special_tokens: Literal[True] = True
    logprobs: NumLogprobs = None

    @property
    def only_echo(self) -> bool:
        """Whether the answers are the prompts, without new tokens."""
        return self.echo and self.max_tokens == 0


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    reasoning_effort: Effort | None = None
    tools: list[Tool] = []
    add_special_tokens: bool = True  # those that the tokenizer puts before a text


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId]
