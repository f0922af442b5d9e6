"""Between LangChain's messages and the engine's: roles and text one way, usage and statistics the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from kvboost_rag import Generation, PromptError


def to_prompt(messages: Sequence[BaseMessage]) -> list[dict[str, str]]:
    """The engine's form of a conversation, in the given order.

    Raises:
        PromptError: a message whose role or content a text model cannot be given.
    """
    return [{"role": role_of(message), "content": text_of(message)} for message in messages]


def role_of(message: BaseMessage) -> str:
    """The chat template's role of a message.

    Raises:
        PromptError: a message class without a role in chat templates.
    """
    match message:
        case ChatMessage():
            return message.role
        case SystemMessage():
            return "system"
        case HumanMessage():
            return "user"
        case AIMessage():
            return "assistant"
        case ToolMessage():
            return "tool"
    raise PromptError(
        f"a {type(message).__name__} has no role in a chat template; use a system, human, AI, tool or chat message"
    )


def text_of(message: BaseMessage) -> str:
    """The text of a message: a string as it is, text blocks joined.

    Raises:
        PromptError: a block that is not text, or a tool call.
    """
    if isinstance(message, AIMessage) and message.tool_calls:
        raise PromptError(
            "an AIMessage holds tool calls, which this chat model cannot render yet; write them into its text"
        )
    content = message.content
    if isinstance(content, str):
        return content
    return "".join(_block_text(block, message) for block in content)


def usage_metadata(generation: Generation, *, stores_prompts: bool) -> UsageMetadata:
    """LangChain's usage of an answer: `input_tokens` counts reused tokens too.

    Args:
        generation: a finished answer.
        stores_prompts: whether the engine keeps the KV of new prompt text, so that new tokens count as written.
    """
    usage = generation.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(
            cache_read=usage.exact_tokens + usage.approximate_tokens,
            cache_creation=usage.new_tokens if stores_prompts else 0,
        ),
    )


def response_metadata(generation: Generation, model_name: str) -> dict[str, Any]:
    """What `usage_metadata` has no place for: how tokens were reused, the time to the first one, why it ended."""
    usage = generation.usage
    return {
        "model_name": model_name,
        "model_provider": "kvboost",
        "finish_reason": generation.finish_reason,
        "fallback_reason": generation.fallback_reason,
        "exact_tokens": usage.exact_tokens,
        "approximate_tokens": usage.approximate_tokens,
        "repaired_tokens": usage.repaired_tokens,
        "computed_tokens": usage.computed_tokens,
        "ttft_s": generation.timing.ttft_s,
    }


def _block_text(block: str | Mapping[str, Any], message: BaseMessage) -> str:
    if isinstance(block, str):
        return block
    kind, text = block.get("type"), block.get("text")
    if kind == "text" and isinstance(text, str):
        return text
    raise PromptError(
        f"a {type(message).__name__} holds a content block of type {kind!r}; this model reads text only: "
        "remove the block or describe it in words"
    )
