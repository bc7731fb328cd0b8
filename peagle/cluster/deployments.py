"""The deployments of Ray Serve: engines (`Prefill`, `Decode`, or `Both`), and the HTTP application before them.

`build` makes the application from a FleetConfig, or from the fields that `serve deploy` reads in a file:

    applications:
      - name: peagle
        import_path: peagle.cluster.deployments:build
        args: {load: {target: DIR, drafter: DIR}, engine: {slots: 8}, prefill: 1, decode: 2}

Ray pickles arguments, so whoever reaches its ports can run code: keep them on a trusted network.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import numpy as np
import ray.exceptions
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from peagle.base.errors import InputError
from peagle.cluster.affinity import ROUTERS, Router
from peagle.cluster.complete import completed, pair_without_weights
from peagle.cluster.config import FleetConfig, read_fleet
from peagle.cluster.fleet import Fleet, ReplicaLost
from peagle.cluster.router import PrefixRouter
from peagle.engine.grammar import PortableGrammar
from peagle.engine.host.handoff import parse
from peagle.engine.request import Request, TokenChunk
from peagle.loading.checkpoints import DEMO
from peagle.loading.load import load
from peagle.serve.app import create_app
from peagle.serve.engine_loop import EngineLoop
from peagle.serve.errors import ApiError
from peagle.serve.request_builder import RequestBuilder
from peagle.serve.shared_state import SharedState
from peagle.serve.stored import RESPONSE_OPTIONS, ResponseStore

UNLIMITED = 1_000_000  # ongoing calls per replica: engines have their own queues
BUSY_PREFILL = 2  # ongoing requests of a replica that prefills above which to scale up: one is computed, one waits
LOOK_BACK_S = 12.0  # window of the average load; Serve requires more than the 10 s between two counts
NO_REQUEST = Request((0,), 1)  # in chunks sent between processes: the reader has the request
NAME = "peagle"  # default model name
REPLICA_LOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.ObjectLostError,  # of a hand-off, with its machine
    ray.exceptions.TaskCancelledError,  # by a stopping replica
)


def scaling(config: FleetConfig, count: int, most: int, busy: int) -> dict[str, Any]:
    """Make Serve's options for `count` replicas, and for up to `most` while each has more than `busy` requests."""
    if most <= count:
        return {"num_replicas": count}
    scaled = AutoscalingConfig(
        min_replicas=count,
        max_replicas=most,
        target_ongoing_requests=float(busy),
        upscale_delay_s=config.scale_up,
        downscale_delay_s=config.scale_down,
        look_back_period_s=LOOK_BACK_S,
    )
    return {"autoscaling_config": scaled}


class Worker:
    """A replica of an engine."""

    def __init__(self, config: FleetConfig, prefill_only: bool) -> None:
        config = completed(config)
        self._pair = load(config.load.target or DEMO, config.load.drafter, **config.load.arguments)
        # without steps there are no costs to measure
        changes: dict[str, Any] = {"prefill_only": True, "adaptive": False} if prefill_only else {}
        settings = config.engine_of(prefill_only)
        engine = self._pair.engine(self._pair.resolve(settings, k_per_request=True, **changes))
        for sampled, full in ((False, False), (True, False), (True, True)):
            engine.warm_up(sampled=sampled, full_logits=full, constrained=full)
        if self._pair.tokenizer is not None:  # a large vocabulary takes seconds
            self._pair.grammars.read()
        self._loop = EngineLoop(engine, config.most_open)  # `Fleet` bounds the queue

    def check_health(self) -> None:
        """Raise RuntimeError if the engine has failed or stalled, so that Serve replaces the replica."""
        if self._loop.status in ("failed", "stalled"):
            raise RuntimeError(self._loop.failure or "the engine has stalled")

    async def ping(self) -> None:
        """Do nothing: Serve calls a replica only after its constructor has ended."""

    async def _with_grammar(self, request: Request, grammar: PortableGrammar | None) -> Request:
        if grammar is None:
            return request
        compiled = await asyncio.to_thread(self._pair.grammars.read().restore, grammar)
        return dataclasses.replace(request, grammar=compiled)

    async def prefill(self, request: Request, grammar: PortableGrammar | None) -> tuple[TokenChunk, np.ndarray | None]:
        """See peagle.cluster.fleet.ReplicaCalls."""
        call = self._loop.submit([await self._with_grammar(request, grammar)])
        try:
            async with contextlib.aclosing(call.chunks()) as chunks:
                async for _, chunk in chunks:
                    handle = call.jobs[0].handle
                    hand_off = None if handle is None else handle.hand_off
                    chunk = dataclasses.replace(chunk, request=NO_REQUEST)
                    return chunk, None if hand_off is None else hand_off.data
        finally:
            call.close()
        raise ApiError(503, "the prefill was stopped")

    async def decode(
        self, request: Request, grammar: PortableGrammar | None, hand_off: np.ndarray | None
    ) -> AsyncGenerator[TokenChunk, None]:
        """See peagle.cluster.fleet.ReplicaCalls."""
        request = await self._with_grammar(request, grammar)
        call = self._loop.submit([request], [None if hand_off is None else parse(hand_off)])
        del hand_off  # the engine drops it as soon as the request has a slot
        try:
            async with contextlib.aclosing(call.chunks()) as chunks:
                async for _, chunk in chunks:
                    yield dataclasses.replace(chunk, request=NO_REQUEST)
        finally:
            call.close()


class RayCalls:
    """See peagle.cluster.fleet.ReplicaCalls. Serve's handles balance the load."""

    def __init__(self, prefill: Any, decode: Any) -> None:
        self.disaggregated = prefill is not None
        self._prefill, self._decode = prefill, decode.options(stream=True)
        self._roles = [decode] if prefill is None else [prefill, decode]
        self._decoding = decode.deployment_name

    @property
    def _router(self) -> Router | None:
        """The router of the replicas that decode; None before the first call, and if prefixes do not matter."""
        return ROUTERS.get(self._decoding)

    def knows(self, prompt_ids: Sequence[int]) -> bool:
        return self._router is not None and self._router.preferred(prompt_ids) is not None

    def note_answer(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        if self._router is not None:
            self._router.affinity.note_answer(prompt_ids, answer_ids)

    async def ping(self) -> None:
        with _translated_errors():
            await asyncio.gather(*(_result(handle.ping.remote()) for handle in self._roles))

    async def prefill(self, request: Request) -> tuple[TokenChunk, np.ndarray | None]:
        with _translated_errors():
            response = self._prefill.prefill.remote(*_without_grammar(request))
            first: tuple[TokenChunk, np.ndarray | None] = await _result(response)
            return first

    async def decode(self, request: Request, hand_off: np.ndarray | None) -> AsyncGenerator[TokenChunk, None]:
        with _translated_errors():
            response = self._decode.decode.remote(*_without_grammar(request), hand_off)
            del hand_off
            try:
                async for chunk in response:
                    yield chunk
            finally:
                response.cancel()


async def _result(response: Any) -> Any:
    """Await the result of a call, and cancel the call if this task is cancelled: Serve alone would finish it."""
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise


def _without_grammar(request: Request) -> tuple[Request, PortableGrammar | None]:
    """Return (the request without its grammar, the grammar in a form that the replica compiles again)."""
    if request.grammar is None:
        return request, None
    return dataclasses.replace(request, grammar=None), request.grammar.portable


@contextlib.contextmanager
def _translated_errors() -> Any:
    """Raise the ApiError or InputError of a replica in place of Ray's error, and ReplicaLost if it is lost."""
    try:
        yield
    except REPLICA_LOST as error:
        raise ReplicaLost from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ApiError | InputError):
            raise error.cause from None
        raise


@serve.ingress()
class Application:
    """The HTTP application, with the tokenizer and without weights."""

    def __init__(self, config: FleetConfig, prefill: Any, decode: Any) -> None:
        config = completed(config)
        pair = pair_without_weights(config)
        resolved = pair.resolve(config.engine, prefix_cache="off", k_per_request=True)
        builder = RequestBuilder(pair, resolved.context, config.date, resolved.num_drafts)
        fleet = Fleet(RayCalls(prefill, decode), pair, resolved, config.most_open, config.patience_s)
        self._watching = asyncio.get_running_loop().create_task(fleet.watch())
        responses = ResponseStore(config.response_store, config.response_ttl, RESPONSE_OPTIONS)
        name = config.served_model_name or NAME
        self._service = SharedState(fleet, builder, name, config.keys, hosts=config.hosts, responses=responses)

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._service)


def build(config: FleetConfig | Mapping[str, Any]) -> serve.Application:
    """Make the application of a fleet from its config, or from the fields of its file.

    Reads no checkpoints: the application's processes have them, and each completes the config in the same way
    (peagle.cluster.complete).
    """
    if not isinstance(config, FleetConfig):
        config = read_fleet(config)
    actor = {"num_cpus": config.num_cpus, "num_gpus": config.num_gpus}
    options: Any = {"health_check_period_s": 5, "graceful_shutdown_timeout_s": config.drain}

    def workers(name: str, prefill_only: bool, scaled: dict[str, Any]) -> Any:
        if config.route_by_prefix and config.engine_of(prefill_only).prefix_cache not in ("off", 0):
            choice: Any = PrefixRouter
            scaled["request_router_config"] = RequestRouterConfig(
                request_router_class=choice, request_router_kwargs={"deployment": name}
            )
        worker: Any = serve.deployment(Worker, name=name, max_ongoing_requests=UNLIMITED, **scaled)
        return worker.options(ray_actor_options=actor, **options).bind(config, prefill_only)

    prefill = None
    if config.prefill:
        scaled = scaling(config, config.prefill, config.max_prefill, config.busy or BUSY_PREFILL)
        prefill = workers("Prefill", True, scaled)
    scaled = scaling(config, config.decode, config.max_decode, config.busy or config.engine.slots)
    decode = workers("Decode" if config.prefill else "Both", False, scaled)
    app: Any = serve.deployment(Application, name="Application", max_ongoing_requests=UNLIMITED)
    application: serve.Application = app.options(ray_actor_options={"num_cpus": 0}, **options).bind(
        config, prefill, decode
    )
    return application
