"""The CUDA kernels on the CPU: their own sources and launcher, through the tests' driver."""

from pathlib import Path

import pytest

from peagle.ops import cuda
from peagle.ops.native import build

DRIVER = Path(__file__).parent / "driver.cc"
GPU_PRAGMAS = "-Wno-unknown-pragmas"


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Compile (the launcher for the CPU, the driver)."""
    directory = tmp_path_factory.mktemp("cuda")
    launcher = build.compile_library(directory / "launch.so", [build.CUDA / "launch.cc"], "-DPEAGLE_TEST_ON_HOST")
    return launcher, build.compile_library(
        directory / "driver.so", [DRIVER], f"-I{build.CUDA}", "-fvisibility=default", GPU_PRAGMAS
    )


@pytest.fixture
def opened(libraries: tuple[Path, Path]) -> None:
    """Open the kernels on the CPU."""
    launcher, driver = libraries
    cuda.open_kernels(launcher, str(driver), b"any image", "cpu")
