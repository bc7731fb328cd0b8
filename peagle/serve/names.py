"""How refusals name the fields of a chat: /v1/responses has other names than /v1/chat/completions."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """The field names of /v1/chat/completions. Places count messages, calls and tools from 0."""

    messages: str = "messages"
    limit: str = "max_completion_tokens"
    response_format: str = "response_format"
    json_schema: str = "response_format.json_schema"
    schema: str = "response_format.json_schema.schema"
    result: str = "a message of the role tool with the tool_call_id"

    def message(self, place: int) -> str:
        return f"messages.{place}"

    def call(self, place: int, number: int) -> str:
        return f"messages.{place}.tool_calls.{number}"

    def call_id(self, place: int, number: int) -> str:
        return f"{self.call(place, number)}.id"

    def result_id(self, place: int) -> str:
        """Name the id of the call whose result a message is."""
        return f"messages.{place}.tool_call_id"

    def tool(self, place: int, kind: str) -> str:
        """Name the object that holds a tool's name and parameters. kind: of the tool, function or custom."""
        return f"tools.{place}.{kind}"


@dataclass(frozen=True)
class MessageNames:
    """The items of a /v1/responses body that became one message of a chat, and its calls."""

    item: str
    calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResponseNames(Names):
    """The field names of a /v1/responses body. items: of the chat's messages. tools: of the chat's tools."""

    messages: str = "input"
    limit: str = "max_output_tokens"
    response_format: str = "text.format"
    json_schema: str = "text.format"
    schema: str = "text.format.schema"
    result: str = "a function_call_output with the call_id"
    items: Sequence[MessageNames] = ()
    tools: Sequence[str] = ()

    def message(self, place: int) -> str:
        return self.items[place].item

    def call(self, place: int, number: int) -> str:
        return self.items[place].calls[number]

    def call_id(self, place: int, number: int) -> str:
        return f"{self.call(place, number)}.call_id"

    def result_id(self, place: int) -> str:
        return f"{self.items[place].item}.call_id"

    def tool(self, place: int, kind: str) -> str:  # noqa: ARG002
        return self.tools[place]


CHAT = Names()
