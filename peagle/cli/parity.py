"""Options of `peagle parity`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from peagle.cli.command import Takes
from peagle.cli.flags import JSON, PROMPT_FILE, QUIET, SPECIAL_TOKENS, STRICT
from peagle.config import LoadConfig, check_num_drafts
from peagle.ops.flag import MODEL, PROMPT, RUNNING, SPECULATION, Flag, check_least

LOADED = Takes(("aux_layer_ids", "drafter_window", "target", "download", "dtype", "experts", "kernels"))


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
        [cyan]peagle parity --target DIR --drafter DIR --prompts IN.jsonl[/cyan]
    """

    drafter: Annotated[str | None, Flag(MODEL, "DIR")] = None
    """P-EAGLE or EAGLE-3 checkpoint. Default: the demo drafter."""
    load: Annotated[LoadConfig, LOADED] = LoadConfig()
    prompts: Annotated[Path | None, PROMPT_FILE] = None
    """Prompt file, in a format of peagle speculate; required for any other target than the demo's. Default: the demo's
    held-out prompts."""
    num_prompts: Annotated[int, Flag(PROMPT, "N")] = 10
    """Use the first N prompts, 1 or more."""
    strict: Annotated[bool, STRICT] = False
    render: Annotated[Literal["chat", "raw"], Flag(PROMPT, "HOW")] = "chat"
    """How you prompt the model. chat: with its chat template; raw: as plain text."""
    special_tokens: Annotated[bool, SPECIAL_TOKENS] = False
    num_speculative_tokens: Annotated[int, Flag(SPECULATION, "K", ("-k", "--num-speculative-tokens"))] = 5
    """Tokens drafted per step (K)."""
    max_new_tokens: Annotated[int, Flag(RUNNING, "N", ("-n", "--max-new-tokens"))] = 64
    """Maximum tokens of an answer, 2 or more."""
    reference_steps: Annotated[int, Flag(RUNNING, "N")] = 6
    """Steps, 1 or more, to compare with the float64 reference, which is slow."""
    json: Annotated[str | None, JSON] = None
    quiet: Annotated[bool, QUIET] = False
    """Hide progress and notes. Warnings and errors are still printed."""

    def __post_init__(self) -> None:
        check_num_drafts(self.num_speculative_tokens, plain=False)
        check_least(self, num_prompts=1, max_new_tokens=2, reference_steps=1)

    def run(self) -> int:
        from peagle.cli.run_parity import compare

        return compare(self)
