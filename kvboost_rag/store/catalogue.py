"""The table of what lies in a folder: a SQLite database in WAL mode, shared by processes.

It decides what is visible, what is promised to writers, and what leaves. Everything in it but the statistics of use can
be made again from the files (`kvboost-rag store rebuild`). It holds the ids of each chunk, so that an index can be
filled without opening a file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ..chunks import ChunkHeader, IntArray, Origin, Scope
from .database import DOOMED, STORED, WRITING, Database, damaged

ROW_BYTES = 512  # what a row and its part of the indexes take, beside the ids
KEPT_REMOVALS = 10_000  # notes of what left; who is further behind compares all keys

# Seconds saved by a use, per byte, weighed by uses, above a clock that rises with what was evicted. Where nobody
# measured, all bytes are equally dear.
_GDSF = (
    "(SELECT value FROM meta WHERE name = 'clock') + uses * "
    "CASE WHEN saved_s IS NULL THEN 1.0 ELSE max(saved_s, 0.0) / nbytes END"
)
_COLUMNS = (
    "chunks.id, name, nbytes, created, expires, uses, codec, format, key, fingerprint, namespace, base, origin, "
    "ids.tokens, history, behind"
)


@dataclass(frozen=True, slots=True)
class Row:
    """A chunk as the catalogue knows it.

    Attributes:
        id: never used again.
        name: of its file.
        nbytes: bytes charged to the budget.
        created, expires: seconds since the epoch; None never expires.
        uses: how often it was loaded, and once for its making.
        codec, format: how its KV lies in the file.
        header: identity and ids.
    """

    id: int
    name: str
    nbytes: int
    created: float
    expires: float | None
    uses: int
    codec: str
    format: int
    header: ChunkHeader


@dataclass(frozen=True, slots=True)
class Changes:
    """What happened since a change.

    Attributes:
        until: number of the last change that is told of.
        added: chunks of the scope that became visible.
        removed: rows of any scope that left, and whether only to make room; None if it is not known any more which.
    """

    until: int
    added: list[Row]
    removed: dict[int, bool] | None


class Catalogue(Database):
    """Rows of chunks and what happened to them, over one connection.

    Args:
        folder: where the database lies.
        read_only: open it without the right to write.
        gdsf: evict by seconds saved per byte and use; otherwise the one used longest ago.
    """

    gdsf = True

    # ---- writing -----------------------------------------------------------------------------------------------------

    def total_bytes(self) -> int:
        """Bytes charged by all rows, also those that are being written."""
        return int(self._meta("bytes"))

    def add_writing(
        self,
        header: ChunkHeader,
        *,
        name: str,
        owner: str,
        nbytes: int,
        codec: str,
        format: int,
        created: float,
        expires: float | None,
        saved_s: float | None,
    ) -> int:
        """Promise bytes to a chunk that is about to be written; the row's id. It is invisible until `publish`."""
        values = (name, header.key, owner, nbytes, header.base, header.origin, codec, format, created, expires, saved_s)
        with self.transaction():
            cursor = self._db.execute(
                "INSERT INTO chunks(name, key, owner, nbytes, base, origin, codec, format, created, expires, saved_s, "
                f"scope, used, state, uses, priority, change) VALUES ({'?, ' * 13}{WRITING}, 1, 0, 0)",
                (*values, self._scope_id(header.scope), self._next("tick")),
            )
            row = cast(int, cursor.lastrowid)
            ids = (_raw(header.tokens), _raw(header.history), _raw(header.behind))
            self._db.execute("INSERT INTO ids VALUES (?, ?, ?, ?)", (row, *ids))
            return row

    def publish(self, row: int) -> bool:
        """Make a written chunk visible; False if it was removed meanwhile, or another one has its key."""
        with self.transaction():
            found = self._db.execute(f"SELECT key FROM chunks WHERE id = ? AND state = {WRITING}", (row,)).fetchone()
            if found is None or self.find(found[0]) is not None:
                return False
            change = self._next("change")
            self._db.execute(
                f"UPDATE chunks SET state = {STORED}, owner = NULL, change = ? WHERE id = ?", (change, row)
            )
            self._rank([row])
            return True

    def touch(self, names: Iterable[str]) -> None:
        """Note that chunks were used."""
        with self.transaction():
            rows = []
            for name in names:
                select = f"SELECT id FROM chunks WHERE name = ? AND state = {STORED}"
                found = self._db.execute(select, (name,)).fetchone()
                if found is not None:
                    rows.append(int(found[0]))
                    change = (self._next("tick"), found[0])
                    self._db.execute("UPDATE chunks SET uses = uses + 1, used = ? WHERE id = ?", change)
            self._rank(rows)

    def _rank(self, rows: Sequence[int]) -> None:
        rank = _GDSF if self.gdsf else "used"
        self._db.executemany(f"UPDATE chunks SET priority = {rank} WHERE id = ?", [(row,) for row in rows])

    def victims(self, nbytes: int, *, format: int) -> list[tuple[int, str, str]]:
        """Id, name and key of the chunks that leave first, so many that ``nbytes`` become free; [] if all do not do.

        Chunks of a newer format are left alone. Notes what the last one was worth, for GDSF ages by it.
        """
        chosen, freed, last = list[tuple[int, str, str]](), 0, 0.0
        cursor = self._db.execute(
            f"SELECT id, name, key, nbytes, priority FROM chunks WHERE state = {STORED} AND format <= ? "
            "ORDER BY priority, used",
            (format,),
        )
        for row, name, key, size, priority in cursor:
            if freed >= nbytes:
                break
            chosen.append((row, name, key))
            freed, last = freed + size, priority
        cursor.close()
        if freed < nbytes:
            return []
        if self.gdsf:
            self._db.execute("UPDATE meta SET value = max(value, ?) WHERE name = 'clock'", (last,))
        return chosen

    def remove(self, rows: Iterable[int], *, evicted: bool = False) -> int:
        """Delete rows at once; how many there were."""
        removed = 0
        with self.transaction():
            for row in rows:
                self._note_removal(row, evicted)
                removed += self._db.execute("DELETE FROM chunks WHERE id = ?", (row,)).rowcount
            self._drop_scopes()
        return removed

    def remove_stored(self, row: int) -> None:
        """Delete a row unless somebody dooms it meanwhile, whose file may have to be wiped yet."""
        with self.transaction():
            self.remove(self._column(f"SELECT id FROM chunks WHERE id = ? AND state = {STORED}", row))

    def withdraw(self, row: int) -> bool:
        """Take a promise back; False if its row is not that of a writer any more."""
        with self.transaction():
            done = self._db.execute(f"DELETE FROM chunks WHERE id = ? AND state = {WRITING}", (row,)).rowcount > 0
            self._drop_scopes()
        return done

    def doom(self, rows: Iterable[int]) -> list[tuple[int, str, str | None]]:
        """Hide rows and drop all they say of their chunk; names and bytes stay until `remove`.

        Returns:
            Id, name and former key of each.
        """
        doomed = list[tuple[int, str, str | None]]()
        with self.transaction():
            for row in rows:
                found = self._db.execute("SELECT id, name, key FROM chunks WHERE id = ?", (row,)).fetchone()
                if found is None:
                    continue
                doomed.append(found)
                self._note_removal(row, False)
                cleared = "key = NULL, scope = NULL, owner = NULL, expires = NULL"
                self._db.execute(f"UPDATE chunks SET state = {DOOMED}, {cleared} WHERE id = ?", (row,))
                self._db.execute("DELETE FROM ids WHERE id = ?", (row,))
            self._drop_scopes()
        return doomed

    def _note_removal(self, row: int, evicted: bool) -> None:
        if self._db.execute(f"SELECT 1 FROM chunks WHERE id = ? AND state = {STORED}", (row,)).fetchone():
            change = self._next("change")
            self._db.execute("INSERT INTO removals VALUES (?, ?, ?)", (change, row, evicted))
            self._db.execute("DELETE FROM removals WHERE change <= ?", (change - KEPT_REMOVALS,))

    def _drop_scopes(self) -> None:
        used = "SELECT scope FROM chunks WHERE scope = scopes.id"
        self._db.execute(f"DELETE FROM scopes WHERE NOT EXISTS ({used})")

    def scrub(self) -> bool:
        """Leave nothing of deleted rows in the database's files; False if another process reads just now."""
        with self._lock:
            self._db.execute("PRAGMA incremental_vacuum").fetchall()
            busy: int = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        return not busy

    # ---- reading -----------------------------------------------------------------------------------------------------

    def find(self, key: str) -> tuple[int, str, float | None, int] | None:
        """Id, name, end of time and bytes of a visible chunk."""
        with self._lock:
            select = f"SELECT id, name, expires, nbytes FROM chunks WHERE key = ? AND state = {STORED}"
            found: tuple[int, str, float | None, int] | None = self._db.execute(select, (key,)).fetchone()
        return found

    def ids_of(self, keys: Iterable[str]) -> list[int]:
        """Rows of chunks, also of those that are being written."""
        return [row for key in keys for row in self._column("SELECT id FROM chunks WHERE key = ?", key)]

    def ids_in(self, namespace: str) -> list[int]:
        """Rows of all of a tenant's chunks, also of those that are being written."""
        scopes = "SELECT id FROM scopes WHERE namespace = ?"
        return self._column(f"SELECT id FROM chunks WHERE scope IN ({scopes})", namespace)

    def expired(self, now: float, format: int) -> list[int]:
        """Rows whose time is over."""
        select = f"SELECT id FROM chunks WHERE expires <= ? AND state = {STORED} AND format <= ?"
        return self._column(select, now, format)

    def unfinished(self) -> list[tuple[int, str, int, str | None]]:
        """Id, name, state and owner of rows that are being written or wiped."""
        with self._lock:
            return self._db.execute(f"SELECT id, name, state, owner FROM chunks WHERE state <> {STORED}").fetchall()

    def names_of(self, rows: Iterable[int]) -> list[str]:
        """Names of rows."""
        with self._lock:
            found = [self._db.execute("SELECT name FROM chunks WHERE id = ?", (row,)).fetchone() for row in rows]
        return [name for (name,) in filter(None, found)]

    def names(self) -> dict[str, tuple[int, int]]:
        """Id and state of every row by name."""
        with self._lock:
            rows = self._db.execute("SELECT name, id, state FROM chunks").fetchall()
        return {name: (row, state) for name, row, state in rows}

    def ids_visible(self) -> set[int]:
        """Ids of all visible chunks."""
        return set(self._column(f"SELECT id FROM chunks WHERE state = {STORED}"))

    def changes(self, scope: Scope, since: int, format: int) -> Changes:
        """What became visible in a scope after a change, and what left the store."""
        with self.snapshot():
            until = int(self._meta("change"))
            removed: dict[int, bool] | None = {}
            if since and until - since > KEPT_REMOVALS:
                removed = None
            elif since:
                select = "SELECT chunk, evicted FROM removals WHERE change > ?"
                removed = {row: bool(evicted) for row, evicted in self._db.execute(select, (since,))}
            where = "scope = (SELECT id FROM scopes WHERE fingerprint = ? AND namespace = ?) AND change > ?"
            added = self._rows(f"{where} AND format <= ?", scope.fingerprint, scope.namespace, since, format)
            return Changes(until, list(added), removed)

    def rows(self, namespace: str | None = None) -> list[Row]:
        """All visible chunks, or those of a tenant under every fingerprint."""
        with self._lock:
            if namespace is None:
                return list(self._rows("1"))
            return list(self._rows("scope IN (SELECT id FROM scopes WHERE namespace = ?)", namespace))

    def counts(self, format: int) -> dict[str, int]:
        """Numbers of rows: stored, newer (of a later format), writing, doomed."""
        with self._lock:
            rows = self._db.execute("SELECT state, format > ?, count(*) FROM chunks GROUP BY 1, 2", (format,))
            found = {(state, bool(newer)): int(count) for state, newer, count in rows}
        return {
            "stored": found.get((STORED, False), 0),
            "newer": found.get((STORED, True), 0),
            "writing": sum(found.get((WRITING, newer), 0) for newer in (False, True)),
            "doomed": sum(found.get((DOOMED, newer), 0) for newer in (False, True)),
        }

    def check(self) -> None:
        """Read the whole database.

        Raises:
            StoreError: it is damaged.
        """
        try:
            with self._lock:
                result = self._db.execute("PRAGMA integrity_check").fetchone()[0]
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise damaged(self.path.parent, error) from error
        if result != "ok":
            raise damaged(self.path.parent, result)

    def _rows(self, where: str, *values: Any) -> Iterator[Row]:
        scopes: dict[tuple[str, str], Scope] = {}  # one object for all its chunks
        cursor = self._db.execute(
            f"SELECT {_COLUMNS} FROM chunks JOIN scopes ON scopes.id = scope JOIN ids ON ids.id = chunks.id "
            f"WHERE state = {STORED} AND {where} ORDER BY change",
            values,
        )
        for row, name, nbytes, created, expires, uses, codec, version, key, mark, space, base, origin, *raw in cursor:
            scope = scopes.setdefault((mark, space), Scope(mark, space))
            try:
                tokens, history, behind = (None if part is None else _ids(part) for part in raw)
            except (TypeError, ValueError) as error:
                raise damaged(self.path.parent, error) from error
            header = ChunkHeader(key, scope, cast(IntArray, tokens), base, history, cast(Origin, origin), behind)
            yield Row(row, name, nbytes, created, expires, uses, codec, version, header)

    def _scope_id(self, scope: Scope) -> int:
        values = (scope.fingerprint, scope.namespace)
        self._db.execute("INSERT OR IGNORE INTO scopes(fingerprint, namespace) VALUES (?, ?)", values)
        return int(self._one("SELECT id FROM scopes WHERE fingerprint = ? AND namespace = ?", *values))

    def _next(self, counter: str) -> int:
        self._db.execute("UPDATE meta SET value = value + 1 WHERE name = ?", (counter,))
        return int(self._meta(counter))


def _raw(ids: IntArray | None) -> bytes | None:
    return None if ids is None else np.ascontiguousarray(ids, dtype="<i4").tobytes()


def _ids(raw: bytes) -> IntArray:
    return np.frombuffer(raw, dtype="<i4").astype(np.int32, copy=False)
