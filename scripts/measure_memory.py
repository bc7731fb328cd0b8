"""Measure the peak memory of loading a checkpoint and of decoding with it, beside what its weights and caches take.

    python -m scripts.measure_memory TARGET
    JAX_NUM_CPU_DEVICES=4 python -m scripts.measure_memory TARGET --mesh tp=4

Anonymous pages are counted (RssAnon): pages of the mapped files are resident too, but the system takes them back when
it needs them. Over a mesh of devices only loading is measured; on CPU the devices share one memory. Prints JSON, in
bytes. Linux only.
"""

import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np

from peagle.engine.request import Request
from peagle.loading import load
from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps
from scripts.runs import in_one_line, new_parser, origin

STATUS = "/proc/{}/status"
NEW_TOKENS = 3
INTERVAL_S = 0.001


class Peak:
    """A context that finds the most anonymous memory of a process, this one by default, while it is open."""

    def __init__(self, pid: int | None = None) -> None:
        self.bytes = 0
        self._pid = pid
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Peak":
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()
        self.bytes = max(self.bytes, anonymous_bytes(self._pid))  # the thread may never have run

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self.bytes = max(self.bytes, anonymous_bytes(self._pid))


def anonymous_bytes(pid: int | None = None) -> int:
    """Read the anonymous memory of a process, this one by default. Raises InputError off Linux."""
    status = Path(STATUS.format(pid or "self"))
    if not status.exists():
        raise InputError(f"{status} is not there: this needs Linux")
    line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def measure(
    directory: str, kernels: str, prompt_tokens: int = 3, blocked: bool = False, mesh: str | None = None
) -> dict[str, int | float]:
    """Measure bytes of weights and caches, and the peaks of loading and decoding beyond a process without them.

    blocked: prefill the prompt at once. mesh: load over these devices, and decode nothing.
    """
    jax.numpy.zeros(1).block_until_ready()
    before = anonymous_bytes()
    started = time.perf_counter()
    with Peak() as loading:
        pair = load(directory, None, experts="packed", kernels=kernels, mesh=mesh)  # type: ignore[arg-type]
    loaded = time.perf_counter()
    found = {
        "weights": sum(leaf.nbytes for leaf in jax.tree.leaves(pair.target)),
        "loading": loading.bytes - before,
        "loading_s": round(loaded - started, 2),
    }
    if mesh is not None:
        return found
    prompt = np.random.default_rng(0).integers(0, pair.target.vocab_size, prompt_tokens).tolist()
    request = Request(tuple(prompt), NEW_TOKENS, stop_token_ids=())
    how = "blocked" if blocked else "chunked"
    with Peak() as decoding:
        engine = pair.engine(pair.engine_config(0, context=pair.capacity([request]), prefill=how))
        chunks = [chunk for _, chunk in engine.generate([request])]
    return {
        **found,
        "caches": sum(engine.memory_bytes()[:2]),
        "decoding": decoding.bytes - before,
        "decoding_s": round(chunks[-1].time_s - loaded, 2),
    }


def main() -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("target", help="directory of an MXFP4 checkpoint")
    parser.add_argument("--kernels", choices=("auto", "native", "xla"), default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=3, help="before those decoded (default %(default)s)")
    parser.add_argument("--mesh", help="load over these devices, as tp=4, and decode nothing")
    parser.add_argument("--prefill", choices=("chunked", "blocked"), default="chunked")
    arguments = parser.parse_args()

    def run() -> int:
        if arguments.prompt_tokens < 1:
            raise InputError(f"--prompt-tokens is {arguments.prompt_tokens}; expected 1 or more")
        blocked = arguments.prefill == "blocked"
        found = measure(arguments.target, arguments.kernels, arguments.prompt_tokens, blocked, arguments.mesh)
        print(dumps({**found, "provenance": origin("scripts.measure_memory")}, indent=1))
        return 0

    return in_one_line("measure_memory", run)


if __name__ == "__main__":
    sys.exit(main())
