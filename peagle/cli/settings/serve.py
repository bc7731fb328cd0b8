"""The options of `serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from peagle.cli.options import defaults_from
from peagle.cli.settings.shared import (
    ENGINE,
    PROMPT,
    SERVER,
    DraftOptions,
    KeptPrefixes,
    KVMemory,
    MeshOptions,
    ModelOptions,
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
        rich_help_panel=ENGINE,
        help="Context length in tokens: the most of one request, prompt plus response. Default: the model's limit, or "
        "what the memory holds if that is less.",
    ),
]
ServedModelName = Annotated[
    str | None,
    Option(
        "--served-model-name",
        metavar="NAME",
        rich_help_panel=SERVER,
        help="Model name in the API. Default: the name of the target's directory.",
    ),
]
Host = Annotated[
    str,
    Option(
        "--host",
        metavar="ADDRESS",
        rich_help_panel=SERVER,
        help="Address to listen on; 0.0.0.0 also accepts other machines.",
    ),
]
MaxQueue = Annotated[
    int,
    Option(
        "--max-queue",
        metavar="N",
        rich_help_panel=SERVER,
        help="Requests that may wait for a slot; further ones get status 429.",
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    Option(
        "--api-key-file",
        metavar="FILE",
        rich_help_panel=SERVER,
        help="File of accepted API keys, one per line. Default: no key is required.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ServedOptions:
    """The pair and its engine, for requests of OpenAI's API over HTTP or from a file."""

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
            rich_help_panel=PROMPT,
            help="Current date for chat templates that show it; fixed, so that results are reproducible.",
        ),
    ] = DEFAULT_DATE
    kv_memory: KVMemory = "auto"
    prefix_cache: KeptPrefixes = "on"
    mask_budget: Annotated[
        int,
        Option(
            "--mask-budget",
            metavar="MS",
            rich_help_panel=ENGINE,
            help="Milliseconds per step for the grammar mask of a request; a request that repeatedly takes longer "
            "ends with an error.",
        ),
    ] = 50
    retain_full_kv: RetainFullKV = False


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Serve an OpenAI-compatible HTTP API.

    Chat completions, completions and responses, with continuous batching; also
    GET /health and GET /metrics. After Ctrl-C or SIGTERM, open responses finish
    first.

    [bold]Examples[/bold]

      the demo models        [cyan]peagle serve[/cyan]
      your checkpoints
        [cyan]peagle serve --target DIR --drafter DIR --slots 8 --context 8192[/cyan]
      with an API key      [cyan]peagle serve --api-key-file KEYS --host 0.0.0.0[/cyan]
      options from a file  [cyan]peagle serve --config serve.toml[/cyan]   (max-queue = 8)
      call the server
        [cyan]curl localhost:8000/v1/completions --json '{"prompt": "def mean("}'[/cyan]
      call a tool (the target's chat template must support tools)
        [cyan]curl localhost:8000/v1/chat/completions --json '{"messages": [[/cyan]
        [cyan]{"role": "user", "content": "What time is it?"}], "tools": [{"type":[/cyan]
        [cyan]"function", "function": {"name": "clock"}}], "tool_choice": "required"}'[/cyan]
      then return its result, with the id of the call
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
        int, Option("--port", metavar="N", rich_help_panel=SERVER, help="Port to listen on; 0: any free port.")
    ] = 8000
    slots: Annotated[
        int,
        Option("--slots", metavar="N", rich_help_panel=ENGINE, help="Requests decoded at once (continuous batching)."),
    ] = 4
    max_queue: MaxQueue = 64
    max_body: Annotated[
        int, Option("--max-body", metavar="BYTES", rich_help_panel=SERVER, help="Largest request, in bytes.")
    ] = 4_000_000
    max_unsent: Annotated[
        int,
        Option(
            "--max-unsent",
            metavar="BYTES",
            rich_help_panel=SERVER,
            help="Most bytes of a stream that wait for a slow client; the stream then ends with an error.",
        ),
    ] = 4_000_000
    api_key_file: ApiKeyFile = None
    allow_origin: Annotated[
        tuple[str, ...],
        Option(
            "--allow-origin",
            metavar="ORIGIN",
            rich_help_panel=SERVER,
            help="Site whose pages may call this server from a browser (CORS), such as https://example.org; *: any. "
            "Repeatable.",
        ),
    ] = ()
    drain: Annotated[
        int,
        Option(
            "--drain",
            metavar="SECONDS",
            rich_help_panel=SERVER,
            help="Time for open responses to finish after SIGTERM or Ctrl-C.",
        ),
    ] = 30
    keep_alive: Annotated[
        int,
        Option(
            "--keep-alive",
            metavar="SECONDS",
            rich_help_panel=SERVER,
            help="Time that a connection stays open between two requests.",
        ),
    ] = 75
    quiet: Annotated[bool, quiet_option("Hide notes and the log of requests")] = False
    config: Annotated[
        Path | None,
        Option(
            "--config",
            metavar="FILE.toml",
            is_eager=True,
            callback=defaults_from,
            rich_help_panel=SERVER,
            help="TOML file with options by name; options on the command line take precedence.",
        ),
    ] = None
