"""Token ids of logged prompts: by the model's tokenizer as the engine would, or estimated where there is none. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..chunks import IntArray, as_ids
from ..errors import PromptError
from ..messages import check_text
from ..prompts import PromptEncoder
from ..question import Alike, Tokens, says_something
from ..tools.formats import JSON, detect
from ..tools.prompting import fallback, fit_roles
from ..tools.schemas import canonical_tools
from .formats import Logged
from .turns import Message

_PIECES = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]"  # a character of Chinese, Japanese or Korean
    r"| ?[^\W\d_]{1,12}"  # a word with the space in front of it, or a piece of a long one
    r"| ?\d{1,3}"
    r"| ?[^\w\s]{1,2}"
    r"|\n+| +(?= )|[^\S\n]+|_+|.",
    re.DOTALL,
)
_MARK = "<|"  # how a marker begins; a document hardly ever holds one
_MOST_PIECES = 1 << 20  # a million different words; those beyond are spelled out


class Encoding(Protocol):
    """Makes token ids of logged prompts."""

    @property
    def about(self) -> str:
        """Where the ids come from, for the report."""
        ...

    @property
    def tokens(self) -> Tokens:
        """What single tokens are."""
        ...

    def prompt(self, logged: Logged) -> IntArray:
        """Ids of a prompt.

        Raises:
            PromptError: it could not be run.
        """
        ...

    def text(self, text: str) -> IntArray:
        """Ids of an answer."""
        ...

    def piece(self, token: int) -> str:
        """Text of one token."""
        ...


class ModelEncoding:
    """Ids as the engine would see them.

    Messages are rendered by the chat template. Tools, roles and calls that it does not know are written as ChatKVBoost
    and KVBoost write them.

    Args:
        tokenizer: a Hugging Face fast tokenizer.
        name: of the model, for the report.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer, self._encoder = tokenizer, PromptEncoder(tokenizer)
        self.about = f"token ids of {name}"
        self.tokens = self._encoder.tokens

    def prompt(self, logged: Logged) -> IntArray:
        """Ids of a prompt.

        Raises:
            PromptError: the engine would refuse it.
        """
        if not isinstance(logged.prompt, list) or not isinstance(logged.prompt[0], Mapping):
            if logged.tools:
                raise PromptError("tools stand beside a prompt that is rendered already")
            return self._encoder.encode(logged.prompt)
        messages, tools = self._known(logged.prompt, logged.tools)
        shown = [*tools] or None

        def render(fitted: list[Message]) -> IntArray:
            return self._encoder.encode(fitted, tools=shown)

        return render(fit_roles(messages, render))

    def text(self, text: str) -> IntArray:
        """Ids of an answer."""
        return self._encoder.encode_text(text)

    def piece(self, token: int) -> str:
        """Text of one token."""
        return self._encoder.piece(token)

    def _known(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]]]:
        """What the template knows of: without a tools branch, everything is text."""
        used = bool(tools) or any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
        format = detect(getattr(self._tokenizer, "chat_template", None))
        if not used or format is not None:
            return messages, canonical_tools(tools)
        return fallback(messages, tools, JSON), ()


class EstimatedEncoding:
    """Ids without a model: words, numbers and marks are tokens, and messages are rendered as ChatML.

    The counts are those of a tokenizer of English within some tenths; shares hardly depend on them.
    """

    about = "estimated tokens (words and marks; name a --tokenizer or --model for its own)"

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._pieces: list[str] = []
        says, breaks = (lambda token: says_something(self.piece(token))), (lambda token: "\n" in self.piece(token))
        self.tokens = Tokens(says, breaks, markers=self._markers, written=self._frame, same=Alike(self.piece))

    def prompt(self, logged: Logged) -> IntArray:
        """Ids of a prompt.

        Raises:
            PromptError: it holds no text, or text that cannot be encoded.
        """
        if isinstance(logged.prompt, str):
            return self._text(logged.prompt)
        if logged.prompt and isinstance(logged.prompt[0], int):
            return self._given(logged.prompt)
        told: list[Message] = logged.prompt  # type: ignore[assignment]
        messages = fallback(told, logged.tools, JSON)
        turns = (f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
        return self._text("".join(turns) + "<|im_start|>assistant\n")

    def text(self, text: str) -> IntArray:
        """Ids of an answer."""
        return self._text(text) if text else as_ids([])

    def piece(self, token: int) -> str:
        """Text of one token."""
        return self._pieces[token] if token < len(self._pieces) else chr(token - _MOST_PIECES)

    def _markers(self) -> IntArray:
        return self._known(_MARK)

    def _frame(self) -> IntArray:
        return self._known(*_PIECES.findall("<|im_start|>system\nuser\nassistant\n<|im_end|>\n"))

    def _known(self, *pieces: str) -> IntArray:
        return as_ids(sorted({self._ids[piece] for piece in pieces if piece in self._ids}))

    def _given(self, ids: Sequence[Any]) -> IntArray:
        raise PromptError(
            f"the prompt is a list of {len(ids)} token ids, which mean nothing without their tokenizer; name it with "
            "--tokenizer"
        )

    def _text(self, text: str) -> IntArray:
        if not check_text(text, "the prompt"):
            raise PromptError("the prompt is empty")
        ids: list[int] = []
        for piece in _PIECES.findall(text):
            token = self._ids.get(piece)
            if token is None:
                if len(self._pieces) == _MOST_PIECES:
                    ids.extend(_MOST_PIECES + ord(char) for char in piece)
                    continue
                token = self._ids[piece] = len(self._pieces)
                self._pieces.append(piece)
            ids.append(token)
        return as_ids(ids)
