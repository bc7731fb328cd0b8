"""The models that servers are measured on, their prompts, and the requests of a round."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peagle.base.errors import InputError
from peagle.loading.checkpoints import DEMO, HELD_OUT, resolve
from peagle.measure.reports import Block
from peagle.measure.sweep.plan import K, parse_ks
from peagle.text.prompt_files import read_prompt_file
from peagle.text.prompts import Rendering
from peagle.text.tokenizer import load_tokenizer
from scripts.peers.llama import convert
from scripts.runs import Json, title
from target.load import inspect_target

PLAIN = "plain"


@dataclass(frozen=True)
class Load:
    """The requests of one round."""

    clients: int
    requests: int
    tokens_in: int
    tokens_out: int
    rounds: int
    engine_alone: bool = False

    @property
    def context(self) -> int:
        return self.tokens_in + self.tokens_out


@dataclass(frozen=True)
class ServedPair:
    """The models of the servers. drafts: K by variant."""

    target: str
    checkpoint: Path  # the target's
    drafter: str | None
    drafts: Mapping[str, K]
    gguf: Path | None = None

    def options(self, variant: str, load: Load, prefix_cache: str = "0") -> list[str]:
        """Make the options of `peagle serve`."""
        k = self.drafts[variant]
        drafter = ["--drafter", self.drafter] if self.drafter is not None and k != 0 else []
        options = ["--target", self.target, *drafter, "-k", str(k), "--slots", str(load.clients)]
        return [*options, "--context", str(load.context), "--prefix-cache", prefix_cache]

    def config(self, options: argparse.Namespace) -> Json:
        """Collect the options for run.json; paths are shortened to names."""
        config = {name: value for name, value in vars(options).items() if name not in ("out", "peer")}
        drafter = None if self.drafter is None else Path(self.drafter).name
        return config | {"target": Path(options.target).name, "drafter": drafter}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the models that are served."""
    parser.add_argument("--target", default=DEMO, help="a target's directory (default: the demo's)")
    parser.add_argument("--drafter", help="a drafter's directory, or ngram (default: the demo's with it, else none)")
    parser.add_argument("-k", default="3,auto", help="drafts of a step, as 1-3,5,auto (default %(default)s)")


def prepared(
    options: argparse.Namespace, loads: Sequence[Load], scratch: Path, llama_cpp: Path | None = None
) -> ServedPair:
    """Choose the variants; with the sources of llama.cpp, make a GGUF file.

    Raises InputError for a target without a tokenizer, or with too few positions.
    """
    ks, checkpoint = parse_ks(options.k), resolve(options.target, "target")
    config = inspect_target(checkpoint).config
    longest = max(load.context for load in loads)
    if longest > config.max_positions:
        raise InputError(f"{checkpoint} has {config.max_positions} positions; expected {longest} or more")
    if load_tokenizer(checkpoint) is None:
        raise InputError(f"{checkpoint} has no tokenizer; expected one: the server answers with texts")
    drafter = options.drafter or (DEMO if options.target == DEMO else None)
    drafts: dict[str, K] = {PLAIN: 0}
    if drafter is not None:
        drafts |= {f"K = {k}": k for k in ks}
    gguf = None if llama_cpp is None else convert(llama_cpp, checkpoint, scratch / "model.gguf")
    return ServedPair(options.target, checkpoint, drafter, drafts, gguf)


def page_title(text: str, record: Json) -> list[Block]:
    """Lay out a page's title with the names of the models."""
    config = record["config"]
    return title(text, record, f"Target {config['target']}, drafter {config['drafter'] or 'none'}")


def prompts(checkpoint: Path, load: Load) -> list[list[int]]:
    """Make prompts of one length: ends of joined held-out chats."""
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer is not None
    conversations = read_prompt_file(HELD_OUT, strict=True).conversations
    chats = [conversation.encode((), tokenizer, Rendering()) for conversation in conversations]
    made = []
    for number in range(load.requests):
        joined: list[int] = []
        while len(joined) < load.tokens_in:
            joined[:0] = chats[number % len(chats)]
            number += 1
        made.append(joined[-load.tokens_in :])
    return made
