"""The options of `cluster up`."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from peagle.cli.settings.serve import ApiKeyFile, Host, MaxQueue, ServedModelName
from peagle.cli.settings.shared import (
    ENGINE,
    MACHINE,
    MODEL,
    SERVER,
    SPECULATION,
    Download,
    DrafterWindow,
    LoadOptions,
    MeshOptions,
    RetainFullKV,
    Target,
    kv_memory_option,
    prefix_cache_option,
)

REPLICAS = "Replicas"


@dataclass(frozen=True, kw_only=True)
class ClusterUpSettings:
    """Serve the API of `peagle serve` from several replicas, on Ray Serve.

    By default each replica prefills and decodes. With --prefill N, N more
    replicas prefill and hand the requests over to those that decode, so that a
    long prompt does not delay other responses. Ctrl-C stops all replicas.

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

    target: Target = None
    drafter: Annotated[
        str | None,
        Option(
            "--drafter",
            metavar="DIR|ngram",
            rich_help_panel=MODEL,
            help="P-EAGLE or EAGLE-3 checkpoint; ngram: prompt lookup, without weights. Default: the demo drafter.",
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        Option(
            "-k",
            "--num-speculative-tokens",
            metavar="K",
            rich_help_panel=SPECULATION,
            help="Tokens drafted per step (K); 0: plain decoding. Default: the largest K in the drafter's "
            "speculation.json.",
        ),
    ] = None
    loading: LoadOptions = LoadOptions()
    devices: MeshOptions = MeshOptions()
    drafter_window: DrafterWindow = "auto"
    download: Download = False
    context: Annotated[
        int | None,
        Option(
            "--context",
            metavar="N",
            rich_help_panel=ENGINE,
            help="Context length in tokens: the most of one request, prompt plus response. Default: 4096, or the "
            "model's limit if that is less.",
        ),
    ] = None
    served_model_name: ServedModelName = None
    kv_memory: Annotated[
        str,
        kv_memory_option("the context of every slot, of which 8192 positions count at most. SIZE is that of a replica"),
    ] = "auto"
    prefix_cache: Annotated[str, prefix_cache_option("Of each replica that prefills. Default: on.")] = "on"
    retain_full_kv: RetainFullKV = False
    prefill: Annotated[
        int,
        Option("--prefill", min=0, metavar="N", rich_help_panel=REPLICAS, help="Replicas that only prefill."),
    ] = 0
    decode: Annotated[
        int,
        Option("--decode", min=1, metavar="N", rich_help_panel=REPLICAS, help="Replicas that decode."),
    ] = 1
    max_prefill: Annotated[
        int,
        Option(
            "--max-prefill",
            min=0,
            metavar="N",
            rich_help_panel=REPLICAS,
            help="Scale the replicas that prefill up to N by load; 0: always --prefill.",
        ),
    ] = 0
    max_decode: Annotated[
        int,
        Option(
            "--max-decode",
            min=0,
            metavar="N",
            rich_help_panel=REPLICAS,
            help="Scale the replicas that decode up to N by load; 0: always --decode.",
        ),
    ] = 0
    busy: Annotated[
        int,
        Option(
            "--busy",
            min=0,
            metavar="N",
            rich_help_panel=REPLICAS,
            help="Ongoing requests per replica above which to scale up; 0: --slots, and 2 for replicas that only "
            "prefill.",
        ),
    ] = 0
    scale_up: Annotated[
        float,
        Option(
            "--scale-up",
            min=0,
            metavar="SECONDS",
            rich_help_panel=REPLICAS,
            help="How long the load must be high before replicas start.",
        ),
    ] = 30.0
    scale_down: Annotated[
        float,
        Option(
            "--scale-down",
            min=0,
            metavar="SECONDS",
            rich_help_panel=REPLICAS,
            help="How long the load must be low before replicas stop; --drain lets them finish open responses.",
        ),
    ] = 600.0
    slots: Annotated[
        int,
        Option("--slots", min=1, metavar="N", rich_help_panel=ENGINE, help="Requests decoded at once per replica."),
    ] = 4
    max_queue: MaxQueue = 64
    drain: Annotated[
        int,
        Option(
            "--drain",
            min=0,
            metavar="SECONDS",
            rich_help_panel=SERVER,
            help="Time for a stopping replica to finish open responses.",
        ),
    ] = 30
    host: Host = "127.0.0.1"
    port: Annotated[
        int, Option("--port", min=1, max=65535, metavar="N", rich_help_panel=SERVER, help="Port to listen on.")
    ] = 8000
    api_key_file: ApiKeyFile = None
    write_config: Annotated[
        str | None,
        Option(
            "--write-config",
            metavar="FILE",
            rich_help_panel=SERVER,
            help="Write these options to a file for `serve deploy`, and start nothing.",
        ),
    ] = None
    address: Annotated[
        str | None,
        Option(
            "--address",
            metavar="ADDRESS",
            rich_help_panel=MACHINE,
            help="Running Ray cluster to use; auto: the one on this machine.",
        ),
    ] = None
    num_cpus: Annotated[
        float,
        Option("--num-cpus", min=0, metavar="N", rich_help_panel=MACHINE, help="CPUs per replica, for Ray."),
    ] = 1.0
    num_gpus: Annotated[
        float,
        Option("--num-gpus", min=0, metavar="N", rich_help_panel=MACHINE, help="GPUs per replica, for Ray."),
    ] = 0.0
