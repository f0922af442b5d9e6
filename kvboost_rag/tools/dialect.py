"""How one model is told of tools, and how its answers are read: between an integration's messages and the engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from secrets import token_hex
from typing import Any, Literal, TypeAlias

from ..errors import ConfigError, PromptError
from .calls import ReplyReader
from .constraint import constraint_for
from .formats import JSON, ToolFormat, detect, of_name
from .grammar import (
    Grammar,
    any_json_grammar,
    calls_or_json_grammar,
    forced_calls_grammar,
    json_grammar,
    text_or_calls_grammar,
)
from .prompting import fallback, fit_roles, tool_text
from .schemas import canonical_tools

Message: TypeAlias = dict[str, Any]
Choice: TypeAlias = Literal["auto", "none", "any"] | tuple[str, ...]  # names: one of these must be called

_NONE: Choice = "none"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request, in the engine's terms.

    Attributes:
        messages: the conversation as the chat template takes it.
        tools: descriptions for the template; None where they stand in the messages or there are none.
        logits_processors: what the answer may look like.
        skip_special_tokens: False where the family marks calls with special tokens.
        constrained: whether the grammar alone ends the answer, so that stop strings must not cut it.
        reader: makes a fresh reader of the answer; None if the answer is text.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    logits_processors: tuple[Callable[..., Any], ...] = ()
    skip_special_tokens: bool = True
    constrained: bool = False
    reader: Callable[[], ReplyReader] | None = None


class Dialect:
    """The way one model speaks of tools. May be used by many threads.

    Args:
        model: a Hugging Face model; its generation config says what ends an answer.
        tokenizer: its tokenizer; the chat template decides how tools are rendered and calls are written.
        format: name of a format, or one of your own; None takes the template's, or JSON if it has no tools branch.

    Raises:
        ConfigError: no format has that name.
    """

    def __init__(self, model: Any, tokenizer: Any, format: str | ToolFormat | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = getattr(tokenizer, "chat_template", None)
        found = detect(self._template)
        self.native = found is not None
        chosen = of_name(format) if isinstance(format, str) else format
        self.format: ToolFormat = chosen or found or JSON
        self._model = model

    def turn(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        choice: Choice = "auto",
        parallel: bool = False,
        schema: Mapping[str, Any] | Literal["any"] | None = None,
        strict: bool = True,
        max_tokens: int,
    ) -> Turn:
        """What to ask of the engine.

        Args:
            messages: the conversation; tool calls of the assistant in OpenAI's form, with arguments as a dict.
            tools: descriptions in OpenAI's form.
            choice: "auto" leaves it to the model, "none" shows it no tools, "any" forces a call, names force a call of
                one of these.
            parallel: whether a forced answer may hold several calls.
            schema: JSON schema that the answer (where it is no call) must fit; "any" for any JSON object.
            strict: whether calls that the model makes of its own will must fit their tools' schemas too, where the
                format marks them.
            max_tokens: of the answer; a forced answer is complete within it.

        Raises:
            PromptError: a tool or message that cannot be rendered.
            ConfigError: no such tool, or a schema that cannot be enforced.
        """
        shown = canonical_tools(tools) if choice != _NONE else []
        named = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools} if shown else {}
        forced = _forced(choice, named)
        told = list(messages) if schema is None or schema == "any" else _told(messages, schema)
        rendered, native = self._rendered(told, shown)
        grammar = self._grammar(named, forced, parallel, schema, strict)
        processors = () if grammar is None else (self._processor(grammar, max_tokens),)
        markers = bool(shown) and not set(self.format.special).isdisjoint(self._special())
        names = tuple(named)
        return Turn(
            messages=rendered,
            tools=shown if native and shown else None,
            logits_processors=processors,
            skip_special_tokens=not markers,
            constrained=grammar is not None and not grammar.free,
            reader=(lambda: ReplyReader(self.format, names)) if shown else None,
        )

    def tool_texts(self, tools: Sequence[Mapping[str, Any]], messages: Sequence[Message] = ()) -> list[str]:
        """The run of text that each tool is in a prompt, whatever stands around it.

        Raises:
            PromptError: the template does not render tools one behind the other.
        """
        shown = canonical_tools(tools)
        if not self.native:
            return [f"{tool_text(tool)}\n" for tool in shown]
        base = list(messages) or [{"role": "user", "content": "?"}]
        mark = f"kv{token_hex(8)}"
        last = {"type": "function", "function": {"name": mark, "description": "", "parameters": {}}}
        whole, alone = self._render(base, [*shown, last]), self._render(base, [last])
        # A prompt with the first i tools agrees with one that has more up to where the next one begins.
        ends = [_shared(self._render(base, shown[:i]), whole) for i in range(1, len(shown) + 1)]
        start = alone.find(mark) - (whole.find(mark) - ends[-1]) if ends else 0
        texts = [whole[a:b] for a, b in pairwise([start, *ends])]
        if mark not in alone or any(t["function"]["name"] not in text for t, text in zip(shown, texts, strict=True)):
            raise PromptError(
                "the chat template does not render tools one behind the other, so they cannot be warmed one by one; "
                "warm a whole prompt that holds them"
            )
        return texts

    def tool_prefix(self, tools: Sequence[Mapping[str, Any]], system: str) -> tuple[str, str]:
        """Start of every prompt with a system message and tools: the text in front of the tools, and the tools' text.

        Raises:
            PromptError: see `tool_texts`.
        """
        messages: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": "?"}]
        text = "".join(self.tool_texts(tools, messages))
        shown = canonical_tools(tools)
        rendered, native = self._rendered(messages, shown)
        whole = self._render(rendered, shown if native else None)
        before, found, _ = whole.partition(text)
        if not found:
            raise PromptError("the chat template renders tools in another way beside this system prompt")
        return before, text

    def _grammar(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        forced: Sequence[str],
        parallel: bool,
        schema: Mapping[str, Any] | Literal["any"] | None,
        strict: bool,
    ) -> Grammar | None:
        """What the answer may be; None if it may be anything."""
        if forced:
            return forced_calls_grammar([(name, tools[name]) for name in forced], self.format, parallel)
        if schema is not None:
            fits = {"type": "object"} if schema == "any" else schema
            if tools:
                return calls_or_json_grammar(list(tools.items()), self.format, fits, parallel=parallel)
            return any_json_grammar() if schema == "any" else json_grammar(fits)
        return text_or_calls_grammar(list(tools.items()), self.format) if tools and strict else None

    def _processor(self, grammar: Grammar, max_tokens: int) -> Callable[..., Any]:
        own = self._model.generation_config.eos_token_id
        ends = own if isinstance(own, (list, tuple)) else [own]
        eos = [token for token in (*ends, self._tokenizer.eos_token_id) if token is not None]
        return constraint_for(self._tokenizer, eos, self._model.config.vocab_size).processor(grammar, max_tokens)

    def _special(self) -> set[str]:
        return set(self._tokenizer.all_special_tokens) | {
            str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special
        }

    def _rendered(self, messages: list[Message], tools: list[dict[str, Any]]) -> tuple[list[Message], bool]:
        """Messages that the template accepts, and whether it shows the tools itself."""
        calls = any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
        if not self.native and (tools or calls):
            messages = fallback(messages, tools, self.format)
        if self._template:
            shown = tools if self.native and tools else None
            messages = fit_roles(messages, lambda fitted: self._render(fitted, shown))
        return messages, self.native

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tools=tools and list(tools), add_generation_prompt=True, tokenize=False
            )
        except Exception as error:
            raise PromptError(f"the chat template refuses the messages: {error}") from error
        return text


def _forced(choice: Choice, tools: Mapping[str, Any]) -> tuple[str, ...]:
    """Tools of which one must be called."""
    if choice == "any" and not tools:
        raise ConfigError("a tool call is demanded, but there are no tools; give tools, or do not demand one")
    if choice == "any":
        return tuple(tools)
    if isinstance(choice, str):
        return ()
    if strangers := [name for name in choice if name not in tools]:
        raise ConfigError(f"no tool is named {strangers[0]!r}; there are {', '.join(map(repr, tools)) or 'none'}")
    return choice


def _told(messages: Sequence[Message], schema: Mapping[str, Any]) -> list[Message]:
    """The conversation with the schema of the answer at the end of the system message."""
    wish = f"Answer with a JSON object that fits this JSON schema:\n{json.dumps(schema, ensure_ascii=False)}"
    made = [dict(message) for message in messages]
    if made and made[0].get("role") in ("system", "developer"):
        made[0]["content"] = f"{made[0]['content']}\n\n{wish}"
        return made
    return [{"role": "system", "content": wish}, *made]


def _shared(one: str, other: str) -> int:
    """Characters of the longest common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
