"""The deployments of Ray Serve: engines (`Prefill`, `Decode`, or `Both`), and the HTTP application before them.

`build` makes the application from a FleetConfig or its fields, as `serve deploy` passes them:

    applications:
      - name: peagle
        import_path: peagle.cluster.deployments:build
        args: {target: DIR, drafter: DIR, prefill: 1, decode: 2}

Ray serialises the arguments of calls by pickle. Whoever reaches its ports runs code: they belong on a trusted network.
"""

import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray.exceptions
from ray import serve

from peagle.api import Pair
from peagle.cluster.fleet import Fleet, ReplicaLost, Shape
from peagle.engine.engine import EngineConfig, Role
from peagle.engine.handoff import parse
from peagle.engine.request import Request, TokenChunk
from peagle.loading import load, without_weights
from peagle.ops.errors import InputError
from peagle.serve.app import Service, create_app
from peagle.serve.errors import ApiError
from peagle.serve.loop import EngineLoop
from peagle.serve.prompts import Prompter
from peagle.text.tokenizer import DEFAULT_DATE

MANY = 1_000_000  # ongoing calls of a replica: engines have their own queues
NO_REQUEST = Request((0,), 1)  # of chunks on their way: the reader has the request
LOSSES = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError, ray.exceptions.OwnerDiedError)


@dataclass(frozen=True)
class FleetConfig:
    """What a fleet runs. prefill: replicas that only prefill; 0: each replica does both. decode: the other replicas."""

    target: str
    drafter: str | None
    name: str = "peagle"
    prefill: int = 0
    decode: int = 1
    num_speculative_tokens: int = 0
    slots: int = 4
    context: int = 4096
    max_queue: int = 64
    prefix_cache_bytes: int = 0
    date: str = DEFAULT_DATE
    keys: tuple[str, ...] = ()
    num_cpus: float = 1.0  # of each engine, for Ray's scheduling
    num_gpus: float = 0.0

    def __post_init__(self) -> None:
        for field, least in (("prefill", 0), ("decode", 1), ("max_queue", 0)):
            if getattr(self, field) < least:
                raise InputError(f"{field} is {getattr(self, field)}; expected {least} or more")

    def engine_config(self, pair: Pair, role: Role) -> EngineConfig:
        return pair.engine_config(
            self.num_speculative_tokens,
            capacity=self.context,
            slots=self.slots,
            prefix_cache_bytes=0 if role == "decode" else self.prefix_cache_bytes,
            k_per_request=True,
            role=role,
        )


class Worker:
    """A replica of an engine."""

    def __init__(self, config: FleetConfig, role: Role) -> None:
        pair = load(config.target, config.drafter)
        engine = pair.engine(config.engine_config(pair, role))
        for sampled, full in ((False, False), (True, False), (True, True)):
            engine.warm_up(sampled=sampled, full=full)
        self._loop = EngineLoop(engine, config.max_queue)

    def check_health(self) -> None:
        """Raise if the engine has failed, so that Serve replaces the replica."""
        if self._loop.failure is not None:
            raise RuntimeError(self._loop.failure)

    async def prefill(self, request: Request) -> tuple[TokenChunk, np.ndarray | None]:
        """See peagle.cluster.fleet.Replicas."""
        call = self._loop.submit([request])
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

    async def decode(self, request: Request, hand_off: np.ndarray | None) -> AsyncGenerator[TokenChunk, None]:
        """See peagle.cluster.fleet.Replicas."""
        call = self._loop.submit([request], [None if hand_off is None else parse(hand_off)])
        try:
            async with contextlib.aclosing(call.chunks()) as chunks:
                async for _, chunk in chunks:
                    yield dataclasses.replace(chunk, request=NO_REQUEST)
        finally:
            call.close()


class RayReplicas:
    """Calls to the replicas by Serve's handles, which balance the load."""

    def __init__(self, prefill: Any, decode: Any) -> None:
        self.disaggregated = prefill is not None
        self._prefill, self._decode = prefill, decode.options(stream=True)

    async def prefill(self, request: Request) -> tuple[TokenChunk, np.ndarray | None]:
        with _known_errors():
            found: tuple[TokenChunk, np.ndarray | None] = await self._prefill.prefill.remote(request)
            return found

    async def decode(self, request: Request, hand_off: np.ndarray | None) -> AsyncGenerator[TokenChunk, None]:
        with _known_errors():
            response = self._decode.decode.remote(request, hand_off)
            try:
                async for chunk in response:
                    yield chunk
            finally:
                response.cancel()


@contextlib.contextmanager
def _known_errors() -> Any:
    """Raise what the replica raised, or ReplicaLost."""
    try:
        yield
    except LOSSES as error:
        raise ReplicaLost from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ApiError | InputError):
            raise error.cause from None
        raise


@serve.ingress()
class Application:
    """The HTTP application: it holds the tokenizer, and no weights."""

    def __init__(self, config: FleetConfig, prefill: Any, decode: Any) -> None:
        pair = without_weights(config.target)
        shape = Shape(config.engine_config(pair, "both"), pair.target.vocab_size, pair.stop_token_ids)
        most = config.decode * config.slots + config.max_queue
        prompter = Prompter(pair, config.context, config.date, config.num_speculative_tokens)
        fleet = Fleet(RayReplicas(prefill, decode), shape, most)
        self._service = Service(fleet, prompter, config.name, config.keys)

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._service)


def build(config: FleetConfig | dict[str, Any]) -> serve.Application:
    """Make the application of a fleet."""
    if isinstance(config, dict):
        try:
            config = FleetConfig(**config)
        except TypeError as error:
            names = ", ".join(field.name for field in dataclasses.fields(FleetConfig))
            raise InputError(f"the fleet's arguments are not understood ({error}); expected {names}") from None
    options = {"num_cpus": config.num_cpus, "num_gpus": config.num_gpus}

    def workers(name: str, role: Role, count: int) -> Any:
        made = serve.deployment(Worker, name=name, num_replicas=count, max_ongoing_requests=MANY)
        return made.options(ray_actor_options=options, health_check_period_s=5).bind(config, role)

    prefill = workers("Prefill", "prefill", config.prefill) if config.prefill else None
    decode = workers("Decode", "decode", config.decode) if config.prefill else workers("Both", "both", config.decode)
    app = serve.deployment(Application, name="Application", max_ongoing_requests=MANY)
    return app.options(ray_actor_options={"num_cpus": 0}).bind(config, prefill, decode)
