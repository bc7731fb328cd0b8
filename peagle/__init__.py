"""Lossless speculative decoding of GPT-OSS models with P-EAGLE drafters, in JAX.

import peagle

pair = peagle.load()
for piece in pair.stream("def mean(values): ..."):
    print(piece, end="", flush=True)
"""

import importlib
from typing import TYPE_CHECKING, Any

from peagle.base import errors as _errors
from peagle.base import jax_workaround as _jax_workaround

_jax_workaround.apply()

if TYPE_CHECKING:
    from peagle.answers.result import Result
    from peagle.answers.stream import AsyncStream, Stream
    from peagle.base.errors import InputError, InputWarning
    from peagle.config import EngineConfig, LoadConfig, SamplingParams
    from peagle.engine.grammar import Grammar
    from peagle.engine.host.engine import Engine
    from peagle.engine.host.handle import EngineError
    from peagle.engine.request import Request, TokenChunk
    from peagle.loading.load import load
    from peagle.pair import Pair

# Modules of the public names. They are imported on first use (PEP 562), so that `import peagle` takes milliseconds.
_MODULES = {
    "peagle.config": ("EngineConfig", "LoadConfig", "SamplingParams"),
    "peagle.engine.host.engine": ("Engine",),
    "peagle.engine.grammar": ("Grammar",),
    "peagle.engine.host.handle": ("EngineError",),
    "peagle.engine.request": ("Request", "TokenChunk"),
    "peagle.loading.load": ("load",),
    "peagle.base.errors": ("InputError", "InputWarning"),
    "peagle.pair": ("Pair",),
    "peagle.answers.result": ("Result",),
    "peagle.answers.stream": ("AsyncStream", "Stream"),
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
    for module, names in _MODULES.items():
        if name in names:
            _errors.refuse_shadowed()
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'peagle' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
