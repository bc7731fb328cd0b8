"""Compare a target over a mesh of devices with the whole one.

A random target whose widths no mesh shares evenly, with sinks that differ by head and large biases, is decoded whole
and over the mesh: logits of one pass, tokens and acceptance of several requests with n-gram drafts, collectives of the
compiled pass. With dp, engines over copies of it share the requests.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from peagle.drafters.ngram import NGram
from peagle.engine.devices.replicas import Replicas
from peagle.engine.host.engine import Engine
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig
from peagle.loading.load import load_over
from peagle.parallel.mesh import MeshShape, make_meshes
from peagle.protocols import Target
from peagle.workflows.random_checkpoint import geometry, random_tensors
from scripts.runs import Json
from target.load import load_target, write_target
from target.model import GptOss

CONFIG = geometry(
    hidden=96, layers=4, heads=(8, 2), head_dim=12, vocab=101, experts=(8, 2), expert_width=160, window=11
)
K, TOKENS, CHUNK, SEVERAL = 3, 48, 40, 4


def loud(tensors: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Make sinks large and different by head, and biases large, so that a wrong cut shows."""
    for name, tensor in tensors:
        if name.endswith("sinks"):
            yield name, np.linspace(-3, 6, tensor.size).astype(tensor.dtype)
        elif name.endswith("bias"):
            yield name, (10 * tensor.astype(np.float32)).astype(tensor.dtype)
        else:
            yield name, tensor


def loud_target(into: Path) -> Path:
    """Write the target that meshes are compared by."""
    directory = into / "loud"
    write_target(directory, CONFIG, loud(random_tensors(CONFIG, True, 1)), mxfp4=True)
    return directory


def facts(target: Target, *copies: Target) -> Json:
    """Compute logits [1, CHUNK, V], count collectives, and decode requests by all copies."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CONFIG.vocab_size, (1, CHUNK)).astype(np.int32)
    positions = np.arange(CHUNK, dtype=np.int32)[None]
    cache = jax.jit(lambda: target.init_cache(1, CHUNK, CHUNK))()
    program = jax.jit(type(target).extend).lower(target, tokens, positions, cache).compile()
    logits = np.asarray(program(target, tokens, positions, cache)[0].logits)
    config = ResolvedConfig(K, slots=SEVERAL, context=128, prefill_chunk=16)
    engines = [Engine(copy, NGram(), config.share(1 + len(copies))) for copy in (target, *copies)]
    engine = Replicas(engines, config) if copies else engines[0]
    prompts = [tuple(rng.integers(0, CONFIG.vocab_size, size).tolist()) for size in (7, 30, 19, 4, 12, 9)]
    answers: list[list[Any]] = [[[], 0] for _ in prompts]
    for index, chunk in engine.generate([Request(prompt, TOKENS) for prompt in prompts]):
        answers[index][0] += chunk.token_ids
        answers[index][1] += sum(step.num_accepted for step in chunk.steps)
    text = program.as_text() or ""
    kinds = re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)[-a-z]*\(", text)
    return {"logits": logits, "answers": answers, "collectives": len(kinds)}


def compare(directory: Path, kernels: Any, shape: MeshShape) -> Json:
    """Compare the target over a mesh with the whole one."""
    loaded = load_target(directory, experts="packed", implementation=kernels)
    alone = facts(GptOss(loaded.params, loaded.config))
    target, over = load_over(directory, shape, experts="packed", implementation=kernels)
    over_mesh = facts(target, *(target.on(mesh) for mesh in make_meshes(shape)[1:]))
    answers = zip(over_mesh["answers"], alone["answers"], strict=True)
    same = [(mine[0] == theirs[0], mine[1] == theirs[1]) for mine, theirs in answers]
    return {
        "kernels": kernels,
        "mesh": str(shape),
        "error_in_spreads": float(np.abs(over_mesh["logits"] - alone["logits"]).max() / alone["logits"].std()),
        "answers": len(same),
        "same_tokens": sum(tokens for tokens, _ in same),
        "same_accepted": sum(accepted for _, accepted in same),
        "accepted": sum(accepted for _, accepted in alone["answers"]),
        "collectives": over_mesh["collectives"],
        "bytes_over_whole": _bytes_of(over.params) / shape.ranks / _bytes_of(loaded.params),
    }


def _bytes_of(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
