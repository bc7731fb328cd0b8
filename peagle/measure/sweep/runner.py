"""Decode a plan: every request by every variant, in turns.

The order of variants rotates from request to request and repeat to repeat, so that drift of the machine affects all of
them equally. No time includes compilation, or the measurement of costs for `auto`. Above temperature 0 repeats have
different seeds.

Many requests at once (`Plan.concurrent`): in each repeat a variant decodes all requests of a workload together.
Variants with the same number of slots take turns in rotating order; numbers of slots ascend and descend in alternating
repeats.

Prompts of later turns hold plain decoding's greedy answers to the earlier turns, so that they are the same for all
variants.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from peagle.answers.result import decode
from peagle.base.errors import InputError
from peagle.base.memory import share_of_mappings
from peagle.config import SamplingParams
from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.request import Request
from peagle.measure.record import rotated
from peagle.measure.sweep.plan import PLAIN, Plan, PromptSource, Variant, Workload
from peagle.measure.sweep.store import Folder, Key, Sample, SweepConversation, SweepRequest
from peagle.pair import Pair
from peagle.text.prompt_files import PromptSet
from peagle.text.prompts import Conversation, Rendering

Models = tuple[str | None, str | None]  # drafter, draft vocabulary
Progress = Callable[[int, int], None]  # (done, total)

MOST_MAPPINGS = 0.85  # of the memory mappings that a process may have; a variant's programs take up to a tenth


def models_of(variant: Variant) -> Models:
    """Return the key of the pair that a variant needs."""
    return variant.drafter, variant.draft_vocab


def make_requests(folder: Folder, pair: Pair, sets: Mapping[str, PromptSet], progress: Progress) -> None:
    """Make and store the requests of every source and rendering that the folder lacks.

    sets: prompts by a source's name. Raises InputError for a conversation that cannot be rendered, and for a source
    without a request.
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
        requests.append(SweepRequest(first + turn, row, request.prompt_ids))
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
    """Decodes the rest of a run's plan, after `make_requests`. failed: errors of variants; the others go on."""

    def __init__(self, folder: Folder, pairs: Mapping[Models, Pair]) -> None:
        self.folder, self.plan, self.pairs, self.pair = folder, folder.plan, pairs, pairs[models_of(PLAIN)]
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
            for number, request in enumerate(requests):
                for variant in rotated(self.plan.variants, repeat + number):
                    yield Task(workload, variant, repeat, [request])
            for number, variants in enumerate(loads if repeat % 2 == 0 else reversed(loads)):
                for variant in rotated(variants, repeat + number):
                    yield Task(workload, variant, repeat, requests)

    def warm_up(self, progress: Progress) -> None:
        """Compile the programs of the remaining tasks, and measure the costs for `auto`."""
        left = dict.fromkeys((task.workload, task.variant) for task in self.left)
        for number, (workload, variant) in enumerate(left):
            progress(number, len(left))
            with self._failing(workload, variant):
                if (share := share_of_mappings()) > MOST_MAPPINGS:
                    raise InputError(
                        f"the programs of {number} variants take {share:.0%} of the memory mappings of a process; "
                        f"expected at most {MOST_MAPPINGS:.0%}, since XLA crashes without free ones: run fewer Ks or "
                        "temperatures at a time, or raise vm.max_map_count"
                    )
                self._engine(variant).warm_up(sampled=not SamplingParams(workload.temperature).greedy)

    def decode(self, progress: Progress) -> None:
        """Decode the remaining tasks, and append their samples."""
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
        self.folder.append_samples([Sample.of(workload, variant, repeat, result) for result in results])

    @contextlib.contextmanager
    def _failing(self, workload: Workload, variant: Variant) -> Iterator[None]:
        """Append a variant's error to the folder, and leave its other tasks out."""
        try:
            yield
        except (InputError, MemoryError, RuntimeError) as error:  # JAX raises RuntimeErrors
            why = " ".join(str(error).split()) or type(error).__name__
            self.folder.append_error(workload, variant, why)
            self.failed[workload, variant] = why

    def request(self, request: SweepRequest, sampling: SamplingParams) -> Request:
        room = self.pair.max_positions - len(request.prompt_ids)
        return Request(request.prompt_ids, min(self.plan.max_new_tokens, room), sampling, index=request.request)

    def _engine(self, variant: Variant) -> AnyEngine:
        pair = self.pairs[models_of(variant)]
        return pair.engine(pair.engine_config(variant.k, context=self.capacity, slots=variant.concurrency or 1))
