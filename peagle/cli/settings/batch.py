"""The options of `batch`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from peagle.cli.settings.serve import ServedOptions
from peagle.cli.settings.shared import RUNNING, quiet_option


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """Answer a file of requests in OpenAI's batch format.

    Each line is {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}. A second run with
    the same files answers the lines that have no response yet. Exit code: 0 if a line was answered; 3 if every line
    was refused; 1 if the engine failed: run the command again.

    [bold]Examples[/bold]

      the demo models        [cyan]peagle batch requests.jsonl answers.jsonl[/cyan]
      your own checkpoints
        [cyan]peagle batch requests.jsonl answers.jsonl --target DIR --drafter DIR[/cyan]
    """

    requests: Annotated[Path, Argument(metavar="IN.jsonl", help="Requests, one per line.")]
    answers: Annotated[Path, Argument(metavar="OUT.jsonl", help="Responses, one per line, appended as they finish.")]
    served: ServedOptions = ServedOptions()
    slots: Annotated[
        int, Option("--slots", metavar="N", rich_help_panel=RUNNING, help="Most requests decoded at once.")
    ] = 8
    quiet: Annotated[bool, quiet_option("Print no notes and no progress")] = False
