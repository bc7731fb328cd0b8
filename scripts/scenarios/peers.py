"""Measure this project beside transformers and vLLM on the same random checkpoints.

    peagle random M /tmp/M
    python -m scripts.bench peers --out RUN /tmp/M
    python -m scripts.bench peers --out RUN --vllm-python VLLM/bin/python --engines peagle,vllm --requests 1,8,32,64 \
        --drafters p-eagle,eagle3 -k 5 --prompt-tokens 512 /tmp/20b

It measures prefill and plain decoding; `peagle parity` compares logits. On a GPU all compute in bfloat16, and
transformers decodes with the faster of its caches: a growing one, and a static one with compiled passes. Every engine
is a process of its own; they take turns round by round, so that drift of the machine affects all equally. --requests:
so many are decoded together, by engines that can. --drafters also times steps with drafters of random weights.
`scripts.bench llama` compares with llama.cpp.

vLLM runs under a Python that has it, best in an environment of its own. It reads the checkpoint, on a CPU a copy
without MXFP4 (scripts/golden/vllm.py says how to install it there); on a GPU the engines share its memory. The page
names engines that are left out because their packages are missing.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from peagle.base.errors import InputError
from peagle.base.files import expect_new
from peagle.measure.provenance import num_threads
from peagle.measure.reports import Block
from peagle.workflows.random_checkpoint import EAGLE_3, LEAST_LAYERS, P_EAGLE, write_random_drafter
from scripts import runs
from scripts.peers.bystanders import Bystanders, others_of
from scripts.peers.remote import Child, cannot_run, start
from scripts.runs import Json, Lines, Progress, Run
from target.load import TargetFiles, inspect_target, load_target, save_target

OURS, VLLM = "peagle", "vllm"
NAMES = (OURS, "peagle-xla", "transformers-bf16", "transformers-fp32", VLLM)
DEFAULT = tuple(name for name in NAMES if name != "peagle-xla")
DRAFTERS = {"p-eagle": P_EAGLE, "eagle3": EAGLE_3}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
VLLM_MEMORY = 0.9  # of a GPU, shared by all engines on it
RATES = ("prefill_tok_per_s", "tok_per_s", "step_ms", "tokens_a_step")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="directories, one or several")
    runs.add_run_options(parser, 5, "after one that warms up")
    parser.add_argument("--vllm-python", metavar="PATH", help="a Python that has vLLM")
    parser.add_argument(
        "--engines", default=",".join(DEFAULT), help=f"of {', '.join(NAMES)}, with commas (default %(default)s)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=128, help="default %(default)s")
    parser.add_argument("-n", "--new-tokens", type=int, default=64, help="decoded each time (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all tokens (default %(default)s)")
    parser.add_argument(
        "--requests", metavar="N,...", default="1", help="decoded together, such as 1,4,8,16,32 (default %(default)s)"
    )
    parser.add_argument("--drafters", metavar="NAME,...", help=f"of {', '.join(DRAFTERS)} (default: none)")
    parser.add_argument("-k", "--num-drafts", type=int, default=5, help="of a step (default %(default)s)")


def run(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check everything, then measure; figures are written after every checkpoint."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a GPU's memory
    names, left_out = engines(options.engines, options.vllm_python)
    options.requests = runs.numbers("--requests", options.requests)
    options.drafters = list(dict.fromkeys(options.drafters.split(","))) if options.drafters else []
    check(options)
    expect_new(options.out)
    for engine, why in left_out.items():
        print(f"{engine} is left out: {why}", file=sys.stderr)
    config = {name: value for name, value in vars(options).items() if name not in ("out", "vllm_python")}
    config["checkpoints"] = [path.name for path in options.checkpoints]
    run, rows, software = Run(options.out, typed, config), [], []
    for checkpoint in options.checkpoints:
        say = Progress(f"{checkpoint.name}:")
        measured = measure(checkpoint, names, options, say)
        say.end()
        run.extend({"checkpoint": checkpoint.name, **line} for line in measured.lines)
        rows += [{"checkpoint": checkpoint.name, **row} for row in rows_of(measured)]
        software += [{"checkpoint": checkpoint.name, **described} for described in measured.software]
        last, others = checkpoint is options.checkpoints[-1], others_of(run.lines)
        run.write(page, show=last, left_out=left_out, rows=rows, software=software, others_frac=others)
    return 0


def engines(named: str, vllm_python: str | None) -> tuple[list[str], dict[str, str]]:
    """Return (the engines to compare, with ours; {engine left out: reason})."""
    names = list(dict.fromkeys([OURS, *named.split(",")]))
    if unknown := [name for name in names if name not in NAMES]:
        raise InputError(f"--engines names {unknown[0]!r}; expected names of {', '.join(NAMES)} with commas between")
    reasons = {name: unavailable(name, vllm_python) for name in names}
    left_out = {name: why for name, why in reasons.items() if why is not None}
    return [name for name in names if name not in left_out], left_out


def unavailable(name: str, vllm_python: str | None) -> str | None:
    """Say why an engine cannot be compared here; None if it can."""
    if name.startswith(OURS):
        return None
    if name == VLLM:
        return cannot_run("--vllm-python", vllm_python, "vllm")
    if absent := [module for module in ("torch", "transformers") if importlib.util.find_spec(module) is None]:
        return f"{absent[0]} is not installed"
    if jax.default_backend() == "gpu":
        command = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return "torch has no CUDA here"
    return None


def check(options: argparse.Namespace) -> None:
    """Raise InputError for impossible options, and for checkpoints with too few positions."""
    runs.expect_least(1, options, "rounds", "prompt_tokens", "num_drafts")
    runs.expect_least(2, options, "new_tokens")
    runs.expect_least(0, options, "seed")
    if unknown := [name for name in options.drafters if name not in DRAFTERS]:
        raise InputError(f"--drafters names {unknown[0]!r}; expected names of {', '.join(DRAFTERS)}")
    if len({path.name for path in options.checkpoints}) < len(options.checkpoints):
        raise InputError("two checkpoints have the same name; expected directories with names of their own")
    for checkpoint in options.checkpoints:
        config = inspect_target(checkpoint).config
        if (longest := context_of(options)) > (room := config.max_positions):
            raise InputError(f"{checkpoint} has {room} positions; expected {longest} or more: ask for fewer tokens")
        if options.drafters and config.num_layers < LEAST_LAYERS:
            raise InputError(
                f"{checkpoint} has {config.num_layers} layers; expected {LEAST_LAYERS} or more, of which a drafter "
                "reads three"
            )


def context_of(options: argparse.Namespace) -> int:
    """Count the positions that a sequence takes at most; vLLM drafts less near the last one."""
    return options.prompt_tokens + options.new_tokens + 2 * (options.num_drafts + 1)


# --- the engines ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One engine for one checkpoint. several: it decodes several requests together."""

    name: str
    kind: str  # a key of worker.KINDS
    options: Mapping[str, Any]  # of its load()
    python: str = sys.executable
    several: bool = True
    ours: str = OURS  # the engine of ours that it is compared with

    def start(self) -> Child:
        """Load it in a process of its own. Raises InputError."""
        return start(self.name, self.python, self.kind, self.options)


@dataclass(frozen=True)
class Site:
    """A checkpoint, and the settings of its engines."""

    checkpoint: Path
    mxfp4: bool
    scratch: Path
    context: int
    vllm_python: str | None = None
    requests: int = 1  # most decoded together
    prompt_tokens: int = 1
    gpu: bool = False  # engines compute on it, in bfloat16
    num_on_gpu: int = 1  # engines at once

    @property
    def unquantised(self) -> Path:
        """The checkpoint's copy in bfloat16, for vLLM, which runs MXFP4 on GPUs alone."""
        return self.scratch / "unquantised"


def entry(name: str, site: Site) -> Entry:
    """Make the entry of an engine (one of NAMES) for a checkpoint."""
    directory = str(site.checkpoint.resolve())
    kind, _, variant = name.partition("-")
    if name == VLLM:
        on_gpu = {"gpu_memory_frac": VLLM_MEMORY / site.num_on_gpu} if site.gpu else {}
        target = directory if site.gpu else str(site.unquantised.resolve())
        options = {"target": target, "dtype": "bfloat16", "max_positions": site.context, "max_requests": site.requests}
        return Entry(name, VLLM, {**options, **on_gpu}, site.vllm_python or "")
    if kind == OURS:
        kernels, dtype = variant or ("auto" if site.gpu else "native"), "bfloat16" if site.gpu else "float32"
        return Entry(name, OURS, {"directory": directory, "kernels": kernels, "dtype": dtype})
    options = {"directory": directory, "dtype": DTYPES[variant], "mxfp4": site.mxfp4}
    options |= {"num_threads": num_threads() or 1, "device": "cuda" if site.gpu else "cpu"}
    options |= {"prompt_tokens": site.prompt_tokens}
    return Entry(name, "transformers", options, several=False)


def drafting(name: str, drafter: str, directory: Path, k: int, site: Site) -> Entry:
    """Make the entry of OURS or VLLM that decodes with K drafts. directory: the drafter's (a key of DRAFTERS)."""
    plain = entry(name, site)
    options = {**plain.options, "drafter": str(directory), "num_drafts": k}
    if name == VLLM:
        options["parallel"] = DRAFTERS[drafter].kind == "P-EAGLE"
    drafted = {"name": f"{name}, {drafter}", "ours": f"{OURS}, {drafter}", "options": options}
    return replace(plain, **drafted)


def write_unquantised(directory: Path, copy: Path, dtype: Any = ml_dtypes.bfloat16) -> None:
    """Write a copy of a target without quantisation, in Hugging Face's layout: vLLM on a CPU runs no MXFP4."""
    loaded = load_target(directory, experts="expanded")
    save_target(copy, loaded.params, loaded.config, dtype=dtype, mxfp4=False, stop_token_ids=loaded.stop_token_ids)


# --- measuring ------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """The measurements of one checkpoint."""

    entries: list[Entry]
    software: list[Json] = field(default_factory=list)  # of each engine
    lines: list[Json] = field(default_factory=list)


def measure(checkpoint: Path, names: Sequence[str], options: argparse.Namespace, say: Progress) -> Measured:
    """Measure one checkpoint."""
    files = inspect_target(checkpoint)
    tokens = Tokens(files.config.vocab_size, options)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        folder = Path(scratch)
        site = Site(
            checkpoint,
            files.mxfp4,
            folder,
            context_of(options),
            options.vllm_python,
            max(options.requests),
            options.prompt_tokens,
            jax.default_backend() == "gpu",
        )
        measured, children = Measured(entries_of(names, files, options, site)), {}
        for own in measured.entries:
            say(f"{own.name} loads")
            children[own.name] = child = running.enter_context(own.start())
            measured.software.append({"engine": own.name, **child.described})
        measured.lines += run_rounds(measured.entries, children, tokens, options, say)
    return measured


def entries_of(names: Sequence[str], files: TargetFiles, options: argparse.Namespace, site: Site) -> list[Entry]:
    """Make the entries of a checkpoint, with the files that they need."""
    speculative = [name for name in names if name in (OURS, VLLM)]
    site = replace(site, num_on_gpu=len(names) + len(speculative) * len(options.drafters))
    if VLLM in names and not site.gpu:
        write_unquantised(site.checkpoint, site.unquantised)
    entries = [entry(name, site) for name in names]
    for drafter in options.drafters:
        directory = site.scratch / drafter
        write_random_drafter(directory, DRAFTERS[drafter], files.config)
        entries += [drafting(name, drafter, directory, options.num_drafts, site) for name in speculative]
    return entries


class Tokens:
    """Random token ids, the same for every engine."""

    def __init__(self, vocab_size: int, options: argparse.Namespace) -> None:
        self._vocab_size, self._seed, self._length = vocab_size, options.seed, options.prompt_tokens

    def prompts(self, count: int) -> list[list[int]]:
        """Draw `count` prompts of one length."""
        generators = (np.random.default_rng([self._seed, number]) for number in range(count))
        return [rng.integers(0, self._vocab_size, self._length).tolist() for rng in generators]


def run_rounds(
    entries: Sequence[Entry],
    children: Mapping[str, Child],
    tokens: Tokens,
    options: argparse.Namespace,
    say: Progress,
) -> Iterator[Json]:
    """Yield a line per round, engine and number of requests; round 0 warms up."""
    say.begin((options.rounds + 1) * len(entries))
    for number, own in runs.turns(entries, options.rounds):
        say.part(own.name)
        for count in options.requests if own.several else {1} & {*options.requests}:
            child, prompts = children[own.name], tokens.prompts(count)
            with Bystanders(child.pid) as others:
                reply = child.call("decode", prompts=prompts, num_tokens=options.new_tokens)
            if number:
                later = options.new_tokens - 1
                yield {
                    "engine": own.name,
                    "round": number,
                    "requests": count,
                    "prefill_tok_per_s": count * options.prompt_tokens / reply["prefill_s"],
                    "tok_per_s": count * later / reply["decode_s"],
                    "step_ms": 1e3 * reply["decode_s"] / reply["steps"],
                    "tokens_a_step": later / reply["steps"],
                    "others_frac": others.frac,
                }


def rows_of(measured: Measured) -> Iterator[Json]:
    """Yield a row per number of requests and engine: spreads over rounds, and ratios within them."""
    lines = Lines(measured.lines)
    for count in sorted({line["requests"] for line in measured.lines}):
        for own in measured.entries:
            mine, ours = ({"engine": name, "requests": count} for name in (own.name, own.ours))
            if lines.of(**mine):
                row = {**mine, **{name: runs.spread(lines.values(name, **mine)) for name in RATES}}
                for ratio, name in (("ours_over_peer", "tok_per_s"), ("ours_over_peer_prefill", "prefill_tok_per_s")):
                    row[ratio] = None if mine == ours else lines.over(name, ours, mine)
                yield row


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    config, platform = record["config"], record["provenance"]["device"]["platform"]
    about = (
        f"Greedy, prompts of {config['prompt_tokens']} random tokens and {config['new_tokens']} new ones; "
        f"{config['rounds']} rounds after a warm-up; the engines take turns in every round, one at a time. Medians "
        "over rounds (least..greatest); ratios are taken within a round"
    )
    names = ("checkpoint", "requests", "engine", "tok_per_s", "ours_over_peer", "prefill_tok_per_s")
    return [
        *runs.title(f"Against peers on {'one GPU' if platform == 'gpu' else 'CPU'}", record, about),
        *(f"Left out: {engine} ({why})." for engine, why in record["left_out"].items()),
        "Requests: so many are decoded together, each with a prompt of its own. tok/s: of all tokens of all requests, "
        "less the time of one token each, which is that of the prompts. Drafters have random weights and geometries of "
        f"the public 20b drafters, K = {config['num_drafts']}: random drafts are hardly ever accepted, so these rows "
        f"tell what a step costs. Other processes took {runs.text_of(record, 'others_frac')} % of the processors' "
        "time.",
        runs.table(record["rows"], *names, "ours_over_peer_prefill", "step_ms", "tokens_a_step"),
        runs.table(record["software"], "checkpoint", "engine", "version", "computes"),
    ]
