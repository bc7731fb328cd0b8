"""The CUDA kernels' compiler, launcher and status, without a GPU, and what they take of experts.

What the kernels compute is tested by the suites of the ops, which run their own source on the CPU through the tests'
driver (driver.cc). scripts/gpu_check covers what needs a GPU: tensor cores, the real driver, speed."""

import contextlib
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from peagle.ops import cuda, kernels, native
from peagle.ops.cuda import calls, graphs, nvrtc
from peagle.ops.cuda.self_test import check
from peagle.ops.expert_matmul import PackedExperts, expert_mlp
from peagle.ops.native import build
from tests.ops.conftest import DRIVER, GPU_PRAGMAS

pytestmark = pytest.mark.compile

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="JAX has CUDA on Linux, and NVIDIA its compiler")


@pytest.fixture(autouse=True)
def _status_is_found_anew() -> None:
    cuda.status.cache_clear()


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say that the kernels run here."""
    monkeypatch.setattr(cuda, "status", lambda: (True, "CUDA, compute capability 9.0"))


# Operands

EXPERTS, TOP_K, WIDTH, HIDDEN = 4, 2, 64, 32


def operands(rows: int, dtype: str = "bfloat16") -> tuple[jax.Array, jax.Array, PackedExperts]:
    """Make (x, router logits, experts)."""

    def matrix(outputs: int, inputs: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        blocks = jnp.zeros((EXPERTS, outputs, inputs // 32, 16), jnp.uint8)
        return blocks, jnp.zeros(blocks.shape[:-1], jnp.uint8), jnp.zeros((EXPERTS, outputs), dtype)

    experts = PackedExperts(*matrix(2 * HIDDEN, WIDTH), *matrix(WIDTH, HIDDEN))
    return jnp.zeros((rows, WIDTH), dtype), jnp.zeros((rows, EXPERTS)), experts


def mlp(x: jax.Array, logits: jax.Array, experts: PackedExperts, **options: Any) -> jax.Array:
    return expert_mlp(x, logits, experts, TOP_K, 7.0, **options)


@pytest.mark.usefixtures("passing")
@pytest.mark.parametrize(
    ("dtype", "rows", "runs"),
    [
        ("bfloat16", 2, True),
        ("bfloat16", 65, True),
        ("bfloat16", calls.MAX_ROWS + 1, False),
        ("float32", 2, False),
        ("float32", 17, False),
    ],
)
def test_implementation_chosen_on_a_gpu(dtype: str, rows: int, runs: bool) -> None:
    """The kernels if they take the operands, XLA's code otherwise."""

    def lowered(**options: Any) -> str:
        traced = jax.jit(functools.partial(mlp, **options)).trace(*operands(rows, dtype))
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert ("peagle_cuda_experts" in lowered()) == runs
    assert "peagle_cuda_experts" not in lowered(implementation="xla")


@pytest.mark.usefixtures("opened", "passing")
def test_shapes_that_do_not_fit_are_refused() -> None:
    x, _, experts = operands(calls.MAX_ROWS + 1)
    ids = jnp.zeros((len(x), TOP_K), jnp.int32)
    gate_up = experts.gate_up_blocks, experts.gate_up_scales, experts.gate_up_bias
    down = experts.down_blocks, experts.down_scales, experts.down_bias
    cut = down[0], down[1][:, :-1], down[2]
    for rows, of_down, says in (
        (len(x), down, "up to 4096 rows"),
        (2, cut, r"down_scales \[4, 63, 1\] is not U8"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=says):
            jax.block_until_ready(calls.experts(x[:rows], ids[:rows], gate_up, of_down, limit=7.0))


@pytest.mark.parametrize("window", [1, 128, 241, 768, 1792, 3840, None])
def test_the_splits_of_a_context_do_not_depend_on_the_rows_of_a_pass(window: int | None) -> None:
    """Or a row's bits would: its sums are joined split by split."""
    capacity = 131_072 if window is None else window + 64
    spans = {width: capacity if window is None else window + width - 1 for width in range(1, calls.STEP_ROWS + 1)}
    splits = {calls.num_splits(span, width, capacity) for width, span in spans.items()}
    assert len(splits) == 1
    assert next(iter(splits)) * calls.CHUNK >= min(max(spans.values()), calls.MOST_SPLITS * calls.CHUNK)


@pytest.fixture(scope="module")
def bounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a program with AddressSanitizer that runs the kernels on buffers without slack."""
    program = tmp_path_factory.mktemp("cuda") / "bounds"
    flags = ["-std=c++20", "-O1", "-fsanitize=address", *GPU_PRAGMAS, f"-I{build.CUDA}"]
    source = DRIVER.with_name("bounds.cc")
    command = [build.compiler(), *flags, str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    return program


@pytest.mark.slow
def test_nothing_beyond_a_buffer_is_touched(bounds: Path) -> None:
    """The sanitizer would find it: each buffer in turn is an element too short."""
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0:symbolize=0"}  # names take longest
    done = subprocess.run([bounds], env=environment, capture_output=True, text=True, check=False)
    whole, *reports = re.split(r"^buffer \d+$", done.stderr, flags=re.MULTILINE)
    assert (done.returncode, done.stdout, len(reports)) == (0, "27 buffers\n", 27), done.stderr[-2000:]
    assert "ERROR" not in whole, whole
    for number, report in enumerate(reports):
        assert "AddressSanitizer: heap-buffer-overflow" in report, number


# Status


@pytest.mark.usefixtures("passing")
def test_the_line_names_the_devices_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.describe_kernels() == native.status()[1]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(graphs, "trial", lambda: (True, ""))
    assert kernels.describe_kernels() == "CUDA, compute capability 9.0"


def gpu(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    """Let the machine have a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(compute_capability=capability)])
    monkeypatch.setattr(jax, "default_device", contextlib.nullcontext)


def test_status_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda.status() == (False, "XLA: the GPU kernels are for NVIDIA GPUs, this is cpu")
    monkeypatch.setenv(native.VARIABLE, native.XLA)
    cuda.status.cache_clear()
    assert cuda.status() == (False, "XLA (PEAGLE_KERNELS=xla)")


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ("7.5", "need compute capability 8.0 or more, this GPU's is 7.5"),
        ("8.9", "NVRTC for sm_89: not today"),
        ("9.0", "NVRTC for sm_90a: not today"),
    ],
)
def test_a_gpu_that_is_too_old_or_has_no_compiler(
    monkeypatch: pytest.MonkeyPatch, capability: str, reason: str
) -> None:
    def refuse(architecture: str) -> bytes:
        raise cuda.CudaError(f"NVRTC for {architecture}: not today")

    monkeypatch.setattr(cuda, "compile_kernels", refuse)
    gpu(monkeypatch, capability)
    runs, line = cuda.status()
    assert not runs
    assert line.startswith("XLA: ")
    assert reason in line


@pytest.mark.usefixtures("opened")
def test_a_gpu_whose_kernels_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call may come while a program is traced."""
    monkeypatch.setattr(cuda, "compile_kernels", lambda architecture: architecture.encode())
    monkeypatch.setattr(cuda, "open_kernels", lambda *_, **__: None)  # `opened` has done it
    gpu(monkeypatch, "8.9")
    assert jax.jit(lambda x: x if cuda.available() else -x)(1) == 1
    assert cuda.status() == (True, "CUDA, compute capability 8.9")


@pytest.mark.usefixtures("opened")
def test_the_check_finds_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    right = calls.experts

    def wrong(*operands: Any, limit: float) -> jax.Array:
        return right(*operands, limit=limit).at[-1, -1, -1].multiply(1.5)

    monkeypatch.setattr(calls, "experts", wrong)
    with pytest.raises(cuda.CudaError, match="fail their check"):
        check(tiles=False)


# The launcher and the compiler


@on_linux
def test_the_launcher_is_compiled_with_the_package() -> None:
    """For a GPU's streams; it opens without a GPU, and looks for the driver."""
    with pytest.raises(cuda.CudaError, match="no_such_driver"):
        cuda.open_kernels(build.LAUNCHER, "no_such_driver.so", b"", "CUDA", tiles=False)


def test_without_cuda_there_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "system", lambda: "Darwin")
    assert build.build_launcher() == []


@pytest.mark.usefixtures("passing")
def test_a_driver_that_refuses_is_an_error(libraries: tuple[Path, Path]) -> None:
    launcher, driver = libraries
    cuda.open_kernels(launcher, str(driver), b"refuse", "cpu", tiles=False)
    with pytest.raises(jax.errors.JaxRuntimeError, match="this driver is a test's"):
        jax.block_until_ready(mlp(*operands(1), implementation="cuda"))
    for launcher_path, driver_path, says in (
        (launcher, "no_such_driver.so", "no_such_driver"),
        (launcher.with_name("none.so"), str(driver), r"python -m peagle\.ops\.native"),
    ):
        with pytest.raises(cuda.CudaError, match=says):
            cuda.open_kernels(launcher_path, driver_path, b"", "cpu", tiles=False)


@on_linux
def test_nvrtc_compiles_the_source_and_the_result_is_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For the oldest architecture: the source asks for none, so newer ones compile the same."""
    architecture = "sm_80"
    assert b"__CUDA_ARCH__" not in nvrtc.sources(architecture)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cubin = nvrtc.compile_kernels(architecture)
    assert cubin[:4] == b"\x7fELF"
    (cached,) = (tmp_path / "cache" / "peagle" / "cuda").iterdir()
    assert cached.read_bytes() == cubin
    cached.write_bytes(b"of the cache")
    assert nvrtc.compile_kernels(architecture) == b"of the cache"
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, b"--no-such-option"))  # other options compile anew
    with pytest.raises(cuda.CudaError, match="NVRTC for sm_"):
        nvrtc.compile_kernels(architecture)


@on_linux
def test_nvrtcs_errors_are_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in nvrtc.NAMES:
        source = (nvrtc.HERE / name).read_text()
        (tmp_path / name).write_text(source.replace("fminf(", "fminimum(") if name == "experts.cu" else source)
    monkeypatch.setattr(nvrtc, "HERE", tmp_path)
    for architecture, says in (
        ("sm_90", r'NVRTC for sm_90: experts\.cu\(\d+\): error: .*"fminimum" is undefined'),
        ("sm_1", r"NVRTC for sm_1: .*architecture"),
    ):
        with pytest.raises(cuda.CudaError, match=says):
            nvrtc.compile_kernels(architecture)
