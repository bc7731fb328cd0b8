"""Which replica has computed which beginning of a prompt. Nothing of Ray in here.

A turn of a conversation begins with the turns before it, which lie in the prefix cache of the replica that answered
them. What that cache holds now is not known here: a wrong guess costs a computed prompt, and no answer.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

Replica = TypeVar("Replica")

BLOCK = 16  # tokens; a beginning is known in whole blocks
MOST_BLOCKS = 1 << 17  # 2 M tokens, in about 15 MB


class Affinity(Generic[Replica]):
    """The replica that each known block of a prompt went to last, with all that stands before the block."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most, self._went = most_blocks, collections.OrderedDict[int, Replica]()

    def note(self, prompt_ids: Sequence[int], replica: Replica) -> None:
        """Keep that a prompt went to a replica. Forgets the blocks that were noted longest ago."""
        for block in _blocks(prompt_ids):
            self._went[block] = replica
            self._went.move_to_end(block)
        while len(self._went) > self._most:
            self._went.popitem(last=False)

    def prefer(self, prompt_ids: Sequence[int], num_open: Mapping[Replica, int]) -> Replica | None:
        """Choose the replica that knows more than half of a prompt; None: no such, or it has far more to do.

        num_open: requests of each replica there is. All requests may begin alike, so what is known does not count
        where more than twice as many are open as elsewhere, as in peagle.engine.replicas.
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
    """Yield a number for each whole block, which depends on the tokens before it, too."""
    number = 0
    for start in range(0, len(prompt_ids) - BLOCK + 1, BLOCK):
        number = hash((number, *prompt_ids[start : start + BLOCK]))
        yield number
