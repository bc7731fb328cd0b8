"""Programs that several processes run alike: one leads, the others follow, call by call.

The leader has the engine: it alone schedules, measures and reads. Each call of a program is sent before it is made, as
its name and its values. The trees of arrays among its operands are those that earlier calls left, on both sides.

    leader     state, _ = steps(state, widths, ..)                      {"call": "steps", "values": [widths, ..]}
    follower   held["state"], _ = steps(held["state"], widths, ..)

So a follower needs no scheduler and no tokenizer, and decides nothing. What the prefix cache keeps has a number.
"""

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from peagle.engine.programs import Programs
from peagle.engine.request import Request
from peagle.engine.state import Prefix, SlotParams
from peagle.engine.step import StepKind
from peagle.ops.errors import InputError
from peagle.protocols import Drafter, Target

Message: TypeAlias = dict[str, Any]
KEPT = "kept"
# call -> (the trees that it takes first, those that it returns); None: what the leader alone reads
CALLS: dict[str, tuple[tuple[str, ...], tuple[str | None, ...]]] = {
    "init": ((), ("state", "lane")),
    "extend": (("lane",), ("lane", "logits")),
    "admit": (("state", "lane", "logits"), ("state", None)),
    "steps": (("state",), ("state", None)),
    "propose": (("state",), ("state", "proposed")),
    "verify": (("state", "proposed"), ("state", "verified")),
    "accept_and_commit": (("state", "proposed", "verified"), ("state", None)),
    "cut_block": (("lane",), (KEPT,)),
    "cut_snapshot": (("lane",), (KEPT,)),
    "put_blocks": (("lane",), ("lane",)),
    "put_snapshot": (("lane",), ("lane",)),
    "relearn": (("lane",), ("lane",)),
    "extract": (("state", "lane"), ("lane",)),
    "absorb": (("state",), ("state",)),
    "evict": (("state",), ("state",)),
    "first_not_finite": ((), (None,)),
}


class Kept:
    """A block or a snapshot of the leader's. The followers drop theirs after this one is gone."""

    def __init__(self, number: int, value: Any) -> None:
        self.number, self.value = number, value


class Lead:
    """What a leading process sends. send: brings a message to all followers, in order."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send, self._engines = send, 0
        self._order = threading.RLock()  # calls are made in the order in which they are sent

    def together(self, message: Message, call: Callable[[], Any]) -> Any:
        """Send a message, then make the call that the followers make when it arrives; return the result."""
        with self._order:
            self._send(message)
            return call()

    def programs(self, target: Target, drafter: Drafter | None, *shape: Any) -> "Leading":
        """Make the programs of an engine, here and on the followers. shape: what `Programs` takes after the models."""
        *numbers, blocks = shape
        if blocks is not None:
            raise InputError("a target over several processes does not prefill at once; leave out --prefill blocked")
        number, self._engines = self._engines, self._engines + 1
        drafts, sampled = drafter is not None, not getattr(drafter, "deterministic", True)
        message = {"programs": number, "drafts": drafts, "sampled": sampled, "shape": numbers}
        made: Leading = self.together(message, lambda: Leading(self, number, target, drafter, *numbers))
        return made


class Leading(Programs):
    """The programs of the leader. Each call in CALLS is sent before it is made."""

    def __init__(self, lead: Lead, number: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lead, self._number = lead, number
        self._held: dict[str, Any] = {}
        self._num_kept, self._gone = 0, collections.deque[int]()

    def init_lane(self) -> Prefix:
        """Raise InputError: this is how an engine begins that hands requests over."""
        raise InputError("a target over several processes neither takes nor hands over requests; leave the role out")

    def sent(self, name: str, operands: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Send a call of this name, and make it."""
        takes, returns = CALLS[name]
        for tree, operand in zip(takes, operands, strict=False):
            assert operand is self._held[tree], f"{name} of another {tree} than the last one"
        values = operands[len(takes) :]
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        message = {"engine": self._number, "call": name, "values": _sent(values), "options": _sent(options)}
        call = functools.partial(getattr(Programs, name), self, *operands[: len(takes)], *_own(values), **options)
        result = self._lead.together({**message, "gone": gone}, call)
        if returns == (KEPT,):
            kept = Kept(self._num_kept, result)
            self._num_kept += 1
            weakref.finalize(kept, self._gone.append, kept.number)
            return kept
        _hold(self._held, returns, result)
        return result


def _leading(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Programs, name))
    def call(self: Leading, *operands: Any, **options: Any) -> Any:
        return self.sent(name, operands, options)

    return call


for _name in CALLS:
    setattr(Leading, _name, _leading(_name))


class Follower:
    """The programs of a following process. models(drafts, sampled): the models of an engine."""

    def __init__(self, models: Callable[[bool, bool], tuple[Target, Drafter | None]]) -> None:
        self._models = models
        self._engines: dict[int, tuple[Programs, int, dict[str, Any]]] = {}
        self._kept: dict[tuple[int, int], Any] = {}
        self._num_kept: collections.Counter[int] = collections.Counter()

    def run(self, message: Message) -> None:
        """Do what a message of `Lead` or `Leading` was sent for."""
        if "programs" in message:
            target, drafter = self._models(message["drafts"], message["sampled"])
            self._engines[message["programs"]] = Programs(target, drafter, *message["shape"]), target.vocab_size, {}
            return
        number, name = message["engine"], message["call"]
        programs, vocab_size, held = self._engines[number]
        takes, returns = CALLS[name]
        for gone in message["gone"]:
            del self._kept[number, gone]

        def received(value: Any) -> Any:
            return _received(value, vocab_size, lambda kept: self._kept[number, kept])

        values, options = received(message["values"]), received(message["options"])
        result = getattr(programs, name)(*(held[tree] for tree in takes), *values, **options)
        if returns == (KEPT,):
            self._kept[number, self._num_kept[number]] = result
            self._num_kept[number] += 1
        else:
            _hold(held, returns, result)

    def settle(self) -> None:
        """Wait for the device."""
        jax.block_until_ready([held for _, _, held in self._engines.values()])


def _hold(held: dict[str, Any], returns: tuple[str | None, ...], result: Any) -> None:
    """Keep the trees of a result for later calls."""
    for tree, value in zip(returns, result if len(returns) > 1 else (result,), strict=True):
        if tree is not None:
            held[tree] = value


def _own(value: Any) -> Any:
    """Take what the leader keeps out of its wrapping."""
    if isinstance(value, Kept):
        return value.value
    return tuple(map(_own, value)) if isinstance(value, list | tuple) else value


def _sent(value: Any) -> Any:
    """Write a value as JSON and arrays. A float becomes an array, which keeps all of it."""
    if isinstance(value, Kept):
        return {KEPT: value.number}
    if isinstance(value, SlotParams):
        return {"slot": [np.asarray(leaf) for leaf in jax.tree.leaves(value)]}
    if isinstance(value, StepKind):
        return {"kind": _sent(vars(value))}
    if isinstance(value, Mapping):
        return {key: _sent(each) for key, each in value.items()}
    if isinstance(value, float):
        return np.float64(value)
    return [_sent(each) for each in value] if isinstance(value, list | tuple) else value


def _received(value: Any, vocab_size: int, kept: Callable[[int], Any]) -> Any:
    """Undo `_sent`; lists are left as tuples."""
    if isinstance(value, list):
        return tuple(_received(each, vocab_size, kept) for each in value)
    if isinstance(value, np.ndarray) and not value.ndim:
        return value.item()
    if not isinstance(value, dict):
        return value
    if KEPT in value:
        return kept(value[KEPT])
    if "slot" in value:
        shape = jax.tree.structure(SlotParams.of(Request((0,), 1), (), vocab_size))
        return jax.tree.unflatten(shape, value["slot"])
    if "kind" in value:
        return StepKind(**_received(value["kind"], vocab_size, kept))
    return {key: _received(each, vocab_size, kept) for key, each in value.items()}
