"""Names of a chat's fields in errors, and unsupported fields whose value changes nothing.

A /v1/responses body becomes a chat, but its errors name its own fields.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class MessageNames:
    """The items of a /v1/responses body that became a message of a chat and the message's calls."""

    item: str
    calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class FieldNames:
    """The field names of /v1/chat/completions. message, call, tool: indices from 0.

    items: by message, if the body was a /v1/responses body. tools: by tool of the chat, likewise.
    """

    messages: str = "messages"
    limit: str = "max_completion_tokens"
    response_format: str = "response_format"
    json_schema: str = "response_format.json_schema"
    schema: str = "response_format.json_schema.schema"
    id_of_call: str = "id"
    id_of_result: str = "tool_call_id"
    result: str = "a message of the role tool with the tool_call_id"
    items: Sequence[MessageNames] | None = None
    tools: Sequence[str] = ()

    def message(self, message: int) -> str:
        return f"messages.{message}" if self.items is None else self.items[message].item

    def call(self, message: int, call: int) -> str:
        return f"messages.{message}.tool_calls.{call}" if self.items is None else self.items[message].calls[call]

    def tool(self, tool: int, kind: str) -> str:
        """Return the name of the object that has a tool's name and parameters. kind: function or custom."""
        return f"tools.{tool}.{kind}" if self.items is None else self.tools[tool]


CHAT_FIELDS = FieldNames()


def response_fields(items: Sequence[MessageNames], tools: Sequence[str]) -> FieldNames:
    """Return the field names of a /v1/responses body."""
    return FieldNames(
        messages="input",
        limit="max_output_tokens",
        response_format="text.format",
        json_schema="text.format",
        schema="text.format.schema",
        id_of_call="call_id",
        id_of_result="call_id",
        result="a function_call_output with the call_id",
        items=items,
        tools=tools,
    )


def is_neutral(key: str, value: Any) -> bool:
    is_bool = isinstance(value, bool)  # in Python, 1 equals True
    return any(value == neutral and is_bool == isinstance(neutral, bool) for neutral in NEUTRAL.get(key, ()))
