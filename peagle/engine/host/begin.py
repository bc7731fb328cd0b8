"""Begin requests, and admit them to their slots after their prompts."""

import time
from collections.abc import Sequence

import jax
import numpy as np

from peagle.engine.host import handoff
from peagle.engine.host.constrained import Constrained
from peagle.engine.host.executor import Executor
from peagle.engine.host.handle import Handle
from peagle.engine.host.request_pages import RequestPages
from peagle.engine.memory.kv_memory import KVMemory
from peagle.engine.step.state import SlotParams


def begin(
    handle: Handle, pages: RequestPages, executor: Executor, memory: KVMemory, prefilling: Sequence[Handle]
) -> int | None:
    """Give a request its pages; return how many of its tokens they hold, or None if pages are short.

    prefilling: the requests whose prompts need pages, too.
    """
    if not pages.open(handle, prefilling):
        return None
    assert handle.table is not None
    token_ids, known = handle.computed_ids, handle.table.num_cached_tokens
    handle.rows_in_flight = 0
    if handle.hand_off is not None:
        handoff.put(executor, memory, handle.table, handle.hand_off)
        handle.hand_off, handle.drafter_rows, known = None, len(token_ids), len(token_ids)
    if not (handle.output_ids or handle.num_preempted):
        handle.queued_s = time.perf_counter() - handle.added_s
        handle.num_cached_tokens = known
        memory.pool.count_lookup(handle.table, len(token_ids))
    return known


def admit(
    executor: Executor,
    constrained: Constrained,
    complete: Sequence[tuple[int, Handle]],
    decoding: Sequence[tuple[int, Handle]],
    size: int,
) -> jax.Array:
    """Admit the requests of a chunk's rows to their slots; return their first tokens, packed.

    decoding: (slot, request). size: most prompts of the chunk.
    """
    slots = {handle: slot for slot, handle in decoding}
    params, known, lengths = [], np.full((size,), -1, np.int32), np.ones((size,), np.int32)
    into = np.full((size,), executor.shape.slots, np.int32)
    for row, (_, handle) in enumerate(complete):
        handle.length, into[row] = len(handle.computed_ids), slots[handle]
        lengths[row] = handle.length
        masks = None if handle.output_ids else constrained.first(handle)
        vocab_size = executor.target.vocab_size
        slot = SlotParams.of(handle.request, handle.stop_token_ids, vocab_size, handle.drafting, masks)
        if handle.output_ids:
            known[row] = handle.output_ids[-1]
            slot = slot.continued(handle.output_ids)
        params.append(slot)
    first = executor.admit([row for row, _ in complete], into, lengths, known, params)
    if executor.reads_tokens:
        for _, handle in complete:
            executor.read_tokens(slots[handle], handle.computed_ids)
    return first
