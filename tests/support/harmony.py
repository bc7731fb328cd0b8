"""A server whose target says what a test wrote, with the control tokens and a chat template of the harmony format."""

import functools
import json
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from peagle.drafters.ngram import NGram
from peagle.engine.request import Request
from peagle.pair import Pair
from peagle.serve.bodies import ChatBody
from peagle.serve.request_body import parse
from peagle.serve.request_builder import RequestBuilder
from peagle.serve.response_bodies import ResponsesBody
from peagle.serve.response_chat import as_chat
from peagle.serve.shared_state import SharedState
from peagle.text.tokenizer import Tokenizer, detokenize
from tests.support.pairs import SPECIALS, VOCAB_SIZE
from tests.support.servers import DATE, K, service_of
from tests.support.toys import TargetWithoutLayers

LONG = 2048  # positions: a token is a byte
RETURN, CALL = 1, len(SPECIALS)
USER: Any = [{"role": "user", "content": "hello"}]


@flax.struct.dataclass
class ScriptedTarget(TargetWithoutLayers):
    """A target whose token after position p is script[p], whatever precedes it."""

    script: jax.Array  # [capacity]

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def max_positions(self) -> int:
        return self.script.shape[0]

    def logits(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        return 10 * jax.nn.one_hot(self.script[jnp.maximum(positions, 0)], VOCAB_SIZE, dtype=jnp.float32)


def says(tokenizer: Tokenizer, *turns: tuple[Mapping[str, Any], str], **options: Any) -> SharedState:
    """Make a server that gives these answers to these bodies, whose prompts have different lengths.

    An answer may end in a control token that ends it.
    """
    script = np.full((LONG,), RETURN, np.int32)
    for body, answer in turns:
        start = len(request_of(tokenizer, body).prompt_ids) - 1
        ids = tokenizer.encode(answer, special_tokens=True)
        script[start : start + len(ids)] = ids
    return service_of(_pair(tokenizer, script), context=LONG, **options)


def _pair(tokenizer: Tokenizer, script: np.ndarray) -> Pair:
    target = ScriptedTarget(jnp.asarray(script))
    return Pair(target, target, NGram(), tokenizer, (RETURN, CALL))


@functools.cache
def builder_of(tokenizer: Tokenizer) -> RequestBuilder:
    return RequestBuilder(_pair(tokenizer, np.zeros((LONG,), np.int32)), LONG, DATE, K)


def request_of(tokenizer: Tokenizer, body: Mapping[str, Any]) -> Request:
    """Make the request of a body of a chat, or of a response, as the routes do."""
    text = json.dumps(body).encode()
    chat = as_chat(parse(ResponsesBody, text, LONG)).body if "input" in body else parse(ChatBody, text, LONG)
    (request,) = builder_of(tokenizer).chat(chat)
    return request


def prompt_of(tokenizer: Tokenizer, **body: Any) -> str:
    """Decode the prompt of a body of a chat, or of a response."""
    return detokenize(tokenizer, request_of(tokenizer, body).prompt_ids)


# messages as prompts have them, in the harmony format as GPT-OSS's template writes it
def said(text: str, role: str = "user") -> str:
    return f"<|start|>{role}<|message|>{text}<|end|>"


def instructed(text: str) -> str:
    return said(f"# Instructions\n\n{text}", "developer")


def thought(text: str) -> str:
    return f"<|start|>assistant<|channel|>analysis<|message|>{text}<|end|>"


def final(text: str) -> str:
    return f"<|start|>assistant<|channel|>final<|message|>{text}<|end|>"


def called(name: str, arguments: str = "{}", result: str = "x") -> str:
    """Write a call and its result."""
    return (
        f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>"
        f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"
        f"{json.dumps(result, ensure_ascii=False)}<|end|>"
    )
