"""A LlamaIndex LLM that answers with an engine: what it read before is reused wherever it stands."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

from llama_index.core.base.llms.generic_utils import messages_to_prompt as default_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import (
    CompletionToPromptType,
    MessagesToPromptType,
    ToolSelection,
    default_completion_to_prompt,
)
from pydantic import AliasChoices, Field, model_validator

from kvboost_rag import ConfigError, Engine, WarmReport
from kvboost_rag.frameworks import STRICT, Asked, EngineOptions, ask, ask_text, checked, off_loop, warm_tools
from kvboost_rag.tools import check_flags, choice_of

from .messages import ChatPieces, TextPieces, to_chat_response, to_completion, to_prompt
from .streams import Opened, astreamed, streamed
from .structured import StructuredPredictor
from .tools import ToolLike, describe, schema_of_format, selections

_TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls", "response_format"})


# What users of HuggingFaceLLM have in the line that they exchange.
_ELSEWHERE = {
    "model_name": "give model=, an id or a folder",
    "tokenizer_name": "leave it out: the tokenizer is the model's",
    "tokenizer": "give engine=Engine(model, tokenizer)",
    "device_map": "give model_kwargs={'device': …}",
    "generate_kwargs": "give temperature=, top_p=, top_k= and the like themselves",
    "stopping_ids": "give stop=, a list of strings",
    "is_chat_model": "leave it out: the chat template decides",
}


class KVBoost(EngineOptions, StructuredPredictor):
    """Answer with a local Hugging Face model; documents and tools that were read before are not read again.

    Example:
        >>> Settings.llm = KVBoost(model="HuggingFaceTB/SmolLM2-135M-Instruct", max_new_tokens=64)
        >>> index.as_query_engine().query("Why is the sky blue?")

    `raw` of each answer holds the usage (reused tokens count as prompt tokens; `cached_tokens` says how many were
    reused), exact, approximate, repaired and computed tokens, `ttft_s`, `finish_reason` and `fallback_reason`.

    Each sampling field, `namespace`, `reuse`, `timeout` and `stop` may also be given per call; other keywords raise
    (but for `extra_headers`, which parts of LlamaIndex send to every model, and which mean nothing without a service).
    `system_prompt` is in front of every `complete` and of what query engines ask; `chat` runs the messages it is given.

    Prompts are rendered with the model's chat template. `messages_to_prompt` and `completion_to_prompt`, where given,
    render them instead; so do LlamaIndex's plain defaults for a model without a chat template. Such a prompt runs as it
    stands, special tokens and all, and knows no tools.
    """

    max_tokens: int = Field(default=256, validation_alias=AliasChoices("max_tokens", "max_new_tokens"))
    """Most tokens of an answer; `max_new_tokens` is another name for it."""
    context_window: int | None = Field(default=None, gt=0)
    """Tokens of prompt and answer that LlamaIndex plans with; None is the model's whole window."""
    tool_format: str | None = None
    """How calls are written: "hermes", "llama3", "mistral" or "json"; None takes the chat template's own way."""

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        for name in _ELSEWHERE.keys() & given.keys() if isinstance(given, dict) else ():
            raise ValueError(f"{name} belongs to HuggingFaceLLM; {_ELSEWHERE[name]}")
        return given

    @model_validator(mode="after")
    @checked
    def _check_prompts(self) -> KVBoost:
        if self.query_wrapper_prompt is not None:
            raise ConfigError("query_wrapper_prompt has no effect on a chat model; give completion_to_prompt")
        if self.engine is not None:
            self.get_engine()  # a window that is too large raises here and not at the first question
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        for shared in (self.callback_manager, self.rate_limiter):  # they watch over several models
            memo[id(shared)] = shared
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        # LlamaIndex drops what cannot be pickled; callbacks and limiters are of this process anyway.
        for name in ("messages_to_prompt", "completion_to_prompt", "output_parser", "model_kwargs"):
            try:
                pickle.dumps(getattr(self, name))
            except Exception as error:
                raise ConfigError(
                    f"{name} cannot be pickled ({error}); give something that another process can import"
                ) from error
        return super().__getstate__()

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised pipelines and in traces."""
        return "KVBoost"

    @property
    def metadata(self) -> LLMMetadata:
        """Window, answer length and abilities of the model, which is loaded for this.

        LlamaIndex asks for it wherever it stands, on the event loop too: to keep that free while a large model is
        loaded, await ``asyncio.to_thread(llm.get_engine)`` first.
        """
        engine = self.get_engine()
        chats = self._has_template(engine)
        return LLMMetadata(
            context_window=self.context_window or engine.window_tokens,
            num_output=min(self.max_tokens, engine.window_tokens // 2),  # the rest is for what is asked
            is_chat_model=chats or self._own_rendering,
            is_function_calling_model=chats and not self._own_rendering,
            model_name=self.name_of_model(),
        )

    def get_engine(self) -> Engine:
        """The engine, loading the model if this is the first use.

        Raises:
            ConfigError: `context_window` is larger than the model's.
        """
        engine = super().get_engine()
        if self.context_window is not None and self.context_window > engine.window_tokens:
            raise ConfigError(
                f"context_window is {self.context_window}, but the model reads {engine.window_tokens} tokens at most; "
                "leave context_window out"
            )
        return engine

    def to_json(self, **kwargs: Any) -> str:
        """The fields as JSON, without an engine. Paths and dtypes become their names."""
        return super().to_json(**{"mode": "json", **kwargs})

    def to_payload(self) -> dict[str, Any]:
        """What traces may show of this model. Loads nothing: it is asked for on the event loop."""
        known = {"class_name": self.class_name(), "model_name": self.name_of_model(), "num_output": self.max_tokens}
        return known if self._loaded() is None else {**known, **self.metadata.model_dump()}

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens: for `Settings.tokenizer` and token counters."""
        ids: list[int] = self.get_engine().tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def warm_tools(
        self, tools: Sequence[ToolLike], *, system: str | None = None, namespace: str | None = None
    ) -> WarmReport:
        """Compute and keep the KV of tool descriptions, as this model's prompts show them.

        Args:
            tools: LlamaIndex tools, or descriptions in OpenAI's form. Prompts may then show them in any order, with
                others, behind any system prompt.
            system: the system prompt that agents will have; prompts with it and with these tools in this order are then
                exact hits. None: no system prompt is favoured.
            namespace: tenant that may use them.

        Raises:
            ConfigError: without a system prompt, where only exact hits are used: there would be none.
            PromptError: the chat template does not render tools one behind the other.
        """
        return warm_tools(self, describe(tools), format=self.tool_format, system=system, namespace=namespace)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        asked = self._asked(messages, kwargs)
        return to_chat_response(asked, asked.generate(), single=_single(kwargs))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat` off the event loop; cancelling the task stops the computation."""
        asked = await off_loop(lambda: self._asked(messages, kwargs))
        return to_chat_response(asked, await asked.agenerate(), single=_single(kwargs))

    @streamed(llm_chat_callback)
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Opened:
        """Answer piece by piece: text as it comes, calls and usage with the last piece. Closing it stops the model."""
        asked = self._asked(messages, kwargs)
        return asked, ChatPieces(asked, single=_single(kwargs))

    @astreamed(llm_chat_callback)
    def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Opened:
        """`stream_chat` off the event loop."""
        asked = self._asked(messages, kwargs)
        return asked, ChatPieces(asked, single=_single(kwargs))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt: a user message behind the system prompt, or, if `formatted`, the text as it stands."""
        asked = self._asked_text(prompt, formatted, kwargs)
        return to_completion(asked, asked.generate())

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """`complete` off the event loop; cancelling the task stops the computation."""
        asked = await off_loop(lambda: self._asked_text(prompt, formatted, kwargs))
        return to_completion(asked, await asked.agenerate())

    @streamed(llm_completion_callback)
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Opened:
        """`complete` piece by piece. Closing it stops the model."""
        asked = self._asked_text(prompt, formatted, kwargs)
        return asked, TextPieces(asked)

    @astreamed(llm_completion_callback)
    def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Opened:
        """`stream_complete` off the event loop."""
        asked = self._asked_text(prompt, formatted, kwargs)
        return asked, TextPieces(asked)

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls of an answer.

        Raises:
            ValueError: there is none, and ``error_on_no_tool_call``.
        """
        found = selections(response)
        if not found and error_on_no_tool_call:
            raise ValueError(f"the answer calls no tool: {response.message.content!r}; demand it with tool_required")
        return found

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[ToolLike],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        described = describe(tools)
        choice = "any" if tool_choice is None and tool_required and described else tool_choice
        choice_of(choice, described)  # raises here and not behind callbacks
        return {
            "messages": [*(chat_history or ()), *([user_msg] if user_msg else ())],
            "tools": described,
            "tool_choice": choice,
            # A forced call is one call; a model that calls of its own will may make several if that is allowed.
            "parallel_tool_calls": bool(allow_parallel_tool_calls),
            **kwargs,
        }

    @property
    def _own_rendering(self) -> bool:
        return self.messages_to_prompt is not default_messages_to_prompt

    def _has_template(self, engine: Engine) -> bool:
        return bool(getattr(engine.tokenizer, "chat_template", None))

    def _asked(self, messages: Sequence[ChatMessage], call: Mapping[str, Any]) -> Asked:
        call, stop = _renamed(call)
        wish = {name: call.pop(name) for name in _TOOL_FIELDS & call.keys()}
        check_flags(parallel_tool_calls=wish.get("parallel_tool_calls"))
        tools = describe(wish.get("tools") or ())
        if self._own_rendering or not self._has_template(self.get_engine()):
            forced = choice_of(wish.get("tool_choice"), tools) not in ("auto", "none")
            if asked := [name for name in ("tools", "response_format") if wish.get(name)] + ["tool_choice"] * forced:
                why = "messages_to_prompt renders the prompts" if self._own_rendering else "there is no chat template"
                raise ConfigError(f"{asked[0]} is given, but {why}, so that the model cannot be shown it")
            render = cast(MessagesToPromptType, self.messages_to_prompt)  # LlamaIndex fills in its default
            return ask_text(self, render(messages), stop=stop, call=call)
        return ask(
            self,
            to_prompt(messages),
            format=self.tool_format,
            stop=stop,
            call=call,
            tools=tools,
            choice=choice_of(wish.get("tool_choice"), tools),
            parallel=wish.get("parallel_tool_calls"),
            schema=schema_of_format(wish.get("response_format")),
        )

    def _asked_text(self, prompt: str, formatted: bool, call: Mapping[str, Any]) -> Asked:
        call, stop = _renamed(call)
        if formatted:
            return ask_text(self, prompt, stop=stop, call=call)
        own = self.completion_to_prompt is not default_completion_to_prompt
        if own or not self._has_template(self.get_engine()):
            render = cast(CompletionToPromptType, self.completion_to_prompt)
            whole = f"{self.system_prompt}\n\n{prompt}" if self.system_prompt else prompt
            return ask_text(self, render(whole), stop=stop, call=call)
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return ask(self, [*system, {"role": "user", "content": prompt}], stop=stop, call=call)


def _renamed(call: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """What a call asks for, under the engine's names, and its stop strings."""
    own = dict(call)
    own.pop("extra_headers", None)  # parts of LlamaIndex send some to every model; there is no service to read them
    stop = own.pop("stop", None)
    if "max_new_tokens" in own:
        if "max_tokens" in own:
            raise ConfigError("max_tokens and max_new_tokens are two names of one argument; give one of them")
        own["max_tokens"] = own.pop("max_new_tokens")
    return own, stop


def _single(call: Mapping[str, Any]) -> bool:
    """Whether the answer may hold one call only; not every format can be constrained to that."""
    return call.get("parallel_tool_calls") is False
