"""JSON schemas as llguidance reads them. It refuses a whole schema for one keyword that it lacks.

So keywords that constrain nothing are taken out first. The rest is refused by its name and path, or left out if the
schema is not strict.
"""

import decimal
import functools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from peagle.base.errors import InputError, not_installed
from peagle.base.settings import brief
from peagle.base.strict_json import dumps

DEEPEST_SCHEMA = 64
MOST_KEYS = 1000  # per object of a schema; compile time grows with the square of the number of properties
LARGEST_MULTIPLE = 10_000  # of the least common multiple of all multipleOf, which is the size of their automaton
WHITESPACE = r"[ \n\r\t]{1,20}"  # between the parts of a JSON text; without a limit, a model may write it forever
ANSWER = "answer"  # name of the grammar's rule, for rules around it
# keywords by their values: schemas by name, lists of schemas, schemas; `items` is either of the last two
MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SCHEMAS = (
    *("items", "additionalItems", "contains", "unevaluatedItems"),
    *("additionalProperties", "propertyNames", "unevaluatedProperties"),
    *("not", "if", "then", "else"),
)
ANNOTATIONS = {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"}
ELSEWHERE = ("$ref", "$defs", "definitions", "oneOf")  # valid or not depending on the rest of the schema
# keywords by one that they go by: they forbid what is left over by it, so that without it they would forbid too much
GO_BY = {"properties": "additionalProperties", "patternProperties": "additionalProperties", "prefixItems": "items"}
LONGEST_KEPT = 1000  # characters of a schema's JSON whose refusal is kept
UNKNOWN = "Unimplemented keys"  # beginnings of llguidance's messages
OVERLAP = "oneOf constraints are not supported"
SEVERAL = "several of its branches may hold at once"  # of a oneOf
UNSATISFIABLE = "Unsatisfiable schema: "
LENIENT = {"lenient": True, "coerce_one_of": True}  # options of llguidance: a oneOf becomes an anyOf
# llguidance's message about a regular expression: the expression, a mark below the wrong character, the problem
_REGEX_ERROR = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)\^+ *\nerror: (.*)")
_NO_TARGET = re.compile(r"(?:Pointer|Anchor|Resource) '(?:json-schema:///)?(.*?)' (?:does not exist|is not present)")


class GrammarError(InputError):
    """A grammar cannot be compiled, or a request cannot follow it any further."""


def prepare(schema: Any, lenient: bool = False) -> dict[str, Any]:
    """Rewrite a schema of `enforceable` for llguidance: without dead ends, with limited white space.

    lenient: llguidance leaves out what it lacks.
    """
    schema = _without_dead_ends(schema)
    fields = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return {**fields, "x-guidance": {"whitespace_pattern": WHITESPACE, **(LENIENT if lenient else {})}}


def enforceable(schema: Any, strict: bool) -> tuple[Any, list[str]]:
    """Return (the schema that llguidance takes, what is lost, with reasons). It must be lenient if something is lost.

    Values that are not valid count as keywords that it lacks, too, as clients send "required": null and "type": "any".
    Raises GrammarError for a schema that no text satisfies, for a reference to nothing, and, if strict, for such a
    keyword.
    """
    schema = _simplified(schema)
    if _refusal(schema) is None:
        return schema, []
    faults = [*_faults(schema)]
    if strict and faults:
        raise GrammarError(f"the JSON schema cannot be used: {faults[0]}")
    schema, lost = _without(schema, {(fault.path, fault.keyword) for fault in faults}), [fault.lost for fault in faults]
    if (reason := _refusal(schema)) is not None:
        if strict or _refusal(schema, lenient=True) is not None:
            raise GrammarError(f"the JSON schema cannot be used: {_placed(schema, reason)}")
        # of several keywords together, or in a part that only a reference names
        lost.append(f"oneOf ({SEVERAL})" if reason.startswith(OVERLAP) else reason)
    return schema, [*dict.fromkeys(lost)]


def map_schemas(schema: Mapping[str, Any], function: Callable[[Any, str], Any], path: str = "#") -> dict[str, Any]:
    """Replace each schema directly inside a schema by function(it, its path). path: JSON Pointer of the outer one."""
    mapped = dict(schema)
    for key, value in schema.items():
        where = f"{path}/{key}"
        if key in MAPS_OF_SCHEMAS and isinstance(value, dict):
            mapped[key] = {name: function(inner, f"{where}/{_escaped(name)}") for name, inner in value.items()}
        elif key in LISTS_OF_SCHEMAS and isinstance(value, list):
            mapped[key] = [function(inner, f"{where}/{index}") for index, inner in enumerate(value)]
        elif key in SCHEMAS and isinstance(value, dict | bool):
            mapped[key] = function(value, where)
    return mapped


def _nodes(schema: Any, path: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, schema) of each object that is a schema, outer ones first."""
    if isinstance(schema, dict):
        yield path, schema
        inner: list[tuple[Any, str]] = []
        map_schemas(schema, lambda *place: inner.append(place), path)
        for value, where in inner:
            yield from _nodes(value, where)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


# --- what constrains nothing ------------------------------------------------------------------------------------------


def _simplified(schema: Any) -> Any:
    """Take out keywords that llguidance lacks where they constrain nothing. {"not": {}} forbids everything: False."""
    if not isinstance(schema, dict):
        return schema
    schema = map_schemas(schema, lambda inner, _: _simplified(inner))
    if "not" in schema and _allows_all(schema["not"]):
        return False
    return {key: value for key, value in schema.items() if not _constrains_nothing(key, value, schema)}


def _constrains_nothing(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    match key:
        case "format" | "$schema":  # unknown ones are only remarks
            return isinstance(value, str) and _refusal({key: value}) is not None
        case "not" | "uniqueItems":
            return value is False
        case "unevaluatedItems" | "unevaluatedProperties":
            return _allows_all(value)
        case "propertyNames":  # names are texts
            return _allows_all(value) or (_allows_all(value, "type") and value["type"] == "string")
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return isinstance(value, dict) and all(inner == [] or _allows_all(inner) for inner in value.values())
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "then" | "else":
            return "if" not in schema
        case "if":
            return not {"then", "else"} & schema.keys()
    return False


def _allows_all(schema: Any, *but: str) -> bool:
    """Whether a schema has only remarks besides these keywords."""
    return schema is True or (isinstance(schema, dict) and schema.keys() <= ANNOTATIONS | {*but})


# --- what llguidance refuses ------------------------------------------------------------------------------------------


class _Fault(NamedTuple):
    """A keyword that llguidance lacks, or whose value is wrong. path: JSON Pointer of the object that has it."""

    path: str
    keyword: str
    reason: str

    def __str__(self) -> str:
        if self.reason.startswith(UNKNOWN):
            return f"{self.keyword} at {self.path} is not supported; leave it out"
        if "supported" in self.reason:
            return f"{self.keyword} at {self.path} is not supported ({self.reason}); leave it out"
        return f"{self.keyword} at {self.path} is not valid ({self.reason}); correct it, or leave it out"

    @property
    def lost(self) -> str:
        """What a schema loses without it."""
        return self.keyword if self.reason.startswith(UNKNOWN) else f"{self.keyword} ({self.reason})"


def _faults(schema: Any) -> Iterator[_Fault]:
    """Yield the keywords that llguidance refuses by themselves, whatever the rest of the schema is."""
    for path, node in _nodes(schema):
        flat = _flat(node)
        if _refusal(flat) is None:
            continue
        kind = {"type": flat["type"]} if "type" in flat and _refusal({"type": flat["type"]}) is None else {}
        for key, value in flat.items():
            reason = _refusal({**kind, key: value})
            if reason is not None and not reason.startswith(UNSATISFIABLE):
                yield _Fault(path, key, reason)
                if GO_BY.get(key) in node:
                    yield _Fault(path, GO_BY[key], f"it goes by {key}, which is not supported")


def _flat(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose inner schemas allow everything, without references."""
    flat = map_schemas(schema, lambda *_: True)
    return {key: value for key, value in flat.items() if key not in ELSEWHERE}


def _without(schema: Any, keywords: Collection[tuple[str, str]], path: str = "#") -> Any:
    """Leave out keywords, (path of their schema, keyword)."""
    if not isinstance(schema, dict):
        return schema
    schema = map_schemas(schema, lambda inner, where: _without(inner, keywords, where), path)
    return {key: value for key, value in schema.items() if (path, key) not in keywords}


def _placed(schema: Any, reason: str) -> str:
    """Add the place in the schema, if one is found, to llguidance's reason for refusing a schema."""
    missing, nodes = _NO_TARGET.match(reason), [*_nodes(schema)]
    if reason.startswith(OVERLAP):
        where = " or ".join([path for path, node in nodes if "oneOf" in node][:3])
        return f"oneOf at {where} is not supported ({SEVERAL}); use anyOf"
    for path, node in nodes if missing else ():
        if isinstance(node.get("$ref"), str) and missing and node["$ref"].endswith(missing[1]):
            return f"$ref at {path} is {brief(node['$ref'])}; expected a part of this schema, such as '#/$defs/a'"
    if reason.startswith(UNKNOWN):  # in a part that only a reference names
        return f"{reason}; leave them out"
    reason = (
        reason.replace("json-schema:///", "")
        .removeprefix(UNSATISFIABLE)
        .replace("schema is false", "it allows no text")
    )
    places = [path for path, node in nodes if _refusal(_flat(node)) is not None]
    return f"{reason}{f' at {places[-1]}' if places else ''}; expected a valid JSON Schema that some text satisfies"


def _refusal(schema: Any, lenient: bool = False) -> str | None:
    """Return why llguidance refuses a schema; None if it does not."""
    if lenient and isinstance(schema, dict):
        schema = {**schema, "x-guidance": LENIENT}
    text = dumps(schema)
    return (_refusal_of if len(text) <= LONGEST_KEPT else _refusal_of.__wrapped__)(text)


@functools.lru_cache(1000)  # parts of a schema are often alike
def _refusal_of(schema: str) -> str | None:
    matcher = _after("", json.loads(schema))
    return plain_reason(matcher.get_error()) if matcher.is_error() else None


def plain_reason(message: str) -> str:
    """Write a message of llguidance in a line."""
    wrong = _REGEX_ERROR.search(message)
    line = f"{wrong[3]} at character {len(wrong[2]) + 1} of {wrong[1]}" if wrong else message
    return one_line(line.removesuffix("<non-verbose/>"))


def one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:300] + "..."


# --- dead ends --------------------------------------------------------------------------------------------------------


def _without_dead_ends(schema: Any) -> Any:
    """Leave out patternProperties that match only names in properties; those properties get the patterns' schemas.

    With such a pattern, llguidance allows a comma after the last property, although no name can follow it.
    """
    if not isinstance(schema, dict):
        return schema
    schema = map_schemas(schema, lambda inner, _: _without_dead_ends(inner))
    patterns, properties = schema.get("patternProperties"), schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(patterns, dict) or not isinstance(properties, dict) or not isinstance(required, list):
        return schema
    names = [name for name in dict.fromkeys([*properties, *required]) if isinstance(name, str)]
    covered = [pattern for pattern in patterns if names and _covers(names, pattern)]
    if not covered:
        return schema
    for pattern in covered:
        matching = [name for name in names if _matches(name, pattern)]
        both = {name: {"allOf": [properties.get(name, True), patterns[pattern]]} for name in matching}
        properties = {**properties, **both}
    others = {pattern: value for pattern, value in patterns.items() if pattern not in covered}
    return {**schema, "patternProperties": others, "properties": properties}


def has_dead_ends(schema: Any) -> bool:
    return bool(_without_dead_ends(schema) != schema)


def _covers(names: Sequence[str], pattern: str) -> bool:
    """Whether a pattern matches no name but these."""
    none = {"properties": dict.fromkeys(names, False), "patternProperties": {pattern: True}}
    matcher = _after("{", {"type": "object", "additionalProperties": False, **none})
    if matcher.is_error():  # an invalid pattern
        return False
    place, bit = divmod(ord('"'), 8)
    return not matcher.compute_bitmask()[place] >> bit & 1


def _matches(name: str, pattern: str) -> bool:
    schema = {"type": "object", "additionalProperties": False, "patternProperties": {pattern: True}}
    return not _after(f"{{{dumps(name, ensure_ascii=False)}:", schema).is_error()


def _after(text: str, schema: Any) -> Any:
    """Make llguidance's matcher of a schema over single bytes, after it has read a text."""
    library, tokenizer = _bytes_alone()
    top = {"name": "top", "lark_grammar": f'%llguidance {{"no_forcing": true}}\nstart: @{ANSWER}'}
    source = dumps({"grammars": [top, {"name": ANSWER, "json_schema": schema}]})
    matcher = library.LLMatcher(tokenizer, source, log_level=0)
    matcher.consume_tokens([*text.encode()])
    return matcher


@functools.cache
def _bytes_alone() -> tuple[Any, Any]:
    """Return (llguidance, its vocabulary of single bytes)."""
    llguidance = load_library()
    tokens = Tokens([*(bytes([byte]) for byte in range(256)), b"end"], [256])
    return llguidance, llguidance.LLTokenizer(llguidance.TokenizerWrapper(tokens))


def load_library() -> Any:
    """Import llguidance. Raises InputError if it is not installed."""
    try:
        import llguidance
    except ModuleNotFoundError:
        raise not_installed("grammars need", "llguidance", "serve") from None
    return llguidance


@dataclass
class Tokens:
    """A vocabulary for llguidance, whose last token is the end."""

    tokens: list[bytes]
    special_token_ids: list[int]
    bos_token_id = None

    @property
    def eos_token_id(self) -> int:
        return len(self.tokens) - 1

    def __call__(self, text: bytes | str) -> list[int]:
        """Encode a text that the grammar forces; without forcing nothing is encoded."""
        raise NotImplementedError


# --- limits -----------------------------------------------------------------------------------------------------------


def check_size(*schemas: Any) -> None:
    """Raise GrammarError for schemas that are too deep, or whose numbers together need too large an automaton."""
    level, depth, multiple = [*schemas], 0, 1
    while level:
        depth += 1
        if depth > DEEPEST_SCHEMA:
            raise GrammarError(f"the JSON schema is nested deeper than {DEEPEST_SCHEMA} levels; make it flatter")
        for node in level:
            if isinstance(node, float) and not math.isfinite(node):
                raise GrammarError("the JSON schema holds a number that is not finite; leave it out")
            if isinstance(node, Mapping) and len(node) > MOST_KEYS:
                raise GrammarError(f"an object of the JSON schema has {len(node)} keys; expected at most {MOST_KEYS}")
            if isinstance(node, Mapping) and "multipleOf" in node:
                multiple = math.lcm(multiple, _without_point(node["multipleOf"]))
        if multiple > LARGEST_MULTIPLE:
            raise GrammarError(
                f"the least common multiple of the JSON schema's multipleOf is too large; expected at most "
                f"{LARGEST_MULTIPLE}"
            )
        nodes = [list(node.values()) if isinstance(node, Mapping) else node for node in level]
        level = [child for node in nodes if isinstance(node, list) for child in node]


def _without_point(number: Any) -> int:
    """Read 0.25 as 25. Anything but a positive number counts as 1: llguidance refuses it later."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
        return 1
    return max(1, int("".join(map(str, decimal.Decimal(repr(number)).normalize().as_tuple().digits))))
