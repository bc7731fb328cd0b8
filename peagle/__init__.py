"""Lossless speculative decoding of GPT-OSS models with a P-EAGLE drafter, in JAX.

import peagle

pair = peagle.load()
for piece in pair.stream("def mean(values): ..."):
    print(piece, end="", flush=True)
"""

import importlib
from typing import TYPE_CHECKING, Any

from peagle.jax_cure import apply as _apply_jax_cure

_apply_jax_cure()

if TYPE_CHECKING:
    from peagle.config import SamplingConfig, SpeculationConfig
    from peagle.engine.engine import EngineError
    from peagle.engine.request import Request, SamplingParams, TokenChunk
    from peagle.metrics import Result
    from peagle.ops.errors import InputError, InputWarning
    from peagle.pair import Pair, Stream, load

# name -> module that defines it; imported on first use, so that `import peagle` costs milliseconds (PEP 562)
_EXPORTS = {
    "EngineError": "peagle.engine.engine",
    "InputError": "peagle.ops.errors",
    "InputWarning": "peagle.ops.errors",
    "Pair": "peagle.pair",
    "Request": "peagle.engine.request",
    "Result": "peagle.metrics",
    "SamplingConfig": "peagle.config",
    "SamplingParams": "peagle.engine.request",
    "SpeculationConfig": "peagle.config",
    "Stream": "peagle.pair",
    "TokenChunk": "peagle.engine.request",
    "load": "peagle.pair",
}

__all__ = [
    "EngineError",
    "InputError",
    "InputWarning",
    "Pair",
    "Request",
    "Result",
    "SamplingConfig",
    "SamplingParams",
    "SpeculationConfig",
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
