"""Start Ray, if none is running, and a fleet on it; end both."""

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

from peagle.cluster.config import FleetConfig
from peagle.cluster.deployments import build
from peagle.ops.errors import InputError
from peagle.serve.server import listen

NAME = "peagle"
LOOKS_S = 0.5  # between looks at what runs
REACHED_S = 5.0  # an address of a cluster must answer in so long; Ray itself tries for minutes


def run(
    config: FleetConfig,
    address: str | None,
    host: str,
    port: int,
    note: Callable[[str], None],
    stopped: threading.Event,
) -> None:
    """Run a fleet until `stopped` is set, then wait for its answers, but for a KeyboardInterrupt.

    note: called with a line at each change of what runs.
    address: of a Ray cluster; None: one is started on this machine. A cluster that was running keeps Serve and what
    others serve there. Raises InputError for an address at which there is no cluster, and if no replica can be started.
    """
    _connect(config, address, host, port)
    try:
        if not stopped.is_set():
            serve.start(http_options=HTTPOptions(host=host, port=port))
            # without waiting: what can never be started must not keep Ctrl-C from ending it
            serve.run_many([serve.RunTarget(build(config), name=NAME)], wait_for_applications_running=False)
            try:
                _watch(f"ready: http://{host}:{port}/v1", note, stopped)
            finally:
                serve.delete(NAME)  # the HTTP proxy stays until answers have ended
    except KeyboardInterrupt:
        note("ended without waiting for answers")
    finally:
        ray.shutdown()  # ends what was started here, Serve with it


def _connect(config: FleetConfig, address: str | None, host: str, port: int) -> None:
    """Start Ray, or join the cluster at an address."""
    if address is None:
        with closing(listen(host, port)):  # Serve finds out in another process, much later
            pass
    elif ":" in address and "://" not in address:
        _expect_reached(address)
    # Ray reckons with CPUs, and starts nothing beyond them: its own machine is said to have enough
    replicas = config.most_replicas
    local: Any = {"num_cpus": max(1, round(replicas * config.num_cpus + 1)), "include_dashboard": False}
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Ray's processes are other programs: nothing of JAX runs in the moment before they begin
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            ray.init(
                address=address,
                log_to_driver=False,  # a line for each request
                logging_level=logging.ERROR,
                **(local if address is None else {}),
            )
    except Exception as error:  # a bare one where the machine is too busy to start Ray in its half minute
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


def _expect_reached(address: str) -> None:
    """Raise InputError if nobody listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACHED_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(_no_cluster(address, str(error))) from None


def _no_cluster(address: str | None, why: str) -> str:
    why = " ".join(why.split())[:300]
    if address is None:
        return f"Ray cannot be started: {why}; more is in /tmp/ray/session_latest/logs; a busy machine may try again"
    return f"--address {address}: {why}; expected a Ray cluster that is running, or leave it out"


def _watch(ready: str, note: Callable[[str], None], stopped: threading.Event) -> None:
    """Note when the fleet is ready, and each change of what runs, until `stopped` is set.

    Raises InputError if it cannot be started.
    """
    shown, answers = "", False
    while not stopped.wait(LOOKS_S):
        application = serve.status().applications.get(NAME)
        if application is None:
            continue
        if application.status == "DEPLOY_FAILED":
            why = (application.message.strip() or "without a reason").splitlines()[-1]
            raise InputError(f"the fleet cannot be started: {why}; more is in Ray's logs, /tmp/ray/session_latest/logs")
        if application.status == "RUNNING" and not answers:
            answers = True
            note(ready)
        line = running(application.deployments)
        if line != shown and answers:
            note(line)
        shown = line
    note("ending: answers are waited for")


def running(deployments: dict[str, Any]) -> str:
    """Describe how many replicas of each deployment run, or start, or stop.

    >>> running({})
    'replicas: none'
    """
    parts = [
        f"{name} {', '.join(f'{count} {state.lower()}' for state, count in sorted(deployment.replica_states.items()))}"
        for name, deployment in sorted(deployments.items())
        if name != "Application" and deployment.replica_states
    ]
    return f"replicas: {'; '.join(parts) or 'none'}"
