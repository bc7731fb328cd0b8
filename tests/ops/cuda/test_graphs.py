"""CUDA graphs with loops and branches: which programs get them, and that they are tried first."""

import contextlib
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from peagle.engine.host import programs
from peagle.ops import cuda, kernels, native
from peagle.ops.cuda import CudaError, graphs
from peagle.ops.cuda.self_test import random_halves
from peagle.workflows.check import check_kernels


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the machine have a GPU whose kernels run and whose graphs were never tried."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "default_device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace()])
    monkeypatch.setattr(cuda, "status", lambda: (True, "CUDA"))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    graphs.trial.cache_clear()
    yield
    for status in (graphs.trial, native.status):  # they were asked about a GPU
        status.cache_clear()


def test_a_cpu_gets_no_options() -> None:
    assert graphs.status() == (False, "")
    assert graphs.options() is None


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_passes_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "check", lambda: None)
    options_of: list[Any] = []
    monkeypatch.setattr(jax, "jit", lambda _, **options: options_of.append(options["compiler_options"]))
    programs._compiled(abs)
    programs._compiled(abs, alone=True)
    assert options_of == [graphs.OPTIONS, programs.NO_GRAPHS]
    assert kernels.describe_kernels() == "CUDA"
    assert check_kernels().ok


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_fails_says_so_in_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA_ERROR_NOT_SUPPORTED:\nconditional nodes")

    monkeypatch.setattr(graphs, "check", fail)
    assert graphs.options() is None
    finding = check_kernels()
    says = "CUDA; the host waits at branches: CUDA_ERROR_NOT_SUPPORTED: conditional nodes"
    assert (finding.ok, finding.found) == (False, says)


@pytest.mark.usefixtures("gpu")
def test_the_users_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert graphs.options() is None
    assert "XLA_FLAGS has xla_gpu_enable_command_buffer" in kernels.describe_kernels()
    assert check_kernels().ok, "a setting chose it"


def test_the_tried_program_depends_on_its_loops_and_operands() -> None:
    """XLA on CPU ignores the options, so the check passes here; a graph that were not changed would fail it."""
    graphs.check()
    operands, program = graphs._operands(), jax.jit(graphs._program)
    results = [
        np.asarray(program(random_halves(np.random.default_rng(seed), 2, 2880), operands, np.int32(count)))
        for count in graphs.COUNTS
        for seed in (0, 1)
    ]
    assert all(np.isfinite(result.astype(np.float32)).all() for result in results)
    for i, result in enumerate(results):
        assert not any(np.array_equal(result, other) for other in results[:i])


def test_another_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right, jit = graphs._program, jax.jit
    wrong = jit(lambda x, operands, count: right(x, operands, count - 1))
    monkeypatch.setattr(jax, "jit", lambda function, **options: wrong if options else jit(function))
    with pytest.raises(CudaError, match="a loop of 1 turns in a CUDA graph gives another result"):
        graphs.check()
