"""`peagle cluster up`: a fleet on Ray Serve, until Ctrl-C or SIGTERM."""

import contextlib
import dataclasses
import os
import signal
import threading
from typing import Any

from peagle.checkpoints import or_demo
from peagle.cli.cluster import Up
from peagle.cli.command import needing, options_of
from peagle.cli.display import Display
from peagle.cli.output import OutputFile
from peagle.cli.serving import default_name, guarded_hosts, read_api_keys, warn_of_strangers
from peagle.cluster.complete import completed
from peagle.cluster.config import FleetConfig
from peagle.ops import interrupt
from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps
from peagle.parallel import refuse_replicas

# Ray's switch to listen on loopback only; it must be set before Ray is imported
LOOPBACK_ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
REPORTS = "RAY_USAGE_STATS_ENABLED"  # usage reports to Ray's makers


def keep_to_itself() -> None:
    """Unless the environment says otherwise, let a Ray started here listen on loopback and send no usage reports."""
    for name in (LOOPBACK_ALONE, REPORTS):
        os.environ.setdefault(name, "0")


def start_fleet(settings: Up) -> int:
    """Run a fleet and return the exit code. Raises InputError, before it starts anything, for bad options or no Ray."""
    refuse_replicas(settings.fleet.load.mesh, "the replicas of a cluster are --decode N")
    config = served(settings)
    if settings.write_config is not None:
        write_config(OutputFile(settings.write_config, "--write-config"), settings, config)
        return 0
    if settings.address is None:
        keep_to_itself()
    with needing("a cluster needs", "cluster"):
        from peagle.cluster.start import run
    warn_of_strangers(settings.host, settings.api_key_file)
    stopped = threading.Event()

    pressed = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: Any) -> None:
        if stopped.is_set():  # the second signal: do not wait for answers
            raise KeyboardInterrupt
        stopped.set()
        if number == signal.SIGINT and callable(pressed):
            pressed(number, frame)
            interrupt.forget()  # or the second press would end this process alone, and leave Ray's

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    display, count = Display(), config.prefill + config.decode
    replicas = "1 replica, which" if count == 1 else f"{count} replicas, each of which"
    with contextlib.ExitStack() as starting:
        starting.enter_context(display.stage(f"starting {replicas} loads the pair and compiles"))

        def note(line: str) -> None:
            starting.close()
            display.note(line)

        run(config, settings.address, settings.host, settings.port, note, stopped)
    return 0


def served(settings: Up) -> FleetConfig:
    """Complete the fleet's config: name, keys and hosts. Raises InputError for models that do not fit."""
    fleet = settings.fleet
    keys = () if settings.api_key_file is None else read_api_keys(settings.api_key_file)
    name = fleet.served_model_name or default_name(or_demo(fleet.load.target))
    hosts = guarded_hosts(settings.host, keys)
    return dataclasses.replace(completed(fleet), served_model_name=name, keys=keys, hosts=hosts)


def write_config(file: OutputFile, settings: Up, fleet: FleetConfig) -> None:
    """Write the config of `serve deploy`, in JSON, which is YAML. Raises InputError if it would hold keys."""
    if settings.api_key_file is not None:
        raise InputError("--write-config would write the keys of --api-key-file as plain text; give one of the two")
    arguments: dict[str, Any] = {"load": {}, "engine": {}}
    for option in options_of(FleetConfig):
        *section, name = option.path
        (arguments[section[0]] if section else arguments)[name] = option.of(fleet)
    arguments["hosts"] = fleet.hosts
    application = {"name": "peagle", "import_path": "peagle.cluster.deployments:build", "args": arguments}
    config = {"http_options": {"host": settings.host, "port": settings.port}, "applications": [application]}
    file.write(dumps(config, indent=1) + "\n")
