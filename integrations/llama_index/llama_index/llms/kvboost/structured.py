"""Objects of a class: every form asks for JSON that fits its schema, and decoding is constrained to that."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing, closing
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events.llm import LLMStructuredPredictEndEvent, LLMStructuredPredictStartEvent
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.program.utils import create_flexible_model
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import Model, PydanticProgramMode
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from kvboost_rag import Engine
from kvboost_rag.frameworks import off_loop

_BY_SCHEMA = (PydanticProgramMode.DEFAULT, PydanticProgramMode.FUNCTION)
# LlamaIndex's programs set these themselves: there is one class, and an object of it must come.
_DECIDED = frozenset({"tool_required", "tool_choice", "allow_parallel_tool_calls"})
_dispatcher = get_dispatcher(__name__)


class StructuredPredictor(FunctionCallingLLM):
    """LlamaIndex's `structured_predict` and its kin, by a schema.

    LlamaIndex's own program makes a tool of the class. That loses the fields of a class that refers to itself and the
    name of a generic one, forgets the system prompt in its async form, demands no call when it streams, and shows an
    object only when its call is complete.
    """

    def get_engine(self) -> Engine:
        """The engine, loading the model if this is the first use."""
        raise NotImplementedError

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """An object of a class; see LlamaIndex's `structured_predict`."""
        if not self._by_schema:
            found: Model = super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return found
        _begin(output_cls, prompt, prompt_args)
        messages, call = self._asking(output_cls, prompt, llm_kwargs, prompt_args)
        return _ended(output_cls, self.chat(messages, **call))

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """`structured_predict` off the event loop."""
        await off_loop(self.get_engine)  # the metadata is asked for on the event loop
        if not self._by_schema:
            found: Model = await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return found
        _begin(output_cls, prompt, prompt_args)
        messages, call = self._asking(output_cls, prompt, llm_kwargs, prompt_args)
        return _ended(output_cls, await self.achat(messages, **call))

    def _structured_stream_call(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        if not self._by_schema:
            yield from super()._structured_stream_call(output_cls, prompt, llm_kwargs, **prompt_args)
            return
        messages, call = self._asking(output_cls, prompt, llm_kwargs, prompt_args)
        objects = PartialObjects(output_cls)
        with closing(self.stream_chat(messages, **call)) as pieces:
            for piece in pieces:
                yield objects.of(piece)

    async def _structured_astream_call(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        await off_loop(self.get_engine)
        if not self._by_schema:
            return await super()._structured_astream_call(output_cls, prompt, llm_kwargs, **prompt_args)
        messages, call = self._asking(output_cls, prompt, llm_kwargs, prompt_args)
        pieces = await self.astream_chat(messages, **call)
        objects = PartialObjects(output_cls)

        async def read() -> AsyncGenerator[Any, None]:
            async with aclosing(pieces):
                async for piece in pieces:
                    yield objects.of(piece)

        return read()

    @property
    def _by_schema(self) -> bool:
        return self.pydantic_program_mode in _BY_SCHEMA and self.metadata.is_function_calling_model

    def _asking(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: Mapping[str, Any] | None,
        prompt_args: Mapping[str, Any],
    ) -> tuple[list[ChatMessage], dict[str, Any]]:
        """Messages, the system prompt first, and arguments of `chat`."""
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
        call = {name: value for name, value in (llm_kwargs or {}).items() if name not in _DECIDED}
        return messages, {**call, "response_format": output_cls}


class PartialObjects:
    """Objects of a class, as complete as the JSON that was streamed so far."""

    def __init__(self, output_cls: type[BaseModel]) -> None:
        self._class = output_cls
        self._partial = create_flexible_model(output_cls)

    def of(self, response: ChatResponse) -> Any:
        """The object so far: one of the class where it is valid, and else one whose missing fields are None.

        Raises:
            ValueError: the answer is complete, and the class does not accept it.
        """
        text = response.message.content or ""
        if response.raw is not None:  # the last piece
            return self._class.model_validate_json(text)
        # LlamaIndex's own reading closes quotes and braces but no lists, and prefers an older object with defaults.
        found = from_json(text or "{}", allow_partial="trailing-strings")
        try:
            return self._class.model_validate(found)
        except ValidationError:
            return self._partial.model_validate(found if isinstance(found, dict) else {})


def _begin(output_cls: type[BaseModel], prompt: PromptTemplate, prompt_args: dict[str, Any]) -> None:
    _dispatcher.event(LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args))


def _ended(output_cls: type[Model], answer: ChatResponse) -> Model:
    """The object that an answer holds.

    Raises:
        ValueError: the class does not accept it.
    """
    found: Model = output_cls.model_validate_json(answer.message.content or "")
    _dispatcher.event(LLMStructuredPredictEndEvent(output=found))
    return found
