"""Everything under test runs strictly: no silent promotion of dtypes or ranks, and every signature of ours is checked
at each call, shapes by jaxtyping and the rest by beartype."""

import os

from tests.compiling import FLAGS

os.environ["XLA_FLAGS"] = f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()  # of two of a name the last one counts

import peagle  # noqa: F401, I001  before JAX: it makes its CPU backend right before it starts

import signal
from pathlib import Path
from typing import Any

import flax.struct
import jax
import pytest
from jaxtyping import install_import_hook

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

# what an earlier run, or the worker beside this one, compiled is read back
COMPILED = Path(__file__).parents[1] / ".pytest_cache" / "jax"
MOST_BYTES = 1 << 30
jax.config.update("jax_compilation_cache_dir", str(COMPILED))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_configure(config: pytest.Config) -> None:
    """The programs written last are kept, of a size that is looked at once: given a limit, JAX reads a file of each of
    the thousands of programs at every one it writes, and holds a lock meanwhile."""
    if hasattr(config, "workerinput"):
        return
    found = [(path, path.stat()) for path in COMPILED.glob("*")]
    size = 0
    for path, stat in sorted(found, key=lambda each: each[1].st_mtime, reverse=True):
        size += stat.st_size
        if size > MOST_BYTES:
            path.unlink(missing_ok=True)
