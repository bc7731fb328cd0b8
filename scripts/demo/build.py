"""Build the demo pair from nothing, in one command; resumable.

    python -m scripts.demo.build --work DIR [--target-tokens 10000000]
    python -m scripts.demo.build --work DIR --scale 0.01        # a rehearsal: minutes, and models that know nothing

Stages, each a folder of `--work`: corpus, tokenizer, dataset, target_begun (training), answers_begun (some of its own
answers), practice (a dataset of those), target (training on it), pair/target (the checkpoint), written (all its answers
with its aux_hidden and best tokens: `peagle data`), drafter_begun, drafter, drafter_eagle3, drafter_dflash_begun and
drafter_dflash (`peagle train`: a P-EAGLE on answers and corpus, the same going on with answers alone, an EAGLE-3, a
DFlash by the P-EAGLE's data and steps), and those in pair/ (with the answers' tokens by frequency). A stage that is
done is not repeated; a training that was cut off goes on.

With --install the pair and its held-out prompts replace those in peagle/demo; its card is then written by hand. About
four and a half hours on two cores, and 4 GB; the result is the same within noise.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from drafter.vocabulary import FREQUENT_TOKENS
from peagle.workflows.frequent_tokens import list_frequent_tokens
from scripts.demo.checkpoint import export
from scripts.demo.corpus import collect
from scripts.demo.dataset import make_dataset
from scripts.demo.practice import make_practice
from scripts.demo.tokenizer import MASK, SPECIAL_TOKENS, train_tokenizer
from scripts.demo.tuned import tuned_environment
from scripts.runs import new_parser

DEMO = Path(__file__).parents[2] / "peagle" / "demo"

# Rows of a step and the rule of its update: rates that suit so small a model.
RECIPE = (
    "--rows", "8", "--width", "512", "--loss", "half", "--optimizer", "muon", "--weight-decay", "0.02",
    "--warmup", "0.02", "--held-out", "0",
)  # fmt: skip
RATES_BEGUN = ("--learning-rate", "0.008", "--other-rate", "0.003", "--decay", "0.6")
RATES_GOING_ON = ("--learning-rate", "0.006", "--other-rate", "0.0022", "--decay", "0.8")
BEGUN = ("--layers", "2", "--depth", "6", "--ratio", "0.75", *RATES_BEGUN)
GOING_ON = ("--depth", "8", "--ratio", "0.7", *RATES_GOING_ON)
EAGLE3 = ("--autoregressive", "--layers", "1", "--depth", "6", "--ratio", "0.7", *RATES_BEGUN)
# of eight rows, as the public DFlash's; with so many of them a step takes as long as one of the P-EAGLE
BLOCKS = ("--depth", "7", "--blocks", "224")
DFLASH_BEGUN = ("--drafter", "dflash", "--layers", "2", *BLOCKS, *RATES_BEGUN)
DFLASH_GOING_ON = (*BLOCKS, *RATES_GOING_ON)
ANSWERS_BEGUN, PRACTICE_TOKENS = 4096, 1_228_800
ANSWERS = ("-n", "288", "--context", "512", "--slots", "64")
STEPS = {
    "drafter_begun": 900,
    "drafter": 2500,
    "drafter_eagle3": 700,
    "drafter_dflash_begun": 900,
    "drafter_dflash": 2500,
}
DRAFTERS = ("drafter", "drafter_eagle3", "drafter_dflash")
TAPS = "1,4,7"


def stage(name: str, done: Path, make: Callable[[], None]) -> None:
    """Run a stage, unless the file that it writes last is there."""
    if done.exists():
        print(f"build: {name}: done before", flush=True)
        return
    print(f"build: {name}", flush=True)
    make()


def command(module: str, *arguments: str | Path, environment: dict[str, str] | None = None) -> None:
    """Run `python -m module` in a process of its own, in this environment or this process'. Exits if it fails."""
    typed = [sys.executable, "-m", module, *map(str, arguments)]
    print("build:", *typed[1:], flush=True)
    if subprocess.run(typed, env=environment, check=False).returncode:
        raise SystemExit(f"build: {module} failed; the same command goes on from here")


def build(work: Path, target_tokens: int, scale: float = 1) -> None:
    """Build everything up to work/pair; scale: the share of all steps, tokens and prompts."""
    corpus, tokenizer, dataset, practice = (work / name for name in ("corpus", "tokenizer", "dataset", "practice"))
    begun, target, written, pair = (work / name for name in ("target_begun", "target", "written", "pair"))
    stage("corpus", corpus / "manifest.json", lambda: collect(corpus))
    stage("tokenizer", tokenizer / "chat_template.jinja", lambda: train_tokenizer(corpus, tokenizer))
    stage("dataset", dataset / "manifest.json", lambda: make_dataset(corpus, tokenizer, dataset))

    def train_target(out: Path, data: Path, num_tokens: int, *more: str | Path) -> None:
        def run() -> None:
            tokens = [] if (out / "run.json").exists() else ["--tokens", str(round(scale * num_tokens))]
            command("scripts.demo.train_target", "--data", data, "--out", out, *tokens, *more)
            (out / "finished").touch()

        stage(out.name, out / "finished", run)

    def ship(run: Path, out: Path) -> None:
        stage(f"{out.name}/target", out / "target" / "config.json", lambda: export(run, tokenizer, out / "target"))

    def answer(by: Path, out: Path, count: int, *more: str) -> Path:
        def run() -> None:
            command(
                "peagle", "data", "--target", by / "target", "--prompt-file", corpus / "chat_train.jsonl",
                "--num-prompts", str(math.ceil(scale * count)), *ANSWERS, *more, "--out", out,
            )  # fmt: skip
            finished.touch()

        finished = out.with_suffix(".finished")
        stage(out.name, finished, run)
        return out

    train_target(begun, dataset, target_tokens)
    ship(begun, work / "pair_begun")
    answers = answer(work / "pair_begun", work / "answers_begun", ANSWERS_BEGUN)
    stage("practice", practice / "manifest.json", lambda: make_practice(answers, dataset, practice))
    train_target(target, practice, PRACTICE_TOKENS, "--practise", begun)
    ship(target, pair)
    num_prompts = json.loads((corpus / "manifest.json").read_text(encoding="utf-8"))["counts"]["chat_train"]
    answer(pair, written, num_prompts, "--hidden", "--taps", TAPS, "--top", "32")

    def train(name: str, *arguments: str | Path) -> None:
        def run() -> None:
            command(
                "peagle", "train", "--target", pair / "target", "--out", work / name,
                *RECIPE, "--steps", str(math.ceil(scale * STEPS[name])), *arguments,
                "--evaluate", corpus / "heldout_prompts.jsonl", "--evaluate-prompts", "60", "--evaluate-every", "300",
                environment=tuned_environment(),
            )  # fmt: skip

        stage(name, work / name / "drafter" / "config.json", run)

    shares = (f"{written}:5", f"{dataset}/shards/chat:2", f"{dataset}/shards/raw:1")
    mixture = [part for data in shares for part in ("--data", data)]
    mask = ("--mask-token", str(SPECIAL_TOKENS.index(MASK)))
    train("drafter_begun", "--taps", TAPS, *mask, *BEGUN, *mixture)
    train("drafter", "--init", work / "drafter_begun" / "drafter", *GOING_ON, "--data", written)
    train("drafter_eagle3", "--taps", TAPS, *EAGLE3, "--data", written)
    train("drafter_dflash_begun", "--taps", TAPS, *mask, *DFLASH_BEGUN, *mixture)
    begun_dflash = work / "drafter_dflash_begun" / "drafter"
    train("drafter_dflash", "--init", begun_dflash, *DFLASH_GOING_ON, "--data", written)
    for name in DRAFTERS:
        if not (pair / name).exists():
            shutil.copytree(work / name / "drafter", pair / name, ignore=shutil.ignore_patterns("README.md"))
        if not (known := pair / name / FREQUENT_TOKENS).exists():
            list_frequent_tokens(sorted(written.glob("*.safetensors")), known)


def install(work: Path) -> None:
    """Copy the pair and the held-out prompts of a build into peagle/demo."""
    for part in ("target", *DRAFTERS):
        shutil.rmtree(DEMO / part, ignore_errors=True)
        shutil.copytree(work / "pair" / part, DEMO / part)
    shutil.copy(work / "corpus" / "heldout_prompts.jsonl", DEMO / "heldout_prompts.jsonl")


def main() -> None:
    """Run the command."""
    parser = new_parser(__doc__)
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
