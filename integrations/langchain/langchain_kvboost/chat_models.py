"""A LangChain chat model that answers with an engine, and so reuses the KV of documents wherever they stand."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Annotated, Any, Literal, TypeAlias, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import run_in_executor
from pydantic import ConfigDict, Field, SkipValidation, model_validator

from kvboost_rag import ConfigError, Delta, Engine, EngineConfig, Generation, SamplingParams

from .engines import shared_engine
from .messages import response_metadata, to_prompt, usage_metadata

Reuse: TypeAlias = Literal["off", "exact", "approximate"]

SAMPLING_FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "seed")
CALL_FIELDS = frozenset((*SAMPLING_FIELDS, "namespace", "reuse"))


class ChatKVBoost(BaseChatModel):
    """Chat with a local Hugging Face model; retrieved documents that were read before are not read again.

    Example:
        >>> llm = ChatKVBoost(model="HuggingFaceTB/SmolLM2-135M-Instruct", max_tokens=64)
        >>> llm.invoke("Why is the sky blue?").content

    `input_tokens` of the usage counts reused tokens too; `cache_read` says how many were reused. The response metadata
    holds the rest: exact, approximate, repaired and computed tokens, `ttft_s`, `finish_reason`, `fallback_reason`.

    Each sampling field, `namespace` and `reuse` may also be given per call (or with `bind`); other keywords raise.
    """

    engine: Annotated[Engine | None, SkipValidation] = Field(default=None, exclude=True, repr=False)
    """An engine to use. Give this or `model`."""
    model: str | None = None
    """Hugging Face id or folder. Loaded at the first call; one engine per model and configuration and process."""
    engine_config: EngineConfig | None = None
    """Configuration of the engine of `model`."""
    temperature: float = 0.0
    """0 is greedy."""
    max_tokens: int = 256
    """Most tokens of an answer."""
    top_p: float | None = None
    """None: what the model's own generation config says."""
    top_k: int | None = None
    """None: what the model's own generation config says."""
    seed: int | None = None
    """Makes sampling repeatable."""
    stop: list[str] | None = None
    """Strings that end every answer; stops given per call are added."""
    streaming: bool = False
    """Whether `invoke` streams inside, so that callbacks see every piece."""
    namespace: str | None = None
    """Tenant whose documents may be reused; None is the engine's default."""
    reuse: Reuse | None = None
    """What may be reused, no wider than the engine was made for; None is the engine's mode."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    @model_validator(mode="after")
    def _check_arguments(self) -> ChatKVBoost:
        if (self.engine is None) == (self.model is None):
            raise ConfigError("ChatKVBoost needs either engine= or model=, and not both")
        if self.engine is not None and self.engine_config is not None:
            raise ConfigError("engine_config= has no effect on an engine that exists; configure the engine itself")
        self._sampling(None, {})  # a bad value raises here and not at the first question
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> ChatKVBoost:
        memo = {} if memo is None else memo
        memo[id(self.engine)] = self.engine  # a copy asks the same engine
        return super().__deepcopy__(memo)

    @property
    def _llm_type(self) -> str:
        return "kvboost-chat"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Everything that changes an answer: LangChain's response cache keys on this."""
        config = self.engine.config if self.engine is not None else self.engine_config or EngineConfig()
        return {
            "model": self._model_name(),
            "fingerprint": None
            if self.engine is None
            else self.engine.fingerprint,  # names do not tell all models apart
            "engine_config": repr(config),
            "stop_sequences": self.stop,
            "namespace": self.namespace,
            "reuse": self.reuse,
            **{name: getattr(self, name) for name in SAMPLING_FIELDS},
        }

    def get_engine(self) -> Engine:
        """The engine, loading the model if this is the first use."""
        return self.engine if self.engine is not None else shared_engine(str(self.model), self.engine_config)

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        ids: list[int] = self.get_engine().tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of a conversation as it will run, the chat template's own included."""
        if tools:
            raise ConfigError("tools cannot be counted: this chat model does not take tools yet")
        return len(self.get_engine().tokenize(to_prompt(messages)))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        arguments = self._arguments(stop, kwargs)
        engine = self.get_engine()
        return self._result(engine, engine.generate(to_prompt(messages), **arguments), arguments["reuse"])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        arguments = self._arguments(stop, kwargs)
        engine = await run_in_executor(None, self.get_engine)  # loading would block the event loop
        return self._result(engine, await engine.agenerate(to_prompt(messages), **arguments), arguments["reuse"])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        arguments = self._arguments(stop, kwargs)
        engine = self.get_engine()
        # Closing stops the computation when the consumer stops reading.
        with closing(cast("Generator[Delta]", engine.stream(to_prompt(messages), **arguments))) as deltas:
            for delta in deltas:
                if delta.text or delta.generation:
                    piece = self._piece(engine, delta, arguments["reuse"])
                    if run_manager:
                        run_manager.on_llm_new_token(delta.text, chunk=piece)
                    yield piece

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        arguments = self._arguments(stop, kwargs)
        engine = await run_in_executor(None, self.get_engine)
        async with aclosing(cast("AsyncGenerator[Delta]", engine.astream(to_prompt(messages), **arguments))) as deltas:
            async for delta in deltas:
                if delta.text or delta.generation:
                    piece = self._piece(engine, delta, arguments["reuse"])
                    if run_manager:
                        await run_manager.on_llm_new_token(delta.text, chunk=piece)
                    yield piece

    def _arguments(self, stop: list[str] | None, call: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the engine for one call: instance values, overridden by the call's."""
        unknown = sorted(call.keys() - CALL_FIELDS - {"stream"})  # `stream` only steers LangChain itself
        if unknown:
            raise ConfigError(f"unknown arguments {unknown}; a call takes stop, {', '.join(sorted(CALL_FIELDS))}")
        return {
            "sampling": self._sampling(stop, call),
            "namespace": call.get("namespace", self.namespace),
            "reuse": call.get("reuse", self.reuse),
        }

    def _sampling(self, stop: list[str] | None, call: Mapping[str, Any]) -> SamplingParams:
        stops = dict.fromkeys([*_as_list(self.stop), *_as_list(stop)])
        values = {name: call.get(name, getattr(self, name)) for name in SAMPLING_FIELDS}
        return SamplingParams(stop=tuple(stops), **values)

    def _model_name(self) -> str:
        return str(self.model if self.engine is None else self.engine.model.name_or_path)

    def _extras(self, engine: Engine, generation: Generation, reuse: Reuse | None) -> dict[str, Any]:
        """What a finished answer reports; on the last streamed piece only, since floats cannot be merged."""
        stores = engine.config.store_prompts and (reuse or engine.config.reuse) != "off"
        return {
            "usage_metadata": usage_metadata(generation, stores_prompts=stores),
            "response_metadata": response_metadata(generation, self._model_name()),
        }

    def _result(self, engine: Engine, generation: Generation, reuse: Reuse | None) -> ChatResult:
        message = AIMessage(content=generation.text, **self._extras(engine, generation, reuse))
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _piece(self, engine: Engine, delta: Delta, reuse: Reuse | None) -> ChatGenerationChunk:
        if delta.generation is None:
            return ChatGenerationChunk(message=AIMessageChunk(content=delta.text))
        extras = self._extras(engine, delta.generation, reuse)
        return ChatGenerationChunk(message=AIMessageChunk(content=delta.text, chunk_position="last", **extras))


def _as_list(stop: str | Sequence[str] | None) -> list[str]:
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else list(stop)
