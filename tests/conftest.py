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


COMPILES = "mark.compile"  # a module that compiles for long has this mark, by which a person at work leaves it out


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what `-m "not compile"` leaves out: the imports take longer than most tests of the rest."""
    if "not compile" not in config.option.markexpr or not collection_path.name.startswith("test_"):
        return None
    return True if collection_path.is_file() and COMPILES in collection_path.read_text(encoding="utf-8") else None
