"""What the commands compile is kept for the next run, where it can be read back."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from peagle.cli import compilation_cache
from peagle.cli.compilation_cache import DIRECTORY, SETTINGS, keep_compiled
from peagle.measure import provenance

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[3]
LEAST_TIME = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
AMD = "processor : 0\nvendor_id : AuthenticAMD\nmodel name : AMD\nflags : fpu avx2\ncpu MHz : {mhz}\n\nprocessor : 1\n"
ARM = "processor : 0\nFeatures : fp asimd\nCPU implementer : 0x41\nCPU part : 0xd0c\n\n"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str | None], str | None]:
    """Where programs are kept on a machine whose /proc/cpuinfo says this; None: it has none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def directory(cpuinfo: str | None) -> str | None:
        monkeypatch.delenv(DIRECTORY, raising=False)
        for name in SETTINGS:
            monkeypatch.setenv(name, "")
        told = tmp_path / "cpuinfo"
        told.unlink(missing_ok=True)
        if cpuinfo is not None:
            told.write_text(cpuinfo)
        monkeypatch.setattr(provenance, "CPUINFO", told)
        keep_compiled()
        return os.environ.get(DIRECTORY)

    return directory


def test_each_kind_of_machine_has_its_own(
    kept: Callable[[str | None], str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    amd, arm = kept(AMD.format(mhz=2000)), kept(ARM)
    assert amd is not None
    assert arm is not None
    assert not (tmp_path / "cache").exists()  # JAX makes it once there is something to keep
    assert Path(amd).is_relative_to(tmp_path / "cache" / "peagle")
    assert amd != arm
    assert kept(AMD.format(mhz=3000)) == amd  # what changes from moment to moment does not tell CPUs apart
    assert kept(AMD.format(mhz=2000).replace("avx2", "avx2 avx512f")) != amd
    monkeypatch.setattr(compilation_cache, "num_threads", lambda: 1234)
    assert kept(AMD.format(mhz=2000)) != amd  # programs are cut into parts for threads


def test_nothing_is_kept_that_could_not_be_read_back_or_written(
    kept: Callable[[str | None], str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for cpuinfo in (AMD.replace("AuthenticAMD", "GenuineIntel").format(mhz=2000), "something else altogether", None):
        assert kept(cpuinfo) is None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept(AMD) is None

    def refuse(_: str) -> Path:
        raise RuntimeError("no home directory")

    monkeypatch.setattr(compilation_cache, "cache_directory", refuse)
    assert kept(AMD) is None


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for directory in ("", str(tmp_path / "elsewhere")):
        monkeypatch.setenv(DIRECTORY, directory)
        keep_compiled()
        assert os.environ[DIRECTORY] == directory
    assert not list(tmp_path.iterdir())


def test_the_oldest_programs_go(kept: Callable[[str | None], str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    directory = kept(AMD)
    assert directory is not None
    Path(directory).mkdir(parents=True)
    (Path(directory) / "of XLA's own").mkdir()
    for age, name in enumerate(("newest", "middle", "oldest")):
        (Path(directory) / name).write_bytes(bytes(10))
        os.utime(Path(directory) / name, (0, 1000 - age))
    monkeypatch.setattr(compilation_cache, "MOST_BYTES", 25)
    kept(AMD)
    assert sorted(path.name for path in Path(directory).iterdir()) == ["middle", "newest", "of XLA's own"]


@pytest.mark.skipif(compilation_cache._machine() is None, reason="what is compiled here is not kept")
def test_a_second_run_compiles_nothing_and_a_torn_file_costs_a_compilation_alone(tmp_path: Path) -> None:
    """In processes of their own, as a person runs them."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    # each program is kept: which take the least time that a person's runs ask for is the machine's to say
    environment[LEAST_TIME] = "0"
    environment["TF_CPP_MIN_LOG_LEVEL"] = "3"  # and whether XLA complains of a slow compilation, too
    command = [sys.executable, "-m", "peagle", "speculate", "-k", "0", "--quiet", "-n", "4"]

    def run() -> tuple[str, dict[Path, float]]:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True
        )
        assert done.stderr == ""
        return done.stdout, {path: path.stat().st_mtime_ns for path in tmp_path.glob("peagle/compiled/*/*-cache")}

    assert LEAST_TIME in SETTINGS
    first, compiled = run()
    assert any("step" in path.name for path in compiled)
    torn = [*compiled][::2]
    for path in torn:
        path.write_bytes(path.read_bytes()[:100])
    again, unchanged = run()
    assert again == first
    whole = compiled.keys() - {*torn}
    assert whole
    assert {path: unchanged[path] for path in whole} == {path: compiled[path] for path in whole}
    assert unchanged.keys() == compiled.keys()
