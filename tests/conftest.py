"""Everything under test runs strictly: no silent promotion of dtypes or ranks, and every signature of ours is checked
at each call, shapes by jaxtyping and the rest by beartype."""

import peagle  # noqa: F401, I001  first: it makes JAX's CPU backend right before it starts

import signal
from pathlib import Path
from typing import Any

import flax.struct
import jax
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

# most of the suite's time is XLA compiling: what an earlier run, or the worker beside this one, compiled is read back
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_compilation_cache_max_size", 1 << 30)  # bytes; the least recently used give way
