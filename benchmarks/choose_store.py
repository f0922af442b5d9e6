"""Which building block carries the disk tier: safetensors files with a SQLite catalogue, or LMDB.

    python benchmarks/choose_store.py [--chunks 64] [--chunk-mib 8] [--entries 5000] [--folder DIR]

LMDB is no dependency of the package: `pip install lmdb` first, or only one column is printed. Bandwidths are those of
a warm page cache, the best of five passes over all chunks.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

try:
    import lmdb
except ImportError:
    lmdb = None

SECRET = b"the tenant's secret text"
SCHEMA = "CREATE TABLE IF NOT EXISTS chunks(key TEXT PRIMARY KEY, name TEXT, tokens BLOB)"


class Files:
    """A safetensors file per chunk, renamed into place, then a row in a SQLite catalogue in WAL mode."""

    name = "files + SQLite"

    def __init__(self, folder: Path, *, sync: bool = False, size: int = 0) -> None:
        self.folder, self.sync = folder, sync
        folder.mkdir(exist_ok=True)
        self.base = sqlite3.connect(folder / "catalogue.sqlite", isolation_level=None)
        self.base.execute("PRAGMA journal_mode=WAL")
        self.base.execute(f"PRAGMA synchronous={'FULL' if sync else 'NORMAL'}")
        self.base.execute("PRAGMA secure_delete=ON")
        self.base.execute(SCHEMA)

    def publish(self, key: str, tensors: dict[str, torch.Tensor], tokens: bytes) -> None:
        path = self.folder / f"{key}.safetensors"
        part = path.with_suffix(".writing")
        with part.open("wb", buffering=0) as out:
            out.write(save(tensors, {"key": key}))
            if self.sync:
                os.fsync(out.fileno())
        part.rename(path)
        self.base.execute("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?)", (key, path.name, tokens))

    def load(self, key: str) -> list[torch.Tensor]:
        with (self.folder / f"{key}.safetensors").open("rb") as file:
            # Private and writable: torch warns about read-only memory, and nobody may write to the file through it.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        return [
            torch.frombuffer(data, dtype=torch.uint8, offset=8 + size + begin, count=end - begin)
            for begin, end in (t["data_offsets"] for n, t in header.items() if n != "__metadata__")
        ]

    def entries(self) -> Iterator[tuple[str, bytes]]:
        yield from self.base.execute("SELECT key, tokens FROM chunks")

    def delete(self, key: str) -> None:
        path = self.folder / f"{key}.safetensors"
        size = path.stat().st_size
        with path.open("r+b", buffering=0) as file:
            file.write(bytes(size))
        path.unlink()
        self.base.execute("DELETE FROM chunks WHERE key = ?", (key,))
        self.base.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self.base.close()


class Lmdb:
    """Chunk and header as two values of one LMDB environment."""

    name = "LMDB"

    def __init__(self, folder: Path, *, sync: bool = False, size: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        # The map must be as large as all that may ever be stored; nosync as SQLite's NORMAL.
        self.env = lmdb.open(str(folder), map_size=size or 4 << 30, max_dbs=2, sync=sync, writemap=False)
        self.chunks, self.heads = self.env.open_db(b"chunks"), self.env.open_db(b"heads")

    def publish(self, key: str, tensors: dict[str, torch.Tensor], tokens: bytes) -> None:
        with self.env.begin(write=True) as txn:
            txn.put(key.encode(), save(tensors, {"key": key}), db=self.chunks)
            txn.put(key.encode(), tokens, db=self.heads)

    def load(self, key: str) -> list[torch.Tensor]:
        self.txn = self.env.begin(buffers=True)  # pages stay valid as long as the transaction is open
        data = self.txn.get(key.encode(), db=self.chunks)
        size = int.from_bytes(data[:8], "little")
        header = json.loads(bytes(data[8 : 8 + size]))
        # Read-only memory behind a writable face, for torch warns about the one and has no other way.
        kind = ctypes.c_uint8 * len(data)
        raw = torch.frombuffer(kind.from_address(np.frombuffer(data, dtype=np.uint8).ctypes.data), dtype=torch.uint8)
        return [
            raw[8 + size + begin : 8 + size + end]
            for begin, end in (t["data_offsets"] for n, t in header.items() if n != "__metadata__")
        ]

    def entries(self) -> Iterator[tuple[str, bytes]]:
        with self.env.begin() as txn:
            for key, tokens in txn.cursor(db=self.heads):
                yield key.decode(), tokens

    def delete(self, key: str) -> None:
        with self.env.begin(write=True) as txn:
            txn.delete(key.encode(), db=self.chunks)
            txn.delete(key.encode(), db=self.heads)
        self.env.sync(True)

    def close(self) -> None:
        self.env.close()


def best(work: Callable[[], Any], times: int = 5) -> float:
    """Least seconds of a few tries."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def tensors_of(nbytes: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(nbytes // 8, generator=generator)
    return {"keys": half, "values": half + 1}


def measure(kind: type[Files] | type[Lmdb], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    nbytes = int(options.chunk_mib * (1 << 20))
    row: dict[str, Any] = {"store": kind.name}
    chunk = tensors_of(nbytes, 0)
    tokens = np.arange(1500, dtype=np.int32).tobytes()
    for sync in (False, True):
        store = kind(folder / f"sync{sync}", sync=sync)
        started = time.perf_counter()
        for number in range(options.chunks):
            store.publish(f"{number:032x}", chunk, tokens)
        row["publish with fsync, ms" if sync else "publish, ms"] = (
            (time.perf_counter() - started) / options.chunks * 1e3
        )
        if sync:
            store.close()
    store = kind(folder / "syncFalse")
    target = torch.empty(nbytes, dtype=torch.uint8)

    def load_all() -> None:
        for number in range(options.chunks):
            at = 0
            for part in store.load(f"{number:032x}"):
                target[at : at + len(part)].copy_(part)
                at += len(part)

    total = nbytes * options.chunks
    row["read, GB/s"] = total / best(load_all) / 1e9
    source = torch.empty(total, dtype=torch.uint8).fill_(1)

    def memcpy() -> None:
        for number in range(options.chunks):
            target.copy_(source[number * nbytes : (number + 1) * nbytes])

    row["memcpy, GB/s"] = total / best(memcpy) / 1e9
    store.close()

    row[f"open {options.entries}, ms"] = reopened(kind, folder / "many", options.entries, tokens) * 1e3
    row["copies of deleted text"] = left_behind(kind, folder / "secret")
    row["after 20 kills: lost / torn"] = killed(kind, folder / "killed")
    return row


def reopened(kind: type[Files] | type[Lmdb], folder: Path, entries: int, tokens: bytes) -> float:
    """Seconds to open a store of many entries and read all their ids."""
    many, tiny = kind(folder), tensors_of(64, 0)
    for number in range(entries):
        many.publish(f"{number:032x}", tiny, tokens)
    many.close()

    def reopen() -> None:
        again = kind(folder)
        assert sum(1 for _ in again.entries()) == entries
        again.close()

    return best(reopen, 3)


def left_behind(kind: type[Files] | type[Lmdb], folder: Path) -> int:
    """Copies of a deleted text in the files of a store."""
    secret, tiny, ids = kind(folder), tensors_of(64, 0), SECRET * 60
    secret.publish("0" * 32, {"keys": torch.frombuffer(bytearray(ids), dtype=torch.uint8)}, ids)
    secret.publish("1" * 32, tiny, b"ids")
    secret.delete("0" * 32)
    left = sum(path.read_bytes().count(SECRET) for path in folder.iterdir())
    secret.close()
    return left


def killed(kind: type[Files] | type[Lmdb], folder: Path) -> str:
    """Kill a process that publishes, 20 times: chunks that it had confirmed and that are gone, and unreadable ones."""
    confirmed: set[str] = set()
    for attempt in range(20):
        child = subprocess.Popen(
            [
                sys.executable,
                __file__,
                "--child",
                kind.__name__,
                "--folder",
                str(folder),
                "--start",
                str(attempt * 10000),
            ],
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        confirmed.add(child.stdout.readline().decode().strip())
        time.sleep(0.005 * attempt)
        child.send_signal(signal.SIGKILL)
        confirmed.update(line.decode().strip() for line in child.stdout if line.endswith(b"\n"))
        child.wait()
        child.stdout.close()
    store = kind(folder)
    keys = {key for key, _ in store.entries()}
    torn = 0
    for key in keys:
        parts = store.load(key)
        keys_part, values = (part.clone().view(torch.float32) for part in parts)  # LMDB aligns no value
        torn += not torch.equal(keys_part + 1, values)
    store.close()
    return f"{len(confirmed - keys - {''})} / {torn} of {len(confirmed)}"


def child(kind: str, folder: Path, start: int) -> None:
    store = {"Files": Files, "Lmdb": Lmdb}[kind](folder)
    chunk = tensors_of(1 << 18, 0)
    for number in range(start, start + 10000):
        store.publish(f"{number:032x}", chunk, b"ids")
        print(f"{number:032x}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--chunk-mib", type=float, default=8)
    parser.add_argument("--entries", type=int, default=5000)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--child", default="")
    parser.add_argument("--start", type=int, default=0)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.folder, options.start)
        return
    from common import machine, markdown  # here, because it takes seconds, which no child shall wait for

    torch.set_num_threads(1)
    kinds = [Files, *([Lmdb] if lmdb is not None else [])]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = []
        for kind in kinds:
            place = Path(folder) / kind.__name__
            place.mkdir()
            rows.append(measure(kind, place, options))
    print(json.dumps(machine()))
    print(markdown(list(rows[0]), rows))


if __name__ == "__main__":
    main()
