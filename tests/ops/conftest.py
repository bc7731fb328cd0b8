"""The kernels under test.

`kernels` are the native ones of an instruction set, `opened` the CUDA ones on the CPU, through the tests' driver.
`form` is each of them and XLA in turn, for suites that every form passes.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from peagle.base.errors import InputError
from peagle.ops import cuda, native, tpu
from peagle.ops.native import build
from peagle.ops.native.build import instruction_sets

CANNOT = ("this CPU runs", "kernels are for CPUs")  # only these skip a test; a set that was not compiled fails it
TILES, WITHOUT_TILES = "avx512amx", "avx512bf16"
# a set, and the better ones that only multiply matrices otherwise
SIMPLER = {"avx512": ("avx512vnni", WITHOUT_TILES, TILES), WITHOUT_TILES: (TILES,)}

IN_TURN = "in_turn"  # in the place of an instruction set in the names of XLA's calls
HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)  # XLA_FFI_Error* (XLA_FFI_CallFrame*)
DRIVER = Path(__file__).parent / "cuda" / "driver.cc"
EMULATED_TILES = Path(__file__).parent / "native" / "emulated_tiles.h"
KEPT = Path(__file__).parents[2] / ".pytest_cache" / "libraries"
GPU_PRAGMAS = ("-Wno-unknown-pragmas", "-Wno-subobject-linkage")
selected: dict[str, Any] = {}
forwarders: dict[str, Any] = {}


def select(isa: str) -> None:
    """Let XLA's calls of the names IN_TURN run a set's kernels, which share every compiled program so."""
    library = native.open_library(isa)
    for name in native.HANDLERS:
        handler = getattr(library, f"peagle_{name}")
        handler.restype, handler.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
        selected[name] = handler
        if name not in forwarders:
            forwarders[name] = HANDLER(lambda frame, name=name: selected[name](frame))
            jax.ffi.register_ffi_target(f"peagle_{name}_{IN_TURN}", jax.ffi.pycapsule(forwarders[name]), platform="cpu")


def emulate_tiles(directory: Path, *flags: str) -> None:
    """Compile the kernels for tiles, with these emulated, into `directory` in the place of the real ones."""
    sources = [build.HERE / source for source in build.SOURCES]
    every = (*instruction_sets()[WITHOUT_TILES], "-include", str(EMULATED_TILES), *flags)
    build.compile_library(build.library(TILES, directory), sources, *every)


@contextlib.contextmanager
def running(
    isa: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, simplify: bool
) -> Iterator[None]:
    """Select an instruction set; skip the test if this CPU lacks it or, to simplify, if another set is the same.

    Tiles are emulated if the CPU lacks only them.
    """
    monkeypatch.delenv(native.VARIABLE, raising=False)
    native.status.cache_clear()
    best, line = native.status()
    if simplify and best in SIMPLER.get(isa, ()):
        pytest.skip(f"{best}, which this CPU runs, is the same here")
    if (isa, best) == (TILES, WITHOUT_TILES):
        with monkeypatch.context() as patch:
            if native.DIRECTORY not in os.environ:
                patch.setenv(native.DIRECTORY, str(request.getfixturevalue("emulated")))
            select(isa)
            patch.setattr(native, "status", lambda: (IN_TURN, line))
            yield
        return
    monkeypatch.setenv(native.VARIABLE, isa)
    native.status.cache_clear()
    try:
        runs, line = native.status()
    except InputError as error:
        if any(words in str(error) for words in CANNOT):
            pytest.skip(f"{isa}: {error}")
        raise
    assert runs == isa
    select(isa)
    with monkeypatch.context() as patch:
        patch.setattr(native, "status", lambda: (IN_TURN, line))
        yield
    native.status.cache_clear()


@pytest.fixture(params=list(instruction_sets()))
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Select an instruction set.

    A module of operations without matrices sets NO_MATRICES: the sets of SIMPLER share their code, which runs once.
    """
    with running(request.param, request, monkeypatch, getattr(request.module, "NO_MATRICES", False)):
        yield request.param


@contextlib.contextmanager
def kept(name: str, *sources: Path) -> Iterator[Path]:
    """Lock the folder of libraries that are compiled of these sources once, for all workers and later runs."""
    digest = hashlib.sha256(f"{build.compiler()} {importlib.metadata.version('jaxlib')}".encode())
    for path in (Path(build.__file__), Path(__file__), *sorted(sources)):
        digest.update(path.read_bytes())
    directory = KEPT / f"{name}-{digest.hexdigest()[:16]}"
    if not directory.exists():
        for old in KEPT.glob(f"{name}-*"):
            shutil.rmtree(old, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory


@pytest.fixture(scope="session")
def emulated() -> Path:
    """Return the folder of the kernels for tiles, emulated."""
    with kept("tiles", EMULATED_TILES, *build.HERE.glob("*.cc"), *build.HERE.glob("*.h")) as directory:
        if not build.library(TILES, directory).exists():
            emulate_tiles(directory)
    return directory


@pytest.fixture(scope="session")
def libraries() -> tuple[Path, Path]:
    """Return (the launcher of the CUDA kernels for the CPU, the driver)."""
    launcher, driver = "-DPEAGLE_TEST_ON_HOST", (f"-I{build.CUDA}", "-fvisibility=default", *GPU_PRAGMAS)
    sources = (path for path in build.CUDA.iterdir() if path.suffix in (".cc", ".cu", ".cuh", ".h"))
    with kept("cuda", DRIVER, *sources) as directory:
        paths = (directory / "launch.so", directory / "driver.so")
        if not paths[0].exists():  # optimised as much as pays
            build.compile_library(paths[1], [DRIVER], "-O2", *driver)
            build.compile_library(paths[0], [build.CUDA / "launch.cc"], "-O0", launcher)
    return paths


@pytest.fixture
def opened(libraries: tuple[Path, Path]) -> None:
    """Open the CUDA kernels on the CPU."""
    launcher, driver = libraries
    cuda.open_kernels(launcher, str(driver), b"any image", "cpu", tiles=False)


@pytest.fixture
def hopper(libraries: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Open the kernels on the CPU, those of Hopper GPUs too."""
    launcher, driver = libraries
    cuda.open_kernels(launcher, str(driver), b"any image", "cpu", tiles=True)
    monkeypatch.setattr(cuda, "has_tiles", lambda: True)


FORMS = ("xla", *instruction_sets(), "cuda", "tpu")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run an op in XLA, and in the native kernels of each instruction set, the CUDA kernels and those for TPUs.

    The latter two run on the CPU if this machine has no such device.
    """
    if request.param in instruction_sets():
        with running(request.param, request, monkeypatch, simplify=True):
            yield "native"
        return
    if request.param == "cuda" and jax.default_backend() != "gpu":
        request.getfixturevalue("opened")
        monkeypatch.setattr(cuda, "status", lambda: (True, "CUDA"))
    monkeypatch.setattr(tpu, "interpreted", jax.default_backend() != "tpu")
    yield request.param
