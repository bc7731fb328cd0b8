"""Everything under test runs strictly: no silent promotion of dtypes or ranks, and every signature of ours is checked
at each call, shapes by jaxtyping and the rest by beartype."""

import os

from tests.compiling import COMPILED, FLAGS, MOST_BYTES

os.environ["JAX_COMPILATION_CACHE_DIR"] = ""  # child processes keep nothing
os.environ["XLA_FLAGS"] = f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()  # of two of a name the last one counts

import peagle  # noqa: F401, I001  before JAX: it makes its CPU backend right before it starts

import signal
from typing import Any

import flax.struct
import jax
import pytest
from jaxtyping import install_import_hook

from peagle.ops.files import trim

_struct_dataclass = flax.struct.dataclass


def _unchecked_dataclass(*args: Any, **kwargs: Any) -> Any:
    """flax.struct.dataclass, its __init__ exempt: JAX rebuilds pytrees with leaves that are not arrays."""
    made = _struct_dataclass(*args, **kwargs)
    if isinstance(made, type):
        made.__no_type_check__ = True  # type: ignore[attr-defined]
    return made


flax.struct.dataclass = _unchecked_dataclass
install_import_hook(["peagle", "target", "drafter"], "beartype.beartype")

# a suite that was started in the background ignores Ctrl-C, and so would the processes whose Ctrl-C is tested
signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

jax.config.update("jax_compilation_cache_dir", str(COMPILED))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_configure(config: pytest.Config) -> None:
    """The programs written last are kept, of a size that is looked at once: given a limit, JAX reads a file of each of
    the thousands of programs at every one it writes, and holds a lock meanwhile."""
    if hasattr(config, "workerinput"):
        return
    COMPILED.mkdir(parents=True, exist_ok=True)
    trim(COMPILED, MOST_BYTES)
