"""The options of `serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from peagle.cli.options import defaults_from
from peagle.cli.settings.shared import (
    MODEL,
    RUNNING,
    DraftOptions,
    MeshOptions,
    ModelOptions,
    PrefixCache,
    ProcessOptions,
    RetainFullKV,
    quiet_option,
)
from peagle.text.tokenizer import DEFAULT_DATE

Context = Annotated[
    int | None,
    Option(
        "--context",
        metavar="N",
        rich_help_panel=MODEL,
        help="Positions of a prompt with its answer; every slot reserves them. Default: 4096, or all of the model.",
    ),
]
ServedModelName = Annotated[
    str | None,
    Option(
        "--served-model-name",
        metavar="NAME",
        rich_help_panel=MODEL,
        help="The model's name for clients. Default: that of the target's directory.",
    ),
]
Host = Annotated[
    str, Option("--host", metavar="ADDRESS", rich_help_panel=RUNNING, help="Address to listen on: this machine's.")
]
MaxQueue = Annotated[
    int,
    Option(
        "--max-queue",
        metavar="N",
        rich_help_panel=RUNNING,
        help="Requests that may wait for a slot; more are refused with status 429.",
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    Option(
        "--api-key-file",
        metavar="FILE",
        rich_help_panel=RUNNING,
        help="Keys, one a line, of which a client must send one. Default: none is needed.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ServedOptions:
    """Which pair answers requests in OpenAI's form, and how it is run, over HTTP or from a file."""

    model: ModelOptions = ModelOptions()
    devices: MeshOptions = MeshOptions()
    processes: ProcessOptions = ProcessOptions()
    drafting: DraftOptions = DraftOptions()
    context: Context = None
    served_model_name: ServedModelName = None
    date: Annotated[
        str,
        Option(
            "--date",
            metavar="YYYY-MM-DD",
            rich_help_panel=MODEL,
            help="Today's date for templates that show it. Fixed by default, so that results do not drift.",
        ),
    ] = DEFAULT_DATE
    prefix_cache: PrefixCache = "auto"
    mask_budget: Annotated[
        int,
        Option(
            "--mask-budget",
            metavar="MS",
            rich_help_panel=RUNNING,
            help="Milliseconds of a step that the grammar of a request may take; one that takes longer again and again "
            "ends with an error.",
        ),
    ] = 50
    retain_full_kv: RetainFullKV = False


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Serve a pair over HTTP, as OpenAI does: chat completions and completions, for many people at once.

    Ctrl-C or SIGTERM: answers that are under way end first. GET /health, GET /metrics for those who run it.

    [bold]Examples[/bold]

      the demo pair          [cyan]peagle serve[/cyan]
      your own checkpoints
        [cyan]peagle serve --target DIR --drafter DIR --slots 8 --context 8192[/cyan]
      with a key             [cyan]peagle serve --api-key-file KEYS --host 0.0.0.0[/cyan]
      options from a file    [cyan]peagle serve --config serve.toml[/cyan]   (max-queue = 8)
      and call it
        [cyan]curl localhost:8000/v1/completions --json '{"prompt": "def mean("}'[/cyan]
      with a tool: the call (the target's chat template must have tools)
        [cyan]curl localhost:8000/v1/chat/completions --json '{"messages": [[/cyan]
        [cyan]{"role": "user", "content": "What time is it?"}], "tools": [{"type":[/cyan]
        [cyan]"function", "function": {"name": "clock"}}], "tool_choice": "required"}'[/cyan]
      and then its result, under the id of the call
        [cyan]curl localhost:8000/v1/chat/completions --json '{"messages": [[/cyan]
        [cyan]{"role": "user", "content": "What time is it?"}, {"role": "assistant",[/cyan]
        [cyan]"tool_calls": [{"id": "call_1", "type": "function", "function":[/cyan]
        [cyan]{"name": "clock", "arguments": "{}"}}]}, {"role": "tool",[/cyan]
        [cyan]"tool_call_id": "call_1", "content": "12:00"}], "tools": [{"type":[/cyan]
        [cyan]"function", "function": {"name": "clock"}}], "tool_choice": "auto"}'[/cyan]
    """

    served: ServedOptions = ServedOptions()
    host: Host = "127.0.0.1"
    port: Annotated[
        int, Option("--port", metavar="N", rich_help_panel=RUNNING, help="Port to listen on; 0: a free one.")
    ] = 8000
    slots: Annotated[int, Option("--slots", metavar="N", rich_help_panel=RUNNING, help="Requests decoded at once.")] = 4
    max_queue: MaxQueue = 64
    max_body: Annotated[
        int, Option("--max-body", metavar="BYTES", rich_help_panel=RUNNING, help="Most bytes of a request.")
    ] = 4_000_000
    api_key_file: ApiKeyFile = None
    allow_origin: Annotated[
        tuple[str, ...],
        Option(
            "--allow-origin",
            metavar="ORIGIN",
            rich_help_panel=RUNNING,
            help="A site whose pages may use this server from a browser, as https://example.org; *: any. Repeatable.",
        ),
    ] = ()
    drain: Annotated[
        int,
        Option(
            "--drain",
            metavar="SECONDS",
            rich_help_panel=RUNNING,
            help="After SIGTERM or Ctrl-C, open answers may take this long to end.",
        ),
    ] = 30
    quiet: Annotated[bool, quiet_option("No notes, no line for each request")] = False
    config: Annotated[
        Path | None,
        Option(
            "--config",
            metavar="FILE.toml",
            is_eager=True,
            callback=defaults_from,
            rich_help_panel=RUNNING,
            help="Options by name; those typed here take precedence.",
        ),
    ] = None
