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
written by hand.
About eight hours on two cores, and 6 GB.

Earlier builds let the rates of p_eagle, dflash and the long drafters fall over the last 80 % of the steps; their mask
token was <|mask|>. `peagle train` lets rates fall over the last 60 %, and takes the highest id that the data lacks. No
pair built so has been measured: the card of peagle/demo describes an earlier one.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from peagle.base import jax_workaround
from peagle.base.checkpoint import CONFIG
from peagle.base.strict_json import dumps
from peagle.loading.speculation import SPECULATION_FILE, WINDOW_KEY
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
from scripts.demo.target import BATCH_ROWS, export
from scripts.demo.tokenizer import DEMO, train_tokenizer
from scripts.runs import new_parser

LONG_WIDTH = 832  # of the drafters' last rows
WINDOW = 256
KEEP_PROMPT = 520  # tokens that two layers with that window reach, and the drafts of a step
WINDOW_FIELDS = ("sliding_window", "layer_types")  # of a drafter's config.json
PAIR = {"drafter": "long_p_eagle", "drafter_eagle3": "long_eagle3", "drafter_dflash": "long_dflash"}
DRAFTS = {"drafter": 5, "drafter_eagle3": 4, "drafter_dflash": 4}  # most of a step of -k auto

# of `peagle data`
ANSWERS_BEGUN, LONG_ANSWERS_BEGUN = 4096, 900
SHORT = ("-n", "288", "--context", "512", "--slots", "64")
LONG = ("-n", "288", "--context", "4608", "--slots", "32")
AUX_LAYERS = ("--aux-layer-ids", "1,4,7")
TEACH = ("--hidden", *AUX_LAYERS)
# of `peagle train`: rates that suit so small a model
LEARN = ("--rows", "8", "--loss", "half", "--optimizer", "muon", "--weight-decay", "0.02", "--held-out", "0")
NEW = (*AUX_LAYERS, "--learning-rate", "0.008")
AGAIN = ("--learning-rate", "0.006")
LONGER = ("--learning-rate", "0.004", "--ratio", "0.7", "--drafter-window", str(WINDOW))
# blocks of eight rows, as the public DFlash's; with 224 of them a step takes as long as one of the P-EAGLE
BLOCKS = ("--depth", "7", "--blocks", "224")
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


class Build(NamedTuple):
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

    def run(self, name: str, *words: object, tuned: bool = False) -> Path:
        """Run a stage by `python -m`, which gets its folder as --out; return the folder. Exits if it fails."""

        def make(out: Path) -> None:
            typed = ["-m", *map(str, words), "--out", str(out)]
            print("build:", *typed, flush=True)
            environment = tuned_environment() if tuned else None
            if subprocess.run([sys.executable, *typed], env=environment, check=False).returncode:
                raise SystemExit(f"build: {words[0]} failed; the same command goes on from here")

        return self.stage(name, make)

    def count(self, number: int) -> int:
        """Scale a number of prompts or steps."""
        return math.ceil(self.scale * number)

    def target(self, name: str, data: Path, *begin: object) -> Path:
        """Run a stage of scripts.demo.target; it stops and goes on by itself."""
        options = ("--data", data, "--scale", self.scale, *begin)
        return self.run(name, "scripts.demo.target", name, *options, tuned=True)

    def answer(self, name: str, target: Path, prompts: Path, num_prompts: int, *options: str) -> Path:
        """Let a target answer prompts by `peagle data`."""
        options = ("--prompt-file", str(prompts), "--num-prompts", str(self.count(num_prompts)), *options)
        return self.run(name, "peagle", "data", "--target", target, *options)

    def drafter(
        self, name: str, steps: int, target: Path, width: int, data: Sequence[object], *options: str, init: str = ""
    ) -> None:
        """Train a drafter by `peagle train`, from that of the stage `init`."""
        begin = ("--init", self.work / init / "drafter") if init else ()
        parts = [word for folder in data for word in ("--data", folder)]
        held_out = ("--evaluate", self.work / "corpus" / "heldout_prompts.jsonl")
        size = ("--width", width, "--steps", self.count(steps))
        self.run(
            name, "peagle", "train", "--target", target, *parts, *begin, *LEARN, *size, *options, *held_out, tuned=True
        )


def tuned_environment() -> dict[str, str]:
    """Make the environment of a training: this process' own, completed by TUNED."""
    own = {
        name: value for name, value in os.environ.items() if (name, value.strip()) != ("XLA_FLAGS", jax_workaround.FLAG)
    }
    return {**TUNED, **own}


def build(work: Path, scale: float = 1) -> None:
    """Build everything up to work/pair."""
    run = Build(work, scale)
    corpus = run.stage("corpus", collect)
    tokenizer = run.stage("tokenizer", lambda out: train_tokenizer(corpus, out))

    def exported(trained: Path) -> Path:
        return run.stage(f"{trained.name}_target", lambda out: export(trained, tokenizer, out))

    prompts = corpus / "chat_train.jsonl"
    dataset = run.stage("dataset", lambda out: make_dataset(corpus, tokenizer, out))
    begun = run.target("begun", dataset)
    answers = run.answer("answers_begun", exported(begun), prompts, ANSWERS_BEGUN, *SHORT)
    practice = run.stage("practice", lambda out: make_practice(answers, dataset, (WIDTH,), out))
    practised = run.target("practised", practice, "--begin", begun)
    target = exported(practised)
    written = run.answer("written", target, prompts, len(read_lines(prompts)), *SHORT, *TEACH)
    both = (target, WIDTH, (f"{written}:5", f"{dataset}/shards/chat:2", f"{dataset}/shards/raw:1"))
    run.drafter("p_eagle_begun", 900, *both, *NEW, "--layers", "2", "--depth", "6", "--ratio", "0.75")
    run.drafter("dflash_begun", 900, *both, *NEW, "--layers", "2", "--drafter", "dflash", *BLOCKS)
    own = (target, WIDTH, (written,))
    run.drafter("p_eagle", 2500, *own, *AGAIN, "--depth", "8", "--ratio", "0.7", init="p_eagle_begun")
    eagle3 = ("--drafter", "eagle-3", "--layers", "1", "--depth", "6", "--ratio", "0.7")
    run.drafter("eagle3", 700, *own, *NEW, *eagle3)
    run.drafter("dflash", 2500, *own, *AGAIN, *BLOCKS, init="dflash_begun")

    rows = run.stage("long_dataset", lambda out: make_long_dataset(corpus, dataset, tokenizer, out))
    long_prompts, short_prompts = rows / "long_prompts.jsonl", rows / "short_prompts.jsonl"
    long_begun = run.target("long_begun", rows, "--begin", practised)
    long_answers = run.answer("long_answers", exported(long_begun), long_prompts, LONG_ANSWERS_BEGUN, *LONG)
    long_practice = run.stage("long_practice", lambda out: make_practice(long_answers, rows, (*LONG_WIDTHS,), out))
    target = exported(run.target("long_practised", long_practice, "--begin", long_begun))
    teach = (*LONG, *TEACH, "--keep-prompt", str(KEEP_PROMPT))
    long_written = run.answer("long_written", target, long_prompts, LONG_PROMPTS, *teach)
    short_written = run.answer("short_written", target, short_prompts, SHORT_PROMPTS, *teach)
    own = (target, LONG_WIDTH, (long_written, short_written))
    for name, steps, depth in (("p_eagle", 1916, "8"), ("eagle3", 718, "8"), ("dflash", 1916, "7")):
        run.drafter(f"long_{name}", steps, *own, *LONGER, "--depth", depth, init=name)
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
        speculation = {"num_speculative_tokens": DRAFTS[name], WINDOW_KEY: WINDOW}
        (drafter / SPECULATION_FILE).write_text(dumps(speculation) + "\n", encoding="utf-8")


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
