"""Options of `peagle data`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from peagle.cli.command import Takes
from peagle.cli.flags import PROMPT_FILE, QUIET, STRICT
from peagle.config import EngineConfig, LoadConfig, SamplingParams
from peagle.ops.errors import InputError
from peagle.ops.flag import OUTPUT, PROMPT, SAMPLING, Flag, check_least, layers_reader
from peagle.text.prompts import Rendering

CONTEXT = "Context length in tokens: prompt plus answer. A prompt that leaves no room is skipped."


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
      with aux_hidden and logits: training then does not run the target
        [cyan]peagle data --prompt-file IN.jsonl --out DATA --hidden --top 32[/cyan]
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
    strict: Annotated[bool, STRICT] = False
    rendering: Rendering = Rendering()
    load: Annotated[LoadConfig, Takes(("target", "download", "dtype", "experts", "kernels"))] = LoadConfig()
    max_new_tokens: Annotated[int | None, Flag(SAMPLING, "N", ("-n", "--max-new-tokens"))] = None
    """Maximum tokens of an answer. Default: what the context leaves."""
    engine: Annotated[EngineConfig, Takes(("context", "slots"), helps={"context": CONTEXT})] = EngineConfig(
        context=512, slots=32
    )
    shard_prompts: Annotated[int, Flag(OUTPUT, "N")] = 512
    """Prompts per shard."""
    hidden: Annotated[bool, Flag(OUTPUT)] = False
    """Also store the target's hidden states that the drafter reads (aux_hidden), for every token: large files."""
    aux_layer_ids: Annotated[tuple[int, ...] | None, Flag(OUTPUT, "L,L,L", read=layers_reader("aux_layer_ids"))] = None
    """With --hidden: store the outputs of these target layers (0-based). Default: 1, n/2 - 1 and n - 4 of n layers."""
    top: Annotated[int, Flag(OUTPUT, "N")] = 0
    """Also store the target's N largest logits after every token."""
    keep_prompt: Annotated[int | None, Flag(OUTPUT, "N")] = None
    """Store only the last N tokens of a prompt; the target still reads all of it. For drafters whose windows see no
    further; needs --hidden and --top."""
    sampling: SamplingParams = SamplingParams()
    quiet: Annotated[bool, QUIET] = False

    def __post_init__(self) -> None:
        check_least(self, num_prompts=1, max_new_tokens=1, shard_prompts=1, top=0, keep_prompt=0)
        if self.keep_prompt is not None and not (self.hidden and self.top):
            raise InputError(
                "--keep-prompt drops tokens that the target would have to read again in training; give --hidden and "
                "--top, too, or leave it out"
            )
        if self.aux_layer_ids is not None and not self.hidden:
            raise InputError(
                "--aux-layer-ids names hidden states to store, and none are stored: give --hidden, too, or leave it out"
            )

    def run(self) -> int:
        from peagle.cli.run_data import make_data
        from peagle.ops.files import locked

        with locked(Path(self.out)):
            return make_data(self)
