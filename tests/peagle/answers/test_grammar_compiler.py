"""Grammars over a tokenizer and a chat template: JSON schemas, channels, whatever K."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import peagle
from peagle.base.errors import InputError
from peagle.engine.grammar import Grammar, GrammarError
from peagle.pair import Pair
from peagle.text.channels import ChannelParser
from peagle.text.tokenizer import Tokenizer
from tests.support.pairs import SPECIALS, STOP, toy_pair

pytestmark = pytest.mark.compile

RETURN, START, END = (SPECIALS.index(name) for name in ("<|return|>", "<|start|>", "<|end|>"))


def an_object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    closed = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {**closed, **more}


NEXT = {"anyOf": [{"$ref": "#/$defs/node"}, {"const": None}]}
TREE = {"$defs": {"node": an_object({"v": {"enum": [0, 1]}, "next": NEXT})}, "$ref": "#/$defs/node"}
# schemas, and whether a value follows them
SUITE: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "closed object": (
        an_object({"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}}),
        lambda v: set(v) == {"a", "b"} and 0 <= v["a"] <= 99 and isinstance(v["b"], bool),
    ),
    "pattern": (an_object({"id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}}), lambda v: bool(
        re.fullmatch("[A-Z]{2}-[0-9]{3}", v["id"])
    )),
    "definitions": (TREE, lambda v: v["v"] in (0, 1)),
}  # fmt: skip


@pytest.fixture(scope="module")
def toy(tokenizer: Tokenizer) -> Pair:
    return toy_pair(tokenizer)


def to_an_end(pair: Pair) -> dict[int, float]:
    """Biases against whitespace and for what ends, without which the toy's answers would be long."""
    assert pair.tokenizer is not None
    size = pair.target.vocab_size
    tokens = [token for token in range(size) if re.fullmatch(rb"\s+", pair.tokenizer.token_bytes(token))]
    return {**dict.fromkeys(tokens, -40.0), STOP: 40.0, **dict.fromkeys(pair.tokenizer.encode("n"), 9.0)}


@pytest.mark.parametrize("name", SUITE)
def test_every_answer_follows_its_schema_and_does_not_depend_on_k(toy: Pair, name: str) -> None:
    schema, follows = SUITE[name]
    options: dict[str, Any] = {"grammar": peagle.Grammar.json_schema(schema), "max_new_tokens": 250, "context": 320}
    biases = to_an_end(toy)
    for sampling in ({}, {"temperature": 1.2, "seed": 1}):
        texts = set()
        for k in (0, 7):
            result = toy.generate("hello", num_speculative_tokens=k, logit_bias=biases, **sampling, **options)
            assert result.finish_reason == "stop"
            texts.add(result.text)
        (text,) = texts
        assert text is not None
        assert follows(json.loads(text)), text


def answered(pair: Pair, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> dict[str, str]:
    """The text of each kind of message."""
    assert pair.tokenizer is not None
    parser, texts = ChannelParser(pair.tokenizer, prompt_ids), {"reasoning": "", "content": "", "tool_call": ""}
    for delta in [*parser.add([token for token in token_ids if token != STOP]), *parser.finish()]:
        texts[delta.kind] += delta.text
    return texts


def test_in_a_template_with_channels_the_final_message_is_the_grammars(toy: Pair) -> None:
    """The model may reason first; the switch falls into the midst of a step's drafts."""
    tokenizer = toy.tokenizer
    assert tokenizer is not None
    prompt = (*tokenizer.encode("hello"), START, *tokenizer.encode("assistant"))
    begins_analysis, reasoned = tokenizer.encode("a")[0], 0
    for seed in range(6):
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_new_tokens": 200, "context": 320}
        options["logit_bias"] = {END: 26.0, begins_analysis: -4.0}
        texts = []
        for k in (0, 3):
            result = toy.generate(prompt, grammar=Grammar.regex("[a-c]{1,9}!"), num_speculative_tokens=k, **options)
            assert result.finish_reason == "stop"
            texts.append(answered(toy, prompt, result.output_ids))
        assert texts[0] == texts[1]
        assert re.fullmatch("[a-c]{1,9}!", texts[0]["content"])
        reasoned += bool(texts[0]["reasoning"])
    assert 0 < reasoned < 6


def spelled(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tokenizer.encode(text, special_tokens=True)


# answers to a prompt that ends in <|start|>assistant; may the answer be this, without and with tools?
HEAD = "<|channel|>analysis<|message|>a { <\n<|end|><|start|>assistant"
ANSWERS = [
    ("<|channel|>final<|message|>42", True, True),
    (HEAD + "<|channel|>final<|message|>42", True, True),
    (HEAD + HEAD + "<|channel|>final<|message|>42", True, True),
    (HEAD + "<|channel|>final<|message|>x", False, False),
    ("42", False, False),
    ("<|channel|>commentary<|message|>42", False, False),
    ("<|channel|>final<|message|>42<|end|><|start|>assistant", False, False),
    ("<|channel|>commentary to=functions.f<|message|>{any", False, True),
    (HEAD + " to=functions.f<|channel|>commentary<|message|>{any", False, True),
    (HEAD + " to=functions.f<|channel|>commentary json<|message|>{any", False, True),
    (HEAD + " to=functions.g<|channel|>commentary<|message|>{any", False, False),
]


@pytest.mark.parametrize(("answer", "plainly", "with_tools"), ANSWERS)
def test_answers_in_channels(toy: Pair, tokenizer: Tokenizer, answer: str, plainly: bool, with_tools: bool) -> None:
    prompt = spelled(tokenizer, "<|start|>user<|message|>hi<|end|><|start|>assistant")
    for calls, expected in (({}, plainly), ({"f": None}, with_tools)):
        compiled = toy.grammars.compile(Grammar.regex("[0-9]{2}"), channels=True, calls=calls)
        matcher = toy.grammars.begin(compiled, prompt).begin((RETURN,))
        matcher.read(spelled(tokenizer, answer))
        assert matcher.may_end == expected


@pytest.mark.parametrize(
    ("end", "answer"),
    [
        ("<|start|>assistant<|channel|>final<|message|>", "42"),
        ("<|start|>assistant<|channel|>final<|message|>4", "2"),
        (
            "<|start|>assistant<|channel|>analysis<|message|>",
            "hm<|end|><|start|>assistant<|channel|>final<|message|>42",
        ),
        ("no message", "42"),
    ],
)
def test_a_prompt_may_begin_the_answer(toy: Pair, tokenizer: Tokenizer, end: str, answer: str) -> None:
    compiled = toy.grammars.compile(Grammar.regex("[0-9]{2}"), channels=True)
    matcher = toy.grammars.begin(compiled, spelled(tokenizer, end)).begin((RETURN,))
    matcher.read(spelled(tokenizer, answer))
    assert matcher.may_end


def test_a_prompt_that_no_grammar_follows_is_refused(toy: Pair, tokenizer: Tokenizer) -> None:
    compiled = toy.grammars.compile(Grammar.regex("[0-9]"), channels=True)
    for end in ("<|start|>user<|message|>hi<|end|>", "<|start|>assistant<|channel|>commentary<|message|>"):
        with pytest.raises(GrammarError, match="cannot follow the end of this prompt"):
            toy.grammars.begin(compiled, spelled(tokenizer, end))


def test_without_a_tokenizer_a_grammar_is_refused() -> None:
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        toy_pair(None).generate([8, 9], grammar=Grammar.regex("a"))


def test_equal_grammars_are_compiled_once(toy: Pair) -> None:
    first, second = (toy.grammars.compile(Grammar.regex("[0-9]x"), channels=False) for _ in range(2))
    assert first is second
