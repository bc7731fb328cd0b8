"""Options of `peagle info`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from peagle.cli.command import Takes
from peagle.config import LoadConfig
from peagle.ops.flag import PLAN, Flag, check_least


@dataclass(frozen=True, kw_only=True)
class Info:
    """Inspect checkpoints: geometry, memory, whether they fit.

    Reads only config.json and the headers of the weights, so it is fast for a
    checkpoint of any size.

    [bold]Examples[/bold]

      the demo models               [cyan]peagle info[/cyan]
      a target or a drafter         [cyan]peagle info DIR[/cyan]
      both, and whether they fit    [cyan]peagle info TARGET DRAFTER[/cyan]
      memory on eight GPUs
        [cyan]peagle info --mesh tp=8 --slots 16 --context 8192 --device H100 DIR[/cyan]
      memory of an engine that only decodes
        [cyan]peagle info TARGET DRAFTER --role decode --slots 8[/cyan]
    """

    directories: Annotated[tuple[str, ...], Flag(names=("DIR",))] = ()
    """Target, drafter, or both; demo, demo-eagle3, demo-dflash: the package's own. Default: demo demo."""
    load: Annotated[LoadConfig, Takes(("aux_layer_ids", "download"))] = LoadConfig()
    role: Annotated[Literal["both", "prefill", "decode"] | None, Flag(PLAN, "ROLE")] = None
    """Also print the cache memory of an engine, and how many tokens fit. prefill: it only prefills prompts; decode: it
    only decodes; both: it does both."""
    mesh: Annotated[str | None, Flag(PLAN, "tp=N,ep=N,dp=N")] = None
    """Also print what each device of this mesh holds of the target. The devices need not be present."""
    slots: Annotated[int | None, Flag(PLAN, "N")] = None
    """Requests decoded at once, 1 or more, over all replicas. Default: one per replica."""
    context: Annotated[int, Flag(PLAN, "N")] = 4096
    """Context length in tokens, 2 or more."""
    device: Annotated[str, Flag(PLAN, "H100|H200|B200")] = "H100"
    """Device of the mesh: its memory and bandwidth."""

    def __post_init__(self) -> None:
        check_least(self, slots=1, context=2)

    def run(self) -> int:
        from peagle.cli.run_info import inspect

        return inspect(self)
