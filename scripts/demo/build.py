"""Build the demo pair from nothing, in one command; resumable.

    python -m scripts.demo.build --work DIR [--target-tokens 10000000]
    python -m scripts.demo.build --work DIR --scale 0.01        # a rehearsal: minutes, and models that know nothing

Stages, each a folder of `--work`: corpus, tokenizer, dataset, target_begun (training), answers_begun (some answers of
its own), practice (what it can learn from them), target (training on that), pair/target (the checkpoint), written (all
its answers with its taps and best tokens: `peagle data`), drafter_begun, drafter and
drafter_eagle3 (`peagle train`: a P-EAGLE on answers and corpus, the same going on with answers alone, an EAGLE-3), and
those two in pair/ (with the answers' tokens by frequency). A stage that is done is not done again, a training that was
cut off goes on. With --install the pair, its held-out prompts and its card replace those in peagle/demo. About three
hours on two cores, and 4 GB; the result is the same within noise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

from drafter.vocabulary import FREQUENT_TOKENS
from peagle.workflows.frequent_tokens import list_frequent_tokens
from scripts.demo.tokenizer import MASK, SPECIAL_TOKENS
from scripts.demo.tuned import TUNED

DEMO = Path(__file__).parents[2] / "peagle" / "demo"

# Rows of a step and the rule of its update: rates that suit so small a model.
RECIPE = (
    "--rows", "8", "--width", "512", "--loss", "half", "--optimizer", "muon", "--weight-decay", "0.02",
    "--warmup", "0.02",
)  # fmt: skip
BEGUN = (
    "--layers", "2", "--depth", "6", "--ratio", "0.75",
    "--learning-rate", "0.008", "--other-rate", "0.003", "--decay", "0.6",
)  # fmt: skip
GOING_ON = (
    "--depth", "8", "--ratio", "0.7",
    "--learning-rate", "0.006", "--other-rate", "0.0022", "--decay", "0.8",
)  # fmt: skip
EAGLE3 = (
    "--autoregressive", "--layers", "1", "--depth", "6", "--ratio", "0.7",
    "--learning-rate", "0.008", "--other-rate", "0.003", "--decay", "0.6",
)  # fmt: skip
ANSWERS_BEGUN, PRACTICE_TOKENS = 4096, 1_228_800
ANSWERS = ("-n", "288", "--context", "512", "--slots", "64")
STEPS = {"drafter_begun": 900, "drafter": 2500, "drafter_eagle3": 700}
DRAFTERS = ("drafter", "drafter_eagle3")
TAPS = "1,4,7"


def stage(name: str, done: Path, *arguments: str | Path) -> None:
    """Runs scripts.demo.<name>, unless the file it ends with is there; stops the build where it fails."""
    _run(name, done, [f"scripts.demo.{name}", *map(str, arguments)], {})


def command(name: str, done: Path, *arguments: str | Path, environment: dict[str, str] | None = None) -> None:
    """The same for `peagle <name>`."""
    _run(name, done, ["peagle", name, *map(str, arguments)], environment or {})


def _run(name: str, done: Path, module: list[str], environment: dict[str, str]) -> None:
    if done.exists():
        print(f"build: {name}: done before", flush=True)
        return
    print("build: -m", " ".join(module), flush=True)
    if subprocess.run([sys.executable, "-m", *module], env={**environment, **os.environ}, check=False).returncode:
        raise SystemExit(f"build: {name} failed; the same command goes on from here")


def build(work: Path, target_tokens: int, scale: float = 1) -> None:
    """Everything up to work/pair; with so small a share of all steps, tokens and prompts."""
    corpus, tokenizer, dataset, practice = (work / name for name in ("corpus", "tokenizer", "dataset", "practice"))
    begun, target, written, pair = (work / name for name in ("target_begun", "target", "written", "pair"))
    stage("corpus", corpus / "manifest.json", "--out", corpus)
    stage("tokenizer", tokenizer / "chat_template.jinja", "--corpus", corpus, "--out", tokenizer)
    stage("dataset", dataset / "manifest.json", "--corpus", corpus, "--tokenizer", tokenizer, "--out", dataset)

    def train_target(out: Path, data: Path, num_tokens: int, *more: str | Path) -> None:
        tokens = [] if (out / "run.json").exists() else ["--tokens", str(round(scale * num_tokens))]
        stage("train_target", out / "finished", "--data", data, "--out", out, *tokens, *more)
        (out / "finished").touch()

    def export(run: Path, out: Path) -> None:
        checkpoint = out / "target"
        stage(
            "export_target", checkpoint / "config.json", "--run", run, "--tokenizer", tokenizer, "--out", checkpoint
        )  # fmt: skip

    def answer(by: Path, out: Path, count: int, *more: str) -> Path:
        finished = out.with_suffix(".finished")
        command(
            "data", finished, "--target", by / "target", "--prompt-file", corpus / "chat_train.jsonl",
            "--num-prompts", str(math.ceil(scale * count)), *ANSWERS, *more, "--out", out,
        )  # fmt: skip
        finished.touch()
        return out

    train_target(begun, dataset, target_tokens)
    export(begun, work / "pair_begun")
    answers = answer(work / "pair_begun", work / "answers_begun", ANSWERS_BEGUN)
    stage("practice", practice / "manifest.json", "--written", answers, "--dataset", dataset, "--out", practice)
    train_target(target, practice, PRACTICE_TOKENS, "--practise", begun)
    export(target, pair)
    num_prompts = json.loads((corpus / "manifest.json").read_text(encoding="utf-8"))["counts"]["chat_train"]
    answer(pair, written, num_prompts, "--hidden", "--taps", TAPS, "--top", "32")

    def train(name: str, *arguments: str | Path) -> None:
        command(
            "train", work / name / "drafter" / "config.json", "--target", pair / "target", "--out", work / name,
            *RECIPE, "--steps", str(math.ceil(scale * STEPS[name])), *arguments,
            "--evaluate", corpus / "heldout_prompts.jsonl", "--evaluate-prompts", "60", "--evaluate-every", "300",
            environment=TUNED,
        )  # fmt: skip

    mixture = [f"{written}:5", f"{dataset}/shards/chat:2", f"{dataset}/shards/raw:1"]
    mask = ("--mask-token", str(SPECIAL_TOKENS.index(MASK)))
    train("drafter_begun", "--taps", TAPS, *mask, *BEGUN, *(part for data in mixture for part in ("--data", data)))
    train("drafter", "--init", work / "drafter_begun" / "drafter", *GOING_ON, "--data", written)
    train("drafter_eagle3", "--taps", TAPS, *EAGLE3, "--data", written)
    for name in DRAFTERS:
        if not (pair / name).exists():
            shutil.copytree(work / name / "drafter", pair / name, ignore=shutil.ignore_patterns("README.md"))
        if not (known := pair / name / FREQUENT_TOKENS).exists():
            list_frequent_tokens(sorted(written.glob("*.safetensors")), known)


def install(work: Path) -> None:
    """peagle/demo holds the pair, the held-out prompts and the card of this build."""
    for part in ("target", *DRAFTERS):
        shutil.rmtree(DEMO / part, ignore_errors=True)
        shutil.copytree(work / "pair" / part, DEMO / part)
    shutil.copy(work / "corpus" / "heldout_prompts.jsonl", DEMO / "heldout_prompts.jsonl")
    subprocess.run([sys.executable, "-m", "scripts.demo.card", "--work", str(work)], check=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of all stages")
    parser.add_argument("--target-tokens", type=int, default=10_000_000, help="tokens the target is trained on")
    parser.add_argument("--scale", type=float, default=1, help="share of all tokens, prompts and steps (default 1)")
    parser.add_argument("--install", action="store_true", help="put the result into peagle/demo")
    arguments = parser.parse_args()
    if not 0 < arguments.scale <= 1 or (arguments.install and arguments.scale < 1):
        parser.error(f"--scale is {arguments.scale}; expected more than 0, at most 1, and 1 with --install")
    arguments.work.mkdir(parents=True, exist_ok=True)
    build(arguments.work, arguments.target_tokens, arguments.scale)
    if arguments.install:
        install(arguments.work)


if __name__ == "__main__":
    main()
