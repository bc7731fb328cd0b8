"""Which replica has computed which prefix of a prompt. Nothing of Ray in here.

A turn of a conversation begins with the turns before it, which lie in the prefix cache of the replica that answered
them. The router cannot see evictions: a wrong guess only recomputes a prompt.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

Replica = TypeVar("Replica")

BLOCK = 16  # tokens; prefixes are known in whole blocks
MOST_BLOCKS = 1 << 17  # 2 M tokens, in about 15 MB


class Affinity(Generic[Replica]):
    """The last replica of each known prefix, in blocks."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most, self._went = most_blocks, collections.OrderedDict[int, Replica]()

    def note(self, prompt_ids: Sequence[int], replica: Replica) -> None:
        """Note that a prompt went to a replica. Forgets the oldest blocks beyond most_blocks."""
        for block in _blocks(prompt_ids):
            self._went[block] = replica
            self._went.move_to_end(block)
        while len(self._went) > self._most:
            self._went.popitem(last=False)

    def prefer(self, prompt_ids: Sequence[int], num_open: Mapping[Replica, int]) -> Replica | None:
        """Choose the replica that knows more than half of a prompt; None if there is none, or it is too busy.

        num_open: open requests of each live replica. Since all requests may share a prefix, a replica with more than
        twice the open requests of another is not preferred (likewise peagle.engine.replicas).
        """
        known, preferred = 0, None
        for number, block in enumerate(_blocks(prompt_ids), 1):
            replica = self._went.get(block)
            if replica is None:
                break
            if replica in num_open:
                known, preferred = number, replica
        if preferred is None or 2 * known * BLOCK <= len(prompt_ids):
            return None
        return preferred if num_open[preferred] <= 2 * min(num_open.values()) + 1 else None


def _blocks(prompt_ids: Sequence[int]) -> Iterator[int]:
    """Yield a hash for each whole block, of its tokens and all before it."""
    number = 0
    for start in range(0, len(prompt_ids) - BLOCK + 1, BLOCK):
        number = hash((number, *prompt_ids[start : start + BLOCK]))
        yield number
