"""LangChain's tools, tool choices and schemas in the words of `kvboost_rag.tools`, and calls the other way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, TypeAlias, cast

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, InvalidToolCall, ToolCall, ToolCallChunk
from langchain_core.messages.tool import invalid_tool_call as make_invalid_call
from langchain_core.messages.tool import tool_call as make_call
from langchain_core.messages.tool import tool_call_chunk as make_call_chunk
from langchain_core.output_parsers import (
    BaseOutputParser,
    JsonOutputKeyToolsParser,
    JsonOutputParser,
    PydanticOutputParser,
    PydanticToolsParser,
)
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, PydanticUserError, TypeAdapter

from kvboost_rag import ConfigError
from kvboost_rag.tools import Reply, check_size, distinct_tools, schema_in

ToolLike: TypeAlias = "Mapping[str, Any] | type | Callable[..., Any] | BaseTool | Runnable[Any, Any]"


def describe(tools: Sequence[ToolLike]) -> list[dict[str, Any]]:
    """Tool descriptions in OpenAI's form. A tool that is given twice, in whatever form, counts once.

    Raises:
        ConfigError: two different tools have one name, or something is no tool.
        PromptError: a description that is no JSON schema.
    """
    if isinstance(tools, (str, Mapping, BaseModel)) or not isinstance(tools, Iterable):
        raise ConfigError(f"tools is a {type(tools).__name__}; give a list of tools")
    return distinct_tools(map(_describe, tools))


def schema_of_format(response_format: Any) -> Mapping[str, Any] | Literal["any"] | None:
    """JSON schema of OpenAI's ``response_format``, or of a class; "any" for any JSON object, None for text.

    Raises:
        ConfigError: neither a schema nor a known form.
    """
    if response_format is None or isinstance(response_format, Mapping):
        return schema_in(response_format)
    return schema_of(response_format)


def schema_of(schema: Any) -> dict[str, Any]:
    """JSON schema of a class, of a TypedDict, or in a tool's description; one that is given comes back as it is.

    Raises:
        ConfigError: there is none in it.
    """
    if isinstance(schema, Mapping) and not {"function", "name", "input_schema"} & schema.keys():
        return dict(schema)
    parameters: dict[str, Any] = _describe(schema, "schema")["function"].get("parameters") or {"type": "object"}
    return parameters


def titled(schema: Any) -> Any:
    """A schema that can be a tool: a JSON schema without a title gets one."""
    if isinstance(schema, Mapping) and not {"title", "function", "name", "input_schema"} & schema.keys():
        return {"title": "answer", **schema}
    return schema


def traced_schema(schema: Any) -> dict[str, Any] | None:
    """A schema for traces, with its name; LangChain would describe the class itself, and cannot describe all."""
    if schema is None:
        return None
    described = _describe(schema, "schema")["function"]
    words = {"description": described["description"]} if described.get("description") else {}
    return {"title": described["name"], **words, **schema_of(schema)}


def calls_of(reply: Reply) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """The calls of an answer as LangChain has them: those that can be run, and those that cannot."""
    return (
        [make_call(name=call.name, args=call.arguments, id=call.id) for call in reply.calls],
        [make_invalid_call(name=bad.name, args=bad.text, error=bad.error) for bad in reply.invalid],
    )


def call_deltas(reply: Reply) -> list[ToolCallChunk]:
    """The calls of an answer as streamed pieces, whole: they are known when their JSON is complete.

    LangChain takes whatever can be completed to a JSON object for the arguments of a call that can be run, so the text
    of an invalid call goes as a JSON string; `written` gives it back. What is wrong with it is in the metadata.
    """
    good = [(call.name, json.dumps(call.arguments, ensure_ascii=False), call.id) for call in reply.calls]
    bad = [(call.name, json.dumps(call.text, ensure_ascii=False), None) for call in reply.invalid]
    return [make_call_chunk(name=n, args=a, id=i, index=k) for k, (n, a, i) in enumerate([*good, *bad])]


def written(args: str | None) -> str:
    """What the model wrote of an invalid call, be the call from a message or from merged pieces."""
    try:
        text = json.loads(args or '""')
    except (ValueError, RecursionError):
        return args or ""
    return text if isinstance(text, str) else args or ""


def json_parser(schema: Any) -> BaseOutputParser[Any]:
    """Reads an answer that is JSON: as an object of a pydantic class, or as a dict."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):  # of pydantic's version 1, too
        return PydanticOutputParser(pydantic_object=schema)
    return JsonOutputParser()


def call_parser(schema: Any) -> BaseOutputParser[Any]:
    """Reads the arguments of an answer's call, likewise."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    return JsonOutputKeyToolsParser(key_name=_describe(schema)["function"]["name"], first_tool_only=True)


def structured(
    llm: Runnable[LanguageModelInput, AIMessage], parser: BaseOutputParser[Any], *, include_raw: bool
) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
    """A model with the parser of its answers behind it.

    Args:
        llm: answers with objects.
        parser: reads them.
        include_raw: give the message, what was parsed, and the error, if any.
    """
    if not include_raw:
        return llm | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    both = RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")
    return cast("Runnable[LanguageModelInput, dict[str, Any] | BaseModel]", both)


def _describe(tool: ToolLike, what: str = "tool") -> dict[str, Any]:
    if isinstance(tool, Runnable) and not isinstance(tool, BaseTool):
        tool = tool.as_tool()
    if isinstance(tool, Mapping):
        check_size(tool, f"the {what}")
    try:
        described = _converted(tool)
    except (ValueError, TypeError, PydanticUserError) as error:
        kinds = "a tool, a function, a pydantic class or a dict" if what == "tool" else "a class, a TypedDict or a dict"
        raise ConfigError(f"{tool!r} is no {what}: {error}; give {kinds}") from error
    if described.get("type") != "function":
        raise ConfigError(
            f"a tool of type {described.get('type')!r} runs at its provider, not in a local model; give a function tool"
        )
    return described


def _converted(tool: Any) -> dict[str, Any]:
    """A description as LangChain makes it, but for what LangChain cannot describe."""
    try:
        described = convert_to_openai_tool(tool)
    except TypeError:
        if not hasattr(tool, "__required_keys__"):  # no TypedDict, from `typing` or `typing_extensions`
            raise
        schema = TypeAdapter(tool).json_schema()  # knows NotRequired
        return convert_to_openai_tool({"title": tool.__name__, "description": tool.__doc__ or "", **schema})
    if isinstance(tool, type) and issubclass(tool, BaseModel):
        schema = tool.model_json_schema()
        if _recursive(schema):  # LangChain resolves references, and leaves out what refers to itself
            described["function"]["parameters"] = schema
    return described


def _recursive(schema: Mapping[str, Any]) -> bool:
    """Whether a schema of pydantic has a definition that reaches itself."""
    reaches = {f"#/$defs/{name}": set(_references(value)) for name, value in schema.get("$defs", {}).items()}
    for _ in reaches:
        reaches = {name: found.union(*(reaches.get(one, ()) for one in found)) for name, found in reaches.items()}
    return any(name in found for name, found in reaches.items())


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        node = list(node.values())
    for value in node if isinstance(node, list) else ():
        yield from _references(value)
