"""Go through a newcomer's first hour by the README's commands; write a page of each command, its time, what it said.

    python -m scripts.first_hour --out RUN
    python -m scripts.first_hour --out RUN --minutes 0.5 --num-prompts 48 --held-out 8 --repeats 1     # a rehearsal
    python -m scripts.first_hour --out RUN --target DIR [--recipe DIR]     # a drafter for the demo's target, changed

The target is the demo's, or one of its shape. Its drafter goes on from the shipped one on answers to functions of the
standard library, and is compared on held-out prompts with the shipped one, and with one that the long recipe made for
this target. `--out` (which must not exist yet) holds README.md, run.json, the whole output of each command in logs/,
the folders that the commands wrote in work/, and pictures of the report in pictures/ if playwright and Chromium are
installed.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from peagle.checkpoints import DEMO, HELD_OUT, resolve
from peagle.measure.pages import Block, Table, heading
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from peagle.ops.strict_json import dumps
from scripts.demo.corpus import build_corpus, collect_sources
from scripts.demo.tasks import digest
from scripts.runs import Json, Progress, add_run_options, figure_text, in_one_line, new_parser, origin, where, write_run
from scripts.screenshots import chromium

PROMPTS, HELDOUT = "prompts.jsonl", "heldout.jsonl"
TRAINED = "run/drafter"
TARGET, SHIPPED, RECIPE = "target", "shipped", "recipe"  # links, for another target than the demo's
LINES = 6  # of a command's output on the page
AIM = 0.8  # the trained drafter's acceptance length lies within this of the shipped one's
SHARE_AIM = 0.9  # of the acceptance length of a drafter by the long recipe
FINDS = ("parity",)  # commands whose exit code 1 is a finding


@dataclass(frozen=True)
class Budget:
    """How much is asked of the hour."""

    minutes: float
    num_prompts: int
    held_out: int
    repeats: int
    target: str | None = None  # a folder; None: the demo's
    recipe: str | None = None  # a folder; a drafter of that target


@dataclass(frozen=True)
class Done:
    """A command with its time and its output."""

    title: str
    command: str
    seconds: float
    exit_code: int
    lines: tuple[str, ...]


def steps(budget: Budget) -> Iterator[tuple[str, str]]:
    """Yield (what it is for, the command as in the README)."""
    asked = f"--prompts {HELDOUT} --num-prompts {budget.held_out} --repeats {budget.repeats}"
    of = "" if budget.target is None else f" --target {TARGET}"
    shipped = SHIPPED if of else DEMO
    compared = ",".join([TRAINED, shipped, *[RECIPE] * (budget.recipe is not None)])
    yield "first command", f"peagle speculate{of} --drafter {shipped} -k 3" if of else "peagle speculate -k 3"
    yield "data", f"peagle data{of} --prompt-file {PROMPTS} --out data"
    trained = f"--out run --init {shipped} --minutes {budget.minutes:g} --evaluate {HELDOUT}"
    yield "train", f"peagle train{of} --data data {trained}"
    yield "use it", f"peagle speculate{of} --drafter {TRAINED}"
    yield "sweep", f"peagle sweep{of} --out sweep -k 3,7 --drafter {compared} {asked}"
    yield "report", "peagle report sweep --out report"
    yield "parity", f"peagle parity{of} --drafter {TRAINED}" + (f" --prompts {HELDOUT}" if of else "")
    yield "export", f"peagle export {TRAINED} --out theirs --dialect speculators"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    add_run_options(parser)
    parser.add_argument(
        "--target", type=Path, help="folder of a target that the demo's drafter fits (default: its own)"
    )
    parser.add_argument("--recipe", type=Path, help="folder of a drafter that the long recipe made for that target")
    parser.add_argument("--minutes", type=float, default=10, help="of training (default %(default)s)")
    parser.add_argument("--num-prompts", type=int, default=2000, help="that the target answers (default %(default)s)")
    parser.add_argument("--held-out", type=int, default=60, help="prompts of the comparison (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each of them (default %(default)s)")
    given = parser.parse_args(arguments)
    return in_one_line("first_hour", lambda: first_hour(given, arguments))


def first_hour(given: argparse.Namespace, arguments: Sequence[str] | None) -> int:
    """Run all commands, then write the page. Raises InputError for one that fails."""
    folders = {name: getattr(given, name) for name in (TARGET, RECIPE) if getattr(given, name) is not None}
    if RECIPE in folders and TARGET not in folders:
        raise InputError("--recipe is a drafter of --target, which is missing; the demo's drafter is compared anyway")
    if missing := [folder for folder in folders.values() if not folder.is_dir()]:
        raise InputError(f"{missing[0]} is no folder; expected a checkpoint's")
    names = {name: str(folder) for name, folder in folders.items()}
    budget = Budget(given.minutes, given.num_prompts, given.held_out, given.repeats, **names)
    for option, least in (("num_prompts", 1), ("held_out", 1), ("repeats", 1)):
        if getattr(budget, option) < least:
            raise InputError(f"--{option.replace('_', '-')} is {getattr(budget, option)}; expected {least} or more")
    expect_new(given.out)
    work, logs = given.out / "work", given.out / "logs"
    work.mkdir(parents=True)
    logs.mkdir()
    if TARGET in folders:
        folders[SHIPPED] = resolve(DEMO, "drafter")  # the name of the demo's is for the demo's target alone
    for name, folder in folders.items():
        (work / name).symlink_to(folder.resolve())
    write_prompts(work, budget.num_prompts)
    commands, done = list(steps(budget)), []
    say = Progress(total=len(commands))
    for number, (title, command) in enumerate(commands, start=1):
        say.part(title)
        done.append(run(title, command, work, logs / f"{number}_{title.replace(' ', '_')}.txt"))
    say.end()
    record = {
        "schema": 1,
        "provenance": origin("scripts.first_hour", arguments),
        "config": asdict(budget),
        "steps": [asdict(each) for each in done],
        "acceptance": acceptance(json.loads((work / "sweep" / "run.json").read_text("utf-8"))["rows"]),
    }
    write_run(given.out, record, page(record))
    if chromium() is not None:
        taken = [sys.executable, "-m", "scripts.screenshots", str(work / "report" / "report.html")]
        subprocess.run([*taken, str(given.out / "pictures")], check=False)
    return 0


def write_prompts(work: Path, number: int) -> None:
    """Write prompts of the standard library's functions, none of a held-out module, and the held-out ones.

    A function of another module whose prompt stands among the held-out ones, too, is left out.
    """
    held_out = {json.loads(line)["prompt"] for line in HELD_OUT.read_text("utf-8").splitlines()}
    found = {each.task.prompt for each in build_corpus(collect_sources({})).chat_train} - held_out
    lines = (dumps({"prompt": prompt}) + "\n" for prompt in sorted(found, key=digest)[:number])
    (work / PROMPTS).write_text("".join(lines), encoding="utf-8")
    (work / HELDOUT).write_bytes(HELD_OUT.read_bytes())


def run(title: str, command: str, work: Path, log: Path) -> Done:
    """Run a command in the folder as a newcomer does. Raises InputError, with its last line, if it fails."""
    here = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    seconds = time.monotonic() - started
    log.write_text(ended.stdout, encoding="utf-8")
    lines = tuple(line for line in ended.stdout.splitlines() if line.strip())
    if ended.returncode not in (0, *[1] * (title in FINDS)):
        raise InputError(f"{command} ended with {ended.returncode}: {lines[-1] if lines else 'no output'}; see {log}")
    return Done(title, command, seconds, ended.returncode, lines[-LINES:])


def acceptance(rows: Sequence[Mapping[str, Json]]) -> list[Json]:
    """Pick K, drafter and acceptance length of each speculative row of a sweep."""
    return [{name: row[name] for name in ("k", "drafter", "acceptance_length", "speedup")} for row in rows if row["k"]]


def verdict(found: Sequence[Json]) -> str:
    """Say how far the trained drafter lies behind the shipped one at the largest K, or the recipe's, and AIM."""
    most = max(each["k"] for each in found)
    lengths = {each["drafter"]: each["acceptance_length"]["value"] for each in found if each["k"] == most}
    if RECIPE in lengths:
        share = lengths[TRAINED] / lengths[RECIPE]
        return f"the trained one has {share:.2f} of the recipe's (aim: {SHARE_AIM}, {_met(share >= SHARE_AIM)})"
    behind = lengths[DEMO if DEMO in lengths else SHIPPED] - lengths[TRAINED]
    return f"the trained one lies {behind:+.2f} behind (aim: {AIM}, {_met(behind <= AIM)})"


def _met(aim: bool) -> str:
    return "met" if aim else "MISSED"


def page(record: Json) -> list[Block]:
    """Lay out README.md."""
    config, source, found = record["config"], record["provenance"], record["acceptance"]
    times = [[each["title"], f"`{each['command']}`", f"{each['seconds']:.0f} s"] for each in record["steps"]]
    minutes = sum(each["seconds"] for each in record["steps"]) / 60
    said = "\n\n".join("\n".join([f"$ {each['command']}", *each["lines"]]) for each in record["steps"])
    return [
        heading("The first hour", 1),
        f"`{source['command']}`",
        f"The README's commands, one after the other, with {_target_text(config)}: {minutes:.0f} minutes. "
        f"{where(source)}.",
        Table(("step", "command", "time"), times),
        f"Acceptance after {config['minutes']:g} minutes of training from the shipped drafter, beside it, on "
        f"{config['held_out']} held-out prompts, {config['repeats']} repeats; intervals: 95 %, bootstrap over prompts. "
        f"At the largest K {verdict(found)}.",
        Table(
            ("K", "drafter", "acceptance length", "speed-up over plain decoding"),
            [
                [str(each["k"]), each["drafter"], *map(figure_text, (each["acceptance_length"], each["speedup"]))]
                for each in found
            ],
        ),
        heading("What the commands said"),
        f"The last {LINES} lines of each.",
        f"```text\n{said}\n```",
    ]


def _target_text(config: Json) -> str:
    if config["target"] is None:
        return "the demo target"
    return f"a changed target, `{Path(config['target']).name}`, for which the shipped drafter was not trained"


if __name__ == "__main__":
    sys.exit(main())
