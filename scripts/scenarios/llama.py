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
prompts; targets of random weights get random tokens, and no drafts.
Variants take turns round by round. llama.cpp runs on all processors or on one: each variant on what is faster at first.
"""

import argparse
import math
import os
import re
import statistics
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
from peagle.base.errors import InputError, InputWarning
from peagle.base.files import expect_new
from peagle.config import AUTO, NumDrafts
from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.request import Request
from peagle.loading.checkpoints import DEMO, DEMO_DFLASH, DEMO_EAGLE3, HELD_OUT, NGRAM
from peagle.measure.provenance import num_threads
from peagle.measure.reports import Block
from peagle.pair import Pair
from peagle.workflows.random_checkpoint import SIZES, write_random_checkpoint
from scripts import runs
from scripts.peers.bystanders import Bystanders, others_of
from scripts.peers.llama import Build, convert, with_drafter, with_ngrams
from scripts.peers.remote import Child
from scripts.runs import Json, Lines, Progress, Run, turns
from scripts.steps import random_request

OURS, LLAMA = "peagle", "llama.cpp"
PLAIN, SPECULATIVE, PROMPTS = "plain", "speculative", "prompts"  # kinds of rows
DRAFTERS = {"EAGLE-3": DEMO_EAGLE3, "P-EAGLE": DEMO, "DFlash": DEMO_DFLASH, "n-grams": NGRAM}
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
    config = {name: value for name, value in vars(options).items() if name not in ("out", "llama_cpp")}
    run = Run(options.out, typed, config)
    for name in options.models:
        progress = Progress(f"{name}:")
        progress("files")
        with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
            prepare = demo if name == DEMO else partial(random_model, name)
            model = prepare(build, Path(folder), options)
            decoders, children = load(model, build, running, progress)
            config["llama_cpp"] = next(iter(children.values())).described
            run.extend({"model": name, **line} for line in measure(model, decoders, children, options.rounds, progress))
        progress.end()
    run.write(page, rows=rows(run.lines), fastest=fastest(run.lines), others_frac=others_of(run.lines))
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


def random_model(name: str, build: Build, folder: Path, options: argparse.Namespace) -> Model:
    """Prepare a target of random weights, without drafters."""
    config, target = SIZES[name], folder / "target"
    write_random_checkpoint(target, config)
    numbers = range(options.num_prompts)
    requests = [random_request(config.vocab_size, i, options.max_new_tokens, RANDOM_TOKENS) for i in numbers]
    gguf = convert(build.sources, target, folder / "target.gguf")
    return Model(str(target), gguf, requests, long_prompts(config.vocab_size, options), list(without_drafts(options)))


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
    made = pair.engine(pair.engine_config(variant.k, context=context))
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
        answers, seconds = answer["token_ids"], seconds_of(variant, answer)
        tokens = sum(map(len, answers)) - len(answers)
        if variant.kind == PROMPTS:
            tokens = sum(len(request.prompt_ids) for request in requests)
        if variant.kind == PLAIN:
            plain.setdefault(variant.side, answers)
        line = {"round": number, "side": variant.side, "row": variant.row, "kind": variant.kind}
        line |= {"tok_per_s": tokens / seconds, "tokens": tokens, "others_frac": bystanders.frac}
        if variant.side == LLAMA:
            line["threads"] = children[variant].described["threads"]
        if variant.kind != PROMPTS:
            line["tokens_a_pass"] = tokens / answer["passes"]
            line["equal"] = {side: sum(map(eq, answers, expected)) for side, expected in plain.items()}
        yield line


# --- rows and the page ----------------------------------------------------------------------------------------------


def rows(lines: Sequence[Json]) -> list[Json]:
    """Make a row of the page per model and variant; both sides' variants of one name share a row."""
    kinds = {(line["model"], line["row"]): line["kind"] for line in lines}  # in the order of the warm-up
    return [row_of(Lines(line for line in lines if line["round"]), *key, kind) for key, kind in kinds.items()]


def row_of(lines: Lines, model: str, row: str, kind: str) -> Json:
    """Take spreads over rounds, and ratios within them. equal: answers in all rounds, to those of the same side."""
    made: Json = {"model": model, "row": row, "kind": kind}
    sides = {side: {"model": model, "side": side, "row": row} for side in (LLAMA, OURS)}
    for side, own in sides.items():
        if not (found := lines.of(**own)):
            continue
        of: Json = {"threads": found[0].get("threads"), "tok_per_s": runs.spread(lines.values("tok_per_s", **own))}
        of["tokens_a_pass"] = runs.spread(lines.values("tokens_a_pass", **own))
        if kind != PROMPTS:
            of["equal"] = min(line["equal"][side] for line in found)
            of["equal_to_ours"] = min(line["equal"][OURS] for line in found) if side == LLAMA else None
        if kind == SPECULATIVE:
            of["over_plain"] = lines.over("tok_per_s", own, {**own, "row": PLAIN})
        made |= {f"{side}_{name}": value for name, value in of.items()}
    return made | {"ours_over_llama": lines.over("tok_per_s", sides[OURS], sides[LLAMA])}


def fastest(lines: Sequence[Json]) -> list[Json]:
    """Divide our fastest variant by llama.cpp's, if both draft: of those with drafts, and of all."""
    timed, made = Lines(line for line in lines if line["round"]), []
    for model in dict.fromkeys(line["model"] for line in lines if line["kind"] == SPECULATIVE):
        for among, kinds in (("with drafts", (SPECULATIVE,)), ("of all", (PLAIN, SPECULATIVE))):
            best = {}
            for side in (OURS, LLAMA):
                own = [line for kind in kinds for line in timed.of(model=model, side=side, kind=kind)]
                variants = [{"model": model, "side": side, "row": row} for row in {line["row"] for line in own}]
                best[side] = max(variants, key=lambda of: statistics.median(timed.values("tok_per_s", **of)))
            over = timed.over("tok_per_s", best[OURS], best[LLAMA])
            names = {side: of["row"] for side, of in best.items()}
            made.append({"model": model, "fastest": among, **names, "ours_over_llama": over})
    return made


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    config, llama = record["config"], record["config"]["llama_cpp"]
    features = ", ".join(re.findall(r"(\w+) = 1", llama["computes"]))
    names = ("threads", "tok_per_s", "over_plain", "tokens_a_pass", "equal", "equal_to_ours")
    columns = [f"{side}_{name}" for side in (LLAMA, OURS) for name in names]
    return [
        *runs.title("Beside llama.cpp", record, f"llama.cpp {llama['version']}, {features}"),
        f"Greedy, one request at a time: {config['num_prompts']} prompts, held-out ones of the demo, else of "
        f"{RANDOM_TOKENS} random tokens; up to {config['max_new_tokens']} new tokens. "
        f"{config['rounds']} rounds in turns after one that warms up: medians (least..greatest), ratios within rounds. "
        "tok/s: tokens after the first over the time after it; of long prompts, the prompt over the time to the first "
        "token. Tokens a pass: of the target, plain passes included. Equal: answers that are, in all rounds, those of "
        "the same side without drafts. Both sides read bfloat16 and MXFP4 experts, and decode in native loops, "
        "llama.cpp on as many threads as were faster at first.",
        runs.table(record["rows"], "model", "row", "kind", *columns, "ours_over_llama"),
        *(
            [runs.table(record["fastest"], "model", "fastest", OURS, LLAMA, "ours_over_llama")]
            * bool(record["fastest"])
        ),
        f"Other processes took {runs.text_of(record, 'others_frac')} % of the processors' time.",
    ]
