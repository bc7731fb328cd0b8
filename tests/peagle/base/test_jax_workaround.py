"""Right sums, and the same bits for any number of rows, whatever jaxlib is installed and however we are imported; each
case is a new process."""

import functools
import importlib.metadata
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from peagle.base.jax_workaround import FLAG, MISCOMPUTING_JAXLIB, takes_the_flag

ROOT = Path(__file__).parents[3]
JAXLIB = importlib.metadata.version("jaxlib")
miscomputing = pytest.mark.skipif(JAXLIB != MISCOMPUTING_JAXLIB, reason=f"jaxlib {JAXLIB} computes this right")
with_the_flag = pytest.mark.skipif(not takes_the_flag(JAXLIB), reason=f"jaxlib {JAXLIB} is run as it comes")
# 32768 squared is exact in float32; the miscompiled reduction gives 1065369600
RIGHT = "1073741824"
PROBE = """
    import jax, jax.numpy as jnp
    ramp = jnp.arange(32769, dtype=jnp.float32)
    rows = jnp.stack([ramp, jnp.zeros_like(ramp), jnp.zeros_like(ramp)], axis=1)
    sums = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))(rows)
    print(int(sums[-1]))
"""
# a norm and a softmax of 256 rows at once, and of some of them: how many numbers differ
ROWS_PROBE = """
    import jax, jax.numpy as jnp, numpy as np

    @jax.jit
    def both(x):
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)
        return jnp.stack([normed, jax.nn.softmax(x, axis=-1)])

    x = np.random.default_rng(1).standard_normal((256, 64), np.float32)
    whole = np.asarray(both(x))
    print(sum(int((np.asarray(both(x[:rows])) != whole[:, :rows]).sum()) for rows in (1, 4, 17)))
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


@functools.cache
def probed(first: str) -> tuple[str, str]:
    """What both probes print in one process that runs `first` before them."""
    last, different = printed(first + textwrap.dedent(PROBE) + textwrap.dedent(ROWS_PROBE)).split()
    return last, different


def test_importing_any_of_ours_makes_it_right() -> None:
    assert probed("import peagle\n")[0] == RIGHT
    environments = [
        printed(f"import os, {package}\nprint(os.environ.get('XLA_FLAGS'))")
        for package in ("peagle", "target", "drafter")
    ]
    assert len(set(environments)) == 1


@with_the_flag
def test_without_the_cure_bits_depend_on_the_number_of_rows() -> None:
    """If this fails, the test below proves nothing."""
    assert probed("")[1] != "0"


def test_importing_ours_gives_a_row_the_same_bits_beside_any_number_of_rows() -> None:
    assert probed("import peagle\n")[1] == "0"


def test_importing_jax_first_is_fine_while_it_has_not_started() -> None:
    assert printed("import jax, peagle\n" + textwrap.dedent(PROBE)) == RIGHT


@miscomputing
def test_a_jax_that_started_without_the_cure_is_refused() -> None:
    done = python("import jax\njax.devices()\nimport peagle")
    assert done.returncode != 0
    assert "MiscompilingJaxError: JAX was started before peagle was imported" in done.stderr
    assert f"XLA_FLAGS={FLAG}" in done.stderr


def test_a_jax_that_started_with_the_cure_is_welcome() -> None:
    flags = FLAG if takes_the_flag(JAXLIB) else ""
    assert printed("import jax\njax.devices()\nimport peagle\nprint('in')", flags) == "in"


@with_the_flag
def test_a_users_own_flags_are_kept() -> None:
    """Also a choice of this flag: a second one behind it would silently win."""
    for own, kept in (
        ("--xla_cpu_enable_fast_math=false", f"--xla_cpu_enable_fast_math=false {FLAG}"),
        (f"{FLAG}LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT", f"{FLAG}LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"),
    ):
        assert printed("import os, peagle\nprint(os.environ['XLA_FLAGS'])", own) == kept


def test_other_jaxlibs_never_see_the_flag() -> None:
    """A jaxlib that does not know a flag aborts on it."""
    code = """
        import importlib.metadata, os
        importlib.metadata.version = lambda name: "0.99.0"
        import peagle
        print("XLA_FLAGS" in os.environ)
    """
    assert printed(code) == "False"
