"""The options of `batch`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from peagle.cli.settings.serve import ServedOptions
from peagle.cli.settings.shared import ENGINE, quiet_option


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """Run a file of OpenAI Batch API requests, without a server.

    Each line is {"custom_id": "a", "method": "POST",
    "url": "/v1/chat/completions", "body": {...}}. The same command resumes with
    the lines that have no response yet. Exit code: 0 if a line was answered, 3 if
    every line was refused, 1 if the engine failed on a line or as a whole; then
    run the command again.

    [bold]Examples[/bold]

      the demo models      [cyan]peagle batch IN.jsonl OUT.jsonl[/cyan]
      your checkpoints
        [cyan]peagle batch IN.jsonl OUT.jsonl --target DIR --drafter DIR --slots 16[/cyan]
    """

    requests: Annotated[Path, Argument(metavar="IN.jsonl", help="Requests, one per line.")]
    answers: Annotated[Path, Argument(metavar="OUT.jsonl", help="Responses, appended in the order they finish.")]
    served: ServedOptions = ServedOptions()
    slots: Annotated[
        int,
        Option("--slots", metavar="N", rich_help_panel=ENGINE, help="Requests decoded at once (continuous batching)."),
    ] = 8
    quiet: Annotated[bool, quiet_option("Hide notes and progress")] = False
