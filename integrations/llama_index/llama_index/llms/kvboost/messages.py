"""Between LlamaIndex's messages and the engine's: roles and text one way, answers and usage the other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CitableBlock,
    CitationBlock,
    CompletionResponse,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from pydantic import BaseModel

from kvboost_rag import Delta, Generation, PromptError
from kvboost_rag.frameworks import Asked, ReplyPieces, cached_tokens, finish_reason, reuse_of
from kvboost_rag.tools import Reply

T_co = TypeVar("T_co", covariant=True)
_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.FUNCTION: "tool",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}


def to_prompt(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The engine's form of a conversation, in the given order.

    Raises:
        PromptError: content that a text model cannot be given, or what is no message.
    """
    if strange := next((message for message in messages if not isinstance(message, ChatMessage)), None):
        raise PromptError(f"messages holds a {type(strange).__name__}; give ChatMessage objects")
    return [_message(message) for message in messages]


def to_chat_response(asked: Asked, generation: Generation, *, single: bool = False) -> ChatResponse:
    """A whole answer: its text, its calls (only the first one if ``single``), and what it cost."""
    return _chat_response(asked, asked.reply(generation), generation, single=single)


def to_completion(asked: Asked, generation: Generation, delta: str | None = None) -> CompletionResponse:
    """A whole answer as text; with ``delta``, the last piece of a stream."""
    return CompletionResponse(
        text=generation.text,
        delta=delta,
        raw=_raw(generation, asked.model_name),
        additional_kwargs=_counts(generation),
    )


class Pieces(Protocol[T_co]):
    """Makes LlamaIndex's pieces of an answer's deltas."""

    def of(self, delta: Delta) -> Iterator[T_co]:
        """The pieces that a delta completes."""
        ...


class ChatPieces:
    """Chat responses with the text so far; calls (only the first if ``single``) and usage come with the last one."""

    def __init__(self, asked: Asked, *, single: bool = False) -> None:
        self._asked, self._single = asked, single
        self._pieces, self._text = ReplyPieces(asked), ""

    def of(self, delta: Delta) -> Iterator[ChatResponse]:
        """See `Pieces`."""
        text, reply = self._pieces.push(delta.text, delta.generation)
        if delta.generation is not None and reply is not None:
            last = _chat_response(self._asked, reply, delta.generation, single=self._single)
            last.delta = (last.message.content or "").removeprefix(self._text)  # it may end with a broken call
            yield last
            return
        self._text += text
        if text:
            yield ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=self._text), delta=text)


class TextPieces:
    """Completion responses with the text so far; usage comes with the last one."""

    def __init__(self, asked: Asked) -> None:
        self._asked, self._text = asked, ""

    def of(self, delta: Delta) -> Iterator[CompletionResponse]:
        """See `Pieces`."""
        self._text += delta.text
        if delta.generation is not None:
            yield to_completion(self._asked, delta.generation, delta.text)
        elif delta.text:
            yield CompletionResponse(text=self._text, delta=delta.text)


def _chat_response(asked: Asked, reply: Reply, generation: Generation, *, single: bool) -> ChatResponse:
    calls = [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=call.arguments)
        for call in (reply.calls[:1] if single else reply.calls)
    ]
    # LlamaIndex has no place for calls that cannot be run; what the model wrote must not be lost.
    broken = [{"name": bad.name, "arguments": bad.text, "error": bad.error} for bad in reply.invalid]
    further: dict[str, Any] = {"invalid_tool_calls": broken} if broken else {}
    if calls:  # where parts of LlamaIndex still look for them
        further["tool_calls"] = [
            _call(block.tool_call_id, block.tool_name, json.dumps(block.tool_kwargs, ensure_ascii=False))
            for block in calls
        ]
    lines = [reply.text, *(bad.text for bad in reply.invalid)]
    text = reply.text if calls or not broken else "\n".join(line for line in lines if line)
    return ChatResponse(
        message=ChatMessage(
            role=MessageRole.ASSISTANT,
            blocks=[*([TextBlock(text=text)] if text or not calls else []), *calls],
            additional_kwargs=further,
        ),
        raw=_raw(generation, asked.model_name, calls=bool(calls), hurried=asked.hurried),
        additional_kwargs=_counts(generation),
    )


def _counts(generation: Generation) -> dict[str, int]:
    """Tokens of an answer under the names that LlamaIndex's counters look for."""
    usage = generation.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _raw(generation: Generation, model_name: str, *, calls: bool = False, hurried: bool = False) -> dict[str, Any]:
    """What is known of an answer beside its text, as plain numbers and strings; usage in OpenAI's form."""
    read, created = cached_tokens(generation)
    return {
        "model": model_name,
        "usage": {
            **_counts(generation),
            "prompt_tokens_details": {"cached_tokens": read, "cache_creation_tokens": created},
        },
        "finish_reason": finish_reason(generation, calls=calls, hurried=hurried),
        **reuse_of(generation),
    }


def _message(message: ChatMessage) -> dict[str, Any]:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in message.blocks:
        if isinstance(block, ToolCallBlock):
            _add_call(texts, calls, block.tool_call_id, block.tool_name, block.tool_kwargs)
        else:
            texts += _texts_of(block, message)
    extra = message.additional_kwargs
    for call in () if calls else extra.get("tool_calls") or ():  # of other integrations, and older conversations
        _add_call(texts, calls, *_legacy(call))
    made: dict[str, Any] = {"role": _ROLES.get(message.role, message.role.value), "content": "\n".join(texts)}
    made |= {name: extra[name] for name in ("name", "tool_call_id") if extra.get(name)}
    if calls:
        made["tool_calls"] = calls
    return made


def _texts_of(block: Any, message: ChatMessage) -> list[str]:
    match block:
        case TextBlock():
            return [block.text]
        case ThinkingBlock() | CachePoint():  # reasoning is not shown again; the cache needs no marks
            return []
        case CitableBlock():
            return [text for part in block.content for text in _texts_of(part, message)]
        case CitationBlock():
            return _texts_of(block.cited_content, message)
    raise PromptError(
        f"a {message.role.value} message holds a {type(block).__name__}; this model reads text only: "
        "remove the block or describe it in words"
    )


def _add_call(
    texts: list[str], calls: list[dict[str, Any]], id: str | None, name: str, arguments: Mapping[str, Any] | str
) -> None:
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):  # it is still what the model wrote
            texts.append(arguments)
            return
        arguments = parsed
    calls.append(_call(id, name, dict(arguments)))


def _call(id: str | None, name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    return {"type": "function", "id": id or "", "function": {"name": name, "arguments": arguments}}


def _legacy(call: Any) -> tuple[str | None, str, Any]:
    """Id, name and arguments of a call in OpenAI's form, as an object or as a dict.

    Raises:
        PromptError: it is none.
    """
    found = call if isinstance(call, Mapping) else call.model_dump() if isinstance(call, BaseModel) else None
    function = None if found is None else found.get("function") or found
    if found is None or not isinstance(function, Mapping):
        raise PromptError(
            f"additional_kwargs['tool_calls'] holds {call!r}, which is no call; give a list of calls in OpenAI's form"
        )
    return found.get("id"), function.get("name") or "", function.get("arguments") or {}
