"""How one model is told of tools, and how its answers are read: between an integration's messages and the engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from secrets import token_hex
from typing import Any, Literal, TypeAlias

from ..errors import ConfigError, ContextOverflowError, PromptError
from .calls import Reply, ReplyReader
from .choices import Choice
from .constraint import Constraint, constraint_for
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
from .strict import check_size

Message: TypeAlias = dict[str, Any]

_NONE: Choice = "none"
_THINKING = "<think>"  # some templates open it for the model


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
        hurried: whether the answer ended sooner than the model would have ended it, for want of tokens.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    logits_processors: tuple[Callable[..., Any], ...] = ()
    skip_special_tokens: bool = True
    constrained: bool = False
    reader: Callable[[], ReplyReader | AnswerReader] | None = None

    @property
    def hurried(self) -> bool:
        """See the class. Known when the answer is finished."""
        return any(getattr(processor, "hurried", False) for processor in self.logits_processors)


class AnswerReader:
    """Reads an answer that is either calls or JSON, as a grammar of both makes it; JSON may look like a bare call.

    Args:
        format: how calls are written.
        names: of the tools.
    """

    def __init__(self, format: ToolFormat, names: Sequence[str]) -> None:
        keys = [f'{{"{format.name_key}":{json.dumps(name)},"{format.arguments_key}":' for name in names]
        self._openings = tuple(_compact(format.begin + format.call_begin) + key for key in keys)
        self._calls, self._answer = ReplyReader(format, names), ReplyReader(format, ())
        self._chosen: ReplyReader | None = None
        self._held = ""

    def push(self, delta: str) -> str:
        """See `ReplyReader.push`."""
        if self._chosen is not None:
            return self._chosen.push(delta)
        self._held += delta
        begun = _compact(self._held)
        if any(begun.startswith(opening) for opening in self._openings):
            self._chosen = self._calls
        elif not any(opening.startswith(begun) for opening in self._openings):
            self._chosen = self._answer
        return "" if self._chosen is None else self._chosen.push(self._held)

    def finish(self) -> Reply:
        """See `ReplyReader.finish`."""
        if self._chosen is None:  # an answer that was cut
            self._chosen = self._calls
            shown = self._chosen.push(self._held)
            reply = self._chosen.finish()
            return replace(reply, rest=shown + reply.rest)
        return self._chosen.finish()


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
        parallel: bool | None = None,
        schema: Mapping[str, Any] | Literal["any"] | None = None,
        strict: bool = True,
        max_tokens: int,
        window_tokens: int | None = None,
    ) -> Turn:
        """What to ask of the engine.

        Args:
            messages: the conversation; tool calls of the assistant in OpenAI's form, with arguments as a dict.
            tools: descriptions in OpenAI's form.
            choice: "auto" leaves it to the model, "none" shows it no tools, "any" forces a call, names force a call of
                one of these.
            parallel: whether an answer may hold several calls. None: a forced one holds one, and calls that the model
                makes of its own will may be several. What is not constrained may always hold several.
            schema: JSON schema that the answer (where it is no call) must fit; "any" for any JSON object.
            strict: whether calls that the model makes of its own will must fit their tools' schemas too, where the
                format marks them.
            max_tokens: of the answer; a forced answer is complete within it.
            window_tokens: of prompt and answer together; a forced answer is complete within this, too. Where not even
                the shortest fits, generating raises `ContextOverflowError`.

        Raises:
            PromptError: a tool or message that cannot be rendered.
            ConfigError: no such tool, or a schema that cannot be enforced.
        """
        if schema is not None and schema != "any":
            check_size(schema, "the schema")
        shown = canonical_tools(tools) if choice != _NONE else []
        named = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools} if shown else {}
        forced = _forced(choice, named)
        told = list(messages) if schema is None or schema == "any" else _told(messages, schema)
        rendered, text = self._rendered(told, shown)
        grammar = self._grammar(named, forced, parallel, schema, strict)
        processors = () if grammar is None else (_Processor(self._constraint(), grammar, max_tokens, window_tokens),)
        markers = bool(shown) and not set(self.format.special).isdisjoint(self._special())
        names, thinking = tuple(named), text.rstrip().endswith(_THINKING)
        either = bool(shown) and schema is not None and not forced
        return Turn(
            messages=rendered,
            tools=shown if self.native and shown else None,
            logits_processors=processors,
            skip_special_tokens=not markers,
            constrained=grammar is not None and not grammar.free,
            reader=_reader(self.format, names, thinking=thinking, either=either) if shown else None,
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
        _, whole = self._rendered(messages, shown)
        before, found, _ = whole.partition(text)
        if not found:
            raise PromptError("the chat template renders tools in another way beside this system prompt")
        return before, text

    def _grammar(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        forced: Sequence[str],
        parallel: bool | None,
        schema: Mapping[str, Any] | Literal["any"] | None,
        strict: bool,
    ) -> Grammar | None:
        """What the answer may be; None if it may be anything."""
        if forced:
            return forced_calls_grammar([(name, tools[name]) for name in forced], self.format, bool(parallel))
        if schema is not None:
            fits = {"type": "object"} if schema == "any" else schema
            if tools:
                return calls_or_json_grammar(list(tools.items()), self.format, fits, parallel=bool(parallel))
            return any_json_grammar() if schema == "any" else json_grammar(fits)
        if not tools or not strict:
            return None
        return text_or_calls_grammar(list(tools.items()), self.format, parallel=parallel is not False)

    def _constraint(self) -> Constraint:
        own = self._model.generation_config.eos_token_id
        ends = own if isinstance(own, (list, tuple)) else [own]
        eos = [token for token in (*ends, self._tokenizer.eos_token_id) if token is not None]
        return constraint_for(self._tokenizer, eos, self._model.config.vocab_size)

    def _special(self) -> set[str]:
        return set(self._tokenizer.all_special_tokens) | {
            str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special
        }

    def _rendered(self, messages: list[Message], tools: list[dict[str, Any]]) -> tuple[list[Message], str]:
        """Messages that the template accepts, and the text it makes of them; empty if there is no template."""
        calls = any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
        if not self.native and (tools or calls):
            messages = fallback(messages, tools, self.format)
        if not self._template:
            return messages, ""
        shown = tools if self.native and tools else None
        texts: list[str] = []
        messages = fit_roles(messages, lambda fitted: texts.append(self._render(fitted, shown)))
        return messages, texts[-1]

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tools=tools and list(tools), add_generation_prompt=True, tokenize=False
            )
        except Exception as error:
            raise PromptError(f"the chat template refuses the messages: {error}") from error
        return text


class _Processor:
    """Keeps one answer to a grammar, within its tokens and within what the window has left behind its prompt.

    Args:
        constraint: of the tokenizer.
        grammar: what the answer may be.
        max_tokens: of the answer.
        window_tokens: of prompt and answer.

    Raises:
        ConfigError: no answer of the grammar fits ``max_tokens``.
    """

    def __init__(self, constraint: Constraint, grammar: Grammar, max_tokens: int, window_tokens: int | None) -> None:
        self._constraint, self._grammar = constraint, grammar
        self._max_tokens, self._window_tokens = max_tokens, window_tokens
        self._begun = False
        self._follow = constraint.processor(grammar, max_tokens)

    @property
    def hurried(self) -> bool:
        """See `ConstraintProcessor`."""
        return self._follow.hurried

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """See `ConstraintProcessor`.

        Raises:
            ContextOverflowError: no answer of the grammar fits behind the prompt.
        """
        if not self._begun:
            self._begun = True
            self._begin(input_ids.shape[1])
        return self._follow(input_ids, scores)

    def _begin(self, prompt_tokens: int) -> None:
        window = self._window_tokens
        if window is None or (room := window - prompt_tokens + 1) >= self._max_tokens:  # the last token need not run
            return
        try:
            self._follow = self._constraint.processor(self._grammar, room)
        except ConfigError as error:
            raise ContextOverflowError(
                prompt_tokens,
                window,
                extra=f", and the shortest answer that fits the schema needs more than the {room} that are left",
            ) from error


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


def _reader(
    format: ToolFormat, names: Sequence[str], *, thinking: bool, either: bool
) -> Callable[[], ReplyReader | AnswerReader]:
    if either:
        return lambda: AnswerReader(format, names)
    return lambda: ReplyReader(format, names, thinking=thinking)


def _compact(text: str) -> str:
    return "".join(text.split())


def _shared(one: str, other: str) -> int:
    """Characters of the longest common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
