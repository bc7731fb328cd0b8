"""`peagle sweep`: check everything, write the plan, decode, write the report."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from peagle.base import interrupt
from peagle.base.errors import InputError
from peagle.base.files import expect_new, locked
from peagle.base.flag import MODEL, OUTPUT, PROMPT, RUNNING, SAMPLING, SPECULATION, Flag, check_least
from peagle.cli.command import Takes, refuse_other_options
from peagle.cli.flags import PROMPT_FILE, QUIET
from peagle.cli.report import finish
from peagle.config import Drafts, LoadConfig
from peagle.measure.sweep.plan import (
    FULL,
    PLAIN,
    TARGET,
    TEMPLATE,
    Plan,
    PromptSource,
    numbers,
    parse_ks,
    short_names,
)
from peagle.text.prompt_files import PromptSet, read_prompt_file, read_prompts, without_suffix
from peagle.text.prompts import Rendering
from peagle.text.tokenizer import template_fingerprint

if TYPE_CHECKING:  # they import JAX
    from peagle.cli.display import Display
    from peagle.measure.sweep.runner import Models, SweepRun
    from peagle.measure.sweep.store import Folder
    from peagle.pair import Pair

RESOLVED = ("dtype", "experts", "kernels", "mesh")  # fields of peagle.pair.Loaded: what the options resolved to
DEMO_PROMPTS = 60  # by default
LOADED = Takes("target", "drafter_window", "dtype", "experts", "mesh")
# allowed with --resume, because they do not change the measurements
FREE = ("out", "resume", "quiet")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Measure acceptance length and speed over K.

    Decodes every prompt with every K and plainly, in turns. Writes the plan, all
    decoded requests, and a report: figures with confidence intervals, and plots.
    A K that fails is left out; --resume tries it again.

    [bold]Examples[/bold]

      the demo models    [cyan]peagle sweep --out RUN[/cyan]
      resume             [cyan]peagle sweep --out RUN --resume[/cyan]
      batch sizes        [cyan]peagle sweep --out RUN --concurrency 1,2,4,8,16[/cyan]
      your checkpoints
        [cyan]peagle sweep --out RUN --target DIR --drafter DIR --prompt-file IN.jsonl[/cyan]
      two drafters
        [cyan]peagle sweep --out RUN -k 1-7,auto --drafter demo,ngram --repeats 5[/cyan]
      raw and in the chat template, greedy and sampled
        [cyan]peagle sweep --out RUN -k 0-8 --render both --temperature 0,1[/cyan]
    """

    out: Annotated[str, Flag(OUTPUT, "DIR")]
    """Output directory: a new one, or a run to --resume."""
    num_speculative_tokens: Annotated[str, Flag(SPECULATION, "K,K", ("-k", "--num-speculative-tokens"))] = (
        "1-3,5,7,auto"
    )
    """Values of K, ranges of them, auto, and auto:N (auto with at most N). Plain decoding (0) is always included."""
    drafter: Annotated[str | None, Flag(MODEL, "DIR,DIR|ngram")] = None
    """Drafters, separated by commas; every K runs with each. Default: the demo drafter."""
    draft_vocab: Annotated[str, Flag(SPECULATION, "N,N|full")] = "full"
    """Draft vocabularies (see peagle speculate --help), or full; every K runs with each."""
    load: Annotated[LoadConfig, LOADED] = LoadConfig()
    prompts: Annotated[tuple[Path, ...], PROMPT_FILE] = ()
    """Prompt file, in a format of peagle speculate; repeatable. Default: the demo's held-out prompts."""
    num_prompts: Annotated[int | None, Flag(PROMPT, "N")] = None
    """Use the first N prompts of each file; 0: all. Default: all of a file, 60 of the demo's."""
    turns: Annotated[int | None, Flag(PROMPT, "N")] = None
    """Use the first N turns, 1 or more, of a conversation. Default: all."""
    render: Annotated[Literal["chat", "raw", "both"], Flag(PROMPT, "HOW")] = "chat"
    """chat: apply the chat template; raw: continue the prompt as plain text; or both."""
    max_prompt_tokens: Annotated[int | None, Flag(PROMPT, "N")] = None
    """Leave longer prompts out, and count them. Default: the model's limit."""
    temperature: Annotated[str, Flag(SAMPLING, "T,T")] = "0"
    """Sampling temperatures, each measured on its own; 0: greedy."""
    seed: Annotated[int, Flag(SAMPLING, "S")] = 0
    """Random seed of the first repeat; the next ones use S + 1, S + 2, ..."""
    repeats: Annotated[int, Flag(RUNNING, "R")] = 3
    """Repeats of every request, 1 or more."""
    concurrency: Annotated[str | None, Flag(RUNNING, "N,N")] = None
    """Also decode all requests N at a time, plainly and with each K, and report the total throughput."""
    max_new_tokens: Annotated[int, Flag(RUNNING, "N", ("-n", "--max-new-tokens"))] = 256
    """Maximum tokens of an answer, 2 or more."""
    resume: Annotated[bool, Flag(RUNNING)] = False
    """Resume the run in --out by its stored plan."""
    quiet: Annotated[bool, QUIET] = False
    """Hide progress and table; the results are in --out. Warnings and errors are still printed."""

    def __post_init__(self) -> None:
        check_least(self, num_prompts=0, turns=1, max_prompt_tokens=1, repeats=1, max_new_tokens=2)

    def run(self) -> int:
        if self.resume:
            refuse_other_options(self, "--resume", FREE, f"the plan in {self.out}")
        return sweep(self)


def sweep(settings: Sweep) -> int:
    """Decode every request of the plan, and write figures and pages into the folder --out.

    Return the exit code: 1 if variants failed, 130 after Ctrl-C. Raises InputError for bad options, files and models
    before it writes.
    """
    typed = _plan(settings)  # first, because bad options must not create the lock file
    with locked(Path(settings.out)):
        return _sweep(settings, typed)


def _sweep(settings: Sweep, typed: Plan) -> int:
    """Sweep. typed: the plan by the options; a resumed run has a plan of its own."""
    from peagle.cli.display import Display
    from peagle.measure.provenance import provenance
    from peagle.measure.sweep import page
    from peagle.measure.sweep.figures import alone, concurrent, rows
    from peagle.measure.sweep.runner import models_of
    from peagle.measure.sweep.store import begin, open_run

    out, display = Path(settings.out), Display(quiet=settings.quiet)
    folder = open_run(out) if settings.resume else None
    if folder is None:
        expect_new(out)
        with display.stage("reading the prompts"):
            plan, sets = _with_prompts(typed, settings)
        if settings.seed != Sweep.seed and not any(plan.temperatures):
            display.warn(["--seed: no effect at temperature 0, where the likeliest token is taken"])
    else:
        plan = folder.plan
        sets = {} if folder.has_prompts else _reread_prompts(plan)
        _check_same_files(plan)
    _check_concurrency(plan, sets)
    _check_models(plan)
    for prompts in sets.values():
        display.warn(prompts.warnings)
    try:
        pairs = _load(plan, display)
        pair = pairs[models_of(PLAIN)]
        ran = {name: value for name in RESOLVED if (value := getattr(pair.loaded, name)) is not None}
        origin = provenance() | {"ran": ran}
        if folder is None:
            folder = begin(out, plan, origin)
        else:
            _check_same_arithmetic(folder, origin["ran"])
            folder.save(origins=[*folder.origins, origin], rows=None)
        run = _measure(folder, pairs, sets, settings.resume, display)
    except KeyboardInterrupt:
        display.note("interrupted" if folder is None else f"interrupted; to go on: peagle sweep --out {out} --resume")
        return interrupt.EXIT_CODE
    finally:
        display.clear()
    with display.stage("figures"):
        figures = rows(folder)
        at_once = [row.to_json() for row in concurrent(figures)]
        folder.save(rows=[row.to_json() for row in alone(figures)], by_concurrency=at_once)
    notes = list(page.notes(folder, figures))
    finish(
        display,
        page.tables(folder, figures),
        [*page.headlines(folder, figures), page.INTERVALS],
        folder.path,
        lambda: page.run_blocks(folder, figures),
    )
    display.warn(notes)
    return 1 if run.failed else 0


def _measure(
    folder: "Folder",
    pairs: "Mapping[Models, Pair]",
    sets: Mapping[str, PromptSet],
    resumed: bool,
    display: "Display",
) -> "SweepRun":
    """Decode the missing requests, with progress."""
    from peagle.measure.sweep.runner import SweepRun, make_requests, models_of

    if not folder.has_prompts:
        with display.stage("reading the prompts", animated=False) as progress:
            try:
                make_requests(folder, pairs[models_of(PLAIN)], sets, progress)
            except InputError:
                if not resumed:
                    folder.discard()  # a new run with a wrong plan
                raise
        display.warn(_left_out(folder))
    run = SweepRun(folder, pairs)
    with display.stage("compiling", animated=False) as progress:
        run.warm_up(progress)
    with display.stage("decoding", animated=False) as progress:
        run.decode(progress)
    return run


def _left_out(folder: "Folder") -> Iterator[str]:
    """Count by prompt file the conversations that are left out or cut, with the first reason."""
    for name, reasons in folder.left_out().items():
        if reasons:
            count = "1 conversation" if len(reasons) == 1 else f"{len(reasons)} conversations"
            yield f"{name}: {count} left out or cut, the first: {reasons[0]}"


def _plan(settings: Sweep) -> Plan:
    """Make a plan from the options, still without prompts. Raises InputError for bad values.

    Its names hold in any working directory, because --resume may be typed in another one.
    """
    from peagle.loading.checkpoints import from_anywhere, or_demo

    return Plan(
        target=from_anywhere(or_demo(settings.load.target)),
        drafters=tuple(dict.fromkeys(map(from_anywhere, or_demo(settings.drafter).split(",")))),
        draft_vocabs=tuple(
            None if name == FULL else name if name.lstrip("-").isdecimal() else from_anywhere(name)
            for name in dict.fromkeys(settings.draft_vocab.split(","))
        ),
        drafter_window=settings.load.drafter_window,
        ks=parse_ks(settings.num_speculative_tokens),
        sources=(),
        raw={"chat": (False,), "raw": (True,), "both": (False, True)}[settings.render],
        temperatures=numbers("--temperature", settings.temperature, float),
        repeats=settings.repeats,
        max_new_tokens=settings.max_new_tokens,
        max_prompt_tokens=settings.max_prompt_tokens,
        seed=settings.seed,
        dtype=settings.load.dtype,
        experts=settings.load.experts,
        kernels=settings.load.kernels,
        mesh=settings.load.mesh,
        concurrencies=() if settings.concurrency is None else numbers("--concurrency", settings.concurrency, int),
    )


def _with_prompts(plan: Plan, settings: Sweep) -> tuple[Plan, dict[str, PromptSet]]:
    """Read the prompts; return (the plan with them and with fingerprints of the models, prompts by source name)."""
    from peagle.loading.checkpoints import DEMO, HELD_OUT

    paths = list(dict.fromkeys(settings.prompts))
    names = short_names([without_suffix(path) for path in paths])
    files = {
        str(path.absolute()): dataclasses.replace(_read(path, plan.target, plan.raw), name=name)
        for path, name in zip(paths, names, strict=True)
    } or {DEMO: dataclasses.replace(read_prompt_file(HELD_OUT), name=DEMO)}
    plan = dataclasses.replace(
        plan,
        sources=tuple(_source(name, prompts, settings) for name, prompts in files.items()),
        fingerprints=_fingerprints(plan.target, plan.drafters),
    )
    return plan, {prompts.name: prompts for prompts in files.values()}


def _check_concurrency(plan: Plan, sets: Mapping[str, PromptSet]) -> None:
    """Raise InputError for fewer requests than slots. sets: empty if a resumed run has stored its requests."""
    most = max(plan.concurrencies, default=0)
    for source, raw in itertools.product(plan.sources if sets else (), plan.raw):
        if (count := _num_requests(source, raw, sets)) < most:
            raise InputError(
                f"--concurrency is {most}, but {source.name} has {count} requests; expected at least as many: raise "
                "--num-prompts, or lower --concurrency"
            )


def _num_requests(source: PromptSource, raw: bool, sets: Mapping[str, PromptSet]) -> int:
    from peagle.measure.sweep.runner import num_turns

    return sum(
        num_turns(source, raw, conversation) for conversation in sets[source.name].conversations[: source.num_used]
    )


def _read(path: Path, target: str, raw: Sequence[bool]) -> PromptSet:
    """Read a file. Rows that the template refuses are skipped in raw text, too, so that both decode the same."""
    from peagle.loading.checkpoints import resolve

    return read_prompts(path, resolve(target, "target"), Rendering(raw=False not in raw))


def _source(file: str, prompts: PromptSet, settings: Sweep) -> PromptSource:
    from peagle.loading.checkpoints import DEMO

    num_conversations = len(prompts.conversations)
    # by default all prompts of a file, because files are often sorted by category
    num_prompts = (DEMO_PROMPTS if file == DEMO else 0) if settings.num_prompts is None else settings.num_prompts
    return PromptSource(
        name=prompts.name,
        file=file,
        layout=prompts.layout,
        sha256=prompts.sha256,
        num_rows=prompts.num_rows,
        num_skipped=len(prompts.skipped),
        num_used=min(num_prompts or num_conversations, num_conversations),
        max_turns=settings.turns,
    )


def _fingerprints(target: str, drafters: Sequence[str]) -> dict[str, str]:
    """Return the fingerprint of each checkpoint. Raises InputError for one that is not there."""
    from peagle.base.checkpoint import fingerprint
    from peagle.loading.checkpoints import drafter_path, resolve

    if not (directory := resolve(target, "target")).exists():
        raise InputError(f"the target {directory} is not there; expected a checkpoint's directory, or a link to it")
    paths = {TARGET: directory}
    paths |= {f"drafter {name}": path for name in drafters if (path := drafter_path(target, name)) is not None}
    return {name: fingerprint(path) for name, path in paths.items()} | {TEMPLATE: template_fingerprint(directory)}


def _check_models(plan: Plan) -> None:
    """Raise InputError for models that do not fit, and for a bad window. Reads no weights."""
    from peagle.loading.checkpoints import drafter_path, resolve
    from peagle.loading.fit import check_fit, chosen_window
    from peagle.parallel.mesh import refuse_replicas

    refuse_replicas(plan.mesh, "peagle sweep measures one replica")
    paths = [path for name in plan.drafters if (path := drafter_path(plan.target, name)) is not None]
    for path in paths:
        ks = [most for k in plan.ks if (most := Drafts.parse(k).num_drafts)]
        check_fit(resolve(plan.target, "target"), path, None, ks)
    for name in plan.drafters:
        chosen_window(drafter_path(plan.target, name), plan.drafter_window)


def _check_same_files(plan: Plan) -> None:
    """Raise InputError for a checkpoint that has changed since the run began."""
    for name, weights in _fingerprints(plan.target, plan.drafters).items():
        if plan.fingerprints.get(name) != weights:
            raise InputError(f"the {name} has changed since this run began; begin a new run with another --out")


def _check_same_arithmetic(folder: "Folder", ran: Mapping[str, str]) -> None:
    """Raise InputError if dtype, experts or kernels differ from the resumed run's: its times would not compare."""
    before = folder.origins[-1].get("ran", ran)
    if before != ran:
        then, now = (", ".join(f"{name} {value}" for name, value in values.items()) for values in (before, ran))
        raise InputError(f"{folder.path} ran with {then}; now it is {now}: begin a new run with another --out")


def _reread_prompts(plan: Plan) -> dict[str, PromptSet]:
    """Read the prompts of a resumed run again, if it stopped before it stored them."""
    from peagle.loading.checkpoints import DEMO, HELD_OUT

    sets: dict[str, PromptSet] = {}
    for source in plan.sources:
        demo = source.file == DEMO
        prompts = read_prompt_file(HELD_OUT) if demo else _read(Path(source.file), plan.target, plan.raw)
        if prompts.sha256 != source.sha256:
            raise InputError(
                f"{source.file} has changed since this run began, before its prompts were stored; begin a new run with "
                "another --out"
            )
        sets[source.name] = dataclasses.replace(prompts, name=source.name)
    return sets


def _load(plan: Plan, display: "Display") -> "dict[Models, Pair]":
    """Load the target alone, and a pair for every drafter and draft vocabulary; all share its weights."""
    from peagle.loading.load import load, with_drafter
    from peagle.measure.sweep.runner import models_of

    options: Any = {"dtype": plan.dtype, "experts": plan.experts, "kernels": plan.kernels, "mesh": plan.mesh}
    with display.stage(f"loading {plan.target}") as progress:
        plain = load(plan.target, None, progress=progress, **options)
    pairs = {models_of(PLAIN): plain}
    for variant in plan.variants[1:]:
        if models_of(variant) in pairs:
            continue
        with display.stage(f"loading {variant.drafter}"):
            pairs[models_of(variant)] = with_drafter(
                plain,
                plan.target,
                variant.drafter,
                draft_vocab=variant.draft_vocab,
                drafter_window=plan.drafter_window,
            )
    return pairs
