"""A LangChain chat model that answers with an engine: what it read before is reused wherever it stands."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any, Literal, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list
from pydantic import BaseModel

from kvboost_rag import ConfigError, Delta, Generation, WarmReport
from kvboost_rag.frameworks import Asked, ReplyPieces, ask, off_loop, warm_tools
from kvboost_rag.tools import Dialect, check_flags, choice_of

from .errors import translated
from .messages import response_metadata, to_prompt, usage_metadata
from .options import STRICT, LangChainOptions
from .tools import (
    ToolLike,
    call_deltas,
    call_parser,
    calls_of,
    describe,
    json_parser,
    schema_of,
    schema_of_format,
    structured,
    titled,
    traced_schema,
)

Method = Literal["json_schema", "function_calling", "json_mode"]
_TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls", "strict", "response_format"})
_STEERING = frozenset({"stream", "ls_structured_output_format", "stream_usage"})  # no engine has to know


class ChatKVBoost(LangChainOptions, BaseChatModel):
    """Chat with a local Hugging Face model; documents and tools that were read before are not read again.

    Example:
        >>> llm = ChatKVBoost(model="HuggingFaceTB/SmolLM2-135M-Instruct", max_tokens=64)
        >>> llm.invoke("Why is the sky blue?").content

    `input_tokens` of the usage counts reused tokens too; `cache_read` says how many were reused, `cache_creation` how
    many were added to the store. The response metadata holds the rest: exact, approximate, repaired and computed
    tokens, `ttft_s`, `finish_reason`, `fallback_reason`.

    Each sampling field, `namespace`, `reuse` and `timeout` may also be given per call (or with `bind`), and so may
    `model`, which is loaded as this one was and then shared (with a map in `transfers` it takes over what this one has
    read); other keywords raise. A message's `name` is given to the chat template; most templates show it to nobody.
    """

    tool_format: str | None = None
    """How calls are written: "hermes", "llama3", "mistral" or "json"; None takes the chat template's own way."""
    stream_usage: bool = True
    """Whether the last streamed piece carries the usage; may be given per call."""

    model_config = STRICT

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """See `Runnable.batch`; without `max_concurrency`, as many at once as the engine decodes in one batch."""
        if not inputs:
            return []
        threads = self.get_engine().config.max_num_seqs
        configs = [
            RunnableConfig(**{**one, "max_concurrency": one.get("max_concurrency") or threads})
            for one in get_config_list(config, len(inputs))
        ]
        return super().batch(inputs, configs, **kwargs)

    @property
    def _llm_type(self) -> str:
        return "kvboost-chat"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {**self._identity(), "tool_format": self.tool_format}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        stops = self._sampling(stop, {}).stop
        params = super()._get_ls_params(stop=list(stops) or None, **kwargs)
        params["ls_provider"] = "kvboost"
        params.setdefault("ls_model_name", self.name_of_model())
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        profile = ModelProfile(
            text_inputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            text_outputs=True,
            tool_calling=True,
            tool_choice=True,
            tool_call_streaming=True,
            structured_output=True,
        )
        if self.engine is not None:  # a model that is not loaded yet is not loaded for this
            profile["max_input_tokens"] = self.engine.window_tokens
        return profile

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        ids: list[int] = self.get_engine().tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[ToolLike] | None = None) -> int:
        """Tokens of a conversation as it will run, tool descriptions and the chat template's own included."""
        engine = self.get_engine()
        turn = Dialect(engine.model, engine.tokenizer, self.tool_format).turn(
            to_prompt(messages), tools=describe(tools or ()), max_tokens=self.max_tokens
        )
        return len(engine.tokenize(turn.messages, tools=turn.tools))

    def bind_tools(
        self,
        tools: Sequence[ToolLike],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        response_format: Any = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let the model call tools.

        Args:
            tools: pydantic classes, functions, LangChain tools, runnables, or descriptions in OpenAI's form.
            tool_choice: "auto", "none", "any", or the name of a tool that must be called. A forced call is always
                valid, complete JSON that fits the tool's schema: decoding is constrained.
            parallel_tool_calls: whether an answer may hold several calls. By default a forced one holds one, and a
                model that calls of its own will may make several. False is enforced where `strict` can be, and
                elsewhere a wish only.
            strict: False lets the model write its voluntary calls unconstrained. Forced ones never are. True raises
                where the format ("llama3", "json") does not mark voluntary calls, so that nothing can be enforced.
            response_format: what an answer that is no call must be, as in `with_structured_output`.
            kwargs: see the class.
        """
        described = describe(tools)
        choice_of(tool_choice, described)  # raises here and not at the first question
        check_flags(strict=strict, parallel_tool_calls=parallel_tool_calls)
        given = {
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "strict": strict,
            "response_format": response_format if isinstance(response_format, Mapping) else _format_of(response_format),
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        return cast("Runnable[LanguageModelInput, AIMessage]", self.bind(tools=described, **chosen, **kwargs))

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """A model whose answers are objects of a schema.

        Args:
            schema: a pydantic class gives objects of it; a TypedDict, a JSON schema or a tool description gives dicts.
            method: "json_schema" constrains the answer to the schema and shows it to the model; "function_calling"
                forces a call of a tool with this schema; "json_mode" gives any JSON object, which the prompt describes.
            include_raw: also give the message and the parsing error.
            strict: accepted as in other chat models; decoding is always constrained.
            kwargs: see the class.
        """
        if method not in ("json_schema", "function_calling", "json_mode"):
            raise ConfigError(f"method is {method!r}; choose 'json_schema', 'function_calling' or 'json_mode'")
        if schema is None and method != "json_mode":
            raise ConfigError(f"schema is None; method={method!r} needs one, only 'json_mode' does without")
        schema = titled(schema)
        tracing: dict[str, Any] = {
            "ls_structured_output_format": {"kwargs": {"method": method}, "schema": traced_schema(schema)}
        }
        if method == "function_calling":
            caller = self.bind_tools([cast("ToolLike", schema)], tool_choice="any", **tracing, **kwargs)
            return structured(caller, call_parser(schema), include_raw=include_raw)
        wanted = {"type": "json_object"} if method == "json_mode" else _format_of(schema)
        answering = self.bind(response_format=wanted, **tracing, **kwargs)
        return structured(answering, json_parser(schema), include_raw=include_raw)

    def warm_tools(
        self, tools: Sequence[ToolLike], *, system: str | None = None, namespace: str | None = None
    ) -> WarmReport:
        """Compute and keep the KV of tool descriptions, as this model's prompts show them.

        Args:
            tools: as for `bind_tools`. Prompts may then show them in any order, with others, behind any system prompt.
            system: the system prompt that agents will have; prompts with it and with these tools in this order are then
                exact hits. None: no system prompt is favoured.
            namespace: tenant that may use them.

        Raises:
            ConfigError: without a system prompt, where only exact hits are used: there would be none.
            PromptError: the chat template does not render tools one behind the other.
        """
        with translated():
            return warm_tools(self, describe(tools), format=self.tool_format, system=system, namespace=namespace)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with translated():
            call = self._call(messages, stop, kwargs)
            generation = call.asked.generate()
        return self._result(call, generation)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with translated():
            call = await self._acall(messages, stop, kwargs)
            generation = await call.asked.agenerate()
        return self._result(call, generation)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with translated():
            call = self._call(messages, stop, kwargs)
            pieces = _Pieces(call)
            # Closing stops the computation when the consumer stops reading.
            with closing(call.asked.stream()) as deltas:
                for delta in deltas:
                    if piece := pieces.piece(delta):
                        if run_manager:
                            run_manager.on_llm_new_token(piece.text, chunk=piece)
                        yield piece

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with translated():
            call = await self._acall(messages, stop, kwargs)
            pieces = _Pieces(call)
            async with aclosing(call.asked.astream()) as deltas:
                async for delta in deltas:
                    if piece := pieces.piece(delta):
                        if run_manager:
                            await run_manager.on_llm_new_token(piece.text, chunk=piece)
                        yield piece

    async def _acall(self, messages: list[BaseMessage], stop: list[str] | None, call: Mapping[str, Any]) -> _Call:
        # Loading and rendering would block the event loop.
        return await off_loop(lambda: self._call(messages, stop, call))

    def _call(self, messages: list[BaseMessage], stop: list[str] | None, call: Mapping[str, Any]) -> _Call:
        usage = bool(call.get("stream_usage", self.stream_usage))
        call = {name: value for name, value in call.items() if name not in _STEERING}
        wish = {name: call.pop(name) for name in _TOOL_FIELDS & call.keys()}
        check_flags(**{name: wish.get(name) for name in ("strict", "parallel_tool_calls")})
        tools = describe(wish.get("tools") or ())
        asked = ask(
            self if (other := call.pop("model", None)) is None else self.on_model(other),
            to_prompt(messages),
            format=self.tool_format,
            stop=stop,
            call=call,
            tools=tools,
            choice=choice_of(wish.get("tool_choice"), tools),
            parallel=wish.get("parallel_tool_calls"),
            schema=schema_of_format(wish.get("response_format")),
            strict=wish.get("strict"),
        )
        return _Call(asked, usage)

    def _result(self, call: _Call, generation: Generation) -> ChatResult:
        reply = call.asked.reply(generation)
        calls, invalid = calls_of(reply)
        message = AIMessage(
            content=reply.text,
            tool_calls=calls,
            invalid_tool_calls=invalid,
            usage_metadata=usage_metadata(generation),
            response_metadata=response_metadata(
                generation,
                call.asked.model_name,
                calls=bool(calls),
                hurried=call.asked.hurried,
                errors=[bad["error"] for bad in invalid],
            ),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])


@dataclass(frozen=True, slots=True)
class _Call:
    """One request, and whether its stream ends with the usage."""

    asked: Asked
    stream_usage: bool


class _Pieces:
    """Makes LangChain's pieces of an answer's deltas; text streams, calls wait until they are complete."""

    def __init__(self, call: _Call) -> None:
        self._asked, self._usage = call.asked, call.stream_usage
        self._pieces = ReplyPieces(call.asked)

    def piece(self, delta: Delta) -> ChatGenerationChunk | None:
        """The next piece, or None if there is nothing to show yet."""
        generation = delta.generation
        text, reply = self._pieces.push(delta.text, generation)
        if generation is None or reply is None:
            return ChatGenerationChunk(message=AIMessageChunk(content=text)) if text else None
        # Usage and statistics are on the last piece only, since merging pieces would add them up.
        message = AIMessageChunk(
            content=text,
            tool_call_chunks=call_deltas(reply),
            chunk_position="last",
            usage_metadata=usage_metadata(generation) if self._usage else None,
            response_metadata=response_metadata(
                generation,
                self._asked.model_name,
                calls=bool(reply.calls),
                hurried=self._asked.hurried,
                errors=[bad.error for bad in reply.invalid],
            ),
        )
        for call, bad in zip(message.invalid_tool_calls, reply.invalid, strict=True):
            call["error"] = bad.error  # pieces have no place for it
        return ChatGenerationChunk(message=message)


def _format_of(schema: Any) -> dict[str, Any] | None:
    """OpenAI's response format of a schema: plain data, so the response cache tells two classes of one name apart."""
    return None if schema is None else {"type": "json_schema", "json_schema": {"schema": schema_of(schema)}}
