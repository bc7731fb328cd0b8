"""`peagle sweep`: check everything, write the plan, run, write the pages."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.checkpoints import DEMO, HELD_OUT, WEIGHTLESS, drafter_folder, drafter_path, or_demo, resolve
from peagle.cli.command import changed_fields
from peagle.cli.display import LABEL, Display
from peagle.cli.output import show_lines
from peagle.cli.report import show, tell_of_pictures
from peagle.cli.sweep import Sweep
from peagle.engine.widths import OFF, WINDOW_KEY, WidthTable, widths_file, write_widths
from peagle.fit import check_fit, chosen_window
from peagle.loading import load, with_drafter
from peagle.measure import pages
from peagle.measure.provenance import provenance
from peagle.measure.sweep import concurrency, page
from peagle.measure.sweep.concurrency import RULE, best_table, ratios
from peagle.measure.sweep.figures import rows
from peagle.measure.sweep.folder import RAW, Folder, begin, open_run
from peagle.measure.sweep.measure import Loaded, Pairs, SweepRun, ask, loaded, turns_asked
from peagle.measure.sweep.plan import AUTO, FULL, PLAIN, Plan, Setting, Source, numbers, parse_ks, short_names
from peagle.ops import interrupt
from peagle.ops.checkpoint import fingerprint
from peagle.ops.errors import InputError
from peagle.ops.files import alone, expect_new
from peagle.pair import Pair
from peagle.text.prompt_files import PromptSet, read_prompt_file, read_prompts, without_suffix
from peagle.text.prompts import Rendering
from peagle.text.tokenizer import template_fingerprint

RAN = ("dtype", "experts", "kernels")  # of a pair: what `auto` came to
DEMO_PROMPTS = 60  # of the held-out ones, by default


def sweep(settings: Sweep) -> int:
    """Decode every request of the plan, and write figures and pages into the folder --out.

    Return the exit code: 0, 1 if some arms failed and the others went on, 130 after Ctrl-C (then --resume goes on).
    Raises InputError, before anything is written, for whatever can be known then.
    """
    with alone(Path(settings.out)):
        return _sweep(settings)


def _sweep(settings: Sweep) -> int:
    out, display = Path(settings.out), Display(text=False, quiet=settings.quiet, total=1, streaming=False)
    folder = open_run(out) if settings.resume else None
    if folder is None:
        expect_new(out)
        with display.stage("reading the prompts"):
            plan, sets = _plan(settings)
        if "seed" in changed_fields(settings) and not any(plan.temperatures):
            display.warn(["--seed: no effect at temperature 0, where the likeliest token is taken"])
    else:
        plan = folder.plan
        sets = _read_again(plan) if folder.asked() is None else {}
        _same_files(plan)
    _expect_enough(plan, sets)
    widths = None if settings.write_widths is None else _widths_file(plan, settings.write_widths)
    _check_models(plan)
    for prompts in sets.values():
        display.warn(prompts.warnings)
    if settings.dry_run:
        _say(plan, sets, folder)
        return 0
    try:
        pairs = _load(plan, settings.continue_on_error, display)
        pair = pairs[loaded(PLAIN)]
        assert isinstance(pair, Pair)
        origin = provenance() | {"ran": {name: getattr(pair.loaded, name) for name in RAN}}
        if folder is None:
            folder = begin(out, plan, origin)
        else:
            _runs_alike(folder, origin["ran"])
        run = _measured(folder, pairs, sets, settings, origin, display)
    except KeyboardInterrupt:
        display.note("interrupted" if folder is None else f"interrupted; to go on: peagle sweep --out {out} --resume")
        return interrupt.EXIT_CODE
    finally:
        display.clear()
    loads = _finish(folder, display)
    display.warn(_undrafted([*folder.record["rows"], *loads]))
    if widths is not None:
        display.note(f"{widths}: {_write_widths(folder, widths).in_words()}")
    for (setting, arm), why in run.failed.items():
        display.note(f"failed: {setting.label}, K = {plan.label(arm)}: {why}")
    return 1 if run.failed else 0


def _measured(
    folder: Folder,
    pairs: Pairs,
    sets: Mapping[str, PromptSet],
    settings: Sweep,
    origin: Mapping[str, Any],
    display: Display,
) -> SweepRun:
    """Decode what the folder lacks, with progress. origin: of this sitting."""
    plain = pairs[loaded(PLAIN)]
    assert isinstance(plain, Pair)
    with folder.appending() as appender:
        if settings.resume:
            folder.save(sittings=[*folder.record["sittings"], origin], rows=None)
        if folder.asked() is None:
            with display.stage("reading the prompts", animated=False) as progress:
                try:
                    ask(folder, plain, sets, progress)
                except InputError:
                    if not settings.resume:
                        folder.discard()  # what is wrong is the plan itself
                    raise
            display.warn(_left_out(folder))
        run = SweepRun(folder, pairs, settings.continue_on_error)
        with display.stage("compiling", animated=False) as progress:
            run.warm_up(appender, progress)
        with display.stage("decoding", animated=False) as progress:
            run.decode(appender, progress)
        with display.stage("profiling some steps", animated=False) as progress:
            run.profile(progress)
    return run


def _left_out(folder: Folder) -> Iterator[str]:
    """Say which conversations are not asked, or not to their ends."""
    prompts = folder.asked()
    assert prompts is not None
    for source in folder.plan.sources:
        reasons = [left.why for left in prompts[1] if left.prompts == source.name and left.row is not None]
        if reasons:
            count = "1 conversation" if len(reasons) == 1 else f"{len(reasons)} conversations"
            yield f"{source.name}: {count} left out or cut, the first: {reasons[0]}"


def _undrafted(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say where auto drafted nothing, so that its speed-up is no measure of drafting."""
    for row in rows:
        if row["k"] == AUTO and not row["num_spec_steps"]:
            setting = Setting(row["prompts"], row["raw"], row["temperature"])
            load = "" if row.get("concurrency") is None else f", {row['concurrency']} at once"
            yield (
                f"{setting.label}{load}: K = {row['label']} drafted nothing, since by its table or by measured costs "
                "that does not pay (peagle info shows both); its speed-up compares plain decoding with itself"
            )


def _finish(folder: Folder, display: Display) -> Sequence[Mapping[str, Any]]:
    """Write the figures into run.json and the pages beside it, and show them. Return those of many at once."""
    with display.stage("figures"):
        loads = concurrency.rows(folder)
        folder.save(rows=rows(folder), **({"by_concurrency": loads} if folder.plan.loads else {}))
    with display.stage("drawing"):
        blocks = page.run_blocks(folder, folder.record["rows"], loads)
        pages.write(folder.path, blocks)
    show(page.arms_blocks(folder, folder.record["rows"]), folder.path, quiet=not display.talks)
    tell_of_pictures(display, folder.path)
    return loads


def _widths_file(plan: Plan, path: Path) -> Path:
    """Where the table of drafts goes. Raises InputError where the plan gives none, or the place cannot be written."""
    if 1 not in plan.concurrencies:
        raise InputError(
            "--write-widths needs figures of one request, too; give --concurrency 1 and others, as 1,2,4,8"
        )
    if all(k == AUTO for k in plan.ks):
        raise InputError(
            "--write-widths chooses among numbers of drafts, and -k names auto alone; give some, as -k 1-4"
        )
    if len(plan.drafters) > 1 or len(plan.draft_vocabs) > 1 or len(plan.drafter_windows) > 1:
        raise InputError(
            "--write-widths is for one drafter with one vocabulary and one window; sweep each in a run of its own"
        )
    return widths_file(drafter_folder(path))


def _write_widths(folder: Folder, file: Path) -> WidthTable:
    """Write the table of drafts, with its ratios and where it was measured. Raises InputError if there is none."""
    plan, sittings, loads = folder.plan, folder.record["sittings"], folder.record["by_concurrency"]
    table = best_table(loads)
    if table is None:
        raise InputError(f"{folder.path} holds no speed of one request by any K; resume it first")
    write_widths(
        file,
        table,
        rule=RULE,
        ratios=ratios(loads),
        **_window_entry(plan.drafter_windows[0]),
        measured={
            "command": " ".join(sittings[0]["command"]),
            "time": sittings[0]["time"],
            "machine": "; ".join(dict.fromkeys(page.place_text(sitting) for sitting in sittings)),
            "target": plan.target,
            "repeats": plan.repeats,
            "requests": sum(row["num_requests"] for row in folder.record["rows"] if row["k"] == 0),
        },
    )
    return table


def _window_entry(window: str | None) -> dict[str, int | str]:
    """Name the window that a table was measured with, if one was given."""
    return {} if window is None else {WINDOW_KEY: window if window == OFF else int(window)}


def _plan(settings: Sweep) -> tuple[Plan, dict[str, PromptSet]]:
    target = or_demo(settings.load.target)
    drafters = tuple(dict.fromkeys((or_demo(settings.drafter)).split(",")))
    paths = list(dict.fromkeys(settings.prompts))
    names = short_names([without_suffix(path) for path in paths])
    raw = {"chat": (False,), "raw": (True,), "both": (False, True)}[settings.render]
    files = {
        str(path): dataclasses.replace(_read(path, target, raw, settings.strict), name=name)
        for path, name in zip(paths, names, strict=True)
    }
    if not files and settings.strict:
        raise InputError("--strict is about the rows of a file; give --prompts, too, or leave it out")
    if not files:
        files = {DEMO: dataclasses.replace(read_prompt_file(HELD_OUT), name=DEMO)}
    plan = Plan(
        target=target,
        drafters=drafters,
        draft_vocabs=tuple(
            None if vocab == FULL else vocab for vocab in dict.fromkeys(settings.draft_vocab.split(","))
        ),
        drafter_windows=tuple(
            None if window == AUTO else window for window in dict.fromkeys(settings.drafter_window.split(","))
        ),
        ks=parse_ks(settings.num_speculative_tokens),
        sources=tuple(_source(name, prompts, settings) for name, prompts in files.items()),
        raw=raw,
        temperatures=numbers("--temperature", settings.temperature, float),
        repeats=settings.repeats,
        in_a_row=settings.in_a_row,
        max_new_tokens=settings.max_new_tokens,
        max_prompt_tokens=settings.max_prompt_tokens,
        too_long=settings.too_long,
        buckets=numbers("--buckets", settings.buckets, int),
        seed=settings.seed,
        special_tokens=settings.special_tokens,
        dtype=settings.load.dtype,
        experts=settings.load.experts,
        kernels=settings.load.kernels,
        template=template_fingerprint(resolve(target, "target")),
        fingerprints=_fingerprints(target, drafters),
        aux_layer_ids=settings.load.aux_layer_ids,
        concurrencies=() if settings.concurrency is None else numbers("--concurrency", settings.concurrency, int),
    )
    return plan, {prompts.name: prompts for prompts in files.values()}


def _expect_enough(plan: Plan, sets: Mapping[str, PromptSet]) -> None:
    """Raises InputError where there are fewer requests than are to be decoded at once; `sets` may lack what was read
    before."""
    most = max(plan.concurrencies, default=0)
    for source, raw in itertools.product(plan.sources, plan.raw):
        if source.name in sets and (there := _num_turns(source, raw, sets)) < most:
            raise InputError(
                f"--concurrency is {most}, but {source.name} has {there} requests; expected at least as many: raise "
                "--num-prompts, or lower --concurrency"
            )


def _num_turns(source: Source, raw: bool, sets: Mapping[str, PromptSet]) -> int:
    return sum(
        turns_asked(source, raw, conversation) for conversation in sets[source.name].conversations[: source.num_used]
    )


def _read(path: Path, target: str, raw: Sequence[bool], strict: bool) -> PromptSet:
    """Read a file for all renderings: what the template refuses is left out of raw text, too."""
    return read_prompts(path, resolve(target, "target"), Rendering(raw=False not in raw), strict=strict)


def _source(file: str, prompts: PromptSet, settings: Sweep) -> Source:
    return Source(
        name=prompts.name,
        file=file,
        layout=prompts.layout,
        sha256=prompts.sha256,
        num_rows=prompts.num_rows,
        num_skipped=len(prompts.skipped),
        num_used=min(_num_prompts(settings, file) or len(prompts.conversations), len(prompts.conversations)),
        max_turns=settings.turns,
    )


def _num_prompts(settings: Sweep, file: str) -> int:
    """Of the demo's many some, of a file all: sets are often sorted by category."""
    if settings.num_prompts is not None:
        return settings.num_prompts
    return DEMO_PROMPTS if file == DEMO else 0


def _fingerprints(target: str, drafters: Sequence[str]) -> dict[str, str]:
    paths = {"target": resolve(target, "target")}
    paths |= {f"drafter {name}": path for name in drafters if (path := drafter_path(target, name)) is not None}
    return {name: fingerprint(path) for name, path in paths.items()}


def _check_models(plan: Plan) -> None:
    """Raises InputError, without reading weights, for a target and drafter that do not fit, and for bad windows."""
    paths = [path for name in plan.drafters if (path := drafter_path(plan.target, name)) is not None]
    if plan.aux_layer_ids is not None and not paths:
        raise InputError("--aux-layer-ids is given, but no drafter with weights that reads any; leave it out")
    for path in paths:
        ks = [arm.k for arm in plan.arms if isinstance(arm.k, int)]
        check_fit(resolve(plan.target, "target"), path, plan.aux_layer_ids, ks)
    for name, window in itertools.product(plan.drafters, plan.drafter_windows):
        chosen_window(drafter_path(plan.target, name), window or AUTO)


def _same_files(plan: Plan) -> None:
    """Raises InputError where a checkpoint is another than when the run began."""
    for name, weights in _fingerprints(plan.target, plan.drafters).items():
        if plan.fingerprints.get(name) != weights:
            raise InputError(f"the {name} is another than when this run began; begin a new run with another --out")


def _runs_alike(folder: Folder, ran: Mapping[str, str]) -> None:
    """Raises InputError where the models would run in another way than before: times, and tokens, would be mixed."""
    before = folder.record["sittings"][-1].get("ran", ran)
    if before != ran:
        how = [", ".join(f"{name} {value}" for name, value in way.items()) for way in (before, ran)]
        raise InputError(f"{folder.path} ran with {how[0]}; now it is {how[1]}: begin a new run with another --out")


def _read_again(plan: Plan) -> dict[str, PromptSet]:
    """The prompts of a run that goes on; needed only where it had not got as far as to write them down."""
    sets: dict[str, PromptSet] = {}
    for source in plan.sources:
        demo = source.file == DEMO
        read = read_prompt_file(HELD_OUT) if demo else _read(Path(source.file), plan.target, plan.raw, strict=False)
        if read.sha256 != source.sha256:
            raise InputError(
                f"{source.file} is another than when this run began, and it had not read its prompts yet; begin a new "
                "run with another --out"
            )
        sets[source.name] = dataclasses.replace(read, name=source.name)
    return sets


def _load(plan: Plan, continue_on_error: bool, display: Display) -> Pairs:
    """A pair for each drafter, draft vocabulary and window, all with the weights of one target; plain decoding runs on
    the first. Raises InputError for a drafter that cannot be loaded, unless the others are to go on without it."""
    kinds: Any = {"dtype": plan.dtype, "experts": plan.experts, "kernels": plan.kernels}
    with display.stage(f"loading {plan.target}") as progress:
        plain = load(plan.target, None, progress=progress, **kinds)
    pairs: dict[Loaded, Pair | InputError] = {loaded(PLAIN): plain}
    for arm in plan.arms[1:]:
        if loaded(arm) in pairs:
            continue
        try:
            with display.stage(f"loading {arm.drafter}"):
                layers = None if arm.drafter in WEIGHTLESS else plan.aux_layer_ids
                pairs[loaded(arm)] = with_drafter(
                    plain,
                    plan.target,
                    arm.drafter,
                    draft_vocab=arm.draft_vocab,
                    drafter_window=arm.drafter_window or AUTO,
                    aux_layer_ids=layers,
                )
        except InputError as error:
            if not continue_on_error:
                raise
            pairs[loaded(arm)] = error
    return pairs


def _say(plan: Plan, sets: Mapping[str, PromptSet], folder: Folder | None) -> None:
    """What would run."""

    known = None if folder is None else folder.asked()

    def turns(source: Source, raw: bool) -> int:
        if known is not None:
            return sum((one.prompts, one.raw) == (source.name, raw) for one in known[0])
        return _num_turns(source, raw, sets)

    requests = {(source.name, raw): turns(source, raw) for source in plan.sources for raw in plan.raw}
    num_requests = sum(requests[setting.prompts, setting.raw] for setting in plan.settings)
    decodes = plan.repeats * (len(plan.arms) + len(plan.loads)) * num_requests
    lines = [
        f"target       {plan.target}; drafters {', '.join(plan.drafters)}",
        f"settings     {'; '.join(setting.label for setting in plan.settings)}",
        f"arms         K = {'; '.join(plan.label(arm) for arm in plan.arms)}",
        *([f"at once      {', '.join(map(str, sorted(plan.concurrencies)))}"] if plan.loads else []),
        *(
            f"prompts      {source.name}: layout {source.layout}, {source.num_used} of {source.num_rows} rows"
            f"{f', {source.num_skipped} cannot be asked' if source.num_skipped else ''}, "
            f"{' and '.join(f'{requests[source.name, raw]} turns' + ' raw' * raw for raw in plan.raw)}"
            for source in plan.sources
        ),
        f"to decode    {decodes} requests ({plan.repeats} repeats), up to {plan.max_new_tokens} tokens",
    ]
    if folder is not None:
        lines.append(f"decoded      {len(folder.samples())} of them ({folder.path / RAW})")
    show_lines(lines, LABEL)
