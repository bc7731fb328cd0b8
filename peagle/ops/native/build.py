"""Compile the native CPU kernels, one shared library per instruction set, and the CUDA kernels' launcher.

    python -m peagle.ops.native [--all]

Installing the package runs this if there is a C++ compiler (hatch_build.py), so this module imports only the standard
library. It compiles this machine's best instruction set, and the portable one, which also detects what a machine runs.
--all, or PEAGLE_INSTRUCTION_SETS=all while installing, compiles every set, for tests and wheels. Run the command after
an installation without a compiler, or for another jaxlib. The CUDA kernels are compiled at their first use
(peagle.ops.cuda).
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("packed.cc", "linear.cc", "experts.cc", "attention.cc", "rope.cc", "likeliest.cc", "draw.cc", "ffi.cc")
SUFFIX = ".so"
VARIABLE = "PEAGLE_INSTRUCTION_SETS"
CPU_INFO = Path("/proc/cpuinfo")
CUDA = HERE.parent / "cuda"
LAUNCHER = CUDA / f"launch{SUFFIX}"
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma")
_X86 = {
    "avx512amx": (*_AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "avx512bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
    "avx512vnni": (*_AVX512, "-mavx512vnni"),
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma"),
}
FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fvisibility-inlines-hidden",
    "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized",
)  # fmt: skip
# -O0: an optimiser would drop reads of unused values, and takes long
SANITIZE = ("-fsanitize=address", "-DPEAGLE_SANITIZED", "-fno-omit-frame-pointer", "-g1", "-O0")


class BuildError(Exception):
    """The kernels cannot be compiled here; the message gives the reason."""


def library(isa: str, directory: Path = HERE) -> Path:
    """Return the path of an instruction set's library, whether it exists or not."""
    return directory / f"kernels_{isa}{SUFFIX}"


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """List the instruction sets of this processor architecture, best first, with their compiler flags."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return {**(_X86 if x86 else {}), "portable": ()}


def sets_of_this_machine() -> dict[str, tuple[str, ...]]:
    """Return the best of `instruction_sets` that this machine runs, and the portable set; all if unknown."""
    sets = instruction_sets()
    try:
        flags = re.search(r"^flags\s*:(.*)$", CPU_INFO.read_text(), re.MULTILINE)
    except OSError:
        flags = None
    if flags is None:
        return sets
    has = {name.replace("_", "") for name in flags[1].split()}
    best = next(isa for isa, needs in sets.items() if {flag[2:].replace("-", "") for flag in needs} <= has)
    return {isa: sets[isa] for isa in dict.fromkeys((best, "portable"))}


def wants_all() -> bool:
    """Whether PEAGLE_INSTRUCTION_SETS is "all". Raises BuildError for another value."""
    sets = os.environ.get(VARIABLE, "")
    if sets not in ("", "all"):
        raise BuildError(f"{VARIABLE} is {sets!r}; expected all, or nothing for what this machine runs")
    return sets == "all"


def compiler() -> str:
    """Return the C++ compiler: $CXX, else the system's. Raises BuildError if there is none."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if path := shutil.which(name):
            return path
    raise BuildError("no C++ compiler was found (CXX, c++, g++, clang++)")


def headers() -> Path:
    """Return the folder of XLA's FFI headers, which come with jaxlib. Raises BuildError without jaxlib."""
    spec = importlib.util.find_spec("jaxlib")
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (folder := Path(location) / "include").is_dir():
            return folder
    raise BuildError("jaxlib, which brings XLA's FFI headers, is not installed")


def build(directory: Path = HERE, *, every: bool = True, sanitize: bool = False) -> list[Path]:
    """Compile the CPU kernels' libraries into `directory`; return their paths.

    every: all instruction sets; else `sets_of_this_machine`. If the compiler is too old for the best of these, the next
    one that it knows takes its place. Raises BuildError with the compiler's first error.
    """
    flags = instruction_sets()
    chosen = list(flags if every else sets_of_this_machine())
    sources, order = [HERE / source for source in SOURCES], list(flags)

    def one(isa: str) -> Path:
        others = [other for other in order[order.index(isa) + 1 :] if other not in chosen]
        try:
            return compile_library(library(isa, directory), sources, *flags[isa], *(SANITIZE if sanitize else ()))
        except BuildError:
            if not others:
                raise
            return one(others[0])

    with ThreadPoolExecutor() as pool:
        return list(pool.map(one, chosen))


def build_launcher() -> list[Path]:
    """Compile the CUDA kernels' launcher to LAUNCHER, on Linux only (JAX has CUDA nowhere else).

    Needs no CUDA installation. Raises BuildError.
    """
    return [compile_library(LAUNCHER, [CUDA / "launch.cc"])] if platform.system() == "Linux" else []


def compile_library(path: Path, sources: list[Path], *flags: str) -> Path:
    """Compile the sources to a shared library at `path`, whole or not at all; return the path. Raises BuildError."""
    cxx, include = compiler(), headers()
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=False).stdout
    unique = () if "clang" in version else ("-fno-gnu-unique",)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    command = [cxx, *FLAGS, *unique, *flags, "-isystem", str(include), *map(str, sources), "-o", str(temporary)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        temporary.unlink(missing_ok=True)
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        message = errors[0] if errors else " ".join(result.stderr.split())[-300:]
        raise BuildError(f"{cxx} failed: {message or f'exit status {result.returncode}, no message'}")
    os.replace(temporary, path)
    return path


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--all"]):
        print(f"peagle: {' '.join(arguments)!r} is no option of this; expected --all, or nothing", file=sys.stderr)
        return 2
    try:
        for path in [*build(every=bool(arguments) or wants_all()), *build_launcher()]:
            print(path)
    except BuildError as error:
        print(f"peagle: the native kernels were not built: {error}", file=sys.stderr)
        return 2
    return 0
