"""Computing the KV of documents before they are asked for.

KV of a document depends on what stood in front of it. Documents of one call are encoded one behind another, in packs,
so that their KV has seen neighbours of its own kind, as it will in a prompt; and each pack in several orders, so that
no one neighbour counts for much (`packing`). Either halves what repair has to mend (docs/accuracy.md). A document that
comes in a call of its own is encoded behind the one before it, which is computed again for that.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from .chunking import Tiles
from .chunks import IntArray, Scope, as_ids, header_of
from .config import ANCHOR_TOKENS, LEAD_TOKENS, EngineConfig
from .keeping import Keeper, Stored
from .kv import RequestKV
from .packing import PackEncoding
from .planner import make_plan
from .prefill import Executor
from .progress import progress
from .repair import Recipe
from .stats import WarmReport

Outcome = Literal["computed", "warm", "short", "rejected"]


REMEMBERED_SCOPES = 256
_log = logging.getLogger("kvboost_rag")
Running = Callable[[], AbstractContextManager[None]]


@dataclass(slots=True, eq=False)
class _Pack:
    """A pack that grows; parted from what comes next when something of its tenant was forgotten.

    Attributes:
        forgotten: ids of the documents that were.
    """

    namespace: str
    parted: bool = False
    forgotten: set[bytes] = field(default_factory=set)


class Warmer:
    """Encodes documents and stores them.

    Args:
        executor: runs the model.
        keeper: cuts and stores.
        config: chunking and packing.
        separator: ids between two documents of a pack.
        window_tokens: most tokens one pass may hold.
    """

    def __init__(
        self, executor: Executor, keeper: Keeper, config: EngineConfig, *, separator: IntArray, window_tokens: int
    ) -> None:
        self._executor, self._keeper, self._config = executor, keeper, config
        self._separator, self._window = separator, window_tokens
        # Last document of each scope: company for the next one, if that comes in a call of its own.
        self._company: OrderedDict[Scope, IntArray] = OrderedDict()
        self._growing: set[_Pack] = set()
        self._lock = threading.Lock()

    def part_company(self, namespace: str, forgotten: Sequence[IntArray] = ()) -> None:
        """Encode nothing of a tenant behind a document that was warmed before, in packs that grow now either.

        Documents that are ``forgotten`` are not stored by what warms them now.
        """
        with self._lock:
            for pack in self._growing:
                if pack.namespace == namespace:
                    pack.parted = True
                    pack.forgotten.update(ids.tobytes() for ids in forgotten)
            for scope in [scope for scope in self._company if scope.namespace == namespace]:
                del self._company[scope]

    def warm(
        self,
        scope: Scope,
        context: IntArray,
        documents: Sequence[IntArray],
        *,
        named: bool,
        running: Running,
        show_progress: bool,
        started: float,
    ) -> WarmReport:
        """Encode and store documents.

        Args:
            scope: whose they are.
            context: ids in front of every document.
            documents: ids of each.
            named: whether the user named the context; then documents stand right behind it, and it is stored too.
            running: held while the model runs, so that requests get their turn between two documents.
            show_progress: draw a progress bar.
            started: when the call began, `time.perf_counter`.
        """
        totals: Counter[str] = Counter()
        library, keys = self._keeper.library, list[str]()
        evictions = library.evictions
        if named and len(context):
            self._store_context(scope, context, running)
        # Exact mode can only use what was encoded behind a prompt's own beginning.
        packed = not named and self._config.reuse == "approximate"
        with progress("warming", len(documents), unit="doc", show=show_progress) as bar:
            for pack in self._packs(documents) if packed else [[ids] for ids in documents]:
                for outcome, stored in self._pack(scope, context, pack, packed, running):
                    totals[outcome] += 1
                    totals.update(chunks=stored.chunks, tokens=stored.tokens, stored_bytes=stored.stored_bytes)
                    keys.extend(stored.keys)
                    bar.update()
        on_disk = library.on_disk(keys)  # waits until everything is written
        if (recorder := library.recorder) is not None:
            recorder.warmed(scope.namespace, time.perf_counter() - started)
        if evicted := library.evictions - evictions:
            disk = library.disk_stats()
            _log.warning(
                "warming %d documents pushed %d chunks out of the store: %s=%d is too small to keep all; raise it, or "
                "warm fewer documents",
                len(documents),
                evicted,
                "ram_budget_bytes" if disk is None else "disk_budget_bytes",
                library.stats().budget_bytes if disk is None else disk.budget_bytes,
            )
        return WarmReport(
            documents=len(documents),
            computed=totals["computed"],
            already_warm=totals["warm"],
            too_short=totals["short"],
            rejected=totals["rejected"],
            chunks=totals["chunks"],
            tokens=totals["tokens"],
            stored_bytes=totals["stored_bytes"],
            on_disk=on_disk,
            evicted=evicted,
            seconds=time.perf_counter() - started,
        )

    def _packs(self, documents: Sequence[IntArray]) -> Iterator[list[IntArray]]:
        """Neighbours to encode one behind another, in packs of about equal size."""
        limit = self._limit
        fits = [self._fits(ids) for ids in documents]
        left = sum(len(ids) for ids, fit in zip(documents, fits, strict=True) if fit)
        count = max(1, round(left / limit)) if limit else 1
        pack: list[IntArray] = []
        for ids, fit in zip(documents, fits, strict=True):
            if not fit:
                yield [ids]
                continue
            pack.append(ids)
            filled = sum(map(len, pack))
            if filled * count >= left:
                yield pack
                pack, left, count = [], left - filled, max(count - 1, 1)

    @property
    def _limit(self) -> int:
        return min(self._config.pack_tokens, self._window // 2)

    def _fits(self, ids: IntArray) -> bool:
        """Whether a document is packed: one longer than half a pack has context enough of its own."""
        separate = self._config.sink_tokens + self._config.overlap_tokens > 0
        return not separate and 2 * len(ids) <= self._limit

    def _remember(self, scope: Scope, ids: IntArray, packed: bool) -> None:
        if packed and self._fits(ids):
            with self._lock:
                self._company[scope] = ids
                self._company.move_to_end(scope)
                if len(self._company) > REMEMBERED_SCOPES:
                    self._company.popitem(last=False)

    def _pack(
        self, scope: Scope, context: IntArray, documents: Sequence[IntArray], packed: bool, running: Running
    ) -> Iterator[tuple[Outcome, Stored]]:
        pack = _Pack(scope.namespace)
        with self._lock:
            self._growing.add(pack)
        try:
            yield from self._grow(pack, scope, context, documents, packed, running)
        finally:
            with self._lock:
                self._growing.discard(pack)

    def _grow(
        self,
        pack: _Pack,
        scope: Scope,
        context: IntArray,
        documents: Sequence[IntArray],
        packed: bool,
        running: Running,
    ) -> Iterator[tuple[Outcome, Stored]]:
        todo = []
        for ids in documents:
            if len(ids) < ANCHOR_TOKENS:
                yield "short", Stored()
            elif packed and self._known(scope, ids):
                yield "warm", Stored()
            else:
                todo.append(ids)
        company = self._company.get(scope) if packed and self._fits(documents[0]) else None
        if not todo or (len(todo) == 1 and company is None):
            for ids in todo:
                yield self._alone(scope, context, ids, running)
                self._remember(scope, ids, packed)
            return
        # The first of a pack would see no neighbour, so something stands in front of it: the end of the document before
        # this pack, or of its last one. A single document has all of the one before it for company.
        before = todo[-1] if company is None else company
        first = before if len(todo) == 1 else before[-LEAD_TOKENS:]
        lead = np.concatenate([context, first])
        orders = self._config.pack_orders
        encoding = PackEncoding(self._executor, lead, todo, separator=self._separator, orders=orders)
        self._remember(scope, todo[-1], packed)
        left = dict(enumerate(todo))
        steps = encoding.steps()
        while left:
            with running():
                done = next(steps)
                outcome = None if done is None else self._keep(scope, encoding, done, left[done])
                if (parted := pack.parted) and outcome is not None:
                    self._keeper.library.delete(outcome[1].keys)
            if parted:  # something that stands in this pack was forgotten meanwhile: the rest makes a new one
                yield from self._without(pack.forgotten, left, scope, context, todo, packed, running)
                return
            if done is not None and outcome is not None:
                del left[done]
                yield outcome

    def _without(
        self,
        forgotten: set[bytes],
        left: Mapping[int, IntArray],
        scope: Scope,
        context: IntArray,
        documents: Sequence[IntArray],
        packed: bool,
        running: Running,
    ) -> Iterator[tuple[Outcome, Stored]]:
        """A pack once more without some documents; also those that were done, and went with them."""
        stay = [number for number, ids in enumerate(documents) if ids.tobytes() not in forgotten]
        for _ in left.keys() - set(stay):
            yield "computed", Stored()
        outcomes = self._pack(scope, context, [documents[number] for number in stay], packed, running)
        yield from itertools.islice(outcomes, len(set(stay) - left.keys()), None)  # the others were told before

    def _keep(self, scope: Scope, encoding: PackEncoding, number: int, ids: IntArray) -> tuple[Outcome, Stored]:
        """Store a document of a pack."""
        if self._known(scope, ids):
            return "warm", Stored()
        start = encoding.starts[number]
        headers = [
            header_of(scope, encoding.ids, start + a, start + b, "warm", exact=encoding.exact)
            for a, b in self._keeper.document_tiles(ids, self._window)
        ]
        stored = self._keeper.store(headers, encoding.kv)
        return ("computed" if stored.chunks else "rejected"), stored

    def _alone(self, scope: Scope, context: IntArray, ids: IntArray, running: Running) -> tuple[Outcome, Stored]:
        """Encode one document right behind the context, in as many pieces as the window or the strategy asks for."""
        extra = self._config.sink_tokens + self._config.overlap_tokens
        tiles = self._keeper.document_tiles(ids, max(self._window - len(context) - extra, ANCHOR_TOKENS))
        blocks = [[tile] for tile in tiles] if extra else _blocks(tiles, self._window - len(context))
        outcomes = [self._block(scope, context, ids, block, running) for block in blocks]
        parts = [stored for _, stored in outcomes]
        total = Stored(
            chunks=sum(part.chunks for part in parts),
            tokens=sum(part.tokens for part in parts),
            stored_bytes=sum(part.stored_bytes for part in parts),
            keys=tuple(key for part in parts for key in part.keys),
        )
        kinds = {outcome for outcome, _ in outcomes}
        return next(kind for kind in ("computed", "rejected", "warm") if kind in kinds), total

    def _block(
        self, scope: Scope, context: IntArray, ids: IntArray, tiles: Tiles, running: Running
    ) -> tuple[Outcome, Stored]:
        first, end = tiles[0][0], tiles[-1][1]
        lead = np.concatenate([context, self._prefix(ids, first)])
        sequence = as_ids(np.concatenate([lead, ids[first:end]]))
        shift = len(lead) - first
        headers = [header_of(scope, sequence, a + shift, b + shift, "warm") for a, b in tiles]
        missing = [header for header in headers if not self._keeper.library.has(header)]
        if not missing:
            return "warm", Stored()
        with running():
            stored = self._keeper.store(missing, self._prefilled(scope, sequence))
        return ("computed" if stored.chunks else "rejected"), stored

    def _prefilled(self, scope: Scope, sequence: IntArray) -> RequestKV:
        """KV of a sequence; what is stored of its beginning, such as the context, is not computed again."""
        library = self._keeper.library
        plan = make_plan(len(sequence), library.match(scope, sequence, approximate=False).exact)
        with library.pin(plan.keys) as chunks:
            if chunks is None:
                plan, chunks = make_plan(len(sequence), ()), {}
            return self._executor.run(sequence, plan, chunks, Recipe()).kv

    def _prefix(self, ids: IntArray, start: int) -> IntArray:
        """Tokens of the document in front of a separately encoded chunk: sink, then overlap (KVBoost)."""
        sink = ids[: min(self._config.sink_tokens, start)]
        overlap = ids[max(len(sink), start - self._config.overlap_tokens) : start]
        return np.concatenate([sink, overlap]).astype(np.int32) if start else ids[:0]

    def _known(self, scope: Scope, ids: IntArray) -> bool:
        """Whether the document was warmed before, behind whatever neighbours."""
        tiles = self._keeper.document_tiles(ids, self._window)
        found = (self._keeper.library.with_content(scope, ids[a:b]) for a, b in tiles)
        return all(any(header.origin == "warm" for header in headers) for headers in found)

    def _store_context(self, scope: Scope, context: IntArray, running: Running) -> None:
        header = header_of(scope, as_ids(context), 0, len(context), "warm")
        if not self._keeper.library.has(header):
            with running():
                growing = self._executor.grow(len(context))
                growing.extend(context)
                self._keeper.store([header], growing.kv)


def _blocks(tiles: Tiles, room: int) -> list[Tiles]:
    """Neighbouring tiles that fit one pass together."""
    blocks: list[Tiles] = []
    for tile in tiles:
        if blocks and tile[1] - blocks[-1][0][0] <= room:
            blocks[-1].append(tile)
        else:
            blocks.append([tile])
    return blocks
