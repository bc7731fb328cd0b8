"""`peagle serve`: OpenAI's API over HTTP; and the engine that `peagle batch` and `peagle cluster` set up like it."""

import logging
import re
import sys
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from peagle.base import interrupt
from peagle.base.errors import InputError
from peagle.base.files import reason_of
from peagle.base.flag import SERVER, Flag, check_least
from peagle.cli.command import Takes, require_extra
from peagle.cli.flags import API_KEY_FILE, HOST, QUIET
from peagle.cli.output import say
from peagle.config import EngineConfig, LoadConfig
from peagle.engine.grammar import Grammar
from peagle.text.prompts import Rendering

if TYPE_CHECKING:  # they import JAX
    from peagle.cli.display import Display
    from peagle.engine.devices.replicas import AnyEngine
    from peagle.pair import Pair
    from peagle.serve.request_builder import RequestBuilder

LOADED = (
    "target",
    "drafter",
    "draft_vocab",
    "drafter_window",
    "query_blocks",
    "ffn_blocks",
    "dtype",
    "mesh",
    "process",
)
DEMO_NAME = "peagle-demo"
FAILED = 1  # exit code
RESPONSE_TTL_S = 86_400  # a stored response is dropped after its last use
ANY_ORIGIN = "*"  # as in peagle.serve.access, which imports FastAPI


@dataclass(frozen=True, kw_only=True)
class Served:
    """The pair and its engine, for requests of OpenAI's API over HTTP or from a file."""

    load: Annotated[LoadConfig, Takes(*LOADED)] = LoadConfig()
    engine: EngineConfig = EngineConfig(slots=4, prefix_cache="on")
    rendering: Annotated[Rendering, Takes("date")] = Rendering()
    served_model_name: Annotated[str | None, Flag(SERVER, "NAME")] = None
    """Model name in the API. Default: the name of the target's directory."""


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
      call the server
        [cyan]curl localhost:8000/v1/completions --json '{"prompt": "def mean("}'[/cyan]
    """

    load: Annotated[LoadConfig, Takes(*LOADED, "retain_full_kv")] = LoadConfig()
    host: Annotated[str, HOST] = "127.0.0.1"
    port: Annotated[int, Flag(SERVER, "N")] = 8000
    """Port to listen on; 0: any free port."""
    max_queue: Annotated[int, Flag(SERVER, "N")] = 64
    """Requests that may wait for a slot; further ones get status 429."""
    response_store: Annotated[int, Flag(SERVER, "BYTES")] = 256_000_000
    """Memory for responses that /v1/responses keeps for a day, for previous_response_id and item references; 0: none is
    kept."""
    api_key_file: Annotated[Path | None, API_KEY_FILE] = None
    allow_origin: Annotated[tuple[str, ...], Flag(SERVER, "ORIGIN")] = ()
    """Site whose pages may call this server from a browser (CORS), such as https://example.org; *: any. Repeatable."""
    drain: Annotated[int, Flag(SERVER, "SECONDS")] = 30
    """Time for open answers to finish after SIGTERM or Ctrl-C."""
    quiet: Annotated[bool, QUIET] = False

    def __post_init__(self) -> None:
        check_least(self, max_queue=0, response_store=0, drain=0)

    def run(self) -> int:
        from peagle.cli.processes import run_together

        return run_together(self, self.load, serve)


def serve(settings: Serve) -> int:
    """Serve and return the exit code: 0 after a drain, 1 if the engine failed.

    Raises InputError for bad options before loading.
    """
    from peagle.cli.display import Display

    with require_extra("serving needs", "serve"):
        from peagle.serve.app import create_app
        from peagle.serve.engine_loop import EngineLoop
        from peagle.serve.request_log import RequestLog
        from peagle.serve.server import Server, ServerOptions, listen
        from peagle.serve.shared_state import SharedState
        from peagle.serve.stored import RESPONSE_OPTIONS, ResponseStore
    models = check_models(settings)
    keys = () if settings.api_key_file is None else read_api_keys(settings.api_key_file)
    for origin in settings.allow_origin:
        check_allowed_origin(origin)
    display = Display(quiet=settings.quiet)
    with listen(settings.host, settings.port) as address:
        warn_if_open(settings.host, keys)
        if ANY_ORIGIN in settings.allow_origin and not keys:
            say("warning", "--allow-origin * accepts pages of every site, and no --api-key-file is given")
        if not display.live:
            display.note("loading; connections wait until the server is ready")
        name = model_name(settings, models)
        engine, builder = load_engine(settings, models, display, f"serving {name}")
        loop = EngineLoop(engine, settings.max_queue)
        shared = SharedState(
            loop,
            builder,
            name,
            keys,
            origins=settings.allow_origin,
            hosts=allowed_hosts(settings.host, keys, settings.allow_origin),
            log=RequestLog(None if settings.quiet else _logger()),
            responses=ResponseStore(settings.response_store, RESPONSE_TTL_S, RESPONSE_OPTIONS),
        )
        options = ServerOptions(
            drain_s=settings.drain,
            ready=lambda url: display.note(f"ready: {url}/v1"),
            note=display.note,
            unread=shared.metrics.unread.inc,
        )
        try:
            Server(create_app(shared), loop, options).run([address])
        finally:
            loop.close()
    if loop.failure is not None:
        say("error", loop.failure)
    return 0 if loop.failure is None else FAILED


def check_models(settings: Served) -> tuple[str, str | None]:
    """Return (target, drafter). Raises InputError for missing models, and for slots that replicas cannot share."""
    from peagle.cli.models import check_slots, chosen_models

    models = chosen_models(settings.load, settings.engine.num_speculative_tokens)
    check_slots(settings.engine.slots, settings.load.mesh)
    return models


def load_engine(
    settings: Served,
    models: tuple[str, str | None],
    display: "Display",
    doing: str,
    *,
    slots: int | None = None,
    greedy: bool = False,
) -> "tuple[AnyEngine, RequestBuilder]":
    """Load the pair, warm up its engine, and note its size.

    doing: begins the note, as "serving NAME". slots: fewer than the settings', for few requests; the context stays.
    greedy: compile the programs of greedy requests only.
    """
    from peagle.cli.compilation_cache import kept_text
    from peagle.cli.models import chosen_context, load_pair
    from peagle.serve.request_builder import RequestBuilder

    pair = load_pair(*models, settings.load, display)
    context = chosen_context(pair, settings.engine)
    config = pair.resolve(settings.engine, context=context, slots=slots or settings.engine.slots, k_per_request=True)
    engine = pair.engine(config)
    display.note(f"compiling for {_slots(config.slots)}: {kept_text()}")
    _warm_up(pair, engine, display, greedy)
    for line in _describe(pair, engine, doing):
        display.note(line)
    return engine, RequestBuilder(pair, config.context, settings.rendering.date, config.num_drafts)


def model_name(settings: Served, models: tuple[str, str | None]) -> str:
    """Return the model's name in the API: as typed, or the target's."""
    return settings.served_model_name or default_name(models[0])


def default_name(target: str) -> str:
    """Return a target's model name in the API: that of its directory or repository."""
    from peagle.loading.checkpoints import DEMO

    return DEMO_NAME if target == DEMO else Path(target).resolve().name


def warn_if_open(host: str, keys: Sequence[str] | Path | None) -> None:
    """Warn if other machines can reach a server without API keys."""
    from peagle.serve.server import on_loopback

    if not keys and not on_loopback(host):
        say("warning", f"--host {host} accepts other machines, and no --api-key-file is given")


def allowed_hosts(host: str, keys: Sequence[str], origins: Sequence[str] = ()) -> list[str] | None:
    """Return the Host headers, besides loopback's, that a server on loopback without keys accepts; None: all.

    The host is among them, because /etc/hosts may map its name to loopback.
    """
    from peagle.serve.server import on_loopback

    if keys or ANY_ORIGIN in origins or not on_loopback(host):
        return None
    return [host.lower().rstrip("."), *(urllib.parse.urlsplit(origin).hostname or "" for origin in origins)]


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Read one key per line. Raises InputError for a file without keys."""
    try:
        keys = tuple(line.strip() for line in path.read_text("utf-8-sig").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"--api-key-file {path} cannot be read: {reason_of(error)}; expected one key per line, in UTF-8"
        ) from None
    if not keys:
        raise InputError(f"--api-key-file {path} is empty; expected one key per line")
    return keys


def check_allowed_origin(origin: str) -> None:
    """Raise InputError for an origin that no browser sends in this form."""
    parts = re.fullmatch(r"([a-z][a-z0-9+.-]*)://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]*)?", origin)
    default = parts is not None and (parts[1], parts[2]) in (("http", ":80"), ("https", ":443"))
    if origin != ANY_ORIGIN and (parts is None or default):
        raise InputError(
            f"--allow-origin is {origin!r}; expected a site as browsers send it: https://example.org, in lower case, "
            "without a path, a wildcard or its default port; or *"
        )


def _warm_up(pair: "Pair", engine: "AnyEngine", display: "Display", greedy: bool) -> None:
    """Compile the programs of greedy, sampled and constrained requests, with progress and the time left."""
    from peagle.cli.display import PART

    parts = (  # (requests, sampled, full logits, share of the compile time), measured on two cores
        ("greedy requests", False, False, 0.2),
        ("sampled requests", True, False, 0.2),
        ("log-probabilities and grammars", True, True, 0.6),
    )[: 1 if greedy else 3]
    finished, started = 0.0, time.monotonic()
    try:
        for done, (requests, sampled, full, share) in enumerate(parts):
            interrupt.check()
            left_s = (time.monotonic() - started) / finished * (1 - finished) if done else None
            # `measuring` ends this stage
            display.begin_run(f"compiling for {requests}", done, len(parts), left_s, unit=PART)
            finished += share
            engine.warm_up(sampled=sampled, full_logits=full, measuring=display.measuring, constrained=full)
        if pair.tokenizer is not None and not greedy:  # with a large vocabulary, the first grammar takes seconds
            pair.grammars.compile(Grammar.json_object(), channels=True)
    finally:
        display.clear()
    interrupt.check()


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"


def _describe(pair: "Pair", engine: "AnyEngine", doing: str) -> list[str]:
    from peagle.base.sizes import format_size

    config = engine.config
    pages, state, logits = engine.memory_bytes()
    k = config.num_drafts
    speculates = "plainly" if not k else f"with K <= {k} by confidence" if config.adaptive else f"with K = {k}"
    return [
        f"{doing} {speculates}: {_slots(config.slots)} with a context of {config.context}, {pair.loaded.dtype}",
        f"memory besides the weights: {format_size(pages + state + logits)}; its pages hold "
        f"{engine.page_use.num_tokens:,} tokens of all requests and the prefix cache"
        + ("" if config.prefix_cache else ", which is off"),
    ]


def _logger() -> logging.Logger:
    """Return a log on standard error, with one JSON line per request."""
    logger = logging.getLogger("peagle.serve")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler(sys.stderr))
    return logger
