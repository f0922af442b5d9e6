"""Nodes, embeddings and real indexes for the tests of the LlamaIndex ingest."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import faiss
import numpy as np
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.schema import MetadataMode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.vector_stores.faiss import FaissVectorStore

from kvboost_rag import Engine
from llama_index.llms.kvboost import KVBoost
from tests.tiny import engine_of, new_model, text

DIMENSIONS = 8


class HashEmbedding(BaseEmbedding):
    """Equal vectors for equal texts, and otherwise vectors of no order."""

    def _get_text_embedding(self, text: str) -> list[float]:
        seed = int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little")
        return np.random.default_rng(seed).normal(size=DIMENSIONS).tolist()

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


EMBEDDING = HashEmbedding()


@functools.cache
def wide_model() -> Any:
    """A tiny model with room for LlamaIndex's prompts."""
    return new_model("llama", max_position_embeddings=1280)


def wide_engine(**config: Any) -> Engine:
    """A fresh engine; its prompts are found by nobody unless a test says so."""
    return engine_of(wide_model(), **config)


def node(seed: int, words: int = 40, *, document: str | None = None, **fields: Any) -> TextNode:
    """A node with metadata, cut from a document if one is named."""
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document)} if document else {}
    fields = {"text": text(seed, words), "metadata": {"file": f"file {seed}"}, **fields}
    return TextNode(id_=f"n{seed}", relationships=source, **fields)


def shown(nodes: Sequence[Any]) -> list[str]:
    """Texts of nodes inside prompts."""
    return [n.get_content(metadata_mode=MetadataMode.LLM).strip() for n in nodes]


def answering(engine: Engine, **fields: Any) -> KVBoost:
    return KVBoost(engine=engine, max_tokens=1, **fields)


def reused_share(engine: Engine, texts: Sequence[str], ask: Any) -> float:
    """Share of the texts' tokens that the requests of `ask` need not compute, on an engine that served none before."""
    assert engine.stats().requests == 0
    ask()
    stats = engine.stats()
    assert stats.requests == 1
    own = sum(len(engine.tokenize(t)) for t in texts)
    assert stats.prompt_tokens > own
    return (stats.exact_tokens + stats.approximate_tokens) / own


def kept_share(engine: Engine, texts: Sequence[str], **options: Any) -> float:
    """Share of the texts' tokens whose KV is there; changes nothing."""
    prompt = "\n\n".join(["Read this.", *texts, "Which river?"])
    usage = engine.prefill(prompt, store=False, **options).usage
    return (usage.exact_tokens + usage.approximate_tokens) / sum(len(engine.tokenize(t)) for t in texts)


def new_faiss() -> FaissVectorStore:
    return FaissVectorStore(faiss_index=faiss.IndexFlatL2(DIMENSIONS))
