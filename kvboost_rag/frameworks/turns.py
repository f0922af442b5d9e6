"""One turn: what a framework asks in its words becomes a request of the engine, and the answer a reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..engine import Engine
from ..errors import ConfigError
from ..stats import Delta, Generation, WarmReport
from ..streaming import Deltas
from ..tools import AnswerReader, Choice, Dialect, Reply, ReplyReader, Turn
from .options import EngineOptions


@dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    Attributes:
        engine: where it goes.
        prompt: text, or messages that the chat template accepts.
        options: of the engine's methods.
        model_name: for reports.
        turn: how to read the answer; None if it is text.
    """

    engine: Engine
    prompt: str | list[dict[str, Any]]
    options: dict[str, Any]
    model_name: str
    turn: Turn | None = None

    @property
    def hurried(self) -> bool:
        """Whether the answer ended sooner than the model would have ended it, for want of tokens."""
        return self.turn is not None and self.turn.hurried

    def generate(self) -> Generation:
        """The answer."""
        return self.engine.generate(self.prompt, **self.options)

    async def agenerate(self) -> Generation:
        """The answer, off the event loop."""
        return await self.engine.agenerate(self.prompt, **self.options)

    def stream(self) -> Deltas:
        """Deltas of the answer; closing stops the computation."""
        return self.engine.stream(self.prompt, **self.options)

    def astream(self) -> AsyncGenerator[Delta, None]:
        """Deltas of the answer off the event loop; leaving the iterator stops the computation."""
        return self.engine.astream(self.prompt, **self.options)

    def reply(self, generation: Generation) -> Reply:
        """A whole answer, its calls told from its text."""
        reader = _reader(self)
        if reader is None:
            return Reply(generation.text)
        reader.push(generation.text)
        return reader.finish()


class ReplyPieces:
    """Text of a streamed answer as soon as it may be shown; calls wait until they are complete."""

    def __init__(self, asked: Asked) -> None:
        self._reader = _reader(asked)

    def push(self, text: str, generation: Generation | None) -> tuple[str, Reply | None]:
        """Take a delta.

        Returns:
            The text that may be shown now; and with the last delta, the whole reply.
        """
        if self._reader is not None:
            text = self._reader.push(text)
        if generation is None:
            return text, None
        if self._reader is None:
            return text, Reply(generation.text)
        reply = self._reader.finish()
        return text + reply.rest, reply


def ask(
    source: EngineOptions,
    messages: Sequence[dict[str, Any]],
    *,
    format: str | None = None,
    stop: str | Sequence[str] | None = None,
    call: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
    choice: Choice = "auto",
    parallel: bool | None = None,
    schema: Mapping[str, Any] | Literal["any"] | None = None,
    strict: bool | None = None,
) -> Asked:
    """Prepare a request. Loads the model if this is its first use, and renders: too much for an event loop.

    Args:
        source: the framework's object: engine, sampling, tenant.
        messages: the conversation in the engine's form.
        format: how calls are written; None takes the chat template's own way.
        stop: strings that end this answer, beside the source's own.
        call: what this call asks for instead of the source's values; see `CALL_FIELDS`.
        tools: descriptions in OpenAI's form; for these and the next three see `Dialect.turn`.
        choice: whether, and of which, a call is forced.
        parallel: whether an answer may hold several calls.
        schema: what an answer that is no call must fit.
        strict: True raises where voluntary calls cannot be constrained, False does not constrain them.

    Raises:
        ConfigError: an unknown argument, tool or format, or a schema or strictness that cannot be enforced.
        PromptError: what cannot be rendered.
    """
    source.request_options(stop, call)  # unknown arguments raise before anything is prepared
    engine = source.get_engine()
    dialect = Dialect(engine.model, engine.tokenizer, format)
    turn = dialect.turn(
        messages,
        tools=tools,
        choice=choice,
        parallel=parallel,
        schema=schema,
        strict=strict is not False,
        max_tokens=call.get("max_tokens", source.max_tokens),
        window_tokens=engine.window_tokens,
    )
    if strict and tools and choice != "none" and not turn.logits_processors:
        raise ConfigError(
            f"strict is True, but calls in the tool format {dialect.format.name!r} have no marker, so that "
            "voluntary ones cannot be constrained; leave strict out, or force a call with tool_choice='any'"
        )
    further: dict[str, Any] = {
        "logits_processors": turn.logits_processors,
        "skip_special_tokens": turn.skip_special_tokens,
    }
    if turn.constrained:
        # The grammar ends the answer; a stop string would cut its JSON.
        further |= {"stop": (), "model_stops": False}
    options = {**source.request_options(stop, call, further), "tools": turn.tools}
    return Asked(engine, turn.messages, options, source.name_of_model(), turn)


def ask_text(source: EngineOptions, prompt: str, *, stop: str | Sequence[str] | None, call: Mapping[str, Any]) -> Asked:
    """Prepare a request whose prompt runs as it stands, without a chat template. Loads the model if need be.

    Raises:
        ConfigError: an unknown argument.
    """
    return Asked(source.get_engine(), prompt, source.request_options(stop, call), source.name_of_model())


def warm_tools(
    source: EngineOptions,
    tools: Sequence[Mapping[str, Any]],
    *,
    format: str | None,
    system: str | None,
    namespace: str | None,
) -> WarmReport:
    """Compute and keep the KV of tool descriptions, as this model's prompts show them.

    Args:
        source: the framework's object.
        tools: descriptions in OpenAI's form.
        format: how calls are written.
        system: the system prompt that agents will have; prompts with it and with these tools in this order are then
            exact hits. None: no system prompt is favoured.
        namespace: tenant that may use them; the source's own if None.

    Raises:
        ConfigError: without a system prompt, where only exact hits are used: there would be none.
        PromptError: the chat template does not render tools one behind the other.
    """
    engine = source.get_engine()
    dialect = Dialect(engine.model, engine.tokenizer, format)
    tenant = source.namespace if namespace is None else namespace
    if system is None:
        if "exact" in (source.reuse, engine.config.reuse):
            raise ConfigError("reuse is 'exact', which finds tools behind the same beginning only; give system=")
        return engine.warm(dialect.tool_texts(tools), namespace=tenant)
    before, text = dialect.tool_prefix(tools, system)
    return engine.warm([text], context=before, namespace=tenant)


def _reader(asked: Asked) -> ReplyReader | AnswerReader | None:
    if asked.turn is None or asked.turn.reader is None:
        return None
    return asked.turn.reader()
