"""Options of `peagle chat`."""

from dataclasses import dataclass
from typing import Annotated

from peagle.cli.command import Takes
from peagle.cli.flags import QUIET
from peagle.config import KEPT_PREFIXES, AnswerConfig, EngineConfig, LoadConfig, SamplingParams, read_kept_prefixes
from peagle.ops.flag import SPECULATION, Flag
from peagle.text.prompts import Rendering

CONTEXT = (
    "Context length of the conversation, in tokens. Default: the model's limit, or what the memory holds if that is "
    "less."
)
TAKEN = Takes(
    ("num_speculative_tokens", "context", "prefill_chunk", "kv_memory", "prefix_cache"),
    helps={"context": CONTEXT, "prefix_cache": KEPT_PREFIXES},
    reads={"prefix_cache": read_kept_prefixes},
)


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Chat in the terminal with speculative decoding.

    Each line of input is a message. /reset starts a new conversation; /exit or
    the end of input quits. Ctrl-C stops an answer, and at the prompt it quits.

    [bold]Examples[/bold]

      your checkpoints    [cyan]peagle chat --target DIR --drafter DIR[/cyan]
      without a drafter   [cyan]peagle chat --target DIR --drafter ngram[/cyan]
      from a pipe         [cyan]printf 'Hi\\nAnd you?\\n' | peagle chat --target DIR[/cyan]
    """

    rendering: Annotated[Rendering, Takes(without=("raw", "special_tokens"))] = Rendering()
    load: LoadConfig = LoadConfig()
    engine: Annotated[EngineConfig, TAKEN] = EngineConfig(prefix_cache="on")
    baseline: Annotated[bool, Flag(SPECULATION)] = False
    """Also decode each answer plainly; report the speed-up."""
    sampling: SamplingParams = SamplingParams()
    answer: Annotated[AnswerConfig, Takes(("max_new_tokens", "stop"))] = AnswerConfig(max_new_tokens=1024)
    quiet: Annotated[bool, QUIET] = False
    """Print only the answers. Warnings and errors are still printed."""

    def run(self) -> int:
        from peagle.cli.processes import run_together
        from peagle.cli.run_chat import chat

        return run_together(self, self.load, chat)
