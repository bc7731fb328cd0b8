"""The bodies of requests: types and names. Unknown fields, and known ones that are not supported, are refused by name.

Ranges are checked where the values are used (`peagle.engine.request`).
"""

import re
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import pydantic_core

from peagle.engine.request import HOTTEST, LARGEST_PENALTY, LARGEST_SEED, MOST_LOGPROBS, MOST_STOP_STRINGS
from peagle.serve.errors import ApiError
from peagle.text.prompts import brief

MOST_CHOICES = 16  # of each prompt
MOST_PROMPTS = 64  # of each call
TOKENS_OF_A_MESSAGE = 4  # at least, in harmony: its start, role, channel or text, and end
LISTS = {"messages": ("tool_calls", "content"), "input": ("content", "output")}  # fields of chats: lists in their items
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
    "include": ([], ["reasoning.encrypted_content"]),  # reasoning is returned as it is
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
    "tool_choice": "expected 'none', 'auto', 'required', or a function by its name",
}


def published(**limits: Any) -> Any:
    """Name the limits of a field in the published document. They are checked where the value is used."""
    return pydantic.Field(json_schema_extra=limits)


TEMPERATURE = Annotated[float, published(minimum=0, maximum=HOTTEST)]
TOP_P = Annotated[float, published(exclusiveMinimum=0, maximum=1)]
PENALTY = Annotated[float, published(minimum=-LARGEST_PENALTY, maximum=LARGEST_PENALTY)]
SEED = Annotated[int | None, published(minimum=0, maximum=LARGEST_SEED)]
LIMIT = Annotated[int | None, published(minimum=1)]
LOGPROBS = Annotated[int | None, published(minimum=0, maximum=MOST_LOGPROBS)]
TOKEN_ID = Annotated[int, published(minimum=0)]


class Body(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(Body):
    """continuous_usage_stats: with include_usage, each chunk has the usage so far, as in vLLM."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class TextPart(Body):
    type: Literal["text"]
    text: str


class Function(Body):
    """A function that the model may call. strict: its arguments are held to the schema of its parameters."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Body):
    name: str
    arguments: str


class PastCall(Body):
    """A call in a past answer. `index`: of clients that send what they received in a stream."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(Body):
    """A message. `reasoning` is left out, as by chat templates, unless it led to calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] = ""
    tool_calls: list[PastCall] = []
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


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
    reasoning_effort: Literal["low", "medium", "high"] | None = None
    tools: list[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    return_token_origins: bool = False  # of the page: which token came from which draft


class CompletionBody(Sampled):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: LOGPROBS = None


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    reasoning_effort: Literal["low", "medium", "high"] | None = None
    tools: list[Tool] = []
    add_special_tokens: bool = True  # that the tokenizer puts before a text


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TOKEN_ID]


Kind = TypeVar("Kind", bound=Body)


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
    return validated(kind, _without_neutral(given, kind))


def _check_count(given: dict[str, Any], context: int) -> None:
    """Raise ApiError for a chat of more messages, calls and parts than so many positions can hold."""
    most = max(1, context // TOKENS_OF_A_MESSAGE)
    for name, lists in LISTS.items():
        items = given.get(name)
        if not isinstance(items, list):
            continue
        inner = (item[key] for item in items if isinstance(item, dict) for key in lists if key in item)
        count = len(items) + sum(len(each) for each in inner if isinstance(each, list))
        if count > most:
            message = f"{count} messages, calls and parts are given; expected at most {most}, since the context holds"
            raise ApiError(400, f"{message} {context} tokens", name, "context_length_exceeded")


def validated(kind: type[Kind], given: Any, where: str = "") -> Kind:
    """Check a value of a body. Raises ApiError with the name of the field, below `where`, that is wrong."""
    try:
        return kind.model_validate(given)
    except pydantic.ValidationError as error:
        raise _refusal(error, where) from None


def _without_neutral(given: Any, kind: type[Body] | None = None) -> Any:
    """Leave out what asks for nothing: nulls, and neutral values of fields that are not supported."""
    if not isinstance(given, dict):
        return given
    known = kind.model_fields if kind is not None else {}
    kept = {
        key: value
        for key, value in given.items()
        if value is not None and (key in known or not any(_same(value, each) for each in NEUTRAL.get(key, ())))
    }
    if isinstance(kept.get("messages"), list):
        kept["messages"] = [_without_neutral(message) for message in kept["messages"]]
    return kept


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def _refusal(error: pydantic.ValidationError, where: str) -> ApiError:
    """Name the first field that is wrong."""
    first, *_ = error.errors(include_url=False, include_context=False)
    # branches of a union are part of the place, but no field of the body
    place = [str(part) for part in first["loc"] if isinstance(part, int) or "[" not in part]
    place = [part for part in place if part not in ("str", "TextPart", "NamedTool", "FunctionChoice")]
    name = ".".join([where] * bool(where) + place) or "the body"
    if first["type"] == "extra_forbidden":
        return ApiError(
            400,
            f"{name} is not supported here (it is {brief(first['input'])}); leave it out",
            name,
            "unsupported_parameter",
        )
    if first["type"] == "missing":
        return ApiError(400, f"{name} is missing; add it", name, "missing_required_parameter")
    expected = EXPECTED.get(place[0] if place else "", _in_words(first["msg"]))
    return ApiError(400, f"{name} is {brief(first['input'])}; {expected}", name, "invalid_type")


def _in_words(message: str) -> str:
    """Say what the type checker expected."""
    message = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", message.removeprefix("Value error, "))
    return (
        message.replace("Input should be", "expected")
        .replace("a valid string", "a text")
        .replace("a valid i", "an i")
        .replace("a valid ", "a ")
    )
