"""Compiling the kernels, its errors, and which kernels run and why."""

import ctypes
import importlib.util
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from peagle.base.errors import InputError, InputWarning
from peagle.ops import native
from peagle.ops.native import build, self_test
from peagle.ops.native.build import BuildError
from tests.ops.conftest import TILES, WITHOUT_TILES

SETS = list(build.instruction_sets())
AGAIN = f"{sys.executable} -P -m peagle.ops.native compiles them, given a C++ compiler"
needs_libraries = pytest.mark.usefixtures("fresh", "libraries")
TINY = """
#include "xla/ffi/api/c_api.h"
extern "C" __attribute__((visibility("default"))) const char* set() {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__FMA__)
#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
  return "avx512amx";
#elif defined(__AVX512BF16__)
  return "avx512bf16";
#elif defined(__AVX512VNNI__)
  return "avx512vnni";
#else
  return "avx512";
#endif
#elif defined(__AVX2__) && defined(__FMA__)
  return "avx2";
#else
  return "portable";
#endif
}
extern "C" const char* hidden() { return ""; }
"""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without a cached status, and without variables that choose a set or other libraries."""
    for name in (native.VARIABLE, native.DIRECTORY):
        monkeypatch.delenv(name, raising=False)
    native.status.cache_clear()
    yield
    native.status.cache_clear()


@pytest.fixture
def compiler() -> str:
    """Skip tests that compile if there is no compiler."""
    try:
        return build.compiler()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def libraries(compiler: str) -> None:
    """If there is a compiler, all libraries must exist, so no test of the kernels may be skipped."""
    missing = [isa for isa in SETS if not build.library(isa).exists()]
    assert not missing, f"{compiler} is here: python -m peagle.ops.native --all"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder for libraries."""
    directory = tmp_path / "out"
    directory.mkdir()
    return directory


def one_line(error: Exception | str) -> str:
    line = str(error)
    assert line
    assert "\n" not in line
    return line


def status_line() -> str:
    """Return the line of the kernels' status, which is one of a refusal or of why XLA runs."""
    native.status.cache_clear()
    try:
        isa, line = native.status()
    except InputError as error:
        return one_line(error)
    assert isa is None
    assert not native.available()
    return one_line(line)


def stand_in(monkeypatch: pytest.MonkeyPatch, directory: Path, *lines: str) -> Path:
    """Make a compiler that runs a given script."""
    path = directory / "stand-in"
    path.write_text("\n".join(["#!/bin/sh", '[ "$1" = --version ] && exit 0', *lines]) + "\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


# Which kernels run


def best_of_machine(isa: str) -> str:
    """Return the best set that this CPU runs, by the portable library."""
    machine = ctypes.CDLL(str(build.library(isa))).peagle_machine
    machine.restype = ctypes.c_char_p
    return str(machine().decode())


@needs_libraries
@pytest.mark.parametrize("isa", SETS)
def test_each_set_is_compiled_and_runs_if_the_cpu_has_it(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = ctypes.CDLL(str(build.library(isa)))
    for name in native.HANDLERS:
        assert hasattr(library, f"peagle_{name}")
    monkeypatch.setenv(native.VARIABLE, isa)
    if SETS.index(isa) < SETS.index(best_of_machine(isa)):
        assert status_line().startswith(f"PEAGLE_KERNELS is {isa!r}, but this CPU runs ")
    else:
        assert native.status() == (isa, f"native, {isa}")
        assert native.available()


@needs_libraries
def test_by_default_the_cpus_best_set_runs_and_is_compiled_with_the_portable_one() -> None:
    best = best_of_machine("portable")
    assert native.status() == (best, f"native, {best}")
    assert list(build.sets_of_this_machine()) == list(dict.fromkeys((best, "portable")))


def test_the_set_is_chosen_by_all_that_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")

    def chosen(flags: str) -> list[str]:
        (tmp_path / "cpuinfo").write_text(f"model name : any\nflags\t\t: fpu {flags} sse2\n")
        return list(build.sets_of_this_machine())

    avx512 = "avx2 fma avx512f avx512bw avx512vl avx512dq"
    assert chosen(f"{avx512} avx512_vnni avx512_bf16 amx_tile amx_bf16") == ["avx512amx", "portable"]
    assert chosen(f"{avx512} avx512_vnni avx512_bf16 amx_tile") == ["avx512bf16", "portable"]
    assert chosen(f"{avx512} avx512_vnni") == ["avx512vnni", "portable"]
    assert chosen(avx512) == ["avx512", "portable"]
    assert chosen("avx2 fma avx512f") == ["avx2", "portable"]
    assert chosen("avx2") == ["portable"]  # without fma
    (tmp_path / "cpuinfo").unlink()
    assert build.sets_of_this_machine() == build.instruction_sets()


def test_every_set_is_compiled_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not build.wants_all()
    monkeypatch.setenv(build.VARIABLE, "all")
    assert build.wants_all()
    monkeypatch.setenv(build.VARIABLE, "avx3")
    with pytest.raises(BuildError, match="'avx3'; expected all"):
        build.wants_all()


NOT_COMPILED = f"the native kernels were not compiled; {AGAIN}"
DO_NOT_LOAD = "the native kernels do not load ("


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("value", "libraries", "begins", "ends"),
    [
        ("xla", "as they are", "XLA (PEAGLE_KERNELS=xla)", ""),
        ("neon", "as they are", f"PEAGLE_KERNELS is 'neon'; expected {', '.join([*SETS, 'xla'])}, or nothing", ""),
        ("", "missing", f"XLA: {NOT_COMPILED}", ""),
        ("portable", "missing", f"PEAGLE_KERNELS is 'portable', but {NOT_COMPILED}", ""),
        ("", "broken", f"XLA: {DO_NOT_LOAD}", f"; {AGAIN}"),
        ("portable", "broken", f"PEAGLE_KERNELS is 'portable', but {DO_NOT_LOAD}", f"; {AGAIN}"),
    ],
)
def test_why_the_kernels_do_not_run_is_one_line_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, out: Path, value: str, libraries: str, begins: str, ends: str
) -> None:
    if value:
        monkeypatch.setenv(native.VARIABLE, value)
    if libraries != "as they are":
        monkeypatch.setenv(native.DIRECTORY, str(out))
    for isa in SETS if libraries == "broken" else ():
        build.library(isa, out).write_text("for another machine\n")
    line = status_line()
    assert line.startswith(begins)
    assert line.endswith(ends)
    assert ends or line == begins


@pytest.mark.usefixtures("fresh")
def test_a_call_where_they_do_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "xla")
    with pytest.raises(InputError, match=r"do not run here .*PEAGLE_KERNELS=xla.*kernels='xla'"):
        native.call("linear", jax.ShapeDtypeStruct((1, 1), np.float32))


@pytest.mark.usefixtures("fresh")
def test_on_other_devices_xla_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert status_line() == "XLA: the native kernels are for CPUs, this is gpu"


@needs_libraries
def test_if_the_best_set_is_missing_the_next_runs(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    best = native.status()[0]
    others = [isa for isa in SETS if isa != best]
    for isa in others:
        build.library(isa, out).symlink_to(build.library(isa))
    monkeypatch.setenv(native.DIRECTORY, str(out))
    native.status.cache_clear()
    isa, line = native.status()
    if best == "portable":
        assert (isa, line[:5]) == (None, "XLA: "), "there is none behind it"
    else:
        assert best is not None
        assert isa == SETS[SETS.index(best) + 1]
        assert line == f"native, {isa} (those for {best} were not compiled; {AGAIN})"
        monkeypatch.setenv(native.VARIABLE, best)
        assert status_line().startswith(f"PEAGLE_KERNELS is {best!r}, but the kernels for {best} were not compiled; ")
        monkeypatch.setenv(native.VARIABLE, isa)
        native.status.cache_clear()
        assert native.status() == (isa, f"native, {isa}"), "it was asked for"


def other_bits(output: np.ndarray) -> np.ndarray:
    return np.nextafter(output, np.float32(np.inf)) if len(output) == 1 else output


FAULTS = {
    "a product with bfloat16 weights is off by 0.5; expected 0.0001 at most": lambda output: output * np.float32(1.5),
    "a row has other bits alone than among 16, with bfloat16 weights": other_bits,
}


@needs_libraries
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_tiles_run_only_if_they_pass_their_check(
    fault: str | None, emulated: Path, monkeypatch: pytest.MonkeyPatch, out: Path
) -> None:
    """Else the next set does, with a warning. The check may come while a program is traced."""
    if best_of_machine("portable") != WITHOUT_TILES:
        pytest.skip(f"tiles are emulated on a CPU whose best set is {WITHOUT_TILES}")
    for isa in SETS:
        build.library(isa, out).symlink_to(build.library(isa, emulated if isa == TILES else build.HERE))
    monkeypatch.setenv(native.DIRECTORY, str(out))
    real, machine = native.open_library, types.SimpleNamespace(peagle_machine=lambda: TILES.encode())
    monkeypatch.setattr(native, "open_library", lambda isa: machine if isa == "portable" else real(isa))
    product = self_test._product
    if fault is not None:
        monkeypatch.setattr(self_test, "_product", lambda *operands: FAULTS[fault](product(*operands)))

    def status() -> tuple[str | None, str]:
        native.status.cache_clear()
        jax.eval_shape(lambda x: x if native.available() else -x, 1)
        return native.status()

    if fault is None:
        assert status() == (TILES, f"native, {TILES}")
        return
    failed = f"the kernels for {TILES} fail their check ({fault})"
    with pytest.warns(InputWarning, match=re.escape(f"{failed}; those for {WITHOUT_TILES} run")):
        assert status() == (WITHOUT_TILES, f"native, {WITHOUT_TILES} ({failed})")
    monkeypatch.setenv(native.VARIABLE, TILES)
    assert status_line() == f"{native.VARIABLE} is {TILES!r}, but {failed}; leave {native.VARIABLE} out"


# Their compilation


@pytest.mark.usefixtures("compiler")
def test_each_library_is_of_the_set_it_is_named_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, out: Path) -> None:
    """The compiler takes the flags and finds XLA's headers, and only the handlers are exported."""
    (tmp_path / "tiny.cc").write_text(TINY)
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "SOURCES", ("tiny.cc",))
    paths = build.build(out)
    assert paths == [build.library(isa, out) for isa in SETS]
    assert sorted(paths) == sorted(out.iterdir())
    for isa, path in zip(SETS, paths, strict=True):
        opened = ctypes.CDLL(str(path))
        opened.set.restype = ctypes.c_char_p
        assert opened.set().decode() == isa
        assert not hasattr(opened, "hidden")
        assert b"__asan" not in path.read_bytes()


def test_a_compiler_too_old_for_the_best_set_compiles_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, out: Path
) -> None:
    monkeypatch.setattr(build, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    features = {flag[2:] for flags in build.instruction_sets().values() for flag in flags}
    (tmp_path / "cpuinfo").write_text(f"flags : {' '.join(features).replace('-', '_')}\n")
    knows_no_tiles = 'case "$*" in *-mamx-tile*) exit 1; esac'
    stand_in(monkeypatch, tmp_path, knows_no_tiles, 'for last; do :; done; echo "$@" > "$last"')
    assert build.build(out, every=False) == [build.library(isa, out) for isa in ("avx512bf16", "portable")]
    with pytest.raises(BuildError):
        build.build(out)


def test_without_a_compiler_it_says_so(
    monkeypatch: pytest.MonkeyPatch, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(BuildError) as caught:
        build.build(out)
    assert one_line(caught.value) == "no C++ compiler was found (CXX, c++, g++, clang++)"
    assert not list(out.iterdir())
    assert build.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"peagle: the native kernels were not built: {caught.value}\n"


def test_without_jaxlib_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, out: Path) -> None:
    stand_in(monkeypatch, tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(BuildError, match=r"^jaxlib, which brings XLA's FFI headers, is not installed$"):
        build.build(out)


@pytest.mark.parametrize(
    ("messages", "quoted"),
    [
        (["in kernels.cc:", "kernels.cc:7:1: error: one", "kernels.cc:9:1: error: two"], "kernels.cc:7:1: error: one"),
        (["out of", "memory"], "out of memory"),
        ([], "exit status 1, no message"),
    ],
)
def test_a_compiler_that_fails_is_quoted_and_leaves_older_libraries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, out: Path, messages: list[str], quoted: str
) -> None:
    """Nothing half-written remains, and every older library does."""
    half = 'for last; do :; done; echo half > "$last"'
    failing = stand_in(monkeypatch, tmp_path, half, *(f'echo "{line}" >&2' for line in messages), "exit 1")
    old = build.library("portable", out)
    old.write_text("old")
    with pytest.raises(BuildError) as caught:
        build.build(out)
    assert one_line(caught.value) == f"{failing} failed: {quoted}"
    assert list(out.iterdir()) == [old]
    assert old.read_text() == "old"
