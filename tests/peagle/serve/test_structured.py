"""Structured output by HTTP: every field constrains the answer, to what the Python interface gives."""

import json
import re
import time
from typing import Any

import pytest
from fastapi.testclient import TestClient

from peagle.engine.grammar import Grammar
from peagle.pair import Pair
from peagle.serve.bodies import ChatBody, CompletionBody
from peagle.serve.request_body import parse
from peagle.serve.structured import grammar_of
from peagle.text.tokenizer import Tokenizer
from tests.support.pairs import STOP, toy_pair
from tests.support.servers import CHAT, COMPLETIONS, CONTEXT, RESPONSES, answer, client_of, error_of

MESSAGES = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "string", "maxLength": 4}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
OBJECT = Grammar.json_object()
LARK = 'start: "x" /[0-9]{3}/'
FIELDS: list[tuple[dict[str, Any], Grammar]] = [
    ({"response_format": {"type": "json_object"}}, OBJECT),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
        Grammar.json_schema(SCHEMA),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar.json_schema(SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, Grammar.json_schema(SCHEMA)),
    ({"structured_outputs": {"json_object": True}}, OBJECT),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, Grammar.regex("[ab]{3}")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, Grammar.choice(["yes", "no"])),
    ({"structured_outputs": {"grammar": LARK}}, Grammar.lark(LARK)),
    ({"guided_json": SCHEMA}, Grammar.json_schema(SCHEMA)),
    ({"guided_regex": "[ab]{3}"}, Grammar.regex("[ab]{3}")),
    ({"guided_choice": ["yes", "no"]}, Grammar.choice(["yes", "no"])),
    ({"guided_grammar": LARK}, Grammar.lark(LARK)),
]


@pytest.fixture(scope="module")
def alone(tokenizer: Tokenizer) -> Pair:
    return toy_pair(tokenizer)


def ending(pair: Pair) -> dict[int, float]:
    """Biases with which the toy's answers are short."""
    assert pair.tokenizer is not None
    spaces = [token for token in range(320) if re.fullmatch(rb"\s+", pair.tokenizer.token_bytes(token))]
    return {STOP: 40.0, pair.tokenizer.encode("}")[0]: 20.0, **dict.fromkeys(spaces, -40.0)}


def options_of(biases: dict[int, float], **fields: Any) -> dict[str, Any]:
    biased = {str(token): value for token, value in biases.items()}
    return {"max_tokens": 100, "temperature": 0, "logit_bias": biased, **fields}


@pytest.mark.parametrize(("fields", "grammar"), FIELDS)
def test_a_field_is_the_grammar_of_the_python_interface(fields: dict[str, Any], grammar: Grammar) -> None:
    for kind, prompt in ((ChatBody, {"messages": MESSAGES}), (CompletionBody, {"prompt": "hello"})):
        body: Any = parse(kind, json.dumps({**prompt, **fields}).encode())
        (read, name) = grammar_of(body) or (None, "")
        assert read == grammar
        assert name.startswith(next(iter(fields)))


def test_a_format_of_any_text_constrains_nothing(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """So such a request does not wait for the grammars of others."""
    service = make()
    monkeypatch.setattr(service, "_compiling", True)
    client, form = client_of(service), {"type": "text"}
    answer(client, CHAT, {"messages": MESSAGES, "max_tokens": 1, "response_format": form})
    answer(client, RESPONSES, {"input": "hello", "max_output_tokens": 1, "text": {"format": form}})
    answer(client, RESPONSES, {"input": "hello", "max_output_tokens": 1})


@pytest.mark.parametrize(("fields", "grammar"), [FIELDS[1], FIELDS[5]])
def test_a_field_constrains_the_answer_as_in_python(
    client: TestClient, alone: Pair, fields: dict[str, Any], grammar: Grammar
) -> None:
    biases = ending(alone)
    options: dict[str, Any] = {"num_speculative_tokens": 0, "logit_bias": biases, "context": CONTEXT}
    expected = alone.generate("hello", grammar=grammar, max_new_tokens=100, **options)
    assert expected.finish_reason == "stop"
    (choice,) = answer(client, CHAT, {"messages": MESSAGES, **options_of(biases, **fields)})["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (expected.text, "stop")
    (free,) = answer(client, CHAT, {"messages": MESSAGES, **options_of(biases)})["choices"]
    assert free["message"]["content"] != expected.text
    (completed,) = answer(client, COMPLETIONS, {"prompt": "hello", **options_of(biases, **fields)})["choices"]
    assert (completed["finish_reason"], bool(completed["text"])) == ("stop", True)


LACKING = {"enum": ["yes", "no"], "if": {"const": "no"}, "then": False}  # a keyword that cannot be enforced


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, "json_schema is missing", "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type is 'xml'", "response_format.type"),
    ({"structured_outputs": {}}, "constrains nothing", "structured_outputs"),
    ({"structured_outputs": {"whitespace_pattern": "a"}}, "is not supported", "structured_outputs.whitespace_pattern"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "are both given", "guided_choice"),
    ({"guided_regex": "(?=a)"}, "look-around", "guided_regex"),
    ({"guided_regex": "("}, "unclosed group", "guided_regex"),
    ({"guided_json": "{"}, "not valid JSON", "guided_json"),
    ({"guided_json": {"type": "integer", "multipleOf": 999983}}, "multipleOf", "guided_json"),
    ({"guided_json": {"$ref": "http://127.0.0.1:1/x"}}, "expected a part of this schema", "guided_json"),
    ({"guided_json": LACKING}, "if at # is not supported; leave it out", "guided_json"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": LACKING}}},
        *("if at # is not supported; leave it out", "response_format.json_schema.schema"),
    ),
    ({"guided_choice": []}, "0 choices", "guided_choice"),
    ({"guided_grammar": "start: x"}, "unknown name", "guided_grammar"),
    ({"guided_choice": ["a"], "ignore_eos": True}, "no stop token", "ignore_eos"),
]


@pytest.mark.parametrize(("fields", "message", "param"), BAD)
def test_impossible_schema_is_an_error_object(
    client: TestClient, fields: dict[str, Any], message: str, param: str
) -> None:
    for path, prompt in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "hello"})):
        error = error_of(client.post(path, json={**prompt, "max_tokens": 5, **fields}))
        assert message in error["message"]
        assert error["param"] == param


def test_a_regex_that_blows_up_ends_its_own_answer_alone(make: Any, tokenizer: Tokenizer) -> None:
    client = client_of(make())
    free = {"prompt": [40, 41], "max_tokens": 20, "temperature": 0}
    expected = answer(client, COMPLETIONS, free)["choices"]
    hostile = {"guided_regex": "((((((a{0,9}){0,9}){0,9}){0,9}){0,9}){0,9}){0,9}b", "max_tokens": 100}
    bias = {str(tokenizer.encode("a")[0]): 100}
    started = time.monotonic()
    error = error_of(client.post(COMPLETIONS, json={**free, **hostile, "logit_bias": bias}))
    assert "cannot be followed any further" in error["message"]
    assert error["param"] == "guided_regex"
    assert answer(client, COMPLETIONS, free)["choices"] == expected
    assert client.get("/health").json()["status"] == "ok"
    assert time.monotonic() - started < 60


def test_a_grammar_that_compiles_for_too_long_is_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make()
    monkeypatch.setattr("peagle.serve.shared_state.GRAMMAR_PATIENCE_S", 0.01)
    monkeypatch.setattr(type(service.builder), "grammar", lambda *_: time.sleep(0.3))
    error = error_of(client_of(service).post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, "guided_regex": "a"}))
    assert "not compiled within 0.01 seconds" in error["message"]
