"""`peagle speculate` and `peagle generate`: check, load, run, write. Other commands load models by it, too."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from peagle.checkpoints import DEMO, DEMO_DRAFTERS, drafter_path, or_demo, resolve
from peagle.cli.command import changed_fields
from peagle.cli.display import Display
from peagle.cli.document import dumps, logprob_lines, report, summary_lines, trace_lines
from peagle.cli.flags import refuse_strict
from peagle.cli.output import STANDARD_OUTPUT, OutputFile, output_file, say
from peagle.cli.processes import load_in_all
from peagle.cli.speculate import Decode
from peagle.config import EngineConfig, LoadConfig, NumDrafts, SamplingParams
from peagle.engine.grammar import Grammar, GrammarError
from peagle.engine.resolved import shared_slots
from peagle.measure.profile import make_directory
from peagle.measure.provenance import peak_memory_bytes, provenance
from peagle.ops import interrupt
from peagle.ops.errors import InputError
from peagle.ops.files import reason_of
from peagle.pair import DRAFT_SAMPLING, Pair
from peagle.parallel import parse_mesh
from peagle.text.prompt_files import PromptSet, Skipped, read_prompts
from peagle.text.prompts import Conversation, Rendering, from_text, parse_ids
from peagle.workflows.run import RunConfig, run

EXAMPLE = '''\
Rename the function to `handle`.

def push(self, item):
    """Put an item into the queue, and wake up one of those that wait for it."""
    with self._lock:
        if self._closed:
            raise ValueError("the queue is closed")
        self._items.append(item)
        self._ready.notify()'''  # a task that the demo target can do


def decode(settings: Decode) -> int:
    """Decode, and return the exit code: text to standard output, the summary to standard error, the rest to files.

    Raises InputError before anything is written; but for a failed profile, and for requests whose grammar no token
    satisfied, at the end.
    """
    json_file = output_file(settings.json, "--json")
    trace_file = None if settings.trace is None else _trace_file(settings, json_file)
    target = or_demo(settings.load.target)
    drafter = None if settings.command == "generate" else or_demo(settings.load.drafter)
    directory = resolve(target, "target")
    drafter_path(target, drafter)
    if settings.answer.logprobs is not None and settings.quiet and json_file is None:
        raise InputError("--logprobs are shown in the notes that --quiet leaves out; give --json FILE, too")
    expect_shared(settings.engine.slots, settings.load.mesh)
    config = _config(settings)  # before anything slow
    with interrupt.waiting():  # standard input may be a keyboard, a file a pipe
        prompts = _prompts(settings, directory)
    if settings.profile is not None:
        make_directory(Path(settings.profile))

    conversations = prompts.conversations
    display = Display(
        text=settings.json != STANDARD_OUTPUT,
        quiet=settings.quiet,
        total=sum(conversation.num_requests for conversation in conversations),
        streaming=min(settings.engine.slots, len(conversations)) == 1,
        drafts=settings.show_drafts,
    )
    display.warn(prompts.warnings)
    display.warn(without_effect(settings.sampling, drawn=settings.engine.synthetic_acceptance is not None))
    if settings.show_drafts and display.shows_drafts:
        display.note(f"accepted drafts are {display.drafts_legend}")
    elif settings.show_drafts:
        display.warn(["--show-drafts has no effect: the text does not go to a terminal"])
    if _is_example(settings):
        display.note(f"the built-in example:\n{EXAMPLE}\n")
    pair = load_pair(target, drafter, settings.load, display)
    display.read_by(pair.tokenizer)
    if any(conversation.prompt_ids is None for conversation in conversations):
        display.warn(not_shown(settings.rendering, pair, target))
    try:
        with _grammar_by_option(settings):
            outcome = run(pair, conversations, config, display)
    finally:
        display.end_all()

    peak = peak_memory_bytes()
    names: dict[str, str | None] = {"command": settings.command, "target": target, "drafter": drafter}
    if trace_file is not None:
        trace_file.write("".join(trace_lines(outcome)))
    if json_file is not None:
        json_file.write(dumps(report(outcome, pair, config, names, provenance(), peak, prompts.skipped)))
    if json_file is None:  # else the file has them
        display.summary(list(logprob_lines(outcome, pair)))
    display.summary(summary_lines(outcome, peak, prompts.skipped))
    if settings.quiet:  # else the summary has them
        display.warn(outcome.cut_short)
    if outcome.profile_failed is not None:
        raise InputError(f"--profile {settings.profile} failed: {outcome.profile_failed}")
    if outcome.failed:
        first, *others = outcome.failed
        raise InputError(f"{first}; and {len(others)} more" if others else first)
    return interrupt.EXIT_CODE if outcome.interrupted else 0


def without_effect(sampling: SamplingParams, drawn: bool = False) -> list[str]:
    """Name the sampling options without effect at temperature 0. drawn: the seed draws synthetic acceptance."""
    if not sampling.greedy:
        return []
    idle = {"top_k", "top_p", "min_p", *([] if drawn else ["seed"])}
    options = ", ".join(f"--{name.replace('_', '-')}" for name in changed_fields(sampling) if name in idle)
    return [f"{options}: no effect at temperature 0, where the likeliest token is taken"] if options else []


def not_shown(rendering: Rendering, pair: Pair, target: str) -> list[str]:
    """Name the rendering options that the prompts do not show."""
    options = [] if pair.tokenizer is None else rendering.without_effect(pair.tokenizer)
    where = "raw prompts do" if rendering.raw else f"the chat template of {target} does"
    return [f"{', '.join(options)}: no effect, since {where} not show it"] if options else []


def chosen_models(load: LoadConfig, k: NumDrafts) -> tuple[str, str | None]:
    """Return (target, drafter); None without drafting. Raises InputError, before anything slow, if one is missing."""
    target = or_demo(load.target)
    if k == 0 and load.drafter is not None:
        say("warning", "--drafter: no effect with -k 0, plain decoding")
    drafter = None if k == 0 else or_demo(load.drafter)
    resolve(target, "target")
    drafter_path(target, drafter)
    return target, drafter


def chosen_context(pair: Pair, engine: EngineConfig, num_engines: int = 1) -> int:
    """Return the context of a request: as typed, or the model's limit, or less if the memory holds less."""
    if engine.context is not None:
        return pair.room(engine.context)
    k, _ = pair.num_drafts(engine.num_speculative_tokens)
    return pair.default_context(k, engine.slots, engine.kv_memory, num_engines)


def expect_shared(slots: int, mesh: str | None) -> None:
    """Raise InputError, before anything slow, for slots that the replicas of a mesh cannot share."""
    shared_slots(slots, 1 if mesh is None else parse_mesh(mesh).dp)


def load_pair(target: str, drafter: str | None, load: LoadConfig, display: Display) -> Pair:
    """Load the target and the drafter, with progress; note which of the target's layers the drafter reads."""
    if load.mesh is None and load.reduce != "ordered":
        raise InputError(f"--reduce {load.reduce} is given without --mesh, over whose devices it sums; give both")
    options = {"target": target, "drafter": drafter, **load.arguments}
    with display.stage(f"loading {'the demo pair' if target == DEMO else target}") as progress:
        pair = load_in_all(options, progress)
    if pair.loaded.mesh is not None:
        display.note(f"target sharded over {pair.loaded.mesh}")
    if pair.loaded.aux_layers is not None and drafter not in DEMO_DRAFTERS:
        display.note(f"the drafter reads the target's {pair.loaded.aux_layers}")
    return pair


def _config(settings: Decode) -> RunConfig:
    engine = settings.engine
    if settings.draft_sampling:
        say("warning", f"--draft-sampling: {DRAFT_SAMPLING}")
    return RunConfig(
        **vars(settings.answer),
        sampling=settings.sampling,
        engine=engine,
        grammar=_grammar(settings),
        baseline=not settings.no_baseline,
        show_drafts=settings.show_drafts,
        profile=None if settings.profile is None else Path(settings.profile),
        rendering=settings.rendering,
    )


def _grammar(settings: Decode) -> Grammar | None:
    """Return the grammar of the responses. Raises InputError for an unreadable file, and for two grammars."""
    path, regex = settings.json_schema, settings.regex
    if path is None:
        with _grammar_by_option(settings):
            return None if regex is None else Grammar.regex(regex)
    if regex is not None:
        raise InputError("--json-schema and --regex are given; expected one of them")
    try:
        with _grammar_by_option(settings):
            return Grammar.json_schema(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"--json-schema {path} cannot be read: {reason_of(error)}; expected a file of JSON in UTF-8"
        ) from None


@contextmanager
def _grammar_by_option(settings: Decode) -> Iterator[None]:
    """Prefix errors of the grammar with its option."""
    try:
        yield
    except GrammarError as error:
        option = f"--json-schema {settings.json_schema}" if settings.regex is None else "--regex"
        raise InputError(f"{option}: {error}") from None


@dataclasses.dataclass(frozen=True)
class _Prompts:
    """Conversations that are not from a file."""

    conversations: Sequence[Conversation]
    skipped: Sequence[Skipped] = ()
    warnings: Sequence[str] = ()


def _prompts(settings: Decode, target: Path) -> "PromptSet | _Prompts":
    rendering = settings.rendering
    prompts = {"PROMPT": settings.prompt, "--prompt-file": settings.prompt_file, "--prompt-ids": settings.prompt_ids}
    named = [name for name, value in prompts.items() if value is not None]
    if len(named) > 1:
        raise InputError(f"{' and '.join(named)} are given; expected one of them")
    if settings.prompt_file is not None:
        return read_prompts(settings.prompt_file, target, rendering, strict=settings.strict)
    refuse_strict(settings.strict)
    if settings.prompt_ids is not None:
        if rendering.options:
            raise InputError(
                f"--prompt-ids are used without the chat template; leave out {' and '.join(rendering.options)}"
            )
        return _Prompts([parse_ids(settings.prompt_ids)])
    if settings.prompt == "-":
        return _Prompts([from_text(_read_standard_input(), "standard input")])
    return _Prompts([from_text(EXAMPLE if settings.prompt is None else settings.prompt)])


def _is_example(settings: Decode) -> bool:
    return settings.prompt is None and settings.prompt_file is None and settings.prompt_ids is None


def _read_standard_input() -> str:
    """Read standard input to its end, without the line break that ends a text file."""
    if sys.stdin is None:
        raise InputError("standard input is closed; expected the prompt there, or a prompt instead of -")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise InputError("standard input is not UTF-8 text; expected UTF-8") from None
    return text.removesuffix("\n").removesuffix("\r")


def _trace_file(settings: Decode, json_file: OutputFile | None) -> OutputFile:
    assert settings.trace is not None
    if settings.trace == STANDARD_OUTPUT:
        raise InputError("--trace -: standard output is for the generated text; expected a file")
    trace_file = OutputFile(settings.trace, "--trace")
    if json_file is not None and settings.json != STANDARD_OUTPUT and json_file.path == trace_file.path:
        raise InputError(f"--json and --trace both name {settings.trace}; expected two files")
    return trace_file
