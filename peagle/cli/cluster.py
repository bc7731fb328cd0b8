"""`peagle cluster`: a fleet on Ray Serve, until Ctrl-C, SIGTERM or SIGHUP."""

import contextlib
import dataclasses
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from peagle.base import interrupt
from peagle.base.errors import InputError
from peagle.base.flag import MACHINE, SERVER, Flag
from peagle.base.strict_json import dumps
from peagle.cli.command import options_of, require_extra
from peagle.cli.flags import API_KEY_FILE, HOST
from peagle.cli.output import OutputFile
from peagle.cli.serve import allowed_hosts, default_name, read_api_keys, warn_if_open
from peagle.cluster.config import FleetConfig

# Ray's switch to listen on loopback only; it must be set before Ray is imported
LOOPBACK_ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
REPORTS = "RAY_USAGE_STATS_ENABLED"  # usage reports to Ray's makers


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Serve from several replicas, on Ray Serve.

    The API is that of peagle serve. Each replica prefills and decodes. With
    --prefill N, N more replicas prefill and hand the requests over to those that
    decode, so that a long prompt does not delay other answers. Ctrl-C stops all.

    Whoever reaches Ray's ports can run code: run a cluster on a trusted network
    only. Without --address the ports are on loopback, except one per replica,
    which Ray Serve opens on all interfaces: put a firewall before it.

    [bold]Examples[/bold]

      two replicas of the demo models   [cyan]peagle cluster --decode 2[/cyan]
      disaggregated prefill
        [cyan]peagle cluster --prefill 1 --decode 2 --target DIR --drafter DIR[/cyan]
      autoscaling
        [cyan]peagle cluster --decode 1 --max-decode 4 --drain 120[/cyan]
      in a running Ray cluster
        [cyan]peagle cluster --address auto --decode 8 --num-gpus 1[/cyan]
      for Ray Serve's own `serve deploy fleet.json`
        [cyan]peagle cluster --decode 8 --write-config fleet.json[/cyan]
    """

    fleet: FleetConfig = FleetConfig()
    host: Annotated[str, HOST] = "127.0.0.1"
    port: Annotated[int, Flag(SERVER, "N")] = 8000
    """Port to listen on."""
    api_key_file: Annotated[Path | None, API_KEY_FILE] = None
    write_config: Annotated[str | None, Flag(SERVER, "FILE")] = None
    """Write these options to a file for `serve deploy`, and start nothing."""
    address: Annotated[str | None, Flag(MACHINE, "ADDRESS")] = None
    """Running Ray cluster to use; auto: the one on this machine."""

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise InputError(f"port is {self.port}; expected a port of 1 to 65535", "port")

    def run(self) -> int:
        """Run a fleet, and return the exit code. Raises InputError before it starts for bad options, or without Ray."""
        from peagle.cli.display import Display
        from peagle.parallel.mesh import refuse_replicas

        refuse_replicas(self.fleet.load.mesh, "the replicas of a cluster are --decode N")
        config = served(self)
        if self.write_config is not None:
            write_config(OutputFile(self.write_config, "--write-config"), self, config)
            return 0
        if self.address is None:  # this process starts Ray
            for name in (LOOPBACK_ALONE, REPORTS):
                os.environ.setdefault(name, "0")
        with require_extra("a cluster needs", "cluster"):
            from peagle.cluster.start import run
        warn_if_open(self.host, self.api_key_file)
        stopped, signals = threading.Event(), interrupt.Signals()

        def stop(*_: Any) -> None:
            if not signals.add():
                return
            if stopped.is_set():  # the second signal: do not wait for open answers
                raise KeyboardInterrupt
            stopped.set()

        # with peagle.base.interrupt's handler a second signal would leave Ray's processes
        for number in interrupt.heeded():
            signal.signal(number, stop)
        display, count = Display(), config.prefill + config.decode
        replicas = "1 replica, which" if count == 1 else f"{count} replicas, each of which"
        with contextlib.ExitStack() as starting:
            starting.enter_context(display.stage(f"starting {replicas} loads the pair and compiles"))

            def note(line: str) -> None:
                starting.close()
                display.note(line)

            run(config, self.address, self.host, self.port, note, stopped)
        return 0


def served(settings: Cluster) -> FleetConfig:
    """Complete a fleet's config: name, keys and hosts. Raises InputError for models that do not fit."""
    from peagle.loading.checkpoints import or_demo

    keys = () if settings.api_key_file is None else read_api_keys(settings.api_key_file)
    with require_extra("a cluster needs", "cluster"):
        from peagle.cluster.complete import completed

        hosts = allowed_hosts(settings.host, keys)
    fleet = settings.fleet
    name = fleet.served_model_name or default_name(or_demo(fleet.load.target))
    return dataclasses.replace(completed(fleet), served_model_name=name, keys=keys, hosts=hosts)


def write_config(file: OutputFile, settings: Cluster, fleet: FleetConfig) -> None:
    """Write the config of `serve deploy`. JSON is valid YAML. Raises InputError if it would hold API keys."""
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
