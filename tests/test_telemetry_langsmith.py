"""What LangSmith's real client sends of an answer: usage where LangSmith looks for it, with what the cache held."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.tracers import LangChainTracer
from langsmith import Client

from langchain_kvboost import ChatKVBoost, KVBoostLLM
from tests.tiny import engine_of, text


class _Receiver(http.server.BaseHTTPRequestHandler):
    """Takes what LangSmith would take."""

    received: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/runs"):
            self.received.append(json.loads(body))
        self.send_response(202)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_PATCH = do_POST

    def log_message(self, *args: Any) -> None:
        """Nothing is printed."""


@pytest.fixture
def langsmith() -> Iterator[tuple[LangChainTracer, list[dict[str, Any]]]]:
    received: list[dict[str, Any]] = []
    handler = type("Receiver", (_Receiver,), {"received": received})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        client = Client(
            api_url=f"http://127.0.0.1:{server.server_port}", api_key="none", auto_batch_tracing=False, info={}
        )
        yield LangChainTracer(client=client), received
        client.close()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("streams", [False, True])
def test_a_chat_answer(langsmith: tuple[LangChainTracer, list[dict[str, Any]]], streams: bool) -> None:
    tracer, received = langsmith
    with engine_of() as engine:
        chat = ChatKVBoost(engine=engine, max_tokens=4)
        prompt = text(1, 60)
        chat.invoke(prompt)
        options = {"callbacks": [tracer]}
        if streams:
            list(chat.stream(prompt, options))  # type: ignore[arg-type]
        else:
            chat.invoke(prompt, options)  # type: ignore[arg-type]
        tracer.wait_for_futures()
        ids = len(engine.tokenize([{"role": "user", "content": prompt}]))
    start, end = received
    assert start["extra"]["metadata"]["ls_provider"] == "kvboost"
    assert start["extra"]["metadata"]["ls_model_type"] == "chat"
    usage = end["extra"]["metadata"]["usage_metadata"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (ids, 4, ids + 4)
    assert usage["input_token_details"]["cache_read"] > 0.9 * ids
    assert usage["input_token_details"]["cache_creation"] >= 0


def test_a_text_answer(langsmith: tuple[LangChainTracer, list[dict[str, Any]]]) -> None:
    tracer, received = langsmith
    with engine_of() as engine:
        KVBoostLLM(engine=engine, max_tokens=4).invoke("river stone paper", {"callbacks": [tracer]})
        tracer.wait_for_futures()
        ids = len(engine.tokenize("river stone paper"))
    _, end = received
    tokens = end["outputs"]["llm_output"]["token_usage"]
    assert (tokens["prompt_tokens"], tokens["completion_tokens"]) == (ids, 4)
