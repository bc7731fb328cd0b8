"""Measure the peak memory of loading a checkpoint and decoding, compared with the size of weights and caches.

    python -m scripts.bench memory TARGET
    JAX_NUM_CPU_DEVICES=4 python -m scripts.bench memory TARGET --mesh tp=4

It counts anonymous pages (RssAnon): the system can reclaim pages of mapped files. Over a mesh of devices it
measures only loading; on CPU the devices share one memory. Prints JSON, in bytes. Linux only.
"""

import argparse
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from peagle.base.errors import InputError
from peagle.base.strict_json import dumps
from peagle.config import read_prefill_chunk
from peagle.engine.request import Request
from peagle.loading.load import load
from scripts.runs import expect_least, origin

STATUS = Path("/proc/self/status")
NEW_TOKENS = 3
INTERVAL_S = 0.001


class Peak:
    """A context that measures the peak anonymous memory of this process."""

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Peak":
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()
        self.bytes = max(self.bytes, anonymous_bytes())  # the thread may never have run

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self.bytes = max(self.bytes, anonymous_bytes())


def anonymous_bytes() -> int:
    """Read the anonymous memory of this process. Raises InputError off Linux."""
    if not STATUS.exists():
        raise InputError(f"{STATUS} does not exist: this needs Linux")
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def measure(
    directory: str, kernels: str, prompt_tokens: int, prefill_chunk: int | Literal["all"] | None, mesh: str | None
) -> dict[str, int | float]:
    """Measure bytes of weights and caches, and the peaks of loading and decoding.

    mesh: load over these devices, and decode nothing.
    """
    jax.numpy.zeros(1).block_until_ready()
    before = anonymous_bytes()
    started = time.perf_counter()
    with Peak() as loading:
        pair = load(directory, None, experts="packed", kernels=kernels, mesh=mesh)  # type: ignore[arg-type]
    loaded = time.perf_counter()
    figures = {
        "weights": sum(leaf.nbytes for leaf in jax.tree.leaves(pair.target)),
        "loading": loading.bytes - before,
        "loading_s": round(loaded - started, 2),
    }
    if mesh is not None:
        return figures
    prompt = np.random.default_rng(0).integers(0, pair.target.vocab_size, prompt_tokens).tolist()
    request = Request(tuple(prompt), NEW_TOKENS, stop_token_ids=())
    with Peak() as decoding:
        engine = pair.engine(pair.engine_config(0, context=pair.capacity([request]), prefill_chunk=prefill_chunk))
        chunks = [chunk for _, chunk in engine.generate([request])]
    return {
        **figures,
        "caches": sum(engine.memory_bytes()[:2]),
        "decoding": decoding.bytes - before,
        "decoding_s": round(chunks[-1].time_s - loaded, 2),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="directory of an MXFP4 checkpoint")
    parser.add_argument("--kernels", choices=("auto", "native", "xla"), default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=3, help="before those decoded (default %(default)s)")
    parser.add_argument("--mesh", help="load over these devices, as tp=4, and decode nothing")
    parser.add_argument("--prefill-chunk", type=read_prefill_chunk, help="prompt tokens per pass, or all")


def run(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Measure, and print JSON."""
    expect_least(1, options, "prompt_tokens")
    figures = measure(options.target, options.kernels, options.prompt_tokens, options.prefill_chunk, options.mesh)
    print(dumps({**figures, "provenance": origin("scripts.bench", typed)}, indent=1))
    return 0
