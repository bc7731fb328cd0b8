"""Acceptance length and speed over K, on the demo's held-out prompts or your own.

    python scripts/sweep_acceptance.py --out results/2026-11-21_cpu_demo_sweep -k 1,2,3,5,7,auto
    python scripts/sweep_acceptance.py --out results/2026-11-21_cpu_draft_vocab -k 3 --draft-vocab full,1024,512
    python scripts/sweep_acceptance.py --out results/2026-11-21_cpu_drafters -k 3,5 --drafter demo,runs/eagle3,ngram

Every prompt is decoded with every K (and every drafter and draft vocabulary) in turn, plain decoding (K = 0) always
among them, in an order that rotates from prompt to prompt and repeat to repeat, so that a drift of the machine falls on
all alike.
Compilation, and measuring the costs that `auto` goes by, are outside of every time.

Afterwards `--out` (which must not exist yet) holds run.json (provenance, configuration, a row per K, and in it the
speed-up of each prompt), raw.jsonl (a line per decoded request), README.md (the table) and sweep.png.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy import stats

import peagle
from peagle.config import SamplingConfig, SpeculationConfig
from peagle.generate import Engine
from peagle.metrics import LOOPING_ABOVE, Result, decode, pooled_counters, pooled_tok_per_s
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from peagle.pair import AUTO, DEMO_DIRECTORY, Pair
from peagle.prompts import Rendering, read_prompt_file
from peagle.provenance import provenance

HELD_OUT = DEMO_DIRECTORY / "heldout_prompts.jsonl"
BOOTSTRAP = 2000
LENGTHS = ("acceptance_length", "acceptance_length_without_loops")  # keys of a row
FULL = "full"  # the drafter's whole vocabulary
SLOWER = 0.97  # a prompt whose interval lies wholly below is slower with speculation


@dataclass(frozen=True)
class Arm:
    """One way to decode; k "auto" chooses at each step, 0 is plain decoding."""

    k: int | Literal["auto"]
    draft_vocab: str | None = None  # None: full
    drafter: str | None = None  # None: the first

    @property
    def label(self) -> str:
        parts = [str(self.k)]
        if self.drafter is not None:
            parts.append(Path(self.drafter).name)
        if self.draft_vocab is not None:
            parts.append(f"{Path(self.draft_vocab).name} tokens")
        return ", ".join(parts)


PLAIN = Arm(0)
Loaded = tuple[str | None, str | None]  # (drafter, draft vocabulary) of an arm


@dataclass(frozen=True)
class Sweep:
    """What is swept; written to run.json before anything runs."""

    target: str
    drafters: tuple[str, ...]
    prompts: str
    num_prompts: int
    arms: tuple[Arm, ...]
    repeats: int
    max_new_tokens: int
    temperature: float
    seed: int
    raw_prompts: bool
    kernels: str  # what computed: the native kernels, or XLA and why


def run(pairs: dict[Loaded, Pair], sweep: Sweep) -> dict[Arm, list[list[Result]]]:
    """results[arm][repeat][prompt], decoded in rotating order."""
    pair = pairs[None, None]
    conversations = read_prompt_file(Path(sweep.prompts))[: sweep.num_prompts]
    rendering = Rendering(raw=sweep.raw_prompts)
    requests = [
        pair.request(c, [], rendering, max_new_tokens=sweep.max_new_tokens, seed=sweep.seed, index=i)
        for i, c in enumerate(conversations)
    ]
    capacity, sampling = pair.capacity(requests), SamplingConfig(temperature=sweep.temperature)
    engines: dict[Arm, Engine] = {}
    for arm in sweep.arms:
        k, adaptive = pair.num_drafts(arm.k)
        engine = pairs[arm.drafter, arm.draft_vocab].engine(SpeculationConfig(k, 1, capacity, sampling, adaptive))
        engine.warm_up(requests)
        engines[arm] = engine
    results: dict[Arm, list[list[Result]]] = {arm: [[] for _ in range(sweep.repeats)] for arm in sweep.arms}
    started, total = time.monotonic(), sweep.repeats * len(requests)
    for repeat in range(sweep.repeats):
        for number, request in enumerate(requests):
            turn = (repeat + number) % len(sweep.arms)
            for arm in sweep.arms[turn:] + sweep.arms[:turn]:
                results[arm][repeat] += decode(engines[arm], [request], pair.tokenizer)
            done = repeat * len(requests) + number + 1
            left = (time.monotonic() - started) / done * (total - done)
            print(f"\r{done}/{total} prompts, {left:.0f} s left ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def row(arm: Arm, fast: list[list[Result]], plain: list[list[Result]]) -> dict[str, Any]:
    """The figures of one arm. Acceptance is of the first repeat (greedy repeats are equal); speeds are of all of them.
    The interval is a bootstrap over prompts, 95 %."""
    first = fast[0]
    quiet = [result for result in first if not result.loops]
    counters, quiet_counters = pooled_counters(first), pooled_counters(quiet)
    per_prompt = [
        _prompt(fasts, plains)
        for fasts, plains in zip(zip(*fast, strict=True), zip(*plain, strict=True), strict=True)
        if all(len(r.output_ids) > 1 for r in (*fasts, *plains))
    ]
    speedups = np.array([prompt["speedup"] for prompt in per_prompt])
    pooled = [
        (pooled_tok_per_s(f) or np.nan) / (pooled_tok_per_s(p) or np.nan) for f, p in zip(fast, plain, strict=True)
    ]
    steps = sum(len(r.decisions) for repeat in fast for r in repeat)
    return {
        "k": arm.k,
        "draft_vocab": arm.draft_vocab,
        "drafter": arm.drafter,
        "acceptance_length": counters and counters.acceptance_length,
        "acceptance_length_interval": _interval(first) if arm.k else None,
        "acceptance_length_without_loops": quiet_counters and quiet_counters.acceptance_length,
        "acceptance_length_without_loops_interval": _interval(quiet) if arm.k and quiet else None,
        "acceptance_rate_per_position": counters and counters.acceptance_rate_per_position,
        "acceptance_histogram": counters and counters.histogram,
        "num_spec_steps": counters and counters.num_steps,
        "num_plain_steps": counters and counters.num_plain_steps,
        "num_outputs": len(first),
        "num_outputs_without_loops": len(quiet),
        "output_tokens": sum(len(result.output_ids) for result in first),
        "finished_frac": float(np.mean([result.finish_reason == "stop" for result in first])),
        "tok_per_s": float(np.median([pooled_tok_per_s(repeat) or np.nan for repeat in fast])),
        "step_ms": 1e3 * sum(r.decode_s or 0.0 for repeat in fast for r in repeat) / max(steps, 1),
        "speedup_pooled": float(np.median(pooled)),
        "speedup_pooled_range": [float(min(pooled)), float(max(pooled))],
        "speedup_median": float(np.median(speedups)),
        "speedup_median_interval": _bootstrap(speedups),
        "slower_prompts": None
        if len(fast) < 2
        else sum(prompt["speedup_interval"][1] < SLOWER for prompt in per_prompt),
        "per_prompt": per_prompt,
        "outputs_equal_to_plain": sum(f.output_ids == p.output_ids for f, p in zip(first, plain[0], strict=True)),
    }


def _prompt(fast: Sequence[Result], plain: Sequence[Result]) -> dict[str, Any]:
    """One prompt's speed-up: the ratio of medians over repeats of the seconds per token, so that one noisy moment
    weighs little; and of repeats as pairs a 95 % t-interval of the mean logarithm of their ratio."""
    seconds = [np.array([r.decode_s / (len(r.output_ids) - 1) for r in results]) for results in (fast, plain)]
    ratios = np.log(seconds[1] / seconds[0])
    interval = None
    if len(ratios) > 1 and ratios.std() > 0:
        half = stats.t.ppf(0.975, len(ratios) - 1) * ratios.std(ddof=1) / np.sqrt(len(ratios))
        interval = [float(np.exp(ratios.mean() + side * half)) for side in (-1, 1)]
    elif len(ratios) > 1:
        interval = [float(np.exp(ratios.mean()))] * 2
    return {
        "request": fast[0].request.index,
        "output_tokens": len(fast[0].output_ids),
        "loop_share": fast[0].loop_share,
        "speedup": float(np.median(seconds[1]) / np.median(seconds[0])),
        "speedup_interval": interval,
    }


def _interval(results: Sequence[Result]) -> list[float]:
    """95 % interval of the pooled acceptance length, resampling prompts."""
    accepted = np.array([r.counters.num_accepted for r in results])
    steps = np.array([r.counters.num_steps for r in results])
    picks = np.random.default_rng(0).integers(0, len(results), (BOOTSTRAP, len(results)))
    lengths = 1 + accepted[picks].sum(1) / np.maximum(steps[picks].sum(1), 1)
    return [float(x) for x in np.quantile(lengths, (0.025, 0.975))]


def _bootstrap(values: np.ndarray) -> list[float]:
    """95 % interval of the median."""
    picks = np.random.default_rng(0).integers(0, len(values), (BOOTSTRAP, len(values)))
    return [float(x) for x in np.quantile(np.median(values[picks], axis=1), (0.025, 0.975))]


def raw_line(arm: Arm, result: Result, repeat: int) -> str:
    """One decoded request."""
    return json.dumps(
        {
            "k": arm.k,
            "draft_vocab": arm.draft_vocab,
            "drafter": arm.drafter,
            "repeat": repeat,
            "request": result.request.index,
            "prompt_tokens": len(result.request.prompt_ids),
            "output_ids": result.output_ids if repeat == 0 and arm == PLAIN else None,
            "output_tokens": len(result.output_ids),
            "finish_reason": result.finish_reason,
            "accepted": [decision.num_accepted for decision in result.decisions] if repeat == 0 else None,
            "verified": [len(decision.draft_token_ids) for decision in result.decisions] if repeat == 0 else None,
            "ttft_s": result.ttft_s,
            "decode_s": result.decode_s,
            "loop_share": result.loop_share,
        }
    )


def page(title: str, sweep: Sweep, rows: list[dict[str, Any]], origin: dict[str, Any], command: str) -> str:
    """README.md of the run."""
    sample = rows[0]
    lines = [
        f"# {title}",
        "",
        f"`{command}`",
        "",
        f"{sample['num_outputs']} prompts ({'raw' if sweep.raw_prompts else 'chat template'}), at most "
        f"{sweep.max_new_tokens} new tokens, temperature {sweep.temperature:g}, {sweep.repeats} repeat(s), batch 1, "
        f"float32; kernels: {sweep.kernels}; {origin['cpu']}, {origin['num_threads']} threads, "
        f"{origin['device']['platform']}; jaxlib {origin['packages']['jaxlib']}; {origin['time']}.",
        "",
        f"Plain outputs: {100 * sample['finished_frac']:.0f} % end by themselves; "
        f"{sample['num_outputs'] - sample['num_outputs_without_loops']} of {sample['num_outputs']} loop "
        "(repeated-4-gram share above 0.3).",
        "",
        "| K | acceptance length (95 %) | without loops (95 %) | per position | ms a step | tok/s | speed-up, pooled "
        "(range of repeats) | speed-up, median of prompts (95 %) | slower prompts | outputs equal to plain |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, r in zip(sweep.arms, rows, strict=True):
        rates = "-"
        if r["num_spec_steps"]:
            rates = " ".join(f"{rate:.2f}".lstrip("0") for rate in r["acceptance_rate_per_position"])
        accepted, quiet = (_with_interval(r, key) for key in LENGTHS)
        slower = "-" if r["slower_prompts"] is None else r["slower_prompts"]
        lines.append(
            f"| {arm.label} | {accepted} | {quiet} | {rates} | {r['step_ms']:.2f} | {r['tok_per_s']:.0f} | "
            f"{r['speedup_pooled']:.2f} ({_span(r['speedup_pooled_range'])}) | {r['speedup_median']:.2f} "
            f"({_span(r['speedup_median_interval'])}) | {slower} | "
            f"{r['outputs_equal_to_plain']} of {r['num_outputs']} |"
        )
    lines += [
        "",
        "Acceptance length is 1 + accepted / steps, pooled over all steps that verified drafts. Slower prompts: their "
        f"95 % interval over the repeats lies wholly below {SLOWER}. ![sweep](sweep.png)",
        "",
    ]
    for arm, r in zip(sweep.arms, rows, strict=True):
        if r["num_plain_steps"]:
            share = r["num_plain_steps"] / (r["num_plain_steps"] + (r["num_spec_steps"] or 0))
            lines += [f"K = {arm.label}: {share:.0%} of the steps were plain.", ""]
    return "\n".join(lines)


def _with_interval(row: dict[str, Any], key: str) -> str:
    """A figure and its interval; "-" where there is none (plain decoding, or every output loops)."""
    return "-" if row[key] is None else f"{row[key]:.2f} ({_span(row[f'{key}_interval'])})"


def _span(interval: Sequence[float]) -> str:
    return f"{interval[0]:.2f}..{interval[1]:.2f}"


def draw(sweep: Sweep, rows: list[dict[str, Any]], path: Path) -> None:
    """Acceptance per position at the widest arm, acceptance length and speed-up of every arm, and each prompt's
    speed-up with the last of them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    arms = [(arm.label, r) for arm, r in zip(sweep.arms, rows, strict=True) if arm.k]
    places = dict(zip([label for label, _ in arms], range(len(arms)), strict=True))
    widest, rates = max(
        ((label, r["acceptance_rate_per_position"] or []) for label, r in arms), key=lambda each: len(each[1])
    )
    left.bar(range(1, len(rates) + 1), rates, color="tab:blue")
    left.set(
        xlabel="draft position", ylabel="accepted / steps", ylim=(0, 1), title=f"Acceptance by position, K = {widest}"
    )
    for key, label in zip(LENGTHS, ("acceptance length", "without loops"), strict=True):
        known = [(places[name], r) for name, r in arms if r[key] is not None]
        if known:
            span = np.array([r[f"{key}_interval"] for _, r in known]).T
            values = np.array([r[key] for _, r in known])
            middle.errorbar([at for at, _ in known], values, np.abs(span - values), fmt="o", capsize=3, label=label)
    values = np.array([r["speedup_median"] for _, r in arms])
    span = np.array([r["speedup_median_interval"] for _, r in arms]).T
    middle.errorbar(range(len(arms)), values, np.abs(span - values), fmt="s", capsize=3, label="speed-up, median")
    middle.axhline(1, color="grey", linewidth=0.8)
    middle.set(xlabel="K", ylim=(0, None), title="Over K (bars: 95 % intervals)")
    middle.set_xticks(range(len(arms)), list(places), rotation=20 if any(len(name) > 4 for name in places) else 0)
    middle.legend()
    last, shown = arms[-1]
    prompts = sorted(shown["per_prompt"], key=lambda prompt: prompt["speedup"])
    for looping, color in ((False, "tab:blue"), (True, "tab:orange")):
        some = [(at, p) for at, p in enumerate(prompts) if (p["loop_share"] > LOOPING_ABOVE) == looping]
        speedups = np.array([p["speedup"] for _, p in some])
        bars = None
        if some and some[0][1]["speedup_interval"]:
            bars = np.abs(np.array([p["speedup_interval"] for _, p in some]).T - speedups)
        right.errorbar(
            [at for at, _ in some], speedups, bars, fmt=".", color=color, elinewidth=0.8,
            label="looping outputs" if looping else "other outputs",
        )  # fmt: skip
    right.axhline(1, color="grey", linewidth=0.8)
    right.axhline(SLOWER, color="grey", linewidth=0.8, linestyle=":")
    right.set(xlabel="prompts, slowest first", ylabel="speed-up", ylim=(0, None), title=f"Each prompt, K = {last}")
    right.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument(
        "-k",
        default="1,2,3,4,5,7,auto",
        help="numbers of drafted tokens, or auto, with commas (default %(default)s)",
    )
    parser.add_argument(
        "--draft-vocab",
        default=FULL,
        help="numbers of tokens the drafter may propose, or files that list them, or full, with commas (default "
        "%(default)s)",
    )
    parser.add_argument("--target", default="demo", help="a target's directory (default: the demo's)")
    parser.add_argument(
        "--drafter",
        default="demo",
        help="drafters' directories, or ngram, with commas between (default: the demo's)",
    )
    parser.add_argument(
        "--prompts", type=Path, default=HELD_OUT, help="JSON lines with a prompt each (default: held out)"
    )
    parser.add_argument("--num-prompts", type=int, default=60, help="how many of them (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="times each prompt is decoded (default %(default)s)")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=256, help="per prompt (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--raw-prompts", action="store_true", help="without the chat template")
    parser.add_argument("--kernels", choices=("auto", "native", "xla"), default="auto", help="default %(default)s")
    arguments = parser.parse_args()
    try:
        return sweep(arguments)
    except (InputError, OSError) as error:
        print(f"sweep_acceptance: error: {error}", file=sys.stderr)
        return 2


def sweep(arguments: argparse.Namespace) -> int:
    """Everything is checked and the configuration written before anything runs."""
    drafters = tuple(dict.fromkeys(arguments.drafter.split(",")))
    arms = parse_arms(arguments.k, arguments.draft_vocab, drafters)
    if arguments.repeats < 1 or arguments.num_prompts < 1:
        raise InputError("--repeats and --num-prompts must be 1 or more")
    expect_new(arguments.out)
    pairs = {
        (drafter, vocab): peagle.load(
            arguments.target, drafter or drafters[0], kernels=arguments.kernels, draft_vocab=vocab
        )
        for drafter, vocab in dict.fromkeys((arm.drafter, arm.draft_vocab) for arm in (PLAIN, *arms))
    }
    pair = pairs[None, None]
    settings = Sweep(
        arguments.target,
        drafters,
        str(arguments.prompts),
        min(arguments.num_prompts, len(read_prompt_file(arguments.prompts))),
        arms,
        arguments.repeats,
        arguments.max_new_tokens,
        arguments.temperature,
        arguments.seed,
        arguments.raw_prompts,
        pair.kernels or "XLA",
    )
    command = shlex.join(["python", "scripts/sweep_acceptance.py", *sys.argv[1:]])
    shown = asdict(settings) | {"prompts": arguments.prompts.name}
    record = {"schema": 1, "provenance": provenance() | {"command": command}, "config": shown, "rows": None}
    arguments.out.mkdir(parents=True)
    _write(arguments.out / "run.json", json.dumps(record, indent=1) + "\n")

    results = run(pairs, settings)
    rows = [row(arm, results[arm], results[PLAIN]) for arm in arms]
    record["rows"] = rows
    lines = [raw_line(arm, r, repeat) for arm in arms for repeat, some in enumerate(results[arm]) for r in some]
    _write(arguments.out / "raw.jsonl", "\n".join(lines) + "\n")
    _write(arguments.out / "run.json", json.dumps(record, indent=1) + "\n")
    draw(settings, rows, arguments.out / "sweep.png")
    text = page("Acceptance and speed over K", settings, rows, record["provenance"], command)
    _write(arguments.out / "README.md", text)
    print(text)
    return 0


def parse_arms(ks: str, vocabs: str, drafters: Sequence[str] = ("demo",)) -> tuple[Arm, ...]:
    """Plain decoding, then every K with every drafter and draft vocabulary, numbers ascending and auto last."""
    asked = ks.split(",")
    try:
        numbers = {int(k) for k in asked if k != AUTO} | {0}
    except ValueError:
        raise InputError(f"-k is {ks!r}; expected numbers, or auto, with commas between, such as 1,3,auto") from None
    if min(numbers) < 0 or (len(numbers) == 1 and AUTO not in asked):
        raise InputError(f"-k is {ks!r}; expected numbers of 1 or more, or auto")
    choices: list[int | Literal["auto"]] = [*sorted(numbers - {0}), *([AUTO] if AUTO in asked else [])]
    chosen = [None if vocab == FULL else vocab for vocab in dict.fromkeys(vocabs.split(","))]
    named = [None] if len(drafters) == 1 else list(drafters)
    return (PLAIN, *(Arm(k, vocab, drafter) for k in choices for drafter in named for vocab in chosen))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
