"""Measure this project beside llama.cpp on a CPU: plain decoding, each side's own speculation, long prompts.

    python -m scripts.bench llama --out RUN --llama-cpp BUILD demo
    python -m scripts.bench llama --out RUN --llama-cpp BUILD --num-prompts 4 -n 64 S M L

BUILD is a folder in which llama.cpp was compiled with the driver of scripts/peers/llama_cpp, which takes ten minutes.
Any checkout of llama.cpp of that time will do; llama-cpp-python's source package has one (0.3.36 was measured):

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xf llama_cpp_python-0.3.36.tar.gz
    cmake -G Ninja -S scripts/peers/llama_cpp -B BUILD -DLLAMA_CPP=llama_cpp_python-0.3.36/vendor/llama.cpp
    ninja -C BUILD

Both sides decode the same token ids greedily, one request at a time, in loops of their own. The demo answers held-out
prompts. Targets of random weights get random tokens; on our side alone, drafts for them are accepted at rates of .76^i.
Variants take turns round by round. llama.cpp runs on all processors or on one: each variant on what is faster at first.

Afterwards `--out` (which must not exist yet) holds run.json, raw.jsonl and README.md.
"""

import argparse
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import eq
from pathlib import Path

import peagle
from peagle.checkpoints import DEMO, DEMO_DFLASH, DEMO_EAGLE3, HELD_OUT, NGRAM
from peagle.config import AUTO, NumDrafts
from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.request import Request
from peagle.measure.provenance import num_threads
from peagle.ops.errors import InputError, InputWarning
from peagle.ops.files import expect_new
from peagle.pair import Pair
from peagle.workflows.random_checkpoint import (
    EAGLE_3,
    LEAST_LAYERS,
    P_EAGLE,
    SIZES,
    write_random_checkpoint,
    write_random_drafter,
)
from scripts import runs
from scripts.peers.bystanders import Bystanders
from scripts.peers.llama import Build, with_drafter, with_ngrams, write_target
from scripts.peers.remote import Child
from scripts.runs import Json, Progress, RawLines, turns
from scripts.scenarios.llama_page import (
    LLAMA,
    OURS,
    PLAIN,
    PROMPTS,
    SPECULATIVE,
    SYNTHETIC,
    fastest,
    others,
    page,
    rows,
)
from scripts.steps import PUBLISHED_RATE, random_request

DRAFTERS = {"EAGLE-3": DEMO_EAGLE3, "P-EAGLE": DEMO, "DFlash": DEMO_DFLASH, "n-grams": NGRAM}
RANDOM_DRAFTERS = {"EAGLE-3": EAGLE_3, "P-EAGLE": P_EAGLE}
FIXED = (3, 5)
DFLASH_K = 7  # its block; for a smaller K llama.cpp runs a shorter one, for which the drafter was not trained
LOOKED_UP = 3  # tokens, of n-grams; llama.cpp's default is 12, with 48 drafts
RANDOM_TOKENS = 128  # of a random request's prompt
TRIALS, TRIED_FRAC = 3, 0.25  # of a number of threads, with so many of the requests

Decode = Callable[[Sequence[Request]], Json]  # {"prefill_s", "decode_s", "passes", "token_ids"}, sums over requests


@dataclass(frozen=True)
class Variant:
    """What a side runs for a row of the page. drafter: ours, a name or a folder. options: llama.cpp's."""

    side: str
    row: str
    kind: str
    drafter: str | None = None
    k: NumDrafts = 0
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    """A target, as both sides read it, its requests and variants."""

    target: str
    gguf: Path
    requests: list[Request]
    prompts: list[Request]  # of the kind PROMPTS
    variants: list[Variant]

    def of(self, variant: Variant) -> list[Request]:
        return self.prompts if variant.kind == PROMPTS else self.requests

    @property
    def context(self) -> int:
        """Count the positions of the longest request."""
        return max(len(request.prompt_ids) + request.max_new_tokens for request in self.requests + self.prompts)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help=f"{DEMO}; random weights: {', '.join(SIZES)}")
    runs.add_run_options(parser, 5, "after one that warms up")
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="BUILD", help="a build folder, see above")
    parser.add_argument("--num-prompts", type=int, default=24, help="default %(default)s")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=128, help="per prompt (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of long prompts (default %(default)s)")


def run(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check everything before anything runs, then measure."""
    expect_new(options.out)
    runs.expect_least(1, options, "rounds", "num_prompts", "prompt_tokens")
    runs.expect_least(2, options, "max_new_tokens")
    if unknown := [name for name in options.models if name not in (DEMO, *SIZES)]:
        raise InputError(f"{unknown[0]} is no model; expected some of {', '.join((DEMO, *SIZES))}")
    build = Build.find(options.llama_cpp)
    raw = RawLines(options.out)
    for name in options.models:
        progress = Progress(f"{name}:")
        progress("files")
        with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
            prepare = demo if name == DEMO else partial(random_model, name)
            model = prepare(build, Path(folder), options)
            decoders, children = load(model, build, running, progress)
            described = next(iter(children.values())).described
            raw.extend({"model": name, **line} for line in measure(model, decoders, children, options.rounds, progress))
        progress.end()
    config = {name: value for name, value in vars(options).items() if name not in ("out", "llama_cpp")}
    config |= {"random_tokens": RANDOM_TOKENS, "llama_cpp": described}
    figures = {"rows": rows(raw.lines), "fastest": fastest(raw.lines), "others_frac": others(raw.lines)}
    record = runs.new_record(typed, config, **figures)
    runs.write_run(options.out, record, page(record))
    return 0


# --- what is measured -----------------------------------------------------------------------------------------------


def demo(build: Build, folder: Path, options: argparse.Namespace) -> Model:
    """Prepare the demo: its drafters, held-out prompts and stop tokens."""
    pair = peagle.load()
    ours: dict[str, tuple[str, NumDrafts]] = {}
    for method, drafter in DRAFTERS.items():
        for k in (*FIXED, *([DFLASH_K] if drafter == DEMO_DFLASH else []), AUTO):
            ours[_row(method, k)] = (drafter, k)
    theirs = {_row("EAGLE-3", k): with_drafter("eagle3", k, folder) for k in FIXED}
    theirs[_row("DFlash", DFLASH_K)] = with_drafter("dflash", DFLASH_K, folder)
    theirs |= {_row("n-grams", k): with_ngrams(LOOKED_UP, k) for k in FIXED}
    theirs["n-grams, llama.cpp's default"] = ("--spec-type", "ngram-simple")
    variants = list(without_drafts(options))
    for row in dict.fromkeys([*ours, *theirs]):
        if row in ours:
            variants.append(Variant(OURS, row, SPECULATIVE, *ours[row]))
        if row in theirs:
            variants.append(Variant(LLAMA, row, SPECULATIVE, options=theirs[row]))
    requests = runs.first_requests(pair, HELD_OUT, options.num_prompts, options.max_new_tokens)
    return Model(DEMO, build.write_demo(folder), requests, long_prompts(pair.target.vocab_size, options), variants)


def random_model(name: str, _: Build, folder: Path, options: argparse.Namespace) -> Model:
    """Prepare a target of random weights, with drafters if it has layers enough for them."""
    config, target, variants = SIZES[name], folder / "target", list(without_drafts(options))
    write_random_checkpoint(target, config)
    for method, geometry in RANDOM_DRAFTERS.items() if config.num_layers >= LEAST_LAYERS else ():
        write_random_drafter(folder / method, geometry, config)
        variants += [Variant(OURS, _row(method, k), SYNTHETIC, str(folder / method), k) for k in (*FIXED, AUTO)]
    numbers = range(options.num_prompts)
    requests = [random_request(config.vocab_size, i, options.max_new_tokens, RANDOM_TOKENS) for i in numbers]
    prompts = long_prompts(config.vocab_size, options)
    return Model(str(target), write_target(target, folder), requests, prompts, variants)


def without_drafts(options: argparse.Namespace) -> Iterator[Variant]:
    """Yield plain decoding and long prompts of both sides."""
    for row, kind in ((PLAIN, PLAIN), (f"prompts of {options.prompt_tokens} tokens", PROMPTS)):
        yield from (Variant(side, row, kind) for side in (OURS, LLAMA))


def long_prompts(vocab_size: int, options: argparse.Namespace) -> list[Request]:
    """Draw prompts, of which only the time to the first token counts."""
    return [random_request(vocab_size, i, 1, options.prompt_tokens) for i in range(options.num_prompts)]


def _row(method: str, k: NumDrafts) -> str:
    return f"{method}, {k}" if k == AUTO else f"{method}, K = {k}"


# --- measuring ------------------------------------------------------------------------------------------------------


def load(
    model: Model, build: Build, running: ExitStack, progress: Progress
) -> tuple[dict[Variant, Decode], dict[Variant, Child]]:
    """Return what decodes each variant, and llama.cpp's processes, which `running` ends. Ours is this process."""
    pairs: dict[str | None, Pair] = {}
    children: dict[Variant, Child] = {}
    decoders: dict[Variant, Decode] = {}
    for variant in model.variants:
        progress(f"{variant.side} loads: {variant.row}")
        if variant.side == LLAMA:
            child = fastest_child(model, variant, build)
            children[variant] = running.enter_context(child)
            decoders[variant] = partial(ask, child)
            continue
        if variant.drafter not in pairs:
            pairs[variant.drafter] = _pair(model.target, variant.drafter)
        decoders[variant] = partial(decode, engine(pairs[variant.drafter], variant, model.context))
    return decoders, children


def fastest_child(model: Model, variant: Variant, build: Build) -> Child:
    """Start llama.cpp for a variant on all processors and on one, and keep what is faster."""
    requests = model.of(variant)
    tried = requests[: math.ceil(TRIED_FRAC * len(requests))]
    threads = sorted({1, num_threads() or 1})
    children = [build.start(model.gguf, model.context, count, variant.options) for count in threads]
    seconds: dict[Child, list[float]] = {child: [] for child in children}
    for _, child in turns(children, TRIALS):
        seconds[child].append(seconds_of(variant, ask(child, tried)))
    best, *others = sorted(children, key=lambda child: min(seconds[child]))
    for child in others:
        child.close()
    return best


def _pair(target: str, drafter: str | None) -> Pair:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InputWarning)  # of a random target's missing tokenizer
        return peagle.load(target, drafter)


def engine(pair: Pair, variant: Variant, context: int) -> AnyEngine:
    """Make our engine of a variant, compiled."""
    rates = (PUBLISHED_RATE,) if variant.kind == SYNTHETIC else None
    made = pair.engine(pair.engine_config(variant.k, context=context, synthetic_acceptance=rates))
    made.warm_up()
    return made


def decode(engine: AnyEngine, requests: Sequence[Request]) -> Json:
    """Decode one request after the other with ours."""
    answer: Json = {"prefill_s": 0.0, "decode_s": 0.0, "passes": 0, "token_ids": []}
    for request in requests:
        started = time.perf_counter()
        chunks = [chunk for _, chunk in engine.generate([request])]
        answer["prefill_s"] += chunks[0].time_s - started
        answer["decode_s"] += chunks[-1].time_s - chunks[0].time_s
        answer["passes"] += sum(len(chunk.steps) for chunk in chunks)
        answer["token_ids"].append([token for chunk in chunks for token in chunk.token_ids])
    return answer


def ask(child: Child, requests: Sequence[Request]) -> Json:
    """Let the driver decode one request after the other."""
    prompts = [request.prompt_ids for request in requests]
    first = requests[0]
    return child.call("decode", prompts=prompts, num_tokens=first.max_new_tokens, stop_token_ids=first.stop_token_ids)


def seconds_of(variant: Variant, answer: Json) -> float:
    """Return the time that counts: that of prompts, or that after each answer's first token, which its prompt gives."""
    seconds: float = answer["prefill_s" if variant.kind == PROMPTS else "decode_s"]
    return seconds


def measure(
    model: Model, decoders: Mapping[Variant, Decode], children: Mapping[Variant, Child], rounds: int, progress: Progress
) -> Iterator[Json]:
    """Yield a line per round and variant; round 0 warms up. equal: how many answers are those of a side's plain one."""
    plain: dict[str, list[list[int]]] = {}
    pids = [os.getpid(), *(child.pid for child in children.values())]
    progress.begin((rounds + 1) * len(decoders))
    for number, variant in turns(model.variants, rounds):
        progress.part(f"{variant.side}, {variant.row}")
        requests = model.of(variant)
        with Bystanders(*pids) as bystanders:
            answer = decoders[variant](requests)
        line = {"round": number, "side": variant.side, "row": variant.row, "kind": variant.kind}
        line |= {"seconds": seconds_of(variant, answer), "passes": answer["passes"], "others_frac": bystanders.frac}
        if variant.side == LLAMA:
            line["threads"] = children[variant].described["threads"]
        if variant.kind == PROMPTS:
            yield line | {"tokens": sum(len(request.prompt_ids) for request in requests)}
            continue
        answers = answer["token_ids"]
        if variant.kind == PLAIN:
            plain.setdefault(variant.side, answers)
        equal = {side: sum(map(eq, answers, expected)) for side, expected in plain.items()}
        yield line | {"tokens": sum(map(len, answers)) - len(answers), "answers": len(answers), "equal": equal}
