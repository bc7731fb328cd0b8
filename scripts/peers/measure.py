"""Measure all engines on one checkpoint with the same tokens, one at a time, round by round."""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from peagle.measure.provenance import num_threads
from peagle.ops.errors import InputError
from peagle.workflows.random_checkpoint import write_random_drafter
from scripts.peers.bystanders import Bystanders
from scripts.peers.remote import Child
from scripts.peers.roster import DRAFTERS, OURS, VLLM, Entry, Site, drafting, entry, naming_experts, reference
from scripts.runs import Json, Progress, turns
from target.load import TargetFiles, inspect_target, load_target, save_target

CHECKED_WIDE = 4  # rows of a pass in the second half of the check; the first half has one
FEWEST_PASSES, MOST_PASSES = 3, 256
FIGURES = ("prefill_s", "decode_s", "pass_s", "steps")  # of a reply, for raw.jsonl


@dataclass(frozen=True)
class Settings:
    """The settings of a comparison."""

    checkpoints: tuple[str, ...]
    engines: tuple[str, ...]
    prompt_tokens: int
    new_tokens: int
    widths: tuple[int, ...]
    rounds: int
    seconds: float  # about so long the passes of one width are repeated
    check_tokens: int  # 0: logits are not compared
    seed: int
    requests: tuple[int, ...] = ()  # decoded together, each number by itself
    drafters: tuple[str, ...] = ()  # keys of DRAFTERS
    num_drafts: int = 0  # of a step with a drafter

    @property
    def requests_with_drafts(self) -> tuple[int, ...]:
        """Return how many requests engines with a drafter decode together."""
        return self.requests or (1,)

    @property
    def context(self) -> int:
        """Count the positions that a sequence takes at most."""
        rows = max(*self.widths, 2 * (self.num_drafts + 1))  # vLLM drafts less near the last position
        return self.prompt_tokens + max(self.new_tokens, self.check_tokens) + rows


@dataclass(frozen=True)
class Measured:
    """The measurements of one checkpoint."""

    files: TargetFiles
    entries: tuple[Entry, ...]
    described: dict[str, Json]  # by engine
    checks: dict[str, Json]  # by engine
    experts: dict[str, Json]  # of a layer, that so many requests use, by engine that says so
    lines: list[Json]  # one per measurement


def measure(checkpoint: Path, settings: Settings, vllm_python: str, say: Progress) -> Measured:
    """Measure one checkpoint."""
    files = inspect_target(checkpoint)
    engines, tokens = settings.engines, Tokens(files.config.vocab_size, settings)
    speculative = [engine for engine in engines if engine in (OURS, VLLM)]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        site = Site(
            checkpoint,
            files.mxfp4,
            Path(scratch),
            settings.context,
            num_threads() or 1,
            vllm_python,
            max(settings.requests, default=1),
            jax.default_backend() == "gpu",
            len(engines) + len(speculative) * len(settings.drafters),
        )
        if settings.check_tokens:
            say("reference logits")
            with reference(site).start() as remote:
                expected = logits_of(remote, tokens, Path(scratch))
        experts: dict[str, Json] = {}
        if VLLM in engines and not site.gpu:
            write_unquantised(checkpoint, site.unquantised)
        if VLLM in engines and settings.requests:
            say(f"the experts that {VLLM}'s requests use")
            with naming_experts(site).start() as remote:
                experts[VLLM] = experts_of(remote, tokens, settings.requests)
        entries = [entry(engine, site) for engine in engines]
        for name in settings.drafters:
            directory = Path(scratch) / name
            write_random_drafter(directory, DRAFTERS[name], files.config)
            entries += [drafting(engine, name, directory, settings.num_drafts, site) for engine in speculative]
        children: dict[str, Child] = {}
        checks: dict[str, Json] = {}
        # the largest first: loading takes about twice an engine's memory
        for own in sorted(entries, key=lambda own: -own.storage.experts):
            say(f"{own.name} loads and is checked")
            children[own.name] = child = running.enter_context(own.start())
            if "verify" in own.calls:
                child.described |= child.call("prepare", prompt_ids=tokens.prompt, widths=list(settings.widths))
            if "experts" in own.calls and settings.requests:
                experts[own.name] = experts_of(child, tokens, settings.requests)
            if "logits" not in own.calls or not settings.check_tokens:
                continue
            checks[own.name] = compare(logits_of(child, tokens, Path(scratch)), expected)
        lines = list(run_rounds(entries, children, tokens, settings, say))
        described = {engine: child.described for engine, child in children.items()}
    return Measured(files, tuple(entries), described, checks, experts, lines)


def write_unquantised(directory: Path, copy: Path, dtype: Any = ml_dtypes.bfloat16) -> None:
    """Write a copy of a target without quantisation, in Hugging Face's layout: vLLM on a CPU runs no MXFP4."""
    loaded = load_target(directory, experts="expanded")
    save_target(copy, loaded.params, loaded.config, dtype=dtype, mxfp4=False, stop_token_ids=loaded.stop_token_ids)


class Tokens:
    """Random token ids, the same for every engine."""

    def __init__(self, vocab_size: int, settings: Settings) -> None:
        self._vocab_size, self._seed = vocab_size, settings.seed
        self.prompt = self._draw(0, settings.prompt_tokens)
        one_by_one = settings.check_tokens // 2
        checked = self._draw(1, settings.check_tokens)
        wide = range(one_by_one, settings.check_tokens, CHECKED_WIDE)
        self.checked = [[token] for token in checked[:one_by_one]] + [checked[i : i + CHECKED_WIDE] for i in wide]

    def passes(self, number: int, count: int, width: int) -> list[list[int]]:
        """Draw `count` passes of `width` tokens, different in every round."""
        flat = self._draw(2 + number, count * width)
        return [flat[i : i + width] for i in range(0, len(flat), width)]

    def prompts(self, count: int) -> list[list[int]]:
        """Draw `count` prompts of one length; the first is `prompt`."""
        return [self.prompt, *(self._draw(0, len(self.prompt), i) for i in range(1, count))]

    def _draw(self, stream: int, count: int, *substream: int) -> list[int]:
        rng = np.random.default_rng([self._seed, stream, *substream])
        ids: list[int] = rng.integers(0, self._vocab_size, count).tolist()
        return ids


def logits_of(child: Child, tokens: Tokens, scratch: Path) -> np.ndarray:
    """Compute logits [checked tokens, vocabulary], teacher-forced after the prompt."""
    path = scratch / "logits.npy"
    child.call("logits", prompt_ids=tokens.prompt, passes=tokens.checked, path=str(path))
    logits: np.ndarray = np.load(path)
    path.unlink()
    return logits


def experts_of(child: Child, tokens: Tokens, counts: Sequence[int]) -> Json:
    """Average over layers how many experts the last tokens of so many prompts use, as a step of them would."""
    chosen = np.asarray(child.call("experts", prompts=tokens.prompts(max(counts)))["chosen"])  # [prompt, layer, k]
    layers = range(chosen.shape[1])
    return {str(n): float(np.mean([np.unique(chosen[:n, layer]).size for layer in layers])) for n in counts}


def compare(logits: np.ndarray, expected: np.ndarray) -> Json:
    """Compare logits in standard deviations of the expected ones, and greedy tokens."""
    if logits.shape != expected.shape:
        raise InputError(f"logits have shape {list(logits.shape)}; expected {list(expected.shape)}")
    difference = (logits.astype(np.float64) - expected) / expected.std()
    return {
        "max_difference": float(np.abs(difference).max()),
        "rms_difference": float(np.sqrt(np.mean(difference**2))),
        "top_1_agreement": float(np.mean(logits.argmax(-1) == expected.argmax(-1))),
    }


def run_rounds(
    entries: Sequence[Entry], engines: Mapping[str, Child], tokens: Tokens, settings: Settings, say: Progress
) -> Iterator[Json]:
    """Yield a line per measurement. Round 0 warms up and chooses the numbers of passes."""
    num_passes: dict[tuple[str, int], int] = {}
    by_name = {entry.name: entry for entry in entries}
    say.begin((settings.rounds + 1) * len(engines))
    for number, engine in turns(list(by_name), settings.rounds):
        say.part(engine)
        for call, fields, arguments in calls_of(by_name[engine], number, num_passes, tokens, settings):
            with Bystanders(engines[engine].pid) as others:
                reply = engines[engine].call(call, **arguments)
            if number:
                measured = {name: reply[name] for name in FIGURES if name in reply}
                line = {"engine": engine, "round": number, "what": call, **fields, **measured}
                yield line | {"others_frac": others.frac}
            elif call == "verify":
                passes = math.ceil(settings.seconds / reply["pass_s"])
                num_passes[engine, fields["rows"]] = min(max(passes, FEWEST_PASSES), MOST_PASSES)


def calls_of(
    entry: Entry, number: int, num_passes: Mapping[tuple[str, int], int], tokens: Tokens, settings: Settings
) -> Iterator[tuple[str, Json, Json]]:
    """Yield (call, fields of its line, arguments) of an engine's measurements in a round."""
    if "decode" in entry.calls:
        yield "decode", {}, {"prompt_ids": tokens.prompt, "num_tokens": settings.new_tokens}
    for width in settings.widths if "verify" in entry.calls else ():
        passes = tokens.passes(number, num_passes.get((entry.name, width), FEWEST_PASSES), width)
        yield "verify", {"rows": width, "passes": len(passes)}, {"prompt_ids": tokens.prompt, "passes": passes}
    for call, counts in (("decode_many", settings.requests), ("speculate", settings.requests_with_drafts)):
        for count in counts if call in entry.calls else ():
            yield call, {"requests": count}, {"prompts": tokens.prompts(count), "num_tokens": settings.new_tokens}
