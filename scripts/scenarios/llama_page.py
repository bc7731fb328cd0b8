"""The figures and the page of the scenario `llama`, from its lines."""

import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from peagle.measure.reports import Block, heading
from scripts.runs import Json, cell, ratios, spread, spread_text, table, title
from scripts.steps import PUBLISHED_RATE

OURS, LLAMA = "peagle", "llama.cpp"
PLAIN, SPECULATIVE, SYNTHETIC, PROMPTS = "plain", "speculative", "synthetic", "prompts"  # kinds of rows


class Lines:
    """The lines of one model, but for the warm-up's."""

    def __init__(self, lines: Sequence[Json]) -> None:
        self.kinds = {line["row"]: line["kind"] for line in lines}  # in the order of the warm-up
        self._lines = sorted((line for line in lines if line["round"]), key=lambda line: line["round"])

    def rows(self, kinds: Sequence[str]) -> list[str]:
        """Name the rows of some kinds."""
        return [row for row, kind in self.kinds.items() if kind in kinds]

    def of(self, side: str, row: str) -> list[Json]:
        """Return a line per round; none if the side has no such row."""
        return [line for line in self._lines if (line["side"], line["row"]) == (side, row)]

    def speeds(self, side: str, row: str) -> list[float]:
        """Return the tokens a second of each round."""
        return [line["tokens"] / line["seconds"] for line in self.of(side, row)]

    def best(self, side: str, kinds: Sequence[str]) -> list[float]:
        """Return each round's greatest speed."""
        speeds = [self.speeds(side, row) for row in self.rows(kinds)]
        return [max(of_round) for of_round in zip(*filter(None, speeds), strict=True)]

    def fastest(self, side: str, kinds: Sequence[str]) -> str:
        """Name the row of the greatest median speed."""
        medians = {row: statistics.median(speeds) for row in self.rows(kinds) if (speeds := self.speeds(side, row))}
        return max(medians, key=medians.__getitem__)


def by_model(lines: Sequence[Json]) -> dict[str, Lines]:
    """Group the lines of models that follow each other."""
    return {model: Lines([*own]) for model, own in itertools.groupby(lines, key=lambda line: line["model"])}


def rows(lines: Sequence[Json]) -> list[Json]:
    """Make a row of the page per model and variant; both sides' variants of one name share a row."""
    made = []
    for model, own in by_model(lines).items():
        for row, kind in own.kinds.items():
            over = _over(own.speeds(OURS, row), own.speeds(LLAMA, row))
            sides = {side: _side(own, side, row) for side in (OURS, LLAMA)}
            made.append({"model": model, "row": row, "kind": kind, **sides, "ours_over_llama": over})
    return made


def fastest(lines: Sequence[Json]) -> list[Json]:
    """Divide our fastest variant of each round by llama.cpp's, if both draft: of those with drafts, and of all."""
    made = []
    for model, own in by_model(lines).items():
        for among, kinds in (("with drafts", (SPECULATIVE,)), ("of all", (PLAIN, SPECULATIVE))):
            if own.rows((SPECULATIVE,)):
                over = _over(own.best(OURS, kinds), own.best(LLAMA, kinds))
                named = {side: own.fastest(side, kinds) for side in (OURS, LLAMA)}
                made.append({"model": model, "among": among, **named, "ours_over_llama": over})
    return made


def others(lines: Sequence[Json]) -> Json | None:
    """Summarise the share of the processors' time that other processes took; None if it is not known."""
    shares = [line["others_frac"] for line in lines if line["round"] and line["others_frac"] is not None]
    return spread(shares) if shares else None


def _side(own: Lines, side: str, row: str) -> Json | None:
    """Summarise a side's lines of a row; None if it has none."""
    lines, speeds = own.of(side, row), own.speeds(side, row)
    if not lines:
        return None
    passes = sum(line["passes"] for line in lines)
    summary: Json = {"tok_per_s": spread(speeds), "threads": lines[0].get("threads")}
    summary["over_plain"] = _over(speeds, own.speeds(side, PLAIN)) if passes and row != PLAIN else None
    summary["tokens_a_pass"] = sum(line["tokens"] for line in lines) / passes if passes else None
    if "equal" in lines[0]:
        summary["answers"] = lines[0]["answers"]
        summary["equal"] = {plain: min(line["equal"][plain] for line in lines) for plain in lines[0]["equal"]}
    return summary


def _over(speeds: list[float], others: list[float]) -> Json | None:
    return spread(ratios(speeds, others)) if speeds and others else None


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    config, llama = record["config"], record["config"]["llama_cpp"]
    features = ", ".join(re.findall(r"(\w+) = 1", llama["computes"]))
    blocks = title("Beside llama.cpp", record, f"llama.cpp {llama['version']}, {features}")
    blocks.append(
        f"Greedy, one request at a time: {config['num_prompts']} prompts, held-out ones of the demo, else of "
        f"{config['random_tokens']} random tokens; up to {config['max_new_tokens']} new tokens. "
        f"{config['rounds']} rounds in turns after one that warms up: medians (least..greatest), ratios within rounds. "
        "tok/s: tokens after the first over the time after it; of long prompts, the prompt over the time to the first "
        "token. Tokens a pass: of the target, plain passes included. Both sides read bfloat16 and MXFP4 experts, and "
        "decode in native loops, llama.cpp on as many threads as were faster at first."
    )
    for model in dict.fromkeys(row["model"] for row in record["rows"]):
        own = [row for row in record["rows"] if row["model"] == model]
        blocks += [heading(model), table(own, COLUMNS)]
        blocks += [
            f"The fastest {row['among']} ({row[OURS]}; {row[LLAMA]}): ours / llama.cpp {_text(row['ours_over_llama'])}."
            for row in record["fastest"]
            if row["model"] == model
        ]
        blocks += _answers(own)
    if frac := record["others_frac"]:
        text = spread_text({name: 100 * value for name, value in frac.items()}, ".0f")
        blocks.append(f"Other processes took {text} % of the processors' time.")
    return blocks


def _answers(rows: Sequence[Json]) -> Iterator[Block]:
    """Say how many answers are equal."""
    (plain,) = (row for row in rows if row["row"] == PLAIN)
    yield f"Plain answers of llama.cpp that equal ours: {plain[LLAMA]['equal'][OURS]} of {plain[LLAMA]['answers']}."
    unequal = [
        f"{side}, {row['row']}: {own['equal'][side]} of {own['answers']}"
        for row in rows
        for side in (OURS, LLAMA)
        if row["kind"] in (PLAIN, SPECULATIVE) and (own := row[side]) and own["equal"][side] < own["answers"]
    ]
    if any(row["kind"] == SPECULATIVE for row in rows):
        but = f", but for {'; '.join(unequal)}" if unequal else ""
        yield f"In all rounds the answers with drafts equal those of the same side without{but}."
    if any(row["kind"] == SYNTHETIC for row in rows):
        yield f"Drafters of random weights, whose draft i is accepted at {PUBLISHED_RATE:g}^i in the mean."


def _text(figure: Json | None) -> str:
    return "" if figure is None else spread_text(figure, ".2f")


def _columns(side: str) -> dict[str, Callable[[Json], str]]:
    def text(name: str, form: Callable[[Any], str]) -> Callable[[Json], str]:
        return lambda row: "" if row[side] is None or row[side][name] is None else form(row[side][name])

    return {
        f"{side} tok/s": text("tok_per_s", lambda figure: spread_text(figure, ".0f")),
        f"{side} over its plain": text("over_plain", _text),
        f"{side} tokens a pass": text("tokens_a_pass", "{:.2f}".format),
    }


COLUMNS = {
    "": cell("row"),
    f"{LLAMA} threads": lambda row: str(row[LLAMA]["threads"]) if row[LLAMA] else "",
    **_columns(LLAMA),
    **_columns(OURS),
    f"{OURS} / {LLAMA}": lambda row: _text(row["ours_over_llama"]),
}
