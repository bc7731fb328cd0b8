"""Measure answers that a grammar binds: are they valid and the same at every K, and what do their neighbours lose?

    python -m scripts.bench_grammar --out RUN [--target DIR --drafter DIR]

First answers to held-out prompts are bound by JSON schemas, plainly and with each K, and validated by the package
jsonschema. Then free answers go on beside one more, which is free or bound by a schema, in turns: how many of their
tokens come in a second. Afterwards `--out` (which must not exist yet) holds run.json, raw.jsonl and README.md.
"""

import argparse
import dataclasses
import importlib
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import peagle
from peagle.engine.engine import Engine
from peagle.engine.request import Request
from peagle.loading import load
from peagle.measure.pages import Block, Table, heading
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from peagle.pair import Pair
from peagle.result import decode
from peagle.text.prompt_files import read_prompt_file
from peagle.text.prompts import Rendering
from scripts.runs import (
    Json,
    Progress,
    RawLines,
    add_drafter_option,
    add_prompt_options,
    add_run_options,
    in_one_line,
    new_parser,
    numbers,
    origin,
    spread,
    spread_text,
    where,
    write_run,
)

CONTEXT = 1024
ANSWER_TOKENS = 256
BESIDE_TOKENS = 512  # of the answer beside the free ones, which end before it


def an_object(**properties: Any) -> Json:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def short(**more: Any) -> Json:
    return {"type": "string", "maxLength": 24, **more}


def at_most(count: int, items: Json) -> Json:
    return {"type": "array", "items": items, "maxItems": count}


NAME, SMALL = short(pattern="^[a-z_]{1,12}$"), {"type": "integer", "minimum": 0, "maximum": 999}
SCHEMAS: dict[str, Json] = {
    "flat": an_object(name=NAME, count=SMALL, done={"type": "boolean"}),
    "nested": an_object(outer=an_object(inner=an_object(name=NAME))),
    "strings": an_object(title=short(), text=short(), code=short()),
    "array": an_object(values={"type": "array", "items": SMALL, "minItems": 1, "maxItems": 8}),
    "objects": an_object(rows={**at_most(4, an_object(key=NAME, value=SMALL)), "minItems": 2}),
    "enum": an_object(kind={"enum": ["function", "class", "module"]}, level={"enum": [1, 2, 3]}),
    "one of several": {"anyOf": [an_object(error=short()), an_object(result=SMALL)]},
    "nullable": an_object(name={"anyOf": [NAME, {"type": "null"}]}, parent={"type": ["integer", "null"], "maximum": 9}),
    "date": an_object(on={"type": "string", "format": "date"}, id=short(pattern="^[A-Z]{2}-[0-9]{3}$")),
    "tree": {
        "$defs": {"node": an_object(v=SMALL, next={"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]}),
                  "leaf": an_object(v=SMALL)},
        "$ref": "#/$defs/node",
    },
}  # fmt: skip
LONG = {"type": "array", "items": an_object(name=NAME, doc=short()), "minItems": 40}  # does not end too soon


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    add_prompt_options(parser, num_prompts=6)
    add_drafter_option(parser)
    add_run_options(parser, 5)
    parser.add_argument("-k", default="3,7", help="drafts of a step (default %(default)s)")
    parser.add_argument("--free", type=int, default=3, help="free answers beside one (default %(default)s)")
    given = sys.argv[1:] if arguments is None else arguments
    return in_one_line("bench_grammar", lambda: bench(parser.parse_args(given), given))


def bench(asked: argparse.Namespace, given: Sequence[str]) -> int:
    """Decode the suite, measure neighbours, and write the page."""
    expect_new(asked.out)
    if min(asked.rounds, asked.free) < 1 or asked.num_prompts < 1:
        raise InputError("--rounds, --free and --num-prompts must be 1 or more")
    check = validator()
    ks = [0, *numbers("-k", asked.k)]
    pair = load(asked.target, asked.drafter)
    conversations = read_prompt_file(asked.prompts, strict=True).conversations
    if len(conversations) < max(asked.num_prompts, asked.free + 1):
        raise InputError(f"{asked.prompts} holds {len(conversations)} prompts; expected {asked.free + 1} or more")
    raw, progress = RawLines(asked.out), Progress()

    def request(number: int, tokens: int, schema: Json | None, ignore_eos: bool = False) -> Request:
        grammar = None if schema is None else peagle.Grammar.json_schema(schema)
        return pair.request(
            conversations[number], [], Rendering(), max_new_tokens=tokens, index=number, context=CONTEXT,
            ignore_eos=ignore_eos, grammar=grammar,
        )  # fmt: skip

    for k in ks:
        progress(f"schemas, K = {k}")
        suite = [(name, request(number, ANSWER_TOKENS, schema)) for name, schema in SCHEMAS.items()
                 for number in range(asked.num_prompts)]  # fmt: skip
        raw.extend(answers(pair, engine_of(pair, k, asked.free + 1), suite, k, check))
        free = [("none", request(number, ANSWER_TOKENS, None)) for number in range(asked.num_prompts)]
        raw.extend(answers(pair, engine_of(pair, k, asked.free + 1), free, k, None))
    engines = {k: engine_of(pair, k, asked.free + 1) for k in ks}
    places = list(itertools.product(ks, (False, True)))
    progress.begin((asked.rounds + 1) * len(places))
    others = [request(number + 1, asked.max_new_tokens, None, ignore_eos=True) for number in range(asked.free)]
    for number in range(asked.rounds + 1):  # the first warms up
        for k, bound in places if number % 2 else places[::-1]:
            progress.part(f"{asked.free} free answers beside one {'bound' if bound else 'free'}, K = {k}")
            beside = request(0, BESIDE_TOKENS, LONG if bound else None, ignore_eos=not bound)
            speeds = tok_per_s(engines[k], beside, others)
            if number:
                raw.add({"kind": "neighbours", "round": number, "k": k, "bound": bound, **speeds})
    progress.end()
    config = {"k": ks, "free": asked.free, "rounds": asked.rounds, "prompts": asked.num_prompts}
    config |= {"target": Path(asked.target).name, "drafter": Path(asked.drafter).name}
    record = {"schema": 1, "provenance": origin("scripts.bench_grammar", given), "config": config,
              "schemas": summed_answers(raw.lines, ks), "neighbours": summed_neighbours(raw.lines, ks)}  # fmt: skip
    write_run(asked.out, record, page(record))
    return 0


def validator() -> Any:
    """Return a function that raises for a value that does not follow a schema."""
    try:
        jsonschema = importlib.import_module("jsonschema")
    except ImportError:
        raise InputError("jsonschema is not installed, which judges the answers: pip install jsonschema") from None
    formats = jsonschema.FormatChecker()
    return lambda value, schema: jsonschema.validate(value, schema, format_checker=formats)


def engine_of(pair: Pair, k: int, slots: int) -> Engine:
    engine = pair.engine(pair.engine_config(k, slots=slots, context=CONTEXT))
    engine.warm_up()
    return engine


def answers(
    pair: Pair, engine: Engine, suite: Sequence[tuple[str, Request]], k: int, check: Any
) -> Iterator[Json]:  # fmt: skip
    """Decode the suite; yield an answer each, and whether it is valid."""
    requests = [dataclasses.replace(request, index=place) for place, (_, request) in enumerate(suite)]
    for (name, _), result in zip(suite, decode(engine, requests, pair.tokenizer), strict=True):
        counters = result.counters
        yield {
            "kind": "answer", "schema": name, "prompt": result.request.name, "k": k, "text": result.text,
            "ended": result.finish_reason, "valid": check is not None and valid(result.text, SCHEMAS[name], check),
            "steps": counters.num_steps, "accepted": counters.num_accepted,
        }  # fmt: skip


def valid(text: str | None, schema: Json, check: Any) -> bool:
    """Judge a text."""
    try:
        check(json.loads(text or ""), schema)
    except Exception:  # ValueError, or the package's own
        return False
    return True


def tok_per_s(engine: Engine, beside: Request, others: Sequence[Request]) -> Json:
    """Decode all together; return the tokens a second of the others and of the one beside them, while all go on."""
    handles = engine.add_all([beside, *others])
    first, last, counts, ended = 0.0, 0.0, [0, 0], False
    for handle, chunk in engine.run(handles):
        first = first or (chunk.time_s if all(each.output_ids for each in handles) else 0.0)
        if first and not ended and chunk.time_s > first:
            counts[handle is not handles[0]] += len(chunk.token_ids)
            last = chunk.time_s
        ended |= chunk.finish_reason is not None
    engine.settle()
    seconds = max(last - first, 1e-9)
    return {"others_tok_per_s": counts[1] / seconds, "beside_tok_per_s": counts[0] / seconds}


def summed_answers(raw: Sequence[Json], ks: Sequence[int]) -> list[Json]:
    """Count, for each K: valid answers, answers equal to plain decoding's, and acceptance with and without."""
    found, plain = [], {}
    for k in ks:
        lines = [line for line in raw if line["kind"] == "answer" and line["k"] == k]
        bound = [line for line in lines if line["schema"] != "none"]
        texts = {(line["schema"], line["prompt"]): line["text"] for line in bound}
        plain = plain or texts
        whole = [line for line in bound if line["ended"] == "stop"]
        rows: Json = {"k": k, "answers": len(bound), "whole": len(whole), "valid": sum(line["valid"] for line in whole)}
        rows["equal"] = sum(text == plain[key] for key, text in texts.items())
        for name, some in (("bound", bound), ("free", [line for line in lines if line["schema"] == "none"])):
            steps = sum(line["steps"] for line in some)
            rows[f"acceptance_{name}"] = 1 + sum(line["accepted"] for line in some) / steps if k else None
        found.append(rows)
    return found


def summed_neighbours(raw: Sequence[Json], ks: Sequence[int]) -> list[Json]:
    """Take medians over rounds, and of the ratios of a round."""
    found = []
    for k in ks:
        by = {bound: [line for line in raw if line["kind"] == "neighbours" and (line["k"], line["bound"]) == (k, bound)]
              for bound in (False, True)}  # fmt: skip
        ratios = [b["others_tok_per_s"] / a["others_tok_per_s"] for a, b in zip(by[False], by[True], strict=True)]
        own = [b["beside_tok_per_s"] / a["beside_tok_per_s"] for a, b in zip(by[False], by[True], strict=True)]
        median = {bound: statistics.median(line["others_tok_per_s"] for line in lines) for bound, lines in by.items()}
        found.append({
            "k": k, "free_tok_per_s": median[False], "bound_tok_per_s": median[True], "own": statistics.median(own),
            "ratio": spread(ratios),
        })  # fmt: skip
    return found


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    config, source = record["config"], record["provenance"]
    suite = [
        (str(each["k"]), str(each["answers"]), f"{each['valid']} of {each['whole']}", str(each["equal"]),
         *("-" if each[name] is None else f"{each[name]:.2f}" for name in ("acceptance_bound", "acceptance_free")))
        for each in record["schemas"]
    ]  # fmt: skip
    beside = [
        (str(each["k"]), f"{each['free_tok_per_s']:.0f}", f"{each['bound_tok_per_s']:.0f}",
         spread_text(each["ratio"], ".2f"), f"{each['own']:.2f}")
        for each in record["neighbours"]
    ]  # fmt: skip
    return [
        heading("Answers that a grammar binds", 1),
        f"Target {config['target']}, drafter {config['drafter']}, greedy. {len(SCHEMAS)} JSON schemas, "
        f"{config['prompts']} held-out prompts each, judged by the package jsonschema; whole: not cut at "
        f"{ANSWER_TOKENS} tokens; equal: the text is plain decoding's. Acceptance length beside that of "
        "free answers to the same prompts.",
        Table(("K", "answers", "valid of whole ones", "equal", "acceptance length", "of free answers"), suite),
        heading("Beside a bound answer", 2),
        f"{config['free']} free answers and one more, which is free or bound, decoded together: tokens a second of the "
        f"free ones, medians of {config['rounds']} rounds, ratios of the same round (least..most); and the speed of "
        "the one beside them, bound over free.",
        Table(("K", "beside a free one", "beside a bound one", "bound over free", "its own speed"), beside),
        f"`{source['command']}`; {where(source)}.",
    ]


if __name__ == "__main__":
    sys.exit(main())
