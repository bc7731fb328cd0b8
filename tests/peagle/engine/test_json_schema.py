"""JSON schemas as clients send them: what constrains nothing is taken, the rest is enforced, or named with its path."""

import contextlib
import pathlib
from typing import Any

import pydantic
import pytest

from peagle.engine import json_schema
from peagle.engine.grammar import Grammar, GrammarError, Vocabulary
from peagle.engine.json_schema import map_schemas

TEXT: dict[str, Any] = {"type": "string"}
NEVER: dict[str, Any] = {"not": {}}
AHEAD = {"type": "string", "pattern": "^(?!a)[ab]$"}
EITHER = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
AHEAD_NAMES = {"patternProperties": {"^(?!_)": {"type": "number"}}}
UNIQUE = {"type": "array", "uniqueItems": True}


@pytest.fixture(scope="module")
def single_bytes() -> Vocabulary:
    return Vocabulary([bytes([byte]) for byte in range(256)])


def allows(vocabulary: Vocabulary, grammar: Grammar, text: str) -> bool:
    matcher = vocabulary.compile(grammar).begin((256,))
    matcher.read(list(text.encode()))
    return matcher.may_end


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


# schemas of which each keyword that llguidance lacks constrains nothing; texts, and whether they follow it
IDLE: list[tuple[Any, dict[str, bool]]] = [
    ({"type": "object", "propertyNames": TEXT, "additionalProperties": TEXT}, {'{"a":"b"}': True, '{"a":1}': False}),
    ({"type": "object", "propertyNames": {}, "unevaluatedProperties": {"title": "any"}}, {'{"a":1}': True, "1": False}),
    ({"type": "array", "uniqueItems": False, "minContains": 2, "unevaluatedItems": True}, {"[1,1]": True, "1": False}),
    ({"dependentRequired": {"a": []}, "dependencies": {"a": {}}, "dependentSchemas": {}}, {'{"a":1}': True}),
    ({"if": TEXT, "type": "integer"}, {"1": True, '"a"': False}),
    ({"then": TEXT, "else": TEXT, "type": "integer"}, {"1": True, '"a"': False}),
    *(({**TEXT, "format": name}, {'"a"': True, "1": False}) for name in ("path", "password", "binary", "uri-template")),
    ({"type": ["integer", "null"], "format": "int32"}, {"7": True, "null": True, '"a"': False}),
    ({"$schema": "https://spec.openapis.org/oas/3.1/dialect/base", **TEXT}, {'"a"': True, "1": False}),
    # {"not": {}} is no remark: it forbids everything
    (an_object(a=TEXT, b=NEVER), {'{"a":"x"}': True, "{}": True, '{"b":1}': False}),
    ({"type": "object", "properties": {"a": TEXT}, "additionalProperties": NEVER}, {"{}": True, '{"b":1}': False}),
    ({"anyOf": [{**NEVER, "title": "none"}, TEXT]}, {'"a"': True, "1": False}),
    ({"type": "array", "items": NEVER}, {"[]": True, "[1]": False}),
    ({"not": NEVER, **TEXT}, {'"a"': True, "1": False}),
    # names and values that are spelled like keywords
    (an_object(format=TEXT, uniqueItems=TEXT), {'{"format":"a"}': True, '{"format":1}': False}),
    ({"enum": [{"format": "path", "not": {}}]}, {'{"format":"path","not":{}}': True, "{}": False}),
    # a oneOf of which only one branch can hold
    ({"oneOf": [{"type": "integer"}, TEXT]}, {"1": True, '"a"': True, "null": False}),
]


@pytest.mark.parametrize(("schema", "texts"), IDLE, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("strict", [True, False])
def test_a_keyword_that_constrains_nothing_is_taken_and_the_others_hold(
    single_bytes: Vocabulary, schema: Any, texts: dict[str, bool], strict: bool
) -> None:
    grammar = Grammar.json_schema(schema, strict)
    assert {text: allows(single_bytes, grammar, text) for text in texts} == texts
    assert single_bytes.compile(grammar).left_out == ()


def test_schemas_that_pydantic_writes_are_accepted(single_bytes: Vocabulary) -> None:
    class Types(pydantic.BaseModel):
        path: pathlib.Path
        secret: pydantic.SecretStr
        data: bytes
        counts: dict[str, int]

    grammar = Grammar.json_schema(Types.model_json_schema())
    assert allows(single_bytes, grammar, '{"path":"/a","secret":"b","data":"c","counts":{"d":1}}')
    assert not allows(single_bytes, grammar, '{"path":"/a","secret":"b","data":"c","counts":{"d":"e"}}')


# schemas that are refused if strict; the keyword and its place; a text that follows the rest, and one that does not
LACKING: list[tuple[Any, str, str, str]] = [
    (an_object(**{"a/b": {"type": "array", "uniqueItems": True}}), "uniqueItems at #/properties/a~1b",
     '{"a/b":[1,1]}', '{"a/b":1}'),
    ({"$defs": {"x": {**TEXT, "not": {"const": "a"}}}, "type": "array", "items": {"$ref": "#/$defs/x"}},
     "not at #/$defs/x", '["a"]', "[1]"),
    ({"anyOf": [{"type": "integer"}, AHEAD]}, "pattern at #/anyOf/1", '"a"', "null"),
    ({"type": "object", "patternProperties": {"(?=a)": TEXT}}, "patternProperties at #", '{"a":1}', "1"),
    ({"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": TEXT}, "propertyNames at #",
     '{"b":"x"}', '{"b":1}'),
    ({"type": "array", "items": {"type": "any", "maxItems": 1}}, "type at #/items", "[1]", "1"),
    ({**TEXT, "minLength": 1.5}, "minLength at #", '""', "1"),
    (an_object(a=EITHER), "oneOf at #/properties/a", '{"a":1}', '{"a":"1"}'),
    ({"oneOf": [EITHER, TEXT]}, "oneOf at # or #/oneOf/0", "1", "null"),
    ({"oneOf": [{"anyOf": [EITHER]}, {"type": "number"}]}, "oneOf at # or #/oneOf/0/anyOf/0", "1", "null"),
    ({"allOf": [{"if": TEXT, "then": {"const": "a"}}], "type": "string"}, "if at #/allOf/0", '"b"', "1"),
    # a keyword that goes by the one that is left out would forbid what that one allows
    ({"type": "object", **AHEAD_NAMES, "additionalProperties": False}, "patternProperties at #", '{"a":1}', "1"),
    ({**an_object(b=TEXT), **AHEAD_NAMES}, "patternProperties at #", '{"a":1}', '{"b":1}'),
    ({"type": "object", "properties": [], "title": "t", "additionalProperties": False}, "properties at #", "{}", "1"),
    ({"type": "array", "prefixItems": {}, "items": False}, "prefixItems at #", "[1]", "1"),
    # parts at places of no schema, to which a reference leads
    ({"components": {"a/b": UNIQUE}, "items": {"$ref": "#/components/a~1b"}, "type": "array"},
     'Unimplemented keys: ["uniqueItems"]', "[[1,1]]", "[1]"),
    ({"x y": [True, {"items": {"$ref": "#/z"}}], "z": UNIQUE, "items": {"$ref": "#/x%20y/1"}, "type": "array"},
     'Unimplemented keys: ["uniqueItems"]', "[[[1,1]]]", "[[1]]"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "place", "follows", "does_not"), LACKING, ids=[row[1] for row in LACKING])
def test_a_keyword_that_cannot_be_enforced_is_named_with_its_path_or_left_out(
    single_bytes: Vocabulary, schema: Any, place: str, follows: str, does_not: str
) -> None:
    with pytest.raises(GrammarError) as refused:
        single_bytes.compile(Grammar.json_schema(schema))
    message = str(refused.value)
    assert message.startswith(f"the JSON schema cannot be used: {place}")
    assert message.endswith(("leave it out", "leave them out", "; use anyOf"))
    loose = Grammar.json_schema(schema, strict=False)
    assert allows(single_bytes, loose, follows)
    assert not allows(single_bytes, loose, does_not)
    lost = [line.partition(" ")[0] for line in single_bytes.compile(loose).left_out]
    assert place.partition(" ")[0] in lost


@pytest.mark.parametrize("strict", [True, False])
def test_a_whole_schema_is_tried_few_times_however_many_one_ofs_it_has(
    monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    """Each try takes longer, the larger the schema is."""
    properties = {f"p{number}": EITHER for number in range(200)}
    sizes: list[int] = []

    def counting(text: str, schema: Any) -> Any:
        sizes.append(len(str(schema)))
        return after(text, schema)

    after = json_schema._after
    monkeypatch.setattr(json_schema, "_after", counting)
    with pytest.raises(GrammarError, match="oneOf at #/properties/p0 or") if strict else contextlib.nullcontext():
        json_schema.enforceable(an_object(**properties), strict)
    assert 1 < sum(size > 5_000 for size in sizes) < 6


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "$ref at #/properties/a is '#/$defs/b'; expected a part of"),
        ({"items": {"$ref": "http://127.0.0.1:1/x"}}, "$ref at #/items is 'http://127.0.0.1:1/x'; expected a part of"),
        ({"items": {"$ref": "x.json"}}, "$ref at #/items is 'x.json'; expected a part of"),
        ({"items": {"$ref": "#b"}}, "$ref at #/items is '#b'; expected a part of"),
        ({**TEXT, "minLength": 3, "maxLength": 1}, "minLength (3) is greater than maxLength (1) at #; expected a"),
        (NEVER, "it allows no text; expected a valid JSON Schema that some text satisfies"),
        ({"type": "object", "enum": ["a"]}, "incompatible types at #; expected"),
        (an_object(a=TEXT) | {"required": ["a", "b"], "properties": {"b": NEVER}}, "required property 'b' is"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_schema_that_no_text_satisfies_and_a_reference_to_nothing_are_refused(
    single_bytes: Vocabulary, schema: Any, message: str, strict: bool
) -> None:
    with pytest.raises(GrammarError) as refused:
        single_bytes.compile(Grammar.json_schema(schema, strict))
    assert str(refused.value).startswith(f"the JSON schema cannot be used: {message}")
    assert "llguidance" not in str(refused.value)


def test_inner_schemas_are_those_at_the_places_of_schemas() -> None:
    schema = {
        "properties": {"enum": {"a": 1}}, "items": [True], "not": {}, "enum": [{"properties": {"b": {}}}],
        "const": {"not": {}}, "default": {"items": {}}, "description": "not",
    }  # fmt: skip
    paths: list[str] = []
    mapped = map_schemas(schema, lambda _, path: paths.append(path))
    assert paths == ["#/properties/enum", "#/items/0", "#/not"]
    assert mapped == {**schema, "properties": {"enum": None}, "items": [None], "not": None}
