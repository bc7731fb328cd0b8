"""The options of `cluster up`."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from peagle.cli.settings.serve import ApiKeyFile, Context, Host, MaxQueue, ServedModelName
from peagle.cli.settings.shared import (
    MODEL,
    RUNNING,
    Download,
    DrafterWindow,
    LoadOptions,
    MeshOptions,
    PrefixCache,
    RetainFullKV,
    Target,
)

SCALING = "Scaling by load"


@dataclass(frozen=True, kw_only=True)
class ClusterUpSettings:
    """Serve with several replicas on Ray Serve.

    Clients see the interface of `peagle serve`. By default each replica prefills and decodes. With --prefill N, N more
    replicas only prefill and hand their prompts over to those that decode, so that long prompts do not delay other
    answers. Ctrl-C stops the cluster.

    Anyone who reaches Ray's ports can run code there: use a trusted network. Without --address, Ray listens on
    loopback, except for one port per replica that Ray Serve opens on all interfaces: put a firewall before it.

    [bold]Examples[/bold]

      two replicas of the demo models   [cyan]peagle cluster up --decode 2[/cyan]
      prefill apart from decoding
        [cyan]peagle cluster up --prefill 1 --decode 2 --target DIR --drafter DIR[/cyan]
      scale with the load
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
            metavar="DIR",
            rich_help_panel=MODEL,
            help="P-EAGLE or EAGLE-3 checkpoint, or ngram. Default: demo.",
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        Option(
            "-k",
            metavar="K",
            rich_help_panel=MODEL,
            help="Draft tokens per step; 0: none. Default: the largest K in the drafter's speculation.json.",
        ),
    ] = None
    loading: LoadOptions = LoadOptions()
    devices: MeshOptions = MeshOptions()
    drafter_window: DrafterWindow = "auto"
    download: Download = False
    context: Context = None
    served_model_name: ServedModelName = None
    prefix_cache: PrefixCache = "auto"
    retain_full_kv: RetainFullKV = False
    prefill: Annotated[
        int,
        Option("--prefill", min=0, metavar="N", rich_help_panel=RUNNING, help="Replicas that only prefill."),
    ] = 0
    decode: Annotated[
        int,
        Option("--decode", min=1, metavar="N", rich_help_panel=RUNNING, help="Replicas that decode."),
    ] = 1
    max_prefill: Annotated[
        int,
        Option(
            "--max-prefill",
            min=0,
            metavar="N",
            rich_help_panel=SCALING,
            help="Most prefill replicas under load. 0: as many as --prefill.",
        ),
    ] = 0
    max_decode: Annotated[
        int,
        Option(
            "--max-decode",
            min=0,
            metavar="N",
            rich_help_panel=SCALING,
            help="Most decoding replicas under load. 0: as many as --decode.",
        ),
    ] = 0
    busy: Annotated[
        int,
        Option(
            "--busy",
            min=0,
            metavar="N",
            rich_help_panel=SCALING,
            help="Ongoing requests per replica above which to scale up. 0: its slots; for prefill replicas, 2.",
        ),
    ] = 0
    scale_up: Annotated[
        float,
        Option(
            "--scale-up",
            min=0,
            metavar="SECONDS",
            rich_help_panel=SCALING,
            help="Load must stay high for this long before scaling up.",
        ),
    ] = 30.0
    scale_down: Annotated[
        float,
        Option(
            "--scale-down",
            min=0,
            metavar="SECONDS",
            rich_help_panel=SCALING,
            help="Load must stay low for this long before scaling down; replicas then have --drain to finish.",
        ),
    ] = 600.0
    slots: Annotated[
        int,
        Option(
            "--slots", min=1, metavar="N", rich_help_panel=RUNNING, help="Most requests decoded at once per replica."
        ),
    ] = 4
    max_queue: MaxQueue = 64
    drain: Annotated[
        int,
        Option(
            "--drain",
            min=0,
            metavar="SECONDS",
            rich_help_panel=RUNNING,
            help="Time a stopping replica has to finish its answers.",
        ),
    ] = 30
    host: Host = "127.0.0.1"
    port: Annotated[
        int, Option("--port", min=1, max=65535, metavar="N", rich_help_panel=RUNNING, help="Port to listen on.")
    ] = 8000
    api_key_file: ApiKeyFile = None
    write_config: Annotated[
        str | None,
        Option(
            "--write-config",
            metavar="FILE",
            rich_help_panel=RUNNING,
            help="Start nothing; write these options to a file for `serve deploy`.",
        ),
    ] = None
    address: Annotated[
        str | None,
        Option(
            "--address",
            metavar="ADDRESS",
            rich_help_panel=RUNNING,
            help="Address of a running Ray cluster; auto: the one on this machine.",
        ),
    ] = None
    num_cpus: Annotated[
        float,
        Option("--num-cpus", min=0, metavar="N", rich_help_panel=RUNNING, help="CPUs that Ray reserves per replica."),
    ] = 1.0
    num_gpus: Annotated[
        float,
        Option("--num-gpus", min=0, metavar="N", rich_help_panel=RUNNING, help="GPUs that Ray assigns per replica."),
    ] = 0.0
