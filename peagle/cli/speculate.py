"""`peagle speculate`: generate with speculative decoding, or plainly with -k 0, and report the speed-up."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from peagle.base import interrupt
from peagle.base.errors import InputError
from peagle.base.files import reason_of
from peagle.base.flag import OUTPUT, PROMPT, SAMPLING, SPECULATION, Flag
from peagle.cli.command import Takes
from peagle.cli.flags import JSON, PROMPT_FILE, QUIET
from peagle.cli.output import STANDARD_OUTPUT, OutputFile, output_file
from peagle.config import AnswerConfig, EngineConfig, LoadConfig, SamplingParams
from peagle.engine.grammar import Grammar, GrammarError
from peagle.text.prompt_files import Skipped, read_prompts
from peagle.text.prompts import Conversation, Rendering, from_text, parse_ids

EXAMPLE = '''\
Rename the function to `handle`.

def load(self, path, mode="r", encoding="utf-8"):
    """Read a file of settings, and return those that are known."""
    settings = {}
    with open(path, mode, encoding=encoding) as file:
        for number, line in enumerate(file, 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            key, sep, value = line.partition("=")
            if not sep:
                raise ValueError("%s:%d: no value" % (path, number))
            settings[key.strip()] = value.strip()
    unknown = set(settings) - set(self.known)
    if unknown and self.strict:
        raise KeyError(", ".join(sorted(unknown)))
    self.loaded[path] = settings
    return settings'''  # a task that the demo target can do
LOADED = Takes(
    *("target", "drafter", "aux_layer_ids", "draft_vocab", "drafter_window"),
    *("query_blocks", "ffn_blocks", "dtype", "mesh", "process"),
)
ENGINE = Takes("num_speculative_tokens", "slots", "context", "prefill_chunk")
COMPARE_S = 2.0  # how long further rounds of speculation and plain decoding may take


@dataclass(frozen=True, kw_only=True)
class Speculate:
    """Generate with speculative decoding and report the speed-up.

    Streams the answer, then decodes the prompt again with and without drafts
    to compare speed and tokens. A terminal shows accepted drafts in colour, by
    their position in the step. -k 0 is plain decoding: the target alone.

    [bold]Examples[/bold]

      built-in example    [cyan]peagle speculate[/cyan]
      K = 5, 128 tokens   [cyan]peagle speculate 'def mean(values):' -k 5 -n 128[/cyan]
      standard input      [cyan]echo 'def mean(values):' | peagle speculate -[/cyan]
      your checkpoints    [cyan]peagle speculate --target DIR --drafter DIR 'Why?'[/cyan]
      plain decoding      [cyan]peagle speculate --target DIR -k 0 'Why?'[/cyan]
      many prompts
        [cyan]peagle speculate --prompt-file IN.jsonl --slots 8 --json OUT.json[/cyan]
    """

    prompt: Annotated[str | None, Flag(names=("PROMPT",))] = None
    """The prompt; - reads standard input. Default: a built-in example."""
    prompt_file: Annotated[Path | None, PROMPT_FILE] = None
    """JSON lines with {"prompt": TEXT}, {"turns": [TEXT, ...]}, {"messages": [...]} or {"prompt_ids": [ID, ...]}; a
    published set, such as MT-Bench; or .txt, one prompt per line."""
    prompt_ids: Annotated[str | None, Flag(PROMPT, "1,2,3")] = None
    """Prompt as token ids, without the chat template."""
    rendering: Annotated[Rendering, Takes("raw", "system", "reasoning_effort")] = Rendering()
    load: Annotated[LoadConfig, LOADED] = LoadConfig()
    engine: Annotated[EngineConfig, ENGINE] = EngineConfig()
    no_baseline: Annotated[bool, Flag(SPECULATION)] = False
    """Skip plain decoding: no speed-up is reported."""
    sampling: SamplingParams = SamplingParams()
    answer: Annotated[AnswerConfig, Takes("max_new_tokens", "stop", "logprobs")] = AnswerConfig()
    json_schema: Annotated[Path | None, Flag(SAMPLING, "FILE")] = None
    """The answer follows this JSON schema."""
    regex: Annotated[str | None, Flag(SAMPLING, "REGEX")] = None
    """The answer matches this regular expression in full."""
    json: Annotated[str | None, JSON] = None
    trace: Annotated[str | None, Flag(OUTPUT, "FILE")] = None
    """Write a JSON line per step: drafts, number accepted, next token."""
    quiet: Annotated[bool, QUIET] = False

    def run(self) -> int:
        from peagle.cli.processes import run_together

        return run_together(self, self.load, decode)


def decode(settings: Speculate) -> int:
    """Decode, and return the exit code: text to standard output, the summary to standard error, the rest to files.

    Raises InputError before anything is written; only that of requests whose grammar failed comes after all output.
    """
    from peagle.cli.display import Display
    from peagle.cli.models import check_slots, chosen_models, load_pair, unused_rendering, unused_sampling
    from peagle.loading.checkpoints import resolve
    from peagle.measure.provenance import peak_memory_bytes, provenance
    from peagle.pair import RequestOptions
    from peagle.workflows.run import RunConfig, run
    from peagle.workflows.run_report import dumps, logprob_lines, report, summary_lines, trace_lines

    json_file, trace_file = _output_files(settings)
    target, drafter = chosen_models(settings.load, settings.engine.num_speculative_tokens)
    if settings.answer.logprobs is not None and settings.quiet and json_file is None:
        raise InputError("--logprobs are shown in the notes that --quiet leaves out; give --json FILE, too")
    check_slots(settings.engine.slots, settings.load.mesh)
    config = RunConfig(
        answer=RequestOptions(**vars(settings.answer), grammar=_grammar(settings)),
        sampling=settings.sampling,
        engine=settings.engine,
        baseline=not settings.no_baseline and not (settings.quiet and json_file is None),  # nothing shows it
        compare_s=COMPARE_S,
        rendering=settings.rendering,
    )
    with interrupt.waiting():  # standard input may be a keyboard, a file a pipe
        conversations, skipped, warnings = _prompts(settings, resolve(target, "target"))

    display = Display(
        text=settings.json != STANDARD_OUTPUT,
        quiet=settings.quiet,
        total=sum(conversation.num_requests for conversation in conversations),
        streaming=min(settings.engine.slots, len(conversations)) == 1,
        drafts=drafter is not None,
    )
    display.warn(warnings)
    display.warn(unused_sampling(settings.sampling))
    colours = " (coloured: accepted drafts, by their position in the step)" if display.shows_drafts else ""
    if (settings.prompt, settings.prompt_file, settings.prompt_ids) == (None, None, None):
        # a person who pipes a prompt must see that it is not read
        piped = sys.stdin is not None and not sys.stdin.isatty()
        example = f"the built-in example{' (peagle speculate - reads a prompt from standard input)' if piped else ''}"
        display.note(f"{example}:\n{EXAMPLE}\n\nits answer{colours}:\n")
    elif colours:
        display.note(f"the answer{colours}:\n")
    pair = load_pair(target, drafter, settings.load, display)
    display.set_tokenizer(pair.tokenizer)
    if any(conversation.prompt_ids is None for conversation in conversations):
        display.warn(unused_rendering(settings.rendering, pair.tokenizer, target))
    try:
        with _errors_name_grammar(settings):
            outcome = run(pair, conversations, config, display.observer)
    finally:
        display.end_all()

    peak = peak_memory_bytes()
    if trace_file is not None:
        trace_file.write("".join(trace_lines(outcome)))
    if json_file is not None:
        names = {"command": "speculate", "target": target, "drafter": drafter}
        json_file.write(dumps(report(outcome, pair, config, names, provenance(), peak, skipped)))
    else:
        display.summary(list(logprob_lines(outcome, pair)))
    display.summary(summary_lines(outcome, peak, skipped))
    if settings.quiet:  # otherwise the summary has them
        display.warn(outcome.cut_short)
    if outcome.failed:
        first, *others = outcome.failed
        raise InputError(f"{first}; and {len(others)} more" if others else first)
    return interrupt.EXIT_CODE if outcome.interrupted else 0


def _output_files(settings: Speculate) -> tuple[OutputFile | None, OutputFile | None]:
    """Return the files of --json and --trace. Raises InputError for files that cannot be written."""
    json_file = output_file(settings.json, "--json")
    if settings.trace == STANDARD_OUTPUT:
        raise InputError("--trace -: standard output is for the generated text; expected a file")
    trace_file = output_file(settings.trace, "--trace")
    if json_file and trace_file and settings.json != STANDARD_OUTPUT and json_file.path == trace_file.path:
        raise InputError(f"--json and --trace both name {settings.trace}; expected two files")
    return json_file, trace_file


def _grammar(settings: Speculate) -> Grammar | None:
    """Return the grammar of the answers. Raises InputError for an unreadable file, and for two grammars."""
    path, regex = settings.json_schema, settings.regex
    if path is not None and regex is not None:
        raise InputError("--json-schema and --regex are given; expected one of them")
    try:
        with _errors_name_grammar(settings):
            if path is not None:
                return Grammar.json_schema(path.read_text("utf-8-sig"))
            return None if regex is None else Grammar.regex(regex)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"--json-schema {path} cannot be read: {reason_of(error)}; expected a file of JSON in UTF-8"
        ) from None


@contextmanager
def _errors_name_grammar(settings: Speculate) -> Iterator[None]:
    """Begin the message of a grammar's error with the option that gave the grammar."""
    try:
        yield
    except GrammarError as error:
        option = f"--json-schema {settings.json_schema}" if settings.regex is None else "--regex"
        raise InputError(f"{option}: {error}") from None


def _prompts(settings: Speculate, target: Path) -> tuple[Sequence[Conversation], Sequence[Skipped], Sequence[str]]:
    """Return (conversations, skipped rows of the prompt file, warnings about it)."""
    rendering = settings.rendering
    prompts = {"PROMPT": settings.prompt, "--prompt-file": settings.prompt_file, "--prompt-ids": settings.prompt_ids}
    names = [name for name, value in prompts.items() if value is not None]
    if len(names) > 1:
        raise InputError(f"{' and '.join(names)} are given; expected one of them")
    if settings.prompt_file is not None:
        file = read_prompts(settings.prompt_file, target, rendering)
        return file.conversations, file.skipped, file.warnings
    if settings.prompt_ids is not None:
        if rendering.options:
            raise InputError(
                f"--prompt-ids are used without the chat template; leave out {' and '.join(rendering.options)}"
            )
        return [parse_ids(settings.prompt_ids)], [], []
    if settings.prompt == "-":
        return [from_text(_read_standard_input(), "standard input")], [], []
    return [from_text(EXAMPLE if settings.prompt is None else settings.prompt)], [], []


def _read_standard_input() -> str:
    """Read standard input to its end, without the line break that ends a text file."""
    if sys.stdin is None:
        raise InputError("standard input is closed; expected the prompt there, or a prompt instead of -")
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError("standard input is not UTF-8 text; expected UTF-8") from None
    return text.removesuffix("\n").removesuffix("\r")
