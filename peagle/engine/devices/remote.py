"""Run the executor's verbs on several processes: the coordinator calls them, the workers repeat each call.

Only the coordinator, process 0, has an engine: it schedules, measures and reads. It sends each verb, as name and
values, before it calls it. State and pages stay in the executor of each process. So a worker needs no scheduler and no
tokenizer, and decides nothing.

    coordinator  executor.steps(plan, costs, count, kind)      {"verb": "steps", "values": [plan, ..]}
    worker       executor.steps(plan, costs, count, kind)
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import jax
import numpy as np

from peagle.engine.host.executor import Executor
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig
from peagle.engine.step.state import SlotParams
from peagle.engine.step.step_kinds import StepKind
from peagle.protocols import Drafter, Target

Message: TypeAlias = dict[str, Any]
VERBS = (
    "start",
    "prefill",
    "admit",
    "read_tokens",
    "steps",
    "propose",
    "verify",
    "accept_and_commit",
    "relearn",
    "first_not_finite",
)


class Coordinator:
    """Sends the messages of process 0. send: brings a message to all workers, in order."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send, self._executors = send, 0
        self._order = threading.RLock()  # verbs are called in the order in which they are sent

    def together(self, message: Message, call: Callable[[], Any]) -> Any:
        """Send a message, then make the same call as the workers; return the result."""
        with self._order:
            self._send(message)
            return call()

    def executor(
        self, target: Target, drafter: Drafter | None, config: ResolvedConfig, lookup: Drafter | None = None
    ) -> "CoordinatorExecutor":
        """Make the executor of an engine, here and in the workers."""
        number, self._executors = self._executors, self._executors + 1
        drafts = {"drafts": drafter is not None, "lookup": lookup is not None}
        message = {"executor": number, **drafts, "config": _sent(asdict(config))}
        executor: CoordinatorExecutor = self.together(
            message, lambda: CoordinatorExecutor(self, number, target, drafter, config, lookup)
        )
        return executor


class CoordinatorExecutor(Executor):
    """The executor in process 0. Sends each of VERBS before it calls it."""

    has_whole_pages = False

    def __init__(self, coordinator: Coordinator, number: int, *models_and_config: Any) -> None:
        super().__init__(*models_and_config)
        self._coordinator, self._number = coordinator, number

    def sent(self, name: str, values: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        message = {"of": self._number, "verb": name, "values": _sent(values), "options": _sent(options)}
        return self._coordinator.together(message, functools.partial(getattr(Executor, name), self, *values, **options))

    @contextlib.contextmanager
    def compiling_steps(self, passes: Sequence[tuple[np.ndarray, StepKind]]) -> Iterator[None]:  # noqa: ARG002
        """Compile nothing ahead: all processes compile the same programs in the same order, at their dispatch."""
        yield


def _sending(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Executor, name))
    def call(self: CoordinatorExecutor, *values: Any, **options: Any) -> Any:
        return self.sent(name, values, options)

    return call


for _name in VERBS:
    setattr(CoordinatorExecutor, _name, _sending(_name))


class Worker:
    """The executors of another process than 0. models(drafts): see `Pair.models`."""

    def __init__(self, models: Callable[[bool], tuple[Target, Drafter | None]], lookup: Drafter | None = None) -> None:
        self._models, self._lookup = models, lookup
        self.executors: dict[int, Executor] = {}

    def run(self, message: Message) -> None:
        """Execute a message of `Coordinator` or `CoordinatorExecutor`."""
        if "executor" in message:
            target, drafter = self._models(message["drafts"])
            config = ResolvedConfig(**_received(message["config"], target.vocab_size))
            lookup = self._lookup if message["lookup"] else None
            self.executors[message["executor"]] = Executor(target, drafter, config, lookup)
            return
        executor = self.executors[message["of"]]
        values, options = (_received(message[part], executor.target.vocab_size) for part in ("values", "options"))
        getattr(executor, message["verb"])(*values, **options)

    def settle(self) -> None:
        for executor in self.executors.values():
            executor.settle()


def _sent(value: Any) -> Any:
    """Write a value as JSON and arrays. A float becomes an array, which keeps all its bits."""
    if isinstance(value, SlotParams):
        return {"slot": [np.asarray(leaf) for leaf in jax.tree.leaves(value)]}
    if isinstance(value, StepKind):
        return {"kind": _sent(vars(value))}
    if isinstance(value, Mapping):
        return {key: _sent(item) for key, item in value.items()}
    if isinstance(value, float):
        return np.float64(value)
    return [_sent(item) for item in value] if isinstance(value, list | tuple) else value


def _received(value: Any, vocab_size: int) -> Any:
    """Undo `_sent`; lists become tuples."""
    if isinstance(value, list):
        return tuple(_received(item, vocab_size) for item in value)
    if isinstance(value, np.ndarray) and not value.ndim:
        return value.item()
    if not isinstance(value, dict):
        return value
    if "slot" in value:
        shape = jax.tree.structure(SlotParams.of(Request((0,), 1), (), vocab_size))
        return jax.tree.unflatten(shape, value["slot"])
    if "kind" in value:
        return StepKind(**_received(value["kind"], vocab_size))
    return {key: _received(item, vocab_size) for key, item in value.items()}
