"""A LangChain text model, for chains that expect text in and text out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, closing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM
from langchain_core.language_models.base import LangSmithParams
from langchain_core.outputs import Generation as TextGeneration
from langchain_core.outputs import GenerationChunk, LLMResult

from kvboost_rag import Generation
from kvboost_rag.frameworks import Asked, all_of, ask_text, at_once, off_loop

from .errors import translated
from .messages import response_metadata, usage_metadata
from .options import CALL_FIELDS, STRICT, LangChainOptions


class KVBoostLLM(LangChainOptions, BaseLLM):
    """Complete text with a local Hugging Face model; documents that were read before are not read again.

    The prompt runs as it stands, without a chat template: special tokens in it are honoured, and whoever writes the
    prompt vouches for the documents in it. For an instruction-tuned model, and for documents of others, prefer
    `ChatKVBoost`.

    Example:
        >>> llm = KVBoostLLM(model="HuggingFaceTB/SmolLM2-135M", max_tokens=32)
        >>> llm.invoke("The capital of France is")

    Usage and reuse of each answer are in its `generation_info`.
    """

    model_config = STRICT

    @property
    def _llm_type(self) -> str:
        return "kvboost"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return self._identity()

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        stops = self._sampling(stop, {}).stop
        params = super()._get_ls_params(stop=list(stops) or None, **kwargs)
        params.setdefault("ls_model_name", self.name_of_model())
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        ids: list[int] = self.get_engine().tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """See `BaseLLM.generate`."""
        asked, further = self._asked(kwargs)
        return BaseLLM.generate(asked, prompts, *args, **further)

    async def agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """See `BaseLLM.agenerate`."""
        asked, further = self._asked(kwargs)
        return await BaseLLM.agenerate(asked, prompts, *args, **further)

    def _asked(self, call: Mapping[str, Any]) -> tuple[KVBoostLLM, dict[str, Any]]:
        """This model with what a call asks for as its own fields, and what remains of the call.

        LangChain's response cache keys on the fields of a text model and not on the call: one tenant would be given
        what another one was answered.
        """
        own = {name: call[name] for name in CALL_FIELDS & call.keys()}
        return (self.model_copy(update=own) if own else self), {k: v for k, v in call.items() if k not in own}

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        if self.streaming:
            pieces = [list(self._stream(prompt, stop, run_manager, **kwargs)) for prompt in prompts]
            return self._llm_result([_joined(answer) for answer in pieces])
        with translated():
            asked = [ask_text(self, prompt, stop=stop, call=kwargs) for prompt in prompts]
            threads = self.get_engine().config.max_num_seqs
            answers = at_once([one.generate for one in asked], threads)
        return self._llm_result([self._text(answer) for answer in answers])

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        if self.streaming:
            streams = [self._astream(prompt, stop, run_manager, **kwargs) for prompt in prompts]
            return self._llm_result([_joined([piece async for piece in stream]) for stream in streams])
        with translated():
            asked = [await self._asked_async(prompt, stop, kwargs) for prompt in prompts]
            answers = await all_of([one.agenerate() for one in asked])
        return self._llm_result([self._text(answer) for answer in answers])

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with translated(), closing(ask_text(self, prompt, stop=stop, call=kwargs).stream()) as deltas:
            for delta in deltas:
                if delta.text or delta.generation:
                    piece = GenerationChunk(text=delta.text, generation_info=self._info(delta.generation))
                    if run_manager:
                        run_manager.on_llm_new_token(piece.text, chunk=piece)
                    yield piece

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        with translated():
            asked = await self._asked_async(prompt, stop, kwargs)
            async with aclosing(asked.astream()) as deltas:
                async for delta in deltas:
                    if delta.text or delta.generation:
                        piece = GenerationChunk(text=delta.text, generation_info=self._info(delta.generation))
                        if run_manager:
                            await run_manager.on_llm_new_token(piece.text, chunk=piece)
                        yield piece

    async def _asked_async(self, prompt: str, stop: list[str] | None, call: Mapping[str, Any]) -> Asked:
        # Loading would block the event loop.
        return await off_loop(lambda: ask_text(self, prompt, stop=stop, call=call))

    def _info(self, generation: Generation | None) -> dict[str, Any] | None:
        if generation is None:
            return None
        metadata = response_metadata(generation, self.name_of_model())
        return {**metadata, "usage_metadata": usage_metadata(generation)}

    def _text(self, answer: Generation) -> TextGeneration:
        return TextGeneration(text=answer.text, generation_info=self._info(answer))

    def _llm_result(self, answers: list[TextGeneration]) -> LLMResult:
        totals = [(answer.generation_info or {})["usage_metadata"] for answer in answers]
        usage = {
            "prompt_tokens": sum(total["input_tokens"] for total in totals),
            "completion_tokens": sum(total["output_tokens"] for total in totals),
            "total_tokens": sum(total["total_tokens"] for total in totals),
        }
        return LLMResult(
            generations=[[answer] for answer in answers],
            llm_output={"token_usage": usage, "model_name": self.name_of_model()},
        )


def _joined(pieces: list[GenerationChunk]) -> TextGeneration:
    return TextGeneration(text="".join(piece.text for piece in pieces), generation_info=pieces[-1].generation_info)
