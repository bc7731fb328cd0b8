"""Compile an engine's programs for a device that is only described: weights are shapes without values."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from peagle.engine.host import programs
from peagle.engine.host.engine import Engine
from peagle.engine.host.pass_plans import chunk_plan
from peagle.engine.request import Request
from peagle.engine.step.state import DecodeState, SlotParams
from peagle.ops.expert_matmul import Experts, PackedExperts
from scripts.gpu.shape import Shape
from target.params import TargetParams
from target.random import random_params

Compile: TypeAlias = Callable[[], jax.stages.Compiled]


class Described(Shape):
    """A shape whose weights have no values. lay_out: lays out a layer's experts for the device."""

    def __init__(self, name: str, sharding: jax.sharding.Sharding, lay_out: Callable[[PackedExperts], Experts]) -> None:
        super().__init__(name)
        self.local, self._sharding, self._lay_out = self.config, sharding, lay_out

    def random_weights(self) -> Any:
        def make() -> TargetParams:
            params = random_params(self.local, 0, as_stored=True)
            layers = [
                layer.replace(moe=layer.moe.replace(experts=self._lay_out(layer.moe.experts)))  # type: ignore[attr-defined,arg-type]
                for layer in params.layers
            ]
            return params.replace(layers=tuple(layers))  # type: ignore[attr-defined,no-any-return]

        return self.on_device(make)

    def on_device(self, make: Callable[..., Any], *arguments: Any) -> Any:
        return self.placed(jax.eval_shape(make, *arguments))

    def placed(self, tree: Any, sharding: jax.sharding.Sharding | None = None) -> Any:
        """Place arrays, of which only the shapes are known, on the device, or by this sharding."""
        by = sharding or self._sharding
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=by), tree)

    def placed_state(self, state: DecodeState) -> DecodeState:
        return self.placed(state)  # type: ignore[no-any-return]


def described_programs(shape: Described, engine: Engine) -> Iterator[tuple[str, Compile]]:
    """Yield (name, what compiles it) of each program of prompts, first tokens and steps, greedy and sampled."""
    executor, batches, vocab_size = engine.executor, engine.batches, shape.config.vocab_size
    state = shape.placed_state(executor.shapes)
    count, length = engine.config.pass_shapes[0]
    chunk = chunk_plan((), (), length, np.full((count, sum(engine.memory.table_widths)), -1, np.int32))
    yield "chunk", _compile(*executor.prepared_prefill(state, chunk, with_drafter=True))
    logits, number = shape.placed(jax.ShapeDtypeStruct((1, vocab_size), jnp.bfloat16)), np.zeros((1,), np.int32)
    params = SlotParams.of(Request((0,), 1), (), vocab_size)
    yield "first_token", _compile(programs.first_token_program(False), (logits, number, number, params))
    plan = batches.empty_plan(engine.config.slots)
    for sampled in (False, True):
        for drafts in batches.program_drafts:
            kind = batches.kind(drafts, sampled)
            prepared = executor.prepared_steps(state, plan, kind.no_costs(len(plan)), 1, kind)
            yield f"steps_{drafts}{'_sampled' * sampled}", _compile(*prepared)


def _compile(program: Any, operands: Any) -> Compile:
    return lambda: program.lower(*operands).compile()  # type: ignore[no-any-return]
