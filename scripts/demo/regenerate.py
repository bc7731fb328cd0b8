"""Have the target itself answer the training prompts: what a drafter is trained on.

    python -m scripts.demo.regenerate --target DIR --prompts chat_train.jsonl --out DIR [--num-prompts N]

Afterwards `--out` holds shard_00000.npz, shard_00001.npz, ... in the layout of scripts.demo.dataset (roles: PROMPT,
and TEXT for what the target wrote). A shard is whole or absent; the same command goes on with the first missing one.
Decoding is greedy, through peagle's own engine.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np

import peagle  # noqa: F401  (before anything starts JAX)
from peagle.autoregressive import NoDrafter
from peagle.config import SpeculationConfig
from peagle.generate import Engine, Request
from peagle.ops import native
from scripts.demo.corpus import read_lines
from scripts.demo.dataset import PROMPT, TEXT, WIDTH, Document, chat_prefix, encode_all, pack, shuffled
from scripts.demo.train_target import log
from target.load import load_target
from target.model import GptOss

PROMPTS_PER_SHARD = 512
BATCH = 64
MAX_NEW_TOKENS = 144
MAX_PROMPT_TOKENS = 256


def documents_of(engine: Engine, prompts: list[list[int]]) -> list[Document]:
    """Each prompt with the target's answer."""
    outputs: list[list[int]] = [[] for _ in prompts]
    requests = [Request(i, tuple(ids), MAX_NEW_TOKENS) for i, ids in enumerate(prompts)]
    for emission in engine.generate(requests):
        outputs[emission.request.index] += emission.token_ids
    return [
        (prompt + output, [PROMPT] * len(prompt) + [TEXT] * len(output))
        for prompt, output in zip(prompts, outputs, strict=True)
        if len(prompt) + len(output) <= WIDTH
    ]


def write_shard(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """The shard is whole, or not there."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)
    os.replace(temporary, path)


def main() -> None:
    """The command."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="a target's directory with its tokenizer")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a prompt each")
    parser.add_argument("--out", type=Path, required=True, help="folder of the shards")
    parser.add_argument("--num-prompts", type=int, default=10240, help="how many, at most (default %(default)s)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    tokenizer = AutoTokenizer.from_pretrained(arguments.target, local_files_only=True)
    texts = [chat_prefix(tokenizer, record["prompt"]) for record in shuffled(read_lines(arguments.prompts), seed=1)]
    prompts = [ids for ids in encode_all(tokenizer, texts) if len(ids) <= MAX_PROMPT_TOKENS][: arguments.num_prompts]
    loaded = load_target(arguments.target, dtype=np.dtype("float32"), native=native.available())
    config = SpeculationConfig(0, BATCH, MAX_PROMPT_TOKENS + MAX_NEW_TOKENS)
    engine = Engine(GptOss(loaded.params, loaded.config), NoDrafter(), config, loaded.stop_token_ids)
    started, done = time.monotonic(), 0
    for number, start in enumerate(range(0, len(prompts), PROMPTS_PER_SHARD)):
        path = arguments.out / f"shard_{number:05d}.npz"
        if path.exists():
            continue
        # similar lengths together: a batch runs as long as its longest row
        chosen = sorted(prompts[start : start + PROMPTS_PER_SHARD], key=len)
        arrays = pack(shuffled(documents_of(engine, chosen)))
        write_shard(path, arrays)
        done += len(chosen)
        elapsed = time.monotonic() - started
        left = elapsed / done * (len(prompts) - start - len(chosen))
        text_tokens = int((arrays["roles"] == TEXT).sum())
        log(arguments.out, shard=number, text_tokens=text_tokens, elapsed_s=elapsed, left_s=left)


if __name__ == "__main__":
    main()
