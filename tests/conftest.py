"""Run everything under test strictly: signatures are checked, and dtypes and ranks are never promoted silently."""

from tests.support import compiling

compiling.set_environment()

# ruff: noqa: E402  JAX reads the environment when it is imported
import peagle  # noqa: F401, I001  before JAX: it makes its CPU backend right before it starts

import ctypes
import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest

from tests.support import strict

strict.install()

# a busy machine is no failure
hypothesis.settings.register_profile(
    "peagle", deadline=None, max_examples=50, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("peagle")

# a suite in the background ignores Ctrl-C, and with nohup SIGHUP, and so would the processes that are tested
if threading.current_thread() is threading.main_thread():  # Ray imports it elsewhere, for a checked class
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
compiling.keep_programs()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        compiling.trim_programs()


_C_LIBRARY = ctypes.CDLL(None)
MOST_RESIDENT_BYTES = 2_500_000_000  # of a process of the suite; JAX keeps every compiled program


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Collect no garbage while modules are imported: nearly all objects stay, and looking at them takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave the 800,000 objects of imported modules out of later garbage collections, and collect less often.

    Together with the hook above this saves an eighth of the suite's processor time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20)


@pytest.fixture(autouse=True)
def _no_stored_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure each engine's costs anew: those in the user's cache are of this machine."""
    monkeypatch.setattr("peagle.engine.auto.measure.store_for", lambda *_: None)


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
    "peagle/loading/test_demo.py",
    "peagle/answers/test_grammar_compiler.py",
    "peagle/parallel/test_mesh.py",
    "peagle/parallel/test_processes.py",
    "peagle/answers/test_result.py",
    "peagle/answers/test_streams.py",
    "peagle/parallel/test_two_processes.py",
    "peagle/loading/test_window.py",
    "peagle/workflows/test_check.py",
    "peagle/workflows/test_export.py",
    "peagle/workflows/test_parity.py",
    "peagle/workflows/test_run.py",
    "peagle/workflows/training/test_data.py",
    "peagle/workflows/training/test_training.py",
    "scripts/test_bench_llama.py",
    "scripts/test_bench_peers.py",
    "scripts/test_gpu_check.py",
    "scripts/test_gpu_programs.py",
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
