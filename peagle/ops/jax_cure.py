"""Work around a miscompiling jaxlib before JAX starts, or refuse to run.

jaxlib 0.10.2 on CPU silently miscomputes some fused reductions (jax issue 39103: a sum comes out 1065369600 instead of
1073741824). An XLA flag, set before the backend starts, disables the fusion. Other jaxlibs may abort on an unknown
flag, so it is set for the affected version only.
"""

import importlib.metadata
import os
import sys

AFFECTED_JAXLIB = "0.10.2"
FLAG = "--xla_cpu_experimental_ynn_fusion_type="


class MiscompilingJaxError(RuntimeError):
    """JAX was started without the workaround."""


def apply() -> None:
    """Set the flag, for this process and its children.

    Raises MiscompilingJaxError if an affected backend has already started without it: the process's results cannot be
    trusted, and the flag comes too late.
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
