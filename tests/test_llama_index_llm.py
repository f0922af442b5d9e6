"""KVBoost on real engines: what reaches them, what comes back, and how it streams, stops, is traced and is copied.

Numbers in names and comments are the issues of other local-model classes that must not happen here.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import logging
import pickle
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_index.core import Settings
from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.span import BaseSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.prompts import PromptTemplate
from llama_index.core.rate_limiter import BaseRateLimiter, TokenBucketRateLimiter
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.types import BaseOutputParser
from pydantic import BaseModel, Field

from kvboost_rag import (
    ConfigError,
    ContextOverflowError,
    Engine,
    EngineConfig,
    PromptError,
    RequestTimeoutError,
    SamplingParams,
)
from kvboost_rag.frameworks import engines
from langchain_kvboost import ChatKVBoost
from llama_index.llms.kvboost import KVBoost, configure_settings, release_engines, shared_engine
from tests.chat_tokenizers import MAKERS
from tests.recording import RecordingEngine, recording
from tests.tiny import Forwards, model_of, new_model, text, tokenizer_of

LONG = 3000  # tokens of an answer that nobody waits for
PATIENCE = 30  # seconds until a test that hangs is given up
QUIET = EngineConfig(calibration_dir=None)


@pytest.fixture(scope="module")
def shared() -> RecordingEngine:
    return recording()


@pytest.fixture
def engine(shared: RecordingEngine) -> RecordingEngine:
    shared.clear()
    shared.asked.clear()
    shared.says = None
    return shared


@pytest.fixture
def llm(engine: RecordingEngine) -> KVBoost:
    return KVBoost(engine=engine, max_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model as it is saved by Hugging Face."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    model_of("llama").save_pretrained(path)
    tokenizer_of().save_pretrained(path)
    return str(path)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine is loaded yet in this process."""
    monkeypatch.setattr(engines, "_engines", {})


def user(content: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=content)]


async def collected(stream: Coroutine[Any, Any, Any]) -> list[Any]:
    """Of LlamaIndex's async streams, which are awaited first."""
    return [piece async for piece in await stream]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


Ask = Callable[..., Any]
# Each form gives the last piece, which holds the whole answer.
FORMS: dict[str, Ask] = {
    "chat": lambda llm, q, **call: llm.chat(user(q), **call),
    "achat": lambda llm, q, **call: run(llm.achat(user(q), **call)),
    "stream_chat": lambda llm, q, **call: list(llm.stream_chat(user(q), **call))[-1],
    "astream_chat": lambda llm, q, **call: run(collected(llm.astream_chat(user(q), **call)))[-1],
    "complete": lambda llm, q, **call: llm.complete(q, **call),
    "acomplete": lambda llm, q, **call: run(llm.acomplete(q, **call)),
    "stream_complete": lambda llm, q, **call: list(llm.stream_complete(q, **call))[-1],
    "astream_complete": lambda llm, q, **call: run(collected(llm.astream_complete(q, **call)))[-1],
}
STREAMS: dict[str, Ask] = {
    "stream_chat": lambda llm, q, **call: list(llm.stream_chat(user(q), **call)),
    "astream_chat": lambda llm, q, **call: run(collected(llm.astream_chat(user(q), **call))),
    "stream_complete": lambda llm, q, **call: list(llm.stream_complete(q, **call)),
    "astream_complete": lambda llm, q, **call: run(collected(llm.astream_complete(q, **call))),
}
every_form = pytest.mark.parametrize("ask", FORMS.values(), ids=FORMS)
every_stream = pytest.mark.parametrize("ask", STREAMS.values(), ids=STREAMS)


def said(answer: Any) -> str:
    return answer.text if hasattr(answer, "text") else answer.message.content or ""


class TestForms:
    @every_form
    def test_every_form_says_the_same(self, llm: KVBoost, ask: Ask) -> None:
        answer, expected = ask(llm, "Which river?"), llm.chat(user("Which river?"))
        assert said(answer) == said(expected) != ""
        assert answer.raw["usage"]["completion_tokens"] == expected.raw["usage"]["completion_tokens"] == 8
        assert answer.raw["usage"]["prompt_tokens"] == expected.raw["usage"]["prompt_tokens"]
        assert answer.raw["finish_reason"] == "length"

    @every_stream
    def test_17024_pieces_add_up(self, llm: KVBoost, ask: Ask) -> None:
        pieces = ask(llm, text(5, 20))
        assert len(pieces) > 3
        whole = ""
        for piece in pieces:
            whole += piece.delta
            assert said(piece) == whole
        assert whole == said(llm.complete(text(5, 20)))
        assert [piece.raw is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]

    def test_17024_pieces_arrive_while_the_model_runs(self, engine: RecordingEngine) -> None:
        with Forwards(engine.model) as forwards:
            stream = KVBoost(engine=engine, max_tokens=LONG).stream_complete("q")
            next(stream)
            assert len(forwards.rows) < LONG / 2
            stream.close()

    @every_form
    def test_19770_an_answer_ends(self, engine: RecordingEngine, ask: Ask) -> None:
        engine.says = "the end"
        answer = ask(KVBoost(engine=engine, max_tokens=LONG), "Which tree is that?")
        assert said(answer) == "the end"  # 24430: and it does not hold the prompt
        assert answer.raw["finish_reason"] == "stop"


class TestPerCall:
    @every_form
    def test_13204_the_call_wins(self, engine: RecordingEngine, ask: Ask) -> None:
        llm = KVBoost(engine=engine, temperature=0.5, max_tokens=9, namespace="a", timeout=60.0, stop=["A"])
        values = {"temperature": 0.25, "top_p": 0.5, "top_k": 3, "min_p": 0.2, "seed": 4, "repetition_penalty": 1.1}
        ask(llm, "q", **values, max_new_tokens=2, namespace="b", reuse="exact", timeout=30.0, stop=["B"])
        assert engine.sampling == SamplingParams(**values, max_tokens=2, stop=("A", "B"))
        assert (engine.options["namespace"], engine.options["reuse"], engine.options["timeout_s"]) == ("b", "exact", 30)

    @every_form
    @pytest.mark.parametrize("name", ["max_new_tokens", "max_tokens"])
    def test_both_names_of_the_limit(self, llm: KVBoost, ask: Ask, name: str) -> None:
        assert ask(llm, "q", **{name: 3}).raw["usage"]["completion_tokens"] == 3

    @every_form
    @pytest.mark.parametrize(
        ("call", "named"),
        [
            ({"max_tokens": 3, "max_new_tokens": 3}, "two names"),
            ({"do_sample": True}, "do_sample"),
            ({"logprobs": True}, "logprobs"),
            ({"max_new_tokens": 0}, "max_tokens"),
            ({"temperature": -1.0}, "temperature"),
            ({"namespace": ""}, "namespace"),
            ({"reuse": "some"}, "reuse"),
            ({"timeout": -1.0}, "timeout"),
            ({"stop": [""]}, "stop"),
        ],
    )
    def test_what_cannot_take_effect_raises(
        self, llm: KVBoost, engine: RecordingEngine, ask: Ask, call: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(ConfigError, match=named):
            ask(llm, "q", **call)

    @pytest.mark.parametrize("name", ["tools", "response_format", "tool_choice"])
    def test_completions_know_no_tools(self, llm: KVBoost, name: str) -> None:
        with pytest.raises(ConfigError, match=name):
            llm.complete("q", **{name: []})

    @pytest.mark.parametrize(
        ("argument", "other"),
        [("temperature", 5.0), ("repetition_penalty", 0.3), ("seed", 9), ("top_k", 1), ("min_p", 1.0), ("top_p", 1e-6)],
    )
    def test_sampling_changes_answers(self, engine: RecordingEngine, argument: str, other: float) -> None:
        llm = KVBoost(engine=engine, max_tokens=12, temperature=1.0, seed=1)
        plain = said(llm.complete("q"))
        assert said(llm.complete("q")) == plain  # the seed makes it repeatable
        assert said(llm.complete("q", **{argument: other})) != plain

    @every_form
    def test_22601_stops_over_several_tokens_end_every_form(self, engine: RecordingEngine, ask: Ask) -> None:
        engine.says = "river </st stone </stop> paper"
        assert len(engine.tokenizer("</stop>").input_ids) > 4
        answer = ask(KVBoost(engine=engine, max_tokens=60), "q", stop=["</stop>"])
        assert said(answer) == "river </st stone "
        assert answer.raw["finish_reason"] == "stop"

    @every_stream
    def test_stops_never_leak(self, engine: RecordingEngine, ask: Ask) -> None:
        engine.says = "river </st stone </stop> paper"
        pieces = ask(KVBoost(engine=engine, max_tokens=60, stop=["</stop>"]), "q", stop="never")
        assert not any("</stop" in said(piece) for piece in pieces)
        assert engine.sampling.stop == ("</stop>", "never")


family_engine = functools.cache(recording)


def plain_ids(engine: Engine, *messages: tuple[str, str]) -> list[int]:
    """Ids of plain Hugging Face."""
    given = [{"role": role, "content": content} for role, content in messages]
    ids: list[int] = engine.tokenizer.apply_chat_template(given, add_generation_prompt=True)["input_ids"]
    return ids


class TestPrompts:
    def test_roles(self, llm: KVBoost, engine: RecordingEngine) -> None:
        llm.chat(
            [
                ChatMessage(role=role, content=role.value, additional_kwargs={"name": "f", "tool_call_id": "1"})
                for role in MessageRole
                if role not in (MessageRole.TOOL, MessageRole.FUNCTION)
            ]
        )
        # Neither of the tiny template's roles is refused, so they come as they are.
        assert [message["role"] for message in engine.prompt] == [
            "system",
            "system",
            "user",
            "assistant",
            "assistant",
            "assistant",
        ]

    @pytest.mark.parametrize("role", [MessageRole.TOOL, MessageRole.FUNCTION])
    def test_results_of_tools(self, llm: KVBoost, engine: RecordingEngine, role: MessageRole) -> None:
        call = ToolCallBlock(tool_call_id="1", tool_name="f", tool_kwargs={"a": 1})
        llm.chat(
            [
                *user("h"),
                ChatMessage(role="assistant", blocks=[TextBlock(text="Well."), call]),
                ChatMessage(role=role, content="t", additional_kwargs={"tool_call_id": "1", "name": "f"}),
            ]
        )
        assert engine.prompt[1:] == [
            {"role": "assistant", "content": 'Well.\n[{"name": "f", "arguments": {"a": 1}}]'},
            {"role": "user", "content": "Result of the tool f:\nt"},
        ]

    @pytest.mark.parametrize(
        "block",
        [
            TextBlock(text="two"),
            CitableBlock(title="t", source="s", content=[TextBlock(text="two")]),
            CitationBlock(
                cited_content=TextBlock(text="two"), source="s", title="t", additional_location_info={"page": 1}
            ),
        ],
    )
    def test_blocks_of_text(self, llm: KVBoost, engine: RecordingEngine, block: Any) -> None:
        hidden = [ThinkingBlock(content="hm"), CachePoint(cache_control={"type": "ephemeral"})]
        llm.chat([ChatMessage(role="user", blocks=[TextBlock(text="one"), *hidden, block])])
        assert engine.prompt == [{"role": "user", "content": "one\ntwo"}]

    def test_blocks_that_a_text_model_cannot_read(self, llm: KVBoost, engine: RecordingEngine) -> None:
        with pytest.raises(PromptError, match="ImageBlock"):
            llm.chat([ChatMessage(role="user", blocks=[ImageBlock(url="http://localhost/x.png")])])
        assert not engine.asked

    @pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
    def test_calls_of_older_conversations(self, llm: KVBoost, engine: RecordingEngine, arguments: Any) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        llm.chat([*user("h"), ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": [call]})])
        assert engine.prompt[1]["content"] == '[{"name": "f", "arguments": {"a": 1}}]'

    def test_calls_as_objects_of_other_clients(self, llm: KVBoost, engine: RecordingEngine) -> None:
        class Function(BaseModel):
            name: str
            arguments: str

        class Call(BaseModel):
            id: str
            function: Function

        call = Call(id="1", function=Function(name="f", arguments=""))
        llm.chat([*user("h"), ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": [call]})])
        assert engine.prompt[1]["content"] == '[{"name": "f", "arguments": {}}]'

    @pytest.mark.parametrize("calls", [["f"], [None], "f", {"name": "f"}, [{"function": "f"}]], ids=str)
    def test_what_is_no_call_raises(self, llm: KVBoost, calls: Any) -> None:
        with pytest.raises(PromptError, match="tool_calls"):
            llm.chat([*user("h"), ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": calls})])

    def test_what_is_no_message_raises(self, llm: KVBoost) -> None:
        with pytest.raises(PromptError, match="ChatMessage"):
            llm.chat([{"role": "user", "content": "q"}])  # type: ignore[list-item]

    def test_a_call_that_is_no_json_is_still_shown(self, llm: KVBoost, engine: RecordingEngine) -> None:
        broken = ToolCallBlock(tool_call_id="1", tool_name="f", tool_kwargs='{"a": ')
        llm.chat([*user("h"), ChatMessage(role="assistant", blocks=[broken])])
        assert engine.prompt[1]["content"] == '{"a": '

    def test_19933_the_chat_template_is_used(self, llm: KVBoost, engine: RecordingEngine) -> None:
        llm.chat([ChatMessage(role="system", content="Be kind."), *user("Which river?")])
        assert engine.ids == plain_ids(engine, ("system", "Be kind."), ("user", "Which river?"))
        llm.complete("Which river?")
        assert engine.ids == plain_ids(engine, ("user", "Which river?"))

    def test_15232_an_answer_may_be_last(self, llm: KVBoost, engine: RecordingEngine) -> None:
        llm.chat([*user("h"), ChatMessage(role="assistant", content="well")])
        assert engine.ids == plain_ids(engine, ("user", "h"), ("assistant", "well"))

    @pytest.mark.parametrize("family", ["mistral", "gemma2"])
    def test_13728_roles_that_must_alternate(self, family: str) -> None:
        engine = family_engine(family)
        roles = ("system", "user", "user", "assistant", "assistant", "user")
        KVBoost(engine=engine, max_tokens=1).chat(
            [ChatMessage(role=role, content=content) for role, content in zip(roles, "sabcde", strict=True)]
        )
        assert engine.ids == plain_ids(engine, ("user", "s\n\na\n\nb"), ("assistant", "c\n\nd"), ("user", "e"))

    @pytest.mark.parametrize("form", ["chat", "complete", "formatted"])
    def test_llama_cpp_1501_one_bos(self, form: str) -> None:
        engine = family_engine("llama3")
        llm, bos = KVBoost(engine=engine, max_tokens=1), engine.tokenizer.bos_token
        if form == "formatted":
            llm.complete(f"{bos}Once upon", formatted=True)
        else:
            FORMS[form](llm, "h")
        assert engine.ids.count(engine.tokenizer.bos_token_id) == 1
        assert engine.ids[0] == engine.tokenizer.bos_token_id

    def test_no_messages(self, llm: KVBoost) -> None:
        with pytest.raises(PromptError, match="message"):
            llm.chat([])


COMPLETIONS = {name: ask for name, ask in FORMS.items() if "complete" in name}


class TestSystemPrompt:
    @pytest.mark.parametrize("ask", COMPLETIONS.values(), ids=COMPLETIONS)
    def test_complete_keeps_it(self, engine: RecordingEngine, ask: Ask) -> None:
        ask(KVBoost(engine=engine, max_tokens=1, system_prompt="Be kind."), "h")
        assert engine.ids == plain_ids(engine, ("system", "Be kind."), ("user", "h"))

    def test_chat_leaves_messages_alone(self, engine: RecordingEngine) -> None:
        KVBoost(engine=engine, max_tokens=1, system_prompt="Be kind.").chat(user("h"))
        assert engine.ids == plain_ids(engine, ("user", "h"))

    @pytest.mark.parametrize(
        "mode", [ResponseMode.COMPACT, ResponseMode.REFINE, ResponseMode.TREE_SUMMARIZE, ResponseMode.ACCUMULATE]
    )
    def test_synthesizers_keep_it_once(self, engine: RecordingEngine, mode: ResponseMode) -> None:
        llm = KVBoost(engine=engine, max_tokens=4, system_prompt="Be kind.")
        synthesizer = get_response_synthesizer(llm=llm, response_mode=mode, prompt_helper=helper_of(llm))
        nodes = [NodeWithScore(node=TextNode(text=text(seed, 20)), score=1.0) for seed in (1, 2)]
        answer = synthesizer.synthesize("Which river?", nodes)
        assert str(answer)
        assert all(engine.tokenize(prompt)[:1] for prompt, _ in engine.asked)
        for prompt, _ in engine.asked:
            assert [message["content"] for message in prompt].count("Be kind.") == 1
            assert prompt[0] == {"role": "system", "content": "Be kind."}

    def test_predict_keeps_it_in_every_form(self, engine: RecordingEngine) -> None:
        llm = KVBoost(engine=engine, max_tokens=4, system_prompt="Be kind.")
        prompt = PromptTemplate("Of {topic}.")
        answers = [
            llm.predict(prompt, topic="rivers"),
            "".join(llm.stream(prompt, topic="rivers")),
            run(llm.apredict(prompt, topic="rivers")),
            "".join(run(collected(llm.astream(prompt, topic="rivers")))),
        ]
        assert len(set(answers)) == 1
        assert all(asked == engine.prompt for asked, _ in engine.asked)
        assert engine.ids == plain_ids(engine, ("system", "Be kind."), ("user", "Of rivers."))


def helper_of(llm: KVBoost) -> PromptHelper:
    return PromptHelper.from_llm_metadata(llm.metadata, tokenizer=llm.get_token_ids)


def bracketed(messages: Any) -> str:
    return "".join(f"[{message.role.value}: {message.content}]" for message in messages)


def quoted(prompt: str) -> str:
    return f"<<{prompt}>>"


class TestOwnRendering:
    def test_messages_to_prompt(self, engine: RecordingEngine) -> None:
        llm = KVBoost(engine=engine, max_tokens=1, messages_to_prompt=bracketed)
        for form in ("chat", "achat", "stream_chat", "astream_chat"):
            FORMS[form](llm, "h")
            assert engine.prompt == "[user: h]"
        assert llm.metadata.is_chat_model
        assert not llm.metadata.is_function_calling_model
        llm.predict(PromptTemplate("h"))
        assert engine.prompt == "[user: h]"

    @pytest.mark.parametrize(
        "call", [{"tools": [{"type": "function", "function": {"name": "f"}}]}, {"response_format": {"type": "object"}}]
    )
    def test_it_knows_no_tools(self, engine: RecordingEngine, call: dict[str, Any]) -> None:
        llm = KVBoost(engine=engine, messages_to_prompt=bracketed)
        with pytest.raises(ConfigError, match="messages_to_prompt"):
            llm.chat(user("h"), **call)
        with pytest.raises(ConfigError, match="tool_choice"):
            llm.chat(user("h"), tool_choice="any")

    @pytest.mark.parametrize("ask", COMPLETIONS.values(), ids=COMPLETIONS)
    def test_completion_to_prompt(self, engine: RecordingEngine, ask: Ask) -> None:
        llm = KVBoost(engine=engine, max_tokens=1, completion_to_prompt=quoted)
        ask(llm, "h")
        assert engine.prompt == "<<h>>"
        ask(llm, "h", formatted=True)
        assert engine.prompt == "h"

    def test_completion_to_prompt_is_given_the_system_prompt(self, engine: RecordingEngine) -> None:
        KVBoost(engine=engine, max_tokens=1, completion_to_prompt=quoted, system_prompt="Be kind.").complete("h")
        assert engine.prompt == "<<Be kind.\n\nh>>"

    @pytest.mark.parametrize("ask", COMPLETIONS.values(), ids=COMPLETIONS)
    def test_formatted_runs_as_it_stands(self, engine: RecordingEngine, ask: Ask) -> None:
        prompt = "<|im_start|>user\nh<|im_end|>\n<|im_start|>assistant\n"
        ask(KVBoost(engine=engine, max_tokens=1, system_prompt="Not here."), prompt, formatted=True)
        assert engine.ids == plain_ids(engine, ("user", "h"))

    def test_query_wrapper_prompt_raises(self, engine: RecordingEngine) -> None:
        with pytest.raises(ValueError, match="query_wrapper_prompt"):
            KVBoost(engine=engine, query_wrapper_prompt=PromptTemplate("{query_str}"))


@pytest.fixture(scope="module")
def bare() -> RecordingEngine:
    """Whose tokenizer has no chat template."""
    tokenizer = MAKERS["smollm2"]()
    tokenizer.chat_template = None
    return recording(tokenizer)


class TestNoTemplate:
    def test_complete(self, bare: RecordingEngine) -> None:
        KVBoost(engine=bare, max_tokens=1).complete("Once upon")
        assert bare.prompt == "Once upon"
        KVBoost(engine=bare, max_tokens=1, system_prompt="s").complete("Once upon")
        assert bare.prompt == "s\n\nOnce upon"

    def test_chat_has_llama_indexs_plain_form(self, bare: RecordingEngine) -> None:
        KVBoost(engine=bare, max_tokens=1).chat([ChatMessage(role="system", content="s"), *user("h")])
        assert bare.prompt == "system: s\nuser: h\nassistant: "

    def test_predict_completes(self, bare: RecordingEngine) -> None:
        llm = KVBoost(engine=bare, max_tokens=1, system_prompt="s")
        assert not llm.metadata.is_chat_model
        llm.predict(PromptTemplate("Once {word}"), word="upon")
        assert bare.prompt == "s\n\nOnce upon"

    def test_tools_raise(self, bare: RecordingEngine) -> None:
        with pytest.raises(ConfigError, match="no chat template"):
            KVBoost(engine=bare).chat(user("h"), response_format={"type": "json_object"})


class Impatient:
    """A logits processor that fails, at the third token."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.seen > 2:
            raise RuntimeError("out of luck")
        return scores


class TestErrors:
    @every_form
    def test_a_failing_processor_surfaces(self, engine: RecordingEngine, ask: Ask) -> None:
        """LlamaIndex's own local class hangs its streams here."""
        plain = engine._noted
        failing = Impatient()

        def noted(prompt: Any, options: dict[str, Any]) -> dict[str, Any]:
            sampling = SamplingParams(max_tokens=50, logits_processors=(failing,))
            return {**plain(prompt, options), "sampling": sampling}

        engine._noted = noted  # type: ignore[method-assign]
        try:
            began = time.monotonic()
            with pytest.raises(RuntimeError, match="out of luck"):
                ask(KVBoost(engine=engine), "q")
            assert time.monotonic() - began < PATIENCE / 2
        finally:
            del engine._noted  # type: ignore[attr-defined]
        assert said(KVBoost(engine=engine, max_tokens=2).complete("q")) is not None

    @every_form
    def test_17496_overflow(self, llm: KVBoost, engine: RecordingEngine, ask: Ask) -> None:
        with pytest.raises(ContextOverflowError, match="context window") as raised:
            ask(llm, "q " * engine.window_tokens)
        assert raised.value.window_tokens == engine.window_tokens
        assert raised.value.prompt_tokens > engine.window_tokens
        assert str(raised.value.prompt_tokens) in str(raised.value)

    @every_form
    def test_timeout_raises_and_stops(self, engine: RecordingEngine, ask: Ask) -> None:
        with Forwards(engine.model) as forwards:
            with pytest.raises(RequestTimeoutError, match="timeout_s"):
                ask(KVBoost(engine=engine, max_tokens=LONG, timeout=0.2), "q")
            stopped = len(forwards.rows)
            assert stopped < LONG
            time.sleep(0.1)
            assert len(forwards.rows) == stopped


class Keeper(BaseEventHandler):
    """Keeps every event, as tracers do."""

    events: list[Any] = Field(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "Keeper"

    def handle(self, event: BaseEvent, **_: Any) -> None:
        self.events.append(event)

    def names(self) -> list[str]:
        return [event.class_name() for event in self.events]

    def of(self, name: str) -> list[Any]:
        return [event for event in self.events if event.class_name() == name]


class Spans(BaseSpanHandler[BaseSpan]):
    """Notes which spans were entered, left, and dropped by an error."""

    told: list[tuple[str, str]] = Field(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "Spans"

    def new_span(self, id_: str, *_: Any, **__: Any) -> BaseSpan:
        self.told.append(("enter", id_.split("-")[0]))
        return BaseSpan(id_=id_)

    def prepare_to_exit_span(self, id_: str, *_: Any, **__: Any) -> BaseSpan | None:
        self.told.append(("exit", id_.split("-")[0]))
        return self.open_spans.get(id_)

    def prepare_to_drop_span(self, id_: str, *_: Any, **__: Any) -> BaseSpan | None:
        self.told.append(("drop", id_.split("-")[0]))
        return self.open_spans.get(id_)


@pytest.fixture
def keeper():
    dispatcher, handler = get_dispatcher(), Keeper()
    dispatcher.add_event_handler(handler)
    yield handler
    dispatcher.event_handlers.remove(handler)


@pytest.fixture
def spans():
    dispatcher, handler = get_dispatcher(), Spans()
    dispatcher.add_span_handler(handler)
    yield handler
    dispatcher.span_handlers.remove(handler)


class TestCancelling:
    """Transformers 27927: a computation that nobody waits for must stop."""

    def ran_on(self, forwards: Forwards) -> int:
        before = len(forwards.rows)
        time.sleep(0.15)
        return len(forwards.rows) - before

    @pytest.mark.parametrize("form", ["stream_chat", "stream_complete"])
    def test_closing_a_stream(self, engine: RecordingEngine, keeper: Keeper, form: str) -> None:
        """Also where a tracer keeps the exception, and with it LlamaIndex's frames."""
        debug = LlamaDebugHandler(print_trace_on_end=False)
        llm = KVBoost(engine=engine, max_tokens=LONG, callback_manager=CallbackManager([debug]))
        with Forwards(engine.model) as forwards:
            stream = llm.stream_chat(user("q")) if form == "stream_chat" else llm.stream_complete("q")
            next(stream)
            stream.close()
            assert self.ran_on(forwards) == 0
            assert len(forwards.rows) < LONG
        assert "ExceptionEvent" in keeper.names()

    @pytest.mark.parametrize("form", ["astream_chat", "astream_complete"])
    def test_closing_an_async_stream(self, engine: RecordingEngine, keeper: Keeper, form: str) -> None:
        debug = LlamaDebugHandler(print_trace_on_end=False)
        llm = KVBoost(engine=engine, max_tokens=LONG, callback_manager=CallbackManager([debug]))

        async def leave() -> int:
            stream = await (llm.astream_chat(user("q")) if form == "astream_chat" else llm.astream_complete("q"))
            await anext(stream)
            await stream.aclose()
            before = len(forwards.rows)
            await asyncio.sleep(0.15)
            return len(forwards.rows) - before

        with Forwards(engine.model) as forwards:
            assert run(leave()) == 0
            assert len(forwards.rows) < LONG

    @pytest.mark.parametrize("form", ["stream_chat", "stream_complete"])
    def test_closing_a_stream_that_another_thread_reads(self, engine: RecordingEngine, form: str) -> None:
        """A button that stops a chat engine: its thread reads the stream that it stops."""
        llm = KVBoost(engine=engine, max_tokens=LONG)
        stream = llm.stream_chat(user("q")) if form == "stream_chat" else llm.stream_complete("q")
        pieces: list[Any] = []
        reader = threading.Thread(target=lambda: pieces.extend(stream))
        with Forwards(engine.model) as forwards:
            reader.start()
            while len(forwards.rows) < 5:
                time.sleep(0.01)
            stream.close()
            assert self.ran_on(forwards) == 0
            assert len(forwards.rows) < LONG
        reader.join(PATIENCE)
        assert not reader.is_alive()
        assert list(stream) == []

    def test_dropping_streams(self, engine: RecordingEngine) -> None:
        llm = KVBoost(engine=engine, max_tokens=LONG)

        async def leave() -> None:
            stream = await llm.astream_chat(user("q"))
            await anext(stream)
            del stream
            await asyncio.sleep(0.1)

        with Forwards(engine.model) as forwards:
            stream = llm.stream_chat(user("q"))
            next(stream)
            del stream
            assert self.ran_on(forwards) == 0
            run(leave())
            assert self.ran_on(forwards) == 0
            assert len(forwards.rows) < LONG

    def test_a_stream_of_predict(self, engine: RecordingEngine) -> None:
        with Forwards(engine.model) as forwards:
            tokens = KVBoost(engine=engine, max_tokens=LONG).stream(PromptTemplate("q"))
            next(tokens)
            tokens.close()
            del tokens
            assert self.ran_on(forwards) == 0
            assert len(forwards.rows) < LONG

    @pytest.mark.parametrize("form", ["achat", "acomplete", "astream_chat", "astream_complete"])
    def test_cancelling_a_task(self, engine: RecordingEngine, form: str) -> None:
        llm = KVBoost(engine=engine, max_tokens=LONG)
        work = {
            "achat": lambda: llm.achat(user("q")),
            "acomplete": lambda: llm.acomplete("q"),
            "astream_chat": lambda: collected(llm.astream_chat(user("q"))),
            "astream_complete": lambda: collected(llm.astream_complete("q")),
        }[form]

        async def give_up() -> None:
            task = asyncio.create_task(work())
            while len(forwards.rows) < 3:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        with Forwards(engine.model) as forwards:
            run(give_up())
            assert self.ran_on(forwards) == 0
            assert len(forwards.rows) < LONG
        assert said(KVBoost(engine=engine, max_tokens=2).complete("q")) is not None


async def longest_stall(work: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[float, float]:
    """Longest time the loop did nothing else, and how long all of it took, in seconds."""
    stalls = []

    async def watch() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.001)
            stalls.append(time.monotonic() - before)

    watcher = asyncio.create_task(watch())
    began = time.monotonic()
    await work()
    took = time.monotonic() - began
    watcher.cancel()
    return max(stalls), took


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model that takes a while to load and to run."""
    path = str(tmp_path_factory.mktemp("models") / "larger")
    model = new_model("llama", num_hidden_layers=6, hidden_size=128, max_position_embeddings=4096)
    model.save_pretrained(path)
    tokenizer_of().save_pretrained(path)
    return path


class TestEventLoop:
    """18182, 10719: the loop goes on while the model is loaded, reads and writes."""

    def test_18182_the_loop_goes_on(self, fresh: None, larger: str) -> None:
        llm = KVBoost(model=larger, engine_config=QUIET, max_tokens=20)
        document = text(1, 800)

        async def work() -> None:
            await llm.achat(user(document))
            await collected(llm.astream_chat(user(text(2, 800))))
            await collected(llm.astream_complete(text(3, 800)))

        stall, took = run(longest_stall(work))
        assert len(llm.get_token_ids(document)) > 1000
        assert took > 0.5
        assert stall < took / 4  # a blocked loop stands still for a third of it, however busy the machine is

    def test_10719_requests_share_the_loop(self, engine: RecordingEngine) -> None:
        llm = KVBoost(engine=engine, max_tokens=30)

        async def both() -> list[str]:
            order = []

            async def ask() -> None:
                await llm.achat(user("q"))
                order.append("answer")

            async def other() -> None:
                for _ in range(5):
                    await asyncio.sleep(0.001)
                order.append("other")

            await asyncio.gather(ask(), other())
            return order

        assert run(both()) == ["other", "answer"]


class TestInstrumentation:
    @pytest.mark.parametrize("form", FORMS)
    def test_events_and_spans(self, llm: KVBoost, keeper: Keeper, spans: Spans, form: str) -> None:
        answer = FORMS[form](llm, "q")
        kind = "LLMCompletion" if "complete" in form else "LLMChat"
        streams = form in STREAMS
        [start] = keeper.of(f"{kind}StartEvent")
        assert start.model_dict == llm.to_payload()
        [end] = keeper.of(f"{kind}EndEvent")
        assert end.response.raw["usage"] == answer.raw["usage"]
        between = keeper.of(f"{kind}InProgressEvent")
        assert (len(between) > 3) == streams
        assert "".join(event.response.delta for event in between) == (said(answer) if streams else "")
        assert spans.told == [("enter", f"KVBoost.{form}"), ("exit", f"KVBoost.{form}")]
        assert {event.span_id.split("-")[0] for event in (start, *between, end)} == {f"KVBoost.{form}"}

    @pytest.mark.parametrize("form", FORMS)
    def test_errors_are_seen(self, llm: KVBoost, keeper: Keeper, spans: Spans, form: str) -> None:
        with pytest.raises(ConfigError):
            FORMS[form](llm, "q", kindness=1)
        assert spans.told == [("enter", f"KVBoost.{form}"), ("drop", f"KVBoost.{form}")]
        assert "kindness" in keeper.of("SpanDropEvent")[0].err_str

    @every_stream
    def test_errors_within_a_stream_are_seen(self, engine: RecordingEngine, keeper: Keeper, ask: Ask) -> None:
        with pytest.raises(RequestTimeoutError):
            ask(KVBoost(engine=engine, max_tokens=LONG, timeout=0.2), "q")
        [event] = keeper.of("ExceptionEvent")
        assert isinstance(event.exception, RequestTimeoutError)

    @every_form
    def test_19740_token_counting_is_exact(self, engine: RecordingEngine, ask: Ask) -> None:
        counter = TokenCountingHandler(tokenizer=lambda text: [0] * 1000)
        llm = KVBoost(engine=engine, max_tokens=8, callback_manager=CallbackManager([counter]))
        usage = ask(llm, "Which river?").raw["usage"]
        assert counter.prompt_llm_token_count == usage["prompt_tokens"] == len(engine.ids)
        assert counter.completion_llm_token_count == usage["completion_tokens"] == 8

    @every_form
    def test_19740_an_empty_answer_is_counted(self, engine: RecordingEngine, ask: Ask) -> None:
        counter = TokenCountingHandler(tokenizer=lambda text: [0] * 1000)
        engine.says = ""
        llm = KVBoost(engine=engine, max_tokens=8, callback_manager=CallbackManager([counter]))
        assert said(ask(llm, "q")) == ""
        assert counter.completion_llm_token_count <= 1

    @every_form
    def test_callbacks(self, engine: RecordingEngine, ask: Ask) -> None:
        debug = LlamaDebugHandler(print_trace_on_end=False)
        ask(KVBoost(engine=engine, max_tokens=4, callback_manager=CallbackManager([debug])), "q")
        [[start, end]] = debug.get_event_pairs(CBEventType.LLM)
        assert start.payload is not None
        assert end.payload is not None

    def test_raw_is_plain(self, engine: RecordingEngine) -> None:
        llm = KVBoost(engine=engine, max_tokens=4)
        document = text(1, 200)
        first = llm.complete(document)
        assert json.loads(json.dumps(first.raw)) == first.raw
        assert first.raw["usage"]["prompt_tokens_details"] == {
            "cached_tokens": 0,
            "cache_creation_tokens": first.raw["usage"]["prompt_tokens"],
        }
        again = llm.chat([ChatMessage(role="system", content="Other words in front."), *user(document)]).raw
        read = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert read == again["exact_tokens"] + again["approximate_tokens"] > 0.5 * again["usage"]["prompt_tokens"]
        assert again["repaired_tokens"] > 0
        assert 0 < again["ttft_s"] < 60
        assert again["usage"]["total_tokens"] == again["usage"]["prompt_tokens"] + again["usage"]["completion_tokens"]
        assert llm.complete(document).additional_kwargs["prompt_tokens"] == first.raw["usage"]["prompt_tokens"]

    def test_payload_loads_and_leaks_nothing(self, fresh: None, folder: str) -> None:
        llm = KVBoost(model=folder, engine_config=QUIET, system_prompt="secret", model_kwargs={"token": "hf_secret"})
        payload = llm.to_payload()
        assert not engines._engines
        assert payload == {"class_name": "KVBoost", "model_name": folder, "num_output": 256}
        assert "secret" not in str(payload)

    def test_payload_of_a_loaded_model(self, llm: KVBoost, engine: RecordingEngine) -> None:
        assert llm.to_payload()["context_window"] == engine.window_tokens


class TestReuse:
    def test_542_a_turn_continues_the_one_before(self, llm: KVBoost) -> None:
        """Of gendox-core: the next turn replays what was sent, so all of it is an exact hit."""
        history = [ChatMessage(role="system", content="s"), *user(f"{text(8, 40)} Which river?")]
        first = llm.chat(history)
        second = llm.chat([*history, ChatMessage(role="assistant", content=said(first) or "-"), *user("And?")])
        assert second.raw["exact_tokens"] >= first.raw["usage"]["prompt_tokens"] - 1

    def test_raglite_49_documents_in_another_order(self, llm: KVBoost) -> None:
        """And open-webui 23583: a document that moves."""
        documents = [text(seed, 40) for seed in (20, 21, 22)]
        llm.complete("\n\n".join(["Read this.", *documents, "Which river?"]))
        usage = llm.complete("\n\n".join(["Now that.", *documents[::-1], "Which stone?"])).raw["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0.7 * usage["prompt_tokens"]

    def test_namespaces_never_see_each_other(self, engine: RecordingEngine) -> None:
        document = text(7, 60)

        def cached(llm: KVBoost, **call: Any) -> int:
            usage = llm.complete(document, **call).raw["usage"]
            found: int = usage["prompt_tokens_details"]["cached_tokens"]
            return found

        one, two = (KVBoost(engine=engine, max_tokens=1, namespace=name) for name in ("one", "two"))
        for name in ("one", "two", "three"):
            engine.clear(name)
        assert cached(one) == 0
        assert cached(two) == 0
        assert cached(one) > 0
        assert cached(one, namespace="three") == 0


class TestMetadata:
    def test_17251_window_and_output(self, llm: KVBoost, engine: RecordingEngine) -> None:
        found = llm.metadata
        assert (found.context_window, found.num_output) == (engine.window_tokens, 8)
        assert found.is_chat_model
        assert found.is_function_calling_model  # 17553, 13563
        assert KVBoost(engine=engine, context_window=100).metadata.context_window == 100

    def test_a_window_too_large(self, engine: RecordingEngine, fresh: None, folder: str) -> None:
        with pytest.raises(ValueError, match=r"context_window is 999999.* 4096"):
            KVBoost(engine=engine, context_window=999_999)
        llm = KVBoost(model=folder, engine_config=QUIET, context_window=999_999)
        for _ in range(2):
            with pytest.raises(ConfigError, match="context_window is 999999"):
                llm.chat(user("q"))

    def test_token_ids(self, llm: KVBoost, engine: RecordingEngine) -> None:
        assert llm.get_token_ids("Hello world") == engine.tokenizer("Hello world", add_special_tokens=False).input_ids


class TestConstruction:
    def test_one_of_engine_and_model(self, engine: RecordingEngine) -> None:
        with pytest.raises(ValueError, match="engine= or model="):
            KVBoost()
        with pytest.raises(ValueError, match="engine= or model="):
            KVBoost(engine=engine, model="m")

    @pytest.mark.parametrize(
        "bad",
        [
            {"temperature": -1},
            {"max_tokens": 0},
            {"max_new_tokens": 0},
            {"stop": [""]},
            {"device_map": "auto"},
            {"timeout": 0},
            {"reuse": "some"},
            {"max_retries": -1},
            {"context_window": 0},
            {"engine_config": QUIET},
            {"model_kwargs": {"revision": "x"}},
        ],
        ids=str,
    )
    def test_bad_values_raise_at_once(self, engine: RecordingEngine, bad: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="max_tokens" if "max_new_tokens" in bad else next(iter(bad))):
            KVBoost(engine=engine, **bad)

    def test_both_names_of_the_limit(self, engine: RecordingEngine) -> None:
        assert KVBoost(engine=engine, max_new_tokens=3).max_tokens == 3
        with pytest.raises(ValueError, match="max_new_tokens"):
            KVBoost(engine=engine, max_tokens=3, max_new_tokens=3)

    def test_17678_ten_instances_cost_one_model_loaded_late(
        self, fresh: None, folder: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loads: list[Any] = []
        load = Engine.from_pretrained
        monkeypatch.setattr(
            Engine, "from_pretrained", lambda *a, **k: loads.append(a) or time.sleep(0.05) or load(*a, **k)
        )
        llms = [KVBoost(model=folder, engine_config=QUIET, max_tokens=n + 1) for n in range(10)]
        assert not loads
        threads = [threading.Thread(target=llm.complete, args=("q",)) for llm in llms]  # all at once
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(loads) == 1
        chat = ChatKVBoost(model=folder, engine_config=QUIET, max_tokens=1)
        assert {id(llm.get_engine()) for llm in llms} == {id(chat.get_engine())}
        assert shared_engine(folder, QUIET) is chat.get_engine()
        usage = chat.invoke("q").usage_metadata
        assert usage is not None
        assert usage["input_token_details"]["cache_read"] > 0  # they share their KV

    def test_release_frees_and_loads_again(self, fresh: None, folder: str) -> None:
        llm = KVBoost(model=folder, engine_config=QUIET, max_tokens=1)
        llm.complete("q")
        engine = llm.get_engine()
        release_engines()
        assert engine.closed
        llm.complete("q")
        assert llm.get_engine() is not engine


class Shout(BaseOutputParser):
    """Adds its wishes and shouts the answer."""

    def parse(self, output: str) -> str:
        return output.upper()

    def format(self, query: str) -> str:
        return f"{query} Loudly!"


class TestCopies:
    def test_5431_pickling(self, fresh: None, folder: str, caplog: pytest.LogCaptureFixture) -> None:
        llm = KVBoost(model=folder, engine_config=QUIET, max_tokens=3, messages_to_prompt=bracketed, stop=["x"])
        llm.chat(user("q"))  # the engine is loaded by now
        with caplog.at_level(logging.WARNING):
            copied = pickle.loads(pickle.dumps(llm))
        assert not caplog.records  # LlamaIndex says so when it drops an attribute
        assert (copied.max_tokens, copied.stop, copied.engine_config) == (3, ["x"], QUIET)
        assert said(copied.chat(user("q"))) == said(llm.chat(user("q")))

    def test_5431_what_cannot_be_pickled_raises(self, engine: RecordingEngine, folder: str) -> None:
        with pytest.raises(ConfigError, match="make it with model="):
            pickle.dumps(KVBoost(engine=engine))
        for lost in ({"messages_to_prompt": lambda messages: ""}, {"completion_to_prompt": lambda prompt: ""}):
            with pytest.raises(ConfigError, match=next(iter(lost))):
                pickle.dumps(KVBoost(model=folder, **lost))

    def test_copies_share_the_engine_and_the_handlers(self, engine: RecordingEngine) -> None:
        limiter = TokenBucketRateLimiter(requests_per_minute=600)  # holds a lock
        manager = CallbackManager([LlamaDebugHandler(print_trace_on_end=False)])
        llm = KVBoost(engine=engine, stop=["x"], rate_limiter=limiter, callback_manager=manager)
        for copied in (copy.deepcopy(llm), llm.model_copy(deep=True), copy.copy(llm)):
            assert copied.engine is engine
            assert copied.rate_limiter is limiter
            assert copied.callback_manager is manager
            assert copied.stop == ["x"]
        assert copy.deepcopy(llm).stop is not llm.stop

    def test_dicts_and_json_round(self, fresh: None, folder: str) -> None:
        given: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0.5, "stop": ["x"], "system_prompt": "s"}
        llm = KVBoost(model=folder, engine_config=EngineConfig(ram_budget_bytes=10**8, calibration_dir=None), **given)
        for data in (llm.to_dict(), json.loads(llm.to_json())):
            copied = KVBoost.from_dict(data)
            assert copied.to_dict() == llm.to_dict()
            assert copied.engine_config == llm.engine_config
            assert (copied.max_tokens, copied.stop, copied.system_prompt) == (3, ["x"], "s")
        assert KVBoost.from_json(llm.to_json()).get_engine() is llm.get_engine()
        assert KVBoost.class_name() == llm.to_dict()["class_name"] == "KVBoost"

    def test_json_with_paths_and_dtypes(self, fresh: None, folder: str, tmp_path: Path) -> None:
        config = EngineConfig(calibration_dir=tmp_path)
        llm = KVBoost(model=folder, engine_config=config, model_kwargs={"dtype": torch.float32})
        copied = KVBoost.from_json(llm.to_json())
        assert copied.model_kwargs == {"dtype": "float32"}
        assert copied.get_engine() is llm.get_engine()
        assert KVBoost.from_dict(llm.to_dict()).model_kwargs == {"dtype": torch.float32}

    def test_an_engine_is_given_again(self, llm: KVBoost, engine: RecordingEngine) -> None:
        with pytest.raises(ValueError, match="engine= or model="):
            KVBoost.from_dict(llm.to_dict())
        assert KVBoost.from_dict(llm.to_dict(), engine=engine).max_tokens == 8


class Gate(BaseRateLimiter):
    """Lets everybody through, and counts them."""

    def __init__(self) -> None:
        self.passed: list[str] = []

    def acquire(self, num_tokens: int = 0) -> None:
        self.passed.append("thread")

    async def async_acquire(self, num_tokens: int = 0) -> None:
        self.passed.append("loop")


class TestFrameworkFields:
    @pytest.mark.parametrize("form", FORMS)
    def test_rate_limiter(self, engine: RecordingEngine, form: str) -> None:
        limiter = Gate()
        FORMS[form](KVBoost(engine=engine, max_tokens=1, rate_limiter=limiter), "q")
        assert limiter.passed == ["loop" if form.startswith("a") else "thread"]

    def test_output_parser(self, engine: RecordingEngine) -> None:
        engine.says = "river"
        llm = KVBoost(engine=engine, max_tokens=20, output_parser=Shout())
        assert llm.predict(PromptTemplate("Which?")) == "RIVER"
        assert run(llm.apredict(PromptTemplate("Which?"))) == "RIVER"
        assert engine.prompt == [{"role": "user", "content": "Which? Loudly!"}]

    def test_output_parser_of_a_class(self, engine: RecordingEngine) -> None:
        class Answer(BaseModel):
            river: str

        engine.says = '{"river": "Rhine"}'
        llm = KVBoost(engine=engine, max_tokens=80)
        prompt = PromptTemplate("Which?", output_parser=PydanticOutputParser(output_cls=Answer))
        assert "Rhine" in llm.predict(prompt)


@pytest.fixture
def settings():
    """LlamaIndex's global settings, as they were afterwards."""
    from llama_index.core.utils import get_tokenizer, set_global_tokenizer

    before, tokenizer = dict(vars(Settings)), get_tokenizer()
    yield Settings
    vars(Settings).clear()
    vars(Settings).update(before)
    set_global_tokenizer(tokenizer)


class TestSettings:
    def test_model_and_tokenizer_together(self, settings: Any, llm: KVBoost) -> None:
        assert configure_settings(llm) is llm
        assert settings.llm is llm
        assert settings.tokenizer("Hello world") == llm.get_token_ids("Hello world")
        assert settings.prompt_helper.context_window == llm.metadata.context_window
        synthesizer = get_response_synthesizer()
        assert synthesizer._llm is llm
        nodes = [NodeWithScore(node=TextNode(text=text(1, 20)), score=1.0)]
        assert str(synthesizer.synthesize("Which river?", nodes))

    def test_nothing_is_loaded(self, settings: Any, fresh: None, folder: str) -> None:
        configure_settings(KVBoost(model=folder, engine_config=QUIET))
        assert not engines._engines


class TestThreads:
    def test_llama_cpp_1367_threads_get_their_own_answers(self, llm: KVBoost) -> None:
        questions = [text(seed, 4) for seed in range(6)]
        alone = [said(llm.complete(question)) for question in questions]
        found: list[Any] = [None] * len(questions)

        def ask(i: int) -> None:
            found[i] = said(FORMS[("chat", "stream_chat", "complete", "stream_complete")[i % 4]](llm, questions[i]))

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(questions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == alone

    def test_llama_cpp_1995_gathered_requests_get_their_own_answers(self, llm: KVBoost) -> None:
        questions = [text(seed, 4) for seed in range(6)]
        alone = [said(llm.complete(question)) for question in questions]

        async def all_at_once() -> list[str]:
            async def ask(i: int) -> str:
                if i % 2:
                    return said((await collected(llm.astream_chat(user(questions[i]))))[-1])
                return said(await llm.achat(user(questions[i])))

            return await asyncio.gather(*(ask(i) for i in range(len(questions))))

        assert run(all_at_once()) == alone


@pytest.mark.model
@pytest.mark.slow
class TestRealModel:
    def test_reordered_documents(self, model_path: Any) -> None:
        documents = [
            "The harbour of Vell opens at six in the morning and closes when the tide turns. Ships that arrive late "
            "wait outside the mole until the next day. The harbour master keeps the list of berths.",
            "The market of Vell is held on Thursdays in the square behind the church. Farmers sell cheese, apples and "
            "wool there, and the brewer sells a dark beer that is made only in autumn.",
        ]
        with Engine.from_pretrained(str(model_path), config=EngineConfig(fallback=False)) as engine:
            llm = KVBoost(engine=engine, max_tokens=24)
            engine.warm(documents)
            context = "\n\n".join(reversed(documents))
            answer = llm.complete(f"{context}\n\nOn which day is the market held?")
            assert "Thursday" in said(answer)
            assert answer.raw["approximate_tokens"] > 0.5 * answer.raw["usage"]["prompt_tokens"]
            pieces = list(llm.stream_complete(f"{context}\n\nOn which day is the market held?"))
            assert said(pieces[-1]) == said(answer)


class TestComingFromHuggingFaceLLM:
    @pytest.mark.parametrize(
        ("given", "remedy"),
        [
            ({"model_name": "x"}, "give model="),
            ({"tokenizer_name": "x"}, "leave it out"),
            ({"generate_kwargs": {"do_sample": True}}, "temperature="),
            ({"device_map": "auto"}, "model_kwargs"),
        ],
    )
    def test_its_arguments_say_where_they_went(self, given: dict[str, Any], remedy: str) -> None:
        with pytest.raises(ValueError, match=remedy):
            KVBoost(model="some/model", **given)

    def test_an_engine_that_is_none(self) -> None:
        with pytest.raises(ValueError, match="engine is a str; give an Engine, or model="):
            KVBoost(engine="some/model")
        with pytest.raises(ConfigError, match="give a KVBoost"):
            configure_settings("some/model")  # type: ignore[arg-type]

    def test_an_answer_as_long_as_the_window_leaves_room_for_a_prompt(self, engine: RecordingEngine) -> None:
        llm = KVBoost(engine=engine, max_tokens=2 * engine.window_tokens)
        assert llm.metadata.num_output == engine.window_tokens // 2
