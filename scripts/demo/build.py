"""Build the demo pair from nothing, in one command; resumable.

    python -m scripts.demo.build --work DIR [--target-tokens 8400000] [--drafter-steps 900]

Stages, each a folder of `--work`: corpus, tokenizer, dataset, target (training), pair/target (the checkpoint),
written (the target's own answers), drafter (training), pair/drafter (with the answers' tokens by frequency). A stage
that is done is not done again, a training that was cut off goes on. With --install the pair, its held-out prompts and
its card replace those in peagle/demo. About two hours on two cores; the result is the same within noise.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from drafter.vocabulary import FREQUENT_TOKENS
from scripts import frequent_tokens

DEMO = Path(__file__).parents[2] / "peagle" / "demo"


def stage(name: str, done: Path, *arguments: str | Path) -> None:
    """Runs scripts.demo.<name>, unless the file it ends with is there; stops the build where it fails."""
    if done.exists():
        print(f"build: {name}: done before", flush=True)
        return
    command = [sys.executable, "-m", f"scripts.demo.{name}", *map(str, arguments)]
    print("build:", " ".join(command[1:]), flush=True)
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"build: {name} failed; the same command goes on from here")


def build(work: Path, target_tokens: int, drafter_steps: int) -> None:
    """Everything up to work/pair."""
    corpus, tokenizer, dataset, target, written, drafter, pair = (
        work / name for name in ("corpus", "tokenizer", "dataset", "target", "written", "drafter", "pair")
    )
    stage("corpus", corpus / "manifest.json", "--out", corpus)
    stage("tokenizer", tokenizer / "chat_template.jinja", "--corpus", corpus, "--out", tokenizer)
    stage("dataset", dataset / "manifest.json", "--corpus", corpus, "--tokenizer", tokenizer, "--out", dataset)
    tokens = [] if (target / "run.json").exists() else ["--tokens", str(target_tokens)]
    stage("train_target", target / "finished", "--data", dataset, "--out", target, *tokens)
    (target / "finished").touch()
    stage(
        "export_target", pair / "target" / "config.json",
        "--run", target, "--tokenizer", tokenizer, "--out", pair / "target",
    )  # fmt: skip
    stage(
        "regenerate", written / "finished",
        "--target", pair / "target", "--prompts", corpus / "chat_train.jsonl", "--out", written,
    )  # fmt: skip
    (written / "finished").touch()
    length = [] if (drafter / "run.json").exists() else ["--steps", str(drafter_steps)]
    stage(
        "train_drafter", drafter / "drafter" / "config.json",
        "--target", pair / "target", "--data", written, "--dataset", dataset, "--out", drafter, *length,
    )  # fmt: skip
    if not (pair / "drafter").exists():
        shutil.copytree(drafter / "drafter", pair / "drafter")
    if not (known := pair / "drafter" / FREQUENT_TOKENS).exists():
        frequent_tokens.main([*map(str, sorted(written.glob("*.npz"))), "--out", str(known)])


def install(work: Path) -> None:
    """peagle/demo holds the pair, the held-out prompts and the card of this build."""
    for part in ("target", "drafter"):
        shutil.rmtree(DEMO / part, ignore_errors=True)
        shutil.copytree(work / "pair" / part, DEMO / part)
    shutil.copy(work / "corpus" / "heldout_prompts.jsonl", DEMO / "heldout_prompts.jsonl")
    subprocess.run([sys.executable, "-m", "scripts.demo.card", "--work", str(work)], check=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of all stages")
    parser.add_argument("--target-tokens", type=int, default=8_400_000, help="tokens the target is trained on")
    parser.add_argument("--drafter-steps", type=int, default=900, help="steps the drafter is trained")
    parser.add_argument("--install", action="store_true", help="put the result into peagle/demo")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    build(arguments.work, arguments.target_tokens, arguments.drafter_steps)
    if arguments.install:
        install(arguments.work)


if __name__ == "__main__":
    main()
