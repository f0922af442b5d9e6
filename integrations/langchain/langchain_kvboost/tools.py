"""LangChain's tools, tool choices and schemas in the words of `kvboost_rag.tools`, and calls the other way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias, cast

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, InvalidToolCall, ToolCall, ToolCallChunk
from langchain_core.messages.tool import invalid_tool_call as make_invalid_call
from langchain_core.messages.tool import tool_call as make_call
from langchain_core.messages.tool import tool_call_chunk as make_call_chunk
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from pydantic import BaseModel

from kvboost_rag import ConfigError
from kvboost_rag.tools import Choice, Reply, canonical_tool

ToolLike: TypeAlias = "Mapping[str, Any] | type | Callable[..., Any] | BaseTool | Runnable[Any, Any]"


def describe(tools: Sequence[ToolLike]) -> list[dict[str, Any]]:
    """Tool descriptions in OpenAI's form. A tool that is given twice, in whatever form, counts once.

    Raises:
        ConfigError: two different tools have one name, or something is no tool.
        PromptError: a description that is no JSON schema.
    """
    found: dict[str, dict[str, Any]] = {}
    for tool in tools:
        described = _describe(tool)
        name = described["function"]["name"]
        if name in found and canonical_tool(found[name]) != canonical_tool(described):
            raise ConfigError(f"two different tools are named {name!r}; rename one of them")
        found.setdefault(name, described)
    return list(found.values())


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


def schema_of_format(response_format: Any) -> Mapping[str, Any] | Any:
    """JSON schema of OpenAI's ``response_format``, "any" for any JSON object, None for text.

    Raises:
        ConfigError: neither a schema nor a known form.
    """
    if response_format is None:
        return None
    if isinstance(response_format, Mapping):
        kind = response_format.get("type")
        if kind == "json_schema" and isinstance(response_format.get("json_schema"), Mapping):
            return response_format["json_schema"].get("schema", {})
        if kind in ("json_object", "text"):
            return "any" if kind == "json_object" else None
        if "properties" not in response_format and "$ref" not in response_format and kind != "object":
            raise ConfigError(
                f"response_format is {dict(response_format)!r}; give a JSON schema, a class, "
                "{'type': 'json_schema', 'json_schema': {'schema': …}} or {'type': 'json_object'}"
            )
        return response_format
    return convert_to_json_schema(response_format)


def calls_of(reply: Reply) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """The calls of an answer as LangChain has them: those that can be run, and those that cannot."""
    return (
        [make_call(name=call.name, args=call.arguments, id=call.id) for call in reply.calls],
        [make_invalid_call(name=bad.name, args=bad.text, error=bad.error) for bad in reply.invalid],
    )


def call_deltas(reply: Reply) -> list[ToolCallChunk]:
    """The calls of an answer as streamed pieces, whole: they are known when their JSON is complete."""
    good = [(call.name, json.dumps(call.arguments, ensure_ascii=False), call.id) for call in reply.calls]
    bad = [(call.name, call.text, None) for call in reply.invalid]
    return [make_call_chunk(name=n, args=a, id=i, index=k) for k, (n, a, i) in enumerate([*good, *bad])]


def structured(
    llm: Runnable[LanguageModelInput, AIMessage], schema: Any, *, include_raw: bool
) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
    """A model that answers in JSON, with the parser of its answers behind it.

    Args:
        llm: answers with JSON in its text.
        schema: a pydantic class gives objects of it; anything else gives dicts.
        include_raw: give the message, what was parsed, and the error, if any.
    """
    parser: BaseOutputParser[Any] = JsonOutputParser()
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        parser = PydanticOutputParser(pydantic_object=schema)
    if not include_raw:
        return llm | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    both = RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")
    return cast("Runnable[LanguageModelInput, dict[str, Any] | BaseModel]", both)


def _describe(tool: ToolLike) -> dict[str, Any]:
    if isinstance(tool, Runnable) and not isinstance(tool, BaseTool):
        tool = tool.as_tool()
    try:
        described = convert_to_openai_tool(cast("Any", tool))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{tool!r} is no tool: {error}; give a tool, a function, a pydantic class or a dict"
        ) from error
    if described.get("type") != "function":
        raise ConfigError(
            f"a tool of type {described.get('type')!r} runs at its provider, not in a local model; give a function tool"
        )
    return described
