"""Train the demo pair's tokenizer: byte-level BPE for Python source, and a harmony-style chat template.

It is a folder as Hugging Face's that `transformers.AutoTokenizer` loads. Every UTF-8 text decodes to itself; a sign,
the line break and the indentation after it share a token if that is frequent.
"""

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from scripts.demo.corpus import read_lines
from scripts.runs import ROOT

VOCAB_SIZE, MAX_POSITIONS = 2048, 131072
START_OF_TEXT, END_OF_TEXT, RETURN, MASK = "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|mask|>"
SPECIAL_TOKENS = (START_OF_TEXT, END_OF_TEXT, RETURN, "<|start|>", "<|message|>", "<|channel|>", "<|end|>", MASK)
DEMO = ROOT / "peagle" / "demo"
CHAT_TEMPLATE = DEMO / "target" / "chat_template.jinja"  # the next pair has the last one's
# A word with one sign or space before it; up to three digits; a run of signs with the line breaks and indentation that
# follow; line breaks with indentation; other white space. (6 % fewer tokens than words and signs apart.)
PIECES = (
    r"[^\s\p{L}\p{N}]?\p{L}+| \p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+(?:\r?\n[ \t]*)*|(?:\r?\n[ \t]*)+|[ \t]+(?=\S)|\s+"
)


def train_bpe(texts: Iterator[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` ids: special tokens, all 256 bytes, pieces."""
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Add the special tokens' roles and the chat template."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START_OF_TEXT,
        eos_token=RETURN,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
    wrapped.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    # raw text starts as in training; the chat template has marks of its own
    wrapped.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START_OF_TEXT} $A", special_tokens=[(START_OF_TEXT, wrapped.bos_token_id)]
    )
    return wrapped


def train_tokenizer(corpus: Path, out: Path) -> None:
    """Train the tokenizer of a corpus, on the raw files and the functions again, and save it."""
    texts = [record["text"] for record in read_lines(corpus / "raw_train.jsonl")]
    texts += [record["reference"] for record in read_lines(corpus / "chat_train.jsonl")]
    wrap(train_bpe(iter(texts))).save_pretrained(out)
