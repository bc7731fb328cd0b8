"""The deployments of Ray Serve: engines (`Prefill`, `Decode`, or `Both`), and the HTTP application before them.

`build` makes the application from a FleetConfig or its fields, as `serve deploy` passes them:

    applications:
      - name: peagle
        import_path: peagle.cluster.deployments:build
        args: {target: DIR, drafter: DIR, prefill: 1, decode: 2}

Ray serialises the arguments of calls by pickle. Whoever reaches its ports runs code: they belong on a trusted network.
"""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import ray.exceptions
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from peagle.api import Pair
from peagle.cluster.fleet import PATIENCE_S, Fleet, ReplicaLost, Shape
from peagle.cluster.router import PrefixRouter
from peagle.config import AUTO
from peagle.engine.grammar import PortableGrammar
from peagle.engine.handoff import parse
from peagle.engine.request import Request, TokenChunk
from peagle.engine.resolved import ResolvedConfig, Role
from peagle.loading import DtypeName, ExpertsChoice, KernelsChoice, load, without_weights
from peagle.ops.errors import InputError
from peagle.ops.sizes import PrefixCacheSize
from peagle.serve.app import create_app
from peagle.serve.errors import ApiError
from peagle.serve.loop import EngineLoop
from peagle.serve.requests import RequestBuilder
from peagle.serve.service import Service
from peagle.text.tokenizer import DEFAULT_DATE

MANY = 1_000_000  # ongoing calls of a replica: engines have their own queues
PROMPTS = 2  # of a replica that prefills: one that is computed, and one that waits
LOOK_BACK_S = 12.0  # requests are averaged over so long; Serve wants more than the 10 s between two counts
NO_REQUEST = Request((0,), 1)  # of chunks on their way: the reader has the request
LOADING = ("dtype", "experts", "kernels", "drafter_window", "mesh", "reduce", "retain_full_kv")
LOSSES = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.ObjectLostError,  # a hand-off, with its machine
    ray.exceptions.TaskCancelledError,  # a replica that was told to stop
)


@dataclass(frozen=True)
class FleetConfig:
    """What a fleet runs.

    prefill: replicas that only prefill; 0: each replica does both. decode: the other replicas.
    max_prefill, max_decode: Serve starts up to so many while a replica has more requests than `busy` (0: its slots) on
    average for scale_up_s, and ends them again if it has had fewer for scale_down_s; 0: no more than at first.
    kv_memory_bytes, prefix_cache_bytes: of each replica (Pair.engine_config).
    route_by_prefix: prompts go where their beginning went (peagle.cluster.router), if prompts are kept.
    patience_s: peagle.cluster.fleet.Fleet. drain_s: a replica that shall stop may take so long to end its answers.
    hosts: peagle.serve.app.Service. num_cpus, num_gpus: of each replica, for Ray's scheduling. LOADING's fields:
    peagle.loading.load.
    """

    target: str
    drafter: str | None
    name: str = "peagle"
    prefill: int = 0
    decode: int = 1
    num_speculative_tokens: int = 0
    slots: int = 4
    context: int = 4096
    max_queue: int = 64
    kv_memory_bytes: int | None = None
    prefix_cache_bytes: PrefixCacheSize = "on"
    date: str = DEFAULT_DATE
    keys: Sequence[str] = field(default=(), repr=False)
    hosts: Sequence[str] | None = None
    dtype: DtypeName | None = None
    experts: ExpertsChoice = "auto"
    kernels: KernelsChoice = "auto"
    drafter_window: int | str = AUTO
    mesh: str | None = None
    reduce: Literal["ordered", "psum"] = "ordered"
    retain_full_kv: bool = False
    patience_s: float = PATIENCE_S
    drain_s: float = 30.0
    max_prefill: int = 0
    max_decode: int = 0
    busy: int = 0
    scale_up_s: float = 30.0
    scale_down_s: float = 600.0
    route_by_prefix: bool = True
    num_cpus: float = 1.0
    num_gpus: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (
            ("prefill", 0), ("decode", 1), ("slots", 1), ("max_queue", 0), ("max_prefill", 0), ("max_decode", 0),
            ("busy", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise InputError(f"{name} is {value!r}; expected an integer of {least} or more")
        if self.kv_memory_bytes is not None and not isinstance(self.kv_memory_bytes, int):
            raise InputError(f"kv_memory_bytes is {self.kv_memory_bytes!r}; expected a number of bytes")
        kept = self.prefix_cache_bytes
        if kept not in ("on", "off") and (not isinstance(kept, int) or kept < 0):
            raise InputError(f"prefix_cache_bytes is {kept!r}; expected on, off or a number of bytes")
        for name in ("patience_s", "drain_s", "scale_up_s", "scale_down_s", "num_cpus", "num_gpus"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; expected a number of 0 or more, and not infinity")
        for name in ("keys", "hosts"):  # a text would be a key for each of its letters
            texts = getattr(self, name) or ()
            if isinstance(texts, str) or not all(isinstance(text, str) and text for text in texts):
                raise InputError(f"{name} are no list of texts; expected [TEXT, ...]")

        for name in ("prefill", "decode"):
            count, most = getattr(self, name), getattr(self, f"max_{name}")
            if most and (most < count or not count):
                raise InputError(f"max_{name} is {most}, and {name} {count}; expected {max(1, count)} of those or more")

    @property
    def most_replicas(self) -> int:
        """Engines at once."""
        return max(self.prefill, self.max_prefill) + max(self.decode, self.max_decode)

    @property
    def most_open(self) -> int:
        """Requests at once."""
        return max(self.decode, self.max_decode) * self.slots + self.max_queue

    def scaling(self, count: int, most: int, busy: int) -> dict[str, Any]:
        """Make Serve's options for `count` replicas, or up to `most` if each has `busy` requests."""
        if most <= count:
            return {"num_replicas": count}
        scaled = AutoscalingConfig(
            min_replicas=count,
            max_replicas=most,
            target_ongoing_requests=float(busy),
            upscale_delay_s=self.scale_up_s,
            downscale_delay_s=self.scale_down_s,
            look_back_period_s=LOOK_BACK_S,
        )
        return {"autoscaling_config": scaled}

    def engine_config(self, pair: Pair, role: Role) -> ResolvedConfig:
        return pair.engine_config(
            self.num_speculative_tokens,
            context=self.context,
            slots=self.slots,
            kv_memory=self.kv_memory_bytes,
            prefix_cache="off" if role == "decode" else self.prefix_cache_bytes,
            k_per_request=True,
            role=role,
        )


class Worker:
    """A replica of an engine."""

    def __init__(self, config: FleetConfig, role: Role) -> None:
        self._pair = load(config.target, config.drafter, **{name: getattr(config, name) for name in LOADING})
        engine = self._pair.engine(config.engine_config(self._pair, role))
        for sampled, full in ((False, False), (True, False), (True, True)):
            engine.warm_up(sampled=sampled, full=full, constrained=full)
        if self._pair.tokenizer is not None:  # a large vocabulary takes seconds
            self._pair.vocabulary()
        self._loop = EngineLoop(engine, config.most_open)  # the fleet's own bound is the queue's

    def check_health(self) -> None:
        """Raise if the engine has failed or stands still, so that Serve replaces the replica."""
        if self._loop.status in ("failed", "stalled"):
            raise RuntimeError(self._loop.failure or "the engine stands still")

    async def _whole(self, request: Request, grammar: PortableGrammar | None) -> Request:
        """Put the request's grammar in its place."""
        if grammar is None:
            return request
        compiled = await asyncio.to_thread(self._pair.vocabulary().restore, grammar)
        return dataclasses.replace(request, grammar=compiled)

    async def prefill(self, request: Request, grammar: PortableGrammar | None) -> tuple[TokenChunk, np.ndarray | None]:
        """See peagle.cluster.fleet.Replicas."""
        call = self._loop.submit([await self._whole(request, grammar)])
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
        """See peagle.cluster.fleet.Replicas."""
        request = await self._whole(request, grammar)
        call = self._loop.submit([request], [None if hand_off is None else parse(hand_off)])
        del hand_off  # the engine drops it as soon as the request has a slot
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
            response = self._prefill.prefill.remote(*_parted(request))
            try:
                found: tuple[TokenChunk, np.ndarray | None] = await response
            except asyncio.CancelledError:
                response.cancel()  # Serve goes on with what nobody awaits
                raise
            return found

    async def decode(self, request: Request, hand_off: np.ndarray | None) -> AsyncGenerator[TokenChunk, None]:
        with _known_errors():
            response = self._decode.decode.remote(*_parted(request), hand_off)
            del hand_off
            try:
                async for chunk in response:
                    yield chunk
            finally:
                response.cancel()


def _parted(request: Request) -> tuple[Request, PortableGrammar | None]:
    """Part a request from its grammar, which is compiled anew in each process."""
    if request.grammar is None:
        return request, None
    return dataclasses.replace(request, grammar=None), request.grammar.portable


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
        checked = dataclasses.replace(config, prefix_cache_bytes="off").engine_config(pair, "both")
        shape = Shape(checked, pair.target.vocab_size, pair.stop_token_ids)
        builder = RequestBuilder(pair, config.context, config.date, config.num_speculative_tokens)
        fleet = Fleet(RayReplicas(prefill, decode), shape, config.most_open, config.patience_s)
        self._service = Service(fleet, builder, config.name, config.keys, hosts=config.hosts)

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._service)


def build(config: FleetConfig | dict[str, Any]) -> serve.Application:
    """Make the application of a fleet."""
    if isinstance(config, dict):
        try:
            config = FleetConfig(**config)
        except TypeError as error:
            names = ", ".join(each.name for each in dataclasses.fields(FleetConfig))
            raise InputError(f"the fleet's arguments are not understood ({error}); expected {names}") from None
    actor = {"num_cpus": config.num_cpus, "num_gpus": config.num_gpus}
    options: Any = {"health_check_period_s": 5, "graceful_shutdown_timeout_s": config.drain_s}

    def workers(name: str, role: Role, scaling: dict[str, Any]) -> Any:
        if config.route_by_prefix and config.prefix_cache_bytes not in ("off", 0) and role != "decode":
            choice: Any = PrefixRouter
            scaling["request_router_config"] = RequestRouterConfig(request_router_class=choice)
        made: Any = serve.deployment(Worker, name=name, max_ongoing_requests=MANY, **scaling)
        return made.options(ray_actor_options=actor, **options).bind(config, role)

    prefill = None
    if config.prefill:  # one prompt is computed at a time
        scaling = config.scaling(config.prefill, config.max_prefill, config.busy or PROMPTS)
        prefill = workers("Prefill", "prefill", scaling)
    scaling = config.scaling(config.decode, config.max_decode, config.busy or config.slots)
    decode = workers("Decode", "decode", scaling) if config.prefill else workers("Both", "both", scaling)
    app: Any = serve.deployment(Application, name="Application", max_ongoing_requests=MANY)
    made: serve.Application = app.options(ray_actor_options={"num_cpus": 0}, **options).bind(config, prefill, decode)
    return made
