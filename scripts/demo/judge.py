"""Judge pairs of the demo by the length of the prompt: acceptance, outputs that loop, held-out nats.

    python -m scripts.demo.judge --out DIR --pair NAME:DIR:WINDOW [--pair ...] --at TOKENS:PROMPTS [--at ...]
        [--chat chat_heldout.jsonl] [--raw raw_heldout.jsonl]

A pair's DIR holds target/, drafter/ and drafter_eagle3/; WINDOW is what --drafter-window takes. At so many TOKENS the
first PROMPTS held-out prompts stand behind topics of pydoc (scripts.long_prompts); at 0 alone. Greedy, K = 7.
With --chat: nats a token of the right answers behind the same topics; with --raw: nats a token of held-out sources, by
position. Each figure is measured once and kept in DIR/figures: the same command goes on after it was cut off.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from peagle.checkpoints import HELD_OUT
from peagle.loading import load
from peagle.measure.logprobs import output_logprobs
from peagle.measure.pages import Block, Picture, Table
from peagle.measure.sweep import charts
from peagle.measure.sweep.figures import Estimate, estimate, one_more_than_ratio, ratio
from peagle.measure.sweep.page import estimate_text
from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps
from peagle.pair import Pair
from peagle.result import decode
from peagle.text.prompts import Conversation, Rendering
from scripts.demo.build import DRAFTERS
from scripts.demo.corpus import read_lines
from scripts.long_prompts import long_prompts
from scripts.runs import Json, in_one_line, new_parser, origin, where, write_run

K, MAX_NEW_TOKENS, SLOTS = 7, 256, 4
EDGES = (0, 512, 2048, 4096, 8192, 10240)  # positions of raw text
RAW_DOCUMENTS, CHAT_ANSWERS = 8, 24
KINDS = dict(zip(DRAFTERS, ("P-EAGLE", "EAGLE-3", "DFlash"), strict=True))


@dataclasses.dataclass(frozen=True)
class Judged:
    """A pair, by its folder, and the window of its drafters' attention."""

    name: str
    folder: Path
    window: str

    def load(self, drafter: str | None) -> Pair:
        given = None if drafter is None else self.folder / drafter
        return load(self.folder / "target", given, drafter_window=self.window if given else "auto")


def held_out_prompts(pair: Pair, rows: Sequence[Json], tokens: int) -> list[str]:
    """Return the rows' prompts, behind text if tokens are given."""
    prompts = [row["prompt"] for row in rows]
    assert pair.tokenizer is not None
    return long_prompts(prompts, pair.tokenizer, tokens) if tokens else prompts


def accepted(pair: Pair, prompts: Sequence[str]) -> Json:
    """Decode the prompts; return counts of each."""
    requests = [
        pair.request(_asked(prompt), [], Rendering(), max_new_tokens=MAX_NEW_TOKENS, index=index)
        for index, prompt in enumerate(prompts)
    ]
    config = pair.engine_config(K, slots=min(SLOTS, len(requests)), context=pair.capacity(requests))
    results = decode(pair.engine(config), requests, pair.tokenizer)
    return {
        "prompt_tokens": [len(result.request.prompt_ids) for result in results],
        "accepted": [result.counters.num_accepted for result in results],
        "steps": [result.counters.num_steps for result in results],
        "loops": [bool(result.loops) for result in results],
    }


def _asked(prompt: str) -> Conversation:
    return Conversation("a held-out prompt", (prompt,))


def nats_of_answers(pair: Pair, rows: Sequence[Json], tokens: int) -> Json:
    """Measure nats of the right answers, of each row."""
    assert pair.tokenizer is not None
    nats, counts = [], []
    for row, prompt in zip(rows, held_out_prompts(pair, rows, tokens), strict=True):
        asked = _asked(prompt).encode([], pair.tokenizer, Rendering())
        answer = [*pair.tokenizer.encode(row["reference"]), pair.stop_token_ids[0]]
        nats.append(-sum(each.logprob for each in output_logprobs(pair.plain_target, asked, answer, 0)))
        counts.append(len(answer))
    return {"nats": nats, "tokens": counts}


def nats_by_position(pair: Pair, texts: Sequence[str]) -> Json:
    """Measure nats of texts that are as long as the last edge, between the edges: a row of sums for each text."""
    assert pair.tokenizer is not None
    sums = []
    for text in texts:
        ids = pair.tokenizer.encode(text)[: EDGES[-1]]
        found = [each.logprob for each in output_logprobs(pair.plain_target, ids[:1], ids[1:], 0)]
        sums.append([-sum(found[low:high]) for low, high in itertools.pairwise(EDGES)])
    return {"nats": sums}


def long_texts(records: Sequence[Json], pair: Pair) -> list[str]:
    """Join held-out sources to texts as long as the last edge; the rest is left out."""
    assert pair.tokenizer is not None
    texts, parts, size = [], [], 0
    for record in records:
        parts.append(record["text"])
        size += len(pair.tokenizer.encode(record["text"]))
        if size >= EDGES[-1]:
            texts.append("\n\n\n".join(parts))
            parts, size = [], 0
    return texts[:RAW_DOCUMENTS]


@dataclasses.dataclass(frozen=True)
class Kept:
    """Figures in a folder, each measured once."""

    folder: Path

    def get(self, name: str, measure: Callable[[], Json]) -> Json:
        path = self.folder / (re.sub(r"[^a-z0-9_]+", "_", name.lower()) + ".json")
        if path.exists():
            found: Json = json.loads(path.read_text(encoding="utf-8"))
            return found
        print(f"judge: {name}", flush=True)
        found = measure()
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(dumps(found) + "\n", encoding="utf-8")
        return found


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is judged: pairs, at lengths of the prompt with so many prompts each, and held-out text."""

    pairs: Sequence[Judged]
    lengths: Sequence[tuple[int, int]]
    chat: Path | None
    raw: Path | None


def measure(asked: Asked, kept: Kept) -> Json:
    """Measure what is not kept yet; return all figures as JSON."""
    rows, seen = read_lines(HELD_OUT), set()
    decoded, nats = [], []
    for judged in asked.pairs:
        for drafter, kind in KINDS.items():
            pair = judged.load(drafter)
            for tokens, count in asked.lengths:
                prompts = held_out_prompts(pair, rows[:count], tokens)
                name = f"{judged.name} {drafter} {tokens}"
                found = kept.get(name, lambda pair=pair, prompts=prompts: accepted(pair, prompts))
                decoded.append({"pair": judged.name, "drafter": kind, "tokens": tokens, **found})
        if judged.folder in seen:
            continue
        seen.add(judged.folder)
        nats += _nats(asked, kept, judged)
    return {"decoded": decoded, "nats": nats}


def _nats(asked: Asked, kept: Kept, judged: Judged) -> list[Json]:
    """Measure a pair's target on held-out text."""
    pair, found = judged.load(None), []
    if asked.chat is not None:
        rows = read_lines(asked.chat)[:CHAT_ANSWERS]
        for tokens, _ in asked.lengths:
            each = kept.get(f"{judged.name} nats {tokens}", lambda tokens=tokens: nats_of_answers(pair, rows, tokens))
            found.append({"pair": judged.name, "what": f"answers behind {tokens:,} tokens", **each})
    if asked.raw is not None:
        texts = long_texts(read_lines(asked.raw), pair)
        sums = kept.get(f"{judged.name} nats of text", lambda: nats_by_position(pair, texts))["nats"]
        for place, (low, high) in enumerate(itertools.pairwise(EDGES)):
            # the first token of a text is given, so its last stretch is one shorter
            counts = [min(high, EDGES[-1] - 1) - low] * len(sums)
            what = f"sources, tokens {low:,} to {high:,}"
            found.append({"pair": judged.name, "what": what, "nats": [row[place] for row in sums], "tokens": counts})
    return found


def page(found: Json, made: Json) -> list[Block]:
    """Render the figures."""
    return [
        "# The demo pair by the length of the prompt",
        f"Greedy, K = {K}, at most {MAX_NEW_TOKENS} new tokens; held-out prompts, the longer ones behind topics of "
        f"pydoc. Intervals: 95 %, over prompts. {where(made)}.",
        "## Acceptance length, and outputs that loop",
        Table(
            (
                "pair",
                "drafter",
                "tokens of prompt",
                "prompts",
                "acceptance length",
                "without loops",
                "outputs that loop",
            ),
            [_decoded_row(row) for row in found["decoded"]],
        ),
        *_pictures(found["decoded"]),
        "## Held-out nats a token",
        Table(("pair", "text", "texts", "nats"), [_nats_row(row) for row in found["nats"]]),
    ]


def _decoded_row(row: Json) -> list[str]:
    median, loops = f"{np.median(row['prompt_tokens']):,.0f}", f"{np.mean(row['loops']):.0%}"
    return [row["pair"], row["drafter"], median, str(len(row["loops"])), *map(_text, _lengths(row)), loops]


def _lengths(row: Json) -> tuple[Estimate | None, Estimate | None]:
    """Estimate the acceptance length (of all outputs, of those that do not loop)."""
    table = np.stack([np.array(row["accepted"], float), np.array(row["steps"], float)], axis=1)
    calm = table[~np.array(row["loops"])]
    return estimate(table, one_more_than_ratio), estimate(calm, one_more_than_ratio)


def _pictures(rows: Sequence[Json]) -> Iterator[Picture]:
    """Draw the acceptance length over the length of the prompt, of each pair and drafter, if there are two lengths."""
    lengths = list(map(_lengths, rows))
    for which, name, caption in (
        (0, "acceptance", "Acceptance length over the length of the prompt."),
        (1, "acceptance_without_loops", "The same, of outputs that do not loop."),
    ):
        series: dict[str, list[Json]] = {}
        for row, found in zip(rows, lengths, strict=True):
            figure = found[which]
            length = None if figure is None else dataclasses.asdict(figure)
            part = {"prompt_tokens": float(np.median(row["prompt_tokens"])), "acceptance_length": length}
            series.setdefault(f"{row['pair']}, {row['drafter']}", []).append(part)
        if (svg := charts.over_context(series, "acceptance_length", "acceptance length")) is not None:
            yield Picture(name, svg, caption)


def _nats_row(row: Json) -> list[str]:
    table = np.stack([np.array(row["nats"], float), np.array(row["tokens"], float)], axis=1)
    return [row["pair"], row["what"], str(len(table)), _text(estimate(table, ratio))]


def _text(figure: Estimate | None) -> str:
    return estimate_text(None if figure is None else dataclasses.asdict(figure))


def parse_pair(typed: str) -> Judged:
    """Read NAME:DIR:WINDOW. Raises InputError for anything else."""
    name, _, rest = typed.partition(":")
    folder, _, window = rest.rpartition(":")
    if not (name and folder and window):
        raise InputError(f"--pair is {typed!r}; expected NAME:DIR:WINDOW")
    if missing := [part for part in ("target", *DRAFTERS) if not (Path(folder) / part).is_dir()]:
        raise InputError(f"--pair {typed}: {folder} holds no {missing[0]}/; expected a folder of a pair")
    return Judged(name, Path(folder), window)


def parse_length(typed: str) -> tuple[int, int]:
    """Read TOKENS:PROMPTS. Raises InputError for anything else."""
    tokens, _, prompts = typed.partition(":")
    if not (tokens.isdecimal() and prompts.isdecimal() and int(prompts) > 0):
        raise InputError(f"--at is {typed!r}; expected TOKENS:PROMPTS, as 2500:24")
    return int(tokens), int(prompts)


def main() -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures and the page")
    parser.add_argument("--pair", action="append", required=True, help="NAME:DIR:WINDOW")
    parser.add_argument("--at", action="append", required=True, help="TOKENS:PROMPTS")
    parser.add_argument("--chat", type=Path, help="held-out tasks with their right answers")
    parser.add_argument("--raw", type=Path, help="held-out sources")
    arguments = parser.parse_args()

    def run() -> int:
        pairs, lengths = [parse_pair(each) for each in arguments.pair], [parse_length(each) for each in arguments.at]
        found = measure(Asked(pairs, lengths, arguments.chat, arguments.raw), Kept(arguments.out / "figures"))
        made = origin("scripts.demo.judge")
        write_run(arguments.out, {"provenance": made, **found}, page(found, made))
        return 0

    return in_one_line("judge", run)


if __name__ == "__main__":
    raise SystemExit(main())
