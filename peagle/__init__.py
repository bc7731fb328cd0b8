"""Lossless speculative decoding of GPT-OSS models with P-EAGLE drafters, in JAX.

import peagle

pair = peagle.load()
for piece in pair.stream("def mean(values): ..."):
    print(piece, end="", flush=True)
"""

import importlib
from typing import TYPE_CHECKING, Any

from peagle.ops import jax_workaround as _jax_workaround

_jax_workaround.apply()

if TYPE_CHECKING:
    from peagle.config import EngineConfig, LoadConfig, SamplingParams
    from peagle.engine.engine import Engine
    from peagle.engine.grammar import Grammar
    from peagle.engine.handle import EngineError
    from peagle.engine.request import Request, TokenChunk
    from peagle.loading import load
    from peagle.ops.errors import InputError, InputWarning
    from peagle.pair import Pair
    from peagle.result import Result
    from peagle.stream import AsyncStream, Stream

# name -> its module, imported on first use (PEP 562), so that `import peagle` takes milliseconds
_EXPORTS = {
    "AsyncStream": "peagle.stream",
    "Engine": "peagle.engine.engine",
    "EngineConfig": "peagle.config",
    "LoadConfig": "peagle.config",
    "EngineError": "peagle.engine.handle",
    "Grammar": "peagle.engine.grammar",
    "InputError": "peagle.ops.errors",
    "InputWarning": "peagle.ops.errors",
    "Pair": "peagle.pair",
    "Result": "peagle.result",
    "Request": "peagle.engine.request",
    "SamplingParams": "peagle.config",
    "Stream": "peagle.stream",
    "TokenChunk": "peagle.engine.request",
    "load": "peagle.loading",
}

__all__ = [
    "AsyncStream",
    "Engine",
    "EngineConfig",
    "EngineError",
    "Grammar",
    "InputError",
    "InputWarning",
    "LoadConfig",
    "Pair",
    "Request",
    "Result",
    "SamplingParams",
    "Stream",
    "TokenChunk",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'peagle' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
