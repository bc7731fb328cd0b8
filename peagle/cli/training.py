"""The commands that make drafters: `peagle data`, `peagle train` and `peagle export`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.app import (
    OUTPUT,
    PROMPT,
    RUNNING,
    SLOTS_HELP,
    AuxLayerIds,
    Batch,
    Date,
    Dtype,
    DtypeOption,
    Experts,
    ExpertsOption,
    Kernels,
    KernelsOption,
    Quiet,
    RawPrompt,
    ReasoningEffort,
    Seed,
    SpecialTokens,
    Strict,
    System,
    Target,
    Temperature,
    TopK,
    TopP,
    app,
    chosen_slots,
    guarded,
)
from peagle.cli.settings import DataSettings, ExportSettings, TrainSettings, parse_layers
from peagle.ops.errors import InputError

DATA_HELP = """
Have a target answer prompts, and keep what it said as training data for its drafter.

The folder is made of shards, each whole or absent: the same command goes on where it was cut off.

[bold]Examples[/bold]

  greedy answers         [cyan]peagle data --prompt-file IN.jsonl --out DIR[/cyan]
  of your own target     [cyan]peagle data --target DIR --prompt-file IN.jsonl --out DIR -n 512[/cyan]
  with what it thought   [cyan]peagle data --prompt-file IN.jsonl --out DIR --hidden --top 32[/cyan]
"""
TRAIN_HELP = """
Train a drafter for a target on data it wrote: P-EAGLE, or EAGLE-3.

The folder holds recipe, log, checkpoints and the curve, and at the end the drafter;
the same command goes on where it was cut off.

[bold]Examples[/bold]

  an hour             [cyan]peagle train --data DIR --out RUN --minutes 60[/cyan]
  and 2000 more       [cyan]peagle train --data DIR --out RUN --steps 5000[/cyan]
  your own target     [cyan]peagle train --target DIR --data DIR --out RUN --steps 5000 --layers 4[/cyan]
  watch acceptance    [cyan]peagle train --data DIR --out RUN --steps 900 --evaluate IN.jsonl[/cyan]
  the baseline        [cyan]peagle train --data DIR --out RUN --minutes 60 --autoregressive[/cyan]
"""

EXPORT_HELP = """
Write a drafter in the layout of vLLM or of the speculators package, with a model card.

[bold]Examples[/bold]

  for speculators   [cyan]peagle export RUN/drafter --out DIR --dialect speculators --verifier openai/gpt-oss-20b[/cyan]
  for vLLM          [cyan]peagle export DIR --out OTHER --verifier openai/gpt-oss-20b[/cyan]
"""

DRAFTER, LEARNING, DATA = "Drafter", "Learning", "Data"


class Loss(StrEnum):
    half = "half"
    cross_entropy = "cross_entropy"
    soft_cross_entropy = "soft_cross_entropy"
    kl = "kl"


class Optimizer(StrEnum):
    adamw = "adamw"
    muon = "muon"


class Dialect(StrEnum):
    vllm = "vllm"
    speculators = "speculators"


Out = Annotated[
    str, typer.Option("--out", metavar="DIR", rich_help_panel=OUTPUT, help="Folder to write; goes on with its own.")
]
Taps = Annotated[
    str | None,
    typer.Option(
        "--taps",
        metavar="L,L,L",
        rich_help_panel=DRAFTER,
        help="Target's layers whose outputs the drafter reads, from 0. Default: 1, n/2 - 1, n - 4.",
    ),
]


@app.command(help=DATA_HELP)
def data(
    prompt_file: Annotated[
        list[Path],
        typer.Option(
            "--prompt-file", metavar="FILE.jsonl", rich_help_panel=PROMPT, help="JSON lines; may be given repeatedly."
        ),
    ],
    out: Out,
    target: Target = None,
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", min=1, metavar="N", rich_help_panel=PROMPT, help="So many at most.")
    ] = None,
    strict: Strict = False,
    raw_prompt: RawPrompt = False,
    special_tokens: SpecialTokens = False,
    system: System = None,
    reasoning_effort: ReasoningEffort = None,
    date: Date = None,
    max_new_tokens: Annotated[
        int, typer.Option("-n", "--max-new-tokens", metavar="N", rich_help_panel=RUNNING, help="Of an answer.")
    ] = 256,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            metavar="N",
            rich_help_panel=RUNNING,
            help="Prompt and answer together; a prompt that leaves no room is skipped. Default: what the model has.",
        ),
    ] = 512,
    slots: Annotated[
        int | None,
        typer.Option("--slots", metavar="N", rich_help_panel=RUNNING, help=f"{SLOTS_HELP} Default: 32."),
    ] = None,
    batch: Batch = None,
    shard_prompts: Annotated[
        int, typer.Option("--shard-prompts", metavar="N", rich_help_panel=OUTPUT, help="Prompts of a shard.")
    ] = 512,
    hidden: Annotated[
        bool,
        typer.Option(
            "--hidden",
            rich_help_panel=OUTPUT,
            help="Keep the taps of every token, too (large).",
        ),
    ] = False,
    top: Annotated[
        int,
        typer.Option(
            "--top",
            metavar="N",
            rich_help_panel=OUTPUT,
            help="Keep the target's N best behind every token.",
        ),
    ] = 0,
    taps: Taps = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    dtype: DtypeOption = None,
    experts: ExpertsOption = Experts.auto,
    kernels: KernelsOption = Kernels.auto,
    quiet: Quiet = False,
) -> int:
    def run() -> int:
        settings = DataSettings(
            target=target,
            prompt_files=tuple(prompt_file),
            out=out,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            context=context,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            slots=chosen_slots(slots, batch, 32),
            shard_prompts=shard_prompts,
            hidden=hidden,
            top=top,
            taps=parse_layers(taps, "--taps"),
            strict=strict,
            raw_prompt=raw_prompt,
            special_tokens=special_tokens,
            system=system,
            reasoning_effort=reasoning_effort and reasoning_effort.value,
            date=date,
            dtype=dtype and dtype.value,
            experts=experts.value,
            kernels=kernels.value,
            quiet=quiet,
        )
        from peagle.cli.data import data_command

        return data_command(settings)

    return guarded(run)


@app.command(help=TRAIN_HELP)
def train(
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            metavar="DIR[:SHARE]",
            rich_help_panel=DATA,
            help="What peagle data wrote; several, with their shares of a step's rows.",
        ),
    ],
    out: Out,
    target: Target = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, rich_help_panel=LEARNING, help="So many; more than it has continue a folder's."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            rich_help_panel=LEARNING,
            help="At most so long now, without evaluations; plans a new training's steps, by a measured one.",
        ),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option("--init", metavar="DIR", rich_help_panel=DRAFTER, help="Begin with this drafter, its shape too."),
    ] = None,
    aux_layer_ids: AuxLayerIds = None,
    autoregressive: Annotated[
        bool,
        typer.Option(
            "--autoregressive", rich_help_panel=DRAFTER, help="An EAGLE-3 drafter: a pass per draft. The baseline."
        ),
    ] = False,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, rich_help_panel=DRAFTER, help="Default: 4; of EAGLE-3, 1.")
    ] = None,
    hidden_size: Annotated[
        int | None, typer.Option("--hidden-size", min=1, rich_help_panel=DRAFTER, help="Default: the target's.")
    ] = None,
    heads: Annotated[
        int | None, typer.Option("--heads", min=1, rich_help_panel=DRAFTER, help="Default: the target's.")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", min=1, rich_help_panel=DRAFTER, help="Default: the target's.")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", min=2, rich_help_panel=DRAFTER, help="Default: the target's.")
    ] = None,
    mlp_width: Annotated[
        int | None, typer.Option("--mlp-width", min=1, rich_help_panel=DRAFTER, help="Default: twice the hidden size.")
    ] = None,
    taps: Taps = None,
    mask_token: Annotated[
        int | None,
        typer.Option(
            "--mask-token", metavar="ID", rich_help_panel=DRAFTER, help="Default: the highest id the data never uses."
        ),
    ] = None,
    mask_hiddens: Annotated[
        int,
        typer.Option(
            "--mask-hiddens", min=1, metavar="N", rich_help_panel=DRAFTER, help="1: all mask slots share one."
        ),
    ] = 1,
    draft_vocab: Annotated[
        str | None,
        typer.Option(
            "--draft-vocab",
            metavar="N|FILE",
            rich_help_panel=DRAFTER,
            help="Propose only the N tokens most frequent in the data, or those a file lists. Default: all.",
        ),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", rich_help_panel=LEARNING, help="Of a step, over all devices.")] = 8,
    width: Annotated[int, typer.Option("--width", rich_help_panel=LEARNING, help="Tokens of a row.")] = 512,
    depth: Annotated[
        int, typer.Option("--depth", rich_help_panel=LEARNING, help="K_train: tokens ahead that are trained.")
    ] = 8,
    ratio: Annotated[
        float, typer.Option("--ratio", rich_help_panel=LEARNING, help="Of chains kept from depth to depth (COD).")
    ] = 0.8,
    min_ratio: Annotated[float, typer.Option("--min-ratio", rich_help_panel=LEARNING, help="Kept at least.")] = 0.2,
    parts: Annotated[
        int,
        typer.Option("--parts", rich_help_panel=LEARNING, help="Cut rows in so many: less memory, same gradient."),
    ] = 1,
    loss: Annotated[Loss, typer.Option("--loss", rich_help_panel=LEARNING)] = Loss.half,
    optimizer: Annotated[Optimizer, typer.Option("--optimizer", rich_help_panel=LEARNING)] = Optimizer.adamw,
    learning_rate: Annotated[float, typer.Option("--learning-rate", rich_help_panel=LEARNING)] = 1e-4,
    other_rate: Annotated[
        float | None,
        typer.Option("--other-rate", rich_help_panel=LEARNING, help="With muon: of all but matrices."),
    ] = None,
    weight_decay: Annotated[float, typer.Option("--weight-decay", rich_help_panel=LEARNING)] = 0.0,
    warmup: Annotated[
        float, typer.Option("--warmup", rich_help_panel=LEARNING, help="Part of the steps in which the rate rises.")
    ] = 0.0025,
    decay: Annotated[
        float, typer.Option("--decay", rich_help_panel=LEARNING, help="Part of the steps in which it falls.")
    ] = 1.0,
    clip: Annotated[
        float | None, typer.Option("--clip", min=0, rich_help_panel=LEARNING, help="Greatest length of a gradient.")
    ] = None,
    freeze_embedding: Annotated[
        bool, typer.Option("--freeze-embedding", rich_help_panel=LEARNING, help="Do not train it.")
    ] = False,
    dtype: Annotated[
        Dtype, typer.Option("--dtype", rich_help_panel=LEARNING, help="Of the arithmetic; weights are float32.")
    ] = Dtype.float32,
    seed: Annotated[int, typer.Option("--seed", min=0, rich_help_panel=LEARNING)] = 0,
    save_every: Annotated[
        int, typer.Option("--save-every", min=1, metavar="STEPS", rich_help_panel=RUNNING, help="Between checkpoints.")
    ] = 100,
    evaluate: Annotated[
        str | None,
        typer.Option(
            "--evaluate",
            metavar="FILE.jsonl",
            rich_help_panel=RUNNING,
            help="Held-out prompts: the engine's own acceptance length on them.",
        ),
    ] = None,
    evaluate_every: Annotated[
        int,
        typer.Option("--evaluate-every", min=0, rich_help_panel=RUNNING, help="Steps between; 0: at the end only."),
    ] = 200,
    evaluate_prompts: Annotated[int, typer.Option("--evaluate-prompts", min=1, rich_help_panel=RUNNING)] = 20,
    strict: Strict = False,
    num_speculative_tokens: Annotated[
        int, typer.Option("-k", "--num-speculative-tokens", min=1, rich_help_panel=RUNNING, help="K of the evaluation.")
    ] = 7,
    dialect: Annotated[
        Dialect, typer.Option("--dialect", rich_help_panel=OUTPUT, help="Of the drafter that is written.")
    ] = Dialect.vllm,
    quiet: Quiet = False,
) -> int:
    def run() -> int:
        settings = TrainSettings(
            target=target,
            data=tuple(data),
            out=out,
            steps=steps,
            minutes=minutes,
            init=init,
            autoregressive=autoregressive,
            layers=layers,
            hidden_size=hidden_size,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            mlp_width=mlp_width,
            taps=parse_layers(taps, "--taps"),
            mask_token=mask_token,
            mask_hiddens=mask_hiddens,
            draft_vocab=draft_vocab,
            rows=rows,
            width=width,
            depth=depth,
            ratio=ratio,
            min_ratio=min_ratio,
            parts=parts,
            loss=loss.value,
            optimizer=optimizer.value,
            learning_rate=learning_rate,
            other_rate=other_rate,
            weight_decay=weight_decay,
            warmup=warmup,
            decay=decay,
            clip=clip,
            freeze_embedding=freeze_embedding,
            dtype=dtype.value,
            seed=seed,
            save_every=save_every,
            evaluate=evaluate,
            evaluate_every=evaluate_every,
            evaluate_prompts=evaluate_prompts,
            strict=strict,
            num_speculative_tokens=num_speculative_tokens,
            dialect=dialect.value,
            quiet=quiet,
            aux_layer_ids=aux_layer_ids,
        )
        try:
            from peagle.cli.train import train_command
        except ModuleNotFoundError as error:
            raise InputError(
                f"training needs {error.name}, which is not installed; pip install 'peagle[train]'"
            ) from None
        return train_command(settings)

    return guarded(run)


@app.command(help=EXPORT_HELP)
def export(
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="Directory, of any dialect; or demo.")],
    out: Annotated[str, typer.Option("--out", metavar="DIR", rich_help_panel=OUTPUT, help="New folder to write.")],
    dialect: Annotated[
        Dialect, typer.Option("--dialect", rich_help_panel=OUTPUT, help="Whose layout to write.")
    ] = Dialect.vllm,
    verifier: Annotated[
        str | None,
        typer.Option(
            "--verifier",
            metavar="NAME|DIR",
            rich_help_panel=OUTPUT,
            help="The target, as others are to find it; speculators needs it. A folder gives what the drafter lacks, "
            "too: positions, embedding, head.",
        ),
    ] = None,
    aux_layer_ids: AuxLayerIds = None,
    quiet: Quiet = False,
) -> int:
    def run() -> int:
        from peagle.cli.export import export_command

        return export_command(ExportSettings(drafter, out, dialect.value, verifier, quiet, aux_layer_ids))

    return guarded(run)
