"""RAM in front of a disk: what was put into either is found in both.

What RAM evicts stays on disk. What is asked for and only on disk is used from its map, and copied to RAM afterwards if
RAM has room without evicting; beyond that, the system's page cache is what keeps it near. Prompts as they were served
stay in RAM only.
"""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

from ..chunks import ChunkHeader, Scope
from ..errors import StoreError
from ..kv import StoredRun
from ..stats import DiskStats
from .codec import codec_of
from .disk import DiskStore
from .eviction import Policy, Worth
from .memory import MemoryStore
from .reading import DiskReader, News
from .tier import Chunk, StoreStats
from .writer import Writer

Kept = Literal["kept", "present", "refused"]
DISK_ERRORS = (OSError, sqlite3.Error, StoreError, UnicodeDecodeError)


class TieredStore:
    """RAM, and a disk if there is one. Thread-safe.

    Args:
        budget_bytes: limit of RAM.
        policy: which chunk leaves RAM first.
        worth: what a chunk is worth to the policy.
        disk: the second tier; `DiskReader` for one that is only read.
        write_behind_bytes: most bytes that may wait to be written, beside RAM's budget.
        on_leave: told of the key of every chunk that left, or may have left, all tiers; runs under locks of tiers.
    """

    def __init__(
        self,
        budget_bytes: int,
        policy: Policy | None = None,
        worth: Callable[[Chunk[StoredRun]], Worth] | None = None,
        *,
        disk: DiskReader | None = None,
        write_behind_bytes: int = 0,
        on_leave: Callable[[str], None],
    ) -> None:
        self._on_leave = on_leave
        self.disk = disk
        self._ram: MemoryStore[StoredRun] = MemoryStore(budget_bytes, policy, self._left_ram, worth)
        self._writer: Writer | None = None
        self._last_stats: DiskStats | None = None
        # Writer and disk know this store weakly: whoever forgets to close it loses nothing, and leaves nothing open.
        if isinstance(disk, DiskStore):
            self._writer = Writer(partial(_write, disk, weakref.WeakMethod(self._failed)), write_behind_bytes)
        if disk is not None:
            disk.tell(partial(_tell, weakref.WeakMethod(self._left_disk)))
            self._finalizer = weakref.finalize(self, _close, self._writer, disk)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def __contains__(self, key: object) -> bool:
        return key in self._ram or self._is_kept(key)

    def _is_kept(self, key: object) -> bool:
        """Whether a chunk is on disk or on its way there."""
        disk = self._open_disk
        return disk is not None and (key in disk or (self._writer is not None and key in self._writer))

    @property
    def _open_disk(self) -> DiskReader | None:
        return self.disk if self.disk is not None and self._finalizer.alive else None

    @contextmanager
    def pin(self, keys: Sequence[str]) -> Iterator[list[Chunk[StoredRun] | None]]:
        """Hold chunks; None stands for what is not stored. Until the block is left they are neither freed nor wiped."""
        disk = self._open_disk
        with self._ram.pin(keys) as held:
            chunks, loaded = list(held), list[Chunk[StoredRun]]()
            for at, key in enumerate(keys):
                if chunks[at] is None and disk is not None:
                    chunks[at] = self._fetch(disk, key, loaded)
            yield chunks
        if loaded:
            self._promote(loaded)
        if isinstance(disk, DiskStore) and disk.has_unwiped:
            self._collect(disk)

    def _fetch(self, disk: DiskReader, key: str, loaded: list[Chunk[StoredRun]]) -> Chunk[StoredRun] | None:
        chunk = None if self._writer is None else self._writer.get(key)
        if chunk is None:
            try:
                chunk = disk.get(key)
            except DISK_ERRORS as error:
                disk.tally.failed(error)
            if chunk is not None:
                loaded.append(chunk)
        return chunk

    def _promote(self, chunks: list[Chunk[StoredRun]]) -> None:
        """Copy to RAM what was read from disk, as far as there is room, after the request that asked for it."""
        stats = self._ram.stats()
        room = stats.budget_bytes - stats.stored_bytes - stats.reserved_bytes
        for chunk in chunks:
            if self._writer is not None and chunk.nbytes <= room:
                room -= chunk.nbytes
                self._writer.run_soon(lambda chunk=chunk: self._copy(chunk))  # type: ignore[misc]

    def _copy(self, chunk: Chunk[StoredRun]) -> None:
        stats = self._ram.stats()
        if chunk.nbytes <= stats.budget_bytes - stats.stored_bytes - stats.reserved_bytes and self._is_kept(
            chunk.header.key
        ):
            tensors = {name: tensor.clone() for name, tensor in chunk.kv.tensors().items()}
            run = codec_of(chunk.kv.codec).load(tensors, chunk.kv.metadata())
            self._ram.put(Chunk(chunk.header, run))
            if not self._is_kept(chunk.header.key):  # deleted meanwhile
                self._ram.delete(chunk.header.key)

    def refresh(self, scope: Scope) -> News:
        """What others changed on disk, and the first time everything that is there of a scope."""
        disk = self._open_disk
        if disk is None:
            return News([], [], [])
        try:
            news = disk.refresh(scope)
        except DISK_ERRORS as error:
            disk.tally.failed(error)
            return News([], [], [])
        for key in news.deleted:  # somebody wanted it gone, so it must not live on here
            self._ram.delete(key)
        return news

    def headers(self, scope: Scope) -> list[ChunkHeader]:
        """All chunks of a scope."""
        return self._headers(lambda header: header.scope == scope, scope.namespace)

    def headers_in(self, namespace: str) -> list[ChunkHeader]:
        """All chunks of a tenant, under every fingerprint."""
        return self._headers(lambda header: header.scope.namespace == namespace, namespace)

    def _headers(self, fits: Callable[[ChunkHeader], bool], namespace: str) -> list[ChunkHeader]:
        found = {header.key: header for header in self._ram.scan() if fits(header)}
        if self._writer is not None:
            found.update((c.header.key, c.header) for c in self._writer.chunks() if fits(c.header))
        if (disk := self._open_disk) is not None:
            try:
                found.update((h.key, h) for h in disk.headers_in(namespace) if fits(h))
            except sqlite3.Error as error:
                raise StoreError(f"the catalogue of {disk.folder} cannot be read: {error}") from error
        return list(found.values())

    # ---- writing -----------------------------------------------------------------------------------------------------

    def keep(
        self, header: ChunkHeader, kv_bytes: int, take: Callable[[], StoredRun], expires: float | None = None
    ) -> tuple[Kept, Chunk[StoredRun] | None]:
        """Store a chunk in RAM, and soon on disk; room is made before ``take`` copies anything.

        What was asked for (origin "warm") waits for room among what is unwritten; what was seen in a prompt does not,
        and is not written then.
        """
        if header.key in self:
            self.ensure_on_disk(header)
            return "present", None
        nbytes = kv_bytes + header.ids_bytes
        reservation = self._ram.reserve(nbytes)
        goes_on = self._writer is not None and self._open_disk is not None and header.origin != "served"
        if reservation is None:
            if not goes_on or not (header.origin == "warm" or self._has_room(nbytes)):
                return "refused", None
            chunk = Chunk(header, take())
            return ("kept", chunk) if self._submit(chunk, expires) else ("refused", None)
        with reservation:
            chunk = Chunk(header, take())
            in_ram = self._ram.put(chunk, reservation)
        on_way = goes_on and self._submit(chunk, expires)
        return ("kept", chunk) if in_ram or on_way else ("refused", None)

    def _has_room(self, nbytes: int) -> bool:
        assert self._writer is not None
        if self._writer.has_room(nbytes):
            return True
        self._count_unwritten()
        return False

    def _count_unwritten(self) -> None:
        assert self.disk is not None
        self.disk.tally.add(unwritten=1)

    def _submit(self, chunk: Chunk[StoredRun], expires: float | None) -> bool:
        assert self._writer is not None
        if self._writer.submit(chunk, expires, wait=chunk.header.origin == "warm"):
            return True
        self._count_unwritten()
        return False

    def ensure_on_disk(self, header: ChunkHeader, expires: float | None = None) -> None:
        """Have a chunk written that so far only RAM holds, for instance because the disk was full before."""
        if self._writer is None or self._open_disk is None or self._is_kept(header.key):
            return
        chunk = self._ram.get(header.key)
        if chunk is not None and chunk.header.origin != "served":
            self._submit(chunk, expires)

    def on_disk(self, keys: Iterable[str]) -> int:
        """How many of the chunks are on disk now, for good. Waits until what was taken is written."""
        self.flush()
        disk = self._open_disk
        try:
            return 0 if disk is None else disk.count(keys)
        except DISK_ERRORS as error:
            assert disk is not None
            disk.tally.failed(error)
            return 0

    def loading_s(self, keys: Iterable[str]) -> float:
        """Seconds that it takes to bring chunks from disk, as far as RAM lacks them, by what loads took so far."""
        disk = self._open_disk
        if disk is None:
            return 0.0
        return disk.loading_s(key for key in keys if key not in self._ram)

    def in_ram(self, key: str) -> bool:
        """Whether a chunk can be had without the disk."""
        return key in self._ram or (self._writer is not None and key in self._writer)

    def delete(self, keys: Sequence[str], *, expired: bool = False) -> int:
        """Forget chunks in every tier; how many there were. What was only overdue leaves the disk a little later.

        Raises:
            StoreError: the disk could not forget them.
        """
        keys = list(dict.fromkeys(keys))
        there = sum(key in self for key in keys)
        served = {key for key in keys if (chunk := self._ram.get(key)) is not None and chunk.header.origin == "served"}
        disk = self._open_disk
        for key in keys:
            if self._writer is not None:
                self._writer.cancel(key)
        if disk is not None:
            disk.hide(keys)
        for key in keys:  # last, for what only now is hidden may just have been copied here
            self._ram.delete(key)
        keys = [key for key in keys if key not in served]
        if not isinstance(disk, DiskStore) or not keys:
            return there
        if expired:
            self._collect(disk)
            return there
        try:
            return max(there, disk.delete_many(keys))
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"{disk.folder} could not forget {len(keys)} chunks ({error}), which may still lie there; mend it, "
                "and forget them again"
            ) from error

    def _collect(self, disk: DiskStore) -> None:
        def collect() -> None:
            try:
                disk.gc()
            except DISK_ERRORS as error:
                disk.tally.failed(error)

        assert self._writer is not None
        self._writer.run_soon(collect)

    def clear_ram(self) -> int:
        """Forget what RAM holds; the disk keeps what it has. Returns how many chunks there were."""
        return self._ram.clear()

    def flush(self) -> None:
        """Wait until everything that was taken is on disk, or has failed."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what waits, free RAM and close the disk."""
        if self._open_disk is not None:
            self.flush()
            self._last_stats = self.disk_stats()
            self._finalizer()
        self._ram.clear()

    # ---- counts ------------------------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """State of RAM."""
        return self._ram.stats()

    def disk_stats(self) -> DiskStats | None:
        """State of the disk, after `close` as it was then; None without one."""
        disk = self._open_disk
        if disk is None:
            return self._last_stats
        waiting = 0 if self._writer is None else self._writer.waiting_bytes
        try:
            return replace(disk.stats(), waiting_bytes=waiting)
        except DISK_ERRORS as error:
            disk.tally.failed(error)
            return disk.tally.snapshot(waiting_bytes=waiting, budget_bytes=disk.budget_bytes, read_only=disk.read_only)

    @property
    def evictions(self) -> int:
        """Chunks that left the last tier to make room."""
        return self._ram.stats().evictions if self.disk is None else self.disk.tally.count("evictions")

    def _failed(self, key: str) -> None:
        """A chunk was not written."""
        if key not in self._ram:
            self._on_leave(key)

    def _left_ram(self, header: ChunkHeader) -> None:
        if not self._is_kept(header.key):
            self._on_leave(header.key)

    def _left_disk(self, key: str) -> None:
        if key not in self._ram and (self._writer is None or key not in self._writer):
            self._on_leave(key)


Heard = weakref.WeakMethod[Callable[[str], None]]


def _tell(heard: Heard, key: str) -> None:
    method = heard()
    if method is not None:
        method(key)


def _write(
    disk: DiskStore, failed: Heard, chunk: Chunk[StoredRun], expires: float | None, wanted: Callable[[], bool]
) -> None:
    """In the writer's thread."""
    try:
        written = disk.put(chunk, expires, wanted)
        disk.note_uses()
        if disk.has_unwiped:
            disk.gc()
    except Exception as error:  # of whatever kind: a chunk that is not written must be counted
        written = False
        disk.tally.failed(error, chunks=1)
    if not written:
        _tell(failed, chunk.header.key)


def _close(writer: Writer | None, disk: DiskReader) -> None:
    if writer is None:
        disk.close()
    else:
        writer.close(disk.close)
