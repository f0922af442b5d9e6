"""LlamaIndex's own components with KVBoost: what they pass to a model is accepted, or has a reason to be refused."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core.extractors import DocumentContextExtractor
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.response_synthesizers import BaseSynthesizer, ResponseMode, get_response_synthesizer
from llama_index.core.schema import Document, NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from pydantic import BaseModel

from kvboost_rag import ConfigError, ContextOverflowError
from llama_index.llms.kvboost import KVBoost
from tests.recording import WINDOW, RecordingEngine, recording


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


def answered(synthesizer: BaseSynthesizer, nodes: list[NodeWithScore], form: str) -> str:
    if form == "async":
        return str(asyncio.run(synthesizer.asynthesize("q", nodes)))
    return str(synthesizer.synthesize("q", nodes))  # a stream is read by this


SYNTHESIZERS = [ResponseMode.COMPACT, ResponseMode.REFINE, ResponseMode.TREE_SUMMARIZE]


@pytest.mark.parametrize("mode", SYNTHESIZERS)
@pytest.mark.parametrize("form", ["plain", "streaming", "async"])
def test_17496_an_overflow_reaches_the_user(engine: RecordingEngine, mode: ResponseMode, form: str) -> None:
    """Some synthesizers take a ValueError for a badly formed answer, and say "Empty Response" instead."""
    llm = KVBoost(engine=engine, max_tokens=4)
    # Counting in words fills the prompt too full, as counting with another model's tokenizer may.
    packing = PromptHelper(context_window=WINDOW, num_output=4, tokenizer=str.split)
    synthesizer = get_response_synthesizer(
        response_mode=mode, llm=llm, prompt_helper=packing, streaming=form == "streaming"
    )
    nodes = [NodeWithScore(node=TextNode(text="ab" * 2 * WINDOW))]
    with pytest.raises(ContextOverflowError):
        answered(synthesizer, nodes, form)


class Lamp(BaseModel):
    """A lamp."""

    on: bool
    colour: str


@pytest.mark.parametrize("mode", [ResponseMode.COMPACT, ResponseMode.REFINE])
@pytest.mark.parametrize("form", ["plain", "async"])
def test_no_room_for_an_object_reaches_the_user(engine: RecordingEngine, mode: ResponseMode, form: str) -> None:
    synthesizer = get_response_synthesizer(
        response_mode=mode, llm=KVBoost(engine=engine, max_tokens=3), output_cls=Lamp
    )
    nodes = [NodeWithScore(node=TextNode(text="river"))]
    with pytest.raises(ConfigError, match="max_tokens is 3"):
        answered(synthesizer, nodes, form)
