"""Tiny targets and scripted drafters for the engine's tests."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from drafter.config import DrafterConfig
from peagle.engine.auto.costs import CostTable
from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.host.engine import Engine
from peagle.engine.host.handle import Handle
from peagle.engine.request import Request, StepRecord, TokenChunk
from peagle.engine.step.state import DecodeState
from peagle.ops.attention import CacheGroup, PagedCache, group_layers
from peagle.ops.messages import Choose, DrafterInput, DraftOutput, VerifyOutput, likeliest_of
from peagle.ops.rope import RopeConfig, Yarn
from target.config import FULL, SLIDING, TargetConfig
from target.model import GptOss
from target.params import init_params

WINDOW = 8
CONFIG = TargetConfig(
    hidden_size=24,
    num_heads=6,
    num_kv_heads=3,
    head_dim=10,
    vocab_size=37,
    layer_types=(SLIDING, FULL),
    sliding_window=WINDOW,
    num_experts=5,
    top_k=2,
    expert_width=14,
    swiglu_limit=7.0,
    rms_norm_eps=1e-5,
    max_positions=4096,
    rope=RopeConfig(10, 150000.0, Yarn(32.0, 64, truncate=False)),
)


@functools.cache
def tiny_target(seed: int = 0, aux_layer_ids: tuple[int, ...] = ()) -> GptOss:
    """Make a random GPT-OSS of non-zero parameters, biases and sinks included, with an output that does not loop."""
    params = jax.jit(init_params, static_argnums=0)(CONFIG, jax.random.key(seed))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    leaves = [jnp.asarray(leaf + rng.normal(0, 0.3, leaf.shape).astype(leaf.dtype)) for leaf in map(np.asarray, leaves)]
    return GptOss(jax.tree.unflatten(tree, leaves), CONFIG, aux_layer_ids)


def drafter_config(target: TargetConfig = CONFIG, **changes: Any) -> DrafterConfig:
    """Make the config of a small P-EAGLE drafter that reads two layers of a target."""
    config = DrafterConfig(
        hidden_size=20,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        mlp_width=26,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        mask_token_id=3,
        rope=RopeConfig(6, 10000.0),
        num_aux_layers=2,
        aux_layer_ids=(0, 1),
    )
    return dataclasses.replace(config, **changes)


@flax.struct.dataclass
class WithoutCaches:
    """A model that keeps no keys and values."""

    def init_pages(self, num_pages: Sequence[int]) -> tuple[()]:
        return ()

    def init_cache(self, batch: int, capacity: int, widest_write: int) -> PagedCache:
        return PagedCache((), ())


@flax.struct.dataclass
class WithoutMemory(WithoutCaches):
    """A drafter that keeps nothing of what it has read."""

    @property
    def cache_groups(self) -> tuple[()]:
        return ()

    def init_state(self, batch: int, capacity: int, widest_write: int) -> Any:
        return ()

    def restart(self, state: Any) -> Any:
        return state

    def absorb(self, state: Any, token_ids: jax.Array, aux_hidden: jax.Array, positions: jax.Array) -> Any:
        return state


@flax.struct.dataclass
class Scripted(WithoutMemory):
    """A drafter that proposes script[index] at each sequence index, from its slot's script."""

    script: jax.Array  # [B, S] int32: the token proposed for each sequence index

    def init_state(self, batch: int, capacity: int, widest_write: int) -> jax.Array:
        return self.script[:batch] + 0  # the state is donated

    def propose(
        self,
        state: jax.Array,
        fresh: DrafterInput,
        widths: jax.Array,
        num_drafts: int,
        choose: Choose = likeliest_of,
    ) -> tuple[DraftOutput, jax.Array]:
        index = (fresh.first_position + fresh.num + 1)[:, None] + jnp.arange(num_drafts, dtype=jnp.int32)[None, :]
        return DraftOutput(jnp.take_along_axis(state, jnp.clip(index, 0, state.shape[1] - 1), axis=1)), state


class TargetWithoutLayers(WithoutCaches):
    """A target whose logits are a function of each row's token and position: `logits`."""

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return group_layers(())

    def logits(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        raise NotImplementedError

    def extend(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        cache: PagedCache,
        logit_rows: jax.Array | None = None,
        writes: jax.Array | None = None,
    ) -> tuple[VerifyOutput, PagedCache]:
        no_aux = jnp.zeros((*token_ids.shape, 0))
        if logit_rows is not None:
            token_ids, positions = (jnp.take_along_axis(rows, logit_rows, axis=1) for rows in (token_ids, positions))
        return VerifyOutput(self.logits(token_ids, positions), no_aux), cache


@flax.struct.dataclass
class MarkovTarget(TargetWithoutLayers):
    """A target without a cache: the next token depends only on the last, logits = table[token]."""

    table: jax.Array  # [V, V]

    @property
    def vocab_size(self) -> int:
        return self.table.shape[0]

    @property
    def max_positions(self) -> int:
        return 1 << 20

    def logits(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        return self.table[token_ids]


@flax.struct.dataclass
class FixedLogits(WithoutMemory):
    """A drafter of constant distributions: logits [K, V] at every step."""

    logits: jax.Array

    def propose(
        self, state: Any, fresh: DrafterInput, widths: jax.Array, num_drafts: int, choose: Choose = likeliest_of
    ) -> tuple[DraftOutput, Any]:
        batch = fresh.num.shape[0]
        logits = jnp.broadcast_to(self.logits[None], (batch, *self.logits.shape))
        token_ids, confidence = choose(logits, None, 0)
        return DraftOutput(token_ids, logits, confidence), state


def costs(k: int, gains: Mapping[int, bool]) -> CostTable:
    """Make times of steps: where drafting gains it takes next to no time, so that all drafts are verified.

    gains: by number of active slots; a number without an entry is as the next smaller one.
    """

    def times(first: int, last: int, much: bool) -> tuple[tuple[int, float], ...]:
        return ((first, float(first > 0)), (last, 1e3 if much else 1.0 + 1e-4))

    verify = {number: times(number, number * (k + 1), not gain) for number, gain in gains.items()}
    return CostTable(verify, {number: ((0, 0.0), (number * k, 1e-4)) for number in gains})


def drafting_at(engine: Engine, gains: Mapping[int, bool]) -> Engine:
    """Give an adaptive engine the times of `costs`."""
    engine.costs = costs(engine.config.num_speculative_tokens, gains)
    return engine


def check_state(state: DecodeState, capacity: int, slots: Sequence[int] | None = None) -> None:
    """Assert the invariants of a state. slots: the decoding ones; None: all."""
    small = dataclasses.replace(
        state,
        target_cache=None,  # type: ignore[arg-type]
        drafter_state=None,
        auto=state.auto and (state.auto.slots, state.auto.pauses),  # type: ignore[arg-type]
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(small):
        name = jax.tree_util.keystr(path)
        assert leaf.shape[:1] == (state.slots,), f"{name} has shape {leaf.shape}, not {state.slots} rows"
    decodes = np.isin(np.arange(state.slots), np.arange(state.slots) if slots is None else slots)
    active = ~np.asarray(state.done) & decodes
    length, remaining = np.asarray(state.length)[active], np.asarray(state.remaining)[active]
    assert (length >= 1).all(), length
    assert (remaining >= 1).all(), remaining
    assert (length + remaining <= capacity).all(), (length, remaining, capacity)
    if state.drafter_input is not None:
        drafting = np.asarray(state.may_draft) & decodes
        waiting = jax.tree.map(lambda leaf: np.asarray(leaf)[drafting], state.drafter_input)
        length, num, first = np.asarray(state.length)[drafting], waiting.num, waiting.first_position
        assert ((num >= 1) & (num <= waiting.token_ids.shape[1])).all(), num
        assert (first + num == length).all(), (first, num, length)
        last = np.take_along_axis(waiting.token_ids, num[:, None] - 1, axis=1)[:, 0]
        assert (last == np.asarray(state.pending_token)[drafting]).all()


def check_whole(engine: Engine) -> None:
    """Assert the invariants of an engine's state and of its pages; an idle one holds no page."""
    check_state(engine.executor.state, engine.config.context, [slot for slot, _ in engine.decoding])
    engine.memory.pool.check_integrity()
    if not engine.busy:
        for number, count in enumerate(engine.memory.num_pages):
            assert engine.memory.pool.num_available(number) == count


def follow(engine: AnyEngine, handle: Handle) -> Iterator[TokenChunk]:
    """Yield the chunks of a request until it ends; raise its error, if it has one."""
    for _, chunk in engine.run([handle]):
        yield chunk
    if handle.error is not None and handle.has_reader:
        raise handle.error


def stepped(engine: AnyEngine, handles: Iterable[Handle]) -> list[tuple[Handle, TokenChunk]]:
    """Run a step; take the chunks of these requests."""
    engine.step()
    return taken(handles)


def taken(handles: Iterable[Handle]) -> list[tuple[Handle, TokenChunk]]:
    return [(handle, handle.inbox.popleft()) for handle in handles for _ in range(len(handle.inbox))]


def decode(
    engine: Engine, requests: Sequence[Request], joining: bool = False
) -> tuple[list[list[int]], list[list[StepRecord]]]:
    """(tokens, step records) of each request. joining: each begins when the one before it has its first token."""
    handles: list[Handle] = []
    for request in requests:
        handles.append(engine.add(request))
        while joining and not handles[-1].output_ids:
            engine.step()
    tokens: dict[Handle, list[int]] = {handle: [] for handle in handles}
    records: dict[Handle, list[StepRecord]] = {handle: [] for handle in handles}
    for handle, chunk in engine.run(handles):
        tokens[handle] += chunk.token_ids
        records[handle] += chunk.steps
    engine.settle()
    return list(tokens.values()), list(records.values())
