"""Write the demo pair's card, peagle/demo/README.md, from the records of a build and of a sweep.

    python -m scripts.demo.card --work DIR [--sweep results/RUN]

Every figure in it comes from those records or is measured here (the held-out losses of what ships).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import peagle  # noqa: F401  (before anything starts JAX)
from drafter.train.shards import read_shards, total_tokens
from scripts.demo.build import DEMO
from scripts.demo.train_target import SEED, Rows, evaluate
from target.load import LoadedTarget, inspect_target, load_target

CARD = """\
# The demo pair

A GPT-OSS-architecture target and its P-EAGLE drafter, small enough to ship ({megabytes:.1f} MB) and to train on two
CPU cores. The task: the user gives a Python signature with its docstring, the assistant writes the body. Raw
continuation of Python source works, too. It is a demonstration of the toolkit, not a useful programmer.

- Target: {target_parameters:.2f} M parameters; hidden {hidden}, {layers} layers (sliding window {window} / full),
  {heads} query and {kv_heads} key/value heads of {head_dim}, {experts} experts top-{top_k} of width {expert_width},
  vocabulary {vocab}. Experts MXFP4, the rest bfloat16.
- Drafter: P-EAGLE, {drafter_layers} layers of the same width, taps at the outputs of layers {taps}; bfloat16.
- Tokenizer: byte-level BPE with a harmony-style chat template.
- Licence of the text: the Python Software Foundation License and those of the packages below.

## Data

{counts[raw_train]} source files ({raw_megabytes:.1f} MB) and {counts[chat_train]} functions with docstrings as chat,
from Python's standard library and these packages: {packages}.

Held out, whole: the standard library's {num_held_out} modules {held_out}. `heldout_prompts.jsonl` are
{counts[heldout_prompts]} functions of them; no training function has a held-out function's body.

## Recipe and losses

Target: {target_tokens:.2f} M tokens in rows of {width}, {target_minutes:.0f} minutes, Muon for matrices (rate
{muon_rate}) and Adam for the rest ({adam_rate}), raw text first, chat while the learning rate decays. Held-out nats per
token, of the checkpoint that ships (in brackets float32, before rounding to MXFP4): raw {raw_loss:.3f}
({raw_loss_before:.3f}), chat {chat_loss:.3f} ({chat_loss_before:.3f}).

Drafter: {drafter_steps} steps of {rows_per_step} rows: {written_share:.0%} the target's own greedy answers
({written_tokens:.2f} M tokens), the rest the corpus' chat and raw text; {drafter_minutes:.0f} minutes.
Conditional-on-depth sampling with K_train = {k_train}, r = {cod_ratio}; labels half the target's distribution, half its
argmax. Agreement with the target's argmax by depth, teacher-forced, at the end: {hits}.

Train it again: `pip install '.[test]'`, then `python -m scripts.demo.build --work DIR --install` (about two hours on
two cores; resumable).

## Acceptance

{acceptance}

## Limits

The target saw {target_tokens:.1f} M tokens: it writes short, plausible bodies that are often wrong, and some outputs
fall into repetition, which flatters acceptance; so the figures without looping outputs stand beside the others.
"""


def log_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a training's log."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def minutes(records: list[dict[str, Any]]) -> float:
    """Minutes of training over all sittings: elapsed_s restarts with each."""
    total, last = 0.0, 0.0
    for record in records:
        if "elapsed_s" in record:
            total += last if record["elapsed_s"] < last else 0.0
            last = record["elapsed_s"]
    return (total + last) / 60


def acceptance_text(sweep: Path | None) -> str:
    """The sweep's table in a few lines, or that there is none."""
    if sweep is None:
        return "Not measured yet: `python scripts/sweep_acceptance.py --out DIR`."
    run = json.loads((sweep / "run.json").read_text(encoding="utf-8"))
    rows = [row for row in run["rows"] if row["k"]]
    lines = [
        f"Greedy, {rows[0]['num_outputs']} held-out prompts, chat template; {rows[0]['num_outputs_without_loops']} "
        f"outputs do not loop. Everything: results/{sweep.name}.",
        "",
        "| K | acceptance length | without loops | speed-up over plain (CPU, median of prompts) |",
        "|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['k']} | {row['acceptance_length']:.2f} | {row['acceptance_length_without_loops']:.2f} | "
            f"{row['speedup_median']:.2f} |"
        )
    return "\n".join(lines)


def held_out_loss(loaded: LoadedTarget, data: Path) -> dict[str, float]:
    """Nats per token of a shipped target on the held-out raw and chat rows."""
    return {
        kind: evaluate(loaded.params, loaded.config, Rows(data / f"{kind}_heldout.npz", SEED))
        for kind in ("raw", "chat")
    }


def card(work: Path, sweep: Path | None) -> str:
    """The text of the card."""
    manifest = json.loads((work / "dataset" / "manifest.json").read_text(encoding="utf-8"))
    target_run = json.loads((work / "target" / "run.json").read_text(encoding="utf-8"))
    drafter_run = json.loads((work / "drafter" / "recipe.json").read_text(encoding="utf-8"))
    recipe, shape = drafter_run["recipe"], drafter_run["drafter"]
    target_log, drafter_log = (log_records(work / name / "log.jsonl") for name in ("target", "drafter"))
    _, written_tokens = total_tokens(read_shards(work / "written"))
    shares = [int(given.rpartition(":")[2]) for given in drafter_run["data"]["given"]]
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
        target_minutes=minutes(target_log),
        muon_rate=target_run["muon_rate"],
        adam_rate=target_run["adam_rate"],
        raw_loss=loss["raw"],
        raw_loss_before=before["raw_heldout"],
        chat_loss=loss["chat"],
        chat_loss_before=before["chat_heldout"],
        drafter_steps=recipe["steps"],
        rows_per_step=drafter_run["rows_per_step"],
        written_share=shares[0] / sum(shares),
        written_tokens=written_tokens / 1e6,
        drafter_minutes=minutes(drafter_log),
        k_train=recipe["cod"]["depth"],
        cod_ratio=recipe["cod"]["ratio"],
        hits=" ".join(f"{rate:.2f}" for rate in [line for line in drafter_log if "loss" in line][-1]["hits_by_depth"]),
        acceptance=acceptance_text(sweep),
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="the folder of scripts.demo.build")
    parser.add_argument("--sweep", type=Path, help="a run of scripts/sweep_acceptance.py with this pair")
    arguments = parser.parse_args()
    (DEMO / "README.md").write_text(card(arguments.work, arguments.sweep), encoding="utf-8")


if __name__ == "__main__":
    main()
