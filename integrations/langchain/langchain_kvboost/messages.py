"""Between LangChain's messages and the engine's: roles and text one way, usage and statistics the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from kvboost_rag import Generation, PromptError
from kvboost_rag.frameworks import cached_tokens, finish_reason, reuse_of

from .tools import written

# What a model wrote besides its text: calls are in `tool_calls`, and reasoning is not shown to the model again.
_BESIDES = frozenset({"tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call"})
_REASONING = frozenset({"reasoning", "thinking", "redacted_thinking", "reasoning_content"})


def to_prompt(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """The engine's form of a conversation, in the given order.

    Raises:
        PromptError: a message whose role or content a text model cannot be given.
    """
    return [_message(message) for message in messages]


def role_of(message: BaseMessage) -> str:
    """The chat template's role of a message.

    Raises:
        PromptError: a message class without a role in chat templates.
    """
    match message:
        case ChatMessage():
            return message.role
        case SystemMessage():
            return str(message.additional_kwargs.get("__openai_role__", "system"))
        case HumanMessage():
            return "user"
        case AIMessage():
            return "assistant"
        case ToolMessage() | FunctionMessage():
            return "tool"
    raise PromptError(
        f"a {type(message).__name__} has no role in a chat template; use a system, human, AI, tool or chat message"
    )


def text_of(message: BaseMessage) -> str:
    """The text of a message: a string as it is, text blocks joined.

    Raises:
        PromptError: a block that is not text.
    """
    content = message.content
    if isinstance(content, str):
        return content
    return "".join(_block_text(block, message) for block in content)


def usage_metadata(generation: Generation) -> UsageMetadata:
    """LangChain's usage of an answer: `input_tokens` counts reused tokens too."""
    usage, (read, created) = generation.usage, cached_tokens(generation)
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=read, cache_creation=created),
    )


def response_metadata(
    generation: Generation,
    model_name: str,
    *,
    calls: bool = False,
    hurried: bool = False,
    errors: Sequence[str | None] = (),
) -> dict[str, Any]:
    """What `usage_metadata` has no place for: how tokens were reused, the time to the first one, why it ended.

    The errors of invalid calls are here too: LangChain drops them where it merges streamed pieces.
    """
    return {
        **({"invalid_tool_call_errors": list(errors)} if errors else {}),
        "model_name": model_name,
        "model_provider": "kvboost",
        "finish_reason": finish_reason(generation, calls=calls, hurried=hurried),
        **reuse_of(generation),
    }


def _message(message: BaseMessage) -> dict[str, Any]:
    made: dict[str, Any] = {"role": role_of(message), "content": text_of(message)}
    if message.name:
        made["name"] = message.name
    if isinstance(message, ToolMessage):
        made["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage):
        # What could not be parsed is still what the model wrote, and what an error message behind it speaks of.
        broken = [written(call["args"]) for call in message.invalid_tool_calls]
        made["content"] = "\n".join(part for part in (made["content"], *broken) if part)
        if message.tool_calls:
            made["tool_calls"] = [
                {
                    "type": "function",
                    "id": call["id"] or "",
                    "function": {"name": call["name"], "arguments": call["args"]},
                }
                for call in message.tool_calls
            ]
    return made


def _block_text(block: str | Mapping[str, Any], message: BaseMessage) -> str:
    if isinstance(block, str):
        return block
    kind, text = block.get("type"), block.get("text")
    if kind == "text" and isinstance(text, str):
        return text
    if isinstance(message, AIMessage) and kind in _BESIDES | _REASONING:
        return ""
    raise PromptError(
        f"a {type(message).__name__} holds a content block of type {kind!r}; this model reads text only: "
        "remove the block or describe it in words"
    )
