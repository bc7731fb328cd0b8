"""Run `peagle parity`: check a pair against references, and explain low acceptance."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import cast

from drafter.dialects import open_drafter
from drafter.propose import AnyDrafter
from peagle.checkpoints import DEMO, HELD_OUT, WEIGHTLESS, drafter_path, or_demo, resolve
from peagle.cli.command import record
from peagle.cli.display import SUMMARY_INDENT, Display
from peagle.cli.flags import refuse_strict
from peagle.cli.models import load_pair
from peagle.cli.output import STANDARD_OUTPUT, output_file, show_lines
from peagle.cli.parity import Parity
from peagle.cli.results import SCHEMA, dumps
from peagle.fit import check_fit
from peagle.measure.provenance import provenance
from peagle.ops.errors import InputError
from peagle.pair import Pair
from peagle.text.prompt_files import PromptSet, read_prompt_file, read_prompts, skipped_line
from peagle.text.prompts import Conversation, Rendering
from peagle.workflows.hf_reference import DTYPE, TargetParity, compare_target
from peagle.workflows.parity import DraftedTexts, Findings, ParityConfig, draft_texts, emitted_texts, examine


def compare(settings: Parity) -> int:
    """Examine a pair, print and write the findings, and return the exit code.

    The code is 1 for a difference and for a likely cause of low acceptance.
    """
    json_file = output_file(settings.json, "--json")
    target, drafter = or_demo(settings.load.target), or_demo(settings.drafter)
    if drafter in WEIGHTLESS:
        raise InputError(f"{drafter} has no weights to compare; give the directory of a drafter")
    path = drafter_path(target, drafter)
    assert path is not None
    check_fit(resolve(target, "target"), path, settings.load.aux_layer_ids)
    prompts = _prompts(settings, target)
    conversations = prompts.conversations[: settings.num_prompts]
    config = ParityConfig(
        num_speculative_tokens=settings.num_speculative_tokens,
        max_new_tokens=settings.max_new_tokens,
        reference_steps=settings.reference_steps,
        raw=settings.render == "raw",
        special_tokens=settings.special_tokens,
    )
    display = Display(quiet=settings.quiet)
    display.warn(prompts.warnings)
    # bfloat16, the default elsewhere, routes some tokens to other experts
    pair = load_pair(target, drafter, dataclasses.replace(settings.load, dtype=settings.load.dtype or DTYPE), display)
    model = cast(AnyDrafter, pair.drafter)
    with display.stage("decoding", animated=False):
        drafted = draft_texts(pair, conversations, config, raw=config.raw)
    compared = _compare_target(pair, drafted, settings, conversations, config, display)
    with display.stage("comparing the drafter", animated=False) as progress:
        findings = examine(pair, model, open_drafter(path), drafted, conversations, config, progress)
    lines = [*compared.lines, f"aux layers   {pair.loaded.aux_layers}", f"window       {pair.loaded.drafter_window}"]
    lines += _report_lines(findings, settings)
    if prompts.skipped:
        lines.append(f"left out     {skipped_line(prompts.skipped)}")
    if json_file is not None:
        json_file.write(_as_json(settings, prompts, compared, findings))
    if settings.json != STANDARD_OUTPUT:
        show_lines(lines, SUMMARY_INDENT)
    return 0 if findings.fine and compared.fine else 1


def _compare_target(
    pair: Pair,
    drafted: DraftedTexts,
    settings: Parity,
    conversations: Sequence[Conversation],
    config: ParityConfig,
    display: Display,
) -> TargetParity:
    """Compare the target with transformers' in DTYPE, in which a pair of another dtype answers once more."""
    target, number = or_demo(settings.load.target), len(drafted.texts)
    if pair.loaded.dtype != DTYPE:
        load = dataclasses.replace(settings.load, dtype=DTYPE)
        pair = load_pair(target, or_demo(settings.drafter), load, display)
        with display.stage(f"decoding in {DTYPE}", animated=False):
            drafted = draft_texts(pair, conversations, config, raw=config.raw)
    with display.stage("comparing the target", animated=False) as progress:
        along = emitted_texts(pair, drafted)
        return compare_target(resolve(target, "target"), along, lambda done: progress(done, number))


def _as_json(settings: Parity, prompts: PromptSet, compared: TargetParity, findings: Findings) -> str:
    content = {
        "schema": SCHEMA,
        "provenance": provenance(),
        "config": {**record(settings), "prompts": settings.prompts and settings.prompts.name},
        "skipped": [dataclasses.asdict(row) for row in prompts.skipped],
        "target": dataclasses.asdict(compared),
        "drafter": dataclasses.asdict(findings),
    }
    return dumps(content)


def _report_lines(findings: Findings, settings: Parity) -> Iterator[str]:
    logits, difference = findings.logits, findings.difference
    if logits is not None:
        verdict = "the same" if logits.close else "DIFFERENT"
        yield (
            f"drafter      {verdict} as the float64 reference in {logits.num_steps} steps: cosine {logits.cosine:.6f}, "
            f"largest difference {logits.max_difference:.1e} of the logits' spread, "
            f"{findings.same_drafts_frac:.0%} of the drafts equal"
        )
    elif findings.same_drafts_frac is not None:
        yield f"drafter      {findings.same_drafts_frac:.0%} of the drafts are the float64 reference's"
    else:
        yield "drafter      not compared with the float64 reference, since it shares the target's head"
    if difference is None:
        yield "engine       drafts the same as the drafter run along the text by itself, in every step"
    elif findings.drafts_fine:
        yield f"engine       drafts the same except in {difference.frac:.1%} of the steps, explained by rounding"
    else:
        yield (
            f"engine       DIFFERENT in {difference.frac:.0%} of the steps, first in text {difference.text}, step "
            f"{difference.step}, draft {difference.draft}: token {difference.engine}, the drafter by itself "
            f"{difference.reference}"
        )
        yield f"             {difference.explanation or 'no known fault explains it'}"
    yield (
        f"acceptance   {findings.acceptance_length:.2f} tokens a step at K = {settings.num_speculative_tokens}, "
        f"{settings.render}; "
        f"expected of this checkpoint {findings.expected:.2f}"
    )
    if findings.vocabulary is not None:
        yield f"vocabulary   of the answers {findings.vocabulary.describe()}"
    if findings.other_rendering is not None:
        other = "raw" if settings.render == "chat" else "chat"
        yield f"             the same prompts {other}: {findings.other_rendering:.2f}"
    for cause in findings.causes:
        yield (
            f"LIKELY CAUSE {cause.name}: {cause.acceptance_length:.2f} tokens a step, {cause.gain.value:+.2f} "
            f"({cause.gain.low or 0:+.2f}..{cause.gain.high or 0:+.2f})"
        )
        yield f"             to fix it, {cause.cure}"
    if not findings.causes:
        kinds = collections.Counter(name.partition(":")[0] for name in findings.readings)
        tried = ", ".join(f"{name} ({count})" for name, count in kinds.items())
        yield f"             no other reading of the checkpoint is accepted more often; tried: {tried}"


def _prompts(settings: Parity, target: str) -> PromptSet:
    if settings.prompts is None and target != DEMO:
        raise InputError(
            f"the demo's prompts are for the demo target only; give prompts for {target} with --prompt-file FILE"
        )
    if settings.special_tokens and settings.render != "raw":
        raise InputError("--special-tokens needs raw text; give --render raw, too, or leave it out")
    if settings.prompts is None:
        refuse_strict(settings.strict)
        return read_prompt_file(HELD_OUT)
    rendering = Rendering(raw=settings.render == "raw", special_tokens=settings.special_tokens)
    return read_prompts(settings.prompts, resolve(target, "target"), rendering, strict=settings.strict)
