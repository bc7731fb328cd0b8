"""What each choice of a drafter's training is worth: the same training with one thing changed at a time.

    python -m scripts.ablate_training --work DIR --out RUN --data DIR --corpus-data DIR --steps 300

Every variant is trained by `peagle train` in a folder of --work, on the same data, with as many steps; then the engine
decodes held-out prompts with it, greedy, K = 7. What is done is not done again, a training that was cut off goes on.
EAGLE-3 is trained twice: with as many steps, and for as long as the base.

Afterwards `--out` (which must not exist yet) holds run.json, raw.jsonl (a line per variant, seed and prompt), README.md
and ablation.png.
"""

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import peagle
from drafter.train.folder import LOG, read_log
from peagle.loading import HELD_OUT
from peagle.measure.metrics import figure_text
from peagle.measure.sweep.figures import Estimate, estimate, one_more_than_ratio, ratio
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from peagle.ops.strict_json import dumps
from peagle.result import LOOPING_ABOVE, decode
from scripts.demo.tuned import TUNED
from scripts.held_out import first_requests
from scripts.results import in_one_line, origin, write_run

Json = dict[str, Any]
Options = Mapping[str, str | None]  # of peagle train; None: a flag
NUM_DRAFTS = 7
PROMPTS = 60
NEW_TOKENS = 256

BASE: Options = {
    "--layers": "2", "--depth": "8", "--ratio": "0.8", "--loss": "half", "--rows": "8", "--width": "512",
    "--optimizer": "muon", "--learning-rate": "0.008", "--other-rate": "0.003", "--weight-decay": "0.02",
    "--warmup": "0.02", "--decay": "0.6",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Variant:
    """A training that differs from the base; what the paper (arXiv 2602.01469) found of that choice."""

    name: str
    group: str
    options: Options
    paper: str = ""
    corpus: bool = False  # trained on the corpus' own text instead of the target's answers
    as_long: bool = False  # for as long as the base, whatever the number of steps


VARIANTS = (
    Variant("base", "", {}),
    Variant("1 layer", "layers", {"--layers": "1"}, "1/2/4 layers: 2.69/3.58/3.92"),
    Variant("4 layers", "layers", {"--layers": "4"}, "as above"),
    Variant("mask hidden by depth", "mask hidden", {"--mask-hiddens": "7"}, "shared is better: 3.16 against 2.85"),
    Variant("frozen embedding", "embedding", {"--freeze-embedding": None}, "trained is better: 2.69 against 2.56"),
    Variant("K_train 5", "K_train", {"--depth": "5"}, "8 is better than 5: 2.51 against 2.41, at K = 5"),
    Variant("COD r 0.5", "COD r", {"--ratio": "0.5"}, "takes 0.8"),
    Variant("COD r 1", "COD r", {"--ratio": "1"}, "takes 0.8"),
    Variant("cross-entropy", "loss", {"--loss": "cross_entropy"}, "does not say; its author: cross-entropy"),
    Variant("KL", "loss", {"--loss": "kl"}, "does not say"),
    Variant("corpus text", "data", {}, "trains on the target's own answers", corpus=True),
    Variant("EAGLE-3, as many steps", "drafter", {"--autoregressive": None, "--layers": "1"}, "P-EAGLE of 2 layers "
            "accepts less, of 4 as much"),
    Variant("EAGLE-3, as long", "drafter", {"--autoregressive": None, "--layers": "1"}, "as above", as_long=True),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the trainings; goes on with its own")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--data", type=Path, required=True, help="what peagle data wrote")
    parser.add_argument("--corpus-data", type=Path, help="training data of the corpus' own text, for that variant")
    parser.add_argument("--steps", type=int, default=300, help="of every training (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each variant (default %(default)s)")
    parser.add_argument("--only", help="names of variants with commas between, beside the base")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--taps", help="as of peagle train")
    parser.add_argument("--mask-token", help="as of peagle train")
    parser.add_argument("--prompts", type=Path, default=HELD_OUT, help="JSON lines (default: the demo's held-out ones)")
    arguments = parser.parse_args()
    return in_one_line("ablate_training", lambda: ablate(arguments))


def ablate(arguments: argparse.Namespace) -> int:
    """Everything is checked before anything runs."""
    expect_new(arguments.out)
    if arguments.steps < 1 or arguments.seeds < 1:
        raise InputError("--steps and --seeds must be 1 or more")
    variants = chosen(arguments.only, arguments.corpus_data is not None)
    arguments.work.mkdir(parents=True, exist_ok=True)
    started, runs = time.monotonic(), [(variant, seed) for variant in variants for seed in range(arguments.seeds)]
    raw: list[Json] = []
    records: list[Json] = []
    for number, (variant, seed) in enumerate(runs):
        took = (time.monotonic() - started) / 60
        left = f"; {took / number * (len(runs) - number):.0f} min left" if number else ""
        print(f"{number + 1} of {len(runs)}: {variant.name}, seed {seed}{left}", file=sys.stderr, flush=True)
        folder = train(arguments, variant, seed)
        records.append(training_record(variant, seed, folder))
        raw += evaluated(arguments, variant, seed, folder)
    record = {
        "schema": 1,
        "provenance": origin("scripts.ablate_training"),
        "config": {
            "base": dict(BASE), "steps": arguments.steps, "seeds": arguments.seeds, "target": arguments.target,
            "num_speculative_tokens": NUM_DRAFTS, "prompts": arguments.prompts.name, "num_prompts": PROMPTS,
            "max_new_tokens": NEW_TOKENS,
        },
        "trainings": records,
        "rows": [row(variant, records, raw) for variant in variants],
    }  # fmt: skip
    write_run(arguments.out, record, raw, page(record))
    draw(record, arguments.out / "ablation.png")
    return 0


def chosen(only: str | None, corpus: bool) -> tuple[Variant, ...]:
    """The base, and those asked for. Raises InputError for a name that is none, and where data is missing for one."""
    names = [variant.name for variant in VARIANTS]
    wanted = names if only is None else ["base", *only.split("/")]
    if unknown := [name for name in wanted if name not in names]:
        raise InputError(f"--only names {unknown[0]!r}; expected names of {'/'.join(names)} with / between")
    found = tuple(variant for variant in VARIANTS if variant.name in wanted)
    if not corpus and any(variant.corpus for variant in found):
        raise InputError("the variant 'corpus text' needs --corpus-data, or leave it out with --only")
    return found


def train(arguments: argparse.Namespace, variant: Variant, seed: int) -> Path:
    """The folder of the training, which is finished."""
    folder: Path = arguments.work / f"{variant.name.replace(' ', '_').replace(',', '')}-{seed}"
    if (folder / "drafter" / "config.json").exists():
        return folder
    options = {**BASE, **variant.options, "--seed": str(seed), "--steps": str(steps_of(arguments, variant))}
    if arguments.mask_token and "--autoregressive" not in variant.options:
        options["--mask-token"] = arguments.mask_token
    if arguments.taps:
        options["--taps"] = arguments.taps
    data = arguments.corpus_data if variant.corpus else arguments.data
    typed = [word for name, value in options.items() for word in ((name,) if value is None else (name, value))]
    command = [sys.executable, "-m", "peagle", "train", "--target", arguments.target, "--data", str(data)]
    done = subprocess.run([*command, "--out", str(folder), *typed, "--quiet"], env={**TUNED, **os.environ}, check=False)
    if done.returncode:
        raise InputError(f"the training of {variant.name} failed; the same command goes on from here")
    return folder


def steps_of(arguments: argparse.Namespace, variant: Variant) -> int:
    """How many steps; of a training as long as the base, by what a step took in the trainings before it."""
    if not variant.as_long:
        return int(arguments.steps)
    base, other = (seconds_per_step(arguments.work / f"{name}-0") for name in ("base", "EAGLE-3_as_many_steps"))
    return max(1, round(arguments.steps * base / other))


def seconds_per_step(folder: Path) -> float:
    """Of the steps between the first line of the log, which holds compiling, and the last of the same sitting."""
    lines = [line for line in read_log(folder / LOG) if "loss" in line]
    pairs = itertools.pairwise(lines)
    took = [
        (after["elapsed_s"] - before["elapsed_s"]) / (after["step"] - before["step"])
        for before, after in pairs
        if after["elapsed_s"] > before["elapsed_s"]
    ]
    if not took:
        raise InputError(f"{folder}: too few steps to tell how long one takes; give more --steps")
    return float(np.median(took))


def training_record(variant: Variant, seed: int, folder: Path) -> Json:
    """What the training's own log says of it."""
    lines = [line for line in read_log(folder / LOG) if "loss" in line]
    return {
        "variant": variant.name,
        "seed": seed,
        "steps": lines[-1]["steps"],
        "seconds_per_step": seconds_per_step(folder),
        "hits_by_depth": lines[-1]["hits_by_depth"],
    }


def evaluated(arguments: argparse.Namespace, variant: Variant, seed: int, folder: Path) -> list[Json]:
    """A line per prompt: what the engine accepted; kept in the folder."""
    kept = folder / "evaluated.jsonl"
    if kept.exists():
        return [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
    pair = peagle.load(arguments.target, folder / "drafter")
    requests = first_requests(pair, arguments.prompts, PROMPTS, NEW_TOKENS)
    engine = pair.engine(pair.engine_config(NUM_DRAFTS, capacity=pair.capacity(requests)))
    lines = []
    for request in requests:
        result = decode(engine, [request], None)[0]
        line = {"variant": variant.name, "seed": seed, "request": request.index, "loop_share": result.loop_share}
        lines.append(line | {"num_accepted": [step.num_accepted for step in result.steps]})
    partial = kept.with_suffix(".partial")
    partial.write_text("".join(dumps(line) + "\n" for line in lines), encoding="utf-8")
    partial.replace(kept)
    return lines


def row(variant: Variant, records: Sequence[Json], raw: Sequence[Json]) -> Json:
    """A variant's figures over its seeds; the intervals resample prompts."""
    lines = [line for line in raw if line["variant"] == variant.name]
    own = [record for record in records if record["variant"] == variant.name]
    quiet = [line for line in lines if (line["loop_share"] or 0.0) <= LOOPING_ABOVE]
    by_seed = [[line for line in lines if line["seed"] == seed] for seed in sorted({line["seed"] for line in lines})]
    accepted = np.array([step for line in lines for step in line["num_accepted"]])
    return {
        "variant": variant.name,
        "group": variant.group,
        "paper": variant.paper,
        "steps": own[0]["steps"],
        "seconds_per_step": float(np.median([record["seconds_per_step"] for record in own])),
        "acceptance_length": length(lines),
        "acceptance_length_interval": interval(lines),
        "over_base": over(lines, [line for line in raw if line["variant"] == VARIANTS[0].name]),
        "acceptance_length_by_seed": [length(each) for each in by_seed],
        "acceptance_length_without_loops": length(quiet),
        "acceptance_length_without_loops_interval": interval(quiet),
        "acceptance_rate_per_position": [
            float((accepted > place).mean()) if len(accepted) else None for place in range(NUM_DRAFTS)
        ],
        "num_outputs": len(lines),
        "num_outputs_without_loops": len(quiet),
    }


def length(lines: Sequence[Json]) -> float | None:
    """1 + accepted / steps, over all steps; None where there are none."""
    steps = [step for line in lines for step in line["num_accepted"]]
    return 1 + sum(steps) / len(steps) if steps else None


def counted(lines: Sequence[Json]) -> dict[int, list[int]]:
    """{prompt: [accepted, steps] of all its seeds}."""
    counts: dict[int, list[int]] = {}
    for line in lines:
        count = counts.setdefault(line["request"], [0, 0])
        count[0] += sum(line["num_accepted"])
        count[1] += len(line["num_accepted"])
    return counts


def interval(lines: Sequence[Json]) -> list[float] | None:
    """95 %, resampling prompts, each with all its seeds; None of too few prompts."""
    return _ends(estimate(np.array(list(counted(lines).values())), one_more_than_ratio))


def over(lines: Sequence[Json], base: Sequence[Json]) -> Json:
    """How much longer than the base's acceptance length is; the interval resamples prompts, the same of both."""
    ours, theirs = counted(lines), counted(base)
    table = np.array([ours[request] + theirs[request] for request in ours])
    found = estimate(table, lambda sums: ratio(sums[:, :2]) - ratio(sums[:, 2:]))
    longer, shorter = length(lines), length(base)
    return {"value": None if longer is None or shorter is None else longer - shorter, "interval": _ends(found)}


def _ends(found: Estimate | None) -> list[float] | None:
    return None if found is None or found.low is None or found.high is None else [found.low, found.high]


def page(record: Json) -> str:
    """README.md of the run."""
    config, source = record["config"], record["provenance"]
    base = record["rows"][0]
    lines = [
        "# What each choice of the training is worth",
        "",
        f"`{source['command']}`",
        "",
        f"Target {config['target']}; {config['steps']} steps of each, {config['seeds']} seed(s); one thing changed "
        f"from the base at a time. Acceptance on {config['num_prompts']} held-out prompts, greedy, K = "
        f"{config['num_speculative_tokens']}, at most {config['max_new_tokens']} new tokens; intervals resample "
        f"prompts, 95 %. {source['cpu']}, {source['num_threads']} threads; jaxlib {source['packages']['jaxlib']}; "
        f"{source['time']}.",
        "",
        "Base: `" + " ".join(f"{name} {value}" for name, value in config["base"].items()) + "`",
        "",
        "| | acceptance length (95 %) | over the base (paired) | without loops (95 %) | per position "
        "| s a step | paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in record["rows"]:
        rates = " ".join(figure_text(rate, ".2f").lstrip("0") for rate in each["acceptance_rate_per_position"])
        steps = "" if each["steps"] == config["steps"] else f" ({each['steps']} steps)"
        lines.append(
            f"| {each['variant']}{steps} | {_with_interval(each, 'acceptance_length')} | "
            f"{'-' if each is base else _signed(each['over_base'])} | "
            f"{_with_interval(each, 'acceptance_length_without_loops')} | {rates} | "
            f"{each['seconds_per_step']:.2f} | {each['paper']} |"
        )
    looping = base["num_outputs"] - base["num_outputs_without_loops"]
    lines += [
        "",
        f"{looping} of {base['num_outputs']} outputs loop (repeated-4-gram share above {LOOPING_ABOVE}). "
        "![ablation](ablation.png)",
        "",
    ]
    return "\n".join(lines)


def _signed(found: Json) -> str:
    ends = found["interval"]
    return figure_text(found["value"], "+.2f") + ("" if ends is None else f" ({ends[0]:+.2f}..{ends[1]:+.2f})")


def _with_interval(each: Json, key: str) -> str:
    ends = each[f"{key}_interval"]
    return figure_text(each[key], ".2f") + ("" if ends is None else f" ({ends[0]:.2f}..{ends[1]:.2f})")


def draw(record: Json, path: Path) -> None:
    """Acceptance length of every variant, the base on top."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = record["rows"][::-1]
    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.42 * len(rows)), layout="constrained")
    series = (
        ("acceptance_length", "all outputs", 0.12, "tab:blue"),
        ("acceptance_length_without_loops", "without loops", -0.12, "tab:orange"),
    )
    for key, label, shift, color in series:
        for at, each in enumerate(rows):
            if each[key] is None:
                continue
            ends = each[f"{key}_interval"] or [each[key]] * 2
            axis.plot(ends, [at + shift] * 2, color=color, linewidth=1.5)
            axis.plot(each[key], at + shift, "o", color=color, markersize=5, label=label if at == 0 else None)
        axis.axvline(record["rows"][0][key] or np.nan, color=color, linewidth=0.7, linestyle=":")
    axis.set_yticks(range(len(rows)), [each["variant"] for each in rows])
    axis.set(xlabel=f"acceptance length, K = {NUM_DRAFTS} (bars: 95 %)")
    axis.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
