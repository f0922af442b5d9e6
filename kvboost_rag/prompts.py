"""Prompts to token ids: what plain Hugging Face gives, but text inside messages and documents stays text.

Trusted are prompts given as a string or as ids (the caller rendered them), `context`, and the chat template itself.
Untrusted are documents and every string inside messages and tools: text of a special token in there never becomes that
token. Markers that are ordinary text to the tokenizer (such as ``[INST]`` where it is no token) cannot be told apart.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from .chunks import IntArray, as_ids
from .config import Markers as MarkerMode
from .errors import ConfigError, PromptError
from .markers import HARMLESS, Codec, Literal, Markers, find_markers
from .messages import Conversation, Message, check_text, render
from .question import Alike, Tokens, says_something

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int] | npt.NDArray[np.integer]

_EMPTY = "the prompt is empty; give a text, at least one message, or at least one token id"
_PROBE_ROLES = (("user", "assistant", "user"), ("system", "user", "assistant", "user"), ("user", "assistant", "tool"))
_LEAST_SAID = (_PROBE_ROLES[1], _PROBE_ROLES[0])  # a template may greet a conversation without a system message


class PromptEncoder:
    """Turns prompts and documents into token ids. May be used by many threads.

    Never changes the tokenizer. Tokens added to the tokenizer later are not seen; a chat template set later is.

    Args:
        tokenizer: a Hugging Face fast tokenizer; None if all prompts are ids.
        markers: "text" keeps special-token text inside messages and documents as text, "refuse" raises on it.
        extra_markers: further added tokens to treat so; with "refuse" any strings.
        vocabulary: ids that a prompt of ids may hold; those of the tokenizer by default. A model's output may be wider
            than its tokenizer, and what it generated must be accepted as the next prompt.

    Raises:
        ConfigError: the tokenizer is no fast tokenizer, or an argument cannot take effect.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        markers: MarkerMode = "text",
        extra_markers: Iterable[str] = (),
        vocabulary: int | None = None,
    ) -> None:
        if markers not in get_args(MarkerMode):
            raise ConfigError(f"markers is {markers!r}; choose one of {', '.join(map(repr, get_args(MarkerMode)))}")
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._refuse = markers == "refuse"
        self._codec = None if tokenizer is None else Codec(tokenizer)
        self._extra = frozenset(extra_markers)
        self._lock = threading.Lock()
        self._found: tuple[Any, Markers] | None = None
        self._literal: tuple[Markers, Literal] | None = None
        known = self._extra if self._refuse or self._codec is None else self._codec.names
        if strangers := sorted(self._extra - (known - {""})):
            raise ConfigError(
                f"extra_markers holds {strangers[0]!r}, which is no added token of the tokenizer and so cannot be told "
                "from its text; add it to the tokenizer, or use markers='refuse'"
            )

    def encode(
        self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True
    ) -> IntArray:
        """Ids of a prompt, those of plain Hugging Face.

        Args:
            prompt: chat messages, rendered with the chat template; or a string that the caller rendered, in which
                special tokens are honoured and to which BOS is added where the tokenizer does so and the string does
                not start with it; or token ids.
            tools: JSON schemas of tools, for messages.
            add_generation_prompt: whether the template opens the answer, for messages.

        Raises:
            PromptError: the prompt cannot be run, or would lose or forge something on its way.
        """
        if isinstance(prompt, str):
            kind, ids = "a string", self._string(check_text(prompt, "the prompt"))
        elif not isinstance(prompt, (Sequence, np.ndarray)) or isinstance(prompt, (bytes, bytearray)):
            raise PromptError(
                f"the prompt is a {type(prompt).__name__}; it must be a string, or a list of messages or token ids"
            )
        elif len(prompt) == 0:
            raise PromptError(_EMPTY)
        elif not _is_number(prompt[0]):
            return as_ids(self._chat(prompt, tools, add_generation_prompt))
        else:
            kind, ids = "a list of token ids", self._given(prompt)
        if tools:
            raise PromptError(f"tools are given but the prompt is {kind}; give messages, or render the tools into it")
        return as_ids(ids)

    def encode_text(self, text: str) -> IntArray:
        """Ids of a document by itself: no BOS in front, and markers in it are text."""
        text = check_text(text, "the document")
        codec, markers = self._need_codec(), self._markers()
        if self._refuse:
            markers.refuse(text, "the document")
        if not markers.pattern.search(text):
            return as_ids(_honest(codec.encode(text), Counter(), markers, codec))
        return as_ids(self._as_text("", text, markers))

    def encode_after(self, context: str, text: str) -> tuple[IntArray, int]:
        """Ids of a document behind a context.

        Args:
            context: start of the prompts in which the document will be met; markers in it are honoured, and BOS is
                added as to a string prompt.
            text: the document; markers in it are text.

        Returns:
            The ids a prompt that starts with context and text gives, up to where the text ends; and how many of them
            are the context's alone: tokens that merge over the border belong to the document.
        """
        context, text = check_text(context, "the context"), check_text(text, "the document")
        codec, markers = self._need_codec(), self._markers()
        if self._refuse:
            markers.refuse(text, "the document")
        start = [] if self._starts_with_bos(context) else codec.prefix
        trusted = markers.count(context)
        if markers.pattern.search(text) or markers.count(context + text) != trusted:
            joint = start + self._as_text(context, text, markers)
        else:
            joint = start + _honest(codec.encode(context + text), trusted, markers, codec)
        alone = start + codec.encode(context)
        same = next((i for i, (a, b) in enumerate(zip(alone, joint, strict=False)) if a != b), None)
        return as_ids(joint), min(len(alone), len(joint)) if same is None else same

    def encode_documents(self, context: str, texts: Sequence[str]) -> tuple[IntArray, list[IntArray]]:
        """Ids of a context, and of each document behind it. Tokens that merge over the border are the document's."""
        encoded = [self.encode_after(context, text) for text in texts]
        shortest, common = min(encoded or [self.encode_after(context, "")], key=lambda pair: pair[1])
        return shortest[:common], [ids[common:] for ids, _ in encoded]

    def piece(self, token: int) -> str:
        """Text of one token, with the space in front of it if it has one; for `chunking.BreakFinder`."""
        return self._need_codec().piece(token)

    @property
    def tokens(self) -> Tokens:
        """What single tokens are."""
        return Tokens(
            self._is_word,
            self._ends_line,
            markers=lambda: self._markers().tokens,
            written=lambda: self._markers().written,
            opening=lambda: self._markers().opening,
            same=Alike(self.piece),
        )

    def _is_word(self, token: int) -> bool:
        return says_something(self.piece(token))

    def _ends_line(self, token: int) -> bool:
        return "\n" in self.piece(token)

    def _string(self, prompt: str) -> list[int]:
        codec = self._need_codec()
        ids = codec.encode(prompt, special=not self._starts_with_bos(prompt)) if prompt else []
        if not ids:
            raise PromptError(_EMPTY)
        return ids

    def _given(self, prompt: Any) -> list[int]:
        limit = self._vocabulary or (np.iinfo(np.int32).max if self._tokenizer is None else len(self._tokenizer))
        ids = []
        for i, token in enumerate(prompt):
            if not _is_number(token) or isinstance(token, (bool, np.bool_)):
                raise PromptError(f"prompt[{i}] is {token!r}; a prompt of token ids holds whole numbers only")
            if not 0 <= token < limit:
                raise PromptError(f"prompt[{i}] is {token}; token ids of this model go from 0 to {limit - 1}")
            ids.append(int(token))
        return ids

    def _chat(self, messages: Any, tools: Sequence[Any] | None, add_generation_prompt: bool) -> list[int]:
        codec = self._need_codec()
        if not getattr(self._tokenizer, "chat_template", None):
            raise PromptError(
                "the tokenizer has no chat template, so messages cannot be rendered; pass the prompt as a string, or "
                "set tokenizer.chat_template"
            )

        def template(messages: list[Message], tools: list[Any] | None) -> str:
            return self._render(messages, tools, add_generation_prompt)

        markers = self._markers()
        text, sentinels = render(Conversation.of(messages, tools), template, markers, refuse=self._refuse)
        trusted = markers.count(text)
        if not sentinels:
            return _honest(codec.encode(text), trusted, markers, codec)
        literal = self._need_literal(markers)
        for marker in sentinels.values():
            literal.check(marker)
        text = re.sub("|".join(sentinels), lambda match: sentinels[match.group()], literal.trusted(text))
        return _honest(literal.encode(text), trusted, markers, codec)

    def _render(self, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except Exception as error:
            raise PromptError(f"the chat template refuses the messages: {error}") from error
        return text

    def _as_text(self, context: str, text: str, markers: Markers) -> list[int]:
        literal = self._need_literal(markers)
        for marker in set(markers.pattern.findall(text)):
            literal.check(marker)
        ids = literal.encode(literal.trusted(context) + text)
        return _honest(ids, markers.count(context), markers, self._need_codec())

    def _starts_with_bos(self, text: str) -> bool:
        bos: str | None = getattr(self._tokenizer, "bos_token", None)
        return bool(bos) and text.startswith(str(bos))

    def _need_codec(self) -> Codec:
        if self._codec is None:
            raise PromptError("there is no tokenizer; give the prompt as token ids, or load a tokenizer")
        return self._codec

    def _markers(self) -> Markers:
        template = getattr(self._tokenizer, "chat_template", None)
        with self._lock:
            if self._found is None or self._found[0] != template:
                named = {
                    *self._tokenizer.all_special_tokens,
                    *(getattr(self._tokenizer, "chat_control_tokens", None) or ()),
                }
                rendered = self._harmless(template)
                markers = find_markers(
                    self._need_codec(),
                    named=named,
                    rendered=rendered.values(),
                    frame=next((rendered[roles] for roles in _LEAST_SAID if roles in rendered), ""),
                    opening=self._opening(template),
                    extra=self._extra,
                )
                self._found = template, markers
            return self._found[1]

    def _harmless(self, template: object) -> dict[tuple[str, ...], str]:
        rendered: dict[tuple[str, ...], str] = {}
        for roles in _PROBE_ROLES if template else ():
            try:
                rendered[roles] = self._render([{"role": role, "content": HARMLESS} for role in roles], None, True)
            except PromptError:
                continue  # a template need not know every role
        return rendered

    def _opening(self, template: object) -> str:
        asked = [{"role": "user", "content": HARMLESS}]
        try:
            bare, opened = (self._render(asked, None, begun) for begun in (False, True)) if template else ("", "")
        except PromptError:
            return ""
        return opened.removeprefix(bare) if opened.startswith(bare) else ""

    def _need_literal(self, markers: Markers) -> Literal:
        with self._lock:
            if self._literal is None or self._literal[0] is not markers:
                self._literal = markers, self._need_codec().literal(markers)
            return self._literal[1]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, np.integer, np.bool_))


def _honest(ids: list[int], trusted: Counter[int], markers: Markers, codec: Codec) -> list[int]:
    """The ids, if they hold no more markers than trusted text does; normalising text could have made some."""
    known = set(markers.ids.values()) - codec.unknown
    forged = Counter(token for token in ids if token in known) - trusted
    if forged:
        names = [marker for marker, token in markers.ids.items() if token in forged]
        raise PromptError(f"the tokenizer makes the marker {names[0]!r} of text that is not it; change that text")
    return ids


def as_texts(texts: str | Iterable[str]) -> list[str]:
    """One text or many, as a list.

    Raises:
        PromptError: neither a string nor many of anything.
    """
    if isinstance(texts, str):
        return [texts]
    if not isinstance(texts, Iterable):
        raise PromptError(f"texts is a {type(texts).__name__}; give a string or a list of strings")
    return list(texts)
