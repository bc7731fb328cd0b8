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
    Taps,
    Target,
    quiet_option,
)


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """Which drafter is trained. Fields are those of peagle.workflows.training.DrafterShape, as they were typed."""

    init: Annotated[
        str | None,
        Option("--init", metavar="DIR", rich_help_panel=DRAFTER, help="Begin with this drafter, its shape too."),
    ] = None
    aux_layer_ids: AuxLayerIds = None
    autoregressive: Annotated[
        bool,
        Option("--autoregressive", rich_help_panel=DRAFTER, help="An EAGLE-3 drafter: a pass per draft. The baseline."),
    ] = False
    layers: Annotated[
        int | None, Option("--layers", min=1, rich_help_panel=DRAFTER, help="Default: 4; of EAGLE-3, 1.")
    ] = None
    hidden_size: Annotated[
        int | None, Option("--hidden-size", min=1, rich_help_panel=DRAFTER, help="Default: the target's.")
    ] = None
    heads: Annotated[int | None, Option("--heads", min=1, rich_help_panel=DRAFTER, help="Default: the target's.")] = (
        None
    )
    kv_heads: Annotated[
        int | None, Option("--kv-heads", min=1, rich_help_panel=DRAFTER, help="Default: the target's.")
    ] = None
    head_dim: Annotated[
        int | None, Option("--head-dim", min=2, rich_help_panel=DRAFTER, help="Default: the target's.")
    ] = None
    mlp_width: Annotated[
        int | None, Option("--mlp-width", min=1, rich_help_panel=DRAFTER, help="Default: twice the hidden size.")
    ] = None
    taps: Taps = None
    drafter_window: Annotated[
        str,
        Option(
            "--drafter-window",
            metavar="N|auto|off",
            rich_help_panel=DRAFTER,
            help="Its attention sees the last N positions only, in training and after. auto: as --init has, else off.",
        ),
    ] = "auto"
    mask_token: Annotated[
        int | None,
        Option("--mask-token", metavar="ID", rich_help_panel=DRAFTER, help="Default: the highest id not in the data."),
    ] = None
    mask_hiddens: Annotated[
        int,
        Option("--mask-hiddens", min=1, metavar="N", rich_help_panel=DRAFTER, help="1: all mask slots share one."),
    ] = 1
    draft_vocab: Annotated[
        str | None,
        Option(
            "--draft-vocab",
            metavar="N|FILE",
            rich_help_panel=DRAFTER,
            help="Propose only the N tokens most frequent in the data, or those a file lists. Default: all.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Train a drafter for a target on data it wrote: P-EAGLE, or EAGLE-3.

    The folder holds recipe, log, checkpoints and the curve, and at the end the drafter;
    the same command, or --resume, goes on where it was cut off.

    [bold]Examples[/bold]

      an hour             [cyan]peagle train --data DIR --out RUN --minutes 60[/cyan]
      go on, with more    [cyan]peagle train --out RUN --resume --steps 5000[/cyan]
      your own target
        [cyan]peagle train --target DIR --data DIR --out RUN --steps 5000 --layers 4[/cyan]
      watch acceptance
        [cyan]peagle train --data DIR --out RUN --steps 900 --evaluate IN.jsonl[/cyan]
      ten minutes
        [cyan]peagle train --data DIR --out RUN --init DRAFTER --minutes 10[/cyan]
      long prompts
        [cyan]peagle train --data DIR --out RUN --steps 900 --width 8192 \\
          --drafter-window 2048[/cyan]
      the baseline
        [cyan]peagle train --data DIR --out RUN --minutes 60 --autoregressive[/cyan]
    """

    data: Annotated[
        tuple[str, ...],
        Option(
            "--data",
            metavar="DIR[:SHARE]",
            rich_help_panel=DATA,
            help="What peagle data wrote; several, with their shares of a step's rows.",
        ),
    ] = ()
    mix: Annotated[
        str | None,
        Option(
            "--mix",
            metavar="LEN:SHARE,...",
            rich_help_panel=DATA,
            help="Shares of a step's rows by length: documents of up to LEN tokens, as 512:5,2048:2,4096:1.",
        ),
    ] = None
    out: OwnFolder
    resume: Annotated[
        bool,
        Option("--resume", rich_help_panel=RUNNING, help="Go on in --out as begun; more with --steps or --minutes."),
    ] = False
    target: Target = None
    download: Download = False
    steps: Annotated[
        int | None,
        Option("--steps", min=1, rich_help_panel=LEARNING, help="So many; more than it has continue a folder's."),
    ] = None
    minutes: Annotated[
        float | None,
        Option(
            "--minutes",
            rich_help_panel=LEARNING,
            help="At most so long now, from the first step on; plans as many steps as fit, by measured ones.",
        ),
    ] = None
    shape: ShapeOptions = ShapeOptions()
    mesh: Annotated[
        str | None,
        Option(
            "--mesh",
            metavar="dp=N",
            rich_help_panel=RUNNING,
            help="Devices that share the rows of a step; may change when it goes on. Default: as many as divide them.",
        ),
    ] = None
    rows: Annotated[int, Option("--rows", rich_help_panel=LEARNING, help="Of a step, over all devices.")] = 8
    width: Annotated[int, Option("--width", rich_help_panel=LEARNING, help="Tokens of a row.")] = 512
    depth: Annotated[
        int, Option("--depth", rich_help_panel=LEARNING, help="K_train: tokens ahead that are trained.")
    ] = 8
    ratio: Annotated[
        float, Option("--ratio", rich_help_panel=LEARNING, help="Of chains kept from depth to depth (COD).")
    ] = 0.8
    min_ratio: Annotated[float, Option("--min-ratio", rich_help_panel=LEARNING, help="Kept at least.")] = 0.2
    parts: Annotated[
        int | None,
        Option(
            "--parts",
            metavar="N",
            rich_help_panel=LEARNING,
            help="Cut rows in so many: less memory, same gradient. Default: 1; with a window, parts of 512 or more.",
        ),
    ] = None
    loss: Annotated[
        Literal["half", "cross_entropy", "soft_cross_entropy", "kl", "total_variation"],
        Option(
            "--loss",
            rich_help_panel=LEARNING,
            help="half: half the target's distribution, half its best token. total_variation: the share refused "
            "of drafts sampled at temperature 1; begin with a trained drafter.",
        ),
    ] = "half"
    optimizer: Annotated[
        Literal["adamw", "muon"] | None,
        Option(
            "--optimizer",
            rich_help_panel=LEARNING,
            help="Default: muon below 3,000 steps, adamw from there on and with --init; rates and schedule follow it.",
        ),
    ] = None
    learning_rate: Annotated[
        float | None,
        Option("--learning-rate", rich_help_panel=LEARNING, help="Alone, of adamw. Default: as the optimizer needs."),
    ] = None
    other_rate: Annotated[
        float | None, Option("--other-rate", rich_help_panel=LEARNING, help="With muon: of all but matrices.")
    ] = None
    weight_decay: Annotated[float, Option("--weight-decay", rich_help_panel=LEARNING)] = 0.0
    warmup: Annotated[
        float | None, Option("--warmup", rich_help_panel=LEARNING, help="Part of the steps in which the rate rises.")
    ] = None
    decay: Annotated[
        float | None, Option("--decay", rich_help_panel=LEARNING, help="Part of the steps in which it falls.")
    ] = None
    clip: Annotated[
        float | None, Option("--clip", min=0, rich_help_panel=LEARNING, help="Greatest length of a gradient.")
    ] = None
    freeze_embedding: Annotated[
        bool, Option("--freeze-embedding", rich_help_panel=LEARNING, help="Do not train it.")
    ] = False
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Option("--dtype", rich_help_panel=LEARNING, help="Of the arithmetic; weights are float32."),
    ] = "float32"
    seed: Annotated[int, Option("--seed", min=0, rich_help_panel=LEARNING)] = 0
    save_every: Annotated[
        int, Option("--save-every", min=1, metavar="STEPS", rich_help_panel=RUNNING, help="Between checkpoints.")
    ] = 100
    evaluate: Annotated[
        str | None,
        Option(
            "--evaluate",
            metavar="FILE.jsonl",
            rich_help_panel=RUNNING,
            help="Held-out prompts: the engine's own acceptance length on them.",
        ),
    ] = None
    evaluate_every: Annotated[
        int, Option("--evaluate-every", min=0, rich_help_panel=RUNNING, help="Steps between; 0: at the end only.")
    ] = 200
    evaluate_prompts: Annotated[int, Option("--evaluate-prompts", min=1, rich_help_panel=RUNNING)] = 20
    held_out: Annotated[
        float | None,
        Option(
            "--held-out",
            min=0,
            max=0.5,
            metavar="PART",
            rich_help_panel=DATA,
            help="Part of the documents that is not trained on: the step that is best on it is kept. 0: the last step "
            "is. Default: 0.1; with --evaluate the answers to it instead.",
        ),
    ] = None
    strict: Annotated[
        bool,
        Option(
            "--strict",
            rich_help_panel=DATA,
            help="Refuse data of another target, and a row of --evaluate that cannot be used, instead of a warning.",
        ),
    ] = False
    num_speculative_tokens: Annotated[
        int,
        Option(
            "-k",
            "--num-speculative-tokens",
            metavar="K",
            rich_help_panel=RUNNING,
            help="K of the evaluation.",
        ),
    ] = 7
    dialect: Annotated[
        Literal["vllm", "speculators"],
        Option("--dialect", rich_help_panel=OUTPUT, help="Of the drafter that is written."),
    ] = "vllm"
    quiet: Annotated[bool, quiet_option("No progress, no lines of the log, no summary: all is in --out")] = False
