"""Measure this project beside vLLM and llama.cpp on the same checkpoints and tokens.

    peagle random 20b /tmp/20b
    python -m scripts.bench peers --out RUN --vllm-python VLLM/bin/python --engines peagle,vllm --requests 1,8,32,64 \
        --drafters p-eagle,eagle3 -k 5 --prompt-tokens 512 /tmp/20b
    python -m scripts.bench peers --out RUN --llama-cpp BUILD --engines peagle,llama.cpp \
        --drafters p-eagle,eagle3,dflash,ngram -k 3,5,7,auto -n 128 demo

It measures prefill, plain decoding and steps with drafts; `peagle parity` compares logits. Every engine is a process of
its own; they take turns round by round, so that drift of the machine affects all equally. --requests: so many are
decoded together, by engines that can. The demo answers held-out prompts, one after the other, with its own drafters;
checkpoints get random tokens, and drafters of random weights. On a GPU all compute in bfloat16.

vLLM runs under a Python that has it, best in an environment of its own. It reads the checkpoint, on a CPU a copy
without MXFP4 (scripts/golden/vllm.py says how to install it there); on a GPU the engines share its memory.

llama.cpp decodes one request at a time, on all processors or on one: what is faster at first. BUILD is a folder in
which it was compiled with the driver of scripts/peers/llama_cpp, which takes ten minutes. Any checkout of that time
will do; llama-cpp-python's source package has one (0.3.36 was measured):

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xf llama_cpp_python-0.3.36.tar.gz
    cmake -G Ninja -S scripts/peers/llama_cpp -B BUILD -DLLAMA_CPP=llama_cpp_python-0.3.36/vendor/llama.cpp
    ninja -C BUILD
"""

import argparse
import functools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

import peagle
from peagle.base.errors import InputError
from peagle.base.files import expect_new
from peagle.loading.checkpoints import DEMO, DEMO_DFLASH, DEMO_EAGLE3, HELD_OUT, NGRAM, resolve
from peagle.measure.reports import Block
from peagle.measure.sweep.plan import K, parse_ks
from peagle.workflows.random_checkpoint import DFLASH, EAGLE_3, LEAST_LAYERS, P_EAGLE, write_random_drafter
from scripts import runs
from scripts.peers.llama import DFLASH_K, Build
from scripts.peers.remote import Child, cannot_run, start
from scripts.runs import Json, Lines, Run
from target.load import inspect_target, load_target, save_target

OURS, VLLM, LLAMA, PLAIN = "peagle", "vllm", "llama.cpp", "plain"
NAMES = (OURS, "peagle-xla", VLLM, LLAMA)
# the demo's drafters, and the geometries of those of random weights
DRAFTERS = {"p-eagle": DEMO, "eagle3": DEMO_EAGLE3, "dflash": DEMO_DFLASH, "ngram": NGRAM}
GEOMETRIES = {"p-eagle": P_EAGLE, "eagle3": EAGLE_3, "dflash": DFLASH}
VLLM_MEMORY = 0.9  # of a GPU, shared by all engines on it
FIGURES = ("tok_per_s", "prefill_tok_per_s", "step_ms", "tokens_a_step")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help=f"{DEMO}, or directories of checkpoints")
    runs.add_run_options(parser, 5, "after one that warms up")
    parser.add_argument("--vllm-python", metavar="PATH", help="a Python that has vLLM")
    parser.add_argument("--llama-cpp", type=Path, metavar="BUILD", help="a build folder, see above")
    parser.add_argument(
        "--engines", default="peagle-xla", help=f"of {', '.join(NAMES)}, with commas (default %(default)s)"
    )
    parser.add_argument("--num-prompts", type=int, default=24, help="of the demo (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of random prompts (default %(default)s)")
    parser.add_argument("-n", "--new-tokens", type=int, default=64, help="decoded each time (default %(default)s)")
    parser.add_argument(
        "--requests", metavar="N,...", default="1", help="decoded together, such as 1,4,8,16,32 (default %(default)s)"
    )
    parser.add_argument("--drafters", metavar="NAME,...", help=f"of {', '.join(DRAFTERS)} (default: none)")
    parser.add_argument("-k", default="5", help="drafts of a step, as 1-3,5,auto (default %(default)s)")


def run(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check everything, then measure; figures are written after every model."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a GPU's memory
    build = None if options.llama_cpp is None else Build.find(options.llama_cpp)
    names = engines(options.engines, options.vllm_python, build)
    check(options)
    expect_new(options.out)
    hidden = ("out", "vllm_python", "llama_cpp")
    config = {name: value for name, value in vars(options).items() if name not in hidden}
    run, rows, software = Run(options.out, typed, config), [], []
    config["models"] = [Path(model).name for model in options.models]
    for model in options.models:
        name = Path(model).name
        with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
            site = site_of(model, Path(scratch), names, options, build)
            entries, children = entries_of(names, site, options), {}
            for own in entries:
                if own.process not in children:
                    runs.say(f"{name}: {own} loads")
                    children[own.process] = child = running.enter_context(own.start())
                    engine = ", ".join(filter(None, own.process))
                    software.append({"model": name, "engine": engine, **child.described})
            run.extend({"model": name, **line} for line in run_rounds(entries, children, site, options))
        runs.say("")
        rows += rows_of([line for line in run.lines if line["model"] == name], entries)
        run.write(page, show=model is options.models[-1], rows=rows, software=software)
    return 0


def engines(named: str, vllm_python: str | None, build: Build | None) -> list[str]:
    """List the engines to compare, ours first. Raises InputError for one that cannot run here."""
    names = list(dict.fromkeys([OURS, *named.split(",")]))
    if unknown := [name for name in names if name not in NAMES]:
        raise InputError(f"--engines names {unknown[0]!r}; expected names of {', '.join(NAMES)} with commas between")
    reasons = {
        VLLM: cannot_run("--vllm-python", vllm_python, "vllm") if VLLM in names else None,
        LLAMA: "no --llama-cpp was given" if build is None else None,
    }
    if missing := [f"{name} cannot run here: {reasons[name]}" for name in names if reasons.get(name)]:
        raise InputError(f"{missing[0]}; give --engines without it, or what it needs")
    return names


def check(options: argparse.Namespace) -> None:
    """Parse lists of options. Raises InputError for impossible ones, and for checkpoints with too few positions."""
    runs.expect_least(1, options, "rounds", "prompt_tokens", "num_prompts")
    runs.expect_least(2, options, "new_tokens")
    options.requests, options.k = runs.numbers("--requests", options.requests), list(parse_ks(options.k))
    options.drafters = list(dict.fromkeys(options.drafters.split(","))) if options.drafters else []
    if unknown := [name for name in options.drafters if name not in DRAFTERS]:
        raise InputError(f"--drafters names {unknown[0]!r}; expected names of {', '.join(DRAFTERS)}")
    if len({Path(model).name for model in options.models}) < len(options.models):
        raise InputError("two checkpoints have the same name; expected directories with names of their own")
    for model in options.models:
        config = inspect_target(resolve(model, "target")).config
        longest = options.prompt_tokens + options.new_tokens + room(options)
        if longest > config.max_positions:
            raise InputError(
                f"{model} has {config.max_positions} positions; expected {longest} or more: ask for fewer tokens"
            )
        if {*options.drafters} & {*GEOMETRIES} and config.num_layers < LEAST_LAYERS:
            raise InputError(
                f"{model} has {config.num_layers} layers; expected {LEAST_LAYERS} or more, of which a drafter reads "
                "three"
            )


def room(options: argparse.Namespace) -> int:
    """Count the positions beyond an answer's end: vLLM drafts less near the last one."""
    return 2 * (1 + max((k for k in options.k if isinstance(k, int)), default=0))


# --- the engines ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A model, what it decodes, and the settings of its engines."""

    target: Path
    scratch: Path
    prompts: Sequence[list[int]]
    context: int
    demo: bool = False
    stop_token_ids: Sequence[int] = ()
    drafters: Mapping[str, str] = field(default_factory=dict)  # names or directories
    requests: int = 1  # most decoded together
    vllm_python: str | None = None
    build: Build | None = None
    gpu: bool = False  # engines compute on it, in bfloat16
    num_on_gpu: int = 1  # engines at once

    def groups(self, count: int) -> list[Sequence[list[int]]]:
        """Return the prompts that are decoded together: of the demo all prompts, else the first `count`."""
        prompts = self.prompts if self.demo else self.prompts[:count]
        return [prompts[first : first + count] for first in range(0, len(prompts), count)]


@dataclass(frozen=True)
class Entry:
    """One way of an engine to decode. several: it decodes several requests together."""

    engine: str
    drafts: str  # PLAIN, or drafter and K
    process: tuple[str, ...]  # entries of one process share it
    start: Callable[[], Child]
    several: bool = True
    arguments: Json = field(default_factory=dict)  # of its calls

    def __str__(self) -> str:
        return f"{self.engine}, {self.drafts}"


def site_of(model: str, scratch: Path, names: Sequence[str], options: argparse.Namespace, build: Build | None) -> Site:
    """Prepare a model: its prompts, and the files that engines need."""
    target, gpu = resolve(model, "target"), jax.default_backend() == "gpu"
    files, drafters = inspect_target(target), dict.fromkeys(options.drafters, NGRAM)
    for name in drafters.keys() & GEOMETRIES.keys():
        drafters[name] = str(resolve(DRAFTERS[name], "drafter") if model == DEMO else scratch / name)
    if model == DEMO:
        pair = peagle.load(DEMO, None)
        requests = runs.first_requests(pair, HELD_OUT, options.num_prompts, options.new_tokens)
        prompts, stop_token_ids = [list(request.prompt_ids) for request in requests], list(pair.stop_token_ids)
    else:
        prompts, stop_token_ids = random_prompts(files.config.vocab_size, options), []
        for name in drafters.keys() & GEOMETRIES.keys():
            write_random_drafter(scratch / name, GEOMETRIES[name], files.config)
    if VLLM in names and not gpu:
        write_unquantised(target, scratch / "unquantised")
    context = max(map(len, prompts)) + options.new_tokens + room(options)
    speculative = sum(name in (OURS, VLLM) for name in names) * len(drafters)
    return Site(
        *(target, scratch, prompts, context, model == DEMO, stop_token_ids, drafters),
        *(max(options.requests), options.vllm_python, build, gpu, len(names) + speculative),
    )


def random_prompts(vocab_size: int, options: argparse.Namespace) -> list[list[int]]:
    """Draw prompts of random tokens, the same for every engine."""
    generators = (np.random.default_rng([0, number]) for number in range(max(options.requests)))
    return [rng.integers(0, vocab_size, options.prompt_tokens).tolist() for rng in generators]


def entries_of(names: Sequence[str], site: Site, options: argparse.Namespace) -> list[Entry]:
    """List what is measured: every engine plainly, then with every drafter and K that it can."""
    drafted = [
        entry(name, site, drafter, k)
        for drafter in options.drafters
        for k in options.k
        for name in names
        if supports(name, site, drafter, k)
    ]
    return [*(entry(name, site) for name in names), *drafted]


def supports(name: str, site: Site, drafter: str, k: K) -> bool:
    """Test whether an engine drafts with this drafter and K."""
    if name == VLLM:
        return drafter in ("p-eagle", "eagle3") and isinstance(k, int)
    if name == LLAMA:
        kinds = {"ngram": 1, "eagle3": 1, "dflash": DFLASH_K} if site.demo else {"ngram": 1}
        return isinstance(k, int) and k >= kinds.get(drafter, math.inf)
    return name.startswith(OURS)


def entry(name: str, site: Site, drafter: str | None = None, k: K = 0) -> Entry:
    """Make the entry of an engine (one of NAMES). drafter: one of DRAFTERS."""
    directory = str(site.target.resolve())
    drafts = PLAIN if drafter is None else f"{drafter}, K = {k}" if isinstance(k, int) else f"{drafter}, {k}"
    own = None if drafter is None else site.drafters[drafter]
    if name == LLAMA:
        return Entry(name, drafts, (name, drafts), functools.partial(start_llama, site, drafter, k), several=False)
    if name == VLLM:
        target = directory if site.gpu else str((site.scratch / "unquantised").resolve())
        options = {"target": target, "dtype": "bfloat16", "max_positions": site.context, "max_requests": site.requests}
        options |= {"gpu_memory_frac": VLLM_MEMORY / site.num_on_gpu} if site.gpu else {}
        if own is not None:
            options |= {"drafter": own, "num_drafts": k, "parallel": drafter == "p-eagle"}
        return Entry(name, drafts, (name, drafts), lambda: start(name, site.vllm_python or "", VLLM, options))
    kernels = "xla" if name != OURS else "auto" if site.gpu else "native"
    options = {"directory": directory, "context": site.context, "kernels": kernels, "drafter": own}
    return Entry(
        name,
        drafts,
        (name, drafter or ""),
        lambda: start(name, sys.executable, OURS, options),
        arguments={"num_drafts": k},
    )


def start_llama(site: Site, drafter: str | None, k: int) -> Child:
    """Load the target's file, and that of a drafter, which are made first."""
    build, drafting = site.build, ()
    assert build is not None
    if drafter is not None:
        file = site.scratch / f"{drafter}.gguf"
        drafting = build.drafting(site.target, drafter, site.drafters[drafter], k, file)
    return build.start(build.converted(site.target, site.scratch / "target.gguf"), site.context, site.prompts, drafting)


def write_unquantised(directory: Path, copy: Path, dtype: Any = ml_dtypes.bfloat16) -> None:
    """Write a copy of a target without quantisation, in Hugging Face's layout: vLLM on a CPU runs no MXFP4."""
    loaded = load_target(directory, experts="expanded")
    save_target(copy, loaded.params, loaded.config, dtype=dtype, mxfp4=False, stop_token_ids=loaded.stop_token_ids)


# --- measuring ------------------------------------------------------------------------------------------------------


def run_rounds(
    entries: Sequence[Entry],
    children: Mapping[tuple[str, ...], Child],
    site: Site,
    options: argparse.Namespace,
) -> Iterator[Json]:
    """Yield a line per round, entry and number of requests; round 0 warms up.

    equal: the share of answers that are those of the same engine without drafts.
    """
    plain: dict[tuple[str, int], list[list[int]]] = {}
    for number, own in runs.turns(entries, options.rounds):
        runs.say(f"round {number}: {own}")
        for count in options.requests if own.several else {1} & {*options.requests}:
            figures, answers = decode(children[own.process], own, site, count, options.new_tokens)
            if own.drafts == PLAIN:
                plain.setdefault((own.engine, count), answers)
            if number:
                same = [mine == known for mine, known in zip(answers, plain[own.engine, count], strict=True)]
                line = {"engine": own.engine, "drafts": own.drafts, "requests": count, "round": number}
                yield {**line, **figures, "equal_frac": sum(same) / len(same)}


def decode(child: Child, own: Entry, site: Site, count: int, new_tokens: int) -> tuple[Json, list[list[int]]]:
    """Decode all groups of so many prompts; return (figures, answers)."""
    fixed = {"num_tokens": new_tokens, "stop_token_ids": list(site.stop_token_ids), **own.arguments}
    replies = [(group, child.call("decode", prompts=group, **fixed)) for group in site.groups(count)]
    answers = [answer for _, reply in replies for answer in reply["token_ids"]]
    later = sum(len(answer) - 1 for answer in answers)
    prefill_s, decode_s = (sum(reply[name] for _, reply in replies) for name in ("prefill_s", "decode_s"))
    return {
        "prefill_tok_per_s": sum(len(prompt) for group, _ in replies for prompt in group) / prefill_s,
        "tok_per_s": later / decode_s,
        "step_ms": 1e3 * decode_s / sum(reply["steps"] for _, reply in replies),
        "tokens_a_step": later / sum(reply["steps"] * len(group) for group, reply in replies),
    }, answers


def rows_of(lines: Sequence[Json], entries: Sequence[Entry]) -> Iterator[Json]:
    """Yield a row per number of requests and entry: spreads over rounds, and ratios within them."""
    of_rounds = Lines(lines)
    for count in sorted({line["requests"] for line in lines}):
        for own in entries:
            mine = {"engine": own.engine, "drafts": own.drafts, "requests": count}
            if not (measured := of_rounds.of(**mine)):
                continue
            ours, plain = {**mine, "engine": OURS}, {**mine, "drafts": PLAIN}
            row = {"model": measured[0]["model"], **mine}
            row |= {name: runs.spread(of_rounds.values(name, **mine)) for name in FIGURES}
            if own.drafts != PLAIN:
                row["over_plain"] = of_rounds.over("tok_per_s", mine, plain)
                row["equal_frac"] = min(line["equal_frac"] for line in measured)
            if own.engine != OURS:
                row["ours_over_peer"] = of_rounds.over("tok_per_s", ours, mine)
                row["ours_over_peer_prefill"] = of_rounds.over("prefill_tok_per_s", ours, mine)
            yield row


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    config, platform = record["config"], record["provenance"]["device"]["platform"]
    about = (
        f"Greedy, up to {config['new_tokens']} new tokens after prompts of {config['prompt_tokens']} random ones, of "
        f"the demo after {config['num_prompts']} held-out prompts; {config['rounds']} rounds after a warm-up, in "
        "turns. Medians over rounds (least..greatest); ratios are taken within a round"
    )
    names = ("model", "requests", "drafts", "engine", "tok_per_s", "over_plain", "ours_over_peer", "prefill_tok_per_s")
    return [
        *runs.title(f"Against peers on {'one GPU' if platform == 'gpu' else 'CPU'}", record, about),
        "Requests: so many are decoded together. tok/s: all tokens after the first, over the time less that of one "
        "token each, which is that of the prompts. Equal: answers that are those of the same engine without drafts, in "
        "the worst round. Drafters of checkpoints have random weights: their drafts are hardly ever accepted, so these "
        "rows tell what a step costs.",
        runs.table(record["rows"], *names, "ours_over_peer_prefill", "step_ms", "tokens_a_step", "equal_frac"),
        runs.table(record["software"], "model", "engine", "version", "computes"),
    ]
