"""This project's engine in a comparison: the shipped loop for decoding, the shipped verify pass for v(T)."""

import dataclasses
import functools
import importlib.metadata
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import peagle
from peagle.config import SpeculationConfig
from peagle.generate import Request
from peagle.ops.kv_cache import KVCache
from peagle.ops.rope import Yarn
from peagle.pair import Pair
from target.model import GptOss

MOST_PASSES = 256  # passes of one program; fewer are run by its count, so that each width compiles once


def load(
    directory: str, kernels: str, dtype: str, drafter: str | None = None, num_drafts: int | Literal["auto"] = 0
) -> "Ours":
    """The engine of a checkpoint, or with a drafter that of a pair, which drafts so many tokens a step when it decodes.
    kernels: auto, native or xla; raises InputError where they do not run."""
    if dtype == "float32" and jax.default_backend() == "gpu":  # the reference; a process has one engine
        jax.config.update("jax_default_matmul_precision", "highest")  # not TF32
    return Ours(peagle.load(directory, drafter, kernels=kernels, dtype=dtype), num_drafts)


class Ours:
    """See worker.Engine."""

    def __init__(self, pair: Pair, num_drafts: int | Literal["auto"]) -> None:
        self._pair = pair
        self._num_drafts, self._adaptive = pair.num_drafts(num_drafts)
        self._target: GptOss = pair.plain_target

    def describe(self) -> dict[str, Any]:
        return {
            "version": f"peagle {importlib.metadata.version('peagle')}",
            "computes": f"{self._pair.kernels}; {self._pair.dtype} activations; experts {self._pair.experts}",
        }

    def prepare(self, prompt_ids: list[int], widths: list[int]) -> dict[str, Any]:
        for width in widths:
            self.verify(prompt_ids, [[0] * width])
        return {}

    def decode(self, prompt_ids: list[int], num_tokens: int) -> dict[str, Any]:
        request = Request(0, tuple(prompt_ids), num_tokens)
        capacity = self._pair.capacity([request])
        config = SpeculationConfig(self._num_drafts, capacity=capacity, adaptive=self._adaptive)
        engine = self._pair.engine(config, ignore_eos=True)
        engine.warm_up([request])
        started = time.perf_counter()
        emissions = list(engine.generate([request]))
        prefilled, ended = emissions[0].time_s, emissions[-1].time_s
        tokens = [token for emission in emissions for token in emission.token_ids]
        return {"prefill_s": prefilled - started, "decode_s": ended - prefilled, "token_ids": tokens}

    def verify(self, prompt_ids: list[int], passes: list[list[int]]) -> dict[str, Any]:
        width = len(passes[0])
        token_ids = np.zeros((MOST_PASSES, 1, width), np.int32)
        token_ids[: len(passes), 0] = passes
        length, cache = self._prefill(self._target, prompt_ids, width, len(prompt_ids) + width)
        cache, _ = jax.block_until_ready(_passes(self._target, token_ids, 1, length, cache))
        started = time.perf_counter()
        jax.block_until_ready(_passes(self._target, token_ids, len(passes), length, cache))
        return {"pass_s": (time.perf_counter() - started) / len(passes)}

    def logits(
        self, prompt_ids: list[int], passes: list[list[int]], path: str, round_yarn: bool = False
    ) -> dict[str, Any]:
        """With round_yarn YaRN's bounds are rounded, as llama.cpp always does."""
        target = rounding_yarn(self._target) if round_yarn else self._target
        widest, room = max(map(len, passes)), len(prompt_ids) + sum(map(len, passes))
        length, cache = self._prefill(target, prompt_ids, widest, room)
        rows = []
        for token_ids in passes:
            logits, cache = _extend(target, np.asarray([token_ids], np.int32), length, cache)
            rows.append(np.asarray(logits[0], np.float32))
            length = length + len(token_ids)
        np.save(path, np.concatenate(rows))
        return {}

    def _prefill(
        self, target: GptOss, prompt_ids: list[int], widest: int, room: int
    ) -> tuple[np.ndarray, tuple[KVCache, ...]]:
        length = np.asarray([len(prompt_ids)], np.int32)
        prompt = np.asarray([prompt_ids], np.int32)
        return length, _prefill(target, prompt, length, widest=widest, room=room)


def rounding_yarn(target: GptOss) -> GptOss:
    """The same model with the bounds of YaRN's ramp rounded outwards."""
    rope = target.config.rope
    if not isinstance(rope.scaling, Yarn):
        return target
    rounded = dataclasses.replace(rope, scaling=dataclasses.replace(rope.scaling, truncate=True))
    return target.replace(config=dataclasses.replace(target.config, rope=rounded))  # type: ignore[attr-defined,no-any-return]


@functools.partial(jax.jit, static_argnames=("widest", "room"))
def _prefill(
    target: GptOss, token_ids: jax.Array, lengths: jax.Array, *, widest: int, room: int
) -> tuple[KVCache, ...]:
    return target.prefill(token_ids, lengths, target.init_cache(1, room, widest))[1]


@functools.partial(jax.jit, donate_argnames="cache")
def _extend(
    target: GptOss, token_ids: jax.Array, lengths: jax.Array, cache: tuple[KVCache, ...]
) -> tuple[jax.Array, tuple[KVCache, ...]]:
    output, cache = target.verify(token_ids, lengths, cache)
    return output.logits, cache


@functools.partial(jax.jit, donate_argnames="cache")
def _passes(
    target: GptOss, token_ids: jax.Array, count: jax.Array, lengths: jax.Array, cache: tuple[KVCache, ...]
) -> tuple[tuple[KVCache, ...], jax.Array]:
    """`count` verify passes at the same place, each with its own tokens; the greedy tokens are summed up, so that all
    are needed."""

    def one(index: jax.Array, carry: tuple[tuple[KVCache, ...], jax.Array]) -> tuple[tuple[KVCache, ...], jax.Array]:
        cache, total = carry
        output, cache = target.verify(token_ids[index], lengths, cache)
        return cache, total + jnp.argmax(output.logits, axis=-1).astype(jnp.int32).sum()

    return jax.lax.fori_loop(0, count, one, (cache, jnp.zeros((), jnp.int32)))
