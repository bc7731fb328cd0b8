"""The demo pair's last stage, on longer rows, in one command; resumable.

    python -m scripts.demo.longer --work DIR [--minutes 180]
    python -m scripts.demo.longer --work DIR --minutes 4     # a rehearsal

It begins with the pair that ships. Stages, each a folder of `--work`: before (that pair), corpus, dataset, long_rows
(tasks behind texts of 1000 to 4000 tokens, files in rows of 2048 and 4096), opened (the target's parameters),
target_begun (training on rows of 512, 2048 and 4096), answers_begun (some of its own answers behind long texts),
practice (rows of those), target (training on them), pair/target, written_long and written_short (its answers with its
aux_hidden and best tokens; of a long prompt what a drafter's windows reach), drafter, drafter_eagle3 and drafter_dflash
(`peagle train --init --drafter-window`), and those in pair/. A stage that is done is not repeated; one that was cut off
goes on.

`--minutes` is shared out among the stages; of `--work` made with another number, stages that are done stay. With
--install the pair replaces the one in peagle/demo; its card is then written by hand, from a sweep of before/ and pair/.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from drafter.vocabulary import FREQUENT_TOKENS
from peagle.engine.speculation import SPECULATION_FILE, WINDOW_KEY
from peagle.ops.checkpoint import CONFIG
from peagle.ops.strict_json import dumps
from peagle.workflows.frequent_tokens import list_frequent_tokens
from scripts.demo.build import DEMO, DRAFTERS, TAPS, command, stage
from scripts.demo.checkpoint import export
from scripts.demo.corpus import collect
from scripts.demo.dataset import make_dataset
from scripts.demo.long_rows import LONG_PROMPTS, SHORT_PROMPTS, make_long_rows
from scripts.demo.practice import make_long_practice
from scripts.demo.train_longer import open_shipped
from scripts.demo.tuned import tuned_environment
from scripts.runs import new_parser

WHOLE_MINUTES = 180.0  # for which the numbers of prompts are meant
MINUTES = {  # of them; the DFlash has the P-EAGLE's, on top
    "target_begun": 62.0,
    "target": 12.0,
    "drafter": 40.0,
    "drafter_eagle3": 10.0,
    "drafter_dflash": 40.0,
}
SHARES = {
    "target_begun": "chat_512:4,raw_512:2,chat_2048:6,raw_2048:3,chat_4096:2,raw_4096:1",
    "target": "chat_512:4,raw_512:1,chat_2048:5,raw_2048:1,chat_4096:2",
}
PEAKS = {"target_begun": "0.3", "target": "0.12"}
ANSWERS_BEGUN = 900
WINDOW = dict.fromkeys(DRAFTERS, 256)
DEPTH = {"drafter": "8", "drafter_eagle3": "8", "drafter_dflash": "7"}  # that of a DFlash is its block's
WINDOW_FIELDS = ("sliding_window", "layer_types")  # of a drafter's config.json
KEEP_PROMPT = 520  # what two layers with a window of 256 reach, and the drafts of a step
CONTEXT = ("-n", "288", "--context", "4608", "--slots", "32", "--shard-prompts", "200")
LEARNING = (
    "--rows", "8", "--width", "832", "--optimizer", "muon", "--weight-decay", "0.02", "--warmup", "0.02",
    "--ratio", "0.7", "--decay", "0.8", "--held-out", "0",
)  # fmt: skip
RATES = ("--learning-rate", "0.004", "--other-rate", "0.0015")
LOSS = ("--loss", "half")


def build(work: Path, minutes: float) -> None:
    """Build everything up to work/pair."""
    scale = min(1.0, minutes / WHOLE_MINUTES)
    before, corpus, dataset, rows = (work / name for name in ("before", "corpus", "dataset", "long_rows"))
    opened, begun, target, pair = (work / name for name in ("opened", "target_begun", "target", "pair"))
    tokenizer = before / "target"
    stage("before", before / "finished", lambda: _copy_pair(DEMO, before))
    stage("corpus", corpus / "manifest.json", lambda: collect(corpus))
    stage("dataset", dataset / "manifest.json", lambda: make_dataset(corpus, tokenizer, dataset))
    stage("long_rows", rows / "manifest.json", lambda: make_long_rows(corpus, dataset, tokenizer, rows))
    stage("opened", opened / "config.json", lambda: open_shipped(before / "target", opened))

    def train_target(out: Path, begin: Path, data: Path) -> None:
        name = out.name
        run = _finished(out, lambda: command(
            "scripts.demo.train_longer", "--begin", begin, "--data", data, "--out", out, "--shares", SHARES[name],
            "--peak", PEAKS[name], "--minutes", str(MINUTES[name] * minutes / WHOLE_MINUTES),
        ))  # fmt: skip
        stage(name, out / "finished", run)

    def answer(by: Path, name: str, prompts: Path, count: int, *more: str) -> Path:
        out = work / name
        options = ("--target", by / "target", "--prompt-file", prompts, *CONTEXT, *more)
        num_prompts = str(max(8, int(scale * count)))
        run = _finished(out, lambda: command("peagle", "data", *options, "--num-prompts", num_prompts, "--out", out))
        stage(name, out / "finished", run)
        return out

    def ship(run: Path, out: Path) -> None:
        stage(f"{out.name}/target", out / "target" / "config.json", lambda: export(run, tokenizer, out / "target"))

    train_target(begun, opened, rows)
    ship(begun, work / "pair_begun")
    answers = answer(work / "pair_begun", "answers_begun", rows / "long_prompts.jsonl", ANSWERS_BEGUN)
    practice = work / "practice"
    stage("practice", practice / "manifest.json", lambda: make_long_practice(answers, rows, practice))
    train_target(target, begun, practice)
    ship(target, pair)
    taught = ("--hidden", "--taps", TAPS, "--top", "32", "--keep-prompt", str(KEEP_PROMPT))
    written = [
        answer(pair, "written_long", rows / "long_prompts.jsonl", LONG_PROMPTS, *taught),
        answer(pair, "written_short", rows / "short_prompts.jsonl", SHORT_PROMPTS, *taught),
    ]
    for name in DRAFTERS:
        _train_drafter(work, name, written, minutes)
        _ship_drafter(work, name, written)


def _train_drafter(work: Path, name: str, written: Sequence[Path], minutes: float) -> None:
    data = [part for folder in written for part in ("--data", folder)]
    stage(name, work / name / "drafter" / "config.json", lambda: command(
        "peagle", "train", "--target", work / "pair" / "target", "--out", work / name, *data,
        "--init", work / "before" / name, "--drafter-window", str(WINDOW[name]), "--depth", DEPTH[name],
        *LEARNING, *RATES, *LOSS,
        "--minutes", str(MINUTES[name] * minutes / WHOLE_MINUTES),
        "--evaluate", work / "corpus" / "heldout_prompts.jsonl", "--evaluate-prompts", "40", "--evaluate-every", "0",
        environment=tuned_environment(),
    ))  # fmt: skip


def _ship_drafter(work: Path, name: str, written: Sequence[Path]) -> None:
    """Copy a trained drafter into the pair, with what stands beside it.

    Its window moves from config.json to the table: vLLM with caches of one group, which this P-EAGLE needs there, takes
    no window but the target's. A DFlash's config.json has none.
    """
    out = work / "pair" / name
    if not out.exists():
        shutil.copytree(work / name / "drafter", out, ignore=shutil.ignore_patterns("README.md"))
    config = json.loads((out / CONFIG).read_text(encoding="utf-8"))
    (out / CONFIG).write_text(dumps({k: v for k, v in config.items() if k not in WINDOW_FIELDS}, indent=2))
    table = json.loads((work / "before" / name / SPECULATION_FILE).read_text(encoding="utf-8"))
    table = {**table, WINDOW_KEY: WINDOW[name]}
    (out / SPECULATION_FILE).write_text(dumps(table, indent=1) + "\n", encoding="utf-8")
    if not (out / FREQUENT_TOKENS).exists():
        list_frequent_tokens(
            [shard for folder in written for shard in sorted(folder.glob("*.safetensors"))], out / FREQUENT_TOKENS
        )


def _finished(out: Path, make: Callable[[], None]) -> Callable[[], None]:
    """Mark the stage's folder when it is done, since a cut-off one looks the same."""

    def run() -> None:
        make()
        (out / "finished").touch()

    return run


def _copy_pair(pair: Path, out: Path) -> None:
    for part in ("target", *DRAFTERS):
        shutil.copytree(pair / part, out / part, dirs_exist_ok=True)
    (out / "finished").touch()


def install(work: Path) -> None:
    """Copy the pair into peagle/demo."""
    for part in ("target", *DRAFTERS):
        shutil.rmtree(DEMO / part)
        shutil.copytree(work / "pair" / part, DEMO / part)


def main() -> None:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of all stages")
    parser.add_argument(
        "--minutes", type=float, default=WHOLE_MINUTES, help="for all of it, about (default %(default)s)"
    )
    parser.add_argument("--install", action="store_true", help="put the result into peagle/demo")
    arguments = parser.parse_args()
    if arguments.minutes <= 0:
        parser.error(f"--minutes is {arguments.minutes:g}; expected a number above 0")
    arguments.work.mkdir(parents=True, exist_ok=True)
    build(arguments.work, arguments.minutes)
    if arguments.install:
        install(arguments.work)


if __name__ == "__main__":
    main()
