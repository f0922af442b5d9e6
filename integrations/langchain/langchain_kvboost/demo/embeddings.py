"""Sentence embeddings with a Hugging Face encoder: mean of the last hidden states, normalised.

This is what sentence-transformers computes for models such as all-MiniLM-L6-v2, without its further dependencies.
"""

from __future__ import annotations

import torch
from langchain_core.embeddings import Embeddings
from transformers import AutoModel, AutoTokenizer

BATCH_TEXTS = 16
MAX_TOKENS = 256  # what all-MiniLM-L6-v2 was trained on; the rest of a longer text is not looked at


class MeanPoolingEmbeddings(Embeddings):
    """Embeddings of texts, each a unit vector, so that inner product and Euclidean distance rank alike.

    Args:
        model: Hugging Face id or folder of an encoder.
        max_tokens: longer texts are cut.
    """

    def __init__(self, model: str, *, max_tokens: int = MAX_TOKENS) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModel.from_pretrained(model).eval()
        self._max_tokens = max_tokens

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector per text, in order."""
        vectors: list[list[float]] = []
        for start in range(0, len(texts), BATCH_TEXTS):
            vectors.extend(self._embed(texts[start : start + BATCH_TEXTS]))
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """The vector of a question."""
        return self._embed([text])[0]

    @torch.inference_mode()
    def _embed(self, texts: list[str]) -> list[list[float]]:
        inputs = self._tokenizer(
            texts, padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt"
        ).to(self._model.device)
        hidden = self._model(**inputs).last_hidden_state  # (batch, seq, width)
        weights = inputs["attention_mask"][..., None].to(hidden.dtype)
        means = (hidden * weights).sum(1) / weights.sum(1)  # padding must not count
        vectors: list[list[float]] = torch.nn.functional.normalize(means, dim=-1).tolist()
        return vectors
