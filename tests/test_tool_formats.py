"""Tool formats and canonical descriptions."""

from __future__ import annotations

import json
import random
from typing import Any

import chat_tokenizers as families
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost_rag.errors import ConfigError, PromptError
from kvboost_rag.tools.formats import FORMATS, HERMES, JSON, LLAMA3, MISTRAL, ToolFormat, detect, of_name
from kvboost_rag.tools.schemas import canonical_tool, canonical_tools


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (families.QWEN25, HERMES),
        (families.LLAMA31_TOOLS, LLAMA3),
        (families.MISTRAL_TOOLS, MISTRAL),
        (families.PHI4_TOOLS, JSON),
        *((getattr(families, name), None) for name in "SMOLLM2 LLAMA3 LLAMA31 MISTRAL GEMMA2 PHI3 PHI4".split()),
        (None, None),
        ("", None),
        ("{{ tools | tojson }}", JSON),
        ("{% if tools %}{{ 'ipython' }}{{ '{\"name\": x, \"parameters\": y}' }}{% endif %}", LLAMA3),
        ("{% for tool in  tools %}{{ tool }}{% endfor %}<tool_call>", HERMES),
        # No tools branch: the word in comments, texts, other names, and where nothing reads it.
        ("{# tools #}{{ 'the tools' }}{{ \"say 'tools'\" }}", None),
        ("Use tools like <tool_call>.{{ messages[0].content }}", None),
        ("{% if builtin_tools %}{{ builtin_tools }}{{ message.tools }}{% endif %}", None),
        ("{% set tools = none %}{{ message.tool_calls }}", None),
    ],
)
def test_the_format_a_template_speaks(template: str | None, format: ToolFormat | None) -> None:
    assert detect(template) == format


def test_of_several_templates_the_one_for_tools_counts() -> None:
    assert detect({"default": families.SMOLLM2, "tool_use": families.QWEN25}) == HERMES
    assert detect([{"name": "default", "template": families.MISTRAL_TOOLS}]) == MISTRAL
    assert detect({"default": families.QWEN25, "rag": families.SMOLLM2}) == HERMES
    assert detect({"tool_use": families.SMOLLM2, "default": families.QWEN25}) is None
    assert detect({"rag": families.QWEN25}) is None
    assert detect([]) is None


@pytest.mark.parametrize("template", [3, b"{{ tools }}", ["{{ tools }}"], {"default": 3}])
def test_what_is_no_template(template: Any) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        detect(template)


def test_formats_by_name() -> None:
    assert [of_name(name) for name in FORMATS] == list(FORMATS.values())
    with pytest.raises(ConfigError, match="'xml'; choose one of 'hermes', 'llama3', 'mistral', 'json'"):
        of_name("xml")
    with pytest.raises(ConfigError, match="None; choose"):
        of_name(None)  # type: ignore[arg-type]


def tool(name: Any = "search", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


RICH: dict[str, Any] = {
    "function": {
        "strict": True,
        "parameters": {
            "$defs": {
                "Unit": {"title": "Unit", "enum": ["c", "f"], "type": "string"},
            },
            "title": "Weather",
            "required": ["unit", "city", "city"],
            "additionalProperties": False,
            "properties": {
                "unit": {"$ref": "#/$defs/Unit"},
                "city": {"title": "City", "type": "string", "description": "Where"},
                "title": {"type": "string", "title": "Other", "default": None},
                "user_name": {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "User Name", "default": None},
                "free": {"additionalProperties": True, "type": "object", "required": []},
                "by_name": {"additionalProperties": {"type": "integer", "title": "x"}, "type": "object"},
                "days": {"items": {"minimum": 0, "type": "integer", "const": None}, "type": "array", "maxItems": 3},
                "pair": {"prefixItems": [{"maxLength": 1, "type": "string"}], "type": "array", "items": False},
            },
            "type": "object",
        },
        "name": "weather",
        "description": "Tells the weather.",
    },
    "type": "function",
    "cache_control": {"type": "ephemeral"},
}


def test_the_canonical_form() -> None:
    assert json.dumps(canonical_tool(RICH)) == json.dumps(
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Tells the weather.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "by_name": {"type": "object", "additionalProperties": {"type": "integer", "title": "x"}},
                        "city": {"type": "string", "description": "Where"},
                        "days": {
                            "type": "array",
                            "items": {"type": "integer", "const": None, "minimum": 0},
                            "maxItems": 3,
                        },
                        "free": {"type": "object", "additionalProperties": True},
                        "pair": {
                            "type": "array",
                            "items": False,
                            "prefixItems": [{"type": "string", "maxLength": 1}],
                        },
                        "title": {"type": "string", "title": "Other"},
                        "unit": {"$ref": "#/$defs/Unit"},
                        "user_name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    },
                    "required": ["city", "unit"],
                    "$defs": {"Unit": {"type": "string", "enum": ["c", "f"]}},
                },
            },
        }
    )


def shuffled(value: Any, source: random.Random) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        source.shuffle(keys)
        return {key: shuffled(value[key], source) for key in keys}
    return [shuffled(one, source) for one in value] if isinstance(value, list) else value


schemas: st.SearchStrategy[Any] = st.recursive(
    st.fixed_dictionaries(
        {},
        optional={"type": st.sampled_from(["string", "integer"]), "title": st.text(max_size=3), "default": st.none()},
    ),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(st.sampled_from(["a", "title", "type", "properties"]), inner, max_size=3),
            "items": inner,
            "anyOf": st.lists(inner, max_size=2),
            "additionalProperties": st.booleans() | inner,
            "required": st.lists(st.sampled_from(["a", "b"]), max_size=2),
            "default": st.dictionaries(st.sampled_from(["b", "a"]), st.none() | st.integers(), max_size=2),
            "$defs": st.dictionaries(st.sampled_from(["A", "B"]), inner, max_size=2),
        },
    ),
    max_leaves=8,
)


@given(schema=schemas, source=st.randoms(use_true_random=False))
def test_order_of_keys_never_shows_and_twice_is_once(schema: dict[str, Any], source: random.Random) -> None:
    given = tool(description="d", parameters={**schema, "type": "object"}, other=schema)
    before = json.dumps(given)
    once = canonical_tool(given)
    assert json.dumps(canonical_tool(shuffled(given, source))) == json.dumps(once)
    assert json.dumps(canonical_tool(once)) == json.dumps(once)
    assert json.dumps(given) == before


def test_what_templates_look_up_is_always_there() -> None:
    empty = {"type": "object", "properties": {}}
    for bare in (tool(), tool(description=None, parameters=None), tool(parameters={})):
        assert canonical_tool(bare) == tool(description="", parameters=empty)
    assert canonical_tool(tool(parameters={"$ref": "#/$defs/A"}))["function"]["parameters"] == {"$ref": "#/$defs/A"}


class Text(str):
    __slots__ = ()


def test_the_form_is_fresh_and_plain() -> None:
    given = tool(Text("search"), parameters={"properties": {"a": {"enum": ("x", Text("y"))}}})
    made = canonical_tool(given)
    made["function"]["parameters"]["properties"]["a"]["enum"].append("z")
    assert canonical_tool(given)["function"]["parameters"]["properties"]["a"]["enum"] == ["x", "y"]
    assert type(made["function"]["name"]) is str


def deep() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("search", "is a str; give {'type': 'function'"),
        ({"name": "search", "parameters": {}}, "no function tool .its keys are .'name', 'parameters'"),
        ({"type": "web_search"}, "no function tool"),
        (tool(None), "the name None"),
        (tool("a b"), "'a b'; a name has 1 to 64 characters"),
        (tool("a" * 65), "1 to 64"),
        (tool("été"), "rename it"),
        (tool("a\n"), "rename it"),
        (tool(description=3), "description of tool 'search' is a int; it must be a string"),
        (tool(description="\ud800"), "surrogate"),
        (tool(parameters=[]), "is a list; give the JSON schema of an object"),
        (tool(parameters={"type": "array"}), "type 'array'; arguments have names"),
        (tool(parameters={"properties": {"a": 3}}), "parameters.properties.a is a int; give a JSON schema"),
        (tool(parameters={"properties": ["a"]}), "properties is a list; give a dict"),
        (tool(parameters={"required": "a"}), "required is 'a'; give a list"),
        (tool(parameters={"properties": {"a": {"default": {1}}}}), "a.default is a set; tools must be plain JSON"),
        (tool(parameters={"properties": {"a": {"maximum": float("nan")}}}), "is nan, which is no JSON"),
        (tool(parameters={"properties": {1: {}}}), "a key of .* is a int"),
        (tool(parameters=deep()), "nested too deeply"),
    ],
    ids=range(19),
)
def test_what_cannot_be_described(given: Any, error: str) -> None:
    with pytest.raises(PromptError, match=error):
        canonical_tool(given)


def test_many_tools() -> None:
    assert [one["function"]["name"] for one in canonical_tools([tool("b"), tool("a")])] == ["b", "a"]
    assert canonical_tools([]) == []
    with pytest.raises(PromptError, match="two tools are named 'a'"):
        canonical_tools([tool("a"), tool("b"), tool("a", description="other")])
    with pytest.raises(PromptError, match=r"tools\[1\] is a int"):
        canonical_tools([tool("a"), 3])  # type: ignore[list-item]
    for wrong in (tool("a"), "a", None):
        with pytest.raises(PromptError, match="give a list of tools"):
            canonical_tools(wrong)  # type: ignore[arg-type]


def test_a_closed_object_that_would_be_open_stays_closed() -> None:
    def made(schema: dict[str, Any]) -> Any:
        function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
        return canonical_tool({"type": "function", "function": function})["function"]["parameters"]["properties"]["a"]

    closed = {"type": "object", "additionalProperties": False}
    named = {"properties": {"b": {"type": "string"}}}
    assert "additionalProperties" not in made({**closed, **named})
    for schema in (
        closed,
        {**closed, "patternProperties": {"^x": {"type": "integer"}}},
        {**closed, **named, "patternProperties": {"^x": {"type": "integer"}}},
        {**closed, **named, "anyOf": [{"required": ["b"]}, {"properties": {"c": {"type": "string"}}}]},
    ):
        assert made(schema)["additionalProperties"] is False
