"""The models that servers are measured on, their prompts, and the requests of a round."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from peagle.base.errors import InputError
from peagle.loading.checkpoints import DEMO, HELD_OUT, resolve
from peagle.measure.reports import Block
from peagle.measure.sweep.plan import K, parse_ks
from peagle.text.prompt_files import read_prompt_file
from peagle.text.prompts import Rendering
from peagle.text.tokenizer import byte_alphabet, load_tokenizer
from scripts.peers.llama import convert
from scripts.runs import Json, expect_least, title
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
    """The models of the servers. drafts: K by variant. directory: the target's, with a tokenizer."""

    checkpoint: Path
    vocab_size: int
    directory: str
    drafter: str | None
    drafts: Mapping[str, K]
    gguf: Path | None = None

    def options(self, variant: str, load: Load, prefix_cache: str = "0") -> list[str]:
        """Make the options of `peagle serve`."""
        k = self.drafts[variant]
        drafter = ["--drafter", self.drafter] if self.drafter is not None and k != 0 else []
        options = ["--target", self.directory, *drafter, "-k", str(k), "--slots", str(load.clients)]
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
    parser.add_argument("--seed", type=int, default=0, help="of random prompts (default %(default)s)")


def prepared(
    options: argparse.Namespace, loads: Sequence[Load], scratch: Path, llama_cpp: Path | None = None
) -> ServedPair:
    """Choose the variants; make a tokenizer if needed and, with the sources of llama.cpp, a GGUF file.

    Raises InputError for a negative seed, and for a target with too few positions.
    """
    expect_least(0, options, "seed")
    ks, checkpoint = parse_ks(options.k), resolve(options.target, "target")
    config = inspect_target(checkpoint).config
    longest = max(load.context for load in loads)
    if longest > config.max_positions:
        raise InputError(f"{checkpoint} has {config.max_positions} positions; expected {longest} or more")
    drafter = options.drafter or (DEMO if options.target == DEMO else None)
    drafts: dict[str, K] = {PLAIN: 0}
    if drafter is not None:
        drafts |= {f"K = {k}": k for k in ks}
    directory, tokens = options.target, byte_level_tokens(config.vocab_size)
    if options.target != DEMO and load_tokenizer(checkpoint) is None:
        directory = str(scratch / checkpoint.resolve().name)
        with_tokenizer(checkpoint, tokens, Path(directory))
    gguf = None
    if llama_cpp is not None:
        gguf = convert(llama_cpp, resolve(directory, "target"), scratch / "model.gguf")
    return ServedPair(checkpoint, config.vocab_size, directory, drafter, drafts, gguf)


def page_title(text: str, record: Json) -> list[Block]:
    """Lay out a page's title with the names of the models."""
    config = record["config"]
    return title(text, record, f"Target {config['target']}, drafter {config['drafter'] or 'none'}")


def byte_level_tokens(size: int) -> list[str]:
    """Make a byte-level vocabulary: the 256 bytes, a pair of them, then other texts."""
    alphabet = [*byte_alphabet()]
    return [*alphabet, "".join(alphabet[:2]), *(f"t{number}." for number in range(257, size))][:size]


def with_tokenizer(checkpoint: Path, tokens: Sequence[str], directory: Path) -> None:
    """Make a directory of links to a checkpoint's files and a tokenizer of these tokens."""
    directory.mkdir()
    for path in checkpoint.iterdir():
        (directory / path.name).symlink_to(path.resolve())
    write_tokenizer(tokens, directory)


def write_tokenizer(tokens: Sequence[str], directory: Path) -> None:
    """Write a byte-level tokenizer of these tokens; llama.cpp needs a merge, so the pair of bytes is one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [(tokens[0], tokens[1])] if tokens[0] + tokens[1] in tokens else []
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    wrapped.save_pretrained(directory)


def random_prompts(vocab_size: int, load: Load, seed: int) -> list[list[int]]:
    """Draw prompts of random tokens."""
    rng = np.random.default_rng([seed, load.tokens_in])
    return [rng.integers(0, vocab_size, load.tokens_in).tolist() for _ in range(load.requests)]


def prompts(checkpoint: Path, vocab_size: int, load: Load, seed: int) -> list[list[int]]:
    """Make prompts of one length: ends of joined held-out chats, or random tokens."""
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        return random_prompts(vocab_size, load, seed)
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
