"""Measure the peak memory of loading a checkpoint and decoding, compared with the size of weights and caches.

    python -m scripts.bench memory TARGET
    JAX_NUM_CPU_DEVICES=4 python -m scripts.bench memory TARGET --mesh tp=4

It counts anonymous pages (RssAnon): the system can reclaim pages of mapped files. Over a mesh of devices it
measures only loading; on CPU the devices share one memory. Prints JSON, in bytes. Linux only.
"""

import argparse
import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from peagle.base.errors import InputError
from peagle.base.strict_json import dumps
from peagle.engine.request import Request
from peagle.loading.load import load
from scripts.runs import Json, origin

STATUS = Path("/proc/self/status")
PROMPT, NEW_TOKENS = (0, 1, 2), 3
INTERVAL_S = 0.001


@contextlib.contextmanager
def peak(figures: Json, name: str, before: int) -> Iterator[None]:
    """Measure the peak anonymous memory of this process beyond `before`."""
    highest, ended = anonymous_bytes(), threading.Event()

    def watch() -> None:
        nonlocal highest
        while not ended.wait(INTERVAL_S):
            highest = max(highest, anonymous_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    figures[name] = max(highest, anonymous_bytes()) - before  # the thread may never have run


def anonymous_bytes() -> int:
    """Read the anonymous memory of this process. Raises InputError off Linux."""
    if not STATUS.exists():
        raise InputError(f"{STATUS} does not exist: this needs Linux")
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="directory of an MXFP4 checkpoint")
    parser.add_argument("--kernels", choices=("auto", "native", "xla"), default="auto")
    parser.add_argument("--mesh", help="load over these devices, as tp=4, and decode nothing")


def run(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Measure bytes of weights and caches, and the peaks of loading and decoding; print JSON."""
    jax.numpy.zeros(1).block_until_ready()
    figures: Json = {}
    before = anonymous_bytes()
    with peak(figures, "loading", before):
        pair = load(options.target, None, experts="packed", kernels=options.kernels, mesh=options.mesh)
    figures["weights"] = sum(leaf.nbytes for leaf in jax.tree.leaves(pair.target))
    if options.mesh is None:
        request = Request(PROMPT, NEW_TOKENS, stop_token_ids=())
        with peak(figures, "decoding", before):
            engine = pair.engine(pair.engine_config(0, context=pair.capacity([request])))
            list(engine.generate([request]))
        figures["caches"] = sum(engine.memory_bytes()[:2])
    print(dumps({**figures, "provenance": origin("scripts.bench", typed)}, indent=1))
    return 0
