"""Options of `peagle serve`, and those that `peagle batch` shares."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from peagle.cli.command import Takes, require_extra
from peagle.cli.flags import API_KEY_FILE, HOST, QUIET
from peagle.config import KEPT_PREFIXES, EngineConfig, LoadConfig, read_kept_prefixes
from peagle.ops.flag import ENGINE, SERVER, Flag, check_least
from peagle.text.prompts import Rendering

TAKEN = Takes(
    ("num_speculative_tokens", "slots", "context", "prefill_chunk", "kv_memory", "prefix_cache"),
    helps={"prefix_cache": KEPT_PREFIXES},
    reads={"prefix_cache": read_kept_prefixes},
)


@dataclass(frozen=True, kw_only=True)
class Served:
    """The pair and its engine, for requests of OpenAI's API over HTTP or from a file."""

    load: LoadConfig = LoadConfig()
    engine: Annotated[EngineConfig, TAKEN] = EngineConfig(slots=4, prefix_cache="on")
    served_model_name: Annotated[str | None, Flag(SERVER, "NAME")] = None
    """Model name in the API. Default: the name of the target's directory."""
    rendering: Annotated[Rendering, Takes(("date",))] = Rendering()
    mask_budget: Annotated[int, Flag(ENGINE, "MS")] = 50
    """Milliseconds per step for the grammar mask of a request; a request that repeatedly takes longer ends with an
    error."""

    def __post_init__(self) -> None:
        check_least(self, mask_budget=1)


@dataclass(frozen=True, kw_only=True)
class Serve(Served):
    """Serve an OpenAI-compatible HTTP API.

    Chat completions, completions and responses, with continuous batching; also
    GET /health and GET /metrics. After Ctrl-C or SIGTERM, open answers finish
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

    host: Annotated[str, HOST] = "127.0.0.1"
    port: Annotated[int, Flag(SERVER, "N")] = 8000
    """Port to listen on; 0: any free port."""
    max_queue: Annotated[int, Flag(SERVER, "N")] = 64
    """Requests that may wait for a slot; further ones get status 429."""
    max_body: Annotated[int, Flag(SERVER, "BYTES")] = 4_000_000
    """Largest request, in bytes. The stored items that it names may have as many."""
    max_unsent: Annotated[int, Flag(SERVER, "BYTES")] = 4_000_000
    """Bytes of a stream that may wait for a slow client; a stream with more ends with an error."""
    response_store: Annotated[int, Flag(SERVER, "BYTES")] = 256_000_000
    """Memory for responses that /v1/responses keeps, for previous_response_id and item references; 0: none is kept."""
    response_ttl: Annotated[int, Flag(SERVER, "SECONDS")] = 86_400
    """Time that a response is kept after its last use, if there is room; 0: none is kept."""
    api_key_file: Annotated[Path | None, API_KEY_FILE] = None
    allow_origin: Annotated[tuple[str, ...], Flag(SERVER, "ORIGIN")] = ()
    """Site whose pages may call this server from a browser (CORS), such as https://example.org; *: any. Repeatable."""
    drain: Annotated[int, Flag(SERVER, "SECONDS")] = 30
    """Time for open answers to finish after SIGTERM or Ctrl-C."""
    keep_alive: Annotated[int, Flag(SERVER, "SECONDS")] = 75
    """Time that a connection stays open between two requests."""
    quiet: Annotated[bool, QUIET] = False
    """Hide notes and the log of requests. Warnings and errors are still printed."""
    config: Annotated[Path | None, Flag(SERVER, "FILE.toml")] = None
    """TOML file with options by name; options on the command line take precedence."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(
            self, max_queue=0, max_body=1, max_unsent=1, response_store=0, response_ttl=0, drain=0, keep_alive=1
        )

    def run(self) -> int:
        from peagle.cli.processes import run_together

        with require_extra("serving needs", "serve"):
            from peagle.cli.run_serve import serve
        return run_together(self, self.load, serve)
