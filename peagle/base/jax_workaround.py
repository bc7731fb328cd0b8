"""Disable a fusion of XLA on CPU that miscomputes sums, or makes a row's bits depend on the number of rows.

From jaxlib 0.10.2 on, XLA on CPU hands some fused reductions to YNNPACK. jaxlib 0.10.2 silently miscomputes them (jax
issue 39103: a sum comes out 1065369600 instead of 1073741824). Later versions are right, but the last bits of a row, in
a norm for example, depend on the number of rows. Then verifying several tokens differs from decoding them in turn. An
XLA flag, set before the backend starts, disables the fusion. jaxlib aborts on an unknown flag, so the flag is set only
for versions that were tried with it.
"""

import importlib.metadata
import os
import sys

MISCOMPUTING_JAXLIB = "0.10.2"
VERSIONS_WITH_FLAG = ("0.11.", "0.12.")  # besides MISCOMPUTING_JAXLIB; tried with 0.11.2 and 0.12.0.1
FLAG = "--xla_cpu_experimental_ynn_fusion_type="


class MiscompilingJaxError(RuntimeError):
    """A miscomputing JAX was started without the workaround."""


def apply() -> None:
    """Set the flag, for this process and its children, if the installed jaxlib has it.

    Raises MiscompilingJaxError if a miscomputing backend has already started: the flag comes too late, and no result
    can be trusted. After the start of a later jaxlib it passes: results are right except in near-ties.
    """
    version = importlib.metadata.version("jaxlib")
    if not takes_the_flag(version):
        return
    flags = os.environ.get("XLA_FLAGS", "")
    if any(flag.startswith(FLAG) for flag in flags.split()):
        return
    if version == MISCOMPUTING_JAXLIB and _backend_started():
        raise MiscompilingJaxError(
            f"JAX was started before peagle was imported, and jaxlib {MISCOMPUTING_JAXLIB} silently miscomputes "
            "reductions on CPU (jax issue 39103). Import peagle (or target, drafter) before the first JAX computation, "
            f"set XLA_FLAGS={FLAG} in the environment, or install another jaxlib."
        )
    os.environ["XLA_FLAGS"] = f"{flags} {FLAG}".strip()


def takes_the_flag(version: str) -> bool:
    """Whether this jaxlib has the flag and the fusion."""
    return version == MISCOMPUTING_JAXLIB or version.startswith(VERSIONS_WITH_FLAG)


def _backend_started() -> bool:
    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge  # private, but reached only on the one miscomputing version

    return xla_bridge.backends_are_initialized()
