"""Whatever an engine's config, its pages suffice for a request alone, computed here or received."""

import dataclasses

import hypothesis.strategies as st
from hypothesis import given, settings

from peagle.engine.memory.kv_memory import Sizing
from peagle.engine.memory.pages import PageGroup, PagePool, PageTable
from peagle.engine.resolved import ResolvedConfig
from peagle.ops.attention import PAGE_SIZE, CacheGroup

GROUPS = st.sampled_from(
    [
        (CacheGroup(None, 0, (0,)), CacheGroup(window, 0, (1,)), *drafter)
        for window in (16, 128, 1000)
        for drafter in ((), (CacheGroup(None, 1, (0,)),), (CacheGroup(256, 1, (0,)),), (CacheGroup(None, 0, (0,)),))
    ]
)
CONFIGS = st.builds(
    ResolvedConfig,
    num_speculative_tokens=st.sampled_from([0, 1, 3, 15]),
    slots=st.integers(1, 9),
    context=st.integers(2, 300) | st.integers(300, 9000),
    prefill_chunk=st.sampled_from([1, 64, 128, 2048, 9000]),
    steps_per_dispatch=st.sampled_from([1, 3, 24]),
)


def sized(groups: tuple[CacheGroup, ...], config: ResolvedConfig, least: bool) -> tuple[Sizing, PagePool, PageTable]:
    """Return (the sizes, a pool of them, the table of a request). least: as little memory as is accepted."""
    sizing = Sizing(groups, (1,) * len(groups), config)
    if least:
        memory = sizing.size(sizing.request_pages)
        sizing = Sizing(groups, (1,) * len(groups), dataclasses.replace(config, kv_memory=memory))
    pairs = zip(sizing.num_pages, groups, strict=True)
    pool = PagePool([PageGroup(count, group.window, group.offset) for count, group in pairs], PAGE_SIZE)
    return sizing, pool, pool.open((), range(len(groups)))


@settings(max_examples=80, deadline=None)
@given(GROUPS, CONFIGS, st.booleans(), st.booleans(), st.data())
def test_a_request_alone_has_its_pages_to_the_end_of_the_context(
    groups: tuple[CacheGroup, ...], config: ResolvedConfig, least: bool, received: bool, data: st.DataObject
) -> None:
    sizing, pool, table = sized(groups, config, least)
    length, chunk = data.draw(st.integers(1, config.context - 1)), config.pass_shapes[0][1]
    if received:
        pool.skip(table, length)
    for end in (length,) if received else (*range(chunk, length, chunk), length):
        assert pool.reserve(table, end)
        pool.trim(table, [end] * len(groups))
    while length < config.context:
        assert pool.reserve(table, min(length + sizing.rows_ahead, config.context + sizing.num_lookahead_tokens))
        length += config.num_speculative_tokens + 1
        pool.trim(table, [length] * len(groups))
