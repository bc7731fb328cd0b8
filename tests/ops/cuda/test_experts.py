"""The CUDA expert kernels on a CPU: their own source and launcher, through the tests' driver (driver.cc).

scripts/gpu_check covers what needs a GPU: tensor cores, the real driver, speed."""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.ops import cuda, kernels, native
from peagle.ops.cuda import calls, nvrtc
from peagle.ops.cuda.check import check
from peagle.ops.expert_matmul import PackedExperts, api, reference
from peagle.ops.expert_matmul import cuda as op
from peagle.ops.mxfp4 import dequantize
from peagle.ops.native import build
from tests.ops.conftest import DRIVER, GPU_PRAGMAS


@pytest.fixture(scope="module")
def bounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a program with AddressSanitizer that runs the kernels on buffers without slack."""
    program = tmp_path_factory.mktemp("cuda") / "bounds"
    flags = ["-std=c++20", "-O1", "-fsanitize=address", *GPU_PRAGMAS, f"-I{build.CUDA}"]
    source = DRIVER.with_name("bounds.cc")
    command = [build.compiler(), *flags, str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    return program


def random_experts(
    num_experts: int, width: int, expert_width: int, scales: tuple[int, int] = (119, 124), seed: int = 0
) -> PackedExperts:
    rng = np.random.default_rng(seed)

    def matrix(outputs: int, inputs: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        blocks = rng.integers(0, 256, (num_experts, outputs, inputs // 32, 16), np.uint8)
        bias = rng.standard_normal((num_experts, outputs), np.float32).astype(jnp.bfloat16)
        drawn = rng.integers(scales[0], scales[1] + 1, blocks.shape[:-1], np.uint8)
        return jnp.asarray(blocks), jnp.asarray(drawn), jnp.asarray(bias)

    return PackedExperts(*matrix(2 * expert_width, width), *matrix(width, expert_width))


def random_rows(rows: int, width: int, num_experts: int, seed: int = 1) -> tuple[jax.Array, jax.Array]:
    """Draw (x, router logits)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width), np.float32).astype(jnp.bfloat16)
    return jnp.asarray(x), jnp.asarray(rng.standard_normal((rows, num_experts), np.float32))


routed = jax.jit(op.routed, static_argnums=(3, 4))


def by_definition(x: jax.Array, logits: jax.Array, experts: PackedExperts, top_k: int, limit: float) -> np.ndarray:
    """Compute transformers' GPT-OSS in float64, with hidden values rounded to bfloat16 between the matrices."""
    rows, scores = np.asarray(x, np.float64), np.asarray(logits, np.float64)
    matrices = [
        dequantize(np.asarray(b), np.asarray(s)).astype(np.float64)
        for b, s in ((experts.gate_up_blocks, experts.gate_up_scales), (experts.down_blocks, experts.down_scales))
    ]
    biases = [np.asarray(bias, np.float64) for bias in (experts.gate_up_bias, experts.down_bias)]
    out = np.zeros_like(rows)
    for t in range(len(rows)):
        chosen = np.argsort(-scores[t], kind="stable")[:top_k]
        weights = np.exp(scores[t, chosen] - scores[t, chosen].max())
        for weight, e in zip(weights / weights.sum(), chosen, strict=True):
            h = matrices[0][e] @ rows[t] + biases[0][e]
            gate, up = np.minimum(h[0::2], limit), np.clip(h[1::2], -limit, limit)
            active = (gate / (1 + np.exp(-1.702 * gate)) * (up + 1)).astype(jnp.bfloat16).astype(np.float64)
            out[t] += weight * (matrices[1][e] @ active + biases[1][e])
    return out


def expect_definition(x: jax.Array, logits: jax.Array, experts: PackedExperts, top_k: int, limit: float) -> None:
    found = np.asarray(routed(x, logits, experts, top_k, limit), np.float64)
    expected = by_definition(x, logits, experts, top_k, limit)
    # the result is bfloat16, and a hidden value may round the other way
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=2**-8 * np.abs(expected).max())


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("rows", "num_experts", "top_k", "width", "expert_width"),
    [
        (1, 32, 4, 160, 96),  # ragged: blocks that do not fill a chunk, chunks that do not fill all warps
        (2, 5, 2, 32, 32),  # one block
        (7, 7, 2, 256, 32),
        (8, 40, 3, 96, 160),  # experts beyond the first word of bits
        (9, 3, 3, 64, 64),  # all rows select all experts; two tiles of rows
        (16, 6, 1, 96, 32),
        (17, 4, 2, 64, 32),
        (64, 9, 4, 64, 32),
        (3, 4, 2, 1632, 32),  # several rounds of loads in flight
        (65, 9, 3, 96, 160),  # many rows: the fewest; a panel of 64 outputs that is not filled
        (150, 2, 2, 64, 32),  # several tiles an expert
        (80, 40, 1, 1632, 32),  # a few rows an expert, or none
    ],
)
def test_the_definition(rows: int, num_experts: int, top_k: int, width: int, expert_width: int) -> None:
    experts = random_experts(num_experts, width, expert_width)
    x, logits = random_rows(rows, width, num_experts)
    expect_definition(x, logits, experts, top_k, 0.9)  # a limit that clamps some values
    assert (
        np.abs(by_definition(x, logits, experts, top_k, 0.9) - by_definition(x, logits, experts, top_k, 1e9)).max()
        > 0.05
    )


@pytest.mark.usefixtures("opened")
def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    """So verification computes decoding's bits, and so does the prefill of a prompt."""
    experts = random_experts(5, 160, 32)
    x, logits = random_rows(170, 160, 5)
    picked = (0, 6, 7, 8, 15, 16, 32)
    alone = {t: np.asarray(routed(x[t : t + 1], logits[t : t + 1], experts, 2, 7.0))[0] for t in picked}
    for rows in (8, 9, 17, 33, 170):  # tiles of one product, two, four and eight; many rows
        found = np.asarray(routed(x[:rows], logits[:rows], experts, 2, 7.0))
        for t in picked:
            if t < rows:
                np.testing.assert_array_equal(found[t], alone[t])


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize("rows", [6, 70])
def test_inactive_rows_are_zero_and_change_no_others_bits(rows: int) -> None:
    experts = random_experts(5, 64, 32)
    x, logits = random_rows(rows, 64, 5)
    active = np.arange(rows) % 3 != 1
    positions = jnp.asarray(np.where(active, np.arange(rows), -1), jnp.int32)
    whole = np.asarray(routed(x, logits, experts, 2, 7.0))
    nan = jnp.where(active[:, None], logits, jnp.nan)
    found = np.asarray(routed(x, nan, experts, 2, 7.0, positions))
    np.testing.assert_array_equal(found[active], whole[active])
    assert not found[~active].any()


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize("same", [True, False])
def test_all_rows_select_the_same_experts_or_all_different_ones(same: bool) -> None:
    experts = random_experts(32, 64, 32)
    x, logits = random_rows(8, 64, 32)
    owner = np.zeros(8, int) if same else np.arange(8)
    favours = (np.arange(32)[None, :] // 4 == owner[:, None]) * np.float32(50)
    expect_definition(x, logits + favours, experts, 4, 7.0)


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize("scale", [0, 1, 60, 127, 128, 129, 140, 200])
def test_extreme_scales(scale: int) -> None:
    """Codes of every scale are exact: if biases alone make the hidden values, outputs are powers of two times sums."""
    experts = random_experts(3, 64, 32, (scale, scale))
    zeros = jnp.zeros_like(experts.gate_up_blocks)
    experts = experts.replace(gate_up_blocks=zeros, down_bias=jnp.zeros_like(experts.down_bias))  # type: ignore[attr-defined]
    x, logits = random_rows(2, 64, 3)
    found = np.asarray(routed(x, logits, experts, 1, 7.0), np.float64)
    expected = by_definition(x, logits, experts, 1, 7.0)
    # outside of the kernels XLA on CPU flushes denormal numbers to zero
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=max(2.0**-125, 2**-8 * np.abs(expected).max()))
    assert np.abs(expected).max() > 0


@pytest.mark.usefixtures("opened")
def test_large_and_small_scales_side_by_side() -> None:
    experts = random_experts(3, 256, 64, (115, 131))
    x, logits = random_rows(5, 256, 3)
    expect_definition(x * jnp.asarray(0.01, jnp.bfloat16), logits, experts, 2, 7.0)


@pytest.mark.usefixtures("opened")
def test_the_check_finds_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    right = calls.experts

    def wrong(*operands: Any, limit: float) -> jax.Array:
        return right(*operands, limit=limit).at[-1, -1, -1].multiply(1.5)

    monkeypatch.setattr(calls, "experts", wrong)
    with pytest.raises(cuda.CudaError, match="fail their check"):
        check(tiles=False)


@pytest.mark.usefixtures("opened")
def test_shapes_that_do_not_fit_are_refused() -> None:
    experts = random_experts(4, 64, 32)
    x, logits = random_rows(4097, 64, 4)
    with pytest.raises(jax.errors.JaxRuntimeError, match="up to 4096 rows"):
        jax.block_until_ready(routed(x, logits, experts, 2, 7.0))
    cut = experts.replace(down_scales=experts.down_scales[:, :-1])  # type: ignore[attr-defined]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"down_scales \[4, 63, 1\] is not U8"):
        jax.block_until_ready(routed(x[:2], logits[:2], cut, 2, 7.0))


def test_a_driver_that_refuses_is_an_error(libraries: tuple[Path, Path]) -> None:
    launcher, driver = libraries
    cuda.open_kernels(launcher, str(driver), b"refuse", "cpu", tiles=False)
    x, logits = random_rows(1, 64, 4)
    with pytest.raises(jax.errors.JaxRuntimeError, match="this driver is a test's"):
        jax.block_until_ready(routed(x, logits, random_experts(4, 64, 32), 2, 7.0))
    with pytest.raises(cuda.CudaError, match="no_such_driver"):
        cuda.open_kernels(launcher, "no_such_driver.so", b"", "cpu", tiles=False)
    with pytest.raises(cuda.CudaError, match=r"python -m peagle\.ops\.native"):
        cuda.open_kernels(launcher.with_name("none.so"), str(driver), b"", "cpu", tiles=False)


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


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("dtype", "rows", "runs"),
    [
        ("bfloat16", 2, True),
        ("float32", 2, False),
        ("bfloat16", 17, True),
        ("bfloat16", 65, True),
        ("bfloat16", 4097, False),
        ("float32", 17, False),
    ],
)
def test_what_a_gpu_runs(monkeypatch: pytest.MonkeyPatch, dtype: str, rows: int, runs: bool) -> None:
    """The kernels if they take the operands, XLA's code otherwise; both agree."""
    monkeypatch.setattr(cuda, "status", lambda: (True, "CUDA"))
    experts = jax.tree.map(
        lambda leaf: leaf if leaf.dtype == jnp.uint8 else leaf.astype(dtype), random_experts(4, 64, 32)
    )
    x, logits = random_rows(rows, 64, 4)
    x = x.astype(dtype)
    on_gpu = functools.partial(api._on_gpu, first=None, top_k=2, limit=7.0, dtype=None, positions=None)
    chosen = jax.jit(functools.partial(on_gpu, implementation=None))
    without = jax.jit(functools.partial(on_gpu, implementation="xla"))
    assert ("peagle_cuda_experts" in chosen.lower(x, logits, experts).as_text()) == runs
    assert "peagle_cuda_experts" not in without.lower(x, logits, experts).as_text()
    plain = jax.jit(reference.all_pairs, static_argnums=(3, 4))(x, logits, experts, 2, 7.0)
    close = np.abs(np.asarray(plain, np.float32)).max() * 2**-6
    np.testing.assert_allclose(
        np.asarray(chosen(x, logits, experts), np.float32), np.asarray(plain, np.float32), atol=close
    )


@pytest.mark.skipif(sys.platform != "linux", reason="JAX has CUDA on Linux")
def test_the_launcher_is_compiled_with_the_package() -> None:
    """For a GPU's streams; it opens without a GPU, and looks for the driver."""
    with pytest.raises(cuda.CudaError, match="no_such_driver"):
        cuda.open_kernels(build.LAUNCHER, "no_such_driver.so", b"", "CUDA", tiles=False)


def test_without_cuda_there_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "system", lambda: "Darwin")
    assert build.build_launcher() == []


def test_the_line_names_the_devices_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.in_words() == native.status()[1]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cuda, "status", lambda: (True, "CUDA, compute capability 9.0"))
    assert kernels.in_words() == "CUDA, compute capability 9.0"


@pytest.fixture
def fresh_status() -> Iterator[None]:
    cuda.status.cache_clear()
    yield
    cuda.status.cache_clear()


@pytest.mark.usefixtures("fresh_status")
def test_status_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda.status() == (False, "XLA: the GPU kernels are for NVIDIA GPUs, this is cpu")
    monkeypatch.setenv(native.VARIABLE, native.XLA)
    cuda.status.cache_clear()
    assert cuda.status() == (False, "XLA (PEAGLE_KERNELS=xla)")


@pytest.mark.usefixtures("fresh_status")
@pytest.mark.parametrize(
    ("capability", "why"),
    [
        ("7.5", "need compute capability 8.0 or more, this GPU's is 7.5"),
        ("8.9", "NVRTC for sm_89: not today"),
        ("9.0", "NVRTC for sm_90a: not today"),
    ],
)
def test_a_gpu_that_is_too_old_or_has_no_compiler(monkeypatch: pytest.MonkeyPatch, capability: str, why: str) -> None:
    class Device:
        compute_capability = capability

    def refuse(architecture: str) -> bytes:
        raise cuda.CudaError(f"NVRTC for {architecture}: not today")

    monkeypatch.setattr(cuda, "compile_kernels", refuse)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    runs, line = cuda.status()
    assert not runs
    assert line.startswith("XLA: ")
    assert why in line


@pytest.mark.usefixtures("fresh_status")
def test_a_gpu_whose_kernels_pass(monkeypatch: pytest.MonkeyPatch, libraries: tuple[Path, Path]) -> None:
    launcher, driver = libraries
    open_kernels = cuda.open_kernels
    monkeypatch.setattr(cuda, "compile_kernels", lambda architecture: architecture.encode())
    opened = functools.partial(open_kernels, launcher, str(driver))
    monkeypatch.setattr(cuda, "open_kernels", lambda *given, tiles: opened(given[2], "cpu", tiles=tiles))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cuda, "_capability", lambda: "8.9")
    assert jax.jit(lambda x: x if cuda.available() else -x)(1) == 1  # first called while a program is traced
    assert cuda.status() == (True, "CUDA, compute capability 8.9")


needs_nvrtc = pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's compiler is for Linux and Windows")


@needs_nvrtc
def test_nvrtc_compiles_the_source_and_the_result_is_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For the oldest architecture: the source asks for none, so newer ones compile the same."""
    architecture = "sm_80"
    assert b"__CUDA_ARCH__" not in nvrtc.sources(architecture)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = nvrtc.compile_kernels(architecture)
    assert made[:4] == b"\x7fELF"
    (kept,) = (tmp_path / "cache" / "peagle" / "cuda").iterdir()
    assert kept.read_bytes() == made

    def unwanted(*_: Any) -> bytes:
        raise AssertionError("compiled again")

    compiling = nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", unwanted)
    assert nvrtc.compile_kernels(architecture) == made
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, b"--no-such-option"))  # other options compile anew
    with pytest.raises(AssertionError, match="compiled again"):
        nvrtc.compile_kernels(architecture)
    monkeypatch.setattr(nvrtc, "_compile", compiling)
    with pytest.raises(cuda.CudaError, match="NVRTC for sm_"):
        nvrtc.compile_kernels(architecture)


@needs_nvrtc
def test_nvrtcs_errors_are_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in nvrtc.NAMES:
        source = (nvrtc.HERE / name).read_text()
        (tmp_path / name).write_text(source.replace("fminf(", "fminimum(") if name == "experts.cu" else source)
    monkeypatch.setattr(nvrtc, "HERE", tmp_path)
    with pytest.raises(cuda.CudaError, match=r'NVRTC for sm_90: experts\.cu\(\d+\): error: .*"fminimum" is undefined'):
        nvrtc.compile_kernels("sm_90")
    with pytest.raises(cuda.CudaError, match=r"NVRTC for sm_1: .*architecture"):
        nvrtc.compile_kernels("sm_1")
