"""Run llama.cpp's own converter on a drafter whose target has a tokenizer that it does not know, as the demo's.

    python convert.py SOURCES DRAFTER --target-model-dir TARGET --outtype bf16 --outfile FILE

The converter recognises a tokenizer by a hash, to name the regular expression that splits texts. The driver gets token
ids, so any name does. It also imports sentencepiece, only to see that the tokenizer is none of its kind.
"""

import runpy
import sys
import types

sources = sys.argv.pop(1)
sys.path[:0] = [sources, f"{sources}/gguf-py"]
from conversion.base import TextModel  # noqa: E402

sys.modules["sentencepiece"] = types.SimpleNamespace(SentencePieceProcessor=None)  # type: ignore[assignment]
TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
sys.argv[0] = f"{sources}/convert_hf_to_gguf.py"
runpy.run_path(sys.argv[0], run_name="__main__")
