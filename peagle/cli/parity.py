"""`peagle parity`: check a pair against references, and explain low acceptance."""

import collections
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from peagle.base.errors import InputError
from peagle.base.flag import PROMPT, RUNNING, SPECULATION, Flag, check_least
from peagle.cli.command import Takes, record
from peagle.cli.flags import JSON, PROMPT_FILE
from peagle.cli.output import STANDARD_OUTPUT, output_file, show_lines
from peagle.config import LoadConfig, check_num_drafts
from peagle.measure.provenance import provenance
from peagle.text.prompt_files import PromptSet, read_prompt_file, read_prompts, skipped_line
from peagle.text.prompts import Rendering

if TYPE_CHECKING:  # they import JAX
    from peagle.workflows.hf_reference import TargetParity
    from peagle.workflows.parity import Findings

REFERENCE_STEPS = 6  # to compare with the float64 reference, which is slow


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Check a pair against references; explain low acceptance.

    Compares the target's layers, final norm and logits with transformers (if torch
    is installed), the drafter with a float64 reference, and the tokens and drafts
    of the engine with both. Then reads the drafter in other ways: aux layers off by
    one, another mask token, norm, vocabulary map, the target's embedding, raw
    prompts. If a reading is accepted more often, it is a likely cause, and the
    report says what to change in the checkpoint. Exit code 1 if there is a
    difference or a likely cause.

    [bold]Examples[/bold]

      the demo models          [cyan]peagle parity[/cyan]
      low acceptance, why?
        [cyan]peagle parity --target DIR --drafter DIR --prompt-file IN.jsonl[/cyan]
    """

    load: Annotated[LoadConfig, Takes("target", "drafter", "aux_layer_ids")] = LoadConfig()
    prompts: Annotated[Path | None, PROMPT_FILE] = None
    """Prompt file, in a format of peagle speculate; required for any other target than the demo's. Default: the demo's
    held-out prompts."""
    num_prompts: Annotated[int, Flag(PROMPT, "N")] = 10
    """Use the first N prompts, 1 or more."""
    rendering: Annotated[Rendering, Takes("raw")] = Rendering()
    num_speculative_tokens: Annotated[int, Flag(SPECULATION, "K", ("-k", "--num-speculative-tokens"))] = 5
    """Tokens drafted per step (K)."""
    max_new_tokens: Annotated[int, Flag(RUNNING, "N", ("-n", "--max-new-tokens"))] = 64
    """Maximum tokens of an answer, 2 or more."""
    json: Annotated[str | None, JSON] = None

    def __post_init__(self) -> None:
        check_num_drafts(self.num_speculative_tokens, plain=False)
        check_least(self, num_prompts=1, max_new_tokens=2)

    def run(self) -> int:
        """Examine a pair, print and write the findings, and return the exit code.

        The code is 1 for a difference and for a likely cause of low acceptance.
        """
        from drafter.dialects import open_drafter
        from peagle.cli.display import SUMMARY_INDENT, Display
        from peagle.cli.models import load_pair
        from peagle.loading.checkpoints import WEIGHTLESS, drafter_path, or_demo, resolve
        from peagle.loading.fit import check_fit
        from peagle.workflows.hf_reference import DTYPE, compare_target
        from peagle.workflows.parity import ParityConfig, draft_texts, emitted_texts, examine
        from peagle.workflows.run_report import dumps

        json_file = output_file(self.json, "--json")
        target, drafter = or_demo(self.load.target), or_demo(self.load.drafter)
        if drafter in WEIGHTLESS:
            raise InputError(f"{drafter} has no weights to compare; give the directory of a drafter")
        path = drafter_path(target, drafter)
        assert path is not None
        check_fit(resolve(target, "target"), path, self.load.aux_layer_ids)
        prompts = _prompts(self, target)
        conversations = prompts.conversations[: self.num_prompts]
        config = ParityConfig(
            num_speculative_tokens=self.num_speculative_tokens,
            max_new_tokens=self.max_new_tokens,
            reference_steps=REFERENCE_STEPS,
            raw=self.rendering.raw,
        )
        display = Display()
        display.warn(prompts.warnings)
        # bfloat16, the default elsewhere, routes some tokens to other experts
        pair = load_pair(target, drafter, dataclasses.replace(self.load, dtype=DTYPE), display)
        with display.stage("decoding", animated=False):
            drafted = draft_texts(pair, conversations, config, raw=config.raw)
        with display.stage("comparing the target", animated=False) as progress:
            number = len(drafted.texts)
            compared = compare_target(
                resolve(target, "target"), emitted_texts(pair, drafted), lambda done: progress(done, number)
            )
        with display.stage("comparing the drafter", animated=False) as progress:
            findings = examine(
                pair, cast(Any, pair.drafter), open_drafter(path), drafted, conversations, config, progress
            )
        lines = [
            *compared.lines,
            f"aux layers   {pair.loaded.aux_layers}",
            f"window       {pair.loaded.drafter_window}",
        ]
        lines += _report_lines(findings, self)
        if prompts.skipped:
            lines.append(f"left out     {skipped_line(prompts.skipped)}")
        if json_file is not None:
            json_file.write(dumps(_as_json(self, prompts, compared, findings)))
        if self.json != STANDARD_OUTPUT:
            show_lines(lines, SUMMARY_INDENT)
        return 0 if findings.fine and compared.fine else 1


def _as_json(settings: Parity, prompts: PromptSet, compared: "TargetParity", findings: "Findings") -> dict[str, Any]:
    from peagle.workflows.run_report import SCHEMA

    return {
        "schema": SCHEMA,
        "provenance": provenance(),
        "config": {**record(settings), "prompts": settings.prompts and settings.prompts.name},
        "skipped": [dataclasses.asdict(row) for row in prompts.skipped],
        "target": dataclasses.asdict(compared),
        "drafter": dataclasses.asdict(findings),
    }


def _report_lines(findings: "Findings", settings: Parity) -> Iterator[str]:
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
            f"{difference.reference}; please report it"
        )
    yield (
        f"acceptance   {findings.acceptance_length:.2f} tokens a step at K = {settings.num_speculative_tokens}, "
        f"{'raw' if settings.rendering.raw else 'chat'}; "
        f"expected of this checkpoint {findings.expected:.2f}"
    )
    if findings.vocabulary is not None:
        yield f"vocabulary   of the answers {findings.vocabulary.describe()}"
    if findings.other_rendering is not None:
        other = "chat" if settings.rendering.raw else "raw"
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
    from peagle.loading.checkpoints import DEMO, HELD_OUT, resolve

    if settings.prompts is not None:
        return read_prompts(settings.prompts, resolve(target, "target"), settings.rendering)
    if target != DEMO:
        raise InputError(
            f"the demo's prompts are for the demo target only; give prompts for {target} with --prompt-file FILE"
        )
    return read_prompt_file(HELD_OUT)
