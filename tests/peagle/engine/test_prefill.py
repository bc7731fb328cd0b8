"""What a prompt leaves in its pages does not depend on where it is cut, nor on how many rows a pass has."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.engine.host.pass_plans import chunk_plan
from peagle.engine.step import prefill
from peagle.ops.attention import paged
from target.model import GptOss
from target.params import init_params
from tests.support.models import TOKENS, Models, engine_of, held, models, needs_native, prefilled
from tests.support.toys import CONFIG, WINDOW

pytestmark = pytest.mark.compile

LENGTH = 150
# rows of a pass, and the tokens that each takes; a pass after the first begins with a known row
CUTTINGS: list[tuple[int, list[int]]] = [
    (2, [1] * LENGTH),
    (17, [16, 16, 16, 2, 16, 16, 16, 16, 16, 16, 4]),
    (65, [64, 64, 22]),
    (WINDOW + 1, [WINDOW] * 18 + [6]),
    (150, [149, 1]),
]


def shortened(counts: Sequence[int], length: int) -> list[int]:
    """For the first tokens only, in the same passes."""
    ends = [min(end, length) for end in np.cumsum(counts)]
    return [int(count) for count in np.diff([0, *ends]) if count]


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_cutting_of_a_prompt_gives_the_same_bits(dtype: str) -> None:
    """Keys and values of target and drafter, aux_hidden and logits, past windows and over pages."""
    engine = engine_of(models(f"native {dtype}"), slots=4, prefill_chunk=LENGTH)
    for length in (LENGTH, 1, 2, WINDOW, 64, 65):
        _, whole = prefilled(engine, TOKENS[:length], LENGTH, [length])
        assert all(np.isfinite(part.astype(np.float32)).all() for part in whole.values())
        for rows, counts in CUTTINGS if length == LENGTH else CUTTINGS[1:4]:
            table, cut = prefilled(engine, TOKENS[:length], rows, shortened(counts, length))
            engine.memory.pool.free(table)
            for name, part in cut.items():
                np.testing.assert_array_equal(part, whole[name], f"{name}: {length} tokens as {counts}")


@pytest.mark.parametrize("most_scores", [pytest.param(None, marks=pytest.mark.slow), 90])
def test_any_cutting_of_a_prompt_gives_the_same_to_rounding(
    most_scores: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On XLA, which takes fewer pages at once if there are many scores."""
    if most_scores is not None:
        monkeypatch.setattr(paged, "MOST_SCORES", most_scores)
    # tables of their own, since engines of equal shapes share programs
    pair = models("float32")
    engine = engine_of(pair, context=256 if most_scores is None else 320, prefill_chunk=LENGTH, slots=3)
    for length in (LENGTH, 2):
        _, whole = prefilled(engine, TOKENS[:length], LENGTH, [length])
        for rows, counts in CUTTINGS[1:4]:
            table, cut = prefilled(engine, TOKENS[:length], rows, shortened(counts, length))
            engine.memory.pool.free(table)
            for name, part in cut.items():
                scale = 1e-4 * max(float(np.abs(whole[name]).max(initial=0.0)), 1.0)
                np.testing.assert_allclose(part, whole[name], atol=scale, err_msg=f"{name}: {length} as {counts}")


@needs_native
def test_prompts_that_share_a_pass_leave_what_each_leaves_alone() -> None:
    """Fresh ones, one that goes on in the midst of a page, one that is known whole, and an empty entry."""
    engine = engine_of(models("native float32"), slots=4, prefill_chunk=64)
    prompts, known = [TOKENS[:30], TOKENS[5:90], TOKENS[100:164]], [0, 70, 64]
    alone = [prefilled(engine, prompt, 128, [len(prompt)])[1] for prompt in prompts]
    engine = engine_of(models("native float32"), slots=4, prefill_chunk=64)
    tables = [engine.memory.open((), with_drafter=True) for _ in prompts]
    for number, prompt in enumerate(prompts):
        if known[number]:
            tables[number], _ = prefilled(engine, prompt[: known[number]], 128, [known[number]])
        assert engine.memory.pool.reserve(tables[number], len(prompt))
    rows = [prompt[max(count - 1, 0) :] for prompt, count in zip(prompts, known, strict=True)]
    plan = chunk_plan(
        rows,
        known,
        64,
        np.stack([*(engine.memory.row(table) for table in tables), np.full_like(engine.memory.row(tables[0]), -1)]),
    )
    engine.executor.prefill(plan, with_drafter=True)
    result = engine.executor.prefilled
    for number, (prompt, expected) in enumerate(zip(prompts, alone, strict=True)):
        mine = {"logits": np.asarray(result.logits)[[number]], "aux_hidden": np.asarray(result.aux_hidden)[[number]]}
        for name, part in (mine | held(engine, tables[number], len(prompt))).items():
            np.testing.assert_array_equal(part, expected[name], f"{name} of prompt {number}")


def in_blocks(pair: Models, query_blocks: int, ffn_blocks: int) -> Models:
    target = dataclasses.replace(pair.target, query_blocks=query_blocks, ffn_blocks=ffn_blocks)
    return dataclasses.replace(pair, target=target)


@pytest.mark.parametrize(
    ("blocks", "kind"),
    [
        *(pytest.param(blocks, "native float32", marks=needs_native) for blocks in ((3, 1), (1, 3), (99, 2))),
        ((3, 2), "float32"),
        pytest.param((99, 4), "float32", marks=pytest.mark.slow),
    ],
)
def test_a_pass_in_blocks_of_rows_leaves_what_it_leaves_whole(
    kind: str, blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On native kernels bit for bit, the drafter in blocks, too; last blocks are full, part full and of one row."""
    pair, capacity = models(kind), 3 * 128 - 20
    whole = engine_of(pair, context=capacity, prefill_chunk=capacity)
    cut = engine_of(in_blocks(pair, *blocks), context=capacity, prefill_chunk=capacity)
    for length in (1, 23, 128, 129, capacity):
        table, expected = prefilled(whole, TOKENS[:length], capacity, [length])
        whole.memory.pool.free(table)
        with monkeypatch.context() as patch:
            patch.setattr(prefill, "ABSORBED_TOGETHER", 100)
            table, parts = prefilled(cut, TOKENS[:length], capacity, [length])
        cut.memory.pool.free(table)
        for name, part in parts.items():
            if kind.startswith("native"):
                np.testing.assert_array_equal(part, expected[name], name)
            else:
                scale = 1e-4 * max(1.0, float(np.abs(part).max(initial=0)))
                np.testing.assert_allclose(part, expected[name], atol=scale, err_msg=name)


def test_a_pass_in_blocks_takes_less_memory() -> None:
    rows, config = 2048, dataclasses.replace(CONFIG, hidden_size=64, expert_width=64)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))

    def temporary_bytes(query_blocks: int, ffn_blocks: int) -> int:
        target = GptOss(params, config, query_blocks=query_blocks, ffn_blocks=ffn_blocks)
        ids = jnp.zeros((1, rows), jnp.int32)
        cache = jax.eval_shape(lambda: target.init_cache(1, rows, rows))
        program = jax.jit(lambda target, cache: target.extend(ids, ids, cache, ids[:, :1]), donate_argnums=1)
        size: int = program.lower(target, cache).compile().memory_analysis().temp_size_in_bytes
        return size

    in_experts = temporary_bytes(1, 8)
    assert in_experts < temporary_bytes(1, 1) / 2
    assert temporary_bytes(16, 8) < 0.9 * in_experts
