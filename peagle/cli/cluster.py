"""`peagle cluster up`: a fleet on Ray Serve, until Ctrl-C or SIGTERM."""

import os
import signal
import threading
from typing import Any

from peagle.cli.display import Display
from peagle.cli.options import needing
from peagle.cli.output import OutputFile
from peagle.cli.serving import default_name, guarded_hosts, read_keys, warn_of_strangers
from peagle.cli.settings.cluster import ClusterUpSettings
from peagle.cli.settings.shared import parse_kept_prefixes, parse_kv_memory
from peagle.loading import (
    DEMO,
    DEMO_EAGLE3,
    asked_window,
    check_fit,
    drafter_path,
    or_demo,
    resolve,
    widths_of,
    without_weights,
)
from peagle.ops import interrupt
from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps
from peagle.parallel import refuse_replicas

# Ray's switch to listen on loopback only; it must be set before Ray is imported
LOOPBACK_ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
DEFAULT_CONTEXT = 4096  # positions of a request, if the model has as many: the memory of replicas is not known here
REPORTS = "RAY_USAGE_STATS_ENABLED"  # usage reports to Ray's makers


def keep_to_itself() -> None:
    """Let the Ray that this process starts listen on loopback and send no usage reports, unless the user decides."""
    for name in (LOOPBACK_ALONE, REPORTS):
        os.environ.setdefault(name, "0")


def up_command(settings: ClusterUpSettings) -> int:
    """Run a fleet and return the exit code.

    Raises InputError, before anything is started, for options that cannot be used, and without Ray.
    """
    arguments = fleet_arguments(settings)
    if settings.write_config is not None:
        write_config(OutputFile(settings.write_config, "--write-config"), settings, arguments)
        return 0
    if settings.address is None:
        keep_to_itself()
    with needing("a cluster needs", "cluster"):
        from peagle.cluster.start import run
    warn_of_strangers(settings.host, settings.api_key_file)
    stopped = threading.Event()

    pressed = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: Any) -> None:
        if stopped.is_set():  # the second time: without waiting for answers
            raise KeyboardInterrupt
        stopped.set()
        if number == signal.SIGINT and callable(pressed):
            pressed(number, frame)
            interrupt.forget()  # or the second press would end this process alone, and leave Ray's

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    display = Display(text=False, quiet=False, total=1, streaming=True)
    display.note(f"starting {settings.prefill + settings.decode} replicas; each loads the pair and compiles")
    run(arguments, settings.address, settings.host, settings.port, display.note, stopped)
    return 0


def write_config(file: OutputFile, settings: ClusterUpSettings, arguments: dict[str, Any]) -> None:
    """Write the config of `serve deploy`, in JSON, which is YAML. Raises InputError for keys, which it would hold."""
    if settings.api_key_file is not None:
        raise InputError("--write-config would write the keys of --api-key-file as plain text; give one of the two")
    application = {"name": "peagle", "import_path": "peagle.cluster.deployments:build", "args": arguments}
    config = {"http_options": {"host": settings.host, "port": settings.port}, "applications": [application]}
    file.write(dumps(config, indent=1) + "\n")


def fleet_arguments(settings: ClusterUpSettings) -> dict[str, Any]:
    """Make the fields of peagle.cluster.deployments.FleetConfig. Raises InputError for models that do not fit."""
    target, k = or_demo(settings.target), settings.num_speculative_tokens
    drafter = None if k == 0 else or_demo(settings.drafter)
    directory, beside = resolve(target, "target"), drafter_path(target, drafter)
    pair = without_weights(target)
    asked_window(beside, settings.drafter_window)
    refuse_replicas(settings.devices.mesh, "the replicas of a cluster are --decode N")
    if beside is not None:
        check_fit(directory, beside)
    if k is None:
        k = widths_of(drafter, beside).most
    keys = () if settings.api_key_file is None else read_keys(settings.api_key_file)
    context = min(DEFAULT_CONTEXT, pair.max_positions) if settings.context is None else pair.room(settings.context)
    kv_memory_bytes, kept = parse_kv_memory(settings.kv_memory), parse_kept_prefixes(settings.prefix_cache)
    # refuse here what no replica could run
    pair.engine_config(k, context=context, slots=settings.slots, kv_memory=kv_memory_bytes)
    # replicas run in directories of their own
    return {
        "target": target if target == DEMO else str(directory.resolve()),
        "drafter": drafter if beside is None or drafter in (DEMO, DEMO_EAGLE3) else str(beside.resolve()),
        "name": settings.served_model_name or default_name(target),
        "prefill": settings.prefill,
        "decode": settings.decode,
        "max_prefill": settings.max_prefill,
        "max_decode": settings.max_decode,
        "busy": settings.busy,
        "scale_up_s": settings.scale_up,
        "scale_down_s": settings.scale_down,
        "num_speculative_tokens": k,
        "slots": settings.slots,
        "context": context,
        "max_queue": settings.max_queue,
        "drain_s": settings.drain,
        "kv_memory_bytes": kv_memory_bytes,
        "prefix_cache_bytes": kept,
        "dtype": settings.loading.dtype,
        "experts": settings.loading.experts,
        "kernels": settings.loading.kernels,
        "drafter_window": settings.drafter_window,
        "mesh": settings.devices.mesh,
        "reduce": settings.devices.reduce,
        "retain_full_kv": settings.retain_full_kv,
        "keys": keys,
        "hosts": guarded_hosts(settings.host, keys),
        "num_cpus": settings.num_cpus,
        "num_gpus": settings.num_gpus,
    }
