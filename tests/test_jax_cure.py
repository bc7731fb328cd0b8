"""JAX issue 39103: right sums whatever jaxlib is installed and however we are imported; each case is a new process."""

import importlib.metadata
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from peagle.ops.jax_cure import AFFECTED_JAXLIB, FLAG

ROOT = Path(__file__).parents[1]
affected = pytest.mark.skipif(
    importlib.metadata.version("jaxlib") != AFFECTED_JAXLIB, reason=f"only jaxlib {AFFECTED_JAXLIB} miscompiles"
)
# 32768 squared is exact in float32; the miscompiled reduction gives 1065369600
RIGHT = "1073741824"
PROBE = """
    import jax, jax.numpy as jnp
    ramp = jnp.arange(32769, dtype=jnp.float32)
    rows = jnp.stack([ramp, jnp.zeros_like(ramp), jnp.zeros_like(ramp)], axis=1)
    sums = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))(rows)
    print(int(sums[-1]))
"""


def python(code: str, flags: str | None = None) -> subprocess.CompletedProcess[str]:
    """The code in a new interpreter on the CPU, with XLA_FLAGS as given and nothing inherited (pytest has the cure)."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | ({} if flags is None else {"XLA_FLAGS": flags})
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=300
    )


def printed(code: str, flags: str | None = None) -> str:
    done = python(code, flags)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@affected
def test_without_the_cure_the_sum_is_wrong() -> None:
    """If this fails, the test below proves nothing: the probe has lost its bite."""
    assert printed(PROBE) != RIGHT


@pytest.mark.parametrize("package", ["peagle", "target", "drafter", "peagle.ops.norm"])
def test_importing_any_of_ours_makes_it_right(package: str) -> None:
    assert printed(f"import {package}\n" + textwrap.dedent(PROBE)) == RIGHT


def test_importing_jax_first_is_fine_while_it_has_not_started() -> None:
    assert printed("import jax, peagle\n" + textwrap.dedent(PROBE)) == RIGHT


@affected
def test_a_jax_that_started_without_the_cure_is_refused() -> None:
    done = python("import jax\njax.devices()\nimport peagle")
    assert done.returncode != 0
    assert "MiscompilingJaxError: JAX was started before peagle was imported" in done.stderr
    assert f"XLA_FLAGS={FLAG}" in done.stderr


def test_a_jax_that_started_with_the_cure_is_welcome() -> None:
    flags = FLAG if importlib.metadata.version("jaxlib") == AFFECTED_JAXLIB else ""
    assert printed("import jax\njax.devices()\nimport peagle\nprint('in')", flags) == "in"


@affected
def test_a_users_own_flags_are_kept() -> None:
    own = "--xla_cpu_enable_fast_math=false"
    assert printed("import os, peagle\nprint(os.environ['XLA_FLAGS'])", own) == f"{own} {FLAG}"


@affected
def test_a_users_own_choice_of_this_flag_is_kept() -> None:
    """Whoever sets the flag knows of it; a second one behind it would silently win."""
    own = f"{FLAG}LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
    assert printed("import os, peagle\nprint(os.environ['XLA_FLAGS'])", own) == own


def test_other_jaxlibs_never_see_the_flag() -> None:
    """A jaxlib that does not know a flag aborts on it."""
    code = """
        import importlib.metadata, os
        importlib.metadata.version = lambda name: "0.99.0"
        import peagle
        print("XLA_FLAGS" in os.environ)
    """
    assert printed(code) == "False"
