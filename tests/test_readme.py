"""The examples of README and documentation run as they stand, with the fetched model in place of the hub's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
LANGCHAIN = README.parent / "docs" / "langchain.md"


def run_blocks(page: Path, model_path: Path, names: dict[str, Any]) -> None:
    """Run a page's Python blocks in order, in one module."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)
    assert blocks
    for block in blocks:
        code = block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(model_path))
        exec(compile(code, str(page), "exec"), names)


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


def test_the_example_is_short() -> None:
    first = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 16
