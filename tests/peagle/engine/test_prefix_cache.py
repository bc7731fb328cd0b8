"""The trie: what is found is the longest that was kept, and the bytes are bounded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.engine import prefix_cache
from peagle.engine.prefix_cache import PrefixCache, PrefixCacheUse

BLOCK = 4


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "BLOCK", BLOCK)


def put(cache: PrefixCache, token_ids: list[int]) -> list[int]:
    """Keep a sequence, with blocks and snapshots that say of what they are; returns the blocks that were cut."""
    cut: list[int] = []

    def block(start: int) -> tuple[int, ...]:
        cut.append(start)
        return tuple(token_ids[: start + BLOCK])

    cache.insert(token_ids, block, lambda: tuple(token_ids))
    cache.check_integrity()
    return cut


tokens = st.lists(st.integers(0, 1), min_size=0, max_size=18)


@settings(max_examples=200, deadline=None)
@given(st.lists(tokens, max_size=12), tokens, st.integers(0, 400))
def test_the_longest_beginning_that_is_held_is_found(kept: list[list[int]], prompt: list[int], size: int) -> None:
    """Whatever was evicted; and with it exactly its own blocks."""
    prefix_cache.BLOCK = BLOCK
    cache = PrefixCache(size, 10, 5)
    for each in kept:
        put(cache, each)
    held = {node.snapshot for node in cache._used}
    assert held <= {tuple(each) for each in kept}
    expected = max(
        (len(each) for each in held if each == tuple(prompt[: len(each)]) and len(each) < len(prompt)), default=0
    )
    found = cache.match(prompt)
    assert (0 if found is None else found.length) == expected
    if found is not None:
        assert found.snapshot == tuple(prompt[: found.length])
        assert found.blocks == tuple(
            tuple(prompt[: min(start + BLOCK, found.length)]) for start in range(0, found.length, BLOCK)
        )
    cache.check_integrity()


@settings(max_examples=200, deadline=None)
@given(st.lists(tokens, max_size=12), tokens, st.integers(0, 200))
def test_without_snapshots_a_request_begins_anywhere(kept: list[list[int]], prompt: list[int], size: int) -> None:
    """With all but the last token that it shares with any sequence that is held, and the blocks of these."""
    prefix_cache.BLOCK = BLOCK
    cache = PrefixCache(size, 10, None)
    for each in kept:
        put(cache, each)
    held = [[t for part in prefix_cache._path(node) for t in part.key] for node in cache._used]
    shared = max((next((i for i, (a, b) in enumerate(zip(each, prompt, strict=False)) if a != b),
                       min(len(each), len(prompt))) for each in held), default=0)  # fmt: skip
    found = cache.match(prompt)
    assert (0 if found is None else found.length) == max(shared - 1, 0)
    if found is not None:
        for start, block in zip(range(0, shared, BLOCK), found.blocks, strict=True):
            assert list(block[:shared]) == prompt[: min(start + BLOCK, shared)]
    cache.check_integrity()


def test_without_snapshots_a_beginning_takes_no_room_beside_what_continues_it() -> None:
    cache = PrefixCache(1000, 10, None)
    assert put(cache, [1, 2, 3, 4, 5]) == [0, 4]
    assert put(cache, [1, 2, 3, 4, 5, 6]) == [4]
    assert put(cache, [1, 2, 3, 4, 5]) == []
    assert put(cache, [1, 2, 3]) == []
    assert (cache.num_entries, cache.num_bytes) == (2, 20)
    assert cache.match([1, 2, 9]) is not None, "counts as a use of what is after it"
    assert cache.use == PrefixCacheUse(1, 1, 3, 1, num_entries=2, num_bytes=20)


def test_a_shared_beginning_is_held_once_and_counted_as_it_is() -> None:
    cache = PrefixCache(1000, 10, 5)
    assert put(cache, [1, 2, 3, 4, 5, 6, 7, 8]) == [0, 4]
    assert put(cache, [1, 2, 3, 4, 5, 6, 7, 9]) == [4], "the last token differs"
    assert put(cache, [1, 2, 3, 4, 5]) == [4], "a shorter one"
    assert put(cache, [1, 2, 3, 4, 5]) == []
    assert (cache.num_entries, cache.num_bytes) == (3, 4 * 10 + 3 * 5)


def test_the_longest_unused_goes_first_with_the_blocks_that_nothing_else_needs() -> None:
    cache = PrefixCache(2 * 15, 10, 5)
    put(cache, [1, 2])
    put(cache, [3, 4])
    assert cache.match([1, 2, 9]) is not None
    put(cache, [5, 6])
    assert cache.match([3, 4, 9]) is None
    assert cache.match([1, 2, 9]) is not None
    put(cache, list(range(99)))
    assert cache.num_entries == 2, "larger than all: nothing was kept, and nothing lost"


def test_a_prompt_that_is_held_whole_leaves_a_token_to_compute() -> None:
    cache = PrefixCache(1000, 10, 5)
    put(cache, [1, 2, 3, 4])
    put(cache, [1, 2, 3, 4, 5, 6])
    found = cache.match([1, 2, 3, 4, 5, 6])
    assert found is not None
    assert found.length == 4
    assert cache.match([1, 2, 3, 4]) is None
    assert cache.use == PrefixCacheUse(2, 1, 10, 4, num_entries=2, num_bytes=2 * 10 + 2 * 5)
