"""Names of a chat's fields in errors. A /v1/responses body becomes a chat, but its errors name its own fields."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FieldNames:
    """The field names of /v1/chat/completions. message, call, tool: indices from 0."""

    messages: str = "messages"
    limit: str = "max_completion_tokens"
    response_format: str = "response_format"
    json_schema: str = "response_format.json_schema"
    schema: str = "response_format.json_schema.schema"
    id_of_call: str = "id"
    id_of_result: str = "tool_call_id"
    result: str = "a message of the role tool with the tool_call_id"

    def message(self, message: int) -> str:
        return f"messages.{message}"

    def call(self, message: int, call: int) -> str:
        return f"messages.{message}.tool_calls.{call}"

    def call_id(self, message: int, call: int) -> str:
        return f"{self.call(message, call)}.{self.id_of_call}"

    def result_id(self, message: int) -> str:
        """Return the name of the call id in a message that is a result."""
        return f"{self.message(message)}.{self.id_of_result}"

    def tool(self, tool: int, kind: str) -> str:
        """Return the name of the object that has a tool's name and parameters. kind: function or custom."""
        return f"tools.{tool}.{kind}"


@dataclass(frozen=True)
class MessageNames:
    """The items of a /v1/responses body that became a message of a chat and the message's calls."""

    item: str
    calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResponsesFieldNames(FieldNames):
    """The field names of a /v1/responses body. items: by message of the chat. tools: by tool of the chat."""

    messages: str = "input"
    limit: str = "max_output_tokens"
    response_format: str = "text.format"
    json_schema: str = "text.format"
    schema: str = "text.format.schema"
    id_of_call: str = "call_id"
    id_of_result: str = "call_id"
    result: str = "a function_call_output with the call_id"
    items: Sequence[MessageNames] = ()
    tools: Sequence[str] = ()

    def message(self, message: int) -> str:
        return self.items[message].item

    def call(self, message: int, call: int) -> str:
        return self.items[message].calls[call]

    def tool(self, tool: int, kind: str) -> str:  # noqa: ARG002
        return self.tools[tool]


CHAT_FIELDS = FieldNames()
