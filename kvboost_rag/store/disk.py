"""Chunks on disk: a safetensors file each, found through a catalogue that processes share.

A chunk is written under a temporary name, renamed, and then made visible by a commit: it is there entirely or not at
all. Its bytes were promised by an earlier commit that counts what every process is writing, so the budget holds for all
of them together. Who dies while writing leaves a promise behind whose owner's lock is free, and the next to open the
folder cleans up. Deleted chunks leave the catalogue at once, and their files are overwritten before they are removed,
as soon as nobody has them mapped.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ..errors import StoreError
from ..kv import StoredRun
from . import files
from .catalogue import ROW_BYTES, Catalogue
from .database import DOOMED, WRITING
from .locks import OwnerLock, is_dead
from .reading import DiskReader, Place
from .tier import Chunk


class DiskStore(DiskReader):
    """Tier on disk. Thread-safe, shared by processes, usable in a child after a fork.

    Args:
        folder: made if it is missing.
        budget_bytes: limit of all files and of what the catalogue says of them, over all processes.
        gdsf: evict by seconds saved per byte and use; otherwise the one used longest ago.
        ttl_s: seconds that what is written, and what is read, may be old; None is without limit.
        saved_s: seconds that one use of a chunk saves, for eviction.
        collect: clean up behind dead writers while opening.
        sync: wait until files are on the disk itself, not only with the system, before they become visible.

    Raises:
        StoreError: the folder cannot be used; says why and what to do.
    """

    read_only = False

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        *,
        gdsf: bool = True,
        ttl_s: float | None = None,
        saved_s: Callable[[Chunk[StoredRun]], float | None] | None = None,
        collect: bool = True,
        sync: bool = True,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._gdsf, self._saved_s, self._sync = gdsf, saved_s, sync
        super().__init__(folder, ttl_s=ttl_s)
        if collect:
            self.gc()

    def _open(self) -> None:
        self._writing = threading.Lock()  # one file at a time
        self.has_unwiped = False  # deleted files that somebody was reading when they were to be wiped
        if self.folder.exists() and not self.folder.is_dir():
            raise StoreError(f"{self.folder} is no folder, so it cannot be written to; choose another disk_path")
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._owner = OwnerLock(self.folder / "owners")
        except OSError as error:
            raise StoreError(
                f"{self.folder} cannot be written to ({error.strerror or error}); choose another disk_path, or "
                "disk_read_only=True to use what is stored there"
            ) from error
        try:
            self._writes = Catalogue(self.folder)
            self._writes.gdsf = self._gdsf
            try:
                super()._open()
            except BaseException:
                self._writes.close()
                raise
        except BaseException:
            self._owner.release()
            raise

    def close(self) -> None:
        """Close the catalogue; what was loaded stays valid."""
        if self._pid != os.getpid():
            return
        try:
            self.note_uses()
            if self.has_unwiped:
                self.gc()
        except (sqlite3.Error, OSError) as error:
            self.tally.failed(error)
        super().close()
        self._writes.close()
        self._owner.release()

    def after_fork(self) -> None:
        """Open everything anew if this is a child; the parent's connections and locks are no use here."""
        if self._pid != os.getpid():
            self._inherited_writes = self._writes
            self._owner.abandon()
            super().after_fork()

    def put(
        self, chunk: Chunk[StoredRun], expires: float | None = None, wanted: Callable[[], bool] = lambda: True
    ) -> bool:
        """Write a chunk and make it visible; True if the tier holds it now. False means refused, and is no error.

        Args:
            chunk: what to write; one that is there is not written again.
            expires: end of its time, seconds since the epoch; by default `ttl_s` from now.
            wanted: asked last of all whether it shall become visible.

        Raises:
            OSError, sqlite3.Error: the disk is full, or the like. Nothing is left behind.
        """
        self.after_fork()
        key, now = chunk.header.key, time.time()
        if self._adopt(key, now):
            return True
        if expires is None and self._ttl_s is not None:
            expires = now + self._ttl_s
        data = files.pack(chunk.header, chunk.kv, expires)
        with self._writing:
            name = files.new_name()
            row = self._promise(chunk, name, len(data), now, expires)
            if row is None:
                return self._adopt(key, now)  # somebody was faster, or there is no room
            try:
                stamp = files.write(self.folder, name, data, sync=self._sync)
                with self._lock:  # before it is visible: who deletes it then takes this note away, too
                    self._note_place(key, Place(row, name, expires, files.on_disk(len(data))))
                    self._verified[name] = stamp
                with self._writes.transaction():
                    published = wanted() and self._writes.publish(row)
            except BaseException:
                self.hide([key])
                if self._abandon(row, name):
                    raise
                return False  # deleted by another process while it was being written
            if not published:
                self.hide([key])
                self._abandon(row, name)
                return self._adopt(key, now)
        self.tally.add(written=1, written_bytes=len(data))
        return True

    def _promise(self, chunk: Chunk[StoredRun], name: str, size: int, now: float, expires: float | None) -> int | None:
        """Set bytes aside for a file, evicting what must leave for it; the row's id, or None if there is no way."""
        header = chunk.header
        nbytes = files.on_disk(size) + header.ids_bytes + ROW_BYTES
        left: list[str] = []
        with self._writes.transaction():
            if self._writes.find(header.key):
                return None
            if nbytes <= self.budget_bytes:
                left = self._evict(self._writes.total_bytes() + nbytes - self.budget_bytes)
            row = None
            if self._writes.total_bytes() + nbytes <= self.budget_bytes:
                row = self._writes.add_writing(
                    header,
                    name=name,
                    owner=self._owner.path.name,
                    nbytes=nbytes,
                    codec=chunk.kv.codec,
                    format=files.FORMAT,
                    created=now,
                    expires=expires,
                    saved_s=None if self._saved_s is None else self._saved_s(chunk),
                )
        self.hide(left)
        for key in left:
            self._left(key)
        if row is None:
            self.tally.add(rejections=1)
        return row

    def _evict(self, nbytes: int) -> list[str]:
        """Make room inside a transaction. Files go before the commit, so that the budget holds at every moment."""
        rows, keys = list[int](), list[str]()
        if nbytes <= 0:
            return keys
        nbytes -= self._remove_expired()
        for row, name, key in self._writes.victims(nbytes, format=files.FORMAT) if nbytes > 0 else ():
            if self._drop_file(name):
                rows.append(row)
                keys.append(key)
        self._writes.remove(rows, evicted=True)
        self.tally.add(evictions=len(rows))
        return keys

    def _remove_expired(self) -> int:
        """Remove chunks whose time is over, inside a transaction; the bytes that became free."""
        before = self._writes.total_bytes()
        for row in self._writes.expired(time.time(), files.FORMAT):
            if all(self._drop_file(name, wipe=True) for name in self._writes.names_of([row])):
                self._writes.remove([row])
        return before - self._writes.total_bytes()

    def _abandon(self, row: int, name: str) -> bool:
        """Undo what was begun; False if somebody else has done so."""
        try:
            if not self._drop_file(name, wipe=True):
                return self._doom([row]) > 0
            return self._writes.withdraw(row)  # who deleted it meanwhile is not done with its row
        except sqlite3.Error as error:  # no room to say so: whoever opens the folder next sees that we are gone
            self.tally.failed(error)
            return True

    def _adopt(self, key: str, now: float) -> bool:
        """Use what is stored under the key, perhaps by another process; False if nothing is."""
        found = self._writes.find(key)
        if found is not None and Place(*found).is_over(now):
            self._doom([found[0]])
            found = None
        with self._lock:
            known = self._places.get(key)
            if found is None or known is None or known.row != found[0]:
                self._forget(key)
                if found is not None:
                    self._note_place(key, Place(*found))
        return found is not None

    def delete(self, key: str) -> bool:
        """Forget a chunk and overwrite its file; True if there was one."""
        return self.delete_many([key]) > 0

    def delete_many(self, keys: Iterable[str]) -> int:
        """Forget chunks and overwrite their files; how many there were. They are out of reach when this returns."""
        self.after_fork()
        keys = list(keys)
        self.hide(keys)
        return self._doom(self._writes.ids_of(keys))

    def clear(self, namespace: str | None = None) -> int:
        """Forget all chunks, or all of a tenant under every fingerprint, and overwrite their files; how many."""
        self.after_fork()
        if namespace is None:
            return self._doom([row for row, _ in self._writes.names().values()])
        return self._doom(self._writes.ids_in(namespace))

    def gc(self) -> dict[str, int]:
        """Remove what nobody can use: leftovers of dead writers, deleted files, chunks whose time is over.

        Returns:
            Counts of what was removed: unfinished, expired, wiped.
        """
        self.after_fork()
        done, self.has_unwiped = {"unfinished": 0, "expired": 0, "wiped": 0}, False
        done["expired"] = self._doom(self._writes.expired(time.time(), files.FORMAT))
        for row, name, state, owner in self._writes.unfinished():
            if state == DOOMED:
                done["wiped"] += self._wipe(row, name)
            elif state == WRITING and owner is not None and self._is_dead(owner):
                self._drop_file(name)
                self._writes.remove([row])
                done["unfinished"] += 1
        return done

    def drop_names(self, names: Iterable[str]) -> int:
        """Remove entries by the names of their files; how many there were."""
        known = self._writes.names()
        return self._doom([known[name][0] for name in names if name in known])

    def orphans(self) -> list[Path]:
        """Files that belong to no entry: nobody writes them, and nobody can find them."""
        present = [path for part in (self.folder / "chunks").glob("*/") for path in part.iterdir()]
        known = self._writes.names()  # afterwards: a row is older than its file
        return [path for path in present if path.stem not in known]

    def note_uses(self) -> None:
        """Tell the catalogue which chunks were used."""
        self.after_fork()
        with self._lock:
            used, self._used = self._used, []
        if used:
            self._writes.touch(used)

    def _is_dead(self, owner: str) -> bool:
        return owner != self._owner.path.name and is_dead(self.folder / "owners" / owner)

    def _doom(self, rows: list[int]) -> int:
        if not rows:
            return 0
        try:
            doomed = self._writes.doom(rows)
        except sqlite3.OperationalError:  # a full disk has no room to note it: first make some
            for name in self._writes.names_of(rows):
                self._wipe_file(name)
            doomed = self._writes.doom(rows)
        with self._lock:
            for _, _, key in doomed:
                if key is not None:
                    self._forget(key)
        for row, name, _ in doomed:
            self._wipe(row, name)
        self._writes.scrub()
        return len(doomed)

    def _wipe(self, row: int, name: str) -> bool:
        """Remove a doomed row when its files are gone; False if somebody reads them now."""
        if not self._wipe_file(name):
            self.has_unwiped = True
            return False
        self._writes.remove([row])
        return True

    def _wipe_file(self, name: str) -> bool:
        """Overwrite and remove the files of a name; False if somebody reads them now."""
        hidden = files.place_of(self.folder, name, files.DOOMED)
        try:
            for suffix in (files.SUFFIX, files.PART):
                path = files.place_of(self.folder, name, suffix)
                if path.exists():
                    path.replace(hidden)
                if not files.remove(hidden, wipe=True):
                    return False
        except OSError as error:
            self.tally.failed(error)
            return False
        return True

    def _drop_file(self, name: str, *, wipe: bool = False) -> bool:
        """Remove the files of a name; False if they stay: nobody may, or somebody reads them."""
        places = [files.place_of(self.folder, name, suffix) for suffix in (files.PART, files.SUFFIX)]
        try:
            return all(files.remove(place, wipe=wipe) for place in places)
        except OSError as error:
            self.tally.failed(error)
            return False

    def _lose(self, key: str, place: Place, *, drop: bool) -> None:
        super()._lose(key, place, drop=drop)
        if drop:
            try:
                self._drop_file(place.name)
                self._writes.remove_stored(place.row)
            except (sqlite3.Error, OSError) as error:
                self.tally.failed(error)
