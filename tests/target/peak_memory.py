"""Measure the peak memory of loading a checkpoint and decoding: python -m tests.target.peak_memory DIR KERNELS [MESH].

It counts anonymous pages: the system can reclaim pages of mapped files. Over a mesh it measures only loading; on CPU
the devices share one memory. Prints JSON, in bytes. On two processors: on many, the compiler would run many threads,
each with memory of its own.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import jax

from peagle.engine.request import Request
from peagle.loading.load import load

INTERVAL_S = 0.001


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon:")).split()[1])


@contextlib.contextmanager
def peak(figures: dict[str, int], name: str, before: int) -> Iterator[None]:
    """Measure the peak memory beyond `before`."""
    highest, ended = anonymous_bytes(), threading.Event()

    def watch() -> None:
        nonlocal highest
        while not ended.wait(INTERVAL_S):
            highest = max(highest, anonymous_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield
    ended.set()
    watcher.join()
    figures[name] = max(highest, anonymous_bytes()) - before  # the thread may never have run


def main(directory: str, kernels: str, mesh: str | None = None) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    jax.numpy.zeros(1).block_until_ready()
    figures: dict[str, int] = {}
    before = anonymous_bytes()
    with peak(figures, "loading", before):
        pair = load(directory, None, experts="packed", kernels=kernels, mesh=mesh)
    figures["weights"] = sum(leaf.nbytes for leaf in jax.tree.leaves(pair.target))
    if mesh is None:
        request = Request((0, 1, 2), 3, stop_token_ids=())
        with peak(figures, "decoding", before):
            engine = pair.engine(pair.engine_config(0, context=pair.capacity([request])))
            list(engine.generate([request]))
        figures["caches"] = sum(engine.memory_bytes()[:2])
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
