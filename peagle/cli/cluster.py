"""Options of `peagle cluster up`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from peagle.cli.command import require_extra
from peagle.cli.flags import API_KEY_FILE, HOST
from peagle.cluster.config import FleetConfig
from peagle.ops.errors import InputError
from peagle.ops.flag import MACHINE, SERVER, Flag


@dataclass(frozen=True, kw_only=True)
class Up:
    """Serve the API of `peagle serve` from several replicas, on Ray Serve.

    By default each replica prefills and decodes. With --prefill N, N more
    replicas prefill and hand the requests over to those that decode, so that a
    long prompt does not delay other answers. Ctrl-C stops all replicas.

    Whoever reaches Ray's ports can run code: run a cluster on a trusted network
    only. Without --address the ports are on loopback, except one per replica,
    which Ray Serve opens on all interfaces: put a firewall before it.

    [bold]Examples[/bold]

      two replicas of the demo models   [cyan]peagle cluster up --decode 2[/cyan]
      disaggregated prefill
        [cyan]peagle cluster up --prefill 1 --decode 2 --target DIR --drafter DIR[/cyan]
      autoscaling
        [cyan]peagle cluster up --decode 1 --max-decode 4 --drain 120[/cyan]
      in a running Ray cluster
        [cyan]peagle cluster up --address auto --decode 8 --num-gpus 1[/cyan]
      for Ray Serve's own `serve deploy fleet.json`
        [cyan]peagle cluster up --decode 8 --write-config fleet.json[/cyan]
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
        with require_extra("a cluster needs", "cluster"):
            from peagle.cli.run_cluster import start_fleet
        return start_fleet(self)
