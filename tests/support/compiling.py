"""How XLA compiles the programs under test. Half of the suite's time is compiling, and most of that the optimising:
asserted is what programs say, not how fast they say it. That a row's bits are its own is asserted of whole models as
they are compiled for users."""

import importlib.metadata
import os
import sys
from pathlib import Path

# what an earlier run, or the worker beside this one, compiled is read back
COMPILED = Path(__file__).parents[2] / ".pytest_cache" / "jax"
MOST_BYTES = 1 << 30

# each of the 32 parts into which LLVM gets a program costs as much as a small program
QUICKLY: dict[str, int | bool] = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
AS_FOR_USERS: dict[str, int | bool] = {"xla_backend_optimization_level": 3, "xla_cpu_parallel_codegen_split_count": 32}

if importlib.metadata.version("jaxlib").startswith("0.10."):  # the newer line has but one way to compile fusions
    QUICKLY["xla_cpu_use_fusion_emitters"] = False
    AS_FOR_USERS["xla_cpu_use_fusion_emitters"] = True

FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICKLY.items())

# the suite starts some 60 processes, and each would compile the package's source again
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
