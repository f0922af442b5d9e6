"""Ordering retrieved documents so that a prompt begins as an earlier one did, whose KV is used as it was served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, Field, PrivateAttr

from kvboost_rag.frameworks import PrefixOrders


class PrefixOrderCompressor(BaseDocumentCompressor):
    """Puts documents into an order that continues one served before, with the best of them last, next to the question.

    Retrieval ranks differ from question to question, so that prompts over the same documents have no common beginning.
    An equal beginning is used as it was served, without repair; in exact mode it is all that is reused of documents. No
    document is dropped or doubled, and the same calls give the same orders.

    Example:
        >>> ContextualCompressionRetriever(base_compressor=PrefixOrderCompressor(), base_retriever=retriever)
        >>> chain = {"context": retriever | ordering.order | join, "question": RunnablePassthrough()} | prompt | llm

    The order changes what the model reads first, so answers may differ from those of rank order.
    """

    model_config = ConfigDict(extra="forbid")

    namespace: str | None = None
    """Tenant whose orders are continued, if a call names none. Tenants never see each other's."""
    max_orders: int = Field(default=1024, ge=1)
    """Orders remembered per namespace; the one used longest ago goes first."""

    _orders: PrefixOrders = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Begin with no orders remembered."""
        self._orders = PrefixOrders(self.max_orders)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """The documents, which come best first, in their new order."""
        return self.order(documents)

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """As `compress_documents`; it takes far less than a millisecond, and so needs no thread."""
        return self.order(documents)

    def order(self, documents: Sequence[Document], namespace: str | None = None) -> list[Document]:
        """The documents in their new order, which is remembered as served.

        Args:
            documents: ranked, best first.
            namespace: tenant; that of the compressor if None.
        """
        ranked = list(documents)
        parts = [(document.id or "", document.page_content) for document in ranked]
        return self._orders.arrange(ranked, parts, self.namespace if namespace is None else namespace)
