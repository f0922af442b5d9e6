"""Reading chunks from a folder: what is there, where it lies, and the map of its file."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..chunks import ChunkHeader, Scope
from ..errors import StoreError
from ..kv import StoredRun
from ..stats import DiskStats
from . import files
from .catalogue import Catalogue, Row
from .counters import Tally
from .database import NAME
from .tier import Chunk


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk lies, until when it may be used, and how large it is."""

    row: int
    name: str
    expires: float | None
    nbytes: int

    def is_over(self, now: float) -> bool:
        """Whether its time is over."""
        return self.expires is not None and self.expires <= now


@dataclass(frozen=True, slots=True)
class News:
    """What others, or this process itself, changed in a folder.

    Attributes:
        added: chunks that can be loaded now, with the end of their time.
        evicted: keys of chunks that left to make room.
        deleted: keys of chunks that somebody wanted gone.
    """

    added: list[tuple[ChunkHeader, float | None]]
    evicted: list[str]
    deleted: list[str]


class DiskReader:
    """The reading half of a `DiskStore`; alone, it writes nothing, not even that a chunk was used.

    Args:
        folder: what a `DiskStore` has written.
        ttl_s: seconds that what is read may be old; None is without limit.

    Raises:
        StoreError: the folder cannot be read; says why and what to do.
    """

    read_only = True
    budget_bytes = 0

    def __init__(self, folder: Path, *, ttl_s: float | None = None) -> None:
        self.folder, self._ttl_s = folder, ttl_s
        self._on_leave: Callable[[str], None] | None = None
        self.tally = Tally()
        self._places: dict[str, Place] = {}
        self._keys: dict[int, str] = {}  # of `_places`, by row
        self._seen: dict[bytes, tuple[int, int]] = {}  # per scope, by digest: data version looked at, last change known
        self._verified: dict[str, files.Stamp] = {}  # by name: how the file was when its checksum was compared
        self._used: list[str] = []
        self._open()

    def _open(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of the fields above; held for no longer than a look
        if self.folder.exists() and not self.folder.is_dir():
            raise StoreError(f"{self.folder} is no folder, so nothing can be read from it; choose another disk_path")
        if not (self.folder / NAME).exists():
            raise StoreError(
                f"{self.folder} holds no catalogue, so nothing was stored there yet; choose another disk_path, or "
                "disk_read_only=False to store there"
            )
        # A connection of its own: who reads does not wait for who writes.
        self._reads = Catalogue(self.folder, read_only=True)
        self._seen.clear()

    def close(self) -> None:
        """Close the catalogue; what was loaded stays valid."""
        if self._pid == os.getpid():  # a child must not touch what it inherited
            self._reads.close()

    def tell(self, on_leave: Callable[[str], None]) -> None:
        """Have somebody told of the key of each chunk that leaves without being asked to: evicted, bad, vanished."""
        self._on_leave = on_leave

    def _left(self, key: str) -> None:
        if self._on_leave is not None:
            self._on_leave(key)

    def after_fork(self) -> None:
        """Open everything anew if this is a child; the parent's connections are no use here."""
        if self._pid != os.getpid():
            self._inherited = self._reads  # kept: closing it could disturb the parent
            self._open()

    def __contains__(self, key: object) -> bool:
        place = self._places.get(key)  # type: ignore[call-overload]
        return place is not None and not place.is_over(time.time())

    def refresh(self, scope: Scope) -> News:
        """Learn what changed; the first time, everything there is of the scope. Costs microseconds if nothing did."""
        self.after_fork()
        version = self._reads.data_version()
        with self._lock:
            looked, since = self._seen.get(scope.digest(), (-1, 0))
            if version == looked:
                return News([], [], [])
        changes = self._reads.changes(scope, since, files.FORMAT)
        added, evicted, deleted = list[tuple[ChunkHeader, float | None]](), list[str](), list[str]()
        with self._lock:
            if changes.removed is None:
                visible = self._reads.ids_visible()
                gone = {row: False for row in self._keys if row not in visible}
            else:
                gone = changes.removed
            for row, was_evicted in gone.items():
                key = self._keys.pop(row, None)
                if key is not None and self._places[key].row == row:
                    self._forget(key)
                    (evicted if was_evicted else deleted).append(key)
            for row_ in changes.added:
                if self._learn(row_):
                    added.append((row_.header, self._places[row_.header.key].expires))
            self._seen[scope.digest()] = (version, changes.until)
        return News(added, evicted, deleted)

    def _learn(self, row: Row) -> bool:
        """Note where a chunk lies; False if that was known, or its time is over."""
        known = self._places.get(row.header.key)
        if known is not None and known.row >= row.id:
            return False
        limits = [row.expires, None if self._ttl_s is None else row.created + self._ttl_s]
        expires = min((limit for limit in limits if limit is not None), default=None)
        place = Place(row.id, row.name, expires, row.nbytes)
        self._note_place(row.header.key, place)
        return known is None and not place.is_over(time.time())

    def _note_place(self, key: str, place: Place) -> None:
        self._places[key] = place
        self._keys[place.row] = key

    def _forget(self, key: str) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            self._keys.pop(place.row, None)
            self._verified.pop(place.name, None)

    def get(self, key: str) -> Chunk[StoredRun] | None:
        """The chunk over its mapped file, or None; its checksum is compared once, and when the file has changed."""
        self.after_fork()
        with self._lock:
            place = self._places.get(key)
            known = None if place is None else self._verified.get(place.name)
        if place is None or place.is_over(time.time()):
            return None
        started = time.perf_counter()
        try:
            loaded = files.load(files.place_of(self.folder, place.name), known=known)
            if loaded.header.key != key:
                raise files.BadEntry(f"{place.name} belongs to another chunk")
        except files.NewerEntry:
            self.tally.add(newer=1)
            self._lose(key, place, drop=False)
            return None
        except FileNotFoundError:
            self.tally.add(vanished=1)
            self._lose(key, place, drop=True)
            return None
        except files.BadEntry as error:
            self.tally.bad(error)
            self._lose(key, place, drop=True)
            return None
        except OSError as error:  # too many open files, or the like: the entry itself may be as it was
            self.tally.unreadable(error)
            self._lose(key, place, drop=False)
            return None
        with self._lock:
            self._verified[place.name] = loaded.stamp
            self._used.append(place.name)
        self.tally.loaded(loaded.run.nbytes, time.perf_counter() - started)
        return Chunk(loaded.header, loaded.run)

    def count(self, keys: Iterable[str]) -> int:
        """How many of the chunks the catalogue has, whoever wrote them."""
        self.after_fork()
        return sum(self._reads.find(key) is not None for key in keys)

    def loading_s(self, keys: Iterable[str]) -> float:
        """Seconds that loading chunks will take, by what it took so far; 0 before anything was loaded."""
        places = [place for key in keys if (place := self._places.get(key)) is not None]
        return self.tally.load_s_per_byte * sum(place.nbytes for place in places)

    def scan(self, scope: Scope | None = None) -> Iterator[ChunkHeader]:
        """Headers of all chunks, or of one scope, as the catalogue knows them now."""
        self.after_fork()
        now = time.time()
        rows = self._reads.rows(None if scope is None else scope.namespace)
        valid = [row.header for row in rows if row.expires is None or row.expires > now]
        return iter([header for header in valid if scope is None or header.scope == scope])

    def headers_in(self, namespace: str) -> list[ChunkHeader]:
        """Headers of all of a tenant's chunks, under every fingerprint, also of those whose time is over."""
        self.after_fork()
        return [row.header for row in self._reads.rows(namespace)]

    def hide(self, keys: Iterable[str]) -> None:
        """Use chunks no more in this process, and leave their files to others."""
        with self._lock:
            for key in keys:
                self._forget(key)

    def stats(self) -> DiskStats:
        """State and totals."""
        self.after_fork()
        counts = self._reads.counts(files.FORMAT)
        return self.tally.snapshot(
            chunks=counts["stored"],
            newer_chunks=counts["newer"],
            stored_bytes=self._reads.total_bytes(),
            budget_bytes=self.budget_bytes,
            read_only=self.read_only,
        )

    @property
    def nbytes(self) -> int:
        """Bytes charged to the budget by all processes."""
        return self._reads.total_bytes()

    def _lose(self, key: str, place: Place, *, drop: bool) -> None:
        """Use a chunk no more, unless it was replaced meanwhile; if `drop`, nobody else shall use it either."""
        with self._lock:
            if self._places.get(key) == place:
                self._forget(key)
        self._left(key)
