"""A tiny random pair in the real file layout, and a toy pair that compiles at once."""

import dataclasses
import itertools
import json
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from drafter.config import DrafterConfig
from drafter.load import save_drafter
from peagle.drafters.ngram import NGram
from peagle.ops.rope import RopeConfig, Yarn
from peagle.pair import Pair
from peagle.text.tokenizer import Message, Tokenizer
from target.config import TargetConfig
from target.load import save_target
from target.params import init_params as init_target
from tests.support.drafters import random_params
from tests.support.toys import MarkovTarget

SPECIALS = ("<|startoftext|>", "<|return|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|mask|>")
STOP, MASK = 1, 6
VOCAB_SIZE = 320
MAX_POSITIONS = 384
TEXTS = ["def mean(values):\n    return sum(values) / len(values)\n", "naïve café größer 東京 🎉🎉 дом\n", "1 + 2 = 3"]
TEMPLATE = """\
{%- if strftime_now is defined -%}
<|start|>system<|message|>Today: {{ strftime_now("%Y-%m-%d") }}
{%- if reasoning_effort is defined %} Reasoning: {{ reasoning_effort }}{% endif %}<|end|>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == "assistant" -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
<|start|>assistant<|channel|>final<|message|>
"""
TARGET = TargetConfig(
    hidden_size=64,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=VOCAB_SIZE,
    layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    sliding_window=24,
    num_experts=4,
    top_k=2,
    expert_width=32,
    swiglu_limit=7.0,
    rms_norm_eps=1e-5,
    max_positions=MAX_POSITIONS,
    rope=RopeConfig(16, 150000.0, Yarn(32.0, 4096, truncate=False)),
)
DRAFTER = DrafterConfig(
    hidden_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=56,
    target_hidden_size=64,
    vocab_size=VOCAB_SIZE,
    draft_vocab_size=VOCAB_SIZE,
    mask_token_id=MASK,
    rope=RopeConfig(8, 10000.0),
    aux_layer_ids=(0, 1, 2),
)


class ByteTokenizer(Tokenizer):
    """A tokenizer of the 256 bytes that counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.special_tokens: Mapping[int, str] = {}
        self.info: Mapping[str, Any] = {}

    def token_bytes(self, token_id: int) -> bytes:
        self.num_calls += 1
        return bytes([token_id])

    def encode(self, text: str, *, special_tokens: bool = False, most_tokens: int | None = None) -> tuple[int, ...]:
        return tuple(text.encode())

    def encode_chat(self, messages: Sequence[Message], **options: object) -> tuple[int, ...]:
        return self.encode(repr((messages, options)))


@dataclasses.dataclass(frozen=True)
class Directories:
    """Checkpoints that fit together, and copies of them with something missing."""

    target: Path
    drafter: Path
    root: Path


def write_tokenizer(directory: Path, specials: Sequence[str] = SPECIALS, template: str = TEMPLATE) -> None:
    """Make a byte-level BPE of VOCAB_SIZE - 8 tokens (higher ids are unused), with a chat template of the date."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 8,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(TEXTS * 3, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=specials[0], eos_token=specials[STOP], clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = template
    wrapped.save_pretrained(directory)


def copy_tokenizer(source: Path, directory: Path, template: str | None = None) -> None:
    """Copy a tokenizer, with this chat template in place of its own; None: without one."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)


def write_target(directory: Path, config: TargetConfig = TARGET, stops: tuple[int, ...] = (STOP,)) -> None:
    """Random weights, MXFP4 experts, with logits so far apart that float32 rounding flips no argmax."""
    params = jax.jit(init_target, static_argnums=0)(config, jax.random.key(0))
    params = dataclasses.replace(params, embedding=params.embedding * 50, lm_head=params.lm_head * 4)
    save_target(directory, params, config, dtype=ml_dtypes.bfloat16, mxfp4=True, stop_token_ids=stops)


def write_drafter(directory: Path, config: DrafterConfig = DRAFTER) -> None:
    save_drafter(directory, random_params(config, seed=1), config)


def edit_json(path: Path, **changes: object) -> None:
    """The object in the file with these keys changed; None removes one."""
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def press_ctrl_c_at(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, call: int = 1, number: int = signal.SIGINT
) -> None:
    """Press Ctrl-C, or send another signal, at a call of a function, counted from 1; the call continues."""
    function, calls = getattr(where, name), itertools.count(1)

    def pressing(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            signal.raise_signal(number)
        return function(*arguments, **options)

    monkeypatch.setattr(where, name, pressing)


@flax.struct.dataclass
class ToyTarget(MarkovTarget):
    """A target that compiles at once: the next token depends only on the last one."""

    @property
    def max_positions(self) -> int:
        return MAX_POSITIONS


def toy_pair(tokenizer: Tokenizer | None, stops: tuple[int, ...] = (STOP,)) -> Pair:
    """Make the toy target with an n-gram drafter.

    It never stops: greedily it counts up in cycles of nine tokens, so drafts fail in the first cycle and succeed in the
    second.
    """
    table = np.random.default_rng(0).normal(0, 1, (VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)
    first, last = len(SPECIALS), VOCAB_SIZE - 8
    table[:, :first] -= 20  # no special tokens
    table[:, last:] -= 20  # no ids outside the tokenizer's
    for token in range(VOCAB_SIZE):
        place = max(token - first, 0)
        following = place + 1 if place % 9 < 8 else place - 8
        table[token, first + following % (last - first)] += 6
    target = ToyTarget(jnp.asarray(table))
    return Pair(target, target, NGram(), tokenizer, stops)
