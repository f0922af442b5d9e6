"""Putting computed KV into the library: cut, named, copied. Also: what of a served prompt is worth keeping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from .chunking import BreakFinder, Tiles, cuts, prompt_cuts
from .chunks import ChunkHeader, IntArray, Scope, as_ids, header_of
from .config import ANCHOR_TOKENS, EngineConfig
from .kv import RequestKV, StoredRun
from .library import Library
from .planner import Fresh
from .rope import Rope
from .store import Codec, KVShape


@dataclass(frozen=True, slots=True)
class Stored:
    """What a call to `Keeper.store` added, and the keys of those chunks."""

    chunks: int = 0
    tokens: int = 0
    stored_bytes: int = 0
    keys: tuple[str, ...] = ()


class Keeper:
    """Cuts runs and stores them.

    Args:
        library: takes the chunks.
        breaks: finds sentence and paragraph ends.
        config: chunking.
        codec: the form that KV is stored in.
        shape: of the model's KV.
        rope: rotation of the model's keys; None where they stay as they are.
        window_tokens: most tokens one pass may hold.
    """

    def __init__(
        self,
        library: Library,
        breaks: BreakFinder | None,
        config: EngineConfig,
        *,
        codec: Codec,
        shape: KVShape,
        rope: Rope | None,
        window_tokens: int,
    ) -> None:
        self.library = library
        self._breaks, self._config = breaks, config
        self._codec, self._shape, self._rope = codec, shape, rope
        self._window = window_tokens

    def document_tiles(self, ids: IntArray, max_tokens: int) -> Tiles:
        """Where a document is cut."""
        return cuts(
            ids,
            strategy=self._config.chunking,
            chunk_tokens=self._config.chunk_tokens,
            breaks=self._breaks,
            max_tokens=max_tokens,
        )

    def store(self, headers: Sequence[ChunkHeader], kv: RequestKV) -> Stored:
        """Copy chunks out of a request's cache, as far as the budget lets them in."""
        chunks = tokens = stored_bytes = 0
        keys: list[str] = []
        for header in headers:
            size = self._codec.nbytes(self._shape, len(header))
            if self.library.keep(header, size, partial(self._encoded, header, kv)) == "kept":
                chunks, tokens, stored_bytes = chunks + 1, tokens + len(header), stored_bytes + size
                keys.append(header.key)
        return Stored(chunks, tokens, stored_bytes, tuple(keys))

    def keep_prompt(
        self, scope: Scope, ids: IntArray, kv: RequestKV, *, new: Sequence[tuple[int, int]], exact_until: int
    ) -> list[ChunkHeader]:
        """Store new text of a prompt from the forward pass that served it.

        Args:
            scope: of the prompt.
            ids: the prompt and, if it may be continued, the answer: everything whose KV ``kv`` holds.
            kv: the request's cache.
            new: stretches ``(start, end)`` that no stored chunk held.
            exact_until: KV in front of this position is what a full prefill gives.

        Returns:
            The chunks that were added.
        """
        sequence, added = as_ids(ids), list[ChunkHeader]()
        for start, end in new:
            for a, b in self._prompt_tiles(sequence[start:end]):
                exact = start + b <= exact_until
                # Behind an approximate context KV can never serve an exact hit, and a short run no approximate one.
                if exact or b - a >= 2 * ANCHOR_TOKENS:
                    header = header_of(scope, sequence, start + a, start + b, "prompt", exact=exact)
                    if self.store([header], kv).chunks:
                        added.append(header)
        return added

    def keep_served(
        self, scope: Scope, ids: IntArray, kv: RequestKV, *, prompt_tokens: int, fresh: Fresh
    ) -> ChunkHeader:
        """Store a whole prompt of so many tokens, and its answer so far, with the KV that served it.

        ``fresh`` is of the prompt, see `planner.fresh_of`.
        """
        header = header_of(scope, as_ids(ids), 0, len(ids), "served", exact=False)
        size = self._codec.nbytes(self._shape, len(header))
        known = np.append(fresh, np.ones(max(len(ids) - prompt_tokens, 0), bool))[: len(ids)]
        take = partial(self._encoded, header, kv)
        self.library.keep_served(header, size, take, prompt_tokens=prompt_tokens, fresh=known)
        return header

    def _encoded(self, header: ChunkHeader, kv: RequestKV) -> StoredRun:
        return self._codec.encode(kv, header.base, header.base + len(header), self._rope)

    def _prompt_tiles(self, ids: IntArray) -> Tiles:
        return prompt_cuts(
            ids,
            strategy=self._config.chunking,
            chunk_tokens=self._config.chunk_tokens,
            breaks=self._breaks,
            max_tokens=self._window,
        )
