"""Ordering retrieved documents so that a prompt begins as an earlier one did, whose KV is used as it was served."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, Field, PrivateAttr

NAMESPACES = 256  # remembered; the one used longest ago goes first


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

    _memory: _Memory = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Begin with no orders remembered."""
        self._memory = _Memory(self.max_orders)

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
        if not ranked:
            return []
        keys = [_identity(document) for document in ranked]
        places: dict[bytes, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(key, []).append(place)
        sizes = {key: len(ranked[at[0]].page_content) for key, at in places.items()}
        order = self._memory.order(namespace if namespace is not None else self.namespace, keys, sizes)
        # Of equal documents the best comes last, so that it and not its copy ends the prompt.
        return [ranked[places[key].pop()] for key in order]


class _Memory:
    """Orders that were served, per namespace. Thread-safe."""

    def __init__(self, max_orders: int) -> None:
        self._max_orders = max_orders
        self._lock = threading.Lock()
        self._spaces: OrderedDict[Hashable, _Orders] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            spaces = OrderedDict((name, orders.copy()) for name, orders in self._spaces.items())
        return {"_max_orders": self._max_orders, "_spaces": spaces}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())  # locks cannot be copied

    def order(self, namespace: Hashable, ranked: list[bytes], sizes: dict[bytes, int]) -> tuple[bytes, ...]:
        """The new order of ranked keys."""
        with self._lock:
            orders = self._spaces.setdefault(namespace, _Orders())
            self._spaces.move_to_end(namespace)
            if len(self._spaces) > NAMESPACES:
                self._spaces.popitem(last=False)
            best, others = ranked[0], ranked[1:]
            beginning = orders.beginning(others, sizes)
            rest = Counter(others) - Counter(beginning)
            # Worst first, so that the better stand nearer to the question.
            order = (*beginning, *sorted(rest.elements(), key=others.index, reverse=True), best)
            orders.add(order, self._max_orders)
            return order


class _Orders:
    """Orders of one namespace, the latest last."""

    def __init__(self) -> None:
        self._orders: OrderedDict[tuple[bytes, ...], None] = OrderedDict()

    def copy(self) -> _Orders:
        copied = _Orders()
        copied._orders = self._orders.copy()
        return copied

    def beginning(self, keys: list[bytes], sizes: dict[bytes, int]) -> tuple[bytes, ...]:
        """The longest beginning of a served order that these keys can make; of equal ones the latest."""
        best: tuple[bytes, ...] = ()
        most = 0
        for order in reversed(self._orders):
            left, length, size = Counter(keys), 0, 0
            while length < len(order) and left[order[length]] > 0:
                left[order[length]] -= 1
                size += sizes[order[length]]
                length += 1
            if size > most:
                best, most = order[:length], size
        return best

    def add(self, order: tuple[bytes, ...], limit: int) -> None:
        self._orders[order] = None
        self._orders.move_to_end(order)
        if len(self._orders) > limit:
            self._orders.popitem(last=False)


def _identity(document: Document) -> bytes:
    """Equal for what a prompt would show alike: the content counts, since a document may change under its id."""
    digest = blake2b(digest_size=16)
    for part in (document.id or "", document.page_content):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.digest()


PrefixOrderCompressor.model_rebuild()
