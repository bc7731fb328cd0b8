"""Measure all engines on one checkpoint with the same tokens, one at a time, round by round."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from peagle.measure.provenance import num_threads
from peagle.ops.errors import InputError
from scripts.peers.bystanders import Bystanders
from scripts.peers.gguf_file import write_gguf
from scripts.peers.remote import Remote
from scripts.peers.roster import LLAMA, Entry, Site, batches, entry, reference
from scripts.runs import Json, Progress, rotated
from target.load import TargetFiles, inspect_target

CHECKED_WIDE = 4  # rows of a pass in the second half of the check; the first half has one
FEWEST_PASSES, MOST_PASSES = 3, 256


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
    check_tokens: int
    seed: int
    requests: tuple[int, ...] = ()  # decoded together, each number by itself


@dataclass(frozen=True)
class Measured:
    """The measurements of one checkpoint."""

    files: TargetFiles
    entries: tuple[Entry, ...]
    described: dict[str, Json]  # by engine
    checks: dict[str, Json]  # by engine
    lines: list[Json]  # one per measurement


def measure(checkpoint: Path, settings: Settings, llama_python: str, say: Progress) -> Measured:
    """Measure one checkpoint."""
    files = inspect_target(checkpoint)
    engines, tokens = settings.engines, Tokens(files.config.vocab_size, settings)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        context = settings.prompt_tokens + max(settings.new_tokens, settings.check_tokens) + max(settings.widths)
        gpu = jax.default_backend() == "gpu"
        gguf = Path(scratch) / "model.gguf"
        site = Site(checkpoint, files.mxfp4, gguf, context, num_threads() or 1, llama_python, gpu)
        say("reference logits")
        expected = reference_logits(site, tokens, Path(scratch), LLAMA in engines)
        if LLAMA in engines:
            write_gguf(checkpoint, site.gguf)
        entries = tuple(entry(engine, site) for engine in engines)
        remotes: dict[str, Remote] = {}
        checks: dict[str, Json] = {}
        # the largest first: loading takes about twice an engine's memory
        for own in sorted(entries, key=lambda own: -own.storage.experts):
            say(f"{own.name} loads and is checked")
            remote = running.enter_context(Remote(own))
            remote.described |= remote.call("prepare", prompt_ids=tokens.prompt, widths=list(settings.widths))
            rounds_yarn = own.name == LLAMA
            logits = logits_of(remote, tokens, Path(scratch))
            checks[own.name] = compare(logits, expected[False])
            if rounds_yarn:
                checks[own.name]["rounded_yarn"] = compare(logits, expected[True])
            remotes[own.name] = remote
        lines = list(run_rounds(remotes, tokens, settings, say))
        described = {engine: remote.described for engine, remote in remotes.items()}
    return Measured(files, entries, described, checks, lines)


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


def reference_logits(site: Site, tokens: Tokens, scratch: Path, rounded: bool) -> dict[bool, np.ndarray]:
    """Compute float32 logits of the checked tokens; by rounding of YaRN's bounds."""
    checked = reference(site)
    with Remote(checked) as remote:
        kinds = (False, True) if rounded else (False,)
        return {kind: logits_of(remote, tokens, scratch, round_yarn=kind) for kind in kinds}


def logits_of(remote: Remote, tokens: Tokens, scratch: Path, **options: Any) -> np.ndarray:
    """Compute logits [checked tokens, vocabulary], teacher-forced after the prompt."""
    path = scratch / "logits.npy"
    remote.call("logits", prompt_ids=tokens.prompt, passes=tokens.checked, path=str(path), **options)
    logits: np.ndarray = np.load(path)
    path.unlink()
    return logits


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


def run_rounds(engines: dict[str, Remote], tokens: Tokens, settings: Settings, say: Progress) -> Iterator[Json]:
    """Yield a line per measurement. Round 0 warms up and chooses the numbers of passes."""
    counts: dict[tuple[str, int], int] = {}
    for engine, remote in engines.items():
        say(f"{engine} warms up")
        remote.call("decode", prompt_ids=tokens.prompt, num_tokens=settings.new_tokens)
        for width in settings.widths:
            passes = tokens.passes(0, FEWEST_PASSES, width)
            pass_s = remote.call("verify", prompt_ids=tokens.prompt, passes=passes)["pass_s"]
            counts[engine, width] = min(max(math.ceil(settings.seconds / pass_s), FEWEST_PASSES), MOST_PASSES)
        for num_requests in settings.requests if batches(engine) else ():
            remote.call("decode_many", prompts=tokens.prompts(num_requests), num_tokens=settings.new_tokens)
    say.begin(settings.rounds * len(engines))
    for number in range(1, settings.rounds + 1):
        for engine in rotated(list(engines), number):
            say.part(engine)
            yield from measure_once(engine, engines[engine], number, counts, tokens, settings)


def measure_once(
    engine: str,
    remote: Remote,
    number: int,
    counts: dict[tuple[str, int], int],
    tokens: Tokens,
    settings: Settings,
) -> Iterator[Json]:
    """Yield the lines of one engine in one round."""
    line = {"engine": engine, "round": number}
    with Bystanders(remote.pid) as others:
        times = remote.call("decode", prompt_ids=tokens.prompt, num_tokens=settings.new_tokens)
    times = {"prefill_s": times["prefill_s"], "decode_s": times["decode_s"]}
    yield {**line, "what": "decode", **times, "others_frac": others.frac}
    for width in settings.widths:
        passes = tokens.passes(number, counts[engine, width], width)
        with Bystanders(remote.pid) as others:
            pass_s = remote.call("verify", prompt_ids=tokens.prompt, passes=passes)["pass_s"]
        measured = {"rows": width, "passes": len(passes), "pass_s": pass_s}
        yield {**line, "what": "verify", **measured, "others_frac": others.frac}
    for num_requests in settings.requests if batches(engine) else ():
        prompts = tokens.prompts(num_requests)
        with Bystanders(remote.pid) as others:
            reply = remote.call("decode_many", prompts=prompts, num_tokens=settings.new_tokens)
        measured = {"requests": num_requests, **{key: reply[key] for key in ("decode_s", "way") if key in reply}}
        yield {**line, "what": "decode_many", **measured, "others_frac": others.frac}
