"""Chat messages: checked, and rendered so that nothing in them can pass for the template's own markers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any, TypeAlias

from .errors import PromptError
from .markers import Markers

Message: TypeAlias = dict[str, Any]
Render: TypeAlias = Callable[[list[Message], list[Any] | None], str]
Change: TypeAlias = Callable[[str, str], str]

_ROLES = frozenset({"system", "developer", "user", "assistant", "model", "tool", "function", "ipython"})
_ROLE = re.compile(r"[A-Za-z][\w.-]*")
# Words of the format itself: templates compare them, and no caller chooses them.
_TYPES = frozenset({"function", "text", "object", "string", "number", "integer", "boolean", "array", "null"})
_KEYS = frozenset(
    "role content name type function tool_calls tool_call_id id arguments parameters properties description required"
    " items enum default title return reasoning_content thinking reasoning".split()
)


def check_text(text: object, at: str) -> str:
    """The text as a plain string.

    Raises:
        PromptError: it is no string, or cannot be encoded.
    """
    if not isinstance(text, str):
        hint = "; give its page_content" if hasattr(text, "page_content") else ""
        raise PromptError(f"{at} is a {type(text).__name__}; it must be a string{hint}")
    text = str.__str__(text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{at} holds a lone surrogate, {text[error.start]!r}, at character {error.start}; clean it with "
            "text.encode('utf-8', 'replace').decode()"
        ) from None
    return text


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and tools in plain JSON types, copied from the caller's."""

    messages: list[Message]
    tools: list[Any] | None

    @classmethod
    def of(cls, messages: Sequence[Any], tools: Sequence[Any] | None) -> Conversation:
        """Check and copy.

        Raises:
            PromptError: a message has no role or no content, or something is not plain JSON.
        """
        try:
            checked = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
            return cls(checked, _map(list(tools), "tools", check_text) if tools else None)
        except RecursionError:
            raise PromptError("the messages or tools are nested too deeply; flatten them") from None

    def map(self, change: Change) -> Conversation:
        """A copy with every string changed, keys too; `change` gets the string and where it stands."""
        tools = None if self.tools is None else _map(self.tools, "tools", change)
        return Conversation(_map(self.messages, "messages", change), tools)

    def with_message(self, i: int, **fields: str) -> Conversation:
        """A copy with some fields of one message replaced."""
        messages = list(self.messages)
        messages[i] = messages[i] | fields
        return replace(self, messages=messages)


def render(
    conversation: Conversation, template: Render, markers: Markers, *, refuse: bool
) -> tuple[str, dict[str, str]]:
    """Render a conversation.

    Returns:
        The text, in which every marker is the template's own; and the sentinels in it, which stand for the markers
        inside the conversation's strings, each with its marker.

    Raises:
        PromptError: the template refuses it or would lose part of it; strings join to a marker; or there is a marker in
            a string and ``refuse`` is set.
    """
    written = repr(conversation)
    while (nonce := f"kv{token_hex(8)}") in written:
        pass
    sentinels = {marker: f"{nonce}m{i}z" for i, marker in enumerate(markers.ids)}
    used: dict[str, str] = {}

    def sentinel(match: re.Match[str]) -> str:
        used[sentinels[match.group()]] = match.group()
        return sentinels[match.group()]

    def hide(text: str, at: str) -> str:
        if refuse:
            markers.refuse(text, at)
        return markers.pattern.sub(sentinel, text)

    conversation = conversation.map(hide)
    text = template(conversation.messages, conversation.tools)
    _check_tools(conversation, template, text)
    _check_roles(conversation, template, text, nonce)
    skeleton = _skeleton(conversation, template, nonce)
    _check_complete(conversation, skeleton, text, nonce)
    _check_forged(markers, text, skeleton, "contents")
    _check_forged(markers, text, *_fenced(conversation, template, markers, nonce))
    return text, used


def _message(message: Any, at: str) -> Message:
    if not isinstance(message, Mapping):
        raise PromptError(f"{at} is a {type(message).__name__}; it must be a dict with 'role' and 'content'")
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise PromptError(f"{at}.role is {role!r}; it must be a word such as 'system', 'user', 'assistant' or 'tool'")
    content = message.get("content")
    if content is None and (role != "assistant" or not message.get("tool_calls")):
        raise PromptError(f"{at} has no content; give a string (only an assistant that calls tools may have none)")
    given = {key: value for key, value in message.items() if value is not None}
    if content is not None:
        given["content"] = _content(content, f"{at}.content")
    plain: Message = _map(given, at, check_text)
    return plain


def _content(content: Any, at: str) -> str:
    if isinstance(content, str):
        return check_text(content, at)
    if not isinstance(content, (list, tuple)):
        raise PromptError(f"{at} is a {type(content).__name__}; it must be a string, or a list of text blocks")
    for i, block in enumerate(content):
        if not isinstance(block, Mapping) or block.get("type") != "text":
            kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
            raise PromptError(f"{at}[{i}] is {kind!r}; only blocks like {{'type': 'text', 'text': …}} can be run")
    return "".join(check_text(block.get("text"), f"{at}[{i}].text") for i, block in enumerate(content))


def _map(value: Any, at: str, change: Change) -> Any:
    if isinstance(value, str):
        return change(value, at)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {change(key, f"a key of {at}"): _map(item, f"{at}.{key}", change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map(item, f"{at}[{i}]", change) for i, item in enumerate(value)]
    raise PromptError(f"{at} is a {type(value).__name__}; messages and tools must be plain JSON values")


def _check_tools(conversation: Conversation, template: Render, text: str) -> None:
    if conversation.tools is not None and template(conversation.messages, None) == text:
        raise PromptError(
            "the chat template ignores tools; describe them in a system message, or use a model whose template "
            "supports tools"
        )


def _check_roles(conversation: Conversation, template: Render, text: str, nonce: str) -> None:
    for i, message in enumerate(conversation.messages):
        if message["role"] in _ROLES:
            continue
        try:
            other = template(conversation.with_message(i, role=f"{nonce}r").messages, conversation.tools)
        except PromptError:
            continue  # so the template knows the roles it takes
        if other == text:
            raise PromptError(
                f"the chat template does not distinguish the role {message['role']!r} of messages[{i}]; use 'system', "
                "'user' or 'assistant'"
            )


def _skeleton(conversation: Conversation, template: Render, nonce: str) -> str | None:
    """The conversation with a unique word for each content; None if the template looks into the contents."""
    probe = conversation
    for i, message in enumerate(conversation.messages):
        if message.get("content", "").strip():
            probe = probe.with_message(i, content=f"{nonce}c{i}z")
    try:
        return template(probe.messages, probe.tools)
    except PromptError:
        return None


def _check_complete(conversation: Conversation, skeleton: str | None, text: str, nonce: str) -> None:
    """See that every content got into the text.

    What the template leaves out because of the role is not in the skeleton; what it leaves out because of the content
    is not in the text. The model's own turns may lose reasoning, and words beside a tool call.
    """
    for i, message in enumerate(conversation.messages):
        content = message.get("content", "")
        if not content.strip() or message.get("tool_calls"):
            continue
        dropped = skeleton is not None and f"{nonce}c{i}z" not in skeleton
        if dropped or (message["role"] != "assistant" and _lost(content, text)):
            raise PromptError(
                f"the chat template leaves out the content of messages[{i}], or part of it (role {message['role']!r}); "
                "use a role or a text that the template keeps"
            )


def _lost(content: str, text: str) -> bool:
    core = content.strip()
    if any(form in text for form in (core, json.dumps(core, ensure_ascii=False)[1:-1], json.dumps(core)[1:-1])):
        return False
    words, there = set(core.split()), set(text.split())
    missing = [word for word in words - there if word not in text]
    # Some templates take switches such as "/no_think" out of a text; that loses a word or two.
    return len(missing) > max(2, len(words) // 10)


def _fenced(conversation: Conversation, template: Render, markers: Markers, nonce: str) -> tuple[str | None, str]:
    """The conversation with fences around strings that could be part of a marker; and where these are."""
    places: list[str] = []

    def fence(string: str, at: str) -> str:
        known = {"role": _ROLES, "type": _TYPES}.get(at.rpartition(".")[2], frozenset())
        if string in (_KEYS if at.startswith("a key of ") else known) or not markers.may_join(string):
            return string
        places.append(at)
        core = string.strip()
        return string.replace(core, f"{nonce}bz{core}{nonce}ez", 1)

    probe = conversation.map(fence)
    return (template(probe.messages, probe.tools) if places else None), ", ".join(places[:3])


def _check_forged(markers: Markers, text: str, harmless: str | None, places: str) -> None:
    """See that the text has no more markers than one that differs from it only in what the caller wrote."""
    if harmless is None:
        return
    if forged := markers.count(text) - markers.count(harmless):
        names = sorted(marker for marker, token in markers.ids.items() if token in forged)
        raise PromptError(f"the chat template would make the marker {names[0]!r} of {places}; change the text there")
