"""State that all routes share: the engine's loop, the request builder, limits, metrics and the log."""

import asyncio
import concurrent.futures
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from peagle.engine.grammar import CompiledGrammar
from peagle.engine.request import Request, TokenLogprobs
from peagle.serve.bodies import Sampled
from peagle.serve.engine_loop import EngineLoop, Loop
from peagle.serve.errors import ApiError
from peagle.serve.formatter import Formatter
from peagle.serve.generation import Generation
from peagle.serve.metrics import Metrics
from peagle.serve.replies import Health, ModelCard
from peagle.serve.request_body import BodyT, parse
from peagle.serve.request_builder import RequestBuilder
from peagle.serve.request_log import RequestLog
from peagle.serve.stored import ResponseStore
from peagle.serve.structured import constraint_field

POLL_S = 0.02
GRAMMAR_PATIENCE_S = 10.0  # time to compile a grammar, and to wait for those of other requests
NO_FIELDS: Mapping[str, str] = {}
T = TypeVar("T")


@dataclass
class SharedState:
    """State that all routes share."""

    loop: Loop
    builder: RequestBuilder
    model: str  # its name
    keys: Sequence[str] = ()  # API keys; without any, none is required
    max_body: int = 4_000_000  # bytes; also of the kept items that a body names
    origins: Sequence[str] = ()  # sites whose pages may use the routes
    hosts: Sequence[str] | None = None  # names, besides loopback's, by which clients may address the server; None: any
    log: RequestLog = field(default_factory=RequestLog)
    created: int = field(default_factory=lambda: int(time.time()))
    responses: ResponseStore = field(default_factory=ResponseStore)
    max_unsent: int = 4_000_000  # bytes of a stream that may wait for its client, or the stream ends
    metrics: Metrics = field(init=False)
    _tokenizer_thread: concurrent.futures.ThreadPoolExecutor = field(  # one: tokenizers are not thread-safe
        default_factory=lambda: concurrent.futures.ThreadPoolExecutor(1, "tokenizer")
    )
    _compiling: bool = False  # a grammar

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.loop, self.model)

    async def in_tokenizer_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that encodes, or that takes long for a large body, outside of the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, function, *arguments)

    async def grammar(self, body: Sampled) -> CompiledGrammar | None:
        """Compile the grammar of the answers; None: they are free. Compiles one grammar at a time.

        Raises ApiError if this takes too long, or has to wait too long for other grammars.
        """
        field = constraint_field(body)
        if field is None:
            return None
        end = time.monotonic() + GRAMMAR_PATIENCE_S
        while self._compiling:
            if time.monotonic() > end:
                raise ApiError(503, "grammars of other requests are being compiled; try again later")
            await asyncio.sleep(POLL_S)
        self._compiling = True
        compiled = in_daemon(self.builder.grammar, body)
        compiled.add_done_callback(self._end_compiling)
        try:
            grammar = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(compiled)), GRAMMAR_PATIENCE_S)
        except TimeoutError:
            message = f"the grammar was not compiled within {GRAMMAR_PATIENCE_S:g} seconds; make it smaller"
            raise ApiError(400, message, field) from None
        for keyword in () if grammar is None else grammar.left_out:
            self.log.note(f"the schema keyword {keyword} is not supported: schemas that are not strict lose it")
        return grammar

    def _end_compiling(self, _: concurrent.futures.Future[Any]) -> None:
        self._compiling = False

    async def parse(self, kind: type[BodyT], body: bytes) -> BodyT:
        """Parse a body outside of the event loop (see `request_body.parse`). Raises ApiError for another model."""
        parsed = await self.in_tokenizer_thread(parse, kind, body, self.builder.context)
        self.check_model(parsed.model)
        return parsed

    def generation(
        self,
        body: Sampled,
        formatter: Formatter,
        requests: Sequence[Request],
        fields: Mapping[str, str] = NO_FIELDS,
        **options: bool,
    ) -> Generation:
        """Send the requests of a body to the engine. fields: see `AsChat`. options: see `Generation`."""
        field = constraint_field(body)
        name = None if field is None else fields.get(field, field)
        return Generation(self.loop, requests, formatter, self.metrics, stream=body.stream, constraint=name, **options)

    async def prompt_logprobs(self, requests: Sequence[Request]) -> list[list[TokenLogprobs]]:
        """Compute the log-probabilities of each request's prompt (see `RequestBuilder.prompt_logprobs`)."""
        by_prompt: dict[tuple[int, ...], list[TokenLogprobs]] = {}
        for request in requests:
            self.loop.check(request)
            if request.prompt_ids not in by_prompt:
                by_prompt[request.prompt_ids] = await self.loop.run(
                    functools.partial(self.builder.prompt_logprobs, request)
                )
        return [by_prompt[request.prompt_ids] for request in requests]

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for a model that is not served here."""
        if name is not None and name != self.model:
            raise ApiError(
                404, f"the model {name[:100]!r} is not served here; expected {self.model!r}", "model", "model_not_found"
            )

    def model_card(self) -> ModelCard:
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "peagle",
            "max_model_len": self.builder.context,
        }

    def health(self) -> Health:
        """Describe the state of the engine's loop."""
        loop = self.loop
        health: Health = {
            "status": loop.status,
            "model": self.model,
            "requests_running": loop.num_running,
            "requests_waiting": loop.num_waiting,
            "error": loop.failure,
        }
        if isinstance(loop, EngineLoop):  # not a fleet
            use = loop.engine.page_use
            health |= {"kv_cache_tokens": use.num_tokens, "kv_cache_usage": round(use.held_frac, 4)}
        return health

    def finish(self, generation: Generation, path: str, request_id: str = "") -> None:
        """End the requests of a reply, and log them."""
        generation.close()
        self.log.answered(generation, path, request_id)


def in_daemon(function: Callable[..., T], *arguments: Any) -> concurrent.futures.Future[T]:
    """Call a function in a daemon thread, for which the end of the process does not wait."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
