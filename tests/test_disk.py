"""The disk tier: what is stored is found again, by anyone, within the budget, and nothing else ever is."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from safetensors import safe_open

from kvboost_rag.chunks import Scope
from kvboost_rag.errors import StoreError
from kvboost_rag.store import files, locks, upkeep
from kvboost_rag.store.catalogue import ROW_BYTES, Catalogue
from kvboost_rag.store.database import DOOMED, NAME
from kvboost_rag.store.disk import DiskStore
from kvboost_rag.store.reading import DiskReader
from kvboost_rag.store.tier import Chunk
from tests.disk_chunks import (
    ALICE,
    BOB,
    chunk_of,
    equal,
    file_bytes,
    files_in,
    in_child,
    needs_fork,
    used_bytes,
    wait_for,
)

BIG = 1 << 30


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    made = DiskStore(tmp_path / "store", BIG, sync=False)
    yield made
    made.close()


def reopened(store: DiskStore, **options: object) -> DiskStore:
    store.close()
    return DiskStore(store.folder, store.budget_bytes, sync=False, **options)  # type: ignore[arg-type]


def only_file(folder: Path) -> Path:
    (path,) = files_in(folder)
    return path


# ---- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("exact", "base"), [(True, 5), (True, 0), (False, 5)])
def test_what_was_put_comes_back_in_this_process_and_after_a_restart(store, dtype, exact, base):
    chunk = chunk_of(1, dtype=dtype, exact=exact, base=base)
    assert store.put(chunk)
    assert equal(store.get(chunk.header.key), chunk)
    again = reopened(store)
    assert chunk.header.key not in again  # nothing is known of a scope before it is asked for
    (found,) = again.refresh(ALICE).added
    assert upkeep.same_identity(found[0], chunk.header)
    assert equal(again.get(chunk.header.key), chunk)
    again.close()


def test_a_file_is_a_plain_safetensors_file_that_names_its_chunk(store):
    chunk = chunk_of(1)
    store.put(chunk)
    with safe_open(only_file(store.folder), framework="pt") as file:
        assert torch.equal(file.get_tensor("kv.keys"), chunk.kv.tensors()["keys"])
        assert file.get_tensor("ids.tokens").tolist() == chunk.header.tokens.tolist()
        assert chunk.header.key in file.metadata()["kvboost-rag"]


def test_names_and_listings_tell_nothing_of_tenants_or_texts(store):
    chunk = chunk_of(1, scope=Scope("f1", "a-tenant-with-a-name"))
    store.put(chunk)
    listing = "\n".join(str(path) for path in store.folder.rglob("*"))
    assert "tenant" not in listing
    assert chunk.header.key[:12] not in listing


def test_kv_is_mapped_and_not_read_before_it_is_used(store):
    chunk = chunk_of(1, tokens=4000)
    store.put(chunk)
    keys = store.get(chunk.header.key).kv.tensors()["keys"]
    before = keys[0, 0, 0, 0].item()
    keys[0, 0, 0, 0] = 7.0  # private: whoever writes by mistake writes to his own copy
    assert store.get(chunk.header.key).kv.tensors()["keys"][0, 0, 0, 0].item() == before
    assert store.stats().loaded_bytes == 2 * chunk.kv.nbytes


def test_another_tenant_or_model_sees_nothing(store):
    store.put(chunk_of(1))
    again = reopened(store)
    assert again.refresh(BOB).added == []
    assert again.refresh(Scope("f2", "alice")).added == []
    again.close()


def test_the_one_used_longest_ago_leaves_first(tmp_path):
    chunks = [chunk_of(seed, tokens=100) for seed in range(4)]
    room = sum(file_bytes(c) + c.header.ids_bytes + ROW_BYTES for c in chunks[:3])
    left: list[str] = []
    store = DiskStore(tmp_path, room, gdsf=False, sync=False)
    store.tell(left.append)
    for chunk in chunks[:3]:
        assert store.put(chunk)
    store.get(chunks[0].header.key)
    store.note_uses()
    assert store.put(chunks[3])
    assert left == [chunks[1].header.key]
    assert store.stats().evictions == 1
    assert store.get(chunks[1].header.key) is None
    store.close()


def test_what_saves_least_per_byte_leaves_first(tmp_path):
    chunks = [chunk_of(seed, tokens=100) for seed in range(4)]
    saved = {chunk.header.key: seconds for chunk, seconds in zip(chunks, (3.0, 1.0, 2.0, 4.0), strict=True)}
    room = sum(file_bytes(c) + c.header.ids_bytes + ROW_BYTES for c in chunks[:3])
    store = DiskStore(tmp_path, room, sync=False, saved_s=lambda chunk: saved[chunk.header.key])
    assert all(store.put(chunk) for chunk in chunks)
    assert [chunk.header.key in store for chunk in chunks] == [True, False, True, True]
    store.close()


def test_a_chunk_larger_than_the_budget_is_refused_and_pushes_nothing_out(tmp_path):
    small, large = chunk_of(1), chunk_of(2, tokens=1000)
    store = DiskStore(tmp_path, file_bytes(small) + 2000, sync=False)
    assert store.put(small)
    assert not store.put(large)
    assert equal(store.get(small.header.key), small)
    assert store.stats().rejections == 1
    store.close()


def test_a_reader_keeps_what_is_evicted_or_deleted_under_it(store):
    chunk = chunk_of(1)
    store.put(chunk)
    held = store.get(chunk.header.key)
    assert store.delete(chunk.header.key)
    assert equal(held, chunk)  # overwriting waits until nobody has it mapped
    assert store.get(chunk.header.key) is None
    assert len(list(files_in(store.folder))) == 1
    assert store.stats().stored_bytes > 0  # it still counts
    del held
    assert store.gc()["wiped"] == 1
    assert not list(files_in(store.folder))
    assert store.stats().stored_bytes == 0


def test_time_to_live(tmp_path):
    store = DiskStore(tmp_path, BIG, sync=False, ttl_s=0.8)
    chunk = chunk_of(1)
    assert store.put(chunk)
    assert chunk.header.key in store
    time.sleep(0.85)
    assert chunk.header.key not in store
    assert store.get(chunk.header.key) is None
    assert list(store.scan()) == []
    assert store.put(chunk)  # in place of the one that is over
    assert equal(store.get(chunk.header.key), chunk)
    time.sleep(0.85)
    assert store.gc()["expired"] == 1
    assert not list(files_in(tmp_path))
    store.close()


def test_what_is_over_makes_room_before_anything_else(tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    over, kept, new = chunk_of(1, tokens=100), chunk_of(2, tokens=100), chunk_of(3, tokens=100)
    store = DiskStore(tmp_path, 2 * (file_bytes(over) + over.header.ids_bytes + ROW_BYTES), gdsf=False, sync=False)
    store.put(kept)
    store.put(over, now + 10)
    now += 20
    assert store.put(new)
    assert store.stats().evictions == 0
    assert equal(store.get(kept.header.key), kept)
    assert len(list(files_in(tmp_path))) == 2
    store.close()


def test_a_shorter_time_to_live_counts_for_what_was_stored_without_one(store):
    store.put(chunk_of(1))
    again = reopened(store, ttl_s=3600.0)
    (found,) = again.refresh(ALICE).added
    assert time.time() < found[1] < time.time() + 3601
    again.close()


def test_deleting_leaves_nothing_of_a_tenant_in_any_file(store):
    tenant = Scope("f1", "the-secret-tenant")
    chunks = [chunk_of(seed, scope=tenant, tokens=300, exact=seed > 2) for seed in range(5)]
    kept = chunk_of(9, scope=BOB)
    for chunk in (*chunks, kept):
        store.put(chunk)
    marks = [b"the-secret-tenant", *(c.header.tokens[10:14].tobytes() for c in chunks)]
    marks += [c.kv.tensors()["keys"].numpy().tobytes()[64:96] for c in chunks]
    assert all(any(mark in path.read_bytes() for path in store.folder.rglob("*") if path.is_file()) for mark in marks)
    # The files' blocks are looked at through links, for names are not what hides a text.
    links = store.folder.parent / "links"
    links.mkdir()
    for number, path in enumerate(files_in(store.folder)):
        os.link(path, links / str(number))
    assert store.clear("the-secret-tenant") == 5
    left = [path for path in store.folder.parent.rglob("*") if path.is_file()]
    assert len(left) >= 6
    for path in left:
        data = path.read_bytes()
        assert not [mark for mark in marks if mark in data], path
    assert equal(store.get(kept.header.key), kept)


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_every_flipped_bit_is_noticed(tmp_path):
    chunk, path = chunk_of(1), tmp_path / "entry.safetensors"
    data = bytearray(files.pack(chunk.header, chunk.kv, None))
    generator = torch.Generator().manual_seed(0)
    everywhere = torch.randint(0, 8 * len(data), (200,), generator=generator).tolist()
    noticed = 0
    for at in [*everywhere, *range(0, 8 * 900, 37)]:  # the header once more: most of what can go wrong is in it
        data[at // 8] ^= 1 << at % 8
        path.write_bytes(data)
        data[at // 8] ^= 1 << at % 8
        try:
            loaded = files.load(path)
        except (files.BadEntry, files.NewerEntry):
            noticed += 1
        else:  # a bit that says nothing, such as one of the header's padding
            assert equal(Chunk(loaded.header, loaded.run), chunk)
            assert upkeep.same_identity(loaded.header, chunk.header)
    assert noticed > 380


@pytest.mark.parametrize("left", [0, 1, 7, 8, 9, 100, 2000, -1])
def test_truncated_files_are_dropped_and_counted(store, left):
    chunk = chunk_of(1, tokens=60)
    store.put(chunk)
    path = only_file(store.folder)
    os.truncate(path, left if left >= 0 else path.stat().st_size + left)
    again = reopened(store)
    again.refresh(ALICE)
    assert again.get(chunk.header.key) is None
    assert again.stats().bad == 1
    assert "damaged" not in (again.stats().last_error or "")
    assert not list(files_in(store.folder))
    assert again.put(chunk)
    assert equal(again.get(chunk.header.key), chunk)
    again.close()


def test_a_foreign_file_under_a_chunks_name_is_not_served(store):
    one, other = chunk_of(1), chunk_of(2)
    store.put(one)
    path = only_file(store.folder)
    path.write_bytes(files.pack(other.header, other.kv, None))
    again = reopened(store)
    again.refresh(ALICE)
    assert again.get(one.header.key) is None
    assert again.stats().bad == 1
    again.close()


def test_a_vanished_file_is_a_miss(store):
    chunk = chunk_of(1)
    store.put(chunk)
    only_file(store.folder).unlink()
    assert store.get(chunk.header.key) is None
    assert store.stats().vanished == 1
    assert store.put(chunk)
    assert equal(store.get(chunk.header.key), chunk)


def test_files_of_a_newer_version_are_neither_used_nor_deleted(store, monkeypatch):
    newer, known = chunk_of(1), chunk_of(2)
    with monkeypatch.context() as patch:
        patch.setattr(files, "FORMAT", files.FORMAT + 1)
        store.put(newer)
    path = only_file(store.folder)
    store.put(known)
    again = reopened(store)
    assert [header.key for header, _ in again.refresh(ALICE).added] == [known.header.key]
    assert again.stats().newer_chunks == 1
    again.close()
    assert upkeep.verify(store.folder).newer == 1
    upkeep.collect(store.folder)
    assert upkeep.rebuild(store.folder).newer == 1
    upkeep.collect(store.folder)
    full = DiskStore(store.folder, file_bytes(known) + 5000, sync=False)
    full.put(chunk_of(3))
    full.close()
    assert path.exists()


def test_a_newer_catalogue_is_refused(store):
    store.close()
    with sqlite3.connect(store.folder / NAME) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreError, match=r"version 99.*update kvboost-rag"):
        DiskStore(store.folder, BIG)


@pytest.mark.parametrize("damage", ["garbage", "truncated", "empty-looking"])
def test_a_damaged_catalogue_is_named_and_can_be_rebuilt(store, damage):
    chunks = [chunk_of(seed) for seed in range(6)]
    for chunk in chunks:
        store.put(chunk)
    store.close()
    path = store.folder / NAME
    data = path.read_bytes()
    path.write_bytes({"garbage": b"no database " * 999, "truncated": data[:5000], "empty-looking": bytes(8192)}[damage])
    with pytest.raises(StoreError, match="kvboost-rag store rebuild"):
        upkeep.verify(store.folder)
    report = upkeep.rebuild(store.folder)
    assert (report.intact, report.bad) == (6, {})
    again = DiskStore(store.folder, BIG, sync=False)
    again.refresh(ALICE)
    assert all(equal(again.get(chunk.header.key), chunk) for chunk in chunks)
    again.close()


def test_verify_finds_what_is_wrong_and_collect_drops_it(store):
    chunks = [chunk_of(seed) for seed in range(3)]
    for chunk in chunks:
        store.put(chunk)
    store.close()
    bad, missing, _ = sorted(files_in(store.folder))
    data = bytearray(bad.read_bytes())
    data[-3] ^= 1
    bad.write_bytes(data)
    missing.unlink()
    (bad.parent / ("0" * 32 + files.SUFFIX)).write_bytes(data)
    report = upkeep.verify(store.folder)
    assert (report.intact, list(report.bad), report.missing) == (1, [bad.stem], [missing.stem])
    done = upkeep.collect(store.folder, drop=report)
    assert (done["bad"], done["orphans"]) == (2, 1)
    assert upkeep.verify(store.folder).intact == 1
    assert len(list(files_in(store.folder))) == 1


def test_rebuilding_waits_for_nobody(store):
    store.put(chunk_of(1))
    with pytest.raises(StoreError, match="in use"):
        upkeep.rebuild(store.folder)


def test_what_is_no_store_is_refused(tmp_path):
    with pytest.raises(StoreError, match="no catalogue"):
        DiskReader(tmp_path / "nothing")
    with pytest.raises(StoreError, match="no stored KV"):
        upkeep.rebuild(tmp_path)
    with pytest.raises(StoreError):
        DiskReader(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="disk_path"):
        DiskStore(tmp_path / "file", BIG)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---- many ------------------------------------------------------------------------------------------------------------


def test_others_see_what_is_written_and_what_is_deleted(store):
    other = DiskStore(store.folder, BIG, sync=False)
    assert other.refresh(ALICE).added == []
    first, second = chunk_of(1), chunk_of(2)
    store.put(first)
    assert [header.key for header, _ in other.refresh(ALICE).added] == [first.header.key]
    assert other.refresh(ALICE).added == []
    store.delete(first.header.key)
    store.put(second)
    news = other.refresh(ALICE)
    assert news.deleted == [first.header.key]
    assert [header.key for header, _ in news.added] == [second.header.key]
    assert first.header.key not in other
    assert store.refresh(ALICE).added == []  # one's own are no news
    other.close()


def test_who_was_away_for_long_compares_all(store, monkeypatch):
    monkeypatch.setattr("kvboost_rag.store.catalogue.KEPT_REMOVALS", 3)
    other = DiskStore(store.folder, BIG, sync=False)
    chunks = [chunk_of(seed) for seed in range(9)]
    for chunk in chunks:
        store.put(chunk)
    other.refresh(ALICE)
    for chunk in chunks[:6]:
        store.delete(chunk.header.key)
    assert sorted(other.refresh(ALICE).deleted) == sorted(c.header.key for c in chunks[:6])
    assert [chunk.header.key in other for chunk in chunks] == [False] * 6 + [True] * 3
    other.close()


def test_two_stores_write_the_same_chunk_once(store):
    other = DiskStore(store.folder, BIG, sync=False)
    chunk = chunk_of(1)
    assert store.put(chunk)
    assert other.put(chunk)
    assert len(list(files_in(store.folder))) == 1
    assert equal(other.get(chunk.header.key), chunk)
    other.close()


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_chunk_deleted_while_it_is_written_does_not_appear(store, monkeypatch, when):
    other, chunk = DiskStore(store.folder, BIG), chunk_of(1)
    write, rename = os.write, Path.rename

    def then(step, early):
        def run(*arguments, **options):
            done = None if early else step(*arguments, **options)
            if not other.stats().chunks:
                other.clear("alice")
            return step(*arguments, **options) if early else done

        return run

    with monkeypatch.context() as patch:
        if when == "before":
            patch.setattr(Path, "rename", then(rename, True))
        elif when == "during":
            patch.setattr(os, "write", then(write, False))
        else:
            patch.setattr(Path, "rename", then(rename, False))
        assert not store.put(chunk)
    assert not store.put(chunk, wanted=lambda: False)
    other.close()
    assert store.get(chunk.header.key) is None
    assert not list(files_in(store.folder))
    assert store.stats().stored_bytes == 0


def test_threads_put_get_and_delete_at_once(store):
    chunks = [chunk_of(seed, tokens=200) for seed in range(12)]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for chunk in chunks[number:] + chunks[:number]:
                store.put(chunk)
                found = store.get(chunk.header.key)
                assert found is None or equal(found, chunk)
                if number == 0:
                    store.delete(chunk.header.key)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    store.gc()
    assert upkeep.verify(store.folder).bad == {}


@needs_fork
def test_a_child_after_a_fork_has_connections_and_locks_of_its_own(store):
    before, after = chunk_of(1), chunk_of(2)
    store.put(before)

    def child() -> None:
        assert equal(store.get(before.header.key), before)
        assert store.put(after)
        store.close()

    wait_for(in_child(child))
    store.refresh(ALICE)
    assert equal(store.get(after.header.key), after)
    assert len(list((store.folder / "owners").iterdir())) == 1
    assert store.put(chunk_of(3))


@needs_fork
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become nobody")
def test_a_folder_without_write_permission_can_be_read():
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        folder, chunk = Path(place) / "store", chunk_of(1)
        store = DiskStore(folder, BIG)
        store.put(chunk)
        store.close()
        os.chmod(place, 0o755)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)

        def child() -> None:
            os.setuid(65534)
            with pytest.raises(StoreError, match="disk_read_only=True"):
                DiskStore(folder, BIG)
            reader = DiskReader(folder)
            assert reader.stats().read_only
            assert len(reader.refresh(ALICE).added) == 1
            assert equal(reader.get(chunk.header.key), chunk)
            reader.close()

        wait_for(in_child(child))
        shutil.rmtree(folder)


# ---- everything against a dict ---------------------------------------------------------------------------------------

SEEDS = st.integers(0, 11)
TTL_S = 1000.0


class DiskMachine(RuleBasedStateMachine):
    """The tier beside a dict of everything that was put; two stores share the folder, and the clock is the test's."""

    @initialize(gdsf=st.booleans(), chunks=st.integers(2, 6))
    def begin(self, gdsf: bool, chunks: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.options = {"gdsf": gdsf, "sync": False, "ttl_s": TTL_S}
        self.budget = chunks * (file_bytes(self.chunk(0)) + self.chunk(0).header.ids_bytes + ROW_BYTES) + 100
        self.now = time.time()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(time, "time", lambda: self.now)
        self.stores = [DiskStore(self.folder, self.budget, **self.options) for _ in range(2)]  # type: ignore[arg-type]
        self.put_at: dict[str, float] = {}
        self.deleted: set[str] = set()

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            for store in self.stores:
                store.close()
            self.patch.undo()
            shutil.rmtree(self.folder)

    def chunk(self, seed: int):
        return chunk_of(seed, scope=ALICE if seed % 3 else BOB)

    @rule(seed=SEEDS, which=st.integers(0, 1))
    def put(self, seed: int, which: int) -> None:
        chunk = self.chunk(seed)
        key = chunk.header.key
        assert self.stores[which].put(chunk)
        self.deleted.discard(key)
        if key not in self.put_at or self.now >= self.put_at[key] + TTL_S or not self.visible(key):
            self.put_at[key] = self.now
        assert equal(self.stores[which].get(key), chunk)

    def visible(self, key: str) -> bool:
        return any(key in store for store in self.stores)

    @rule(seed=SEEDS, which=st.integers(0, 1))
    def get(self, seed: int, which: int) -> None:
        chunk = self.chunk(seed)
        key = chunk.header.key
        self.stores[which].refresh(chunk.header.scope)
        found = self.stores[which].get(key)
        if found is not None:
            assert equal(found, chunk)
            assert key in self.put_at
            assert key not in self.deleted
            assert self.now < self.put_at[key] + TTL_S

    @rule(seed=SEEDS, which=st.integers(0, 1))
    def delete(self, seed: int, which: int) -> None:
        key = self.chunk(seed).header.key
        self.stores[which].delete(key)
        self.deleted.add(key)
        assert key not in self.stores[which]

    @rule(which=st.integers(0, 1))
    def clear(self, which: int) -> None:
        self.stores[which].clear("bob")
        self.deleted.update(self.chunk(seed).header.key for seed in range(0, 12, 3))
        self.stores[which].refresh(BOB)

    @rule(which=st.integers(0, 1))
    def reopen(self, which: int) -> None:
        self.stores[which].close()
        self.stores[which] = DiskStore(self.folder, self.budget, **self.options)  # type: ignore[arg-type]
        for scope in (ALICE, BOB):
            for header, _ in self.stores[which].refresh(scope).added:
                assert header.key in self.put_at
                assert header.key not in self.deleted

    @rule(seconds=st.sampled_from((10.0, 400.0, 1100.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(which=st.integers(0, 1))
    def gc(self, which: int) -> None:
        self.stores[which].note_uses()
        self.stores[which].gc()
        assert not self.stores[which].orphans()

    @invariant()
    def within_budget(self) -> None:
        if hasattr(self, "stores"):
            assert used_bytes(self.folder) <= self.stores[0].nbytes <= self.budget
            rows = self.stores[0]._writes.names()
            assert len(list(files_in(self.folder))) == len(rows)


DiskMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestDiskMachine = DiskMachine.TestCase


def test_the_catalogue_agrees_with_itself(tmp_path):
    store = DiskStore(tmp_path, BIG, sync=False)
    for seed in range(5):
        store.put(chunk_of(seed))
    catalogue = Catalogue(tmp_path, read_only=True)
    catalogue.check()
    assert catalogue.total_bytes() == sum(row.nbytes for row in catalogue.rows())
    catalogue.close()
    store.close()


# ---- what cannot be read just now, and what others hold --------------------------------------------------------------


@contextlib.contextmanager
def no_more_files(monkeypatch: pytest.MonkeyPatch, number: int = errno.EMFILE) -> Iterator[None]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(files.mmap, "mmap", refuse)
        yield


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_an_entry_that_cannot_be_read_just_now_is_a_miss_and_stays(store, monkeypatch, number):
    chunk = chunk_of(1)
    store.put(chunk)
    with no_more_files(monkeypatch, number):
        assert store.get(chunk.header.key) is None
    stats = store.stats()
    assert (stats.unreadable, stats.bad, stats.chunks) == (1, 0, 1)
    again = reopened(store)
    again.refresh(ALICE)
    assert equal(again.get(chunk.header.key), chunk)
    again.close()


def test_upkeep_deletes_nothing_that_it_cannot_read(store, monkeypatch):
    chunk = chunk_of(1)
    store.put(chunk)
    store.close()
    name = only_file(store.folder).stem
    with no_more_files(monkeypatch):
        report = upkeep.verify(store.folder)
        assert (report.intact, report.bad, list(report.unreadable)) == (0, {}, [name])
        assert upkeep.collect(store.folder, drop=report)["bad"] == 0
        report = upkeep.rebuild(store.folder)
        assert (report.removed, report.bad, list(report.unreadable)) == (0, {}, [name])
    assert upkeep.rebuild(store.folder).intact == 1
    again = DiskStore(store.folder, BIG, sync=False)
    again.refresh(ALICE)
    assert equal(again.get(chunk.header.key), chunk)
    again.close()


def test_a_deleted_file_that_is_still_read_is_not_lost_sight_of(store):
    chunk, other = chunk_of(1), DiskStore(store.folder, BIG, sync=False)
    store.put(chunk)
    held = store.get(chunk.header.key)
    other.delete(chunk.header.key)
    assert store.get(chunk.header.key) is None  # it knows nothing of that yet, and finds no file
    assert store.stats().stored_bytes > 0
    del held
    assert other.gc()["wiped"] == 1
    assert not list(files_in(store.folder))
    other.close()


def test_what_is_over_and_still_read_leaves_no_file_behind(tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    over, new = chunk_of(1, tokens=100), chunk_of(3, tokens=100)
    store = DiskStore(tmp_path, 2 * (file_bytes(over) + over.header.ids_bytes + ROW_BYTES) - 1, sync=False)
    store.put(over, now + 10)
    held = store.get(over.header.key)
    now += 20
    assert store.put(new)
    assert len(list(files_in(tmp_path))) == 1
    assert store.orphans() == []
    assert equal(held, over)
    store.close()


def test_what_was_not_wanted_any_more_and_is_already_read_is_wiped_later(store):
    chunk, held = chunk_of(1), list[object]()

    def wanted() -> bool:
        held.append(store.get(chunk.header.key))
        return False

    assert not store.put(chunk, wanted=wanted)
    assert held[0] is not None
    assert store.orphans() == []
    held.clear()
    assert store.gc()["wiped"] == 1
    assert not list(files_in(store.folder))


def test_an_owner_that_cannot_be_asked_counts_as_alive(store, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    (owner,) = (store.folder / "owners").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(locks.os, "open", refuse)
        assert not locks.is_dead(owner)
    assert locks.is_dead(owner.with_name("nobody"))


def test_a_file_that_was_changed_after_it_was_checked_is_checked_again(store):
    chunk = chunk_of(1)
    store.put(chunk)
    assert equal(store.get(chunk.header.key), chunk)
    path = only_file(store.folder)
    data = bytearray(path.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 5] ^= 1  # in the keys
    path.with_suffix(".copy").write_bytes(data)
    path.with_suffix(".copy").replace(path)
    assert store.get(chunk.header.key) is None
    assert store.stats().bad == 1


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
def test_nobody_else_can_read_what_is_stored(tmp_path):
    """Also in a folder that others may look into."""
    tmp_path.chmod(0o755)
    store = DiskStore(tmp_path, BIG, sync=False)
    store.put(chunk_of(1))
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(found) > 2
    assert {path.stat().st_mode & 0o077 for path in found} == {0}
    store.close()


def test_who_is_deleted_while_writing_leaves_the_row_to_whoever_deletes(tmp_path, monkeypatch):
    store, other = DiskStore(tmp_path, BIG, sync=False), DiskStore(tmp_path, BIG, sync=False)
    chunk, write = chunk_of(1), files.write

    def deleted_before_it_is_written(*args, **options):
        monkeypatch.setattr(other, "_wipe", lambda row, name: False)  # not done yet
        other.delete(chunk.header.key)
        raise FileNotFoundError("renamed away")

    monkeypatch.setattr(files, "write", deleted_before_it_is_written)
    assert store.put(chunk) is False  # a deletion is no error
    assert [state for _, _, state, _ in store._writes.unfinished()] == [DOOMED]
    monkeypatch.setattr(files, "write", write)
    monkeypatch.undo()
    assert store.gc()["wiped"] == 1
    for one in (store, other):
        one.close()
