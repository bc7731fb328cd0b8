"""What measuring code asks of an engine without other requests (`engine.one`)."""

import contextlib
from collections.abc import Iterator

import jax

from peagle.engine.host.engine import Engine
from peagle.engine.host.executor import Executor


@contextlib.contextmanager
def launching_alone(executor: Executor) -> Iterator[bool]:
    """Launch a step's operations one by one: in a CUDA graph a profiler cannot tell them apart.

    Yields whether steps compile anew at their first dispatch: False on a CPU, where this changes nothing.
    """
    executor.launches_alone = jax.default_backend() == "gpu"
    try:
        yield executor.launches_alone
    finally:
        executor.launches_alone = False


def step_programs(engine: Engine, sampled: bool = False) -> list[jax.stages.Compiled]:
    """Compile the step programs once more."""
    executor, batches = engine.executor, engine.batches
    state, plan = executor.shapes, batches.empty_plan(engine.config.slots)
    prepared = [
        executor.prepared_steps(state, plan, kind.no_costs(len(plan)), 1, kind)
        for kind in (batches.kind(drafts, sampled) for drafts in batches.program_drafts)
    ]
    return [program.lower(*operands).compile() for program, operands in prepared]
