"""A server whose target says what a test wrote, with the control tokens and a chat template of the harmony format."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from peagle.drafters.ngram import NGram
from peagle.pair import Pair
from peagle.serve.bodies import ChatBody
from peagle.serve.http import parse
from peagle.serve.requests import RequestBuilder
from peagle.serve.response_bodies import ResponsesBody
from peagle.serve.responses import as_chat
from peagle.serve.service import Service
from peagle.text.tokenizer import ByteLevelTokenizer
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


def says(tokenizer: ByteLevelTokenizer, *turns: tuple[Mapping[str, Any], str], **options: Any) -> Service:
    """Make a server that gives these answers to these bodies, whose prompts have different lengths.

    An answer may end in a control token that ends it.
    """
    script = np.full((LONG,), RETURN, np.int32)
    for body, answer in turns:
        start = len(prompt_of(tokenizer, body)) - 1
        ids = tokenizer.encode(answer, special_tokens=True)
        script[start : start + len(ids)] = ids
    target = ScriptedTarget(jnp.asarray(script))
    stops = (RETURN, CALL)
    return service_of(Pair(target, target, NGram(), tokenizer, stops), context=LONG, **options)


def prompt_of(tokenizer: ByteLevelTokenizer, body: Mapping[str, Any]) -> Sequence[int]:
    """Encode the prompt of a body of a chat, or of a response."""
    target = ScriptedTarget(jnp.zeros((LONG,), jnp.int32))
    builder = RequestBuilder(Pair(target, target, NGram(), tokenizer, (RETURN,)), LONG, DATE, K)
    text = json.dumps(body).encode()
    (request,) = builder.chat(as_chat(parse(ResponsesBody, text)).body if "input" in body else parse(ChatBody, text))
    return request.prompt_ids
