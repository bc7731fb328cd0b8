"""Everything under test runs strictly: no silent promotion of dtypes or ranks, and every signature of ours is checked
at each call, shapes by jaxtyping and the rest by beartype."""

import os

from tests.support.compiling import COMPILED, FLAGS, MOST_BYTES

os.environ["JAX_COMPILATION_CACHE_DIR"] = ""  # child processes keep nothing
os.environ["XLA_FLAGS"] = f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()  # of two of a name the last one counts

import peagle  # noqa: F401, I001  before JAX: it makes its CPU backend right before it starts

import ctypes
import dataclasses
import functools
import gc
import inspect
import signal
import threading
import types
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import flax.struct
import hypothesis
import jax
import jaxtyping
import numpy as np
import pytest

_struct_dataclass = flax.struct.dataclass


def _unchecked_dataclass(*args: Any, **kwargs: Any) -> Any:
    """flax.struct.dataclass, its __init__ exempt: JAX rebuilds pytrees with leaves that are not arrays."""
    made = _struct_dataclass(*args, **kwargs)
    if isinstance(made, type):
        made.__no_type_check__ = True  # type: ignore[attr-defined]
    return made


_jaxtyped = jaxtyping.jaxtyped


def _may_hold_a_shape(hint: Any) -> bool:
    """Whether jaxtyping has something to say of what is annotated so; a text may name anything."""
    if isinstance(hint, str) or (isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)):
        return True
    parts = () if get_origin(hint) is Literal else hint if isinstance(hint, list) else get_args(hint)
    return any(map(_may_hold_a_shape, parts))


# what frameworks tell apart by its flags stays what it is
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _at_its_first_call(check: Callable[[Any], Any], function: Any) -> Any:
    """Make `check(function)` at the first call: a process calls a part of our functions, and making a check takes as
    long as thousands of checks."""
    if not function.__annotations__:
        return function
    if function.__code__.co_flags & _SUSPENDED:
        return check(function)
    run: Any = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal run
        if run is None:
            run = check(function) if function.__closure__ is None else _by_shared_check(check, function)
        return run(*args, **kwargs)

    return call


_shared_checks: dict[types.CodeType, Any] = {}  # of closures
_pending = threading.local()  # the closures whose arguments are being checked


def _by_shared_check(check: Callable[[Any], Any], closure: Any) -> Any:
    """Share one check among the closures of a function, which is made anew at every call of the one around it."""
    code = closure.__code__
    if code not in _shared_checks:
        # holds nothing alive of what the first closure saw
        cells = tuple(types.CellType() for _ in code.co_freevars)
        hollow = types.FunctionType(code, closure.__globals__, closure.__name__, closure.__defaults__, cells)
        hollow.__kwdefaults__, hollow.__qualname__ = closure.__kwdefaults__, closure.__qualname__
        hollow.__annotations__ = closure.__annotations__

        @functools.wraps(hollow)
        def relay(*args: Any, **kwargs: Any) -> Any:
            return _pending.closures.pop()(*args, **kwargs)

        _shared_checks[code] = check(relay)
    checked = _shared_checks[code]

    def run(*args: Any, **kwargs: Any) -> Any:
        closures = _pending.__dict__.setdefault("closures", [])
        depth = len(closures)
        closures.append(closure)
        try:
            return checked(*args, **kwargs)
        finally:
            del closures[depth:]  # left there if its arguments do not fit

    return run


def _jaxtyped_where_shapes_are(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """jaxtyping.jaxtyped, but that signatures without shapes are the type checker's alone: jaxtyping binds the
    arguments at every call, and calls two more functions, which is thirty times as long."""

    def check(made: Any) -> Any:
        shapes = any(map(_may_hold_a_shape, made.__annotations__.values()))
        return _jaxtyped(made, typechecker=typechecker) if shapes else typechecker(made)

    def checked(made: Any) -> Any:
        if inspect.isfunction(made):
            return _at_its_first_call(check, made)
        own = vars(made).get("__init__") if dataclasses.is_dataclass(made) else None
        if own is not None and not hasattr(own, "__wrapped__") and not getattr(made, "__no_type_check__", False):
            made.__init__ = checked(own)
        return made

    return checked


flax.struct.dataclass = _unchecked_dataclass
jaxtyping.jaxtyped = _jaxtyped_where_shapes_are
jaxtyping.install_import_hook(["peagle", "target", "drafter"], "beartype.beartype")

# a busy machine is no failure
hypothesis.settings.register_profile(
    "peagle", deadline=None, max_examples=50, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("peagle")

# a suite that was started in the background ignores Ctrl-C, and so would the processes whose Ctrl-C is tested
if threading.current_thread() is threading.main_thread():  # Ray imports it elsewhere, for a checked class
    signal.signal(signal.SIGINT, signal.default_int_handler)

_stage = jax._src.core.stage_p
_lift = _stage.impl


def _lift_quickly(value: Any) -> jax.Array:
    """Copy NumPy's arrays to the device, in place of JAX's program for each shape: there are thousands of them here."""
    if isinstance(value, np.ndarray) and not getattr(value, "weak_type", False):
        return jax.device_put(np.array(value))
    return _lift(value)


_stage.def_impl(_lift_quickly)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

jax.config.update("jax_compilation_cache_dir", str(COMPILED))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# a quarter of the time
jax._src.compilation_cache.compress_executable = functools.partial(zlib.compress, level=1)
jax._src.compilation_cache.decompress_executable = zlib.decompress


def pytest_configure(config: pytest.Config) -> None:
    """The programs written last are kept, of a size that is looked at once: given a limit, JAX reads a file of each of
    the thousands of programs at every one it writes, and holds a lock meanwhile."""
    if hasattr(config, "workerinput"):
        return
    from peagle.ops.files import trim_folder  # not before signatures are checked

    COMPILED.mkdir(parents=True, exist_ok=True)
    trim_folder(COMPILED, MOST_BYTES)


_C_LIBRARY = ctypes.CDLL(None)
MOST_RESIDENT_BYTES = 2_500_000_000  # of a process of the suite; JAX keeps every compiled program


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Look for no garbage while modules are imported: nearly all they make stays, and looking took seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave what was collected, 800,000 objects that stay, out of every later garbage collection: it took half a
    second each time. And collect more rarely, since tracing makes thousands of objects that stay, too."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20)


@pytest.fixture(autouse=True)
def _no_stored_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure each engine's costs anew: those in the user's cache are of this machine."""
    monkeypatch.setattr("peagle.engine.warmup.store_for", lambda *_: None)


@pytest.fixture(scope="module", autouse=True)
def _programs_are_dropped_when_they_fill_the_memory() -> Iterator[None]:
    """Two processes that kept all programs of the suite took 14 GB. glibc keeps what was freed, unless it is told to
    give it back: a process that was full once seemed full after every module, and compiled all anew."""
    yield
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    if pages * os.sysconf("SC_PAGE_SIZE") > MOST_RESIDENT_BYTES:
        jax.clear_caches()
        gc.collect()
        if hasattr(_C_LIBRARY, "malloc_trim"):
            _C_LIBRARY.malloc_trim(0)


# modules that compile for long; a person at work leaves them out: pytest -m "not slow and not compile"
COMPILING = (
    "drafter/test_conformance.py",
    "drafter/test_window.py",
    "drafter/train/test_blocks.py",
    "drafter/train/test_parts.py",
    "drafter/train/test_train.py",
    "drafter/train/test_trainer.py",
    "golden/test_vllm.py",
    "ops/cuda/test_kernels.py",
    "ops/cuda/test_experts_hopper.py",
    "ops/native/test_experts.py",
    "ops/native/test_memory.py",
    "ops/native/test_thread_team.py",
    "ops/test_expert_matmul.py",
    "ops/test_paged_attention.py",
    "peagle/cli/test_chat.py",
    "peagle/cli/test_cli.py",
    "peagle/cli/test_compilation_cache.py",
    "peagle/cli/test_interrupt.py",
    "peagle/engine/test_adjust.py",
    "peagle/engine/test_blocked_prefill.py",
    "peagle/engine/test_dflash.py",
    "peagle/engine/test_engine.py",
    "peagle/engine/test_grammar.py",
    "peagle/engine/test_handoff.py",
    "peagle/engine/test_interleaving.py",
    "peagle/engine/test_preemption.py",
    "peagle/engine/test_prefill.py",
    "peagle/engine/test_prefix_reuse.py",
    "peagle/engine/test_remote.py",
    "peagle/engine/test_state.py",
    "peagle/measure/sweep/test_concurrency.py",
    "peagle/measure/sweep/test_report.py",
    "peagle/measure/sweep/test_sweep.py",
    "peagle/measure/test_bench.py",
    "peagle/measure/test_profile.py",
    "peagle/serve/test_errors.py",
    "peagle/serve/test_parameters.py",
    "peagle/test_pair.py",
    "peagle/test_demo.py",
    "peagle/test_grammars.py",
    "peagle/test_parallel.py",
    "peagle/test_processes.py",
    "peagle/test_result.py",
    "peagle/test_streams.py",
    "peagle/test_two_processes.py",
    "peagle/test_window.py",
    "peagle/workflows/test_check.py",
    "peagle/workflows/test_export.py",
    "peagle/workflows/test_parity.py",
    "peagle/workflows/test_run.py",
    "peagle/workflows/training/test_data.py",
    "peagle/workflows/training/test_training.py",
    "scripts/test_bench_peers.py",
    "scripts/test_gpu_check.py",
    "target/test_memory.py",
    "target/test_model.py",
    "target/test_native.py",
    "target/test_parity.py",
)


def _compiles(path: Path) -> bool:
    here = Path(__file__).parent
    return path.is_relative_to(here) and path.relative_to(here).as_posix() in COMPILING


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what `-m "not compile"` leaves out: the imports take longer than most tests of the rest."""
    return True if "not compile" in config.option.markexpr and _compiles(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _compiles(item.path):
            item.add_marker("compile")
