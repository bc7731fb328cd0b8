"""Options of `peagle bench`."""

from dataclasses import dataclass
from typing import Annotated

from peagle.cli.command import Takes
from peagle.cli.flags import JSON
from peagle.config import EngineConfig, LoadConfig
from peagle.ops.flag import OUTPUT, RUNNING, SPECULATION, Flag

DRAFTER = "Drafter for -k: a checkpoint, or ngram. Default: the demo drafter."
TAKEN = Takes(("prefill_chunk", "kv_memory"))
LOADED = Takes(
    (
        *("drafter", "download", "drafter_window", "query_blocks", "ffn_blocks"),
        *("dtype", "experts", "kernels", "mesh", "reduce"),
    ),
    {"drafter": DRAFTER},
)


@dataclass(frozen=True, kw_only=True)
class BenchCommand:
    """Time a target's prefill, decoding and verify passes.

    v(T) is the time of a verify pass over T rows divided by that over one row.
    Drafting K = T - 1 tokens saves time only if a step emits more than v(T) tokens.

    [bold]Examples[/bold]

      the demo target       [cyan]peagle bench[/cyan]
      a checkpoint          [cyan]peagle bench DIR[/cyan]
      decoding only         [cyan]peagle bench DIR -p 0 -t 1 -n 64,256 --context 1024[/cyan]
      batch sizes           [cyan]peagle bench DIR -p 0 -t 1 --slots 1,2,4,8,16,32[/cyan]
      cost of drafting
        [cyan]peagle bench DIR --drafter DIR -p 0 -t 1 --slots 1,4,16 -k 1,3[/cyan]
      for a report          [cyan]peagle bench DIR --markdown - --json OUT.json[/cyan]
    """

    target: Annotated[str | None, Flag(names=("TARGET",))] = None
    """GPT-OSS checkpoint. Default: the demo target."""
    prompt_lengths: Annotated[str, Flag(RUNNING, "N,N", ("-p", "--prompt-lengths"))] = "128,512"
    """Prompt lengths to prefill (pp); 0: none."""
    new_tokens: Annotated[str, Flag(RUNNING, "N,N", ("-n", "--new-tokens"))] = "64"
    """Tokens to decode (tg); 0: none."""
    widths: Annotated[str, Flag(RUNNING, "T,T", ("-t", "--widths"))] = "1,2,4,8"
    """Rows of the verify passes; 1 is always included."""
    context: Annotated[int, Flag(RUNNING, "N")] = 128
    """Tokens in the KV cache before decoding and verifying."""
    slots: Annotated[str, Flag(RUNNING, "N,N")] = "1"
    """Requests decoded at once. With several numbers, decoding is timed with each and with 1, other passes with 1."""
    engine: Annotated[EngineConfig, TAKEN] = EngineConfig()
    num_speculative_tokens: Annotated[str | None, Flag(SPECULATION, "K,K", ("-k", "--num-speculative-tokens"))] = None
    """Also time decoding with K drafts per step, all rejected: the cost of a drafted step."""
    load: Annotated[LoadConfig, LOADED] = LoadConfig()
    repeats: Annotated[int, Flag(RUNNING, "R")] = 5
    """Measurements per test."""
    json: Annotated[str | None, JSON] = None
    markdown: Annotated[str | None, Flag(OUTPUT, "FILE|-")] = None
    """Write the table in Markdown; -: to standard output."""

    def run(self) -> int:
        from peagle.cli.run_bench import time_target

        return time_target(self)
