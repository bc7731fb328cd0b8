"""Run `peagle serve` and `peagle batch`: answer requests of OpenAI's API over HTTP, or from a file."""

import asyncio
import logging
import re
import sys
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

from peagle.checkpoints import DEMO
from peagle.cli.batch import BatchCommand
from peagle.cli.display import PART, Display
from peagle.cli.models import check_slots, chosen_context, chosen_models, load_pair
from peagle.cli.output import say
from peagle.cli.serve import Serve, Served
from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.grammar import Grammar
from peagle.ops import interrupt
from peagle.ops.errors import InputError
from peagle.ops.files import reason_of
from peagle.ops.memory import format_size
from peagle.pair import Pair
from peagle.serve.app import create_app
from peagle.serve.batch import BatchFile, Counts, check_files
from peagle.serve.engine_loop import EngineLoop
from peagle.serve.http import ANY_ORIGIN
from peagle.serve.request_builder import RequestBuilder
from peagle.serve.server import Server, ServerOptions, listen, on_loopback
from peagle.serve.shared_state import SharedState
from peagle.serve.stored import RESPONSE_OPTIONS, ResponseStore

DEMO_NAME = "peagle-demo"
FAILED = 1  # exit codes
ALL_REFUSED = 3
MAX_QUEUE = 1 << 30  # of a file: no limit, because a line may ask for many answers, and no client waits
LINES_PER_SLOT = 2  # of a file: in flight, so that no slot waits for the next line


def serve(settings: Serve) -> int:
    """Serve and return the exit code: 0 after a drain, 1 if the engine failed.

    Raises InputError for bad options before loading.
    """
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
            display.note("loading and compiling; connections wait until the server is ready")
        engine, builder, name = load_engine(settings, models, display)
        loop = EngineLoop(engine, settings.max_queue)
        shared = SharedState(
            loop,
            builder,
            name,
            keys,
            settings.max_body,
            settings.allow_origin,
            allowed_hosts(settings.host, keys, settings.allow_origin),
            None if settings.quiet else _request_log(),
            responses=ResponseStore(settings.response_store, settings.response_ttl, RESPONSE_OPTIONS),
            max_unsent=settings.max_unsent,
        )
        options = ServerOptions(
            drain_s=settings.drain,
            keep_alive_s=settings.keep_alive,
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


def answer_file(settings: BatchCommand) -> int:
    """Answer the file and return the exit code, as the command's help says.

    Raises InputError for bad options and files before loading, and KeyboardInterrupt after Ctrl-C.
    """
    models = check_models(settings)
    check_files(settings.requests, settings.answers)
    display = Display(quiet=settings.quiet)
    engine, builder, name = load_engine(settings, models, display, "answering as")
    loop = EngineLoop(engine, MAX_QUEUE)
    batch = BatchFile(
        SharedState(loop, builder, name), settings.requests, settings.answers, LINES_PER_SLOT * settings.engine.slots
    )
    started = time.perf_counter()
    try:
        with display.on_interrupt(lambda: _progress(batch.counts)), display.stage("answering") as advance:
            asyncio.run(batch.run(interrupt.pressed, lambda counts: advance(counts.done, counts.total)))
            interrupt.check()
    finally:
        loop.close()
    if loop.failure is not None:
        say("error", f"{loop.failure}; {_progress(batch.counts)}")
        return FAILED
    summary = _summary(batch.counts, time.perf_counter() - started)
    display.note(summary)
    if settings.quiet and (batch.counts.refused or batch.counts.failed):
        display.warn([summary])
    return FAILED if batch.counts.failed else ALL_REFUSED if batch.counts.all_refused else 0


def _progress(counts: Counts) -> str:
    return f"{counts.done} of {counts.total} lines are done; the same command resumes"


def _summary(counts: Counts, seconds: float) -> str:
    known = f", {counts.known} answered before" if counts.known else ""
    speed = f"; {counts.tokens} tokens in {seconds:.1f} s, {counts.tokens / seconds:.0f} tok/s"
    failed = f", {counts.failed} failed: run the same command again" if counts.failed else ""
    why = "; the output has the reason of each refusal" if counts.refused else ""
    done = f"{counts.answered} line{'s' * (counts.answered != 1)} answered, {counts.refused} refused{failed}{known}"
    return f"{done}{speed if counts.tokens else ''}{why}"


def check_models(settings: Served) -> tuple[str, str | None]:
    """Return (target, drafter). Raises InputError for missing models, and for slots that replicas cannot share."""
    models = chosen_models(settings.load, settings.engine.num_speculative_tokens)
    check_slots(settings.engine.slots, settings.load.mesh)
    return models


def load_engine(
    settings: Served, models: tuple[str, str | None], display: Display, doing: str = "serving"
) -> tuple[AnyEngine, RequestBuilder, str]:
    """Load the pair and warm up its engine; return (engine, builder, model name). doing: begins the note about it."""
    pair = load_pair(*models, settings.load, display)
    config = pair.resolve(
        settings.engine,
        context=chosen_context(pair, settings.engine),
        k_per_request=True,
        mask_budget_s=settings.mask_budget / 1000,
    )
    engine = pair.engine(config)
    _warm_up(pair, engine, display)
    name = settings.served_model_name or default_name(models[0])
    for line in _describe(pair, engine, f"{doing} {name}"):
        display.note(line)
    builder = RequestBuilder(pair, config.context, settings.rendering.date, config.num_drafts)
    return engine, builder, name


def default_name(target: str) -> str:
    """Return a target's model name in the API: that of its directory or repository."""
    return DEMO_NAME if target == DEMO else Path(target).resolve().name


def warn_if_open(host: str, keys: Sequence[str] | Path | None) -> None:
    """Warn if other machines can reach a server without API keys."""
    if not keys and not on_loopback(host):
        say("warning", f"--host {host} accepts other machines, and no --api-key-file is given")


def allowed_hosts(host: str, keys: Sequence[str], origins: Sequence[str] = ()) -> list[str] | None:
    """Return the Host headers, besides loopback's, that a server on loopback without keys accepts; None: all.

    The host is among them, because /etc/hosts may map its name to loopback.
    """
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


def _warm_up(pair: Pair, engine: AnyEngine, display: Display) -> None:
    """Compile the programs of greedy, sampled and constrained requests, with progress and the time left."""
    # (sampled, full): share of the compile time, measured on two cores; the last also has the programs of grammars
    shares, started = {(False, False): 0.2, (True, False): 0.2, (True, True): 0.6}, time.monotonic()
    finished = 0.0
    try:
        for done, ((sampled, full), share) in enumerate(shares.items()):
            interrupt.check()
            left_s = (time.monotonic() - started) / finished * (1 - finished) if done else None
            display.begin_run("compiling", done, len(shares), left_s, unit=PART)  # `measuring` ends it
            finished += share
            engine.warm_up(sampled=sampled, full_logits=full, measuring=display.measuring, constrained=full)
        if pair.tokenizer is not None:  # with a large vocabulary, the first grammar takes seconds
            pair.grammars.compile(Grammar.json_object(), channels=True)
    finally:
        display.clear()
    interrupt.check()


def _describe(pair: Pair, engine: AnyEngine, doing: str) -> list[str]:
    config = engine.config
    pages, state, logits = engine.memory_bytes()
    k = config.num_drafts
    speculates = "plainly" if not k else f"with K <= {k} by confidence" if config.adaptive else f"with K = {k}"
    return [
        f"{doing} {speculates}: {config.slots} slots with a context of {config.context}, {pair.loaded.dtype}",
        f"memory besides the weights: {format_size(pages + state + logits)}; its pages hold "
        f"{engine.page_use.num_tokens:,} tokens of all requests and the prefix cache"
        + ("" if config.prefix_cache else ", which is off"),
    ]


def _request_log() -> logging.Logger:
    """Return a log on standard error, with one JSON line per request."""
    logger = logging.getLogger("peagle.serve")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler(sys.stderr))
    return logger
