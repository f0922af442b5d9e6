"""Strict schemas, and grammars of calls and JSON: what they let through and what they refuse."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import date, datetime
from typing import Annotated, Any, Literal

import llguidance
import pytest
from chat_tokenizers import CHATML, MAKERS, QWEN25, byte_level, sentencepiece, special
from pydantic import BaseModel, Field

from fetch_assets import cache_root
from kvboost_rag.errors import ConfigError
from kvboost_rag.tools.constraint import Constraint
from kvboost_rag.tools.formats import FORMATS, HERMES, JSON, LLAMA3, MISTRAL, ToolFormat
from kvboost_rag.tools.grammar import (
    MAX_CALLS,
    Grammar,
    any_json_grammar,
    calls_or_json_grammar,
    forced_calls_grammar,
    json_grammar,
    text_or_calls_grammar,
)
from kvboost_rag.tools.strict import MAX_ITEMS, MAX_STRING, strict_schema

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS: list[tuple[str, Mapping[str, Any]]] = [
    ("get_weather", WEATHER),
    ('we"ird\\näme', {"type": "object", "properties": {}}),
    ("now", {}),
    (
        "tree",
        {
            "$ref": "#/$defs/Node",
            "$defs": {
                "Node": {
                    "type": "object",
                    "properties": {"v": {"type": "integer"}, "c": {"type": "array", "items": {"$ref": "#/$defs/Node"}}},
                    "required": ["v", "c"],
                }
            },
        },
    ),
    (
        "nest",
        {
            "type": "object",
            "properties": {"inner": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["inner"],
        },
    ),
]
ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Köln", "days": -3}),
    ("get_weather", {"city": 'a "b" \\ c'}),
    ('we"ird\\näme', {}),
    ("now", {}),
    ("tree", {"v": 1, "c": [{"v": 2, "c": []}]}),
    ("nest", {"inner": {"inner": None}}),
]
ANSWER = {"type": "object", "properties": {"title": {"type": "string"}, "name": {"type": "string"}}}


def constraint_of(tokenizer: Any) -> Constraint:
    return Constraint(tokenizer, [tokenizer.eos_token_id], len(tokenizer))


@pytest.fixture(scope="module")
def plain() -> Constraint:
    """No marker is a token of its own."""
    return constraint_of(byte_level(QWEN25, CHATML, eos_token="<|im_end|>"))


def accepts(constraint: Constraint, grammar: Grammar, text: str) -> bool:
    matcher = constraint._start(grammar).matcher.deep_copy()
    ids = constraint._tokenizer.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written(format: ToolFormat, *calls: tuple[str, Any]) -> str:
    bodies = [json.dumps({format.name_key: n, format.arguments_key: a}, ensure_ascii=False) for n, a in calls]
    return (
        format.begin + format.between.join(format.call_begin + body + format.call_end for body in bodies) + format.end
    )


class TestStrictSchema:
    def test_objects_are_closed_at_every_depth(self) -> None:
        inner = {"type": "object", "properties": {"title": {"type": "boolean"}}}
        strict = strict_schema(
            {
                "type": "object",
                "properties": {
                    "a": inner,
                    "b": {"type": "array", "items": inner},
                    "c": {"anyOf": [inner, {"type": "null"}]},
                    "d": {"type": "array", "prefixItems": [inner], "items": False},
                    "e": {"$ref": "#/$defs/E"},
                    "f": {"allOf": [inner]},
                },
                "$defs": {"E": inner},
            }
        )
        closed = {"type": "object", "properties": {"title": {"type": "boolean"}}, "additionalProperties": False}
        properties = strict["properties"]
        assert strict["additionalProperties"] is False
        assert properties["a"] == properties["b"]["items"] == properties["c"]["anyOf"][0] == closed
        assert properties["d"]["prefixItems"] == [closed]
        assert strict["$defs"]["E"] == properties["f"] == closed

    def test_what_the_user_set_stays(self) -> None:
        schema = {
            "type": "object",
            "properties": {"z": {"type": "string", "maxLength": 7}, "a": {"type": "array", "maxItems": 2}},
            "required": ["a"],
            "additionalProperties": {"type": "integer", "minimum": 1, "maximum": 5},
        }
        before = json.dumps(schema)
        strict = strict_schema(schema)
        assert json.dumps(schema) == before
        assert list(strict["properties"]) == ["z", "a"]
        assert strict["properties"]["z"] == {"type": "string", "maxLength": 7}
        assert strict["properties"]["a"]["maxItems"] == 2
        assert strict["required"] == ["a"]
        assert strict["additionalProperties"] == {"type": "integer", "minimum": 1, "maximum": 5}

    def test_nothing_goes_on_for_ever(self) -> None:
        strict = strict_schema(
            {
                "properties": {
                    "s": {"type": ["string", "null"]},
                    "l": {"type": "array", "items": {"type": "integer"}},
                    "n": {"type": "number"},
                    "d": {"type": "object", "additionalProperties": {"type": "boolean"}},
                    "e": {"enum": ["x" * 9000]},
                    "p": {"type": "string", "pattern": "^a+$"},
                }
            }
        )["properties"]
        assert strict["s"]["maxLength"] == MAX_STRING
        assert strict["l"]["maxItems"] == strict["d"]["maxProperties"] == MAX_ITEMS
        assert {"minimum", "maximum", "multipleOf"} <= set(strict["n"])
        assert strict["e"] == {"enum": ["x" * 9000]}
        assert "maxLength" not in strict["p"]

    def test_all_of_becomes_one_object(self) -> None:
        strict = strict_schema(
            {
                "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {"type": "null"}}, "required": ["b"]}],
                "$defs": {"A": {"type": "object", "properties": {"a": {"type": "null"}}}},
            }
        )
        assert list(strict["properties"]) == ["a", "b"]
        assert strict["required"] == ["b"]
        assert strict["additionalProperties"] is False

    @pytest.mark.parametrize(
        ("schema", "said"),
        [
            ({"type": "array", "items": {"not": {"type": "string"}}}, r"\$\.items: 'not'"),
            ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, r"\$\.properties\.a: 'uniqueItems'"),
            ({"if": {"type": "string"}}, "'if'"),
            ({"type": "array", "contains": {"const": 1}}, "'contains'"),
            ({"properties": {"a": {}}, "unevaluatedProperties": False}, None),
            ({"dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
            ({"$ref": "https://example.org/x"}, "only references into the same schema"),
            ({"$ref": "#/$defs/Missing"}, "nothing there"),
            ({"type": "string", "format": "ipv4network"}, "format 'ipv4network'"),
            ({"type": "string", "pattern": "^(?!a)b$"}, "looks around"),
            ({"type": "object", "minProperties": 2}, "minProperties is 2"),
            ({"allOf": [{"properties": {"a": {}}}, {"properties": {"a": {"type": "null"}}}]}, r"because of \['a'\]"),
            ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
            ({"type": "object", "properties": {"a": 5}}, r"\$\.properties\.a is 5"),
            ([], "must be a dict"),
        ],
    )
    def test_what_cannot_be_enforced_is_said(self, schema: Any, said: str | None) -> None:
        if said is None:  # false is what closing does anyway
            assert strict_schema(schema)["additionalProperties"] is False
            return
        with pytest.raises(ConfigError, match=said):
            strict_schema(schema)

    def test_what_only_llguidance_refuses_is_said_too(self, plain: Constraint) -> None:
        for schema in ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, {"type": "string", "pattern": "("}):
            with pytest.raises(ConfigError, match="cannot be enforced"):
                plain.processor(json_grammar(schema), 1000)

    def test_alternatives_that_cannot_be_enforced_are_left_out(self) -> None:
        decimal = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}  # pydantic's of a Decimal
        assert len(strict_schema({"anyOf": [{"type": "number"}, decimal]})["anyOf"]) == 1
        with pytest.raises(ConfigError, match="looks around"):
            strict_schema({"anyOf": [decimal]})

    def test_formats_that_only_describe_are_dropped(self) -> None:
        assert "format" not in strict_schema({"type": "string", "format": "password"})
        assert "format" not in strict_schema({"type": "number", "format": "double"})

    def test_literal_keys_of_a_map_become_properties(self) -> None:
        class Votes(BaseModel):
            votes: dict[Literal["yes", "no"], int]

        votes = strict_schema(Votes.model_json_schema())["properties"]["votes"]
        assert list(votes["properties"]) == ["yes", "no"]
        assert votes["additionalProperties"] is False


class Unique(BaseModel):
    names: set[str]


def chain(kind: str, levels: int) -> dict[str, Any]:
    """A short schema in which each definition uses the next one twice."""
    defs: dict[str, Any] = {f"d{levels}": {"type": "string"}}
    for at in range(levels):
        one = {"$ref": f"#/$defs/d{at + 1}"}
        both = {"type": "object", "properties": {"a": one, "b": one}}
        defs[f"d{at}"] = {
            "choice": {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]},
            "optional": both,
            "required": {**both, "required": ["a", "b"]},
        }[kind]
    return {"$ref": "#/$defs/d0", "$defs": defs}


def mutual(size: int) -> dict[str, Any]:
    """Definitions that all need each other."""
    names = [f"d{at}" for at in range(size)]
    every = {name: {"$ref": f"#/$defs/{name}"} for name in names}
    node = {"type": "object", "properties": every, "required": names[1:]}
    return {"$ref": "#/$defs/d0", "$defs": {**dict.fromkeys(names, node), names[-1]: {"type": "null"}}}


class TestAbsurdSchemas:
    """A schema of somebody else must not hang a server."""

    @pytest.mark.parametrize("schema", [chain("choice", 200), chain("optional", 200), mutual(60)])
    def test_repetition_costs_little(self, plain: Constraint, schema: dict[str, Any]) -> None:
        begun = time.process_time()
        json_grammar(schema)
        assert time.process_time() - begun < 2

    def test_the_shortest_document_is_found_through_references(self) -> None:
        assert json_grammar(chain("choice", 3)).shortest == '""'
        assert json_grammar(chain("required", 1)).shortest == '{"a": "", "b": ""}'
        tree = {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["n"]}
        assert json_grammar(tree).shortest == '{"n": null}'

    @pytest.mark.parametrize(
        "schema",
        [
            chain("required", 30),
            {"type": "string", "minLength": 10**9},
            {"type": "string", "pattern": "^a{1000000000}$"},
            {"type": "array", "items": {"type": "array", "items": {}, "minItems": 9999}, "minItems": 10**9},
        ],
    )
    def test_answers_that_are_never_short_are_refused(self, schema: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="more than 32768 characters"):
            json_grammar(schema)
        json_grammar({"anyOf": [schema, {"type": "null"}], "$defs": schema.get("$defs", {})})

    def test_what_is_too_deep_or_too_large_is_refused(self) -> None:
        deep: dict[str, Any] = {"type": "string"}
        for _ in range(5000):
            deep = {"type": "array", "items": deep}
        cyclic: dict[str, Any] = {"type": "object", "properties": {}}
        cyclic["properties"] |= dict.fromkeys("abcdefgh", cyclic)
        for schema in (deep, cyclic):
            with pytest.raises(ConfigError, match="nested more than 128 levels"):
                json_grammar(schema)
        with pytest.raises(ConfigError, match="more than 20000 values"):
            json_grammar({"enum": list(range(30_000))})
        endless = {"properties": {"a": {"allOf": [{"$ref": "#"}, {"properties": {"b": {}}}]}}}
        with pytest.raises(ConfigError, match="allOf merges"):
            json_grammar(endless)

    def test_a_set_should_be_a_list(self) -> None:
        with pytest.raises(ConfigError, match=r"\$\.properties\.names: 'uniqueItems'.*use a list"):
            json_grammar(Unique.model_json_schema())


class Part(BaseModel):
    kind: Literal["screw", "nut"]
    size: Annotated[float, Field(gt=0, le=100)]
    made: date | None = None


class Order(BaseModel):
    """An order."""

    id: int
    parts: list[Part] = Field(min_length=1, description="what was ordered")
    counts: dict[str, int] = {}
    at: datetime
    parent: Order | None = None


class TestJsonGrammar:
    def test_pydantic_models_round_trip(self, plain: Constraint) -> None:
        grammar = json_grammar(Order.model_json_schema())
        order = {
            "id": 7,
            "parts": [{"kind": "nut", "size": 2.5, "made": "2024-02-29"}, {"kind": "screw", "size": 1}],
            "counts": {"größe": 3},
            "at": "2024-05-06T07:08:09.5+02:00",
            "parent": {"id": 1, "parts": [{"kind": "nut", "size": 1}], "at": "2024-05-06T07:08:09Z", "parent": None},
        }
        Order.model_validate(order)
        assert accepts(plain, grammar, json.dumps(order, ensure_ascii=False))
        for change in (
            {"id": "7"},
            {"parts": []},
            {"extra": 1},
            {"at": "2024-05-06T07:08:60Z"},
            {"parts": [{"kind": "bolt", "size": 1}]},
            {"parts": [{"kind": "nut", "size": 1, "made": "2023-02-29"}]},
            {"parts": [{"kind": "nut", "size": 0}]},
        ):
            assert not accepts(plain, grammar, json.dumps({**order, **change}, ensure_ascii=False)), change
        del order["at"]
        assert not accepts(plain, grammar, json.dumps(order, ensure_ascii=False))

    def test_spaces_are_those_of_json_dumps(self, plain: Constraint) -> None:
        grammar = json_grammar({"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]})
        assert accepts(plain, grammar, '{"a": [1, {"b": null}]}')
        for text in ('{"a":[1]}', '{"a": [1,2]}', '{ "a": [1]}', '{"a": [1]} ', '{"a":  [1]}', '\n{"a": [1]}'):
            assert not accepts(plain, grammar, text), text

    def test_escapes_are_few_and_whole(self, plain: Constraint) -> None:
        grammar = json_grammar({"type": "string"})
        for text in ('"a\\n\\"b\\\\"', '"\\t"', '"é😀"'):
            assert accepts(plain, grammar, text), text
        for text in ('"\\u0000"', '"\\ud83d"', '"a\nb"', '"a'):
            assert not accepts(plain, grammar, text), text

    def test_control_characters_of_a_constant_can_be_written(self, plain: Constraint) -> None:
        assert accepts(plain, json_grammar({"const": "a\x01b"}), '"a\\u0001b"')

    def test_any_json_is_an_object(self, plain: Constraint) -> None:
        grammar = any_json_grammar()
        for text in ("{}", '{"a": [1, 2.5, {"b": {"c": null}}], "d e": "x"}'):
            assert accepts(plain, grammar, text), text
        for text in ("[]", "1", '"a"', "", "{"):
            assert not accepts(plain, grammar, text), text


class TestCallGrammars:
    @pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
    @pytest.mark.parametrize("call", ARGUMENTS, ids=lambda call: call[0])
    def test_a_call_in_each_format(self, plain: Constraint, format: ToolFormat, call: tuple[str, Any]) -> None:
        text = written(format, call)
        assert accepts(plain, forced_calls_grammar(TOOLS, format), text)
        assert accepts(plain, calls_or_json_grammar(TOOLS, format, ANSWER), text)
        assert not accepts(plain, forced_calls_grammar(TOOLS, format), text[:-1])
        assert not accepts(plain, forced_calls_grammar(TOOLS, format), "Sure! " + text)

    @pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
    def test_one_call_or_several(self, plain: Constraint, format: ToolFormat) -> None:
        two = written(format, *ARGUMENTS[:2])
        many = [written(format, *[("now", {})] * count) for count in (MAX_CALLS, MAX_CALLS + 1)]
        assert not accepts(plain, forced_calls_grammar(TOOLS, format, parallel=False), two)
        parallel = forced_calls_grammar(TOOLS, format, parallel=True)
        assert [accepts(plain, parallel, text) for text in (two, *many)] == [True, True, False]

    @pytest.mark.parametrize(
        "call",
        [
            ("get_weather", {}),
            ("get_weather", {"city": 5}),
            ("get_weather", {"city": "a", "x": 1}),
            ("now", {"a": 1}),
            ("other", {}),
            ("tree", {"v": 1, "c": [{"v": 2}]}),
        ],
        ids=str,
    )
    def test_wrong_calls_are_refused(self, plain: Constraint, call: tuple[str, Any]) -> None:
        for format in FORMATS.values():
            assert not accepts(plain, forced_calls_grammar(TOOLS, format), written(format, call))

    @pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
    def test_calls_or_an_answer(self, plain: Constraint, format: ToolFormat) -> None:
        grammar = calls_or_json_grammar(TOOLS, format, ANSWER)
        assert accepts(plain, grammar, '{"title": "a", "name": "get_weather"}')
        assert accepts(plain, grammar, '{"name": "get_weather"}')
        assert not accepts(plain, grammar, "plain text")

    @pytest.mark.parametrize("format", [HERMES, MISTRAL], ids=lambda format: format.name)
    def test_text_that_may_become_a_call(self, plain: Constraint, format: ToolFormat) -> None:
        grammar = text_or_calls_grammar(TOOLS, format)
        assert grammar is not None
        call = written(format, ARGUMENTS[0])
        for text in ("", "Hello <b>you</b> [1]\n", call, "Let me look.\n" + call, written(format, *ARGUMENTS)):
            assert accepts(plain, grammar, text), text
        for text in (call[:-1], "Hm " + call[:14] + " what", written(format, ("other", {}))):
            assert not accepts(plain, grammar, text), text

    @pytest.mark.parametrize("format", [LLAMA3, JSON], ids=lambda format: format.name)
    def test_formats_without_a_marker_have_no_such_grammar(self, format: ToolFormat) -> None:
        assert text_or_calls_grammar(TOOLS, format) is None

    def test_errors_name_the_tool(self) -> None:
        with pytest.raises(ConfigError, match=r"tool 'bad': \$\.properties\.a: 'not'"):
            forced_calls_grammar([("bad", {"properties": {"a": {"not": {}}}})], JSON)


class TestMarkersThatAreTokens:
    """The model writes `<tool_call>` as the one token that its family uses, not letter by letter."""

    def tokenizers(self) -> dict[str, tuple[Any, ToolFormat]]:
        return {
            "added": (MAKERS["qwen2.5"](), HERMES),
            "special": (
                byte_level(QWEN25, [*CHATML, "<tool_call>", "</tool_call>"], eos_token="<|im_end|>"),
                HERMES,
            ),
            "mistral": (sentencepiece(None, legacy=False, added=special("[TOOL_CALLS]")), MISTRAL),
            "mistral-legacy": (sentencepiece(None, legacy=True, added=special("[TOOL_CALLS]")), MISTRAL),
        }

    @pytest.mark.parametrize("kind", ["added", "special", "mistral", "mistral-legacy"])
    def test_the_token_is_what_is_forced(self, kind: str) -> None:
        tokenizer, format = self.tokenizers()[kind]
        constraint = constraint_of(tokenizer)
        marker = tokenizer.convert_tokens_to_ids((format.begin + format.call_begin).split()[0])
        forced = constraint._start(forced_calls_grammar(TOOLS, format)).matcher.compute_ff_tokens()
        assert forced[0] == marker
        for grammar in (
            forced_calls_grammar(TOOLS, format, parallel=True),
            calls_or_json_grammar(TOOLS, format, ANSWER),
            text_or_calls_grammar(TOOLS, format),
        ):
            assert grammar is not None
            assert accepts(constraint, grammar, written(format, *ARGUMENTS))
        assert accepts(constraint, text_or_calls_grammar(TOOLS, format), "Hm.\n" + written(format, *ARGUMENTS))

    def test_other_markers_may_stand_in_free_text(self) -> None:
        tokenizer = byte_level(
            None, CHATML, ["<think>", "</think>", "<tool_call>", "</tool_call>"], eos_token="<|im_end|>"
        )
        constraint = constraint_of(tokenizer)
        grammar = text_or_calls_grammar(TOOLS, HERMES)
        assert grammar is not None
        assert accepts(constraint, grammar, "<think>\nhm\n</think>\n" + written(HERMES, ARGUMENTS[0]))
        assert not accepts(constraint, grammar, "<think>\nhm\n</think>\n" + written(HERMES, ("other", {})))

    def test_with_the_real_tokenizer_of_qwen(self) -> None:
        folder = cache_root() / "models" / "qwen2.5-coder-0.5b"
        if not (folder / "tokenizer.json").is_file():
            pytest.skip(f"{folder} holds no tokenizer")
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        constraint = constraint_of(tokenizer)
        text = written(HERMES, *ARGUMENTS[:2])
        grammar = forced_calls_grammar(TOOLS, HERMES, parallel=True)
        matcher = constraint._start(grammar).matcher.deep_copy()
        assert matcher.compute_ff_tokens()[0] == tokenizer.convert_tokens_to_ids("<tool_call>")
        ids = tokenizer(text).input_ids
        assert matcher.try_consume_tokens(ids) == len(ids)
        assert matcher.is_accepting()
        assert accepts(constraint, text_or_calls_grammar(TOOLS, HERMES), "Ok.\n" + text)


def test_the_rules_are_plain_lark() -> None:
    rules = forced_calls_grammar(TOOLS, HERMES).lark({"<tool_call>": 7}.get)
    assert rules.startswith('start: <[7]> "\\n" body "\\n" "</tool_call>"')
    assert llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_lark(rules)) == ""
