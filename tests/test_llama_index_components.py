"""LlamaIndex's own components with KVBoost: what they pass to a model is accepted, or has a reason to be refused."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core.extractors import DocumentContextExtractor
from llama_index.core.schema import Document, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore

from llama_index.llms.kvboost import KVBoost
from tests.recording import RecordingEngine, recording


@pytest.fixture
def engine() -> RecordingEngine:
    return recording()


def test_document_context_extractor(engine: RecordingEngine) -> None:
    """It sends the document in front of each of its nodes, and headers that only a service would read."""
    docstore = SimpleDocumentStore()
    docstore.add_documents([Document(id_="d", text="river stone paper winter")])
    node = TextNode(text="river", relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id="d")})
    engine.says = "stone"
    extractor = DocumentContextExtractor(
        docstore=docstore,
        llm=KVBoost(engine=engine),
        num_workers=1,
        max_context_length=2000,
        max_output_tokens=20,
        show_progress=False,
    )
    assert asyncio.run(extractor.aextract([node])) == [{"context": "stone"}]
    assert engine.sampling.max_tokens == 20
    assert "river stone paper winter" in engine.text
