"""Scripted drafters and a target without caches, as peagle.engine has them."""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp

from peagle.engine.engine import Engine
from peagle.engine.request import Request, StepRecord
from peagle.ops.messages import Draft, Fresh, TargetOutput
from tests.peagle.toys import CONFIG, WINDOW, tiny_target

__all__ = ["CONFIG", "WINDOW", "FixedLogits", "MarkovTarget", "Scripted", "decode", "tiny_target"]


@flax.struct.dataclass
class Scripted:
    """Proposes script[index] for the token at each sequence index, from its row's own script; forgets everything
    else."""

    script: jax.Array  # [B, S] int32: the token proposed for each sequence index

    def init_state(self, batch: int, capacity: int, num_drafts: int) -> None:
        pass

    def absorb(self, state: None, token_ids: jax.Array, aux_hidden: jax.Array, positions: jax.Array) -> None:
        pass

    def propose(self, state: None, fresh: Fresh, num_drafts: int, widths: jax.Array) -> tuple[Draft, None]:
        index = (fresh.first_position + fresh.num + 1)[:, None] + jnp.arange(num_drafts, dtype=jnp.int32)[None, :]
        return Draft(jnp.take_along_axis(self.script, jnp.clip(index, 0, self.script.shape[1] - 1), axis=1)), state


@flax.struct.dataclass
class MarkovTarget:
    """A target whose next token depends on the last one alone: logits = table[token]. Holds no cache."""

    table: jax.Array  # [V, V]

    @property
    def vocab_size(self) -> int:
        return self.table.shape[0]

    @property
    def max_positions(self) -> int:
        return 1 << 20

    def init_cache(self, batch: int, capacity: int, widest_write: int) -> None:
        pass

    def extend(
        self, token_ids: jax.Array, positions: jax.Array, cache: None, logit_rows: jax.Array | None = None
    ) -> tuple[TargetOutput, None]:
        read = token_ids if logit_rows is None else jnp.take_along_axis(token_ids, logit_rows, axis=1)
        return TargetOutput(self.table[read], jnp.zeros((*token_ids.shape, 0))), cache


@flax.struct.dataclass
class FixedLogits:
    """A drafter whose distributions never change: logits [K, V] at every step."""

    logits: jax.Array

    def init_state(self, batch: int, capacity: int, num_drafts: int) -> None:
        pass

    def absorb(self, state: None, token_ids: jax.Array, aux_hidden: jax.Array, positions: jax.Array) -> None:
        pass

    def propose(self, state: None, fresh: Fresh, num_drafts: int, widths: jax.Array) -> tuple[Draft, None]:
        batch = fresh.num.shape[0]
        logits = jnp.broadcast_to(self.logits[None], (batch, *self.logits.shape))
        return Draft(jnp.argmax(logits, axis=-1).astype(jnp.int32), logits), state


def decode(engine: Engine, requests: Sequence[Request]) -> tuple[list[list[int]], list[list[StepRecord]]]:
    """(tokens, step records) of each request."""
    tokens: list[list[int]] = [[] for _ in requests]
    records: list[list[StepRecord]] = [[] for _ in requests]
    for place, chunk in engine.generate(requests):
        tokens[place] += chunk.token_ids
        records[place] += chunk.steps
    return tokens, records
