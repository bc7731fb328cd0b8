"""`peagle data`: write a target's answers to prompts, new or recorded ones, to shards of training data."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from peagle.base.errors import InputError
from peagle.base.files import expect_room, free_bytes, locked
from peagle.base.flag import OUTPUT, PROMPT, SAMPLING, Flag, check_least, layers_reader
from peagle.base.strict_json import dumps
from peagle.cli.command import Takes, changed_options
from peagle.cli.flags import PROMPT_FILE, QUIET
from peagle.config import EngineConfig, LoadConfig, SamplingParams
from peagle.text.prompt_files import PromptSet, read_prompts, skipped_line
from peagle.text.prompts import Conversation, Rendering, num_repeated
from peagle.text.tokenizer import load_tokenizer, template_fingerprint

if TYPE_CHECKING:  # they import JAX
    from drafter.train.shards import Document
    from peagle.cli.display import Display
    from peagle.workflows.answers import Skip
    from peagle.workflows.dataset import Tally
    from target.load import TargetFiles
    from target.teacher import Teacher

    # makes documents of (conversations, the index of the first, skipped, done, documents of an earlier run)
    Source = Callable[[Sequence[Conversation], int, Skip, Callable[[], None], Sequence[Document]], Iterator[Document]]

MANY_FRAC = 0.1  # of the answers; warn if more are cut or left out


@dataclass(frozen=True, kw_only=True)
class Data:
    """Generate training data: a target's answers to prompts.

    Writes the answers in shards. After Ctrl-C or SIGTERM, the same command
    resumes with the answers that are missing.

    [bold]Examples[/bold]

      the demo target   [cyan]peagle data --prompt-file IN.jsonl --out DATA[/cyan]
      your target
        [cyan]peagle data --target DIR --prompt-file IN.jsonl --out DATA --context 2048[/cyan]
      answers that a file already holds
        [cyan]peagle data --prompt-file IN.jsonl --out DATA --answers recorded[/cyan]
      with what training reads of the target, which then need not run
        [cyan]peagle data --prompt-file IN.jsonl --out DATA --hidden[/cyan]
      long prompts
        [cyan]peagle data --target DIR --prompt-file IN.jsonl --out DATA --context 8192[/cyan]
    """

    prompt_file: Annotated[tuple[Path, ...], PROMPT_FILE]
    """Prompt file, in a format of peagle speculate; repeatable."""
    out: Annotated[str, Flag(OUTPUT, "DIR")]
    """Output directory; the same command resumes it."""
    answers: Annotated[Literal["generated", "recorded"], Flag(PROMPT, "HOW")] = "generated"
    """generated: the target answers anew. recorded: take the answers in the prompt file as they are: those of an
    assistant in messages, or input_ids with a loss_mask."""
    num_prompts: Annotated[int | None, Flag(PROMPT, "N")] = None
    """Use the first N prompts, 1 or more."""
    rendering: Annotated[Rendering, Takes("raw", "system", "reasoning_effort", "date")] = Rendering()
    load: Annotated[LoadConfig, Takes("target")] = LoadConfig()
    max_new_tokens: Annotated[int | None, Flag(SAMPLING, "N", ("-n", "--max-new-tokens"))] = None
    """Maximum tokens of an answer. Default: what the context leaves."""
    engine: Annotated[EngineConfig, Takes("context", "slots")] = EngineConfig(context=512, slots=32)
    hidden: Annotated[bool, Flag(OUTPUT)] = False
    """Also store the hidden states that the drafter reads (aux_hidden) and the target's 32 largest logits, for every
    token: large files, and training does not run the target."""
    aux_layer_ids: Annotated[tuple[int, ...] | None, Flag(OUTPUT, "L,L,L", read=layers_reader("aux_layer_ids"))] = None
    """With --hidden: store the outputs of these target layers (0-based). Default: 1, n/2 - 1 and n - 4 of n layers."""
    keep_prompt: Annotated[int | None, Flag(OUTPUT, "N")] = None
    """Store only the last N tokens of a prompt; the target still reads all of it. For drafters whose windows see no
    further; needs --hidden."""
    sampling: Annotated[SamplingParams, Takes("temperature", "top_p", "seed")] = SamplingParams()
    quiet: Annotated[bool, QUIET] = False

    def __post_init__(self) -> None:
        check_least(self, num_prompts=1, max_new_tokens=1, keep_prompt=0)
        for option, value in (("--keep-prompt", self.keep_prompt), ("--aux-layer-ids", self.aux_layer_ids)):
            if value is not None and not self.hidden:
                raise InputError(
                    f"{option} is for data with hidden states, and none are stored: give --hidden, too, or leave it out"
                )

    def run(self) -> int:
        with locked(Path(self.out)):
            return make_data(self)


@dataclass(frozen=True)
class CheckedData:
    """Checked options: everything that is known before weights are loaded."""

    name: str  # of the target, as typed
    directory: Path  # of the target
    target: "TargetFiles"
    out: Path
    context: int
    manifest: dict[str, Any]
    conversations: Sequence[Conversation]
    sets: Sequence[PromptSet]
    warnings: Sequence[str]
    aux_layers: tuple[int, ...]  # to store; none without --hidden
    token_bytes: int  # in a shard
    starts: range  # the first conversation of every shard
    missing: Sequence[int]  # numbers of the shards still to write

    def shard(self, number: int) -> Sequence[Conversation]:
        return self.conversations[self.starts[number] : self.starts[number] + self.starts.step]

    def kept(self) -> str:
        """Say what an interrupted run leaves."""
        from drafter.train.shards import read_part, shard_path

        num_answers = sum(len(read_part(self.out, number)) for number in self.missing)
        count = sum(shard_path(self.out, number).exists() for number in range(len(self.starts)))
        more = f", and {num_answers:,} answers of the next" if num_answers else ""
        return f"{count} of {len(self.starts)} shards are in {self.out}{more}; the same command goes on after them"


def make_data(settings: Data) -> int:
    """Write every missing shard. Return the exit code.

    Raises InputError for bad options and prompts before it loads weights; later if a shard cannot be written.
    """
    from peagle.cli.display import Display
    from peagle.workflows.dataset import Tally, load_teacher

    display = Display(quiet=settings.quiet)
    with display.stage("reading the prompts"):
        checked = _check(settings)
    display.warn(checked.warnings)
    display.warn(_unused_options(settings))
    if not checked.missing:
        display.note(f"{checked.out} is complete: {len(checked.starts)} shards")
        return 0
    for line in _notes(checked, settings):
        display.note(line)
    max_new_tokens = settings.max_new_tokens if settings.answers == "generated" else None
    tally = Tally(checked.target.stop_token_ids, settings.answers == "generated", max_new_tokens, checked.context)
    source = _source(checked, settings, display)
    teacher = load_teacher(checked.directory, checked.aux_layers) if settings.hidden else None
    started = time.perf_counter()
    with display.on_interrupt(checked.kept):
        _write_shards(checked, settings, source, teacher, tally, display)
    display.summary(_summary(checked, settings, tally, time.perf_counter() - started))
    display.warn(_losses(settings, tally))
    return 0


def _check(settings: Data) -> CheckedData:
    """Read the prompts and check the folder. Raises InputError for prompts, options and folders that do not work."""
    from drafter.train.shards import expect_folder, shard_path
    from peagle.loading.checkpoints import or_demo, resolve
    from peagle.workflows.dataset import bytes_per_token, chosen_aux_layers, prompts_per_shard
    from target.load import inspect_target

    name = or_demo(settings.load.target)
    directory = resolve(name, "target")
    answered = settings.answers == "recorded"
    sets = [read_prompts(path, directory, settings.rendering, answered=answered) for path in settings.prompt_file]
    conversations = [conversation for prompts in sets for conversation in prompts.conversations]
    if settings.num_prompts is not None:
        conversations = conversations[: settings.num_prompts]
    target = inspect_target(directory)
    config = target.config
    aux_layers = chosen_aux_layers(settings.aux_layer_ids, config.num_layers) if settings.hidden else ()
    warnings, typed = [line for prompts in sets for line in prompts.warnings], settings.engine.context
    context = min(typed or config.max_positions, config.max_positions)
    if typed not in (None, context, Data.engine.context):
        warnings.append(f"--context is {typed}, more than {name} has; {context} is used")
    out = Path(settings.out)
    token_bytes = bytes_per_token(len(aux_layers) * config.hidden_size)
    starts = range(0, len(conversations), prompts_per_shard(context * token_bytes))
    manifest = _manifest(settings, name, directory, sets, len(conversations), starts.step, aux_layers)
    expect_folder(out, manifest)
    return CheckedData(
        name=name, directory=directory, target=target, out=out, context=context, manifest=manifest,
        conversations=conversations, sets=sets, warnings=warnings, aux_layers=aux_layers,
        token_bytes=token_bytes, starts=starts,
        missing=[number for number in range(len(starts)) if not shard_path(out, number).exists()],
    )  # fmt: skip


def _unused_options(settings: Data) -> list[str]:
    """Return a warning about options without effect, if any."""
    from peagle.cli.models import unused_sampling

    if settings.answers == "generated":
        return unused_sampling(settings.sampling)
    unused = _unused()
    options = ", ".join(option.names[0] for option in changed_options(settings) if option.name in unused)
    return [f"{options}: no effect with --answers recorded, which generates nothing"] if options else []


def _unused() -> set[str]:
    """Name the settings without effect on recorded answers."""
    return {"max_new_tokens", "slots", *(item.name for item in dataclasses.fields(SamplingParams))}


def _notes(checked: CheckedData, settings: Data) -> Iterator[str]:
    """Say what the prompts are, and what their answers may take."""
    from peagle.base.sizes import format_size

    num_prompts, num_recorded = len(checked.conversations), sum(row.num_left_out for row in checked.conversations)
    if num_recorded and settings.answers == "generated":
        yield (
            f"recorded answers that are left out: {num_recorded:,}; the target answers anew, and --answers recorded "
            "takes them as they are"
        )
    if repeated := num_repeated(checked.conversations):
        yield f"{repeated:,} of {num_prompts:,} prompts repeat one before; a training holds out all of a prompt or none"
    num_missing = sum(len(checked.shard(number)) for number in checked.missing)
    most, free = num_missing * checked.context * checked.token_bytes, free_bytes(checked.out)
    if most > free:
        yield (
            f"{num_missing:,} documents of up to {checked.context:,} tokens take up to {format_size(most)} in "
            f"{checked.out}, which has room for {format_size(free)}"
        )


def _source(checked: CheckedData, settings: Data, display: "Display") -> "Source":
    """Return what makes the documents: the loaded target, or the reader of recorded answers."""
    from peagle.cli.models import load_pair, unused_rendering
    from peagle.workflows.answers import AnswerOptions, answer
    from peagle.workflows.recorded import Reader

    if settings.answers == "recorded":
        tokenizer, target = load_tokenizer(checked.directory), checked.target
        display.warn(unused_rendering(settings.rendering, tokenizer, checked.name))
        stops, vocab_size = target.stop_token_ids, target.config.vocab_size
        reader = Reader(checked.directory, tokenizer, settings.rendering, stops, vocab_size, checked.context)
        return reader.documents
    pair = load_pair(checked.name, None, settings.load, display)
    display.warn(unused_rendering(settings.rendering, pair.tokenizer, checked.name))
    options = AnswerOptions(
        settings.rendering,
        settings.sampling,
        settings.max_new_tokens,
        pair.room(checked.context),
        settings.engine.slots,
    )
    return lambda conversations, *rest: answer(pair, conversations, options, *rest)


def _write_shards(
    checked: CheckedData,
    settings: Data,
    source: "Source",
    teacher: "Teacher | None",
    tally: "Tally",
    display: "Display",
) -> None:
    """Write the missing shards, with progress. Raises InputError if no prompt of any shard has an answer."""
    from drafter.train.shards import open_folder
    from peagle.workflows.answers import in_order
    from peagle.workflows.dataset import Unfinished, write_documents

    open_folder(checked.out, checked.manifest)
    progress = _AnswerProgress(sum(len(checked.shard(number)) for number in checked.missing))
    groups, empty = _groups(checked.conversations), []
    doing = "answering" if settings.answers == "generated" else "reading the answers to"
    for index, number in enumerate(checked.missing):
        with Unfinished(checked.out, number) as unfinished:
            with display.stage(f"{doing} {progress.total:,} prompts", animated=False) as stage:
                progress.stage = stage
                conversations, kept = checked.shard(number), list(unfinished.documents)
                tally.keep(kept)
                progress.num_kept += len({document.conversation for document in kept})
                for document in source(conversations, checked.starts[number], tally.skip, progress.done, kept):
                    unfinished.add(document)
            documents = in_order(unfinished.documents)
            tally.end(documents)
            if teacher is not None:
                title = f"computing hidden states and logits of shard {index + 1} of {len(checked.missing)}"
                documents = _taught(checked, settings, teacher, documents, unfinished.taught, title, display)
            documents = [
                dataclasses.replace(document, conversation=groups[document.conversation]) for document in documents
            ]
            if documents:
                write_documents(checked.out, number, documents)
            else:
                empty.append(number)
        tally.add(documents)
    if len(empty) == len(checked.starts):
        raise InputError(f"none of the prompts can be answered, the first: {tally.why}")
    for number in empty:
        write_documents(checked.out, number, [])


def _taught(
    checked: CheckedData,
    settings: Data,
    teacher: "Teacher",
    documents: "Sequence[Document]",
    done: "dict[int, Document]",
    title: str,
    display: "Display",
) -> "list[Document]":
    """Add hidden states and logits to the documents that are not done. Raises InputError first if there is no room."""
    from peagle.workflows.dataset import cut_prompt, with_teacher

    num_tokens = sum(len(cut_prompt(document, settings.keep_prompt).token_ids) for document in documents)
    expect_room(checked.out, num_tokens * checked.token_bytes, f"a shard of {num_tokens:,} tokens")
    with display.stage(title, animated=False) as stage:
        return list(with_teacher(documents, teacher, settings.keep_prompt, stage, done))


class _AnswerProgress:
    """Count the conversations that have ended, and estimate the time left, with the teacher's passes so far."""

    def __init__(self, total: int) -> None:
        self.total, self.stage = total, lambda *_: None
        self.num_kept = self._finished = 0  # kept: from an earlier run
        self._started = time.perf_counter()

    def done(self) -> None:
        self._finished += 1
        spent_s, num_new = time.perf_counter() - self._started, max(1, self._finished - self.num_kept)
        self.stage(self._finished, self.total, spent_s / num_new * (self.total - self._finished))


def _groups(conversations: Sequence[Conversation]) -> list[int]:
    """Number the conversations; rows of one conversation have the same number.

    Rows may be turns of one, whose common beginning a training does not see once prompts are cut.
    """
    from drafter.train.held_out import groups_of

    prompts = [conversation.first_prompt for conversation in conversations]
    return groups_of(prompts, [conversation.group for conversation in conversations])


def _summary(checked: CheckedData, settings: Data, tally: "Tally", seconds: float) -> list[str]:
    from peagle.workflows.dataset import lengths_in_words

    totals = f"{tally.num_documents:,} documents, {tally.num_tokens:,} tokens, {tally.num_trained:,} of them "
    if settings.answers == "recorded":
        totals += "of recorded answers"
    else:
        totals += "the target's"
        if new := tally.num_trained - tally.num_kept_trained:
            totals += f", {new / seconds:,.0f} tok/s"
    if tally.num_kept:
        totals += f"; {tally.num_kept:,} of the documents are of a run before"
    lines = [
        f"data         {len(checked.starts)} shards in {checked.out} ({len(checked.missing)} new)",
        f"new          {totals}",
    ]
    if tally.lengths:
        lines += [f"lengths      {lengths_in_words(tally.lengths)}", f"ends         {_ends(tally)}"]
    lines += [f"left out     {skipped_line(prompts.skipped)}" for prompts in checked.sets if prompts.skipped]
    if tally.num_left_out:
        lines.append(f"no answer    {tally.num_left_out:,} turns, the first: {tally.why}")
    return lines


def _ends(tally: "Tally") -> str:
    """Count answers by how they end, as in: 3 of 5 answers end at a stop token, 2 at -n 10."""
    from peagle.workflows.dataset import NO_STOP, STOP

    counts = [f"{tally.ends[STOP]:,} of {tally.num_documents:,} answers end at a stop token"]
    counts += [f"{tally.ends[at]:,} at {at} {limit}" for at, limit in tally.limits.items() if tally.ends[at]]
    counts += [f"{tally.ends[NO_STOP]:,} at another token"] if tally.ends[NO_STOP] else []
    return ", ".join(counts)


def _losses(settings: Data, tally: "Tally") -> Iterator[str]:
    """Warn of answers that are cut, and of turns that are left out, if they are many."""
    from peagle.workflows.dataset import NO_STOP, STOP

    num_turns = tally.num_documents + tally.num_left_out
    many = tally.num_documents - tally.ends[STOP] > MANY_FRAC * tally.num_documents
    for at, limit in tally.limits.items():
        if many and tally.ends[at]:
            yield (
                f"{tally.ends[at]:,} of {tally.num_documents:,} answers are cut at {at} {limit}, and a drafter learns "
                f"no ends from them; a larger {at} keeps them whole"
            )
    if many and tally.ends[NO_STOP]:
        yield (
            f"{tally.ends[NO_STOP]:,} of {tally.num_documents:,} recorded answers do not end at a stop token, and a "
            "drafter learns no ends from them; expected a stop token last, with 1 in the loss_mask"
        )
    if tally.num_left_out > (0 if settings.quiet else MANY_FRAC * num_turns):  # otherwise the summary has them
        yield f"{tally.num_left_out:,} of {num_turns:,} turns have no answer in the data, the first: {tally.why}"


def _manifest(
    settings: Data,
    name: str,
    directory: Path,
    sets: Sequence[PromptSet],
    num_prompts: int,
    shard_prompts: int,
    aux_layers: Sequence[int],
) -> dict[str, Any]:
    """Return everything on which the shards depend, as JSON. name, directory: of the target."""
    from drafter.train.shards import KEPT, NAME, WEIGHTS
    from peagle.base.checkpoint import fingerprint

    depends_on: dict[str, Any] = {
        NAME: name,
        WEIGHTS: fingerprint(directory),
        "template": template_fingerprint(directory),
        "prompts": [[path.name, prompts.sha256] for path, prompts in zip(settings.prompt_file, sets, strict=True)],
        "answers": settings.answers,
        "num_prompts": num_prompts,
        "shard_prompts": shard_prompts,
        "max_new_tokens": settings.max_new_tokens,
        "context": settings.engine.context,
        "rendering": dataclasses.asdict(settings.rendering),
        "sampling": dataclasses.asdict(settings.sampling),
        "aux_layer_ids": list(aux_layers),
        **({} if settings.keep_prompt is None else {KEPT: settings.keep_prompt}),
    }
    if settings.answers == "recorded":
        unused = _unused() | {"sampling"}
        depends_on = {key: value for key, value in depends_on.items() if key not in unused}
    loaded: dict[str, Any] = json.loads(dumps(depends_on))
    return loaded
