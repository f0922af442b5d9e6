"""Faults: processes killed at any moment, bits that flip, disks that are full, many processes at once.

Whatever happens: nothing that was reported stored is lost, nothing half-written is visible, nothing wrong is served.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvboost_rag import Engine
from kvboost_rag.store import upkeep
from kvboost_rag.store.disk import DiskStore
from tests.disk_chunks import ALICE, chunk_of, equal, file_bytes, files_in, in_child, needs_fork, used_bytes, wait_for
from tests.tiny import LIMIT, engine_of, off_by, prompt_of, text

pytestmark = needs_fork
BIG = 1 << 30
KILLS, MANY_KILLS = 8, 200
READERS = 8


def kill_while_warming(folder: Path, count: int, seed: int) -> None:
    """Kill a warming process at random moments; see after each what it had reported stored, and serve it."""
    draw = random.Random(seed)
    engine = engine_of(disk_path=folder, served_share=0.0)
    documents = [text(5000 + number, 30) for number in range(count * 16)]
    reported: list[int] = []
    begin = 0
    for number in range(count):
        read, write = os.pipe()

        def child(begin: int = begin, write: int = write) -> None:
            mine = engine_of(disk_path=folder)
            os.write(write, b"ready\n")
            for at in range(begin, len(documents), 2):
                report = mine.warm(documents[at : at + 2])
                assert report.on_disk == report.chunks
                os.write(write, f"{at}\n{at + 1}\n".encode())

        victim = in_child(child)
        os.close(write)
        with os.fdopen(read) as told:
            assert told.readline() == "ready\n"
            time.sleep(draw.uniform(0.05, 0.6))
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            said = told.read()
        reported += [int(line) for line in said.splitlines(keepends=True) if line.endswith("\n")]
        begin = max([begin, *(at + 1 for at in reported)])
        # What it reported can be had from the engine that was there all the time,
        for at in reported[-3:]:
            usage = engine.prefill(prompt_of([documents[at]]), store=False).usage
            assert usage.approximate_tokens > 0, f"document {at} is lost after kill {number}"
        # and after a restart, which cleans up, no trace is left of what was not finished.
        store = DiskStore(folder, BIG)
        assert not store._writes.unfinished()
        store.close()
        report_ = upkeep.verify(folder)
        assert not report_.bad
        assert not report_.missing
        assert report_.intact == len(list(files_in(folder)))
    assert len(reported) >= count // 2
    engine.close()
    again = engine_of(disk_path=folder)
    for at in reported:
        assert again._library.with_content(again._scope(None), again._encoder.encode_after("", documents[at])[0]), at
    found = again.prefill(prompt_of([documents[at] for at in reported[:4]]), reuse="exact")
    assert off_by(again, found) < LIMIT
    again.close()


@pytest.mark.slow
def test_a_warming_process_is_killed(tmp_path):
    kill_while_warming(tmp_path, KILLS, seed=0)


@pytest.mark.slow
def test_a_warming_process_is_killed_200_times(tmp_path):
    for part in range(MANY_KILLS // 20):  # a store that grows through all of them would take ever longer to verify
        kill_while_warming(tmp_path / str(part), 20, seed=1 + part)


@pytest.mark.slow
def test_a_deleting_process_is_killed(tmp_path):
    chunks = [chunk_of(seed, tokens=300) for seed in range(12)]
    draw = random.Random(0)
    for _ in range(KILLS):
        store = DiskStore(tmp_path, BIG, sync=False)
        for chunk in chunks:
            assert store.put(chunk)

        def child() -> None:
            mine = DiskStore(tmp_path, BIG)
            for chunk in chunks[:6]:
                mine.delete(chunk.header.key)
            time.sleep(60)

        victim = in_child(child)
        time.sleep(draw.uniform(0.01, 0.1))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        store.close()
        again = DiskStore(tmp_path, BIG, sync=False)
        again.refresh(ALICE)
        for number, chunk in enumerate(chunks):
            found = again.get(chunk.header.key)
            assert equal(found, chunk) or (found is None and number < 6)
            del found
        again.gc()
        assert not again._writes.unfinished()
        assert not again.orphans()
        assert again.stats().vanished == 0
        again.close()
        assert upkeep.verify(tmp_path).bad == {}


@contextmanager
def standing_still(process: int) -> Iterator[None]:
    """Stop another process for a while."""
    os.kill(process, signal.SIGSTOP)
    os.waitpid(process, os.WUNTRACED)  # it stops a moment later
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


@pytest.mark.slow
def test_a_process_killed_while_it_evicts_leaves_the_budget_whole(tmp_path):
    room = 4 * (file_bytes(chunk_of(0, tokens=200)) + 2000)
    draw = random.Random(0)
    for attempt in range(KILLS):

        def child(attempt: int = attempt) -> None:
            mine = DiskStore(tmp_path, room, sync=False)
            for seed in range(1000):
                mine.put(chunk_of(seed + 100 * attempt, tokens=200))

        victim = in_child(child)
        until = time.monotonic() + draw.uniform(0.05, 0.2)
        while time.monotonic() < until:
            with standing_still(victim):  # files that come and go while one counts them would be counted together
                assert used_bytes_now(tmp_path) <= room
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        store = DiskStore(tmp_path, room, sync=False)
        assert used_bytes(tmp_path) <= store.nbytes <= room
        assert not store.orphans()
        store.close()
        report = upkeep.verify(tmp_path)
        assert not report.bad
        upkeep.collect(tmp_path, drop=report)


def used_bytes_now(folder: Path) -> int:
    """Bytes of files, while they come and go."""
    total = 0
    for path in (folder / "chunks").glob("*/*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            pass
    return total


# ---- damage ----------------------------------------------------------------------------------------------------------


def flip_bits(folder: Path, flips: int) -> None:
    """Flip one bit of one entry at a time, serve, and see that it was dropped or did not matter."""
    documents = [text(seed, 40) for seed in range(300, 304)]
    engine = engine_of(disk_path=folder, served_share=0.0, ram_budget_bytes=0, repair="none")
    draw = random.Random(0)
    engine.warm(documents)
    expected = engine.prefill(prompt_of(documents), store=False)
    dropped = 0
    for _ in range(flips):
        path = draw.choice(sorted(files_in(folder)))
        data = bytearray(path.read_bytes())
        at = draw.randrange(8 * len(data))
        data[at // 8] ^= 1 << at % 8
        inode = path.with_suffix(".new")
        inode.write_bytes(data)
        inode.replace(path)
        engine._library._store.disk._verified.clear()  # as a new process would begin
        found = engine.prefill(prompt_of(documents), store=False)
        if found.usage == expected.usage:
            assert torch.equal(found.logits, expected.logits)
        else:
            assert found.usage.approximate_tokens < expected.usage.approximate_tokens
            dropped += 1
        assert engine.warm(documents).on_disk == (found.usage != expected.usage)
    disk = engine.stats().disk
    assert disk.bad + disk.newer == dropped >= 0.9 * flips
    engine.close()


def test_flipped_bits(tmp_path):
    flip_bits(tmp_path, 20)


@pytest.mark.slow
def test_200_flipped_bits(tmp_path):
    flip_bits(tmp_path, 200)


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.3, 0.99])
def test_truncated_entries(tmp_path, keep):
    documents = [text(seed, 40) for seed in range(300, 304)]
    engine = engine_of(disk_path=tmp_path, served_share=0.0)
    engine.warm(documents)
    engine.close()
    for path in list(files_in(tmp_path))[:2]:
        os.truncate(path, int(keep * path.stat().st_size))
    again = engine_of(disk_path=tmp_path, served_share=0.0)
    found = again.prefill(prompt_of(documents), store=False)
    assert again.stats().disk.bad == 2
    assert found.usage.approximate_tokens > 0
    assert again.warm(documents).on_disk == 2
    again.close()


def test_a_catalogue_with_random_damage_never_serves_anything_wrong(tmp_path):
    chunks = [chunk_of(seed) for seed in range(20)]
    store = DiskStore(tmp_path, BIG, sync=False)
    for chunk in chunks:
        store.put(chunk)
    store.close()
    path = tmp_path / "catalogue.sqlite"
    intact, draw = path.read_bytes(), random.Random(0)
    for _ in range(40):
        data = bytearray(intact)
        for _ in range(30):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        try:
            reader = DiskStore(tmp_path, BIG, sync=False, collect=False)
        except upkeep.StoreError:
            continue
        try:
            for header, _ in reader.refresh(ALICE).added:
                found = reader.get(header.key)
                assert found is None or any(equal(found, chunk) for chunk in chunks)
                # What the index would use are the ids of the catalogue, and they are compared with the file's.
                assert (
                    found is None
                    or not found.header.is_same(header)
                    or any(header.is_same(chunk.header) for chunk in chunks)
                )
        except (sqlite3.Error, ValueError, OverflowError, TypeError):
            pass  # damage that is noticed
        finally:
            reader.close()
    path.unlink()
    assert upkeep.rebuild(tmp_path).intact >= 1


# ---- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of one MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no small file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(engine: Engine, documents: list[str]) -> None:
    report = engine.warm(documents)
    disk = engine.stats().disk
    assert report.chunks == len(documents)
    assert 0 <= report.on_disk < len(documents)
    assert disk.write_errors == len(documents) - report.on_disk
    assert disk.last_error is not None
    assert engine.prefill(prompt_of(documents[-3:]), store=False).usage.approximate_tokens > 0  # from RAM


def test_a_full_disk_is_said_and_counted_and_serves_from_ram(small_disk, caplog):
    documents = [text(seed, 60) for seed in range(400, 430)]
    engine = engine_of(disk_path=small_disk / "store")
    with caplog.at_level("WARNING", "kvboost_rag"):
        fill(engine, documents)
    assert "could not be written" in caplog.text
    assert len([record for record in caplog.records if "could not be written" in record.message]) == 1
    engine.close()
    report = upkeep.verify(small_disk / "store")
    assert not report.bad
    assert not report.missing
    (small_disk / "other").mkdir()
    again = engine_of(disk_path=small_disk / "store")
    assert again.clear() == report.intact  # room again
    assert again.warm(documents[:2]).on_disk == 2
    again.close()


def test_a_limit_on_file_sizes_is_an_error_and_no_end(tmp_path):
    """EFBIG while writing: a real error in the middle of a file."""

    def child() -> None:
        engine = engine_of(disk_path=tmp_path)
        assert engine.warm(text(1, 20)).on_disk == 1
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, resource.RLIM_INFINITY))
        report = engine.warm(text(2, 120))
        assert (report.chunks, report.on_disk) == (1, 0)
        disk = engine.stats().disk
        assert disk.write_errors == 1
        assert os.strerror(errno.EFBIG) in disk.last_error or "disk" in disk.last_error
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert engine.warm(text(3, 40)).on_disk == 1
        assert engine.warm(text(2, 120)).already_warm == 1
        engine.close()

    wait_for(in_child(child))
    assert upkeep.verify(tmp_path).intact == len(list(files_in(tmp_path))) == 2


# ---- many processes --------------------------------------------------------------------------------------------------


def test_readers_against_a_writer(tmp_path):
    chunks = [chunk_of(seed, tokens=100) for seed in range(40)]
    DiskStore(tmp_path, BIG).close()

    def reader() -> None:
        store, seen, end = DiskStore(tmp_path, BIG, sync=False), 0, time.monotonic() + 60
        while seen < len(chunks) and time.monotonic() < end:
            for header, _ in store.refresh(ALICE).added:
                found = store.get(header.key)
                assert found is not None
                assert any(equal(found, chunk) for chunk in chunks)
                seen += 1
        assert seen == len(chunks)
        store.close()

    children = [in_child(reader) for _ in range(READERS)]
    store = DiskStore(tmp_path, BIG, sync=False)
    for chunk in chunks:
        assert store.put(chunk)
    wait_for(*children)
    store.close()


def test_readers_against_a_writer_that_evicts_and_deletes(tmp_path):
    room = 6 * (file_bytes(chunk_of(0, tokens=100)) + 2000)
    DiskStore(tmp_path, room).close()

    def reader() -> None:
        store, end = DiskStore(tmp_path, room, sync=False), time.monotonic() + 2
        while time.monotonic() < end:
            for header, _ in store.refresh(ALICE).added:
                seed = int(header.tokens[0])
                found = store.get(header.key)
                assert found is None or torch.equal(found.kv.tensors()["keys"], known[seed].kv.tensors()["keys"])
        store.close()

    known = {int(chunk.header.tokens[0]): chunk for chunk in (chunk_of(seed, tokens=100) for seed in range(20))}
    children = [in_child(reader) for _ in range(READERS)]
    store, draw, end = DiskStore(tmp_path, room, sync=False), random.Random(0), time.monotonic() + 2
    while time.monotonic() < end:
        chunk = draw.choice(list(known.values()))
        if draw.random() < 0.2:
            store.delete(chunk.header.key)
        else:
            store.put(chunk)
        assert store.nbytes <= room
    wait_for(*children)
    store.gc()
    assert not store.orphans()
    store.close()
    assert upkeep.verify(tmp_path).bad == {}


@pytest.mark.slow
def test_two_writers(tmp_path):
    room = 12 * (file_bytes(chunk_of(0, tokens=100)) + 2000)

    def writer(number: int) -> None:
        store = DiskStore(tmp_path, room, sync=False)
        for seed in range(number, 60 + number):
            chunk = chunk_of(seed, tokens=100)
            assert store.put(chunk)
            found = store.get(chunk.header.key)
            assert found is None or equal(found, chunk)  # the other may have pushed it out
            with store._writes.transaction():  # nobody makes room while one counts
                assert used_bytes_now(tmp_path) <= room
        store.close()

    wait_for(*[in_child(lambda number=number: writer(number)) for number in (0, 1)])  # type: ignore[misc]
    report = upkeep.verify(tmp_path)
    assert report.bad == {}
    assert report.missing == []
    assert report.intact >= 11
    assert report.intact == len(list(files_in(tmp_path)))


def test_two_processes_open_a_new_folder_at_once(tmp_path):
    def child() -> None:
        DiskStore(tmp_path / "new", BIG).close()

    for _ in range(5):
        wait_for(*[in_child(child) for _ in range(4)])
        store = DiskStore(tmp_path / "new", BIG)
        assert store.put(chunk_of(1))
        store.close()
        upkeep.collect(tmp_path / "new")
        for path in sorted((tmp_path / "new").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
