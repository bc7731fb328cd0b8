"""Makes a miscompiling JAX right before it starts, or refuses.

jaxlib 0.10.2 on CPU silently miscomputes some fused reductions (jax issue 39103: a sum comes out 1065369600 instead of
1073741824). An XLA flag that disables the fusion cures it, if it is set before the backend starts. jaxlibs that do not
know the flag abort on it, so it is set for the affected version only.
"""

import importlib.metadata
import os
import sys

AFFECTED_JAXLIB = "0.10.2"
FLAG = "--xla_cpu_experimental_ynn_fusion_type="


class MiscompilingJaxError(RuntimeError):
    """JAX was started without the cure."""


def apply() -> None:
    """After this, JAX's CPU backend will compute right sums, in this process and its children.

    Raises MiscompilingJaxError where an affected backend has already started without the flag: results of such a
    process cannot be trusted, and nothing can mend it any more.
    """
    if importlib.metadata.version("jaxlib") != AFFECTED_JAXLIB:
        return
    flags = os.environ.get("XLA_FLAGS", "")
    if any(flag.startswith(FLAG) for flag in flags.split()):
        return
    if _backend_started():
        raise MiscompilingJaxError(
            f"JAX was started before peagle was imported, and jaxlib {AFFECTED_JAXLIB} silently miscomputes reductions "
            f"on CPU (jax issue 39103). Import peagle (or target, drafter) before the first JAX computation, set "
            f"XLA_FLAGS={FLAG} in the environment, or install another jaxlib."
        )
    os.environ["XLA_FLAGS"] = f"{flags} {FLAG}".strip()


def _backend_started() -> bool:
    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge  # not public, but only ever reached on the one affected version

    return xla_bridge.backends_are_initialized()
