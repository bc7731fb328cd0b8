"""This project's engine in a comparison: the shipped loop for decoding, the shipped verify pass for v(T)."""

import contextlib
import functools
import time
import unittest.mock
from collections.abc import Generator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import peagle
from peagle.config import DEFAULT_CHUNK
from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.request import Request, TokenChunk
from peagle.measure.bench import BenchOptions, prefill, time_steps
from peagle.measure.provenance import version_of
from peagle.ops.expert_matmul import expert_block
from peagle.ops.linear import linear
from peagle.ops.norm import Norm
from peagle.pair import Pair
from peagle.protocols import PyTree
from target.model import GptOss

MOST_PASSES = 256  # of one program, whose count is an operand: each width compiles once


def load(
    directory: str,
    kernels: Literal["auto", "native", "xla"],
    dtype: Literal["float32", "bfloat16"],
    drafter: str | None = None,
    num_drafts: int = 0,
) -> "Ours":
    """Load a checkpoint, with a drafter or without. Raises InputError if these kernels do not run."""
    if dtype == "float32" and jax.default_backend() == "gpu":  # the reference; a process has one engine
        jax.config.update("jax_default_matmul_precision", "highest")  # not TF32
    return Ours(peagle.load(directory, drafter, kernels=kernels, dtype=dtype), num_drafts)


class Ours:
    """See worker.Engine."""

    def __init__(self, pair: Pair, num_drafts: int = 0) -> None:
        self._pair, self._num_drafts = pair, num_drafts
        self._target = pair.plain_target

    def describe(self) -> dict[str, Any]:
        loaded = self._pair.loaded
        return {
            "version": f"peagle {version_of('peagle') or 'not installed'}",
            "computes": f"{loaded.kernels}; {loaded.dtype} activations; experts {loaded.experts}",
        }

    def prepare(self, prompt_ids: list[int], widths: list[int]) -> dict[str, Any]:
        for width in widths:
            self.verify(prompt_ids, [[0] * width])
        return {}

    def decode(self, prompt_ids: list[int], num_tokens: int) -> dict[str, Any]:
        request = Request(tuple(prompt_ids), num_tokens, stop_token_ids=())
        engine = self._engine([request])
        started = time.perf_counter()
        chunks = [chunk for _, chunk in engine.generate([request])]
        first_s, ended_s = chunks[0].time_s, chunks[-1].time_s
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        return {"prefill_s": first_s - started, "decode_s": ended_s - first_s, "token_ids": tokens}

    def decode_many(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """See worker.BatchingEngine. Prefill alternates with steps of earlier requests."""
        budget = budget_of_many(len(prompts), max(map(len, prompts)), num_tokens, self._pair.steps_per_dispatch)
        requests = [Request(tuple(prompt_ids), budget, stop_token_ids=()) for prompt_ids in prompts]
        engine = self._engine(requests)
        token_ids: list[list[int]] = [[] for _ in requests]

        def collected() -> Generator[tuple[int, TokenChunk], None, None]:
            chunks = engine.generate(requests)
            assert isinstance(chunks, Generator)
            with contextlib.closing(chunks):
                for index, chunk in chunks:
                    token_ids[index] += chunk.token_ids
                    yield index, chunk

        decode_s = time_steps(collected(), len(requests), num_tokens - 1)
        return {"decode_s": decode_s, "token_ids": token_ids}

    def speculate(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """See worker.SpeculativeEngine. decode_s: of all tokens, less that of one token of each request."""

        def requests_of(budget: int) -> list[Request]:
            return [Request(tuple(prompt_ids), budget, stop_token_ids=()) for prompt_ids in prompts]

        engine = self._engine(requests_of(num_tokens), self._num_drafts)

        def timed(budget: int) -> tuple[float, int]:
            """Return (seconds, steps of all requests)."""
            requests, started = requests_of(budget), time.perf_counter()
            steps = sum(len(chunk.steps) for _, chunk in engine.generate(requests))
            return time.perf_counter() - started, steps

        timed(1)  # the pages' first use takes longer
        prefill_s, _ = timed(1)
        whole_s, steps = timed(num_tokens)
        return {"decode_s": whole_s - prefill_s, "steps": steps / len(prompts)}

    def experts(self, prompts: list[list[int]]) -> dict[str, Any]:
        """See worker.RoutingEngine."""
        chosen = []
        for prompt_ids in prompts:
            length = len(prompt_ids)
            positions = np.arange(length, dtype=np.int32)[None]
            caches = self._target.init_cache(1, length, length)
            ids = _experts_of_last(self._target, np.asarray([prompt_ids], np.int32), positions, caches)
            chosen.append(np.asarray(ids).tolist())
        return {"chosen": chosen}

    def _engine(self, requests: Sequence[Request], num_drafts: int = 0) -> AnyEngine:
        """Make an engine with a slot for each request, ready to decode."""
        context = self._pair.capacity(requests)
        engine = self._pair.engine(self._pair.engine_config(num_drafts, slots=len(requests), context=context))
        engine.warm_up()
        return engine

    def verify(self, prompt_ids: list[int], passes: list[list[int]]) -> dict[str, Any]:
        """See worker.Engine."""
        width, length = len(passes[0]), len(prompt_ids)
        token_ids = np.zeros((MOST_PASSES, 1, width), np.int32)
        token_ids[: len(passes), 0] = passes
        positions = np.arange(length, length + width, dtype=np.int32)[None]
        caches = prefilled(self._target, prompt_ids, length + width, width)
        caches, _ = jax.block_until_ready(_passes(self._target, token_ids, 1, positions, caches))
        started = time.perf_counter()
        jax.block_until_ready(_passes(self._target, token_ids, len(passes), positions, caches))
        return {"pass_s": (time.perf_counter() - started) / len(passes)}

    def logits(self, prompt_ids: list[int], passes: list[list[int]], path: str) -> dict[str, Any]:
        """See worker.Engine."""
        target = self._target
        length, widest = len(prompt_ids), max(map(len, passes))
        caches = prefilled(target, prompt_ids, length + sum(map(len, passes)), widest)
        rows = []
        for token_ids in passes:
            positions = np.arange(length, length + len(token_ids), dtype=np.int32)[None]
            logits, caches = _extend(target, np.asarray([token_ids], np.int32), positions, caches)
            rows.append(np.asarray(logits[0], np.float32))
            length += len(token_ids)
        np.save(path, np.concatenate(rows))
        return {}


def budget_of_many(num_requests: int, prompt_tokens: int, num_tokens: int, steps_per_dispatch: int) -> int:
    """Compute the budget of `decode_many`, so that no request ends before the timed steps."""
    options = BenchOptions((), (num_tokens - 1,), (), prompt_tokens, (num_requests,))
    (case,) = options.cases
    return options.budget(case, steps_per_dispatch)


def prefilled(target: GptOss, prompt_ids: list[int], room: int, widest: int) -> PyTree:
    """Prefill a prompt into caches of `room` tokens, for passes of `widest` rows."""
    return prefill(target, np.asarray([prompt_ids], np.int32), room, min(DEFAULT_CHUNK, len(prompt_ids)), widest)


@jax.jit
def _experts_of_last(target: GptOss, token_ids: jax.Array, positions: jax.Array, caches: PyTree) -> jax.Array:
    """Return the experts [layers, k] of the last token of one prompt."""
    chosen: list[jax.Array] = []

    def recording(x: jax.Array, norm: Norm, router: Any, bias: jax.Array, *operands: Any, **options: Any) -> Any:
        logits = linear(x[:, -1:], router, bias, norm=norm, implementation=options.get("implementation"))
        chosen.append(jax.lax.top_k(logits[0, 0], target.config.top_k)[1])
        return expert_block(x, norm, router, bias, *operands, **options)

    with unittest.mock.patch("target.model.expert_block", recording):
        target.extend(token_ids, positions, caches)
    return jnp.stack(chosen)


@functools.partial(jax.jit, donate_argnames="caches")
def _extend(target: GptOss, token_ids: jax.Array, positions: jax.Array, caches: PyTree) -> tuple[jax.Array, PyTree]:
    output, caches = target.extend(token_ids, positions, caches)
    return output.logits, caches


@functools.partial(jax.jit, donate_argnames="caches")
def _passes(
    target: GptOss, token_ids: jax.Array, count: jax.Array, positions: jax.Array, caches: PyTree
) -> tuple[PyTree, jax.Array]:
    """Run `count` passes at the same positions; the sum of their greedy tokens keeps all of them in the program."""

    def one(index: jax.Array, carry: tuple[PyTree, jax.Array]) -> tuple[PyTree, jax.Array]:
        caches, total = carry
        output, caches = target.extend(token_ids[index], positions, caches)
        return caches, total + jnp.argmax(output.logits, axis=-1).astype(jnp.int32).sum()

    return jax.lax.fori_loop(0, count, one, (caches, jnp.zeros((), jnp.int32)))
