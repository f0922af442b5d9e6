"""A connection to the database of a store: opened, made, guarded, and closed."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import StoreError

VERSION = 1
NAME = "catalogue.sqlite"
BUSY_S = 30.0

WRITING, STORED, DOOMED = 0, 1, 2  # states of a row: promised to a writer; visible; hidden, its file not yet wiped

_SCHEMA = f"""
CREATE TABLE meta(name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('bytes', 0), ('change', 0), ('clock', 0), ('tick', 0);
CREATE TABLE scopes(id INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, namespace TEXT NOT NULL,
    UNIQUE(fingerprint, namespace));
CREATE TABLE chunks(
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, key TEXT, scope INTEGER, state INTEGER NOT NULL,
    owner TEXT, nbytes INTEGER NOT NULL, base INTEGER NOT NULL, origin TEXT NOT NULL, codec TEXT NOT NULL,
    format INTEGER NOT NULL, created REAL NOT NULL, expires REAL, used INTEGER NOT NULL, uses INTEGER NOT NULL,
    saved_s REAL, priority REAL NOT NULL, change INTEGER NOT NULL);
CREATE INDEX chunks_by_key ON chunks(key);
CREATE UNIQUE INDEX chunks_once ON chunks(key) WHERE state = {STORED};
CREATE INDEX chunks_by_scope ON chunks(scope, change);
CREATE INDEX chunks_by_priority ON chunks(priority, used) WHERE state = {STORED};
CREATE INDEX chunks_by_expiry ON chunks(expires) WHERE expires IS NOT NULL;
CREATE INDEX chunks_unfinished ON chunks(state) WHERE state <> {STORED};
CREATE TABLE ids(id INTEGER PRIMARY KEY, tokens BLOB NOT NULL, history BLOB, behind BLOB);
CREATE TABLE removals(change INTEGER PRIMARY KEY, chunk INTEGER NOT NULL, evicted INTEGER NOT NULL);
CREATE TRIGGER chunk_added AFTER INSERT ON chunks BEGIN
    UPDATE meta SET value = value + new.nbytes WHERE name = 'bytes'; END;
CREATE TRIGGER chunk_removed AFTER DELETE ON chunks BEGIN
    DELETE FROM ids WHERE id = old.id;
    UPDATE meta SET value = value - old.nbytes WHERE name = 'bytes'; END;
"""


class Database:
    """One connection. Thread-safe; not for use in a child after a fork.

    Args:
        folder: where the database lies.
        read_only: open it without the right to write.

    Raises:
        StoreError: it is damaged, of a newer version, or there is none to read.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self.path = folder / NAME
        self._lock = threading.RLock()
        self._depth = 0
        try:
            self._db = self._connect(read_only)
            self._prepare(read_only)
        except sqlite3.OperationalError as error:
            raise StoreError(f"{self.path} cannot be opened: {error}; check the folder and its permissions") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # damaged text breaks even its error message
            raise damaged(folder, error) from error

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, and alone among all writers; may be nested."""
        with self._lock:
            if self._depth:
                yield
                return
            self._db.execute("BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                self._depth -= 1
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read as of one moment."""
        with self._lock:
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                self._db.execute("COMMIT")

    def data_version(self) -> int:
        """A number that changes when another connection has written."""
        return int(self._one("PRAGMA data_version"))

    def _connect(self, read_only: bool) -> sqlite3.Connection:
        base = self.path.absolute().as_uri()
        if not read_only:
            # Tenants' names and ids are nobody else's; SQLite gives its log the same mode. Only a new file is opened:
            # closing one that is there would drop the locks that this process has on it.
            with suppress(OSError):
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        # A folder without write permission may have no room for the index that readers share.
        queries = ["mode=ro", "immutable=1"] if read_only else ["mode=rwc"]
        while True:
            uri = f"{base}?{queries.pop(0)}"
            db = sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                db.close()
                if not queries or not isinstance(error, sqlite3.OperationalError):
                    raise
            else:
                return db

    def _prepare(self, read_only: bool) -> None:
        try:
            version = self._one("PRAGMA user_version")
            if version > VERSION:
                raise StoreError(
                    f"{self.path} has version {version}, and this version of kvboost-rag knows {VERSION}; "
                    "update kvboost-rag, or use another disk_path"
                )
            if not read_only:
                self._make(version == 0)
            elif version == 0:
                raise StoreError(f"{self.path} holds no catalogue; nothing was stored here yet")
        except BaseException:
            self._db.close()
            raise

    def _make(self, new: bool) -> None:
        db = self._db
        if new:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")  # what was reported stored survives a power cut, too
        db.execute("PRAGMA secure_delete = ON")
        db.execute("PRAGMA journal_size_limit = 0")
        if new:
            with self.transaction():
                if self._one("PRAGMA user_version") == 0:  # nobody was faster
                    for statement in _statements(_SCHEMA):
                        db.execute(statement)
                    db.execute(f"PRAGMA user_version = {VERSION}")

    def _meta(self, name: str) -> float:
        return float(self._one("SELECT value FROM meta WHERE name = ?", name))

    def _one(self, sql: str, *values: Any) -> Any:
        with self._lock:
            return self._db.execute(sql, values).fetchone()[0]

    def _column(self, sql: str, *values: Any) -> list[int]:
        with self._lock:
            return [int(row[0]) for row in self._db.execute(sql, values)]


def damaged(folder: Path, reason: object) -> StoreError:
    """The error that says how to mend a catalogue."""
    return StoreError(
        f"the catalogue of {folder} is damaged ({reason}); make it anew from the stored files with: "
        f"kvboost-rag store rebuild {folder}"
    )


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
