"""The options of `train`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from typer import Option

from peagle.cli.settings.shared import (
    DATA,
    DRAFTER,
    LEARNING,
    OUTPUT,
    RUNNING,
    AuxLayerIds,
    Download,
    OwnFolder,
    Strict,
    Taps,
    Target,
    quiet_option,
)


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """The drafter to train. The fields are those of peagle.workflows.training.DrafterShape, as typed."""

    init: Annotated[
        str | None,
        Option(
            "--init",
            metavar="DIR",
            rich_help_panel=DRAFTER,
            help="Start from this drafter and its shape; demo is the shipped one.",
        ),
    ] = None
    aux_layer_ids: AuxLayerIds = None
    autoregressive: Annotated[
        bool,
        Option(
            "--autoregressive", rich_help_panel=DRAFTER, help="Train an EAGLE-3 drafter, which runs one pass per draft."
        ),
    ] = False
    layers: Annotated[
        int | None, Option("--layers", min=1, rich_help_panel=DRAFTER, help="Layers. Default: 4; for EAGLE-3, 1.")
    ] = None
    hidden_size: Annotated[
        int | None, Option("--hidden-size", min=1, rich_help_panel=DRAFTER, help="Model width. Default: the target's.")
    ] = None
    heads: Annotated[
        int | None, Option("--heads", min=1, rich_help_panel=DRAFTER, help="Query heads. Default: the target's.")
    ] = None
    kv_heads: Annotated[
        int | None, Option("--kv-heads", min=1, rich_help_panel=DRAFTER, help="Key/value heads. Default: the target's.")
    ] = None
    head_dim: Annotated[
        int | None, Option("--head-dim", min=2, rich_help_panel=DRAFTER, help="Width of a head. Default: the target's.")
    ] = None
    mlp_width: Annotated[
        int | None,
        Option("--mlp-width", min=1, rich_help_panel=DRAFTER, help="Width of the MLP. Default: twice the hidden size."),
    ] = None
    taps: Taps = None
    drafter_window: Annotated[
        str,
        Option(
            "--drafter-window",
            metavar="N|auto|off",
            rich_help_panel=DRAFTER,
            help="Limit its attention to the last N positions, in training and after. auto: as in --init, else off.",
        ),
    ] = "auto"
    mask_token: Annotated[
        int | None,
        Option(
            "--mask-token",
            metavar="ID",
            rich_help_panel=DRAFTER,
            help="Token id of the mask. Default: the highest id not in the data.",
        ),
    ] = None
    mask_hiddens: Annotated[
        int,
        Option(
            "--mask-hiddens",
            min=1,
            metavar="N",
            rich_help_panel=DRAFTER,
            help="Hidden states of mask slots; 1: all share one.",
        ),
    ] = 1
    draft_vocab: Annotated[
        str | None,
        Option(
            "--draft-vocab",
            metavar="N|FILE",
            rich_help_panel=DRAFTER,
            help="Draft only the N most frequent tokens of the data, or those a file lists. Default: all.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Train a P-EAGLE or EAGLE-3 drafter on a target's answers.

    The folder holds the recipe, the log, checkpoints, the curve and, at the end, the drafter. The same command, or
    --resume, continues an interrupted run.

    [bold]Examples[/bold]

      an hour             [cyan]peagle train --data DIR --out RUN --minutes 60[/cyan]
      train longer        [cyan]peagle train --out RUN --resume --steps 5000[/cyan]
      your own target
        [cyan]peagle train --target DIR --data DIR --out RUN --steps 5000 --layers 4[/cyan]
      measure acceptance meanwhile
        [cyan]peagle train --data DIR --out RUN --steps 900 --evaluate IN.jsonl[/cyan]
      ten minutes, from a trained drafter
        [cyan]peagle train --data DIR --out RUN --init DRAFTER --minutes 10[/cyan]
      long prompts
        [cyan]peagle train --data DIR --out RUN --steps 900 --width 8192 \\
          --drafter-window 2048[/cyan]
      an EAGLE-3 drafter
        [cyan]peagle train --data DIR --out RUN --minutes 60 --autoregressive[/cyan]
    """

    data: Annotated[
        tuple[str, ...],
        Option(
            "--data",
            metavar="DIR[:SHARE]",
            rich_help_panel=DATA,
            help="Folder of peagle data. Repeatable, with each folder's share of a step's rows.",
        ),
    ] = ()
    mix: Annotated[
        str | None,
        Option(
            "--mix",
            metavar="LEN:SHARE,...",
            rich_help_panel=DATA,
            help="Shares of a step's rows by document length, such as 512:5,2048:2,4096:1.",
        ),
    ] = None
    out: OwnFolder
    resume: Annotated[
        bool,
        Option("--resume", rich_help_panel=RUNNING, help="Resume the run in --out; --steps or --minutes extend it."),
    ] = False
    target: Target = None
    download: Download = False
    steps: Annotated[
        int | None,
        Option(
            "--steps", min=1, rich_help_panel=LEARNING, help="Training steps; a larger number continues a finished run."
        ),
    ] = None
    minutes: Annotated[
        float | None,
        Option(
            "--minutes",
            rich_help_panel=LEARNING,
            help="Time limit from the first step on; the number of steps is planned from measured step times.",
        ),
    ] = None
    shape: ShapeOptions = ShapeOptions()
    mesh: Annotated[
        str | None,
        Option(
            "--mesh",
            metavar="dp=N",
            rich_help_panel=RUNNING,
            help="Devices that share the rows of a step; may differ after a resume. Default: as many as divide them.",
        ),
    ] = None
    rows: Annotated[int, Option("--rows", rich_help_panel=LEARNING, help="Rows per step, over all devices.")] = 8
    width: Annotated[int, Option("--width", rich_help_panel=LEARNING, help="Tokens per row.")] = 512
    depth: Annotated[int, Option("--depth", rich_help_panel=LEARNING, help="Draft positions to train (K_train).")] = 8
    ratio: Annotated[
        float,
        Option("--ratio", rich_help_panel=LEARNING, help="Share of chains kept from each depth to the next (COD)."),
    ] = 0.8
    min_ratio: Annotated[
        float, Option("--min-ratio", rich_help_panel=LEARNING, help="Smallest share of chains to keep.")
    ] = 0.2
    parts: Annotated[
        int | None,
        Option(
            "--parts",
            metavar="N",
            rich_help_panel=LEARNING,
            help="Split rows into N parts: less memory, same gradient. Default: 1; with a window, parts of 512 or "
            "more.",
        ),
    ] = None
    loss: Annotated[
        Literal["half", "cross_entropy", "soft_cross_entropy", "kl", "total_variation"],
        Option(
            "--loss",
            rich_help_panel=LEARNING,
            help="half: half the target's distribution, half its argmax. total_variation: the rejection rate of drafts "
            "sampled at temperature 1; start it from a trained drafter.",
        ),
    ] = "half"
    optimizer: Annotated[
        Literal["adamw", "muon"], Option("--optimizer", rich_help_panel=LEARNING, help="Optimizer of matrices.")
    ] = "adamw"
    learning_rate: Annotated[float, Option("--learning-rate", rich_help_panel=LEARNING, help="Peak learning rate.")] = (
        1e-4
    )
    other_rate: Annotated[
        float | None,
        Option(
            "--other-rate", rich_help_panel=LEARNING, help="With muon: the learning rate of everything but matrices."
        ),
    ] = None
    weight_decay: Annotated[float, Option("--weight-decay", rich_help_panel=LEARNING, help="Weight decay.")] = 0.0
    warmup: Annotated[
        float, Option("--warmup", rich_help_panel=LEARNING, help="Share of the steps in which the learning rate rises.")
    ] = 0.0025
    decay: Annotated[
        float, Option("--decay", rich_help_panel=LEARNING, help="Share of the steps in which the learning rate falls.")
    ] = 1.0
    clip: Annotated[
        float | None, Option("--clip", min=0, rich_help_panel=LEARNING, help="Clip gradients to this norm.")
    ] = None
    freeze_embedding: Annotated[
        bool, Option("--freeze-embedding", rich_help_panel=LEARNING, help="Do not train the embedding.")
    ] = False
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Option("--dtype", rich_help_panel=LEARNING, help="Data type of activations; weights stay float32."),
    ] = "float32"
    seed: Annotated[
        int, Option("--seed", min=0, rich_help_panel=LEARNING, help="Seed of initialization and sampling.")
    ] = 0
    save_every: Annotated[
        int, Option("--save-every", min=1, metavar="STEPS", rich_help_panel=RUNNING, help="Steps between checkpoints.")
    ] = 100
    evaluate: Annotated[
        str | None,
        Option(
            "--evaluate",
            metavar="FILE.jsonl",
            rich_help_panel=RUNNING,
            help="Held-out prompts on which to measure the acceptance length.",
        ),
    ] = None
    evaluate_every: Annotated[
        int,
        Option(
            "--evaluate-every", min=0, rich_help_panel=RUNNING, help="Steps between evaluations; 0: only at the end."
        ),
    ] = 200
    evaluate_prompts: Annotated[
        int, Option("--evaluate-prompts", min=1, rich_help_panel=RUNNING, help="Prompts per evaluation.")
    ] = 20
    strict: Strict = False
    num_speculative_tokens: Annotated[
        int,
        Option(
            "-k",
            "--num-speculative-tokens",
            metavar="K",
            rich_help_panel=RUNNING,
            help="Draft tokens per step of the evaluation.",
        ),
    ] = 7
    dialect: Annotated[
        Literal["vllm", "speculators"],
        Option("--dialect", rich_help_panel=OUTPUT, help="Layout of the drafter to write."),
    ] = "vllm"
    quiet: Annotated[bool, quiet_option("Print no progress, log or summary")] = False
