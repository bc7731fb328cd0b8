"""Grammars: every answer is a text of the grammar, and the one that constrained plain decoding gives."""

import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.answers import result as results
from peagle.base.errors import InputError
from peagle.config import SamplingParams
from peagle.engine.grammar import Grammar, GrammarError, Vocabulary
from peagle.engine.host.engine import Engine
from peagle.engine.host.programs import trace_counts
from peagle.engine.json_schema import DEEPEST_SCHEMA
from peagle.engine.request import Request, StepRecord
from peagle.engine.resolved import ResolvedConfig
from peagle.engine.step.adjust import Adjustments, adjust
from peagle.engine.step.masks import all_allowed, fill, next_mask
from peagle.engine.step.sampling import RowSampling, draw_keys, probabilities
from peagle.ops.draw import draw
from tests.support.toys import MarkovTarget, Scripted, check_whole, decode, follow, stepped

pytestmark = pytest.mark.compile

CONTROL, STOP = 0, 1
SPELLED = [
    "<|control|>", "<|stop|>", *'{}[]":,', " ", *"0123456789-", *"abcx", '{"', '":', '",', "12", "ab", "ba", "cab",
    "true", "null", "é", "\n", "",
]  # fmt: skip
TOKENS = [text.encode() for text in SPELLED] + [b"\xc3", b"\xa9"]
V, CONTEXT, NEW = len(TOKENS), 128, 60
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -99, "maximum": 99},
        "b": {"type": "array", "items": {"enum": ["ab", "cab", None, True]}, "maxItems": 3},
        "c": {"type": "string", "pattern": "^[abc]{2,5}$"},
    },
    "required": ["a", "c"],
    "additionalProperties": False,
}
CHOICES = ["abc", "ab 12", 'cab": é', "x"]


def fits_the_schema(text: str) -> bool:
    answer = json.loads(text)
    items = answer.get("b", [])
    return (
        {"a", "c"} <= set(answer) <= {"a", "b", "c"}
        and -99 <= answer["a"] <= 99
        and len(items) <= 3
        and all(item in ("ab", "cab", None, True) for item in items)
        and re.fullmatch("[abc]{2,5}", answer["c"]) is not None
    )


def is_nested(text: str) -> bool:
    return re.fullmatch(r"\[[\[\],ab0-9]+\]", text) is not None and text.count("[") == text.count("]")


# (a grammar of each kind, whether a text is one of it)
KINDS: dict[str, tuple[Grammar, Callable[[str], object]]] = {
    "json_schema": (Grammar.json_schema(SCHEMA), fits_the_schema),
    "regex": (Grammar.regex(r"(ab|c)+ [0-9]{2,4}"), re.compile(r"(ab|c)+ [0-9]{2,4}").fullmatch),
    "choice": (Grammar.choice(CHOICES), CHOICES.__contains__),
    "lark": (Grammar.lark('start: "[" item ("," item)* "]"\nitem: "ab" | /[0-9]+/ | start'), is_nested),
    "gbnf": (Grammar.lark('root ::= "x" ("12" | "ba")+ ":"?'), re.compile("x(12|ba)+:?").fullmatch),
}
GRAMMARS = {kind: grammar for kind, (grammar, _) in KINDS.items()}
HARD = SamplingParams(0.9, top_p=0.95, seed=7, repetition_penalty=1.3, logit_bias=((STOP, 3.0),), min_tokens=4)
HOT = SamplingParams(1.3, seed=3)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENS, [CONTROL, STOP])


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens if token != STOP).decode()


def bits(masks: np.ndarray) -> np.ndarray:
    """Unpack masks to [..., V] booleans."""
    return np.unpackbits(masks.view(np.uint8), axis=-1, bitorder="little")[..., :V] > 0


# Masks


def test_masks_are_those_of_a_finite_language(vocabulary: Vocabulary) -> None:
    """Every token that continues a text of the language, however it is cut; the stop token after a whole text."""
    texts = ["".join(parts) for n in (1, 2, 3) for parts in itertools.product(("ab", "c", "12"), repeat=n)]
    compiled = vocabulary.compile(Grammar.regex("(ab|c|12){1,3}"))
    rng = np.random.default_rng(0)
    for _ in range(30):
        matcher, so_far = compiled.begin((STOP,)), b""
        while True:
            expected = {
                token
                for token, data in enumerate(TOKENS)
                if data and token not in (CONTROL, STOP) and any(t.encode().startswith(so_far + data) for t in texts)
            }
            expected |= {STOP} if so_far.decode() in texts else set()
            assert set(np.flatnonzero(bits(next_mask(matcher))[0, 0]).tolist()) == expected
            token = int(rng.choice(sorted(expected)))
            if token == STOP:
                assert matcher.may_end
                break
            matcher.read((token,))
            so_far += TOKENS[token]


@given(
    kind=st.sampled_from(sorted(GRAMMARS)),
    draws=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=24),
    wrong=st.integers(0, 12),
    width=st.integers(0, 7),
)
def test_masks_along_drafts_are_those_after_reading_them(
    vocabulary: Vocabulary, kind: str, draws: list[int], wrong: int, width: int
) -> None:
    compiled = vocabulary.compile(GRAMMARS[kind])
    walked, path = compiled.begin((STOP,)), []
    for number in draws:
        allowed = [token for token in np.flatnonzero(bits(next_mask(walked))[0, 0]).tolist() if token != STOP]
        if not allowed:
            break
        path.append(allowed[number % len(allowed)])
        walked.read(path[-1:])
    emitted, drafts = path[: len(path) // 2], path[len(path) // 2 :][:width]
    legal = len(drafts)
    if wrong < len(drafts):
        drafts[wrong], legal = CONTROL, wrong
    matcher = compiled.begin((STOP,))
    matcher.read(emitted)
    for _ in range(2):  # looking ahead changes nothing
        masks = all_allowed(3, width + 1, V)
        fill(masks, {1: (matcher, drafts)})
        fresh = compiled.begin((STOP,))
        fresh.read(emitted)
        for row in range(legal + 1):
            np.testing.assert_array_equal(bits(masks[1, row]), bits(next_mask(fresh))[0, 0])
            fresh.read(drafts[row : row + 1])
        assert bits(masks[[0, 2]]).all()
        assert matcher.failure is None


TEXT = {"type": "string", "maxLength": 3}
PATTERNS: list[tuple[dict[str, Any], dict[str, bool]]] = [
    # properties and patterns of an object without others, and texts of it and of none
    ({"properties": {"a": TEXT}, "patternProperties": {"^a$": {"pattern": "^[ab]*$"}}},
     {"{}": True, '{"a":"ab"}': True, '{"a":"cab"}': False, '{"b":"a"}': False}),
    ({"properties": {"a": TEXT, "b": TEXT}, "patternProperties": {"^[ab]$": TEXT}, "required": ["a"]},
     {'{"a":"x"}': True, '{"a":"x","b":"x"}': True, '{"a":"x","c":"x"}': False}),
    ({"patternProperties": {"^x$": TEXT}, "required": ["x"]}, {'{"x":"a"}': True, '{"x":"a","x":"a"}': False}),
    ({"properties": {"a": TEXT}, "patternProperties": {"^a$": {}, "^c": TEXT}},
     {'{"a":"x","c":"x"}': True, '{"c":"x"}': True, '{"a":12}': False}),
    ({"properties": {"a": TEXT, "b": False}, "patternProperties": {"^(a|b)$": TEXT}},
     {'{"a":"x"}': True, "{}": True, '{"b":"x"}': False}),
    ({"properties": {"a": {"type": "object", "properties": {"b": TEXT}, "patternProperties": {"^b$": TEXT},
                           "additionalProperties": False}}, "patternProperties": {"b": TEXT}},
     {'{"a":{"b":"x"},"ab":"x"}': True, '{"a":{"ab":"x"}}': False}),
    ({"properties": {"a": {"type": "integer"}}, "patternProperties": {"^a$": TEXT}}, {"{}": True, '{"a":12}': False}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "texts"), PATTERNS)
def test_a_text_of_a_schema_with_patterns_can_always_go_on(
    vocabulary: Vocabulary, fields: dict[str, Any], texts: dict[str, bool]
) -> None:
    """A pattern that matches known names alone leaves no name for a further property."""
    compiled = vocabulary.compile(Grammar.json_schema({"type": "object", "additionalProperties": False, **fields}))
    for text, is_whole in texts.items():
        matcher = compiled.begin((STOP,))
        matcher.read([SPELLED.index(char) for char in text])
        assert matcher.may_end is is_whole, text
    for seed in range(40):
        rng, walked = np.random.default_rng(seed), compiled.begin((STOP,))
        for _ in range(60):
            allowed = np.flatnonzero(bits(next_mask(walked))[0, 0]).tolist()
            assert walked.failure is None
            token = int(rng.choice(allowed))
            if token == STOP:
                break
            walked.read([token])


def test_min_tokens_give_way_where_the_text_must_end() -> None:
    masks = np.zeros((1, 2, V // 32 + 1), np.uint32)
    masks[0, 0, 0], masks[0, 1, 0] = 1 << STOP, (1 << STOP) | (1 << 5)
    row = jax.tree.map(jnp.asarray, Adjustments.of(Request((2,), 9, SamplingParams(min_tokens=9)), V))
    run_adjust, stops = jax.jit(adjust), np.asarray([[STOP]], np.int32)
    logits = np.asarray(run_adjust(np.zeros((1, 2, V), np.float32), np.zeros((1, 1), np.int32), row, stops, masks))
    assert [np.flatnonzero(row == 0).tolist() for row in logits[0]] == [[STOP], [5]]


# The engine


@pytest.fixture(scope="module")
def target() -> MarkovTarget:
    table = np.random.default_rng(0).normal(0, 2, (V, V)).astype(np.float32)
    return MarkovTarget(jnp.asarray(table))


_probabilities, _draw, _keys = jax.jit(probabilities), jax.jit(draw), jax.jit(draw_keys)


def by_definition(target: MarkovTarget, request: Request) -> list[int]:
    """Decode plainly: mask, adjust, draw, one token after another; each mask by a matcher that reads from the start."""
    assert request.grammar is not None
    sampling, emitted = request.sampling, list[int]()
    numbers = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed, 0)
    row = RowSampling(*(jnp.asarray([n], jnp.float32 if isinstance(n, float) else jnp.int32) for n in numbers))
    while len(emitted) < request.max_new_tokens and STOP not in emitted:
        matcher = request.grammar.begin((STOP,))
        matcher.read(emitted)
        allowed = bits(next_mask(matcher))[0, 0]
        tokens = [*request.prompt_ids, *emitted]
        logits = np.where(allowed, np.asarray(target.table)[tokens[-1]], -np.inf)
        if len(emitted) < sampling.min_tokens and allowed.sum() > 1:
            logits[STOP] = -np.inf
        for token, bias in sampling.logit_bias:
            logits[token] += bias
        for token in set(tokens):
            logits[token] *= 1 / sampling.repetition_penalty if logits[token] > 0 else sampling.repetition_penalty
        if sampling.greedy:
            emitted.append(int(np.argmax(logits)))
            continue
        weights = _probabilities(np.asarray(logits, np.float32)[None, None], row)
        emitted.append(int(_draw(weights, _keys(row, np.asarray([[len(tokens)]], np.int32)))[0, 0]))
    return emitted


def engine_of(target: MarkovTarget, k: int, script: list[int] | None = None, **options: Any) -> Engine:
    """Make an engine whose drafter proposes a script, most of it right."""
    right = np.resize(np.asarray([2] if script is None else script, np.int32), 256)
    drafts = np.where(np.random.default_rng(1).random(256) < 0.75, right, (right + 3) % V)
    config = ResolvedConfig(k, **{"slots": 3, "context": CONTEXT, "prefill_chunk": 8, **options})
    rows = np.tile(drafts, (config.slots, 1)).astype(np.int32)
    return Engine(target, Scripted(jnp.asarray(rows)) if k else None, config, (STOP,))


def run(engine: Engine, requests: Sequence[Request]) -> tuple[list[list[int]], list[list[StepRecord]]]:
    answers = decode(engine, requests)
    check_whole(engine)
    return answers


@pytest.mark.parametrize("kind", GRAMMARS)
def test_an_answer_is_a_text_of_the_grammar_and_that_of_constrained_plain_decoding(
    target: MarkovTarget, vocabulary: Vocabulary, kind: str
) -> None:
    compiled, ended, accepted = vocabulary.compile(GRAMMARS[kind]), 0, 0
    for sampling in (SamplingParams(), HARD, HOT):
        for prompt in ((2, 9, 5), (20,))[: 1 if sampling is HARD else 2]:
            request = Request(prompt, NEW, sampling, grammar=compiled)
            expected = by_definition(target, request)
            if expected[-1] == STOP:
                assert KINDS[kind][1](text_of(expected)), text_of(expected)
                ended += 1
            for k in (0, 1, 3, 7):
                (tokens,), (records,) = run(engine_of(target, k, [*prompt, *expected]), [request])
                assert tokens == expected, (k, sampling, text_of(tokens), text_of(expected))
                accepted += sum(record.num_accepted for record in records)
            assert run(engine_of(target, 3, [*prompt, *expected], adaptive=True), [request])[0] == [expected]
    assert ended >= 3
    assert accepted > 20


def test_nothing_compiles_after_a_warm_up(target: MarkovTarget, vocabulary: Vocabulary) -> None:
    engine = engine_of(target, 2, context=72)
    engine.warm_up(sampled=True)
    engine.warm_up(sampled=True, full_logits=True, constrained=True)
    assert engine.compile_s > 0
    before = trace_counts()
    decode(
        engine,
        [Request((2,), 40, HARD, grammar=vocabulary.compile(GRAMMARS["regex"])), Request((3,), 40, HOT, index=1)],
    )
    assert trace_counts() == before
    engine.warm_up(sampled=True, full_logits=True, constrained=True)
    assert trace_counts() == before


# Refusals, and grammars that end their own request


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


KNOWN_NAMES = '{"type": "object", "properties": {"a": {}}, "patternProperties": {"^a$": {}}}'
# (the class method, its argument, what the line says)
HOSTILE: list[tuple[str, Any, str]] = [
    ("regex", "(?=a)b", "look-around"),
    ("regex", "(", "unclosed group"),
    ("regex", "a" * 100_001, "100001 characters; expected at most 100000"),
    ("regex", "a\0", "null character"),
    ("regex", "\ud800", "not valid Unicode"),
    ("regex", "(" * 3000 + "a" + ")" * 3000, "cannot be used"),
    ("choice", [], "0 choices"),
    ("choice", ["a", ""], "a choice is empty"),
    ("json_schema", "[]", "JSON schema is list"),
    ("json_schema", "{", "not valid JSON"),
    ("json_schema", {"not": {}}, "it allows no text"),
    ("json_schema", {"type": "text"}, "Invalid type: text"),
    ("json_schema", {"$ref": "http://127.0.0.1/x"}, "expected a part of this schema"),
    ("json_schema", {"$ref": "#"}, "cannot be used"),
    ("json_schema", {"type": "integer", "multipleOf": 999983}, "multipleOf is too large"),
    ("json_schema", {"allOf": [{"multipleOf": 9973}, {"multipleOf": 0.9967}]}, "multipleOf is too large"),
    ("json_schema", {"multipleOf": 10**400}, "number out of range"),
    ("json_schema", {"properties": {str(i): {} for i in range(1001)}}, "has 1001 keys"),
    ("json_schema", {"const": "a" * 100_001}, "schema has 100014 characters"),
    ("json_schema", deep(DEEPEST_SCHEMA), "nested deeper than 64 levels"),
    ("lark", "a: b", "cannot be used"),
    ("lark", "start: start", "cannot be used"),
    ("lark", 'start: a\na[capture, max_tokens = 3]: /a*/ "b"', "sets max_tokens"),
    ("lark", "start: a\n?a [max_tokens=3]: /a*/", "sets max_tokens"),
    ("lark", "start: %json {a}", "not followed by valid JSON"),
    ("lark", 'start: %json {"multipleOf": 999983}', "multipleOf is too large"),
    ("lark", 'start: a b\na: %json {"multipleOf": 997}\nb: %json {"multipleOf": 991}', "multipleOf is too large"),
    ("lark", "start: a\na: " + " ".join(["%json {}"] * 9), "holds 9 schemas"),
    ("lark", f"start: %json {KNOWN_NAMES}", "match only names of its properties; leave them out"),
]


@pytest.mark.parametrize(("kind", "source", "says"), HOSTILE, ids=[f"{row[0]} {row[2][:20]}" for row in HOSTILE])
def test_a_grammar_that_cannot_be_is_refused_in_one_line(
    vocabulary: Vocabulary, kind: str, source: Any, says: str
) -> None:
    with pytest.raises(GrammarError, match=says) as refused:
        vocabulary.compile(getattr(Grammar, kind)(source))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_a_schema_may_be_as_deep_as_the_limit(vocabulary: Vocabulary) -> None:
    assert vocabulary.compile(Grammar.json_schema(deep(DEEPEST_SCHEMA - 2)))


def test_choices_are_texts_whatever_they_spell(vocabulary: Vocabulary) -> None:
    texts = ["a\nb", 'x"', "é", "ab]", "{1,2}", "\\"]
    for text in texts[:5]:
        matcher = vocabulary.compile(Grammar.choice(texts)).begin((STOP,))
        for byte in text.encode():
            matcher.read([TOKENS.index(bytes([byte]))])
        assert matcher.may_end


def test_a_regex_that_blows_up_ends_its_own_request_alone(target: MarkovTarget, vocabulary: Vocabulary) -> None:
    """Its automaton grows with every token, until llguidance's limits stop it."""
    hostile = vocabulary.compile(Grammar.regex("((((((a{0,9}){0,9}){0,9}){0,9}){0,9}){0,9}){0,9}b"))
    sampling = SamplingParams(logit_bias=((SPELLED.index("a"), 100.0),))
    engine = engine_of(target, 3)
    free = Request((3, 4), 30, stop_token_ids=())
    expected = run(engine, [free])[0][0]
    bad, good = engine.add(Request((2,), NEW, sampling, grammar=hostile)), engine.add(free)
    tokens: list[int] = []
    while engine.busy:
        for handle, chunk in stepped(engine, [bad, good]):
            tokens += chunk.token_ids if handle is good else ()
    assert bad.finished == "error"
    assert re.search("the prompt: the regular expression cannot be followed any further: .*too many", str(bad.error))
    assert tokens == expected


def test_an_automaton_that_other_requests_filled_ends_nobody_else(target: MarkovTarget, vocabulary: Vocabulary) -> None:
    """Requests of one grammar share an automaton; another regular expression is as hostile as that above."""
    hostile = vocabulary.compile(Grammar.regex("((((((a{0,9}){0,9}){0,9}){0,9}){0,9}){0,9}){0,9}[bc]"))
    long, short = (SamplingParams(logit_bias=((SPELLED.index(char), 100.0), (STOP, 50.0))) for char in "ab")
    engine = engine_of(target, 3)
    failed, waits = results.decode(
        engine, [Request((2,), NEW, params, grammar=hostile) for params in (long, short)], None
    )
    assert failed.error is not None
    matcher = hostile.begin((STOP,))
    next_mask(matcher)
    assert matcher.limited  # what the first request did reaches all of them
    (after,) = results.decode(engine, [Request((2,), NEW, short, grammar=hostile)], None)
    for answer in (waits, after):
        assert (text_of(answer.output_ids), answer.finish_reason) == ("b", "stop")
    assert vocabulary.compile(hostile.grammar) is not hostile


PATHS = {
    # choices, the script of drafts, what the target says alone
    "a dead end that the target avoids": (["abz", "ac"], "abbbb", ["a", "c", "<|stop|>"]),
    "a dead end": (["abz"], "abxxx", ["a", "b"]),
    "drafts that are no tokens": (["abc", "ac"], [V + 1] * 5, ["a", "c", "<|stop|>"]),
}


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", PATHS)
def test_drafts_do_not_change_the_grammar_of_a_request(vocabulary: Vocabulary, name: str, k: int) -> None:
    """Every K gives the tokens and the error of K = 0."""
    choices, script, expected = PATHS[name]
    a, b, c = map(SPELLED.index, "abc")
    table = np.full((V, V), -5, np.float32)
    table[2, a], table[a, c], table[a, b], table[c, STOP] = 9, 5, 4, 9
    compiled = vocabulary.compile(Grammar.choice(choices))
    drafts = [2, *(SPELLED.index(token) if isinstance(token, str) else token for token in script)]

    def answer(k: int) -> tuple[list[str], bool]:
        drafter = Scripted(jnp.asarray(np.resize(drafts, (3, 256)).astype(np.int32))) if k else None
        # of engine_of's shape, whose programs it takes
        config = ResolvedConfig(k, slots=3, context=CONTEXT, prefill_chunk=8)
        engine = Engine(MarkovTarget(jnp.asarray(table)), drafter, config, (STOP,))
        handle, tokens = engine.add(Request((2,), 20, grammar=compiled)), []
        while engine.busy:
            tokens += [token for _, chunk in stepped(engine, [handle]) for token in chunk.token_ids]
        return [SPELLED[token] for token in tokens], handle.error is not None

    assert answer(k) == answer(0) == (expected, name == "a dead end")


def test_without_the_library_a_grammar_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match=r"pip install '\.\[serve\]'"):
        Vocabulary(TOKENS)


def test_a_request_that_no_grammar_can_bind_is_refused(target: MarkovTarget, vocabulary: Vocabulary) -> None:
    compiled = vocabulary.compile(GRAMMARS["choice"])
    with pytest.raises(InputError, match="no stop token, so nothing can end its answer"):
        engine_of(target, 0).add(Request((2,), 5, stop_token_ids=(V,), grammar=compiled))
    other = Vocabulary([b"a", b"b", b"c"]).compile(Grammar.regex("a"))
    with pytest.raises(InputError, match="compiled for 3 tokens; expected 39, the target's vocabulary"):
        engine_of(target, 0).add(Request((2,), 5, grammar=other))
    with pytest.raises(InputError, match="synthetic acceptance ignores grammars"):
        engine_of(target, 1, synthetic_acceptance=(0.5,)).add(Request((2,), 5, grammar=compiled))


@pytest.mark.parametrize("k", [0, 3])
def test_an_answer_goes_on_in_another_engine(target: MarkovTarget, vocabulary: Vocabulary, k: int) -> None:
    """With its grammar compiled anew there."""
    for kind in ("json_schema", "regex"):
        request = Request((2, 9, 5), NEW, SamplingParams(), grammar=vocabulary.compile(GRAMMARS[kind]))
        restored = dataclasses.replace(request, grammar=vocabulary.restore(request.grammar.portable))
        (expected,), _ = run(engine_of(target, k), [request])
        sender, receiver = engine_of(target, k, prefill_only=True), engine_of(target, k)
        handle = sender.add(request)
        for _ in follow(sender, handle):
            pass
        received = receiver.add(restored, hand_off=handle.hand_off)
        for _ in follow(receiver, received):
            pass
        assert received.output_ids == expected, kind


def test_a_hand_off_that_its_grammar_does_not_allow_is_refused(target: MarkovTarget, vocabulary: Vocabulary) -> None:
    sender = engine_of(target, 0, prefill_only=True)
    free = Request((2, 9, 5), NEW, SamplingParams(logit_bias=((3, 90.0),)))
    handle = sender.add(free)
    for _ in follow(sender, handle):
        pass
    bound = dataclasses.replace(free, grammar=vocabulary.compile(GRAMMARS["json_schema"]))
    with pytest.raises(GrammarError, match="does not follow its grammar"):
        engine_of(target, 0).add(bound, hand_off=handle.hand_off)


def test_a_grammar_is_restored_with_what_the_prompt_holds_of_its_text(vocabulary: Vocabulary) -> None:
    compiled = vocabulary.compile(GRAMMARS["regex"]).after([TOKENS.index(b"ab")])
    again = vocabulary.restore(compiled.portable)
    assert again == compiled
    assert (next_mask(again.begin((STOP,))) == next_mask(compiled.begin((STOP,)))).all()
