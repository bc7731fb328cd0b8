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
    """Which drafter is trained. Fields are those of peagle.workflows.training.DrafterShape, as typed."""

    init: Annotated[
        str | None,
        Option(
            "--init", metavar="DIR", rich_help_panel=DRAFTER, help="Start from this drafter: its weights and its shape."
        ),
    ] = None
    aux_layer_ids: AuxLayerIds = None
    autoregressive: Annotated[
        bool,
        Option("--autoregressive", rich_help_panel=DRAFTER, help="Train an EAGLE-3 drafter: one pass per draft."),
    ] = False
    layers: Annotated[
        int | None,
        Option(
            "--layers",
            metavar="N",
            min=1,
            rich_help_panel=DRAFTER,
            help="Decoder layers. Default: 4, or 1 for EAGLE-3.",
        ),
    ] = None
    hidden_size: Annotated[
        int | None,
        Option(
            "--hidden-size", metavar="N", min=1, rich_help_panel=DRAFTER, help="Hidden size. Default: the target's."
        ),
    ] = None
    heads: Annotated[
        int | None,
        Option("--heads", metavar="N", min=1, rich_help_panel=DRAFTER, help="Query heads. Default: the target's."),
    ] = None
    kv_heads: Annotated[
        int | None,
        Option(
            "--kv-heads", metavar="N", min=1, rich_help_panel=DRAFTER, help="Key/value heads. Default: the target's."
        ),
    ] = None
    head_dim: Annotated[
        int | None,
        Option(
            "--head-dim", metavar="N", min=2, rich_help_panel=DRAFTER, help="Size of a head. Default: the target's."
        ),
    ] = None
    mlp_width: Annotated[
        int | None,
        Option(
            "--mlp-width",
            metavar="N",
            min=1,
            rich_help_panel=DRAFTER,
            help="Width of the MLP. Default: twice the hidden size.",
        ),
    ] = None
    taps: Taps = None
    drafter_window: Annotated[
        str,
        Option(
            "--drafter-window",
            metavar="N|auto|off",
            rich_help_panel=DRAFTER,
            help="Sliding window of the drafter's attention, in positions, in training and after. auto: that of "
            "--init, else off.",
        ),
    ] = "auto"
    mask_token: Annotated[
        int | None,
        Option(
            "--mask-token",
            metavar="ID",
            rich_help_panel=DRAFTER,
            help="Token id of the mask slots. Default: the highest id not in the data.",
        ),
    ] = None
    mask_hiddens: Annotated[
        int,
        Option(
            "--mask-hiddens",
            min=1,
            metavar="N",
            rich_help_panel=DRAFTER,
            help="Learned mask_hidden vectors; 1: all mask slots share one.",
        ),
    ] = 1
    draft_vocab: Annotated[
        str | None,
        Option(
            "--draft-vocab",
            metavar="N|FILE",
            rich_help_panel=DRAFTER,
            help="Draft only the N most frequent tokens of the data, or the ids in a JSON list. Default: all.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Train a P-EAGLE or EAGLE-3 drafter.

    Reads the output of peagle data. Writes the recipe, the log, checkpoints and a
    plot of the training, and at the end the drafter. The same command, or
    --resume, resumes after the last checkpoint.

    [bold]Examples[/bold]

      one hour          [cyan]peagle train --data DATA --out RUN --minutes 60[/cyan]
      resume, longer    [cyan]peagle train --out RUN --resume --steps 5000[/cyan]
      your target
        [cyan]peagle train --target DIR --data DATA --out RUN --steps 5000[/cyan]
      from a trained drafter
        [cyan]peagle train --data DATA --out RUN --init DRAFTER --minutes 10[/cyan]
      acceptance length on held-out prompts
        [cyan]peagle train --data DATA --out RUN --steps 900 --evaluate IN.jsonl[/cyan]
      long prompts
        [cyan]peagle train --data DATA --out RUN --steps 900 --width 8192 \\
          --drafter-window 2048[/cyan]
      EAGLE-3
        [cyan]peagle train --data DATA --out RUN --minutes 60 --autoregressive[/cyan]
    """

    data: Annotated[
        tuple[str, ...],
        Option(
            "--data",
            metavar="DIR[:SHARE]",
            rich_help_panel=DATA,
            help="Output of peagle data; repeatable. SHARE: its weight among the rows of a step.",
        ),
    ] = ()
    mix: Annotated[
        str | None,
        Option(
            "--mix",
            metavar="LEN:SHARE,...",
            rich_help_panel=DATA,
            help="Weights among the rows of a step by length of the document: up to LEN tokens, such as "
            "512:5,2048:2,4096:1.",
        ),
    ] = None
    out: OwnFolder
    resume: Annotated[
        bool,
        Option(
            "--resume",
            rich_help_panel=RUNNING,
            help="Resume the training in --out with its own options; --steps or --minutes extend it.",
        ),
    ] = False
    target: Target = None
    download: Download = False
    steps: Annotated[
        int | None,
        Option(
            "--steps",
            metavar="N",
            min=1,
            rich_help_panel=LEARNING,
            help="Training steps; more steps than before extend the training in --out.",
        ),
    ] = None
    minutes: Annotated[
        float | None,
        Option(
            "--minutes",
            metavar="MINUTES",
            rich_help_panel=LEARNING,
            help="Time limit of this run, from its first step on. Without --steps, train for as many steps as fit.",
        ),
    ] = None
    shape: ShapeOptions = ShapeOptions()
    mesh: Annotated[
        str | None,
        Option(
            "--mesh",
            metavar="dp=N",
            rich_help_panel=RUNNING,
            help="Data parallelism: devices that share the rows of a step; may differ after --resume. Default: the "
            "most devices that divide --rows.",
        ),
    ] = None
    rows: Annotated[
        int, Option("--rows", metavar="N", rich_help_panel=LEARNING, help="Rows per step, over all devices.")
    ] = 8
    width: Annotated[int, Option("--width", metavar="N", rich_help_panel=LEARNING, help="Tokens per row.")] = 512
    depth: Annotated[
        int, Option("--depth", metavar="N", rich_help_panel=LEARNING, help="K_train: draft positions that are trained.")
    ] = 8
    ratio: Annotated[
        float,
        Option(
            "--ratio",
            metavar="P",
            rich_help_panel=LEARNING,
            help="Fraction of chains kept from one depth to the next (COD).",
        ),
    ] = 0.8
    min_ratio: Annotated[
        float,
        Option(
            "--min-ratio",
            metavar="P",
            rich_help_panel=LEARNING,
            help="Least fraction of chains kept at any depth (COD).",
        ),
    ] = 0.2
    parts: Annotated[
        int | None,
        Option(
            "--parts",
            metavar="N",
            rich_help_panel=LEARNING,
            help="Split rows into N parts: less memory, the same gradient. Default: 1; with --drafter-window, parts of "
            "512 tokens or more.",
        ),
    ] = None
    loss: Annotated[
        Literal["half", "cross_entropy", "soft_cross_entropy", "kl", "total_variation"],
        Option(
            "--loss",
            metavar="LOSS",
            rich_help_panel=LEARNING,
            help="cross_entropy: with the token in the data; soft_cross_entropy or kl: with the target's distribution; "
            "half: half soft_cross_entropy, half cross-entropy with the target's best token; total_variation: the "
            "distance of the two distributions at temperature 1, to be used with --init.",
        ),
    ] = "half"
    optimizer: Annotated[
        Literal["adamw", "muon"] | None,
        Option(
            "--optimizer",
            metavar="NAME",
            rich_help_panel=LEARNING,
            help="adamw; or muon for the layers' matrices, with Adam for the rest. Default: muon below 3,000 steps; "
            "adamw from there on and with --init. Rates and schedule follow it.",
        ),
    ] = None
    learning_rate: Annotated[
        float | None,
        Option(
            "--learning-rate",
            metavar="X",
            rich_help_panel=LEARNING,
            help="Peak learning rate; given alone, of adamw. Default: by the optimizer.",
        ),
    ] = None
    other_rate: Annotated[
        float | None,
        Option(
            "--other-rate",
            metavar="X",
            rich_help_panel=LEARNING,
            help="With muon: peak learning rate of embedding, head, norms and mask_hidden. Default: --learning-rate.",
        ),
    ] = None
    weight_decay: Annotated[
        float, Option("--weight-decay", metavar="X", rich_help_panel=LEARNING, help="Weight decay.")
    ] = 0.0
    warmup: Annotated[
        float | None,
        Option(
            "--warmup",
            metavar="P",
            rich_help_panel=LEARNING,
            help="Fraction of the steps in which the learning rate rises, at the start. Default: by the optimizer.",
        ),
    ] = None
    decay: Annotated[
        float | None,
        Option(
            "--decay",
            metavar="P",
            rich_help_panel=LEARNING,
            help="Fraction of the steps in which it falls, at the end. Default: by the optimizer.",
        ),
    ] = None
    clip: Annotated[
        float | None,
        Option(
            "--clip", metavar="X", min=0, rich_help_panel=LEARNING, help="Maximum gradient norm. Default: no clipping."
        ),
    ] = None
    freeze_embedding: Annotated[
        bool, Option("--freeze-embedding", rich_help_panel=LEARNING, help="Do not train the embedding.")
    ] = False
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Option(
            "--dtype",
            metavar="DTYPE",
            rich_help_panel=LEARNING,
            help="Compute in float32 or bfloat16; weights and optimiser stay float32.",
        ),
    ] = "float32"
    seed: Annotated[int, Option("--seed", metavar="S", min=0, rich_help_panel=LEARNING, help="Random seed.")] = 0
    save_every: Annotated[
        int, Option("--save-every", min=1, metavar="STEPS", rich_help_panel=RUNNING, help="Steps between checkpoints.")
    ] = 100
    evaluate: Annotated[
        str | None,
        Option(
            "--evaluate",
            metavar="FILE.jsonl",
            rich_help_panel=RUNNING,
            help="Held-out prompts: measure the acceptance length on them with the engine.",
        ),
    ] = None
    evaluate_every: Annotated[
        int,
        Option(
            "--evaluate-every",
            metavar="STEPS",
            min=0,
            rich_help_panel=RUNNING,
            help="Steps between evaluations; 0: only at the end.",
        ),
    ] = 200
    evaluate_prompts: Annotated[
        int,
        Option(
            "--evaluate-prompts",
            metavar="N",
            min=1,
            rich_help_panel=RUNNING,
            help="Prompts of an evaluation: the first N.",
        ),
    ] = 20
    held_out: Annotated[
        float | None,
        Option(
            "--held-out",
            min=0,
            max=0.5,
            metavar="P",
            rich_help_panel=DATA,
            help="Fraction of the documents to hold out; the step that is best on them is kept. 0 keeps the last step. "
            "Default: 0.1; with --evaluate, its prompts are held out instead.",
        ),
    ] = None
    strict: Annotated[
        bool,
        Option(
            "--strict",
            rich_help_panel=DATA,
            help="Refuse data of another target and unusable rows of --evaluate, instead of warning.",
        ),
    ] = False
    num_speculative_tokens: Annotated[
        int,
        Option(
            "-k",
            "--num-speculative-tokens",
            metavar="K",
            rich_help_panel=RUNNING,
            help="Tokens drafted per step (K) in evaluations.",
        ),
    ] = 7
    dialect: Annotated[
        Literal["vllm", "speculators"],
        Option(
            "--dialect",
            metavar="LAYOUT",
            rich_help_panel=OUTPUT,
            help="Layout of the trained drafter: vllm or speculators.",
        ),
    ] = "vllm"
    quiet: Annotated[bool, quiet_option("Hide progress, log and summary; they are in --out")] = False
