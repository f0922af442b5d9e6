"""Which tool must be called, and what an answer must be, in any of the forms that frameworks' users write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from ..errors import ConfigError

Choice: TypeAlias = Literal["auto", "none", "any"] | tuple[str, ...]  # names: one of these must be called


def check_flags(**flags: Any) -> None:
    """Refuse what is neither a bool nor None: ``"false"`` would count as true.

    Raises:
        ConfigError: names the flag.
    """
    for name, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; give True, False or None")


def choice_of(tool_choice: Any, tools: Sequence[Mapping[str, Any]]) -> Choice:
    """A tool choice in any of the forms that chat models take: a word, a name, a bool, OpenAI's or Anthropic's dict.

    Raises:
        ConfigError: no such choice, or no tool of that name.
    """
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function")
        tool_choice = function.get("name") if isinstance(function, Mapping) else tool_choice.get("name") or tool_choice
        if isinstance(tool_choice, Mapping):
            tool_choice = tool_choice.get("type")
    if tool_choice in names:
        return (str(tool_choice),)
    match tool_choice:
        case None | False | "auto":
            return "auto"
        case True | "any" | "required":
            return "any"
        case "none":
            return "none"
    raise ConfigError(
        f"tool_choice is {tool_choice!r}; choose 'auto', 'none', 'any' or the name of a tool: {', '.join(names) or '–'}"
    )


def schema_in(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | Literal["any"] | None:
    """JSON schema of OpenAI's ``response_format``; "any" for any JSON object, None for text.

    Raises:
        ConfigError: neither a schema nor a known form.
    """
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "json_schema" and isinstance(response_format.get("json_schema"), Mapping):
        schema: Mapping[str, Any] = response_format["json_schema"].get("schema", {})
        return schema
    if kind in ("json_object", "text"):
        return "any" if kind == "json_object" else None
    if "properties" not in response_format and "$ref" not in response_format and kind != "object":
        raise ConfigError(
            f"response_format is {dict(response_format)!r}; give a JSON schema, a class, "
            "{'type': 'json_schema', 'json_schema': {'schema': …}} or {'type': 'json_object'}"
        )
    return response_format
