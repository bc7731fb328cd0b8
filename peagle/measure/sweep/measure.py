"""Decode a plan: every prompt by every arm, in turns. Each result is appended at once.

In each repeat and setting every prompt is decoded by every arm. The order of arms rotates from prompt to prompt and
repeat to repeat, so that drift of the machine affects all arms equally. No time includes compilation, or the
measurement of costs for `auto`. At a temperature above 0 each repeat has its own seed. At the end each arm decodes some
requests once more under the profiler, to split a step's time into parts.

Many requests at once (`Plan.loads`): every arm decodes all requests of a setting together, once a repeat. Arms with the
same number of slots follow one another in rotating order; numbers of slots ascend and descend in alternating repeats.

The prompts of later turns hold plain decoding's greedy answers to the turns before, so that all arms get the same
prompts.
"""

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from peagle.config import SamplingParams
from peagle.engine.loop import AnyEngine
from peagle.engine.request import Request
from peagle.measure.bound import bound
from peagle.measure.profile import operations_of, profile
from peagle.measure.sweep.folder import (
    ASKING,
    Appender,
    Folder,
    Json,
    Sample,
    SweepConversation,
    SweepRequest,
    arm_of,
    key,
    sample_of,
)
from peagle.measure.sweep.plan import PLAIN, PROFILED, PROFILED_TOKENS, Arm, Plan, Setting, Source
from peagle.ops.errors import InputError
from peagle.ops.memory import share_of_mappings
from peagle.pair import Pair
from peagle.result import Result, decode
from peagle.text.prompt_files import PromptSet
from peagle.text.prompts import Conversation, Rendering

Loaded = tuple[str | None, str | None, str | None]  # drafter, draft vocabulary, window of the drafter
Pairs = Mapping[Loaded, Pair | InputError]  # an error if the pair could not be loaded and the run continues
Progress = Callable[[int, int], None]

MOST_MAPPINGS = 0.85  # share of the allowed memory mappings; an arm's programs take up to a tenth


def loaded(arm: Arm) -> Loaded:
    """Return the key of the pair that an arm needs; plain decoding runs with any."""
    return arm.drafter, arm.draft_vocab, arm.drafter_window


def ask(folder: Folder, pair: Pair, sets: Mapping[str, PromptSet], progress: Progress) -> None:
    """Make and store the numbered requests of every source and rendering, and the prompts left out.

    Conversations that the folder holds already are not made again. `sets`: prompts by a source's name. Raises
    InputError for a conversation that cannot be rendered; for a prompt that is too long only by `Plan.too_long`.
    """
    plan = folder.plan
    stored = {(each.prompts, each.raw, each.row): each for each in folder.posed()}
    total = sum(source.num_used for source in plan.sources) * len(plan.raw)
    done: list[SweepConversation] = []
    with folder.appending(ASKING) as out:
        for source, raw in itertools.product(plan.sources, plan.raw):
            first = 0
            for row, conversation in enumerate(sets[source.name].conversations[: source.num_used]):
                posed = stored.get((source.name, raw, row))
                if posed is None:
                    posed = _ask_one(plan, pair, source, raw, row, conversation, first)
                    out.posed(posed)
                first += len(posed.asked)
                done.append(posed)
                progress(len(done), total)
    for source in plan.sources:
        own = [posed for posed in done if posed.prompts == source.name]
        if not any(posed.asked for posed in own):
            last = f"; the last: {own[-1].why}" if own else ""
            raise InputError(f"{source.name} has no usable prompt{last}")
    folder.save_asked(done, {name: [row.reason for row in each.skipped] for name, each in sets.items()})


def turns_asked(source: Source, raw: bool, conversation: Conversation) -> int:
    """Count the turns of a conversation that the plan uses, before lengths. Raw text has one."""
    turns = min(source.max_turns or conversation.num_requests, conversation.num_requests)
    return min(turns, 1) if raw and conversation.turns else turns


def _ask_one(
    plan: Plan, pair: Pair, source: Source, raw: bool, row: int, conversation: Conversation, first: int
) -> SweepConversation:
    """Make a conversation's requests, numbered from `first`; later turns need plain decoding."""
    found: list[SweepRequest] = []
    answers: list[str] = []
    why = None
    turns = turns_asked(source, raw, conversation)
    if turns < turns_asked(source, False, conversation):
        why = f"{conversation.name}: raw text has one turn; the {conversation.num_requests - 1} after it"
    asked = dataclasses.replace(conversation, turns=conversation.turns[:turns])
    rendering = Rendering(raw=raw, special_tokens=raw and plan.special_tokens)
    longest = min(plan.max_prompt_tokens or pair.max_positions, pair.max_positions - 1)
    for turn in range(turns):
        try:
            prompt_ids = asked.encode(answers, pair.tokenizer, rendering)
        except InputError as error:
            if not raw:
                raise
            why = str(error).partition(";")[0]  # raw text has no system text or history
            break
        if len(prompt_ids) > longest:
            why = f"{conversation.name}, turn {turn + 1}, has {len(prompt_ids)} tokens; expected at most {longest}"
            if plan.too_long == "error":
                raise InputError(f"{why}: leave it out with --too-long skip")
            break
        request = pair.request(asked, answers, rendering, max_new_tokens=plan.max_new_tokens)
        found.append(SweepRequest(source.name, raw, first + turn, row, turn, conversation.category, request.prompt_ids))
        if turn + 1 < turns:
            engine = pair.engine(pair.engine_config(0, context=pair.capacity([request])))
            engine.warm_up()
            answers.append(decode(engine, [request], pair.tokenizer)[0].text or "")
    return SweepConversation(source.name, raw, row, tuple(found), why)


class SweepRun:
    """Decode the rest of a plan in this process, after `ask`.

    `failed`: the errors of arms without which the run continued.
    """

    def __init__(self, folder: Folder, pairs: Pairs, continue_on_error: bool) -> None:
        prompts = folder.asked()
        assert prompts is not None
        asked, _ = prompts
        self.folder, self.plan, self.pairs, self.continue_on_error = folder, folder.plan, pairs, continue_on_error
        pair = pairs[loaded(PLAIN)]
        assert isinstance(pair, Pair)
        self.pair = pair
        self.requests = {
            (prompts, raw): [each for each in asked if (each.prompts, each.raw) == (prompts, raw)]
            for prompts, raw in dict.fromkeys((each.prompts, each.raw) for each in asked)
        }
        self.settings = [each for each in self.plan.settings if (each.prompts, each.raw) in self.requests]
        self.capacity = self.pair.capacity([self._request(each, SamplingParams()) for each in asked])
        self.done = {key(sample) for sample in folder.samples()}
        self.failed: dict[tuple[Setting, Arm], str] = {}

    def warm_up(self, out: Appender, progress: Progress) -> None:
        """Compile for all arms that have requests left, and measure the costs for `auto`.

        Raises InputError if an arm fails, unless `continue_on_error`.
        """
        left = [
            (setting, arm)
            for setting, arm in itertools.product(self.settings, (*self.plan.arms, *self.plan.loads))
            if any(
                (setting, arm, repeat, each.request) not in self.done
                for repeat in range(self.plan.repeats)
                for each in self._asked(setting)
            )
        ]
        for number, (setting, arm) in enumerate(left):
            progress(number, len(left))
            with self._failing(out, setting, arm):
                if (share := share_of_mappings()) > MOST_MAPPINGS:
                    raise InputError(
                        f"the programs of {number} variants take {share:.0%} of the memory mappings of a process; "
                        f"expected at most {MOST_MAPPINGS:.0%}, since XLA crashes without free ones: run fewer Ks or "
                        "temperatures at a time (peagle report joins runs), or raise vm.max_map_count"
                    )
                self._engine(arm).warm_up(sampled=not SamplingParams(setting.temperature).greedy)

    def decode(self, out: Appender, progress: Progress) -> None:
        """Decode the requests that the folder's raw lines lack, and append them by `out`.

        Raises InputError as `warm_up` does.
        """
        done = self.done
        arms = self.plan.arms
        sizes = {setting: len(self._asked(setting)) for setting in self.settings}
        num_arms = len(arms) + len(self.plan.loads)
        total, before = self.plan.repeats * sum(sizes.values()) * num_arms, len(done)
        for repeat in range(self.plan.repeats):
            for setting in self.settings:
                asked, row = self._asked(setting), self.plan.in_a_row
                for number, start in enumerate(range(0, len(asked), row)):
                    turn = (repeat + number) % len(arms)
                    for arm, each in itertools.product(arms[turn:] + arms[:turn], asked[start : start + row]):
                        if (setting, arm, repeat, each.request) not in done:
                            self._decode(out, setting, arm, repeat, [each])
                            done.add((setting, arm, repeat, each.request))
                    progress(len(done) - before, total - before)
                for arm in self._loads(repeat):
                    if any((setting, arm, repeat, each.request) not in done for each in asked):
                        self._decode(out, setting, arm, repeat, asked)
                        done.update((setting, arm, repeat, each.request) for each in asked)
                    progress(len(done) - before, total - before)

    def _loads(self, repeat: int) -> Iterator[Arm]:
        """Yield the arms of many requests at once in the order of this repeat."""
        by_slots = [list(some) for _, some in itertools.groupby(self.plan.loads, key=lambda arm: arm.concurrency)]
        for number, arms in enumerate(by_slots if repeat % 2 == 0 else reversed(by_slots)):
            turn = (repeat + number) % len(arms)
            yield from arms[turn:] + arms[:turn]

    def _decode(self, out: Appender, setting: Setting, arm: Arm, repeat: int, asked: Sequence[SweepRequest]) -> None:
        """Decode these requests together, and append their lines together."""
        if (setting, arm) in self.failed:
            return
        with self._failing(out, setting, arm):
            seed = self.plan.seed + (repeat if setting.temperature else 0)
            requests = [self._request(each, SamplingParams(setting.temperature, seed=seed)) for each in asked]
            results = decode(self._engine(arm), requests, self.pair.tokenizer)
            bounded = setting.temperature > 0 and repeat == 0 and arm.speculates and arm.concurrency is None
            bounds = [self._bound(arm, result) if bounded else None for result in results]
            out.samples(
                [sample_of(setting, arm, repeat, *each) for each in zip(results, bounds, strict=True)],
            )

    def _bound(self, arm: Arm, result: Result) -> Json | None:
        """Measure what the law of acceptance allows along an output, after its time was taken."""
        pair = self.pairs[loaded(arm)]
        assert isinstance(pair, Pair)
        assert pair.drafter is not None
        found = bound(pair.target, pair.drafter, result)
        return None if found is None else dataclasses.asdict(found)

    @contextlib.contextmanager
    def _failing(self, out: Appender, setting: Setting, arm: Arm) -> Iterator[None]:
        """Append the error of an arm, and raise it as InputError, or with `continue_on_error` store it."""
        try:
            yield
        except (InputError, MemoryError, RuntimeError) as error:  # JAX raises RuntimeErrors
            why = " ".join(str(error).split()) or type(error).__name__
            out.error(setting, arm, why)
            if not self.continue_on_error:
                raise InputError(
                    f"{setting.label}, K = {self.plan.label(arm)}: {why}; decoded requests are kept: continue with "
                    "--resume, without this K with --continue-on-error"
                ) from error
            self.failed[setting, arm] = why

    def _asked(self, setting: Setting) -> Sequence[SweepRequest]:
        return self.requests[setting.prompts, setting.raw]

    def _request(self, each: SweepRequest, sampling: SamplingParams) -> Request:
        room = self.pair.max_positions - len(each.prompt_ids)
        return Request(each.prompt_ids, min(self.plan.max_new_tokens, room), sampling, index=each.request)

    def _engine(self, arm: Arm) -> AnyEngine:
        pair = self.pairs[loaded(arm)]
        if isinstance(pair, InputError):
            raise pair
        k, adaptive = pair.num_drafts(arm.k)
        slots = arm.concurrency or 1
        return pair.engine(pair.engine_config(k, context=self.capacity, adaptive=adaptive, slots=slots))

    def profile(self, progress: Progress) -> None:
        """Profile PROFILED conversations in every setting and arm, and store the results in run.json.

        Profiles that failed are tried again on the next resume.
        """
        folder = self.folder
        shares = [share for share in folder.record["shares"] if "why_not" not in share]
        stored = {(*arm_of(share), share["request"]) for share in shares}
        plain = [sample for sample in folder.samples() if sample.arm == PLAIN]
        left = [
            (setting, each, arm)
            for setting in self.settings
            for each in self._spread(setting, [sample for sample in plain if sample.setting == setting])
            for arm in self.plan.arms
            if (setting, arm, each.request) not in stored and (setting, arm) not in self.failed
        ]
        programs: dict[tuple[float, Arm], dict[str, str]] = {}
        for number, (setting, each, arm) in enumerate(left):
            progress(number, len(left))
            found: Json = {**dataclasses.asdict(setting), **dataclasses.asdict(arm), "request": each.request}
            try:
                request = self._request(each, SamplingParams(setting.temperature, seed=self.plan.seed))
                request = dataclasses.replace(request, max_new_tokens=min(request.max_new_tokens, PROFILED_TOKENS))
                engine = self._engine(arm)
                engine.warm_up(sampled=not request.sampling.greedy)
                program = (setting.temperature, arm)
                if program not in programs:
                    programs[program] = operations_of(engine, not request.sampling.greedy)
                with tempfile.TemporaryDirectory() as directory:
                    seen = profile(engine, [request], Path(directory), programs[program], perfetto=False)
                found |= {"num_steps": seen.num_steps, **seen.in_three}
            except (InputError, OSError, RuntimeError) as error:
                found["why_not"] = str(error).partition("\n")[0]
            shares.append(found)
            folder.save(shares=shares)

    def _spread(self, setting: Setting, plain: Sequence[Sample]) -> list[SweepRequest]:
        """Choose PROFILED requests of different conversations, evenly among the longest plain outputs.

        Outputs of PROFILED_TOKENS or more count as equally long.
        """
        tokens = {sample.request: min(sample.output_tokens, PROFILED_TOKENS) for sample in plain}
        by_row: dict[int, SweepRequest] = {}
        for each in self._asked(setting):
            by_row.setdefault(each.row, each)
        lengths = sorted((tokens.get(each.request, 0) for each in by_row.values()), reverse=True)
        count = min(PROFILED, len(lengths))
        some = [each for each in by_row.values() if tokens.get(each.request, 0) >= lengths[count - 1]]
        return [some[number * len(some) // count] for number in range(count)]
