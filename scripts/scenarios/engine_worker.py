"""The child's side of the scenario `engine`: measure one model on the engine of the imported checkout.

PYTHONPATH=CHECKOUT python scripts/scenarios/engine_worker.py TARGET DRAFTER
"""

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import peagle
from peagle.engine.request import Request


class Measured:
    """The measurements of one pair, in seconds. The first call of each compiles, outside its time."""

    def __init__(self, target: str, drafter: str) -> None:
        self._pair = peagle.load() if target == "demo" else peagle.load(target, drafter or None)
        self._vocab_size = self._pair.plain_target.vocab_size
        self._num_turns = 0

    def describe(self) -> dict[str, Any]:
        return {"kernels": self._pair.loaded.kernels}

    def one(self, slots: int, k: int, prompt: int, new: int) -> dict[str, float]:
        """Decode one request in an engine of several slots: tokens a second after the first one."""
        _, first_s, total_s, count = self._run(self._engine(slots, k, prompt + new + 64), [(prompt, new)])
        return {"tok_per_s": (count - 1) / (total_s - first_s)}

    def many(self, requests: int, k: int, prompt: int, new: int) -> dict[str, float]:
        """Decode equal requests at once: tokens a second, and the time until all have a token."""
        engine = self._engine(requests, k, prompt + new + 64)
        last_s, _, total_s, count = self._run(engine, [(prompt, new)] * requests)
        return {"tok_per_s": count / total_s, "last_first_token_s": last_s}

    def prompt(self, tokens: int) -> dict[str, float]:
        """Read one prompt: time to its first token."""
        _, first_s, _, _ = self._run(self._engine(1, 0, tokens + 64), [(tokens, 2)])
        return {"ttft_s": first_s}

    def turn(self, history: int, question: int) -> dict[str, float]:
        """Answer a second turn after a first one: time to its first token."""
        engine = self._engine(1, 0, history + 2 * question, prefix_cache=1 << 28)
        self._num_turns += 1
        first = self._prompt(history, 1000 + self._num_turns)  # other tokens than those of the rounds before
        list(engine.generate([Request(first, 2, stop_token_ids=())]))
        started = time.perf_counter()
        chunks = engine.generate([Request(first + self._prompt(question, 0), 2, stop_token_ids=())])
        next(iter(chunks))
        seconds = time.perf_counter() - started
        list(chunks)
        return {"ttft_s": seconds}

    def arrivals(self, requests: int, slots: int, prompt: int, new: int, long: int, load: float) -> dict[str, float]:
        """Decode requests that arrive at `load` times the throughput, with and without a long one.

        Returns the 99th percentile of the others' inter-token latency, and the long prompt's ttft.
        """
        engine = self._engine(slots, 0, long + new + 64)
        shapes = [(prompt, new)] * requests
        _, _, closed_s, _ = self._run(engine, shapes)
        self._num_turns += 1
        rng = np.random.default_rng(self._num_turns)
        due = np.cumsum(rng.exponential(closed_s / (load * requests), requests)).tolist()
        figures = {}
        for name, extra in (("itl_p99_alone_s", []), ("itl_p99_s", [((long, new), due[requests // 3])])):
            times, due_s = self._play(engine, [*zip(shapes, due, strict=True), *extra])
            waits = np.concatenate([np.diff(arrived) for arrived in times[:requests]])
            figures[name] = float(np.quantile(waits, 0.99))
            if extra:
                figures["ttft_s"] = times[requests][0] - due_s[requests]
        return figures

    def memory(self, requests: int, least: int, most: int, new: int, frac: float | None) -> dict[str, float]:
        """Decode requests of several lengths with kv memory for `frac` of all contexts, or for as many as fit."""
        lengths = np.exp(np.random.default_rng(1).uniform(np.log(least), np.log(most), requests)).astype(int)
        engine = self._engine(requests, 0, most + 64)
        if frac is not None:
            token_bytes = sum(engine.memory.num_bytes) / engine.page_use.num_tokens
            engine = self._engine(requests, 0, most + 64, kv_memory=int(frac * token_bytes * lengths.sum()))
        _, _, total_s, count = self._run(engine, [(int(length) - new, new) for length in lengths])
        return {"tok_per_s": count / total_s}

    def warm_up(self, slots: int, k: int, context: int) -> dict[str, float]:
        """Return the seconds that the first engine of this shape took to compile."""
        return {"warm_up_s": self._engine(slots, k, context, prefix_cache=1 << 20).compile_s}

    def _engine(self, slots: int, k: int, context: int, **options: Any) -> Any:
        options = {"context": context, "prefix_cache": 0, **options}
        engine = self._pair.engine(self._pair.engine_config(k, slots=slots, **options))
        engine.warm_up()
        return engine

    def _prompt(self, length: int, seed: int) -> tuple[int, ...]:
        return tuple(np.random.default_rng(seed).integers(5, self._vocab_size - 5, length).tolist())

    def _play(
        self, engine: Any, arrivals: list[tuple[tuple[int, int], float]]
    ) -> tuple[list[list[float]], list[float]]:
        """Add requests when they are due; return the arrivals of their tokens, and their due times."""
        waiting = sorted(range(len(arrivals)), key=lambda index: arrivals[index][1])
        times: list[list[float]] = [[] for _ in arrivals]
        indices: dict[Any, int] = {}
        started = time.perf_counter()

        def add_due() -> None:
            while waiting and arrivals[waiting[0]][1] <= time.perf_counter() - started:
                index = waiting.pop(0)
                (prompt, new), _ = arrivals[index]
                request = Request(self._prompt(prompt, index), new, stop_token_ids=(), index=index)
                indices[engine.add(request)] = index

        while waiting:
            time.sleep(max(0.0, arrivals[waiting[0]][1] - (time.perf_counter() - started)))
            add_due()
            for handle, chunk in engine.run(indices):
                if chunk.token_ids:
                    times[indices[handle]].append(chunk.time_s)
                add_due()
        engine.settle()
        return times, [started + due for _, due in arrivals]

    def _run(self, engine: Any, shapes: list[tuple[int, int]]) -> tuple[float, float, float, int]:
        """Decode requests; return (seconds to all and any first tokens, to the end; tokens)."""
        requests = [
            Request(self._prompt(prompt, index), new, stop_token_ids=(), index=index)
            for index, (prompt, new) in enumerate(shapes)
        ]
        first: dict[int, float] = {}
        started, count = time.perf_counter(), 0
        for index, chunk in engine.generate(requests):
            first.setdefault(index, time.perf_counter() - started)
            count += len(chunk.token_ids)
        return max(first.values()), min(first.values()), time.perf_counter() - started, count


def _server() -> Any:
    """Load worker.py by its path: the imported checkout may have an older one."""
    path = Path(__file__).parents[1] / "peers" / "worker.py"
    spec = importlib.util.spec_from_file_location("worker", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(_server().serve(lambda: Measured(*sys.argv[1:])))
