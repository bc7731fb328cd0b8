"""Lossless speculative decoding of GPT-OSS models with a P-EAGLE drafter, in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

from peagle.jax_cure import apply as _apply_jax_cure

_apply_jax_cure()

if TYPE_CHECKING:
    from peagle.config import SamplingConfig, SpeculationConfig

# name -> module that defines it; imported on first use, so that `import peagle` costs milliseconds (PEP 562)
_EXPORTS = {
    "SamplingConfig": "peagle.config",
    "SpeculationConfig": "peagle.config",
}

__all__ = ["SamplingConfig", "SpeculationConfig"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'peagle' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
