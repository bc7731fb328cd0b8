"""Record how openai-harmony parses answers, for tests/golden/test_harmony.py.

    TIKTOKEN_ENCODINGS_BASE=DIRECTORY python -m scripts.golden.harmony

needs `pip install openai-harmony==0.0.8` and, in DIRECTORY, o200k_base.tiktoken: the vocabulary of GPT-OSS, which that
package downloads if the variable is not set. It writes tests/golden/harmony.jsonl: a line about the record, then a line
per answer, with its tokens (bytes as Latin-1) and openai-harmony's messages (channel, recipient, text).
"""

import importlib.metadata
import random
from collections.abc import Iterator
from typing import Any

from peagle.base.errors import InputError
from peagle.base.strict_json import dumps
from scripts.runs import ROOT, in_one_line, new_parser

GOLDEN = ROOT / "tests" / "golden" / "harmony.jsonl"
NUM_GENERATED = 40
MAX_MESSAGES = 4

HEADERS = (
    "<|channel|>analysis",
    "<|channel|>final",
    "<|channel|>commentary",
    "<|channel|>final <|constrain|>json",
    "<|channel|>commentary to=functions.get_weather <|constrain|>json",
    "<|channel|>commentary to=functions.get_weather<|constrain|>json",
    "<|channel|>commentary to=functions.lookup.all json",
    "<|channel|>commentary to=functions.f",
    "<|channel|>analysis to=python code",
    "<|channel|>analysis to=functions.g",
    " to=functions.get_weather<|channel|>commentary json",
    " to=functions.f<|channel|>commentary",
    "",
)
TEXTS = (
    "",
    "4",
    '{"location": "東京", "days": [1, 2]}',
    "naïve café größer 🎉👩‍👩‍👧 дом\n\n\tx = 1  # ok",
    "analysis to=functions.f",
    "We need a <tool>; user said final|end.",
    # control tokens that are plain text inside a message
    "one <|message|> two<|constrain|>three",
)


def generated() -> Iterator[str]:
    """Yield answers of a few messages with random headers, texts and ends; some are cut off."""
    rng = random.Random(0)
    for number in range(NUM_GENERATED):
        parts = []
        for message in range(rng.randint(1, MAX_MESSAGES)):
            header, text = rng.choice(HEADERS), rng.choice(TEXTS)
            end = rng.choice(("<|end|>", "<|call|>" if " to=" in header else "<|return|>"))
            parts.append(f"{'<|start|>assistant' if message else ''}{header}<|message|>{text}{end}")
        answer = "".join(parts)
        yield answer.removesuffix(end) if number % 4 == 3 else answer


def record() -> Iterator[dict[str, Any]]:
    """Yield the record's lines."""
    from openai_harmony import HarmonyEncodingName, Role, StreamableParser, load_harmony_encoding

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    yield {
        "command": "python -m scripts.golden.harmony",
        "recorded": {"openai-harmony": importlib.metadata.version("openai-harmony")},
    }
    every = (f"{header}<|message|>{text}<|end|>" for header in HEADERS for text in TEXTS[2:4])
    for answer in (*every, *generated()):
        parser, tokens = StreamableParser(encoding, role=Role.ASSISTANT), []
        for token in encoding.encode(answer, allowed_special="all"):
            parser.process(token)
            tokens.append(encoding._inner.decode_bytes([token]).decode("latin-1"))  # the public decode() replaces bytes
        parser.process_eos()
        messages = [
            (message.channel, message.recipient, "".join(part.text for part in message.content))
            for message in parser.messages
        ]
        yield {"tokens": tokens, "messages": messages}


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    new_parser(__doc__).parse_args(arguments)
    return in_one_line("golden.harmony", write)


def write() -> int:
    """Write the record. Raises InputError without openai-harmony or its vocabulary."""
    try:
        lines = list(record())
    except (ImportError, RuntimeError) as error:
        raise InputError(f"openai-harmony cannot run here: {error}; see --help for what it needs") from None
    GOLDEN.write_text("".join(dumps(line) + "\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
