"""Keeping KV: documents that the user warms, and new text first seen inside a prompt."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import numpy as np
from tqdm.auto import tqdm

from .chunking import BreakFinder, Tiles, cuts, prompt_cuts
from .chunks import ChunkHeader, IntArray, Origin, Scope, as_ids
from .config import ANCHOR_TOKENS, EngineConfig
from .kv import KVRun, RequestKV
from .library import Library
from .planner import Plan, Segment, make_plan
from .prefill import Executor
from .repair import Recipe
from .stats import WarmReport

CONTEXT_KEY = "context"
Outcome = Literal["computed", "warm", "short", "rejected"]


@dataclass(frozen=True, slots=True)
class Warmed:
    """What became of one document."""

    outcome: Outcome
    chunks: int = 0
    tokens: int = 0
    stored_bytes: int = 0


class Keeper:
    """Decides what is stored, cuts it, and stores it.

    Args:
        executor: encodes documents.
        library: takes the chunks.
        breaks: finds sentence and paragraph ends.
        config: strategy and limits.
        token_bytes: bytes of KV per token.
        window_tokens: most tokens one pass may hold.
    """

    def __init__(
        self,
        executor: Executor,
        library: Library,
        breaks: BreakFinder | None,
        config: EngineConfig,
        *,
        token_bytes: int,
        window_tokens: int,
    ) -> None:
        self._executor, self._library, self._breaks, self._config = executor, library, breaks, config
        self._token_bytes, self._window = token_bytes, window_tokens
        self._primed: tuple[str, KVRun] | None = None  # the primer's KV, by the key it would be stored under

    def lead_in(self, scope: Scope, ids: IntArray, *, stored: bool) -> KVRun:
        """KV of what documents are encoded behind, computed once.

        Args:
            scope: of the documents.
            ids: the lead-in, at least one token.
            stored: whether prompts may hit it: yes for a preamble that the user named, no for the primer.
        """
        # The primer is the same for every tenant, so its KV is too.
        owner = scope if stored else Scope(scope.fingerprint, "")
        header = ChunkHeader.of(owner, ids, base=0, history=ids[:0], origin="warm")
        if self._primed is not None and self._primed[0] == header.key:
            return self._primed[1]
        with self._library.pin([header.key] if stored else []) as found:
            if found:
                return found[header.key]
        done = self._executor.run(ids, make_plan(len(ids), ()), {}, Recipe())
        run = done.kv.take(0, len(ids))
        if stored:
            self._library.keep(header, run.nbytes, lambda: run)
        else:
            self._primed = (header.key, run)
        return run

    def warm_all(
        self,
        scope: Scope,
        documents: Sequence[tuple[IntArray, int]],
        *,
        running: Callable[[], AbstractContextManager[None]],
        stored: bool,
        show_progress: bool,
        started: float,
    ) -> WarmReport:
        """Encode and store documents one after the other.

        Args:
            scope: whose they are.
            documents: ids of lead-in and document, and how many are the lead-in's.
            running: held while the model runs, so that requests get their turn between two documents.
            stored: whether the lead-in itself is stored.
            show_progress: draw a progress bar.
            started: when the call began.
        """
        totals: Counter[str] = Counter()
        for ids, split in tqdm(documents, desc="warming", unit="doc", disable=not show_progress):
            before, document = ids[:split], ids[split:]
            with running():
                kv = self.lead_in(scope, before, stored=stored) if len(before) else None
                done = self.warm(scope, document, before, kv)
            totals[done.outcome] += 1
            totals.update(chunks=done.chunks, tokens=done.tokens, stored_bytes=done.stored_bytes)
        return WarmReport(
            documents=len(documents),
            computed=totals["computed"],
            already_warm=totals["warm"],
            too_short=totals["short"],
            rejected=totals["rejected"],
            chunks=totals["chunks"],
            tokens=totals["tokens"],
            stored_bytes=totals["stored_bytes"],
            seconds=time.perf_counter() - started,
        )

    def warm(self, scope: Scope, ids: IntArray, context: IntArray, context_kv: KVRun | None) -> Warmed:
        """Encode one document behind ``context`` and store it, cut by the configured strategy."""
        if len(ids) < ANCHOR_TOKENS:
            return Warmed("short")
        room = self._window - len(context)
        tiles = cuts(
            ids,
            strategy=self._config.chunking,
            chunk_tokens=self._config.chunk_tokens,
            breaks=self._breaks,
            max_tokens=max(room - self._config.sink_tokens - self._config.overlap_tokens, ANCHOR_TOKENS),
        )
        separate = self._config.sink_tokens + self._config.overlap_tokens > 0
        blocks = [[tile] for tile in tiles] if separate else _blocks(tiles, room)
        total = Warmed("warm")
        for block in blocks:
            total = _add(total, self._warm_block(scope, ids, block, context, context_kv))
        return total

    def _warm_block(
        self, scope: Scope, ids: IntArray, tiles: Tiles, context: IntArray, context_kv: KVRun | None
    ) -> Warmed:
        first = tiles[0][0]
        lead = np.concatenate([context, self._prefix(ids, first)]).astype(np.int32)
        sequence = as_ids(np.concatenate([lead, ids[first : tiles[-1][1]]]))
        shift = len(lead) - first
        headers = [_header(scope, sequence, a + shift, b + shift, "warm") for a, b in tiles]
        missing = [h for h in headers if not self._library.has(h)]
        if not missing:
            return Warmed("warm")
        segments = []
        if context_kv is not None and len(context):
            segments.append(Segment("exact", 0, len(context), CONTEXT_KEY))
        segments.append(Segment("compute", len(context) if segments else 0, len(sequence)))
        plan = Plan(len(sequence), tuple(segments))
        done = self._executor.run(sequence, plan, {} if context_kv is None else {CONTEXT_KEY: context_kv}, Recipe())
        return self._store(missing, done.kv)

    def _prefix(self, ids: IntArray, start: int) -> IntArray:
        """Tokens of the document in front of a separately encoded chunk: sink, then overlap (KVBoost)."""
        sink = ids[: min(self._config.sink_tokens, start)]
        overlap = ids[max(len(sink), start - self._config.overlap_tokens) : start]
        return np.concatenate([sink, overlap]).astype(np.int32) if start else ids[:0]

    def keep_prompt(
        self, scope: Scope, ids: IntArray, kv: RequestKV, *, new: Sequence[tuple[int, int]], exact_until: int
    ) -> None:
        """Store new text of a prompt from the forward pass that served it.

        Args:
            scope: of the prompt.
            ids: the prompt and, if it may be continued, the answer: everything whose KV ``kv`` holds.
            kv: the request's cache.
            new: stretches ``(start, end)`` that no stored chunk held.
            exact_until: KV in front of this position is what a full prefill gives.
        """
        sequence = as_ids(ids)
        for start, end in new:
            for a, b in self._prompt_tiles(sequence[start:end]):
                exact = start + b <= exact_until
                # Behind an approximate context KV can never serve an exact hit, and a short run no approximate one.
                if exact or b - a >= 2 * ANCHOR_TOKENS:
                    header = _header(scope, sequence, start + a, start + b, "prompt", exact=exact)
                    self._store([header], kv)

    def _prompt_tiles(self, ids: IntArray) -> Tiles:
        return prompt_cuts(
            ids,
            strategy=self._config.chunking,
            chunk_tokens=self._config.chunk_tokens,
            breaks=self._breaks,
            max_tokens=self._window,
        )

    def _store(self, headers: Sequence[ChunkHeader], kv: RequestKV) -> Warmed:
        kept = Warmed("rejected")
        for header in headers:
            size = len(header) * self._token_bytes
            start, end = header.base, header.base + len(header)
            if self._library.keep(header, size, lambda s=start, e=end: kv.take(s, e)) == "kept":  # type: ignore[misc]
                kept = _add(kept, Warmed("computed", 1, len(header), size))
        return kept


def _header(
    scope: Scope, sequence: IntArray, start: int, end: int, origin: Origin, *, exact: bool = True
) -> ChunkHeader:
    history = sequence[:start] if exact else None
    return ChunkHeader.of(scope, sequence[start:end], base=start, history=history, origin=origin)


def _blocks(tiles: Tiles, room: int) -> list[Tiles]:
    """Neighbouring tiles that fit one pass together."""
    blocks: list[Tiles] = []
    for tile in tiles:
        if blocks and tile[1] - blocks[-1][0][0] <= room:
            blocks[-1].append(tile)
        else:
            blocks.append([tile])
    return blocks


def _add(a: Warmed, b: Warmed) -> Warmed:
    rank = ("warm", "rejected", "computed")
    outcome = max(a.outcome, b.outcome, key=rank.index)
    return Warmed(outcome, a.chunks + b.chunks, a.tokens + b.tokens, a.stored_bytes + b.stored_bytes)
