"""Run the engine's verbs on the device: prefill, admit, steps, and the three parts of a masked step.

The executor is the engine's only door to the device. It holds the state and the pages. Verbs take host values and
return arrays for the host to read, so several processes can run the same verbs (peagle.engine.devices.remote).

One array of integers, the plan, carries the slots and tables of a pass. No program depends on a request: batches and
chunks come in a few sizes, and steps in a few variants. The state is donated.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from peagle.base import interrupt
from peagle.engine.auto.state import AutoState
from peagle.engine.host import programs
from peagle.engine.host.pass_plans import PlanLayout
from peagle.engine.memory.kv_memory import Sizing
from peagle.engine.resolved import ResolvedConfig
from peagle.engine.step.prefill import Prefilled
from peagle.engine.step.propose import Proposed
from peagle.engine.step.state import DecodeState, SlotParams
from peagle.engine.step.step_kinds import StepKind
from peagle.ops.attention import PagedCache, Pages
from peagle.ops.messages import VerifyOutput
from peagle.protocols import Drafter, Explains, Target

ModelName: TypeAlias = Literal["target", "drafter"]
FillMasks: TypeAlias = Callable[[jax.Array, jax.Array], tuple[np.ndarray, np.ndarray]]
NO_PAGES = PagedCache((), ())


class Executor:
    """The programs of one target, drafter and config, with their state.

    Executors of equal models and sizes share compiled programs. lookup: drafts in adaptive steps, too.
    """

    has_whole_pages = True  # this process has, on all of its devices together

    def __init__(
        self, target: Target, drafter: Drafter | None, config: ResolvedConfig, lookup: Drafter | None = None
    ) -> None:
        self.target, self.drafter, self.config = target, drafter, config
        sizing = Sizing.of(target, drafter, config)
        self._layout, self._num_pages = PlanLayout(sizing.table_widths, sizing.num_target_groups), sizing.num_pages
        self._num_sources = 1 if lookup is None else 2  # of drafts, in adaptive steps
        reader, self._reader_state = (drafter, "drafter_state") if lookup is None else (lookup, "lookup_state")
        self.reads_tokens = reader is not None and not reader.cache_groups  # a drafter without caches does
        self._models, self._tree = jax.tree.flatten((target, drafter, lookup))
        self._plain_models, self._plain_tree = jax.tree.flatten((target, None, None))
        self._target_alone, self._drafters = jax.tree.flatten(target), jax.tree.flatten((drafter, lookup))
        self._reader = jax.tree.flatten(reader)
        self.launches_alone = False  # whether steps launch operations one by one: peagle.engine.host.inspection
        self._state: DecodeState | None = None
        self._prefilled: Prefilled | None = None
        self._proposed: Proposed | None = None
        self._verified: VerifyOutput | None = None

    @property
    def state(self) -> DecodeState:
        """The state of all slots; `start` makes it."""
        assert self._state is not None
        return self._state

    @property
    def started(self) -> bool:
        return self._state is not None

    @property
    def prefilled(self) -> Prefilled:
        """Results of the last chunk, for `admit`."""
        assert self._prefilled is not None
        return self._prefilled

    @property
    def models_text(self) -> str:
        """Describe how the models run: configs, mesh, forms of the weights; the same text in every process."""
        return str(self._tree)

    @functools.cached_property
    def shapes(self) -> DecodeState:
        shapes: DecodeState = jax.eval_shape(self._init_program, self._models)
        return shapes

    def start(self) -> None:
        self._state = self._init_program(self._models)

    @property
    def _init_program(self) -> Any:
        config, num_target = self.config, self._layout.num_target_groups
        sizes = config.slots, config.context, config.num_drafts
        pages = self._num_pages[:num_target], self._num_pages[num_target:]
        return programs.init_program(self._tree, *sizes, *pages, config.adaptive)

    def prefill(self, plan: np.ndarray, with_drafter: bool) -> jax.Array:
        """Compute a chunk (`chunk_plan`); return an array to wait for."""
        state = self.state
        program, operands = self.prepared_prefill(state, plan, with_drafter)
        (target_pages, drafter_pages), self._prefilled = program(*operands)
        drafter_state = PagedCache(drafter_pages, ()) if drafter_pages else state.drafter_state
        target_cache = PagedCache(target_pages, ())
        self._state = dataclasses.replace(state, target_cache=target_cache, drafter_state=drafter_state)
        return self._prefilled.logits

    def admit(
        self,
        rows: Sequence[int],
        slots: np.ndarray,
        length: np.ndarray,
        token_ids: np.ndarray,
        params: Sequence[SlotParams],
    ) -> jax.Array:
        """Admit requests of the last chunk to their slots; return their first tokens and log-probabilities [n, W].

        rows: of the chunk, one or more; params: of each. slots, length and token_ids have n entries, of which those
        after `rows` have no slot. token_ids: the first token if it is known; negative: choose it by the request's own
        parameters. The copy of the result to the host is started.
        """
        size = len(slots)
        index = np.zeros((size,), np.int32)
        index[: len(rows)] = rows
        # each request runs the same size-1 program; a batched one would be compiled anew for every size and engine
        logits, aux_hidden = self.prefilled
        chosen = [
            programs.first_token_program(bool(own.full_logits[0]))(
                _row(logits, row), length[[place]], token_ids[[place]], own
            )
            for place, (row, own) in enumerate(zip(rows, params, strict=True))
        ]
        if size == 1:
            (first,) = chosen
        else:
            first = programs.join_rows([*chosen, *chosen[:1] * (size - len(chosen))], np.int32(0))
        small, kept = _split(self.state)
        stacked = SlotParams.stack(params, size)
        self._state = _join(programs.admit_rows(small, aux_hidden, index, slots, length, first, stacked), kept)
        first.copy_to_host_async()
        return first

    def read_tokens(self, slot: int, token_ids: Sequence[int]) -> None:
        """Let the drafter without caches read the tokens of a slot's request, the pending one excluded."""
        padded = np.zeros((1, self.config.context), np.int32)
        padded[0, : len(token_ids)] = token_ids
        (models, tree), before = self._reader, getattr(self.state, self._reader_state)
        after = programs.read_tokens_program(tree)(models, before, padded, np.int32(len(token_ids)), np.int32(slot))
        self._state = dataclasses.replace(self.state, **{self._reader_state: after})

    def steps(self, plan: np.ndarray, costs: np.ndarray, count: int, kind: StepKind) -> jax.Array:
        """Dispatch `count` steps of the slots of a plan (`step_plan`); return their packed outputs.

        costs: packed (peagle.engine.auto.costs.StepCosts) for adaptive steps, empty for others. Starts the copy of the
        outputs to the host and waits for nothing.
        """
        program, operands = self.prepared_steps(self.state, plan, costs, count, kind)
        after, outputs = program(*operands)
        outputs.copy_to_host_async()
        unused = {name: getattr(self.state, name) for name in _unused_leaves(kind)}
        self._state = dataclasses.replace(after, **unused)
        return outputs  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def compiling_steps(self, passes: Sequence[tuple[np.ndarray, StepKind]]) -> Iterator[None]:
        """Compile the programs of steps, by (plan, kind), in threads while the block compiles others.

        JAX traces one after the other; XLA, which takes longer, compiles them side by side. The block may donate the
        state, of which these programs need the shapes only.
        """
        prepared = [self.prepared_steps(self.state, plan, kind.no_costs(len(plan)), 1, kind) for plan, kind in passes]

        def one(program: Any, operands: list[Any]) -> None:
            interrupt.check()
            program.lower(*operands).compile()

        with ThreadPoolExecutor() as pool:
            compiled = [pool.submit(one, program, operands) for program, operands in prepared]
            try:
                yield
                for future in compiled:
                    future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def prepared_steps(
        self, state: DecodeState, plan: np.ndarray, costs: np.ndarray, count: int, kind: StepKind
    ) -> tuple[Any, list[Any]]:
        """Return (the program of a dispatch of steps, its operands)."""
        models, tree = (self._models, self._tree) if kind.num_drafts else (self._plain_models, self._plain_tree)
        most = self.config.steps_per_dispatch
        program = programs.steps_program(tree, kind, self._layout, most, self.launches_alone)
        unused: dict[str, Any] = dict.fromkeys(_unused_leaves(kind))
        return program, [models, dataclasses.replace(state, **unused), plan, costs, np.int32(count)]

    def prepared_prefill(self, state: DecodeState, plan: np.ndarray, with_drafter: bool) -> tuple[Any, list[Any]]:
        """Return (the program of a chunk, its operands)."""
        absorbs = with_drafter and self.drafter is not None and bool(self.drafter.cache_groups)
        models, tree = (self._models, self._tree) if absorbs else (self._plain_models, self._plain_tree)
        pages = state.target_cache.pages, state.drafter_state.pages if absorbs else ()
        return programs.prefill_program(tree, self._layout), [models, pages, plan]

    def masked_step(self, plan: np.ndarray, kind: StepKind, fill: FillMasks) -> jax.Array:
        """Dispatch one step in three programs; return its packed output [1, B, W].

        fill(drafts, an array of the verification) reads the drafts, while the target verifies them, and returns masks
        and counts for `accept_and_commit`.
        """
        drafts, verified = self.propose(plan, kind), self.verify(plan)
        return self.accept_and_commit(plan, *fill(drafts, verified), kind)

    def propose(self, plan: np.ndarray, kind: StepKind) -> jax.Array:
        """Dispatch the first part of a masked step; return the drafts, whose copy to the host is started."""
        (models, tree), state = self._drafters, self.state
        small = dataclasses.replace(_split(state)[0], adjustments=None)
        program = programs.propose_program(tree, kind, self._layout)
        (drafter_state, lookup_state), self._proposed = program(
            models, (state.drafter_state, state.lookup_state), small, plan
        )
        self._state = dataclasses.replace(self.state, drafter_state=drafter_state, lookup_state=lookup_state)
        self._proposed.draft_token_ids.copy_to_host_async()
        return self._proposed.draft_token_ids

    def verify(self, plan: np.ndarray) -> jax.Array:
        """Dispatch the second part; return an array to wait for."""
        models, tree = self._target_alone
        small = dataclasses.replace(_split(self.state)[0], adjustments=None)
        program = programs.verify_program(tree, self._layout)
        pages, self._verified = program(models, self.state.target_cache.pages, small, plan, self._proposed)
        self._state = dataclasses.replace(self.state, target_cache=PagedCache(pages, ()))
        return self._verified.logits

    def accept_and_commit(self, plan: np.ndarray, masks: np.ndarray, counts: np.ndarray, kind: StepKind) -> jax.Array:
        """Dispatch the last part; return its packed output [1, B, W].

        masks: uint32 [B, K+1, W] (peagle.engine.step.masks). counts: int32 [B], how many drafts of a slot may count.
        """
        small, kept = _split(self.state)
        program = programs.accept_and_commit_program(kind, self._layout)
        after, outputs = program(small, plan, self._proposed, self._verified, masks, counts)
        outputs.copy_to_host_async()
        self._state = _join(after, kept)
        return outputs  # type: ignore[no-any-return]

    def relearn(self) -> None:
        """Forget what steps have learned."""
        auto = AutoState.start(self.config.slots, self.config.num_drafts, self._num_sources)
        self._state = dataclasses.replace(self.state, auto=auto)

    def read_pages(self, layer: int, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Copy pages of a layer to the host: (keys, values). Layers: the target's, then the drafter's."""
        pages = self._pools[layer]
        index = np.asarray(numbers, np.int32)
        if _on_host(pages.key):
            return np.asarray(pages.key)[index], np.asarray(pages.value)[index]
        return tuple(np.asarray(programs.gather_pages(leaf, index)) for leaf in (pages.key, pages.value))  # type: ignore[return-value]

    def write_pages(self, layer: int, numbers: Sequence[int], keys: np.ndarray, values: np.ndarray) -> None:
        pools = list(self._pools)
        pools[layer] = programs.write_pages(pools[layer], np.asarray(numbers, np.int32), keys, values)
        split = len(self.state.target_cache.pages)
        drafter_state = self.state.drafter_state
        if isinstance(drafter_state, PagedCache):
            drafter_state = PagedCache(tuple(pools[split:]), ())
        self._state = dataclasses.replace(
            self.state, target_cache=PagedCache(tuple(pools[:split]), ()), drafter_state=drafter_state
        )

    @property
    def _pools(self) -> tuple[Pages, ...]:
        drafter_state = self.state.drafter_state
        drafter_pages = drafter_state.pages if isinstance(drafter_state, PagedCache) else ()
        return (*self.state.target_cache.pages, *drafter_pages)

    def first_not_finite(self, name: ModelName, token_ids: Sequence[int]) -> str | None:
        """Name a model's first output that is not finite (peagle.protocols.Explains)."""
        model = self.target if name == "target" else self.drafter
        assert isinstance(model, Explains)
        return model.first_not_finite(token_ids)

    def settle(self) -> None:
        if self._state is not None:
            jax.block_until_ready((self._state.done, self._state.target_cache))


def _unused_leaves(kind: StepKind) -> list[str]:
    """Name the leaves of the state that steps of a kind do not take, because every leaf costs host time."""
    names = [] if kind.num_drafts else ["drafter_state", "lookup_state", "auto"]
    names += [] if kind.keep_drafter_input else ["drafter_input"]
    return names if kind.full_logits else [*names, "adjustments"]


def _split(state: DecodeState) -> tuple[DecodeState, tuple[PagedCache, Any, Any]]:
    """Return (the state without pages and drafter states, these pages and states)."""
    small = dataclasses.replace(state, target_cache=NO_PAGES, drafter_state=None, lookup_state=None)
    return small, (state.target_cache, state.drafter_state, state.lookup_state)


def _join(small: DecodeState, kept: tuple[PagedCache, Any, Any]) -> DecodeState:
    return dataclasses.replace(small, target_cache=kept[0], drafter_state=kept[1], lookup_state=kept[2])


def _on_host(leaf: jax.Array) -> bool:
    """Whether NumPy reads an array in place: it is whole and in host memory."""
    devices = leaf.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def _row(logits: jax.Array, row: int) -> jax.Array:
    """Take a row [1, V]; waits for nothing."""
    return logits if logits.shape[0] == 1 else programs.take_row(logits, np.int32(row))
