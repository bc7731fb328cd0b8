"""Peak memory of loading a checkpoint and of decoding three tokens with it, beside what its weights and caches take.

    python -m scripts.measure_memory TARGET

Counted are anonymous pages (RssAnon): pages of the mapped files are resident too, and the system takes them back when
it needs them. Prints JSON, in bytes. Linux only.
"""

import argparse
import sys
import threading
import time
from pathlib import Path

import jax

from peagle.engine.request import Request
from peagle.loading import load
from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps
from scripts.results import origin

STATUS = Path("/proc/self/status")
PROMPT, NEW_TOKENS = (1, 2, 3), 3
INTERVAL_S = 0.001


class Peak:
    """The most anonymous memory while the block runs."""

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
        self.bytes = max(self.bytes, anonymous_bytes())  # it may never have had its turn

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self.bytes = max(self.bytes, anonymous_bytes())


def anonymous_bytes() -> int:
    """Of this process, now."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def measure(directory: str, kernels: str) -> dict[str, int | float]:
    """Bytes of the weights and of caches, and what loading and decoding took at most, beyond the interpreter and its
    libraries."""
    jax.numpy.zeros(1).block_until_ready()
    before = anonymous_bytes()
    started = time.perf_counter()
    with Peak() as loading:
        pair = load(directory, None, experts="packed", kernels=kernels)  # type: ignore[arg-type]
    loaded = time.perf_counter()
    with Peak() as decoding:
        pair.generate(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    capacity = pair.capacity([Request(PROMPT, NEW_TOKENS)])
    return {
        "weights": sum(leaf.nbytes for leaf in jax.tree.leaves(pair.target.params)),
        "caches": sum(pair.engine(pair.engine_config(0, capacity=capacity)).memory_bytes()[:2]),
        "loading": loading.bytes - before,
        "decoding": decoding.bytes - before,
        "loading_s": round(loaded - started, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="directory of an MXFP4 checkpoint")
    parser.add_argument("--kernels", choices=("auto", "native", "xla"), default="auto")
    args = parser.parse_args()
    if not STATUS.exists():
        sys.exit(f"error: {STATUS} is not there: this needs Linux")
    try:
        found = measure(args.target, args.kernels)
    except InputError as error:
        sys.exit(f"error: {error}")
    typed = [Path(args.target).name, "--kernels", args.kernels]
    print(dumps({**found, "provenance": origin("scripts.measure_memory", typed)}, indent=1))


if __name__ == "__main__":
    main()
