"""The engines of a comparison: their workers, their Pythons, and the storage of their weights."""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from peagle.measure.bench import WeightBytes
from peagle.ops.strict_json import dumps
from peagle.workflows.random_checkpoint import EAGLE_3, P_EAGLE
from scripts.peers.remote import Child
from target.config import TargetConfig
from target.dialects import tensor_shapes

OURS, VLLM = "peagle", "vllm"
NAMES = (OURS, "peagle-xla", "transformers-bf16", "transformers-fp32", VLLM)
DEFAULT = tuple(name for name in NAMES if name != "peagle-xla")
DRAFTERS = {"p-eagle": P_EAGLE, "eagle3": EAGLE_3}
CALLS = ("decode", "verify", "logits")
OUR_CALLS = (*CALLS, "decode_many", "experts")
VLLM_MEMORY = 0.9  # of a GPU, shared by all engines on it
MXFP4_BYTES = 17 / 32  # of a weight: 4 bits, and its share of its block's scale


@dataclass(frozen=True)
class Storage:
    """Bytes of a weight, in an engine's memory."""

    dense: float
    experts: float

    def weights(self, config: TargetConfig) -> WeightBytes:
        """Add up every matrix and bias except the embedding."""
        dense = experts = 0.0
        for name, shape in tensor_shapes(config, mxfp4=False).items():
            if ".experts." in name:
                experts += float(np.prod(shape)) * (self.experts if len(shape) == 3 else self.dense)
            elif "embed_tokens" not in name:
                dense += float(np.prod(shape)) * self.dense
        return WeightBytes(round(dense), round(experts), config.num_experts, config.top_k)


@dataclass(frozen=True)
class Entry:
    """One engine for one checkpoint."""

    name: str
    kind: str  # a key of worker.KINDS
    options: Mapping[str, Any]  # of its load()
    python: str
    storage: Storage
    weights: str  # describes the storage
    calls: tuple[str, ...]  # of worker.Engine
    ours: str = OURS  # the engine of ours that it is compared with

    def start(self) -> Child:
        """Load it in a process of its own. Raises InputError."""
        return start(self.name, self.python, self.kind, self.options)


def start(name: str, python: str, kind: str, options: Mapping[str, Any]) -> Child:
    """Load a worker's engine in a process of its own. Raises InputError."""
    return Child(name, [python, "-m", "scripts.peers.worker", kind, dumps(dict(options))])


@dataclass(frozen=True)
class Site:
    """A checkpoint, and the settings of its engines."""

    checkpoint: Path
    mxfp4: bool
    scratch: Path
    context: int
    num_threads: int
    vllm_python: str = ""
    requests: int = 1  # most decoded together
    gpu: bool = False  # engines compute on it, in bfloat16
    num_on_gpu: int = 1  # engines at once

    @property
    def unquantised(self) -> Path:
        """The checkpoint's copy in bfloat16, for vLLM, which runs MXFP4 on GPUs alone."""
        return self.scratch / "unquantised"


def unavailable(name: str, vllm_python: str | None) -> str | None:
    """Say why an engine cannot be compared here; None if it can."""
    if name.startswith(OURS):
        return None
    if name == VLLM:
        return cannot_run("--vllm-python", vllm_python, "vllm")
    if absent := [module for module in ("torch", "transformers") if importlib.util.find_spec(module) is None]:
        return f"{absent[0]} is not installed"
    if jax.default_backend() == "gpu":
        command = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return "torch has no CUDA here"
    return None


def cannot_run(option: str, python: str | None, module: str) -> str | None:
    """Say why the Python that an option names cannot run a peer's module; None if it can."""
    if python is None:
        return f"no {option} was given"
    if shutil.which(python) is None:
        return f"there is no such program as {option} names"
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if subprocess.run([python, "-c", find], capture_output=True, check=False).returncode:
        return f"the Python that {option} names has no {module}"
    return None


def entry(name: str, site: Site) -> Entry:
    """Make the entry of an engine (one of NAMES) for a checkpoint."""
    directory = str(site.checkpoint.resolve())
    experts = MXFP4_BYTES if site.mxfp4 else 2.0
    as_stored = Storage(2, experts), "bfloat16, MXFP4 experts" if site.mxfp4 else "bfloat16"
    kind, _, variant = name.partition("-")
    if name == VLLM:
        weights = as_stored if site.gpu else (Storage(2, 2), "bfloat16")
        return Entry(name, VLLM, _vllm_options(site), site.vllm_python, *weights, ("decode", "decode_many"))
    if kind == OURS:
        kept = (Storage(4, 4), "float32") if variant and not site.gpu else as_stored
        return Entry(name, OURS, _our_options(directory, variant, site), sys.executable, *kept, OUR_CALLS)
    dtype, size = {"bf16": ("bfloat16", 2), "fp32": ("float32", 4)}[variant]
    options = {"directory": directory, "dtype": dtype, "mxfp4": site.mxfp4, "num_threads": site.num_threads}
    options |= {"device": "cuda" if site.gpu else "cpu"}
    return Entry(name, "transformers", options, sys.executable, Storage(size, size), dtype, CALLS)


def naming_experts(site: Site) -> Entry:
    """Make the entry of VLLM, alone on a GPU, that says which experts its rows use."""
    plain = entry(VLLM, replace(site, num_on_gpu=1))
    return replace(plain, options={**plain.options, "names_experts": True}, calls=("experts",))


def drafting(name: str, drafter: str, directory: Path, k: int, site: Site) -> Entry:
    """Make the entry of OURS or VLLM that decodes with K drafts. directory: the drafter's (a key of DRAFTERS)."""
    plain = entry(name, site)
    options = {**plain.options, "drafter": str(directory), "num_drafts": k}
    if name == VLLM:
        options["parallel"] = DRAFTERS[drafter].kind == "P-EAGLE"
    ours = f"{OURS}, {drafter}"
    return replace(plain, name=f"{name}, {drafter}", options=options, calls=("speculate",), ours=ours)


def _our_options(directory: str, variant: str, site: Site) -> dict[str, Any]:
    kernels = variant or ("auto" if site.gpu else "native")
    return {"directory": directory, "kernels": kernels, "dtype": "bfloat16" if site.gpu else "float32"}


def _vllm_options(site: Site) -> dict[str, Any]:
    on_gpu = {"gpu_memory_frac": VLLM_MEMORY / site.num_on_gpu} if site.gpu else {}
    return {
        "target": str((site.checkpoint if site.gpu else site.unquantised).resolve()),
        "dtype": "bfloat16",
        "max_positions": site.context,
        "max_requests": site.requests,
        **on_gpu,
    }


def reference(site: Site) -> Entry:
    """Make the reference's entry: this project on XLA in float32, experts dequantised."""
    plain = entry("peagle-xla", site)
    return replace(plain, options={**plain.options, "dtype": "float32"})
