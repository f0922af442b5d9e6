"""Which nodes of a store need which KV: warmed when they come, forgotten when the last one with their text goes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from llama_index.core.schema import BaseNode

from kvboost_rag import EngineClosedError, WarmReport
from kvboost_rag.frameworks import Records

from .nodes import NodeWarmer


@dataclass(frozen=True, slots=True)
class Entry:
    """A node that comes into a store.

    Attributes:
        name: its id.
        document: id of the document it was cut from, if there is one.
        text: as prompts show it.
        forgets: how often something had been forgotten when it came.
    """

    name: str
    document: str | None
    text: str
    forgets: int


class NodeKeeper:
    """Knows the nodes of a store and keeps the KV in step. Thread-safe. All of it is too slow for an event loop.

    Forgetting drops KV that was computed behind the forgotten text, and near copies of it; nodes that may have lost
    theirs that way are warmed again.
    """

    def __init__(self, warmer: NodeWarmer) -> None:
        self._warmer = warmer
        self._records = Records(keep_texts=True)
        self._lock = threading.Lock()
        self._nodes_of: dict[str, set[str]] = {}  # document -> nodes
        self._document_of: dict[str, str] = {}
        # One batch or one forgetting at a time: what is encoded behind a text must be known when that is forgotten.
        self._encoding = threading.Lock()

    def entries(self, nodes: Iterable[BaseNode]) -> list[Entry]:
        """Nodes, rendered; from now on nobody forgets these texts until `keep` or `drop_again`.

        Raises:
            PromptError: one cannot be rendered.
        """
        forgets = self._records.forgets
        found = [Entry(node.node_id, node.ref_doc_id, self._warmer.render(node), forgets) for node in nodes]
        self._records.claim(entry.text for entry in found)
        return found

    def batches(self, entries: Sequence[Entry]) -> list[list[str]]:
        """Distinct texts to give to `warm`, one after the other."""
        texts = list(dict.fromkeys(entry.text for entry in entries))
        size = self._warmer.batch_size
        return [texts[at : at + size] for at in range(0, len(texts), size)]

    def warm(self, batch: list[str]) -> WarmReport:
        """Warm texts in one call of the engine."""
        with self._encoding:
            report = self._warmer.warm(batch)
            self._records.warmed(batch, computed=report.chunks > 0)
            return report

    def keep(self, entries: Sequence[Entry]) -> None:
        """The store has these nodes now; what they replaced is forgotten."""
        names = [entry.name for entry in entries]
        replaced = list(self._records.texts(names).values())
        with self._lock:
            for entry in entries:
                self._strike(entry.name)
                if entry.document is not None:
                    self._document_of[entry.name] = entry.document
                    self._nodes_of.setdefault(entry.document, set()).add(entry.name)
        texts = [entry.text for entry in entries]
        self._records.put_all((entry.name, entry.text) for entry in entries)
        self._forget(replaced)
        if any(entry.forgets != self._records.forgets for entry in entries):
            self._warm_again(texts)  # what was not recorded yet may have gone with what was forgotten
        self._records.release(texts)
        self._forget(texts)  # what was deleted meanwhile

    def drop_again(self, entries: Sequence[Entry]) -> None:
        """The store did not take these nodes."""
        self._records.release(entry.text for entry in entries)
        self._forget([entry.text for entry in entries])

    def nodes_of(self, document: str) -> list[str]:
        """Ids of the nodes that were cut from a document."""
        with self._lock:
            return sorted(self._nodes_of.get(document, ()))

    def names(self) -> list[str]:
        """Ids of all nodes."""
        return self._records.ids()

    def gone(self, names: Iterable[str]) -> None:
        """These nodes left the store: forget the texts that no other node has."""
        names = list(names)
        texts = list(self._records.texts(names).values())
        self._records.drop(names)
        with self._lock:
            for name in names:
                self._strike(name)
        self._forget(texts)

    def _strike(self, name: str) -> None:
        document = self._document_of.pop(name, None)
        if document is not None:
            self._nodes_of[document].discard(name)
            if not self._nodes_of[document]:
                del self._nodes_of[document]

    def _forget(self, texts: list[str]) -> None:
        records = self._records
        with self._encoding, records.lock:  # or an add could find a text warm that is being forgotten
            unneeded = records.unneeded(texts)
            if not unneeded:
                return
            try:
                dropped = self._warmer.forget(unneeded)
            except EngineClosedError:  # a closed engine holds no KV
                return
            concerned = records.forgotten(unneeded)
            others = list(records.texts(concerned).values()) if dropped else []
            records.claim(others)
        try:
            self._warm_again(others)
        finally:
            records.release(others)
            self._forget(others)  # what was deleted meanwhile

    def _warm_again(self, texts: Iterable[str]) -> None:
        distinct = list(dict.fromkeys(texts))
        with suppress(EngineClosedError):
            for at in range(0, len(distinct), self._warmer.batch_size):
                self.warm(distinct[at : at + self._warmer.batch_size])
