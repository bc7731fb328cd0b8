"""Run a command in several processes: process 0 runs it, the others work for it (peagle.parallel.processes)."""

import functools
import importlib.metadata
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from peagle.base import interrupt
from peagle.base.errors import InputError, InputWarning
from peagle.cli.command import record
from peagle.cli.output import say
from peagle.config import LoadConfig
from peagle.engine.devices.remote import Coordinator
from peagle.loading.load import load as load_models
from peagle.loading.load import resolve_layout
from peagle.ops import native
from peagle.pair import Pair
from peagle.parallel.mesh import refuse_replicas
from peagle.parallel.processes import BAD_INPUT, LOST, Team, gather, join, parse_rendezvous
from peagle.workflows.worker import work

Settings = TypeVar("Settings")
NOTICED_S = 2.0  # a process learns within this time, by its connection, that another one has ended
_complain = functools.partial(say, "error")
_coordinators: list[Coordinator] = []  # one, if this is process 0 of several


def run_together(settings: Settings, load: LoadConfig, run: Callable[[Settings], int]) -> int:
    """Run a command in process 0, or work for process 0 in another one. Return the exit code.

    Raises InputError for options that contradict one another, or that differ from those of the other processes.
    """
    rendezvous = parse_rendezvous(load.process)
    if rendezvous is None:
        return run(settings)
    if load.mesh is None:
        raise InputError("--process is given without --mesh, which shards the target over the processes; give both")
    why = "several processes run one replica of the target; peagle cluster --decode N runs several"
    refuse_replicas(load.mesh, why)
    versions = {name: importlib.metadata.version(name) for name in ("peagle", "jax", "jaxlib")}
    options = {name: str(value) if isinstance(value, Path) else value for name, value in record(settings).items()}
    del options["process"]  # which differs
    hello = {"versions": versions, "options": options}
    if rendezvous.process:
        warnings.simplefilter("ignore", InputWarning)  # process 0 prints them
        team = join(rendezvous, hello, _complain)
        return _run_to_end(team, lambda: work(team))
    team = gather(rendezvous, hello, _complain)
    _coordinators.append(Coordinator(team.send))
    try:
        return _run_to_end(team, lambda: run(settings))
    finally:
        _coordinators.clear()


def _run_to_end(team: Team, run: Callable[[], int]) -> int:
    """Run this process's part and return its exit code. After an error, end the process without waiting for others."""
    try:
        code = run()
    except InputError as error:
        team.end(str(error))
        _complain(str(error))
        team.leave(BAD_INPUT)
    except KeyboardInterrupt:
        if not team.rendezvous.process:
            team.end()
            raise
        team.end("it was interrupted")
        team.leave(interrupt.EXIT_CODE)
    except BaseException as error:
        time.sleep(NOTICED_S)  # if another process has ended, the team ends this one and names that process
        team.end(f"it failed: {' '.join(str(error).split()) or type(error).__name__}")
        traceback.print_exc()
        team.leave(LOST)
    team.end()
    return code


def load_in_all(options: Mapping[str, Any], progress: Callable[[int, int], None] | None) -> Pair:
    """Load a pair (peagle.loading.load.load), in all processes if there are several."""
    if not _coordinators:
        return load_models(**options, progress=progress)
    (coordinator,) = _coordinators
    dtype, experts = resolve_layout(*(options[name] for name in ("target", "dtype", "experts", "kernels")))
    decided = {**options, "dtype": dtype, "experts": experts}
    message = {"load": decided, "kernels": native.status()[0]}
    pair: Pair = coordinator.together(
        message, lambda: load_models(**decided, progress=progress, coordinator=coordinator)
    )
    return pair
