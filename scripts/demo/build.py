"""Build the demo pair from nothing, in one command; resumable.

    python -m scripts.demo.build --work DIR [--install]
    python -m scripts.demo.build --work DIR --scale 0.003       # a rehearsal: minutes, and models that know nothing

Each stage is a folder of `--work`; a stage that is finished is not repeated, one that was cut off goes on. First on
short rows: corpus, tokenizer, dataset, begun (the target's training), answers_begun, practice (rows of those answers),
practised (training on them), written (its answers with its aux_hidden and best tokens: `peagle data`), and the drafters
by `peagle train`: p_eagle_begun and dflash_begun on answers and corpus, then p_eagle, eagle3 and dflash on answers.
Then the same on rows of 512, 2048 and 4096: long_dataset, long_begun, long_answers, long_practice, long_practised,
long_written and short_written, long_p_eagle, long_eagle3 and long_dflash, the drafters with a window of 256 positions.

pair/ holds the result. With --install it replaces the pair and the held-out prompts in peagle/demo; its card is then
written by hand, and `peagle sweep --write-widths peagle/demo/drafter` counts the acceptance that -k auto begins with.
About eight hours on two cores, and 6 GB; the result is the same within noise.
"""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from peagle.base import jax_workaround
from peagle.base.checkpoint import CONFIG
from peagle.base.strict_json import dumps
from peagle.engine.auto.speculation import SPECULATION_FILE, WINDOW_KEY
from scripts.demo.batches import BATCH_ROWS
from scripts.demo.corpus import collect, read_lines
from scripts.demo.rows import (
    LONG_PROMPTS,
    LONG_WIDTHS,
    SHORT_PROMPTS,
    WIDTH,
    make_dataset,
    make_long_dataset,
    make_practice,
)
from scripts.demo.tokenizer import MASK, SPECIAL_TOKENS, train_tokenizer
from scripts.demo.train_target import export
from scripts.runs import new_parser

DEMO = Path(__file__).parents[2] / "peagle" / "demo"
AUX_LAYERS = "1,4,7"
WINDOW = 256
KEEP_PROMPT = 520  # tokens that two layers with that window reach, and the drafts of a step
WINDOW_FIELDS = ("sliding_window", "layer_types")  # of a drafter's config.json
PAIR = {"drafter": "long_p_eagle", "drafter_eagle3": "long_eagle3", "drafter_dflash": "long_dflash"}

ANSWERS_BEGUN, LONG_ANSWERS_BEGUN = 4096, 900
SHORT = ("-n", "288", "--context", "512", "--slots", "64")
LONG = ("-n", "288", "--context", "4608", "--slots", "32", "--shard-prompts", "200")
TEACH = ("--hidden", "--aux-layer-ids", AUX_LAYERS, "--top", "32")
# rows of a step and the rule of its update: rates that suit so small a model
LEARN = (
    "--rows", "8", "--loss", "half", "--optimizer", "muon", "--weight-decay", "0.02", "--warmup", "0.02",
    "--held-out", "0",
)  # fmt: skip
NEW = ("--aux-layer-ids", AUX_LAYERS, "--learning-rate", "0.008", "--other-rate", "0.003", "--decay", "0.6")
AGAIN = ("--learning-rate", "0.006", "--other-rate", "0.0022", "--decay", "0.8")
LONGER = (
    "--learning-rate", "0.004", "--other-rate", "0.0015", "--decay", "0.8", "--ratio", "0.7",
    "--drafter-window", str(WINDOW),
)  # fmt: skip
MASK_TOKEN = ("--mask-token", str(SPECIAL_TOKENS.index(MASK)))
# One JAX device per core, each on one thread with its own rows: cores meet once a step instead of once an operation.
# Large blocks of memory stay with the process, on huge pages.
TUNED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "1000000000",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": str(max(n for n in (1, 2, 4, 8) if n <= min(os.cpu_count() or 1, BATCH_ROWS))),
    "XLA_FLAGS": (
        "--xla_cpu_multi_thread_eigen=false --xla_cpu_prefer_vector_width=512 --xla_cpu_enable_fast_min_max=true"
        " --xla_cpu_collective_call_terminate_timeout_seconds=3600"  # a busy machine may delay one core for long
    ),
}
# blocks of eight rows, as the public DFlash's; with 224 of them a step takes as long as one of the P-EAGLE
BLOCKS = ("--depth", "7", "--blocks", "224")


@dataclasses.dataclass(frozen=True)
class Training:
    """One `peagle train`: its steps and options, and the stage whose drafter it starts from."""

    steps: int
    options: tuple[str, ...]
    init: str | None = None


ON_ANSWERS_AND_CORPUS = {
    "p_eagle_begun": Training(900, (*NEW, *MASK_TOKEN, "--layers", "2", "--depth", "6", "--ratio", "0.75")),
    "dflash_begun": Training(900, (*NEW, *MASK_TOKEN, "--drafter", "dflash", "--layers", "2", *BLOCKS)),
}
ON_ANSWERS = {
    "p_eagle": Training(2500, (*AGAIN, "--depth", "8", "--ratio", "0.7"), "p_eagle_begun"),
    "eagle3": Training(700, (*NEW, "--drafter", "eagle-3", "--layers", "1", "--depth", "6", "--ratio", "0.7")),
    "dflash": Training(2500, (*AGAIN, *BLOCKS), "dflash_begun"),
}
ON_LONG_ANSWERS = {
    "long_p_eagle": Training(1916, (*LONGER, "--depth", "8"), "p_eagle"),
    "long_eagle3": Training(718, (*LONGER, "--depth", "8"), "eagle3"),
    "long_dflash": Training(1916, (*LONGER, "--depth", "7"), "dflash"),
}


@dataclasses.dataclass(frozen=True)
class Build:
    """The stages in a folder; scale: the share of all steps, tokens and prompts."""

    work: Path
    scale: float

    def stage(self, name: str, make: Callable[[Path], object]) -> Path:
        """Run a stage, unless it is finished; return its folder."""
        out = self.work / name
        print(f"build: {name}{': done before' if (out / 'finished').exists() else ''}", flush=True)
        if not (out / "finished").exists():
            make(out)
            (out / "finished").touch()
        return out

    def run(self, name: str, *words: str | Path, environment: dict[str, str] | None = None) -> Path:
        """Run a stage by `python -m`, which gets its folder as --out; return the folder."""
        return self.stage(name, lambda out: command(*words, "--out", out, environment=environment))

    def count(self, number: int) -> str:
        """Scale a number of prompts or steps."""
        return str(math.ceil(self.scale * number))

    def train_target(self, name: str, data: Path, begin: Path | None = None) -> Path:
        """Run a stage of scripts.demo.train_target; it stops and goes on by itself."""
        options = ("--scale", str(self.scale), *(() if begin is None else ("--begin", begin)))
        command = ("scripts.demo.train_target", name, "--data", data, *options)
        return self.run(name, *command, environment=tuned_environment())

    def answer(self, name: str, target: Path, prompts: Path, num_prompts: int, *options: str) -> Path:
        """Let a target answer prompts by `peagle data`."""
        count = self.count(num_prompts)
        data = ("peagle", "data", "--target", target, "--prompt-file", prompts, "--num-prompts", count)
        return self.run(name, *data, *options)

    def train(self, trainings: dict[str, Training], target: Path, width: int, data: Sequence[str | Path]) -> None:
        """Train drafters by `peagle train`."""
        evaluation = ("--evaluate", self.work / "corpus" / "heldout_prompts.jsonl", "--evaluate-every", "300")
        for name, training in trainings.items():
            options = [part for folder in data for part in ("--data", folder)]
            options += [] if training.init is None else ["--init", self.work / training.init / "drafter"]
            options += [*LEARN, "--width", str(width), "--steps", self.count(training.steps), *training.options]
            options += [*evaluation, "--evaluate-prompts", self.count(60)]
            self.run(name, "peagle", "train", "--target", target, *options, environment=tuned_environment())


def tuned_environment() -> dict[str, str]:
    """Make the environment of a training: this process' own, completed by TUNED."""
    own = {
        name: value for name, value in os.environ.items() if (name, value.strip()) != ("XLA_FLAGS", jax_workaround.FLAG)
    }
    return {**TUNED, **own}


def command(module: str, *arguments: str | Path, environment: dict[str, str] | None = None) -> None:
    """Run `python -m module` in a process of its own. Exits if it fails."""
    typed = [sys.executable, "-m", module, *map(str, arguments)]
    print("build:", *typed[1:], flush=True)
    if subprocess.run(typed, env=environment, check=False).returncode:
        raise SystemExit(f"build: {module} failed; the same command goes on from here")


def build(work: Path, scale: float = 1) -> None:
    """Build everything up to work/pair."""
    run = Build(work, scale)
    corpus = run.stage("corpus", collect)
    tokenizer = run.stage("tokenizer", lambda out: train_tokenizer(corpus, out))

    def exported(trained: Path) -> Path:
        return run.stage(f"{trained.name}_target", lambda out: export(trained, tokenizer, out))

    prompts = corpus / "chat_train.jsonl"
    dataset = run.stage("dataset", lambda out: make_dataset(corpus, tokenizer, out))
    begun = run.train_target("begun", dataset)
    answers = run.answer("answers_begun", exported(begun), prompts, ANSWERS_BEGUN, *SHORT)
    practice = run.stage("practice", lambda out: make_practice(answers, dataset, (WIDTH,), out))
    practised = run.train_target("practised", practice, begun)
    target = exported(practised)
    written = run.answer("written", target, prompts, len(read_lines(prompts)), *SHORT, *TEACH)
    shares = (f"{written}:5", f"{dataset}/shards/chat:2", f"{dataset}/shards/raw:1")
    run.train(ON_ANSWERS_AND_CORPUS, target, WIDTH, shares)
    run.train(ON_ANSWERS, target, WIDTH, (written,))

    rows = run.stage("long_dataset", lambda out: make_long_dataset(corpus, dataset, tokenizer, out))
    long_prompts, short_prompts = rows / "long_prompts.jsonl", rows / "short_prompts.jsonl"
    long_begun = run.train_target("long_begun", rows, practised)
    long_answers = run.answer("long_answers", exported(long_begun), long_prompts, LONG_ANSWERS_BEGUN, *LONG)
    long_practice = run.stage("long_practice", lambda out: make_practice(long_answers, rows, (*LONG_WIDTHS,), out))
    target = exported(run.train_target("long_practised", long_practice, long_begun))
    teach = (*LONG, *TEACH, "--keep-prompt", str(KEEP_PROMPT))
    data = (
        run.answer("long_written", target, long_prompts, LONG_PROMPTS, *teach),
        run.answer("short_written", target, short_prompts, SHORT_PROMPTS, *teach),
    )
    run.train(ON_LONG_ANSWERS, target, 832, data)
    run.stage("pair", lambda out: make_pair(work, target, out))


def make_pair(work: Path, target: Path, out: Path) -> None:
    """Copy the target and the drafters.

    A drafter's window goes from config.json to speculation.json: vLLM with caches of one group, which this P-EAGLE
    needs there, takes no window but the target's.
    """
    shutil.copytree(target, out / "target", ignore=shutil.ignore_patterns("finished"), dirs_exist_ok=True)
    for name, stage in PAIR.items():
        drafter, ignored = out / name, shutil.ignore_patterns("README.md")
        shutil.copytree(work / stage / "drafter", drafter, ignore=ignored, dirs_exist_ok=True)
        config = json.loads((drafter / CONFIG).read_text(encoding="utf-8"))
        kept = {key: value for key, value in config.items() if key not in WINDOW_FIELDS}
        (drafter / CONFIG).write_text(dumps(kept, indent=2), encoding="utf-8")
        (drafter / SPECULATION_FILE).write_text(dumps({WINDOW_KEY: WINDOW}, indent=1) + "\n", encoding="utf-8")


def install(work: Path) -> None:
    """Copy the pair and the held-out prompts of a build into peagle/demo."""
    for part in ("target", *PAIR):
        shutil.rmtree(DEMO / part, ignore_errors=True)
        shutil.copytree(work / "pair" / part, DEMO / part)
    shutil.copy(work / "corpus" / "heldout_prompts.jsonl", DEMO / "heldout_prompts.jsonl")


def main() -> None:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of all stages")
    parser.add_argument("--scale", type=float, default=1, help="share of all tokens, prompts and steps (default 1)")
    parser.add_argument("--install", action="store_true", help="put the result into peagle/demo")
    arguments = parser.parse_args()
    if not 0 < arguments.scale <= 1 or (arguments.install and arguments.scale < 1):
        parser.error(f"--scale is {arguments.scale}; expected more than 0, at most 1, and 1 with --install")
    arguments.work.mkdir(parents=True, exist_ok=True)
    build(arguments.work, arguments.scale)
    if arguments.install:
        install(arguments.work)


if __name__ == "__main__":
    main()
