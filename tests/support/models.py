"""A small pair with windows in both models, and what its pages hold of a sequence."""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import flax.struct
import jax.numpy as jnp
import numpy as np
import pytest

from drafter.load import load_drafter, save_drafter
from drafter.propose import AnyDrafter, drafter_of
from peagle.engine.host.engine import Engine
from peagle.engine.host.pass_plans import chunk_plan
from peagle.engine.memory.pages import PageTable
from peagle.engine.request import Request, StepRecord, TokenLogprobs
from peagle.engine.resolved import ResolvedConfig
from peagle.ops import native
from peagle.ops.attention import PAGE_SIZE
from target.load import load_target, save_target
from target.model import GptOss
from tests.support.drafters import random_params as random_drafter
from tests.support.toys import CONFIG as TARGET
from tests.support.toys import WINDOW, drafter_config, follow, tiny_target

needs_native = pytest.mark.skipif(not native.available(), reason=native.status()[1])
FAST = "native float32" if native.available() else "float32"
DRAFTER = drafter_config(num_layers=2, windows=(WINDOW, None))  # as the target's layers
BLOCK = drafter_config(
    hidden_size=TARGET.hidden_size, num_layers=2, mask_token_id=36, block_size=8, qk_norm=True, attention_bias=True
)
DRAFTERS = {"P-EAGLE": DRAFTER, "EAGLE-3": drafter_config(num_layers=1, mask_token_id=None), "DFlash": BLOCK}
TOKENS = tuple(np.random.default_rng(8).integers(0, TARGET.vocab_size, 400).tolist())
Answer = tuple[list[int], list[StepRecord], list[TokenLogprobs]]


@flax.struct.dataclass
class Models:
    target: GptOss
    drafter: AnyDrafter


@functools.cache
def models(kind: str = FAST, drafter: str = "P-EAGLE") -> Models:
    """Load the same weights as XLA's arrays, or in the kernels' layout. kind: "native float32", "float32", ..."""
    dtype, implementation = jnp.dtype(kind.split()[-1]), "native" if kind.startswith("native") else None
    with tempfile.TemporaryDirectory() as root:
        at, drafting = Path(root), DRAFTERS[drafter]
        save_target(at / "target", tiny_target().params, TARGET, dtype=np.float32, mxfp4=False)
        save_drafter(at / "drafter", random_drafter(drafting), drafting)
        loaded = load_target(at / "target", dtype=dtype, implementation=implementation)
        params, config = load_drafter(
            at / "drafter",
            dtype,
            implementation=implementation,
            target_embedding=loaded.params.embedding,
            target_lm_head=loaded.params.lm_head,
        )
    return Models(GptOss(loaded.params, loaded.config, (0, 1)), drafter_of(params, config))


@functools.cache
def fast_target() -> GptOss:
    """Make `tiny_target` in the kernels' layout where they run: XLA compiles the calls of kernels in less time."""
    return models().target.replace(aux_layer_ids=())


def engine_of(pair: Models, k: int = 3, context: int = 256, **options: object) -> Engine:
    """Make an engine of the pair; its prefix cache is off, unless prefix_cache says otherwise."""
    return Engine(pair.target, pair.drafter, ResolvedConfig(k, context=context, **options))  # type: ignore[arg-type]


def ask(engine: Engine, prompt: Sequence[int], new: int = 24, **options: object) -> tuple[Answer, int]:
    """Return ((tokens, steps, log-probabilities), tokens of the prompt that were not computed)."""
    chunks = list(follow(engine, engine.add(Request(tuple(prompt), new, **options))))  # type: ignore[arg-type]
    return answer_of(chunks), chunks[0].num_cached_tokens


def answer_of(chunks: Sequence) -> Answer:
    """Join the chunks of a request."""
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    steps = [step for chunk in chunks for step in chunk.steps]
    return tokens, steps, [logprob for chunk in chunks for logprob in chunk.logprobs]


def prefilled(
    engine: Engine, token_ids: Sequence[int], rows: int, counts: Sequence[int]
) -> tuple[PageTable, dict[str, np.ndarray]]:
    """Compute a prompt in passes of `rows` rows that take `counts` of its tokens; return (its table, what it left)."""
    engine.start()
    table, begin = engine.memory.open((), with_drafter=True), 0
    for count in counts:
        first, end = max(begin - 1, 0), begin + count
        assert engine.memory.pool.reserve(table, end)
        plan = chunk_plan([token_ids[first:end]], [begin], rows, engine.memory.row(table)[None])
        engine.executor.prefill(plan, with_drafter=True)
        engine.memory.publish(table, token_ids[:end], end, end)
        begin = end
    result = engine.executor.prefilled
    parts = {"logits": np.asarray(result.logits), "aux_hidden": np.asarray(result.aux_hidden)}
    return table, parts | held(engine, table, len(token_ids))


def held(engine: Engine, table: PageTable, length: int) -> dict[str, np.ndarray]:
    """Copy the keys and values that a request needs to go on after `length` tokens, in order of index."""
    models = (engine.executor.target.cache_groups, engine.executor.drafter.cache_groups)  # type: ignore[union-attr]
    held_parts, base, begin = {}, 0, 0
    for groups in models:
        for offset, group in enumerate(groups):
            first = group.offset if group.window is None else max(group.offset, length - group.window)
            for layer in group.layers:
                numbers = table.pages[begin + offset][first // PAGE_SIZE : -(-length // PAGE_SIZE)]
                for part, pages in zip(
                    ("key", "value"), engine.executor.read_pages(base + layer, numbers), strict=True
                ):
                    rows = pages.reshape(-1, *pages.shape[2:])
                    skipped = first // PAGE_SIZE * PAGE_SIZE
                    held_parts[f"{base + layer} {part}"] = rows[first - skipped : length - skipped].astype(np.float32)
        base += sum(len(group.layers) for group in groups)
        begin += len(groups)
    return held_parts
