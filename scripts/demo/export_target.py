"""Turn a trained target into the checkpoint that ships: MXFP4 experts, the rest bfloat16, with its tokenizer.

    python -m scripts.demo.export_target --run DIR --tokenizer DIR --out DIR

Afterwards `--out` is a Hugging Face directory that target.load (and transformers) loads. What it costs against the
float32 parameters is measured by the card (scripts.demo.card).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import peagle  # noqa: F401  (before anything starts JAX)
from scripts.demo.checkpoint import load_target
from target.load import save_target

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="what scripts.demo.train_target wrote")
    parser.add_argument("--tokenizer", type=Path, required=True, help="what scripts.demo.tokenizer wrote")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint to write")
    arguments = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer, local_files_only=True)
    config, params = load_target(arguments.run)
    save_target(
        arguments.out,
        params,
        config,
        stop_token_ids=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
        tokenizer_files={name: (arguments.tokenizer / name).read_bytes() for name in TOKENIZER_FILES},
    )


if __name__ == "__main__":
    main()
