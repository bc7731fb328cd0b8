"""Prefill and THE loop: one for speculation and plain decoding, double-buffered.

The loop dispatches step n + 1 before it reads step n's few integers, which are copied to the host while the device
works: two steps in flight, the host one step late. What was computed past a row's end is never shown.

    device | prefill          | step 0                    | step 1             | step 2 ...
    host   | dispatch prefill | read first, dispatch 0, 1 | read 0, dispatch 2 | read 1 ...

A dispatch costs the host a fraction of a millisecond. Where a step is as quick as that, one dispatch holds several, and
an adaptive run has a program for each number of drafts, as lean as that of a run with this K: choosing in each step
would cost what it gains. The host chooses the next one, by what the outputs it has read so far tell (policy.Course).
"""

import collections
import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from peagle import costs, policy
from peagle.autoregressive import NoDrafter
from peagle.config import Ladder, SamplingConfig, SpeculationConfig
from peagle.costs import Running, Steps
from peagle.ops import interrupt, native
from peagle.ops.errors import InputError
from peagle.ops.likeliest import NO_TOKEN
from peagle.policy import Costs, Course, Outlook, Turns
from peagle.protocols import Drafter, Explains, PyTree, Target
from peagle.sampling import TARGET, choose, row_keys, uniforms
from peagle.state import DecodeState, StepOutput, init_state
from peagle.step import steps, steps_of

SMALLEST_BUCKET = 32
STEPS_THAT_SHARE_A_CHOICE = 8  # where a dispatch holds as many, -k auto chooses once for all of them


@dataclass(frozen=True)
class Request:
    """A prompt to go on with. Its random numbers are a function of (seed, index, position) alone; `index` is its
    place in the input."""

    index: int
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**31:
            raise InputError(f"seed is {self.seed}; expected an integer in 0..{2**31 - 1}")


@dataclass(frozen=True)
class Decision:
    """What a step decided for a row, before a stop token or the budget cut it. `length` is that before the step:
    prompt + emitted - 1."""

    length: int
    draft_token_ids: tuple[int, ...]  # those that were verified: none in a plain step
    num_accepted: int
    next_token: int
    confidence: tuple[float, ...] = ()  # the drafter's, of the same drafts; 0 where it has none


@dataclass(frozen=True)
class Emission:
    """What one step gave one request, as soon as the host knows it; `decision` is None for the first token, which
    prefill gives. `time_s` is a reading of time.perf_counter()."""

    request: Request
    token_ids: tuple[int, ...]
    time_s: float
    decision: Decision | None = None


class _NotFinite(Exception):
    """A model's outputs for this request, behind these tokens, are not finite."""

    def __init__(self, part: Literal["target", "drafter"], request: Request, token_ids: Sequence[int]) -> None:
        super().__init__(f"the {part}'s outputs are not finite")
        self.part, self.request, self.token_ids = part, request, tuple(token_ids)


_traces = collections.Counter({"prefill": 0, "step": 0})


@functools.partial(jax.jit, static_argnames=("capacity", "draft_places"))
def _prefill(
    target: Target, drafter: Drafter, token_ids: jax.Array, lengths: jax.Array, *, capacity: int, draft_places: int
) -> tuple[jax.Array, jax.Array, PyTree, PyTree]:
    """(logits after the last token [B, V], its aux_hidden [B, A], target caches, drafter state) of the prompts
    token_ids[:, :lengths]. Nothing here is about what happens to the logits: all samplings, and neighbouring K, share
    this program."""
    _traces["prefill"] += 1
    batch = token_ids.shape[0]
    output, caches = target.prefill(token_ids, lengths, target.init_cache(batch, capacity, draft_places + 1))
    drafter_state = drafter.init_state(batch, capacity, draft_places)
    drafter_state = drafter.prefill(drafter_state, token_ids, lengths, output.aux_hidden)
    last_aux = jnp.take_along_axis(output.aux_hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return output.logits, last_aux, caches, drafter_state


@functools.partial(jax.jit, static_argnames=("ladder", "sampling"))
def _first(
    logits: jax.Array,
    last_aux: jax.Array,
    lengths: jax.Array,
    budgets: jax.Array,
    seeds: jax.Array,
    indices: jax.Array,
    stop_token_ids: jax.Array,
    before: tuple[Outlook, Outlook] | None,
    *,
    ladder: Ladder,
    sampling: SamplingConfig,
) -> tuple[DecodeState, jax.Array, Outlook | None]:
    """(state but for caches, first token [B], its outlook) of prompts with these logits behind them; a row of budget 0
    is done from the start. `before`: the outlooks at the beginning and at the end of the requests before, where each
    step chooses."""
    keys = row_keys(seeds, indices)
    random = None if sampling.greedy else uniforms(keys, lengths[:, None])[:, 0, TARGET]
    token = choose(logits, sampling, random)
    outlook = None if before is None else policy.again(ladder, *before)
    state = init_state(token, lengths, last_aux, ladder, outlook, budgets, keys, stop_token_ids)
    return state, token, outlook


@functools.cache
def _program(
    models: Any, state: Any, ladder: Ladder, sampling: SamplingConfig, count: int, rung: int | None = None
) -> Any:
    """The steps as a program of (leaves of target and drafter, leaves of the state, which are donated, how many steps
    at most, if there is a rung with drafts), for these tree structures: (leaves of the state after them, what the host
    reads). Given the trees themselves, JAX would walk through all of them in Python at every dispatch, which takes as
    long as a step of a small model."""

    def _steps(
        model_leaves: list[jax.Array], state_leaves: list[jax.Array], limit: jax.Array | None = None
    ) -> tuple[list[jax.Array], jax.Array]:
        _traces["step"] += 1
        target, drafter = jax.tree.unflatten(models, model_leaves)
        before = jax.tree.unflatten(state, state_leaves)
        run = functools.partial(steps_of, rung) if rung else steps
        after, outputs = run(target, drafter, before, ladder, sampling, count, limit)
        return jax.tree.leaves(after), _counted_as_long(outputs) if native.available() else outputs

    # what the profiler calls it
    _steps.__name__ += "".join(f"_{size}" for size in ladder) + ("" if rung is None else f"_of_{ladder[rung]}")
    return jax.jit(_steps, donate_argnums=1)


def _counted_as_long(outputs: jax.Array) -> jax.Array:
    """The same outputs, of a program that is dispatched and not waited for.

    XLA on CPU runs a program inside the call that dispatches it if it counts fewer than 1000 operations in it
    (cheap_computation_ in its PjRt CPU client), and in compiled kernels it counts none. So here are some for it to
    count, in a branch that is never taken: the number of emitted tokens is not negative.
    """
    emitted = outputs[0, 0, 0]

    def never(outputs: jax.Array) -> jax.Array:
        return outputs + jnp.sum(jnp.arange(4000, dtype=jnp.int32) * emitted)

    return jax.lax.cond(emitted < 0, never, lambda outputs: outputs, outputs)


def trace_counts() -> dict[str, int]:
    """Programs traced so far in this process: one step per (batch, K, capacity) of a pair, or one for each number of
    drafts where the steps of a dispatch share it, and one prefill per bucket, which neighbouring K share."""
    return dict(_traces)


@dataclass
class Engine:
    """A target and a drafter with the shape of a run. `compile_s` adds up what `warm_up` took.

    steps_per_dispatch changes when tokens reach the host, and how often an adaptive run chooses; never which tokens.
    costs are what it chooses by; where none are given they are found before the first request (peagle.costs),
    costs_found says how, and, where the steps of a dispatch share a choice, each request corrects them for the next.
    Where they say that drafting cannot pay, or a drafter that did not pay still rests for longer than a request may
    get, `plain` decodes in this engine's place, if there is one.
    """

    target: Target
    drafter: Drafter
    config: SpeculationConfig
    stop_token_ids: tuple[int, ...] = ()
    steps_per_dispatch: int = 1
    costs: Costs | None = None
    plain: "Engine | None" = None
    compile_s: float = field(default=0.0, init=False)
    costs_found: str | None = field(default=None, init=False)
    _outlooks: tuple[Outlook, Outlook] | None = field(default=None, init=False, repr=False)
    _running_costs: Running | None = field(default=None, init=False, repr=False)
    _warm: set[int] = field(default_factory=set, init=False, repr=False)

    def check(self, request: Request) -> None:
        """Raises InputError, before any work, for a request that cannot be run."""
        prompt, capacity, name = request.prompt_ids, self.config.capacity, f"prompt {request.index}"
        if not prompt:
            raise InputError(f"{name} is empty; expected at least one token")
        if outside := [i for i in prompt if not 0 <= i < self.target.vocab_size]:
            raise InputError(
                f"{name} holds token id {outside[0]}, outside the vocabulary; expected 0..{self.target.vocab_size - 1}"
            )
        if request.max_new_tokens < 1:
            raise InputError(f"{request.max_new_tokens} new tokens asked for; expected 1 or more")
        if len(prompt) + request.max_new_tokens > capacity:
            raise InputError(
                f"{name} has {len(prompt)} tokens and {request.max_new_tokens} new ones are asked for, but the context "
                f"holds {capacity}: shorten one of them or raise the context"
            )

    def warm_up(self, requests: Sequence[Request], measuring: Callable[[], object] = lambda: None) -> None:
        """Compiles, and runs once, every program the requests need, so that no time measured later holds a
        compilation. `measuring` is called where costs are measured then, which takes seconds."""
        started = time.perf_counter()
        for bucket in sorted({self._bucket(batch) for batch in self._batches(requests)} - self._warm):
            dummy = [Request(0, (0,), max_new_tokens=2)]
            with self._learning_nothing():
                # whether it is finite behind a token that nobody asked about is not looked into
                with contextlib.suppress(_NotFinite):
                    for _ in self._decode(dummy, bucket):
                        pass
                for rung in self._rungs if not self._warm else ():
                    self._dispatch_once(dummy, bucket, rung)
            self._warm.add(bucket)
            self.compile_s += time.perf_counter() - started
            started = time.perf_counter()
        if self.plain is not None:
            before = self.plain.compile_s
            self.plain.warm_up(requests)
            self.compile_s += self.plain.compile_s - before
        if self.config.adaptive and self.costs is None:
            self._find_costs(measuring)

    def _dispatch_once(self, requests: Sequence[Request], bucket: int, rung: int | None) -> None:
        """A dispatch of that rung has run, and its caches are gone: nobody holds them while the next ones are made."""
        state = jax.block_until_ready(self._start(requests, bucket)[0])
        state, sent = self._dispatch(state, rung, self.steps_per_dispatch)
        jax.block_until_ready((state, sent.outputs))

    @contextlib.contextmanager
    def _learning_nothing(self) -> Iterator[None]:
        """What is known of drafting is afterwards as it was."""
        outlooks = self._outlooks
        try:
            yield
        finally:
            self._outlooks = outlooks

    def _decoder(self) -> "Engine":
        """The engine that decodes: this one, or the plain one where drafting cannot pay."""
        if self.plain is None or self.costs is None or policy.can_pay(self.config.ladder, self.costs):
            return self
        return self.plain

    @property
    def chooses_by_dispatch(self) -> bool:
        """Whether the host chooses, from dispatch to dispatch, which number of drafts runs (policy.Course): then each
        is a program of its own, as lean as that of a run with this K. Else each step chooses."""
        return self.config.adaptive and self.steps_per_dispatch >= STEPS_THAT_SHARE_A_CHOICE

    @property
    def _rungs(self) -> Sequence[int | None]:
        """Those that have a program of their own; None: the program of all."""
        return range(len(self.config.ladder)) if self.chooses_by_dispatch else [None]

    def _find_costs(self, measuring: Callable[[], object]) -> None:
        """The costs are there: kept from other runs, or, as long as those were few, measured once more now, with the
        programs that are warm."""
        known = costs.identity(self.target, self.drafter, self.config, self.steps_per_dispatch)
        measured, self._outlooks = costs.load(known), None
        if len(measured) == costs.MEASUREMENTS:
            self._go_by(costs.typical(measured), "kept from earlier runs")
            return
        started = time.perf_counter()
        bucket, capacity, batch = max(self._warm), self.config.capacity, self.config.batch_size
        length = max(min(bucket, capacity // 4), 1)
        if capacity - length < 2:  # prefill gives all that there is room for
            self._go_by(Costs.even(self.config.ladder), "not measured: the context has no room for a step")
            return
        prompt = np.random.default_rng(0).integers(0, self.target.vocab_size, length).tolist()
        requests = [Request(0, tuple(prompt), capacity - length)] * batch
        measuring()
        unending = dataclasses.replace(self, stop_token_ids=(-1,) * len(self.stop_token_ids))

        def holding(choice: costs.Choice) -> Steps:
            state, _, _ = unending._start(requests, bucket)
            assert state.outlook is not None
            held = dataclasses.replace(state, outlook=policy.hold(state.outlook, *choice))
            return unending._steps(jax.block_until_ready(held), None)

        def in_turn(rungs: Iterator[int]) -> Steps:
            state, _, _ = unending._start(requests, bucket)
            return unending._steps(jax.block_until_ready(state), Turns(rungs))

        if self.chooses_by_dispatch:
            measured += [costs.measure_whole_steps(self.config.ladder, in_turn)]
        else:
            measured += [costs.measure(self.config.ladder, holding, self.steps_per_dispatch)]
        kept = "kept for later" if costs.save(known, measured) else f"not kept, {costs.directory()} cannot be written"
        self._go_by(costs.typical(measured), f"measured in {time.perf_counter() - started:.1f} s, {kept}")

    def _go_by(self, found: Costs, how: str) -> None:
        self.costs, self.costs_found = found, how
        self._running_costs = Running(found) if self.chooses_by_dispatch else None

    def generate(self, requests: Sequence[Request]) -> Iterator[Emission]:
        """Decode the requests, batch_size together, and yield each step's tokens as soon as the host knows them.

        Raises InputError where the outputs of the target, or of the drafter, are not finite."""
        for request in requests:
            self.check(request)
        if self.config.adaptive and self.costs is None:
            self.warm_up(requests)
        decoder = self._decoder()
        try:
            for batch in self._batches(requests):
                if decoder is self and self._rests_through(batch):
                    yield from self._rest_through(batch)
                else:
                    yield from decoder._decode(batch, self._bucket(batch), self._running_costs)
        except _NotFinite as found:
            raise self._explained(found) from None

    def _explained(self, found: _NotFinite) -> InputError:
        """Make the error for a person, with what a diagnostic pass finds where the model has one."""
        model = self.target if found.part == "target" else self.drafter
        number, index = len(found.token_ids) - len(found.request.prompt_ids), found.request.index
        said = f"the {found.part}'s logits for token {number} of the answer to prompt {index} are not finite"
        if isinstance(model, Explains):
            where = model.first_not_finite(found.token_ids)
            said += f"; the first output that is not is that of {where}" if where else ", but are in a second pass"
        return InputError(f"{said}; expected finite ones: check the weights, or try --dtype float32 or --kernels xla")

    def _rests_through(self, requests: Sequence[Request]) -> bool:
        """Whether the drafter would rest from the beginning of these requests to their end, however long they get."""
        if self.plain is None or self._outlooks is None:
            return False
        return int(self._outlooks[1].resting) >= max(request.max_new_tokens for request in requests)

    def _rest_through(self, requests: Sequence[Request]) -> Iterator[Emission]:
        """The requests as plain decoding's own programs have them, which hold nothing of the drafter; they count as so
        much of its rest."""
        assert self.plain is not None
        assert self._outlooks is not None
        steps = collections.Counter[int]()
        for emission in self.plain._decode(requests, self._bucket(requests), self._running_costs):
            steps[emission.request.index] += len(emission.token_ids)
            yield emission
        first, last = self._outlooks
        resting = np.asarray(int(last.resting) - max(steps.values()), np.int32)
        self._outlooks = first, dataclasses.replace(last, resting=resting)

    def compiled(self, requests: Sequence[Request]) -> list[jax.stages.Compiled]:
        """The programs that dispatches of these requests may run, compiled once more, to look at."""
        with self._learning_nothing():
            state, _, _ = self._start(requests, self._bucket(requests))
        sent = [self._prepared(state, rung, self.steps_per_dispatch) for rung in self._rungs]
        own = [program.lower(*operands).compile() for program, operands, _ in sent]
        return own + ([] if self.plain is None else self.plain.compiled(requests))

    @functools.cached_property
    def _models(self) -> tuple[list[jax.Array], Any]:
        """(the leaves of target and drafter, their tree)."""
        return jax.tree.flatten((self.target, self.drafter))

    @functools.cached_property
    def _models_of_plain_steps(self) -> tuple[list[jax.Array], Any]:
        return jax.tree.flatten((self.target, NoDrafter()))

    def _prepared(self, state: DecodeState, rung: int | None, num_steps: int) -> tuple[Any, list[Any], Any]:
        """(the program of a dispatch, its operands, the tree of its state). Every leaf takes the host its time, and
        plain steps need none that drafting or choosing does."""
        config, (models, structure) = self.config, self._models
        if rung == 0:
            state = dataclasses.replace(state, drafter_state=None)
            models, structure = self._models_of_plain_steps
        leaves, tree = jax.tree.flatten(state)
        program = _program(structure, tree, config.ladder, config.sampling, self.steps_per_dispatch, rung)
        return program, [models, leaves, *([np.int32(num_steps)] if rung else [])], tree

    def _batches(self, requests: Sequence[Request]) -> list[Sequence[Request]]:
        size = self.config.batch_size
        return [requests[start : start + size] for start in range(0, len(requests), size)]

    def _bucket(self, requests: Sequence[Request]) -> int:
        """The padded length prompts are run at: a power of two, so that few lengths are ever compiled."""
        longest = max(len(request.prompt_ids) for request in requests)
        return min(max(SMALLEST_BUCKET, 1 << (longest - 1).bit_length()), self.config.capacity)

    def _decode(self, requests: Sequence[Request], bucket: int, running: Running | None = None) -> Iterator[Emission]:
        """The requests of one batch; what its dispatches take is told to `running`."""
        state, first_token, course = self._start(requests, bucket)
        # read before a step is sent off: where the device is the host's own cores, steps would delay the first token
        firsts = np.asarray(first_token)
        now = time.perf_counter()
        for request, token in zip(requests, firsts, strict=False):
            if token == NO_TOKEN:
                raise _NotFinite("target", request, request.prompt_ids)
        known = [[*request.prompt_ids, int(token)] for request, token in zip(requests, firsts, strict=False)]
        state, in_flight = self._dispatch_next(state, course)
        lengths = [len(request.prompt_ids) for request in requests]
        for request, token in zip(requests, firsts, strict=False):
            yield Emission(request, (int(token),), now)
        for outputs, now in self._steps(state, course, in_flight, running):
            for tokens, counts, accepted, verified, drafts, confidence in zip(
                *map(np.ndarray.tolist, _read(outputs)), strict=True
            ):
                for row, request in enumerate(requests):
                    if accepted[row] >= 0:
                        width = verified[row]
                        sure = tuple(confidence[row][:width])
                        if math.isnan(sum(sure)):
                            raise _NotFinite("drafter", request, known[row])
                        if tokens[row][accepted[row]] == NO_TOKEN:
                            raise _NotFinite("target", request, known[row] + tokens[row][: accepted[row]])
                        decision = Decision(
                            lengths[row], tuple(drafts[row][:width]), accepted[row], tokens[row][accepted[row]], sure
                        )
                        lengths[row] += accepted[row] + 1
                        known[row] += tokens[row][: counts[row]]
                        yield Emission(request, tuple(tokens[row][: counts[row]]), now, decision)

    def _steps(
        self,
        state: DecodeState,
        course: Course | Turns | None,
        in_flight: "_InFlight | None" = None,
        running: Running | None = None,
    ) -> Steps:
        """The outputs of dispatch after dispatch until all rows are done, and when the host knew them. `in_flight` is
        the dispatch that gave the state, if one did."""
        if in_flight is None:
            state, in_flight = self._dispatch_next(state, course)
        before = None  # when the device was done with the dispatch before, and began this one, if the host knows that
        resumed = False  # whether that was a plain one, and this one is not
        following: _InFlight | None
        try:
            while True:
                following = None
                if course is None or not course.waits:
                    state, following = self._dispatch_next(state, course)
                knows_end = not in_flight.ready()
                outputs = StepOutput.unpack(np.asarray(in_flight.outputs), in_flight.num_drafts)
                now = time.perf_counter()
                if course is not None and in_flight.rung:
                    course.learn(in_flight.rung, np.asarray(outputs.num_accepted))
                if running is not None and knows_end and before is not None:
                    _see(running, in_flight, resumed, outputs, now - before)
                all_done = outputs.done[in_flight.num_steps - 1].all()
                before = now if knows_end and following is not None else None
                if following is None:
                    state, following = self._dispatch_next(state, course)
                resumed = in_flight.rung == 0 and following.rung != 0
                in_flight = following
                yield outputs, now
                if all_done:
                    break
            last = course.outlook if isinstance(course, Course) else state.outlook
            if self._outlooks is not None and last is not None:
                self._outlooks = self._outlooks[0], last
        finally:
            jax.block_until_ready(in_flight.outputs)  # sent off in vain, and not to run into what is measured next

    def _start(self, requests: Sequence[Request], bucket: int) -> tuple[DecodeState, jax.Array, Course | None]:
        """Prefill of a batch: the state, the first tokens, the course where the host has one to keep. Rows without a
        request hold one token and are done from the start."""
        batch = self.config.batch_size
        token_ids = np.zeros((batch, bucket), np.int32)
        lengths, budgets = np.ones((batch,), np.int32), np.zeros((batch,), np.int32)
        seeds, indices = np.zeros((batch,), np.int32), np.zeros((batch,), np.int32)
        for row, request in enumerate(requests):
            token_ids[row, : len(request.prompt_ids)] = request.prompt_ids
            lengths[row], budgets[row] = len(request.prompt_ids), request.max_new_tokens
            seeds[row], indices[row] = request.seed, request.index
        stops = np.asarray(self.stop_token_ids, np.int32)
        config = self.config
        logits, last_aux, caches, drafter_state = _prefill(
            self.target,
            self.drafter,
            token_ids,
            lengths,
            capacity=config.capacity,
            draft_places=config.draft_places,
        )
        # found while the device is at the prompts
        course = self._new_course() if self.chooses_by_dispatch else None
        before = self._outlooks_before() if config.adaptive and course is None else None
        state, first_token, outlook = _first(
            logits,
            last_aux,
            lengths,
            budgets,
            seeds,
            indices,
            stops,
            before,
            ladder=config.ladder,
            sampling=config.sampling,
        )
        if outlook is not None:
            self._outlooks = outlook, outlook
        return dataclasses.replace(state, target_cache=caches, drafter_state=drafter_state), first_token, course

    def _outlooks_before(self) -> tuple[Outlook, Outlook]:
        """Those at the beginning and at the end of the requests before, the same twice if there were none; the host's
        own, where it chooses."""
        if self._outlooks is not None:
            return self._outlooks
        ladder, functions = self.config.ladder, np if self.chooses_by_dispatch else jnp
        outlook = policy.begin(ladder, self.costs or Costs.even(ladder), functions)
        return outlook, outlook

    def _new_course(self) -> Course:
        """The course of the next request."""
        new = self._outlooks is None
        first, last = self._outlooks_before()
        if self._running_costs is not None:
            last = dataclasses.replace(last, costs=self._running_costs.costs())
        outlook = policy.again(self.config.ladder, first, last)
        self._outlooks = outlook, outlook
        return Course(self.config.ladder, outlook, new)

    def _dispatch_next(self, state: DecodeState, course: Course | Turns | None) -> tuple[DecodeState, "_InFlight"]:
        """The dispatch that the course says; without one each step chooses, or there is one rung alone."""
        most = self.steps_per_dispatch
        return self._dispatch(state, *((None, most) if course is None else course.choose(most)))

    def _dispatch(self, state: DecodeState, rung: int | None, num_steps: int) -> tuple[DecodeState, "_InFlight"]:
        """Sends off the next steps and the copy of their packed outputs to the host; waits for neither. Fewer steps
        than steps_per_dispatch are for rungs with drafts.

        Raises KeyboardInterrupt, before it sends anything off, where Ctrl-C was pressed (peagle.ops.interrupt).
        """
        interrupt.check()
        program, operands, tree = self._prepared(state, rung, num_steps)
        leaves, outputs = program(*operands)
        outputs.copy_to_host_async()
        after = jax.tree.unflatten(tree, leaves)
        if rung == 0:
            after = dataclasses.replace(after, drafter_state=state.drafter_state)
        num_drafts = self.config.ladder[-1 if rung is None else rung]
        return after, _InFlight(outputs, rung, num_drafts, num_steps)


@dataclass(frozen=True)
class _InFlight:
    """A dispatch that was sent off, and what the host will read of it."""

    outputs: jax.Array  # packed
    rung: int | None  # that all its steps share
    num_drafts: int  # places for drafts in the outputs
    num_steps: int  # the most that it has; places in the outputs behind those are of none

    def ready(self) -> bool:
        """Whether reading would not have to wait."""
        return bool(self.outputs.is_ready())  # type: ignore[attr-defined]  # not in jax's stubs


def _see(running: Running, dispatch: _InFlight, resumed: bool, outputs: StepOutput, seconds: float) -> None:
    """What the device took for a dispatch is among the running costs, if all its steps ran. One without a rung is
    plain decoding's own."""
    ran = np.any(outputs.num_accepted >= 0, axis=1)
    if ran.all():
        running.see(dispatch.rung or 0, len(ran), 1e3 * seconds, resumed)


def _read(outputs: StepOutput) -> tuple[np.ndarray, ...]:
    """What emissions are made of, step by step and row by row."""
    parts = (
        outputs.token_ids,
        outputs.count,
        outputs.num_accepted,
        outputs.num_verified,
        outputs.draft_token_ids,
        outputs.confidence,
    )
    return tuple(np.asarray(part) for part in parts)
