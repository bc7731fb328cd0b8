"""The config of a fleet. Imports neither JAX nor Ray."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from peagle.base.errors import InputError
from peagle.base.flag import MACHINE, REPLICAS, SERVER, Flag, Takes, check_least
from peagle.config import EngineConfig, LoadConfig, configs_of
from peagle.text.tokenizer import DEFAULT_DATE

TEXT_LISTS = ("keys", "hosts")  # fields
LOAD = Takes(
    *("target", "drafter", "drafter_window", "query_blocks", "ffn_blocks"),
    *("dtype", "mesh", "retain_full_kv"),
)
OF_ROLE = ("slots", "prefill_chunk", "kv_memory", "prefix_cache")  # of an engine, which may differ by role
ENGINE = Takes("num_speculative_tokens", "context", *OF_ROLE)
Config = TypeVar("Config")


def read_changes(typed: str) -> dict[str, int | str]:
    """Read NAME=VALUE,... into values as `FleetConfig.prefill_engine` takes them."""
    pairs = [part.strip().partition("=") for part in typed.split(",")]
    return {name.replace("-", "_"): int(value) if value.isdecimal() else value for name, _, value in pairs}


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """The models, engines and numbers of replicas."""

    load: Annotated[LoadConfig, LOAD] = LoadConfig()  # noqa: RUF009  # frozen
    engine: Annotated[EngineConfig, ENGINE] = EngineConfig(slots=4, prefix_cache="on")  # noqa: RUF009
    prefill_engine: Annotated[Mapping[str, Any] | None, Flag(REPLICAS, "NAME=VALUE,...", read=read_changes)] = None
    """Options of --prefill replicas that differ, as slots=1,prefill_chunk=2048; also kv_memory, prefix_cache."""
    served_model_name: Annotated[str | None, Flag(SERVER, "NAME")] = None
    """Model name in the API. Default: the name of the target's directory."""
    prefill: Annotated[int, Flag(REPLICAS, "N")] = 0
    """Replicas that only prefill."""
    decode: Annotated[int, Flag(REPLICAS, "N")] = 1
    """Replicas that decode."""
    max_prefill: Annotated[int, Flag(REPLICAS, "N")] = 0
    """Scale the replicas that prefill up to N by load; 0: always --prefill."""
    max_decode: Annotated[int, Flag(REPLICAS, "N")] = 0
    """Scale the replicas that decode up to N by load; 0: always --decode."""
    busy: int = 0  # ongoing requests per replica above which to scale up; 0: `slots`; 2, if replicas only prefill
    scale_up: float = 30.0  # seconds of high load before replicas start
    scale_down: float = 600.0  # seconds of low load before replicas stop; they finish open responses within `drain`
    max_queue: Annotated[int, Flag(SERVER, "N")] = 64
    """Requests that may wait for a slot; further ones get status 429."""
    response_store: Annotated[int, Flag(SERVER, "BYTES")] = 256_000_000
    """Memory for responses that /v1/responses keeps for a day, for previous_response_id and item references; 0: none is
    kept."""
    response_ttl: int = 86_400  # seconds that a response is kept after its last use, if there is room
    drain: Annotated[float, Flag(SERVER, "SECONDS")] = 30.0
    """Time for a stopping replica to finish open responses."""
    num_cpus: Annotated[float, Flag(MACHINE, "N")] = 1.0
    """CPUs per replica, for Ray."""
    num_gpus: Annotated[float, Flag(MACHINE, "N")] = 0.0
    """GPUs per replica, for Ray."""
    keys: Sequence[str] = field(default=(), repr=False)  # see peagle.serve.shared_state.SharedState
    hosts: Sequence[str] | None = None  # see peagle.serve.shared_state.SharedState
    date: str = DEFAULT_DATE  # for chat templates that show one
    patience_s: float = 600.0  # without a chunk, before an answer ends with an error; longer than any queue
    route_by_prefix: bool = True  # send a prompt to the replica that has its prefix, if there are prefix caches

    def __post_init__(self) -> None:
        check_least(
            self,
            prefill=0,
            decode=1,
            max_prefill=0,
            max_decode=0,
            busy=0,
            max_queue=0,
            response_store=0,
            response_ttl=0,
        )
        for name in ("scale_up", "scale_down", "drain", "num_cpus", "num_gpus", "patience_s"):
            if not 0 <= getattr(self, name) < math.inf:
                message = f"{name} is {getattr(self, name)}; expected a number of 0 or more, and not infinity"
                raise InputError(message, name)
        for name in ("prefill", "decode"):
            count, most = getattr(self, name), getattr(self, f"max_{name}")
            if most and not count:
                raise InputError(f"{name} is 0; expected 1 or more, to scale up to {most}", name)
            if most and most < count:
                message = f"max_{name} is {most}; expected {count} or more ({name} is {count}), or 0"
                raise InputError(message, f"max_{name}")
        if self.prefill_engine and not self.prefill:
            raise InputError("prefill is 0; expected 1 or more, since prefill_engine is given", "prefill")
        for name in TEXT_LISTS:
            _check_texts(name, getattr(self, name))
        self.engine_of(prefill_only=True)  # raises for changes that cannot be
        if self.load.process is not None:
            raise InputError("process is given, but each replica of a fleet is one process; leave it out", "process")

    def engine_of(self, prefill_only: bool) -> EngineConfig:
        """Return the config of the engines of a role. Raises InputError for a prefill_engine that cannot be."""
        changes = self.prefill_engine
        if not prefill_only or changes is None:
            return self.engine
        if not changes.keys() <= {*OF_ROLE}:
            names = ", ".join(OF_ROLE)
            message = f"prefill_engine is {dict(changes)}; expected NAME=VALUE,... with names of {names}"
            raise InputError(message, "prefill_engine")
        try:
            return _changed(self.engine, changes)
        except InputError as error:
            raise InputError(f"prefill_engine is {dict(changes)}; {error}", "prefill_engine") from None

    @property
    def most_replicas(self) -> int:
        return max(self.prefill, self.max_prefill) + max(self.decode, self.max_decode)

    @property
    def most_open(self) -> int:
        """The most requests at once, running or queued."""
        return max(self.decode, self.max_decode) * self.engine.slots + self.max_queue


SECTIONS = {"load": LoadConfig, "engine": EngineConfig}


def read_fleet(values: Mapping[str, Any]) -> FleetConfig:
    """Make a fleet's config from the fields of its file. The sections `load` and `engine` have fields of their own.

    Texts are read like values of options. Raises InputError for an unknown name or a value of another type.
    """
    read, defaults = _read(values, FleetConfig), FleetConfig()
    unknown = values.keys() - get_type_hints(FleetConfig).keys()
    for name, kind in SECTIONS.items():
        section = values.get(name, {})
        if not isinstance(section, Mapping):
            raise InputError(f"{name} is {section!r}; expected its fields, as in {name}: {{...}}", name)
        if misplaced := next((field for field in get_type_hints(kind) if field in unknown), None):
            message = f"{misplaced} is not an option here; expected it in {name}, as in {name}: {{{misplaced}: ...}}"
            raise InputError(message, misplaced)
        try:
            read[name] = _changed(getattr(defaults, name), section)
        except InputError as error:
            raise InputError(f"{name}: {error}", error.field) from None
    (config,) = configs_of(read, FleetConfig)
    fleet: FleetConfig = config
    return fleet


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a config with some of its fields as a file has them. Raises InputError."""
    (changed,) = configs_of({**vars(config), **_read(changes, type(config))}, type(config))
    made: Config = changed
    return made


def _read(values: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Read a section: texts like values of options, integers of float fields as floats. Raises InputError."""
    kinds, read = get_type_hints(kind), dict(values)
    for name, hint in get_type_hints(kind, include_extras=True).items():
        value = values.get(name)
        flag = next((mark for mark in get_args(hint) if isinstance(mark, Flag)), None)
        if name in TEXT_LISTS and name in values:
            _check_texts(name, value)
        elif flag is not None and flag.read is not None and isinstance(value, str):
            read[name] = flag.read(value)
        elif kinds[name] is float and isinstance(value, int) and not isinstance(value, bool):
            read[name] = float(value)
    return read


def _check_texts(name: str, texts: Any) -> None:
    """Raise InputError for a value that is no list of texts. The error does not show it, since it may hold keys."""
    listed = texts is None or (isinstance(texts, Sequence) and not isinstance(texts, str))
    if not listed or not all(isinstance(text, str) and text for text in texts or ()):
        raise InputError(f"{name} are no list of texts; expected [TEXT, ...]", name)
