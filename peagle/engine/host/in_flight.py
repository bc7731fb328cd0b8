"""A dispatch that was sent and not yet read."""

from dataclasses import dataclass

import jax
import numpy as np

from peagle.engine.host.handle import Handle
from peagle.engine.host.step_batches import StepBatch


@dataclass(frozen=True)
class InFlight:
    """What a dispatch computes, and for whom: it carries its own map from rows to requests."""

    batch: StepBatch | None  # None: a chunk of prompts
    result: jax.Array
    requests: tuple[Handle | None, ...]  # of each row of the result; () if a chunk completed no prompt
    sent_s: float

    @property
    def most_tokens(self) -> int:
        """The most tokens that its steps add to a request."""
        return 0 if self.batch is None else self.batch.count * (self.batch.kind.num_drafts + 1)

    @property
    def ready(self) -> bool:
        return bool(self.result.is_ready())  # type: ignore[attr-defined]

    def wait(self) -> np.ndarray:
        """Wait for the result and copy it to the host, if a request has a row of it."""
        if self.requests:
            return np.asarray(self.result)
        jax.block_until_ready(self.result)
        return np.zeros((0,), np.int32)
