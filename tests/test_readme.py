"""The examples of README and documentation run as they stand, with the fetched model in place of the hub's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
LANGCHAIN = README.parent / "docs" / "langchain.md"
LLAMA_INDEX = README.parent / "docs" / "llama_index.md"


def run_blocks(page: Path, model_path: Path, names: dict[str, Any]) -> None:
    """Run a page's Python blocks in order, in one module."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)
    assert blocks
    for block in blocks:
        code = block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(model_path))
        exec(compile(code, str(page), "exec", dont_inherit=True), names)


@pytest.mark.model
def test_the_example_runs(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks(README, model_path, {})
    assert capsys.readouterr().out.strip()


@pytest.mark.model
@pytest.mark.slow
def test_the_langchain_page_runs(model_path: Path, embeddings_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from langchain_kvboost import release_engines
    from langchain_kvboost.demo.embeddings import MeanPoolingEmbeddings

    names = {"embeddings": MeanPoolingEmbeddings(str(embeddings_path)), "__name__": "page"}
    try:
        run_blocks(LANGCHAIN, model_path, names)
        assert names["forced"].tool_calls[0]["name"] == "word_count"
        assert (names["report"].computed, names["again"].computed) == (5, 0)
        assert names["answer"].usage_metadata["input_token_details"]["cache_read"] > 100
    finally:
        release_engines()
    assert capsys.readouterr().out.strip()


@pytest.mark.model
@pytest.mark.slow
def test_the_llama_index_page_runs(
    model_path: Path,
    embeddings_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from llama_index.core import Settings
    from llama_index.core.embeddings import BaseEmbedding

    from langchain_kvboost.demo.embeddings import MeanPoolingEmbeddings
    from llama_index.llms.kvboost import release_engines

    embeddings = MeanPoolingEmbeddings(str(embeddings_path))

    class MiniLM(BaseEmbedding):
        def _get_text_embedding(self, text: str) -> list[float]:
            return embeddings.embed_query(text)

        def _get_query_embedding(self, query: str) -> list[float]:
            return embeddings.embed_query(query)

        async def _aget_query_embedding(self, query: str) -> list[float]:
            return embeddings.embed_query(query)

    monkeypatch.chdir(tmp_path)  # the page persists an index
    for name in ("_llm", "_embed_model", "_tokenizer", "_prompt_helper"):
        monkeypatch.setattr(Settings, name, getattr(Settings, name, None), raising=False)
    monkeypatch.setattr("llama_index.core.global_tokenizer", None)
    names = {"embed_model": MiniLM(), "__name__": "page"}
    try:
        run_blocks(LLAMA_INDEX, model_path, names)
        assert names["llm"].get_tool_calls_from_response(names["forced"])[0].tool_name == "word_count"
        assert names["report"].computed == 0 < names["report"].already_warm
        assert isinstance(names["verdict"].relevant, bool)
        assert names["llm"].get_engine().stats().approximate_tokens > 300
    finally:
        release_engines()
    assert capsys.readouterr().out.strip()


def test_the_example_is_short() -> None:
    first = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 16
