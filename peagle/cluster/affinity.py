"""Guess which replica has a prompt's prefix in its cache. Does not import Ray.

A turn of a conversation begins with the turns before it, which are in the prefix cache of the replica that answered
them. The router cannot see evictions: a wrong guess only recomputes a prompt.
"""

import collections
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

Replica = TypeVar("Replica")

BLOCK = 16  # tokens; prefixes are compared in whole blocks
MOST_BLOCKS = 1 << 17  # 2 M tokens, in about 15 MB


class Affinity(Generic[Replica]):
    """The replica that last got each prefix of earlier prompts and answers. Any thread may call it."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most, self._replica_by_block = most_blocks, collections.OrderedDict[int, Replica]()
        self._lock = threading.Lock()

    def note(self, token_ids: Sequence[int], replica: Replica) -> None:
        """Record that a replica got these tokens. Forgets the oldest blocks beyond most_blocks."""
        with self._lock:
            for block in _blocks(token_ids):
                self._replica_by_block[block] = replica
                self._replica_by_block.move_to_end(block)
            while len(self._replica_by_block) > self._most:
                self._replica_by_block.popitem(last=False)

    def note_answer(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Record that the replica that last got a prompt, of a block or more, has its answer, too."""
        with self._lock:
            *_, replica = (None, *map(self._replica_by_block.get, _blocks(prompt_ids)))
        if replica is not None:
            self.note((*prompt_ids, *answer_ids), replica)

    def prefer(self, prompt_ids: Sequence[int], num_open: Mapping[Replica, int]) -> Replica | None:
        """Choose the replica that has more than half of a prompt; None if there is none, or it is too busy.

        num_open: open requests by live replica. A replica with more than twice the open requests of another is too
        busy, since all requests may share a prefix (peagle.engine.devices.replicas has the same rule).
        """
        known, preferred = 0, None
        with self._lock:
            replicas = [*map(self._replica_by_block.get, _blocks(prompt_ids))]
        for count, replica in enumerate(replicas, 1):
            if replica is None:
                break
            if replica in num_open:
                known, preferred = count, replica
        if preferred is None or 2 * known * BLOCK <= len(prompt_ids):
            return None
        return preferred if num_open[preferred] <= 2 * min(num_open.values()) + 1 else None


class Router(Protocol):
    """What a peagle.cluster.router.PrefixRouter tells the process whose calls it routes."""

    affinity: Affinity[Any]

    def preferred(self, prompt_ids: Sequence[int]) -> object | None:
        """Return the live replica that has most of a prompt and is not too busy, if there is one."""
        ...


ROUTERS: dict[str, Router] = {}  # of this process, by deployment


def _blocks(prompt_ids: Sequence[int]) -> Iterator[int]:
    """Yield a hash for each whole block: of its tokens and all before it."""
    block = 0
    for start in range(0, len(prompt_ids) - BLOCK + 1, BLOCK):
        block = hash((block, *prompt_ids[start : start + BLOCK]))
        yield block
