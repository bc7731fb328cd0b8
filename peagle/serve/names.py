"""What the interfaces of chats call the fields that a refusal is about."""

from collections.abc import Sequence
from dataclasses import dataclass

from peagle.serve.types import Tool


@dataclass(frozen=True)
class Names:
    """The names of /v1/chat/completions."""

    messages: str = "messages"
    limit: str = "max_completion_tokens"
    response_format: str = "response_format"
    json_schema: str = "response_format.json_schema"
    schema: str = "response_format.json_schema.schema"
    result: str = "a message of the role tool with the tool_call_id"

    def message(self, place: int) -> str:
        """Name a message of the chat, by its number."""
        return f"messages.{place}"

    def call(self, place: int, number: int) -> str:
        """Name a call of a message."""
        return f"messages.{place}.tool_calls.{number}"

    def call_id(self, place: int, number: int) -> str:
        """Name the id of a call."""
        return f"{self.call(place, number)}.id"

    def result_id(self, place: int) -> str:
        """Name the id of the call whose result a message is."""
        return f"messages.{place}.tool_call_id"

    def tool(self, place: int, tool: Tool) -> str:
        """Name the object of a tool that has its name."""
        return f"tools.{place}.{tool.type}"


@dataclass(frozen=True)
class MessageNames:
    """What a body of /v1/responses calls a message of its chat: its item, and those of its calls."""

    item: str
    calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResponseNames(Names):
    """The names of a body of /v1/responses. items: of the chat's messages. tools: of the chat's tools."""

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

    def tool(self, place: int, tool: Tool) -> str:  # noqa: ARG002
        return self.tools[place]


CHAT = Names()
