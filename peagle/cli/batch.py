"""Options of `peagle batch`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from peagle.cli.command import require_extra
from peagle.cli.flags import QUIET
from peagle.cli.serve import TAKEN, Served
from peagle.config import EngineConfig
from peagle.ops.flag import Flag


@dataclass(frozen=True, kw_only=True)
class BatchCommand(Served):
    """Run a file of OpenAI Batch API requests, without a server.

    Each line is {"custom_id": "a", "method": "POST",
    "url": "/v1/chat/completions", "body": {...}}. The same command resumes with
    the lines that have no answer yet. Exit code: 0 if a line was answered, 3 if
    every line was refused, 1 if the engine failed on a line or as a whole; then
    run the command again.

    [bold]Examples[/bold]

      the demo models      [cyan]peagle batch IN.jsonl OUT.jsonl[/cyan]
      your checkpoints
        [cyan]peagle batch IN.jsonl OUT.jsonl --target DIR --drafter DIR --slots 16[/cyan]
    """

    requests: Annotated[Path, Flag(names=("IN.jsonl",))]
    """Requests, one per line."""
    answers: Annotated[Path, Flag(names=("OUT.jsonl",))]
    """Answers, appended in the order they finish."""
    engine: Annotated[EngineConfig, TAKEN] = EngineConfig(slots=8, prefix_cache="on")
    quiet: Annotated[bool, QUIET] = False

    def run(self) -> int:
        from peagle.cli.processes import run_together

        with require_extra("batches need", "serve"):
            from peagle.cli.run_serve import answer_file
        return run_together(self, self.load, answer_file)
