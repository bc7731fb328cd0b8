"""The options of `batch`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from peagle.cli.settings.serve import ServedOptions
from peagle.cli.settings.shared import RUNNING, quiet_option


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """Answer a file of requests in the form of OpenAI's Batch API, by the code of `peagle serve`, without a server.

    Each line is {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}. A second run with
    the same files goes on with the lines that have no response yet. The exit code is 0 if some line was answered, 3 if
    every line was refused, 1 if the engine failed, also at a line: then run it again.

    [bold]Examples[/bold]

      the demo pair          [cyan]peagle batch requests.jsonl answers.jsonl[/cyan]
      your own checkpoints
        [cyan]peagle batch requests.jsonl answers.jsonl --target DIR --drafter DIR[/cyan]
    """

    requests: Annotated[Path, Argument(metavar="IN.jsonl", help="Requests, one a line.")]
    answers: Annotated[Path, Argument(metavar="OUT.jsonl", help="Answers, one a line, as they end; appended to.")]
    served: ServedOptions = ServedOptions()
    slots: Annotated[int, Option("--slots", metavar="N", rich_help_panel=RUNNING, help="Requests decoded at once.")] = 8
    quiet: Annotated[bool, quiet_option("No notes, no progress")] = False
