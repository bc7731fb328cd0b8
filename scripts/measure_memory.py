"""Measure the peak memory of loading a checkpoint and of decoding with it, beside what its weights and caches take.

    python -m scripts.measure_memory TARGET

Anonymous pages are counted (RssAnon): pages of the mapped files are resident too, but the system takes them back when
it needs them. Prints JSON, in bytes. Linux only.
"""

import sys
import threading
import time
from pathlib import Path

import jax

from peagle.engine.request import Request
from peagle.loading import load
from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps
from scripts.runs import in_one_line, new_parser, origin

STATUS = Path("/proc/self/status")
PROMPT, NEW_TOKENS = (1, 2, 3), 3
INTERVAL_S = 0.001


class Peak:
    """A context that finds the most anonymous memory while it is open."""

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
    """Read the anonymous memory of this process."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def measure(directory: str, kernels: str) -> dict[str, int | float]:
    """Measure bytes of weights and caches, and the peaks of loading and decoding beyond a process without them."""
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


def main() -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("target", help="directory of an MXFP4 checkpoint")
    parser.add_argument("--kernels", choices=("auto", "native", "xla"), default="auto")
    arguments = parser.parse_args()

    def run() -> int:
        if not STATUS.exists():
            raise InputError(f"{STATUS} is not there: this needs Linux")
        found = measure(arguments.target, arguments.kernels)
        print(dumps({**found, "provenance": origin("scripts.measure_memory")}, indent=1))
        return 0

    return in_one_line("measure_memory", run)


if __name__ == "__main__":
    sys.exit(main())
