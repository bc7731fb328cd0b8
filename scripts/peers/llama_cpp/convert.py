"""Run llama.cpp's own converter on a checkpoint with any tokenizer, as the demo's, or with none.

    python convert.py SOURCES CHECKPOINT [--target-model-dir TARGET] --outtype bf16 --outfile FILE

The converter recognises a tokenizer by a hash, to name the regular expression that splits texts. The driver gets token
ids, so any name does. It also imports sentencepiece, only to see that the tokenizer is none of its kind.
"""

import runpy
import sys
import types
from pathlib import Path

sources = sys.argv.pop(1)
sys.path[:0] = [sources, f"{sources}/gguf-py"]
from conversion.base import TextModel  # noqa: E402

sys.modules["sentencepiece"] = types.SimpleNamespace(SentencePieceProcessor=None)  # type: ignore[assignment]
TextModel.get_vocab_base_pre = lambda *_: "gpt-2"


def set_no_vocab(model: TextModel) -> None:
    model._set_vocab_none()
    model.gguf_writer.add_vocab_size(model.hparams["vocab_size"])


if not (Path(sys.argv[1]) / "tokenizer.json").exists() and "--target-model-dir" not in sys.argv:
    TextModel._set_vocab_gpt2 = set_no_vocab
sys.argv[0] = f"{sources}/convert_hf_to_gguf.py"
runpy.run_path(sys.argv[0], run_name="__main__")
