"""Start a fleet, and Ray unless a cluster is running; end both."""

import logging
import socket
import threading
import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from peagle.base.errors import InputError
from peagle.cluster.config import FleetConfig
from peagle.cluster.deployments import build
from peagle.serve.server import listen

NAME = "peagle"
POLL_S = 0.5  # between readings of the fleet's state
CONNECT_S = 5.0  # time to connect to a cluster's address; Ray itself tries for minutes


def run(
    config: FleetConfig,
    address: str | None,
    host: str,
    port: int,
    note: Callable[[str], None],
    stopped: threading.Event,
) -> None:
    """Run a fleet until `stopped` is set; then wait for open answers. KeyboardInterrupt ends the wait.

    address: of a running Ray cluster, which keeps Serve and its other applications; None: start one on this machine.
    note: called with a line at each change of the fleet. Raises InputError if there is no cluster at the address, or no
    replica can start.
    """
    _connect(config, address, host, port)
    try:
        if not stopped.is_set():
            serve.start(http_options=HTTPOptions(host=host, port=port))
            # without waiting, so that Ctrl-C also ends a fleet that cannot start
            serve.run_many([serve.RunTarget(build(config), name=NAME)], wait_for_applications_running=False)
            try:
                _watch(f"ready: http://{host}:{port}/v1", note, stopped)
            finally:
                serve.delete(NAME)  # waits for open answers
    except KeyboardInterrupt:
        note("ended without waiting for answers")
    finally:
        ray.shutdown()  # also ends a cluster that `_connect` started, and its Serve


def _connect(config: FleetConfig, address: str | None, host: str, port: int) -> None:
    """Start Ray, or join the cluster at an address."""
    if address is None:
        with closing(listen(host, port)):  # Serve would notice a taken port much later, in another process
            pass
    elif ":" in address and "://" not in address:
        _check_reachable(address)
    # Ray starts no more replicas than its CPUs allow: declare enough of them
    replicas = config.most_replicas
    local: Any = {"num_cpus": max(1, round(replicas * config.num_cpus + 1)), "include_dashboard": False}
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # JAX warns of forks; Ray forks only to run other programs
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            ray.init(
                address=address,
                log_to_driver=False,  # they would be a line for each request
                logging_level=logging.ERROR,
                **(local if address is None else {}),
            )
    except Exception as error:  # Ray raises a plain Exception if it does not start in half a minute
        ray.shutdown()
        raise InputError(_no_cluster(address, str(error))) from None
    if address is None and config.num_gpus:
        num_gpus, needed = ray.cluster_resources().get("GPU", 0), replicas * config.num_gpus
        if num_gpus < needed:
            ray.shutdown()
            raise InputError(
                f"--num-gpus {config.num_gpus:g} for {replicas} replicas needs {needed:g} GPUs, and Ray finds "
                f"{num_gpus:g}; take fewer replicas, or a share of a GPU for each, as 0.5"
            )


def _check_reachable(address: str) -> None:
    """Raise InputError if no program listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(_no_cluster(address, str(error))) from None


def _no_cluster(address: str | None, why: str) -> str:
    why = " ".join(why.split())[:300]
    if address is None:
        return f"Ray cannot be started: {why}; more is in /tmp/ray/session_latest/logs; a busy machine may try again"
    return f"--address {address}: {why}; expected a Ray cluster that is running, or leave it out"


def _watch(ready: str, note: Callable[[str], None], stopped: threading.Event) -> None:
    """Note when the fleet is ready and each change of its replicas, until `stopped` is set.

    Raises InputError if it cannot start.
    """
    shown, is_ready = "", False
    while not stopped.wait(POLL_S):
        application = serve.status().applications.get(NAME)
        if application is None:
            continue
        if application.status == "DEPLOY_FAILED":
            why = (application.message.strip() or "without a reason").splitlines()[-1]
            raise InputError(f"the fleet cannot be started: {why}; more is in Ray's logs, /tmp/ray/session_latest/logs")
        if application.status == "RUNNING" and not is_ready:
            is_ready = True
            note(ready)
        line = running(application.deployments)
        if line != shown and is_ready:
            note(line)
        shown = line
    note("ending: waiting for open answers")


def running(deployments: dict[str, Any]) -> str:
    """Describe how many replicas of each deployment are in each state.

    >>> running({})
    'replicas: none'
    """
    parts = [
        f"{name} {', '.join(f'{count} {state.lower()}' for state, count in sorted(deployment.replica_states.items()))}"
        for name, deployment in sorted(deployments.items())
        if name != "Application" and deployment.replica_states
    ]
    return f"replicas: {'; '.join(parts) or 'none'}"
