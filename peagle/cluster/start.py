"""Start Ray, if none is running, and a fleet on it; end both."""

import threading
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from peagle.cluster.deployments import FleetConfig, build
from peagle.ops.errors import InputError

NAME = "peagle"


def run(
    arguments: dict[str, Any],
    address: str | None,
    host: str,
    port: int,
    ready: Callable[[], None],
    stopped: threading.Event,
) -> None:
    """Run a fleet until `stopped` is set. address: of a Ray cluster; None: one is started on this machine.

    A cluster that was running keeps Serve and what others serve there. Raises InputError for arguments that cannot be
    used, and for an address at which there is no cluster.
    """
    config = FleetConfig(**arguments)
    replicas = (config.prefill + config.decode) * config.num_cpus
    # Ray reckons with CPUs, and starts nothing beyond them: its own machine is said to have enough
    local: Any = {"num_cpus": max(1, round(replicas + 1)), "include_dashboard": False} if address is None else {}
    try:
        ray.init(address=address, **local)
    except (ConnectionError, ValueError) as error:
        raise InputError(
            f"--address {address}: {' '.join(str(error).split())[:300]}; expected a Ray cluster that is running, or "
            "leave it out"
        ) from None
    try:
        serve.start(http_options=HTTPOptions(host=host, port=port))
        serve.run(build(config), name=NAME)
        ready()
        while not stopped.wait(1.0):
            pass
    finally:
        if address is None:
            serve.shutdown()
        else:
            serve.delete(NAME)
        ray.shutdown()
