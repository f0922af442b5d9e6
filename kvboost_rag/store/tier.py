"""What every tier offers: chunks by key, and their headers by scope."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ..chunks import ChunkHeader, Scope


class HasBytes(Protocol):
    """The tensor part of a chunk; a tier only needs its size."""

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        ...


KV_co = TypeVar("KV_co", bound=HasBytes, covariant=True)
KV = TypeVar("KV", bound=HasBytes)


@dataclass(frozen=True, eq=False, slots=True)
class Chunk(Generic[KV_co]):
    """A header and the KV of its tokens. Shared between readers; nobody may write to it.

    Attributes:
        header: what was encoded, for whom, behind what.
        kv: keys and values of exactly those tokens.
    """

    header: ChunkHeader
    kv: KV_co

    @property
    def nbytes(self) -> int:
        """Bytes that the chunk charges to a budget: keys, values and every token id kept with them."""
        history = self.header.history
        return self.kv.nbytes + self.header.tokens.nbytes + (0 if history is None else history.nbytes)


class Tier(Protocol[KV]):
    """Chunks by key. Every method may be called from any thread.

    A chunk is visible entirely or not at all.
    """

    @property
    def nbytes(self) -> int:
        """Bytes the stored chunks occupy."""
        ...

    def get(self, key: str) -> Chunk[KV] | None:
        """The chunk, or None."""
        ...

    def put(self, chunk: Chunk[KV]) -> bool:
        """Keep a chunk; True if the tier holds it now. False means refused, and is no error."""
        ...

    def delete(self, key: str) -> bool:
        """Forget a chunk; True if there was one."""
        ...

    def scan(self, scope: Scope | None = None) -> Iterator[ChunkHeader]:
        """Headers of all chunks, or of one scope, as they were when the scan began."""
        ...

    def __contains__(self, key: object) -> bool:
        """Whether `get` would find the key. Does not count as a use."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """State and totals of a store.

    Attributes:
        chunks: chunks that `get` can find.
        stored_bytes: bytes of those, and of deleted ones that somebody still pins.
        reserved_bytes: bytes promised to chunks that are being written.
        pinned_bytes: bytes that cannot be evicted now; part of `stored_bytes`.
        budget_bytes: limit of `stored_bytes` + `reserved_bytes`.
        evictions: chunks pushed out to make room.
        rejections: chunks and reservations refused.
    """

    chunks: int
    stored_bytes: int
    reserved_bytes: int
    pinned_bytes: int
    budget_bytes: int
    evictions: int
    rejections: int
