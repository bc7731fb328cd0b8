"""Keep computed prompts and answers for requests that begin with them. Host only; no JAX.

A trie of blocks: a node holds the full layers' rows of 128 positions, so that a shared beginning is held once. Sliding
rings and aux_hidden are valid at one length alone: a snapshot holds them, at the end of a node. A request begins with
the longest snapshot that is shorter than its prompt, since the last token's logits are not kept.

    root ── t0..t127 ── t128..t255 ■ ── t256..t299 ■        ■ snapshot; the last node of an entry may be shorter
                                  └──── t256'..t383' ■      differs in one token: another node

If no layer is a ring (`--retain-full-kv`), there are no snapshots: a request begins with the longest beginning that it
shares with any entry, but for its last token. That one is computed again, for its aux_hidden and its logits.

The cache is bounded in bytes. It evicts the least recently used entry, with the blocks that no other entry needs.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

BLOCK = 128  # positions

Key = tuple[int, ...]


NO_SNAPSHOT = ()  # at the end of an entry that needs none


@dataclass(eq=False)
class _Node:
    parent: "_Node | None"
    key: Key
    block: Any = None
    snapshot: Any = None  # None: no entry ends here
    children: dict[Key, "_Node"] = field(default_factory=dict)


@dataclass(frozen=True)
class Match:
    """The longest known beginning of a prompt: its first `length` tokens, in blocks, and the snapshot at their end."""

    length: int
    blocks: tuple[Any, ...]
    snapshot: Any


@dataclass(frozen=True)
class PrefixCacheUse:
    """Counts since the cache was made, and what it holds now.

    num_hits: requests that began with known tokens. num_tokens: of prompts; num_hit_tokens: those that were known.
    """

    num_requests: int
    num_hits: int
    num_tokens: int
    num_hit_tokens: int
    num_entries: int
    num_bytes: int


class PrefixCache:
    """Blocks and snapshots by the tokens that they hold. Both are opaque here, of a fixed size each."""

    def __init__(self, max_bytes: int, block_bytes: int, snapshot_bytes: int | None) -> None:
        """snapshot_bytes None: none are needed, so a request begins anywhere in an entry."""
        self._max_bytes, self._block_bytes = max_bytes, block_bytes
        self._anywhere, self._snapshot_bytes = snapshot_bytes is None, snapshot_bytes or 0
        self._root = _Node(None, ())
        self._used: collections.OrderedDict[_Node, None] = collections.OrderedDict()  # nodes with a snapshot, by use
        self._num_blocks = 0
        self._num_requests = self._num_hits = self._num_tokens = self._num_hit_tokens = 0

    @property
    def num_entries(self) -> int:
        """Sequences that are kept; with snapshots, the lengths at which some request may begin."""
        return len(self._used)

    @property
    def num_bytes(self) -> int:
        return self._num_blocks * self._block_bytes + self.num_entries * self._snapshot_bytes

    @property
    def use(self) -> PrefixCacheUse:
        counts = self._num_requests, self._num_hits, self._num_tokens, self._num_hit_tokens
        return PrefixCacheUse(*counts, self.num_entries, self.num_bytes)

    def match(self, token_ids: Sequence[int]) -> Match | None:
        """Find the longest beginning that a request may begin with, shorter than the prompt; it counts as used now."""
        self._num_requests += 1
        self._num_tokens += len(token_ids)
        best, length = self._longest(token_ids)
        if best is None or length < 1:
            return None
        self._used.move_to_end(_entry_of(best))
        self._num_hits += 1
        self._num_hit_tokens += length
        return Match(length, tuple(node.block for node in _path(best)), best.snapshot)

    def num_known(self, token_ids: Sequence[int]) -> int:
        """Return the length of what `match` would find. It counts as no use."""
        return max(self._longest(token_ids)[1], 0)

    def _longest(self, token_ids: Sequence[int]) -> tuple[_Node | None, int]:
        return self._shared(token_ids) if self._anywhere else self._with_snapshot(token_ids)

    def _with_snapshot(self, token_ids: Sequence[int]) -> tuple[_Node | None, int]:
        best, length = None, 0
        for node, end in self._walk(token_ids):
            for key, child in node.children.items():
                if len(key) < BLOCK and child.snapshot is not None and end + len(key) < len(token_ids):
                    longer = best is None or end + len(key) > length
                    if longer and tuple(token_ids[end : end + len(key)]) == key:
                        best, length = child, end + len(key)
            if node.snapshot is not None and length < end < len(token_ids):
                best, length = node, end
        return best, length

    def _shared(self, token_ids: Sequence[int]) -> tuple[_Node | None, int]:
        """Return (the node in which the longest shared beginning ends, its length but for the last token)."""
        *_, (best, whole) = self._walk(token_ids)
        length, children = whole, best.children
        for key, child in children.items():
            if (end := whole + _num_equal(key, token_ids[whole : whole + BLOCK])) > length:
                best, length = child, end
        return best, length - 1

    def insert(
        self,
        token_ids: Sequence[int],
        cut_block: Callable[[int], Any],
        cut_snapshot: Callable[[], Any],
        whole: int | None = None,
    ) -> None:
        """Keep the sequence of these tokens.

        Keeps nothing if they, or the `whole` tokens that they will become, are more than the cache can hold.
        cut_block(first position) and cut_snapshot() are called for parts that are not held.
        """
        num_blocks = -(-(whole or len(token_ids)) // BLOCK)
        if not token_ids or num_blocks * self._block_bytes + self._snapshot_bytes > self._max_bytes:
            return
        node = self._root
        for start in range(0, len(token_ids), BLOCK):
            key = tuple(token_ids[start : start + BLOCK])
            if self._anywhere:
                key = self._merge(node, key)
            if key not in node.children:
                node.children[key] = _Node(node, key, cut_block(start))
                self._num_blocks += 1
            node = node.children[key]
        if node.snapshot is None:
            node.snapshot = NO_SNAPSHOT if self._anywhere else cut_snapshot()
            self._used[node] = None
        self._used.move_to_end(node)
        while self.num_bytes > self._max_bytes:
            self._evict()

    def check_integrity(self) -> None:
        """Raise AssertionError if counts and trie disagree. For tests."""
        nodes = list(_below(self._root))
        assert self._num_blocks == len(nodes)
        assert {node for node in nodes if node.snapshot is not None} == set(self._used)
        assert all(node.children or node.snapshot is not None for node in nodes), "a block that nothing needs"
        assert all(node.parent is not None and node.parent.children[node.key] is node for node in nodes)
        assert all(len(node.key) == BLOCK or not node.children for node in nodes)
        assert self.num_bytes <= self._max_bytes

    def _walk(self, token_ids: Sequence[int]) -> Iterator[tuple[_Node, int]]:
        """The nodes along the prompt's whole blocks, each with the position of its end."""
        node, end = self._root, 0
        yield node, end
        while (child := node.children.get(tuple(token_ids[end : end + BLOCK]))) and len(child.key) == BLOCK:
            node, end = child, end + BLOCK
            yield node, end

    def _merge(self, node: _Node, key: Key) -> Key:
        """Drop the children that are beginnings of the key; return the child's key that begins with it, or itself."""
        for shorter in [each for each in node.children if len(each) < len(key) and key[: len(each)] == each]:
            del self._used[node.children.pop(shorter)]
            self._num_blocks -= 1
        return next((each for each in node.children if each[: len(key)] == key), key)

    def _evict(self) -> None:
        node, _ = self._used.popitem(last=False)
        node.snapshot = None
        while node.parent is not None and not node.children and node.snapshot is None:
            del node.parent.children[node.key]
            self._num_blocks -= 1
            node = node.parent


def aligned_chunk(chunk: int) -> int:
    """Round a prefill chunk down, so that chunks end at the ends of blocks as often as possible."""
    return chunk // BLOCK * BLOCK if chunk >= BLOCK else 1 << chunk.bit_length() - 1


def _path(node: _Node) -> list[_Node]:
    """The nodes from the first block to this one."""
    found: list[_Node] = []
    current: _Node | None = node
    while current is not None and current.parent is not None:
        found.append(current)
        current = current.parent
    return found[::-1]


def _entry_of(node: _Node) -> _Node:
    """Return the node itself if an entry ends there, else one after it that an entry ends at."""
    while node.snapshot is None:
        node = next(iter(node.children.values()))
    return node


def _num_equal(key: Key, token_ids: Sequence[int]) -> int:
    """Count the first tokens that are equal."""
    return next(
        (i for i, (a, b) in enumerate(zip(key, token_ids, strict=False)) if a != b), min(len(key), len(token_ids))
    )


def _below(node: _Node) -> Iterator[_Node]:
    for child in node.children.values():
        yield child
        yield from _below(child)
