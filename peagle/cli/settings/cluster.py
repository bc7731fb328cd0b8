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
    """Serve a pair by several processes, on Ray Serve: the interface of `peagle serve`.

    By default each replica computes prompts and decodes. With --prefill N, N more replicas compute prompts, and hand
    them over to those that decode, so that a long prompt does not delay the answers of others. Ctrl-C ends all of it.

    Ray's ports run code for whoever reaches them, so a cluster belongs on a trusted network. Without --address they are
    on loopback, but for one port of each replica, which Ray Serve opens to all: keep a firewall before it.

    [bold]Examples[/bold]

      two replicas of the demo pair     [cyan]peagle cluster up --decode 2[/cyan]
      prompts elsewhere than answers
        [cyan]peagle cluster up --prefill 1 --decode 2 --target DIR --drafter DIR[/cyan]
      more replicas while there is much to do
        [cyan]peagle cluster up --decode 1 --max-decode 4 --drain 120[/cyan]
      in a Ray cluster that is running
        [cyan]peagle cluster up --address auto --decode 8 --num-gpus 1[/cyan]
      for Ray Serve's own `serve deploy fleet.json`
        [cyan]peagle cluster up --decode 8 --write-config fleet.json[/cyan]
    """

    target: Target = None
    drafter: Annotated[
        str | None,
        Option("--drafter", metavar="DIR", rich_help_panel=MODEL, help="The drafter, or ngram. Default: the demo's."),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        Option(
            "-k",
            metavar="K",
            rich_help_panel=MODEL,
            help="Tokens drafted in a step; 0: none. Default: the most that the drafter's speculation.json names.",
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
        Option("--prefill", min=0, metavar="N", rich_help_panel=RUNNING, help="Replicas that only compute prompts."),
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
            help="Start up to N replicas that compute prompts while there is much to do. 0: as many as --prefill.",
        ),
    ] = 0
    max_decode: Annotated[
        int,
        Option(
            "--max-decode",
            min=0,
            metavar="N",
            rich_help_panel=SCALING,
            help="Start up to N replicas that decode while there is much to do. 0: as many as --decode.",
        ),
    ] = 0
    busy: Annotated[
        int,
        Option(
            "--busy",
            min=0,
            metavar="N",
            rich_help_panel=SCALING,
            help="Requests of a replica, on average, beyond which there is much to do. 0: its slots; 2 prompts.",
        ),
    ] = 0
    scale_up: Annotated[
        float,
        Option("--scale-up", min=0, metavar="SECONDS", rich_help_panel=SCALING, help="Start more after so long."),
    ] = 30.0
    scale_down: Annotated[
        float,
        Option(
            "--scale-down",
            min=0,
            metavar="SECONDS",
            rich_help_panel=SCALING,
            help="End those that are not needed after so long; they have --drain to end their answers.",
        ),
    ] = 600.0
    slots: Annotated[
        int,
        Option("--slots", min=1, metavar="N", rich_help_panel=RUNNING, help="Requests at once in a replica."),
    ] = 4
    max_queue: MaxQueue = 64
    drain: Annotated[
        int,
        Option(
            "--drain",
            min=0,
            metavar="SECONDS",
            rich_help_panel=RUNNING,
            help="A replica that shall stop may take so long to end its answers.",
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
            help="Start nothing: write these options to a file for `serve deploy`.",
        ),
    ] = None
    address: Annotated[
        str | None,
        Option(
            "--address", metavar="ADDRESS", rich_help_panel=RUNNING, help="A running Ray cluster; auto: the one here."
        ),
    ] = None
    num_cpus: Annotated[
        float,
        Option("--num-cpus", min=0, metavar="N", rich_help_panel=RUNNING, help="CPUs of a replica, for Ray's count."),
    ] = 1.0
    num_gpus: Annotated[
        float,
        Option("--num-gpus", min=0, metavar="N", rich_help_panel=RUNNING, help="GPUs of a replica, for Ray to give."),
    ] = 0.0
