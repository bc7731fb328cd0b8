"""A plan decoded: every prompt in every way, taking turns, a line as soon as it is there.

For each repeat and setting every prompt is decoded by every arm in turn, in an order that rotates from prompt to prompt
and repeat to repeat, so that a drift of the machine falls on all alike. Compilation, and the costs that `auto` goes by,
are outside of every time. With a temperature each repeat has a seed of its own. At the end each arm decodes some
requests once more under the profiler, which says into what parts a step's time goes.

Many requests at once (`Plan.loads`): every arm decodes all requests of a setting together, once a repeat. Arms with as
many slots follow one another, in an order that rotates, and numbers of slots go up and down in turns.

Later turns of a conversation are asked with plain decoding's greedy answers to those before, so that all arms are asked
the same.
"""

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from peagle.api import Pair
from peagle.engine.engine import Engine
from peagle.engine.request import Request, SamplingParams
from peagle.measure.profile import operations_of, profile
from peagle.measure.sweep.folder import ASKING, Appender, Asked, Folder, Json, Posed, Sample, key, sample_of, where
from peagle.measure.sweep.plan import LOOKED_AT, LOOKED_AT_TOKENS, PLAIN, Arm, Plan, Setting, Source
from peagle.ops.errors import InputError
from peagle.ops.memory import share_of_mappings
from peagle.result import decode
from peagle.text.prompt_files import PromptSet
from peagle.text.prompts import Conversation, Rendering

Loaded = tuple[str | None, str | None, str | None]  # drafter, draft vocabulary, window of the drafter
Pairs = Mapping[Loaded, Pair | InputError]  # why a pair could not be loaded, where the others are to go on
Progress = Callable[[int, int], None]

MOST_MAPPINGS = 0.85  # of those allowed: an arm's programs take up to a tenth


def loaded(arm: Arm) -> Loaded:
    """Which pair an arm needs; plain decoding any."""
    return arm.drafter, arm.draft_vocab, arm.drafter_window


def ask(folder: Folder, pair: Pair, sets: Mapping[str, PromptSet], progress: Progress) -> None:
    """The folder knows every request of every source and rendering, numbered, and what is left out; what it knew
    before is not asked again. `sets` by a source's name.

    Raises InputError for what cannot be asked; for a prompt that is too long only where the plan says so.
    """
    plan = folder.plan
    known = {(each.prompts, each.raw, each.row): each for each in folder.posed()}
    total = sum(source.num_used for source in plan.sources) * len(plan.raw)
    done: list[Posed] = []
    with folder.appending(ASKING) as out:
        for source, raw in itertools.product(plan.sources, plan.raw):
            first = 0
            for row, conversation in enumerate(sets[source.name].conversations[: source.num_used]):
                posed = known.get((source.name, raw, row))
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
            raise InputError(f"nothing of {source.name} can be asked{last}")
    folder.save_asked(done, {name: each.left_out for name, each in sets.items()})


def turns_asked(source: Source, raw: bool, conversation: Conversation) -> int:
    """How many turns of a conversation are asked, if its prompts are not too long. Raw text has one."""
    turns = min(source.max_turns or conversation.num_requests, conversation.num_requests)
    return min(turns, 1) if raw and conversation.turns else turns


def _ask_one(
    plan: Plan, pair: Pair, source: Source, raw: bool, row: int, conversation: Conversation, first: int
) -> Posed:
    """A conversation's requests, the first of this number."""
    found: list[Asked] = []
    answers: list[str] = []
    why = None
    turns = turns_asked(source, raw, conversation)
    if turns < turns_asked(source, False, conversation):
        why = f"{conversation.name}: raw text has one turn; the {conversation.num_requests - 1} behind it"
    asked = dataclasses.replace(conversation, turns=conversation.turns[:turns])
    rendering = Rendering(raw=raw, special_tokens=raw and plan.special_tokens)
    longest = min(plan.max_prompt_tokens or pair.max_positions, pair.max_positions - 1)
    for turn in range(turns):
        try:
            prompt_ids = asked.encode(answers, pair.tokenizer, rendering)
        except InputError as error:
            if not raw:
                raise
            why = str(error).partition(";")[0]  # what only a chat template can put together
            break
        if len(prompt_ids) > longest:
            why = f"{conversation.name}, turn {turn + 1}, has {len(prompt_ids)} tokens; expected at most {longest}"
            if plan.too_long == "error":
                raise InputError(f"{why}: leave it out with --too-long skip")
            break
        request = pair.request(asked, answers, rendering, max_new_tokens=plan.max_new_tokens)
        found.append(Asked(source.name, raw, first + turn, row, turn, conversation.category, request.prompt_ids))
        if turn + 1 < turns:
            engine = pair.engine(pair.engine_config(0, capacity=pair.capacity([request])))
            engine.warm_up()
            answers.append(decode(engine, [request], pair.tokenizer)[0].text or "")
    return Posed(source.name, raw, row, tuple(found), why)


class Sitting:
    """One process' part of a run whose prompts are known. `failed`: why arms could not go on, where the others are to
    go on without them."""

    def __init__(self, folder: Folder, pairs: Pairs, continue_on_error: bool) -> None:
        known = folder.asked()
        assert known is not None
        asked, _ = known
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
        """What still has to decode is compiled, and the costs that `auto` goes by are known.

        Raises InputError for an arm that cannot go on, unless the others are to go on without it.
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
                        f"the programs of {number} arms take {share:.0%} of the memory mappings that the system allows "
                        "a process, and XLA crashes where it gets no more; run fewer arms or temperatures at a time "
                        "(peagle report puts runs together), or raise vm.max_map_count"
                    )
                self._engine(arm).warm_up(sampled=not SamplingParams(setting.temperature).greedy)

    def decode(self, out: Appender, progress: Progress) -> None:
        """Everything of the plan is in the folder's raw lines (`out` appends to them) that was not there yet.

        Raises InputError as `warm_up` does.
        """
        done = self.done
        arms = self.plan.arms
        sizes = {setting: len(self._asked(setting)) for setting in self.settings}
        ways = len(arms) + len(self.plan.loads)
        total, before = self.plan.repeats * sum(sizes.values()) * ways, len(done)
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
        """The arms of many requests at once, as they follow one another in this repeat."""
        by_slots = [list(some) for _, some in itertools.groupby(self.plan.loads, key=lambda arm: arm.concurrency)]
        for number, arms in enumerate(by_slots if repeat % 2 == 0 else reversed(by_slots)):
            turn = (repeat + number) % len(arms)
            yield from arms[turn:] + arms[:turn]

    def _decode(self, out: Appender, setting: Setting, arm: Arm, repeat: int, asked: Sequence[Asked]) -> None:
        """These requests are decoded together, and written down together."""
        if (setting, arm) in self.failed:
            return
        with self._failing(out, setting, arm):
            seed = self.plan.seed + (repeat if setting.temperature else 0)
            requests = [self._request(each, SamplingParams(setting.temperature, seed=seed)) for each in asked]
            results = decode(self._engine(arm), requests, self.pair.tokenizer)
            out.samples([sample_of(setting, arm, repeat, result) for result in results])

    @contextlib.contextmanager
    def _failing(self, out: Appender, setting: Setting, arm: Arm) -> Iterator[None]:
        """Why the arm cannot go on is written down; it is an InputError, or, where the others are to go on, kept."""
        try:
            yield
        except (InputError, MemoryError, RuntimeError) as error:  # JAX's own are RuntimeErrors
            why = " ".join(str(error).split()) or type(error).__name__
            out.error(setting, arm, why)
            if not self.continue_on_error:
                raise InputError(
                    f"{setting.label}, K = {self.plan.label(arm)}: {why}; what was decoded is kept: go on with "
                    "--resume, without this arm with --continue-on-error"
                ) from error
            self.failed[setting, arm] = why

    def _asked(self, setting: Setting) -> Sequence[Asked]:
        return self.requests[setting.prompts, setting.raw]

    def _request(self, each: Asked, sampling: SamplingParams) -> Request:
        room = self.pair.max_positions - len(each.prompt_ids)
        return Request(each.prompt_ids, min(self.plan.max_new_tokens, room), sampling, index=each.request)

    def _engine(self, arm: Arm) -> Engine:
        pair = self.pairs[loaded(arm)]
        if isinstance(pair, InputError):
            raise pair
        k, adaptive = pair.num_drafts(arm.k)
        slots = arm.concurrency or 1
        return pair.engine(pair.engine_config(k, capacity=self.capacity, adaptive=adaptive, slots=slots))

    def profile(self, progress: Progress) -> None:
        """Where a step's time goes, of every setting and arm in LOOKED_AT conversations: run.json holds what it did
        not. What could not be looked at is tried again when the run is resumed."""
        folder = self.folder
        looked = [share for share in folder.record["shares"] if "why_not" not in share]
        known = {(*where(share), share["request"]) for share in looked}
        plain = [sample for sample in folder.samples() if sample.arm == PLAIN]
        left = [
            (setting, each, arm)
            for setting in self.settings
            for each in self._spread(setting, [sample for sample in plain if sample.setting == setting])
            for arm in self.plan.arms
            if (setting, arm, each.request) not in known and (setting, arm) not in self.failed
        ]
        programs: dict[tuple[float, Arm], dict[str, str]] = {}
        for number, (setting, each, arm) in enumerate(left):
            progress(number, len(left))
            found: Json = {**dataclasses.asdict(setting), **dataclasses.asdict(arm), "request": each.request}
            try:
                request = self._request(each, SamplingParams(setting.temperature, seed=self.plan.seed))
                request = dataclasses.replace(request, max_new_tokens=min(request.max_new_tokens, LOOKED_AT_TOKENS))
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
            looked.append(found)
            folder.save(shares=looked)

    def _spread(self, setting: Setting, plain: Sequence[Sample]) -> list[Asked]:
        """LOOKED_AT requests of different conversations, evenly over those whose plain outputs are longest: beyond
        LOOKED_AT_TOKENS all are alike."""
        tokens = {sample.request: min(sample.output_tokens, LOOKED_AT_TOKENS) for sample in plain}
        by_row: dict[int, Asked] = {}
        for each in self._asked(setting):
            by_row.setdefault(each.row, each)
        lengths = sorted((tokens.get(each.request, 0) for each in by_row.values()), reverse=True)
        count = min(LOOKED_AT, len(lengths))
        some = [each for each in by_row.values() if tokens.get(each.request, 0) >= lengths[count - 1]]
        return [some[number * len(some) // count] for number in range(count)]
