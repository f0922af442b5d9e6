"""LlamaIndex's tools in the words of `kvboost_rag.tools`, and calls the other way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from llama_index.core.base.llms.types import ChatResponse, ToolCallBlock
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools import BaseTool
from pydantic import BaseModel

from kvboost_rag import ConfigError
from kvboost_rag.tools import distinct_tools, schema_in

ToolLike: TypeAlias = BaseTool | Mapping[str, Any]


def describe(tools: Sequence[ToolLike]) -> list[dict[str, Any]]:
    """Tool descriptions in OpenAI's form. A tool that is given twice counts once.

    Raises:
        ConfigError: two different tools have one name, or something is no tool.
    """
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise ConfigError(f"tools is a {type(tools).__name__}; give a list of tools")
    return distinct_tools(map(_describe, tools))


def schema_of_format(response_format: Any) -> Mapping[str, Any] | Literal["any"] | None:
    """JSON schema of OpenAI's ``response_format``, or of a pydantic class; "any" for any JSON object, None for text.

    Raises:
        ConfigError: neither a schema nor a known form.
    """
    if isinstance(response_format, type) and issubclass(response_format, BaseModel):
        return response_format.model_json_schema()
    if response_format is None or isinstance(response_format, Mapping):
        return schema_in(response_format)
    raise ConfigError(f"response_format is {response_format!r}; give a pydantic class or a JSON schema")


def selections(response: ChatResponse) -> list[ToolSelection]:
    """The calls of an answer."""
    return [
        ToolSelection(tool_id=block.tool_call_id or "", tool_name=block.tool_name, tool_kwargs=block.tool_kwargs)
        for block in response.message.blocks
        if isinstance(block, ToolCallBlock)
    ]


def _describe(tool: ToolLike) -> dict[str, Any]:
    if isinstance(tool, BaseTool):
        # Long descriptions are a local model's own business; OpenAI's limit is not.
        described: dict[str, Any] = tool.metadata.to_openai_tool(skip_length_check=True)
        # LlamaIndex writes another name where OpenAI would not take it, and then does not find the tool by that.
        return {**described, "function": {**described["function"], "name": tool.metadata.get_name()}}
    if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) and tool["function"].get("name"):
        return dict(tool)
    raise ConfigError(f"{tool!r} is no tool; give a LlamaIndex tool, such as FunctionTool.from_defaults(fn)")
