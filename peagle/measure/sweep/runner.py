"""Decode a plan: every request by every variant, in turns.

The order of variants rotates from request to request and repeat to repeat, so that drift of the machine affects all of
them equally. No time includes compilation, or the measurement of costs for `auto`. Above temperature 0 repeats have
different seeds. At the end variants decode some requests once more under the profiler, which splits a step's time into
parts.

Many requests at once (`Plan.concurrent`): in each repeat a variant decodes all requests of a workload together.
Variants with the same number of slots take turns in rotating order; numbers of slots ascend and descend in alternating
repeats.

Prompts of later turns hold plain decoding's greedy answers to the earlier turns, so that they are the same for all
variants.
"""

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from peagle.answers.result import decode
from peagle.base.errors import InputError
from peagle.base.memory import share_of_mappings
from peagle.config import SamplingParams
from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.request import Request
from peagle.measure.bound import Bound, bound
from peagle.measure.profile import operation_parts, profile
from peagle.measure.sweep.plan import PLAIN, Plan, PromptSource, Variant, Workload
from peagle.measure.sweep.store import (
    Folder,
    Key,
    Sample,
    Share,
    SweepConversation,
    SweepRequest,
    line_of,
)
from peagle.pair import Pair
from peagle.text.prompt_files import PromptSet
from peagle.text.prompts import Conversation, Rendering

Models = tuple[str | None, str | None, str | None]  # drafter, draft vocabulary, window of the drafter
Pairs = Mapping[Models, Pair | InputError]  # the error of a pair that could not be loaded, if the run continues
Progress = Callable[[int, int], None]  # (done, total)
Item = TypeVar("Item")

MOST_MAPPINGS = 0.85  # of the memory mappings that a process may have; a variant's programs take up to a tenth
PROFILED, PROFILED_TOKENS = 3, 32  # conversations of a variant to profile, and tokens of each


def models_of(variant: Variant) -> Models:
    """Return the key in Pairs of the models that a variant needs."""
    return variant.drafter, variant.draft_vocab, variant.drafter_window


def make_requests(folder: Folder, pair: Pair, sets: Mapping[str, PromptSet], progress: Progress) -> None:
    """Make and store the requests of every source and rendering, and the prompts left out.

    Conversations that the folder holds are kept. sets: prompts by a source's name. Raises InputError for a
    conversation that cannot be rendered.
    """
    plan = folder.plan
    stored = {(known.prompts, known.raw, known.row): known for known in folder.conversations()}
    total = sum(source.num_used for source in plan.sources) * len(plan.raw)
    conversations: list[SweepConversation] = []
    for source, raw in itertools.product(plan.sources, plan.raw):
        first = 0
        for row, prompts in enumerate(sets[source.name].conversations[: source.num_used]):
            conversation = stored.get((source.name, raw, row))
            if conversation is None:
                conversation = _conversation(plan, pair, source, raw, row, prompts, first)
                folder.append_conversation(conversation)
            first += len(conversation.requests)
            conversations.append(conversation)
            progress(len(conversations), total)
    for source in plan.sources:
        own = [conversation for conversation in conversations if conversation.prompts == source.name]
        if not any(conversation.requests for conversation in own):
            last = f"; the last: {own[-1].why}" if own else ""
            raise InputError(f"{source.name} has no usable prompt{last}")
    folder.save_prompts(conversations, {name: [row.reason for row in read.skipped] for name, read in sets.items()})


def num_turns(source: PromptSource, raw: bool, conversation: Conversation) -> int:
    """Count the turns of a conversation that the plan uses, if none is too long. Raw text has one."""
    turns = min(source.max_turns or conversation.num_requests, conversation.num_requests)
    return min(turns, 1) if raw and conversation.turns else turns


def _conversation(
    plan: Plan, pair: Pair, source: PromptSource, raw: bool, row: int, prompts: Conversation, first: int
) -> SweepConversation:
    """Make a conversation's requests, numbered from `first`. Decodes the answers that later turns hold."""
    requests: list[SweepRequest] = []
    answers: list[str] = []
    why = None
    turns = num_turns(source, raw, prompts)
    if turns < num_turns(source, False, prompts):
        why = f"{prompts.name}: raw text has one turn; the {prompts.num_requests - 1} after it"
    used = dataclasses.replace(prompts, turns=prompts.turns[:turns])
    rendering = Rendering(raw=raw)
    longest = min(plan.max_prompt_tokens or pair.max_positions, pair.max_positions - 1)
    for turn in range(turns):
        try:
            prompt_ids = used.encode(answers, pair.tokenizer, rendering)
        except InputError as error:
            if not raw:
                raise
            why = str(error).partition(";")[0]  # the conversation has a system text or history
            break
        if len(prompt_ids) > longest:
            why = f"{prompts.name}, turn {turn + 1}, has {len(prompt_ids)} tokens; expected at most {longest}"
            break
        request = pair.request(used, answers, rendering, max_new_tokens=plan.max_new_tokens)
        requests.append(SweepRequest(source.name, raw, first + turn, row, turn, prompts.category, request.prompt_ids))
        if turn + 1 < turns:
            engine = pair.engine(pair.engine_config(0, context=pair.capacity([request])))
            engine.warm_up()
            answers.append(decode(engine, [request], pair.tokenizer)[0].text or "")
    return SweepConversation(source.name, raw, row, tuple(requests), why)


class Task(NamedTuple):
    """Requests that a variant decodes together: one, or all of a workload at once."""

    workload: Workload
    variant: Variant
    repeat: int
    requests: Sequence[SweepRequest]

    def keys(self) -> Iterator[Key]:
        return ((self.workload, self.variant, self.repeat, request.request) for request in self.requests)


class SweepRun:
    """Decodes the rest of a run's plan, after `make_requests`.

    failed: errors of variants, if the run continues without them.
    """

    def __init__(self, folder: Folder, pairs: Pairs, continue_on_error: bool) -> None:
        self.folder, self.plan, self.pairs, self.continue_on_error = folder, folder.plan, pairs, continue_on_error
        self.pair = self._pair(PLAIN)
        by_workload = {workload: folder.requests(workload) for workload in self.plan.workloads}
        self.requests = {workload: requests for workload, requests in by_workload.items() if requests}
        requests = itertools.chain.from_iterable(self.requests.values())
        self.capacity = self.pair.capacity([self.request(request, SamplingParams()) for request in requests])
        done = {sample.key for sample in folder.samples()}
        self.left = [task for task in self._tasks() if not done.issuperset(task.keys())]
        self.failed: dict[tuple[Workload, Variant], str] = {}

    def _tasks(self) -> Iterator[Task]:
        """Yield all tasks in the order of decoding."""
        by_slots = itertools.groupby(self.plan.concurrent, key=lambda variant: variant.concurrency)
        loads = [list(variants) for _, variants in by_slots]
        for repeat, (workload, requests) in itertools.product(range(self.plan.repeats), self.requests.items()):
            for number, start in enumerate(range(0, len(requests), self.plan.in_a_row)):
                in_a_row = requests[start : start + self.plan.in_a_row]
                for variant in _rotated(self.plan.variants, repeat + number):
                    yield from (Task(workload, variant, repeat, [request]) for request in in_a_row)
            for number, variants in enumerate(loads if repeat % 2 == 0 else reversed(loads)):
                yield from (
                    Task(workload, variant, repeat, requests) for variant in _rotated(variants, repeat + number)
                )

    def warm_up(self, progress: Progress) -> None:
        """Compile the programs of the remaining tasks, and measure the costs for `auto`.

        Raises InputError if a variant fails, unless `continue_on_error`.
        """
        left = dict.fromkeys((task.workload, task.variant) for task in self.left)
        for number, (workload, variant) in enumerate(left):
            progress(number, len(left))
            with self._failing(workload, variant):
                if (share := share_of_mappings()) > MOST_MAPPINGS:
                    raise InputError(
                        f"the programs of {number} variants take {share:.0%} of the memory mappings of a process; "
                        f"expected at most {MOST_MAPPINGS:.0%}, since XLA crashes without free ones: run fewer Ks or "
                        "temperatures at a time (peagle report joins runs), or raise vm.max_map_count"
                    )
                self._engine(variant).warm_up(sampled=not SamplingParams(workload.temperature).greedy)

    def decode(self, progress: Progress) -> None:
        """Decode the remaining tasks, and append their samples. Raises InputError as `warm_up` does."""
        total, decoded = sum(len(task.requests) for task in self.left), 0
        for task in self.left:
            progress(decoded, total)
            decoded += len(task.requests)
            if (task.workload, task.variant) not in self.failed:
                with self._failing(task.workload, task.variant):
                    self._decode(task)
        progress(decoded, total)

    def _decode(self, task: Task) -> None:
        workload, variant, repeat = task.workload, task.variant, task.repeat
        sampling = SamplingParams(workload.temperature, seed=self.plan.seed + (repeat if workload.temperature else 0))
        requests = [self.request(request, sampling) for request in task.requests]
        results = decode(self._engine(variant), requests, self.pair.tokenizer)
        bounds: Sequence[Bound | None] = [None] * len(results)
        if workload.temperature > 0 and repeat == 0 and variant.speculates and variant.concurrency is None:
            pair = self._pair(variant)
            assert pair.drafter is not None
            bounds = [bound(pair.target, pair.drafter, result) for result in results]
        self.folder.append_samples(
            [Sample.of(workload, variant, repeat, result, most) for result, most in zip(results, bounds, strict=True)]
        )

    @contextlib.contextmanager
    def _failing(self, workload: Workload, variant: Variant) -> Iterator[None]:
        """Append a variant's error to the folder; then keep it if `continue_on_error`, else raise InputError."""
        try:
            yield
        except (InputError, MemoryError, RuntimeError) as error:  # JAX raises RuntimeErrors
            why = " ".join(str(error).split()) or type(error).__name__
            self.folder.append_error(workload, variant, why)
            if not self.continue_on_error:
                raise InputError(
                    f"{workload.label}, K = {self.plan.label(variant)}: {why}; decoded requests are kept: continue "
                    "with --resume, without this K with --continue-on-error"
                ) from error
            self.failed[workload, variant] = why

    def request(self, request: SweepRequest, sampling: SamplingParams) -> Request:
        room = self.pair.max_positions - len(request.prompt_ids)
        return Request(request.prompt_ids, min(self.plan.max_new_tokens, room), sampling, index=request.request)

    def _pair(self, variant: Variant) -> Pair:
        pair = self.pairs[models_of(variant)]
        if isinstance(pair, InputError):
            raise pair
        return pair

    def counting_engine(self, variant: Variant) -> tuple[AnyEngine, int]:
        """Return (an adaptive engine of a variant's models, the most drafts of its steps).

        They are the plan's largest fixed K, else those of `auto`.
        """
        pair = self._pair(variant)
        largest = max((k for k in self.plan.ks if isinstance(k, int)), default=0)
        num_drafts = largest or pair.drafts(variant.k).num_drafts
        window = getattr(pair.drafter, "window", None)
        num_drafts = num_drafts if window is None else min(num_drafts, window - 1)
        return pair.engine(pair.engine_config(num_drafts, context=self.capacity, adaptive=True)), num_drafts

    def _engine(self, variant: Variant) -> AnyEngine:
        pair = self._pair(variant)
        return pair.engine(pair.engine_config(variant.k, context=self.capacity, slots=variant.concurrency or 1))

    def profile(self, progress: Progress) -> None:
        """Profile PROFILED conversations of each workload by each variant, and store the results.

        A resumed run tries profiles that failed again.
        """
        shares = self.folder.shares
        stored = {share.key for share in shares}
        tokens: dict[Workload, dict[int, int]] = {workload: {} for workload in self.requests}
        for sample in self.folder.samples():
            if sample.variant == PLAIN:
                tokens[sample.workload][sample.request] = min(sample.output_tokens, PROFILED_TOKENS)
        left = [
            (workload, request, variant)
            for workload, requests in self.requests.items()
            for request in _longest(requests, tokens[workload])
            for variant in self.plan.variants
            if (workload, variant, request.request) not in stored and (workload, variant) not in self.failed
        ]
        programs: dict[tuple[float, Variant], dict[str, str]] = {}
        for number, (workload, request, variant) in enumerate(left):
            progress(number, len(left))
            shares.append(self._profile(workload, request, variant, programs))
            self.folder.save(shares=[line_of(share) for share in shares])

    def _profile(
        self,
        workload: Workload,
        request: SweepRequest,
        variant: Variant,
        programs: dict[tuple[float, Variant], dict[str, str]],
    ) -> Share:
        """Decode a request under the profiler. programs: results of `operation_parts`, to reuse and add to."""
        try:
            profiled = self.request(request, SamplingParams(workload.temperature, seed=self.plan.seed))
            profiled = dataclasses.replace(profiled, max_new_tokens=min(profiled.max_new_tokens, PROFILED_TOKENS))
            engine, sampled = self._engine(variant), not profiled.sampling.greedy
            engine.warm_up(sampled=sampled)
            key = (workload.temperature, variant)
            if key not in programs:
                programs[key] = operation_parts(engine, sampled)
            with tempfile.TemporaryDirectory() as directory:
                times = profile(engine, [profiled], Path(directory), programs[key], perfetto=False)
        except (InputError, OSError, RuntimeError) as error:
            return Share(workload, variant, request.request, why_not=str(error).partition("\n")[0])
        other_ms = times.step_ms - times.draft_ms - times.verify_ms
        return Share(workload, variant, request.request, times.num_steps, times.draft_ms, times.verify_ms, other_ms)


def _longest(requests: Sequence[SweepRequest], tokens: Mapping[int, int]) -> list[SweepRequest]:
    """Choose the first turns of the PROFILED conversations with most tokens. tokens: of plain decoding, by request."""
    first_turns = [request for request in requests if request.turn == 0]
    return sorted(first_turns, key=lambda request: -tokens.get(request.request, 0))[:PROFILED]


def _rotated(items: Sequence[Item], shift: int) -> Iterator[Item]:
    return (items[(shift + index) % len(items)] for index in range(len(items)))
