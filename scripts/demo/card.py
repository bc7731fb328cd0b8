"""Write the demo pair's card, peagle/demo/README.md, from the records of a build and of sweeps.

    python -m scripts.demo.card --work DIR [--sweep results/RUN ...]
    python -m scripts.demo.card --sweep results/RUN ...          # its acceptance anew, the rest unchanged

A sweep is given by its own folder or by what scripts.publish made of it.

Every figure in it comes from those records or is measured here (the held-out losses of what ships).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import peagle  # noqa: F401  (before anything starts JAX)
from peagle.measure.pages import Block, Table, markdown
from peagle.measure.sweep import page as sweep_page
from peagle.measure.sweep.plan import AUTO, Setting
from scripts.demo.build import DEMO
from scripts.demo.practice import GOOD, LOOPING
from scripts.demo.train_target import SEED, Rows, evaluate
from scripts.runs import Json, at_largest_k, new_parser
from target.load import LoadedTarget, inspect_target, load_target

TRAININGS = ("drafter_begun", "drafter", "drafter_eagle3", "drafter_dflash_begun", "drafter_dflash")
SETTING = ("prompts", "raw", "temperature")
SHOWN = (3, 7, AUTO)  # K of a sweep; the runs' pages have all
ACCEPTANCE, LIMITS = "\n## Acceptance\n\n", "\n\n## Limits\n"  # what the figures of a sweep stand between
CARD = """\
# The demo pair

A GPT-OSS-architecture target, its P-EAGLE drafter, an EAGLE-3 and a DFlash to compare with, small enough to ship
({megabytes:.1f} MB) and to train on two CPU cores. It answers three kinds of questions about Python functions: the user
gives a signature with its docstring, and it writes the function; or gives a function, and it makes a small change
(renames a parameter or the function, removes the docstring, puts it into a class), or describes it (what it takes,
calls, raises, returns). Raw continuation of Python source works, too. It is a demonstration of the toolkit, not a
useful programmer.

- Target: {target_parameters:.2f} M parameters; hidden {hidden}, {layers} layers (sliding window {window} / full),
  {heads} query and {kv_heads} key/value heads of {head_dim}, {experts} experts top-{top_k} of width {expert_width},
  vocabulary {vocab}. Experts MXFP4, the rest bfloat16.
- Drafter (`demo`): P-EAGLE, {drafter_layers} layers of the same width, taps at the outputs of layers {taps}; bfloat16.
- Drafters to compare with: `demo-eagle3`, autoregressive EAGLE-3, 1 layer, the same taps; `demo-dflash`, DFlash, 2
  layers, the same taps, blocks of 8.
- Tokenizer: byte-level BPE with a harmony-style chat template.
- Licence of the text: the Python Software Foundation License and those of the packages below.

## Data

{counts[raw_train]} source files ({raw_megabytes:.1f} MB) and {counts[chat_train]} functions as chat, each as one of
the three tasks, from Python's standard library and these packages: {packages}.

Held out, whole: the standard library's {num_held_out} modules {held_out}. `heldout_prompts.jsonl` are
{counts[heldout_prompts]} functions of them; no training function has a held-out function's body.

## Recipe and losses

Target: {target_tokens:.2f} M tokens in rows of {width}, {target_minutes:.0f} minutes, Muon for matrices (rate
{muon_rate}) and Adam for the rest ({adam_rate}), raw text first, more and more chat; then {practice_tokens:.2f} M
tokens, {practice_minutes:.0f} minutes, at a quarter of the rates, of practice: half corpus, half of {answers_begun}
greedy answers of its own, the {good} that end by themselves to be given again, and the repeats in the {looping} that
were cut off in a loop to be avoided (unlikelihood, arXiv 1908.04319). Held-out nats per token, of the checkpoint that
ships (in brackets float32, before rounding to MXFP4): raw {raw_loss:.3f} ({raw_loss_before:.3f}), chat {chat_loss:.3f}
({chat_loss_before:.3f}).

Drafters, in rows of {width}; labels half the target's distribution, half its argmax; agreement with the target's argmax
by depth is teacher-forced, on what they learn from, at the end:

| training | steps | rows a step, by source | tokens | minutes | K_train, r | agreement by depth |
|---|---|---|---|---|---|---|
{trainings}

Of the sources, `written` are the target's own greedy answers, `chat` and `raw` the corpus. `drafter` goes on from
`drafter_begun`, `drafter_dflash` from `drafter_dflash_begun`; their data and steps are the same.

Train it again: `pip install '.[test]'`, then `python -m scripts.demo.build --work DIR --install` (about four and a half
hours on two cores; resumable).

## Acceptance

{acceptance}

## Limits

The target saw {target_tokens:.1f} M tokens. What it changes or describes stands in the prompt for the most part, and
drafts are accepted there. The functions it writes are plausible and often wrong, and some of them fall into repetition,
which flatters acceptance; so the figures without looping outputs and those by task stand beside the others.
"""


def log_records(path: Path) -> list[Json]:
    """Read a training's log."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def minutes(records: list[Json]) -> float:
    """Add up the minutes of a training that may have been resumed; elapsed_s restarts each time."""
    total, last = 0.0, 0.0
    for record in records:
        if "elapsed_s" in record:
            total += last if record["elapsed_s"] < last else 0.0
            last = record["elapsed_s"]
    return (total + last) / 60


def training_text(run: Path) -> str:
    """Render a training as a row of the card's table."""
    record = json.loads((run / "recipe.json").read_text(encoding="utf-8"))
    recipe, log = record["recipe"], log_records(run / "log.jsonl")
    given = [data.partition(":")[::2] for data in record["data"]["given"]]
    whole = sum(int(share or 1) for _, share in given)
    rows = [f"{Path(data).name} {record['rows_per_step'] * int(share or 1) // whole}" for data, share in given]
    hits = " ".join(f"{rate:.2f}" for rate in [line for line in log if "loss" in line][-1]["hits_by_depth"])
    cells = (
        f"`{run.name}`",
        recipe["steps"],
        ", ".join(rows),
        f"{record['data']['tokens'] / 1e6:.2f} M",
        f"{minutes(log):.0f}",
        f"{recipe['cod']['depth']}, {recipe['cod']['ratio']}",
        hits,
    )
    return f"| {' | '.join(map(str, cells))} |"


def acceptance_text(sweeps: Sequence[Path]) -> str:
    """Render the sweeps' tables, or that there is none."""
    if not sweeps:
        return "Not measured yet: `peagle sweep --out DIR`."
    rows = [row for sweep in sweeps for row in json.loads((sweep / "run.json").read_text(encoding="utf-8"))["rows"]]
    header = ("prompts", "temperature", "K", "acceptance length", "without loops", "speed-up over plain (CPU, pooled)")
    lines = [
        [
            "raw" if row["raw"] else "chat",
            f"{row['temperature']:g}",
            row["label"],
            sweep_page.acceptance_text(row),
            *map(sweep_page.estimate_text, (row["without_loops"]["acceptance_length"], row["speedup"])),
        ]
        for row in rows
        if row["k"] in SHOWN
    ]
    blocks = [
        f"{rows[0]['num_requests']} held-out prompts; {Setting(*(rows[0][key] for key in SETTING)).label}: "
        f"{rows[0]['looping_frac']:.0%} of the outputs loop. Intervals: 95 %. More: "
        f"{', '.join(f'results/{sweep.name}' for sweep in sweeps)}.",
        Table(header, lines),
        *by_task(rows),
    ]
    return markdown(blocks).rstrip("\n")


def by_task(rows: list[Json]) -> list[Block]:
    """Make the table of acceptance and speed by task, chat prompts, at the largest K; none if prompts have no task."""
    chat = at_largest_k(rows)
    if not any(row["by_category"] for row in chat):
        return []
    header = ("task", "temperature", "drafter", "requests", "loop")
    figures = ("acceptance length", "without loops", "speed-up over plain")
    lines = [
        [
            part["part"],
            f"{row['temperature']:g}",
            row["drafter"],
            str(part["num_requests"]),
            f"{part['looping_frac']:.0%}",
            *map(
                sweep_page.estimate_text,
                (part["acceptance_length"], part["without_loops"]["acceptance_length"], part["speedup"]),
            ),
        ]
        for row in chat
        for part in row["by_category"]
    ]
    return [f"By task, chat prompts, K = {chat[0]['k']}:", Table((*header, *figures), lines)]


def held_out_loss(loaded: LoadedTarget, data: Path) -> dict[str, float]:
    """Measure nats per token of a shipped target on the held-out raw and chat rows."""
    return {
        kind: evaluate(loaded.params, loaded.config, Rows(data / f"{kind}_heldout.npz", SEED))
        for kind in ("raw", "chat")
    }


def card(work: Path, sweeps: Sequence[Path]) -> str:
    """Render the card."""
    manifest = json.loads((work / "dataset" / "manifest.json").read_text(encoding="utf-8"))
    target_run, practice_run = (
        json.loads((work / name / "run.json").read_text(encoding="utf-8")) for name in ("target_begun", "target")
    )
    answers = json.loads((work / "practice" / "manifest.json").read_text(encoding="utf-8"))["answers"]
    shape = json.loads((work / "drafter" / "recipe.json").read_text(encoding="utf-8"))["drafter"]
    target_log = log_records(work / "target" / "log.jsonl")
    before = [record for record in target_log if "raw_heldout" in record][-1]
    loaded = load_target(DEMO / "target")
    loss = held_out_loss(loaded, work / "dataset")
    config = loaded.config
    size = sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file())
    return CARD.format(
        megabytes=size / 1e6,
        target_parameters=inspect_target(DEMO / "target").num_parameters / 1e6,
        hidden=config.hidden_size,
        layers=config.num_layers,
        window=config.sliding_window,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        experts=config.num_experts,
        top_k=config.top_k,
        expert_width=config.expert_width,
        vocab=config.vocab_size,
        drafter_layers=shape["num_layers"],
        taps=", ".join(map(str, shape["aux_layer_ids"])),
        counts=manifest["counts"],
        raw_megabytes=manifest["bytes"]["raw_train"] / 1e6,
        packages=", ".join(f"{name} {version}" for name, version in manifest["versions"].items()),
        num_held_out=len(manifest["held_out_modules"]),
        held_out=", ".join(manifest["held_out_modules"]),
        target_tokens=target_run["tokens"] / 1e6,
        width=target_run["width"],
        target_minutes=minutes(log_records(work / "target_begun" / "log.jsonl")),
        practice_tokens=practice_run["tokens"] / 1e6,
        practice_minutes=minutes(target_log),
        answers_begun=sum(answers.values()),
        good=answers[GOOD],
        looping=answers[LOOPING],
        muon_rate=target_run["muon_rate"],
        adam_rate=target_run["adam_rate"],
        raw_loss=loss["raw"],
        raw_loss_before=before["raw_heldout"],
        chat_loss=loss["chat"],
        chat_loss_before=before["chat_heldout"],
        trainings="\n".join(training_text(work / name) for name in TRAININGS),
        acceptance=acceptance_text(sweeps),
    )


def main() -> None:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, help="the folder of scripts.demo.build")
    parser.add_argument("--sweep", type=Path, nargs="+", default=[], help="runs of peagle sweep with this pair")
    arguments = parser.parse_args()
    if arguments.work is None and not arguments.sweep:
        parser.error("expected --work, --sweep or both")
    path = DEMO / "README.md"
    text = card(arguments.work, arguments.sweep) if arguments.work else path.read_text(encoding="utf-8")
    if arguments.work is None:
        (begin, *_), (*_, end) = text.split(ACCEPTANCE), text.split(LIMITS)
        text = f"{begin}{ACCEPTANCE}{acceptance_text(arguments.sweep)}{LIMITS}{end}"
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
