"""Care of a folder of stored KV without a model: verify, collect, rebuild."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from ..chunks import ChunkHeader
from ..errors import StoreError
from . import files
from .catalogue import ROW_BYTES, Catalogue, Row
from .database import NAME, damaged
from .disk import DiskStore
from .locks import OwnerLock, is_dead

T = TypeVar("T")
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Report:
    """What was found in a folder.

    Attributes:
        intact: entries that are as they were written.
        bad: names of damaged entries, and what is wrong with each.
        missing: names of entries whose file is gone.
        unreadable: names of entries that could not be read just now, and why; they were left alone.
        newer: files of a newer version, which were left alone.
        removed: files and rows that were removed.
    """

    intact: int = 0
    bad: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    newer: int = 0
    removed: int = 0


class StoreView:
    """What a folder holds, by its catalogue.

    Raises:
        StoreError: there is no catalogue, or it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / NAME).is_file():
            raise missing(folder)
        self._folder = folder
        self._catalogue = Catalogue(folder, read_only=True)

    def __enter__(self) -> StoreView:
        return self

    def __exit__(self, *exc: object) -> None:
        self._catalogue.close()

    def rows(self, namespace: str | None = None) -> list[Row]:
        """All chunks, or those of a tenant."""
        return self._read(lambda: self._catalogue.rows(namespace))

    def counts(self) -> dict[str, int]:
        """Numbers of chunks: stored, newer, writing, doomed."""
        return self._read(lambda: self._catalogue.counts(files.FORMAT))

    def total_bytes(self) -> int:
        """Bytes charged to the budget."""
        return self._read(self._catalogue.total_bytes)

    def _read(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise damaged(self._folder, error) from error


def missing(folder: Path) -> StoreError:
    """The error for a folder without a catalogue."""
    return StoreError(f"{folder} holds no catalogue; if it holds stored KV, run: kvboost-rag store rebuild {folder}")


def verify(folder: Path, *, progress: Progress | None = None) -> Report:
    """Read every entry and compare its checksum, and its ids with those of the catalogue. Changes nothing.

    Raises:
        StoreError: there is no catalogue, or it is damaged.
    """
    if not (folder / NAME).is_file():
        raise missing(folder)
    catalogue, report = Catalogue(folder, read_only=True), Report()
    try:
        catalogue.check()
        rows = catalogue.rows()
        for number, row in enumerate(rows):
            try:
                loaded = files.load(files.place_of(folder, row.name))
                if not same_identity(loaded.header, row.header):
                    raise files.BadEntry("its ids are not those of the catalogue")
                report.intact += 1
            except FileNotFoundError:
                report.missing.append(row.name)
            except files.NewerEntry:
                report.newer += 1
            except files.BadEntry as error:
                report.bad[row.name] = str(error)
            except OSError as error:
                report.unreadable[row.name] = str(error)
            if progress is not None:
                progress(number + 1, len(rows))
    finally:
        catalogue.close()
    return report


def collect(folder: Path, *, drop: Report | None = None) -> dict[str, int]:
    """Remove what nobody can use; entries that ``drop`` says to be bad or missing as well.

    Returns:
        Counts of what was removed: unfinished, expired, wiped, orphans, bad.

    Raises:
        StoreError: there is no catalogue, or it is damaged, or the folder cannot be written to.
    """
    if not (folder / NAME).is_file():
        raise missing(folder)
    store = DiskStore(folder, 1 << 62, collect=False)
    try:
        done = store.gc()
        done["bad"] = store.drop_names([*drop.bad, *drop.missing]) if drop else 0
        done["orphans"] = sum(_remove_orphan(path) for path in store.orphans())
    finally:
        store.close()
    for path in (folder / "owners").iterdir():
        is_dead(path)  # removes it
    return done


def rebuild(folder: Path, *, progress: Progress | None = None) -> Report:
    """Make the catalogue anew from the files. What is damaged or was not finished is removed.

    Raises:
        StoreError: somebody uses the folder, or it holds no stored KV.
    """
    if not (folder / "chunks").is_dir():
        raise StoreError(f"{folder} holds no stored KV")
    if not all(is_dead(path) for path in _listed(folder / "owners")):
        raise StoreError(f"{folder} is in use; stop the processes that use it, and rebuild it then")
    owner = OwnerLock(folder / "owners")
    try:
        for suffix in ("", "-wal", "-shm"):
            (folder / (NAME + suffix)).unlink(missing_ok=True)
        catalogue, report = Catalogue(folder), Report()
        try:
            paths = sorted(_files(folder))
            for number, path in enumerate(paths):
                _readmit(catalogue, path, owner.path.name, report)
                if progress is not None:
                    progress(number + 1, len(paths))
        finally:
            catalogue.close()
    finally:
        owner.release()
    return report


def same_identity(a: ChunkHeader, b: ChunkHeader) -> bool:
    """Whether two headers name the same ids behind the same ids for the same tenant."""
    pairs = ((a.tokens, b.tokens), (a.history, b.history), (a.behind, b.behind))
    same = all(x is y if x is None or y is None else np.array_equal(x, y) for x, y in pairs)
    return same and (a.key, a.scope, a.base, a.origin) == (b.key, b.scope, b.base, b.origin)


def _readmit(catalogue: Catalogue, path: Path, owner: str, report: Report) -> None:
    if path.suffix != files.SUFFIX:  # unfinished, or to be wiped
        report.removed += files.remove(path, wipe=True)
        return
    try:
        loaded = files.load(path)
    except files.NewerEntry:
        report.newer += 1
        return
    except files.BadEntry as error:
        report.bad[path.stem] = str(error)
        report.removed += files.remove(path, wipe=False)
        return
    except OSError as error:
        report.unreadable[path.stem] = str(error)
        return
    size, header = path.stat(), loaded.header
    row = catalogue.add_writing(
        header,
        name=path.stem,
        owner=owner,
        nbytes=files.on_disk(size.st_size) + header.ids_bytes + ROW_BYTES,
        codec=loaded.run.codec,
        format=files.FORMAT,
        created=min(size.st_mtime, time.time()),
        expires=loaded.expires,
        saved_s=None,
    )
    del loaded  # it holds the file
    if catalogue.publish(row):
        report.intact += 1
    else:  # a second file of one chunk
        catalogue.remove([row])
        report.removed += files.remove(path, wipe=True)


def _remove_orphan(path: Path) -> bool:
    if path.suffix == files.SUFFIX:
        try:
            files.load(path)
        except files.NewerEntry:
            return False
        except (files.BadEntry, OSError):
            pass
    return files.remove(path, wipe=True)


def _files(folder: Path) -> Iterator[Path]:
    for part in _listed(folder / "chunks"):
        if part.is_dir():
            yield from (path for path in part.iterdir() if path.suffix in (files.SUFFIX, files.PART, files.DOOMED))


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
