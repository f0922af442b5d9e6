"""Tool descriptions in one canonical form, so that the same tool is the same text wherever it comes from.

A tool's KV is found again only if its text is the same each time; frameworks, pydantic versions and callers differ in
key order and in what they add. What is decided here:

- A tool always has ``type`` and ``function``; a function always ``name``, ``description`` and ``parameters``, because
  templates look them up. A missing description is empty, missing parameters are an object without properties.
- Other keys beside ``type`` and ``function`` are settings for remote services and are left out, and so is ``strict``.
  Other keys inside ``function`` (``return`` of Hugging Face) are kept, sorted.
- Inside schemas: a customary order of keys, then the rest sorted; ``properties`` and ``required`` sorted.
- Left out of schemas, as they tell a model nothing: None values (but not ``const``), an empty ``required``,
  ``$schema``, the title of the parameters, titles made from the name they stand under, and
  ``additionalProperties: false`` beside ``properties``, where it is what is meant anyway. Beside ``patternProperties``
  or alternatives, and where no property is named, it says something and stays; so does one that is true or a schema.
- ``$ref`` and ``$defs`` stay. Order inside ``enum``, ``anyOf`` and other lists stays: it may be meant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ConfigError, PromptError
from ..messages import check_text

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ORDER = ("type", "title", "description", "enum", "properties", "required", "items")
_RANK = {key: i for i, key in enumerate(_ORDER)}
_SCHEMA = frozenset(
    "items additionalProperties not if then else contains propertyNames unevaluatedItems unevaluatedProperties".split()
)
_SCHEMAS_BY_NAME = frozenset("properties patternProperties $defs definitions dependentSchemas".split())
_SCHEMA_LISTS = frozenset("anyOf oneOf allOf prefixItems items".split())
_OPENING = frozenset("patternProperties anyOf oneOf allOf $ref".split())
_NOISE = frozenset(("strict", "$schema"))
_REMEDY = "give {'type': 'function', 'function': {'name': …, 'description': …, 'parameters': {…}}}"


def canonical_tools(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools in canonical form, in the order given.

    Args:
        tools: function tools as OpenAI describes them.

    Raises:
        PromptError: one cannot be described, or two have the same name.
    """
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Iterable):
        raise PromptError(f"tools is a {type(tools).__name__}; give a list of tools")
    canonical = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    seen: set[str] = set()
    for tool in canonical:
        name = tool["function"]["name"]
        if name in seen:
            raise PromptError(f"two tools are named {name!r}; a call could not tell them apart, so rename one")
        seen.add(name)
    return canonical


def canonical_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in canonical form: a fresh dict whose JSON does not depend on where the tool came from.

    Args:
        tool: a function tool as OpenAI describes it.

    Raises:
        PromptError: it is no such tool, its name or its parameters cannot be used, or something is not plain JSON.
    """
    return _tool(tool, "the tool")


def _tool(tool: Any, at: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise PromptError(f"{at} is a {type(tool).__name__}; {_REMEDY}")
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise PromptError(f"{at} is no function tool (its keys are {sorted(map(str, tool))}); {_REMEDY}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PromptError(
            f"{at} has the name {name!r}; a name has 1 to 64 characters of A-Z a-z 0-9 _ - and ., so rename it"
        )
    try:
        described = _function(function, str.__str__(name), f"tool {name!r}")
    except RecursionError:
        raise PromptError(f"tool {name!r} is nested too deeply; flatten its parameters") from None
    return {"type": "function", "function": described}


def _function(function: Mapping[str, Any], name: str, at: str) -> dict[str, Any]:
    description = function.get("description")
    more = {key: value for key, value in function.items() if key not in ("name", "description", "parameters")}
    return {
        "name": name,
        "description": "" if description is None else check_text(description, f"the description of {at}"),
        "parameters": _parameters(function.get("parameters"), at),
        **_data({key: value for key, value in more.items() if value is not None and key not in _NOISE}, at),
    }


def _parameters(parameters: Any, at: str) -> dict[str, Any]:
    at = f"{at}.parameters"
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping):
        raise PromptError(f"{at} is a {type(parameters).__name__}; give the JSON schema of an object")
    if parameters.get("type") not in (None, "object"):
        raise PromptError(f"{at} has the type {parameters['type']!r}; arguments have names, so give type 'object'")
    given = {key: value for key, value in parameters.items() if key != "title"}
    if not given.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
        given |= {"type": "object", "properties": given.get("properties") or {}}
    canonical: dict[str, Any] = _schema(given, at, None)
    return canonical


def _schema(schema: Any, at: str, name: str | None) -> Any:
    """A schema that stands under `name` in canonical form; true and false are schemas as well."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise PromptError(f"{at} is a {type(schema).__name__}; give a JSON schema, such as {{'type': 'string'}}")
    # Elsewhere it forbids what would be free.
    closed = "properties" in schema and not schema.keys() & _OPENING
    made = {}
    for key in sorted(map(str, schema), key=lambda key: (_RANK.get(key, len(_RANK)), key)):
        value = schema.get(key)
        if not _says_nothing(key, value, name) and not (key == "additionalProperties" and closed and value is False):
            made[check_text(key, f"a key of {at}")] = _value(key, value, f"{at}.{key}")
    return made


def _says_nothing(key: str, value: Any, name: str | None) -> bool:
    if value is None:
        return key != "const"
    if key == "title":
        return name is not None and isinstance(value, str) and _plain(value) == _plain(name)
    return key in _NOISE or (key == "required" and value == [])


def _plain(title: str) -> str:
    return title.replace("_", " ").strip().casefold()


def _value(key: str, value: Any, at: str) -> Any:
    if key in _SCHEMAS_BY_NAME:
        if not isinstance(value, Mapping):
            raise PromptError(f"{at} is a {type(value).__name__}; give a dict of JSON schemas")
        names = sorted(check_text(name, f"a key of {at}") for name in value)
        return {name: _schema(value[name], f"{at}.{name}", name) for name in names}
    if key in _SCHEMA_LISTS and isinstance(value, (list, tuple)):
        return [_schema(one, f"{at}[{i}]", None) for i, one in enumerate(value)]
    if key in _SCHEMA:
        return _schema(value, at, None)
    if key == "required":
        if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
            raise PromptError(f"{at} is {value!r}; give a list of property names")
        return sorted({check_text(name, at) for name in value})
    return _data(value, at)


def _data(value: Any, at: str) -> Any:
    """Plain JSON with sorted keys."""
    if isinstance(value, str):
        return check_text(value, at)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise PromptError(f"{at} is {value!r}, which is no JSON; give a finite number")
        return value
    if isinstance(value, Mapping):
        keys = sorted(check_text(key, f"a key of {at}") for key in value)
        return {key: _data(value[key], f"{at}.{key}") for key in keys}
    if isinstance(value, (list, tuple)):
        return [_data(one, f"{at}[{i}]") for i, one in enumerate(value)]
    raise PromptError(f"{at} is a {type(value).__name__}; tools must be plain JSON values")


def distinct_tools(described: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Descriptions in OpenAI's form, each once.

    Raises:
        ConfigError: two different tools have one name.
    """
    found: dict[str, dict[str, Any]] = {}
    for tool in described:
        name = tool["function"]["name"]
        if name in found and canonical_tool(found[name]) != canonical_tool(tool):
            raise ConfigError(f"two different tools are named {name!r}; rename one of them")
        found.setdefault(name, tool)
    return list(found.values())
